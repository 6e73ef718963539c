//! The guest's clock by the host's, for what the host tells of a vCPU.

use std::time::{Duration, Instant};

/// From two readings so far apart the rate is known better than from its name.
const LONG: Duration = Duration::from_secs(1);
/// A reading that the rate is made of is not further off than that.
const CLOSE: Duration = Duration::from_micros(20);
/// By which part of it a rate may differ from what it is said to be: clocks do, by less than a tenth of that.
const TOLERANCE: u128 = 1000;

/// Parts of a million by which the two clocks drift apart, at most: NTP may slew the host's by 500.
const DRIFT: u128 = 500;

/// The guest's clock was read once.
#[derive(Clone, Copy, Debug)]
struct Reading {
    at: Instant,
    ticks: u64,
    /// By how much `at` may be wrong.
    error: Duration,
}

/// What the guest's clock showed at moments of the host's.
#[derive(Debug)]
pub(super) struct GuestClock {
    /// Ticks in a second.
    hz: u64,
    first: Option<Reading>,
    last: Reading,
}

impl GuestClock {
    /// It is said to have so many ticks in a second, and has shown about so many at that moment.
    pub(super) fn new(hz: u64, (at, ticks): (Instant, u64), error: Duration) -> Self {
        Self { hz, first: None, last: Reading { at, ticks, error } }
    }

    /// It was read between these two moments. Whoever reads it may be preempted meanwhile: then what was
    /// known before may be better.
    pub(super) fn read(&mut self, (from, to): (Instant, Instant), ticks: u64) {
        let error = to.saturating_duration_since(from) / 2;
        let at = from + error;
        let reading = Reading { at, ticks, error };
        if error <= CLOSE {
            self.first.get_or_insert(reading);
        }
        if error <= self.last.error_at(at) {
            self.last = reading;
        }
    }

    /// What it showed then.
    pub(super) fn ticks_at(&self, then: Instant) -> u64 {
        let Reading { at, ticks, .. } = self.last;
        match then.checked_duration_since(at) {
            Some(after) => ticks.saturating_add(self.ticks_in(after)),
            None => ticks.saturating_sub(self.ticks_in(at.duration_since(then))),
        }
    }

    fn ticks_in(&self, time: Duration) -> u64 {
        let (ticks, in_time) = self.rate();
        let in_time = in_time.as_nanos().max(1);
        u64::try_from(time.as_nanos() * u128::from(ticks) / in_time).unwrap_or(u64::MAX)
    }

    /// So many ticks in such a time.
    fn rate(&self) -> (u64, Duration) {
        let said = (self.hz, Duration::from_secs(1));
        let (Some(first), last) = (self.first, self.last) else { return said };
        let Some(time) = last.at.checked_duration_since(first.at).filter(|time| *time >= LONG)
        else {
            return said;
        };
        let expected = time.as_nanos() * u128::from(self.hz) / 1_000_000_000;
        // A guest may set its clock.
        let is_set = |ticks| u128::from(ticks).abs_diff(expected) > expected / TOLERANCE;
        match last.ticks.checked_sub(first.ticks) {
            Some(ticks) if !is_set(ticks) => (ticks, time),
            _ => said,
        }
    }
}

impl Reading {
    /// By how much what is made of it for then may be wrong.
    fn error_at(&self, then: Instant) -> Duration {
        let age = then.saturating_duration_since(self.at).as_nanos();
        let drift = u64::try_from(age * DRIFT / 1_000_000).unwrap_or(u64::MAX);
        self.error.saturating_add(Duration::from_nanos(drift))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HZ: u64 = 2_000_000_000;
    const MS: Duration = Duration::from_millis(1);

    fn at(moment: Instant) -> (Instant, Instant) {
        (moment, moment)
    }

    // A tenth of a millisecond beside its place, a preemption is in another latency.
    #[test]
    fn times_between_and_after_readings_are_told() {
        let start = Instant::now();
        let mut clock = GuestClock::new(HZ, (start, 460_000_000), 100 * MS);
        assert_eq!(clock.ticks_at(start + MS), 462_000_000);
        clock.read(at(start + 10 * MS), 500_000_000);
        assert_eq!(clock.ticks_at(start + 11 * MS), 502_000_000);
        assert_eq!(clock.ticks_at(start), 480_000_000);
        // It is a ten-thousandth faster than it is said to be.
        let ticks = 500_000_000 + 2000 * 2_000_200;
        clock.read(at(start + 2010 * MS), ticks);
        assert_eq!(clock.ticks_at(start + 3010 * MS), ticks + 1000 * 2_000_200);
        assert_eq!(clock.ticks_at(start + 2009 * MS), ticks - 2_000_200);
    }

    // The thread that reads the clock is one of those that the host lets wait.
    #[test]
    fn a_reading_that_took_long_replaces_none_that_is_better() {
        let start = Instant::now();
        let mut clock = GuestClock::new(HZ, (start, 0), 100 * MS);
        clock.read((start, start + 20 * MS), 0);
        clock.read((start + 30 * MS, start + 32 * MS), 62_000_000);
        assert_eq!(clock.ticks_at(start + 31 * MS), 62_000_000);
        // It was at 40 ms when it was read.
        clock.read((start + 40 * MS, start + 44 * MS), 80_000_000);
        assert_eq!(clock.ticks_at(start + 40 * MS), 80_000_000);
        // By now the clocks may have drifted apart by more than that.
        clock.read((start + 10_000 * MS, start + 10_004 * MS), 20_004_000_000);
        assert_eq!(clock.ticks_at(start + 10_002 * MS), 20_004_000_000);
    }

    #[test]
    fn a_clock_that_is_set_is_as_fast_as_before() {
        let start = Instant::now();
        let mut clock = GuestClock::new(HZ, (start, 0), 100 * MS);
        clock.read(at(start), 500_000_000);
        for set in [0, 1 << 50, u64::MAX] {
            clock.read(at(start + 5000 * MS), set);
            let after = clock.ticks_at(start + 5001 * MS);
            assert_eq!(after, set.saturating_add(2_000_000));
        }
        assert_eq!(clock.ticks_at(start), u64::MAX - 10_000_000_000);
    }
}
