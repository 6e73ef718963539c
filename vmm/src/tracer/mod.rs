//! Plan, annex, patching, rings: knows guest memory and a pause, never KVM.
//!
//! Everything here works on a [`Guest`]: guest-physical memory that nobody runs
//! on while it is used. Unit tests and fuzzing use plain memory.

pub mod annex;
mod arch;
mod brackets;
mod exit_plan;
mod exits;
mod ftrace;
mod guest;
mod members;
mod paging;
pub mod patch;
mod programs;
mod ram;
mod raw;
mod readable;
pub mod ring;
mod riscv64;
mod sharing;
mod tasks;
mod trace;
mod tripwire;
mod view;
mod x86_64;

pub use brackets::Moment;
pub use exit_plan::ExitPlan;
pub use exits::{ExitSkip, ExitWord};
pub use guest::{Guest, GuestError, Image};
pub use paging::{PageTables, WalkError};
pub use patch::{Skip, SkipReason};
pub use programs::{Duty, Part};
pub use ram::Ram;
pub use raw::{RawBatch, RawRecord};
pub use sharing::Lent;
pub use tasks::Tasks;
pub use trace::{AttachReport, Attachment, Options, TraceError, return_address, stack_bias};
pub use tripwire::Tripwire;
