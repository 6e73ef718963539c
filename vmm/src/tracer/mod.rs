//! Plan, annex, patching, rings: knows guest memory and a pause, never KVM.
//!
//! Everything here works on a [`Guest`]: guest-physical memory that nobody runs
//! on while it is used. Unit tests and fuzzing use plain memory.

pub mod annex;
mod ftrace;
mod guest;
pub mod patch;
pub mod ring;
mod tasks;
mod trace;
mod tripwire;

#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
use x86_64 as arch;

#[cfg(not(target_arch = "x86_64"))]
compile_error!("vmtrace traces x86-64 guests only as yet");

pub use arch::paging::PageTables;
pub use guest::{Guest, GuestError, Image};
pub use patch::{Skip, SkipReason};
pub use tasks::Tasks;
pub use trace::{AttachReport, Attachment, Options, TraceError};
pub use tripwire::Tripwire;
