#![no_main]
libfuzzer_sys::fuzz_target!(|input: &[u8]| (vmtrace_targets::find("module_file").unwrap().run)(input));
