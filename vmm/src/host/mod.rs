//! Where jobs can run: on this machine's KVM, or in an emulated host.

mod arch;
mod cache;
mod emulated;
mod error;
mod image;
pub mod init;
mod interrupts;
mod job;
mod link;
mod qemu;
mod wire;

pub use arch::HostArch;
pub use cache::{HostKernel, cache_dir};
pub use emulated::{EmulatedHost, HostOptions};
pub use error::{HostError, LogTail};
pub use image::FileSource;
pub use interrupts::Interrupts;
pub use job::{Job, JobEnd, Output, Stdin, Stopped};
pub use qemu::Qemu;
