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
