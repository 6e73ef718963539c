//! Payloads of frames, as a reader sees them.

use std::borrow::Cow;

use zerocopy::FromBytes;

use super::counts::Counts;
use super::dictionary::{Symbol, Task, Tracer};
use super::header::Header;
use super::mark::{LossReason, Mark};
use super::record::Batch;
use super::summary::Summary;
use super::traced::Traced;
use super::values::RawValues;
use super::wire::{
    ALIGN, BatchHead, ListHead, LossFixed, MAX_DESCRIPTION, MAX_NAME, MAX_PID, MarkFixed,
    SymbolHead, TaskEntry, TotalEntry, TotalsHead, TracerHead, ValuesHead, WatermarkFixed, flag,
    kind,
};

/// One frame of a stream, decoded.
#[derive(Debug)]
#[non_exhaustive]
pub enum Frame<'a> {
    /// The first frame; readers keep it.
    Header(Box<Header>),
    /// Names of kernel text.
    Symbols(SymbolList<'a>),
    /// Names of tasks, for the records that follow.
    Tasks(TaskList<'a>),
    /// Records of one vCPU.
    Records(Batch<'a>),
    /// Records of one vCPU are missing here.
    Loss(Loss),
    /// Something happened.
    Mark(Mark),
    /// Every record up to these clock ticks, of every vCPU, has been sent.
    Watermark(u64),
    /// Totals of each vCPU at the moment that a late consumer joined: records, lost.
    Join(Vec<(u64, u64)>),
    /// The last frame.
    End(Box<Summary>),
    /// Names of tracers, for the records that follow.
    Tracers(TracerList<'a>),
    /// What the values of records are, for the records that follow.
    Values(ValuesList<'a>),
    /// Functions that were traced, whether they were called or not.
    Traced(Traced<'a>),
    /// How often functions were entered, beside records.
    Counts(Counts<'a>),
    /// A type of a later version that may be skipped.
    Skipped(u16),
}

/// Records of one vCPU that are missing at this place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loss {
    /// The vCPU.
    pub vcpu: u32,
    /// How many.
    pub count: u64,
    /// Why.
    pub reason: LossReason,
    /// Lost on this vCPU up to and with these.
    pub total: u64,
}

/// Why a payload cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PayloadError {
    /// Its parts and its length disagree.
    Malformed(String),
    /// It would have to be known.
    Unknown(String),
}

impl<'a> Frame<'a> {
    /// Reads a payload without looking into the entries of its lists.
    pub(super) fn parse(
        frame_type: u16,
        flags: u16,
        payload: &'a [u8],
    ) -> Result<Self, PayloadError> {
        Ok(match frame_type {
            kind::HEADER => {
                Self::Header(Box::new(Header::decode(payload).map_err(PayloadError::Malformed)?))
            }
            kind::SYMBOLS => {
                let (count, rest) = list(payload)?;
                Self::Symbols(SymbolList { count, rest })
            }
            kind::TASKS => {
                let (count, rest) = list(payload)?;
                Self::Tasks(TaskList { count, rest })
            }
            kind::RECORDS => {
                let (head, records) = fixed::<BatchHead>(payload)?;
                let (vcpu, count) = (head.vcpu.get(), head.count.get());
                Self::Records(Batch::new(vcpu, head.first.get(), count, records))
            }
            kind::LOSS => {
                let (loss, _) = fixed::<LossFixed>(payload)?;
                Self::Loss(Loss {
                    vcpu: loss.vcpu.get(),
                    count: loss.count.get(),
                    reason: loss.reason.get().into(),
                    total: loss.total.get(),
                })
            }
            kind::MARK => Self::Mark(mark(payload)?),
            kind::WATERMARK => Self::Watermark(fixed::<WatermarkFixed>(payload)?.0.ticks.get()),
            kind::JOIN => Self::Join(totals(payload)?.0),
            kind::END => Self::End(Box::new(end(payload)?)),
            kind::TRACERS => {
                let (count, rest) = list(payload)?;
                Self::Tracers(TracerList { count, rest })
            }
            kind::VALUES => {
                let (count, rest) = list(payload)?;
                Self::Values(ValuesList { count, rest })
            }
            kind::TRACED => Self::Traced(
                Traced::decode(payload)
                    .ok_or_else(|| malformed("it has fewer functions than it says"))?,
            ),
            kind::COUNTS => Self::Counts(
                Counts::decode(payload)
                    .ok_or_else(|| malformed("it has fewer counts than it says"))?,
            ),
            skipped if flags & flag::OPTIONAL != 0 => Self::Skipped(skipped),
            unknown => return Err(PayloadError::Unknown(format!("frame type {unknown}"))),
        })
    }

    /// Looks into the lists, so that their iterators give all that was announced.
    pub(super) fn verify(&self) -> Result<(), PayloadError> {
        let whole = match self {
            Self::Symbols(list) => {
                let mut walk = list.clone();
                let mut limits = true;
                for symbol in walk.by_ref() {
                    limits &= symbol.name.len().max(symbol.module.len()) <= MAX_NAME;
                }
                walk.count == 0 && limits
            }
            Self::Tasks(list) => {
                let mut walk = list.clone();
                walk.by_ref().all(|task| task.pid < MAX_PID) && walk.count == 0
            }
            Self::Tracers(list) => {
                let mut walk = list.clone();
                let limits = walk.by_ref().all(|tracer| {
                    tracer.name.len() <= MAX_NAME && tracer.description.len() <= MAX_DESCRIPTION
                });
                walk.count == 0 && limits
            }
            Self::Values(list) => {
                let mut walk = list.clone();
                for values in walk.by_ref() {
                    values.format().map_err(PayloadError::Malformed)?;
                }
                walk.count == 0
            }
            Self::Records(batch) => batch.is_well_formed(),
            _ => true,
        };
        if whole { Ok(()) } else { Err(malformed("its entries are not as its head says")) }
    }
}

fn malformed(cause: &str) -> PayloadError {
    PayloadError::Malformed(cause.to_owned())
}

fn fixed<T>(payload: &[u8]) -> Result<(&T, &[u8]), PayloadError>
where
    T: FromBytes + zerocopy::KnownLayout + zerocopy::Immutable + zerocopy::Unaligned,
{
    T::ref_from_prefix(payload).map_err(|_| malformed("it is shorter than its fixed part"))
}

fn list(payload: &[u8]) -> Result<(u32, &[u8]), PayloadError> {
    let (head, rest) = fixed::<ListHead>(payload)?;
    Ok((head.count.get(), rest))
}

fn text(bytes: &[u8], length: u32) -> Result<Cow<'_, str>, PayloadError> {
    let text = usize::try_from(length).ok().and_then(|length| bytes.get(..length));
    text.map(String::from_utf8_lossy).ok_or_else(|| malformed("its text is cut off"))
}

fn mark(payload: &[u8]) -> Result<Mark, PayloadError> {
    let (mark, rest) = fixed::<MarkFixed>(payload)?;
    Ok(Mark {
        ticks: mark.ticks.get(),
        kind: mark.kind.get().into(),
        duration_ns: mark.duration_ns.get(),
        text: text(rest, mark.text.get())?.into_owned(),
    })
}

/// Totals of each vCPU: records and lost.
type Totals = Vec<(u64, u64)>;

/// The totals, the length of the text after them, and all that is after them.
fn totals(payload: &[u8]) -> Result<(Totals, u32, &[u8]), PayloadError> {
    let (head, rest) = fixed::<TotalsHead>(payload)?;
    let vcpus = usize::try_from(head.vcpus.get()).unwrap_or(usize::MAX);
    let (entries, rest) = <[TotalEntry]>::ref_from_prefix_with_elems(rest, vcpus)
        .map_err(|_| malformed("its totals are cut off"))?;
    let totals = entries.iter().map(|total| (total.records.get(), total.lost.get())).collect();
    Ok((totals, head.json.get(), rest))
}

fn end(payload: &[u8]) -> Result<Summary, PayloadError> {
    let (totals, length, rest) = totals(payload)?;
    let json = text(rest, length)?;
    let mut summary: Summary = serde_json::from_str(&json)
        .map_err(|error| PayloadError::Malformed(format!("its summary: {error}")))?;
    // The binary totals are the ones that count.
    summary.vcpus.resize(totals.len(), Default::default());
    for (vcpu, (records, lost)) in summary.vcpus.iter_mut().zip(totals) {
        (vcpu.records, vcpu.lost) = (records, lost);
    }
    Ok(summary)
}

/// The symbols of a frame.
#[derive(Clone, Debug)]
pub struct SymbolList<'a> {
    count: u32,
    rest: &'a [u8],
}

/// A symbol as it is in a frame: its texts may not be UTF-8.
#[derive(Clone, Copy, Debug)]
pub struct RawSymbol<'a> {
    /// Runtime address of its first byte.
    pub address: u64,
    /// Bytes; zero when not known.
    pub size: u32,
    /// Name.
    pub name: &'a [u8],
    /// Module; empty for the kernel itself.
    pub module: &'a [u8],
}

impl RawSymbol<'_> {
    /// Calls `with` with the symbol as text.
    pub fn with_text<T>(&self, with: impl FnOnce(Symbol<'_>) -> T) -> T {
        let name = String::from_utf8_lossy(self.name);
        let module = String::from_utf8_lossy(self.module);
        with(Symbol { address: self.address, size: self.size, name: &name, module: &module })
    }
}

impl<'a> Iterator for SymbolList<'a> {
    type Item = RawSymbol<'a>;

    fn next(&mut self) -> Option<RawSymbol<'a>> {
        if self.count == 0 {
            return None;
        }
        let (head, rest) = SymbolHead::ref_from_prefix(self.rest).ok()?;
        let (name, module) = (usize::from(head.name.get()), usize::from(head.module.get()));
        let (texts, rest) = rest.split_at_checked((name + module).next_multiple_of(ALIGN))?;
        self.rest = rest;
        self.count -= 1;
        let (address, size) = (head.address.get(), head.size.get());
        Some(RawSymbol { address, size, name: &texts[..name], module: &texts[name..name + module] })
    }
}

