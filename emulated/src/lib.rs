//! The emulated host: a QEMU in which vmtrace finds a real `/dev/kvm` and runs jobs.
//!
//! This crate has both ends. Outside, a program starts an [`EmulatedHost`] and gives it [`Job`]s.
//! Inside, the same program is process 1 ([`init`]) and executes them. `wire` is the protocol
//! between the two.

#![warn(clippy::print_stderr, clippy::print_stdout)]

mod arch;
mod cache;
mod check;
mod error;
mod host;
mod image;
pub mod init;
mod interrupts;
mod inventory;
mod job;
mod link;
mod program;
mod qemu;
mod tunnel;
mod wire;

pub use arch::HostArch;
pub use cache::{HostKernel, cache_dir};
pub use check::Check;
pub use error::{HostError, LogTail};
pub use host::{EmulatedHost, HostDisk, HostOptions};
pub use image::FileSource;
pub use interrupts::{Interrupts, Patience};
pub use inventory::emulated_host_checks;
pub use job::{Job, JobEnd, Output, Stdin, Stopped};
pub use program::{THIS_PROGRAM, program};
pub use qemu::Qemu;
pub use tunnel::Tunnel;
#[doc(hidden)]
pub use wire::exercise as exercise_wire;
