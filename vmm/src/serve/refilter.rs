//! A stream of some functions out of a stream of all: a stream of its own, with its own
//! numbers and totals.

use crate::stream::{Decoder, EntryRecord, Frame, LossReason, Progress, Record, Writer};
use std::collections::HashSet;
use std::io::{Error, ErrorKind, Result, Write};

/// Takes the bytes of one stream, writes another into `sink`.
pub(super) struct Refilter<W> {
    decoder: Decoder,
    out: Out<W>,
    functions: HashSet<u32>,
    kept: Vec<EntryRecord>,
}

enum Out<W> {
    /// Until the header was seen.
    Sink(W),
    Writer(Box<Writer<W>>),
    Failed,
}

impl<W: Write> Refilter<W> {
    /// Keeps the records of `functions`, as records name them.
    pub(super) fn new(sink: W, functions: HashSet<u32>) -> Self {
        Self { decoder: Decoder::new(), out: Out::Sink(sink), functions, kept: Vec::new() }
    }

    fn frame(&mut self) -> Result<()> {
        let Some(frame) = self.decoder.frame() else { return Ok(()) };
        if let Frame::Header(header) = &frame {
            if let Out::Sink(sink) = std::mem::replace(&mut self.out, Out::Failed) {
                self.out = Out::Writer(Box::new(Writer::new(sink, header)?));
            }
            return Ok(());
        }
        let Out::Writer(writer) = &mut self.out else {
            return Err(Error::from(ErrorKind::BrokenPipe));
        };
        match frame {
            Frame::Symbols(mut list) => {
                list.try_for_each(|symbol| symbol.with_text(|symbol| writer.symbols([symbol])))
            }
            Frame::Tasks(mut list) => list.try_for_each(|task| writer.task(task)),
            Frame::Records(batch) => {
                self.kept.clear();
                self.kept.extend(batch.records().filter_map(|record| match record {
                    Record::Entry(entry) => {
                        self.functions.contains(&entry.function.get()).then_some(*entry)
                    }
                    _ => None,
                }));
                writer.records(batch.vcpu, &self.kept)
            }
            Frame::Loss(loss) if loss.reason == LossReason::Consumer => {
                writer.missed(loss.vcpu, loss.count, loss.total)
            }
            Frame::Loss(loss) => writer.loss(loss.vcpu, loss.count, loss.reason),
            Frame::Mark(mark) => writer.mark(&mark),
            Frame::Watermark(ticks) => writer.watermark(ticks),
            Frame::End(summary) => writer.end(&summary).map(drop),
            // Where a late consumer joined; this stream begins there.
            _ => Ok(()),
        }
    }
}

impl<W: Write> Write for Refilter<W> {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        self.decoder.feed(bytes);
        while self.decoder.advance().map_err(Error::other)? == Progress::Frame {
            self.frame()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> Result<()> {
        match &mut self.out {
            Out::Sink(sink) => sink.flush(),
            Out::Writer(writer) => writer.flush(),
            Out::Failed => Ok(()),
        }
    }
}
