//! What is known of the part of a stream that has been read but not yet shown.

use std::collections::VecDeque;

use super::names::{Symbols, Tasks, Tracers};
use super::select::Selection;
use super::values::Formats;
use crate::stream::{
    Context, DictionaryFull, Frame, Header, Loss, Mark, Record, RecordHead, ValuesOf,
};

/// An item that waits until it is shown.
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
    pub(super) timestamp: u64,
    pub(super) function: u32,
    /// Caller or target.
    pub(super) other: u32,
    pub(super) pid: u32,
    /// Where the task's name is.
    pub(super) slot: u32,
    pub(super) tracer: u8,
    pub(super) kind: Kind,
    pub(super) has_sp: bool,
    pub(super) has_value: bool,
    /// What its values are is known; so they wait, too.
    pub(super) has_format: bool,
    pub(super) context: Option<Context>,
}

// There may be a million of them.
const _: () = assert!(size_of::<Held>() == 32);

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

    /// How many of stack pointer, value and duration wait beside it.
    pub(super) fn numbers(&self) -> usize {
        usize::from(self.has_sp) + usize::from(self.has_value) + usize::from(self.kind.is_whole())
    }
}

/// Names and formats so far, and what of records that wait does not fit into a [`Held`].
#[derive(Debug, Default)]
pub(super) struct Ahead {
    pub(super) symbols: Symbols,
    pub(super) tasks: Tasks,
    pub(super) tracers: Tracers,
    pub(super) selection: Selection,
    pub(super) formats: Formats,
    /// Of the records that wait, by queue and in their order, what they have of these: the stack
    /// pointer, the returned value, the duration, and a format's number, what failed, and words.
    beside: Vec<VecDeque<u64>>,
    /// Words of values in there.
    words: usize,
}

impl Ahead {
    /// One that has read nothing yet, and wants the same.
    pub(super) fn again(&self) -> Self {
        Self { selection: self.selection.again(), ..Self::default() }
    }

    /// Words of values that wait with their records.
    pub(super) fn words(&self) -> usize {
        self.words
    }

    /// Takes in what a frame says of those that follow.
    ///
    /// # Errors
    /// When there are too many names.
    pub(super) fn learn(&mut self, frame: &Frame<'_>) -> Result<(), DictionaryFull> {
        match frame {
            Frame::Header(header) => {
                let vcpus = usize::try_from(header.vcpus).unwrap_or(0);
                self.beside = vec![VecDeque::new(); vcpus];
            }
            Frame::Symbols(list) => {
                self.selection.renamed();
                self.symbols.extend(list.clone())?;
            }
            Frame::Tasks(list) => list.clone().for_each(|task| self.tasks.insert(&task)),
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

    /// Takes what waits beside a record, which is the next of its queue.
    #[inline]
    pub(super) fn take(&mut self, queue: usize, held: &Held, into: &mut Vec<u64>) {
        let Some(beside) = self.beside.get_mut(queue) else { return };
        for _ in 0..held.numbers() {
            into.extend(beside.pop_front());
        }
        if held.has_format {
            let count = beside.front().map_or(0, |head| usize::from(head.to_le_bytes()[0]));
            into.extend(beside.drain(..(count + 2).min(beside.len())));
            self.words = self.words.saturating_sub(count);
        }
    }
}
