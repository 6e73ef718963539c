//! x86-64: a PC without PCI, booted without firmware.

mod acpi;
mod cpuid;
mod e820;
mod exits;
mod kvm;
mod layout;
mod load;
mod platform;
mod setup;
mod tables;
mod vcpu;

pub use layout::{ANNEX_BASE, MAX_ANNEX};
pub use load::BootImage;
pub use vcpu::Registers;

pub(in crate::machine) use cpuid::check_far;
pub(in crate::machine) use kvm::NEEDED_CAPABILITIES;
pub(in crate::machine) use layout::ram_ranges;
pub(in crate::machine) use load::load;
pub(in crate::machine) use platform::Platform;
pub(in crate::machine) use setup::{create_vcpu, start_at};
pub(in crate::machine) use vcpu::{
    Kept, clock, clock_hz, divert, is_in_kernel, paused, put_back, refuse_trap, registers, run,
    set_program_counter, trap_address,
};

/// The instruction that a controller writes as a trap: `out 0xea, al`.
///
/// The port is one that no PC has, and the second byte is an invalid instruction in 64-bit mode,
/// so that nobody gets anywhere by jumping to it.
pub const TRAP_INSTRUCTION: [u8; 2] = [0xe6, layout::TRAP_PORT];

/// The instruction with which the guest's code waits for [`Room`](super::Room): `out 0xeb, al`. No PC has
/// that port either.
pub const WAIT_INSTRUCTION: &[u8] = &[0xe6, layout::WAIT_PORT];

/// A command line for guests that have no wish of their own: the console is the serial port, and a
/// panic ends the machine instead of halting it.
///
/// Nothing is here to save time. What other machines need for that (`i8042.*`, `reboot=k`,
/// `pci=off`, `no_timer_check`) changes nothing measurable: ACPI has already told the kernel not to
/// look, and kvmclock tells the clock's rate.
pub const DEFAULT_CMDLINE: &str = "console=ttyS0 panic=-1";
