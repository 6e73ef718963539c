//! What is known of the part of a stream that has been read but not yet shown.

use super::names::{LATER, Symbols, Tracers};
use super::select::Selection;
use super::values::Formats;
use crate::stream::{
    Context, DictionaryFull, Frame, Header, Plain, Record, RecordHead, ReturnRecord, TailRecord,
    ValuesOf,
};

/// A record that waits. Most of all that waits is this, so it is small: what only some have waits
/// beside. It is made of whole words: a processor that copies parts of them waits for it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Held {
    pub(super) timestamp: u64,
    /// The stack pointer, if there is one.
    pub(super) sp: u64,
    pub(super) function: u32,
    /// Caller or target.
    pub(super) other: u32,
    /// Where their names are: see [`Symbols::index`]; [`LATER`] where nobody has looked yet.
    pub(super) function_index: u32,
    pub(super) other_index: u32,
    pub(super) pid: u32,
    /// Where the task's name is: who shows the record knows that.
    pub(super) slot: u32,
    /// What it is and has.
    of: u64,
}

// There may be a million of them.
const _: () = assert!(size_of::<Held>() == 48);

/// What a [`Held`] is and has.
#[derive(Clone, Copy, Debug)]
struct Of {
    tracer: u8,
    kind: Kind,
    has_sp: bool,
    has_value: bool,
    context: Option<Context>,
}

impl Of {
    const SP: u8 = 1;
    const VALUE: u8 = 2;
    const FORMAT: u8 = 4;
    const CONTEXT: u8 = 8;

    #[inline]
    fn packed(self) -> u64 {
        let Context { flags, depths } = self.context.unwrap_or_default();
        let flag = |flag: u8, there: bool| if there { flag } else { 0 };
        let has = flag(Self::SP, self.has_sp)
            | flag(Self::VALUE, self.has_value)
            | flag(Self::CONTEXT, self.context.is_some());
        u64::from_le_bytes([self.tracer, self.kind as u8, has, flags, depths, 0, 0, 0])
    }
}

impl Held {
    #[inline]
    fn parts(&self) -> [u8; 8] {
        self.of.to_le_bytes()
    }

    #[inline]
    pub(super) fn tracer(&self) -> u8 {
        self.parts()[0]
    }

    #[inline]
    pub(super) fn kind(&self) -> Kind {
        Kind::ALL.get(usize::from(self.parts()[1])).copied().unwrap_or(Kind::Event)
    }

    #[inline]
    fn has(&self, what: u8) -> bool {
        self.parts()[2] & what != 0
    }

    #[inline]
    pub(super) fn has_sp(&self) -> bool {
        self.has(Of::SP)
    }

    #[inline]
    pub(super) fn has_value(&self) -> bool {
        self.has(Of::VALUE)
    }

    /// What its values are is known; so they wait, too.
    #[inline]
    pub(super) fn has_format(&self) -> bool {
        self.has(Of::FORMAT)
    }

    #[inline]
    pub(super) fn context(&self) -> Option<Context> {
        let [.., flags, depths, _, _, _] = self.parts();
        self.has(Of::CONTEXT).then_some(Context { flags, depths })
    }

    /// Whether something waits beside it.
    #[inline]
    pub(super) fn has_more(&self) -> bool {
        self.has(Of::VALUE | Of::FORMAT) || self.kind().is_whole()
    }
}

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
    const ALL: [Self; 8] = [
        Self::Entry,
        Self::Return,
        Self::Aid,
        Self::Tail,
        Self::Last,
        Self::Whole,
        Self::WholeTail,
        Self::Event,
    ];

    /// Whether what is beside the function in a record is a place with a name that is shown.
    fn has_other(self) -> bool {
        !matches!(self, Self::Return | Self::Aid | Self::Whole)
    }

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
        let has_sp = record.sp.is_some();
        let of = Of { tracer: head.tracer, kind, has_sp, has_value: false, context: None };
        Self {
            timestamp: head.timestamp.get(),
            sp: record.sp.unwrap_or(0),
            function: record.function,
            other: record.other,
            function_index: LATER,
            other_index: LATER,
            pid: head.pid.get(),
            slot: 0,
            of: of.packed(),
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
        let (has_sp, has_value) = (sp.is_some(), value.is_some());
        let of = Of { tracer: head.tracer, kind, has_sp, has_value, context: record.context() };
        let held = Self {
            timestamp: head.timestamp.get(),
            sp: sp.unwrap_or(0),
            function: function.get(),
            other: other.get(),
            function_index: LATER,
            other_index: LATER,
            pid: head.pid.get(),
            slot: 0,
            of: of.packed(),
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

    /// Looks up the names of a record, for who shows it with the same names.
    #[inline]
    pub(super) fn look_up(&mut self, header: &Header, held: &mut Held) {
        held.function_index = self.symbols.index(header, held.function);
        if held.other != 0 && held.kind().has_other() {
            held.other_index = self.symbols.index(header, held.other);
        }
    }

    #[inline]
    fn wants(&mut self, header: &Header, held: &Held) -> bool {
        self.selection.wants_tracer(held.tracer())
            && (held.has_sp()
                || self.selection.wants_plain(&mut self.symbols, header, held.function))
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
        if held.has_more() {
            beside.extend(numbers.into_iter().flatten());
        }
        let words = if self.formats.is_empty() { None } else { self.hold_values(record, beside) };
        if words.is_some() {
            held.of |= u64::from(Of::FORMAT) << 16;
        }
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
