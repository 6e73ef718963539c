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
