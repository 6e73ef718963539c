//! The kernel's own `AF_VSOCK`: from a host to its guests, or from a guest to its host.

use crate::serve::FIRST_UNPRIVILEGED_PORT;
use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, VsockAddr, bind, connect, socket};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// The lowest port that [`bind_privileged`] takes, as `bindresvport` has it.
const LOWEST_PORT: u32 = 512;

/// A connected stream socket.
///
/// # Errors
/// When nobody listens there, or the kernel has no vsock.
pub(crate) fn connect_to(cid: u32, port: u32) -> io::Result<OwnedFd> {
    connected(stream_socket()?, cid, port)
}

/// The same from a privileged port, as far as this process may have one: by that a trace port
/// knows whom it serves.
///
/// # Errors
/// As [`connect_to`].
pub(crate) fn connect_privileged(cid: u32, port: u32) -> io::Result<OwnedFd> {
    let socket = stream_socket()?;
    bind_privileged(&socket);
    connected(socket, cid, port)
}

fn stream_socket() -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC;
    Ok(socket(AddressFamily::Vsock, SockType::Stream, flags, None)?)
}

fn connected(socket: OwnedFd, cid: u32, port: u32) -> io::Result<OwnedFd> {
    connect(socket.as_raw_fd(), &VsockAddr::new(cid, port))?;
    Ok(socket)
}

/// Without the right to one, or when all are taken, the system chooses a port when it connects.
fn bind_privileged(socket: &OwnedFd) {
    let count = FIRST_UNPRIVILEGED_PORT - LOWEST_PORT;
    // Programs that come one after the other do not get the port that the last is still closing.
    let first = std::process::id() % count;
    for offset in 0..count {
        let port = LOWEST_PORT + (first + offset) % count;
        match bind(socket.as_raw_fd(), &VsockAddr::new(libc::VMADDR_CID_ANY, port)) {
            Err(Errno::EADDRINUSE) => {}
            _ => return,
        }
    }
}
