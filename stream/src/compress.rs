//! Compressed frames: whole frames of a stream, compressed together.
//!
//! A compressed frame contains the unchanged frames of the plain stream, with their heads, so that
//! only [`Compressor`] and the decoder know of compression.

use std::io::{Error, ErrorKind, Result, Write};
use std::str::FromStr;

use zerocopy::{FromBytes, IntoBytes};
use zstd::bulk;

use super::wire::{
    ALIGN, CompressedHead, FrameHead, HEAD, MAGIC, MAX_PAYLOAD, MAX_PLAIN, METHOD_ZSTD, Prologue,
    VERSION_COMPRESSED, VERSION_MAJOR, kind,
};

/// The number of bytes of frames that are compressed together. More would hardly improve the
/// result.
const BLOCK: usize = 256 << 10;

/// How a stream is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compression {
    level: i32,
}

impl Compression {
    /// Records come faster than higher levels can take them.
    const LEVEL: i32 = 1;
}

impl FromStr for Compression {
    type Err = String;

    /// `zstd`, or `zstd:` and a level.
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let (method, level) = text.split_once(':').map_or((text, None), |(it, at)| (it, Some(at)));
        if method != "zstd" {
            return Err(format!("{method:?} is not a compression method: use zstd or zstd:LEVEL"));
        }
        let levels = zstd::compression_level_range();
        let level = level.map_or(Some(Self::LEVEL), |level| level.parse().ok());
        let level = level.filter(|level| levels.contains(level)).ok_or_else(|| {
            let (least, most) = (levels.start(), levels.end());
            format!("levels of zstd are {least} to {most}: higher ones are smaller and slower")
        })?;
        Ok(Self { level })
    }
}

/// Makes a compressed stream of a plain one.
///
/// Takes the bytes of a [`Writer`](super::Writer) in pieces of any size. What it was given is in the
/// sink after [`Write::flush`], or when the end frame has come: until then it gathers frames that
/// are compressed together.
pub struct Compressor<W> {
    sink: W,
    zstd: bulk::Compressor<'static>,
    /// What was not passed on yet: whole frames up to `whole`, then the beginning of one.
    pending: Vec<u8>,
    whole: usize,
    frames: u32,
    begun: bool,
    /// A compressed frame, used again.
    packed: Vec<u8>,
}

impl<W: Write> Compressor<W> {
    /// # Errors
    /// When there is no memory for it.
    pub fn new(sink: W, compression: Compression) -> Result<Self> {
        let zstd = bulk::Compressor::new(compression.level)?;
        let (pending, packed) = (Vec::new(), Vec::new());
        Ok(Self { sink, zstd, pending, whole: 0, frames: 0, begun: false, packed })
    }

    /// The sink.
    ///
    /// # Errors
    /// When it does not take what was gathered.
    pub fn into_inner(mut self) -> Result<W> {
        self.pack()?;
        Ok(self.sink)
    }

    /// Whether the prologue is complete, and written then.
    fn begin(&mut self) -> Result<bool> {
        let Ok((prologue, _)) = Prologue::read_from_prefix(&self.pending) else { return Ok(false) };
        if prologue.magic != MAGIC || prologue.major.get() != VERSION_MAJOR {
            return Err(invalid("only a plain stream of this version can be compressed"));
        }
        let prologue = Prologue::new(VERSION_COMPRESSED, prologue.minor.get());
        self.sink.write_all(prologue.as_bytes())?;
        self.pending.drain(..size_of::<Prologue>());
        Ok(true)
    }

    /// Takes the next frame, if it is complete.
    fn step(&mut self) -> Result<bool> {
        let rest = self.pending.get(self.whole..).unwrap_or_default();
        let Ok((head, payload)) = FrameHead::read_from_prefix(rest) else { return Ok(false) };
        let size = usize::try_from(head.length.get()).unwrap_or(usize::MAX);
        if head.length.get() > MAX_PAYLOAD || !size.is_multiple_of(ALIGN) {
            return Err(invalid("what is to be compressed has a frame of an impossible size"));
        }
        if payload.len() < size {
            return Ok(false);
        }
        let size = HEAD + size;
        // Whoever looks for these finds them without decompressing anything.
        let stays = matches!(head.kind.get(), kind::HEADER | kind::END) || size > MAX_PLAIN;
        if stays || self.whole + size > MAX_PLAIN {
            self.pack()?;
        }
        if stays {
            self.sink.write_all(self.pending.get(..size).unwrap_or_default())?;
            self.pending.drain(..size);
            return Ok(true);
        }
        self.whole += size;
        self.frames += 1;
        if self.whole >= BLOCK {
            self.pack()?;
        }
        Ok(true)
    }

    /// Passes on what was gathered: plain, if that is not longer.
    fn pack(&mut self) -> Result<()> {
        let plain = self.pending.get(..self.whole).unwrap_or_default();
        let Ok((first, _)) = FrameHead::read_from_prefix(plain) else { return Ok(()) };
        const DATA: usize = HEAD + size_of::<CompressedHead>();
        self.packed.resize(DATA + zstd::zstd_safe::compress_bound(plain.len()) + ALIGN, 0);
        let size = self.zstd.compress_to_buffer(plain, &mut self.packed[DATA..])?;
        let end = (DATA + size).next_multiple_of(ALIGN);
        let written = if end < plain.len() {
            self.packed[DATA + size..end].fill(0);
            let about = CompressedHead {
                length: u32::try_from(plain.len()).unwrap_or(u32::MAX).into(),
                size: u32::try_from(size).unwrap_or(u32::MAX).into(),
                frames: self.frames.into(),
                method: METHOD_ZSTD,
                reserved: [0; 3],
            };
            let (head, payload) = self.packed[..end].split_at_mut(HEAD);
            payload[..size_of::<CompressedHead>()].copy_from_slice(about.as_bytes());
            let filled = FrameHead::sealed(kind::COMPRESSED, 0, first.sequence.get(), payload);
            head.copy_from_slice(filled.as_bytes());
            self.sink.write_all(&self.packed[..end])
        } else {
            self.sink.write_all(plain)
        };
        // After an error the stream is torn at this place; nothing is sent twice.
        self.pending.drain(..self.whole);
        (self.whole, self.frames) = (0, 0);
        written
    }
}

impl<W: Write> Write for Compressor<W> {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        self.pending.extend_from_slice(bytes);
        if !self.begun {
            self.begun = self.begin()?;
        }
        while self.begun && self.step()? {}
        Ok(bytes.len())
    }

    fn flush(&mut self) -> Result<()> {
        self.pack()?;
        self.sink.flush()
    }
}

fn invalid(cause: &'static str) -> Error {
    Error::new(ErrorKind::InvalidInput, cause)
}
