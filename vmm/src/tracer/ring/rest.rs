//! Takes what is in a ring at the end or at a snapshot. It works in pieces, since a ring may be too large
//! to be in memory twice.

use super::{Found, RingReader};
use crate::tracer::raw::{RawBatch, RawRecord};
use std::sync::Arc;
use vm_memory::VolatileSlice;
use vmtrace_trampolines::layout::{CHUNK_SIZE, Info};

/// What is left of a ring; see [`RingReader::rest`].
#[derive(Debug)]
pub struct Rest {
    /// As far as it goes; `None` when there is no more.
    head: Option<u64>,
    /// Overwriting: where the chunks begin that were not looked through yet, the next one last.
    openings: Vec<u64>,
    /// Programs of records that were never finished ([`RawRecord::NO_PROGRAM`] where that is not known).
    pub unfinished: Vec<u16>,
}

impl Rest {
    /// Whether all was taken.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.head.is_none()
    }
}

/// What [`RingReader::walk`] has met: records, one for each tracer.
#[derive(Clone, Copy, Debug, Default)]
struct Walked {
    /// Before `tail`.
    before: u64,
    /// Behind it.
    behind: u64,
}

impl RingReader {
    /// Takes all that is left once the guest is gone or no site calls any more. Returns how many
    /// records were newly found lost, and the programs of those that were never finished
    /// ([`RawRecord::NO_PROGRAM`] where that is not known).
    pub fn finish(&mut self, out: &mut RawBatch) -> (u64, Vec<u16>) {
        let (lost, mut rest) = self.rest();
        while !rest.is_empty() {
            self.take_rest(&mut rest, out, usize::MAX);
        }
        (lost, rest.unfinished)
    }

    /// Begins to take all that is left while nobody writes there, which
    /// [`RingReader::take_rest`] goes on with. Returns how many records were newly found lost.
    pub fn rest(&mut self) -> (u64, Rest) {
        let shared = Arc::clone(&self.memory);
        let memory = shared.slice();
        let mut rest = Rest { head: None, openings: Vec::new(), unfinished: Vec::new() };
        let mut lost = self.all_dropped(&memory);
        if let Some(head) = self.head(&memory) {
            rest.head = Some(head);
            if self.overwrite {
                rest.openings = self.openings(&memory, head);
                rest.openings.reverse();
                let before = self.before_tail(&memory, head, &mut rest);
                // What was overwritten before is older than all that is left.
                let ever = self.count_overwritten(&memory).saturating_add(before);
                lost = lost.saturating_add(ever.saturating_sub(self.accounted));
                self.accounted = ever.max(self.accounted);
            }
        }
        self.totals.lost = self.totals.lost.saturating_add(lost);
        (lost, rest)
    }

    /// Adds what comes next of the `rest` to `out`, oldest first, chunk by chunk until these are `most`
    /// records or more. What was taken is no part of a later rest.
    pub fn take_rest(&mut self, rest: &mut Rest, out: &mut RawBatch, most: usize) {
        let Some(head) = rest.head else { return };
        let shared = Arc::clone(&self.memory);
        let memory = shared.slice();
        let before = out.records.len();
        let enough = before.saturating_add(most);
        let done = if self.overwrite {
            loop {
                if out.records.len() >= enough {
                    break rest.openings.is_empty();
                }
                let Some(opening) = rest.openings.pop() else { break true };
                let walked = self.walk(&memory, opening, head, Some(out), &mut rest.unfinished);
                self.accounted = self.accounted.saturating_add(walked.behind);
                self.tail = rest.openings.last().map_or(head, |&next| next);
            }
        } else {
            self.take_drained(&memory, head, out, enough, &mut rest.unfinished)
        };
        self.totals.records += (out.records.len() - before) as u64;
        if done {
            if self.overwrite {
                self.tail = head;
            }
            rest.head = None;
        }
    }

    /// Nothing of the `rest` is taken any more. Returns how many records are lost by that.
    pub fn leave_rest(&mut self, rest: &mut Rest) -> u64 {
        /// At once: they are counted alone.
        const PIECE: usize = 8192;
        let mut lost = 0;
        let mut forgotten = RawBatch::with_capacity(PIECE);
        while !rest.is_empty() {
            forgotten.clear();
            self.take_rest(rest, &mut forgotten, PIECE);
            lost += forgotten.records.iter().map(|record| u64::from(record.tracers)).sum::<u64>();
            self.totals.records -= forgotten.records.len() as u64;
        }
        self.totals.lost = self.totals.lost.saturating_add(lost);
        lost
    }

    /// Where chunks were opened that may have records, in this order.
    fn openings(&self, memory: &VolatileSlice<'_>, head: u64) -> Vec<u64> {
        let ring = self.ring;
        let state = vmtrace_trampolines::layout::front::STATE;
        let mut openings: Vec<_> = (0..ring.chunks())
            .map(|chunk| ring.opening(chunk, self.front(memory, chunk, state) >> 32))
            .filter(|&opening| opening >> 32 != 0 && ring.order(opening) <= ring.order(head))
            .collect();
        openings.sort_unstable_by_key(|&opening| ring.order(opening));
        openings
    }

