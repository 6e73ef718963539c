//! What is known of the part of a stream that has been read but not yet shown.

use super::names::{Symbols, Tracers};
use super::select::Selection;
use super::values::Formats;
use crate::stream::{
    Context, DictionaryFull, Frame, Header, Plain, Record, RecordHead, ReturnRecord, TailRecord,
    ValuesOf,
};

/// A record that waits. Most of all that waits is this, so it is small: what only some have waits
/// beside.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    pub(super) timestamp: u64,
    pub(super) function: u32,
    /// Caller or target.
    pub(super) other: u32,
    pub(super) pid: u32,
    /// Where the task's name is: who shows the record knows that.
    pub(super) slot: u32,
    /// The stack pointer, if there is one.
    pub(super) sp: u64,
    pub(super) tracer: u8,
    pub(super) kind: Kind,
    pub(super) has_sp: bool,
    pub(super) has_value: bool,
    /// What its values are is known; so they wait, too.
    pub(super) has_format: bool,
    pub(super) context: Option<Context>,
}

// There may be a million of them.
const _: () = assert!(size_of::<Held>() == 40);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
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
    pub(super) fn is_whole(self) -> bool {
        matches!(self, Self::Whole | Self::WholeTail)
    }
}

impl Held {
    #[inline]
    fn plain(record: &Plain<'_>) -> Self {
        let head = record.head;
        let kind = match head.kind {
            ReturnRecord::KIND if head.flags & RecordHead::AID != 0 => Kind::Aid,
            ReturnRecord::KIND => Kind::Return,
            TailRecord::KIND if head.flags & RecordHead::LAST != 0 => Kind::Last,
            TailRecord::KIND => Kind::Tail,
            _ => Kind::Entry,
        };
        Self {
            timestamp: head.timestamp.get(),
            function: record.function,
            other: record.other,
            pid: head.pid.get(),
            slot: 0,
            sp: record.sp.unwrap_or(0),
            tracer: head.tracer,
            kind,
            has_sp: record.sp.is_some(),
            has_value: false,
            has_format: false,
            context: None,
        }
    }

    /// With value and duration; `None` for records of unknown kinds.
    #[inline]
    fn of(record: &Record<'_>) -> Option<(Self, [Option<u64>; 2])> {
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
        let held = Self {
            timestamp: head.timestamp.get(),
            function: function.get(),
            other: other.get(),
            pid: head.pid.get(),
            slot: 0,
            sp: sp.unwrap_or(0),
            tracer: head.tracer,
            kind,
            has_sp: sp.is_some(),
            has_value: value.is_some(),
            has_format: false,
            context: record.context(),
        };
        Some((held, [value, took]))
    }
}

/// Names and formats so far.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    pub(super) symbols: Symbols,
    pub(super) tracers: Tracers,
    pub(super) selection: Selection,
    pub(super) formats: Formats,
}

impl Ahead {
    /// One that has read nothing yet, and wants the same.
    pub(super) fn again(&self) -> Self {
        Self { selection: self.selection.again(), ..Self::default() }
    }

    /// Takes in what a frame says of those that follow.
    ///
    /// # Errors
    /// When there are too many names.
    pub(super) fn learn(&mut self, frame: &Frame<'_>) -> Result<(), DictionaryFull> {
        match frame {
            Frame::Symbols(list) => {
                self.selection.renamed();
                self.symbols.extend(list.clone())?;
            }
            Frame::Tracers(list) => list.clone().for_each(|tracer| {
                tracer.with_text(|tracer| {
                    self.tracers.insert(tracer);
                    self.selection.learn(tracer);
                });
            }),
            Frame::Values(list) => list.clone().for_each(|values| self.formats.insert(&values)),
            _ => {}
        }
        Ok(())
    }

    /// What of a record that has no more than most waits for its turn, if it is wanted.
    #[inline]
    pub(super) fn hold_plain(&mut self, header: &Header, record: &Plain<'_>) -> Option<Held> {
        let held = Held::plain(record);
        self.wants(header, &held).then_some(held)
    }

    #[inline]
    fn wants(&mut self, header: &Header, held: &Held) -> bool {
        self.selection.wants_tracer(held.tracer)
            && (held.has_sp || self.selection.wants_plain(&mut self.symbols, header, held.function))
    }

    /// What of a record waits for its turn, if it is wanted; unknown kinds are counted. `beside`
    /// takes what it has of these: the returned value, the duration, and a format's number, what
    /// failed, and words. Also how many such words there are.
    #[inline]
    pub(super) fn hold(
        &mut self,
        header: &Header,
        record: &Record<'_>,
        unknown: &mut u64,
        beside: &mut impl Extend<u64>,
    ) -> Option<(Held, usize)> {
        let Some((mut held, numbers)) = Held::of(record) else {
            *unknown += 1;
            return None;
        };
        if !self.wants(header, &held) {
            return None;
        }
        if held.has_value || held.kind.is_whole() {
            beside.extend(numbers.into_iter().flatten());
        }
        let words = if self.formats.is_empty() { None } else { self.hold_values(record, beside) };
        held.has_format = words.is_some();
        Some((held, words.unwrap_or(0)))
    }

    /// Keeps the values of a record and what they are, if there are any and that is known: then,
    /// how many words.
    #[inline(never)]
    fn hold_values(&mut self, record: &Record<'_>, beside: &mut impl Extend<u64>) -> Option<usize> {
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
            _ => return None,
        };
        let (format, needed) = self.formats.find(function.get(), record.head().tracer, of)?;
        let words = &words[..words.len().min(needed)];
        // A record has fewer than 256.
        beside.extend([u64::from(format) << 8 | words.len() as u64, failed]);
        beside.extend(words.iter().map(|word| word.get()));
        Some(words.len())
    }
}
