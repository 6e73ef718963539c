//! Listens on `AF_VSOCK`, if the kernel has it.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{self, AddressFamily, Backlog, SockFlag, SockType, VsockAddr};

use super::Server;

/// The device of the vsock core.
const DEVICE: &str = "/dev/vsock";

// _IO(7, 0xb9), which takes a pointer nevertheless.
nix::ioctl_read_bad!(local_cid, 0x7b9, libc::c_uint);

/// Listens on a port of `AF_VSOCK`.
#[derive(Debug)]
pub struct Listener(OwnedFd);

impl Listener {
    /// Listens on `port`, for the host: see [`Self::serve`].
    ///
    /// # Errors
    /// The text says what the guest lacks.
    pub fn bind(port: u32) -> Result<Self, String> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let socket = socket::socket(AddressFamily::Vsock, SockType::Stream, flags, None);
        let socket = socket.map_err(|error| match error {
            Errno::EAFNOSUPPORT => {
                "the kernel has no AF_VSOCK: no module vsock was loaded (see --modules)".to_owned()
            }
            error => format!("no AF_VSOCK socket: {error}"),
        })?;
        // Without a transport one can listen too, and wait for ever.
        has_transport()?;
        let address = VsockAddr::new(libc::VMADDR_CID_ANY, port);
        socket::bind(socket.as_raw_fd(), &address)
            .and_then(|()| socket::listen(&socket, Backlog::MAXALLOWABLE))
            .map_err(|error| format!("cannot listen on vsock port {port}: {error}"))?;
        Ok(Self(socket))
    }

    /// Serves the host alone; returns when that becomes impossible. Anybody else who connects is
    /// refused, and `log` gets a line about it: with `vsock_loopback` any process of this very
    /// system can, and a request may run commands with our rights.
    pub fn serve(&self, server: &Server, mut log: impl FnMut(&str)) -> io::Error {
        let mut strangers = Strangers::default();
        loop {
            match self.accept() {
                Ok((socket, libc::VMADDR_CID_HOST)) => server.attend(socket),
                Ok((socket, cid)) => {
                    if let Some(line) = strangers.refused(cid, Instant::now()) {
                        log(&line);
                    }
                    server.refuse_stranger(socket, cid);
                }
                Err(error) => match error.kind() {
                    ErrorKind::Interrupted | ErrorKind::ConnectionAborted => {}
                    ErrorKind::InvalidInput => return error,
                    // Out of descriptors or memory: for now.
                    _ => std::thread::sleep(Duration::from_millis(100)),
                },
            }
        }
    }

    /// A connection, and the CID of who is at its other end.
    #[allow(unsafe_code)] // nix gives a bare descriptor
    fn accept(&self) -> io::Result<(OwnedFd, u32)> {
        let socket = socket::accept4(self.0.as_raw_fd(), SockFlag::SOCK_CLOEXEC)?;
        // SAFETY: the descriptor is new, and nobody else knows it.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        // The kernel's word, not the peer's: a transport drops packets with another sender's CID.
        let peer: VsockAddr =
            socket::getpeername(socket.as_raw_fd()).map_err(|error| match error {
                // It has gone already. `EINVAL` is for a listener that is none any more.
                Errno::ENOTCONN | Errno::EINVAL => ErrorKind::ConnectionAborted.into(),
                error => io::Error::from(error),
            })?;
        Ok((socket, peer.cid()))
    }
}

/// Those who were refused. They may come as often as they like: the log has one line a minute.
#[derive(Debug, Default)]
struct Strangers {
    told: Option<Instant>,
    untold: u64,
}

impl Strangers {
    const PERIOD: Duration = Duration::from_secs(60);

    /// What to log of one more.
    fn refused(&mut self, cid: u32, now: Instant) -> Option<String> {
        if self.told.is_some_and(|told| now.duration_since(told) < Self::PERIOD) {
            self.untold += 1;
            return None;
        }
        self.told = Some(now);
        let more = match std::mem::take(&mut self.untold) {
            0 => String::new(),
            count => format!("; {count} more since the last such line"),
        };
        Some(format!("vsock: refused a connection from CID {cid}, which is not the host{more}"))
    }
}

#[allow(unsafe_code)] // an ioctl that nix and std do not wrap
fn has_transport() -> Result<(), String> {
    // Without the device nothing can be said, and trying does no harm.
    let Ok(device) = File::open(DEVICE) else { return Ok(()) };
    let mut cid = libc::VMADDR_CID_ANY;
    // SAFETY: the ioctl writes one unsigned int through the pointer, which is valid for it.
    let asked = unsafe { local_cid(device.as_raw_fd(), &raw mut cid) };
    match (asked, cid) {
        (Ok(_), libc::VMADDR_CID_ANY) => {
            Err("there is no vsock device, or no driver for it (vmw_vsock_virtio_transport)"
                .to_owned())
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // A process of the guest must not be able to fill the host's log.
    #[test]
    fn strangers_are_told_of_now_and_then() {
        let (mut strangers, now) = (Strangers::default(), Instant::now());
        let first = strangers.refused(1, now).unwrap();
        assert!(
            first.ends_with("refused a connection from CID 1, which is not the host"),
            "{first}"
        );
        for _ in 0..1000 {
            assert_eq!(strangers.refused(1, now + Duration::from_secs(59)), None);
        }
        let second = strangers.refused(7, now + Duration::from_secs(60)).unwrap();
        assert!(
            second.contains("CID 7") && second.ends_with("; 1000 more since the last such line")
        );
        assert_eq!(strangers.refused(1, now + Duration::from_secs(61)), None);
    }
}
