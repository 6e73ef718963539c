//! The guest's kernel is patched, and has direct callers of a module, at functions that are traced.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use vmtrace::emulated::{FileSource, cache_dir};
use vmtrace::initramfs::Modules;

use crate::args::json;
use crate::cases::{Guests, assert_whole, trouble, value};
use crate::counts::counted;
use crate::trace::{Entry, kernel};

/// What the module calls, and what it patches.
const CALLED: &str = "lcm";
const PATCHED: &str = "cmdline_proc_show";
/// How often it calls that before, while and after it is a direct caller.
const CALLS: usize = 25;
/// How often the other is called with the patch, and without.
const READS: usize = 20;

/// Members whose places the source of the module has.
const MEMBERS: [(&str, &str); 8] = [
    ("module", "name"),
    ("module", "init"),
    ("module", "exit"),
    ("klp_func", "old_name"),
    ("klp_func", "new_func"),
    ("klp_object", "funcs"),
    ("klp_patch", "mod"),
    ("klp_patch", "objs"),
];
const SIZES: [&str; 5] = ["module", "klp_func", "klp_object", "klp_patch", "ftrace_ops"];

/// Builds the module for a kernel of the cache: an object file is one if nothing is to be linked to it.
fn build(name: &str) -> Result<Vec<u8>> {
    let kernel = kernel(name)?;
    let btf = kernel.btf()?;
    let mut command = Command::new("cc");
    let define = |name: &str, value: &str| format!("-D{}={value}", name.to_uppercase());
    for (strukt, member) in MEMBERS {
        let offset = btf.member_offset(strukt, member);
        let offset = offset.with_context(|| format!("{name}: {strukt}.{member}"))?;
        command.arg(define(&format!("{strukt}_{member}"), &offset.to_string()));
    }
    for strukt in SIZES {
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
    command.args(["-c", "-O2", "-std=gnu11", "-ffreestanding", "-fno-pic", "-mcmodel=kernel"]);
    command.args(["-mno-red-zone", "-mgeneral-regs-only", "-fno-stack-protector", "-fno-common"]);
    command.args(["-fcf-protection=branch", "-fno-asynchronous-unwind-tables", "-o"]);
    command.arg(&object);
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/src/livepatch/module.c"));
    let output = command.output().context("cc")?;
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
    /// A patch that does not come or go, a direct caller that misses a call, or a call that is not traced is a
    /// loss to the guest or to the trace.
    pub fn livepatches_and_direct_callers_of_modules_are_shared(&self, name: &str) {
        let path = format!("/m/{name}/own.ko");
        let module = FileSource::Bytes(build(name).unwrap());
        self.host.with(|host| host.put_file(&path, &module)).unwrap();
        let counting = format!("counts={CALLED},{PATCHED}:count");
        let mut args = vec!["-f", CALLED, "-f", PATCHED, "--graph", "--tracer", &counting];
        args.extend(["--cpus", "2", "--add", &path]);
        let (finished, trace) = self.run(name, &format!("livepatch /own.ko {READS}"), &args);
        let (err, summary) = (finished.err(), &trace.summary);
        assert_eq!(trouble(&err), None, "{name}: {err}");
        assert_whole(name, summary, &err);
        assert_eq!(value(&finished, "ftrace-enabled "), 1, "{name}");
        // The guest's side.
        let direct = format!("vmtrace_own: direct calls {CALLS}, error 0");
        assert!(err.contains(&direct), "{name}: {err}");
        let reads = u32::try_from(READS).unwrap();
        assert_eq!(value(&finished, "patched "), reads, "{name}: {err}");
        assert_eq!(value(&finished, "unpatched "), reads, "{name}: {err}");
        // Ours.
        let pid = value(&finished, "pid ");
        let of = |entries: &[Entry], function: &str| {
            let own = entries.iter().filter(|entry| entry.pid == pid);
            own.filter(|entry| &*entry.function == function).count()
        };
        let [entries, returns] = [&trace.entries, &trace.returns]
            .map(|list| [CALLED, PATCHED].map(|function| of(list, function)));
        assert_eq!(entries, [3 * CALLS, 2 * READS], "{name}: {err}");
        // What is patched never comes to an end of its own.
        assert_eq!(returns, [3 * CALLS, READS], "{name}: {err}");
        let counts = counted(&json(&trace), "counts", None);
        for function in [CALLED, PATCHED] {
            let all = trace.entries.iter().filter(|entry| &*entry.function == function);
            assert_eq!(counts.get(function), Some(&(all.count() as u64)), "{name}: {counts:?}");
        }
        assert!(summary.sites.shared >= 1, "{name}: {:?}", summary.sites);
    }
}
