//! Stress test of the socket device: guests and host processes open, close, abort, stall, send
//! invalid packets and break queues, all at once. At the end no connection may remain.
//!
//! `VMTRACE_SOAK_SECONDS` is the time (2 by default), and `VMTRACE_SOAK_SEED` the seed that repeats
//! the choices.

#[path = "vsock/driver.rs"]
mod driver;

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use driver::{CREDIT, Driver, Packet, SIZE, data, header};
use vm_memory::{Bytes, GuestAddress};
use vmtrace::devices::virtio::vsock::packet::{Header, SHUTDOWN_BOTH, op};
use vmtrace::devices::virtio::vsock::{Incoming, Limits, Options};

const SERVICE: u32 = 1024;
const SOCKET: u32 = 2000;
const CLOSE_TIME: Duration = Duration::from_millis(300);
/// What may come and go, KiB: buffers of 300 connections.
const MEMORY: u64 = 128 << 10;
const PATIENCE: Duration = Duration::from_secs(20);

/// Random enough, and the same for the same seed (xorshift).
struct Dice(u64);

impl Dice {
    fn throw(&mut self, sides: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        u32::try_from(self.0 >> 40).unwrap() % sides
    }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Resident memory of this process, KiB.
fn memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse().unwrap()
}

/// A host process with a connection: does something with it and leaves.
fn misuse(mut stream: UnixStream, dice: &mut Dice) {
    let _ = stream.set_read_timeout(Some(Duration::from_millis(5)));
    let _ = stream.set_write_timeout(Some(Duration::from_millis(5)));
    let mut buffer = vec![7; 100_000];
    for _ in 0..dice.throw(6) {
        let length = dice.throw(100_000) as usize;
        let _ = match dice.throw(6) {
            0 => stream.shutdown(Shutdown::Write).map(|()| 0),
            1 => stream.shutdown(Shutdown::Read).map(|()| 0),
            2 | 3 => stream.read(&mut buffer[..length]),
            _ => stream.write(&buffer[..length]),
        };
    }
}

fn consumer(service: &Receiver<Incoming>, seed: u64) {
    let mut dice = Dice(seed);
    let mut held = Vec::new();
    for incoming in service {
        if dice.throw(4) == 0 {
            held.push(incoming.stream);
        } else {
            misuse(incoming.stream, &mut dice);
        }
        if held.len() > 50 {
            held.clear();
        }
    }
}

fn client(path: &Path, stop: &AtomicBool, seed: u64) {
    let mut dice = Dice(seed);
    while !stop.load(Ordering::Relaxed) {
        let Ok(mut stream) = UnixStream::connect(path) else { continue };
        let _ = match dice.throw(5) {
            0 => stream.write_all(b"CONN"),
            1 => stream.write_all(b"rubbish\n"),
            _ => writeln!(stream, "CONNECT {}", dice.throw(50)),
        };
        misuse(stream, &mut dice);
    }
}

