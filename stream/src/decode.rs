//! The state machine of every reader: it turns bytes into frames.

use std::io::{self, Read};
use std::ops::Range;

use zerocopy::FromBytes;

use super::check::Check;
use super::error::{Remedy, StreamError};
use super::expand::Expanded;
use super::frame::{Frame, PayloadError};
use super::header::Header;
use super::wire::{
    ALIGN, FrameHead, HEAD, MAGIC, MAX_PAYLOAD, Prologue, VERSION_COMPRESSED, VERSION_MAJOR, kind,
};

/// What [`Decoder::advance`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// A frame is ready: [`Decoder::frame`] gives it.
    Frame,
    /// The next frame is not complete: feed more bytes.
    NeedMore,
    /// The end frame was given; nothing follows.
    Ended,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Prologue,
    Header,
    Frames,
    Ended,
    Failed,
}

#[derive(Clone, Debug)]
struct Current {
    kind: u16,
    flags: u16,
    /// In the frames that were compressed, or else in the buffer.
    inside: bool,
    payload: Range<usize>,
}

/// A verified frame apart from its stream: see [`Decoder::apart`].
#[derive(Clone, Debug)]
pub struct Apart {
    kind: u16,
    flags: u16,
    payload: Box<[u8]>,
}

impl Apart {
    /// The frame.
    #[must_use]
    pub fn frame(&self) -> Option<Frame<'_>> {
        Frame::parse(self.kind, self.flags, &self.payload).ok()
    }
}

/// Bytes in, verified frames out.
///
/// Holds at most one incomplete frame beside what it was fed, and the frames of one compressed frame.
#[derive(Debug)]
pub struct Decoder {
    buffer: Vec<u8>,
    /// The undecoded bytes of `buffer`.
    pending: Range<usize>,
    /// Where the first undecoded byte is.
    place: u64,
    /// The same in a stream that is not compressed.
    offset: u64,
    /// Whether there may be compressed frames.
    compressed: bool,
    expanded: Expanded,
    /// Those of `expanded` that were not decoded yet, and the bytes of the frame that they came in.
    inside: Range<usize>,
    outside: usize,
    state: State,
    current: Option<Current>,
    header: Option<Box<Header>>,
    check: Check,
    /// Whether frames are taken as they are.
    trusting: bool,
}

impl Default for Decoder {
    fn default() -> Self {
        Self {
            buffer: Vec::new(),
            pending: 0..0,
            place: 0,
            offset: 0,
            compressed: false,
            expanded: Expanded::default(),
            inside: 0..0,
            outside: 0,
            state: State::Prologue,
            current: None,
            header: None,
            check: Check::default(),
            trusting: false,
        }
    }
}

impl Decoder {
    /// A decoder at the start of a stream.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A decoder that takes frames as they are: no check values, numbers or entries of lists are
    /// verified. For those who decode a stream a second time in any case.
    pub(super) fn trusting() -> Self {
        Self { trusting: true, ..Self::default() }
    }

    /// The header, once its frame was given.
    #[must_use]
    pub fn header(&self) -> Option<&Header> {
        self.header.as_deref()
    }

