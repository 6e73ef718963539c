//! Tables that tell how deep calls are nested.

use super::wipe::clear;
use super::{Counters, Keeper};
use crate::tracer::annex::SIZE;
use crate::tracer::error::TraceError;
use vmtrace_trampolines::histogram::Calls;
use vmtrace_trampolines::nesting::Nesting;

impl Counters {
    /// Makes room for what tells how somebody's calls are nested, to this depth, if there is none yet.
    ///
    /// # Errors
    /// When there is not so much.
    pub fn make_nests(&mut self, keeper: Keeper, depth: Option<u8>) -> Result<(), TraceError> {
        if self.nests.get(&keeper).is_none_or(|&(known, _)| known != depth) {
            let offset = self.room(Nesting::size(depth)).ok_or(TraceError::Counters(self.vcpus))?;
            self.nests.insert(keeper, (depth, offset));
        }
        Ok(())
    }

    /// Where programs find that.
    #[must_use]
    pub fn nests(&self, keeper: Keeper, depth: Option<u8>) -> Option<u64> {
        let &(_, offset) = self.nests.get(&keeper).filter(|&&(known, _)| known == depth)?;
        Some(self.area.address.wrapping_add(offset))
    }

    /// How many calls of somebody's roots found the row of their stack in use; counted from 0 again.
    pub fn take_unrooted(&mut self, keeper: Keeper) -> u64 {
        let Some(&(_, offset)) = self.nests.get(&keeper) else { return 0 };
        self.take_word(offset + Nesting::CROWDED)
    }

    /// No call is known to be open any more. All vCPUs are paused.
    pub(super) fn begin_nests(&self, keeper: Keeper) {
        let Some(&(depth, offset)) = self.nests.get(&keeper) else { return };
        let (from, len) = (SIZE + offset, Nesting::size(depth));
        // All but what is counted, which is the first page's beginning: it is memory of the annex, as the tables are.
        let memory = self.memory.slice();
        let _ = clear(&memory, from + Nesting::ROWS..from + len);
        // Those ends are not looked for any more.
        if let Some(&open) = self.open.get(&keeper) {
            let from = SIZE + open;
            let _ = clear(&memory, from + Calls::PLACES..from + Calls::SIZE);
        }
    }
}
