//! The client's end: sends a request to a running trace.

use super::request::StreamRequest;
use super::{Control, Format};
use crate::host_vsock;
use std::fmt;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};
use vmtrace_system::send_request;

/// Where a running trace can be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// The socket of `vmtrace boot --socket`.
    Unix(PathBuf),
    /// From inside the guest.
    Vsock {
        /// Context id; 2 is the VMM.
        cid: u32,
        /// Port.
        port: u32,
    },
}

impl FromStr for Source {
    type Err = String;

    /// A path, or `vsock:CID:PORT`.
    fn from_str(text: &str) -> Result<Self, String> {
        let Some(address) = text.strip_prefix("vsock:") else { return Ok(Self::Unix(text.into())) };
        address
            .split_once(':')
            .and_then(|(cid, port)| {
                Some(Self::Vsock { cid: cid.parse().ok()?, port: port.parse().ok()? })
            })
            .ok_or_else(|| format!("{text:?} is not an address: use vsock:CID:PORT, or a path"))
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => path.display().fmt(f),
            Self::Vsock { cid, port } => write!(f, "vsock:{cid}:{port}"),
        }
    }
}

/// Bytes of an answer, at most.
const ANSWER_MAX: u64 = 16 << 20;
/// How long a client waits between two tries.
const RETRY: Duration = Duration::from_millis(50);

impl Source {
    /// Connects; tries for so long.
    ///
    /// # Errors
    /// When nobody is there.
    pub fn connect(&self, wait: Duration) -> io::Result<UnixStream> {
        // Longer than clocks go is for ever.
        let begin = Instant::now();
        loop {
            match self.connect_once() {
                Err(_) if begin.elapsed() < wait => std::thread::sleep(RETRY),
                done => return done,
            }
        }
    }

    fn connect_once(&self) -> io::Result<UnixStream> {
        match self {
            Self::Unix(path) => UnixStream::connect(path),
            Self::Vsock { cid, port } => {
                // A stream socket like any other: nothing that is used here looks at its family.
                Ok(host_vsock::connect_privileged(*cid, *port)?.into())
            }
        }
    }
}

/// Asks for a stream; what can be read from then on is it, or `ERR` and why not.
///
/// # Errors
/// When the connection fails.
pub fn ask_stream(stream: &UnixStream, request: &StreamRequest) -> io::Result<()> {
    let format = match request.format {
        Format::Raw => "raw",
        Format::Text => "text",
        Format::Json => "json",
        Format::Graph => "graph",
    };
    let globs = &request.globs;
    let space = if globs.is_empty() { "" } else { " " };
    let tracer = request.tracer.as_ref().map(|name| format!(" -t {name}")).unwrap_or_default();
    send_request(stream, format!("{format}{space}{globs}{tracer}\n").as_bytes())
}

/// Gives a command and waits for its answer.
///
/// # Errors
/// When the connection fails, or with the reason of a refusal.
pub fn command(stream: &UnixStream, command: &Control) -> io::Result<String> {
    command_telling(stream, command, (None, || ()))
}

/// The same, which tells once when there is no answer after this time.
///
/// # Errors
/// When the connection fails, or with the reason of a refusal.
pub fn command_telling(
    stream: &UnixStream,
    command: &Control,
    (silence, tell): (Option<Duration>, impl FnOnce()),
) -> io::Result<String> {
    let words = match command {
        Control::Status => "status".to_owned(),
        Control::Table => "table".to_owned(),
        Control::Filter(globs) => format!("filter {globs}"),
        Control::TracerAdd(spec) => format!("tracer add {spec}"),
        Control::TracerRemove(name) => format!("tracer remove {name}"),
        Control::TracerList => "tracer list".to_owned(),
        Control::EventAdd(glob) => format!("event add {glob}"),
        Control::EventRemove(glob) => format!("event remove {glob}"),
        Control::EventList => "event list".to_owned(),
        Control::TriggerAdd { action, spec } => format!("trigger add {action} {spec}"),
        Control::TriggerRemove(id) => format!("trigger remove {id}"),
        Control::TriggerList => "trigger list".to_owned(),
        Control::LatencyStart { kind, over } => {
            let over = over.map(|over| format!(" {over}ns")).unwrap_or_default();
            format!("latency start {}{over}", kind.name())
        }
        Control::LatencyShow { json } => {
            format!("latency show{}", if *json { " json" } else { "" })
        }
        Control::LatencyStop { json } => {
            format!("latency stop{}", if *json { " json" } else { "" })
        }
        Control::Pause => "pause".to_owned(),
        Control::Resume => "resume".to_owned(),
        Control::Stop => "stop".to_owned(),
        Control::Clear => "clear".to_owned(),
        Control::Snapshot => "snapshot".to_owned(),
        Control::Mark { text, .. } => format!("mark {text}"),
    };
    send_request(stream, format!("ctl {words}\n").as_bytes())?;
    let mut line = Vec::new();
    let mut answer = BufReader::new(stream.take(ANSWER_MAX));
    stream.set_read_timeout(silence)?;
    if let Err(error) = answer.read_until(b'\n', &mut line) {
        if error.kind() != io::ErrorKind::WouldBlock {
            return Err(error);
        }
        tell();
        stream.set_read_timeout(None)?;
        answer.read_until(b'\n', &mut line)?;
    }
    // Who is not vmtrace answers as it likes.
    let line = String::from_utf8_lossy(&line);
    if !line.is_empty() && !line.ends_with('\n') {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the answer has no end"));
    }
    let line = line.trim_end();
    match (line.strip_prefix("OK"), line.strip_prefix("ERR ")) {
        (Some(answer), _) => Ok(answer.trim_start().to_owned()),
        (_, Some(reason)) => Err(io::Error::other(reason.to_owned())),
        _ => Err(io::Error::other("no answer: the peer is not vmtrace, or it has just ended")),
    }
}

