//! Writes frames.

use std::collections::BTreeMap;
use std::io::{Error, ErrorKind, Result, Write};

use zerocopy::IntoBytes;

use super::buffer::RecordBuffer;
use super::counts::{
    Bucket, CallerCount, Count, HistogramOf, MAX_COUNTS, encode, encode_buckets, encode_callers,
};
use super::dictionary::{Dictionaries, Symbol, Task, Tracer, cut};
use super::header::Header;
use super::mark::{LossReason, Mark};
use super::record::EntryRecord;
use super::summary::{Summary, VcpuTotals};
use super::told::Told;
use super::traced::{MAX_FUNCTIONS, Stretch};
use super::values::{RawValues, ValuesFormat};
use super::wire::{
    ALIGN, BATCH, BatchHead, FrameHead, HEAD, ListHead, LossFixed, MAX_PID, MarkFixed, Prologue,
    TotalEntry, TotalsHead, WatermarkFixed, flag, kind,
};

/// The number of bytes that are buffered before they are written.
const GATHER: usize = 256 << 10;
/// Longest text of a mark or note.
const MAX_TEXT: usize = 64 << 10;

/// Makes a stream.
///
/// The sink is only ever given whole frames. Bytes are gathered: [`Writer::watermark`],
/// [`Writer::flush`] and [`Writer::end`] hand them on. A writer that is dropped without
/// [`Writer::end`] leaves a torn stream, and that is what readers say.
#[derive(Debug)]
pub struct Writer<W> {
    sink: W,
    frames: Frames,
    header: Header,
    names: Dictionaries,
    totals: Vec<VcpuTotals>,
    told: Told,
    /// The highest time that a consumer may still hold back, until a watermark covers it.
    held: Option<u64>,
    ended: bool,
}

impl<W: Write> Writer<W> {
    /// Begins a stream with its header.
    ///
    /// # Errors
    /// When the header is impossible (rate or vCPUs of zero, for example).
    pub fn new(sink: W, header: &Header) -> Result<Self> {
        if let Some(fault) = header.fault() {
            return Err(invalid(fault));
        }
        let mut frames = Frames::default();
        frames.bytes.extend_from_slice(Prologue::current().as_bytes());
        frames.push(kind::HEADER, 0, |out| header.encode(out));
        let vcpus = usize::try_from(header.vcpus).unwrap_or(0);
        Ok(Self {
            sink,
            frames,
            header: header.clone(),
            names: Dictionaries::new(),
            totals: vec![VcpuTotals::default(); vcpus],
            told: Told::default(),
            held: None,
            ended: false,
        })
    }

    /// The header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Records and losses so far, by vCPU.
    pub fn totals(&self) -> &[VcpuTotals] {
        &self.totals
    }

    /// The names sent so far.
    pub fn names(&self) -> &Dictionaries {
        &self.names
    }

    /// The sink.
    pub fn get_mut(&mut self) -> &mut W {
        &mut self.sink
    }

