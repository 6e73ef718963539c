//! Work for the guest while its sites change, and a check of the kernel's code from inside.

use super::kcore::Kcore;
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::io::{BufRead, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use vmtrace_tests::asking::hash;
use vmtrace_tests::exact::BACKLOGS;

/// Calls that are made before others have the CPU: so many that some are open at most changes.
const BATCH: usize = 200;
/// Calls that are known to the last one: of each CPU, and whether they go on.
static CALLS: [Mutex<u64>; 2] = [const { Mutex::new(0) }; 2];
static CALLING: AtomicBool = AtomicBool::new(false);

/// Forks and files on every CPU until standard input says `end`. Other lines are requests: a number and a word. At
/// `keep` a copy of the kernel's code is made; at `compare` it is told where that differs now; at `churn SEED` some of
/// the guest's own tracers come and go; between `begin` and `finish` calls are made on all CPUs, which are counted.
///
/// Each line of an answer begins with the number of its request, and the last one has a hash of all: the kernel's
/// messages can stand in the midst of any line of a console. The same request once more has the same answer.
pub(crate) fn stress(cpus: usize) -> Result<()> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stop = &stop;
        let more = |_| !stop.load(Ordering::Relaxed);
        let workers: Vec<_> = (0..cpus).map(|cpu| scope.spawn(move || work(cpu, more))).collect();
        let callers = (0..CALLS.len()).map(|cpu| scope.spawn(move || call(cpu, stop)));
        let callers: Vec<_> = callers.collect();
        let obeyed = obey();
        stop.store(true, Ordering::Relaxed);
        for worker in workers {
            println!("worked {}", worker.join().map_err(|_| anyhow::anyhow!("a panic"))??);
        }
        for caller in callers {
            caller.join().map_err(|_| anyhow::anyhow!("a panic"))??;
        }
        obeyed
    })
}

/// Calls that fail at once, with backlogs from 0 on, some at a time.
fn call(cpu: usize, stop: &AtomicBool) -> Result<()> {
    super::pin(cpu)?;
    while !stop.load(Ordering::Relaxed) {
        let mut calls = CALLS[cpu].lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..if CALLING.load(Ordering::SeqCst) { BATCH } else { 0 } {
            // SAFETY: no pointers, and no descriptor.
            let failed = unsafe { libc::syscall(libc::SYS_listen, -1, *calls % BACKLOGS) };
            ensure!(failed == -1, "a socket at -1");
            *calls += 1;
        }
        drop(calls);
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

fn obey() -> Result<()> {
    let (mut kept, mut answered) = (Vec::new(), String::new());
    println!("stress ready");
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        if line.trim() == "end" {
            break;
        }
        let Some((number, request)) = line.trim().split_once(' ') else { continue };
        if !answered.lines().any(|line| line.starts_with(&format!("{number}: done "))) {
            let said = answer(request, &mut kept)?;
            answered = said.iter().map(|line| format!("{number}: {line}\n")).collect();
            answered += &format!("{number}: done {:x}\n", hash(said.iter().map(String::as_str)));
        }
        std::io::stdout().lock().write_all(answered.as_bytes())?;
    }
    Ok(())
}

fn answer(request: &str, kept: &mut Vec<u8>) -> Result<Vec<String>> {
    let (word, rest) = request.split_once(' ').unwrap_or((request, ""));
    Ok(match word {
        "keep" => {
            *kept = text()?;
            vec![kept.len().to_string()]
        }
        "compare" => {
            let differ = differences(kept, &text()?);
            differ.iter().map(|(start, end)| format!("differs {start:x} {end:x}")).collect()
        }
        "begin" => {
            for calls in &CALLS {
                *calls.lock().unwrap_or_else(PoisonError::into_inner) = 0;
            }
            CALLING.store(true, Ordering::SeqCst);
            Vec::new()
        }
        "finish" => {
            CALLING.store(false, Ordering::SeqCst);
            // Who still makes some holds its lock.
            let calls = CALLS.iter().map(|it| *it.lock().unwrap_or_else(PoisonError::into_inner));
            calls.map(|calls| format!("called {calls}")).collect()
        }
        "churn" => vec![super::beside::churn(rest.parse()?)?],
        _ => bail!("unknown request {request:?}"),
    })
}

/// Rounds of what one process on one CPU does, as long as there are to be `more` than so many:
/// processes and files come and go.
pub(super) fn work(cpu: usize, more: impl Fn(u64) -> bool) -> Result<u64> {
    super::pin(cpu)?;
    let (path, other) = (format!("/tmp/stress-{cpu}"), format!("/tmp/stress-{cpu}-renamed"));
    let mut rounds = 0;
    while more(rounds) {
        // SAFETY: the child makes one system call and is gone.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: ends the process, runs nothing of it.
            unsafe { libc::_exit(7) };
        }
        let mut status = 0;
        // SAFETY: a child of ours, a valid place for its status.
        if child < 0 || unsafe { libc::waitpid(child, &raw mut status, 0) } != child {
            bail!("fork: {}", std::io::Error::last_os_error());
        }
        if !libc::WIFEXITED(status) || libc::WEXITSTATUS(status) != 7 {
            bail!("a child died: status {status:#x}");
        }
        let content = rounds.to_string().repeat(1000);
        fs::write(&path, &content)?;
        fs::rename(&path, &other)?;
        if fs::read_to_string(&other)? != content {
            bail!("a file has changed");
        }
        fs::remove_file(&other)?;
        rounds += 1;
    }
    Ok(rounds)
}

/// The kernel's code as it is, through `/proc/kcore`.
pub(super) fn text() -> Result<Vec<u8>> {
    let iomem = fs::read_to_string("/proc/iomem")?;
    let line = iomem.lines().find_map(|line| line.trim().strip_suffix(" : Kernel code"));
    let (start, last) = line.and_then(|range| range.split_once('-')).context("no kernel code")?;
    let (start, last) = (u64::from_str_radix(start, 16)?, u64::from_str_radix(last, 16)?);
    let len = usize::try_from(last - start + 1)?;
    Kcore::open()?.read_physical(start, len).context("no kernel code")
}

/// Ranges of bytes that are not the same.
fn differences(old: &[u8], new: &[u8]) -> Vec<(usize, usize)> {
    if old.len() != new.len() {
        return vec![(0, old.len().max(new.len()))];
    }
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    // Most blocks are equal, and comparing those at once is fast.
    const BLOCK: usize = 4096;
    for (number, (old, new)) in old.chunks(BLOCK).zip(new.chunks(BLOCK)).enumerate() {
        if old == new {
            continue;
        }
        for (at, _) in old.iter().zip(new).enumerate().filter(|(_, (old, new))| old != new) {
            let at = number * BLOCK + at;
            match ranges.last_mut() {
                Some((_, end)) if *end == at => *end += 1,
                _ => ranges.push((at, at + 1)),
            }
        }
    }
    ranges
}
