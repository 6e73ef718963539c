//! A driver of the block device that makes valid or invalid requests, as a test asks.

// Tests and fuzzer need a part of it each.
#![allow(dead_code, unreachable_pub)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use virtio_bindings::virtio_mmio as reg;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmtrace::devices::virtio::MmioTransport;
use vmtrace::devices::virtio::blk::{Block, Disk, Worker};
use vmtrace::devices::{Device, Gate, IrqLine};

pub const SIZE: u16 = 256;
pub const MEMORY: u64 = 16 << 20;
pub const DESCRIPTORS: u64 = 0x1000;
pub const AVAILABLE: u64 = 0x4000;
pub const USED: u64 = 0x8000;
/// Header, data for the device, data for the driver, status.
pub const HEADER: u64 = 0x1_0000;
pub const FROM: u64 = 0x10_0000;
pub const TO: u64 = 0x80_0000;
pub const STATUS: u64 = 0x2_0000;
pub const WRITE: u16 = 2;
pub const NEXT: u16 = 1;
/// A status that no device gives.
pub const NONE: u8 = 0xee;

pub const IN: u32 = 0;
pub const OUT: u32 = 1;
pub const FLUSH: u32 = 4;
pub const GET_ID: u32 = 8;
pub const DISCARD: u32 = 11;
pub const WRITE_ZEROES: u32 = 13;

#[derive(Default)]
struct Line(AtomicUsize);

impl IrqLine for Line {
    fn assert(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
    fn deassert(&self) {}
}

pub struct Driver {
    transport: MmioTransport,
    pub memory: GuestMemoryMmap,
    pub gate: Arc<Gate>,
    worker: Option<Worker>,
    line: Arc<Line>,
    pub offered: u16,
    pub seen: u16,
}

/// A descriptor: address, length, and whether the device writes it.
pub type Piece = (u64, u32, bool);

/// How a request has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct End {
    pub status: u8,
    /// What the used ring says was written.
    pub length: u32,
}

impl Driver {
    /// A device whose worker has its turn when the driver waits, with all that it offers.
    pub fn new(disk: Disk) -> Driver {
        let (device, worker) = Block::with_worker(7, disk).unwrap();
        let mut driver = Driver::with(device, Some(worker));
        driver.start(u32::MAX);
        driver
    }

    /// A device with its thread.
    pub fn threaded(disk: Disk) -> Driver {
        let mut driver = Driver::with(Block::new(0, disk).unwrap(), None);
        driver.start(u32::MAX);
        driver
    }

