//! x86-64 entry trampolines.
//!
//! A site is a 5-byte call; a trampoline is entered with the return address
//! into the traced function at `[rsp]` and the function's own return address
//! at `[rsp + 8]`. `r10` and `r11` are free there (the kernel's own
//! `ftrace_caller` does not keep them either); all else is preserved.
//!
//! How a slot is found: the control block of a CPU lies at a constant distance
//! from that CPU's gs base ([`crate::Fixup::ControlFromGs`]), so a single
//! `cmpxchg gs:[..]` both picks the CPU and reserves. No lock prefix is needed
//! (only this CPU writes head), no preemption count is touched, and a task that
//! is migrated in between fails the exchange, since positions of two rings are
//! never equal. Whether there is room is read off the position itself: it is at
//! the end of a chunk or it is not. Where a guest's per-CPU areas are not evenly spaced, the
//! `shared` variants find the block by CPU number and use locked instructions.

pub use crate::Overflow;

// The assembler of another architecture cannot make these templates.
#[cfg(target_arch = "x86_64")]
mod assembled;
#[cfg(target_arch = "x86_64")]
pub use assembled::entry;
#[cfg(not(target_arch = "x86_64"))]
mod absent;
#[cfg(not(target_arch = "x86_64"))]
pub use absent::entry;

/// How a trampoline finds the control block of its CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Addressing {
    /// At a constant distance from the gs base.
    PerCpu,
    /// By CPU number through a table, with locked instructions.
    Shared,
}
