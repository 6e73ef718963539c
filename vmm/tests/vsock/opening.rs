//! The opening of connections, in both directions.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use super::driver::{Driver, connect, data, header};
use super::*;
use vmtrace::devices::virtio::vsock::packet::op;
use vmtrace::devices::virtio::vsock::{ConnectError, PortTaken, Vsock, VsockError};
use vmtrace_system::private_socket::SocketError;

fn with_socket() -> (tempfile::TempDir, Driver) {
    let directory = tempfile::tempdir().unwrap();
    let socket = Some(directory.path().join("v.sock"));
    (directory, started(&Options { socket, ..Options::default() }))
}

#[test]
fn the_guest_reads_its_cid() {
    let driver = started(&Options { cid: 77, ..Options::default() });
    let mut config = [0; 8];
    driver.read_config(0, &mut config);
    assert_eq!(u64::from_le_bytes(config), 77);
    driver.read_config(4, &mut config);
    assert_eq!(config, [0; 8]);
    driver.read_config(u64::MAX - 0x100, &mut config);
    assert_eq!(config, [0; 8]);
    for cid in [0, 1, 2, u32::MAX] {
        let result = Vsock::with_worker(&Options { cid, ..Options::default() });
        assert!(matches!(result, Err(VsockError::Cid(_))));
    }
}

#[test]
fn a_host_client_reaches_a_port_of_the_guest() {
    let (directory, mut driver) = with_socket();
    let path = directory.path().join("v.sock");
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let mut client = UnixStream::connect(&path).unwrap();
    // What follows the line belongs to the connection.
    client.write_all(b"CONNECT 52\nhello").unwrap();
    let request = driver.expect(op::REQUEST).header;
    assert_eq!((request.src_port.get(), request.dst_port.get()), (1 << 30, 52));
    assert_eq!(request.buf_alloc.get(), Limits::default().buffer);
    // Nothing is sent to a guest that has not accepted.
    driver.expect_nothing();
    driver.send(header(op::RESPONSE, 52, 1 << 30), &[]);
    assert_eq!(driver.expect(op::RW).data, b"hello");
    driver.send(data(52, 1 << 30, 2), b"ok");
    let mut answer = [0; 16];
    driver.turn();
    client.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"OK 1073741824\nok");
}

#[test]
fn a_client_that_the_guest_refuses_is_closed() {
    let (directory, mut driver) = with_socket();
    let path = directory.path().join("v.sock");
    let mut client = UnixStream::connect(&path).unwrap();
    client.write_all(b"connect 52\n").unwrap();
    let request = driver.expect(op::REQUEST).header;
    driver.send(request.reset(), &[]);
    driver.turn();
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    // And one that asks for nothing sensible, or is gone.
    for line in ["HELLO\n", "CONNECT x\n", &"C".repeat(100)] {
        let mut client = UnixStream::connect(&path).unwrap();
        client.write_all(line.as_bytes()).unwrap();
        driver.expect_nothing();
        assert!(matches!(client.read(&mut [0]), Ok(0) | Err(_)), "{line}");
    }
    drop(UnixStream::connect(&path).unwrap());
    driver.expect_nothing();
    assert_eq!(driver.host.connections(), 0);
}

#[test]
fn a_client_that_leaves_before_the_answer_is_forgotten() {
    let (directory, mut driver) = with_socket();
    let path = directory.path().join("v.sock");
    let mut client = UnixStream::connect(&path).unwrap();
    client.write_all(b"CONNECT 52\n").unwrap();
    let request = driver.expect(op::REQUEST).header;
    drop(client);
    assert_eq!(driver.expect(op::RST).header.dst_port.get(), 52);
    assert_eq!(driver.host.connections(), 0);
    // The guest's answer comes too late.
    driver.send(header(op::RESPONSE, 52, request.src_port.get()), &[]);
    driver.expect(op::RST);
}

#[test]
fn the_guest_reaches_sockets_of_the_host() {
    let (directory, mut driver) = with_socket();
    let listener = UnixListener::bind(directory.path().join("v.sock_7777")).unwrap();
    let response = driver.connect(7777, 99);
    assert_eq!(response.op(), op::RESPONSE);
    assert_eq!(response.header.buf_alloc.get(), Limits::default().buffer);
    let (mut peer, _) = listener.accept().unwrap();
    driver.send(data(99, 7777, 5), b"hello");
    driver.turn();
    let mut bytes = [0; 5];
    peer.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"hello");
    peer.write_all(b"world").unwrap();
    assert_eq!(driver.expect(op::RW).data, b"world");
    // Nobody listens there.
    for port in [7778, 0, u32::MAX, u32::MAX - 1, u32::MAX - 2] {
        assert_eq!(driver.connect(port, 99).op(), op::RST, "{port}");
    }
    drop(listener);
    assert_eq!(driver.connect(7777, 98).op(), op::RST);
}

