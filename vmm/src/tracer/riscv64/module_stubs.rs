//! Which stubs of exits of modules there are.

use crate::kernel::epilogues::Epilogue;
use crate::tracer::edit::SkipReason;
use rustc_hash::FxHashMap;
use std::collections::HashMap;

/// The stubs of exits of modules.
#[derive(Debug, Default)]
pub(super) struct OfModules {
    /// Where in the area the next stub can be, and where all end.
    pub(super) free: u64,
    pub(super) end: u64,
    /// Bytes of relays.
    pub(super) relays: u64,
    /// All that there ever were. A stub depends on nothing but this.
    pub(super) made: HashMap<Epilogue, Way>,
    /// Of each exit that was to be rewritten, by its number, the slot of its stub, or why it was left
    /// alone.
    pub(super) slots: FxHashMap<usize, Result<u64, SkipReason>>,
}

/// From a window on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Way {
    /// Run-time address.
    pub(super) relay: u64,
    /// Offset in the area.
    pub(super) slot: u64,
}

impl OfModules {
    pub(super) fn new((free, end): (u64, u64)) -> Self {
        Self { free, end, ..Self::default() }
    }

    /// Offset in the area of an exit's slot; `None` when it was not to be rewritten.
    pub(super) fn slot(&self, exit: usize) -> Option<Result<u64, SkipReason>> {
        self.slots.get(&exit).copied()
    }
}
