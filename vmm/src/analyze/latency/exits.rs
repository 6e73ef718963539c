//! The times when vCPUs were out of the guest.

use std::collections::{HashMap, VecDeque};

/// Exits of each vCPU that are remembered: an episode may have very many, such as one in which a
/// serial port is written to.
const KEPT: usize = 1 << 16;

/// Beginnings and ends, in nanoseconds; those of a vCPU in their order.
#[derive(Debug, Default)]
pub(super) struct Exits(HashMap<u32, VecDeque<(u64, u64)>>);

impl Exits {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn add(&mut self, vcpu: u32, (start, end): (u64, u64)) {
        let of = self.0.entry(vcpu).or_default();
        if of.len() == KEPT {
            of.pop_front();
        }
        // One after the other, whatever the two clocks say: they are looked up by their ends.
        let before = of.back().map_or(0, |&(_, end)| end);
        of.push_back((start.max(before), end.max(before)));
    }

    /// Those of a vCPU that were not over then.
    pub(super) fn of(&mut self, vcpu: u32, then: u64) -> &[(u64, u64)] {
        let Some(of) = self.0.get_mut(&vcpu) else { return &[] };
        let of = of.make_contiguous();
        &of[of.partition_point(|&(_, end)| end <= then)..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exits_of_a_vcpu_are_found_by_time() {
        let mut exits = Exits::default();
        for at in 0..2 * KEPT as u64 {
            exits.add(1, (10 * at + 8, 10 * at + 10));
        }
        assert_eq!(exits.of(0, 0), []);
        let last = 10 * (2 * KEPT as u64);
        assert_eq!(exits.of(1, last - 10), [(last - 2, last)]);
        assert_eq!(exits.of(1, last - 11), [(last - 12, last - 10), (last - 2, last)]);
        assert_eq!(exits.of(1, 0).len(), KEPT);
        // A guest can set its clock back.
        exits.add(1, (5, 7));
        assert_eq!(exits.of(1, last - 1), [(last - 2, last), (last, last)]);
    }
}
