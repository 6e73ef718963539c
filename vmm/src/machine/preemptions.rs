//! When the host's scheduler ran others in place of a vCPU's thread: `PERF_RECORD_SWITCH` of
//! perf_event_open(2). Between a vCPU's exits nothing else tells it.

use std::io;
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use perf_event::events::Software;
use perf_event::{Builder, Clock, SampleFlag, Sampler};

/// `PERF_RECORD_LOST`, `PERF_RECORD_SWITCH` and the bits of a switch from the thread, and of one though it
/// could have gone on (include/uapi/linux/perf_event.h).
const LOST: u32 = 2;
const SWITCH: u32 = 14;
const SWITCH_OUT: u16 = 1 << 13;
const SWITCH_OUT_PREEMPT: u16 = 1 << 14;
/// Bytes of the buffer: 4096 switches between two looks at it, of which each sleep takes two as well.
const BUFFER: usize = 64 << 10;
/// Attempts to read two clocks at one moment, and how long that takes where nothing comes between.
const ATTEMPTS: usize = 20;
const ONE_MOMENT: Duration = Duration::from_micros(2);

/// What was found of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preemption {
    /// It could have run since the first of these, and did not until the second.
    Of(Instant, Instant),
    /// There was no room for some of its switches.
    Unknown,
}

/// The preemptions of one thread.
pub struct Preemptions {
    sampler: Sampler,
    /// One moment by two names: as the standard library has it, and in nanoseconds of `CLOCK_MONOTONIC`.
    base: (Instant, u64),
    switches: Switches,
}

impl Preemptions {
    /// Those of the calling thread, from now on.
    ///
    /// # Errors
    /// When the system does not tell: mostly by `kernel.perf_event_paranoid`.
    pub fn of_this_thread() -> io::Result<Self> {
        let counter = Builder::new(Software::DUMMY)
            .context_switch(true)
            .sample_id_all(true)
            .sample(SampleFlag::TIME)
            .clockid(Clock::MONOTONIC)
            // Nobody waits for it.
            .wakeup_watermark(1 << 30)
            .enabled(true)
            .build()?;
        let sampler = counter.sampled(BUFFER)?;
        Ok(Self { sampler, base: one_moment()?, switches: Switches::default() })
    }

    fn at(&self, monotonic: u64) -> Instant {
        let (instant, base) = self.base;
        let moment = match monotonic.checked_sub(base) {
            Some(after) => instant.checked_add(Duration::from_nanos(after)),
            None => instant.checked_sub(Duration::from_nanos(base - monotonic)),
        };
        moment.unwrap_or(instant)
    }
}

impl Iterator for Preemptions {
    type Item = Preemption;

    /// The next one that is over, if that is known by now.
    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let record = self.sampler.next_record()?;
            let time = record.to_contiguous().last_chunk().map(|word| u64::from_ne_bytes(*word));
            let (kind, misc) = (record.ty(), record.misc());
            drop(record);
            match time.and_then(|time| self.switches.next(kind, misc, time)) {
                Some(Switched::Preempted(from, until)) => {
                    return Some(Preemption::Of(self.at(from), self.at(until)));
                }
                Some(Switched::Lost) => return Some(Preemption::Unknown),
                None => {}
            }
        }
    }
}

/// A moment by both names. A thread that has just begun may be preempted between two readings.
fn one_moment() -> io::Result<(Instant, u64)> {
    let mut best = None;
    for _ in 0..ATTEMPTS {
        let before = Instant::now();
        let now = Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC)?);
        let took = before.elapsed();
        if best.is_none_or(|(least, _)| took < least) {
            let now = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
            best = Some((took, (before + took / 2, now)));
        }
        if took <= ONE_MOMENT {
            break;
        }
    }
    best.map(|(_, moment)| moment).ok_or_else(|| io::ErrorKind::Other.into())
}

/// What a record tells, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Switched {
    Preempted(u64, u64),
    Lost,
}

/// Where the thread is, as far as its records tell.
#[derive(Debug, Default)]
struct Switches {
    /// Preempted since then.
    since: Option<u64>,
}

impl Switches {
    /// A record of this kind, and its time, which is the last word of each.
    fn next(&mut self, kind: u32, misc: u16, time: u64) -> Option<Switched> {
        match kind {
            SWITCH if misc & SWITCH_OUT == 0 => {
                let since = self.since.take()?;
                Some(Switched::Preempted(since, time.max(since)))
            }
            SWITCH => {
                self.since = (misc & SWITCH_OUT_PREEMPT != 0).then_some(time);
                None
            }
            LOST => {
                self.since = None;
                Some(Switched::Lost)
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    // A vCPU that sleeps since its guest has nothing to do does not wait for its host.
    #[test]
    fn only_a_thread_that_could_go_on_is_preempted() {
        let mut switches = Switches::default();
        let mut next = |kind, misc, time| switches.next(kind, misc, time);
        let preempted = SWITCH_OUT | SWITCH_OUT_PREEMPT;
        assert_eq!(next(SWITCH, 0, 5), None, "it was there before");
        assert_eq!(next(SWITCH, SWITCH_OUT, 10), None);
        assert_eq!(next(SWITCH, 0, 20), None);
        assert_eq!(next(SWITCH, preempted, 30), None);
        assert_eq!(next(SWITCH, 0, 37), Some(Switched::Preempted(30, 37)));
        assert_eq!(next(SWITCH, 0, 40), None);
        // What came back is among the lost.
        assert_eq!(next(SWITCH, preempted, 50), None);
        assert_eq!(next(LOST, 0, 55), Some(Switched::Lost));
        assert_eq!(next(SWITCH, 0, 60), None);
        assert_eq!(next(9, 0, 61), None);
    }

    // Three busy threads on each CPU: this one must wait for others.
    #[test]
    fn a_thread_learns_of_its_own() {
        // It may be preempted as soon as it is looked at.
        let begun = Instant::now();
        // Not every machine lets us.
        let Ok(mut own) = Preemptions::of_this_thread() else { return };
        let cpus = std::thread::available_parallelism().unwrap().get();
        let end = Instant::now() + Duration::from_secs(20);
        let busy = AtomicBool::new(true);
        let seen = std::thread::scope(|scope| {
            for _ in 0..2 * cpus {
                scope.spawn(|| {
                    while busy.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            let seen = loop {
                if let Some(seen) = own.next() {
                    break Some(seen);
                }
                if Instant::now() > end {
                    break None;
                }
            };
            busy.store(false, Ordering::Relaxed);
            seen
        });
        let Some(Preemption::Of(from, until)) = seen else { panic!("{seen:?}") };
        assert!(begun <= from && from < until && until <= Instant::now());
    }
}
