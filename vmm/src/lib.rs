//! vmtrace: a hypervisor-based tracer of guest kernel functions.
//!
//! The way of a record is described in `docs/architecture.md`.

pub mod agent_channel;
pub mod cli;
pub mod devices;
pub mod export;
pub mod host;
pub mod initramfs;
pub mod kernel;
pub mod machine;
pub mod stream;
pub mod tracer;
