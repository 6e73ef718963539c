//! The machine's memory as the tracer wants it.

use crate::machine::Annex;
use crate::tracer::{Guest, GuestError, annex};
use std::borrow::Borrow;
use std::sync::atomic::{AtomicU64, Ordering};
use vm_memory::{
    GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, VolatileMemory,
    VolatileSlice,
};

/// The RAM of a machine, borrowed or not.
pub(super) struct Ram<M>(pub(super) M);

impl<M: Borrow<GuestMemoryMmap>> Ram<M> {
    /// So many bytes from guest-physical `address`, of one region. (The generic accessors
    /// of guest memory, which may cross regions, take ten times the instructions: patching
    /// every site is 250,000 accesses.)
    fn slice(&self, address: u64, len: usize) -> Result<VolatileSlice<'_>, GuestError> {
        let region = self.0.borrow().find_region(GuestAddress(address));
        region
            .and_then(|region| {
                let offset = usize::try_from(address - region.start_addr().0).ok()?;
                VolatileMemory::get_slice(&**region, offset, len).ok()
            })
            .ok_or(GuestError::NoRam(address))
    }
}

impl<M: Borrow<GuestMemoryMmap>> Guest for Ram<M> {
    fn read(&self, address: u64, out: &mut [u8]) -> Result<(), GuestError> {
        self.slice(address, out.len())?.copy_to(out);
        Ok(())
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), GuestError> {
        self.slice(address, bytes.len())?.copy_from(bytes);
        Ok(())
    }

    fn write_u64(&self, address: u64, word: u64) -> Result<(), GuestError> {
        let slice = self.slice(address, 8)?;
        let cell = slice.get_atomic_ref::<AtomicU64>(0).map_err(|_| GuestError::NoRam(address))?;
        cell.store(word.to_le(), Ordering::Release);
        Ok(())
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
