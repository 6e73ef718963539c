//! Where programs find in a guest what they need beside rings.

use super::{Measure, Nested, Tally};
use crate::kernel::Kernel;
use crate::tracer::counters::{Counters, Keeper};
use crate::tracer::readable;
use vmtrace_trampolines::Counts;
use vmtrace_trampolines::histogram::{Calls, Ended};
use vmtrace_trampolines::marks::Marks;
use vmtrace_trampolines::nesting::Nesting;

/// `THREAD_SIZE` of kernels that do not tell it: 16 KiB, as both architectures have it unless they are built with KASAN
/// (arch/x86/include/asm/page_64_types.h, arch/riscv/include/asm/thread_info.h).
const USUAL_STACK: u64 = 16 << 10;

/// Tells it.
pub(in crate::tracer) trait Find {
    /// Somebody's counters of a tally.
    fn counts(&self, tally: Tally, keeper: Keeper) -> Option<Counts>;

    /// Somebody's open calls.
    fn calls(&self, keeper: Keeper) -> Option<Calls>;

    /// Somebody's marks.
    fn marks(&self, keeper: Keeper) -> Option<Marks>;

    /// What tells how somebody's calls are nested.
    fn nesting(&self, keeper: Keeper, nested: Nested) -> Option<Nesting>;
}

/// The tables of a guest.
pub(in crate::tracer) struct Tables<'a> {
    pub(in crate::tracer) counters: &'a Counters,
    pub(in crate::tracer) kernel: &'a Kernel,
    /// By how much the kernel has been moved.
    pub(in crate::tracer) slide: u64,
    pub(in crate::tracer) clock_hz: u64,
    pub(in crate::tracer) trap: &'static [u8],
}

impl Find for Tables<'_> {
    fn counts(&self, tally: Tally, keeper: Keeper) -> Option<Counts> {
        let at = |table| self.counters.find(table, self.slide);
        match tally {
            Tally::Table(table) => at(table).map(Counts::Up),
            Tally::Callers(table) => self.counters.find_callers(table).map(Counts::ByCaller),
            Tally::Sort(table, sorted) => Some(Counts::Sort(at(table)?, sorted)),
            Tally::Begin(table) => Some(Counts::Begin(Some(at(table)?), self.calls(keeper)?)),
            Tally::Open(_) => Some(Counts::Begin(None, self.calls(keeper)?)),
            Tally::Untold { .. } => Some(Counts::Untold(self.calls(keeper)?)),
            Tally::End(measure) => {
                let ended = match measure {
                    Measure::Duration => Ended::duration(self.clock_hz)?,
                    Measure::Value(bytes, signed) => Ended::Value { bytes, signed },
                };
                Some(Counts::End(self.calls(keeper)?, ended))
            }
            Tally::Stop { number, .. } => {
                let counter = self.counters.find_stop(number).filter(|_| !self.trap.is_empty())?;
                Some(Counts::Down { number, counter, trap: self.trap })
            }
            Tally::Mark(going) => Some(Counts::Mark(self.marks(keeper)?, going)),
            Tally::Nothing => Some(Counts::Nothing),
            Tally::Forget => Some(Counts::Forget),
            Tally::Follow { argument, pid, inside } => {
                Some(Counts::Follow { argument, pid, inside })
            }
        }
    }

    fn calls(&self, keeper: Keeper) -> Option<Calls> {
        self.counters.calls(keeper)
    }

    fn marks(&self, keeper: Keeper) -> Option<Marks> {
        self.counters.marks(keeper)
    }

    fn nesting(&self, keeper: Keeper, Nested { depth, call }: Nested) -> Option<Nesting> {
        let address = self.counters.nests(keeper, depth)?;
        let stack = readable::stack_size(self.kernel).unwrap_or(USUAL_STACK);
        let stack_bits = u8::try_from(stack.trailing_zeros()).ok()?;
        Some(Nesting { address, stack_bits, depth, call })
    }
}
