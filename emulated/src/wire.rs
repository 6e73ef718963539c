//! The protocol between the outer vmtrace and the emulated host's `/init`.
//!
//! One byte stream in each direction (a virtio-serial port; its other end is a socket of QEMU's) carries frames:
//!
//! ```text
//! u32 length of the payload | u32 stream | u8 kind | u8 0 | u16 0 | payload      (little endian)
//! ```
//!
//! A *stream* is an independent byte stream inside the connection. The outer side chooses the numbers of streams,
//! from 1 on. A request that names a stream opens it, and it ends when it is closed. (The host opens the streams
//! of connections to its sockets, and chooses their numbers, from [`FIRST_ACCEPTED`] on.) Both directions of a
//! stream are independent. For each direction the receiver grants *credit*: the sender may send at most [`WINDOW`]
//! bytes before the receiver returns credit by `CREDIT`. So a slow reader of one stream (such as a full pipe at a
//! job's standard output) stops only that stream. Requests, signals and other streams continue, and neither side
//! buffers more than the windows.
//!
//! | kind | from | stream | payload |
//! |---|---|---|---|
//! | 0 `HELLO` | host | 0 | JSON [`Hello`]; the first frame, when jobs are accepted |
//! | 1 `RUN` | outer | job | JSON [`Run`]; a job's number comes from the same numbers as streams |
//! | 2 `SIGNAL` | outer | job | u32 signal number for the job's process (`SIGKILL`: for its group) |
//! | 3 `EXITED` | host | job | JSON [`Exited`]; data of its streams may still follow |
//! | 4 `DATA` | both | any | bytes |
//! | 5 `CREDIT` | both | any | u32 number of bytes |
//! | 6 `CLOSE` | both | any | none: the sender sends no more |
//! | 7 `STOP` | both | any | none: the sender reads no more; what is still sent is dropped. Ends a `LISTEN` as well |
//! | 8 `PUT` | outer | new | JSON [`Put`]; then `DATA` and `CLOSE`; answered by `DONE` or `FAILED` |
//! | 9 `DONE` | host | that of the request | none |
//! | 10 `FAILED` | host | that of the request | text |
//! | 11 `CONNECT` | outer | new | JSON [`Connect`]; answered by `DONE` or `FAILED` |
//! | 12 `LISTEN` | outer | new | JSON [`Listen`]; answered by `DONE` or `FAILED` |
//! | 13 `ACCEPTED` | host | that of the `LISTEN` | JSON [`Accepted`]: somebody has connected there |
//!
//! `FAILED` answers a `RUN` that could not be started as well.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The version of the protocol. It changes with every incompatible change. (The two sides are the same
/// binary unless a user mixes builds.)
pub(super) const PROTOCOL: u32 = 3;

/// What may be under way in one direction of a stream.
pub(super) const WINDOW: u32 = 1 << 20;

pub(super) const HEADER: usize = 12;

/// A data frame fills one write to the guest's port, which takes 32 KiB at most.
pub(super) const DATA_MAX: usize = (32 << 10) - HEADER;

/// Requests may be longer than data.
const PAYLOAD_MAX: usize = 1 << 20;

/// The name of the virtio-serial port.
pub(super) const PORT: &str = "vmtrace";

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Hello,
    Run,
    Signal,
    Exited,
    Data,
    Credit,
    Close,
    Stop,
    Put,
    Done,
    Failed,
    Connect,
    Listen,
    Accepted,
}

const KINDS: [Kind; 14] = [
    Kind::Hello,
    Kind::Run,
    Kind::Signal,
    Kind::Exited,
    Kind::Data,
    Kind::Credit,
    Kind::Close,
    Kind::Stop,
    Kind::Put,
    Kind::Done,
    Kind::Failed,
    Kind::Connect,
    Kind::Listen,
    Kind::Accepted,
];

/// The host is up.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) protocol: u32,
    /// The host kernel's release.
    pub(super) release: String,
    /// Why there is no usable `/dev/kvm`, if so.
    pub(super) kvm_error: Option<String>,
    /// What went wrong without being fatal.
    pub(super) notes: Vec<String>,
    /// Which sources its vmtrace was built from.
    #[serde(default)]
    pub(super) source: String,
}

