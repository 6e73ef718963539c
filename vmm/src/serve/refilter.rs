//! Makes a stream of some functions from a stream of all. The result is a complete stream, with its
//! own frame numbers and totals.

use super::part::Part;
use super::request::Globs;
use crate::export::{Absent, Pick, TracerChoice};
use crate::stream::{
    Count, CountsOf, Decoder, Dictionaries, Frame, Header, Loss, LossReason, Progress, Record,
    RecordBuffer, RecordHead, StreamError, Stretch, Summary, Symbol, Traced, Writer,
};
use std::collections::HashSet;
use std::io::{Error, ErrorKind, Result, Write};
use std::mem::offset_of;

/// Takes the bytes of one stream, writes another into `sink`.
pub(crate) struct Refilter<W> {
    decoder: Decoder,
    out: Out<W>,
    /// Those that are wanted, when not all are.
    functions: Option<HashSet<u32>>,
    /// By which those of modules become known, as they are named.
    globs: Globs,
    /// Those of the kernel as well.
    by_names: bool,
    header: Option<Header>,
    kept: RecordBuffer,
    /// Numbers of the tracers whose records are wanted, when not all are.
    tracer: Option<TracerChoice>,
    /// What is wanted by time, vCPU and task, when not all is.
    part: Option<Part>,
    /// Is told the name of each function that has a record.
    seer: Option<Seer>,
    /// Records of kinds that nobody here knows: whether they are wanted, neither.
    unknown: u64,
    /// Calls that are wanted and go on in functions that may not be.
    jumps: Jumps,
    /// A record that is changed.
    aid: Vec<u8>,
    /// Of the end frame, when it has come.
    summary: Option<Summary>,
}

/// Is told a function's name and module, and tells whether to go on.
type See = dyn FnMut(&str, Option<&str>) -> bool + Send;

/// Who is told of functions, and which ones were told.
struct Seer {
    see: Box<See>,
    /// Whose functions are told, when not those of all.
    tracer: Option<TracerChoice>,
    told: HashSet<u32>,
    has_enough: bool,
}

impl Seer {
    /// Most functions that are remembered.
    const KNOWN: usize = 1 << 20;

    fn see(&mut self, (at, tracer): (u32, u8), names: &Dictionaries, header: Option<&Header>) {
        let is_of_another = self.tracer.as_ref().is_some_and(|choice| !choice.is(tracer));
        if self.has_enough || is_of_another {
            return;
        }
        if self.told.len() >= Self::KNOWN {
            self.told.clear();
        }
        if !self.told.insert(at) {
            return;
        }
        let address = header.map(|header| header.address(at));
        if let Some(symbol) = address.and_then(|address| names.symbol(address)) {
            let module = (!symbol.module.is_empty()).then_some(symbol.module);
            self.has_enough = !(self.see)(symbol.name, module);
        }
    }
}

/// Calls that were left by a jump, by tracer, task and stack pointer: a return from what was jumped to
/// ends them as well.
#[derive(Default)]
struct Jumps(HashSet<(u8, u32, u64)>);

impl Jumps {
    /// More than can be open at a time, if no ends are missing.
    const MOST: usize = 1 << 16;

