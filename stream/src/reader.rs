//! Reads a stream from any [`Read`](std::io::Read).

use std::io::{ErrorKind, Read};

use super::decode::{Decoder, Progress};
use super::error::StreamError;
use super::frame::Frame;
use super::header::Header;

/// Bytes asked for at once.
const CHUNK: usize = 256 << 10;

/// A stream from anything that can be read.
///
/// ```no_run
/// use vmtrace_stream::{Frame, Reader};
///
/// let mut reader = Reader::new(std::fs::File::open("boot.vmt")?)?;
/// println!("kernel {}", reader.header().release);
/// while let Some(frame) = reader.next_frame()? {
///     if let Frame::Records(batch) = frame {
///         println!("{} records of vCPU {}", batch.count, batch.vcpu);
///     }
/// }
/// # Ok::<(), vmtrace_stream::StreamError>(())
/// ```
#[derive(Debug)]
pub struct Reader<R> {
    source: R,
    decoder: Decoder,
    header: Header,
}

impl<R: Read> Reader<R> {
    /// Reads up to and with the header.
    ///
    /// # Errors
    /// When the source fails or does not begin a stream.
    pub fn new(source: R) -> Result<Self, StreamError> {
        Self::with(source, Decoder::new())
    }

    /// The same without looking whether what comes is right: no check values, numbers or entries of
    /// lists are verified. Only for what a second reader of the same stream does, and without
    /// believing any of it.
    ///
    /// # Errors
    /// When the source fails or does not begin a stream.
    pub fn trusting(source: R) -> Result<Self, StreamError> {
        Self::with(source, Decoder::trusting())
    }

    fn with(source: R, decoder: Decoder) -> Result<Self, StreamError> {
        let mut reader = Self { source, decoder, header: Header::default() };
        reader.ready()?;
        reader.header = reader.decoder.header().cloned().unwrap_or_default();
        Ok(reader)
    }

    /// The header.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Bytes of the stream that the frames so far took.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.decoder.offset()
    }

    /// The next frame after the header; `None` after the end frame.
    ///
    /// # Errors
    /// When the source fails, or the stream is torn, damaged or followed by something (as far as that was read:
    /// nothing is waited for after the end). An error of the source (such as a timeout) loses nothing: the call may
    /// be repeated.
    pub fn next_frame(&mut self) -> Result<Option<Frame<'_>>, StreamError> {
        Ok(if self.ready()? { self.decoder.frame() } else { None })
    }

    /// Reads until a frame is ready (`true`) or the stream has ended.
    fn ready(&mut self) -> Result<bool, StreamError> {
        loop {
            match self.decoder.advance()? {
                Progress::Frame => return Ok(true),
                Progress::Ended => return Ok(false),
                Progress::NeedMore => {}
            }
            match self.decoder.read(&mut self.source, CHUNK) {
                Ok(0) => {
                    self.decoder.finish()?;
                    return Ok(false);
                }
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}
