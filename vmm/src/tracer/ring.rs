//! The VMM's side of the rings. Nothing that it reads there is trusted.

pub mod rest;

use super::annex::{Layout, Memory};
use super::raw::{RawBatch, RawRecord};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use vm_memory::{Bytes, VolatileMemory, VolatileSlice};
use vmtrace_trampolines::layout::{
    CHUNK_SIZE, COMMON_SIZE, FRONT_SIZE, Info, LAP, Ring, control, front,
};

/// The state of a ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Records taken out, as many as programs wrote.
    pub records: u64,
    /// Records lost, one for each tracer: dropped by programs, or overwritten.
    pub lost: u64,
}

/// A ring that does not hold what programs leave there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the ring of vCPU {cpu} was overwritten by the guest (at {position:#x})")]
pub struct Corrupt {
    /// Which ring.
    pub cpu: usize,
    /// The position at which that was found.
    pub position: u64,
}

/// Laps between two looks at what was overwritten.
const COUNT_LAPS: u64 = 64;

/// The upper part of a record as it is copied out of guest memory.
type Slot = [u64; COMMON_SIZE / 8];

/// What is at a position.
enum Found {
    /// A published record of so many bytes.
    Record(RawRecord, u64),
    /// A record of so many bytes that is not finished.
    Unfinished(Info),
    /// No record has been begun here, as far as can be seen.
    Nothing,
    /// What no program writes.
    Damage,
}

/// Takes records out of the ring of one vCPU.
pub struct RingReader {
    memory: Arc<dyn Memory>,
    cpu: usize,
    ring: Ring,
    /// Offsets in the annex.
    control: usize,
    start: usize,
    /// Position of the next record to take; with overwriting, before which all were forgotten.
    tail: u64,
    /// What was seen dropped, by chunk.
    dropped: Vec<u64>,
    /// The same overwritten, modulo 2^32, as chunks count it; and all together.
    overwritten: Vec<u32>,
    all_overwritten: u64,
    /// The lap in which that was looked at last.
    counted: u64,
    /// Chunks all of whose records are known, by chunk: the lap in which it was opened, and how many
    /// they are, one for each tracer.
    known: Vec<(u32, u32)>,
    /// Overwriting: records before `tail`, kept or not, that are accounted for.
    accounted: u64,
    /// The head at the last look: see [`RingReader::newest`].
    looked: u64,
    overwrite: bool,
    /// The head from which on nothing counts: see [`RingReader::seal`].
    sealed: Option<u64>,
    totals: Totals,
    corrupt: Option<Corrupt>,
}

impl RingReader {
    /// A reader for each ring of a freshly installed layout.
    #[must_use]
    pub fn all(layout: &Layout, memory: &Arc<dyn Memory>, overwrite: bool) -> Vec<Self> {
        let reader = |(cpu, (&ring, &control)): (usize, (&Ring, &u64))| Self {
            memory: Arc::clone(memory),
            cpu,
            ring,
            control: usize::try_from(control).unwrap_or(usize::MAX),
            start: usize::try_from(layout.offset(&ring)).unwrap_or(usize::MAX),
            tail: ring.start(),
            dropped: vec![0; usize::try_from(ring.chunks()).unwrap_or(0)],
            overwritten: vec![0; usize::try_from(ring.chunks()).unwrap_or(0)],
            all_overwritten: 0,
            counted: 0,
            known: vec![
                (0, 0);
                if overwrite { usize::try_from(ring.chunks()).unwrap_or(0) } else { 0 }
            ],
            accounted: 0,
            looked: ring.start(),
            overwrite,
            sealed: None,
            totals: Totals::default(),
            corrupt: None,
        };
        layout.rings.iter().zip(&layout.controls).enumerate().map(reader).collect()
    }

