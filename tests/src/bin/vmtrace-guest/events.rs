//! The guest's own trace of events that vmtrace traces as well.

use super::{TRACING, set};
use anyhow::{Context, Result, ensure};
use nix::sys::termios::tcdrain;
use std::fs;
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;
use vmtrace_tests::events::lines_to_tell;

/// A signal that nobody takes marks where a round begins or ends. The kernel tells of it with
/// interrupts off: no interrupt comes between one side's look at it and the other's.
fn signal(number: libc::c_int) -> Result<()> {
    // SAFETY: takes no pointers; the signal is ignored.
    let result = unsafe { libc::kill(libc::getpid(), number) };
    ensure!(result == 0, "kill: {}", std::io::Error::last_os_error());
    Ok(())
}

/// Names of the task that mark where the work without the guest's own events begins and ends.
fn mark(name: &std::ffi::CStr) -> Result<()> {
    // SAFETY: a string with its end.
    let result = unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
    ensure!(result == 0, "prctl: {}", std::io::Error::last_os_error());
    Ok(())
}

extern "C" fn ignore(_: libc::c_int) {}

/// Forks, programs, signals, pipes and sleeps.
fn work() -> Result<()> {
    let handler: extern "C" fn(libc::c_int) = ignore;
    // SAFETY: a handler that does nothing.
    unsafe { libc::signal(libc::SIGUSR1, handler as libc::sighandler_t) };
    let mut child = Command::new("/proc/self/exe");
    let status = child.arg("uptime").stdout(Stdio::null()).status().context("no child")?;
    ensure!(status.success(), "{status}");
    // SAFETY: takes no pointers.
    unsafe { libc::raise(libc::SIGUSR1) };
    let (mut reader, mut writer) = std::io::pipe()?;
    let other = thread::spawn(move || {
        let mut bytes = [0; 4];
        reader.read_exact(&mut bytes).map(|()| bytes)
    });
    thread::sleep(Duration::from_millis(20));
    writer.write_all(b"word")?;
    ensure!(other.join().is_ok_and(|read| read.is_ok_and(|bytes| bytes == *b"word")), "no word");
    Ok(())
}

/// Line after line, each sent before the next one: a UART that is never done keeps a CPU in its
/// interrupt, until the kernel's watchdog cries "soft lockup" (and into the lines).
pub(super) fn tell(lines: &[String]) -> Result<()> {
    let mut out = std::io::stdout().lock();
    for line in lines {
        writeln!(out, "{line}")?;
        out.flush()?;
        tcdrain(&out)?;
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Switches the guest's own events (`SYSTEM/NAME`) on and off again, `rounds` times, with work
/// between; prints what it has seen in the last round, then works alone.
pub(super) fn events(rounds: usize, names: &[&str]) -> Result<()> {
    super::pin(1)?;
    set("buffer_size_kb", "8192")?;
    for round in 0..rounds {
        set("trace", "")?;
        for name in names {
            set(&format!("events/{name}/enable"), "1")?;
        }
        signal(libc::SIGURG)?;
        work()?;
        signal(libc::SIGWINCH)?;
        if round + 1 < rounds {
            for name in names {
                set(&format!("events/{name}/enable"), "0")?;
            }
        }
    }
    for name in names.iter().rev() {
        set(&format!("events/{name}/enable"), "0")?;
    }
    mark(c"alone-begin")?;
    work()?;
    mark(c"alone-end")?;
    let trace = fs::read_to_string(format!("{TRACING}/trace"))?;
    let lines = trace.lines().filter(|line| !line.starts_with('#'));
    let tells = |line: &str, signal| line.contains(&format!(" signal_generate: sig={signal} "));
    let mut inside = false;
    let mut told = Vec::new();
    for line in lines {
        inside |= tells(line, libc::SIGURG);
        // The console is slow, and other CPUs are not compared.
        if inside && line.contains(" [001] ") {
            told.push(line.trim());
        }
        if tells(line, libc::SIGWINCH) {
            break;
        }
    }
    // Its messages stay in its log.
    const LEVELS: &str = "/proc/sys/kernel/printk";
    let levels = fs::read_to_string(LEVELS)?;
    fs::write(LEVELS, "1")?;
    tell(&lines_to_tell(&told))?;
    fs::write(LEVELS, levels)?;
    Ok(())
}
