//! Where jobs can run: on this machine's KVM, or in an emulated host.

mod arch;
mod cache;
mod choice;
mod emulated;
mod error;
mod image;
pub mod init;
mod interrupts;
mod inventory;
mod job;
mod link;
pub mod probe;
mod program;
mod qemu;
mod tunnel;
mod wire;

pub use arch::HostArch;
pub use cache::{HostKernel, cache_dir};
pub use choice::{Choice, HostMode, choose};
pub use emulated::{EmulatedHost, HostOptions};
pub use error::{HostError, LogTail};
pub use image::FileSource;
pub use interrupts::Interrupts;
pub use inventory::emulated_host_checks;
pub use job::{Job, JobEnd, Output, Stdin, Stopped};
pub use program::program;
pub use qemu::Qemu;
pub use tunnel::Tunnel;
#[doc(hidden)]
pub use wire::exercise as exercise_wire;

/// This very program, wherever its file is by now.
pub const THIS_PROGRAM: &str = "/proc/self/exe";