    /// Whether a record that may not be wanted for itself ends such a call.
    fn follow(&mut self, record: &Record<'_>, wanted: bool) -> bool {
        let RecordHead { tracer, flags, pid, .. } = *record.head();
        let call = |sp: u64| (tracer, pid.get(), sp);
        match record {
            Record::Return { ret, .. } => !self.0.is_empty() && self.0.remove(&call(ret.sp.get())),
            // Of others nothing else is heard.
            Record::Tail { tail, .. }
                if wanted && flags & (RecordHead::LAST | RecordHead::DURATION) == 0 =>
            {
                if self.0.len() >= Self::MOST {
                    self.0.clear();
                }
                self.0.insert(call(tail.sp.get()));
                false
            }
            _ => false,
        }
    }
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
            by_names: false,
            header: None,
            kept: RecordBuffer::new(),
            tracer: tracer.map(TracerChoice::new),
            part: None,
            seer: None,
            unknown: 0,
            jumps: Jumps::default(),
            aid: Vec::new(),
            summary: None,
        }
    }

    /// The same of a stream alone: the names in it tell which functions `globs` mean.
    pub(crate) fn by_names(sink: W, globs: Globs, tracer: Option<String>) -> Self {
        let functions = (!globs.is_empty()).then(HashSet::new);
        Self { by_names: true, ..Self::new(sink, functions, globs, tracer) }
    }

    /// Keeps only what `pick` chooses by time, vCPU, process id and name. `zero` are the ticks of time
    /// 0, if they are not those of the header.
    pub(crate) fn with_part(mut self, pick: Pick, zero: Option<u64>) -> Self {
        self.part = (!pick.is_all()).then(|| Part::new(pick, zero));
        self
    }

    /// Tells `see` of all functions that have a record of `tracer`, of none of any, whether it is kept or
    /// not, until it has enough.
    pub(crate) fn with_seer(
        mut self,
        tracer: Option<String>,
        see: impl FnMut(&str, Option<&str>) -> bool + Send + 'static,
    ) -> Self {
        let (see, tracer) = (Box::new(see), tracer.map(TracerChoice::new));
        self.seer = Some(Seer { see, tracer, told: HashSet::new(), has_enough: false });
        self
    }

    /// Whether the tracer that is wanted was one of the stream, of which all was read.
    ///
    /// # Errors
    /// When it was not.
    pub(crate) fn check_tracer(&self) -> std::result::Result<(), Absent> {
        let (Some(choice), Out::Writer(writer)) = (&self.tracer, &self.out) else { return Ok(()) };
        choice.check_told(writer.names().tracers())
    }

    /// What of the part no record was of.
    pub(crate) fn notes(&self) -> Vec<String> {
        self.part.as_ref().map(|part| part.unmet().collect()).unwrap_or_default()
    }

    /// To be called when no more bytes come. Returns the summary of the stream: of a part by time, vCPU
    /// or task that of the part.
    ///
    /// # Errors
    /// When its end frame was not reached.
    pub(crate) fn finish(&mut self) -> std::result::Result<Option<Summary>, StreamError> {
        if let (Some(part), Out::Writer(writer)) = (&mut self.part, &mut self.out) {
            part.rest().into_iter().try_for_each(|loss| lose(writer, loss))?;
        }
        self.decoder.finish().map(|()| self.summary.take())
    }

    /// A function of a module is where the symbol says, whatever was there before.
    fn learn(
        functions: &mut Option<HashSet<u32>>,
        (globs, by_names): (&Globs, bool),
        header: Option<&Header>,
        symbol: &Symbol<'_>,
    ) {
        let Some(functions) = functions else { return };
        let module = (!symbol.module.is_empty()).then_some(symbol.module);
        let at = header.and_then(|header| header.offset(symbol.address));
        let (Some(at), true) = (at, module.is_some() || by_names) else { return };
        if globs.mean(symbol.name, module) {
            functions.insert(at);
        } else {
            functions.remove(&at);
        }
    }

    fn frame(&mut self) -> Result<()> {
        let Some(frame) = self.decoder.frame() else { return Ok(()) };
        if let Frame::Header(header) = &frame {
            if let Some(part) = &self.part {
                part.check(header).map_err(Error::other)?;
            }
            if let Out::Sink(sink) = std::mem::replace(&mut self.out, Out::Failed) {
                self.out = Out::Writer(Box::new(Writer::new(sink, header)?));
                if let Some(part) = &mut self.part {
                    part.begin(header);
                }
                self.header = Some((**header).clone());
            }
            return Ok(());
        }
        let Out::Writer(writer) = &mut self.out else {
            return Err(Error::from(ErrorKind::BrokenPipe));
        };
        match frame {
            Frame::Symbols(mut list) => {
                let (functions, globs) = (&mut self.functions, (&self.globs, self.by_names));
                let header = self.header.as_ref();
                let mut seer = self.seer.as_mut();
                list.try_for_each(|symbol| {
                    symbol.with_text(|symbol| {
                        if let Some(seer) = &mut seer
                            && let Some(at) = header.and_then(|it| it.offset(symbol.address))
                        {
                            seer.told.remove(&at);
                        }
                        Self::learn(functions, globs, header, &symbol);
                        writer.symbols([symbol])
                    })
                })
            }
            Frame::Tasks(mut list) => list.try_for_each(|task| {
                if let Some(part) = &mut self.part {
                    part.renamed(task.pid);
                }
                writer.task(task)
            }),
            Frame::Records(batch) => {
                self.kept.clear();
                for (record, bytes) in batch.whole_records() {
                    let RecordHead { tracer, flags, timestamp, pid, .. } = *record.head();
                    if let (Some(seer), Some(function)) = (&mut self.seer, record.function()) {
                        seer.see((function, tracer), writer.names(), self.header.as_ref());
                    }
                    if let Some(part) = &mut self.part {
                        let (ticks, pid) = (timestamp.get(), pid.get());
                        for loss in part.before(batch.vcpu, ticks) {
                            lose(writer, loss)?;
                        }
                        if !part.has(batch.vcpu, ticks, pid, writer.names()) {
                            continue;
                        }
                    }
                    let Some(function) = record.function() else {
                        self.unknown += 1;
                        continue;
                    };
                    if self.tracer.as_mut().is_some_and(|choice| !choice.meets(tracer)) {
                        continue;
                    }
                    let (wanted, ends) = match &self.functions {
                        None => (true, false),
                        Some(set) => {
                            let wanted = set.contains(&function);
                            (wanted, self.jumps.follow(&record, wanted))
                        }
                    };
                    // A function of the set may have jumped to it.
                    let aid =
                        matches!(record, Record::Return { .. }) && flags & RecordHead::AID != 0;
                    if wanted || aid {
                        self.kept.push_whole(bytes);
                    } else if ends {
                        self.aid.clear();
                        self.aid.extend_from_slice(bytes);
                        if let Some(flags) = self.aid.get_mut(offset_of!(RecordHead, flags)) {
                            *flags |= RecordHead::AID;
                        }
                        self.kept.push_whole(&self.aid);
                    }
                }
                self.seer.take_if(|seer| seer.has_enough);
                writer.records(batch.vcpu, &self.kept)
            }
            Frame::Loss(loss) => match &mut self.part {
                Some(part) => {
                    part.lost(loss);
                    Ok(())
                }
                None => lose(writer, loss),
            },
            Frame::Mark(mark) if self.part.as_ref().is_some_and(|part| !part.has_mark(&mark)) => {
                Ok(())
            }
            Frame::Mark(mark) => writer.mark(&mark),
            Frame::Watermark(ticks) => writer.watermark(ticks),
            Frame::Tracers(list) => {
                for tracer in list {
                    let of_seer = self.seer.as_mut().and_then(|seer| seer.tracer.as_mut());
                    for choice in self.tracer.iter_mut().chain(of_seer) {
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
                let stretch = Stretch { since, until, tracer, of };
                let cut = self.part.as_ref().map_or(Some(stretch), |part| part.cut(stretch));
                cut.map_or(Ok(()), |stretch| writer.traced(&stretch, &functions))
            }
            Frame::Counts(counts) => {
                if let Some(seer) = &mut self.seer {
                    let (names, of) = (writer.names(), counts.tracer);
                    let mut see = |at: u32| seer.see((at, of), names, self.header.as_ref());
                    match counts.of {
                        Some(CountsOf::Entries) => counts.counts().for_each(|it| see(it.function)),
                        Some(CountsOf::Callers) => counts.callers().for_each(|it| see(it.function)),
                        Some(CountsOf::Sorted(_)) => {
                            counts.buckets().for_each(|it| see(it.function));
                        }
                        None => {}
                    }
                }
                let of_part = self.part.as_ref().is_none_or(|part| part.has_counts(counts.vcpu));
                if !of_part || !self.tracer.as_mut().is_none_or(|it| it.meets(counts.tracer)) {
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
                    Some(CountsOf::Callers) => {
                        let kept = counts.callers().filter(|it| wanted(it.function));
                        writer.callers(counts.vcpu, counts.tracer, &kept.collect::<Vec<_>>())
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
                let Some(part) = &mut self.part else {
                    writer.end(&summary)?;
                    self.summary = Some(*summary);
                    return Ok(());
                };
                for loss in part.rest() {
                    lose(writer, loss)?;
                }
                summary.notes.push(part.note());
                self.summary = Some(writer.end(&summary)?);
                Ok(())
            }
            // Where a late consumer joined; this stream begins there.
            _ => Ok(()),
        }
    }
}

/// Records are missing here.
fn lose<W: Write>(writer: &mut Writer<W>, loss: Loss) -> Result<()> {
    match loss.reason {
        LossReason::Consumer => writer.missed(loss.vcpu, loss.count, loss.total),
        reason => writer.loss(loss.vcpu, loss.count, reason),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::sample;

    // A crafted file names another function in every record.
    #[test]
    fn who_is_told_of_functions_remembers_so_many() {
        let (see, told) = (Box::new(|_: &str, _: Option<&str>| true), HashSet::new());
        let mut seer = Seer { see, tracer: None, told, has_enough: false };
        let names = Dictionaries::new();
        for at in 0..=u32::try_from(Seer::KNOWN).expect("32 bits") {
            seer.see((at, 0), &names, None);
        }
        assert_eq!(seer.told.len(), 1);
    }

    // It may be as long as it likes.
    #[test]
    fn what_follows_the_end_is_not_kept() {
        let mut refilter = Refilter::by_names(Vec::new(), Globs::default(), None);
        refilter.write_all(&sample::stream()).expect("a stream");
        let error = refilter.write_all(&sample::stream()).expect_err("another one");
        assert!(error.get_ref().is_some_and(|inner| inner.is::<StreamError>()), "{error}");
    }

    #[test]
    fn who_has_enough_is_not_asked_any_more() {
        for enough in [true, false] {
            let refilter = Refilter::by_names(Vec::new(), Globs::default(), None);
            let mut refilter = refilter.with_seer(None, move |_, _| !enough);
            refilter.write_all(&sample::stream()).expect("a stream");
            assert_eq!(refilter.seer.is_none(), enough);
        }
    }
}
