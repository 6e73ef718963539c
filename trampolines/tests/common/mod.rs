//! A fake guest: per-CPU areas, rings and sites in the low 2 GiB of a process.
#![allow(unsafe_code, reason = "runs machine code in this process")]
#![allow(dead_code, reason = "not every test binary uses all of it")]

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use vmtrace_trampolines::layout::{Control, Header, RECORD_SIZE, Record, Ring};
use vmtrace_trampolines::{
    Fixup,
    x86_64::{Addressing, Overflow, entry},
};

/// Offsets in a fake per-CPU area.
const CURRENT: u64 = 0;
const CPU_NUMBER: u64 = 8;
const CONTROL: u64 = 64;
const AREA: u64 = 4096;
/// Offset of `pid` in a fake task.
const PID: u64 = 40;

pub(crate) struct FakeGuest {
    pub(crate) cpus: u64,
    pub(crate) rings: Vec<Ring>,
    per_cpu: u64,
    tasks: u64,
    code: u64,
}

fn map(len: u64, align: u64, protection: i32) -> u64 {
    let wanted = usize::try_from(len + align).unwrap();
    // SAFETY: a new anonymous mapping, nothing existing is replaced.
    let address = unsafe {
        libc::mmap(
            core::ptr::null_mut(),
            wanted,
            protection,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_32BIT,
            -1,
            0,
        )
    };
    assert_ne!(address, libc::MAP_FAILED, "no memory in the low 2 GiB");
    (address.addr() as u64).next_multiple_of(align)
}

pub(crate) fn set_gs(base: u64) {
    const ARCH_SET_GS: i32 = 0x1001;
    // SAFETY: gs is unused by Rust and glibc on x86-64.
    let result = unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_SET_GS, base) };
    assert_eq!(result, 0);
}

fn at<T>(address: u64) -> *mut T {
    core::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap())
}

impl FakeGuest {
    pub(crate) const SITES: u64 = 8;

    pub(crate) fn new(cpus: u64, stride: u64, addressing: Addressing, overflow: Overflow) -> Self {
        let rw = libc::PROT_READ | libc::PROT_WRITE;
        let per_cpu = map(AREA * cpus, 4096, rw);
        let tasks = map(4096, 4096, rw);
        let memory = map(stride * cpus, stride, rw);
        let code = map(4096, 4096, rw | libc::PROT_EXEC);
        let rings: Vec<_> =
            (0..cpus).map(|cpu| Ring::new(memory + cpu * stride, stride).unwrap()).collect();
        let table = per_cpu + CONTROL + 64;
        for (cpu, ring) in (0..cpus).zip(&rings) {
            let area = per_cpu + cpu * AREA;
            // SAFETY: all inside the mappings made above, aligned, not shared yet.
            unsafe {
                at::<Control>(area + CONTROL).write(ring.control());
                at::<Header>(ring.address()).write(ring.header());
                at::<u64>(area + CURRENT).write(tasks);
                at::<u64>(area + CPU_NUMBER).write(cpu);
                at::<u64>(table + 8 * cpu).write(area + CONTROL);
            }
        }
        let values = [
            // gs is the area's address; the block lies CONTROL bytes into it.
            (Fixup::ControlFromGs, CONTROL),
            (Fixup::Current, CURRENT),
            (Fixup::Pid, PID),
            (Fixup::RingMask, stride.wrapping_neg()),
            (Fixup::CpuNumber, CPU_NUMBER),
            (Fixup::CpuCount, cpus),
            (Fixup::ControlTable, table),
        ];
        let mut text = vec![0xcc_u8; 4096];
        entry(addressing, overflow).instantiate(&mut text[1024..], &values).unwrap();
        for site in 0..Self::SITES {
            // call stub; ret
            let offset = usize::try_from(site * 16).unwrap();
            let relative = i32::try_from(1024 - (offset + 5)).unwrap();
            text[offset] = 0xe8;
            text[offset + 1..offset + 5].copy_from_slice(&relative.to_le_bytes());
            text[offset + 5] = 0xc3;
        }
        // SAFETY: `code` is 4096 writable bytes.
        unsafe { core::ptr::copy_nonoverlapping(text.as_ptr(), at(code), text.len()) };
        Self { cpus, rings, per_cpu, tasks, code }
    }

    /// What gs holds on `cpu`.
    pub(crate) fn gs(&self, cpu: u64) -> u64 {
        self.per_cpu + cpu * AREA
    }

    pub(crate) fn set_current(&self, cpu: u64, pid: u32) -> u64 {
        let task = self.tasks + u64::from(pid) % 16 * 64;
        // SAFETY: inside the mappings of `new`.
        unsafe { at::<u32>(task + PID).write_volatile(pid) };
        // SAFETY: as above.
        unsafe { at::<u64>(self.gs(cpu) + CURRENT).write_volatile(task) };
        task
    }

    pub(crate) fn site(&self, site: u64) -> u64 {
        self.code + site % Self::SITES * 16
    }

    /// Calls the traced function `site` on the CPU whose gs is set.
    pub(crate) fn hit(&self, site: u64) {
        // SAFETY: a C ABI function without arguments was written there.
        let function: extern "C" fn() = unsafe { core::mem::transmute(at::<u8>(self.site(site))) };
        function();
    }

    fn word(&self, address: u64) -> &AtomicU64 {
        // SAFETY: inside the mappings of `new`, aligned, only used atomically.
        unsafe { AtomicU64::from_ptr(at(address)) }
    }

    pub(crate) fn head(&self, cpu: u64) -> u64 {
        self.word(self.gs(cpu) + CONTROL).load(Ordering::Acquire)
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