fn listener(listener: &UnixListener, stop: &AtomicBool, seed: u64) {
    let mut dice = Dice(seed);
    listener.set_nonblocking(true).unwrap();
    while !stop.load(Ordering::Relaxed) {
        match listener.accept() {
            Ok((stream, _)) => misuse(stream, &mut dice),
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// The guest: many processes without manners.
struct Guest {
    driver: Driver,
    dice: Dice,
    /// Bytes received, by guest's and host's port.
    received: HashMap<(u32, u32), u32>,
    packets: u64,
    resets: u64,
}

impl Guest {
    fn any_connection(&mut self) -> (u32, u32) {
        let skip = self.dice.throw(u32::try_from(self.received.len()).unwrap().max(1)) as usize;
        self.received.keys().nth(skip).copied().unwrap_or((1, SERVICE))
    }

    fn act(&mut self) {
        let (guest, local) = self.any_connection();
        let flags = self.dice.throw(8).into();
        match self.dice.throw(2000) {
            0..400 => {
                let port = [SERVICE, SOCKET, 5, u32::MAX][self.dice.throw(4) as usize];
                let guest = self.dice.throw(1000);
                self.driver.send(header(op::REQUEST, guest, port), &[]);
            }
            400..1200 => {
                let length = self.dice.throw(40_000) as usize;
                let split = [self.dice.throw(100) as usize, 44, 3000];
                let bytes = vec![1; length];
                let parts = &split[..self.dice.throw(4) as usize];
                self.driver.send_split(data(guest, local, length), &bytes, parts);
            }
            1200..1400 => {
                self.driver.send(Header { flags, ..header(op::SHUTDOWN, guest, local) }, &[]);
            }
            1400..1500 => self.driver.send(header(op::RST, guest, local), &[]),
            1500..1700 => {
                let fwd_cnt = self.received.get(&(guest, local)).copied().unwrap_or(0);
                let lie = self.dice.throw(3) * self.dice.throw(1 << 24);
                let fwd_cnt = fwd_cnt.wrapping_add(lie).into();
                let update = header(op::CREDIT_UPDATE, guest, local);
                self.driver.send(Header { fwd_cnt, ..update }, &[]);
            }
            1700..1995 => {
                let mut bytes = [0; Header::LENGTH];
                bytes.fill_with(|| u8::try_from(self.dice.throw(256)).unwrap());
                let mut any: Header = zerocopy::transmute!(bytes);
                let plain = header(op::RW, guest, local);
                (any.src_cid, any.dst_cid) = (plain.src_cid, plain.dst_cid);
                (any.src_port, any.dst_port) = (plain.src_port, plain.dst_port);
                any.op = u16::try_from(self.dice.throw(9)).unwrap().into();
                if self.dice.throw(2) == 0 {
                    any.kind = plain.kind;
                    any.len = self.dice.throw(70_000).into();
                }
                self.driver.send(any, &bytes);
            }
            1995 => {
                let at = self.driver.tx.available + 2;
                let ahead = self.driver.tx.offered.wrapping_add(SIZE + 1);
                self.driver.memory.write_obj(ahead, GuestAddress(at)).unwrap();
                self.driver.notify(1);
                self.restart();
            }
            1996 => self.restart(),
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }

    fn restart(&mut self) {
        self.driver.reset();
        self.received.clear();
        self.driver.start();
        self.resets += 1;
    }

    /// Takes what the device has sent; `honest` guests do what they should.
    fn take(&mut self, honest: bool) {
        while let Some(Packet { header: got, .. }) = self.driver.take(true) {
            self.driver.offer_receive_buffers(1);
            self.packets += 1;
            let key = (got.dst_port.get(), got.src_port.get());
            match got.op.get() {
                op::RST => {
                    self.received.remove(&key);
                }
                op::REQUEST => match self.dice.throw(3) {
                    _ if honest => self.driver.send(got.reset(), &[]),
                    0 => self.driver.send(got.reset(), &[]),
                    1 => {}
                    _ => {
                        self.received.insert(key, 0);
                        self.driver.send(header(op::RESPONSE, key.0, key.1), &[]);
                    }
                },
                op::RESPONSE => {
                    self.received.insert(key, 0);
                }
                _ => {
                    let count = self.received.entry(key).or_default();
                    *count = count.wrapping_add(got.len.get());
                    let update = header(op::CREDIT_UPDATE, key.0, key.1);
                    let update = Header { fwd_cnt: (*count).into(), ..update };
                    if honest || self.dice.throw(2) == 0 {
                        self.driver.send(update, &[]);
                    }
                }
            }
        }
        self.driver.reap();
        assert!(self.received.len() < 100_000);
    }

    fn run(&mut self, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            for _ in 0..100 {
                self.act();
                // Also takes care of `send`, which waits for descriptors.
                self.take(false);
            }
        }
    }

    /// Every connection's host side has gone: without the guest's closing any, they must end.
    fn calm_down(&mut self) {
        let start = Instant::now();
        for (guest, local) in self.received.keys().copied().collect::<Vec<_>>() {
            let Some(received) = self.received.get(&(guest, local)) else { continue };
            let fwd_cnt = (*received).into();
            let update = header(op::CREDIT_UPDATE, guest, local);
            self.driver.send(Header { fwd_cnt, buf_alloc: CREDIT.into(), ..update }, &[]);
            self.take(true);
        }
        while self.driver.host.connections() > 0 {
            self.take(true);
            std::thread::sleep(Duration::from_millis(1));
            let left = self.driver.host.connections();
            assert!(start.elapsed() < PATIENCE, "{left} connections are stuck");
        }
    }
}

#[test]
fn storms_leave_nothing_behind() {
    let number = |name| std::env::var(name).ok().map(|value| value.parse::<u64>().unwrap());
    let seconds = number("VMTRACE_SOAK_SECONDS").unwrap_or(2);
    let seed =
        number("VMTRACE_SOAK_SEED").unwrap_or_else(|| u64::from(std::process::id()) << 20 | 1);
    println!("VMTRACE_SOAK_SEED={seed}");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("v.sock");
    let socket = directory.path().join(format!("v.sock_{SOCKET}"));
    let baseline = descriptors();
    let limits = Limits {
        connections: 300,
        connect_time: CLOSE_TIME,
        close_time: CLOSE_TIME,
        linger_time: CLOSE_TIME,
        ..Limits::default()
    };
    let options = Options { socket: Some(path.clone()), limits, ..Options::default() };
    let mut driver = Driver::threaded(&options);
    driver.start();
    let (sender, service) = channel();
    driver.host.listen(SERVICE, move |incoming| drop(sender.send(incoming))).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let accepting = UnixListener::bind(&socket).unwrap();
    let dice = Dice(seed);
    let mut guest = Guest { driver, dice, received: HashMap::new(), packets: 0, resets: 0 };
    let idle = descriptors();
    std::thread::scope(|scope| {
        let stopping = &*stop;
        for i in 1..3 {
            let path = &path;
            scope.spawn(move || client(path, stopping, seed ^ (i << 50)));
        }
        scope.spawn(|| listener(&accepting, stopping, seed ^ (3 << 50)));
        let consumer = scope.spawn(move || {
            let (forward, incoming) = channel();
            std::thread::scope(|scope| {
                scope.spawn(move || consumer(&incoming, seed ^ (4 << 50)));
                while !stopping.load(Ordering::Relaxed) {
                    if let Ok(incoming) = service.recv_timeout(Duration::from_millis(5)) {
                        forward.send(incoming).unwrap();
                    }
                }
                drop(forward);
            });
            service
        });
        // By the end of the first half everything has been as large as it gets.
        guest.run(Duration::from_secs(seconds) / 2);
        let half = memory();
        guest.run(Duration::from_secs(seconds) / 2);
        println!("{half} KiB of memory after one half, {} after the other", memory());
        assert!(memory() < half + MEMORY, "memory leaks");
        stop.store(true, Ordering::Relaxed);
        // The consumers leave, and then nobody takes the guest's connections any more.
        while !consumer.is_finished() {
            guest.take(false);
        }
        drop(consumer.join().unwrap());
    });
    drop(accepting);
    guest.calm_down();
    println!("{} packets for the guest, {} resets", guest.packets, guest.resets);
    assert!(guest.packets > 100);
    assert_eq!(guest.driver.status(), 15);
    assert!(descriptors() < idle, "descriptors leak");
    // And it is as good as new.
    let (sender, service) = channel();
    guest.driver.host.listen(3000, move |incoming| sender.send(incoming).unwrap()).unwrap();
    guest.take(true);
    assert_eq!(guest.driver.connect(3000, 1).op(), op::RESPONSE);
    let mut stream = service.recv().unwrap().stream;
    guest.driver.send(data(1, 3000, 4), b"calm");
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"calm");
    guest.driver.send(Header { flags: SHUTDOWN_BOTH.into(), ..header(op::SHUTDOWN, 1, 3000) }, &[]);
    guest.driver.expect(op::RST);
    drop((guest, stream));
    assert_eq!(descriptors(), baseline);
    assert!(!path.exists());
}
