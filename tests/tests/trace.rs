//! Real kernels, booted and traced in the emulated host.

use anyhow::Result;
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::Write;
use vmtrace::emulated::{FileSource, HostArch, HostOptions, cache_dir};
use vmtrace::kernel::Symbol;
use vmtrace::stream::{Exit, MarkKind};
use vmtrace_tests::SharedHost;
use vmtrace_tests::args::json;
use vmtrace_tests::cases::Guests;
use vmtrace_tests::graph::{jumped, jumping};
use vmtrace_tests::hostile::Harm;
use vmtrace_tests::live::{unless_lost, vmtrace};
use vmtrace_tests::mitigations::Closed;
use vmtrace_tests::readers::trace_cmd_report;
use vmtrace_tests::trace::{
    KERNELS, WORKLOAD, boot, initrd, kernel, missing_after, options, some, syscall,
};
use vmtrace_tests::{anew, disks, latency, shares, userland, workload};

static GUESTS: Guests = Guests {
    host: SharedHost::new(|| options(env!("CARGO_BIN_EXE_vmtrace-guest"), &KERNELS)),
    kernels: &KERNELS,
};

#[test]
fn a_hundred_thousand_calls_are_a_hundred_thousand_records() {
    GUESTS.a_hundred_thousand_calls_are_a_hundred_thousand_records("x86_64-6.12");
}

// Whoever reads a line of dmesg looks for its time in the trace.
#[test]
fn times_are_those_of_the_guests_log() {
    GUESTS.times_are_those_of_the_guests_log("x86_64-6.12");
}

#[test]
fn every_function_can_be_traced_from_boot_to_power_off() {
    GUESTS.every_function_can_be_traced_from_boot_to_power_off();
}

#[test]
#[ignore = "on riscv64 it is run each time: with scripts/test --all"]
fn a_hundred_thousand_calls_have_a_hundred_thousand_returns() {
    GUESTS.a_hundred_thousand_calls_have_a_hundred_thousand_returns("x86_64-6.12");
}

// A call that is left out, or one that is elsewhere in the tree, makes a trace of what it is not said to be of.
#[test]
fn a_part_of_the_call_tree_is_whole() {
    for name in some(&["x86_64-6.1", "x86_64-6.12", "x86_64-7"], 1) {
        GUESTS.a_part_of_the_call_tree_is_whole(name);
    }
}

#[test]
fn every_function_can_be_traced_with_its_returns() {
    GUESTS.every_function_can_be_traced_with_its_returns();
}

#[test]
#[ignore = "a host of its own, two minutes: with scripts/test --all"]
fn a_realtime_kernel_is_traced_as_others_are() {
    GUESTS.a_realtime_kernel_is_traced_as_others_are("x86_64-6.12-rt");
}

// A place that is not found, or told at the wrong moment, is a state that is wrong from there on.
#[test]
fn switches_agree_with_the_state_of_the_cpu() {
    for name in some(&["x86_64-6.1", "x86_64-6.12", "x86_64-7"], 0) {
        GUESTS.switches_agree_with_the_state_of_the_cpu(name);
    }
}

// What a processor has is forced where the kernel can be told to.
#[test]
fn programs_return_as_the_guests_own_code_does() {
    const CLOSED: [Closed; 4] = [
        Closed { cmdline: "", says: ("retbleed", "Not affected"), thunk: None },
        Closed {
            cmdline: "retbleed=unret,force",
            says: ("retbleed", "untrained return thunk"),
            thunk: Some("retbleed_return_thunk"),
        },
        Closed {
            cmdline: "retbleed=stuff,force spectre_v2=retpoline",
            says: ("retbleed", "Stuffing"),
            thunk: Some("call_depth_return_thunk"),
        },
        Closed {
            cmdline: "indirect_target_selection=force",
            says: ("indirect_target_selection", "Aligned branch/return thunks"),
            thunk: Some("its_return_thunk"),
        },
    ];
    for closed in CLOSED {
        GUESTS.programs_return_as_the_guests_own_code_does("x86_64-6.12", closed);
    }
}

