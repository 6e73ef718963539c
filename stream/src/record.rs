//! Records and batches of them.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::context::Context;
use super::values::Values;
use super::wire::ALIGN;

/// The head of every record, of all kinds.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct RecordHead {
    /// Clock ticks.
    pub timestamp: U64,
    /// What the record is.
    pub kind: u8,
    /// Size of the whole record in units of 8 bytes.
    pub words: u8,
    /// Number of the tracer that the record is of; zero is the first.
    pub tracer: u8,
    /// What the record has beside its fixed fields: [`RecordHead::SP`], [`RecordHead::VALUE`],
    /// [`RecordHead::VALUES`], [`RecordHead::CONTEXT`], [`RecordHead::DURATION`].
    pub flags: u8,
    /// Process id of the task that ran.
    pub pid: U32,
}

impl RecordHead {
    /// Flag: the stack pointer follows (always so in returns and tails).
    pub const SP: u8 = 1;
    /// Flag: the value that is returned follows.
    pub const VALUE: u8 = 2;
    /// Flag of entries and events: values follow, up to the end of the record.
    pub const VALUES: u8 = 4;
    /// Flag: the last word of the record is a [`Context`].
    pub const CONTEXT: u8 = 32;
    /// Flag of a return or a tail jump: how long the call took follows, in ticks. Such a record is all there is of
    /// its call.
    pub const DURATION: u8 = 64;
    /// Flag of a tail jump: to a function that is not traced and calls nothing, so that nothing else
    /// is heard of this call.
    pub const LAST: u8 = 8;
    /// Flag of a return: of a function that is not traced. It ends the calls that jumped to it, if
    /// there are such, and means nothing else.
    pub const AID: u8 = 16;
}

macro_rules! wire_record {
    ($(#[$meta:meta])* $name:ident: $kind:literal, $words:literal { $($fields:tt)* }) => {
        $(#[$meta])*
        ///
        /// The wire form itself, so that it is written and read without conversion.
        #[derive(
            Clone,
            Copy,
            Debug,
            PartialEq,
            Eq,
            FromBytes,
            IntoBytes,
            KnownLayout,
            Immutable,
            Unaligned,
        )]
        #[repr(C)]
        pub struct $name { $($fields)* }

        impl $name {
            /// Number of this kind.
            pub const KIND: u8 = $kind;
            /// Size in units of 8 bytes.
            pub const WORDS: u8 = $words;

            /// The same for another tracer than the first.
            #[must_use]
            pub fn of_tracer(mut self, tracer: u8) -> Self {
                self.head_mut().tracer = tracer;
                self
            }
        }

        impl sealed::Sealed for $name {}
        impl WireRecord for $name {}

        // The writer counts on it.
        const _: () = assert!(size_of::<$name>() == $words as usize * ALIGN);
    };
}

mod sealed {
    pub trait Sealed {}
}

/// A record in its wire form: what a [`RecordBuffer`](super::RecordBuffer) takes.
pub trait WireRecord: IntoBytes + Immutable + sealed::Sealed {}

wire_record! {
    /// A function was entered.
    EntryRecord: 1, 3 {
        /// Common part.
        pub head: RecordHead,
        /// Entry address of the function, less the stream's address base.
        pub function: U32,
        /// Address that the function returns to, less the stream's address base; zero when not
        /// known.
        pub caller: U32,
    }
}

wire_record! {
    /// A tracepoint was come by.
    EventRecord: 4, 3 {
        /// Common part.
        pub head: RecordHead,
        /// Address of the tracepoint, less the stream's address base.
        pub tracepoint: U32,
        /// Address behind the place where it was, less the stream's address base; zero when not
        /// known.
        pub caller: U32,
    }
}

wire_record! {
    /// A function was entered, and its stack pointer is known: it can be paired with its return.
    FrameEntryRecord: 1, 4 {
        /// What every entry has.
        pub entry: EntryRecord,
        /// The stack pointer at the function's entry.
        pub sp: U64,
    }
}

