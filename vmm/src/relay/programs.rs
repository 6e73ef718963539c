//! Converts records of programs to records of the stream.

use super::Targets;
use super::context::Meaning;
use super::memo::{End, Place, Shape};
use super::values::{Untold, may_be_address};
use crate::kernel::Kernel;
use crate::stream::{
    Context, EntryRecord, Header, RecordBuffer, ReturnRecord, TailRecord, ValueField, ValuesOf,
};
use crate::tracer::{Duty, Part, RawRecord, stack_bias};
use vmtrace_trampolines::layout::COMMON_SIZE;
use vmtrace_trampolines::{Field, Point, RawContext};

/// What the records of a program have.
#[derive(Clone, Debug)]
pub(super) struct Format {
    pub(super) point: Point,
    parts: Vec<PartFormat>,
    /// How many words there are.
    words: usize,
    /// Which of them is the stack pointer, and what it lacks.
    stack: Option<usize>,
    bias: u64,
    /// Which of them is the value returned, which how long the call took, which the function jumped to, and which says what
    /// failed.
    value: Option<usize>,
    duration: Option<usize>,
    target: Option<usize>,
    failed: Option<usize>,
    /// Which of them is the state of the CPU, and what that means.
    context: Option<(usize, Meaning)>,
    /// Whether there is anything that the stream must be told of.
    pub(super) has_values: bool,
}

/// What of it is one tracer's.
#[derive(Clone, Debug)]
struct PartFormat {
    tracer: u8,
    stack: bool,
    value: bool,
    /// It is the end of calls of other functions.
    aid: bool,
    /// Words of its values: where they begin, how many there are, and the bit of their failure.
    values: Vec<(usize, usize, u32)>,
}

impl Format {
    /// `meaning` is that of a state of the CPU, if one is told.
    fn new(kernel: &Kernel, duty: &Duty, meaning: Option<Meaning>) -> Self {
        let program = duty.program(0, None, None);
        let place = |wanted: Field| {
            let mut places = program.places().enumerate();
            let (index, (field, below)) = places.find(|&(_, (field, _))| field == wanted)?;
            Some((below.saturating_sub(COMMON_SIZE) / 8 - 1, field.words(), index))
        };
        let find = |field| place(field).map(|(at, ..)| at);
        let part = |part: &Part| {
            let fields = part.fields.iter().copied();
            let values =
                fields.filter(|field| matches!(field, Field::Argument(_) | Field::Read(_)));
            let value = |field| {
                let (at, words, index) = place(field)?;
                Some((at, words, u32::try_from(index).ok()?))
            };
            PartFormat {
                tracer: part.tracer,
                stack: part.fields.contains(&Field::Stack),
                value: part.fields.contains(&Field::Value),
                aid: part.aid,
                values: values.filter_map(value).collect(),
            }
        };
        let parts: Vec<_> = duty.parts.iter().map(part).collect();
        Self {
            point: duty.point,
            words: (program.size() - COMMON_SIZE) / 8,
            stack: find(Field::Stack),
            bias: stack_bias(kernel, duty.point),
            value: find(Field::Value),
            duration: find(Field::Duration),
            target: find(Field::Target),
            failed: find(Field::Failed),
            context: find(Field::Context).zip(meaning),
            has_values: parts.iter().any(|part| part.value || !part.values.is_empty()),
            parts,
        }
    }

    /// The tracers, each with what the stream must be told of this function's records for it.
    pub(super) fn valued(&self) -> impl Iterator<Item = (u8, ValuesOf)> {
        self.parts.iter().filter_map(|part| match (part.value, part.values.is_empty()) {
            (true, _) => Some((part.tracer, ValuesOf::Return)),
            (_, false) => Some((part.tracer, ValuesOf::Entry)),
            _ => None,
        })
    }

    /// What its records are for its tracer, if there is one alone and they have nothing that the
    /// shape does not say.
    #[inline]
    pub(super) fn shape(&self) -> Option<(Shape, u8)> {
        let [part] = &self.parts[..] else { return None };
        if part.aid {
            return None;
        }
        let shape = match (self.point, self.words, part.stack) {
            (Point::Entry, 0, _) => Shape::Entry,
            (Point::Entry, 1, true) => Shape::Frame,
            (Point::Return, 1, true) => Shape::Return,
            _ => return None,
        };
        Some((shape, part.tracer))
    }

    /// Whether its records tell where calls go on: after jumps through pointers.
    pub(super) fn tells_targets(&self) -> bool {
        self.target.is_some()
    }

    /// Whether all that the stream must be told of its records are functions and callers.
    pub(super) fn is_plain(&self) -> bool {
        self.target.is_none() && !self.has_values
    }

    /// The place of a record, with where it jumps to if that is only known when it happens.
    #[inline]
    pub(super) fn refine(&self, place: Place, fields: &[u64]) -> Place {
        let Some(&target) = self.target.and_then(|index| fields.get(index)) else { return place };
        let target = u32::try_from(target.wrapping_sub(Header::TOP_4_GIB)).unwrap_or(0);
        Place { target, ..place }
    }

    /// Adds the places of words that may be addresses, of a function (low half of its entry address).
    pub(super) fn addresses(&self, function: u32, untold: &Untold, places: &mut Vec<usize>) {
        places.extend(self.target);
        for part in &self.parts {
            let returned = self.value.filter(|_| part.value);
            let of = if part.value { ValuesOf::Return } else { ValuesOf::Entry };
            if !part.value && part.values.is_empty() {
                continue;
            }
            let fields = untold.fields(function, part.tracer, of).unwrap_or_default();
            let mut words = part.values.iter().flat_map(|&(at, words, _)| at..at + words);
            let mut words = returned.into_iter().chain(&mut words);
            for ValueField { shape, .. } in fields {
                let first = words.next();
                places.extend(first.filter(|_| may_be_address(shape)));
                words.by_ref().take(shape.words().saturating_sub(1)).for_each(drop);
            }
        }
    }

