//! Tunnels for Unix sockets: from sockets on this machine to sockets in the emulated host, and vice
//! versa.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::error::HostError;
use super::host::EmulatedHost;
use super::link::{Connection, Link, TunnelError};
use vmtrace_system::ports::{self, beside};
use vmtrace_system::private_socket::{Acceptor, SocketError, connect_now};

/// The time between two attempts to reach a socket that does not exist yet.
const RETRY: Duration = Duration::from_millis(100);
/// The longest request.
const MAX_LINE: usize = 64;
/// How long the last bytes of connections may take.
const DRAIN_TIME: Duration = Duration::from_secs(5);

/// A socket, here or in the host, as long as it lives.
#[derive(Debug)]
pub struct Tunnel {
    acceptor: Option<Acceptor>,
    /// A socket in the host, by its number.
    listening: Option<(Link, u32)>,
    closed: Arc<AtomicBool>,
    /// One clone for every connection.
    connections: Arc<()>,
}

impl EmulatedHost {
    /// Listens at `here`, for the owner of this process alone, and connects whoever comes to
    /// the socket at `there` in the host. Who comes before that listens waits for it.
    ///
    /// # Errors
    /// When there cannot be a socket.
    pub fn tunnel(&self, here: &Path, there: &str) -> Result<Tunnel, SocketError> {
        let closed = Arc::new(AtomicBool::new(false));
        let connections = Arc::new(());
        let (link, there, flag) = (self.link.clone(), there.to_owned(), Arc::clone(&closed));
        let count = Arc::clone(&connections);
        let acceptor = Acceptor::start(here, move |stream| {
            let (link, there, flag) = (link.clone(), there.clone(), Arc::clone(&flag));
            let counted = Arc::clone(&count);
            let spawned = std::thread::Builder::new().name("tunnel".into()).spawn(move || {
                connect(&link, &there, &stream, &flag);
                drop(counted);
            });
            if let Err(error) = spawned {
                log::warn!("a connection is not served: {error}");
            }
        })?;
        Ok(Tunnel { acceptor: Some(acceptor), listening: None, closed, connections })
    }

    /// Listens at `there` in the host as a vsock device's gateway (see
    /// `Options::gateway` of its socket device) to the sockets here
    /// whose paths are `here` with the port appended.
    ///
    /// # Errors
    /// When the host cannot listen there.
    pub fn gateway(&self, there: &str, here: &Path) -> Result<Tunnel, HostError> {
        self.offer(there, ports_beside(here))
    }

    /// The same, to whatever `connect` gives for a number.
    ///
    /// # Errors
    /// When the host cannot listen there.
    pub fn offer(
        &self,
        there: &str,
        connect: impl Fn(u32) -> io::Result<UnixStream> + Send + Sync + 'static,
    ) -> Result<Tunnel, HostError> {
        Tunnel::gateway(&self.link, there, connect)
    }
}

impl Tunnel {
    fn gateway(
        link: &Link,
        there: &str,
        connect: impl Fn(u32) -> io::Result<UnixStream> + Send + Sync + 'static,
    ) -> Result<Tunnel, HostError> {
        let (number, incoming) = link.listen(there).map_err(|error| {
            let reason = match error {
                TunnelError::Refused(reason) => reason,
                TunnelError::Lost => "it is gone".to_owned(),
            };
            HostError::Failed { what: format!("listen at {there}"), reason }
        })?;
        let connections = Arc::new(());
        let listening = Some((link.clone(), number));
        let (link, connect, count) = (link.clone(), Arc::new(connect), Arc::clone(&connections));
        let spawn = move |connection| {
            let (link, connect, counted) = (link.clone(), Arc::clone(&connect), Arc::clone(&count));
            std::thread::Builder::new().name("gateway".into()).spawn(move || {
                reach(&link, connection, &*connect);
                drop(counted);
            })
        };
        // It ends with the listening.
        let accept = move || {
            for connection in incoming {
                if let Err(error) = spawn(connection) {
                    log::warn!("a connection of the guest is not served: {error}");
                }
            }
        };
        let started = std::thread::Builder::new().name("gateway".into()).spawn(accept);
        started.map_err(|error| HostError::Failed {
            what: "start a thread".to_owned(),
            reason: error.to_string(),
        })?;
        Ok(Tunnel { acceptor: None, listening, closed: Arc::default(), connections })
    }
}

