//! Invalid drivers and packets.

use std::io::Read;

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::driver::{CID, Driver, NEXT, SIZE, WRITE, data, header};
use super::*;
use vmtrace::devices::virtio::vsock::packet::{
    HOST_CID, Header, MAX_PAYLOAD, SHUTDOWN_BOTH, SHUTDOWN_SEND, op,
};

const NEEDS_RESET: u32 = 15 | 64;

/// The device serves a new connection, in both directions.
fn assert_works(driver: &mut Driver, service: &Receiver<Incoming>) {
    let stream = connected(driver, service, 60_000);
    driver.send(data(60_000, PORT, 5), b"fine?");
    driver.turn();
    let mut bytes = [0; 5];
    (&stream).read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"fine?");
    driver.send(Header { flags: SHUTDOWN_BOTH.into(), ..header(op::SHUTDOWN, 60_000, PORT) }, &[]);
    while driver.packet().header.dst_port.get() != 60_000 {}
}

#[test]
fn packets_of_others_are_ignored_or_refused() {
    let mut driver = plain();
    let service = served(&driver);
    for src_cid in [0, 1, HOST_CID, 4, CID | 1 << 32, u64::MAX] {
        driver.send(Header { src_cid: src_cid.into(), ..header(op::REQUEST, 9, PORT) }, &[]);
        driver.expect_nothing();
    }
    for dst_cid in [0, 1, CID, 4, HOST_CID | 1 << 32] {
        driver.send(Header { dst_cid: dst_cid.into(), ..header(op::REQUEST, 9, PORT) }, &[]);
        assert_eq!(driver.expect(op::RST).header.src_cid.get(), dst_cid);
    }
    for kind in [0, 2, 3, u16::MAX] {
        driver.send(Header { kind: kind.into(), ..header(op::REQUEST, 9, PORT) }, &[]);
        assert_eq!(driver.expect(op::RST).header.kind.get(), kind);
        // No answer to an answer.
        driver.send(Header { kind: kind.into(), ..header(op::RST, 9, PORT) }, &[]);
        driver.expect_nothing();
    }
    assert!(service.try_recv().is_err());
    assert_works(&mut driver, &service);
}

#[test]
fn operations_without_a_connection_are_refused() {
    let mut driver = plain();
    let service = served(&driver);
    for operation in [0, op::RESPONSE, op::SHUTDOWN, op::RW, op::CREDIT_UPDATE, 8, u16::MAX] {
        driver.send(header(operation, 9, PORT), &[]);
        let reset = driver.expect(op::RST).header;
        assert_eq!((reset.src_port.get(), reset.dst_port.get()), (PORT, 9));
    }
    driver.send(header(op::RST, 9, PORT), &[]);
    driver.expect_nothing();
    assert_works(&mut driver, &service);
}

#[test]
fn operations_out_of_order_end_the_connection() {
    let mut driver = plain();
    let service = served(&driver);
    for operation in [0, op::REQUEST, op::RESPONSE, 8, u16::MAX] {
        let mut stream = connected(&mut driver, &service, 9);
        driver.send(header(operation, 9, PORT), &[]);
        driver.expect(op::RST);
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        assert_eq!(driver.host.connections(), 0);
    }
    // Data after its end.
    let _stream = connected(&mut driver, &service, 9);
    driver.send(Header { flags: SHUTDOWN_SEND.into(), ..header(op::SHUTDOWN, 9, PORT) }, &[]);
    driver.send(data(9, PORT, 1), b"x");
    driver.expect(op::RST);
    // Anything but an answer to a request.
    for operation in [op::REQUEST, op::SHUTDOWN, op::RW, op::CREDIT_UPDATE, op::CREDIT_REQUEST] {
        let connecting = driver.asking(52);
        let port = driver.expect(op::REQUEST).header.src_port.get();
        driver.send(header(operation, 52, port), &[]);
        driver.expect(op::RST);
        assert!(connecting.join().unwrap().is_err());
    }
    assert_works(&mut driver, &service);
}

