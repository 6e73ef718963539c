//! Records and batches of them.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::wire::ALIGN;

/// What every record begins with, of whatever kind.
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
    /// Reserved for the context (interrupts off, ...): zero means not known.
    pub context: U16,
    /// Process id of the task that ran.
    pub pid: U32,
}

/// A function was entered.
///
/// The wire form itself, so that a batch is written and read without conversion.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct EntryRecord {
    /// Common part.
    pub head: RecordHead,
    /// Entry address of the function, less the stream's address base.
    pub function: U32,
    /// Address that the function returns to, less the stream's address base; zero when not
    /// known.
    pub caller: U32,
}

impl EntryRecord {
    /// Number of this kind.
    pub const KIND: u8 = 1;
    /// Size in units of 8 bytes.
    pub const WORDS: u8 = 3;

    /// A record. `function` is the runtime address of the function's entry (the key of the
    /// dictionary) and `caller` the return address, both as the low 32 bits that
    /// [`Header::offset`](super::Header::offset) gives.
    #[must_use]
    pub fn new(timestamp: u64, function: u32, caller: u32, pid: u32) -> Self {
        Self {
            head: RecordHead {
                timestamp: timestamp.into(),
                kind: Self::KIND,
                words: Self::WORDS,
                context: 0.into(),
                pid: pid.into(),
            },
            function: function.into(),
            caller: caller.into(),
        }
    }

    /// The same on account of this tracer.
    #[must_use]
    pub fn by(mut self, tracer: u8) -> Self {
        self.head.context = u16::from(tracer).into();
        self
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
}

/// A record of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record<'a> {
    /// A function was entered.
    Entry(&'a EntryRecord),
    /// A kind that this version does not know; the bytes are the whole record.
    Other(&'a RecordHead, &'a [u8]),
}

impl Record<'_> {
    /// The part common to all kinds.
    #[must_use]
    pub fn head(&self) -> &RecordHead {
        match self {
            Self::Entry(entry) => &entry.head,
            Self::Other(head, _) => head,
        }
    }
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
        let walked = records.by_ref().fold(0u64, |count, _| count + 1);
        walked == u64::from(self.count) && records.rest.is_empty()
    }

    /// The records one by one.
    #[must_use]
    pub fn records(&self) -> Records<'a> {
        Records { rest: self.bytes }
    }

    /// The records as one slice, when all of them are entries.
    #[must_use]
    pub fn entries(&self) -> Option<&'a [EntryRecord]> {
        let entries = <[EntryRecord]>::ref_from_bytes(self.bytes).ok()?;
        let uniform = entries.iter().all(|entry| {
            entry.head.kind == EntryRecord::KIND && entry.head.words == EntryRecord::WORDS
        });
        uniform.then_some(entries)
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

impl<'a> Iterator for Records<'a> {
    type Item = Record<'a>;

    fn next(&mut self) -> Option<Record<'a>> {
        let (head, _) = RecordHead::ref_from_prefix(self.rest).ok()?;
        let size = usize::from(head.words) * ALIGN;
        if size < size_of::<RecordHead>() {
            return None;
        }
        let (record, rest) = self.rest.split_at_checked(size)?;
        // A known kind may grow at its end; it never shrinks.
        let record = if head.kind == EntryRecord::KIND {
            Record::Entry(EntryRecord::ref_from_prefix(record).ok()?.0)
        } else {
            Record::Other(head, record)
        };
        self.rest = rest;
        Some(record)
    }
}
