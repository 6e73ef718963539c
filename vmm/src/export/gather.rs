//! Bytes that are gathered before they are written.

use std::io::{self, Write};

/// So many are written at a time.
const GATHER: usize = 64 << 10;

/// Gathers bytes in front of an output. Who appends has a vector: nothing of what is formatted has to ask for room as often
/// as a writer's buffer is asked.
#[derive(Debug)]
pub(crate) struct Gather<W> {
    pub(crate) bytes: Vec<u8>,
    out: W,
}

impl<W: Write> Gather<W> {
    /// In front of `out`, which needs no buffer of its own.
    pub(crate) fn new(out: W) -> Self {
        Self { bytes: Vec::with_capacity(GATHER + 4096), out }
    }

    /// Something has been appended, and is whole.
    #[inline]
    pub(crate) fn done(&mut self) -> io::Result<()> {
        if self.bytes.len() >= GATHER { self.hand_on() } else { Ok(()) }
    }

    /// The output, without what has not been handed on.
    pub(crate) fn into_inner(self) -> W {
        self.out
    }

    fn hand_on(&mut self) -> io::Result<()> {
        let written = self.out.write_all(&self.bytes);
        self.bytes.clear();
        written
    }
}

/// For what has a formatter.
impl<W: Write> Write for Gather<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes.extend_from_slice(bytes);
        self.done()?;
        Ok(bytes.len())
    }

    /// Writes all that was appended, and flushes the output.
    fn flush(&mut self) -> io::Result<()> {
        self.hand_on()?;
        self.out.flush()
    }
}