/// Starts a job.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(super) struct Run {
    /// Absolute path; none: vmtrace itself.
    pub(super) program: Option<String>,
    pub(super) args: Vec<String>,
    pub(super) env: BTreeMap<String, String>,
    /// None: `/dev/null`.
    pub(super) stdin: Option<u32>,
    pub(super) stdout: u32,
    pub(super) stderr: u32,
    /// Paths that are made as FIFOs for the job to write to, and their streams.
    pub(super) outputs: Vec<(String, u32)>,
}

/// How a job ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Exited {
    Code(i32),
    Signal(i32),
}

/// Makes a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Put {
    pub(super) path: String,
    pub(super) mode: u32,
}

/// Connects to a unix socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Connect {
    pub(super) path: String,
    /// The stream of what goes to the socket.
    pub(super) input: u32,
    /// The stream of what comes from it.
    pub(super) output: u32,
}

/// Listens at a unix socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Listen {
    pub(super) path: String,
}

/// A connection to such a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Accepted {
    /// The stream of what goes to whoever has connected.
    pub(super) input: u32,
    /// The stream of what comes from there.
    pub(super) output: u32,
}

/// The first number of the host's own streams.
pub(super) const FIRST_ACCEPTED: u32 = 1 << 31;

/// One message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) kind: Kind,
    pub(super) stream: u32,
    pub(super) payload: Vec<u8>,
}

/// What precedes a payload of `length` bytes.
pub(super) fn header(kind: Kind, stream: u32, length: usize) -> [u8; HEADER] {
    let [l0, l1, l2, l3] = u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes();
    let [s0, s1, s2, s3] = stream.to_le_bytes();
    let kind = KINDS.iter().position(|k| *k == kind).and_then(|n| u8::try_from(n).ok());
    [l0, l1, l2, l3, s0, s1, s2, s3, kind.unwrap_or_default(), 0, 0, 0]
}

/// The other side does not keep to the protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the protocol of the connection to the emulated host is broken ({0})")]
pub(super) struct ProtocolError(pub(super) &'static str);

impl Frame {
    pub(super) fn new(kind: Kind, stream: u32) -> Self {
        Self { kind, stream, payload: Vec::new() }
    }

    pub(super) fn with(kind: Kind, stream: u32, payload: impl Into<Vec<u8>>) -> Self {
        Self { kind, stream, payload: payload.into() }
    }

    pub(super) fn number(kind: Kind, stream: u32, value: u32) -> Self {
        Self::with(kind, stream, value.to_le_bytes())
    }

    pub(super) fn json(
        kind: Kind,
        stream: u32,
        value: &impl Serialize,
    ) -> Result<Self, ProtocolError> {
        let payload = serde_json::to_vec(value).map_err(|_| ProtocolError("unwritable request"))?;
        if payload.len() > PAYLOAD_MAX {
            return Err(ProtocolError("request too long"));
        }
        Ok(Self { kind, stream, payload })
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER + self.payload.len());
        bytes.extend(header(self.kind, self.stream, self.payload.len()));
        bytes.extend(&self.payload);
        bytes
    }

    pub(super) fn as_number(&self) -> Result<u32, ProtocolError> {
        self.payload
            .as_slice()
            .try_into()
            .map(u32::from_le_bytes)
            .map_err(|_| ProtocolError("bad number"))
    }

    pub(super) fn as_json<'a, T: Deserialize<'a>>(&'a self) -> Result<T, ProtocolError> {
        serde_json::from_slice(&self.payload).map_err(|_| ProtocolError("bad request"))
    }
}

/// Takes bytes as they come and gives frames.
#[derive(Debug, Default)]
pub(super) struct Decoder {
    buffer: Vec<u8>,
    /// Up to here the buffer was given out already.
    start: usize,
}

