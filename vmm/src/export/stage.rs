//! From what waited for its turn to events with names, depths and durations.

use std::collections::VecDeque;

use crate::stream::{
    Context, Count, Counts, CountsOf, Header, HistogramOf, Loss, Mark, MarkKind, RawTracer, Record,
    RecordHead, Stretch, Traced, ValuesOf,
};

use super::names::{Symbols, Tasks, Tracers};
use super::pairing::{Call, Choice, Frame, Pairing, Step};
use super::player::PlayError;
use super::select::Selection;
use super::values::{Args, Formats, Returned};
use super::{Entry, Event, Export, Place, Return, SortedBy, Tail, Tracepoint, Unfinished};

/// What waits for its turn.
#[derive(Debug)]
pub(super) enum Item {
    Record(Held),
    Loss(Loss),
    Mark(Box<Mark>),
}

/// A record that waits. Most of all that waits is this, so it is small: what only some have waits
/// in a queue beside.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    timestamp: u64,
    function: u32,
    /// Caller or target.
    other: u32,
    pid: u32,
    /// Where the task's name is.
    pub(super) slot: u32,
    tracer: u8,
    kind: Kind,
    has_sp: bool,
    has_value: bool,
    /// What its values are is known; so they wait, too.
    has_format: bool,
    context: Option<Context>,
}

// There may be a million of them.
const _: () = assert!(size_of::<Held>() == 32);

/// What is known of the values of the present record.
#[derive(Debug, Default)]
struct Present {
    format: Option<u32>,
    failed: u64,
    words: Vec<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Entry,
    Return,
    /// Of a function that is not traced.
    Aid,
    Tail,
    /// Nothing else is heard of the call.
    Last,
    /// A return, with how long the call took: there is no other record of it.
    Whole,
    /// The same of a jump.
    WholeTail,
    /// A tracepoint.
    Event,
}

impl Kind {
    fn is_whole(self) -> bool {
        matches!(self, Self::Whole | Self::WholeTail)
    }
}

impl Held {
    /// With stack pointer, value and duration; `None` for records of unknown kinds.
    #[inline]
    fn of(record: &Record<'_>, tasks: &mut Tasks) -> Option<(Self, [Option<u64>; 3])> {
        let took = match record {
            Record::Return { duration, .. } | Record::Tail { duration, .. } => *duration,
            _ => None,
        };
        let (kind, function, other, sp, value) = match record {
            Record::Entry { entry, sp, .. } => {
                (Kind::Entry, entry.function, entry.caller, *sp, None)
            }
            Record::Return { ret, .. } if ret.head.flags & RecordHead::AID != 0 => {
                (Kind::Aid, ret.function, ret.caller, Some(ret.sp.get()), None)
            }
            Record::Return { ret, value, .. } => {
                (Kind::Return, ret.function, ret.caller, Some(ret.sp.get()), *value)
            }
            Record::Tail { tail, .. } if tail.head.flags & RecordHead::LAST != 0 => {
                (Kind::Last, tail.function, tail.target, Some(tail.sp.get()), None)
            }
            Record::Tail { tail, .. } => {
                (Kind::Tail, tail.function, tail.target, Some(tail.sp.get()), None)
            }
            Record::Event { event, .. } => {
                (Kind::Event, event.tracepoint, event.caller, None, None)
            }
            Record::Other(..) => return None,
        };
        let kind = match (kind, took) {
            (Kind::Return, Some(_)) => Kind::Whole,
            (Kind::Tail | Kind::Last, Some(_)) => Kind::WholeTail,
            // It means nothing there.
            (kind, _) => kind,
        };
        let took = took.filter(|_| kind.is_whole());
        let head = record.head();
        let pid = head.pid.get();
        let held = Self {
            timestamp: head.timestamp.get(),
            function: function.get(),
            other: other.get(),
            pid,
            slot: tasks.slot(pid),
            tracer: head.tracer,
            kind,
            has_sp: sp.is_some(),
            has_value: value.is_some(),
            has_format: false,
            context: record.context(),
        };
        Some((held, [sp, value, took]))
    }

