//! A socket device (virtio 1.2, section 5.10): streams between the guest and the host, without a
//! network and without vhost.
//!
//! On the host's side there are
//! - **Unix sockets** by Firecracker's convention. A process connects to [`Options::socket`],
//!   writes `CONNECT PORT` and a newline, and reads `OK HOSTPORT` and a newline once the guest has
//!   accepted; if it does not accept, the connection is closed. A connection of the guest to CID 2
//!   and port P goes to the socket whose path is that one with `_P` appended; if nobody listens
//!   there, it is refused. If this process cannot reach those sockets, a gateway connects to them:
//!   see [`Options::gateway`].
//! - **Services** of this process: see [`Host`]. They take precedence over sockets with the same
//!   port.
//!
//! The event loop moves the bytes, and all sockets are non-blocking. Each connection has its own
//! credit in each direction, so that a slow reader stops only its own connection. Nothing from the
//! guest is trusted: an invalid packet is dropped, one that does not fit its connection resets that
//! connection, and a broken queue stops the device until the driver resets it.

mod clients;
mod connection;
mod credit;
mod device;
mod key;
mod muxer;
pub mod packet;
mod rings;
mod watch;
mod worker;

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use vmtrace_system::private_socket::SocketError;

pub use device::{Host, Vsock};

pub use worker::Worker;

/// The guest's default CID.
pub const GUEST_CID: u32 = 3;

/// The port where vmtrace serves the trace: a consumer in the guest connects to CID 2 there.
pub use vmtrace_agent::protocol::TRACE_PORT;

/// What a device is made of.
#[derive(Debug, Clone)]
pub struct Options {
    /// The guest's CID, from 3 to 2^32 - 2.
    pub cid: u32,
    /// Path of the host's socket. Its file is made for the owner alone and removed at the end.
    pub socket: Option<PathBuf>,
    /// A Unix socket to ask for the host's ports, instead of the paths that `socket` gives them:
    /// for each connection of the guest it is connected to and sent `CONNECT PORT` and a newline.
    /// If it answers with `OK` and a newline, it is that port from then on. If it closes the
    /// connection, the guest's is refused.
    pub gateway: Option<PathBuf>,
    /// How much of everything.
    pub limits: Limits,
}

impl Default for Options {
    fn default() -> Options {
        Options { cid: GUEST_CID, socket: None, gateway: None, limits: Limits::default() }
    }
}

/// What a guest can make the host spend.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Connections at a time, with those that are being opened or closed. More are refused.
    pub connections: usize,
    /// Bytes of the guest that are kept for one connection while its reader is slow. Those made
    /// while there are 256 others get a quarter.
    pub buffer: u32,
    /// How long the guest may take to answer to a connection of the host.
    pub connect_time: Duration,
    /// How long the guest may take to close a connection that the host's side has closed.
    pub close_time: Duration,
    /// How long a reader may take to read anything of what a guest had sent before it closed.
    pub linger_time: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: 2048,
            // As Linux has it, and expects it.
            buffer: 256 << 10,
            connect_time: Duration::from_secs(10),
            close_time: Duration::from_secs(8),
            linger_time: Duration::from_secs(60),
        }
    }
}

/// A connection of the guest to a service.
#[derive(Debug)]
pub struct Incoming {
    /// The service's end, blocking. The guest sees end of file when this is shut down for writing
    /// or dropped, and a reset when it is dropped with bytes unread.
    pub stream: UnixStream,
    /// The port of the service.
    pub port: u32,
    /// The guest's port.
    pub guest_port: u32,
}

/// Why a device cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum VsockError {
    /// No guest can have this CID.
    #[error("CID {0} is reserved; choose one from 3 on")]
    Cid(u32),
    /// The host's socket cannot be made.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The system refuses something.
    #[error("cannot {what} for vsock")]
    System {
        /// What was to be done.
        what: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
}

/// A port that a service asks for is another's already, or the one that is none.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("vsock port {0} is taken")]
pub struct PortTaken(pub u32);

/// Why the guest cannot be connected to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// The guest has no driver, or not yet, or not any more.
    #[error("the guest has no vsock driver running")]
    NoDriver,
    /// Nobody listens there, or whoever does has closed it at once.
    #[error("the guest refuses the connection")]
    Refused,
    /// The guest does not answer.
    #[error("the guest does not answer in time")]
    TimedOut,
    /// As many as [`Limits::connections`].
    #[error("there are too many vsock connections")]
    TooMany,
    /// The machine is gone.
    #[error("the machine has ended")]
    Ended,
    /// The host has no descriptors or memory left.
    #[error("the host has no resources for another connection")]
    Host,
}
