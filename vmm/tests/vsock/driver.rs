//! A driver of the socket device that makes valid or invalid requests, as a test asks.

// Tests, benchmark and fuzzer need a part of it each.
#![allow(dead_code, unreachable_pub)]

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use virtio_bindings::virtio_mmio as reg;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmtrace::devices::virtio::MmioTransport;
use vmtrace::devices::virtio::vsock::packet::{HOST_CID, Header, TYPE_STREAM, op};
use vmtrace::devices::virtio::vsock::{Host, Options, Vsock, Worker};
use vmtrace::devices::{Device, Gate, IrqLine};
use vmtrace::events::EventLoop;
use vmtrace::sandbox::Thread;
use zerocopy::{FromBytes, IntoBytes};

pub const CID: u64 = 3;
pub const SIZE: u16 = 256;
/// What the guest says it can hold, bytes.
pub const CREDIT: u32 = 256 << 10;
/// Bytes of a receive buffer, as Linux has them.
const RX_BUFFER: u32 = 3776;
/// Bytes between transmit buffers.
const TX_BUFFER: u64 = 128 << 10;
pub const WRITE: u16 = 2;
pub const NEXT: u16 = 1;
const WAIT: Duration = Duration::from_secs(20);

#[derive(Default)]
struct Line(AtomicUsize);

impl IrqLine for Line {
    fn assert(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
    fn deassert(&self) {}
}

/// A queue as the driver sees it.
pub struct Ring {
    number: u32,
    pub descriptors: u64,
    pub available: u64,
    pub used: u64,
    pub buffers: u64,
    pub offered: u16,
    /// What had been offered when the device was last notified.
    notified: u16,
    seen: u16,
    pub free: Vec<u16>,
}

impl Ring {
    fn new(number: u32) -> Ring {
        let base = 0x1_0000 * (1 + u64::from(number));
        Ring {
            number,
            descriptors: base,
            available: base + 0x4000,
            used: base + 0x8000,
            buffers: 0x10_0000 + u64::from(number) * TX_BUFFER * u64::from(SIZE),
            offered: 0,
            notified: 0,
            seen: 0,
            free: (0..SIZE).rev().collect(),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packet {
    pub header: Header,
    pub data: Vec<u8>,
}

impl Packet {
    pub fn op(&self) -> u16 {
        self.header.op.get()
    }
}

pub struct Driver {
    transport: MmioTransport,
    pub memory: GuestMemoryMmap,
    pub host: Host,
    pub gate: Arc<Gate>,
    worker: Option<Worker>,
    events: Option<EventLoop>,
    pub rx: Ring,
    pub tx: Ring,
    line: Arc<Line>,
    features: u32,
    /// Bytes of a receive buffer.
    pub rx_buffer: u32,
}

/// Event indices.
pub const EVENT_IDX: u32 = 1 << 29;

impl Driver {
    /// A device whose worker has its turn when the driver waits.
    pub fn new(options: &Options) -> Driver {
        let (device, host, worker) = Vsock::with_worker(options).unwrap();
        Driver::with(device, host, Some(worker))
    }

    /// A device that an event loop serves.
    pub fn threaded(options: &Options) -> Driver {
        let events = EventLoop::start(Thread::Events).unwrap();
        let (device, host) = Vsock::new(options, &events.handle()).unwrap();
        let mut driver = Driver::with(device, host, None);
        driver.events = Some(events);
        driver
    }

    fn with(device: Vsock, host: Host, worker: Option<Worker>) -> Driver {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 128 << 20)]).unwrap();
        let (line, gate) = (Arc::new(Line::default()), Arc::new(Gate::default()));
        let transport = MmioTransport::new(
            Box::new(device),
            memory.clone(),
            Arc::clone(&gate),
            Arc::<Line>::clone(&line),
        );
        let (rx, tx) = (Ring::new(0), Ring::new(1));
        let (features, rx_buffer) = (EVENT_IDX, RX_BUFFER);
        let events = None;
        Driver { transport, memory, host, gate, worker, events, rx, tx, line, features, rx_buffer }
    }

