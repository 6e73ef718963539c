//! Events of tracepoints: describes their fields, and converts records of programs to records of
//! the stream.

mod from;

use super::Targets;
use super::values::may_be_address;
use crate::kernel::Kernel;
use crate::stream::{
    EventRecord, Header, RecordBuffer, Symbol, ValueField, ValuesFormat, ValuesOf,
};
use crate::tracer::RawRecord;
use rustc_hash::FxHashMap;
use std::sync::Arc;
use vmtrace_trampolines::condition::Operand;
use vmtrace_trampolines::layout::COMMON_SIZE;
use vmtrace_trampolines::{Field, Point, Program};

pub use from::{From, Letter, OPERATION, Part};

/// An event that is traced.
#[derive(Clone, Debug)]
pub struct EventTarget {
    /// Link address of what it is known by in the kernel: its `struct tracepoint`, or what is its own
    /// where several come from one.
    pub address: u64,
    /// What its program writes in place of a function.
    pub word: u32,
    /// What is recorded.
    pub event: Arc<EventFields>,
}

/// What an event is, and what its records have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventFields {
    /// Such as `sched:sched_switch`.
    pub name: String,
    /// What the program records.
    pub fields: Vec<Field>,
    /// What is made of that: a value each.
    pub values: Vec<EventValue>,
    /// How it is printed: see `docs/stream.md`.
    pub print: Option<String>,
    /// Of which records of its tracepoint it is, if not of all.
    pub call: Option<OneCall>,
    /// No tracepoint tells it: the state of the CPU is as it was recorded.
    pub in_place: bool,
}

/// A single system call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OneCall {
    /// Its number.
    pub number: u32,
    /// What that is recorded as.
    pub place: Part,
}

/// A field of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventValue {
    /// What it is called and what it is.
    pub shown: ValueField,
    /// What it is made of.
    pub from: From,
}

impl EventFields {
    /// What a program knows the number of a system call by, if these are calls and it does.
    pub(crate) fn number_operand(&self) -> Option<Operand> {
        match self.fields.get(self.call.as_ref()?.place.field)? {
            Field::Argument(number) => {
                Some(Operand::Argument { number: *number, bytes: 8, signed: true })
            }
            _ => None,
        }
    }

    /// Its program.
    fn program(&self) -> Program {
        crate::tracer::Duty::new(Point::Entry, vec![0], &self.fields).program(0, None, None)
    }
}

/// What is known of an event's records.
#[derive(Debug)]
struct Known {
    /// Low half of the address that it is known by.
    address: u32,
    event: Arc<EventFields>,
    /// Of each field where its words begin, how many there are, and the bit of its failure.
    places: Vec<(usize, usize, u32)>,
    /// The word that says what failed.
    failed: Option<usize>,
    told: bool,
}

impl Known {
    fn new(address: u32, event: &Arc<EventFields>) -> Self {
        let program = event.program();
        let place = |wanted: &Field| {
            let mut all = program.places().enumerate();
            let (index, (field, below)) = all.find(|(_, (field, _))| field == wanted)?;
            let at = below.saturating_sub(COMMON_SIZE) / 8 - 1;
            Some((at, field.words(), u32::try_from(index).ok()?))
        };
        let places = event.fields.iter().map(|field| place(field).unwrap_or_default());
        Self {
            address,
            event: Arc::clone(event),
            places: places.collect(),
            failed: place(&Field::Failed).map(|(at, ..)| at),
            told: false,
        }
    }

    /// The words of a part, and the bit of its failure.
    fn words<'a>(&self, part: &Part, fields: &'a [u64]) -> (&'a [u64], u32) {
        let (at, words, bit) = self.places.get(part.field).copied().unwrap_or_default();
        (fields.get(at..at + words).unwrap_or_default(), bit)
    }
}

/// A record of an event.
struct Recorded<'a> {
    known: &'a Known,
    fields: &'a [u64],
    /// What could not be read.
    lost: u64,
    caller: u32,
    pid: u32,
}

impl Recorded<'_> {
    /// The words of a part, and whether they could not be read.
    fn words(&self, part: &Part) -> (&[u64], bool) {
        let (words, bit) = self.known.words(part, self.fields);
        (words, self.lost >> bit & 1 != 0)
    }

    /// The number that a part is, and whether it could not be read.
    fn number(&self, part: &Part) -> (u64, bool) {
        let (words, lost) = self.words(part);
        (part.number(words), lost)
    }
}

/// What the records of a program are.
#[derive(Debug)]
enum Which {
    /// All of one event.
    All(usize),
    /// Of single system calls, by their numbers, which `any` of them finds where all do; those of
    /// others were not asked for.
    Calls { any: usize, by_number: FxHashMap<u64, usize> },
}