    /// Names kernel text: traced functions and the callers in records. What was sent before
    /// is left out.
    ///
    /// # Errors
    /// When the sink fails or there are more names than a stream may have.
    pub fn symbols<'a>(&mut self, symbols: impl IntoIterator<Item = Symbol<'a>>) -> Result<()> {
        let (names, told, header) = (&mut self.names, &mut self.told, &self.header);
        let mut full = None;
        let mut fresh = symbols.into_iter().filter_map(|symbol| {
            if names.replaces_symbol(symbol) {
                let at = header.offset(symbol.address);
                at.into_iter().for_each(|at| told.forget_function(at, symbol.size));
            }
            let known = names.insert_symbol(symbol);
            let new = known.unwrap_or_else(|error| {
                full = Some(error);
                false
            });
            new.then(|| Symbol { name: cut(symbol.name), module: cut(symbol.module), ..symbol })
        });
        self.frames.symbols(0, &mut fresh);
        drop(fresh);
        match full {
            Some(error) => Err(Error::other(error)),
            None => self.hand_on(GATHER),
        }
    }

    /// Names a task, for the records that follow. What is known already is left out, and so
    /// are process ids that cannot be.
    ///
    /// # Errors
    /// When the sink fails.
    pub fn task(&mut self, task: Task) -> Result<()> {
        if task.pid >= MAX_PID || !self.names.insert_task(task) {
            return Ok(());
        }
        self.frames.tasks(0, &mut std::iter::once(&task));
        self.hand_on(GATHER)
    }

    /// Names a tracer and describes it for people, for the records that follow. What is known
    /// already is left out; names are cut at [`MAX_NAME`](super::MAX_NAME) bytes.
    ///
    /// # Errors
    /// When the sink fails.
    pub fn tracer(&mut self, tracer: Tracer<'_>) -> Result<()> {
        let known = self.names.tracer(tracer.number);
        if known.is_some_and(|known| known.name != cut(tracer.name)) {
            self.told.forget_tracer(tracer.number);
        }
        if !self.names.insert_tracer(tracer) {
            return Ok(());
        }
        self.frames.tracers(0, &mut self.names.tracer(tracer.number).into_iter());
        self.hand_on(GATHER)
    }

    /// Says which functions were traced, by the numbers that they have in records, whether they
    /// were called or not. Their names are to be sent before.
    ///
    /// # Errors
    /// When the sink fails.
    pub fn traced(&mut self, stretch: &Stretch, functions: &[u32]) -> Result<()> {
        for functions in functions.chunks(MAX_FUNCTIONS) {
            self.frames.push(kind::TRACED, flag::OPTIONAL, |out| stretch.encode(functions, out));
            self.hand_on(GATHER)?;
        }
        Ok(())
    }

    /// Says how often functions were entered on a vCPU for a tracer, beside records; what
    /// was said before is added to. Their names are to be sent before.
    ///
    /// # Errors
    /// When the sink fails or there is no such vCPU.
    pub fn counts(&mut self, vcpu: u32, tracer: u8, counts: &[Count]) -> Result<()> {
        self.total(vcpu)?;
        self.told.add(vcpu, tracer, counts);
        for counts in counts.chunks(MAX_COUNTS) {
            self.frames.counts(0, vcpu, tracer, counts);
            self.hand_on(GATHER)?;
        }
        Ok(())
    }

    /// The same by caller: what was said before is added to. Names of functions and callers are to be sent before.
    ///
    /// # Errors
    /// When the sink fails or there is no such vCPU.
    pub fn callers(&mut self, vcpu: u32, tracer: u8, counts: &[CallerCount]) -> Result<()> {
        self.total(vcpu)?;
        self.told.add_callers(vcpu, tracer, counts);
        for counts in counts.chunks(MAX_COUNTS) {
            self.frames.callers(0, vcpu, tracer, counts);
            self.hand_on(GATHER)?;
        }
        Ok(())
    }

    /// Adds to histograms of calls that began on a vCPU, for one tracer, beside records: of the argument
    /// with this name, where they are of one. Names of functions are to be sent before.
    ///
    /// # Errors
    /// When the sink fails or there is no such vCPU.
    pub fn buckets(
        &mut self,
        of: (u32, u8),
        what: (HistogramOf, &str),
        buckets: &[Bucket],
    ) -> Result<()> {
        self.total(of.0)?;
        self.told.sort(of, what, buckets);
        for buckets in buckets.chunks(MAX_COUNTS) {
            self.frames.buckets(0, of, what, buckets);
            self.hand_on(GATHER)?;
        }
        Ok(())
    }

    /// Says what the values of a function's records are, for the records that follow; what was
    /// said before of the same function, tracer and kind of record is replaced. What is known
    /// already is left out.
    ///
    /// # Errors
    /// When the sink fails, there is no such format (see [`ValuesFormat::values`]), or there are
    /// more formats than a stream may have.
    pub fn values(&mut self, format: &ValuesFormat) -> Result<()> {
        let text = format.text().map_err(invalid)?;
        self.known_values(RawValues {
            function: format.function,
            tracer: format.tracer,
            of: format.of.number(),
            text: text.as_bytes(),
        })
    }

    /// [`Writer::values`] with what another stream says, so that nothing is lost of what only a
    /// later version knows.
    ///
    /// # Errors
    /// As with [`Writer::values`].
    pub fn raw_values(&mut self, values: RawValues<'_>) -> Result<()> {
        values.format().map_err(invalid)?;
        self.known_values(values)
    }

    fn known_values(&mut self, values: RawValues<'_>) -> Result<()> {
        if self.names.insert_values(values).map_err(Error::other)? {
            self.frames.values(0, &mut std::iter::once(values));
        }
        self.hand_on(GATHER)
    }

    /// Writes records of one vCPU, in their order.
    ///
    /// # Errors
    /// When the sink fails or there is no such vCPU.
    pub fn records(&mut self, vcpu: u32, records: &RecordBuffer) -> Result<()> {
        self.total(vcpu)?;
        for (count, bytes) in records.frames() {
            self.batch(vcpu, count, records.newest(), bytes)?;
        }
        Ok(())
    }

    /// Writes plain entries of one vCPU, in their order.
    ///
    /// # Errors
    /// When the sink fails or there is no such vCPU.
    pub fn entries(&mut self, vcpu: u32, records: &[EntryRecord]) -> Result<()> {
        self.total(vcpu)?;
        for batch in records.chunks(BATCH / size_of::<EntryRecord>()) {
            // The last one is the newest, but for records that an interrupt came in between.
            let newest = batch.iter().map(EntryRecord::timestamp).max().unwrap_or(0);
            self.batch(vcpu, batch.len(), newest, batch.as_bytes())?;
        }
        Ok(())
    }

    fn batch(&mut self, vcpu: u32, count: usize, newest: u64, records: &[u8]) -> Result<()> {
        let total = self.total(vcpu)?;
        let first = total.records;
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        total.records += u64::from(count);
        self.held = self.held.max(Some(newest));
        self.frames.push(kind::RECORDS, 0, |out| {
            let head = BatchHead { vcpu: vcpu.into(), count: count.into(), first: first.into() };
            out.extend_from_slice(head.as_bytes());
            out.extend_from_slice(records);
        });
        self.hand_on(GATHER)
    }

    /// Says that records are missing at this place.
    ///
    /// # Errors
    /// When the sink fails, there is no such vCPU, or the reason is a consumer's.
    pub fn loss(&mut self, vcpu: u32, count: u64, reason: LossReason) -> Result<()> {
        if reason == LossReason::Consumer {
            return Err(invalid("a loss of one consumer is not one of the trace".into()));
        }
        let total = self.total(vcpu)?;
        // A guest can make up any count; no reader takes a sum that does not fit.
        let count = count.min(u64::MAX - total.lost);
        if count == 0 {
            return Ok(());
        }
        total.lost += count;
        let by_reason = total.lost_by_reason.entry(reason.to_string()).or_default();
        *by_reason = by_reason.saturating_add(count);
        let total = total.lost;
        // A loss has the time of the record before it, which may have been covered already.
        self.held = self.held.max(Some(0));
        self.frames.loss(0, vcpu, reason, count, total);
        self.hand_on(GATHER)
    }

    /// Says that this consumer was too slow for records of a vCPU: for a writer whose stream
    /// is made of one that has such losses. `total` is all that it missed of the vCPU.
    ///
    /// # Errors
    /// When the sink fails or there is no such vCPU.
    pub fn missed(&mut self, vcpu: u32, count: u64, total: u64) -> Result<()> {
        let records = &mut self.total(vcpu)?.records;
        *records = records.saturating_add(count);
        self.held = self.held.max(Some(0));
        self.frames.loss(flag::LOCAL, vcpu, LossReason::Consumer, count, total);
        self.hand_on(GATHER)
    }

    /// Marks something that happened.
    ///
    /// # Errors
    /// When the sink fails.
    pub fn mark(&mut self, mark: &Mark) -> Result<()> {
        self.held = self.held.max(Some(mark.ticks));
        self.frames.push(kind::MARK, 0, |out| {
            let text = &mark.text[..mark.text.floor_char_boundary(MAX_TEXT)];
            let fixed = MarkFixed {
                ticks: mark.ticks.into(),
                duration_ns: mark.duration_ns.into(),
                kind: u32::from(mark.kind).into(),
                text: u32::try_from(text.len()).unwrap_or(0).into(),
            };
            out.extend_from_slice(fixed.as_bytes());
            out.extend_from_slice(text.as_bytes());
        });
        self.hand_on(GATHER)
    }

    /// Says that every record up to `ticks`, of every vCPU, has been written, and hands all
    /// gathered bytes on. Nothing is written when no consumer can be waiting for it: an idle
    /// trace does not grow.
    ///
    /// # Errors
    /// When the sink fails.
    pub fn watermark(&mut self, ticks: u64) -> Result<()> {
        if self.held.is_none() {
            return self.flush();
        }
        self.tell_watermark(ticks)
    }

    /// The same, also where nothing waits for it: for those who want to know how far the stream is.
    ///
    /// # Errors
    /// When the sink fails.
    pub fn tell_watermark(&mut self, ticks: u64) -> Result<()> {
        if self.held.is_some_and(|held| held <= ticks) {
            self.held = None;
        }
        self.frames.push(kind::WATERMARK, 0, |out| {
            out.extend_from_slice(WatermarkFixed { ticks: ticks.into() }.as_bytes());
        });
        self.flush()
    }

    /// Hands all gathered bytes on.
    ///
    /// # Errors
    /// When the sink fails.
    pub fn flush(&mut self) -> Result<()> {
        self.hand_on(0)?;
        self.sink.flush()
    }

    /// Ends the stream. Returns the summary as it was written: with the totals and counts of
    /// this writer.
    ///
    /// # Errors
    /// When the sink fails or the stream has ended before.
    pub fn end(&mut self, summary: &Summary) -> Result<Summary> {
        let counted = self.told.all();
        let summary = Summary { vcpus: self.totals.clone(), counted, ..summary.clone() };
        let json = summary_json(&summary)?;
        self.frames.push(kind::END, 0, |out| totals(out, &self.totals, &json));
        self.flush()?;
        self.ended = true;
        Ok(summary)
    }

    /// What a consumer must be sent that joins now, before the frames to come: prologue,
    /// header, names, totals and counts so far. Hands all gathered bytes on before.
    ///
    /// # Errors
    /// When the sink fails.
    pub fn join(&mut self) -> Result<Vec<u8>> {
        self.flush()?;
        let mut frames = Frames { bytes: Vec::new(), sequence: self.frames.sequence };
        frames.bytes.extend_from_slice(Prologue::current().as_bytes());
        frames.push(kind::HEADER, flag::LOCAL, |out| self.header.encode(out));
        frames.push(kind::JOIN, flag::LOCAL, |out| totals(out, &self.totals, ""));
        frames.symbols(flag::LOCAL, &mut self.names.symbols());
        frames.tasks(flag::LOCAL, &mut self.names.tasks());
        frames.tracers(flag::LOCAL, &mut self.names.tracers());
        frames.values(flag::LOCAL, &mut self.names.values());
        for (vcpu, tracer, sums) in self.told.sums() {
            for counts in sums.chunks(MAX_COUNTS) {
                frames.counts(flag::LOCAL, vcpu, tracer, counts);
            }
        }
        for (vcpu, tracer, sums) in self.told.callers() {
            for counts in sums.chunks(MAX_COUNTS) {
                frames.callers(flag::LOCAL, vcpu, tracer, counts);
            }
        }
        for (of, what, words) in self.told.sorted() {
            for buckets in words.chunks(MAX_COUNTS) {
                frames.buckets(flag::LOCAL, of, what, buckets);
            }
        }
        Ok(frames.bytes)
    }

    /// Hands gathered bytes on and returns the sink.
    ///
    /// # Errors
    /// When the sink fails.
    pub fn into_inner(mut self) -> Result<W> {
        self.flush()?;
        Ok(self.sink)
    }

    fn total(&mut self, vcpu: u32) -> Result<&mut VcpuTotals> {
        let vcpus = self.header.vcpus;
        let total = usize::try_from(vcpu).ok().and_then(|index| self.totals.get_mut(index));
        total.ok_or_else(|| invalid(format!("vCPU {vcpu}, but the header announced {vcpus}")))
    }

    /// Gives the sink what was gathered when it is over `limit`.
    fn hand_on(&mut self, limit: usize) -> Result<()> {
        if self.ended && !self.frames.bytes.is_empty() {
            self.frames.bytes.clear();
            return Err(invalid("the stream has ended".into()));
        }
        if self.frames.bytes.len() > limit {
            let written = self.sink.write_all(&self.frames.bytes);
            // After an error the stream is torn at this place; nothing is sent twice.
            self.frames.bytes.clear();
            written?;
        }
        Ok(())
    }
}