/// The gateway's end of what the guest has asked for.
fn asked(driver: &mut Driver, gateway: &UnixListener, guest_port: u32) -> UnixStream {
    driver.send(header(op::REQUEST, guest_port, 7777), &[]);
    driver.turn();
    let (mut peer, _) = gateway.accept().unwrap();
    let mut line = [0; 13];
    peer.read_exact(&mut line).unwrap();
    assert_eq!(&line, b"CONNECT 7777\n");
    // The guest waits.
    driver.expect_nothing();
    peer
}

#[test]
fn a_gateway_is_asked_for_ports_of_the_host() {
    let directory = tempfile::tempdir().unwrap();
    let gateway = UnixListener::bind(directory.path().join("gateway")).unwrap();
    let path = Some(directory.path().join("gateway"));
    let mut driver = started(&Options { gateway: path, ..Options::default() });
    let service = served(&driver);
    let _served = connected(&mut driver, &service, 5);

    let mut peer = asked(&mut driver, &gateway, 9);
    // What follows the line belongs to the connection.
    peer.write_all(b"OK\nhello").unwrap();
    driver.expect(op::RESPONSE);
    assert_eq!(driver.expect(op::RW).data, b"hello");
    driver.send(data(9, 7777, 5), b"world");
    driver.turn();
    let mut bytes = [0; 5];
    peer.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"world");

    for answer in ["", "NO\n", "OK", "OK 5\n"] {
        let mut peer = asked(&mut driver, &gateway, 10);
        peer.write_all(answer.as_bytes()).unwrap();
        drop(peer);
        assert_eq!(driver.expect(op::RST).header.dst_port.get(), 10, "{answer}");
    }
    // A guest that asks twice has one connection.
    let mut twice = [11, 11].map(|port| asked(&mut driver, &gateway, port));
    twice.iter_mut().for_each(|peer| peer.write_all(b"OK\n").unwrap());
    driver.expect(op::RESPONSE);
    driver.expect_nothing();
    let closed = twice.iter_mut().map(|peer| {
        peer.set_nonblocking(true).unwrap();
        usize::from(matches!(peer.read(&mut [0]), Ok(0)))
    });
    assert_eq!(closed.sum::<usize>(), 1);

    // One that begins again does not wait for answers any more.
    let mut peer = asked(&mut driver, &gateway, 12);
    driver.reset();
    driver.start();
    driver.turn();
    assert_eq!(peer.read(&mut [0]).unwrap(), 0);
    drop(gateway);
    assert_eq!(driver.connect(7777, 13).op(), op::RST);
}

#[test]
fn services_come_before_sockets() {
    let (directory, mut driver) = with_socket();
    let listener = UnixListener::bind(directory.path().join("v.sock_1024")).unwrap();
    listener.set_nonblocking(true).unwrap();
    let service = served(&driver);
    assert_eq!(driver.host.listen(PORT, drop), Err(PortTaken(PORT)));
    connected(&mut driver, &service, 5);
    assert!(listener.accept().is_err());
}

#[test]
fn a_live_socket_is_not_taken_over_and_a_dead_one_is() {
    let (directory, driver) = with_socket();
    let socket = directory.path().join("v.sock");
    let options = Options { socket: Some(socket.clone()), ..Options::default() };
    let result = Vsock::with_worker(&options);
    assert!(matches!(result, Err(VsockError::Socket(SocketError::InUse(_)))));
    // Removed with the device, even though someone still has its host's side.
    let host = driver.finish();
    assert!(!socket.exists());
    assert_eq!(connect(&host, 1, SECOND).unwrap_err(), ConnectError::Ended.to_string());
    drop(UnixListener::bind(&socket).unwrap());
    Vsock::with_worker(&options).unwrap();
}

#[test]
fn this_process_reaches_a_port_of_the_guest() {
    let mut driver = plain();
    let connecting = driver.asking(52);
    let request = driver.expect(op::REQUEST).header;
    driver.send(header(op::RESPONSE, 52, request.src_port.get()), &[]);
    driver.turn();
    let mut stream = connecting.join().unwrap().unwrap();
    stream.write_all(b"mark").unwrap();
    assert_eq!(driver.expect(op::RW).data, b"mark");
    driver.send(data(52, request.src_port.get(), 4), b"done");
    driver.turn();
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"done");
}

