//! Guest memory: RAM and the annex, and their memory slots in KVM.
#![allow(unsafe_code)]

use std::io;
use std::sync::Arc;

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use vm_memory::{
    GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, MmapRegion,
    VolatileMemory, VolatileSlice,
};

use super::{MAX_MEMORY, MIN_MEMORY, MachineError, arch};

/// Guest-physical memory outside the guest's RAM map: the guest has it only where its page tables
/// are made to point to it.
///
/// A cheap handle: clones are the same memory, which lives as long as any of them.
#[derive(Clone)]
pub struct Annex {
    gpa: u64,
    region: Arc<MmapRegion>,
}

impl Annex {
    /// Guest-physical address of its first byte, 2 MiB aligned.
    #[must_use]
    pub fn gpa(&self) -> u64 {
        self.gpa
    }

    /// Its size in bytes, a multiple of 2 MiB.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.region.size() as u64
    }

    /// Always false; for completeness.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All of it. The guest may write to it at any time.
    #[must_use]
    pub fn slice(&self) -> VolatileSlice<'_> {
        self.region.as_volatile_slice()
    }

    /// Where this process sees its first byte, valid as long as `self` or a clone of it lives.
    #[must_use]
    pub fn host(&self) -> *mut u8 {
        self.region.as_ptr()
    }
}

/// Reserves the guest's RAM; no page of it exists before it is touched.
pub(super) fn create_ram(size: u64) -> Result<GuestMemoryMmap, MachineError> {
    if !(MIN_MEMORY..=MAX_MEMORY).contains(&size) || !size.is_multiple_of(4096) {
        return Err(MachineError::MemorySize(size));
    }
    let mut ranges = Vec::new();
    for (start, length) in arch::ram_ranges(size) {
        let length = usize::try_from(length).map_err(|_| MachineError::MemorySize(size))?;
        ranges.push((GuestAddress(start), length));
    }
    GuestMemoryMmap::from_ranges(&ranges)
        .map_err(|e| MachineError::MemoryReserve { bytes: size, source: io::Error::other(e) })
}

/// Reserves the annex; `None` for a size of 0.
pub(super) fn create_annex(size: u64) -> Result<Option<Annex>, MachineError> {
    if size == 0 {
        return Ok(None);
    }
    let error = MachineError::AnnexSize { asked: size, max: arch::MAX_ANNEX };
    if size > arch::MAX_ANNEX || !size.is_multiple_of(2 << 20) {
        return Err(error);
    }
    let length = usize::try_from(size).map_err(|_| error)?;
    let region = MmapRegion::new(length)
        .map_err(|e| MachineError::MemoryReserve { bytes: size, source: io::Error::other(e) })?;
    Ok(Some(Annex { gpa: arch::ANNEX_BASE, region: Arc::new(region) }))
}

/// Shows RAM and annex to the guest. Both must outlive `vm`'s last vCPU.
pub(super) fn register(
    vm: &VmFd,
    ram: &GuestMemoryMmap,
    annex: Option<&Annex>,
) -> Result<(), MachineError> {
    let ram = ram.iter().map(|region| {
        (region.start_addr().0, region.len(), region.as_volatile_slice().map(host_address))
    });
    let annex = annex.map(|annex| (annex.gpa, annex.len(), Ok(host_address(annex.slice()))));
    for (slot, (gpa, length, host)) in (0..).zip(ram.chain(annex)) {
        let host =
            host.map_err(|source| MachineError::GuestMemory { what: "memory slot", source })?;
        let region = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: gpa,
            memory_size: length,
            userspace_addr: host,
        };
        // SAFETY: the range is a mapping of ours of exactly this length, which the machine keeps
        // until its vCPUs are gone, and which Rust only sees through volatile accesses.
        unsafe { vm.set_user_memory_region(region) }
            .map_err(MachineError::kvm("give the guest its memory"))?;
    }
    Ok(())
}

fn host_address(slice: VolatileSlice<'_>) -> u64 {
    slice.ptr_guard_mut().as_ptr() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_checked() {
        assert!(matches!(create_ram(0), Err(MachineError::MemorySize(0))));
        assert!(matches!(create_ram(MIN_MEMORY + 1), Err(MachineError::MemorySize(_))));
        assert!(matches!(create_ram(1 << 50), Err(MachineError::MemorySize(_))));
        assert!(create_annex(0).unwrap().is_none());
        assert!(matches!(create_annex(4096), Err(MachineError::AnnexSize { .. })));
        assert!(matches!(create_annex(1 << 40), Err(MachineError::AnnexSize { .. })));
    }

    #[test]
    fn annex_is_one_memory() {
        let annex = create_annex(2 << 20).unwrap().unwrap();
        assert_eq!((annex.gpa() % (2 << 20), annex.len()), (0, 2 << 20));
        annex.slice().get_ref::<u64>(8).unwrap().store(7);
        assert_eq!(annex.clone().slice().get_ref::<u64>(8).unwrap().load(), 7);
    }
}