    pub fn without_event_idx(mut self) -> Driver {
        self.features = 0;
        self
    }

    pub fn read(&self, register: u32) -> u32 {
        let mut data = [0; 4];
        self.transport.read(register.into(), &mut data);
        u32::from_le_bytes(data)
    }

    pub fn write(&self, register: u32, value: u32) {
        self.transport.write(register.into(), &value.to_le_bytes());
    }

    pub fn read_config(&self, offset: u64, data: &mut [u8]) {
        self.transport.read(u64::from(reg::VIRTIO_MMIO_CONFIG) + offset, data);
    }

    pub fn status(&self) -> u32 {
        self.read(reg::VIRTIO_MMIO_STATUS)
    }

    pub fn interrupts(&self) -> usize {
        self.line.0.load(Ordering::Relaxed)
    }

    pub fn reset(&mut self) {
        self.write(reg::VIRTIO_MMIO_STATUS, 0);
        (self.rx, self.tx) = (Ring::new(0), Ring::new(1));
        self.memory.write_slice(&[0; 0x4_0000], GuestAddress(0)).unwrap();
    }

    /// Everything up to `DRIVER_OK`.
    pub fn start_empty(&mut self) {
        for status in [1, 3] {
            self.write(reg::VIRTIO_MMIO_STATUS, status);
        }
        for (select, value) in [(0, self.features), (1, 1)] {
            self.write(reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL, select);
            self.write(reg::VIRTIO_MMIO_DRIVER_FEATURES, value);
        }
        self.write(reg::VIRTIO_MMIO_STATUS, 11);
        let events = Ring::new(2);
        for (ring, size) in [(&self.rx, SIZE), (&self.tx, SIZE), (&events, 16)] {
            self.write(reg::VIRTIO_MMIO_QUEUE_SEL, ring.number);
            self.write(reg::VIRTIO_MMIO_QUEUE_NUM, size.into());
            for (register, address) in [
                (reg::VIRTIO_MMIO_QUEUE_DESC_LOW, ring.descriptors),
                (reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW, ring.available),
                (reg::VIRTIO_MMIO_QUEUE_USED_LOW, ring.used),
            ] {
                self.write(register, u32::try_from(address).unwrap());
                self.write(register + 4, 0);
            }
            self.write(reg::VIRTIO_MMIO_QUEUE_READY, 1);
        }
        self.write(reg::VIRTIO_MMIO_STATUS, 15);
    }

    /// As [`Driver::start_empty`], with all receive buffers offered.
    pub fn start(&mut self) {
        self.start_empty();
        assert_eq!(self.status(), 15);
        self.offer_receive_buffers(SIZE);
    }

    pub fn offer_receive_buffers(&mut self, count: u16) {
        for _ in 0..count {
            let index = self.rx.free.pop().unwrap();
            let address = self.rx.buffers + u64::from(index) * TX_BUFFER;
            self.descriptor(self.rx.descriptors, index, address, self.rx_buffer, WRITE, 0);
            self.offer(0, index);
        }
        self.kick(0);
    }

    pub fn descriptor(&self, table: u64, index: u16, at: u64, length: u32, flags: u16, next: u16) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&at.to_le_bytes());
        bytes[8..12].copy_from_slice(&length.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        self.memory.write_slice(&bytes, GuestAddress(table + u64::from(index) * 16)).unwrap();
    }

    fn ring(&mut self, number: u32) -> &mut Ring {
        if number == 0 { &mut self.rx } else { &mut self.tx }
    }

    /// Makes a chain available.
    pub fn offer(&mut self, number: u32, head: u16) {
        let ring = self.ring(number);
        let entry = ring.available + 4 + u64::from(ring.offered % SIZE) * 2;
        ring.offered = ring.offered.wrapping_add(1);
        let (available, offered) = (ring.available, ring.offered);
        self.memory.write_obj(head, GuestAddress(entry)).unwrap();
        self.memory.store(offered, GuestAddress(available + 2), Ordering::SeqCst).unwrap();
    }