#[test]
fn this_process_learns_why_the_guest_cannot_be_reached() {
    let mut idle = Driver::new(&Options::default());
    let refused = |driver: &Driver| connect(&driver.host, 52, SECOND).unwrap_err();
    assert_eq!(refused(&idle), ConnectError::NoDriver.to_string());
    idle.start();
    let asked = |driver: &mut Driver, then: fn(&mut Driver)| {
        let connecting = driver.asking(52);
        driver.expect(op::REQUEST);
        then(driver);
        connecting.join().unwrap().unwrap_err()
    };
    let refuse = |driver: &mut Driver| {
        driver.send(header(op::RST, 52, 1 << 30), &[]);
        driver.turn();
    };
    assert_eq!(asked(&mut idle, refuse), ConnectError::Refused.to_string());
    assert_eq!(asked(&mut idle, Driver::reset), ConnectError::NoDriver.to_string());
    let limits = Limits { connect_time: Duration::from_millis(50), ..Limits::default() };
    let mut driver = with_limits(limits);
    let wait = |driver: &mut Driver| {
        driver.expect(op::RST);
    };
    assert_eq!(asked(&mut driver, wait), ConnectError::TimedOut.to_string());
    let mut full = with_limits(Limits { connections: 0, ..Limits::default() });
    assert_eq!(refused(&full), ConnectError::TooMany.to_string());
    full.expect_nothing();
}

#[test]
fn a_thousand_connections_in_each_direction_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("v.sock");
    let mut driver = started(&Options { socket: Some(path.clone()), ..Options::default() });
    let service = served(&driver);
    let mut streams = Vec::new();
    for guest_port in 0..1000 {
        streams.push((guest_port, PORT, connected(&mut driver, &service, guest_port)));
    }
    for guest_port in 0..1000 {
        let mut client = UnixStream::connect(&path).unwrap();
        writeln!(client, "CONNECT {guest_port}").unwrap();
        let local = driver.expect(op::REQUEST).header.src_port.get();
        driver.send(header(op::RESPONSE, guest_port, local), &[]);
        driver.turn();
        let mut line = vec![0; format!("OK {local}\n").len()];
        client.read_exact(&mut line).unwrap();
        streams.push((guest_port, local, client));
    }
    assert_eq!(driver.host.connections(), 2000);
    // Later ones get less memory.
    driver.send(header(op::CREDIT_REQUEST, 999, PORT), &[]);
    let update = driver.expect(op::CREDIT_UPDATE).header;
    assert_eq!(update.buf_alloc.get(), Limits::default().buffer / 4);
    // Everyone gets what is theirs.
    for (guest_port, local, stream) in &mut streams {
        write!(stream, "from {guest_port} {local}").unwrap();
    }
    for _ in 0..streams.len() {
        let packet = driver.expect(op::RW);
        let (guest, local) = (packet.header.dst_port.get(), packet.header.src_port.get());
        assert_eq!(packet.data, format!("from {guest} {local}").as_bytes());
        driver.send(data(guest, local, packet.data.len()), &packet.data);
    }
    driver.turn();
    for (guest_port, local, stream) in &mut streams {
        let mut bytes = vec![0; format!("from {guest_port} {local}").len()];
        stream.read_exact(&mut bytes).unwrap();
        assert_eq!(bytes, format!("from {guest_port} {local}").as_bytes());
    }
}

#[test]
fn more_connections_than_allowed_are_refused_until_some_end() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("v.sock");
    let limits = Limits { connections: 3, ..Limits::default() };
    let mut driver = started(&Options { socket: Some(path.clone()), limits, ..Options::default() });
    let service = served(&driver);
    let streams: Vec<_> = (0..3).map(|port| connected(&mut driver, &service, port)).collect();
    assert_eq!(driver.connect(PORT, 3).op(), op::RST);
    // A client waits in the socket's queue.
    let mut client = UnixStream::connect(&path).unwrap();
    client.write_all(b"CONNECT 52\n").unwrap();
    driver.expect_nothing();
    // It costs nothing meanwhile.
    let before = Instant::now();
    driver.send(header(op::RST, 0, PORT), &[]);
    driver.expect(op::REQUEST);
    assert!(before.elapsed() < 5 * SECOND);
    assert_eq!(driver.connect(PORT, 3).op(), op::RST);
    drop(streams);
}