// Which of SRSO's returns a guest has is decided by the family of its processor, and no option
// forces it; KVM passes on what its host has. 23: Zen 1, which has one; 25: Zen 3, which has the other.
#[test]
#[ignore = "two hosts of their own: with scripts/test --all"]
fn programs_return_as_code_of_amds_families_does() {
    const OF_ZEN_1: fn() -> Result<HostOptions> = || host_of_family(&["family=23", "model=1"]);
    const OF_ZEN_3: fn() -> Result<HostOptions> = || host_of_family(&["family=25", "model=1"]);
    for (options, thunk) in [(OF_ZEN_1, "srso_return_thunk"), (OF_ZEN_3, "srso_alias_return_thunk")]
    {
        let closed =
            Closed { cmdline: "", says: ("spec_rstack_overflow", "Safe RET"), thunk: Some(thunk) };
        let guests = Guests { host: SharedHost::new(options), kernels: &["x86_64-6.12"] };
        guests.programs_return_as_the_guests_own_code_does("x86_64-6.12", closed);
    }
}

fn host_of_family(cpu_properties: &'static [&'static str]) -> Result<HostOptions> {
    let options = options(env!("CARGO_BIN_EXE_vmtrace-guest"), &["x86_64-6.12"])?;
    Ok(HostOptions { cpu_properties, ..options })
}

#[test]
#[ignore = "three minutes, on riscv64 it is run each time: with scripts/test --all"]
fn calls_are_nested_as_the_guests_own_tracer_shows() {
    GUESTS.calls_are_nested_as_the_guests_own_tracer_shows("x86_64-6.12");
}

#[test]
fn a_panic_shows_the_same_calls_with_every_return_traced() {
    GUESTS.a_panic_shows_the_same_calls_with_every_return_traced("x86_64-6.12");
}

#[test]
fn arguments_and_results_are_those_of_the_calls() {
    for name in some(&KERNELS, 1) {
        GUESTS.arguments_and_results_are_those_of_the_calls(name);
    }
}

// The slide is found without any help of the guest.
#[test]
fn kaslr_kernels_are_traced_where_they_are() {
    let mut slides = BTreeSet::new();
    // Two: one in some hundreds stays where it is.
    for name in [some(&KERNELS, 1), some(&KERNELS, 2)].concat().into_iter().collect::<BTreeSet<_>>()
    {
        let image = format!("--boot-image=/k/{name}.bz");
        // Where they jump to is held for them alone, and where it is.
        let jumping = jumping(&kernel(name).unwrap()).unwrap();
        let jumps = format!("--tracer=jumps={}:graph", jumping.join(","));
        let args = ["-f", "vfs_*", "--cpus", "2", "--kaslr", &image, &jumps, "--overflow", "block"];
        let (_, trace) = GUESTS.run(name, "files", &args);
        let (ended, unended) = jumped(&trace, 1);
        println!("{name}: {} functions jump, {ended} calls ended, {unended} not", jumping.len());
        assert!(ended > 300 && unended * 100 < ended, "{name}: {ended} ended, {unended} did not");
        slides.insert(trace.header.slide);
        let names: BTreeSet<&str> = trace.entries.iter().map(|e| &*e.function).collect();
        assert!(names.contains("vfs_open") && names.contains("vfs_rename"), "{name}: {names:?}");
    }
    assert_ne!(slides, BTreeSet::from([0]), "no kernel moved: was KASLR on?");
}

#[test]
fn calls_end_where_pointers_lead() {
    GUESTS.calls_end_where_pointers_lead("x86_64-6.12");
}

#[test]
fn the_guests_own_ftrace_sees_the_same_and_keeps_working() {
    GUESTS.the_guests_own_ftrace_sees_the_same_and_keeps_working();
}

#[test]
fn both_trace_the_same_function() {
    for name in some(&KERNELS, 2) {
        GUESTS.both_trace_the_same_function(name);
    }
}

#[test]
fn counts_are_those_of_the_records() {
    for name in some(&["x86_64-6.1", "x86_64-7"], 3) {
        GUESTS.counts_are_those_of_the_records(name);
    }
}

#[test]
fn tracing_begins_and_ends_at_the_very_call() {
    GUESTS.tracing_begins_and_ends_at_the_very_call("x86_64-6.12");
}

#[test]
fn triggers_see_how_calls_end() {
    for name in some(&["x86_64-6.1", "x86_64-6.12", "x86_64-7"], 7) {
        GUESTS.triggers_see_how_calls_end(name);
    }
}

#[test]
fn conditions_hold_of_exactly_the_calls_that_are_meant() {
    GUESTS.conditions_hold_of_exactly_the_calls_that_are_meant("x86_64-6.12");
}

