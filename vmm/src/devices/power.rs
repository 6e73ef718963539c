//! The power-off and reset registers that ACPI describes.

use super::{Device, Outcome};

/// ACPI sleep control (offset 0) and sleep status (offset 1) registers of hardware-reduced ACPI
/// (ACPI 6.5, 4.8.3.7), and a reset register (offset 2).
#[derive(Debug, Clone, Copy)]
pub struct PowerControl;

impl PowerControl {
    /// Length of its registers in bytes.
    pub const LENGTH: u64 = 3;
    /// Offset of the sleep control register.
    pub const SLEEP_CONTROL: u64 = 0;
    /// Offset of the sleep status register.
    pub const SLEEP_STATUS: u64 = 1;
    /// Offset of the reset register.
    pub const RESET: u64 = 2;
    /// What to write to the reset register.
    pub const RESET_VALUE: u8 = 1;
    /// The sleep type of "soft off", for the `_S5` object.
    pub const SLEEP_TYPE_OFF: u8 = 5;

    /// Sleep control: enter the state. Bits 2 to 4 hold its type.
    const SLEEP_ENABLE: u8 = 1 << 5;
}

impl Device for PowerControl {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        // No wake status: nothing sleeps here.
        data.fill(0);
    }

    fn write(&self, offset: u64, data: &[u8]) -> Outcome {
        let &[value] = data else { return Outcome::Continue };
        let sleep_type = value >> 2 & 7;
        let enable = value & Self::SLEEP_ENABLE != 0;
        match offset {
            Self::SLEEP_CONTROL if enable && sleep_type == Self::SLEEP_TYPE_OFF => {
                Outcome::PowerOff
            }
            Self::RESET if value == Self::RESET_VALUE => Outcome::Reset,
            _ => Outcome::Continue,
        }
    }
}

/// The reset control register at port 0xcf9 of PC chip sets.
#[derive(Debug, Clone, Copy)]
pub struct ResetControl;

impl Device for ResetControl {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, _offset: u64, data: &[u8]) -> Outcome {
        // Bit 2 starts the reset, the others choose its kind.
        if matches!(data, &[value] if value & 4 != 0) { Outcome::Reset } else { Outcome::Continue }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_soft_off_powers_off() {
        let off = PowerControl::SLEEP_TYPE_OFF << 2 | 1 << 5;
        assert_eq!(PowerControl.write(0, &[off]), Outcome::PowerOff);
        assert_eq!(PowerControl.write(0, &[off & !(1 << 5)]), Outcome::Continue);
        assert_eq!(PowerControl.write(0, &[3 << 2 | 1 << 5]), Outcome::Continue);
        assert_eq!(PowerControl.write(1, &[off]), Outcome::Continue);
        assert_eq!(PowerControl.write(0, &[off, 0]), Outcome::Continue);
        assert_eq!(PowerControl.write(0, &[]), Outcome::Continue);
    }

    #[test]
    fn resets() {
        assert_eq!(PowerControl.write(2, &[1]), Outcome::Reset);
        assert_eq!(PowerControl.write(2, &[0]), Outcome::Continue);
        assert_eq!(ResetControl.write(0, &[6]), Outcome::Reset);
        assert_eq!(ResetControl.write(0, &[2]), Outcome::Continue);
        let mut data = [0xff; 4];
        PowerControl.read(0, &mut data);
        assert_eq!(data, [0; 4]);
    }
}
