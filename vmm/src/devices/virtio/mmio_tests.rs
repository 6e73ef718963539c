//! Tests of the transport with the entropy device; the tests play the driver.

use std::io::Cursor;
use std::sync::atomic::Ordering;

use proptest::prelude::*;
use virtio_queue::desc::{RawDescriptor, split::Descriptor};
use vm_memory::Bytes;

use super::*;
use crate::devices::virtio::Rng;
use crate::devices::virtio::test_line::Line;

const DESCRIPTORS: u64 = 0x1000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
const BUFFER: u64 = 0x4000;
const WRITE: u16 = 2;
const NEXT: u16 = 1;

struct Guest {
    transport: MmioTransport,
    memory: GuestMemoryMmap,
    line: Arc<Line>,
}

impl Guest {
    fn new() -> Guest {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1_0000)]).unwrap();
        let line = Arc::new(Line::default());
        let bytes: Vec<u8> = (1..=250).cycle().take(100_000).collect();
        let device = Box::new(Rng::new(Box::new(Cursor::new(bytes))));
        let transport = MmioTransport::new(device, memory.clone(), Arc::default(), line.clone());
        Guest { transport, memory, line }
    }

    fn read(&self, offset: u32) -> u32 {
        let mut data = [0xff; 4];
        self.transport.read(offset.into(), &mut data);
        u32::from_le_bytes(data)
    }

    fn write(&self, offset: u32, value: u32) {
        assert_eq!(self.transport.write(offset.into(), &value.to_le_bytes()), Outcome::Continue);
    }

    fn negotiate(&self, low: u32, high: u32) -> u32 {
        self.write(reg::VIRTIO_MMIO_STATUS, 0);
        self.write(reg::VIRTIO_MMIO_STATUS, 1);
        self.write(reg::VIRTIO_MMIO_STATUS, 3);
        for (select, value) in [(0, low), (1, high)] {
            self.write(reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL, select);
            self.write(reg::VIRTIO_MMIO_DRIVER_FEATURES, value);
        }
        self.write(reg::VIRTIO_MMIO_STATUS, 11);
        self.read(reg::VIRTIO_MMIO_STATUS)
    }

    fn set_up_queue(&self, size: u32) {
        self.write(reg::VIRTIO_MMIO_QUEUE_SEL, 0);
        self.write(reg::VIRTIO_MMIO_QUEUE_NUM, size);
        for (register, address) in [
            (reg::VIRTIO_MMIO_QUEUE_DESC_LOW, DESCRIPTORS),
            (reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW, AVAILABLE),
            (reg::VIRTIO_MMIO_QUEUE_USED_LOW, USED),
        ] {
            self.write(register, half(address, 0));
            self.write(register + 4, half(address, 1));
        }
        self.write(reg::VIRTIO_MMIO_QUEUE_READY, 1);
    }

    fn start(&self) {
        assert_eq!(self.negotiate(0, 1), 11);
        self.set_up_queue(8);
        self.write(reg::VIRTIO_MMIO_STATUS, 15);
        assert_eq!(self.read(reg::VIRTIO_MMIO_STATUS), 15);
    }

    fn descriptor(&self, index: u16, address: u64, length: u32, flags: u16, next: u16) {
        let descriptor = RawDescriptor::from(Descriptor::new(address, length, flags, next));
        let at = DESCRIPTORS + u64::from(index) * 16;
        self.memory.write_obj(descriptor, GuestAddress(at)).unwrap();
    }

    fn offer(&self, count: u16, heads: &[u16]) {
        for (i, head) in (0_u64..).zip(heads) {
            self.memory.write_obj(*head, GuestAddress(AVAILABLE + 4 + i * 2)).unwrap();
        }
        self.memory.write_obj(count, GuestAddress(AVAILABLE + 2)).unwrap();
        self.write(reg::VIRTIO_MMIO_QUEUE_NOTIFY, 0);
    }

    fn used(&self) -> u16 {
        self.memory.read_obj(GuestAddress(USED + 2)).unwrap()
    }
}

