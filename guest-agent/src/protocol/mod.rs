//! The protocol between the agent and the host, over a byte stream; `README.md` describes it.
//!
//! Both sides use this module, and neither trusts the other: everything has a bound, and invalid input is a
//! [`ProtocolError`], never a panic.

mod fields;
mod frame;
mod hello;
mod request;
#[cfg(test)]
mod tests;

pub use frame::{Decoder, Frame, Stream};
pub use hello::{Hello, VERSIONS};
pub use request::{Command, Entry, Exit, Failure, LoadedModule, Reason, Request, Run};

/// The agent listens on this port of `AF_VSOCK`.
pub const AGENT_PORT: u32 = 1025;

/// The VMM listens on this port of the host (CID 2): for consumers of the trace, and for marks.
pub const TRACE_PORT: u32 = 1024;

/// Where the VMM takes what the command of `--run` writes to standard output, a stream of bytes.
/// Only from a port below 1024, and it closes the connection when it has everything.
pub const STDOUT_PORT: u32 = 1026;

/// The same for standard error.
pub const STDERR_PORT: u32 = 1027;

/// What may be under way on one stream of a command: sent, and not granted again by a credit.
pub const WINDOW: u32 = 256 << 10;

/// Length and kind.
pub const HEADER: usize = 5;

/// Most bytes in one data frame: such a frame fits into one packet of 32 KiB.
pub const DATA_MAX: usize = (32 << 10) - HEADER - 1;

/// The longest payload; only a [`Run`] comes near.
pub const PAYLOAD_MAX: usize = 256 << 10;

/// The longest text of a mark, in bytes: its line fits the serial port's channel as well.
pub const MARK_MAX: usize = 200;

/// The other side does not keep to the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProtocolError(pub &'static str);

impl std::fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the other side does not speak the agent protocol: {}", self.0)
    }
}

impl std::error::Error for ProtocolError {}

impl From<ProtocolError> for std::io::Error {
    fn from(error: ProtocolError) -> Self {
        Self::new(std::io::ErrorKind::InvalidData, error)
    }
}
