//! Which parts of a place are free.

use std::ops::Range;

/// Free parts of a place: ascending, and no two of them touch.
#[derive(Debug, Default)]
pub(super) struct FreeList(Vec<Range<u64>>);

impl FreeList {
    /// All of it.
    pub(super) fn new(all: Range<u64>) -> Self {
        Self(if all.is_empty() { Vec::new() } else { vec![all] })
    }

    /// Where so many bytes begin that are taken now, the first that fit; `None` when no part is
    /// large enough.
    pub(super) fn take(&mut self, len: u64) -> Option<u64> {
        let fits = |part: &Range<u64>| len > 0 && part.end - part.start >= len;
        let at = self.0.iter().position(fits)?;
        let part = self.0.get_mut(at)?;
        let start = part.start;
        part.start += len;
        if part.is_empty() {
            self.0.remove(at);
        }
        Some(start)
    }

    /// Gives a part back. One of which anything is free already is left as it is: whoever has the rest
    /// of it keeps that.
    pub(super) fn give(&mut self, part: Range<u64>) {
        let at = self.0.partition_point(|free| free.end < part.start);
        // Those that it touches: at most one on each side.
        let behind = self.0.iter().skip(at).take_while(|free| free.start <= part.end).count();
        let touched = self.0.get(at..at + behind).unwrap_or_default();
        let overlaps = |free: &Range<u64>| free.start < part.end && part.start < free.end;
        if part.is_empty() || touched.iter().any(overlaps) {
            return;
        }
        let start = touched.first().map_or(part.start, |free| free.start.min(part.start));
        let end = touched.last().map_or(part.end, |free| free.end.max(part.end));
        self.0.splice(at..at + behind, std::iter::once(start..end));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn neighbours_are_one_part_again() {
        let mut free = FreeList::new(64..128);
        let parts: Vec<u64> = (0..4).map(|_| free.take(16).unwrap()).collect();
        assert_eq!((parts, free.take(4)), (vec![64, 80, 96, 112], None));
        free.give(64..80);
        free.give(96..112);
        assert_eq!(free.take(20), None, "two parts of 16");
        free.give(80..96);
        assert_eq!((free.0.first(), free.0.len()), (Some(&(64..112)), 1));
        assert_eq!(free.take(48), Some(64));
    }

    // A place that is free twice would be given to two stubs.
    #[test]
    fn what_is_free_is_not_given_back_again() {
        let mut free = FreeList::new(0..32);
        free.take(16).unwrap();
        for part in [8..24, 16..20, 12..40, 8..8] {
            free.give(part);
            assert_eq!((free.0.first(), free.0.len()), (Some(&(16..32)), 1));
        }
    }

    proptest! {
        // What two have at once is code of one that the other executes; what nobody has is lost.
        #[test]
        fn each_byte_is_free_or_has_one_owner(
            steps in proptest::collection::vec((1_u64..12, any::<Option<u8>>()), 0..400),
        ) {
            const END: u64 = 512;
            let mut free = FreeList::new(0..END);
            let mut taken: Vec<Range<u64>> = Vec::new();
            for (words, given) in steps {
                if let Some(given) = given.filter(|_| !taken.is_empty()) {
                    let given = taken.swap_remove(usize::from(given) % taken.len());
                    free.give(given);
                } else if let Some(at) = free.take(words * 4) {
                    taken.push(at..at + words * 4);
                } else {
                    prop_assert!(free.0.iter().all(|part| part.end - part.start < words * 4));
                }
                let mut all = [&free.0[..], &taken].concat();
                all.sort_by_key(|part| part.start);
                let bounds = all.iter().map(|part| part.start).chain([END]);
                let ends = [0].into_iter().chain(all.iter().map(|part| part.end));
                prop_assert_eq!(bounds.collect::<Vec<_>>(), ends.collect::<Vec<_>>());
                let apart = free.0.windows(2).all(|pair| pair[0].end < pair[1].start);
                prop_assert!(apart, "{:?}", free);
            }
        }
    }
}