#[test]
fn one_task_alone_is_traced() {
    GUESTS.one_task_alone_is_traced("x86_64-7");
}

#[test]
fn events_of_devices_and_memory_are_those_of_the_guests_own_trace() {
    for name in some(&KERNELS, 5) {
        GUESTS.events_of_devices_and_memory_are_those_of_the_guests_own_trace(name);
    }
}

#[test]
fn events_are_those_of_the_guests_own_trace() {
    for name in some(&KERNELS, 4) {
        GUESTS.events_are_those_of_the_guests_own_trace(name);
    }
}

#[test]
fn system_calls_are_told_apart() {
    GUESTS.system_calls_are_told_apart("x86_64-7");
}

#[test]
fn children_that_are_followed_are_told_to_the_call() {
    GUESTS.who_is_followed_is_told_to_the_call("x86_64-7");
}

#[test]
fn a_line_that_needs_a_shell_gets_one() {
    GUESTS.a_line_that_needs_a_shell_gets_one("x86_64-6.12");
}

#[test]
fn a_command_runs_in_a_users_own_initramfs() {
    userland::a_command_runs_in_a_users_own_initramfs("x86_64-6.12");
}

#[test]
fn a_kernel_without_type_information_is_traced() {
    GUESTS.a_kernel_without_type_information_is_traced("x86_64-6.12");
}

#[test]
fn from_begins_at_the_first_call() {
    GUESTS.from_begins_at_the_first_call("x86_64-6.12");
}

#[test]
fn overwrite_keeps_the_newest_and_counts_the_rest() {
    GUESTS.overwrite_keeps_the_newest_and_counts_the_rest("x86_64-6.12");
}

// Ends are told apart, and the trace is whole after each.
#[test]
fn ends_are_told_apart() {
    let command = format!("{WORKLOAD} crash");
    let args = ["-f", "vfs_*", "--add", WORKLOAD, "--run", &command];
    let (finished, trace) = boot(&GUESTS.host, "x86_64-6.12", &args).unwrap();
    assert_eq!((finished.end.code, trace.summary.exit), (Some(3), Exit::Panic));
    assert!(trace.entries.iter().any(|e| &*e.function == "vfs_write"));

    let (finished, trace) =
        boot(&GUESTS.host, "x86_64-6.12", &["-f", "vfs_*", "--run", "false"]).unwrap();
    assert_eq!(finished.end.code, Some(4), "{}", finished.err());
    assert_eq!((trace.summary.run_status, trace.summary.exit), (Some(1), Exit::Poweroff));

    let args = ["-f", "vfs_*", "--run", "sleep 1000", "--timeout", "20"];
    let (finished, trace) = boot(&GUESTS.host, "x86_64-6.12", &args).unwrap();
    assert_eq!((finished.end.code, trace.summary.exit), (Some(124), Exit::Timeout));
}

/// Puts an initramfs into the host for the kernel that a guest starts: its agent runs this.
fn put_second(kernel: &str, modules: &[&str], line: &str) -> &'static str {
    const INITRD: &str = "/m/second.cpio";
    let content = initrd(kernel, modules, line, &workload(HostArch::X86_64).unwrap()).unwrap();
    GUESTS.host.with(|host| host.put_file(INITRD, &FileSource::Bytes(content))).unwrap();
    INITRD
}

// What is in memory then is not what was traced: it is left alone, and said so once. That it panics is known although it
// has no tripwires and its console is silent: its driver finds the device for that, and tells.
#[test]
fn a_guest_that_starts_another_kernel_is_let_go() {
    let image = "/k/x86_64-7.bz";
    let initrd = put_second("x86_64-7", &["pvpanic-mmio"], &format!("{WORKLOAD} crash"));
    let run = format!("{WORKLOAD} kexec /x86_64-7.bz initrd=/second.cpio loglevel=0");
    let mut args = vec!["-f", "vfs_*", "-f", "kernel_kexec", "--graph", "--cpus", "2"];
    args.extend(["--add", WORKLOAD, "--add", image, "--add", initrd, "--run", &run]);
    args.extend(["--timeout", "480"]);
    let (finished, trace) = boot(&GUESTS.host, "x86_64-6.12", &args).unwrap();
    let (err, summary) = (finished.err(), &trace.summary);
    assert_eq!((finished.end.code, summary.exit), (Some(3), Exit::Panic), "{err}");
    assert!(!err.contains("Kernel panic - not syncing"), "the console told: {err}");
    assert!(trace.entries.iter().any(|e| &*e.function == "kernel_kexec"), "{err}");
    let [note, end] = &summary.notes[..] else { panic!("{:?}", summary.notes) };
    assert!(note.contains("another kernel (kexec), which is not traced"), "{note}");
    assert!(end.starts_with("kernel panic: the guest's pvpanic device was told so"), "{end}");
}

