//! Connects to an agent.

use std::io::{self, ErrorKind, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use vmtrace_system::send_request;

use super::client::{AgentError, Connection, TIMEOUT, set_timeout};
use super::protocol::AGENT_PORT;
use crate::host_vsock;

/// The time until the next attempt.
const RETRY: Duration = Duration::from_millis(100);
/// A longer line is no answer to a connection.
const LINE_MAX: u64 = 256;

/// Where an agent is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// A unix socket: that of `vmtrace boot --socket`, or one of a VMM's vsock device.
    Unix {
        /// Its path.
        path: PathBuf,
        /// The agent's vsock port.
        port: u32,
        /// It is that of a vsock device; otherwise autodetected.
        vsock: bool,
    },
    /// The host's own `AF_VSOCK`.
    Vsock {
        /// The guest.
        cid: u32,
        /// The agent's port.
        port: u32,
    },
}

/// What a unix socket said to a first line.
enum Answer {
    Connected(OwnedFd),
    Refused(String),
    /// It ended without saying why.
    Nothing,
}

impl Endpoint {
    /// From `vsock:CID`, `vsock:CID:PORT`, or the path of a unix socket.
    pub fn parse(text: &Path, port: Option<u32>, vsock: bool) -> Self {
        let numbers = text.to_str().and_then(|text| text.strip_prefix("vsock:"));
        let numbers =
            numbers.map(|text| text.split_once(':').map_or((text, None), |(a, b)| (a, Some(b))));
        if let Some((cid, own)) = numbers
            && let Ok(cid) = cid.parse()
            && let Ok(own) = own.map(str::parse).transpose()
        {
            return Self::Vsock { cid, port: own.or(port).unwrap_or(AGENT_PORT) };
        }
        Self::Unix { path: text.to_owned(), port: port.unwrap_or(AGENT_PORT), vsock }
    }

    /// Connects to the agent; tries for so long.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub fn connect_within(&self, wait: Duration) -> Result<Connection, AgentError> {
        // Longer than clocks go is for ever.
        let begin = Instant::now();
        loop {
            match self.connect() {
                // Another version, or one that does not keep to the protocol, stays what it is.
                Err(
                    AgentError::Connect { .. } | AgentError::Refused { .. } | AgentError::Ended,
                ) if begin.elapsed() < wait => {
                    std::thread::sleep(RETRY);
                }
                done => return done,
            }
        }
    }

    /// Connects to the agent.
    ///
    /// # Errors
    /// When there is none, or none that this version understands.
    pub fn connect(&self) -> Result<Connection, AgentError> {
        let socket = match self {
            Self::Vsock { cid, port } => {
                let to = || format!("vsock port {port} of guest {cid}");
                host_vsock::connect_to(*cid, *port).map_err(|error| failed(to(), error))?
            }
            Self::Unix { path, port, vsock } => unix(path, *port, *vsock)?,
        };
        Connection::new(socket)
    }
}

fn failed(to: String, reason: io::Error) -> AgentError {
    AgentError::Connect { to, reason }
}

fn unix(path: &Path, port: u32, vsock: bool) -> Result<OwnedFd, AgentError> {
    let refused = |reason| Err(AgentError::Refused { socket: path.to_owned(), reason });
    // A vsock device ends a connection that begins with anything but CONNECT.
    let first = if vsock { Answer::Nothing } else { ask(stream(path)?, "agent\n")? };
    let answer = match first {
        Answer::Nothing => ask(stream(path)?, &format!("CONNECT {port}\n"))?,
        answer => answer,
    };
    match answer {
        Answer::Connected(socket) => Ok(socket),
        Answer::Refused(reason) => refused(reason),
        Answer::Nothing => refused(format!(
            "nobody listens on vsock port {port} in the guest; run `vmtrace-agent serve` there"
        )),
    }
}

/// A new connection.
fn stream(path: &Path) -> Result<UnixStream, AgentError> {
    let to = || path.display().to_string();
    let socket = UnixStream::connect(path).map_err(|error| failed(to(), error))?;
    set_timeout(&socket, &TIMEOUT)?;
    Ok(socket)
}