    /// How many records before `tail` are still there. Takes the chunks that have no others out of the
    /// rest.
    fn before_tail(&mut self, memory: &VolatileSlice<'_>, head: u64, rest: &mut Rest) -> u64 {
        let mut before = 0;
        while let Some(&opening) = rest.openings.last()
            && self.ring.order(opening) < self.ring.order(self.tail)
        {
            let here = self.is_in_chunk_of(opening);
            let mut unfinished = Vec::new();
            before += match self.known(opening).filter(|_| !here) {
                Some(events) => events,
                None => self.walk(memory, opening, head, None, &mut unfinished).before,
            };
            if here {
                // The others in it are told with it.
                break;
            }
            rest.unfinished.extend(unfinished);
            rest.openings.pop();
        }
        before
    }

    /// How many records there are, forgotten or not.
    pub(super) fn count(&mut self, memory: &VolatileSlice<'_>, head: u64) -> u64 {
        let mut events = 0;
        for opening in self.openings(memory, head) {
            events += match self.known(opening) {
                Some(events) => events,
                None => {
                    let walked = self.walk(memory, opening, head, None, &mut Vec::new());
                    walked.before + walked.behind
                }
            };
        }
        events
    }

    /// How many records are in a chunk that was opened like this, if it was looked through before.
    fn known(&self, opening: u64) -> Option<u64> {
        let chunk = usize::try_from(self.ring.chunk(opening)).ok()?;
        let &(lap, events) = self.known.get(chunk)?;
        (u64::from(lap) == opening >> 32).then_some(events.into())
    }

    /// Goes through a chunk that was opened like this. Adds the records behind `tail` to `out`, if there
    /// is one, and programs of unfinished ones to `unfinished`.
    fn walk(
        &mut self,
        memory: &VolatileSlice<'_>,
        opening: u64,
        head: u64,
        mut out: Option<&mut RawBatch>,
        unfinished: &mut Vec<u16>,
    ) -> Walked {
        let ring = self.ring;
        let mut walked = Walked::default();
        let mut extra = Vec::new();
        let mut position = opening;
        let mut hole = false;
        let unfinished_before = unfinished.len();
        let tail = ring.order(self.tail);
        // An earlier lap of the head's own chunk cannot be: it was opened with this lap.
        let in_head = (head ^ opening) < CHUNK_SIZE as u64;
        let end = if in_head { head } else { 0 };
        while position > end && !(end == 0 && ring.is_spent(position)) {
            extra.clear();
            let size = match self.look(memory, position, self.tag(opening), &mut extra) {
                Found::Record(mut record, size) => {
                    let events = u64::from(record.tracers);
                    if ring.order(position) < tail {
                        walked.before += events;
                    } else {
                        walked.behind += events;
                        if let Some(out) = out.as_mut() {
                            record.extra = u32::try_from(out.extra.len()).unwrap_or(u32::MAX);
                            out.extra.extend_from_slice(&extra);
                            out.records.push(record);
                        }
                    }
                    hole = false;
                    size
                }
                Found::Unfinished(info) => {
                    unfinished.push(info.program());
                    hole = false;
                    info.size() as u64
                }
                // Reserved, and not even begun. All of it is zero up to the next record.
                Found::Nothing => {
                    if !std::mem::replace(&mut hole, true) {
                        unfinished.push(RawRecord::NO_PROGRAM);
                    }
                    8
                }
                Found::Damage => {
                    unfinished.push(RawRecord::NO_PROGRAM);
                    break;
                }
            };
            position -= size.min(position - end);
        }
        // Nothing comes to a chunk behind which another was opened but what was not finished.
        if !in_head && unfinished.len() == unfinished_before {
            let chunk = usize::try_from(ring.chunk(opening)).unwrap_or(usize::MAX);
            let events = u32::try_from(walked.before + walked.behind);
            if let (Some(known), Ok(events), Ok(lap)) =
                (self.known.get_mut(chunk), events, u32::try_from(opening >> 32))
            {
                *known = (lap, events);
            }
        }
        walked
    }

    /// From `tail` on until there are `enough`, unfinished records left out. Whether that is all.
    fn take_drained(
        &mut self,
        memory: &VolatileSlice<'_>,
        head: u64,
        out: &mut RawBatch,
        enough: usize,
        unfinished: &mut Vec<u16>,
    ) -> bool {
        let mut hole = false;
        while self.tail != head {
            let in_head = self.is_in_chunk_of(head);
            if self.ring.is_spent(self.tail) {
                if in_head {
                    break;
                }
                self.tail = self.ring.next_opening(self.tail);
                hole = false;
                if out.records.len() >= enough {
                    return false;
                }
                continue;
            }
            let size = match self.look(memory, self.tail, Info::DRAINED, &mut out.extra) {
                Found::Record(record, size) => {
                    out.records.push(record);
                    hole = false;
                    size
                }
                Found::Unfinished(info) => {
                    unfinished.push(info.program());
                    hole = false;
                    info.size() as u64
                }
                // Reserved, and not even begun. All of it is zero up to the next record.
                Found::Nothing => {
                    if !std::mem::replace(&mut hole, true) {
                        unfinished.push(RawRecord::NO_PROGRAM);
                    }
                    8
                }
                Found::Damage => {
                    self.damaged(self.tail);
                    break;
                }
            };
            if in_head && self.tail - size < head {
                self.damaged(self.tail);
                break;
            }
            self.tail -= size;
        }
        true
    }
}