// What it does from early boot on is a new part of the same stream: entries, returns and counts.
#[test]
#[ignore = "the next one does it at another place: with scripts/test --all"]
fn a_guest_that_starts_its_kernel_anew_is_traced_again() {
    let image = "/k/x86_64-6.12.bz";
    let run = format!("{WORKLOAD} kexec /x86_64-6.12.bz nokaslr");
    let mut args = vec!["-f", "vfs_*", "-f", "kernel_kexec", "-f", "kernel_init_freeable"];
    args.extend(["--graph", "--cpus", "2", "--tracer", "n=kernel_init:count"]);
    args.extend(["--add", WORKLOAD, "--add", image, "--run", &run]);
    let (finished, trace) = boot(&GUESTS.host, "x86_64-6.12", &args).unwrap();
    let (err, summary) = (finished.err(), &trace.summary);
    // Its panic is told by its own tripwire.
    assert_eq!((finished.end.code, summary.exit), (Some(3), Exit::Panic), "{err}");
    let [note, end] = &summary.notes[..] else { panic!("{:?}", summary.notes) };
    assert!(note.contains("started anew (kexec), and was traced again"), "{note}");
    assert!(end.starts_with("kernel panic: VFS: Unable to mount root fs"), "{end}");
    let times = |function: &str| {
        let all = trace.entries.iter().filter(|entry| &*entry.function == function);
        all.map(|entry| entry.timestamp).collect::<Vec<_>>()
    };
    let (boots, left) = (times("kernel_init_freeable"), times("kernel_kexec"));
    assert_eq!((boots.len(), left.len()), (2, 1), "{err}");
    assert!(boots[0] < left[0] && left[0] < boots[1], "{boots:?} {left:?}");
    assert!(
        trace.entries.iter().any(|it| it.timestamp > boots[1] && it.function.starts_with("vfs_"))
    );
    assert!(trace.returns.iter().any(|it| it.timestamp > boots[1]), "{err}");
    assert_eq!(trace.counted().unwrap().get("kernel_init"), Some(&2), "{err}");
    assert_eq!(missing_after(summary, 2), 0, "{summary:?}");
    let attached = trace.marks(MarkKind::Attach).unwrap();
    assert_eq!((attached.len(), &attached[0]), (2, &attached[1]), "{err}");
    let notes = trace.marks(MarkKind::Note).unwrap();
    assert!(notes.iter().any(|text| text == anew::BEGINS), "{notes:?}");
}

// A whole system starts again: what its second kernel runs is followed, with exits, and nothing is lost.
#[test]
fn what_a_guests_second_kernel_runs_is_traced() {
    const TIMES: [usize; 2] = [300, 500];
    let name = "x86_64-6.12";
    let getppid = syscall(name, "getppid").unwrap();
    let again = format!("{WORKLOAD} getppid {} 0", TIMES[1]);
    let (image, initrd) = (format!("/k/{name}.bz"), put_second(name, &[], &again));
    let run = format!(
        "{WORKLOAD} getppid {} 0 && {WORKLOAD} kexec /{name}.bz initrd=/second.cpio",
        TIMES[0]
    );
    let mut args = vec!["-f", &getppid, "--comm", "vmtrace-guest", "--children", "--exits"];
    args.extend(["--overflow", "block", "--timeout", "480", "--cpus", "2", "--run", &run]);
    args.extend(["--add", WORKLOAD, "--add", &image, "--add", initrd]);
    let (finished, trace) = boot(&GUESTS.host, name, &args).unwrap();
    let (err, summary) = (finished.err(), &trace.summary);
    assert_eq!((finished.end.code, summary.exit), (Some(0), Exit::Poweroff), "{err}");
    assert_eq!(summary.run_status, Some(0), "{err}");
    let [note] = &summary.notes[..] else { panic!("{:?}", summary.notes) };
    assert!(note.contains("started anew (kexec), and was traced again"), "{note}");
    assert_eq!(missing_after(summary, 2), 0, "{summary:?}");
    let lines = json(&trace);
    let begins = |line: &Value| {
        line["event"] == "mark"
            && line["text"].as_str().is_some_and(|it| it.starts_with(anew::BEGINS))
    };
    let parts: Vec<_> = lines.split(begins).collect();
    // Nobody else calls it in these programs.
    let calls = |part: &&[Value]| part.iter().filter(|line| line["event"] == "entry").count();
    assert_eq!(parts.iter().map(calls).collect::<Vec<_>>(), TIMES, "{err}");
    for part in parts {
        assert!(part.iter().any(|line| line["name"] == "host:exit"), "{err}");
    }
}

