//! The virtual machine: memory, vCPUs, boot, pause.
//!
//! A [`Machine`] boots an unmodified kernel on KVM and tells its owner, the controller, what it
//! must know through [`Event`]s. The controller can stop all vCPUs with [`Machine::pause`], read
//! registers and change guest memory while they are stopped, and let them go again.
//!
//! Nothing here knows about tracing. Per-architecture code is in `arch`, with the same item names
//! for every architecture.

mod arch;
mod board;
mod config;
mod control;
mod error;
mod event;
mod exits;
mod kvm;
mod lock;
mod memory;
mod pause;
mod preemptions;
mod room;
mod signal;
mod vcpu;
mod vm;

pub use arch::{
    ANNEX_BASE, BootImage, DEFAULT_CMDLINE, MAX_ANNEX, Registers, TRAP_INSTRUCTION,
    WAIT_INSTRUCTION,
};
pub use config::{AgentSink, Config, ConsoleSinks, Far, ImageBytes, MAX_MEMORY, MIN_MEMORY};
pub use error::MachineError;
pub use event::{Event, ExitReason};
pub use exits::{ExitCause, ExitObserver, VcpuExit};
pub use memory::Annex;
pub use pause::{Detour, Diverted, Paused};
pub use preemptions::{Preemption, Preemptions};
pub use room::{Room, Stall};
pub(crate) use signal::number as kick_signal;
pub use vm::{Machine, SerialInput, Waker};
