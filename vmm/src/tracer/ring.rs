//! The VMM's side of the rings: it trusts nothing that it finds there.

use super::annex::{Layout, Memory};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use vm_memory::{Bytes, VolatileMemory, VolatileSlice};
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
                start: usize::try_from(Layout::offset(&ring)).unwrap_or(usize::MAX),
                tail: ring.start(),
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

    /// Copies the committed front of `run` slots from position `start`.
    fn take(
        &mut self,
        memory: &VolatileSlice<'_>,
        start: u64,
        run: u64,
        out: &mut Vec<Record>,
    ) -> u64 {
        let slot = |index: u64| start + index * RECORD_SIZE as u64;
        // Commit words first: a record is whole once its word was seen set.
        let committed = (0..run)
            .take_while(|&index| {
                self.commit(memory, slot(index))
                    .is_some_and(|word| word.load(Ordering::Acquire) != 0)
            })
            .count() as u64;
        for index in 0..committed {
            out.push(self.record(memory, slot(index)));
        }
        for index in 0..committed {
            if let Some(word) = self.commit(memory, slot(index)) {
                word.store(0, Ordering::Relaxed);
            }
        }
        self.totals.records += committed;
        committed
    }

    fn record(&self, memory: &VolatileSlice<'_>, position: u64) -> Record {
        let at = usize::try_from(self.ring.offset(position)).unwrap_or(usize::MAX);
        let mut bytes = [0_u8; RECORD_SIZE];
        // In bounds: a slot of the ring. Zeroes would be an uncommitted record.
        let _ = memory.read_slice(&mut bytes, self.start.saturating_add(at));
        let u64_at =
            |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap_or_default());
        let u32_at =
            |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap_or_default());
        Record {
            timestamp: u64_at(record::TIMESTAMP),
            function: u32_at(record::FUNCTION),
            caller: u32_at(record::CALLER),
            task: u64_at(record::TASK),
            pid: u32_at(record::PID),
            lap: u32_at(record::LAP),
        }
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
            lost = lost.max(oldest);
            if oldest > 0 {
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