// A kernel chooses where it runs (KASLR). If what it says were not translated, its functions, callers and pointers would
// be those of other places of the first one.
#[test]
fn a_guest_that_starts_its_kernel_elsewhere_is_traced_again() {
    // Called by many, and by the same in every boot.
    const CREATES: &str = "__kmem_cache_create_args";
    for name in some(&["x86_64-6.12", "x86_64-7"], 5) {
        let image = format!("/k/{name}.bz");
        let run = format!("{WORKLOAD} kexec /{name}.bz");
        let mut args = vec!["-f", "vfs_*", "-f", "do_one_initcall", "-f", "kernel_init_freeable"];
        args.extend(["--graph", "--cpus", "2", "--count-callers", CREATES]);
        // Two boots, and the second one decompresses its kernel in the guest.
        args.extend(["--event", "initcall:initcall_start", "--timeout", "480"]);
        args.extend(["--add", WORKLOAD, "--add", &image, "--run", &run]);
        let (finished, trace) = boot(&GUESTS.host, name, &args).unwrap();
        let (err, summary) = (finished.err(), &trace.summary);
        assert_eq!((finished.end.code, summary.exit), (Some(3), Exit::Panic), "{name}: {err}");
        let [note, end] = &summary.notes[..] else { panic!("{name}: {:?}", summary.notes) };
        assert!(note.contains("started anew (kexec), and was traced again"), "{name}: {note}");
        // What `panic` was called with is read where the second kernel is.
        assert!(end.starts_with("kernel panic: VFS: Unable to mount root fs"), "{name}: {end}");
        assert_eq!(missing_after(summary, 2), 0, "{name}: {summary:?}");
        let parts = anew::parts(&trace).unwrap();
        let [first, second] = &parts[..] else { panic!("{name}: {parts:?}") };
        // By chance it has chosen the first one's place: one in some hundreds does.
        let begins = anew::BEGINS;
        let elsewhere = second.begins.ends_with(" above where the first one was");
        assert!(second.begins == begins || elsewhere, "{name}: {}", second.begins);
        let boots = |part: &anew::Part| {
            part.called.iter().filter(|(of, _)| of == "kernel_init_freeable+0x0").count()
        };
        assert_eq!((boots(first), boots(second)), (1, 1), "{name}: {err}");
        // It boots as the first one did.
        for (what, first, second) in [
            ("called", &first.called, &second.called),
            ("counted", &first.counted, &second.counted),
        ] {
            let new: Vec<_> = second.difference(first).collect();
            println!("{name}: {what}: {} in both, new: {new:?}", second.len() - new.len());
            assert!(second.len() > 20 && new.len() * 10 < second.len(), "{name}: {new:?}");
        }
        // What its initcalls are is in the header, where the first kernel has them.
        let initcalls: BTreeSet<u64> = trace.header.initcalls().map(|it| it.address).collect();
        assert!(second.fields.len() > 100, "{name}: {}", second.fields.len());
        assert!(second.fields.is_subset(&initcalls), "{name}");
        assert!(second.fields.is_subset(&first.fields), "{name}");
        let again = second.begins.strip_prefix(begins).unwrap_or_default();
        println!("{name}: {} initcalls{again}", second.fields.len());
        let attached = trace.marks(MarkKind::Attach).unwrap();
        let last = trace.returns.iter().map(|it| it.timestamp).max().unwrap();
        let start = trace.entries.iter().filter(|it| &*it.function == "kernel_init_freeable");
        assert!(start.map(|it| it.timestamp).max().unwrap() < last, "{name}: no returns");
        assert_eq!(attached.len(), 2, "{name}");
    }
}

