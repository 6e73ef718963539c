//! A module that is a direct caller of a function of the kernel, and patches another one.

use super::events::tell;
use super::{load, tell_ftrace};
use anyhow::{Result, ensure};
use std::fs;
use std::path::Path;
use std::time::Duration;
use vmtrace_tests::within;

/// Of the module's patch.
const PATCH: &str = "/sys/kernel/livepatch/vmtrace_own";
/// The kernel wakes tasks that are in its way every 15 s (kernel/livepatch/transition.c).
const LIMIT: Duration = Duration::from_secs(120);

/// Loads the module, reads `/proc/cmdline` so often with its patch, and so often when that is gone; how many of
/// them were as they should be.
pub(super) fn livepatch(file: &str, reads: usize) -> Result<()> {
    callers(file)?;
    let is_done = || fs::read_to_string(format!("{PATCH}/transition")).is_ok_and(|it| it == "0\n");
    ensure!(within(LIMIT, is_done), "the patch has not come");
    println!("patched {}", patched(reads)?);
    fs::write(format!("{PATCH}/enabled"), "0")?;
    ensure!(within(LIMIT, || !Path::new(PATCH).exists()), "the patch does not end");
    println!("unpatched {}", reads - patched(reads)?);
    Ok(())
}

/// Loads the module.
pub(super) fn callers(file: &str) -> Result<()> {
    // The kernel has something to say of such a module, if need be in the middle of a line.
    tell(&[format!("pid {}", std::process::id())])?;
    load(file)?;
    tell_ftrace()
}

fn patched(reads: usize) -> Result<usize> {
    let mut patched = 0;
    for _ in 0..reads {
        patched += usize::from(fs::read_to_string("/proc/cmdline")?.contains("live patched"));
    }
    Ok(patched)
}
