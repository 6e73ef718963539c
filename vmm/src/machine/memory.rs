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

use super::{Far, MAX_MEMORY, MIN_MEMORY, MachineError, arch};

/// Bytes of a huge page.
const HUGE: u64 = 2 << 20;
const GIB: u64 = 1 << 30;

/// Guest-physical memory outside the guest's RAM map: the guest has it only where its page tables
/// are made to point to it.
///
/// A cheap handle: clones are the same memory, which lives as long as any of them.
#[derive(Clone)]
pub struct Annex {
    gpa: u64,
    /// Its size without what is far.
    len: usize,
    /// Guest-physical address of what is far, and its size.
    far: Option<(u64, u64)>,
    /// Where it begins in `region`.
    skip: usize,
    region: Arc<MmapRegion>,
}

impl Annex {
    /// Guest-physical address of its first byte, 2 MiB aligned.
    #[must_use]
    pub fn gpa(&self) -> u64 {
        self.gpa
    }

    /// The size in bytes of its first part, a multiple of 2 MiB.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Guest-physical address and size of its second part, if it has one.
    #[must_use]
    pub fn far(&self) -> Option<(u64, u64)> {
        self.far
    }

    /// Always false; for completeness.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All of it, one part behind the other. The guest may write to it at any time.
    #[must_use]
    pub fn slice(&self) -> VolatileSlice<'_> {
        let far = self.far.map_or(0, |(_, size)| usize::try_from(size).unwrap_or(usize::MAX));
        let all = self.region.as_volatile_slice();
        // Both were added when it was made.
        all.subslice(self.skip, self.len + far).unwrap_or(all)
    }

    /// Its parts as slots of KVM: guest-physical address, size, where they are in this process.
    fn slots(&self) -> impl Iterator<Item = (u64, u64, u64)> {
        let host = host_address(self.slice());
        let far = self.far.map(|(gpa, size)| (gpa, size, host + self.len()));
        [(self.gpa, self.len(), host)].into_iter().chain(far)
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

/// Reserves the annex of a machine with so many bytes of RAM; `None` for a size of 0.
pub(super) fn create_annex(
    size: u64,
    far: Option<Far>,
    ram: u64,
) -> Result<Option<Annex>, MachineError> {
    if size == 0 {
        return Ok(None);
    }
    let error = || MachineError::AnnexSize { asked: size, max: arch::MAX_ANNEX };
    if size > arch::MAX_ANNEX || !size.is_multiple_of(HUGE) {
        return Err(error());
    }
    let len = usize::try_from(size).map_err(|_| error())?;
    let reserve = |bytes: u64| {
        let length = usize::try_from(bytes).map_err(|_| error())?;
        MmapRegion::new(length)
            .map_err(|e| MachineError::MemoryReserve { bytes, source: io::Error::other(e) })
    };
    let Some(Far { size: more, offset }) = far else {
        let region = Arc::new(reserve(size)?);
        return Ok(Some(Annex { gpa: arch::ANNEX_BASE, len, far: None, skip: 0, region }));
    };
    if !(more | offset).is_multiple_of(HUGE) || offset >= GIB {
        return Err(MachineError::FarSize(more));
    }
    // All of it will be written to: better to say so now than to be killed later.
    if let Some(available) = available().filter(|&available| more > available) {
        return Err(MachineError::FarMemory { asked: more, available });
    }
    let region = reserve(size + more + HUGE)?;
    // As the guest's addresses are, so that a huge page here is one for the guest, too.
    let host = region.as_ptr() as u64;
    let skip = usize::try_from(host.next_multiple_of(HUGE) - host).map_err(|_| error())?;
    let gpa = arch::ram_ranges(ram).iter().map(|(start, length)| start + length).max();
    let gpa = gpa.unwrap_or(0).max(4 * GIB).next_multiple_of(GIB) + offset;
    let annex = Annex {
        gpa: arch::ANNEX_BASE,
        len,
        far: Some((gpa, more)),
        skip,
        region: Arc::new(region),
    };
    if let Ok(part) = annex.slice().offset(len) {
        let advise = |advice| {
            // SAFETY: a mapping of ours; what it holds stays as it is.
            let done =
                unsafe { libc::madvise(part.ptr_guard_mut().as_ptr().cast(), part.len(), advice) };
            if done != 0 {
                // Of a kernel that cannot: it works all the same.
                log::debug!("advice {advice} for the rings: {}", io::Error::last_os_error());
            }
        };
        advise(libc::MADV_HUGEPAGE);
        // Now, and not while the guest stands still for it.
        advise(libc::MADV_POPULATE_WRITE);
    }
    Ok(Some(annex))
}

/// Bytes of memory that this machine could still give, if it says.
fn available() -> Option<u64> {
    available_in(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

fn available_in(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
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
    let annex = annex.into_iter().flat_map(Annex::slots);
    let annex = annex.map(|(gpa, length, host)| (gpa, length, Ok(host)));
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
        let annex = |size| create_annex(size, None, MIN_MEMORY);
        assert!(annex(0).unwrap().is_none());
        assert!(matches!(annex(4096), Err(MachineError::AnnexSize { .. })));
        assert!(matches!(annex(1 << 40), Err(MachineError::AnnexSize { .. })));
        let far = |size, offset| create_annex(HUGE, Some(Far { size, offset }), MIN_MEMORY);
        assert!(matches!(far(4096, 0), Err(MachineError::FarSize(4096))));
        assert!(matches!(far(HUGE, GIB), Err(MachineError::FarSize(_))));
    }

    // The guest's RAM would be written over, or its devices be behind it.
    #[test]
    fn what_is_far_is_behind_all_else() {
        for ram in [MIN_MEMORY, 3 << 30, (5 << 30) + 4096] {
            let far = Some(Far { size: 2 * HUGE, offset: HUGE });
            let annex = create_annex(HUGE, far, ram).unwrap().unwrap();
            let (gpa, size) = annex.far().unwrap();
            assert_eq!((gpa % GIB, size, annex.len()), (HUGE, 2 * HUGE, HUGE));
            let end = arch::ram_ranges(ram).iter().map(|(at, len)| at + len).max().unwrap();
            assert!(gpa >= end.max(4 * GIB));
            assert_eq!(annex.slice().len() as u64, 3 * HUGE);
            let slots: Vec<_> = annex.slots().collect();
            assert_eq!(slots[1].2, slots[0].2 + HUGE);
            assert!(slots.iter().all(|slot| slot.2.is_multiple_of(HUGE)));
        }
    }

    // Who has not enough would be killed in the middle of a run.
    #[test]
    fn more_than_there_is_is_refused() {
        let all = Some(Far { size: 1 << 46, offset: HUGE });
        let error = create_annex(HUGE, all, MIN_MEMORY).err().unwrap();
        assert!(matches!(error, MachineError::FarMemory { .. }), "{error}");
        assert_eq!(available_in("MemTotal: 9 kB\nMemAvailable:   12 kB\n"), Some(12288));
        assert_eq!(available_in("MemTotal: 9 kB\n"), None);
    }

    #[test]
    fn annex_is_one_memory() {
        let annex = create_annex(2 << 20, None, MIN_MEMORY).unwrap().unwrap();
        assert_eq!((annex.gpa() % (2 << 20), annex.len()), (0, 2 << 20));
        annex.slice().get_ref::<u64>(8).unwrap().store(7);
        assert_eq!(annex.clone().slice().get_ref::<u64>(8).unwrap().load(), 7);
    }
}
