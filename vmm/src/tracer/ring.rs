//! The VMM's side of the rings: it trusts nothing that it finds there.

use super::annex::{Layout, Memory};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use vm_memory::{VolatileMemory, VolatileSlice};
use vmtrace_trampolines::layout::{LAP, RECORD_SIZE, Record, Ring, header, record};

/// What a ring has come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Records taken out.
    pub records: u64,
    /// Records dropped by trampolines, or overwritten.
    pub lost: u64,
    /// Slots reserved but never completed (their writer was interrupted for good).
    pub torn: u64,
}

/// A ring that does not hold what trampolines leave there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the ring of vCPU {cpu} was overwritten by the guest (head {head:#x})")]
pub struct Corrupt {
    /// Which ring.
    pub cpu: usize,
    /// What was found for a head.
    pub head: u64,
}

/// A slot as it is copied out of guest memory.
type Slot = [u64; RECORD_SIZE / 8];

/// The fields of a slot; the layout is asserted below.
#[allow(clippy::cast_possible_truncation, reason = "each half of a word is a field")]
fn decode(slot: Slot) -> Record {
    let [timestamp, function_caller, task, pid_lap] = slot.map(u64::from_le);
    Record {
        timestamp,
        function: function_caller as u32,
        caller: (function_caller >> 32) as u32,
        task,
        pid: pid_lap as u32,
        lap: (pid_lap >> 32) as u32,
    }
}

const _: () = assert!(
    record::TIMESTAMP == 0
        && record::FUNCTION == 8
        && record::CALLER == 12
        && record::TASK == 16
        && record::PID == 24
        && record::LAP == 28
);

/// Takes records out of the ring of one vCPU.
pub struct RingReader {
    memory: Arc<dyn Memory>,
    cpu: usize,
    ring: Ring,
    /// Offsets in the annex.
    control: usize,
    start: usize,
    /// Position of the next record to take.
    tail: u64,
    /// Records before this count are accounted for: see [`RingReader::clear`].
    base: u64,
    /// The head at the last look: see [`RingReader::newest`].
    looked: u64,
    overwrite: bool,
    totals: Totals,
    corrupt: Option<Corrupt>,
}

impl RingReader {
    /// A reader for each ring of a freshly installed layout.
    #[must_use]
    pub fn all(layout: &Layout, memory: &Arc<dyn Memory>, overwrite: bool) -> Vec<Self> {
        layout
            .rings
            .iter()
            .zip(&layout.controls)
            .enumerate()
            .map(|(cpu, (&ring, &control))| Self {
                memory: Arc::clone(memory),
                cpu,
                ring,
                control: usize::try_from(control).unwrap_or(usize::MAX),
                start: usize::try_from(layout.offset(&ring)).unwrap_or(usize::MAX),
                tail: ring.start(),
                base: 0,
                looked: ring.start(),
                overwrite,
                totals: Totals::default(),
                corrupt: None,
            })
            .collect()
    }

    /// Totals so far.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Whether the trampolines overwrite what was not taken out.
    #[must_use]
    pub fn overwrites(&self) -> bool {
        self.overwrite
    }

    /// Set once the ring was found damaged; nothing is taken out from then on.
    #[must_use]
    pub fn corrupt(&self) -> Option<Corrupt> {
        self.corrupt
    }

    fn head(&mut self, memory: &VolatileSlice<'_>) -> Option<u64> {
        if self.corrupt.is_some() {
            return None;
        }
        let head = memory
            .get_atomic_ref::<AtomicU64>(self.control)
            .map_or(u64::MAX, |word| word.load(Ordering::Acquire));
        let ahead = self.ring.count(head).wrapping_sub(self.ring.count(self.tail));
        let sound = self.ring.is_position(head)
            && self.ring.slot(head) >= self.tail
            && (self.overwrite || ahead <= self.ring.slots());
        if !sound {
            self.corrupt = Some(Corrupt { cpu: self.cpu, head });
            return None;
        }
        Some(head)
    }

    fn dropped(&self, memory: &VolatileSlice<'_>) -> u64 {
        memory
            .get_atomic_ref::<AtomicU64>(self.start + header::DROPPED)
            .map_or(0, |word| word.load(Ordering::Relaxed))
    }

    fn commit<'a>(&self, memory: &'a VolatileSlice<'_>, position: u64) -> Option<&'a AtomicU32> {
        let at = self.start + usize::try_from(self.ring.offset(position)).ok()? + record::FUNCTION;
        memory.get_atomic_ref::<AtomicU32>(at).ok()
    }

    /// Takes up to `out`'s spare capacity of committed records, oldest first,
    /// while the guest runs, and hands their slots back. Returns how many records
    /// were newly found dropped. With the overwrite policy nothing is taken: see
    /// [`RingReader::finish`].
    pub fn drain(&mut self, out: &mut Vec<Record>) -> u64 {
        if self.overwrite {
            return 0;
        }
        let shared = Arc::clone(&self.memory);
        let memory = shared.slice();
        // Read before head: a drop counted later belongs to a later drain.
        let dropped = self.dropped(&memory);
        let Some(head) = self.head(&memory) else { return 0 };
        let mut budget = out.capacity() - out.len();
        while budget > 0 {
            let start = self.ring.slot(self.tail);
            let ready = self.ring.count(head).saturating_sub(self.ring.count(start));
            let run = ready.min(self.ring.left_in_chunk(start)).min(budget as u64);
            let taken = self.take(&memory, start, run, out);
            self.tail = start + taken * RECORD_SIZE as u64;
            budget -= usize::try_from(taken).unwrap_or(budget);
            if taken < run || run == 0 {
                break;
            }
        }
        let room = self.ring.room(self.tail);
        if let Ok(word) = memory.get_atomic_ref::<AtomicU64>(self.start + header::ROOM) {
            word.store(room, Ordering::Release);
        }
        // The counter is guest-writable: it must not make totals go backwards.
        let lost = dropped.saturating_sub(self.totals.lost);
        self.totals.lost += lost;
        lost
    }