/// The frame that one slow consumer is sent in the place of `count` records of a vCPU that
/// were left out for it. `total` is all that it missed of this vCPU, and `sequence` the
/// number of the next frame of the trace that it will get.
#[must_use]
pub fn consumer_loss(vcpu: u32, count: u64, total: u64, sequence: u32) -> Vec<u8> {
    let mut frames = Frames { bytes: Vec::new(), sequence };
    frames.loss(flag::LOCAL, vcpu, LossReason::Consumer, count, total);
    frames.bytes
}

fn invalid(cause: String) -> Error {
    Error::new(ErrorKind::InvalidInput, cause)
}

fn totals(out: &mut Vec<u8>, totals: &[VcpuTotals], json: &str) {
    let head = TotalsHead {
        vcpus: u32::try_from(totals.len()).unwrap_or(0).into(),
        json: u32::try_from(json.len()).unwrap_or(0).into(),
    };
    out.extend_from_slice(head.as_bytes());
    for total in totals {
        let entry = TotalEntry { records: total.records.into(), lost: total.lost.into() };
        out.extend_from_slice(entry.as_bytes());
    }
    out.extend_from_slice(json.as_bytes());
}

/// The summary as text; what is only nice to have is left out when it is too long.
fn summary_json(summary: &Summary) -> Result<String> {
    let json = serde_json::to_string(summary)?;
    if json.len() <= BATCH {
        return Ok(json);
    }
    let mut short = summary.clone();
    short.notes.truncate(16);
    for note in &mut short.notes {
        note.truncate(note.floor_char_boundary(1024));
    }
    short.sites.skipped.truncate(64);
    for skipped in &mut short.sites.skipped {
        skipped.reason.truncate(skipped.reason.floor_char_boundary(256));
        skipped.examples.clear();
    }
    for vcpu in &mut short.vcpus {
        vcpu.lost_by_reason = BTreeMap::new();
    }
    Ok(serde_json::to_string(&short)?)
}

