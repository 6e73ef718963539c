//! Programs for riscv64.
//!
//! How a record is reserved: `tp` points to the current task, its `thread_info.cpu` is the number
//! of the control block, and `lr.d`/`sc.d` on that block's head reserve. No instruction of this
//! architecture selects a CPU and reserves at once. None is needed, since the pair is atomic
//! between harts: a task that was migrated after it looked up its CPU reserves in the ring of the
//! CPU on which its function was entered, along with that CPU's own tasks. An interrupt in between
//! makes the pair fail, as does a reservation by any other hart. Every reservation ends with an
//! `sc.d`. So no nested one leaves a reservation with which the `sc.d` of the outer one could store
//! its older position. (Kernels also end reservations when they return from an exception.)
#![allow(
    clippy::cast_sign_loss,
    clippy::cast_possible_truncation,
    clippy::cast_lossless,
    clippy::useless_conversion,
    clippy::unnecessary_cast,
    reason = "of the assembler's macro"
)]

mod callers;
mod compile;
mod condition;
mod count;
pub mod encode;
mod nesting;
mod operands;
mod read;
mod slow;
mod sort;
mod switch;
mod timed;

pub use compile::compile;
pub use switch::{Switch, SwitchStub, SwitchedWord, landing, switch_stub};

use crate::context::ContextPlaces;
use crate::family::Strangers;
use crate::layout::MAX_RECORD;
use crate::program::Readable;

/// Chunks are used up below this many bytes: a program looks for more than [`MAX_RECORD`].
pub const SPENT: u64 = MAX_RECORD as u64 + 8;

const _: () = assert!(SPENT > MAX_RECORD as u64 && SPENT.is_multiple_of(8));

/// What is only known when a guest runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Values {
    /// Offset in a task of the number of the CPU that it runs on. There is a control block for
    /// every number that a kernel can give.
    pub cpu: u64,
    /// Offset in a task of its pid.
    pub pid: u64,
    /// Address of the first CPU's control block; the others follow it.
    pub controls: u64,
    /// From link addresses to those of the running kernel.
    pub slide: u64,
    /// What memory can be read.
    pub readable: Readable,
    /// Address of the set of tasks that are followed, if there is one.
    pub followed: Option<u64>,
    /// Where tasks are noted that nothing is recorded of, if they are.
    pub strangers: Option<Strangers>,
    /// Where the state of a CPU is, if that is known.
    pub context: Option<ContextPlaces>,
}