#[test]
fn eight_vcpus_and_memory_above_4_gib() {
    let args = ["-f", "__x64_sys_getppid", "--cpus", "8", "--memory", "5G"];
    let (_, trace) = GUESTS.run("x86_64-6.12", "getppid 1000 0 1 2 3 4 5 6 7", &args);
    for vcpu in 0..8 {
        assert_eq!(trace.entries.iter().filter(|e| e.vcpu == vcpu).count(), 1000, "vCPU {vcpu}");
    }
}

// The command as a user types it, on whatever this machine is, with files of his own.
#[test]
fn the_command_line_works_end_to_end() {
    unless_lost(|| {
        let vmlinuz = cache_dir().unwrap().join("kernels/x86_64-6.12/vmlinuz");
        let mut map = tempfile::NamedTempFile::new().unwrap();
        for Symbol { address, kind, name } in kernel("x86_64-6.12").unwrap().symbols().iter() {
            writeln!(map, "{address:016x} {kind} {name}").unwrap();
        }
        let map = map.path().to_str().unwrap();
        let mut args = vec!["--filter", "vfs_*", "--run", "ls /", "--timeout", "240"];
        args.extend(["--system-map", map]);
        args.extend([
            "--expect",
            "vfs_open >= 1",
            "--forbid",
            "vfs_rename",
            "--forbid",
            "vfs_open",
        ]);
        let output = vmtrace("boot", &vmlinuz, &args);
        let (out, err) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        // All went well but for the last rule.
        assert_eq!(output.status.code(), Some(5), "{err}");
        assert!(err.contains("\nok    expect vfs_open >= 1: "), "{err}");
        assert!(err.contains("\nok    forbid vfs_rename: not called\n"), "{err}");
        assert!(err.contains("\nFAIL  forbid vfs_open: "), "{err}");
        assert!(err.contains("\nrules 3, passed 2, failed 1, undecided 0\n"), "{err}");
        assert!(out.starts_with("# tracer: function\n"), "{out}");
        assert!(out.contains("vfs_open <-"), "{out}");
        assert!(err.contains("vmtrace: run status 0"), "{err}");
    });
}

// A trace for another tool straight from the boot: what that tool reads is what was recorded, and nothing
// else is left behind. A file of before stays until then.
#[test]
fn a_boot_writes_what_another_tool_reads() {
    unless_lost(|| {
        let vmlinuz = cache_dir().unwrap().join("kernels/x86_64-6.12/vmlinuz");
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("trace.dat");
        std::fs::write(&place, "before").unwrap();
        let boot = |more: &[&str]| {
            let args = ["--cpus", "2", "--run", "ls /", "--timeout", "240", "--console", "none"];
            let place = ["-o", place.to_str().unwrap()];
            let output = vmtrace("boot", &vmlinuz, &[&args[..], &place, more].concat());
            let files = std::fs::read_dir(directory.path()).unwrap().count();
            (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned(), files)
        };
        let (code, err, files) = boot(&["-f", "no_such_function"]);
        assert_eq!((code, files), (Some(1), 1), "{err}");
        assert_eq!(std::fs::read(&place).unwrap(), b"before", "{err}");

        let (code, err, files) = boot(&["-f", "vfs_*", "--args"]);
        assert_eq!((code, files), (Some(0), 1), "{err}");
        let records =
            err.split_once("vmtrace: records ").and_then(|(_, rest)| rest.split_once(' '));
        let records: usize = records.unwrap().0.parse().unwrap();
        let text = trace_cmd_report(&place);
        let calls: Vec<&str> = text.lines().filter(|line| line.contains(" function:")).collect();
        assert_eq!(calls.len(), records, "{err}");
        let of_ls = |function| move |line: &&&str| line.contains(" ls-") && line.contains(function);
        for function in ["vfs_open", "vfs_write"] {
            assert!(calls.iter().any(|line| of_ls(function)(&line)), "no {function} of ls");
        }
        assert_eq!(err.matches(" entries with arguments: left out\n").count(), 1, "{err}");
        assert!(err.contains("vmtrace: run status 0"), "{err}");
    });
}

#[test]
fn files_have_what_the_guest_has_written() {
    unless_lost(|| disks::files_have_what_the_guest_has_written("x86_64-6.12"));
}

#[test]
fn what_was_flushed_outlives_vmtrace() {
    unless_lost(|| disks::what_was_flushed_outlives_vmtrace("x86_64-6.12"));
}

