//! Where everything is in the guest's physical address space and among its I/O ports.
//!
//! ```text
//! 0x0000_0000  RAM: GDT, zero page, page tables, command line (below)
//! 0x0009_fc00  end of low RAM; extended BIOS data area, empty
//! 0x000e_0000  ACPI tables
//! 0x000f_fff0  real-mode code that resets the machine
//! 0x0010_0000  RAM: kernel, initrd as high as it may be
//! 0xc000_0000  annex: no RAM, reserved in e820 as far as it goes
//! 0xf000_0000  virtio-mmio devices, 4 KiB each
//! 0xfec0_0000  I/O APIC (in KVM)
//! 0xfee0_0000  local APICs (in KVM)
//! 0xfffb_c000  pages that KVM wants for itself on some CPUs
//! 0x1_0000_0000  RAM: what does not fit below 3 GiB
//! ```

/// Global descriptor table for the first instruction.
pub(super) const GDT: u64 = 0x500;
/// The `boot_params` of the Linux boot protocol.
pub(super) const ZERO_PAGE: u64 = 0x7000;
/// Initial stack pointer.
pub(super) const BOOT_STACK: u64 = 0x8ff0;
/// Page tables that map the first 4 GiB to themselves: six pages from here.
pub(super) const PAGE_TABLES: u64 = 0x9000;
/// The kernel command line.
pub(super) const CMDLINE: u64 = 0x2_0000;
/// End of the RAM below 640 KiB.
pub(super) const LOW_RAM_END: u64 = 0x9_fc00;
/// Where legacy video memory begins.
pub(super) const LEGACY_HOLE: u64 = 0xa_0000;
/// ACPI tables, where firmware has them: the root pointer is found here even by who is not told.
pub(super) const ACPI: u64 = 0xe_0000;
/// Where a CPU is sent that shall start over, F000:FFF0.
pub(super) const RESET_VECTOR: u64 = 0xf_fff0;
/// End of the area for ACPI tables and of the legacy hole.
pub(super) const ACPI_END: u64 = 0x10_0000;
/// RAM from 1 MiB on.
pub(super) const HIGH_RAM: u64 = 0x10_0000;
/// End of RAM below 4 GiB.
pub(super) const GAP: u64 = 0xc000_0000;
/// End of the gap in RAM.
pub(super) const GAP_END: u64 = 0x1_0000_0000;

/// Guest-physical address of the annex.
pub const ANNEX_BASE: u64 = GAP;
/// The largest annex in bytes: up to the first device.
pub const MAX_ANNEX: u64 = VIRTIO_MMIO as u64 - ANNEX_BASE;

/// Registers of the first virtio device.
pub(super) const VIRTIO_MMIO: u32 = 0xf000_0000;
/// Interrupts of virtio devices: first the I/O APIC's pins that the legacy PIC does not have, then
/// those of its pins that no kernel takes for something else (timer, cascade, serial ports, clock).
pub(super) const VIRTIO_GSIS: [u32; 18] =
    [16, 17, 18, 19, 20, 21, 22, 23, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15];

/// The I/O APIC's registers.
pub(super) const IO_APIC: u32 = 0xfec0_0000;
/// Every CPU's local APIC's registers.
pub(super) const LOCAL_APIC: u32 = 0xfee0_0000;
/// One page for KVM: identity map for real mode on CPUs without unrestricted guests.
pub(super) const KVM_IDENTITY_MAP: u64 = 0xfffb_c000;
/// Three pages for KVM: task state segment for the same.
pub(super) const KVM_TSS: u64 = KVM_IDENTITY_MAP + 0x1000;
/// End of these.
pub(super) const KVM_END: u64 = KVM_TSS + 0x3000;

/// First serial port: the console.
pub(super) const COM1: u16 = 0x3f8;
/// Its interrupt.
pub(super) const COM1_GSI: u32 = 4;
/// Second serial port: the agent's channel.
pub(super) const COM2: u16 = 0x2f8;
/// Its interrupt.
pub(super) const COM2_GSI: u32 = 3;
/// Keyboard controller; only its reset command.
pub(super) const I8042: u16 = 0x60;
/// Its length.
pub(super) const I8042_LENGTH: u64 = 5;
/// Where the guest tells of a panic, as in QEMU.
pub(super) const PVPANIC: u16 = 0x505;
/// Power and reset registers.
pub(super) const POWER: u16 = 0x600;
/// Reset control register of PC chip sets.
pub(super) const RESET_CONTROL: u16 = 0xcf9;
/// The port whose `out` instructions are traps.
pub(super) const TRAP_PORT: u8 = 0xea;
/// The port whose writes wait for room.
pub(super) const WAIT_PORT: u8 = 0xeb;

/// RAM of a machine with `size` bytes of it: start and length of each piece.
#[must_use]
pub(in crate::machine) fn ram_ranges(size: u64) -> Vec<(u64, u64)> {
    let mut ranges = vec![(0, size.min(GAP))];
    if size > GAP {
        ranges.push((GAP_END, size - GAP));
    }
    ranges
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::devices::virtio::blk::MAX_DISKS;

    #[test]
    fn ram_leaves_the_gap_free() {
        assert_eq!(ram_ranges(512 << 20), [(0, 512 << 20)]);
        assert_eq!(ram_ranges(3 << 30), [(0, 3 << 30)]);
        assert_eq!(ram_ranges(5 << 30), [(0, 3 << 30), (4 << 30, 2 << 30)]);
    }

    // Edges that two devices share are lost.
    #[test]
    fn every_device_has_an_interrupt_of_its_own() {
        let all = VIRTIO_GSIS.iter().chain(&[COM1_GSI, COM2_GSI]).collect::<BTreeSet<_>>();
        assert_eq!(all.len(), VIRTIO_GSIS.len() + 2);
        // The I/O APIC's pins; 0, 2 and 8 are the timer, the cascade and the clock.
        assert!(all.iter().all(|gsi| **gsi < 24 && ![0, 2, 8].contains(*gsi)));
        // Entropy and sockets besides.
        assert!(VIRTIO_GSIS.len() >= MAX_DISKS + 2);
    }

    #[test]
    fn annex_is_aligned() {
        assert_eq!(ANNEX_BASE % (2 << 20), 0);
        assert_eq!(MAX_ANNEX % (2 << 20), 0);
    }
}
