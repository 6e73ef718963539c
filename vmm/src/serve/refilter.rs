//! A stream of some functions out of a stream of all: a stream of its own, with its own
//! numbers and totals.

use super::request::Globs;
use crate::export::TracerChoice;
use crate::kernel::selects;
use crate::stream::{
    Count, CountsOf, Decoder, Frame, Header, LossReason, Progress, Record, RecordBuffer,
    RecordHead, Stretch, Symbol, Traced, Writer,
};
use std::collections::HashSet;
use std::io::{Error, ErrorKind, Result, Write};

/// Takes the bytes of one stream, writes another into `sink`.
pub(super) struct Refilter<W> {
    decoder: Decoder,
    out: Out<W>,
    /// Those that are wanted, when not all are.
    functions: Option<HashSet<u32>>,
    /// By which those of modules become known, as they are named.
    globs: Globs,
    header: Option<Header>,
    kept: RecordBuffer,
    /// Numbers of the tracers whose records are wanted, when not all are.
    tracer: Option<TracerChoice>,
    /// Records of kinds that nobody here knows: whether they are wanted, neither.
    unknown: u64,
}

enum Out<W> {
    /// Until the header was seen.
    Sink(W),
    Writer(Box<Writer<W>>),
    Failed,
}

impl<W: Write> Refilter<W> {
    /// Keeps the records of `functions`, as records name them, of those of modules that `globs`
    /// mean as well, and of one tracer.
    pub(super) fn new(
        sink: W,
        functions: Option<HashSet<u32>>,
        globs: Globs,
        tracer: Option<String>,
    ) -> Self {
        Self {
            decoder: Decoder::new(),
            out: Out::Sink(sink),
            functions,
            globs,
            header: None,
            kept: RecordBuffer::new(),
            tracer: tracer.map(TracerChoice::new),
            unknown: 0,
        }
    }

    /// A function of a module is where the symbol says, whatever was there before.
    fn learn(
        functions: &mut Option<HashSet<u32>>,
        globs: &Globs,
        header: Option<&Header>,
        symbol: &Symbol<'_>,
    ) {
        let Some(functions) = functions else { return };
        let at = header.and_then(|header| header.offset(symbol.address));
        let (Some(at), false) = (at, symbol.module.is_empty()) else { return };
        let Globs { filter, notrace } = globs;
        if selects(filter, notrace, symbol.module, &std::iter::once(symbol.name)) {
            functions.insert(at);
        } else {
            functions.remove(&at);
        }
    }

    fn frame(&mut self) -> Result<()> {
        let Some(frame) = self.decoder.frame() else { return Ok(()) };
        if let Frame::Header(header) = &frame {
            if let Out::Sink(sink) = std::mem::replace(&mut self.out, Out::Failed) {
                self.out = Out::Writer(Box::new(Writer::new(sink, header)?));
                self.header = Some((**header).clone());
            }
            return Ok(());
        }
        let Out::Writer(writer) = &mut self.out else {
            return Err(Error::from(ErrorKind::BrokenPipe));
        };
        match frame {
            Frame::Symbols(mut list) => {
                let (functions, globs) = (&mut self.functions, &self.globs);
                let header = self.header.as_ref();
                list.try_for_each(|symbol| {
                    symbol.with_text(|symbol| {
                        Self::learn(functions, globs, header, &symbol);
                        writer.symbols([symbol])
                    })
                })
            }
            Frame::Tasks(mut list) => list.try_for_each(|task| writer.task(task)),
            Frame::Records(batch) => {
                self.kept.clear();
                for (record, bytes) in batch.whole_records() {
                    let Some(function) = record.function() else {
                        self.unknown += 1;
                        continue;
                    };
                    let (tracer, flags) = (record.head().tracer, record.head().flags);
                    // A function of the set may have jumped to it.
                    let aid =
                        matches!(record, Record::Return { .. }) && flags & RecordHead::AID != 0;
                    let wanted = (aid
                        || self.functions.as_ref().is_none_or(|set| set.contains(&function)))
                        && self.tracer.as_ref().is_none_or(|choice| choice.is(tracer));
                    if wanted {
                        self.kept.push_whole(bytes);
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
            Frame::Tracers(list) => {
                for tracer in list {
                    if let Some(choice) = &mut self.tracer {
                        tracer.with_text(|tracer| choice.learn(tracer));
                    }
                    tracer.with_text(|tracer| writer.tracer(tracer)).unwrap_or(Ok(()))?;
                }
                Ok(())
            }
            Frame::Values(mut list) => list.try_for_each(|values| {
                let wanted =
                    self.functions.as_ref().is_none_or(|set| set.contains(&values.function));
                if wanted { writer.raw_values(values) } else { Ok(()) }
            }),
            Frame::Traced(traced) => {
                let Some(of) = traced.of else { return Ok(()) };
                if !self.tracer.as_ref().is_none_or(|choice| choice.is(traced.tracer)) {
                    return Ok(());
                }
                let Traced { since, until, tracer, .. } = traced;
                let wanted = |function: &u32| {
                    self.functions.as_ref().is_none_or(|set| set.contains(function))
                };
                let functions: Vec<_> = traced.functions().filter(wanted).collect();
                writer.traced(&Stretch { since, until, tracer, of }, &functions)
            }
            Frame::Counts(counts) => {
                if !self.tracer.as_ref().is_none_or(|it| it.is(counts.tracer)) {
                    return Ok(());
                }
                let wanted = |function: u32| {
                    self.functions.as_ref().is_none_or(|set| set.contains(&function))
                };
                match counts.of {
                    Some(CountsOf::Entries) => {
                        let kept = counts.counts().filter(|it: &Count| wanted(it.function));
                        writer.counts(counts.vcpu, counts.tracer, &kept.collect::<Vec<_>>())
                    }
                    Some(CountsOf::Sorted(of)) => {
                        let kept: Vec<_> =
                            counts.buckets().filter(|it| wanted(it.function)).collect();
                        let whose = (counts.vcpu, counts.tracer);
                        writer.buckets(whose, (of, counts.name), &kept)
                    }
                    None => Ok(()),
                }
            }
            Frame::End(mut summary) => {
                if self.unknown > 0 {
                    let unknown = self.unknown;
                    summary.notes.push(format!("{unknown} records of unknown kinds were left out"));
                }
                writer.end(&summary).map(drop)
            }
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
