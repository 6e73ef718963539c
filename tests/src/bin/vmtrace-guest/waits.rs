//! Known waits for a CPU, and what the kernel's code is like meanwhile.

use anyhow::{Result, bail};
use std::fs;
use std::io::{Read, Write};
use std::time::Duration;

/// How long before the wait begins the CPU is taken.
const BEFORE: i64 = 30_000_000;
/// How late it may be woken.
const LATEST: i64 = 1_000_000_000;

/// Rounds, until it is killed. In each the task `sleeper` is woken and waits `ms` for its CPU, which a
/// real-time task has. Then a line has the number of the round, what it has waited since that task has
/// seen it woken (its timer may be late), and a hash of the kernel's code as it was after that; and
/// `sched_rr_get_interval` is called, which nobody else calls.
pub(crate) fn rounds(ms: i64) -> Result<()> {
    super::pin(0)?;
    fs::write("/proc/self/comm", "sleeper")?;
    for round in 0_u64.. {
        let wake = super::now(libc::CLOCK_MONOTONIC) + 3 * BEFORE;
        let (mut told, teller) = std::io::pipe()?;
        // SAFETY: the child makes a few system calls and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let hogged = hog(wake, ms * 1_000_000, teller);
            // SAFETY: ends the process, runs nothing of it.
            unsafe { libc::_exit(i32::from(hogged.is_err())) };
        }
        drop(teller);
        sleep_until(wake);
        let runs = super::now(libc::CLOCK_MONOTONIC);
        let mut status = 0;
        // SAFETY: a child of ours, a valid place for its status.
        if child < 0 || unsafe { libc::waitpid(child, &raw mut status, 0) } != child || status != 0
        {
            bail!("no real-time task: {}, status {status}", std::io::Error::last_os_error());
        }
        let mut woken = [0; 8];
        // One that was late itself has seen nothing.
        let seen = told.read_exact(&mut woken).map(|()| i64::from_le_bytes(woken));
        let waited = runs - seen.unwrap_or(wake);
        let code = hash(&super::stress::text()?);
        println!("round {round} waited {waited} code {code:x}");
        let mut interval = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: a valid place for it.
        unsafe { libc::sched_rr_get_interval(0, &raw mut interval) };
    }
    Ok(())
}

/// Quick: the guest's processor is an emulated one.
fn hash(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let words = words.iter().map(|word| u64::from_le_bytes(*word));
    let all = words.chain(rest.iter().map(|&byte| byte.into()));
    all.fold(0, |hash: u64, word| (hash.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// Has the CPU from before that moment of `CLOCK_MONOTONIC`, at which its parent is woken, to `ns` behind
/// the moment at which it sees that, which it tells if it is.
fn hog(wake: i64, ns: i64, mut tell: impl Write) -> Result<()> {
    fs::write("/proc/self/comm", "hog")?;
    let parameters = libc::sched_param { sched_priority: 50 };
    // SAFETY: a valid parameter for this process.
    if unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const parameters) } != 0 {
        bail!("sched_setscheduler: {}", std::io::Error::last_os_error());
    }
    sleep_until(wake - BEFORE);
    // A host that is busy lets the guest's timers come late.
    let parent = format!("/proc/{}/stat", std::os::unix::process::parent_id());
    let woken = loop {
        let stat = fs::read_to_string(&parent)?;
        let now = super::now(libc::CLOCK_MONOTONIC);
        if stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('R')) {
            break now;
        }
        if now > wake + LATEST {
            return Ok(());
        }
    };
    tell.write_all(&woken.to_le_bytes())?;
    while super::now(libc::CLOCK_MONOTONIC) < woken + ns {}
    Ok(())
}

fn sleep_until(moment: i64) {
    let left = u64::try_from(moment - super::now(libc::CLOCK_MONOTONIC));
    std::thread::sleep(Duration::from_nanos(left.unwrap_or(0)));
}