/// The tasks of a frame.
#[derive(Clone, Debug)]
pub struct TaskList<'a> {
    count: u32,
    rest: &'a [u8],
}

impl Iterator for TaskList<'_> {
    type Item = Task;

    fn next(&mut self) -> Option<Task> {
        if self.count == 0 {
            return None;
        }
        let (entry, rest) = TaskEntry::ref_from_prefix(self.rest).ok()?;
        self.rest = rest;
        self.count -= 1;
        Some(Task::decode(entry))
    }
}

/// The tracers of a frame.
#[derive(Clone, Debug)]
pub struct TracerList<'a> {
    count: u32,
    rest: &'a [u8],
}

/// A tracer as it is in a frame: its texts may not be UTF-8.
#[derive(Clone, Copy, Debug)]
pub struct RawTracer<'a> {
    /// Its number; records have those below 256 only.
    pub number: u32,
    /// Name.
    pub name: &'a [u8],
    /// What it does.
    pub description: &'a [u8],
}

impl RawTracer<'_> {
    /// Calls `with` with the tracer as text, if records can have its number.
    pub fn with_text<T>(&self, with: impl FnOnce(Tracer<'_>) -> T) -> Option<T> {
        let number = u8::try_from(self.number).ok()?;
        let name = String::from_utf8_lossy(self.name);
        let description = String::from_utf8_lossy(self.description);
        Some(with(Tracer { number, name: &name, description: &description }))
    }
}