/// The events that are traced.
#[derive(Debug, Default)]
pub(super) struct Events {
    /// By what their programs write.
    words_of: FxHashMap<u32, Which>,
    known: Vec<Known>,
    /// Words of one record.
    words: Vec<u64>,
}

impl Events {
    /// Adds those that are new, in a kernel that runs at `slide`. Of single system calls those that
    /// are not among these are no more.
    pub(super) fn add(&mut self, slide: u64, targets: &Targets) {
        let mut calls: FxHashMap<u32, Which> = FxHashMap::default();
        for EventTarget { address, word, event } in &targets.events {
            let low = address.wrapping_add(slide).wrapping_sub(Header::TOP_4_GIB);
            let Ok(address) = u32::try_from(low) else { continue };
            let same = |known: &Known| known.address == address && known.event == *event;
            let index = self.known.iter().position(same).unwrap_or_else(|| {
                self.known.push(Known::new(address, event));
                self.known.len() - 1
            });
            match &event.call {
                None => drop(self.words_of.insert(*word, Which::All(index))),
                Some(call) => {
                    let none = || Which::Calls { any: index, by_number: FxHashMap::default() };
                    if let Which::Calls { by_number, .. } = calls.entry(*word).or_insert_with(none)
                    {
                        by_number.insert(call.number.into(), index);
                    }
                }
            }
        }
        self.words_of.extend(calls);
    }

    /// No program writes for any of them any more.
    pub(super) fn forget_words(&mut self) {
        self.words_of.clear();
    }

    /// Whether no tracepoint tells an event.
    pub(super) fn is_in_place(&self, index: usize) -> bool {
        self.known.get(index).is_some_and(|known| known.event.in_place)
    }

    /// Whether none was ever traced.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// Whether the record of a program is one of an event, and of which; `None` for those that
    /// nobody has asked for.
    pub(super) fn find(&self, word: u32, fields: &[u64]) -> Option<Option<usize>> {
        Some(match self.words_of.get(&word)? {
            Which::All(index) => Some(*index),
            Which::Calls { any, by_number } => self.known.get(*any).and_then(|known| {
                let place = &known.event.call.as_ref()?.place;
                by_number.get(&place.number(known.words(place, fields).0)).copied()
            }),
        })
    }

    /// The places of words that may be addresses, in the fields of an event's records.
    pub(super) fn addresses(&self, index: usize) -> impl Iterator<Item = usize> {
        self.known.get(index).into_iter().flat_map(|known| {
            let place = |value: &EventValue| match &value.from {
                From::Same(part) if may_be_address(&part.shape) => {
                    known.places.get(part.field).filter(|(_, words, _)| *words == 1)
                }
                // Numbers, text, and what was never an address of the kernel's.
                _ => None,
            };
            known.event.values.iter().filter_map(place).map(|(at, ..)| *at)
        })
    }

    /// What the stream must be told before the first record of an event.
    pub(super) fn first(
        &mut self,
        kernel: &Kernel,
        index: usize,
    ) -> Option<(Symbol<'_>, ValuesFormat)> {
        let known = self.known.get_mut(index)?;
        if std::mem::replace(&mut known.told, true) {
            return None;
        }
        let address = Header::TOP_4_GIB | u64::from(known.address);
        let tracepoint = || kernel.btf().ok().and_then(|btf| btf.struct_size("tracepoint"));
        let size = if known.event.in_place { 8 } else { tracepoint().unwrap_or(0) };
        let values = known.event.values.iter().map(|value| value.shown.clone()).collect();
        let format = ValuesFormat {
            function: known.address,
            tracer: 0,
            of: ValuesOf::Event,
            values,
            print: known.event.print.clone(),
        };
        Some((Symbol::new(address, size, &known.event.name), format))
    }

