//! Times in which the guest stood still for vmtrace, while its clock went on.

use std::collections::VecDeque;

use crate::stream::{Header, Mark, MarkKind};

/// Stops that are remembered.
const KEPT: usize = 1 << 12;

/// Beginnings and ends, in nanoseconds of the guest's clock.
#[derive(Debug, Default)]
pub(super) struct Stops(VecDeque<(i128, i128)>);

impl Stops {
    /// A mark may tell of one, at its end.
    pub(super) fn add(&mut self, header: &Header, mark: &Mark) {
        let stops = matches!(
            mark.kind,
            MarkKind::Pause | MarkKind::Attach | MarkKind::Filter | MarkKind::Note
        );
        if !stops || mark.duration_ns == 0 {
            return;
        }
        if self.0.len() == KEPT {
            self.0.pop_front();
        }
        let end = header.nanoseconds(mark.ticks);
        self.0.push_back((end - i128::from(mark.duration_ns), end));
    }

    /// For how much of the last `took` nanoseconds before `until` the guest stood still.
    pub(super) fn within(&self, until: i128, took: u64) -> u64 {
        let from = until - i128::from(took);
        let inside = |&(start, end): &(i128, i128)| (end.min(until) - start.max(from)).max(0);
        u64::try_from(self.0.iter().map(inside).sum::<i128>()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::sample;

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
        add(300, MarkKind::Pause, 0);
        let within = |until, took| stops.within(header.nanoseconds(until), took);
        assert_eq!(within(400, 400), 90);
        assert_eq!((within(180, 100), within(140, 30)), (20 + 30, 0));
    }
}