    /// Totals so far.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Bytes of records that the ring holds.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.ring.capacity()
    }

    /// Whether programs overwrite what was not taken out.
    #[must_use]
    pub fn overwrites(&self) -> bool {
        self.overwrite
    }

    /// Whether programs that can wait for room in this ring do so; at first none does.
    pub fn let_wait(&self, on: bool) {
        let memory = self.memory.slice();
        if let Some(at) = self.control.checked_add(control::WAIT)
            && let Ok(word) = memory.get_atomic_ref::<AtomicU64>(at)
        {
            word.store(u64::from(on).to_le(), Ordering::Release);
        }
    }

    /// Set once the ring was found damaged; nothing is taken out from then on.
    #[must_use]
    pub fn corrupt(&self) -> Option<Corrupt> {
        self.corrupt
    }

    fn damaged(&mut self, position: u64) {
        self.corrupt.get_or_insert(Corrupt { cpu: self.cpu, position });
    }

    fn head(&mut self, memory: &VolatileSlice<'_>) -> Option<u64> {
        if self.corrupt.is_some() {
            return None;
        }
        let head = self.sealed.unwrap_or_else(|| {
            let word = memory.get_atomic_ref::<AtomicU64>(self.control);
            word.map_or(0, |word| word.load(Ordering::Acquire))
        });
        let ring = &self.ring;
        let around = u128::from(ring.size());
        let sound = ring.is_position(head)
            && ring.order(head) >= ring.order(self.tail)
            && (self.overwrite || ring.order(head) - ring.order(self.tail) <= around);
        if !sound {
            self.damaged(head);
            return None;
        }
        Some(head)
    }

    /// A word of a chunk's account.
    fn front(&self, memory: &VolatileSlice<'_>, chunk: u64, field: usize) -> u64 {
        let at = self.at(self.ring.front_offset(chunk) + field as u64);
        memory.get_atomic_ref::<AtomicU64>(at).map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Offset in the annex of a byte of the ring; out of it where there is none.
    fn at(&self, offset: u64) -> usize {
        usize::try_from(offset)
            .ok()
            .and_then(|offset| self.start.checked_add(offset))
            .unwrap_or(usize::MAX)
    }

    /// What ends at `position`. `tag` is what its upper byte must be.
    #[inline]
    fn look(
        &self,
        memory: &VolatileSlice<'_>,
        position: u64,
        tag: u8,
        extra: &mut Vec<u64>,
    ) -> Found {
        let end = self.at(self.ring.offset(position));
        let Some(last) = end.checked_sub(8) else { return Found::Damage };
        let Ok(word) = memory.get_atomic_ref::<AtomicU64>(last) else { return Found::Damage };
        let word = u64::from_le(word.load(Ordering::Acquire));
        #[allow(clippy::cast_possible_truncation, reason = "both halves")]
        let (site, info) = (word as u32, Info((word >> 32) as u32));
        if info.tag() != tag {
            return Found::Nothing;
        }
        let size = info.size();
        let room = position % CHUNK_SIZE as u64;
        if size < COMMON_SIZE || size as u64 > room {
            return Found::Damage;
        }
        if site == 0 {
            return Found::Unfinished(info);
        }
        let Ok(slot) = memory.get_array_ref::<Slot>(end - COMMON_SIZE, 1) else {
            return Found::Damage;
        };
        // Its last word is what was looked at: the guest may have changed it since.
        let [task, caller_pid, timestamp, _] = slot.load(0).map(u64::from_le);
        let mut record = RawRecord::new([task, caller_pid, timestamp, word]);
        let fields = size - COMMON_SIZE;
        if fields > 0 {
            record.extra = u32::try_from(extra.len()).unwrap_or(u32::MAX);
            // In memory the last field comes first.
            for below in (COMMON_SIZE..size).step_by(8) {
                let word = memory.get_atomic_ref::<AtomicU64>(end - below - 8);
                extra.push(word.map_or(0, |word| u64::from_le(word.load(Ordering::Relaxed))));
            }
        }
        Found::Record(record, size as u64)
    }

    /// Takes up to `out`'s spare capacity of published records, oldest first, while the guest
    /// runs, and hands their chunks back. Returns how many records were newly found dropped, which
    /// is after those that were taken. With the overwrite policy nothing is taken: see
    /// [`RingReader::finish`].
    pub fn drain(&mut self, out: &mut RawBatch) -> u64 {
        if self.overwrite {
            return 0;
        }
        let shared = Arc::clone(&self.memory);
        let memory = shared.slice();
        let Some(head) = self.head(&memory) else { return 0 };
        let mut lost = 0;
        while out.has_room() {
            let in_head = self.is_in_chunk_of(head);
            // All of another chunk: the first position in it is 0.
            let stop = if in_head { head } else { self.tail - self.tail % CHUNK_SIZE as u64 };
            if !self.take(&memory, stop, out) {
                break;
            }
            if in_head || !out.has_room() {
                break;
            }
            lost = self.hand_back(&memory).saturating_add(lost);
            if lost > 0 {
                // They are missing at this very place.
                break;
            }
        }
        if self.tail == head || self.ring.is_spent(self.tail) {
            lost = self.newly_dropped(&memory, self.ring.chunk(self.tail)).saturating_add(lost);
        }
        self.totals.lost = self.totals.lost.saturating_add(lost);
        lost
    }

    /// Whether all that was ever reserved has been taken (or is damaged, and never will be). A
    /// record that is reserved later is later than this.
    #[must_use]
    pub fn is_empty(&mut self) -> bool {
        // The next chunk may not be opened yet, or be opened without a record.
        self.position().is_none_or(|head| head == self.tail)
    }

    /// Where the next record will be reserved; `None` where none will be taken.
    #[must_use]
    pub fn position(&mut self) -> Option<u64> {
        let shared = Arc::clone(&self.memory);
        self.head(&shared.slice())
    }

    /// Whether all that was reserved before this position has been taken.
    #[must_use]
    pub fn has_taken(&self, position: u64) -> bool {
        self.ring.order(self.tail) >= self.ring.order(position)
    }

    /// What is reserved from now on is not taken any more: tracing has ended, and a guest that
    /// goes on to write to its ring must not keep its reader for ever.
    pub fn seal(&mut self) {
        let shared = Arc::clone(&self.memory);
        self.sealed = self.head(&shared.slice()).or(self.sealed);
    }

    /// Takes published records of the chunk of `tail`, as far as `stop`, until it is used up or
    /// `out` is full. Whether that is so: else there is one that is not finished, or damage.
    fn take(&mut self, memory: &VolatileSlice<'_>, stop: u64, out: &mut RawBatch) -> bool {
        const PLAIN: usize = COMMON_SIZE / 8;
        const FRAME: usize = PLAIN + 1;
        let start = self.tail - self.tail % CHUNK_SIZE as u64;
        let at = self.at(self.ring.offset(start));
        let Ok(chunk) = memory.subslice(at, CHUNK_SIZE) else { return false };
        let mut tail = self.tail;
        let before = out.records.len();
        let done = loop {
            if tail == stop || self.ring.is_spent(tail) || !out.has_room() {
                break true;
            }
            let end = usize::try_from((tail - start) / 8).unwrap_or(0);
            let Some(last) = end.checked_sub(1) else { break false };
            let Ok(word) = chunk.get_atomic_ref::<AtomicU64>(last * 8) else { break false };
            let word = u64::from_le(word.load(Ordering::Acquire));
            #[allow(clippy::cast_possible_truncation, reason = "both halves")]
            let (site, info) = (word as u32, Info((word >> 32) as u32));
            if site == 0 || info.tag() != Info::DRAINED {
                break false;
            }
            let size = info.size();
            if size < COMMON_SIZE || size > end * 8 || tail - (size as u64) < stop {
                self.damaged(tail);
                break false;
            }
            let bottom = usize::try_from(stop - start).unwrap_or(0) / 8;
            let mut run = |words| self.take_run(&chunk, words, bottom..end, out);
            // Compiled for lengths that are known: those of entries, and of calls with their stack pointer.
            let left = match size / 8 {
                PLAIN => run(PLAIN),
                FRAME => run(FRAME),
                words => run(words),
            };
            if left == end {
                // The guest has changed what it says of itself.
                break false;
            }
            tail = start + 8 * left as u64;
        };
        self.tail = tail;
        self.totals.records += (out.records.len() - before) as u64;
        done
    }

    /// Takes published records of so many words, one after the other from the end of a range of words of the chunk
    /// down to its start, up to one that is not of as many. Most are: so where each ends is known without a look into
    /// the one before, for which the processor would have to wait. Returns where the last one begins.
    #[inline(always)]
    fn take_run(
        &self,
        chunk: &VolatileSlice<'_>,
        size: usize,
        Range { start: stop, mut end }: Range<usize>,
        out: &mut RawBatch,
    ) -> usize {
        const COMMON: usize = COMMON_SIZE / 8;
        let Ok(words) = chunk.get_array_ref::<u64>(0, CHUNK_SIZE / 8) else { return end };
        let info = Info::new(size * 8, 0, 1, Info::DRAINED).0;
        let spent = usize::try_from(self.ring.spent()).unwrap_or(0).div_ceil(8);
        let least = spent.max(stop + size);
        while end >= least && end <= CHUNK_SIZE / 8 && out.has_room() {
            let Ok(word) = chunk.get_atomic_ref::<AtomicU64>((end - 1) * 8) else { break };
            let word = u64::from_le(word.load(Ordering::Acquire));
            #[allow(clippy::cast_possible_truncation, reason = "both halves")]
            let (site, said) = (word as u32, (word >> 32) as u32);
            if site == 0 || said & Info::SHAPE != info {
                break;
            }
            let load = |below: usize| u64::from_le(words.load(end - below));
            let mut record = RawRecord::new([load(4), load(3), load(2), word]);
            if size > COMMON {
                record.extra = u32::try_from(out.extra.len()).unwrap_or(u32::MAX);
                // In memory the last field comes first.
                (COMMON + 1..=size).for_each(|below| out.extra.push(load(below)));
            }
            out.records.push(record);
            end -= size;
        }
        end
    }

    fn is_in_chunk_of(&self, position: u64) -> bool {
        (position ^ self.tail) < CHUNK_SIZE as u64
    }

    /// Hands the chunk of `tail`, which is used up, back to the guest, and goes on to the next one.
    /// Returns how many records were dropped between them.
    fn hand_back(&mut self, memory: &VolatileSlice<'_>) -> u64 {
        const CLEAN: [u8; CHUNK_SIZE - FRONT_SIZE] = [0; CHUNK_SIZE - FRONT_SIZE];
        let chunk = self.ring.chunk(self.tail);
        let lost = self.newly_dropped(memory, chunk);
        // Not before: what is not yet written must not look as if it were.
        let cleaned = memory.write_slice(&CLEAN, self.at(chunk * CHUNK_SIZE as u64));
        let lap = (self.tail >> 32).wrapping_add(1) % LAP;
        let room = self.at(self.ring.front_offset(chunk) + front::ROOM as u64);
        if let (Ok(()), Ok(word)) = (cleaned, memory.get_atomic_ref::<AtomicU64>(room)) {
            word.store(self.ring.opening(chunk, lap), Ordering::Release);
        }
        self.tail = self.ring.next_opening(self.tail);
        lost
    }

    /// What was dropped behind a chunk since the last look. The counter is guest-writable: it must
    /// not make totals go backwards.
    fn newly_dropped(&mut self, memory: &VolatileSlice<'_>, chunk: u64) -> u64 {
        let now = self.front(memory, chunk, front::DROPPED);
        let Some(seen) = usize::try_from(chunk).ok().and_then(|at| self.dropped.get_mut(at)) else {
            return 0;
        };
        let new = now.saturating_sub(*seen);
        *seen = now.max(*seen);
        new
    }

    /// The same of all chunks.
    fn all_dropped(&mut self, memory: &VolatileSlice<'_>) -> u64 {
        (0..self.ring.chunks())
            .fold(0, |sum: u64, chunk| sum.saturating_add(self.newly_dropped(memory, chunk)))
    }

    /// Adds the newest records since the last time, up to a chunk of them, to `out` and leaves
    /// them where they are, while the guest runs and may write others there: to be taken for
    /// hints alone.
    pub fn newest(&mut self, out: &mut RawBatch) {
        let shared = Arc::clone(&self.memory);
        let memory = shared.slice();
        let Some(head) = self.head(&memory) else { return };
        let ring = self.ring;
        let known = (head ^ self.looked) < CHUNK_SIZE as u64 && self.looked >= head;
        let opening = ring.opening(ring.chunk(head), head >> 32);
        let mut position = if known { self.looked } else { opening };
        self.looked = head;
        // Long before any chunk has overwritten 2^32, of which it has 2^17 in a lap at most: a ring may
        // have so many chunks that looking at all of them is work.
        if self.overwrite && (head >> 32).wrapping_sub(self.counted) > COUNT_LAPS {
            self.count_overwritten(&memory);
            self.counted = head >> 32;
        }
        while position > head && out.has_room() {
            match self.look(&memory, position, self.tag(position), &mut out.extra) {
                Found::Record(record, size) => {
                    out.records.push(record);
                    position -= size;
                }
                Found::Unfinished(info) => position -= info.size() as u64,
                Found::Nothing | Found::Damage => break,
            }
        }
    }

    /// What the upper byte of what a record says of itself must be.
    fn tag(&self, position: u64) -> u8 {
        if self.overwrite { (position >> 32 & 0xff) as u8 } else { Info::DRAINED }
    }

    /// Forgets the records in the ring, while the guest runs. Returns how many were
    /// forgotten, and how many were newly found lost before.
    pub fn clear(&mut self) -> (u64, u64) {
        if !self.overwrite {
            let mut forgotten = RawBatch::with_capacity(1 << 16);
            let (mut cleared, mut lost) = (0, 0);
            // What the guest writes meanwhile is not of before.
            let before = self.sealed;
            self.seal();
            loop {
                forgotten.clear();
                lost = self.drain(&mut forgotten).saturating_add(lost);
                cleared += forgotten.records.len() as u64;
                if forgotten.records.is_empty() {
                    self.sealed = before;
                    self.totals.records -= cleared;
                    return (cleared, lost);
                }
            }
        }
        let shared = Arc::clone(&self.memory);
        let memory = shared.slice();
        let Some(head) = self.head(&memory) else { return (0, 0) };
        // What is overwritten while it is counted would be counted twice, or not at all.
        const TRIES: usize = 8;
        let mut kept = 0;
        let mut overwritten = 0;
        for _ in 0..TRIES {
            overwritten = self.count_overwritten(&memory);
            kept = self.count(&memory, head);
            if self.count_overwritten(&memory) == overwritten {
                break;
            }
        }
        let before = std::mem::replace(&mut self.accounted, overwritten.saturating_add(kept));
        self.tail = head;
        let all = self.accounted.saturating_sub(before);
        let cleared = kept.min(all);
        self.totals.lost = self.totals.lost.saturating_add(all - cleared);
        (cleared, all - cleared)
    }

    /// Records overwritten so far, one for each tracer. To be called before any chunk has
    /// overwritten 2^32 of them since the last time.
    fn count_overwritten(&mut self, memory: &VolatileSlice<'_>) -> u64 {
        for chunk in 0..self.ring.chunks() {
            let state = self.front(memory, chunk, front::STATE);
            let seen = usize::try_from(chunk).ok().and_then(|at| self.overwritten.get_mut(at));
            let Some(seen) = seen else { continue };
            #[allow(clippy::cast_possible_truncation, reason = "the low half")]
            let now = state as u32;
            let new = u64::from(now.wrapping_sub(*seen));
            *seen = now;
            self.all_overwritten = self.all_overwritten.saturating_add(new);
        }
        self.all_overwritten
    }
}