    fn with(device: Block, worker: Option<Worker>) -> Driver {
        let length = usize::try_from(MEMORY).unwrap();
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), length)]).unwrap();
        let (line, gate) = (Arc::new(Line::default()), Arc::new(Gate::default()));
        let transport = MmioTransport::new(
            Box::new(device),
            memory.clone(),
            Arc::clone(&gate),
            Arc::<Line>::clone(&line),
        );
        Driver { transport, memory, gate, worker, line, offered: 0, seen: 0 }
    }

    pub fn read(&self, register: u32) -> u32 {
        let mut data = [0; 4];
        self.transport.read(register.into(), &mut data);
        u32::from_le_bytes(data)
    }

    pub fn write(&self, register: u32, value: u32) {
        self.transport.write(register.into(), &value.to_le_bytes());
    }

    pub fn config<const LENGTH: usize>(&self, offset: u64) -> [u8; LENGTH] {
        let mut data = [0; LENGTH];
        self.transport.read(u64::from(reg::VIRTIO_MMIO_CONFIG) + offset, &mut data);
        data
    }

    /// The low half of what the device offers.
    pub fn features(&self) -> u32 {
        self.write(reg::VIRTIO_MMIO_DEVICE_FEATURES_SEL, 0);
        self.read(reg::VIRTIO_MMIO_DEVICE_FEATURES)
    }

    pub fn status(&self) -> u32 {
        self.read(reg::VIRTIO_MMIO_STATUS)
    }

    pub fn needs_reset(&self) -> bool {
        self.status() & 64 != 0
    }

    pub fn interrupts(&self) -> usize {
        self.line.0.load(Ordering::Relaxed)
    }

    /// Resets the device and starts it with those features of `mask` that it has.
    pub fn start(&mut self, mask: u32) {
        self.write(reg::VIRTIO_MMIO_STATUS, 0);
        assert_eq!(self.status(), 0);
        (self.offered, self.seen) = (0, 0);
        self.memory.write_slice(&[0; 0x1_0000], GuestAddress(0)).unwrap();
        for status in [1, 3] {
            self.write(reg::VIRTIO_MMIO_STATUS, status);
        }
        // Without event indices every used buffer interrupts.
        let accepted = self.features() & mask & !(1 << 29);
        for (select, value) in [(0, accepted), (1, 1)] {
            self.write(reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL, select);
            self.write(reg::VIRTIO_MMIO_DRIVER_FEATURES, value);
        }
        self.write(reg::VIRTIO_MMIO_STATUS, 11);
        self.write(reg::VIRTIO_MMIO_QUEUE_SEL, 0);
        self.write(reg::VIRTIO_MMIO_QUEUE_NUM, SIZE.into());
        for (register, address) in [
            (reg::VIRTIO_MMIO_QUEUE_DESC_LOW, DESCRIPTORS),
            (reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW, AVAILABLE),
            (reg::VIRTIO_MMIO_QUEUE_USED_LOW, USED),
        ] {
            self.write(register, u32::try_from(address).unwrap());
            self.write(register + 4, 0);
        }
        self.write(reg::VIRTIO_MMIO_QUEUE_READY, 1);
        self.write(reg::VIRTIO_MMIO_STATUS, 15);
        assert_eq!(self.status(), 15);
    }

    pub fn descriptor(&self, index: u16, address: u64, length: u32, flags: u16, next: u16) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&address.to_le_bytes());
        bytes[8..12].copy_from_slice(&length.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        let at = GuestAddress(DESCRIPTORS + u64::from(index % SIZE) * 16);
        self.memory.write_slice(&bytes, at).unwrap();
    }

    /// A chain of these pieces from descriptor `first` on.
    pub fn chain(&self, first: u16, pieces: &[Piece]) {
        for (index, &(address, length, write)) in (first..).zip(pieces) {
            let last = usize::from(index - first) + 1 == pieces.len();
            let flags = if write { WRITE } else { 0 } | if last { 0 } else { NEXT };
            self.descriptor(index, address, length, flags, index + 1);
        }
    }

    /// Makes a chain available, without saying so.
    pub fn offer(&mut self, head: u16) {
        let at = AVAILABLE + 4 + u64::from(self.offered % SIZE) * 2;
        self.memory.write_obj(head, GuestAddress(at)).unwrap();
        self.offered = self.offered.wrapping_add(1);
        self.memory.write_obj(self.offered, GuestAddress(AVAILABLE + 2)).unwrap();
    }

    pub fn notify(&mut self) {
        self.write(reg::VIRTIO_MMIO_QUEUE_NOTIFY, 0);
        if let Some(worker) = &mut self.worker {
            worker.turn();
        }
    }

    /// The next used element: head and length.
    pub fn next_used(&mut self) -> Option<(u32, u32)> {
        let index: u16 = self.memory.read_obj(GuestAddress(USED + 2)).unwrap();
        if index == self.seen {
            return None;
        }
        let at = USED + 4 + u64::from(self.seen % SIZE) * 8;
        self.seen = self.seen.wrapping_add(1);
        let word = |at| self.memory.read_obj::<u32>(GuestAddress(at)).unwrap();
        Some((word(at), word(at + 4)))
    }

    pub fn header(&self, at: u64, kind: u32, sector: u64) {
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        self.memory.write_slice(&header, GuestAddress(at)).unwrap();
    }

    /// A chain that was offered has come back; `None`: it has not.
    pub fn end(&mut self) -> Option<End> {
        let (_, length) = self.next_used()?;
        Some(End { status: self.memory.read_obj(GuestAddress(STATUS)).unwrap(), length })
    }

    /// A chain of these pieces between a header and a status.
    pub fn send(&mut self, kind: u32, sector: u64, data: &[Piece]) -> Option<End> {
        self.header(HEADER, kind, sector);
        let pieces = [&[(HEADER, 16, false)], data, &[(STATUS, 1, true)]].concat();
        self.send_chain(&pieces)
    }

    pub fn send_chain(&mut self, pieces: &[Piece]) -> Option<End> {
        self.memory.write_obj(NONE, GuestAddress(STATUS)).unwrap();
        self.chain(0, pieces);
        self.offer(0);
        self.notify();
        self.end()
    }

    /// What is in there, in pieces of these lengths.
    pub fn read_disk(&mut self, sector: u64, pieces: &[u32]) -> (End, Vec<u8>) {
        let mut at = TO;
        let mut data = Vec::new();
        for &length in pieces {
            data.push((at, length, true));
            at += u64::from(length);
        }
        let mut bytes = vec![0xdd; usize::try_from(at - TO).unwrap()];
        self.memory.write_slice(&bytes, GuestAddress(TO)).unwrap();
        let end = self.send(IN, sector, &data).expect("it ends");
        self.memory.read_slice(&mut bytes, GuestAddress(TO)).unwrap();
        (end, bytes)
    }

    pub fn write_disk(&mut self, sector: u64, bytes: &[u8]) -> End {
        self.memory.write_slice(bytes, GuestAddress(FROM)).unwrap();
        let length = u32::try_from(bytes.len()).unwrap();
        self.send(OUT, sector, &[(FROM, length, false)]).expect("it ends")
    }

    /// To discard or to clear ranges of sectors, with their flags.
    pub fn clear(&mut self, kind: u32, ranges: &[(u64, u32, u32)]) -> End {
        let mut bytes = Vec::new();
        for (sector, sectors, flags) in ranges {
            bytes.extend(sector.to_le_bytes());
            bytes.extend(sectors.to_le_bytes());
            bytes.extend(flags.to_le_bytes());
        }
        self.memory.write_slice(&bytes, GuestAddress(FROM)).unwrap();
        let length = u32::try_from(bytes.len()).unwrap();
        self.send(kind, 0, &[(FROM, length, false)]).expect("it ends")
    }
}
