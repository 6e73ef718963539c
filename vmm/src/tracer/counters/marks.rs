//! Tables of marks: calls that have gone on in functions whose own calls are not traced.

use super::{Counters, Keeper};
use crate::tracer::error::TraceError;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use vm_memory::Bytes as _;
use vmtrace_trampolines::marks::Marks;

impl Counters {
    /// Makes room for somebody's marks, if there is none yet.
    ///
    /// # Errors
    /// When there is not so much.
    pub fn make_marks(&mut self, keeper: Keeper) -> Result<(), TraceError> {
        if !self.marks.contains_key(&keeper) {
            let offset = self.room(Marks::SIZE).ok_or(TraceError::Counters(self.vcpus))?;
            self.marks.insert(keeper, offset);
        }
        Ok(())
    }

    /// Calls of these that go on in these functions (run-time addresses) by a jump through a pointer are marked from then
    /// on, those of nobody else; but where two functions share a place only those of the first. Without `all` none are that
    /// were not before.
    pub fn mark_those_to(&self, targets: &BTreeMap<Keeper, Vec<u64>>, all: bool) {
        let memory = self.memory.slice();
        for (keeper, offset) in &self.marks {
            let mut wanted = vec![0; usize::try_from(Marks::TARGET_PLACES).unwrap_or(0)];
            for &target in targets.get(keeper).into_iter().flatten() {
                let place = usize::try_from(Marks::target_place(target)).unwrap_or(usize::MAX);
                if let Some(word) = wanted.get_mut(place).filter(|word| **word == 0) {
                    *word = target;
                }
            }
            let first = super::SIZE + offset + Marks::TARGETS;
            for (at, wanted) in (first..).step_by(8).zip(wanted) {
                // It is memory of the annex, as the tables are.
                let Ok(at) = usize::try_from(at) else { break };
                let found: u64 = memory.load(at, Ordering::Relaxed).unwrap_or_default();
                let word = if all || found == wanted { wanted } else { 0 };
                if word != found {
                    let _ = memory.store(word, at, Ordering::Relaxed);
                }
            }
        }
    }

    /// Where programs find them.
    #[must_use]
    pub fn marks(&self, keeper: Keeper) -> Option<Marks> {
        let offset = self.marks.get(&keeper)?;
        Some(Marks { address: self.area.address.wrapping_add(*offset) })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Area, SIZE};
    use super::*;
    use crate::tracer::annex::Memory;
    use std::sync::Arc;
    use vm_memory::{MmapRegion, VolatileMemory as _, VolatileSlice};

    struct Annex(MmapRegion);

    impl Memory for Annex {
        fn slice(&self) -> VolatileSlice<'_> {
            self.0.as_volatile_slice()
        }

        fn guest_address(&self) -> u64 {
            0
        }
    }

    // A function that stands there while its ends are not looked at leaves marks, which end others' calls; one that does not has
    // calls without an end.
    #[test]
    fn functions_stand_in_the_tables_of_those_whose_calls_go_on_there() {
        const LEN: u64 = 4 << 20;
        const FIRST: u64 = 0xffff_ffff_a100_0010;
        let region: MmapRegion = MmapRegion::new(usize::try_from(SIZE + LEN).unwrap()).unwrap();
        let memory: Arc<dyn Memory> = Arc::new(Annex(region));
        let area = Area { address: 0xffff_ffff_c000_0000, len: LEN };
        let mut counters = Counters::new(&memory, area, 1, false);
        let [one, two, late] = [1, 2, 3].map(Keeper::Tracer);
        for keeper in [one, two] {
            counters.make_marks(keeper).unwrap();
        }
        let place = Marks::target_place(FIRST);
        let same = (1..).map(|number| FIRST + 16 * number);
        let second = { same }.find(|&it| Marks::target_place(it) == place).unwrap();
        let third = FIRST + 16;
        assert_ne!(Marks::target_place(third), place);
        // All words, from those of the tables of functions alone.
        let found = |counters: &Counters, keeper: Keeper| -> Vec<u64> {
            let start = SIZE + counters.marks(keeper).unwrap().address - area.address;
            let word = |at: u64| -> u64 {
                memory
                    .slice()
                    .load(usize::try_from(start + at).unwrap(), Ordering::Relaxed)
                    .unwrap()
            };
            let marks = (0..Marks::TARGETS).step_by(8).filter(|&at| word(at) != 0).count();
            assert_eq!(marks, 0, "no mark is touched");
            let targets = (Marks::TARGETS..Marks::SIZE).step_by(8).map(word);
            targets.filter(|&word| word != 0).collect()
        };
        let sorted = |mut all: Vec<u64>| {
            all.sort_unstable();
            all
        };
        let of = |lists: &[(Keeper, &[u64])]| -> BTreeMap<Keeper, Vec<u64>> {
            lists.iter().map(|&(keeper, list)| (keeper, list.to_vec())).collect()
        };
        counters.mark_those_to(&of(&[(one, &[FIRST, third]), (late, &[FIRST])]), true);
        assert_eq!(sorted(found(&counters, one)), [FIRST, third]);
        assert!(found(&counters, two).is_empty());
        // What is new waits for its ends; what is old goes before they do.
        let next = of(&[(one, &[second, third]), (two, &[FIRST])]);
        counters.mark_those_to(&next, false);
        assert_eq!((found(&counters, one), found(&counters, two)), (vec![third], vec![]));
        counters.mark_those_to(&next, true);
        assert_eq!(sorted(found(&counters, one)), sorted(vec![second, third]));
        assert_eq!(found(&counters, two), [FIRST]);
        // Of two that share a place, the one that was there first.
        counters.mark_those_to(&of(&[(one, &[second, FIRST])]), true);
        assert_eq!((found(&counters, one), found(&counters, two)), (vec![second], vec![]));
        counters.make_marks(late).unwrap();
        assert!(found(&counters, late).is_empty());
        counters.mark_those_to(&of(&[(late, &[FIRST])]), true);
        assert_eq!((found(&counters, one), found(&counters, late)), (vec![], vec![FIRST]));
    }
}