wire_record! {
    /// A function returned.
    ReturnRecord: 2, 4 {
        /// Common part.
        pub head: RecordHead,
        /// Entry address of the function, less the stream's address base.
        pub function: U32,
        /// Address that it returns to, less the stream's address base; zero when not known.
        pub caller: U32,
        /// The stack pointer as it was at the function's entry.
        pub sp: U64,
    }
}

wire_record! {
    /// A function returned a value.
    ReturnValueRecord: 2, 5 {
        /// What every return has.
        pub ret: ReturnRecord,
        /// The value: what the register for it held.
        pub value: U64,
    }
}

wire_record! {
    /// A function was left by a jump to another function, which returns in its place.
    TailRecord: 3, 4 {
        /// Common part.
        pub head: RecordHead,
        /// Entry address of the function, less the stream's address base.
        pub function: U32,
        /// Entry address of the function jumped to, less the stream's address base; zero when
        /// not known.
        pub target: U32,
        /// The stack pointer as it was at the function's entry.
        pub sp: U64,
    }
}

fn head(timestamp: u64, kind: u8, words: u8, flags: u8, pid: u32) -> RecordHead {
    RecordHead { timestamp: timestamp.into(), kind, words, tracer: 0, flags, pid: pid.into() }
}

impl EntryRecord {
    /// A record. `function` is the runtime address of the function's entry (the key of the
    /// dictionary) and `caller` the return address, both as the low 32 bits that
    /// [`Header::offset`](super::Header::offset) gives.
    #[must_use]
    pub fn new(timestamp: u64, function: u32, caller: u32, pid: u32) -> Self {
        let head = head(timestamp, Self::KIND, Self::WORDS, 0, pid);
        Self { head, function: function.into(), caller: caller.into() }
    }

    /// The record of an entry whose stack pointer is known.
    #[must_use]
    pub fn with_sp(mut self, sp: u64) -> FrameEntryRecord {
        self.head.words = FrameEntryRecord::WORDS;
        self.head.flags |= RecordHead::SP;
        FrameEntryRecord { entry: self, sp: sp.into() }
    }

    /// Whether it has nothing but what every entry has.
    #[inline]
    fn is_plain(&self) -> bool {
        let head = &self.head;
        let entry = head.kind == Self::KIND && head.words == Self::WORDS;
        entry && head.flags & (RecordHead::SP | RecordHead::VALUES | RecordHead::CONTEXT) == 0
    }

    /// Clock ticks.
    #[must_use]
    pub fn timestamp(&self) -> u64 {
        self.head.timestamp.get()
    }

    /// Process id of the task that ran.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.head.pid.get()
    }

    fn head_mut(&mut self) -> &mut RecordHead {
        &mut self.head
    }
}

impl EventRecord {
    /// A record. Addresses are as those of [`EntryRecord::new`]; that of the tracepoint is the key
    /// of its name in the dictionary.
    #[must_use]
    pub fn new(timestamp: u64, tracepoint: u32, caller: u32, pid: u32) -> Self {
        let head = head(timestamp, Self::KIND, Self::WORDS, 0, pid);
        Self { head, tracepoint: tracepoint.into(), caller: caller.into() }
    }

    fn head_mut(&mut self) -> &mut RecordHead {
        &mut self.head
    }
}

impl FrameEntryRecord {
    fn head_mut(&mut self) -> &mut RecordHead {
        &mut self.entry.head
    }
}

impl ReturnRecord {
    /// A record. Addresses are as those of [`EntryRecord::new`]; `sp` is that of the entry.
    #[must_use]
    pub fn new(timestamp: u64, function: u32, caller: u32, pid: u32, sp: u64) -> Self {
        let head = head(timestamp, Self::KIND, Self::WORDS, RecordHead::SP, pid);
        Self { head, function: function.into(), caller: caller.into(), sp: sp.into() }
    }

    /// The same of a function that is not traced: [`RecordHead::AID`].
    #[must_use]
    pub fn of_aid(mut self) -> Self {
        self.head.flags |= RecordHead::AID;
        self
    }