/// Sockets here by their ports.
fn ports_beside(here: &Path) -> impl Fn(u32) -> io::Result<UnixStream> + Send + Sync + 'static {
    let here = here.to_owned();
    move |port| {
        let path: PathBuf = beside(&here, port);
        let connected = connect_now(&path).map(UnixStream::from).map_err(io::Error::from);
        let local = connected.and_then(|local| local.set_nonblocking(false).map(|()| local));
        local.inspect_err(|error| log::debug!("vsock: {}: {error}", path.display()))
    }
}

/// Connects the guest to the port that the first line asks for.
fn reach(link: &Link, connection: Connection, connect: &dyn Fn(u32) -> io::Result<UnixStream>) {
    let Some((port, rest)) = request(link, &connection) else { return link.refuse(&connection) };
    match connect(port) {
        Ok(local) => link.pass(connection, &local, b"OK\n", rest),
        Err(_) => link.refuse(&connection),
    }
}

/// The port, and what came behind the line.
fn request(link: &Link, connection: &Connection) -> Option<(u32, Vec<u8>)> {
    let mut line = Vec::new();
    loop {
        line.extend(connection.data.recv().ok()?);
        if let Some(end) = line.iter().position(|byte| *byte == b'\n') {
            let rest = line.split_off(end + 1);
            let _ = link.grant(connection.output, line.len());
            return Some((ports::requested(line.trim_ascii_end())?, rest));
        }
        if line.len() > MAX_LINE {
            return None;
        }
    }
}

fn connect(link: &Link, there: &str, stream: &UnixStream, closed: &AtomicBool) {
    while !closed.load(Ordering::Relaxed) {
        match link.tunnel(there, stream) {
            Ok(()) | Err(TunnelError::Lost) => return,
            Err(TunnelError::Refused(reason)) => {
                log::debug!("{there} in the emulated host: {reason}");
                std::thread::sleep(RETRY);
            }
        }
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        self.acceptor = None;
        if let Some((link, number)) = self.listening.take() {
            link.unlisten(number);
        }
        self.closed.store(true, Ordering::Relaxed);
        // What the job wrote last may still be on its way; a peer that does not read is left.
        let end = Instant::now() + DRAIN_TIME;
        while Arc::strong_count(&self.connections) > 1 && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::init::tests::server;
    use std::io::{Read, Write};
    use std::net::Shutdown;
    use std::os::unix::net::UnixListener;

    /// What a device does for a connection of its guest.
    fn ask(gateway: &Path, port: u32) -> UnixStream {
        let mut stream = UnixStream::connect(gateway).unwrap();
        writeln!(stream, "CONNECT {port}").unwrap();
        stream
    }

    fn everything(mut stream: &UnixStream) -> Vec<u8> {
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        bytes
    }

    // Half of a connection must not end with the other, nothing may be lost or wait for ever, and
    // a port that nobody listens at is refused.
    #[test]
    fn a_guest_reaches_sockets_on_the_outer_side() {
        let directory = tempfile::tempdir().unwrap();
        let (link, _server) = server();
        let (there, here) = (directory.path().join("gateway"), directory.path().join("vsock"));
        let tunnel = Tunnel::gateway(&link, there.to_str().unwrap(), ports_beside(&here)).unwrap();
        let listener = UnixListener::bind(beside(&here, 5001)).unwrap();
        let input: Vec<u8> = (0..2_000_000_u32).flat_map(u32::to_le_bytes).collect();

        let guest = ask(&there, 5001);
        let (mut peer, _) = listener.accept().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                (&guest).write_all(&input).unwrap();
                guest.shutdown(Shutdown::Write).unwrap();
            });
            let got = everything(&peer);
            assert!(got == input, "{} bytes", got.len());
            scope.spawn(move || peer.write_all(&got).unwrap());
            let got = everything(&guest);
            assert!(got.strip_prefix(b"OK\n") == Some(&input), "{} bytes", got.len());
        });

        // Both sides know when the other is gone.
        let guest = ask(&there, 5001);
        let (peer, _) = listener.accept().unwrap();
        drop(guest);
        assert_eq!(everything(&peer), b"");
        let guest = ask(&there, 5001);
        drop(listener.accept().unwrap());
        assert_eq!(everything(&guest), b"OK\n");
        assert!((0..500).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            (&guest).write(b"x").is_err()
        }));

        drop(listener);
        for request in ["CONNECT 5001\n", "CONNECT 5002\n", "nonsense\n", &"x".repeat(100)] {
            let mut guest = UnixStream::connect(&there).unwrap();
            guest.write_all(request.as_bytes()).unwrap();
            assert!(matches!(guest.read(&mut [0]), Ok(0) | Err(_)), "{request}");
        }
        let begin = Instant::now();
        drop(tunnel);
        assert!(begin.elapsed() < DRAIN_TIME, "connections are left");
    }
}
