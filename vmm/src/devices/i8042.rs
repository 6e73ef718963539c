//! An i8042 keyboard controller that can only reset the machine.

use super::{Device, Outcome};

/// Offset of the status and command register (port 0x64) from the controller's base (0x60).
const COMMAND: u64 = 4;
/// Command: pulse the CPU's reset line.
const RESET: u8 = 0xfe;

/// The two ports of an i8042. No keyboard, no mouse: kernels are told (ACPI) not to look for it,
/// but those that reset by it shall succeed.
#[derive(Debug, Clone, Copy)]
pub struct I8042;

impl Device for I8042 {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        // Both buffers empty: ready for a command, nothing to read.
        data.fill(0);
    }

    fn write(&self, offset: u64, data: &[u8]) -> Outcome {
        if offset == COMMAND && data == [RESET] { Outcome::Reset } else { Outcome::Continue }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_reset_command_resets() {
        let mut data = [0xff];
        I8042.read(4, &mut data);
        assert_eq!(data, [0]);
        assert_eq!(I8042.write(4, &[0xfe]), Outcome::Reset);
        assert_eq!(I8042.write(0, &[0xfe]), Outcome::Continue);
        assert_eq!(I8042.write(4, &[0xd1]), Outcome::Continue);
        assert_eq!(I8042.write(4, &[]), Outcome::Continue);
        assert_eq!(I8042.write(4, &[0xfe, 0]), Outcome::Continue);
    }
}
