//! Where jobs can run: on this machine's KVM, or in an emulated host.

mod choice;
pub mod probe;

pub use choice::{Choice, ForeignKvm, HostMode, choose};