// With what they need as modules (6.1), and built in.
#[test]
fn a_guest_reads_and_writes_directories() {
    for kernel in some(&["x86_64-6.1", "x86_64-7"], 6) {
        unless_lost(|| shares::a_guest_reads_and_writes_directories(kernel));
    }
}

#[test]
fn a_directory_is_the_root() {
    for kernel in some(&["x86_64-6.1", "x86_64-6.12"], 7) {
        unless_lost(|| shares::a_directory_is_the_root(kernel, "x86_64"));
    }
}

#[test]
fn functions_of_a_module_are_traced() {
    for name in some(&KERNELS, 8) {
        GUESTS.functions_of_a_module_are_traced(name);
    }
}

#[test]
fn livepatches_and_direct_callers_of_modules_are_shared() {
    for name in some(&KERNELS, 9) {
        GUESTS.livepatches_and_direct_callers_of_modules_are_shared(name);
    }
}

#[test]
fn functions_of_a_module_return() {
    for name in some(&["x86_64-6.12", "x86_64-7"], 10) {
        GUESTS.functions_of_a_module_return(name);
    }
}

#[test]
#[ignore = "three minutes, on riscv64 it is run each time: with scripts/test --all"]
fn events_of_modules_are_traced() {
    for name in some(&["x86_64-6.1", "x86_64-7"], 11) {
        GUESTS.events_of_modules_are_traced(name);
    }
}

#[test]
#[ignore = "on riscv64 it is done with returns each time: with scripts/test --all"]
fn modules_come_and_go_with_every_function_traced() {
    GUESTS.modules_come_and_go_with_every_function_traced("x86_64-6.12");
}

#[test]
fn random_changes_leave_no_trace() {
    GUESTS.random_changes_leave_no_trace(&some(&["x86_64-6.12", "x86_64-7"], 1));
}

#[test]
fn panics_are_told_by_the_kernel() {
    GUESTS.panics_are_told_by_the_kernel(&some(&KERNELS, 0));
}

#[test]
fn the_console_is_no_witness() {
    GUESTS.the_console_is_no_witness("x86_64-6.12");
}

#[test]
fn a_guest_that_hangs_is_found_out() {
    GUESTS.a_guest_that_hangs_is_found_out("x86_64-6.12");
}

#[test]
fn a_task_that_is_not_given_up_is_found_out() {
    GUESTS.a_task_that_is_not_given_up_is_found_out("x86_64-6.12");
}

#[test]
fn other_ends_are_told_apart() {
    GUESTS.other_ends_are_told_apart("x86_64-6.12");
}

#[test]
fn a_damaged_ring_ends_tracing_and_not_the_guest() {
    GUESTS.a_damaged_ring_ends_tracing_and_not_the_guest("x86_64-6.12");
}

#[test]
fn a_guest_may_write_anything_into_the_annex() {
    GUESTS.a_guest_may_do_harm(Harm::Annex, "x86_64-6.12", &[1]);
}

#[test]
fn a_guest_may_give_its_devices_anything() {
    GUESTS.a_guest_may_do_harm(Harm::Queues, "x86_64-6.12", &[1]);
}

#[test]
fn a_guest_may_change_its_records_of_ftrace() {
    GUESTS.a_guest_may_do_harm(Harm::Records, "x86_64-6.12", &[1]);
}

#[test]
fn a_guest_may_change_the_page_tables_of_the_annex() {
    GUESTS.a_guest_may_do_harm(Harm::Tables, "x86_64-6.12", &[1]);
}

#[test]
fn waits_are_those_of_the_guests_own_tracer() {
    unless_lost(|| latency::waits_are_those_of_the_guests_own_tracer("x86_64-6.12-rt"));
}

#[test]
fn noises_are_those_of_the_guests_own_tracer() {
    unless_lost(|| latency::noises_are_those_of_the_guests_own_tracer("x86_64-6.12-rt"));
}

#[test]
fn times_off_are_as_long_as_they_were() {
    for kernel in ["x86_64-6.12", "x86_64-6.12-rt"] {
        unless_lost(|| latency::times_off_are_as_long_as_they_were(kernel));
    }
}

#[test]
fn times_off_in_a_module_are_seen() {
    for kernel in ["x86_64-6.12", "x86_64-7"] {
        unless_lost(|| latency::times_off_in_a_module_are_seen(kernel));
    }
}

#[test]
fn a_task_is_the_noise_of_another() {
    unless_lost(|| latency::a_task_is_the_noise_of_another("x86_64-6.12"));
}
