//! A fake guest: CPUs, tasks, rings and sites in the low 2 GiB of a process.
#![allow(unsafe_code, reason = "runs machine code in this process")]
#![allow(dead_code, reason = "not every test binary uses all of it")]

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use vmtrace_trampolines::Overflow;
use vmtrace_trampolines::layout::{Control, Header, RECORD_SIZE, Record, Ring};

#[cfg_attr(target_arch = "x86_64", path = "x86_64.rs")]
#[cfg_attr(target_arch = "riscv64", path = "riscv64.rs")]
pub(crate) mod arch;

use arch::Addressing;

/// Bytes of what belongs to a CPU, and of all tasks.
const AREA: u64 = 4096;
/// Offset of `pid` in a fake task.
const PID: u64 = 40;
/// Offset of the trampoline in the code page; sites are before it.
const TRAMPOLINE: usize = 1024;
/// Bytes from a site to the next.
const SITE: usize = 16;

pub(crate) struct FakeGuest {
    pub(crate) cpus: u64,
    pub(crate) rings: Vec<Ring>,
    per_cpu: u64,
    tasks: u64,
    code: u64,
}

fn map(len: u64, align: u64, protection: i32) -> u64 {
    // Addresses must survive a sign extension from 32 bits; not every
    // architecture has MAP_32BIT.
    static NEXT: AtomicU64 = AtomicU64::new(0x3000_0000);
    let address = NEXT.fetch_add(len + align, Ordering::Relaxed).next_multiple_of(align);
    // SAFETY: a new anonymous mapping, nothing existing is replaced.
    let mapped = unsafe {
        libc::mmap(
            at(address),
            usize::try_from(len).unwrap(),
            protection,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE,
            -1,
            0,
        )
    };
    assert_eq!(mapped.addr() as u64, address, "no memory in the low 2 GiB");
    address
}

fn at<T>(address: u64) -> *mut T {
    core::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap())
}

impl FakeGuest {
    pub(crate) const SITES: u64 = 8;

    pub(crate) fn new(cpus: u64, stride: u64, addressing: Addressing, overflow: Overflow) -> Self {
        let rw = libc::PROT_READ | libc::PROT_WRITE;
        let per_cpu = map(AREA * cpus, 4096, rw);
        let tasks = map(AREA, 4096, rw);
        let memory = map(stride * cpus, stride, rw);
        let code = map(4096, 4096, rw | libc::PROT_EXEC);
        let rings: Vec<_> =
            (0..cpus).map(|cpu| Ring::new(memory + cpu * stride, stride).unwrap()).collect();
        for (cpu, ring) in (0..cpus).zip(&rings) {
            // SAFETY: inside the mappings made above, aligned, not shared yet.
            unsafe {
                at::<Control>(arch::control(per_cpu, cpu)).write(ring.control());
                at::<Header>(ring.address()).write(ring.header());
            }
        }
        let guest = Self { cpus, rings, per_cpu, tasks, code };
        let mut text = guest.trampoline(addressing, overflow, stride);
        text.resize(4096 - TRAMPOLINE, 0);
        let mut page = vec![0; TRAMPOLINE];
        for site in 0..usize::try_from(Self::SITES).unwrap() {
            let code = arch::site(TRAMPOLINE - site * SITE);
            page[site * SITE..][..code.len()].copy_from_slice(&code);
        }
        page.extend(text);
        // SAFETY: `code` is 4096 writable bytes.
        unsafe { core::ptr::copy_nonoverlapping(page.as_ptr(), at(code), page.len()) };
        guest
    }

    pub(crate) fn site(&self, site: u64) -> u64 {
        self.code + site % Self::SITES * SITE as u64
    }

    /// What the record of a hit has for a function.
    pub(crate) fn function(&self, site: u64) -> u32 {
        u32::try_from(self.site(site) + arch::SITE_RETURN).unwrap()
    }

    fn word(&self, address: u64) -> &AtomicU64 {
        // SAFETY: inside the mappings of `new`, aligned, only used atomically.
        unsafe { AtomicU64::from_ptr(at(address)) }
    }

    pub(crate) fn head(&self, cpu: u64) -> u64 {
        self.word(arch::control(self.per_cpu, cpu)).load(Ordering::Acquire)
    }

    pub(crate) fn dropped(&self, cpu: u64) -> u64 {
        let ring = &self.rings[usize::try_from(cpu).unwrap()];
        self.word(ring.address() + core::mem::offset_of!(Header, dropped) as u64)
            .load(Ordering::Acquire)
    }

    /// Takes the committed records of `cpu` from `tail` on, as the VMM does.
    pub(crate) fn drain(&self, cpu: u64, tail: &mut u64, mut record: impl FnMut(Record)) {
        let ring = self.rings[usize::try_from(cpu).unwrap()];
        let head = self.head(cpu);
        assert!(ring.is_position(head), "head {head:#x}");
        while *tail != head && ring.count(*tail) < ring.count(head) {
            let slot = ring.slot(*tail);
            let address = ring.address() + ring.offset(slot);
            // SAFETY: a slot inside the ring, aligned for its fields.
            let commit = unsafe {
                AtomicU32::from_ptr(at(address + core::mem::offset_of!(Record, function) as u64))
            };
            if commit.load(Ordering::Acquire) == 0 {
                break;
            }
            // SAFETY: committed: no trampoline writes it until room grows.
            record(unsafe { at::<Record>(address).read_volatile() });
            commit.store(0, Ordering::Relaxed);
            *tail = slot + RECORD_SIZE as u64;
        }
        self.word(ring.address() + core::mem::offset_of!(Header, room) as u64)
            .store(ring.room(*tail), Ordering::Release);
    }
}
