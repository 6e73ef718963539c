//! Tables of marks: calls that have gone on in functions whose own calls are not traced.

use super::{Counters, Keeper};
use crate::tracer::error::TraceError;
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

    /// Where programs find them.
    #[must_use]
    pub fn marks(&self, keeper: Keeper) -> Option<Marks> {
        let offset = self.marks.get(&keeper)?;
        Some(Marks { address: self.area.address.wrapping_add(*offset) })
    }
}