    /// Bytes of the stream that were decoded; of one that is compressed, as if it were not: all
    /// frames have places of their own.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Adds bytes of the stream.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.spare(bytes.len())[..bytes.len()].copy_from_slice(bytes);
        self.filled(bytes.len());
    }

    /// Reads bytes of the stream from a source, as they are there, into room for at least `length`;
    /// returns how many.
    ///
    /// # Errors
    /// Those of the source: nothing is lost.
    pub fn read(&mut self, source: &mut impl Read, length: usize) -> io::Result<usize> {
        let read = source.read(self.spare(length))?;
        self.filled(read);
        Ok(read)
    }

    /// Room for at least `length` further bytes, to be declared by [`Decoder::filled`].
    fn spare(&mut self, length: usize) -> &mut [u8] {
        self.current = None;
        if self.buffer.len() - self.pending.end < length {
            self.buffer.copy_within(self.pending.clone(), 0);
            self.pending = 0..self.pending.len();
            let needed = self.pending.end + length;
            if self.buffer.len() < needed {
                self.buffer.resize(needed, 0);
            }
        }
        &mut self.buffer[self.pending.end..]
    }

    /// Declares that so many bytes of [`Decoder::spare`] are of the stream.
    fn filled(&mut self, length: usize) {
        self.pending.end = self.buffer.len().min(self.pending.end + length);
    }

    /// Decodes the next frame.
    ///
    /// # Errors
    /// When the stream is not one, is damaged, goes on after its end, or needs a newer reader. After an error
    /// nothing more is decoded.
    pub fn advance(&mut self) -> Result<Progress, StreamError> {
        let progress = self.step();
        if progress.is_err() {
            self.state = State::Failed;
        }
        progress
    }

    /// The frame that [`Decoder::advance`] announced, until the next call of it.
    #[must_use]
    pub fn frame(&self) -> Option<Frame<'_>> {
        let current = self.current.as_ref()?;
        let payload = self.bytes(current.inside).get(current.payload.clone())?;
        Frame::parse(current.kind, current.flags, payload).ok()
    }

    /// The same frame with a copy of its payload, which outlives the decoder.
    #[must_use]
    pub fn apart(&self) -> Option<Apart> {
        let Current { kind, flags, inside, ref payload } = *self.current.as_ref()?;
        let payload = self.bytes(inside).get(payload.clone())?;
        Some(Apart { kind, flags, payload: payload.into() })
    }

    /// To be called when no more bytes come.
    ///
    /// # Errors
    /// When the end frame was not reached.
    pub fn finish(&self) -> Result<(), StreamError> {
        let rest = u64::try_from(self.pending.len() + self.outside).unwrap_or(0);
        let place = match (self.state, self.pending.is_empty()) {
            (State::Ended | State::Failed, _) => return Ok(()),
            (State::Prologue, true) => "since it is empty",
            (State::Prologue, false) => "inside the first 16 bytes",
            (_, true) => "between two frames, before the end frame",
            (_, false) => "inside a frame",
        };
        Err(StreamError::Torn { offset: self.place + rest, place })
    }

    fn step(&mut self) -> Result<Progress, StreamError> {
        self.current = None;
        match self.state {
            State::Ended if !self.pending.is_empty() => {
                let another = self.buffer[self.pending.clone()].starts_with(&MAGIC);
                return Err(StreamError::Followed { offset: self.place, another });
            }
            State::Ended | State::Failed => return Ok(Progress::Ended),
            State::Prologue => {
                if !self.prologue()? {
                    return Ok(Progress::NeedMore);
                }
                self.state = State::Header;
            }
            State::Header | State::Frames => {}
        }
        let (head, current) = loop {
            let Some((head, current)) = self.sealed()? else { return Ok(Progress::NeedMore) };
            let compressed = self.compressed && head.kind.get() == kind::COMPRESSED;
            if !compressed || self.state == State::Header {
                break (head, current);
            }
            self.expand(&head, current.payload)?;
        };
        let Current { kind, flags, inside, ref payload } = current;
        if (self.state == State::Header) != (kind == kind::HEADER) {
            let cause = format!("a frame of type {kind} where the header must or must not be");
            return Err(self.damaged(cause, Remedy::Writer));
        }
        let size = payload.len();
        // Not by `bytes`: what checks them is of this decoder, too.
        let bytes = if inside { self.expanded.plain() } else { &self.buffer };
        let payload = &bytes[payload.clone()];
        let frame = Frame::parse(kind, flags, payload).map_err(|error| self.faulty(kind, error))?;
        if !self.trusting {
            frame.verify().map_err(|error| self.faulty(kind, error))?;
            if let Err(cause) = self.check.frame(&head, &frame) {
                return Err(self.damaged(cause, Remedy::Writer));
            }
        }
        self.state = if kind == kind::END { State::Ended } else { State::Frames };
        if let Frame::Header(header) = frame {
            self.header = Some(header);
        }
        self.current = Some(current);
        self.consume(HEAD + size);
        Ok(Progress::Frame)
    }

    /// What is there to be decoded: bytes of the stream, or those that were compressed.
    fn bytes(&self, inside: bool) -> &[u8] {
        if inside { self.expanded.plain() } else { &self.buffer }
    }

    /// The next frame with its check value verified; `None` if it is not complete.
    fn sealed(&self) -> Result<Option<(FrameHead, Current)>, StreamError> {
        let inside = !self.inside.is_empty();
        let range = if inside { self.inside.clone() } else { self.pending.clone() };
        let Ok((head, rest)) = FrameHead::read_from_prefix(&self.bytes(inside)[range.clone()])
        else {
            return Ok(None);
        };
        let length = head.length.get();
        let size = usize::try_from(length).unwrap_or(usize::MAX);
        if length > MAX_PAYLOAD || !size.is_multiple_of(ALIGN) {
            return Err(self.damaged(
                format!(
                    "a frame of {length} bytes; frames are multiples of {ALIGN} up to {MAX_PAYLOAD}"
                ),
                Remedy::Copy,
            ));
        }
        let Some(payload) = rest.get(..size) else { return Ok(None) };
        if !self.trusting {
            let found = head.expected_check(payload);
            if found != head.check.get() {
                let expected = head.check.get();
                let cause = format!("check value {found:#010x} instead of {expected:#010x}");
                return Err(self.damaged(cause, Remedy::Copy));
            }
        }
        let start = range.start + HEAD;
        let (kind, flags) = (head.kind.get(), head.flags.get());
        Ok(Some((head, Current { kind, flags, inside, payload: start..start + size })))
    }

    /// Puts what is inside of a compressed frame in its place.
    fn expand(&mut self, head: &FrameHead, payload: Range<usize>) -> Result<(), StreamError> {
        let outside = HEAD + payload.len();
        let filled = self.expanded.fill(&self.buffer[payload], head.sequence.get());
        filled.map_err(|error| self.faulty(kind::COMPRESSED, error))?;
        self.pending.start += outside;
        (self.inside, self.outside) = (0..self.expanded.plain().len(), outside);
        Ok(())
    }

    fn faulty(&self, kind: u16, error: PayloadError) -> StreamError {
        match error {
            PayloadError::Malformed(cause) => {
                self.damaged(format!("the frame of type {kind}: {cause}"), Remedy::Writer)
            }
            PayloadError::Unknown(what) => {
                self.damaged(format!("{what} is not known to this vmtrace"), Remedy::Upgrade)
            }
        }
    }

    /// Whether the prologue is complete; it is then consumed.
    fn prologue(&mut self) -> Result<bool, StreamError> {
        let bytes = &self.buffer[self.pending.clone()];
        let known = bytes.len().min(MAGIC.len());
        if bytes[..known] != MAGIC[..known] {
            return Err(StreamError::NotAStream { found: bytes[..known].to_vec() });
        }
        let Ok((prologue, _)) = Prologue::ref_from_prefix(bytes) else { return Ok(false) };
        if prologue.check.get() != prologue.expected_check() {
            let cause = "the version has a wrong check value".into();
            return Err(self.damaged(cause, Remedy::Copy));
        }
        let (major, minor) = (prologue.major.get(), prologue.minor.get());
        self.compressed = major == VERSION_COMPRESSED;
        if self.compressed && !cfg!(feature = "zstd") {
            return Err(StreamError::Compressed);
        }
        if major != VERSION_MAJOR && !self.compressed {
            return Err(StreamError::Version { major, minor });
        }
        self.consume(size_of::<Prologue>());
        Ok(true)
    }

    fn consume(&mut self, length: usize) {
        let consumed = if self.inside.is_empty() {
            self.pending.start += length;
            length
        } else {
            self.inside.start += length;
            if self.inside.is_empty() { std::mem::take(&mut self.outside) } else { 0 }
        };
        self.place += u64::try_from(consumed).unwrap_or(0);
        self.offset += u64::try_from(length).unwrap_or(0);
    }

    fn damaged(&self, cause: String, remedy: Remedy) -> StreamError {
        StreamError::Damaged { offset: self.place, cause, remedy }
    }
}
