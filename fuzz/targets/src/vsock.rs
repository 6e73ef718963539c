//! The socket device: packets, descriptors and rings made of the input.
#[path = "../../../vmm/tests/vsock/driver.rs"]
mod driver;

use std::cell::RefCell;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::mpsc::{Receiver, channel};

use driver::{Driver, data, header};
use vm_memory::{Bytes, GuestAddress};
use vmtrace::devices::virtio::vsock::packet::{HOST_CID, Header, op};
use vmtrace::devices::virtio::vsock::{Incoming, Limits, Options};
use zerocopy::FromBytes;

const PORT: u32 = 1024;
const CONNECTIONS: usize = 8;

struct Target {
    driver: Driver,
    service: Receiver<Incoming>,
}

fn target() -> Target {
    let limits = Limits { connections: CONNECTIONS, ..Limits::default() };
    let driver = Driver::new(&Options { limits, ..Options::default() });
    let (sender, service) = channel();
    driver.host.listen(PORT, move |incoming| drop(sender.send(incoming))).unwrap();
    Target { driver, service }
}

thread_local! {
    // Made once: its memory is large.
    static TARGET: Rc<RefCell<Target>> = {
        // The process is not Rust's own: a write to what is closed would end it.
        let mut signals = nix::sys::signal::SigSet::empty();
        signals.add(nix::sys::signal::Signal::SIGPIPE);
        signals.thread_block().unwrap();
        Rc::new(RefCell::new(target()))
    };
}

fn number(input: &mut &[u8]) -> u64 {
    let mut bytes = [0; 8];
    let count = input.len().min(8);
    bytes[..count].copy_from_slice(&input[..count]);
    *input = &input[count..];
    u64::from_le_bytes(bytes)
}

/// A packet: a plausible one, with damage from the input.
fn packet(input: &mut &[u8]) -> Header {
    let (what, damage) = (number(input), number(input));
    let field = |shift: u32, of: u64| u32::try_from(damage >> shift & of).unwrap();
    let operation = u16::try_from(what & 7).unwrap();
    let mut packet = header(operation, field(0, 3), PORT);
    if what & 0x800 != 0 {
        packet.dst_port = (1 << 30 | field(4, 3)).into();
    }
    packet.flags = field(8, 3).into();
    packet.len = (u32::try_from(what >> 16 & 0x1_ffff).unwrap()).into();
    if what & 0x1000 != 0 {
        packet.buf_alloc = field(16, 0xffff).into();
        packet.fwd_cnt = field(32, 0xffff_ffff).into();
    }
    if what & 0xe000 == 0xe000 && input.len() >= Header::LENGTH {
        packet = Header::read_from_bytes(&input[..Header::LENGTH]).unwrap();
        packet.src_cid = driver::CID.into();
        packet.dst_cid = HOST_CID.into();
    }
    packet
}

fn drive(target: &mut Target, mut input: &[u8]) {
    let Target { driver, service } = target;
    let mut streams: Vec<UnixStream> = Vec::new();
    let mut buffer = [0; 4096];
    while let Some((&choice, rest)) = input.split_first() {
        input = rest;
        match choice % 16 {
            0..6 => {
                let header = packet(&mut input);
                let split = number(&mut input);
                let length =
                    (header.len.get() as usize).min(70_000) ^ usize::try_from(split >> 60).unwrap();
                let parts =
                    [split & 0x3f, split >> 8 & 0xfff].map(|part| usize::try_from(part).unwrap());
                let parts = &parts[..usize::try_from(split >> 24 & 0xff).unwrap() % 3];
                // Descriptors are lent anew each time: what the device does not use is lost.
                driver.tx.free = (0..driver::SIZE).rev().collect();
                driver.send_split(header, &vec![1; length], parts);
            }
            6 => {
                // Any descriptor, ring entry or index.
                let (place, value) = (number(&mut input), number(&mut input));
                let ring = if place & 1 == 0 { &driver.rx } else { &driver.tx };
                let area = [ring.descriptors, ring.available, ring.used]
                    [usize::try_from(place >> 1 & 0xff).unwrap() % 3];
                let at = GuestAddress(area + (place >> 8 & 0x1fff));
                driver.memory.write_obj(value, at).unwrap();
            }
            7 => {
                let head = u16::try_from(number(&mut input) & 0x1ff).unwrap();
                driver.offer(u32::from(choice >> 7), head);
            }
            8 => {
                driver.reset();
                assert_eq!(driver.host.connections(), 0);
                driver.start();
            }
            9 => streams.truncate(usize::from(choice >> 4)),
            10 => {
                for mut stream in &streams {
                    let _ = stream.read(&mut buffer);
                }
            }
            11 => {
                for mut stream in &streams {
                    let _ = stream.write(&buffer[..usize::from(choice >> 4) * 200 + 1]);
                }
            }
            12 => {
                let how = [std::net::Shutdown::Read, std::net::Shutdown::Write];
                for stream in &streams {
                    let _ = stream.shutdown(how[usize::from(choice >> 7)]);
                }
            }
            _ => {}
        }
        driver.notify(u32::from(choice) >> 6);
        driver.turn();
        while driver.next_used(0).is_some() || driver.next_used(1).is_some() {}
        while let Ok(incoming) = service.try_recv() {
            incoming.stream.set_nonblocking(true).unwrap();
            streams.push(incoming.stream);
        }
        assert!(driver.host.connections() <= CONNECTIONS);
    }
}

/// After a reset it is as good as new.
fn check(target: &mut Target) {
    let Target { driver, service } = target;
    driver.reset();
    assert_eq!(driver.status(), 0);
    driver.start();
    assert_eq!(driver.connect(PORT, 9).op(), op::RESPONSE);
    let mut stream = service.try_recv().unwrap().stream;
    driver.send(data(9, PORT, 4), b"calm");
    driver.turn();
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"calm");
    driver.reset();
}

pub(crate) fn run(input: &[u8]) {
    let target = TARGET.with(Rc::clone);
    let target = &mut *target.borrow_mut();
    target.driver.start();
    drive(target, input);
    check(target);
}