    /// The record of a return whose value is known.
    #[must_use]
    pub fn with_value(mut self, value: u64) -> ReturnValueRecord {
        self.head.words = ReturnValueRecord::WORDS;
        self.head.flags |= RecordHead::VALUE;
        ReturnValueRecord { ret: self, value: value.into() }
    }

    fn head_mut(&mut self) -> &mut RecordHead {
        &mut self.head
    }
}

impl ReturnValueRecord {
    fn head_mut(&mut self) -> &mut RecordHead {
        &mut self.ret.head
    }
}

impl TailRecord {
    /// A record. Addresses are as those of [`EntryRecord::new`]; `sp` is that of the entry.
    #[must_use]
    pub fn new(timestamp: u64, function: u32, target: u32, pid: u32, sp: u64) -> Self {
        let head = head(timestamp, Self::KIND, Self::WORDS, RecordHead::SP, pid);
        Self { head, function: function.into(), target: target.into(), sp: sp.into() }
    }

    /// The same where nothing else is heard of the call: [`RecordHead::LAST`].
    #[must_use]
    pub fn and_last(mut self) -> Self {
        self.head.flags |= RecordHead::LAST;
        self
    }

    fn head_mut(&mut self) -> &mut RecordHead {
        &mut self.head
    }
}

/// A record of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record<'a> {
    /// A function was entered.
    Entry {
        /// What every entry has.
        entry: &'a EntryRecord,
        /// The stack pointer at the function's entry, where it was recorded.
        sp: Option<u64>,
        /// The values of arguments, where they were recorded.
        values: Option<Values<'a>>,
        /// The state of the CPU, where it was recorded.
        context: Option<Context>,
    },
    /// A function returned.
    Return {
        /// What every return has.
        ret: &'a ReturnRecord,
        /// The value, where it was recorded.
        value: Option<u64>,
        /// How many ticks the call took, where it was recorded: there is no other record of it then.
        duration: Option<u64>,
        /// The state of the CPU, where it was recorded.
        context: Option<Context>,
    },
    /// A function was left by a jump to another one.
    Tail {
        /// What every tail jump has.
        tail: &'a TailRecord,
        /// How many ticks the call took up to this, where it was recorded: there is no other record of it then.
        duration: Option<u64>,
        /// The state of the CPU, where it was recorded.
        context: Option<Context>,
    },
    /// A tracepoint was come by.
    Event {
        /// What every event has.
        event: &'a EventRecord,
        /// The values of its fields, where they were recorded.
        values: Option<Values<'a>>,
        /// The state of the CPU, where it was recorded.
        context: Option<Context>,
    },
    /// A kind that this version does not know; the bytes are the whole record.
    Other(&'a RecordHead, &'a [u8]),
}

