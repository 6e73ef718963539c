//! riscv64: a board without PCI and firmware, described by a device tree.

mod aia;
mod exits;
mod fdt;
mod interrupts;
mod isa;
mod kvm;
mod layout;
mod load;
mod platform;
mod registers;
mod sbi;
mod setup;
mod vcpu;

pub use layout::{ANNEX_BASE, MAX_ANNEX};
pub use load::BootImage;
pub use registers::Registers;

pub(in crate::machine) use kvm::{NEEDED_CAPABILITIES, check_far};
pub(in crate::machine) use layout::ram_ranges;
pub(in crate::machine) use load::load;
pub(in crate::machine) use platform::Platform;
pub(in crate::machine) use registers::{
    Kept, clock, clock_hz, divert, put_back, registers, set_program_counter,
};
pub(in crate::machine) use setup::{create_vcpu, start_at};
pub(in crate::machine) use vcpu::{is_in_kernel, paused, refuse_trap, run, trap_address};

/// The instructions that a controller writes as a trap: `lui a7, 0x976d; ecall`.
///
/// A call of an extension of the SBI in the range for vendors, which KVM hands to its user; the
/// two letters in its number are "vm". No register but a7 changes: at the entry of a function that
/// is its eighth argument.
pub const TRAP_INSTRUCTION: [u8; 8] = call_of(sbi::TRAP);

/// The instructions with which the guest's code waits for [`Room`](super::Room): `lui a7, 0x976e; ecall`.
pub const WAIT_INSTRUCTION: &[u8] = &call_of(sbi::WAIT);

/// Calls an extension, whose number is a multiple of 4096.
const fn call_of(extension: u64) -> [u8; 8] {
    const LUI_A7: u32 = 0x37 | 17 << 7;
    #[expect(clippy::cast_possible_truncation, reason = "extensions have 32 bits")]
    let [a, b, c, d] = (extension as u32 | LUI_A7).to_le_bytes();
    [a, b, c, d, 0x73, 0, 0, 0]
}

/// A command line for guests that have no wish of their own: the console is the serial port, and a
/// panic ends the machine instead of halting it.
pub const DEFAULT_CMDLINE: &str = "console=ttyS0 panic=-1";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traps_name_an_extension_of_the_vendor_range() {
        for extension in [sbi::TRAP, sbi::WAIT] {
            assert!((0x0900_0000..=0x09ff_ffff).contains(&extension) && extension % 4096 == 0);
        }
        assert_eq!(TRAP_INSTRUCTION, [0xb7, 0xd8, 0x76, 0x09, 0x73, 0, 0, 0]);
    }
}
