//! A CPU is a gs base.

use super::{AREA, FakeGuest, PID, at};
use vmtrace_trampolines::x86_64::{self, Values, compile};
use vmtrace_trampolines::{Code, Program};

pub(crate) use vmtrace_trampolines::x86_64::SPENT;

/// How a control block is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Addressing {
    PerCpu,
    Shared,
}

pub(crate) const ADDRESSINGS: [Addressing; 2] = [Addressing::PerCpu, Addressing::Shared];
/// From a site to where the program returns to.
pub(crate) const SITE_RETURN: u64 = 5;

/// Offsets in a CPU's area.
const CURRENT: u64 = 0;
const CPU_NUMBER: u64 = 8;
const CONTROL: u64 = 64;

pub(super) const fn control(per_cpu: u64, cpu: u64) -> u64 {
    per_cpu + cpu * AREA + CONTROL
}

/// call program; ret
pub(super) fn site(address: u64, program: u64) -> Vec<u8> {
    let mut code = vec![0xe8];
    let distance = program.wrapping_sub(address + 5).cast_signed();
    code.extend(i32::try_from(distance).unwrap().to_le_bytes());
    code.push(0xc3);
    code
}

pub(crate) fn ticks() -> u64 {
    // SAFETY: rdtsc has no preconditions.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// A signal handler that may interrupt anything here.
pub(crate) fn handler(handler: extern "C" fn(i32)) -> usize {
    handler as *const () as usize
}

impl FakeGuest {
    pub(super) fn compile(&self, program: &Program, addressing: Addressing) -> Code {
        let table = self.per_cpu + CONTROL + 64;
        for cpu in 0..self.cpus {
            let area = self.per_cpu + cpu * AREA;
            // SAFETY: all inside the mappings made by `new`, aligned, not shared yet.
            unsafe {
                at::<u64>(area + CURRENT).write(self.tasks);
                at::<u64>(area + CPU_NUMBER).write(cpu);
                at::<u64>(table + 8 * cpu).write(control(self.per_cpu, cpu));
            }
        }
        let addressing = match addressing {
            // gs is the area's address; the block lies CONTROL bytes into it.
            Addressing::PerCpu => x86_64::Addressing::PerCpu { distance: CONTROL },
            Addressing::Shared => {
                x86_64::Addressing::Shared { number: CPU_NUMBER, cpus: self.cpus, table }
            }
        };
        let values = Values { addressing, current: CURRENT, pid: PID };
        compile(program, self.overflow, &values).unwrap()
    }

    /// The calling thread runs on `cpu` from now on.
    pub(crate) fn run_on(&self, cpu: u64) {
        const ARCH_SET_GS: i32 = 0x1001;
        let base = self.per_cpu + cpu * AREA;
        // SAFETY: gs is unused by Rust and glibc on x86-64.
        let result = unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_SET_GS, base) };
        assert_eq!(result, 0);
    }

    /// The calling thread is the task `pid` on `cpu`. Returns the task.
    pub(crate) fn set_current(&self, cpu: u64, pid: u32) -> u64 {
        let task = self.tasks + u64::from(pid) % 16 * 64;
        // SAFETY: inside the mappings of `new`.
        unsafe { at::<u32>(task + PID).write_volatile(pid) };
        // SAFETY: as above.
        unsafe { at::<u64>(self.per_cpu + cpu * AREA + CURRENT).write_volatile(task) };
        self.run_on(cpu);
        task
    }

    /// Calls the traced function `site` on the CPU of this thread.
    pub(crate) fn hit(&self, site: u64) {
        // SAFETY: a C ABI function without arguments was written there.
        let function: extern "C" fn() = unsafe { core::mem::transmute(at::<u8>(self.site(site))) };
        function();
    }
}