/// Sends the first line of a connection and reads the answer.
#[allow(clippy::unbuffered_bytes)] // what follows is the agent's
fn ask(socket: UnixStream, line: &str) -> Result<Answer, AgentError> {
    let mut answer = Vec::new();
    let read = send_request(&socket, line.as_bytes()).and_then(|()| {
        for byte in (&socket).take(LINE_MAX).bytes() {
            match byte? {
                b'\n' => return Ok(true),
                byte => answer.push(byte),
            }
        }
        Ok(false)
    });
    let answer = String::from_utf8_lossy(&answer);
    match read {
        Ok(true) if answer == "OK" || answer.starts_with("OK ") => {
            Ok(Answer::Connected(socket.into()))
        }
        Ok(true) if answer.starts_with("ERR ") => {
            Ok(Answer::Refused(answer.trim_start_matches("ERR ").escape_debug().to_string()))
        }
        Ok(false) if answer.is_empty() => Ok(Answer::Nothing),
        Ok(_) => Ok(Answer::Refused(format!("its answer is {answer:?}"))),
        Err(error) => match error.kind() {
            ErrorKind::ConnectionReset => Ok(Answer::Nothing),
            _ => Err(error.into()),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixListener;
    use std::thread;
    use vmtrace_agent::reaper::Reaper;
    use vmtrace_agent::server::Server;

    /// A socket that has an answer for `wanted` and one for anything else, and an agent behind `OK`.
    fn bridge(
        wanted: &'static str,
        answer: &'static str,
        other: &'static str,
    ) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("s")).unwrap();
        let server = Server::new(Reaper::new());
        thread::spawn(move || {
            for socket in listener.incoming() {
                let mut socket = socket.unwrap();
                let mut line = Vec::new();
                while line.last() != Some(&b'\n') {
                    let mut byte = [0];
                    socket.read_exact(&mut byte).unwrap();
                    line.push(byte[0]);
                }
                let wanted = line == wanted.as_bytes();
                let answer = if wanted { answer } else { other };
                socket.write_all(answer.as_bytes()).unwrap();
                if answer.starts_with("OK") {
                    server.attend(socket.into());
                }
            }
        });
        dir
    }

    fn modules(dir: &tempfile::TempDir, vsock: bool) -> Result<usize, AgentError> {
        let endpoint = Endpoint::parse(&dir.path().join("s"), None, vsock);
        Ok(endpoint.connect()?.modules()?.len())
    }

    #[test]
    fn both_kinds_of_socket_are_found_out() {
        let trace = bridge("agent\n", "OK\n", "ERR no such request\n");
        modules(&trace, false).unwrap();
        let device = bridge("CONNECT 1025\n", "OK 1073741824\n", "");
        modules(&device, false).unwrap();
        modules(&device, true).unwrap();
        let error = modules(&trace, true).unwrap_err().to_string();
        assert!(
            error.ends_with("gives no connection to the guest's agent: no such request"),
            "{error}"
        );
    }

    #[test]
    fn refusals_say_what_to_do() {
        let error = |dir| modules(&dir, false).unwrap_err().to_string();
        let no_agent = error(bridge("CONNECT 1025\n", "", ""));
        assert!(no_agent.contains("run `vmtrace-agent serve` there"), "{no_agent}");
        let refused = error(bridge("agent\n", "ERR the guest has\x1b no vsock\n", ""));
        assert!(refused.ends_with("the guest has\\u{1b} no vsock"), "{refused}");
        let strange = error(bridge("agent\n", "HTTP/1.1 400 Bad Request\r\n", ""));
        assert!(strange.contains("its answer is \"HTTP/1.1 400"), "{strange}");
        let missing = error(tempfile::tempdir().unwrap());
        assert!(missing.contains("is the guest running?"), "{missing}");
    }

    // Whoever takes it for no answer asks again with CONNECT, and says that nobody listens in the guest.
    #[test]
    fn a_refusal_is_told_that_came_before_the_request() {
        let (mut server, socket) = UnixStream::pair().unwrap();
        server.write_all(b"ERR too many connections at once; try again later\n").unwrap();
        drop(server);
        let Answer::Refused(reason) = ask(socket, "agent\n").unwrap() else {
            panic!("taken for no answer")
        };
        assert_eq!(reason, "too many connections at once; try again later");
        // Nothing was said.
        let (_, socket) = UnixStream::pair().unwrap();
        assert!(matches!(ask(socket, "agent\n"), Ok(Answer::Nothing)));
    }

    #[test]
    fn endpoints() {
        let parse = |text: &str, port| Endpoint::parse(Path::new(text), port, false);
        let vsock = |cid, port| Endpoint::Vsock { cid, port };
        assert_eq!(parse("vsock:3", None), vsock(3, AGENT_PORT));
        assert_eq!(parse("vsock:3", Some(7)), vsock(3, 7));
        assert_eq!(parse("vsock:3:8", Some(7)), vsock(3, 8));
        for path in ["vsock:", "vsock:x", "vsock:3:", "/run/vsock:3", "s"] {
            let unix = Endpoint::Unix { path: path.into(), port: 7, vsock: false };
            assert_eq!(parse(path, Some(7)), unix);
        }
    }
}