    pub(super) fn timestamp(&self) -> u64 {
        self.timestamp
    }
}

/// Where items become events.
#[derive(Debug)]
pub(super) struct Stage<E> {
    pub(super) export: E,
    pub(super) symbols: Symbols,
    pub(super) tasks: Tasks,
    pub(super) tracers: Tracers,
    pub(super) selection: Selection,
    pub(super) pairing: Pairing,
    /// What the present record turned out to be.
    steps: Vec<Step>,
    pub(super) formats: Formats,
    /// Of the records that wait, by queue and in their order, what they have of these: the stack
    /// pointer, the returned value, the duration, and a format's number, what failed, and words.
    beside: Vec<VecDeque<u64>>,
    /// Words of values in there.
    words: usize,
    present: Present,
}

impl<E: Export> Stage<E> {
    pub(super) fn new(export: E) -> Self {
        Self {
            export,
            symbols: Symbols::new(),
            tasks: Tasks::default(),
            tracers: Tracers::default(),
            selection: Selection::default(),
            pairing: Pairing::new(0),
            steps: Vec::new(),
            formats: Formats::default(),
            beside: Vec::new(),
            words: 0,
            present: Present::default(),
        }
    }

    /// Words of values that wait with their records.
    pub(super) fn words(&self) -> usize {
        self.words
    }

    /// The header is known.
    pub(super) fn begin(&mut self, vcpus: usize) {
        let max_depth = self.pairing.max_depth;
        self.pairing = Pairing::new(vcpus);
        self.pairing.max_depth = max_depth;
        self.beside = vec![VecDeque::new(); vcpus];
    }

    /// Takes a tracer's name in.
    pub(super) fn learn(&mut self, tracer: &RawTracer<'_>) {
        tracer.with_text(|tracer| {
            self.tracers.insert(tracer);
            self.selection.learn(tracer);
        });
    }

    /// What of a record waits for its turn, if it is wanted; unknown kinds are counted.
    #[inline]
    pub(super) fn hold(
        &mut self,
        header: &Header,
        queue: usize,
        record: &Record<'_>,
        unknown: &mut u64,
    ) -> Option<Held> {
        let Some((mut held, numbers)) = Held::of(record, &mut self.tasks) else {
            *unknown += 1;
            return None;
        };
        self.tracers.see(held.tracer);
        let wanted = self.selection.wants_tracer(held.tracer)
            && (held.has_sp
                || self.selection.wants_plain(&mut self.symbols, header, held.function));
        if wanted && let (true, Some(beside)) = (held.has_sp, self.beside.get_mut(queue)) {
            beside.extend(numbers.into_iter().flatten());
        }
        if wanted && !self.formats.is_empty() {
            held.has_format = self.hold_values(queue, record);
        }
        wanted.then_some(held)
    }

    /// Keeps the values of a record and what they are, if there are any and that is known.
    #[inline(never)]
    fn hold_values(&mut self, queue: usize, record: &Record<'_>) -> bool {
        let (function, of, failed, words) = match record {
            Record::Entry { entry, values: Some(values), .. } => {
                (entry.function, ValuesOf::Entry, values.failed, values.words)
            }
            Record::Event { event, values: Some(values), .. } => {
                (event.tracepoint, ValuesOf::Event, values.failed, values.words)
            }
            Record::Return { ret, value: Some(_), .. } => {
                (ret.function, ValuesOf::Return, 0, &[][..])
            }
            _ => return false,
        };
        let Some((format, needed)) = self.formats.find(function.get(), record.head().tracer, of)
        else {
            return false;
        };
        let Some(beside) = self.beside.get_mut(queue) else { return false };
        let words = &words[..words.len().min(needed)];
        // A record has fewer than 256.
        beside.extend([u64::from(format) << 8 | words.len() as u64, failed]);
        beside.extend(words.iter().map(|word| word.get()));
        self.words += words.len();
        true
    }

