//! A stream of some functions out of a stream of all: a stream of its own, with its own
//! numbers and totals.

use super::request::Globs;
use crate::stream::{Decoder, EntryRecord, Frame, LossReason, Progress, Record, Writer};
use std::collections::HashMap;
use std::io::{Error, ErrorKind, Result, Write};

/// Takes the bytes of one stream, writes another into `sink`.
pub(super) struct Refilter<W> {
    decoder: Decoder,
    out: Out<W>,
    globs: Globs,
    /// Answers by address, until the names change.
    known: HashMap<u32, bool>,
    kept: Vec<EntryRecord>,
}

enum Out<W> {
    /// Until the header was seen.
    Sink(W),
    Writer(Box<Writer<W>>),
    Failed,
}

/// Most answers of a filter that are remembered: one a function.
const KNOWN: usize = 1 << 20;

impl<W: Write> Refilter<W> {
    pub(super) fn new(sink: W, globs: Globs) -> Self {
        Self {
            decoder: Decoder::new(),
            out: Out::Sink(sink),
            globs,
            known: HashMap::new(),
            kept: Vec::new(),
        }
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
            Frame::Symbols(list) => {
                self.known.clear();
                list.into_iter()
                    .try_for_each(|symbol| symbol.with_text(|symbol| writer.symbols([symbol])))
            }
            Frame::Tasks(mut list) => list.try_for_each(|task| writer.task(task)),
            Frame::Records(batch) => {
                self.kept.clear();
                if self.known.len() > KNOWN {
                    self.known.clear();
                }
                let base = writer.header().address_base;
                for record in batch.records() {
                    let Record::Entry(entry) = record else { continue };
                    let function = entry.function.get();
                    let accepted = *self.known.entry(function).or_insert_with(|| {
                        let address = base.wrapping_add(function.into());
                        match writer.names().symbol(address) {
                            Some(symbol) => self.globs.accepts(symbol.name),
                            None => self.globs.accepts(&format!("{address:#x}")),
                        }
                    });
                    if accepted {
                        self.kept.push(*entry);
                    }
                }
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
