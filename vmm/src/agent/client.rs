//! The host's side of the agent protocol.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::time::TimeVal;
use vmtrace_system::send_request;

use super::protocol::{
    Decoder, Entry, Failure, Frame, Hello, LoadedModule, ProtocolError, Request, Stream,
};

/// The name of this side in the greeting.
const SOFTWARE: &str = concat!("vmtrace ", env!("CARGO_PKG_VERSION"));

/// An agent that is there answers at once, but in an emulated host that may be slow.
pub(super) const TIMEOUT: TimeVal = TimeVal::new(60, 0);

/// Read at once.
const CHUNK: usize = 64 << 10;

/// No kernel has more modules.
const MODULES_MAX: usize = 1 << 14;

/// Why a request to the agent was not met.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// Nobody accepts connections.
    #[error("cannot connect to {to}: {reason}; is the guest running?")]
    Connect {
        /// Where.
        to: String,
        /// The system's reason.
        reason: io::Error,
    },
    /// The other end of the socket has no way to the agent.
    #[error("{} gives no connection to the guest's agent: {reason}", .socket.display())]
    Refused {
        /// The socket.
        socket: PathBuf,
        /// Its reason, or ours.
        reason: String,
    },
    /// They would not understand each other.
    #[error(
        "the guest has {agent}, this is {ours}: no version of the protocol is common to both; \
         use both from the same release"
    )]
    Version {
        /// The agent.
        agent: Hello,
        /// This side.
        ours: Hello,
    },
    /// The agent cannot do it.
    #[error("{}", .0.text)]
    Failed(Failure),
    /// The agent does not keep to the protocol.
    #[error("the agent in the guest has sent an invalid message")]
    Protocol(#[from] ProtocolError),
    /// No answer.
    #[error("the guest's agent does not answer; is the guest stopped?")]
    Silent,
    /// The guest, its agent, or the VMM has ended.
    #[error("the connection to the guest's agent ended too early; has the guest ended?")]
    Ended,
    /// The connection broke.
    #[error("the connection to the guest's agent failed")]
    Connection(#[source] io::Error),
    /// What came from the guest cannot be written here.
    #[error("cannot write what came from the guest")]
    Output(#[source] io::Error),
}

impl From<io::Error> for AgentError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => Self::Silent,
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => Self::Ended,
            _ => Self::Connection(error),
        }
    }
}

/// A connection to an agent, good for one request.
#[derive(Debug)]
pub struct Connection {
    pub(super) socket: File,
    decoder: Decoder,
    agent: Hello,
    chunk: Vec<u8>,
}

impl Connection {
    /// Agrees with the agent at the other end of `socket` on a version.
    ///
    /// # Errors
    /// When there is none, or the other end is no agent.
    pub fn new(socket: OwnedFd) -> Result<Self, AgentError> {
        let socket = File::from(socket);
        let ours = Hello::new(SOFTWARE);
        set_timeout(&socket, &TIMEOUT)?;
        let mut connection =
            Self { socket, decoder: Decoder::new(), agent: ours.clone(), chunk: vec![0; CHUNK] };
        send_request(&connection.socket, &ours.encode())?;
        connection.agent = connection.next(Decoder::hello)?;
        if ours.common(&connection.agent).is_none() {
            return Err(AgentError::Version { agent: connection.agent, ours });
        }
        // Answers may take any time.
        set_timeout(&connection.socket, &TimeVal::new(0, 0))?;
        Ok(connection)
    }

    /// Who the agent says it is.
    pub fn agent(&self) -> &Hello {
        &self.agent
    }

    /// The modules that the guest's kernel has loaded.
    ///
    /// # Errors
    /// When the agent or the connection fails.
    pub fn modules(mut self) -> Result<Vec<LoadedModule>, AgentError> {
        self.request(Request::Modules)?;
        let mut modules = Vec::new();
        loop {
            match self.frame()? {
                Frame::Module(module) if modules.len() < MODULES_MAX => modules.push(module),
                Frame::Done => return Ok(modules),
                other => return Err(unexpected(other)),
            }
        }
    }

    /// What is in a directory of the guest, sorted; or the one file of that path.
    ///
    /// # Errors
    /// When the agent or the connection fails, or `each` does.
    pub fn list(
        mut self,
        path: &[u8],
        mut each: impl FnMut(Entry) -> io::Result<()>,
    ) -> Result<(), AgentError> {
        self.request(Request::List(path.to_vec()))?;
        loop {
            match self.frame()? {
                Frame::Entry(entry) => each(entry).map_err(AgentError::Output)?,
                Frame::Done => return Ok(()),
                other => return Err(unexpected(other)),
            }
        }
    }

    /// Copies a file of the guest.
    ///
    /// # Errors
    /// When the agent, the connection, or `out` fails; some bytes may have been written then.
    pub fn fetch(mut self, path: &[u8], out: &mut dyn Write) -> Result<Entry, AgentError> {
        self.request(Request::Fetch(path.to_vec()))?;
        let entry = match self.frame()? {
            Frame::Entry(entry) => entry,
            other => return Err(unexpected(other)),
        };
        loop {
            match self.frame()? {
                Frame::Data(Stream::Stdout, bytes) => {
                    out.write_all(&bytes).map_err(AgentError::Output)?;
                }
                Frame::Done => {
                    out.flush().map_err(AgentError::Output)?;
                    return Ok(entry);
                }
                other => return Err(unexpected(other)),
            }
        }
    }

    pub(super) fn request(&mut self, request: Request) -> Result<(), AgentError> {
        let mut bytes = Vec::new();
        // The only message of this side that can be too long.
        Frame::Request(request).encode(&mut bytes).map_err(|_| {
            let error = "the command, its arguments and environment are longer than 256 KiB";
            AgentError::Connection(io::Error::new(ErrorKind::InvalidInput, error))
        })?;
        Ok(send_request(&self.socket, &bytes)?)
    }

    /// The next frame.
    pub(super) fn frame(&mut self) -> Result<Frame, AgentError> {
        self.next(Decoder::frame)
    }

    fn next<T>(
        &mut self,
        take: fn(&mut Decoder) -> Result<Option<T>, ProtocolError>,
    ) -> Result<T, AgentError> {
        loop {
            if let Some(message) = take(&mut self.decoder)? {
                return Ok(message);
            }
            match self.socket.read(&mut self.chunk) {
                Ok(0) => return Err(AgentError::Ended),
                Ok(count) => self.decoder.push(self.chunk.get(..count).unwrap_or_default()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// A frame that has no place here, unless it says that the request failed.
pub(super) fn unexpected(frame: Frame) -> AgentError {
    match frame {
        Frame::Failed(failure) => AgentError::Failed(failure),
        _ => ProtocolError("a frame that was not expected").into(),
    }
}

/// For both directions; zero is none.
pub(super) fn set_timeout(socket: &impl AsFd, time: &TimeVal) -> Result<(), AgentError> {
    setsockopt(socket, sockopt::ReceiveTimeout, time)
        .and_then(|()| setsockopt(socket, sockopt::SendTimeout, time))
        .map_err(|error| AgentError::Connection(error.into()))
}
