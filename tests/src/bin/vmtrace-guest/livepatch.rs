//! A module that is a direct caller of a function of the kernel, and patches another one.

use super::load;
use anyhow::{Result, ensure};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Of the module's patch.
const PATCH: &str = "/sys/kernel/livepatch/vmtrace_own";
/// The kernel wakes tasks that are in its way every 15 s (kernel/livepatch/transition.c).
const LIMIT: Duration = Duration::from_secs(120);

/// Loads the module, reads `/proc/cmdline` so often with its patch, and so often when that is gone; how many of
/// them were as they should be.
pub(super) fn livepatch(file: &str, reads: usize) -> Result<()> {
    callers(file)?;
    wait("the patch", || {
        fs::read_to_string(format!("{PATCH}/transition")).is_ok_and(|it| it == "0\n")
    })?;
    println!("patched {}", patched(reads)?);
    fs::write(format!("{PATCH}/enabled"), "0")?;
    wait("its end", || !Path::new(PATCH).exists())?;
    println!("unpatched {}", reads - patched(reads)?);
    Ok(())
}

/// Loads the module.
pub(super) fn callers(file: &str) -> Result<()> {
    println!("pid {}", std::process::id());
    load(file)?;
    println!("ftrace-enabled {}", fs::read_to_string("/proc/sys/kernel/ftrace_enabled")?.trim());
    Ok(())
}

fn patched(reads: usize) -> Result<usize> {
    let mut patched = 0;
    for _ in 0..reads {
        patched += usize::from(fs::read_to_string("/proc/cmdline")?.contains("live patched"));
    }
    Ok(patched)
}

fn wait(what: &str, is_so: impl Fn() -> bool) -> Result<()> {
    let begin = Instant::now();
    while !is_so() {
        ensure!(begin.elapsed() < LIMIT, "{what} has not come");
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}