impl<'a> Iterator for TracerList<'a> {
    type Item = RawTracer<'a>;

    fn next(&mut self) -> Option<RawTracer<'a>> {
        if self.count == 0 {
            return None;
        }
        let (head, rest) = TracerHead::ref_from_prefix(self.rest).ok()?;
        let (name, about) = (usize::from(head.name.get()), usize::from(head.description.get()));
        let (texts, rest) = rest.split_at_checked((name + about).next_multiple_of(ALIGN))?;
        self.rest = rest;
        self.count -= 1;
        let (name, description) = (&texts[..name], &texts[name..name + about]);
        Some(RawTracer { number: head.number.get(), name, description })
    }
}

/// The formats of values of a frame.
#[derive(Clone, Debug)]
pub struct ValuesList<'a> {
    count: u32,
    rest: &'a [u8],
}

impl<'a> Iterator for ValuesList<'a> {
    type Item = RawValues<'a>;

    fn next(&mut self) -> Option<RawValues<'a>> {
        if self.count == 0 {
            return None;
        }
        let (head, rest) = ValuesHead::ref_from_prefix(self.rest).ok()?;
        let length = usize::try_from(head.text.get()).ok()?;
        let (text, rest) = rest.split_at_checked(length.checked_next_multiple_of(ALIGN)?)?;
        self.rest = rest;
        self.count -= 1;
        let (function, tracer, of) = (head.function.get(), head.tracer, head.of);
        Some(RawValues { function, tracer, of, text: &text[..length] })
    }
}