#[test]
fn identifies_itself() {
    let guest = Guest::new();
    assert_eq!(guest.read(0), u32::from_le_bytes(*b"virt"));
    assert_eq!((guest.read(4), guest.read(8)), (2, 4));
    assert_eq!(guest.read(reg::VIRTIO_MMIO_QUEUE_NUM_MAX), 64);
    guest.write(reg::VIRTIO_MMIO_QUEUE_SEL, 1);
    assert_eq!(guest.read(reg::VIRTIO_MMIO_QUEUE_NUM_MAX), 0);
    assert_eq!(guest.read(reg::VIRTIO_MMIO_SHM_LEN_LOW), u32::MAX);
    let mut byte = [7];
    guest.transport.read(0, &mut byte);
    assert_eq!(byte, [0]);
}

#[test]
fn features_are_negotiated() {
    let guest = Guest::new();
    guest.write(reg::VIRTIO_MMIO_DEVICE_FEATURES_SEL, 1);
    assert_eq!(guest.read(reg::VIRTIO_MMIO_DEVICE_FEATURES), 1);
    guest.write(reg::VIRTIO_MMIO_DEVICE_FEATURES_SEL, 0);
    assert_eq!(guest.read(reg::VIRTIO_MMIO_DEVICE_FEATURES), 3 << 28);
    assert_eq!(guest.negotiate(3 << 28, 1), 11);
    // not legacy, and nothing that was not offered
    assert_eq!(guest.negotiate(0, 0), 3);
    assert_eq!(guest.negotiate(1, 1), 3);
    assert_eq!(guest.negotiate(0, 3), 3);
}

#[test]
fn status_bits_come_in_order() {
    let guest = Guest::new();
    guest.write(reg::VIRTIO_MMIO_STATUS, 12);
    assert_eq!(guest.read(reg::VIRTIO_MMIO_STATUS), 0);
    guest.write(reg::VIRTIO_MMIO_STATUS, 1 | 128);
    assert_eq!(guest.read(reg::VIRTIO_MMIO_STATUS), 129);
    guest.write(reg::VIRTIO_MMIO_STATUS, 0);
    assert_eq!(guest.read(reg::VIRTIO_MMIO_STATUS), 0);
}

#[test]
fn entropy_arrives_with_an_interrupt() {
    let guest = Guest::new();
    guest.start();
    guest.descriptor(0, BUFFER, 32, WRITE | NEXT, 1);
    guest.descriptor(1, BUFFER + 32, 32, WRITE, 0);
    guest.offer(1, &[0]);
    assert_eq!(guest.used(), 1);
    let used: [u32; 2] = guest.memory.read_obj(GuestAddress(USED + 4)).unwrap();
    assert_eq!(used, [0, 64]);
    let mut bytes = [0; 64];
    guest.memory.read_slice(&mut bytes, GuestAddress(BUFFER)).unwrap();
    assert_eq!(bytes.to_vec(), (1..=64).collect::<Vec<u8>>());
    assert_eq!(guest.line.0.load(Ordering::Relaxed), 1);
    assert_eq!(guest.read(reg::VIRTIO_MMIO_INTERRUPT_STATUS), 1);
    guest.write(reg::VIRTIO_MMIO_INTERRUPT_ACK, 1);
    assert_eq!(guest.read(reg::VIRTIO_MMIO_INTERRUPT_STATUS), 0);
}

#[test]
fn a_queue_outside_ram_needs_a_reset() {
    for (register, value) in [
        (reg::VIRTIO_MMIO_QUEUE_DESC_HIGH, 1),
        (reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW, 0xfff_fffe),
        (reg::VIRTIO_MMIO_QUEUE_USED_LOW, 0x3001),
        (reg::VIRTIO_MMIO_QUEUE_NUM, 3),
        (reg::VIRTIO_MMIO_QUEUE_NUM, 128),
        (reg::VIRTIO_MMIO_QUEUE_NUM, 0x1_0008),
        (reg::VIRTIO_MMIO_QUEUE_NUM, 0),
    ] {
        let guest = Guest::new();
        guest.negotiate(0, 1);
        guest.set_up_queue(8);
        guest.write(reg::VIRTIO_MMIO_QUEUE_READY, 0);
        guest.write(register, value);
        guest.write(reg::VIRTIO_MMIO_QUEUE_READY, 1);
        guest.write(reg::VIRTIO_MMIO_STATUS, 15);
        assert_eq!(guest.read(reg::VIRTIO_MMIO_STATUS), 15 | 64, "{register:#x} {value:#x}");
        guest.offer(1, &[0]);
        guest.start();
    }
}

