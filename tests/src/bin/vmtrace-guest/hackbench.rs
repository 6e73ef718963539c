//! The load of hackbench (tools/perf/bench/sched-messaging.c of the kernel): threads that send messages to others over
//! sockets, each to each.

use super::bench::{Meter, be_real_time, small_buffer};
use super::{TRACING, mark, now, set};
use anyhow::{Context, Result, anyhow};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Barrier;
use std::thread;

/// Those that send, and as many that receive: half of hackbench's, which has 20 of each.
const PAIRS: usize = 10;
/// Messages from each to each, of so many bytes.
const LOOPS: usize = 50;
const SIZE: usize = 100;

/// The messages of a round.
const MESSAGES: usize = PAIRS * PAIRS * LOOPS;

/// Instructions of a message without tracing and with all events: the guest's own, or vmtrace's.
pub(super) fn hackbench(guest: bool) -> Result<()> {
    let meter = Meter::new();
    // The fair scheduler's choices differ from round to round, by more than events cost.
    be_real_time()?;
    let figure = || -> Result<f64> {
        // The first one touches memory that nobody has.
        round()?;
        let mut figures = [round()?, round()?, round()?];
        figures.sort_unstable();
        Ok(f64::from(i32::try_from(figures[1])?) / meter.instruction / messages())
    };
    let untraced = figure()?;
    println!("hackbench untraced {untraced:.0}");
    if guest {
        small_buffer()?;
        set("events/enable", "1")?;
        let before = recorded()?;
        let on = figure()?;
        let events = recorded()? - before;
        set("events/enable", "0")?;
        println!("hackbench on {:.0}", on - untraced);
        println!("hackbench events {:.1}", events / (4.0 * messages()));
    } else {
        // vmtrace waits for this call: --from the function of getpgid
        mark();
        println!("hackbench on {:.0}", figure()? - untraced);
        // It records no more from here: --stop-at the function of getsid
        // SAFETY: takes no pointers.
        unsafe { libc::getsid(0) };
    }
    println!("hackbench off {:.0}", figure()? - untraced);
    Ok(())
}

/// As hackbench says how many there are.
fn messages() -> f64 {
    f64::from(u32::try_from(MESSAGES).unwrap_or(u32::MAX))
}

/// Nanoseconds of all messages, from when all threads are there.
fn round() -> Result<i64> {
    let pairs: Vec<_> = (0..PAIRS).map(|_| UnixStream::pair()).collect::<Result<_, _>>()?;
    let everyone_is_there = Barrier::new(2 * PAIRS + 1);
    let receive = |mut from: &UnixStream| -> std::io::Result<()> {
        everyone_is_there.wait();
        let mut message = [0; SIZE];
        (0..PAIRS * LOOPS).try_for_each(|_| from.read_exact(&mut message))
    };
    let send = || -> std::io::Result<()> {
        everyone_is_there.wait();
        let all = (0..LOOPS).flat_map(|_| &pairs);
        all.map(|(_, to)| to).try_for_each(|mut to| to.write_all(&[0; SIZE]))
    };
    thread::scope(|scope| {
        let receivers = pairs.iter().map(|(from, _)| scope.spawn(|| receive(from)));
        let mut threads: Vec<_> = receivers.collect();
        threads.extend((0..PAIRS).map(|_| scope.spawn(send)));
        everyone_is_there.wait();
        let start = now(libc::CLOCK_MONOTONIC);
        for thread in threads {
            thread.join().map_err(|_| anyhow!("a thread panicked"))??;
        }
        Ok(now(libc::CLOCK_MONOTONIC) - start)
    })
}

/// How many events the guest's own trace has had.
fn recorded() -> Result<f64> {
    let stats = fs::read_to_string(format!("{TRACING}/per_cpu/cpu0/stats"))?;
    let value = |key: &str| -> Result<f64> {
        let value = stats.lines().find_map(|line| line.strip_prefix(key));
        Ok(value.with_context(|| format!("no {key} in {stats}"))?.trim().parse()?)
    };
    Ok(value("entries:")? + value("overrun:")?)
}
