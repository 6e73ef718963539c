//! Maps addresses to devices.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Device, Outcome};

/// An address space of devices: I/O ports or memory-mapped registers.
#[derive(Default)]
pub struct Bus {
    /// By first address: length in bytes and device.
    devices: BTreeMap<u64, (u64, Arc<dyn Device>)>,
}

/// Two devices want the same address.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("the {length} bytes at {base:#x} are empty or taken by another device")]
pub struct Overlap {
    /// First address of the device that came second.
    pub base: u64,
    /// Its length in bytes.
    pub length: u64,
}

impl Bus {
    /// A bus without devices.
    #[must_use]
    pub fn new() -> Bus {
        Bus::default()
    }

    /// Puts a device at `base`.
    pub fn insert(
        &mut self,
        base: u64,
        length: u64,
        device: Arc<dyn Device>,
    ) -> Result<(), Overlap> {
        let error = Overlap { base, length };
        let last = match length.checked_sub(1).and_then(|n| base.checked_add(n)) {
            Some(last) => last,
            None => return Err(error),
        };
        let before = self.devices.range(..=last).next_back();
        if before.is_some_and(|(start, (length, _))| start + (length - 1) >= base) {
            return Err(error);
        }
        self.devices.insert(base, (length, device));
        Ok(())
    }

    fn find(&self, address: u64) -> Option<(u64, &dyn Device)> {
        let (base, (length, device)) = self.devices.range(..=address).next_back()?;
        let offset = address - base;
        (offset < *length).then_some((offset, &**device))
    }

    /// The guest reads; where nobody answers, all bits are one.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        data.fill(0xff);
        if let Some((offset, device)) = self.find(address) {
            device.read(offset, data);
        }
    }

    /// The guest writes; where nobody listens, nothing happens.
    pub fn write(&self, address: u64, data: &[u8]) -> Outcome {
        self.find(address).map_or(Outcome::Continue, |(offset, device)| device.write(offset, data))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[derive(Default)]
    struct Recorder(Mutex<Vec<(u64, Vec<u8>)>>);

    impl Device for Recorder {
        fn read(&self, offset: u64, data: &mut [u8]) {
            data.fill(u8::try_from(offset).unwrap());
        }
        fn write(&self, offset: u64, data: &[u8]) -> Outcome {
            self.0.lock().unwrap().push((offset, data.to_vec()));
            Outcome::Continue
        }
    }

    #[test]
    fn devices_get_their_offsets() {
        let mut bus = Bus::new();
        let device = Arc::new(Recorder::default());
        bus.insert(0x10, 4, device.clone()).unwrap();
        let mut data = [0; 2];
        bus.read(0x13, &mut data);
        assert_eq!(data, [3, 3]);
        bus.read(0x14, &mut data);
        assert_eq!(data, [0xff, 0xff]);
        bus.read(0xf, &mut data);
        assert_eq!(data, [0xff, 0xff]);
        assert_eq!(bus.write(0x11, &[7]), Outcome::Continue);
        assert_eq!(bus.write(0x20, &[7]), Outcome::Continue);
        assert_eq!(*device.0.lock().unwrap(), [(1, vec![7])]);
    }

    #[test]
    fn overlaps_are_refused() {
        let mut bus = Bus::new();
        let device = Arc::new(Recorder::default());
        bus.insert(0x10, 4, device.clone()).unwrap();
        for (base, length) in [(0x10, 1), (0x13, 1), (0xf, 2), (0x0, 0x100), (0x12, 0x10)] {
            assert_eq!(bus.insert(base, length, device.clone()), Err(Overlap { base, length }));
        }
        for (base, length) in [(0x30, 0), (u64::MAX, 2)] {
            assert_eq!(bus.insert(base, length, device.clone()), Err(Overlap { base, length }));
        }
        bus.insert(0x14, 1, device.clone()).unwrap();
        bus.insert(0xf, 1, device.clone()).unwrap();
        bus.insert(u64::MAX, 1, device.clone()).unwrap();
        let mut data = [0; 8];
        bus.read(u64::MAX, &mut data);
        assert_eq!(data, [0; 8]);
    }
}
