//! Frames: a `u32` length of the payload, a `u8` kind, the payload; all little endian.

use super::fields::{Fields, put_bytes};
use super::request::{Entry, Exit, Failure, LoadedModule, Request, Run};
use super::{DATA_MAX, HEADER, Hello, PAYLOAD_MAX, ProtocolError};

/// One message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// What the connection is for; the host's first frame.
    Request(Request),
    /// Bytes of a stream, or of the file that was asked for ([`Stream::Stdout`]).
    Data(Stream, Vec<u8>),
    /// The receiver of that stream takes so many bytes more.
    Credit(Stream, u32),
    /// The sender of that stream sends no more.
    End(Stream),
    /// The receiver of that stream takes no more: what is still sent is dropped.
    Stop(Stream),
    /// For the command's process group, from the host.
    Signal(u8),
    /// The command has ended; the agent's last frame.
    Exited(Exit),
    /// The request cannot be met; the agent's last frame.
    Failed(Failure),
    /// A file of a list, or the one whose content follows.
    Entry(Entry),
    /// A loaded module.
    Module(LoadedModule),
    /// A list or a file is complete; the agent's last frame.
    Done,
}

/// A standard stream of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Standard input, to the command.
    Stdin,
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

impl Stream {
    fn number(self) -> u8 {
        match self {
            Self::Stdin => 0,
            Self::Stdout => 1,
            Self::Stderr => 2,
        }
    }

    fn decode(fields: &mut Fields<'_>) -> Result<Self, ProtocolError> {
        match fields.u8()? {
            0 => Ok(Self::Stdin),
            1 => Ok(Self::Stdout),
            2 => Ok(Self::Stderr),
            _ => Err(ProtocolError("a stream that does not exist")),
        }
    }
}

mod kind {
    pub(super) const RUN: u8 = 1;
    pub(super) const MODULES: u8 = 2;
    pub(super) const LIST: u8 = 3;
    pub(super) const FETCH: u8 = 4;
    pub(super) const DATA: u8 = 16;
    pub(super) const CREDIT: u8 = 17;
    pub(super) const END: u8 = 18;
    pub(super) const STOP: u8 = 19;
    pub(super) const SIGNAL: u8 = 20;
    pub(super) const EXITED: u8 = 32;
    pub(super) const FAILED: u8 = 33;
    pub(super) const ENTRY: u8 = 34;
    pub(super) const MODULE: u8 = 35;
    pub(super) const DONE: u8 = 36;
}

impl Frame {
    /// Appends the frame.
    ///
    /// # Errors
    /// When it would be longer than the other side accepts; nothing is appended then.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), ProtocolError> {
        let start = out.len();
        out.extend([0; HEADER]);
        let kind = self.payload(out);
        let length = out.len() - start - HEADER;
        let too_long =
            length > PAYLOAD_MAX || matches!(self, Self::Data(_, bytes) if bytes.len() > DATA_MAX);
        if too_long {
            out.truncate(start);
            return Err(ProtocolError("a message is longer than 256 KiB"));
        }
        let [l0, l1, l2, l3] = u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes();
        for (to, from) in out.iter_mut().skip(start).zip([l0, l1, l2, l3, kind]) {
            *to = from;
        }
        Ok(())
    }

    fn payload(&self, out: &mut Vec<u8>) -> u8 {
        match self {
            Self::Request(Request::Run(run)) => {
                run.encode(out);
                kind::RUN
            }
            Self::Request(Request::Modules) => kind::MODULES,
            Self::Request(Request::List(path)) => {
                put_bytes(out, path);
                kind::LIST
            }
            Self::Request(Request::Fetch(path)) => {
                put_bytes(out, path);
                kind::FETCH
            }
            Self::Data(stream, bytes) => {
                out.push(stream.number());
                out.extend(bytes);
                kind::DATA
            }
            Self::Credit(stream, bytes) => {
                out.push(stream.number());
                out.extend(bytes.to_le_bytes());
                kind::CREDIT
            }
            Self::End(stream) => {
                out.push(stream.number());
                kind::END
            }
            Self::Stop(stream) => {
                out.push(stream.number());
                kind::STOP
            }
            Self::Signal(signal) => {
                out.push(*signal);
                kind::SIGNAL
            }
            Self::Exited(exit) => {
                exit.encode(out);
                kind::EXITED
            }
            Self::Failed(failure) => {
                failure.encode(out);
                kind::FAILED
            }
            Self::Entry(entry) => {
                entry.encode(out);
                kind::ENTRY
            }
            Self::Module(module) => {
                module.encode(out);
                kind::MODULE
            }
            Self::Done => kind::DONE,
        }
    }

    fn decode(kind: u8, payload: &[u8]) -> Result<Self, ProtocolError> {
        let fields = &mut Fields(payload);
        let frame = match kind {
            kind::RUN => Self::Request(Request::Run(Run::decode(fields)?)),
            kind::MODULES => Self::Request(Request::Modules),
            kind::LIST => Self::Request(Request::List(fields.bytes()?)),
            kind::FETCH => Self::Request(Request::Fetch(fields.bytes()?)),
            kind::DATA => {
                let (stream, bytes) = (Stream::decode(fields)?, fields.rest());
                if bytes.len() > DATA_MAX {
                    return Err(ProtocolError("too much data in a frame"));
                }
                Self::Data(stream, bytes)
            }
            kind::CREDIT => Self::Credit(Stream::decode(fields)?, fields.u32()?),
            kind::END => Self::End(Stream::decode(fields)?),
            kind::STOP => Self::Stop(Stream::decode(fields)?),
            kind::SIGNAL => Self::Signal(fields.u8()?),
            kind::EXITED => Self::Exited(Exit::decode(fields)?),
            kind::FAILED => Self::Failed(Failure::decode(fields)?),
            kind::ENTRY => Self::Entry(Entry::decode(fields)?),
            kind::MODULE => Self::Module(LoadedModule::decode(fields)?),
            kind::DONE => Self::Done,
            _ => return Err(ProtocolError("a frame of an unknown kind")),
        };
        fields.end()?;
        Ok(frame)
    }
}

/// Takes bytes as they come and gives messages. Holds one message and what was pushed after it, so whoever takes
/// all messages before the next push has a bound.
#[derive(Debug, Default)]
pub struct Decoder {
    bytes: Vec<u8>,
    /// What was given out already.
    taken: usize,
}

impl Decoder {
    /// Without bytes.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.taken);
        self.taken = 0;
        self.bytes.extend(bytes);
    }

    /// The first message, if it is complete.
    pub fn hello(&mut self) -> Result<Option<Hello>, ProtocolError> {
        let decoded = Hello::decode(self.rest())?;
        Ok(decoded.map(|(hello, length)| {
            self.taken += length;
            hello
        }))
    }

    /// The next frame, if it is complete.
    pub fn frame(&mut self) -> Result<Option<Frame>, ProtocolError> {
        let Some((&[l0, l1, l2, l3, kind], rest)) = self.rest().split_first_chunk::<HEADER>()
        else {
            return Ok(None);
        };
        let length = usize::try_from(u32::from_le_bytes([l0, l1, l2, l3])).unwrap_or(usize::MAX);
        if length > PAYLOAD_MAX {
            return Err(ProtocolError("a frame is longer than 256 KiB"));
        }
        let Some(payload) = rest.get(..length) else { return Ok(None) };
        let frame = Frame::decode(kind, payload)?;
        self.taken += HEADER + length;
        Ok(Some(frame))
    }

    fn rest(&self) -> &[u8] {
        self.bytes.get(self.taken..).unwrap_or_default()
    }
}
