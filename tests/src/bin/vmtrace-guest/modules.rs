//! A module that comes and goes, and is used in between.

use super::{TRACING, load, mark, set};
use anyhow::{Context, Result, ensure};
use std::ffi::CString;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Of the module `dummy`: called once for each look at its device's counters.
const FUNCTION: &str = "dummy_get_stats64";

/// Loads the module `dummy` from a file, has its device's counters read so often between two calls of
/// getpgid, and unloads it; all that so often. With `beside` the guest's own function tracer is on
/// the same function, from before the module is loaded, and in every other round until after it is
/// gone.
pub(super) fn modules(file: &str, rounds: u32, reads: usize, beside: bool) -> Result<()> {
    println!("pid {}", std::process::id());
    let stem = Path::new(file).file_stem().and_then(|stem| stem.to_str());
    let name = CString::new(stem.context("no name")?)?;
    if beside {
        set("current_tracer", "nop")?;
        set("set_ftrace_pid", &std::process::id().to_string())?;
    }
    for round in 0..rounds {
        if beside {
            set("set_ftrace_filter", &format!("{FUNCTION}:mod:dummy\n"))?;
            set("current_tracer", "function")?;
        }
        load(file)?;
        if beside {
            set("trace", "")?;
            set("tracing_on", "1")?;
        }
        mark();
        for _ in 0..reads {
            let counters = fs::read_to_string("/proc/net/dev")?;
            ensure!(counters.contains("dummy0"), "no dummy0: {counters}");
        }
        mark();
        if beside {
            set("tracing_on", "0")?;
            let trace = fs::read_to_string(format!("{TRACING}/trace"))?;
            let seen = trace.lines().filter(|line| line.contains(FUNCTION)).count();
            println!("guest-saw {seen}");
            if round % 2 == 0 {
                set("current_tracer", "nop")?;
            }
        }
        // SAFETY: a string and flags.
        let failed = unsafe { libc::syscall(libc::SYS_delete_module, name.as_ptr(), 0) };
        ensure!(failed == 0, "cannot unload {file}: {}", std::io::Error::last_os_error());
        if beside {
            set("current_tracer", "nop")?;
        }
    }
    println!("ftrace-enabled {}", fs::read_to_string("/proc/sys/kernel/ftrace_enabled")?.trim());
    Ok(())
}

/// The same while all CPUs fork and use files.
pub(super) fn busy(file: &str, rounds: u32, reads: usize) -> Result<()> {
    const FOR_EVER: &str = "1000000000";
    let mut load = Command::new(std::env::current_exe()?);
    let mut load = load.args(["load", "2", FOR_EVER]).spawn()?;
    let done = modules(file, rounds, reads, false);
    load.kill()?;
    load.wait()?;
    done
}
