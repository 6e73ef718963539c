//! Known waits for a CPU, and the state of the kernel's code meanwhile; known times without preemption or
//! interrupts.

use super::bpf::{Runs, Taking};
use anyhow::{Result, bail};
use std::fs;
use std::io::{Read, Write};
use std::time::Duration;

/// Between rounds: a real-time task must not have the CPU all the time.
const BETWEEN: Duration = Duration::from_millis(60);
/// How often the task is looked at that is to wait.
const LOOK: Duration = Duration::from_millis(1);

/// Rounds, until it is killed. In each the task `sleeper` is woken and waits at least `ms` for its CPU, which the
/// real-time task has that wakes it. Then a line has the number of the round, what it has waited at most, and a
/// hash of the kernel's code as it was after that; and `sched_rr_get_interval` is called, which nobody
/// else calls.
pub(crate) fn rounds(ms: i64) -> Result<()> {
    super::pin(0)?;
    fs::write("/proc/self/comm", "sleeper")?;
    for round in 0_u64.. {
        let (mut wakes, waker) = std::io::pipe()?;
        // SAFETY: the child makes a few system calls and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let hogged = hog(ms * 1_000_000, waker);
            // SAFETY: ends the process, runs nothing of it.
            unsafe { libc::_exit(i32::from(hogged.is_err())) };
        }
        drop(waker);
        let mut woken = [0; 8];
        let read = wakes.read_exact(&mut woken);
        let waited = super::now(libc::CLOCK_MONOTONIC) - i64::from_le_bytes(woken);
        let mut status = 0;
        // SAFETY: a child of ours, a valid place for its status.
        if child < 0 || unsafe { libc::waitpid(child, &raw mut status, 0) } != child || status != 0
        {
            bail!("no real-time task: {}, status {status}", std::io::Error::last_os_error());
        }
        read?;
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

/// Wakes its parent once that sleeps, and has the CPU for `ns` once that is awake. No timer decides when: on a
/// busy host they come late.
fn hog(ns: i64, mut wake: impl Write) -> Result<()> {
    fs::write("/proc/self/comm", "hog")?;
    schedule(libc::SCHED_FIFO, 50)?;
    std::thread::sleep(BETWEEN);
    let parent = format!("/proc/{}/stat", std::os::unix::process::parent_id());
    let sleeps = |stat: &str| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S'));
    while !sleeps(&fs::read_to_string(&parent)?) {
        std::thread::sleep(LOOK);
    }
    let woken = super::now(libc::CLOCK_MONOTONIC);
    wake.write_all(&woken.to_le_bytes())?;
    // From now on: the machine may have done something else since the first look at the clock.
    let awake = super::now(libc::CLOCK_MONOTONIC);
    while super::now(libc::CLOCK_MONOTONIC) < awake + ns {}
    // Nobody waits again while this one ends.
    schedule(libc::SCHED_IDLE, 0)
}

fn schedule(policy: i32, priority: i32) -> Result<()> {
    let parameters = libc::sched_param { sched_priority: priority };
    // SAFETY: a valid parameter for this process.
    if unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) } != 0 {
        bail!("sched_setscheduler: {}", std::io::Error::last_os_error());
    }
    Ok(())
}

/// Calls `getppid` on that CPU, and again from a task that wakes up there a little later.
pub(crate) fn held(cpu: usize) -> Result<()> {
    const LATER: Duration = Duration::from_secs(3);
    super::pin(cpu)?;
    // SAFETY: parent and child make the same few system calls.
    let child = unsafe { libc::fork() };
    if child == 0 {
        std::thread::sleep(LATER);
    }
    super::call_getppid();
    match child {
        0 => Ok(()),
        _ => bail!("getppid has returned"),
    }
}

/// So many times with preemption off on CPU 0, and so many with interrupts off on CPU 1 (preemption off on
/// CPU 0 meanwhile), each of about 5 ms, with a line for each of how long it was at least.
pub(crate) fn off(times: u32) -> Result<()> {
    super::pin(0)?;
    fs::write("/proc/self/comm", "holder")?;
    let taking = Taking::new(5_000_000)?;
    let held = (0..times).map(|_| ("preempt", Runs::Here));
    for (what, runs) in held.chain((0..times).map(|_| ("irq", Runs::On(1)))) {
        println!("off {what} {}", taking.run(runs)?);
    }
    Ok(())
}
