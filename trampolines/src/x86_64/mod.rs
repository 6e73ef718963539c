//! Programs for x86-64.
//!
//! How a record is reserved: the control block of a CPU is at a constant distance from that CPU's
//! gs base ([`Addressing::PerCpu`]), so a single `cmpxchg gs:[..]` both selects the CPU and
//! reserves. No lock prefix is needed, since only this CPU writes head. The preemption count is not
//! changed: if a task is migrated in between, its exchange fails, since positions of two rings are
//! never equal. Where a guest's per-CPU areas are not evenly spaced, the block is found by CPU
//! number and instructions are locked ([`Addressing::Shared`]).

#[allow(clippy::useless_conversion, reason = "of the assembler's macro")]
mod callers;
#[allow(clippy::useless_conversion, reason = "of the assembler's macro")]
mod compile;
#[allow(clippy::useless_conversion, reason = "of the assembler's macro")]
mod condition;
#[allow(clippy::useless_conversion, reason = "of the assembler's macro")]
mod count;
#[allow(clippy::useless_conversion, reason = "of the assembler's macro")]
mod marks;
mod nesting;
#[allow(clippy::useless_conversion, reason = "of the assembler's macro")]
mod operands;
#[allow(clippy::useless_conversion, reason = "of the assembler's macro")]
mod read;
mod slow;
#[allow(clippy::useless_conversion, reason = "of the assembler's macro")]
mod sort;
mod switch;
#[allow(clippy::useless_conversion, reason = "of the assembler's macro")]
mod timed;

pub use compile::{
    BEYOND_CALL, BEYOND_RETURN, INDIRECT_CALL, PROBE_CALLED, beyond_stub, compile, indirect_jump,
    indirect_stub, return_stub, tail_stub,
};

pub use switch::{Switch, SwitchStub, switch_stub};

use crate::context::ContextPlaces;
use crate::layout::MAX_RECORD;
use crate::program::Readable;

/// Chunks are used up below this many bytes: what `test eax, 0x3f00` finds.
pub const SPENT: u64 = MAX_RECORD as u64;

/// How a program finds the control block of its CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Addressing {
    /// At this (wrapping) distance from the gs base.
    PerCpu {
        /// Control block less gs base.
        distance: u64,
    },
    /// By CPU number through a table, with locked instructions.
    Shared {
        /// Offset of the CPU number from the gs base.
        number: u64,
        /// CPUs in the table.
        cpus: u64,
        /// Address of the table of addresses of control blocks.
        table: u64,
    },
}

/// What is only known when a guest runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Values {
    /// How the control block of a CPU is found.
    pub addressing: Addressing,
    /// From what the low half of a position gives when it is sign-extended to where that is in memory:
    /// a multiple of a chunk's bytes, small enough for a displacement with any field's.
    pub rings: i32,
    /// Offset of `current` from the gs base.
    pub current: u64,
    /// Offset of `pid` in a task.
    pub pid: u64,
    /// Offset of the CPU number from the gs base.
    pub cpu: u64,
    /// From link addresses to those of the running kernel.
    pub slide: u64,
    /// What memory can be read.
    pub readable: Readable,
    /// Address of the set of tasks that are followed, if there is one.
    pub followed: Option<u64>,
    /// Where the state of a CPU is, if that is known.
    pub context: Option<ContextPlaces>,
}

/// What [`Field::Stack`](crate::Field::Stack) of a program has to be increased by to give the
/// address at which the return address of its function lies.
#[must_use]
pub const fn stack_bias(point: crate::Point) -> u64 {
    match point {
        // rax, rdx and the return address into the function or the stub.
        crate::Point::Entry | crate::Point::Tail => 24,
        crate::Point::Return | crate::Point::Probe => 0,
        // What the stub has saved, too.
        crate::Point::Beyond => {
            const { assert!(compile::BEYOND == 16) };
            24 + 16
        }
    }
}
