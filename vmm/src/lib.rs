//! vmtrace: a hypervisor-based tracer of guest kernel functions.
//!
//! `docs/architecture.md` describes the life of a record.

// They panic when nobody can be told: see `vmtrace_system::say`.
#![warn(clippy::print_stderr, clippy::print_stdout)]

pub mod agent;
pub mod analyze;
pub mod check;
pub mod cli;
pub mod condition;
pub mod convert;
pub mod deadline;
pub mod devices;
pub mod events;
pub mod export;
mod files;
pub mod host;
mod host_vsock;
pub use vmtrace_emulated as emulated;
pub use vmtrace_initramfs as initramfs;
pub use vmtrace_kernel as kernel;
pub mod machine;
pub mod relay;
pub mod sandbox;
pub mod serve;
pub mod session;
pub use vmtrace_stream as stream;
pub mod tracer;

/// Which sources this vmtrace was built from.
pub const SOURCE: &str = env!("VMTRACE_SOURCE");

/// The whole program; returns the exit code.
#[must_use]
pub fn main() -> u8 {
    cli::main()
}
