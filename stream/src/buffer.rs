//! Buffers records for a writer.

use std::mem::offset_of;

use zerocopy::IntoBytes;

use super::context::Context;
use super::record::{
    EntryRecord, EventRecord, FrameEntryRecord, Record, RecordHead, ReturnRecord,
    ReturnValueRecord, TailRecord, WireRecord,
};
use super::wire::{ALIGN, BATCH, MAX_VALUE_WORDS};

/// Records of one vCPU, of any kinds, in their wire form: gathered, written with
/// [`Writer::records`](super::Writer::records), cleared, used again.
#[derive(Clone, Debug, Default)]
pub struct RecordBuffer {
    bytes: Vec<u8>,
    count: usize,
    newest: u64,
    /// Where full frames end: bytes and records before that place.
    cuts: Vec<(usize, usize)>,
    /// The last of `cuts`, or zero.
    begin: usize,
    /// Where the newest record begins.
    last: usize,
}

impl RecordBuffer {
    /// An empty buffer.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty buffer with room for so many bytes.
    #[must_use]
    pub fn with_capacity(bytes: usize) -> Self {
        Self { bytes: Vec::with_capacity(bytes), ..Self::default() }
    }

    /// Forgets the records, keeps the memory.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.cuts.clear();
        (self.count, self.newest, self.begin, self.last) = (0, 0, 0, 0);
    }

    /// How many records there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The highest time of a record; zero without one.
    #[must_use]
    pub fn newest(&self) -> u64 {
        self.newest
    }

    /// The records as they will be on the wire.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Adds an entry.
    #[inline]
    pub fn push(&mut self, entry: EntryRecord) {
        self.add(entry.as_bytes(), entry.timestamp());
    }

    /// Adds an entry whose stack pointer is known.
    #[inline]
    pub fn push_frame(&mut self, entry: FrameEntryRecord) {
        self.add(entry.as_bytes(), entry.entry.timestamp());
    }

    /// Adds an entry with values of its arguments: bit *i* of `failed` says that value *i* could
    /// not be read, and `words` are those of the [`ValuesFormat`](super::ValuesFormat) that was
    /// written for its function. Words over [`MAX_VALUE_WORDS`] are left out.
    #[inline]
    pub fn push_values(
        &mut self,
        mut entry: EntryRecord,
        sp: Option<u64>,
        failed: u64,
        words: impl IntoIterator<Item = u64>,
    ) {
        entry.head.flags |= RecordHead::VALUES;
        if sp.is_some() {
            entry.head.flags |= RecordHead::SP;
        }
        self.add_values(entry.as_bytes(), entry.timestamp(), sp, failed, words);
    }

    /// Adds an event with the values of its fields, as [`RecordBuffer::push_values`] does.
    pub fn push_event(
        &mut self,
        mut event: EventRecord,
        failed: u64,
        words: impl IntoIterator<Item = u64>,
    ) {
        event.head.flags |= RecordHead::VALUES;
        self.add_values(event.as_bytes(), event.head.timestamp.get(), None, failed, words);
    }

    #[inline]
    fn add_values(
        &mut self,
        record: &[u8],
        timestamp: u64,
        sp: Option<u64>,
        failed: u64,
        words: impl IntoIterator<Item = u64>,
    ) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(record);
        for word in sp.into_iter().chain([failed]) {
            self.bytes.extend_from_slice(&word.to_le_bytes());
        }
        for word in words.into_iter().take(MAX_VALUE_WORDS) {
            self.bytes.extend_from_slice(&word.to_le_bytes());
        }
        // Only now it is known how long it is.
        let size = u8::try_from((self.bytes.len() - start) / ALIGN).unwrap_or(u8::MAX);
        if let Some(words) = self.bytes.get_mut(start + offset_of!(RecordHead, words)) {
            *words = size;
        }
        if self.bytes.len() - self.begin > BATCH {
            self.cut(start);
        }
        self.last = start;
        self.count += 1;
        self.newest = self.newest.max(timestamp);
    }

    /// Adds a return.
    #[inline]
    pub fn push_return(&mut self, ret: ReturnRecord) {
        self.add(ret.as_bytes(), ret.head.timestamp.get());
    }

    /// Adds a return with its value.
    #[inline]
    pub fn push_return_value(&mut self, ret: ReturnValueRecord) {
        self.add(ret.as_bytes(), ret.ret.head.timestamp.get());
    }

    /// Adds a tail jump.
    #[inline]
    pub fn push_tail(&mut self, tail: TailRecord) {
        self.add(tail.as_bytes(), tail.head.timestamp.get());
    }

    /// Adds a record of any kind.
    #[inline]
    pub fn push_any<R: WireRecord>(&mut self, record: &R) {
        let bytes = record.as_bytes();
        let timestamp = bytes.first_chunk().map_or(0, |first| u64::from_le_bytes(*first));
        self.add(bytes, timestamp);
    }

    /// Gives the newest record, which has none, the state of the CPU, unless it is of the greatest
    /// length.
    pub fn with_context(&mut self, context: Context) {
        self.grow(RecordHead::CONTEXT, context.word());
    }

    /// Gives the newest record, a return or a tail jump which has neither this nor the state of the CPU, how many ticks
    /// its call took.
    pub fn with_duration(&mut self, ticks: u64) {
        self.grow(RecordHead::DURATION, ticks);
    }

    /// Puts a word behind the newest record, and says so.
    fn grow(&mut self, flag: u8, word: u64) {
        let Some([.., words, _, flags]) =
            self.bytes.get_mut(self.last..self.last + offset_of!(RecordHead, flags) + 1)
        else {
            return;
        };
        let Some(grown) = words.checked_add(1) else { return };
        (*words, *flags) = (grown, *flags | flag);
        self.bytes.extend_from_slice(&word.to_le_bytes());
        if self.bytes.len() - self.begin > BATCH {
            // It is counted already.
            self.begin = self.last;
            self.cuts.push((self.begin, self.count - 1));
        }
    }

    /// Adds a record of another stream as it is there; see
    /// [`Batch::whole_records`](super::Batch::whole_records). What is no whole record is left
    /// out: says whether it was added.
    pub fn push_whole(&mut self, record: &[u8]) -> bool {
        let mut records = super::Batch::new(0, 0, 1, record).whole_records();
        match (records.next(), records.next()) {
            (Some((first, bytes)), None) if bytes.len() == record.len() => {
                self.add(record, Record::head(&first).timestamp.get());
                true
            }
            _ => false,
        }
    }

    /// `record` is a whole one, and `timestamp` its time.
    #[inline]
    fn add(&mut self, record: &[u8], timestamp: u64) {
        debug_assert!(record.len() >= size_of::<RecordHead>());
        if self.bytes.len() - self.begin + record.len() > BATCH {
            self.cut(self.bytes.len());
        }
        self.last = self.bytes.len();
        self.bytes.extend_from_slice(record);
        self.count += 1;
        self.newest = self.newest.max(timestamp);
    }

    /// The records from `begin` on belong to another frame; those before are all that are counted.
    #[cold]
    fn cut(&mut self, begin: usize) {
        self.begin = begin;
        self.cuts.push((self.begin, self.count));
    }

    /// The records in pieces that fit into frames: how many, and their bytes.
    pub(super) fn frames(&self) -> impl Iterator<Item = (usize, &[u8])> {
        let mut from = (0, 0);
        let ends = self.cuts.iter().copied().chain(std::iter::once((self.bytes.len(), self.count)));
        ends.filter_map(move |end| {
            let (start, before) = std::mem::replace(&mut from, end);
            let bytes = self.bytes.get(start..end.0).unwrap_or_default();
            (!bytes.is_empty()).then(|| (end.1 - before, bytes))
        })
    }
}