    /// Adds a record for every tracer.
    #[inline]
    pub(super) fn write(
        &self,
        batch: &mut RecordBuffer,
        time: u64,
        record: &RawRecord,
        fields: &[u64],
        place: &Place,
    ) {
        let field = |index: Option<usize>| fields.get(index?).copied();
        let sp = field(self.stack).map(|sp| sp.wrapping_add(self.bias));
        let context = self.context(fields, Meaning::context);
        let (function, caller, pid) = (place.function, record.caller, record.pid);
        for part in &self.parts {
            let sp = sp.filter(|_| part.stack);
            match self.point {
                Point::Entry | Point::Probe => {
                    let entry =
                        EntryRecord::new(time, function, caller, pid).of_tracer(part.tracer);
                    match sp {
                        _ if !part.values.is_empty() => {
                            let failed = part.failed(field(self.failed).unwrap_or(0));
                            batch.push_values(entry, sp, failed, part.words(fields));
                        }
                        None => batch.push(entry),
                        Some(sp) => batch.push_frame(entry.with_sp(sp)),
                    }
                }
                Point::Tail if part.aid => {
                    let ret = ReturnRecord::new(time, function, caller, pid, sp.unwrap_or(0));
                    batch.push_return(ret.of_tracer(part.tracer).of_aid());
                }
                Point::Return | Point::Beyond => {
                    let sp = sp.unwrap_or(0);
                    let ret = ReturnRecord::new(time, function, caller, pid, sp);
                    let mut ret = ret.of_tracer(part.tracer);
                    if place.end == End::Aid || part.aid {
                        ret = ret.of_aid();
                    }
                    match field(self.value).filter(|_| part.value) {
                        Some(value) => batch.push_return_value(ret.with_value(value)),
                        None => batch.push_return(ret),
                    }
                    if let Some(ticks) = field(self.duration) {
                        batch.with_duration(ticks);
                    }
                }
                Point::Tail => {
                    let sp = sp.unwrap_or(0);
                    let mut tail = TailRecord::new(time, function, place.target, pid, sp);
                    if place.end == End::Last {
                        tail = tail.and_last();
                    }
                    batch.push_tail(tail.of_tracer(part.tracer));
                    if let Some(ticks) = field(self.duration) {
                        batch.with_duration(ticks);
                    }
                }
            }
            if let Some(context) = context {
                batch.with_context(context);
            }
        }
    }

    fn context(
        &self,
        fields: &[u64],
        meaning: fn(Meaning, RawContext) -> Context,
    ) -> Option<Context> {
        let (index, kernel) = self.context?;
        Some(meaning(kernel, RawContext(*fields.get(index)?)))
    }

    /// The state of the CPU in a record as it was.
    pub(super) fn context_in_place(&self, fields: &[u64]) -> Option<Context> {
        self.context(fields, Meaning::context)
    }

    /// The state of the CPU in the record of an event.
    pub(super) fn context_of_event(&self, fields: &[u64]) -> Option<Context> {
        self.context(fields, Meaning::context_of_event)
    }
}

impl PartFormat {
    /// Bits of the values that failed, of those of all fields.
    fn failed(&self, fields: u64) -> u64 {
        if fields == 0 {
            return 0;
        }
        let bits = self.values.iter().enumerate();
        bits.fold(0, |all, (index, &(.., bit))| all | (fields >> bit & 1) << index)
    }

    /// The words of its values.
    fn words<'a>(&'a self, fields: &'a [u64]) -> impl Iterator<Item = u64> + 'a {
        let of = |&(at, words, _): &(usize, usize, u32)| {
            fields.get(at..at + words).unwrap_or_default().iter().copied()
        };
        self.values.iter().flat_map(of)
    }
}

/// The formats of all programs, by number.
#[derive(Debug, Default)]
pub(super) struct Programs {
    formats: Vec<Format>,
    /// What the stack pointer lacks in records of entries, and of returns.
    biases: (u64, u64),
}

impl Programs {
    /// These are all that there are.
    pub(super) fn set(&mut self, kernel: &Kernel, targets: &Targets) {
        let tells = |duty: &Duty| duty.parts.iter().any(|it| it.fields.contains(&Field::Context));
        // The kernel's code is looked into for it: once, and only if it is needed.
        let told = targets.programs.iter().any(tells);
        let meaning = told.then(|| Meaning::of(kernel)).flatten();
        let format = |duty| Format::new(kernel, duty, meaning);
        self.formats = targets.programs.iter().map(format).collect();
        self.biases = (stack_bias(kernel, Point::Entry), stack_bias(kernel, Point::Return));
    }

    /// What a record has, if a program can have written it.
    #[inline]
    pub(super) fn format(&self, record: &RawRecord) -> Option<&Format> {
        let format = self.formats.get(usize::from(record.program))?;
        (format.words == usize::from(record.fields)).then_some(format)
    }

    /// What the stack pointer lacks in records of entries, and of returns.
    #[inline]
    pub(super) fn stack_biases(&self) -> (u64, u64) {
        self.biases
    }

    /// How many records one of a program would have become.
    pub(super) fn tracers(&self, program: u16) -> u64 {
        self.formats.get(usize::from(program)).map_or(1, |format| format.parts.len() as u64)
    }
}