impl<'a> Record<'a> {
    /// The part common to all kinds.
    #[must_use]
    pub fn head(&self) -> &'a RecordHead {
        match self {
            Self::Entry { entry, .. } => &entry.head,
            Self::Return { ret, .. } => &ret.head,
            Self::Tail { tail, .. } => &tail.head,
            Self::Event { event, .. } => &event.head,
            Self::Other(head, _) => head,
        }
    }

    /// The function that was entered or left, or the tracepoint, less the stream's address base;
    /// `None` for unknown kinds.
    #[must_use]
    pub fn function(&self) -> Option<u32> {
        match self {
            Self::Entry { entry, .. } => Some(entry.function.get()),
            Self::Return { ret, .. } => Some(ret.function.get()),
            Self::Tail { tail, .. } => Some(tail.function.get()),
            Self::Event { event, .. } => Some(event.tracepoint.get()),
            Self::Other(..) => None,
        }
    }

    /// The state of the CPU, where it was recorded.
    #[must_use]
    pub fn context(&self) -> Option<Context> {
        match self {
            Self::Entry { context, .. }
            | Self::Return { context, .. }
            | Self::Tail { context, .. }
            | Self::Event { context, .. } => *context,
            Self::Other(..) => None,
        }
    }

    /// Looks into a whole record; `None` when it is shorter than its kind and flags say.
    #[inline]
    fn of(head: &'a RecordHead, bytes: &'a [u8]) -> Option<Self> {
        // Behind all else, so that readers who do not know it see a record that has grown.
        let known = (EntryRecord::KIND..=EventRecord::KIND).contains(&head.kind);
        let (context, bytes) = match head.flags & RecordHead::CONTEXT {
            0 => (None, bytes),
            _ if !known => (None, bytes),
            _ => {
                let (rest, word) = U64::ref_from_suffix(bytes).ok()?;
                (Some(Context::of(word.get())), rest)
            }
        };
        // A known kind may grow at its end; it never shrinks.
        Some(match head.kind {
            EntryRecord::KIND => {
                let (entry, rest) = EntryRecord::ref_from_prefix(bytes).ok()?;
                let (sp, rest) = optional(head, RecordHead::SP, rest)?;
                let values = match head.flags & RecordHead::VALUES {
                    0 => None,
                    _ => Some(values(rest)?),
                };
                Self::Entry { entry, sp, values, context }
            }
            ReturnRecord::KIND => {
                let (ret, rest) = ReturnRecord::ref_from_prefix(bytes).ok()?;
                let (value, rest) = optional(head, RecordHead::VALUE, rest)?;
                let (duration, _) = optional(head, RecordHead::DURATION, rest)?;
                Self::Return { ret, value, duration, context }
            }
            TailRecord::KIND => {
                let (tail, rest) = TailRecord::ref_from_prefix(bytes).ok()?;
                let (duration, _) = optional(head, RecordHead::DURATION, rest)?;
                Self::Tail { tail, duration, context }
            }
            EventRecord::KIND => {
                let (event, rest) = EventRecord::ref_from_prefix(bytes).ok()?;
                let values = match head.flags & RecordHead::VALUES {
                    0 => None,
                    _ => Some(values(rest)?),
                };
                Self::Event { event, values, context }
            }
            _ => Self::Other(head, bytes),
        })
    }
}

/// The number that follows if the flag is set, and what is behind it; `None` when it is missing.
#[inline]
fn optional<'a>(head: &RecordHead, flag: u8, rest: &'a [u8]) -> Option<(Option<u64>, &'a [u8])> {
    if head.flags & flag == 0 {
        return Some((None, rest));
    }
    let (number, rest) = U64::ref_from_prefix(rest).ok()?;
    Some((Some(number.get()), rest))
}

/// The values that are all of the rest; `None` when there is not even what failed.
#[inline(never)]
fn values(rest: &[u8]) -> Option<Values<'_>> {
    let (failed, words) = U64::ref_from_prefix(rest).ok()?;
    Some(Values { failed: failed.get(), words: <[U64]>::ref_from_bytes(words).ok()? })
}

/// A record that has no more than most have: of an entry, a return or a tail jump.
#[derive(Clone, Copy, Debug)]
pub struct Plain<'a> {
    /// The part common to all kinds.
    pub head: &'a RecordHead,
    /// The function, less the stream's address base.
    pub function: u32,
    /// The caller, or the target of a jump.
    pub other: u32,
    /// The stack pointer: only entries may have none.
    pub sp: Option<u64>,
}

/// Records of one vCPU, in their order.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// The vCPU.
    pub vcpu: u32,
    /// Records of this vCPU before this batch, counted from the start of the trace.
    pub first: u64,
    /// Records in this batch.
    pub count: u32,
    bytes: &'a [u8],
}

impl<'a> Batch<'a> {
    pub(super) fn new(vcpu: u32, first: u64, count: u32, bytes: &'a [u8]) -> Self {
        Self { vcpu, first, count, bytes }
    }

    /// Whether the bytes are exactly `count` well-formed records.
    pub(super) fn is_well_formed(&self) -> bool {
        if self.entries().is_some_and(|entries| entries.len() as u64 == u64::from(self.count)) {
            return true;
        }
        let mut records = self.records();
        let mut walked = 0_u64;
        while records.next_plain().is_some() || records.next().is_some() {
            walked += 1;
        }
        walked == u64::from(self.count) && records.rest.is_empty()
    }

