//! The guest's kernel is patched, and has direct callers of a module, at functions that are traced.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use vmtrace::emulated::{FileSource, HostArch, cache_dir};
use vmtrace::initramfs::Modules;

use crate::Finished;
use crate::args::json;
use crate::cases::{Guests, assert_whole, trouble, value};
use crate::counts::counted;
use crate::trace::{Entry, Trace, arch_of, kernel};

/// What the module calls, and what it patches.
const CALLED: &str = "lcm";
const PATCHED: &str = "cmdline_proc_show";
/// How often it calls that before, while and after it is a direct caller.
const CALLS: usize = 25;
/// How often the other is called with the patch, and without.
const READS: usize = 20;

/// Members whose places the source of the module has.
const MEMBERS: [(&str, &str); 3] = [("module", "name"), ("module", "init"), ("module", "exit")];
const SIZES: [&str; 2] = ["module", "ftrace_ops"];
/// The same where there are livepatches.
const PATCH_MEMBERS: [(&str, &str); 5] = [
    ("klp_func", "old_name"),
    ("klp_func", "new_func"),
    ("klp_object", "funcs"),
    ("klp_patch", "mod"),
    ("klp_patch", "objs"),
];
const PATCH_SIZES: [&str; 3] = ["klp_func", "klp_object", "klp_patch"];

/// How kernels of these architectures are compiled.
const X86_64: [&str; 4] =
    ["-mcmodel=kernel", "-mno-red-zone", "-mgeneral-regs-only", "-fcf-protection=branch"];
const RISCV64: [&str; 5] = [
    "-mabi=lp64",
    "-march=rv64imac_zicsr_zifencei",
    "-mcmodel=medany",
    "-mno-relax",
    "-mno-save-restore",
];

/// Builds the module for a kernel of the cache: an object file is one if nothing is to be linked to it.
fn build(name: &str) -> Result<Vec<u8>> {
    let kernel = kernel(name)?;
    let btf = kernel.btf()?;
    let arch = arch_of(name)?;
    let (compiler, flags) = match arch {
        HostArch::X86_64 => ("cc", &X86_64[..]),
        HostArch::Riscv64 => ("riscv64-linux-gnu-gcc", &RISCV64[..]),
    };
    let patches = arch == HostArch::X86_64;
    let (members, sizes) =
        if patches { (&PATCH_MEMBERS[..], &PATCH_SIZES[..]) } else { (&[][..], &[][..]) };
    let mut command = Command::new(compiler);
    let define = |name: &str, value: &str| format!("-D{}={value}", name.to_uppercase());
    for (strukt, member) in MEMBERS.iter().chain(members) {
        let offset = btf.member_offset(strukt, member);
        let offset = offset.with_context(|| format!("{name}: {strukt}.{member}"))?;
        command.arg(define(&format!("{strukt}_{member}"), &offset.to_string()));
    }
    for strukt in SIZES.iter().chain(sizes) {
        let size = btf.struct_size(strukt).with_context(|| format!("{name}: {strukt}"))?;
        command.arg(define(&format!("{strukt}_size"), &size.to_string()));
    }
    // Until 6.4 the one without a suffix takes no ops (include/linux/ftrace.h).
    let multi = kernel.symbols().address("register_ftrace_direct_multi").is_some();
    let suffix = if multi { "_multi" } else { "" };
    command.arg(define("register", &format!("register_ftrace_direct{suffix}")));
    command.arg(define("unregister", &format!("unregister_ftrace_direct{suffix}")));
    command.arg(define("calls", &CALLS.to_string()));
    command.arg(define("vermagic", &format!("\"{}\"", vermagic(name)?)));
    let directory = tempfile::tempdir()?;
    let object = directory.path().join("own.ko");
    command.args(["-c", "-O2", "-std=gnu11", "-ffreestanding", "-fno-pic", "-fno-common"]);
    command.args(["-fno-stack-protector", "-fno-asynchronous-unwind-tables"]).args(flags);
    command.arg("-o");
    command.arg(&object);
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/src/livepatch/module.c"));
    let output = command.output().context(compiler)?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(fs::read(&object)?)
}

/// What the kernel's own modules say they are for.
fn vermagic(name: &str) -> Result<String> {
    let directory = cache_dir().context("no cache")?.join("kernels").join(name).join("modules");
    let module = Modules::open(&directory)?.read("dummy")?;
    const KEY: &[u8] = b"vermagic=";
    let at = module.windows(KEY.len()).position(|window| window == KEY).context("no vermagic")?;
    let text = module[at + KEY.len()..].split(|&byte| byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8(text.to_vec())?)
}

impl Guests {
    /// Boots a guest that loads the module with a command, its functions being traced with their returns, and
    /// counted.
    fn own_module(&self, name: &str, command: &str) -> (Finished, Trace) {
        let path = format!("/m/{name}/own.ko");
        let module = FileSource::Bytes(build(name).unwrap());
        self.host.with(|host| host.put_file(&path, &module)).unwrap();
        let counting = format!("counts={CALLED},{PATCHED}:count");
        let mut args = vec!["-f", CALLED, "-f", PATCHED, "--graph", "--tracer", &counting];
        args.extend(["--cpus", "2", "--add", &path]);
        let (finished, trace) = self.run(name, command, &args);
        let (err, summary) = (finished.err(), &trace.summary);
        assert_eq!(trouble(&err), None, "{name}: {err}");
        assert_whole(name, summary, &err);
        assert_eq!(value(&finished, "ftrace-enabled "), 1, "{name}");
        let direct = format!("vmtrace_own: direct calls {CALLS}, error 0");
        assert!(err.contains(&direct), "{name}: {err}");
        assert!(summary.sites.shared >= 1, "{name}: {:?}", summary.sites);
        let counts = counted(&json(&trace), "counts", None);
        for function in [CALLED, PATCHED] {
            let all = trace.entries.iter().filter(|entry| &*entry.function == function);
            let count = counts.get(function).copied().unwrap_or(0);
            assert_eq!(count, all.count() as u64, "{name}: {counts:?}");
        }
        (finished, trace)
    }

    /// A direct caller that misses a call, or a call that is not traced, is a loss to the guest or to the trace.
    pub fn direct_callers_of_modules_are_shared(&self, name: &str) {
        let (finished, trace) = self.own_module(name, "callers /own.ko");
        let pid = value(&finished, "pid ");
        let calls = [&trace.entries, &trace.returns].map(|list| own(list, pid, CALLED));
        assert_eq!(calls, [3 * CALLS; 2], "{name}: {}", finished.err());
    }

    /// The same, and a patch that does not come or go.
    pub fn livepatches_and_direct_callers_of_modules_are_shared(&self, name: &str) {
        let (finished, trace) = self.own_module(name, &format!("livepatch /own.ko {READS}"));
        let (err, reads) = (finished.err(), u32::try_from(READS).unwrap());
        assert_eq!(value(&finished, "patched "), reads, "{name}: {err}");
        assert_eq!(value(&finished, "unpatched "), reads, "{name}: {err}");
        let pid = value(&finished, "pid ");
        let [entries, returns] = [&trace.entries, &trace.returns]
            .map(|list| [CALLED, PATCHED].map(|function| own(list, pid, function)));
        assert_eq!(entries, [3 * CALLS, 2 * READS], "{name}: {err}");
        // What is patched never comes to an end of its own.
        assert_eq!(returns, [3 * CALLS, READS], "{name}: {err}");
    }
}

/// How many are of a function in this process.
fn own(entries: &[Entry], pid: u32, function: &str) -> usize {
    entries.iter().filter(|entry| entry.pid == pid && &*entry.function == function).count()
}
