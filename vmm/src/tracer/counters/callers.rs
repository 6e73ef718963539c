//! Tables in which programs count calls by function and caller, among those of counters.
//!
//! A guest can write them: what they say is a number for a site that was asked for, or nothing.

use super::resting::RESTING;
use super::{Counters, load};
use crate::tracer::annex::SIZE;
use crate::tracer::error::TraceError;
use rustc_hash::FxHashSet;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vm_memory::{Bytes, VolatileSlice};
use vmtrace_trampolines::callers::Callers;

/// How often a tracer's functions were called on a vCPU, by caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallerHits {
    /// The tracer's number.
    pub tracer: u8,
    /// The vCPU.
    pub vcpu: u32,
    /// Sites (indices), low halves of return addresses in the callers, and how often: in order, none with 0.
    pub hits: Vec<(usize, u32, u64)>,
}

/// What a place says: of whom (tracer, vCPU, site, caller), where it counts in the area, and how many calls.
pub(super) type Found = ((u8, u32, usize, u32), u64, u64);

/// When a table became nobody's: a number that grows.
type Since = u64;

/// One for each vCPU.
#[derive(Clone, Debug)]
struct Table {
    /// Or nobody's any more, since then.
    of: Result<u8, Since>,
    /// Of the first vCPU, from the start of the area.
    offset: u64,
    /// From one vCPU's to that of the next; 0 where all vCPUs have this one.
    stride: u64,
    /// By the low half of what tells a function (run-time address): its site.
    sites: BTreeMap<u32, usize>,
}

impl Table {
    /// Where that of each vCPU is, from the start of the area.
    fn parts(&self, vcpus: u64) -> impl Iterator<Item = (u32, u64)> {
        let vcpus = if self.stride == 0 { 1 } else { vcpus };
        (0..).zip((0..vcpus).map(|vcpu| self.offset + vcpu * self.stride))
    }
}

/// All of a guest.
#[derive(Clone, Debug, Default)]
pub(super) struct Tables(Vec<Table>);

impl Tables {
    /// Whether there is none.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The number of a tracer's table.
    pub(super) fn of(&self, tracer: u8) -> Option<u16> {
        let found = self.0.iter().rposition(|table| table.of == Ok(tracer))?;
        u16::try_from(found).ok()
    }

    /// One for a tracer at this offset, with so many bytes for each vCPU (0 where all have one): its number.
    pub(super) fn add(&mut self, tracer: u8, offset: u64, stride: u64) -> Option<u16> {
        let number = u16::try_from(self.0.len()).ok()?;
        self.0.push(Table { of: Ok(tracer), offset, stride, sites: BTreeMap::new() });
        Some(number)
    }

    /// How many are nobody's any more.
    fn resting(&self) -> usize {
        self.0.iter().filter(|table| table.of.is_err()).count()
    }

    /// Gives a tracer that which has been nobody's for longest: its number.
    pub(super) fn inherit(&mut self, tracer: u8) -> Option<u16> {
        let resting = |(index, table): (usize, &Table)| Some((table.of.err()?, index));
        let (_, found) = self.0.iter().enumerate().filter_map(resting).min()?;
        let table = self.0.get_mut(found)?;
        (table.of, table.sites) = (Ok(tracer), BTreeMap::new());
        u16::try_from(found).ok()
    }

    /// Functions that are told by these addresses (run-time) are counted in a table from now on.
    pub(super) fn count(&mut self, table: u16, sites: impl IntoIterator<Item = (u64, usize)>) {
        let Some(table) = self.0.get_mut(usize::from(table)) else { return };
        table.sites.extend(sites.into_iter().map(|(told, site)| (low(told), site)));
    }

    /// A tracer has none any more, since now.
    pub(super) fn forget(&mut self, tracer: u8, now: u64) {
        let own = self.0.iter_mut().filter(|table| table.of == Ok(tracer));
        own.for_each(|table| table.of = Err(now));
    }

    /// These sites are gone.
    pub(super) fn forget_sites(&mut self, gone: &FxHashSet<usize>) {
        for table in &mut self.0 {
            table.sites.retain(|_, site| !gone.contains(site));
        }
    }

    /// Where programs find a table, in an area that begins at this run-time address.
    pub(super) fn find(&self, table: u16, area: u64) -> Option<Callers> {
        let table = self.0.get(usize::from(table))?;
        Some(Callers { address: area.wrapping_add(table.offset), stride: table.stride })
    }

    /// Places with calls, of the tracers and sites that are wanted. In order.
    pub(super) fn look(
        &self,
        memory: &VolatileSlice<'_>,
        vcpus: u64,
        wanted: impl Fn(u8, usize) -> bool,
    ) -> Vec<Found> {
        let mut found = Vec::new();
        for table in &self.0 {
            let Ok(tracer) = table.of else { continue };
            for (vcpu, part) in table.parts(vcpus) {
                for place in 0..Callers::COUNT {
                    let place = part + Callers::PLACES + place * Callers::PLACE;
                    let pair = load(memory, SIZE + place);
                    if pair == 0 {
                        continue;
                    }
                    // A pair of no site that was asked for is the guest's own.
                    let Some(&site) = table.sites.get(&low(pair >> 32)) else { continue };
                    let calls = load(memory, SIZE + place + Callers::CALLS);
                    if calls != 0 && wanted(tracer, site) {
                        let of = (tracer, vcpu, site, low(pair));
                        found.push((of, place + Callers::CALLS, calls));
                    }
                }
            }
        }
        found.sort_unstable();
        found
    }

