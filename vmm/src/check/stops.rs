//! Times in which the guest stood still for vmtrace, while its clock went on.

use std::collections::VecDeque;

use crate::export::covered;
use crate::stream::{Header, Mark};

/// Stops that are remembered.
const KEPT: usize = 1 << 12;

/// Beginnings and ends, in nanoseconds of the guest's clock.
#[derive(Debug, Default)]
pub(super) struct Stops(VecDeque<(i128, i128)>);

impl Stops {
    /// A mark may tell of one, at its end.
    pub(super) fn add(&mut self, header: &Header, mark: &Mark) {
        let stood_still_ns = mark.stood_still_ns();
        if stood_still_ns == 0 {
            return;
        }
        if self.0.len() == KEPT {
            self.0.pop_front();
        }
        let end = header.nanoseconds(mark.ticks);
        self.0.push_back((end - i128::from(stood_still_ns), end));
    }

    /// For how much of the last `took` nanoseconds before `until` the guest stood still.
    pub(super) fn within(&self, until: i128, took: u64) -> u64 {
        let from = until - i128::from(took);
        u64::try_from(covered((from, until), self.0.iter().copied())).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::{MarkKind, sample};

    #[test]
    fn only_what_is_within_counts() {
        let header = Header { clock_hz: 1_000_000_000, ..sample::header() };
        let mut stops = Stops::default();
        let mut add = |ticks, kind, duration_ns| {
            stops.add(&header, &Mark { ticks, kind, duration_ns, ..sample::mark() });
        };
        add(100, MarkKind::Pause, 40);
        add(150, MarkKind::Console, 40);
        add(200, MarkKind::Filter, 50);
        // All of it is in the one before.
        add(190, MarkKind::Resume, 10);
        add(300, MarkKind::Pause, 0);
        let within = |until, took| stops.within(header.nanoseconds(until), took);
        assert_eq!(within(400, 400), 90);
        assert_eq!((within(180, 100), within(140, 30)), (20 + 30, 0));
    }
}
