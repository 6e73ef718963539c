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
    /// Those of records, and room for more behind them: it is written over, and never made anew.
    bytes: Vec<u8>,
    /// Bytes of records.
    used: usize,
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
        Self { bytes: vec![0; bytes], ..Self::default() }
    }

    /// Forgets the records, keeps the memory.
    pub fn clear(&mut self) {
        self.cuts.clear();
        (self.used, self.count, self.newest) = (0, 0, 0);
        (self.begin, self.last) = (0, 0);
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
        self.bytes.get(..self.used).unwrap_or_default()
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
        let start = self.used;
        self.put(record);
        for word in sp.into_iter().chain([failed]) {
            self.put(&word.to_le_bytes());
        }
        for word in words.into_iter().take(MAX_VALUE_WORDS) {
            self.put(&word.to_le_bytes());
        }
        // Only now it is known how long it is.
        let size = u8::try_from((self.used - start) / ALIGN).unwrap_or(u8::MAX);
        if let Some(words) = self.bytes.get_mut(start + offset_of!(RecordHead, words)) {
            *words = size;
        }
        if self.used - self.begin > BATCH {
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
        let there = self.bytes.get_mut(..self.used).unwrap_or_default();
        let Some([.., words, _, flags]) =
            there.get_mut(self.last..self.last + offset_of!(RecordHead, flags) + 1)
        else {
            return;
        };
        let Some(grown) = words.checked_add(1) else { return };
        (*words, *flags) = (grown, *flags | flag);
        self.put(&word.to_le_bytes());
        if self.used - self.begin > BATCH {
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

    /// Lets `fill` add up to `most` records, whose kinds are known where it is compiled, at less cost
    /// than one by one. Returns what it returns.
    pub fn fill<T>(&mut self, most: usize, fill: impl FnOnce(&mut Filler<'_>) -> T) -> T {
        let left = BATCH.saturating_sub(self.used - self.begin);
        let end = self.used + most.saturating_mul(size_of::<ReturnValueRecord>()).min(left);
        self.reach(end);
        let out = self.bytes.get_mut(self.used..end).unwrap_or_default();
        let mut filler = Filler { out, count: 0, newest: self.newest, last: 0 };
        let filled = fill(&mut filler);
        let Filler { out, count, newest, last } = filler;
        self.used = end - out.len();
        if count > 0 {
            self.count += count;
            (self.newest, self.last) = (newest, self.used - last);
        }
        filled
    }

    /// Makes the bytes up to `end` be there.
    #[inline]
    fn reach(&mut self, end: usize) {
        if end > self.bytes.len() {
            // Seldom: they stay when records are forgotten.
            self.bytes.resize(end.next_power_of_two(), 0);
        }
    }

    #[inline]
    fn put(&mut self, bytes: &[u8]) {
        let end = self.used + bytes.len();
        self.reach(end);
        if let Some(place) = self.bytes.get_mut(self.used..end) {
            place.copy_from_slice(bytes);
        }
        self.used = end;
    }

    /// `record` is a whole one, and `timestamp` its time.
    #[inline]
    fn add(&mut self, record: &[u8], timestamp: u64) {
        debug_assert!(record.len() >= size_of::<RecordHead>());
        if self.used - self.begin + record.len() > BATCH {
            self.cut(self.used);
        }
        self.last = self.used;
        self.put(record);
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
        let ends = self.cuts.iter().copied().chain(std::iter::once((self.used, self.count)));
        ends.filter_map(move |end| {
            let (start, before) = std::mem::replace(&mut from, end);
            let bytes = self.bytes.get(start..end.0).unwrap_or_default();
            (!bytes.is_empty()).then(|| (end.1 - before, bytes))
        })
    }
}

/// Adds records to a [`RecordBuffer`], until the frame that it is filling has no room.
#[derive(Debug)]
pub struct Filler<'a> {
    /// Where they go.
    out: &'a mut [u8],
    count: usize,
    newest: u64,
    /// Bytes of the newest.
    last: usize,
}

impl Filler<'_> {
    /// Adds a record of this time. Whether there was room.
    #[inline]
    pub fn push<R: WireRecord>(&mut self, record: &R, timestamp: u64) -> bool {
        if self.out.len() < size_of::<R>() {
            return false;
        }
        let (place, rest) = std::mem::take(&mut self.out).split_at_mut(size_of::<R>());
        place.copy_from_slice(record.as_bytes());
        self.out = rest;
        self.count += 1;
        self.last = size_of::<R>();
        self.newest = self.newest.max(timestamp);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Adds a record of a kind as it is added to both.
    fn records(number: u64, kind: u8) -> (EntryRecord, ReturnValueRecord, bool) {
        let function = u32::try_from(number % 1000).expect("small");
        let entry = EntryRecord::new(number, function, 7, 9);
        let ret = ReturnRecord::new(number, function, 7, 9, !number).with_value(number);
        (entry, ret, kind == 0)
    }

    proptest! {
        // Most records of a trace come in runs: where frames are cut, and what they are said to have, must be the
        // same, or readers refuse them.
        #[test]
        fn records_that_come_in_runs_are_those_that_come_one_by_one(
            runs in prop::collection::vec((0_usize..4000, 0_u8..2, any::<bool>()), 0..12)
        ) {
            let (mut one_by_one, mut in_runs) = (RecordBuffer::new(), RecordBuffer::with_capacity(64));
            // What was there before must not come again.
            in_runs.fill(10, |out| out.push(&records(1 << 40, 1).1, 1 << 40));
            in_runs.clear();
            let mut number = 0;
            for (count, kind, with_context) in runs {
                let mut left = count;
                while left > 0 {
                    let added = in_runs.fill(left, |out| {
                        (0..left as u64)
                            .take_while(|at| match records(number + at, kind) {
                                (entry, _, true) => out.push(&entry, number + at),
                                (_, ret, _) => out.push(&ret, number + at),
                            })
                            .count()
                    });
                    for at in number..number + added as u64 {
                        match records(at, kind) {
                            (entry, _, true) => one_by_one.push(entry),
                            (_, ret, _) => one_by_one.push_return_value(ret),
                        }
                    }
                    (number, left) = (number + added as u64, left - added);
                    if left > 0 {
                        // There was no room in the frame.
                        let entry = records(number, kind).0;
                        one_by_one.push(entry);
                        in_runs.push(entry);
                        (number, left) = (number + 1, left - 1);
                    }
                }
                if with_context && count > 0 {
                    let context = Context::new(1, 2, 3);
                    one_by_one.with_context(context);
                    in_runs.with_context(context);
                }
            }
            prop_assert_eq!((one_by_one.len(), one_by_one.newest()), (in_runs.len(), in_runs.newest()));
            prop_assert!(one_by_one.as_bytes() == in_runs.as_bytes());
            prop_assert!(one_by_one.frames().eq(in_runs.frames()));
            prop_assert!(in_runs.frames().all(|(_, bytes)| bytes.len() <= BATCH));
        }
    }
}
