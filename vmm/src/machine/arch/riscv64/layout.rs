//! Where everything is in the guest's physical address space.
//!
//! ```text
//! 0x0c00_0000  PLIC (where KVM has no interrupt controllers)
//! 0x0d00_0000  APLIC (in KVM)
//! 0x1000_0000  serial ports, 4 KiB each
//! 0x1000_2000  pvpanic
//! 0x1001_0000  virtio-mmio devices, 4 KiB each
//! 0x2800_0000  IMSICs, 4 KiB for each hart (in KVM)
//! 0x4000_0000  annex: no RAM
//! 0x8000_0000  RAM: kernel, device tree, initrd as high as it may be
//! ```

/// The PLIC's registers.
pub(super) const PLIC: u64 = 0x0c00_0000;
/// The APLIC's registers.
pub(super) const APLIC: u64 = 0x0d00_0000;
/// The console.
pub(super) const UART0: u64 = 0x1000_0000;
/// The agent's channel.
pub(super) const UART1: u64 = 0x1000_1000;
/// Where the guest tells of a panic.
pub(super) const PVPANIC: u64 = 0x1000_2000;
/// Interrupt of the console. 0 is no interrupt.
pub(super) const UART0_IRQ: u32 = 1;
/// Interrupt of the agent's channel.
pub(super) const UART1_IRQ: u32 = 2;
/// Registers of the first virtio device.
pub(super) const VIRTIO_MMIO: u32 = 0x1001_0000;
/// Interrupt of the first virtio device.
pub(super) const VIRTIO_IRQ: u32 = 3;
/// The highest interrupt. KVM wants no more of them than messages a hart can get, 63 at least.
pub(super) const LAST_IRQ: u32 = 63;
/// The first hart's IMSIC.
pub(super) const IMSIC: u64 = 0x2800_0000;

/// Guest-physical address of the annex.
pub const ANNEX_BASE: u64 = 0x4000_0000;
/// The largest annex in bytes: up to the RAM.
pub const MAX_ANNEX: u64 = RAM - ANNEX_BASE;
/// Where RAM begins.
pub(super) const RAM: u64 = 0x8000_0000;

/// RAM of a machine with `size` bytes of it: start and length of each piece.
#[must_use]
pub(in crate::machine) fn ram_ranges(size: u64) -> Vec<(u64, u64)> {
    vec![(RAM, size)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn annex_is_aligned() {
        assert_eq!(ANNEX_BASE % (2 << 20), 0);
        assert_eq!(MAX_ANNEX % (2 << 20), 0);
    }
}