#[test]
fn buffers_that_are_none_harm_only_the_driver() {
    for (address, length) in [(0xffff_0000, 16), (0xfff0, 0x20), (u64::MAX, u32::MAX)] {
        let guest = Guest::new();
        guest.start();
        guest.descriptor(0, address, length, WRITE, 0);
        guest.offer(1, &[0]);
        assert_eq!(guest.read(reg::VIRTIO_MMIO_STATUS), 15 | 64);
        assert_eq!(guest.read(reg::VIRTIO_MMIO_INTERRUPT_STATUS) & 2, 2);
    }
    // a loop, and an index beyond the table
    let guest = Guest::new();
    guest.start();
    guest.descriptor(0, BUFFER, 16, WRITE | NEXT, 0);
    guest.offer(1, &[0]);
    guest.offer(2, &[0, 60_000]);
    guest.offer(60_000, &[]);
    // huge buffers get a little
    let guest = Guest::new();
    guest.start();
    guest.descriptor(0, 0, 0x1000, WRITE | NEXT, 1);
    guest.descriptor(1, BUFFER, 0x8000, WRITE, 0);
    guest.offer(1, &[0]);
    assert_eq!(guest.used(), 1);
}

#[test]
fn a_running_queue_cannot_be_changed() {
    let guest = Guest::new();
    guest.start();
    guest.write(reg::VIRTIO_MMIO_QUEUE_READY, 0);
    guest.write(reg::VIRTIO_MMIO_QUEUE_DESC_LOW, 0);
    assert_eq!(guest.read(reg::VIRTIO_MMIO_QUEUE_READY), 1);
    guest.write(reg::VIRTIO_MMIO_DRIVER_FEATURES, 0xffff);
    guest.descriptor(0, BUFFER, 8, WRITE, 0);
    guest.offer(1, &[0]);
    assert_eq!(guest.used(), 1);
    guest.write(reg::VIRTIO_MMIO_QUEUE_NOTIFY, 1);
    guest.write(reg::VIRTIO_MMIO_QUEUE_NOTIFY, u32::MAX);
}

proptest! {
    /// Whatever the driver does, nothing panics, status bits keep their order, and a reset makes
    /// everything work again.
    #[test]
    fn any_driver_is_survived(
        operations in prop::collection::vec(
            (any::<bool>(), prop_oneof![0_u32..0x110, any::<u32>()], prop_oneof![
                0_u32..16, Just(half(DESCRIPTORS, 0)), Just(half(AVAILABLE, 0)), any::<u32>(),
            ]),
            0..60,
        ),
        widths in prop::collection::vec(0_usize..9, 60),
        rings in prop::collection::vec(any::<u8>(), 0x400),
    ) {
        let guest = Guest::new();
        guest.memory.write_slice(&rings, GuestAddress(DESCRIPTORS)).unwrap();
        guest.memory.write_slice(&rings, GuestAddress(AVAILABLE)).unwrap();
        if operations.len() % 2 == 0 {
            guest.start();
        }
        for ((write, offset, value), width) in operations.into_iter().zip(widths) {
            let offset = u64::from(if width == 4 { offset & !3 } else { offset });
            let mut data = [0; 8];
            data[..4].copy_from_slice(&value.to_le_bytes());
            if write {
                guest.transport.write(offset, &data[..width]);
            } else {
                guest.transport.read(offset, &mut data[..width]);
            }
            let status = guest.read(reg::VIRTIO_MMIO_STATUS);
            prop_assert!(status & 8 == 0 || status & 3 == 3);
            prop_assert!(status & 4 == 0 || status & 11 == 11);
            prop_assert_eq!(guest.read(0), MAGIC);
        }
        guest.memory.write_slice(&[0; 0x3000], GuestAddress(DESCRIPTORS)).unwrap();
        guest.start();
        guest.descriptor(0, BUFFER, 16, WRITE, 0);
        guest.offer(1, &[0]);
        prop_assert_eq!(guest.used(), 1);
    }
}