    /// Copies the committed front of `run` slots of one chunk, from position `start`.
    fn take(
        &mut self,
        memory: &VolatileSlice<'_>,
        start: u64,
        run: u64,
        out: &mut Vec<Record>,
    ) -> u64 {
        let Some((at, run)) = self.slots_at(start, run) else { return 0 };
        let word = |index: usize| {
            memory.get_atomic_ref::<AtomicU32>(at + index * RECORD_SIZE + record::FUNCTION).ok()
        };
        // Commit words first: a record is whole once its word was seen set.
        let committed = (0..run)
            .take_while(|&index| word(index).is_some_and(|w| w.load(Ordering::Acquire) != 0))
            .count();
        let Ok(slots) = memory.get_array_ref::<Slot>(at, committed) else { return 0 };
        out.extend((0..committed).map(|index| decode(slots.load(index))));
        for index in 0..committed {
            if let Some(word) = word(index) {
                word.store(0, Ordering::Relaxed);
            }
        }
        self.totals.records += committed as u64;
        committed as u64
    }

    /// Where the slots from `position` on are in the annex; all of them are in it.
    fn slots_at(&self, position: u64, count: u64) -> Option<(usize, usize)> {
        let at = self.start.checked_add(usize::try_from(self.ring.offset(position)).ok()?)?;
        Some((at, usize::try_from(count).ok()?))
    }

    /// The record in a slot. Zeroes, which are no record, where there is none.
    fn record(&self, memory: &VolatileSlice<'_>, position: u64) -> Record {
        self.slots_at(position, 1)
            .and_then(|(at, count)| memory.get_array_ref::<Slot>(at, count).ok())
            .map_or_else(Record::default, |slots| decode(slots.load(0)))
    }

    /// Adds the newest records since the last time, up to a chunk of them, to `out` and leaves
    /// them where they are, while the guest runs and may write others there: to be taken for
    /// hints alone.
    pub fn newest(&mut self, out: &mut Vec<Record>) {
        let shared = Arc::clone(&self.memory);
        let memory = shared.slice();
        let Some(head) = self.head(&memory) else { return };
        let (first, count) = self.ring.reserved_in_chunk(head);
        let known = self.looked.saturating_sub(first) / RECORD_SIZE as u64;
        let known = if (first..=head).contains(&self.looked) { known.min(count) } else { 0 };
        let (first, count) = (first + known * RECORD_SIZE as u64, count - known);
        self.looked = head;
        let Some((at, count)) = self.slots_at(first, count) else { return };
        let Ok(slots) = memory.get_array_ref::<Slot>(at, count) else { return };
        let all = (0..count).map(|index| decode(slots.load(index)));
        out.extend(all.filter(|record| record.function != 0));
    }

    /// Forgets the records in the ring, while the guest runs. Returns how many were
    /// forgotten, and how many were newly found overwritten before.
    pub fn clear(&mut self) -> (u64, u64) {
        let shared = Arc::clone(&self.memory);
        let memory = shared.slice();
        let Some(head) = self.head(&memory) else { return (0, 0) };
        let end = self.ring.count(head);
        let from = self.ring.count(self.ring.slot(self.tail));
        if !self.overwrite {
            let mut dropped = Vec::with_capacity(usize::try_from(end - from).unwrap_or(0));
            let lost = self.drain(&mut dropped);
            let cleared = dropped.len() as u64;
            self.totals.records -= cleared;
            return (cleared, lost);
        }
        let oldest = end.saturating_sub(self.ring.slots()).max(self.base);
        let lost = oldest - self.base;
        self.totals.lost += lost;
        (self.tail, self.base) = (self.ring.slot(head), end);
        (end - oldest, lost)
    }

    /// Takes all that is left once the guest is gone or no site calls any more.
    /// Slots that were never completed are counted as torn. Returns how many
    /// records were newly found lost.
    pub fn finish(&mut self, out: &mut Vec<Record>) -> u64 {
        let shared = Arc::clone(&self.memory);
        let memory = shared.slice();
        let dropped = self.dropped(&memory);
        let Some(head) = self.head(&memory) else { return 0 };
        let end = self.ring.count(head);
        let mut lost = dropped.saturating_sub(self.totals.lost);
        let mut position = self.ring.slot(self.tail);
        if self.overwrite {
            // Everything older than one lap is gone.
            let oldest = end.saturating_sub(self.ring.slots());
            lost = lost.max(oldest.saturating_sub(self.base));
            if oldest > self.base {
                let here = self.ring.slot(head);
                position = (here & (LAP - 1)) | ((here >> 32).saturating_sub(1) << 32);
            }
        }
        while self.ring.count(position) < end {
            let record = self.record(&memory, position);
            let lap = !self.overwrite || u64::from(record.lap) == position >> 32;
            if record.function != 0 && lap {
                out.push(record);
                self.totals.records += 1;
            } else {
                self.totals.torn += 1;
            }
            if let Some(word) = self.commit(&memory, position) {
                word.store(0, Ordering::Relaxed);
            }
            position = self.ring.slot(position + RECORD_SIZE as u64);
        }
        self.tail = position;
        self.totals.lost += lost;
        lost
    }
}
