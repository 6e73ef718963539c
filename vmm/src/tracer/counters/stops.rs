//! Counters that programs count down: at the call that makes one 0 a vCPU stops.

use super::{COUNTER, Counters, PAGE};
use crate::tracer::annex::SIZE;
use crate::tracer::error::TraceError;
use std::sync::atomic::Ordering;
use vm_memory::Bytes;

/// Most stops of a guest: each has a counter in a page behind all tables.
const STOPS: u64 = PAGE / COUNTER;

impl Counters {
    /// From the start of the area.
    fn stop(&self, number: u16) -> Option<u64> {
        let number = u64::from(number);
        let start = self.stops.filter(|_| number < STOPS)?;
        Some(start + number * COUNTER)
    }

    /// The run-time address of the counter of the stop with this number.
    #[must_use]
    pub fn find_stop(&self, number: u16) -> Option<u64> {
        self.stop(number).map(|offset| self.area.address.wrapping_add(offset))
    }

    /// Lets a vCPU stop at so many calls from now; at 0, at none.
    ///
    /// # Errors
    /// When there is no counter with this number.
    pub fn count_down(&mut self, number: u16, calls: u64) -> Result<(), TraceError> {
        let offset = self.stop(number).ok_or(TraceError::Stops)?;
        let at = usize::try_from(SIZE + offset).map_err(|_| TraceError::Stops)?;
        let stored = self.memory.slice().store(calls, at, Ordering::Relaxed);
        stored.map_err(|_| TraceError::Stops)
    }

    /// How many calls are still to come until a vCPU stops; `None` where there is no counter with this number.
    #[must_use]
    pub fn left(&self, number: u16) -> Option<u64> {
        let at = usize::try_from(SIZE + self.stop(number)?).ok()?;
        let left: u64 = self.memory.slice().load(at, Ordering::Relaxed).ok()?;
        // It counts on below 0.
        Some(left.cast_signed().max(0).cast_unsigned())
    }
}
