//! The annex of a machine as the tracer wants it.

use crate::machine::Annex;
use crate::tracer::annex;
use vm_memory::VolatileSlice;

impl annex::Memory for Annex {
    fn slice(&self) -> VolatileSlice<'_> {
        self.slice()
    }

    fn guest_address(&self) -> u64 {
        self.gpa()
    }

    fn far_guest_address(&self) -> Option<u64> {
        self.far().map(|(address, _)| address)
    }
}
