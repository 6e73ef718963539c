//! The machine's memory as the tracer wants it.

use crate::machine::Annex;
use crate::tracer::{Guest, GuestError, annex};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap, VolatileSlice};

/// The RAM of a machine.
pub(super) struct Ram<'a>(pub(super) &'a GuestMemoryMmap);

impl Guest for Ram<'_> {
    fn read(&self, address: u64, out: &mut [u8]) -> Result<(), GuestError> {
        self.0.read_slice(out, GuestAddress(address)).map_err(|_| GuestError::NoRam(address))
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), GuestError> {
        self.0.write_slice(bytes, GuestAddress(address)).map_err(|_| GuestError::NoRam(address))
    }
}

/// The annex of a machine.
pub(super) struct AnnexMemory(pub(super) Annex);

impl annex::Memory for AnnexMemory {
    fn slice(&self) -> VolatileSlice<'_> {
        self.0.slice()
    }

    fn guest_address(&self) -> u64 {
        self.0.gpa()
    }
}
