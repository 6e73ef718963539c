//! The hosts where jobs can run: this machine's KVM, or an emulated host.

mod choice;
pub mod probe;

pub use choice::{Choice, ForeignKvm, HostMode, choose};