#[test]
fn lengths_that_lie_drop_the_packet() {
    let mut driver = plain();
    let service = served(&driver);
    let stream = connected(&mut driver, &service, 9);
    for length in [11, 4096, MAX_PAYLOAD, MAX_PAYLOAD + 1, u32::MAX, u32::MAX - 43] {
        let lying = Header { len: length.into(), ..header(op::RW, 9, PORT) };
        driver.send(lying, &[7; 10]);
    }
    // Longer than a packet may be, with the bytes to it.
    let length = MAX_PAYLOAD as usize + 1;
    driver.send(data(9, PORT, length), &vec![7; length]);
    // Less than a header.
    for length in [0, 1, 43] {
        let index = driver.tx.free.pop().unwrap();
        let (table, at) = (driver.tx.descriptors, driver.tx.buffers);
        driver.descriptor(table, index, at, length, 0, 0);
        driver.offer(1, index);
        driver.notify(1);
    }
    // Nothing but memory for answers.
    let index = driver.tx.free.pop().unwrap();
    let (table, at) = (driver.tx.descriptors, driver.tx.buffers);
    driver.descriptor(table, index, at, 4096, WRITE, 0);
    driver.offer(1, index);
    driver.notify(1);
    driver.expect_nothing();
    // Bytes behind the packet are not part of it.
    driver.send(data(9, PORT, 3), b"yes, and no");
    driver.turn();
    let mut bytes = [0; 3];
    (&stream).read_exact(&mut bytes).unwrap();
    stream.set_nonblocking(true).unwrap();
    assert_eq!(&bytes, b"yes");
    assert!((&stream).read(&mut [0]).is_err());
    assert_works(&mut driver, &service);
}

/// What a driver does to its queues, by which the device can only give up.
type Damage = fn(&mut Driver);

const DAMAGES: [(&str, Damage); 8] = [
    ("a transmit buffer outside RAM", |driver| {
        let index = driver.tx.free.pop().unwrap();
        driver.descriptor(driver.tx.descriptors, index, 1 << 40, 100, 0, 0);
        driver.offer(1, index);
    }),
    ("a transmit buffer that wraps", |driver| {
        let index = driver.tx.free.pop().unwrap();
        driver.descriptor(driver.tx.descriptors, index, u64::MAX - 10, 100, 0, 0);
        driver.offer(1, index);
    }),
    ("more packets than the queue has", |driver| {
        let at = GuestAddress(driver.tx.available + 2);
        driver.memory.write_obj(driver.tx.offered.wrapping_add(SIZE + 1), at).unwrap();
    }),
    ("a head that is none", |driver| driver.offer(1, SIZE)),
    ("an endless packet", |driver| {
        let table = 0x7_0000_u64;
        for index in 0..300 {
            driver.descriptor(table, index, driver.tx.buffers, 1, NEXT, index + 1);
        }
        // indirect
        driver.descriptor(driver.tx.descriptors, 0, table, 300 * 16, 4, 0);
        driver.offer(1, 0);
    }),
    ("a receive buffer for no data", |driver| {
        driver.descriptor(driver.rx.descriptors, 0, driver.rx.buffers, 44, WRITE, 0);
        driver.offer(0, 0);
        driver.send(header(op::REQUEST, 9, 1), &[]);
    }),
    ("a receive buffer that is read-only", |driver| {
        driver.descriptor(driver.rx.descriptors, 0, driver.rx.buffers, 4096, 0, 0);
        driver.offer(0, 0);
        driver.send(header(op::REQUEST, 9, 1), &[]);
    }),
    ("a receive buffer outside RAM", |driver| {
        driver.descriptor(driver.rx.descriptors, 0, 1 << 30, 4096, WRITE, 0);
        driver.offer(0, 0);
        driver.send(header(op::REQUEST, 9, 1), &[]);
    }),
];

#[test]
fn broken_queues_stop_the_device_until_it_is_reset() {
    for (what, damage) in DAMAGES {
        let mut driver = Driver::new(&Options::default());
        let service = served(&driver);
        driver.start_empty();
        driver.send(header(op::REQUEST, 9, PORT), &[]);
        driver.turn();
        let mut stream = service.try_recv().unwrap().stream;
        // The answer is not wanted.
        driver.reset();
        driver.turn();
        driver.start_empty();
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        let before = driver.interrupts();
        damage(&mut driver);
        driver.notify(1);
        driver.turn();
        assert_eq!(driver.status(), NEEDS_RESET, "{what}");
        assert!(driver.interrupts() > before);
        // Dead, not deadly.
        driver.notify(1);
        driver.turn();
        driver.reset();
        driver.start();
        assert_works(&mut driver, &service);
    }
}