    /// Where the places of a table count, from the start of the area.
    pub(super) fn places(&self, table: u16, vcpus: u64) -> Vec<u64> {
        let parts = self.0.get(usize::from(table)).into_iter().flat_map(|table| table.parts(vcpus));
        let place = |place| Callers::PLACES + place * Callers::PLACE + Callers::CALLS;
        parts.flat_map(|(_, part)| (0..Callers::COUNT).map(move |of| part + place(of))).collect()
    }

    /// Where calls are counted whose pairs found no place, from the start of the area: of a tracer, or all.
    pub(super) fn crowded(&self, vcpus: u64, tracer: Option<u8>) -> Vec<u64> {
        let wanted = |table: &&Table| match tracer {
            Some(tracer) => table.of == Ok(tracer),
            None => table.of.is_ok(),
        };
        let parts = self.0.iter().filter(wanted).flat_map(|table| table.parts(vcpus));
        parts.map(|(_, part)| part + Callers::CROWDED).collect()
    }
}

impl Counters {
    /// The number of the table in which calls of these sites are counted by caller for a tracer, which is made if there
    /// is none yet. `told` is what tells a site's function (run-time address).
    ///
    /// # Errors
    /// When there is no room.
    pub(in crate::tracer) fn callers(
        &mut self,
        tracer: u8,
        told: impl IntoIterator<Item = (u64, usize)>,
    ) -> Result<u16, TraceError> {
        let full = TraceError::Counters(self.vcpus);
        let table = match self.callers.of(tracer) {
            Some(table) => table,
            None if self.callers.resting() >= RESTING => {
                self.inherit_callers(tracer).ok_or(full)?
            }
            None => {
                let all = Callers::SIZE * self.vcpus;
                let stride = if self.vcpus > 1 && self.has_room(all) { Callers::SIZE } else { 0 };
                let bytes = if stride == 0 { Callers::SIZE } else { all };
                match self.room(bytes) {
                    Some(offset) => {
                        self.shared |= stride == 0 && self.vcpus > 1;
                        self.callers.add(tracer, offset, stride).ok_or(full)?
                    }
                    None => self.inherit_callers(tracer).ok_or(full)?,
                }
            }
        };
        self.callers.count(table, told);
        Ok(table)
    }

    /// The table that has been nobody's for longest, with what it says by now taken, and all places free.
    fn inherit_callers(&mut self, tracer: u8) -> Option<u16> {
        let table = self.callers.inherit(tracer)?;
        let memory = Arc::clone(&self.memory);
        let memory = memory.slice();
        for word in self.callers.places(table, self.vcpus) {
            let pair = word - Callers::CALLS;
            if load(&memory, SIZE + pair) == 0 {
                continue;
            }
            let total = load(&memory, SIZE + word);
            self.taken.insert(word, total);
            self.cleared.insert(word, total);
            // It is memory of the annex, as that was.
            let _ = memory.store(0_u64, usize::try_from(SIZE + pair).ok()?, Ordering::Relaxed);
        }
        self.take_crowded(Some(tracer));
        Some(table)
    }

    /// Where programs find a table of callers.
    #[must_use]
    pub fn find_callers(&self, table: u16) -> Option<Callers> {
        self.callers.find(table, self.area.address)
    }

    /// How many calls of a tracer's, or of all, were counted for no caller, since there was no place for them; counted
    /// from 0 again.
    pub fn take_crowded(&mut self, tracer: Option<u8>) -> u64 {
        let words = self.callers.crowded(self.vcpus, tracer);
        words.into_iter().fold(0, |sum, word| sum.saturating_add(self.take_word(word)))
    }

    pub(super) fn look_callers(&self, wanted: impl Fn(u8, usize) -> bool) -> Vec<Found> {
        self.callers.look(&self.memory.slice(), self.vcpus, wanted)
    }
}

/// Adds to what is in order.
pub(super) fn add(all: &mut Vec<CallerHits>, (of, count): ((u8, u32, usize, u32), u64)) {
    let (tracer, vcpu, site, caller) = of;
    if count == 0 {
        return;
    }
    match all.last_mut() {
        Some(last) if (last.tracer, last.vcpu) == (tracer, vcpu) => match last.hits.last_mut() {
            // A guest can make two places of one.
            Some((same, from, total)) if (*same, *from) == (site, caller) => {
                *total = total.saturating_add(count);
            }
            _ => last.hits.push((site, caller, count)),
        },
        _ => all.push(CallerHits { tracer, vcpu, hits: vec![(site, caller, count)] }),
    }
}

/// The low half of an address.
#[allow(clippy::cast_possible_truncation, reason = "that is what is wanted")]
fn low(address: u64) -> u32 {
    address as u32
}
