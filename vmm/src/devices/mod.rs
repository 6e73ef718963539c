//! Emulated devices.
//!
//! The guest drives devices: every offset, length and value that they get is untrusted. They depend
//! neither on KVM nor on an architecture; an interrupt is an [`IrqLine`].

mod bus;
mod gate;
mod i8042;
mod output;
mod panic_watch;
mod plic;
mod power;
mod pvpanic;
mod serial;
pub mod virtio;

pub use bus::{Bus, Overlap};
pub use gate::{Gate, Pass};
pub use i8042::I8042;
pub use output::{OutputPump, PumpWriter};
pub use panic_watch::{PanicWatch, Witness};
pub use plic::{Harts, Plic, PlicLine};
pub use power::{PowerControl, ResetControl};
pub use pvpanic::PvPanic;
pub use serial::SerialPort;

/// A device on a [`Bus`]. Called by vCPU threads, several at a time.
pub trait Device: Send + Sync {
    /// The guest reads `data.len()` bytes at `offset` from the device's base. `data` holds ones.
    fn read(&self, offset: u64, data: &mut [u8]);

    /// The guest writes `data` at `offset` from the device's base.
    fn write(&self, offset: u64, data: &[u8]) -> Outcome;
}

/// What a write to a device means to the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing; the guest goes on.
    Continue,
    /// The guest powers itself off.
    PowerOff,
    /// The guest resets itself.
    Reset,
    /// The guest's kernel panics. It goes on for now.
    Panics {
        /// Another kernel is going to save what there is to save (kdump).
        crash_kernel: bool,
    },
    /// The guest's kernel has panicked and halted for good.
    Panicked,
}

/// An interrupt line of a device.
pub trait IrqLine: Send + Sync {
    /// The device wants attention.
    fn assert(&self);
    /// The guest has seen to it. Means nothing to an edge-triggered line, but a level-triggered one
    /// interrupts until then.
    fn deassert(&self);
}
