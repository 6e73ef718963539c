//! The kernel's own `AF_VSOCK`: of a host towards its guests, or of a guest towards its host.

use nix::sys::socket::{AddressFamily, SockFlag, SockType, VsockAddr, connect, socket};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// A connected stream socket.
///
/// # Errors
/// When nobody listens there, or the kernel has no vsock.
pub(crate) fn connect_to(cid: u32, port: u32) -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC;
    let fd = socket(AddressFamily::Vsock, SockType::Stream, flags, None)?;
    connect(fd.as_raw_fd(), &VsockAddr::new(cid, port))?;
    Ok(fd)
}