/// Frames one after the other.
#[derive(Debug, Default)]
struct Frames {
    bytes: Vec<u8>,
    sequence: u32,
}

impl Frames {
    /// Adds a frame with the payload that `fill` appends.
    fn push(&mut self, kind: u16, flags: u16, fill: impl FnOnce(&mut Vec<u8>)) {
        let start = self.bytes.len();
        self.bytes.resize(start + HEAD, 0);
        fill(&mut self.bytes);
        let length = self.bytes.len() - start - HEAD;
        self.bytes.resize(start + HEAD + length.next_multiple_of(ALIGN), 0);
        let (head, payload) = self.bytes[start..].split_at_mut(HEAD);
        let filled = FrameHead::sealed(kind, flags, self.sequence, payload);
        head.copy_from_slice(filled.as_bytes());
        if flags & flag::LOCAL == 0 {
            self.sequence = self.sequence.wrapping_add(1);
        }
    }

    /// Adds list frames, as many as the entries need; none for no entries.
    fn list<T>(
        &mut self,
        kind: u16,
        flags: u16,
        entries: &mut dyn Iterator<Item = T>,
        mut encode: impl FnMut(T, &mut Vec<u8>),
    ) {
        let mut entries = entries.peekable();
        while entries.peek().is_some() {
            self.push(kind, flags, |out| {
                let start = out.len();
                out.extend_from_slice(ListHead { count: 0.into(), reserved: 0.into() }.as_bytes());
                let mut count = 0u32;
                while out.len() - start < BATCH
                    && let Some(entry) = entries.next()
                {
                    encode(entry, out);
                    count += 1;
                }
                out[start..start + 4].copy_from_slice(&count.to_le_bytes());
            });
        }
    }

