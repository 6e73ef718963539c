//! What a CPU of the guest runs, as its scheduler keeps it.

use super::image::Image;
use super::members::Members;
use super::{riscv64, x86_64};
use crate::kernel::{Arch, Kernel};

/// The largest number of a task (`PID_MAX_LIMIT`, include/linux/threads.h).
const MAX_PID: u32 = 4 << 20;
/// Counts of preemptions, softirqs, interrupts and NMIs (include/linux/preempt.h). x86-64 has in the last bit whether
/// no other task is to run.
const COUNTS: u32 = 0x7fff_ffff;

/// Where that is found.
#[derive(Clone, Copy, Debug)]
pub struct Scheduling {
    place: Place,
    pid: u64,
    /// Of the flags of the task, and which of them asks for another one.
    flags: u64,
    wanted: u8,
    /// Of the counts of switches (`nvcsw`, `nivcsw`).
    switches: [u64; 2],
}

#[derive(Clone, Copy, Debug)]
enum Place {
    /// From the base of gs: of the task, and of its count of preemptions.
    PerCpu { task: u64, count: u64 },
    /// In the task: of that count.
    InTask { count: u64 },
}

/// A task on a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Running {
    /// Its address.
    pub task: u64,
    /// Its number; 0: the CPU is idle.
    pub pid: u32,
    /// How often it was taken off a CPU.
    pub switches: u64,
    /// Whether it cannot be taken off, or another one waits for its CPU.
    pub is_held: bool,
}

impl Scheduling {
    /// From symbols and the layout of structures; `None` where they do not tell.
    #[must_use]
    pub fn find(kernel: &Kernel, image: &Image) -> Option<Self> {
        let members = Members::of(kernel).ok()?;
        let switches = ["nvcsw", "nivcsw"].map(|member| members.offset("task_struct", member).ok());
        let (place, pid, state) = match kernel.arch() {
            Arch::X86_64 => {
                let context = x86_64::context::Context::find(kernel, image).ok()?;
                let state = context.state?;
                let (task, count) = (context.current, state.preempt_count);
                (Place::PerCpu { task, count }, context.pid, state)
            }
            Arch::Riscv64 => {
                let context = riscv64::context::Context::find(kernel).ok()?;
                let state = context.state?;
                (Place::InTask { count: state.preempt_count }, context.pid, state)
            }
        };
        Some(Self {
            place,
            pid,
            flags: state.flags,
            wanted: kernel.need_resched()?.eager,
            switches: [switches[0]?, switches[1]?],
        })
    }

    /// What a CPU in the kernel runs. `base` is that of gs, on riscv64 `tp`; `read` fills in what is at a run-time
    /// address, which may be any. `None` for what no kernel has there, as in its first instructions after the user's.
    pub fn look(&self, base: u64, read: impl Fn(u64, &mut [u8]) -> Option<()>) -> Option<Running> {
        let word = |address: u64| {
            let mut bytes = [0; 8];
            read(address, &mut bytes)?;
            Some(u64::from_le_bytes(bytes))
        };
        let half = |address: u64| {
            let mut bytes = [0; 4];
            read(address, &mut bytes)?;
            Some(u32::from_le_bytes(bytes))
        };
        let (task, count) = match self.place {
            Place::PerCpu { task, count } => {
                (word(base.wrapping_add(task))?, base.wrapping_add(count))
            }
            Place::InTask { count } => (base, base.wrapping_add(count)),
        };
        let in_task = |offset: u64| task.wrapping_add(offset);
        let pid = half(in_task(self.pid))?;
        if task >> 63 == 0 || pid > MAX_PID {
            return None;
        }
        let [own, others] = self.switches.map(|offset| word(in_task(offset)));
        let wanted = word(in_task(self.flags))?.checked_shr(self.wanted.into())? & 1 != 0;
        Some(Running {
            task,
            pid,
            switches: own?.wrapping_add(others?),
            is_held: wanted || half(count)? & COUNTS != 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tracer::PageTables;
    use std::collections::BTreeMap;

    const BASE: u64 = 0xffff_8880_1f30_0000;
    const TASK: u64 = 0xffff_8880_0400_0000;

    fn look(at: &Scheduling, words: &BTreeMap<u64, u64>) -> Option<Running> {
        at.look(BASE, |address, out| {
            let bytes = words.get(&(address & !7))?.to_le_bytes();
            let from = usize::try_from(address & 7).ok()?;
            out.copy_from_slice(bytes.get(from..from + out.len())?);
            Some(())
        })
    }

    // A count that is read at the wrong place makes a guest that is well one that hangs.
    #[test]
    fn a_task_is_held_while_it_cannot_be_or_should_be_taken_off() {
        let place = Place::PerCpu { task: 0x40, count: 0x4c };
        let at = Scheduling { place, pid: 0x100, flags: 0, wanted: 3, switches: [0x200, 0x208] };
        let all = |count: u64, flags: u64| {
            BTreeMap::from([
                (BASE + 0x40, TASK),
                (BASE + 0x48, count << 32),
                (TASK, flags),
                (TASK + 0x100, 0x1234_0000_0007),
                (TASK + 0x200, 40),
                (TASK + 0x208, 2),
            ])
        };
        let running = Running { task: TASK, pid: 7, switches: 42, is_held: false };
        assert_eq!(look(&at, &all(0, 0)), Some(running));
        // That none is to run, which is no count.
        assert_eq!(look(&at, &all(1 << 31, !8)), Some(running));
        for (count, flags) in [(1, 0), (0x100, 0), (0x1_0000, 0), (0x8000_0001, 0), (0, 8)] {
            let held = Running { is_held: true, ..running };
            assert_eq!(look(&at, &all(count, flags)), Some(held), "{count:#x} {flags:#x}");
        }
        // What is not there, or is none.
        for missing in all(0, 0).into_keys() {
            let mut words = all(0, 0);
            words.remove(&missing);
            assert_eq!(look(&at, &words), None, "{missing:#x}");
        }
        let absurd = |at: u64, word: u64| {
            let mut words = all(0, 0);
            words.insert(at, word);
            words
        };
        assert_eq!(look(&at, &absurd(TASK + 0x100, 5 << 20)), None);
        assert_eq!(look(&at, &absurd(BASE + 0x40, 0x40)), None);
        let of_task = Scheduling { place: Place::InTask { count: 8 }, wanted: 64, ..at };
        assert_eq!(look(&of_task, &all(0, 0)), None, "no such flag");
    }

    #[test]
    fn kernels_tell_where_it_is() {
        for cached in ["x86_64-6.1", "x86_64-6.12", "x86_64-7", "riscv64-6.12", "riscv64-7"] {
            let cache = vmtrace_emulated::cache_dir().expect("no cache directory");
            let path = cache.join("kernels").join(cached).join("vmlinuz");
            let kernel = Kernel::open(&path).unwrap();
            let tables = PageTables::none(kernel.arch());
            let image = Image { slide: 0, physical: 0, tables };
            let found = Scheduling::find(&kernel, &image).unwrap_or_else(|| panic!("{cached}"));
            assert_eq!(found.switches[1], found.switches[0] + 8, "{cached}: {found:?}");
            let is_of_cpu = matches!(found.place, Place::PerCpu { .. });
            assert_eq!(is_of_cpu, kernel.arch() == Arch::X86_64, "{cached}");
        }
    }
}