impl Decoder {
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.buffer.drain(..self.start);
        self.start = 0;
        self.buffer.extend(bytes);
    }

    /// The next whole frame.
    pub(super) fn frame(&mut self) -> Result<Option<Frame>, ProtocolError> {
        let rest = self.buffer.get(self.start..).unwrap_or_default();
        let Some((&[l0, l1, l2, l3, s0, s1, s2, s3, kind, ..], rest)) =
            rest.split_first_chunk::<HEADER>()
        else {
            return Ok(None);
        };
        let length = usize::try_from(u32::from_le_bytes([l0, l1, l2, l3])).unwrap_or(usize::MAX);
        if length > PAYLOAD_MAX {
            return Err(ProtocolError("frame too long"));
        }
        let kind = *KINDS.get(usize::from(kind)).ok_or(ProtocolError("unknown kind"))?;
        let Some(payload) = rest.get(..length) else { return Ok(None) };
        let frame = Frame::with(kind, u32::from_le_bytes([s0, s1, s2, s3]), payload);
        self.start += HEADER + length;
        Ok(Some(frame))
    }
}

/// For fuzzing: reads `bytes` in pieces as either side does, with all that a frame may be taken
/// for.
///
/// # Panics
/// When what was understood is not the same when it is sent again.
#[doc(hidden)]
pub fn exercise(bytes: &[u8], piece: usize) {
    let mut decoder = Decoder::default();
    for piece in bytes.chunks(piece.max(1)) {
        decoder.push(piece);
        while let Ok(Some(frame)) = decoder.frame() {
            let mut again = Decoder::default();
            again.push(&frame.to_bytes());
            assert_eq!(again.frame(), Ok(Some(frame.clone())), "another frame");
            let _ = frame.as_number();
            let _ = frame.as_json::<Hello>();
            let _ = frame.as_json::<Run>();
            let _ = frame.as_json::<Exited>();
            let _ = frame.as_json::<Put>();
            let _ = frame.as_json::<Connect>();
            let _ = frame.as_json::<Listen>();
            let _ = frame.as_json::<Accepted>();
        }
        // Whoever waits for the rest of a frame holds no more than one.
        assert!(decoder.buffer.len() - decoder.start <= HEADER + PAYLOAD_MAX + bytes.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frames(bytes: &[u8], piece: usize) -> Result<Vec<Frame>, ProtocolError> {
        let mut decoder = Decoder::default();
        let mut frames = Vec::new();
        for piece in bytes.chunks(piece) {
            decoder.push(piece);
            while let Some(frame) = decoder.frame()? {
                frames.push(frame);
            }
        }
        Ok(frames)
    }

    proptest! {
        #[test]
        fn frames_survive_any_cutting(
            list in prop::collection::vec((0..KINDS.len(), any::<u32>(), prop::collection::vec(any::<u8>(), 0..100)), 0..8),
            piece in 1..200usize,
        ) {
            let list: Vec<_> = list.into_iter().map(|(k, s, p)| Frame::with(KINDS[k], s, p)).collect();
            let bytes: Vec<u8> = list.iter().flat_map(Frame::to_bytes).collect();
            prop_assert_eq!(frames(&bytes, piece).unwrap(), list);
        }

        #[test]
        fn noise_is_no_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = frames(&bytes, 7);
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let mut long = Frame::new(Kind::Data, 1).to_bytes();
        long[3] = 0xff;
        assert!(frames(&long, 100).is_err());
        let mut unknown = Frame::new(Kind::Data, 1).to_bytes();
        unknown[8] = 200;
        assert!(frames(&unknown, 100).is_err());
    }

    #[test]
    fn requests() {
        let run =
            Run { args: vec!["boot".into()], outputs: vec![("/out".into(), 3)], ..Run::default() };
        let frame = Frame::json(Kind::Run, 7, &run).unwrap();
        assert_eq!(frame.as_json::<Run>().unwrap(), run);
        assert!(frame.as_json::<Hello>().is_err());
        assert_eq!(Frame::number(Kind::Credit, 1, 77).as_number(), Ok(77));
        assert!(frame.as_number().is_err());
    }
}
