//! By which a guest's kernel says that it panics, where it has a driver (`CONFIG_PVPANIC_MMIO`).

use super::{Device, Outcome};

/// The register of pvpanic: one byte (QEMU, docs/specs/pvpanic.rst; drivers/misc/pvpanic/pvpanic.c). A guest
/// writes what happens, and reads what the device knows of.
///
/// Nobody but the kernel, or who may do all that it may, reaches it: unlike the console, it is evidence.
#[derive(Debug, Clone, Copy)]
pub struct PvPanic;

impl PvPanic {
    /// Length of its registers in bytes.
    pub const LENGTH: u64 = 1;

    /// The guest panics, and will halt or reset.
    const PANICKED: u8 = 1 << 0;
    /// The guest panics, and its crash kernel will run.
    const CRASH_LOADED: u8 = 1 << 1;
}

impl Device for PvPanic {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let Some(events) = data.first_mut() {
            *events = Self::PANICKED | Self::CRASH_LOADED;
        }
    }

    fn write(&self, _offset: u64, data: &[u8]) -> Outcome {
        let &[events] = data else { return Outcome::Continue };
        let (panics, crash_kernel) =
            (events & Self::PANICKED != 0, events & Self::CRASH_LOADED != 0);
        if panics || crash_kernel { Outcome::Panics { crash_kernel } } else { Outcome::Continue }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // A driver tells nothing that the device does not say it knows.
    #[test]
    fn what_is_offered_is_understood() {
        let mut offered = [0xff];
        PvPanic.read(0, &mut offered);
        let panics = |events| match PvPanic.write(0, &[events]) {
            Outcome::Panics { crash_kernel } => Some(crash_kernel),
            _ => None,
        };
        assert_eq!(
            (panics(1), panics(2), panics(offered[0])),
            (Some(false), Some(true), Some(true))
        );
        // An orderly shutdown, and what may come later.
        assert_eq!((panics(0), panics(4), panics(0xf8)), (None, None, None));
    }

    #[test]
    fn a_guest_may_access_it_in_any_way() {
        for length in [0, 2, 8] {
            let mut data = vec![0xff; length];
            PvPanic.read(0, &mut data);
            assert!(data.iter().skip(1).all(|byte| *byte == 0));
            assert_eq!(PvPanic.write(0, &data), Outcome::Continue);
        }
    }
}