    fn symbols<'a>(&mut self, flags: u16, symbols: &mut dyn Iterator<Item = Symbol<'a>>) {
        self.list(kind::SYMBOLS, flags, symbols, |symbol, out| symbol.encode(out));
    }

    fn tasks(&mut self, flags: u16, tasks: &mut dyn Iterator<Item = &Task>) {
        self.list(kind::TASKS, flags, tasks, Task::encode);
    }

    /// Readers of version 1.0 skip them.
    fn tracers<'a>(&mut self, flags: u16, tracers: &mut dyn Iterator<Item = Tracer<'a>>) {
        let flags = flags | flag::OPTIONAL;
        self.list(kind::TRACERS, flags, tracers, |tracer, out| tracer.encode(out));
    }

    /// Readers of version 1.0 skip them.
    fn values<'a>(&mut self, flags: u16, values: &mut dyn Iterator<Item = RawValues<'a>>) {
        let flags = flags | flag::OPTIONAL;
        self.list(kind::VALUES, flags, values, |values, out| values.encode(out));
    }

    /// Readers of version 1.0 skip them.
    fn counts(&mut self, flags: u16, vcpu: u32, tracer: u8, counts: &[Count]) {
        let flags = flags | flag::OPTIONAL;
        self.push(kind::COUNTS, flags, |out| encode(vcpu, tracer, counts, out));
    }

    /// Readers of version 1.0 skip them.
    fn callers(&mut self, flags: u16, vcpu: u32, tracer: u8, counts: &[CallerCount]) {
        let flags = flags | flag::OPTIONAL;
        self.push(kind::COUNTS, flags, |out| encode_callers(vcpu, tracer, counts, out));
    }

    /// Readers of version 1.0 skip them.
    fn buckets(
        &mut self,
        flags: u16,
        of: (u32, u8),
        what: (HistogramOf, &str),
        buckets: &[Bucket],
    ) {
        let flags = flags | flag::OPTIONAL;
        self.push(kind::COUNTS, flags, |out| encode_buckets(of, what, buckets, out));
    }

    fn loss(&mut self, flags: u16, vcpu: u32, reason: LossReason, count: u64, total: u64) {
        let loss = LossFixed {
            vcpu: vcpu.into(),
            reason: u32::from(reason).into(),
            count: count.into(),
            total: total.into(),
        };
        self.push(kind::LOSS, flags, |out| out.extend_from_slice(loss.as_bytes()));
    }
}