#[test]
fn a_chain_without_end_is_one_packet() {
    let mut driver = plain();
    let service = served(&driver);
    let index = driver.tx.free.pop().unwrap();
    let at = driver.tx.buffers;
    driver.memory.write_slice(&[0; 64], GuestAddress(at)).unwrap();
    driver.descriptor(driver.tx.descriptors, index, at, 64, NEXT, index);
    driver.offer(1, index);
    driver.notify(1);
    driver.expect_nothing();
    assert_works(&mut driver, &service);
}

fn any_header() -> impl Strategy<Value = Header> {
    let cid = prop_oneof![20 => Just(CID), 1 => any::<u64>()];
    let host = prop_oneof![20 => Just(HOST_CID), 1 => any::<u64>()];
    let ports =
        (0_u32..4, prop_oneof![20 => Just(PORT), 1 => Just((1 << 30) + 1), 1 => any::<u32>()]);
    let kind = prop_oneof![20 => Just(1_u16), 1 => any::<u16>()];
    let operation = prop_oneof![3 => Just(op::REQUEST), 20 => 1_u16..8, 1 => any::<u16>()];
    let credit = (
        prop_oneof![Just(0), Just(u32::MAX), 0_u32..10_000],
        prop_oneof![Just(0), any::<u32>(), 0_u32..10_000],
    );
    let len = prop_oneof![0_u32..3000, Just(MAX_PAYLOAD), any::<u32>()];
    let parts = (cid, host, ports, kind, operation, 0_u32..8, credit, len);
    parts.prop_map(|(cid, host, (guest, local), kind, op, flags, (alloc, fwd), len)| Header {
        src_cid: cid.into(),
        dst_cid: host.into(),
        src_port: guest.into(),
        dst_port: local.into(),
        len: len.into(),
        kind: kind.into(),
        op: op.into(),
        flags: flags.into(),
        buf_alloc: alloc.into(),
        fwd_cnt: fwd.into(),
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever packets come, the device and its other connections work, and nothing is left of
    /// those once they have ended.
    #[test]
    fn any_packets_are_survived(
        packets in prop::collection::vec((any_header(), 0_usize..2000, 0_usize..60), 1..150),
    ) {
        let limits = Limits { connections: 6, ..Limits::default() };
        let mut driver = with_limits(limits);
        let service = served(&driver);
        let honest = connected(&mut driver, &service, 40_000);
        let mut kept = Vec::new();
        for (header, length, split) in packets {
            driver.send_split(header, &vec![3; length], &[split]);
            driver.turn();
            while let Some(packet) = driver.poll() {
                prop_assert!(packet.header.dst_port.get() != 40_000);
            }
            // Half of the consumers leave at once.
            while let Ok(incoming) = service.try_recv() {
                if incoming.guest_port.is_multiple_of(2) {
                    kept.push(incoming.stream);
                }
            }
            prop_assert!(driver.host.connections() <= 6);
        }
        prop_assert_eq!(driver.status(), 15);
        driver.send(data(40_000, PORT, 6), b"honest");
        driver.turn();
        let mut bytes = [0; 6];
        (&honest).read_exact(&mut bytes).unwrap();
        driver.reset();
        prop_assert_eq!(driver.host.connections(), 0);
    }

    /// Whatever is in the queues.
    #[test]
    fn any_queues_are_survived(
        bytes in prop::collection::vec(any::<u8>(), 64..512),
        places in prop::collection::vec((0_u64..0x100, 0_u16..64), 1..20),
    ) {
        let mut driver = plain();
        let service = served(&driver);
        for (chunk, (place, offered)) in bytes.chunks(16).cycle().zip(places) {
            let ring = if place % 2 == 0 { &driver.tx } else { &driver.rx };
            driver.memory.write_slice(chunk, GuestAddress(ring.descriptors + place * 16)).unwrap();
            driver.memory.write_slice(chunk, GuestAddress(ring.available + 4 + place)).unwrap();
            driver.memory.write_obj(offered, GuestAddress(driver.tx.available + 2)).unwrap();
            driver.notify(u32::try_from(place % 3).unwrap());
            driver.turn();
        }
        driver.reset();
        driver.start();
        assert_works(&mut driver, &service);
    }
}