    /// Notifies the device if it asks for it.
    fn kick(&mut self, number: u32) {
        let event_idx = self.features & EVENT_IDX != 0;
        let ring = self.ring(number);
        let (used, offered, notified) = (ring.used, ring.offered, ring.notified);
        ring.notified = offered;
        fence(Ordering::SeqCst);
        let load = |offset| -> u16 {
            self.memory.load(GuestAddress(used + offset), Ordering::SeqCst).unwrap()
        };
        let wanted = if event_idx {
            let event = load(4 + u64::from(SIZE) * 8);
            offered.wrapping_sub(event).wrapping_sub(1) < offered.wrapping_sub(notified)
        } else {
            load(0) & 1 == 0
        };
        if wanted {
            self.notify(number);
        }
    }

    /// Notifies the device, whether it asks for it or not.
    pub fn notify(&self, number: u32) {
        self.write(reg::VIRTIO_MMIO_QUEUE_NOTIFY, number);
    }

    /// The next used entry of a queue: head and bytes.
    pub fn next_used(&mut self, number: u32) -> Option<(u16, u32)> {
        let ring = self.ring(number);
        let (used, seen) = (ring.used, ring.seen);
        let index: u16 = self.memory.load(GuestAddress(used + 2), Ordering::SeqCst).unwrap();
        if index == seen {
            return None;
        }
        let entry = used + 4 + u64::from(seen % SIZE) * 8;
        let [head, bytes]: [u32; 2] = self.memory.read_obj(GuestAddress(entry)).unwrap();
        let next = seen.wrapping_add(1);
        self.ring(number).seen = next;
        // used_event: an interrupt for the next
        let available = self.ring(number).available;
        let at = GuestAddress(available + 4 + u64::from(SIZE) * 2);
        self.memory.store(next, at, Ordering::SeqCst).unwrap();
        Some((u16::try_from(head & 0xffff).unwrap(), bytes))
    }

    /// Sends a packet in descriptors of these lengths (the rest in the last).
    pub fn send_split(&mut self, header: Header, data: &[u8], lengths: &[usize]) {
        let bytes = [header.as_bytes(), data].concat();
        let head = self.tx_chain(&bytes, lengths);
        self.offer(1, head);
        self.kick(1);
    }

    fn tx_chain(&mut self, bytes: &[u8], lengths: &[usize]) -> u16 {
        while self.tx.free.len() <= lengths.len() {
            self.turn();
            self.reap();
        }
        let count = lengths.len() + 1;
        let indices: Vec<u16> = (0..count).map(|_| self.tx.free.pop().unwrap()).collect();
        let mut rest = bytes;
        for (i, index) in indices.iter().enumerate() {
            let length = lengths.get(i).copied().unwrap_or(rest.len()).min(rest.len());
            let (part, left) = rest.split_at(length);
            rest = left;
            let address = self.tx.buffers + u64::from(*index) * TX_BUFFER;
            self.memory.write_slice(part, GuestAddress(address)).unwrap();
            let (flags, next) = indices.get(i + 1).map_or((0, 0), |next| (NEXT, *next));
            let length = u32::try_from(length).unwrap();
            self.descriptor(self.tx.descriptors, *index, address, length, flags, next);
        }
        indices[0]
    }

    /// Sends a packet without copying: the data is what was in that buffer before.
    pub fn send_again(&mut self, header: Header) {
        while self.tx.free.is_empty() {
            self.turn();
            self.reap();
        }
        let index = self.tx.free.pop().unwrap();
        let address = self.tx.buffers + u64::from(index) * TX_BUFFER;
        self.memory.write_slice(header.as_bytes(), GuestAddress(address)).unwrap();
        let length = u32::try_from(Header::LENGTH).unwrap() + header.len.get();
        self.descriptor(self.tx.descriptors, index, address, length, 0, 0);
        self.offer(1, index);
        self.kick(1);
    }

    /// Takes back descriptors that the device has used.
    pub fn reap(&mut self) {
        while let Some((head, _)) = self.next_used(1) {
            let mut index = head;
            loop {
                self.tx.free.push(index);
                let at = self.tx.descriptors + u64::from(index) * 16 + 12;
                let [flags, next]: [u16; 2] = self.memory.read_obj(GuestAddress(at)).unwrap();
                if flags & NEXT == 0 {
                    break;
                }
                index = next;
            }
        }
    }

