//! The annex for another kernel.

use super::{Counters, PAGE};
use crate::tracer::annex::{SIZE, WITH_TABLES};
use crate::tracer::error::TraceError;
use std::ops::Range;
use vm_memory::{Bytes, VolatileSlice};

impl Counters {
    /// Makes the annex what it was before it was installed: programs, rings and tables are gone. To be called
    /// when the kernel that used them has left to another one, and what they say was taken. Pages in which
    /// nothing was written stay without memory. Everything in the annex begins and ends with a page.
    ///
    /// # Errors
    /// When the annex is smaller than what was made in it.
    pub fn wipe(&self) -> Result<(), TraceError> {
        let memory = self.memory.slice();
        let tables = SIZE..SIZE + self.used;
        let stops = self.stops.map(|stops| SIZE + stops..SIZE + stops + PAGE);
        // Rings that have memory of their own.
        let far = WITH_TABLES..(memory.len() as u64).max(WITH_TABLES);
        for range in [0..SIZE, tables, far].into_iter().chain(stops) {
            clear(&memory, range)?;
        }
        Ok(())
    }
}

pub(super) fn clear(memory: &VolatileSlice<'_>, range: Range<u64>) -> Result<(), TraceError> {
    const LEN: usize = 4096;
    let (mut page, mut at) = ([0; LEN], range.start);
    while at < range.end {
        let place = usize::try_from(at).map_err(|_| TraceError::Annex)?;
        // What is behind the range is somebody else's.
        let len = usize::try_from(range.end - at).map_or(LEN, |left| left.min(LEN));
        let Some(page) = page.get_mut(..len) else { break };
        memory.read_slice(page, place).map_err(|_| TraceError::Annex)?;
        if page.iter().any(|byte| *byte != 0) {
            page.fill(0);
            memory.write_slice(page, place).map_err(|_| TraceError::Annex)?;
        }
        at += PAGE;
    }
    Ok(())
}

const _: () =
    assert!(SIZE.is_multiple_of(PAGE) && WITH_TABLES.is_multiple_of(PAGE) && PAGE == 4096);
