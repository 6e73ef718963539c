//! Unix sockets here whose other ends are unix sockets in the emulated host.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::emulated::EmulatedHost;
use super::link::{Link, TunnelError};
use crate::private_socket::{Acceptor, SocketError};

/// Between two tries to reach a socket that is not there yet.
const RETRY: Duration = Duration::from_millis(100);
/// How long the last bytes of connections may take.
const DRAIN_TIME: Duration = Duration::from_secs(5);

/// A socket here, as long as it lives.
#[derive(Debug)]
pub struct Tunnel {
    acceptor: Option<Acceptor>,
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
        Ok(Tunnel { acceptor: Some(acceptor), closed, connections })
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
        self.closed.store(true, Ordering::Relaxed);
        // What the job wrote last may still be on its way; a peer that does not read is left.
        let end = Instant::now() + DRAIN_TIME;
        while Arc::strong_count(&self.connections) > 1 && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
