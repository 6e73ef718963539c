//! riscv64: a kernel runs where it is linked (it moves itself only by a seed that
//! firmware gives, and ours gives none), and lies where it is entered.

#![allow(unsafe_code, reason = "a system call that libc does not wrap")]

use crate::kernel::Kernel;
use crate::machine::Registers;
use crate::tracer::{GuestError, Image, PageTables};

/// None is needed.
pub(in crate::session) const WATCHED_MSR: Option<u32> = None;
/// See [`WATCHED_MSR`].
pub(in crate::session) const WATCHED_SYMBOL: &str = "_start";
/// The clock in records.
pub(in crate::session) const CLOCK: &str = "riscv-time";

/// The image before its first instruction, where that is known.
///
/// # Errors
/// When the image does not say where it begins.
pub(in crate::session) fn loaded(
    kernel: &Kernel,
    registers: &Registers,
) -> Result<Option<Image>, GuestError> {
    Image::loaded(kernel, registers.pc).map(Some)
}

/// The page tables of a vCPU.
pub(in crate::session) fn tables(registers: &Registers) -> PageTables {
    PageTables::riscv64(registers.satp)
}

/// Lets every vCPU fetch what was written into guest code. To be called before a
/// pause ends.
///
/// A hart may fetch what was there before until it executes `fence.i`, and guest
/// harts are harts of this machine. `riscv_flush_icache` makes each of them do so
/// before it next runs a thread of this process, such as a vCPU's: those that run one
/// now get an interrupt, the others are marked (arch/riscv/mm/cacheflush.c).
pub(in crate::session) fn code_changed() {
    // arch/riscv/include/uapi/asm/unistd.h
    const RISCV_FLUSH_ICACHE: libc::c_long = 259;
    const ALL_THREADS: usize = 0;
    // SAFETY: takes no pointers that it reads or writes through.
    let result = unsafe { libc::syscall(RISCV_FLUSH_ICACHE, 0, 0, ALL_THREADS) };
    if result != 0 {
        log::warn!("riscv_flush_icache: {}", std::io::Error::last_os_error());
    }
}

/// Where an argument of a function is.
pub(in crate::session) enum Argument {
    /// In a register.
    Word(u64),
    /// In memory, at this run-time address.
    Stack(u64),
}

/// An integer argument, variable ones included, of the function whose first instructions are next
/// and hold a tripwire: that takes `a7`, the eighth.
pub(in crate::session) fn argument(registers: &Registers, index: usize) -> Option<Argument> {
    const A0: usize = 10;
    const IN_REGISTERS: usize = 8;
    match index {
        0..7 => registers.x.get(A0 + index).copied().map(Argument::Word),
        7 => None,
        _ => {
            let sp = registers.x[2];
            Some(Argument::Stack(sp.wrapping_add(8 * (index - IN_REGISTERS) as u64)))
        }
    }
}

/// Where a vCPU stands.
pub(in crate::session) fn program_counter(registers: &Registers) -> u64 {
    registers.pc
}

/// Where a vCPU stands, where it was interrupted last, and what else is in its registers: what leads
/// to code that it may still execute.
pub(in crate::session) fn words(registers: &Registers) -> impl Iterator<Item = u64> {
    [registers.pc, registers.sepc].into_iter().chain(registers.x)
}

/// Called when the guest halts: that is a power-off here, of which the machine tells
/// (arch/riscv/kernel/reset.c).
pub(in crate::session) const HALT: Option<&str> = None;

/// Whether an interrupt would be taken, or wakes the hart: the kernel is idle with interrupts off, in a
/// `wfi` that goes on whenever there is one (arch/riscv/include/asm/processor.h). A hart that was stopped
/// there stands at it or behind it. `word` reads four bytes at a virtual address.
pub(in crate::session) fn is_interruptible(
    registers: &Registers,
    word: impl Fn(u64) -> Option<u32>,
) -> bool {
    const SIE: u64 = 1 << 1;
    const WFI: u32 = 0x1050_0073;
    let at_wfi = || [registers.pc, registers.pc.wrapping_sub(4)].map(word).contains(&Some(WFI));
    registers.sstatus & SIE != 0 || at_wfi()
}

/// What leads to the task of a CPU that is in the kernel: see [`crate::tracer::Scheduling::look`].
pub(in crate::session) fn task_base(registers: &Registers) -> u64 {
    registers.x[4]
}

/// What tells the site of a program in which it was stopped.
pub(in crate::session) fn told(registers: &Registers) -> u64 {
    registers.x[5]
}

/// Its stack pointer.
pub(in crate::session) fn stack_pointer(registers: &Registers) -> u64 {
    registers.x[2]
}

/// What a program must keep and has not, if anything, between a call of its site and its return.
pub(in crate::session) fn changed(before: &Registers, after: &Registers) -> Option<&'static str> {
    const NAMES: [&str; 32] = [
        "zero", "ra", "sp", "gp", "tp", "t0", "t1", "t2", "s0", "s1", "a0", "a1", "a2", "a3", "a4",
        "a5", "a6", "a7", "s2", "s3", "s4", "s5", "s6", "s7", "s8", "s9", "s10", "s11", "t3", "t4",
        "t5", "t6",
    ];
    // The caller's to save, and at a function's entry nobody's; the trap takes a7.
    let free = |name: &str| name.starts_with('t') && name != "tp" || name == "a7";
    let mut all = NAMES.into_iter().zip(before.x.iter().zip(&after.x));
    all.find_map(|(name, (before, after))| (before != after && !free(name)).then_some(name))
}

/// What a vCPU tells of the exception that it has just entered.
pub(in crate::session) fn fault(registers: &Registers) -> String {
    let Registers { scause, sepc, stval, .. } = registers;
    format!("scause {scause:#x}, sepc {sepc:#x}, stval {stval:#x}")
}