    /// The records one by one.
    #[must_use]
    pub fn records(&self) -> Records<'a> {
        Records { rest: self.bytes }
    }

    /// The records with the bytes of each, for those who pass them on.
    pub fn whole_records(&self) -> impl Iterator<Item = (Record<'a>, &'a [u8])> + use<'a> {
        let mut records = self.records();
        std::iter::from_fn(move || records.next_whole())
    }

    /// The records as one slice, when all of them are plain entries.
    #[must_use]
    pub fn entries(&self) -> Option<&'a [EntryRecord]> {
        let entries = <[EntryRecord]>::ref_from_bytes(self.bytes).ok()?;
        entries.iter().all(EntryRecord::is_plain).then_some(entries)
    }

    /// The times of the records, in clock ticks, whatever else is in them; ends early where a
    /// record has no room for its head.
    pub fn times(&self) -> impl Iterator<Item = u64> + use<'a> {
        let mut rest = self.bytes;
        std::iter::from_fn(move || {
            let (head, _) = RecordHead::ref_from_prefix(rest).ok()?;
            let size = usize::from(head.words) * ALIGN;
            rest = rest.get(size.max(size_of::<RecordHead>())..)?;
            Some(head.timestamp.get())
        })
    }

    /// The records as they are on the wire.
    #[must_use]
    pub fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

/// Iterator over the records of a [`Batch`]; ends early where a record is malformed.
#[derive(Clone, Debug)]
pub struct Records<'a> {
    rest: &'a [u8],
}

impl<'a> Records<'a> {
    /// The next record if it has no more than most have. If not, [`Iterator::next`] gives it. For who
    /// reads millions.
    #[inline]
    pub fn next_plain(&mut self) -> Option<Plain<'a>> {
        const MORE: u8 =
            RecordHead::VALUE | RecordHead::VALUES | RecordHead::CONTEXT | RecordHead::DURATION;
        // The other kinds have the same in these places.
        let (EntryRecord { head, function, caller }, rest) =
            EntryRecord::ref_from_prefix(self.rest).ok()?;
        let known = (EntryRecord::KIND..=TailRecord::KIND).contains(&head.kind);
        if !known || head.flags & MORE != 0 {
            return None;
        }
        let (sp, rest) = match (head.words, head.flags & RecordHead::SP) {
            (FrameEntryRecord::WORDS, RecordHead::SP) => {
                let (sp, rest) = U64::ref_from_prefix(rest).ok()?;
                (Some(sp.get()), rest)
            }
            (EntryRecord::WORDS, 0) if head.kind == EntryRecord::KIND => (None, rest),
            _ => return None,
        };
        self.rest = rest;
        Some(Plain { head, function: function.get(), other: caller.get(), sp })
    }

    #[inline]
    fn next_whole(&mut self) -> Option<(Record<'a>, &'a [u8])> {
        // Most traces have no others.
        if let Ok((entry, rest)) = EntryRecord::ref_from_prefix(self.rest)
            && entry.is_plain()
        {
            self.rest = rest;
            let record = Record::Entry { entry, sp: None, values: None, context: None };
            return Some((record, entry.as_bytes()));
        }
        self.next_other()
    }

    #[inline]
    fn next_other(&mut self) -> Option<(Record<'a>, &'a [u8])> {
        let (head, _) = RecordHead::ref_from_prefix(self.rest).ok()?;
        let size = usize::from(head.words) * ALIGN;
        if size < size_of::<RecordHead>() {
            return None;
        }
        let (bytes, rest) = self.rest.split_at_checked(size)?;
        let record = Record::of(head, bytes)?;
        self.rest = rest;
        Some((record, bytes))
    }
}

impl<'a> Iterator for Records<'a> {
    type Item = Record<'a>;

    #[inline]
    fn next(&mut self) -> Option<Record<'a>> {
        self.next_whole().map(|(record, _)| record)
    }
}