    /// Takes what [`Stage::hold_values`] kept.
    fn take_values(&mut self, queue: usize) {
        let Some(beside) = self.beside.get_mut(queue) else { return };
        let (Some(head), Some(failed)) = (beside.pop_front(), beside.pop_front()) else { return };
        let count = beside.len().min(usize::from(head.to_le_bytes()[0]));
        self.present.words.extend(beside.drain(..count));
        self.words -= count;
        (self.present.format, self.present.failed) = (u32::try_from(head >> 8).ok(), failed);
    }

    fn beside(&mut self, queue: usize) -> Option<u64> {
        self.beside.get_mut(queue)?.pop_front()
    }

    /// [`Stage::give`] of a record whose values wait, too.
    #[inline(never)]
    fn give_with_values(
        &mut self,
        header: &Header,
        queue: usize,
        held: &Held,
    ) -> Result<(), PlayError> {
        let vcpu = u32::try_from(queue).unwrap_or(u32::MAX);
        let sp = if held.has_sp { self.beside(queue) } else { None };
        let value = if held.has_value { self.beside(queue) } else { None };
        let took = if held.kind.is_whole() { self.beside(queue) } else { None };
        self.take_values(queue);
        let given = if held.kind == Kind::Event {
            self.event(header, vcpu, held)
        } else if held.has_sp {
            self.pair(header, vcpu, held, sp.unwrap_or(0), (value, took))
        } else {
            self.pairing.plain(vcpu);
            self.entry(header, vcpu, held, None)
        };
        self.present.format = None;
        self.present.words.clear();
        given
    }

    pub(super) fn give(
        &mut self,
        header: &Header,
        queue: usize,
        item: &Item,
    ) -> Result<(), PlayError> {
        let vcpu = u32::try_from(queue).unwrap_or(u32::MAX);
        let event = match item {
            Item::Record(held) if held.has_format => {
                return self.give_with_values(header, queue, held);
            }
            Item::Record(held) if held.kind == Kind::Event => {
                return self.event(header, vcpu, held);
            }
            Item::Record(held) if held.has_sp => {
                let sp = self.beside(queue).unwrap_or(0);
                let value = if held.has_value { self.beside(queue) } else { None };
                let took = if held.kind.is_whole() { self.beside(queue) } else { None };
                return self.pair(header, vcpu, held, sp, (value, took));
            }
            Item::Record(held) => {
                self.pairing.plain(vcpu);
                return self.entry(header, vcpu, held, None);
            }
            Item::Loss(loss) => {
                self.pairing.loss(loss.vcpu);
                Event::Loss(*loss)
            }
            Item::Mark(mark) => {
                let beside = [
                    MarkKind::Exit,
                    MarkKind::Agent,
                    MarkKind::Note,
                    MarkKind::Console,
                    MarkKind::Events,
                ];
                if !beside.contains(&mark.kind) {
                    self.pairing.change();
                }
                Event::Mark(mark)
            }
        };
        self.export.event(&event).map_err(PlayError::Output)
    }

    /// Tells which functions were traced, if their tracer is wanted.
    pub(super) fn traced(&mut self, header: &Header, traced: &Traced<'_>) -> Result<(), PlayError> {
        let Some(of) = traced.of.filter(|_| self.selection.wants_tracer(traced.tracer)) else {
            return Ok(());
        };
        let Traced { since, until, tracer, .. } = *traced;
        let functions: Vec<_> =
            traced.functions().map(|at| (at, self.symbols.index(header, at))).collect();
        let symbols = &self.symbols;
        let mut names = functions.iter().map(|&(at, index)| symbols.name(header, at, index));
        let stretch = Stretch { since, until, tracer, of };
        self.export.traced(&stretch, &mut names).map_err(PlayError::Output)
    }

    /// Tells what was counted, of those functions and tracers that are wanted.
    pub(super) fn counts(&mut self, header: &Header, counts: &Counts<'_>) -> Result<(), PlayError> {
        self.tracers.see(counts.tracer);
        if !self.selection.wants_tracer(counts.tracer) {
            return Ok(());
        }
        match counts.of {
            Some(CountsOf::Entries) => {}
            Some(CountsOf::Sorted(of)) => return self.sorted(header, counts, of),
            None => return Ok(()),
        }
        let mut wanted = Vec::new();
        for Count { function: at, hits } in counts.counts() {
            // As an entry of which nobody knows where in the call graph it is.
            if self.selection.wants_plain(&mut self.symbols, header, at) {
                wanted.push((at, self.symbols.index(header, at), hits));
            }
        }
        let symbols = &self.symbols;
        let mut hits = wanted.iter().map(|&(at, of, hits)| (symbols.name(header, at, of), hits));
        let tracer = self.tracers.name(counts.tracer);
        self.export.counts(counts.vcpu, tracer, &mut hits).map_err(PlayError::Output)
    }

