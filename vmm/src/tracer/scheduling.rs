//! What a CPU of the guest runs, as its scheduler keeps it.

use super::image::Image;
use super::members::Members;
use super::{riscv64, x86_64};
use crate::kernel::{Arch, Kernel};

/// The largest number of a task (`PID_MAX_LIMIT`, include/linux/threads.h).
const MAX_PID: u32 = 4 << 20;

/// Where that is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheduling {
    /// From the base of gs (x86-64): of the pointer to the task.
    current: Option<u64>,
    /// In the task: of its number.
    pid: u64,
    /// Of its flags, and which of them says that another one is to run (`TIF_NEED_RESCHED`).
    flags: u64,
    wanted: u8,
    /// Of how often it was taken off a CPU (`nvcsw`, `nivcsw`).
    switches: [u64; 2],
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
    /// Whether another one is to run there.
    pub is_wanted: bool,
}

impl Scheduling {
    /// From symbols and the layout of structures; `None` where they do not tell.
    #[must_use]
    pub fn find(kernel: &Kernel, image: &Image) -> Option<Self> {
        let members = Members::of(kernel).ok()?;
        let of_task = |member| members.offset("task_struct", member).ok();
        let (current, pid, state) = match kernel.arch() {
            Arch::X86_64 => {
                let context = x86_64::context::Context::find(kernel, image).ok()?;
                (Some(context.current), context.pid, context.state?)
            }
            Arch::Riscv64 => {
                let context = riscv64::context::Context::find(kernel).ok()?;
                (None, context.pid, context.state?)
            }
        };
        Some(Self {
            current,
            pid,
            flags: state.flags,
            wanted: kernel.need_resched()?.eager,
            switches: [of_task("nvcsw")?, of_task("nivcsw")?],
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
        let task = match self.current {
            Some(current) => word(base.wrapping_add(current))?,
            None => base,
        };
        let in_task = |offset: u64| task.wrapping_add(offset);
        let mut pid = [0; 4];
        read(in_task(self.pid), &mut pid)?;
        let pid = u32::from_le_bytes(pid);
        if task >> 63 == 0 || pid > MAX_PID {
            return None;
        }
        let [own, others] = self.switches.map(|offset| word(in_task(offset)));
        let is_wanted = word(in_task(self.flags))?.checked_shr(self.wanted.into())? & 1 != 0;
        Some(Running { task, pid, switches: own?.wrapping_add(others?), is_wanted })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tracer::PageTables;
    use std::collections::BTreeMap;

    const BASE: u64 = 0xffff_8880_1f30_0000;
    const TASK: u64 = 0xffff_8880_0400_0000;
    const AT: Scheduling = Scheduling {
        current: Some(0x40),
        pid: 0x100,
        flags: 0,
        wanted: 3,
        switches: [0x200, 0x208],
    };

    fn words(flags: u64) -> BTreeMap<u64, u64> {
        BTreeMap::from([
            (BASE + 0x40, TASK),
            (TASK, flags),
            (TASK + 0x100, 0x1234_0000_0007),
            (TASK + 0x200, 40),
            (TASK + 0x208, 2),
        ])
    }

    fn look(at: &Scheduling, base: u64, words: &BTreeMap<u64, u64>) -> Option<Running> {
        at.look(base, |address, out| {
            let bytes = words.get(&(address & !7))?.to_le_bytes();
            let from = usize::try_from(address & 7).ok()?;
            out.copy_from_slice(bytes.get(from..from + out.len())?);
            Some(())
        })
    }

    // A flag that is read at the wrong place makes a guest that is well one that hangs.
    #[test]
    fn a_task_is_wanted_off_by_its_flag() {
        let running = Running { task: TASK, pid: 7, switches: 42, is_wanted: false };
        let wanted = Running { is_wanted: true, ..running };
        assert_eq!(look(&AT, BASE, &words(!8)), Some(running));
        assert_eq!(look(&AT, BASE, &words(8)), Some(wanted));
        // riscv64
        let of_task = Scheduling { current: None, ..AT };
        assert_eq!(look(&of_task, TASK, &words(8)), Some(wanted));
        // What is not there, or is none.
        for missing in words(0).into_keys() {
            let mut words = words(0);
            words.remove(&missing);
            assert_eq!(look(&AT, BASE, &words), None, "{missing:#x}");
        }
        for (at, word) in [(TASK + 0x100, 5 << 20), (BASE + 0x40, 0x40)] {
            let mut words = words(0);
            words.insert(at, word);
            assert_eq!(look(&AT, BASE, &words), None, "{at:#x}");
        }
        assert_eq!(look(&Scheduling { wanted: 64, ..AT }, BASE, &words(0)), None, "no such flag");
    }

    #[test]
    fn kernels_tell_where_it_is() {
        const ALL: [&str; 6] = [
            "x86_64-6.1",
            "x86_64-6.12",
            "x86_64-6.12-rt",
            "x86_64-7",
            "riscv64-6.12",
            "riscv64-7",
        ];
        for cached in ALL {
            let cache = vmtrace_emulated::cache_dir().expect("no cache directory");
            let kernel = Kernel::open(&cache.join("kernels").join(cached).join("vmlinuz")).unwrap();
            let tables = PageTables::none(kernel.arch());
            let image = Image { slide: 0, physical: 0, tables };
            let found = Scheduling::find(&kernel, &image).unwrap_or_else(|| panic!("{cached}"));
            assert_eq!(found.switches[1], found.switches[0] + 8, "{cached}: {found:?}");
            assert_eq!(found.current.is_some(), kernel.arch() == Arch::X86_64, "{cached}");
        }
    }
}
