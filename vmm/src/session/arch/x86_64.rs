//! x86-64: a kernel may move itself and says where it is by a register that it writes.

use crate::kernel::Kernel;
use crate::machine::Registers;
use crate::tracer::{GuestError, Image, PageTables};

/// `MSR_LSTAR`: written once a boot with the address of [`WATCHED_SYMBOL`], after
/// `setup_arch` and before `ftrace_init` (arch/x86/kernel/cpu/common.c).
pub(in crate::session) const WATCHED_MSR: Option<u32> = Some(0xc000_0082);
/// See [`WATCHED_MSR`].
pub(in crate::session) const WATCHED_SYMBOL: &str = "entry_SYSCALL_64";
/// The clock in records.
pub(in crate::session) const CLOCK: &str = "x86-tsc";

/// The image before its first instruction, where that is known.
///
/// # Errors
/// Never.
pub(in crate::session) fn loaded(_: &Kernel, _: &Registers) -> Result<Option<Image>, GuestError> {
    Ok(None)
}

/// The page tables of a vCPU.
pub(in crate::session) fn tables(registers: &Registers) -> PageTables {
    PageTables::x86_64(registers.cr3, registers.cr4)
}

/// Lets every vCPU fetch what was written into guest code. To be called before a
/// pause ends. Here entering the guest does that.
pub(in crate::session) fn code_changed() {}

/// Where an argument of a function is.
pub(in crate::session) enum Argument {
    /// In a register.
    Word(u64),
    /// In memory, at this run-time address.
    Stack(u64),
}

/// An integer argument, variable ones included, of the function whose first instructions are next.
pub(in crate::session) fn argument(registers: &Registers, index: usize) -> Option<Argument> {
    let Registers { rdi, rsi, rdx, rcx, r8, r9, rsp, .. } = *registers;
    Some(match [rdi, rsi, rdx, rcx, r8, r9].get(index) {
        Some(&word) => Argument::Word(word),
        // Behind the return address.
        None => Argument::Stack(rsp.wrapping_add(8 * (index as u64 - 5))),
    })
}

/// Where a vCPU stands.
pub(in crate::session) fn program_counter(registers: &Registers) -> u64 {
    registers.rip
}

/// What leads to code that a vCPU may still execute: nobody asks, since no code is written again.
pub(in crate::session) fn words(_: &Registers) -> impl Iterator<Item = u64> {
    std::iter::empty()
}

/// Called when the guest halts: its CPUs wait with interrupts off then, and no device is told
/// (arch/x86/kernel/reboot.c).
pub(in crate::session) const HALT: Option<&str> = Some("machine_halt");

/// Whether an interrupt would be taken: unlike riscv64's `wfi`, `hlt` waits for one only where it is.
pub(in crate::session) fn is_interruptible(
    registers: &Registers,
    _: impl Fn(u64) -> Option<u32>,
) -> bool {
    const INTERRUPT_FLAG: u64 = 1 << 9;
    registers.rflags & INTERRUPT_FLAG != 0
}

/// What leads to the task of a CPU that is in the kernel: see [`crate::tracer::Scheduling::look`].
pub(in crate::session) fn task_base(registers: &Registers) -> u64 {
    registers.gs_base
}

/// What tells the site of a program in which it was stopped.
pub(in crate::session) fn told(registers: &Registers) -> u64 {
    registers.r10
}

/// Its stack pointer.
pub(in crate::session) fn stack_pointer(registers: &Registers) -> u64 {
    registers.rsp
}

/// What a program must keep and has not, if anything, between a call of its site and its return.
pub(in crate::session) fn changed(before: &Registers, after: &Registers) -> Option<&'static str> {
    // Direction and interrupts; the other flags are the caller's to save.
    const KEPT_FLAGS: u64 = 1 << 9 | 1 << 10;
    let kept = |it: &Registers| {
        // r10 and r11 are free at a function's entry.
        let Registers { rax, rbx, rcx, rdx, rsi, rdi, rbp, rsp, r8, r9, .. } = *it;
        let Registers { r12, r13, r14, r15, gs_base, fs_base, .. } = *it;
        let flags = it.rflags & KEPT_FLAGS;
        [
            ("rax", rax),
            ("rbx", rbx),
            ("rcx", rcx),
            ("rdx", rdx),
            ("rsi", rsi),
            ("rdi", rdi),
            ("rbp", rbp),
            ("rsp", rsp),
            ("r8", r8),
            ("r9", r9),
            ("r12", r12),
            ("r13", r13),
            ("r14", r14),
            ("r15", r15),
            ("the base of gs", gs_base),
            ("the base of fs", fs_base),
            ("a flag", flags),
        ]
    };
    let mut both = kept(before).into_iter().zip(kept(after));
    both.find_map(|(before, after)| (before != after).then_some(before.0))
}

/// What a vCPU tells of the exception that it has just entered.
pub(in crate::session) fn fault(registers: &Registers) -> String {
    format!("page fault address {:#x}, stack pointer {:#x}", registers.cr2, registers.rsp)
}