    fn sorted(
        &mut self,
        header: &Header,
        counts: &Counts<'_>,
        of: HistogramOf,
    ) -> Result<(), PlayError> {
        let mut wanted = Vec::new();
        for it in counts.buckets() {
            if self.selection.wants_plain(&mut self.symbols, header, it.function) {
                wanted.push((it, self.symbols.index(header, it.function)));
            }
        }
        let symbols = &self.symbols;
        let mut words = wanted
            .iter()
            .map(|&(it, of)| (symbols.name(header, it.function, of), it.bucket, it.hits));
        let tracer = self.tracers.name(counts.tracer);
        let by = SortedBy { vcpu: counts.vcpu, tracer, of, name: counts.name };
        self.export.sorted(&by, &mut words).map_err(PlayError::Output)
    }

    /// Nothing follows.
    pub(super) fn finish(&mut self, header: &Header) -> Result<(), PlayError> {
        let mut steps = std::mem::take(&mut self.steps);
        self.pairing.finish(&mut steps);
        let told = steps.iter().try_for_each(|step| match step {
            Step::Left(frame) => self.unfinished(header, frame),
            _ => Ok(()),
        });
        steps.clear();
        self.steps = steps;
        told
    }

    fn pair(
        &mut self,
        header: &Header,
        vcpu: u32,
        held: &Held,
        sp: u64,
        (value, took): (Option<u64>, Option<u64>),
    ) -> Result<(), PlayError> {
        let call = Call {
            timestamp: held.timestamp,
            vcpu,
            pid: held.pid,
            tracer: held.tracer,
            function: held.function,
            other: held.other,
            sp,
        };
        let choice: Choice = self.selection.choice(&mut self.symbols, header, held.function);
        let mut steps = std::mem::take(&mut self.steps);
        match held.kind {
            Kind::Whole => self.pairing.whole(&call, choice, (false, took), &mut steps),
            Kind::WholeTail => self.pairing.whole(&call, choice, (true, took), &mut steps),
            Kind::Entry => self.pairing.enter(&call, choice, &mut steps),
            Kind::Return => self.pairing.leave(&call, choice, &mut steps),
            Kind::Aid => self.pairing.leave_others(&call, &mut steps),
            Kind::Tail => self.pairing.jump(&call, choice, &mut steps),
            Kind::Last => self.pairing.jump_last(&call, choice, &mut steps),
            Kind::Event => {}
        }
        let told = steps.iter().try_for_each(|step| self.tell(header, vcpu, held, value, step));
        steps.clear();
        self.steps = steps;
        told
    }

