//! Bytes per second through the socket device, in each direction, with a driver in this process.
//! For comparison the Unix socket alone, which is the second half of the path.
//!
//! `cargo bench -p vmtrace --bench vsock`

#[path = "../tests/vsock/driver.rs"]
mod driver;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::channel;

use divan::Bencher;
use divan::counter::BytesCount;
use driver::{Driver, data, header};
use vmtrace::devices::virtio::vsock::Options;
use vmtrace::devices::virtio::vsock::packet::{Header, op};

const PORT: u32 = 1024;
const TOTAL: u32 = 256 << 20;
const PIECE: usize = 64 << 10;
const CREDIT: u32 = 256 << 10;

fn main() {
    divan::main();
}

fn connected(rx_buffer: u32) -> (Driver, UnixStream) {
    let mut driver = Driver::threaded(&Options::default());
    driver.rx_buffer = rx_buffer;
    driver.start();
    let (sender, receiver) = channel();
    driver.host.listen(PORT, move |incoming| sender.send(incoming).unwrap()).unwrap();
    assert_eq!(driver.connect(PORT, 9).op(), op::RESPONSE);
    (driver, receiver.recv().unwrap().stream)
}

/// Reads so many bytes.
fn consume(mut stream: &UnixStream) {
    let (mut buffer, mut left) = (vec![0; 256 << 10], TOTAL as usize);
    while left > 0 {
        left -= stream.read(&mut buffer).unwrap();
    }
}

fn produce(mut stream: &UnixStream) {
    let buffer = vec![0; PIECE];
    for _ in 0..TOTAL as usize / PIECE {
        stream.write_all(&buffer).unwrap();
    }
}

/// Packets of this many bytes, read by a thread.
#[divan::bench(sample_count = 10, args = [4 << 10, 32 << 10, 64 << 10])]
fn guest_to_host(bencher: Bencher<'_, '_>, packet: u32) {
    let (mut driver, stream) = connected(4096);
    let (mut sent, mut forwarded) = (0_u32, 0);
    bencher.counter(BytesCount::new(TOTAL)).bench_local(|| {
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| consume(&stream));
            let end = sent.wrapping_add(TOTAL);
            while sent != end {
                if CREDIT - sent.wrapping_sub(forwarded) >= packet {
                    driver.send_again(data(9, PORT, packet as usize));
                    sent = sent.wrapping_add(packet);
                    continue;
                }
                let Some(update) = driver.take(true) else {
                    driver.turn();
                    continue;
                };
                driver.offer_receive_buffers(1);
                forwarded = update.header.fwd_cnt.get();
            }
            reader.join().unwrap();
        });
    });
}

/// Receive buffers of this many bytes: what Linux has since 6.2, and what it could have.
#[divan::bench(sample_count = 10, args = [3776, 65_580])]
fn host_to_guest(bencher: Bencher<'_, '_>, buffer: u32) {
    let (mut driver, stream) = connected(buffer);
    let (mut got, mut told) = (0_u32, 0);
    bencher.counter(BytesCount::new(TOTAL)).bench_local(|| {
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| produce(&stream));
            let end = got.wrapping_add(TOTAL);
            while got != end {
                let Some(packet) = driver.take(true) else {
                    driver.turn();
                    continue;
                };
                driver.offer_receive_buffers(1);
                got = got.wrapping_add(packet.header.len.get());
                // As Linux does it: when less than a large packet would fit.
                if got.wrapping_sub(told) > driver::CREDIT - (64 << 10) || got == end {
                    driver.reap();
                    let update = header(op::CREDIT_UPDATE, 9, PORT);
                    driver.send(Header { fwd_cnt: got.into(), ..update }, &[]);
                    told = got;
                }
            }
            writer.join().unwrap();
        });
    });
}

/// The Unix socket alone, from thread to thread.
#[divan::bench(sample_count = 10)]
fn unix_socket(bencher: Bencher<'_, '_>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    bencher.counter(BytesCount::new(TOTAL)).bench_local(|| {
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| consume(&theirs));
            produce(&ours);
            reader.join().unwrap();
        });
    });
}
