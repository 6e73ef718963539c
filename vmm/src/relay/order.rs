//! The order of one vCPU's records.
//!
//! A program first reserves its record and then reads the clock. If a traced interrupt comes in
//! between, the program's record precedes those of the interrupt but has a later time. The order of
//! entries counts: such a record gets the earliest time of those that follow it.

use crate::tracer::{RawBatch, RawRecord};

/// This many of the newest records wait for those that follow: more than the depth to which
/// programs can interrupt one another between two instructions (tasks, interrupts, NMIs,
/// exceptions).
pub(super) const WAITING: usize = 16;

/// Records of one vCPU on their way: their times never go back.
#[derive(Debug, Default)]
pub(super) struct Order {
    /// The newest records, which wait.
    waiting: RawBatch,
    /// The time of the last record that was let through.
    last: u64,
    /// Records whose time was behind that of an earlier one that had gone already.
    behind: u64,
}

impl Order {
    /// Puts those that wait into the empty `batch`, for the newer ones to be added.
    pub(super) fn resume(&mut self, batch: &mut RawBatch) {
        batch.append(&mut self.waiting);
    }

    /// Gives the records of `batch` their times, and keeps the newest back unless `all` are to be
    /// let through: because what is behind them is known to be later.
    pub(super) fn settle(&mut self, batch: &mut RawBatch, all: bool) {
        let floor = self.last;
        let mut least = u64::MAX;
        for record in batch.records.iter_mut().rev() {
            // A clock that was set back is behind what came before it, too: no reason to move that.
            if record.timestamp >= floor {
                least = least.min(record.timestamp);
                record.timestamp = least;
            }
        }
        if !all {
            batch.split_newest(WAITING, &mut self.waiting);
        }
    }

    /// Whether any wait.
    pub(super) fn waits(&self) -> bool {
        !self.waiting.records.is_empty()
    }

    /// The time of the next record that is let through.
    #[inline]
    pub(super) fn pass(&mut self, record: &RawRecord) -> u64 {
        if record.timestamp < self.last {
            self.behind += 1;
        }
        self.last = self.last.max(record.timestamp);
        self.last
    }

    /// Some records have been let through: the last of them with this time, and so many whose time was behind that
    /// of an earlier one.
    pub(super) fn passed(&mut self, last: u64, behind: u64) {
        self.last = last;
        self.behind += behind;
    }

    /// The same of what is no record of the guest's.
    pub(super) fn pass_at(&mut self, ticks: u64) -> u64 {
        self.last = self.last.max(ticks);
        self.last
    }

    /// No later record of the vCPU is earlier than this.
    pub(super) fn last(&self) -> u64 {
        self.last
    }

    /// Records that came with a time behind that of an earlier one, which they were given: where
    /// the guest sets its clock back.
    pub(super) fn behind(&self) -> u64 {
        self.behind
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn batch(times: &[u64]) -> RawBatch {
        let mut batch = RawBatch::with_capacity(times.len() + WAITING);
        batch
            .records
            .extend(times.iter().map(|&timestamp| RawRecord { timestamp, ..RawRecord::default() }));
        batch
    }

    /// What becomes of records that are drained in these pieces.
    fn ordered(order: &mut Order, pieces: &[&[u64]]) -> Vec<u64> {
        let mut out = Vec::new();
        for (index, piece) in pieces.iter().enumerate() {
            let mut all = batch(&[]);
            order.resume(&mut all);
            all.append(&mut batch(piece));
            order.settle(&mut all, index + 1 == pieces.len());
            out.extend(all.records.iter().map(|record| order.pass(record)));
        }
        assert!(order.waiting.records.is_empty());
        out
    }

    // Consumers draw the records of a vCPU one after the other.
    #[test]
    fn an_interrupted_record_is_no_later_than_what_interrupted_it() {
        let order = |pieces: &[&[u64]]| ordered(&mut Order::default(), pieces);
        assert_eq!(order(&[&[10, 90, 20, 30, 95]]), [10, 20, 20, 30, 95]);
        // What interrupted it was interrupted itself.
        assert_eq!(order(&[&[10, 90, 25, 20, 95]]), [10, 20, 20, 20, 95]);
        // What interrupted it is in the next piece.
        assert_eq!(order(&[&[10, 90], &[20, 95]]), [10, 20, 20, 95]);
        assert_eq!(order(&[&[10, 90], &[25], &[], &[20, 95]]), [10, 20, 20, 20, 95]);
    }

    // A guest can set its clock: all before that keeps its time, and that it was is counted.
    #[test]
    fn a_clock_that_was_set_back_moves_nothing_before_it() {
        let mut order = Order { last: 90, ..Order::default() };
        assert_eq!(ordered(&mut order, &[&[100, 110, 5, 6, 112]]), [100, 110, 110, 110, 112]);
        assert_eq!(order.behind(), 2);
    }

    /// A writer that reserves a record, is interrupted by others, and then reads the clock.
    #[derive(Clone, Debug)]
    struct Hit {
        inner: Vec<Hit>,
        after: Vec<Hit>,
    }

    fn hits() -> impl Strategy<Value = Vec<Hit>> {
        let leaf = Just(Hit { inner: Vec::new(), after: Vec::new() });
        let hit = leaf.prop_recursive(6, 64, 4, |hit| {
            (prop::collection::vec(hit.clone(), 0..4), prop::collection::vec(hit, 0..4))
                .prop_map(|(inner, after)| Hit { inner, after })
        });
        prop::collection::vec(hit, 0..40)
    }

    /// Times of records in the order in which they were reserved, and when that was.
    fn play(hits: &[Hit], clock: &mut u64, times: &mut Vec<(u64, u64)>) {
        for hit in hits {
            let index = times.len();
            *clock += 1;
            times.push((*clock, 0));
            play(&hit.inner, clock, times);
            *clock += 1;
            times[index].1 = *clock;
            play(&hit.after, clock, times);
        }
    }

    proptest! {
        // However programs interrupt one another, and wherever the drain cuts: each record's time
        // is between when it was reserved and when its writer read the clock, and none goes back.
        #[test]
        fn times_are_in_order_and_true(
            hits in hits(), cuts in prop::collection::vec(0_usize..200, 0..8)
        ) {
            let (mut clock, mut times) = (0, Vec::new());
            play(&hits, &mut clock, &mut times);
            let own: Vec<u64> = times.iter().map(|&(_, read)| read).collect();
            let mut cuts: Vec<_> = cuts.into_iter().map(|cut| cut.min(own.len())).collect();
            cuts.extend([0, own.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u64]> = cuts.windows(2).map(|cut| &own[cut[0]..cut[1]]).collect();
            let mut order = Order::default();
            let shown = ordered(&mut order, &pieces);
            prop_assert!(shown.is_sorted());
            prop_assert_eq!(order.behind(), 0);
            for (shown, (reserved, read)) in shown.iter().zip(&times) {
                prop_assert!((*reserved..=*read).contains(shown), "{} {} {}", reserved, shown, read);
            }
        }

        // Whatever a guest writes as times.
        #[test]
        fn times_never_go_back(
            times in prop::collection::vec(any::<u64>(), 0..60), cut in 0_usize..60
        ) {
            let (first, second) = times.split_at(cut.min(times.len()));
            let shown = ordered(&mut Order::default(), &[first, second]);
            prop_assert_eq!(shown.len(), times.len());
            prop_assert!(shown.is_sorted());
        }
    }
}