    fn tell(
        &mut self,
        header: &Header,
        vcpu: u32,
        held: &Held,
        value: Option<u64>,
        step: &Step,
    ) -> Result<(), PlayError> {
        let hides = self.selection.min_duration.is_some();
        match *step {
            Step::Left(frame) | Step::Evicted(frame) => self.unfinished(header, &frame),
            Step::Entered { id, parent, depth, shown } if shown && !hides => {
                self.entry(header, vcpu, held, Some(Place { frame: id, parent, depth }))
            }
            Step::Tailed { depth, shown } if shown && !hides => {
                let function_index = self.symbols.index(header, held.function);
                let target_index = self.symbols.index(header, held.other);
                let target = self.symbols.name(header, held.other, target_index);
                let event = Event::Tail(Tail {
                    timestamp: held.timestamp,
                    vcpu,
                    pid: held.pid,
                    comm: self.tasks.comm(held.pid, held.slot),
                    function: self.symbols.name(header, held.function, function_index),
                    target: (held.other != 0).then_some(target),
                    tracer: self.tracers.name(held.tracer),
                    depth,
                    context: held.context,
                });
                self.export.event(&event).map_err(PlayError::Output)
            }
            Step::Returned { frame, depth, ticks, shown } if shown => {
                let duration_ns = ticks.map(|ticks| header.duration_ns(ticks));
                if duration_ns < self.selection.min_duration {
                    return Ok(());
                }
                let function = frame.map_or(held.function, |frame| frame.function);
                let index = self.symbols.index(header, function);
                let fields = self.present.format.and_then(|format| self.formats.fields(format));
                let shape = fields.and_then(|fields| fields.first()).map(|field| &field.shape);
                let event = Event::Return(Return {
                    timestamp: held.timestamp,
                    vcpu,
                    pid: held.pid,
                    comm: self.tasks.comm(held.pid, held.slot),
                    tgid: self.tasks.tgid(held.slot),
                    function: self.symbols.name(header, function, index),
                    tracer: self.tracers.name(held.tracer),
                    depth,
                    duration_ns,
                    value: value.map(|raw| Returned { raw, shape }),
                    frame: frame.filter(|_| !hides).map(|frame| frame.id),
                    whole: frame.is_none() && ticks.is_some(),
                    context: held.context,
                });
                self.export.event(&event).map_err(PlayError::Output)
            }
            _ => Ok(()),
        }
    }

    fn entry(
        &mut self,
        header: &Header,
        vcpu: u32,
        held: &Held,
        place: Option<Place>,
    ) -> Result<(), PlayError> {
        let (function, caller) = (held.function, held.other);
        let function_index = self.symbols.index(header, function);
        let caller_index = self.symbols.index(header, caller);
        let fields = self.present.format.and_then(|format| self.formats.fields(format));
        let Present { failed, words, .. } = &self.present;
        let event = Event::Entry(Entry {
            timestamp: held.timestamp,
            vcpu,
            pid: held.pid,
            comm: self.tasks.comm(held.pid, held.slot),
            tgid: self.tasks.tgid(held.slot),
            function: self.symbols.name(header, function, function_index),
            caller: (caller != 0).then(|| self.symbols.name(header, caller, caller_index)),
            tracer: self.tracers.name(held.tracer),
            place,
            args: fields.map(|fields| Args { fields, failed: *failed, words }),
            context: held.context,
        });
        self.export.event(&event).map_err(PlayError::Output)
    }

    fn event(&mut self, header: &Header, vcpu: u32, held: &Held) -> Result<(), PlayError> {
        let (event, caller) = (held.function, held.other);
        let event_index = self.symbols.index(header, event);
        let caller_index = self.symbols.index(header, caller);
        let format = self.present.format;
        let fields = format.and_then(|format| self.formats.fields(format));
        let Present { failed, words, .. } = &self.present;
        let event = Event::Tracepoint(Tracepoint {
            timestamp: held.timestamp,
            vcpu,
            pid: held.pid,
            comm: self.tasks.comm(held.pid, held.slot),
            tgid: self.tasks.tgid(held.slot),
            event: self.symbols.name(header, event, event_index),
            caller: (caller != 0).then(|| self.symbols.name(header, caller, caller_index)),
            fields: fields.map(|fields| Args { fields, failed: *failed, words }),
            print: format.and_then(|format| self.formats.print(format)),
            context: held.context,
        });
        self.export.event(&event).map_err(PlayError::Output)
    }

    fn unfinished(&mut self, header: &Header, frame: &Frame) -> Result<(), PlayError> {
        if !frame.shown || self.selection.min_duration.is_some() {
            return Ok(());
        }
        let index = self.symbols.index(header, frame.function);
        let slot = self.tasks.slot(frame.pid);
        let event = Event::Unfinished(Unfinished {
            vcpu: frame.vcpu,
            pid: frame.pid,
            comm: self.tasks.comm(frame.pid, slot),
            function: self.symbols.name(header, frame.function, index),
            tracer: self.tracers.name(frame.tracer),
            place: Place { frame: frame.id, parent: None, depth: frame.depth },
        });
        self.export.event(&event).map_err(PlayError::Output)
    }
}
