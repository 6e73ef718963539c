//! Requests and answers.

use super::ProtocolError;
use super::fields::{Fields, put_bytes, put_list};

/// What a connection is for: one request each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// Run a command.
    Run(Run),
    /// Name the loaded modules.
    Modules,
    /// What is in the directory, or the one file, of this path.
    List(Vec<u8>),
    /// The content of the file of this path.
    Fetch(Vec<u8>),
}

/// A command to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// What.
    pub command: Command,
    /// Where; empty: where the agent is.
    pub directory: Vec<u8>,
    /// `NAME=VALUE`, in addition to the agent's own.
    pub environment: Vec<Vec<u8>>,
}

/// What to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// A program and its arguments.
    Program(Vec<Vec<u8>>),
    /// A command line, as for `--run` of `vmtrace boot`.
    Line(Vec<u8>),
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// With this status.
    Status(u8),
    /// By this signal.
    Signal(u8),
}

impl Exit {
    /// As shells have it: 128 and more for signals.
    pub fn code(self) -> u8 {
        match self {
            Self::Status(status) => status,
            Self::Signal(signal) => signal.saturating_add(128),
        }
    }
}

/// A request could not be met.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Why, for programs.
    pub reason: Reason,
    /// Why, for people.
    pub text: String,
}

/// Why a request could not be met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// Anything else.
    Other,
    /// No such file, directory or program.
    NotFound,
    /// The system does not allow it.
    Denied,
    /// The request makes no sense.
    BadRequest,
    /// Too many connections.
    Busy,
}

const REASONS: [Reason; 5] =
    [Reason::Other, Reason::NotFound, Reason::Denied, Reason::BadRequest, Reason::Busy];

/// A file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// `st_mode`: its type and permissions.
    pub mode: u32,
    /// Its size; files of procfs and sysfs have none.
    pub size: u64,
    /// Its name in the directory, or the path that was asked for.
    pub name: Vec<u8>,
}

/// A loaded module, a line of `/proc/modules`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadedModule {
    /// Its name.
    pub name: String,
    /// Bytes of memory.
    pub size: u64,
    /// Where it is; 0 if the system does not tell.
    pub address: u64,
    /// `Live`, `Loading` or `Unloading`.
    pub state: String,
    /// Modules that use it.
    pub users: Vec<String>,
}

impl Run {
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        match &self.command {
            Command::Program(words) => {
                out.push(0);
                put_list(out, words);
            }
            Command::Line(line) => {
                out.push(1);
                put_bytes(out, line);
            }
        }
        put_bytes(out, &self.directory);
        put_list(out, &self.environment);
    }

    pub(super) fn decode(fields: &mut Fields<'_>) -> Result<Self, ProtocolError> {
        let command = match fields.u8()? {
            0 => Command::Program(fields.list()?),
            1 => Command::Line(fields.bytes()?),
            _ => return Err(ProtocolError("a command of an unknown kind")),
        };
        Ok(Self { command, directory: fields.bytes()?, environment: fields.list()? })
    }
}

impl Exit {
    pub(super) fn encode(self, out: &mut Vec<u8>) {
        match self {
            Self::Status(status) => out.extend([0, status]),
            Self::Signal(signal) => out.extend([1, signal]),
        }
    }

    pub(super) fn decode(fields: &mut Fields<'_>) -> Result<Self, ProtocolError> {
        match (fields.u8()?, fields.u8()?) {
            (0, status) => Ok(Self::Status(status)),
            (1, signal @ 1..=127) => Ok(Self::Signal(signal)),
            _ => Err(ProtocolError("an end of an unknown kind")),
        }
    }
}

impl Failure {
    /// The reason by what the system said.
    pub fn new(error: &std::io::Error, text: String) -> Self {
        let reason = match error.kind() {
            std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => Reason::NotFound,
            std::io::ErrorKind::PermissionDenied => Reason::Denied,
            _ => Reason::Other,
        };
        Self { reason, text }
    }

    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        let number = REASONS.iter().position(|reason| *reason == self.reason);
        out.push(number.and_then(|number| u8::try_from(number).ok()).unwrap_or_default());
        put_bytes(out, self.text.as_bytes());
    }

    pub(super) fn decode(fields: &mut Fields<'_>) -> Result<Self, ProtocolError> {
        // A reason of a later agent is still a failure.
        let reason = REASONS.get(usize::from(fields.u8()?)).copied().unwrap_or(Reason::Other);
        Ok(Self { reason, text: fields.text()? })
    }
}

impl Entry {
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        out.extend(self.mode.to_le_bytes());
        out.extend(self.size.to_le_bytes());
        put_bytes(out, &self.name);
    }

    pub(super) fn decode(fields: &mut Fields<'_>) -> Result<Self, ProtocolError> {
        Ok(Self { mode: fields.u32()?, size: fields.u64()?, name: fields.bytes()? })
    }
}

impl LoadedModule {
    /// From a line of `/proc/modules`: `NAME SIZE REFERENCES USERS STATE ADDRESS [TAINTS]`.
    pub fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let (name, size) = (words.next()?.to_owned(), words.next()?.parse().ok()?);
        let users =
            words.nth(1)?.split(',').filter(|user| !matches!(*user, "" | "-" | "[permanent]"));
        let users = users.map(str::to_owned).collect();
        let state = words.next()?.to_owned();
        let address = words.next()?.strip_prefix("0x")?;
        Some(Self { name, size, users, state, address: u64::from_str_radix(address, 16).ok()? })
    }

    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        put_bytes(out, self.name.as_bytes());
        out.extend(self.size.to_le_bytes());
        out.extend(self.address.to_le_bytes());
        put_bytes(out, self.state.as_bytes());
        let users: Vec<_> = self.users.iter().map(|user| user.as_bytes().to_vec()).collect();
        put_list(out, &users);
    }

    pub(super) fn decode(fields: &mut Fields<'_>) -> Result<Self, ProtocolError> {
        Ok(Self {
            name: fields.text()?,
            size: fields.u64()?,
            address: fields.u64()?,
            state: fields.text()?,
            users: (0..fields.u16()?).map(|_| fields.text()).collect::<Result<_, _>>()?,
        })
    }
}
