//! Implements the tracer's interface to guest memory for a machine's memory.

use super::guest::{Guest, GuestError};
use std::borrow::Borrow;
use std::sync::atomic::{AtomicU64, Ordering};
use vm_memory::{
    GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, VolatileMemory,
    VolatileRef, VolatileSlice,
};

/// The RAM of a machine, borrowed or not.
#[derive(Clone, Copy, Debug)]
pub struct Ram<M>(pub M);

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

/// The first and the last four of four to eight bytes, which may overlap: a site is copied in two
/// moves. (Copies of volatile slices that are not aligned go byte by byte.)
fn half<'a>(slice: &'a VolatileSlice<'_>) -> Option<[VolatileRef<'a, [u8; 4]>; 2]> {
    let last = slice.len().checked_sub(4).filter(|&last| last <= 4)?;
    Some([slice.get_ref(0).ok()?, slice.get_ref(last).ok()?])
}

impl<M: Borrow<GuestMemoryMmap>> Guest for Ram<M> {
    fn read(&self, address: u64, out: &mut [u8]) -> Result<(), GuestError> {
        let slice = self.slice(address, out.len())?;
        match half(&slice) {
            None => {
                slice.copy_to(out);
            }
            Some([first, last]) => {
                if let Some(out) = out.first_chunk_mut() {
                    *out = first.load();
                }
                if let Some(out) = out.last_chunk_mut() {
                    *out = last.load();
                }
            }
        }
        Ok(())
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), GuestError> {
        let slice = self.slice(address, bytes.len())?;
        match half(&slice).zip(bytes.first_chunk().zip(bytes.last_chunk())) {
            None => slice.copy_from(bytes),
            Some(([first, last], (&front, &back))) => {
                first.store(front);
                last.store(back);
            }
        }
        Ok(())
    }

    fn run(&self, address: u64) -> Option<(u64, VolatileSlice<'_>)> {
        let region = self.0.borrow().find_region(GuestAddress(address))?;
        let memory = VolatileMemory::get_slice(&**region, 0, region.size()).ok()?;
        Some((region.start_addr().0, memory))
    }

    fn write_u64(&self, address: u64, word: u64) -> Result<(), GuestError> {
        let slice = self.slice(address, 8)?;
        let cell = slice.get_atomic_ref::<AtomicU64>(0).map_err(|_| GuestError::NoRam(address))?;
        cell.store(word.to_le(), Ordering::Release);
        Ok(())
    }
}