    /// Adds the record of an event.
    pub(super) fn write(
        &mut self,
        index: usize,
        batch: &mut RecordBuffer,
        time: u64,
        record: &RawRecord,
        fields: &[u64],
    ) {
        let Some(known) = self.known.get(index) else { return };
        let lost = known.failed.and_then(|at| fields.get(at)).copied().unwrap_or(0);
        let &RawRecord { caller, pid, .. } = record;
        let recorded = Recorded { known, fields, lost, caller, pid };
        self.words.clear();
        let mut failed = 0;
        for (index, value) in known.event.values.iter().enumerate() {
            let lost = value.from.add(&value.shown.shape, &recorded, &mut self.words);
            failed |= u64::from(lost) << index;
        }
        let event = EventRecord::new(time, known.address, caller, pid);
        batch.push_event(event, failed, self.words.iter().copied());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::Shape;

    // A system call that is asked for no more, or never was, is no record; one that is asked for again
    // is told by what was told of it.
    #[test]
    fn system_calls_are_those_that_are_asked_for() {
        const WORD: u32 = 0x4000;
        let event = |number: Option<u32>| {
            let place = Part { field: 0, shape: Shape::Signed { bytes: 8 } };
            let call = number.map(|number| OneCall { number, place });
            let (fields, name) = (vec![Field::Argument(2)], format!("{number:?}"));
            Arc::new(EventFields {
                name,
                fields,
                values: Vec::new(),
                print: None,
                call,
                in_place: false,
            })
        };
        let targets = |all: &[(u32, Option<u32>)]| {
            let of = |&(word, number): &(u32, Option<u32>)| {
                let address = Header::TOP_4_GIB + 0x1000 + u64::from(number.unwrap_or(99));
                EventTarget { address, word, event: event(number) }
            };
            Targets { events: all.iter().map(of).collect(), ..Targets::default() }
        };
        let mut events = Events::default();
        events.add(0, &targets(&[(WORD, Some(1)), (WORD, Some(2)), (WORD + 1, None)]));
        let [one, two] = [1, 2].map(|number| events.find(WORD, &[number]).flatten());
        assert!(one.is_some() && two.is_some() && one != two);
        assert_eq!(events.find(WORD, &[3]), Some(None));
        assert!(events.find(WORD + 1, &[3]).flatten().is_some());
        assert_eq!(events.find(WORD + 2, &[1]), None);
        events.add(0, &targets(&[(WORD, Some(2))]));
        assert_eq!(events.find(WORD, &[1]), Some(None));
        assert_eq!(events.find(WORD, &[2]), Some(two));
        events.add(0, &targets(&[(WORD, Some(2)), (WORD, Some(1))]));
        assert_eq!(events.find(WORD, &[1]), Some(one));
        assert_eq!(events.known.len(), 3);
    }

    // A value that is made of the wrong words, or is said to be there when it could not be read, is a wrong trace.
    #[test]
    fn values_are_made_of_what_was_recorded() {
        let fields: Vec<_> = (0..4).map(Field::Argument).chain([Field::Failed]).collect();
        let part = |field| Part { field, shape: Shape::Unsigned { bytes: 8 } };
        let all = [
            From::Same(part(1)),
            From::Swapped(part(2)),
            From::SwitchState([part(0), part(1), part(2)]),
            From::Pointed(part(0), part(3), [70, 71]),
            From::Pointed(part(1), part(3), [70, 71]),
            From::Pointed(part(2), part(3), [70, 71]),
            From::Each(vec![part(0), part(3)]),
            From::Caller,
            From::Pid,
            From::Always(9),
        ];
        let shown = || ValueField { name: "it".into(), shape: Shape::Unsigned { bytes: 8 } };
        let event = EventFields {
            name: "test:event".into(),
            fields: fields.clone(),
            values: all.map(|from| EventValue { shown: shown(), from }).into(),
            print: None,
            call: None,
            in_place: false,
        };
        let event = Arc::new(event);
        let target = EventTarget { address: Header::TOP_4_GIB + 0x1000, word: 5, event };
        let mut events = Events::default();
        events.add(0, &Targets { events: vec![target], ..Targets::default() });
        let places = events.known[0].places.clone();
        let mut recorded = vec![0; fields.len()];
        for ((at, ..), word) in places.iter().zip([0, 1, 0x1234, 50]) {
            recorded[*at] = word;
        }
        let record = RawRecord { caller: 0x40, pid: 7, ..RawRecord::default() };
        let expected = [1, 0x3412, 0x20, 70, 71, 50, 0, 50, Header::TOP_4_GIB | 0x40, 7, 9];
        // Nothing failed; the last argument; the one that is behind it.
        for (lost, failed) in [(None, 0), (Some(3), 0b110_0000), (Some(0), 0b100_0100)] {
            let failed_at = events.known[0].failed.unwrap();
            recorded[failed_at] = lost.map_or(0, |field: usize| 1 << places[field].2);
            let mut batch = RecordBuffer::new();
            events.write(0, &mut batch, 3, &record, &recorded);
            let mut wanted = RecordBuffer::new();
            wanted.push_event(EventRecord::new(3, 0x1000, 0x40, 7), failed, expected);
            assert_eq!(batch.as_bytes(), wanted.as_bytes(), "{lost:?}");
        }
    }

    // A program that does not know the number would record every call.
    #[test]
    fn programs_know_the_number_of_a_call_where_it_is_an_argument() {
        let event = |fields, field| EventFields {
            name: String::new(),
            fields,
            values: Vec::new(),
            print: None,
            call: Some(OneCall { number: 1, place: Part { field, shape: Shape::Pointer } }),
            in_place: false,
        };
        let fields = vec![Field::Argument(2), Field::Stack];
        let number = Operand::Argument { number: 2, bytes: 8, signed: true };
        assert_eq!(event(fields.clone(), 0).number_operand(), Some(number));
        assert_eq!(event(fields.clone(), 1).number_operand(), None);
        assert_eq!(event(fields, 2).number_operand(), None);
    }
}