/// Puts what was read first back before the rest, unless it is a refusal.
///
/// # Errors
/// With the reason of a refusal.
pub fn accepted(mut stream: UnixStream) -> io::Result<impl Read> {
    const REFUSAL: &[u8] = b"ERR ";
    let mut first = Vec::new();
    (&mut stream).take(REFUSAL.len() as u64).read_to_end(&mut first)?;
    if first == REFUSAL {
        let mut reason = String::new();
        BufReader::new((&mut stream).take(4096)).read_line(&mut reason)?;
        return Err(io::Error::other(reason.trim_end().to_owned()));
    }
    Ok(io::Cursor::new(first).chain(stream))
}

#[cfg(test)]
mod tests {
    use super::super::Globs;
    use super::*;
    use std::io::Write;

    #[test]
    fn sources() {
        assert_eq!("vsock:2:1024".parse(), Ok(Source::Vsock { cid: 2, port: 1024 }));
        assert_eq!("/run/t".parse(), Ok(Source::Unix("/run/t".into())));
        assert!("vsock:2".parse::<Source>().is_err());
        assert!("vsock:x:1".parse::<Source>().is_err());
    }

    // Who waits for another program's socket would wait for ever without a word. (An answer may take its time.)
    #[test]
    fn silence_is_told_and_the_answer_is_waited_for() {
        let (mut server, client) = UnixStream::pair().unwrap();
        let said = std::cell::Cell::new(false);
        let tell = || {
            said.set(true);
            server.write_all(b"OK late\n").unwrap();
        };
        let silence = Some(Duration::from_millis(10));
        let answer = command_telling(&client, &Control::Status, (silence, tell));
        assert_eq!((answer.unwrap().as_str(), said.get()), ("late", true));
    }

    // A server that has no room says so and closes, before it was asked.
    #[test]
    fn a_refusal_is_told_that_came_before_the_request() {
        let refused = || {
            let (mut server, client) = UnixStream::pair().unwrap();
            server.write_all(b"ERR too many connections at once\n").unwrap();
            client
        };
        let error = command(&refused(), &Control::Status).unwrap_err();
        assert_eq!(error.to_string(), "too many connections at once");
        let (client, globs) = (refused(), Globs::default());
        ask_stream(&client, &StreamRequest { format: Format::Raw, globs, tracer: None }).unwrap();
        let error = accepted(client).map(|_| ()).unwrap_err();
        assert_eq!(error.to_string(), "too many connections at once");
        // Nothing was said.
        let (_, client) = UnixStream::pair().unwrap();
        let error = command(&client, &Control::Status).unwrap_err();
        assert!(error.to_string().starts_with("no answer"), "{error}");
        // Another program's socket.
        for other in [&b"\x80\xe8\n"[..], b"{\"QMP\": {}}\r\n"] {
            let (mut server, client) = UnixStream::pair().unwrap();
            server.write_all(other).unwrap();
            let error = command(&client, &Control::Status).unwrap_err();
            assert!(error.to_string().contains("the peer is not vmtrace"), "{error}");
        }
    }
}