    pub fn send(&mut self, header: Header, data: &[u8]) {
        self.send_split(header, data, &[]);
    }

    /// Gives the device's worker its turn, or its thread time.
    pub fn turn(&mut self) {
        match &mut self.worker {
            Some(worker) => assert!(worker.turn(Some(Duration::ZERO))),
            None => std::thread::yield_now(),
        }
    }

    /// The next packet that is there already; without its data if `skip`.
    pub fn take(&mut self, skip: bool) -> Option<Packet> {
        let (head, bytes) = self.next_used(0)?;
        let address = self.rx.buffers + u64::from(head) * TX_BUFFER;
        let mut header = [0; Header::LENGTH];
        self.memory.read_slice(&mut header, GuestAddress(address)).unwrap();
        let header = Header::read_from_bytes(&header).unwrap();
        assert_eq!(bytes as usize, Header::LENGTH + header.len.get() as usize);
        assert_eq!(header.dst_cid.get(), CID);
        let mut data = vec![0; if skip { 0 } else { header.len.get() as usize }];
        self.memory.read_slice(&mut data, GuestAddress(address + 44)).unwrap();
        self.rx.free.push(head);
        Some(Packet { header, data })
    }

    /// The next packet, if one comes; its buffer is offered again.
    pub fn poll(&mut self) -> Option<Packet> {
        for _ in 0..3 {
            if let Some(packet) = self.take(false) {
                self.offer_receive_buffers(1);
                return Some(packet);
            }
            self.turn();
        }
        None
    }

    /// The next packet, which must come.
    pub fn packet(&mut self) -> Packet {
        let start = Instant::now();
        loop {
            if let Some(packet) = self.poll() {
                return packet;
            }
            assert!(start.elapsed() < WAIT, "no packet");
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// The next packet, which must be this.
    pub fn expect(&mut self, operation: u16) -> Packet {
        let packet = self.packet();
        assert_eq!(packet.op(), operation, "{packet:?}");
        packet
    }

    /// No packet comes.
    pub fn expect_nothing(&mut self) {
        assert_eq!(self.poll(), None);
    }

    /// Opens a connection to the host.
    pub fn connect(&mut self, port: u32, guest_port: u32) -> Packet {
        self.send(header(op::REQUEST, guest_port, port), &[]);
        self.packet()
    }

    /// What `connect` reads, in a thread of its own: the connection, or why there is none.
    pub fn asking(&self, port: u32) -> JoinHandle<Result<UnixStream, String>> {
        let host = self.host.clone();
        std::thread::spawn(move || connect(&host, port, WAIT))
    }

    /// The driver ends, and the device with it.
    pub fn finish(self) -> Host {
        self.host
    }
}

/// Connects to a port of the guest, and waits for the answer.
pub fn connect(host: &Host, port: u32, limit: Duration) -> Result<UnixStream, String> {
    let (ours, theirs) = UnixStream::pair().unwrap();
    host.pass(theirs, port, limit, |error| error.to_string());
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        let mut byte = [0];
        assert_eq!((&ours).read(&mut byte).unwrap(), 1, "no answer");
        line.extend(byte);
    }
    match String::from_utf8(line).unwrap().trim_end() {
        "OK" => Ok(ours),
        other => Err(other.strip_prefix("ERR ").unwrap().to_owned()),
    }
}

/// A packet from the guest.
pub fn header(operation: u16, guest_port: u32, port: u32) -> Header {
    Header {
        src_cid: CID.into(),
        dst_cid: HOST_CID.into(),
        src_port: guest_port.into(),
        dst_port: port.into(),
        kind: TYPE_STREAM.into(),
        op: operation.into(),
        buf_alloc: CREDIT.into(),
        ..Header::default()
    }
}

/// A packet with data.
pub fn data(guest_port: u32, port: u32, length: usize) -> Header {
    Header { len: u32::try_from(length).unwrap().into(), ..header(op::RW, guest_port, port) }
}
