//! `AF_VSOCK`: whether it is there, and listening on it.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

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
    /// Listens on `port`, for whoever connects.
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

    /// Serves whoever connects; returns when that becomes impossible.
    pub fn serve(&self, server: &Server) -> io::Error {
        loop {
            match self.accept() {
                Ok(socket) => server.attend(socket),
                Err(error) => match error.kind() {
                    ErrorKind::Interrupted | ErrorKind::ConnectionAborted => {}
                    ErrorKind::InvalidInput => return error,
                    // Out of descriptors or memory: for now.
                    _ => std::thread::sleep(Duration::from_millis(100)),
                },
            }
        }
    }

    #[allow(unsafe_code)] // nix gives a bare descriptor
    fn accept(&self) -> io::Result<OwnedFd> {
        let socket = socket::accept4(self.0.as_raw_fd(), SockFlag::SOCK_CLOEXEC)?;
        // SAFETY: the descriptor is new, and nobody else knows it.
        Ok(unsafe { OwnedFd::from_raw_fd(socket) })
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
