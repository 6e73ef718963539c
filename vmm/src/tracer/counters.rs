//! Tables in which programs count calls, behind the rings in the annex.
//!
//! A table has a counter of 8 bytes for each function, as far behind its start as what tells the
//! function is behind the first one: no search leads a program there. Each vCPU has its own, so that
//! none waits for another. Only what is counted takes memory of the host.

use super::annex::{Memory, SIZE};
use super::trace::TraceError;
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vm_memory::{Bytes, VolatileSlice};
use vmtrace_trampolines as program;

const PAGE: u64 = 4096;
/// Bytes of a counter.
const COUNTER: u64 = 8;
/// Functions that are further apart are in different memory: of the image's text, of its start-up code, of
/// modules.
const APART: u64 = 1 << 20;

/// Most stops of a guest: each has a counter in a page behind all tables.
const STOPS: u64 = PAGE / COUNTER;

/// Where tables can be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Area {
    /// Run-time address.
    pub(super) address: u64,
    /// Bytes.
    pub(super) len: u64,
}

/// A table for each vCPU.
#[derive(Clone, Debug)]
struct Table {
    tracer: u8,
    /// Whose place is at the front: the lowest of these link addresses, and the first behind them.
    from: u64,
    to: u64,
    /// Of the first vCPU, from the start of the area.
    offset: u64,
    /// From one vCPU's to that of the next; 0 where all vCPUs have this one.
    stride: u64,
    rounds: bool,
    /// What tells the functions that are counted here (link addresses), with their sites.
    sites: BTreeMap<u64, usize>,
}

impl Table {
    fn covers(&self, cluster: &[(u64, usize)]) -> bool {
        cluster.iter().all(|(told, _)| {
            (self.from..self.to).contains(told) && (self.rounds || told.is_multiple_of(COUNTER))
        })
    }

    /// Of a function of which this tells (link address), from the start of the area.
    fn place(&self, told: u64, vcpu: u64) -> u64 {
        let inside = told.saturating_sub(self.from);
        let inside = if self.rounds { inside & !(COUNTER - 1) } else { inside };
        self.offset + vcpu * self.stride + inside
    }
}

/// How often a tracer's functions were called on a vCPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hits {
    /// The tracer's number.
    pub tracer: u8,
    /// The vCPU.
    pub vcpu: u32,
    /// Sites (indices) with how often their functions were called: in order, none with 0.
    pub hits: Vec<(usize, u64)>,
}

/// All tables of a guest.
#[derive(Clone)]
pub struct Counters {
    memory: Arc<dyn Memory>,
    area: Area,
    /// The page of stops, from the start of the area.
    stops: Option<u64>,
    /// Strides are powers of two.
    power: bool,
    vcpus: u64,
    used: u64,
    shared: bool,
    tables: Vec<Table>,
    /// What was taken of a counter: by its place in the area.
    taken: FxHashMap<u64, u64>,
    /// What it said when all was to begin anew.
    cleared: FxHashMap<u64, u64>,
}

impl Counters {
    pub(super) fn new(memory: &Arc<dyn Memory>, area: Area, vcpus: u64, power: bool) -> Self {
        let memory = Arc::clone(memory);
        let (tables, taken) = (Vec::new(), FxHashMap::default());
        let cleared = FxHashMap::default();
        let (stops, len) = match area.len.checked_sub(PAGE) {
            Some(len) => (Some(len), len),
            None => (None, area.len),
        };
        let area = Area { len, ..area };
        Self { memory, area, stops, power, vcpus, used: 0, shared: false, tables, taken, cleared }
    }

    /// The numbers of tables of this tracer's in which these sites have their places, by site; tables
    /// that there are not yet are made. `told` is what tells a site's function (link address).
    ///
    /// # Errors
    /// When there is no room, or two of them cannot be told apart.
    pub(super) fn tables(
        &mut self,
        tracer: u8,
        mut told: Vec<(u64, usize)>,
    ) -> Result<FxHashMap<usize, u16>, TraceError> {
        told.sort_unstable();
        let mut found = FxHashMap::default();
        for cluster in told.chunk_by(|(before, _), (next, _)| next - before <= APART) {
            let table = self.table(tracer, cluster)?;
            found.extend(cluster.iter().map(|&(_, site)| (site, table)));
        }
        Ok(found)
    }

    /// The number of one for sites that are close to each other.
    fn table(&mut self, tracer: u8, cluster: &[(u64, usize)]) -> Result<u16, TraceError> {
        let is_its = |table: &Table| table.tracer == tracer && table.covers(cluster);
        let found = match self.tables.iter().rposition(is_its) {
            Some(found) => found,
            None => self.make(tracer, cluster)?,
        };
        let Some(table) = self.tables.get_mut(found) else { return Err(TraceError::NotCounted) };
        for &(told, site) in cluster {
            let near = told / COUNTER * COUNTER;
            let mut others = table.sites.range(near..near + COUNTER);
            if others.any(|(other, _)| *other != told) {
                return Err(TraceError::NotCounted);
            }
            table.sites.insert(told, site);
        }
        u16::try_from(found).map_err(|_| TraceError::Counters(self.vcpus))
    }

    fn make(&mut self, tracer: u8, cluster: &[(u64, usize)]) -> Result<usize, TraceError> {
        let full = TraceError::Counters(self.vcpus);
        let (Some((low, _)), Some((high, _))) = (cluster.first(), cluster.last()) else {
            return Err(TraceError::NotCounted);
        };
        let rounds = cluster.iter().any(|(told, _)| !told.is_multiple_of(COUNTER));
        let (from, to) = (low / PAGE * PAGE, (high + COUNTER).next_multiple_of(PAGE));
        let span = to - from;
        let own = if self.power { span.next_power_of_two() } else { span };
        let all = own.checked_mul(self.vcpus).filter(|_| self.vcpus > 1);
        let stride = all.filter(|&all| self.has_room(all)).map_or(0, |_| own);
        let all = if stride == 0 { span } else { stride * self.vcpus };
        if !self.has_room(all) || self.tables.len() >= usize::from(u16::MAX) {
            return self.inherit(tracer, cluster).ok_or(full);
        }
        self.shared |= stride == 0 && self.vcpus > 1;
        let offset = self.used;
        self.used += all;
        let sites = BTreeMap::new();
        self.tables.push(Table { tracer, from, to, offset, stride, rounds, sites });
        Ok(self.tables.len() - 1)
    }

    fn has_room(&self, bytes: u64) -> bool {
        self.used.checked_add(bytes).is_some_and(|end| end <= self.area.len)
    }

    /// Whether there is a table in which all vCPUs count, for want of room: its counts are those of vCPU 0.
    /// Told once.
    pub fn tell_shared(&mut self) -> bool {
        std::mem::take(&mut self.shared)
    }

    /// The place of a table that is nobody's any more, with what it says by now taken.
    fn inherit(&mut self, tracer: u8, cluster: &[(u64, usize)]) -> Option<usize> {
        let is_free = |table: &Table| table.tracer == NOBODY && table.covers(cluster);
        let found = self.tables.iter().position(is_free)?;
        let table = self.tables.get_mut(found)?;
        table.tracer = tracer;
        // Not what the tracer's other tables have.
        let offset = table.offset;
        let before = self.look(|table, _| table.offset == offset);
        self.begin_anew(&before);
        let _ = self.have_taken(before);
        self.tables.get_mut(found)?.sites.clear();
        Some(found)
    }

    /// Where programs find a table, in a kernel that has been moved by so much.
    #[must_use]
    pub fn find(&self, table: u16, slide: u64) -> Option<program::Counters> {
        let table = self.tables.get(usize::from(table))?;
        let start = self.area.address.wrapping_add(table.offset);
        Some(program::Counters {
            distance: start.wrapping_sub(table.from.wrapping_add(slide)),
            stride: table.stride,
            rounds: table.rounds,
        })
    }

    /// From the start of the area.
    fn stop(&self, number: u16) -> Option<u64> {
        let number = u64::from(number);
        let start = self.stops.filter(|_| number < STOPS)?;
        Some(start + number * COUNTER)
    }

    /// The run-time address of the counter of the stop with this number.
    #[must_use]
    pub fn find_stop(&self, number: u16) -> Option<u64> {
        self.stop(number).map(|offset| self.area.address.wrapping_add(offset))
    }

    /// Lets a vCPU stop at so many calls from now; at 0, at none.
    ///
    /// # Errors
    /// When there is no counter with this number.
    pub fn count_down(&mut self, number: u16, calls: u64) -> Result<(), TraceError> {
        let offset = self.stop(number).ok_or(TraceError::Stops)?;
        let at = usize::try_from(SIZE + offset).map_err(|_| TraceError::Stops)?;
        let stored = self.memory.slice().store(calls, at, Ordering::Relaxed);
        stored.map_err(|_| TraceError::Stops)
    }

    /// Whether there is nothing to count in.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }

    /// Lets [`Counters::read`] begin anew, and [`Counters::take`] with it: how many calls it will
    /// not have.
    pub fn clear(&mut self) -> u64 {
        let all = self.look(|_, _| true);
        self.begin_anew(&all);
        let hits = self.have_taken(all);
        hits.iter().flat_map(|hits| &hits.hits).fold(0, |sum, (_, hits)| sum.saturating_add(*hits))
    }

    fn begin_anew(&mut self, all: &[Found]) {
        self.cleared.extend(all.iter().map(|&(_, place, total)| (place, total)));
    }

    /// What was counted since this was called last, of one tracer or of all.
    #[must_use]
    pub fn take(&mut self, tracer: Option<u8>) -> Vec<Hits> {
        let all = self.look(|table, _| tracer.is_none_or(|tracer| table.tracer == tracer));
        self.have_taken(all)
    }

    /// The same of sites that are gone, which are forgotten.
    #[must_use]
    pub fn take_gone(&mut self, gone: &[usize]) -> Vec<Hits> {
        let gone: FxHashSet<usize> = gone.iter().copied().collect();
        let all = self.look(|_, site| gone.contains(&site));
        for table in &mut self.tables {
            table.sites.retain(|_, site| !gone.contains(site));
        }
        // What comes to their places begins at 0.
        self.begin_anew(&all);
        self.have_taken(all)
    }

    fn have_taken(&mut self, all: Vec<Found>) -> Vec<Hits> {
        let mut hits: Vec<Hits> = Vec::new();
        for (of, place, total) in all {
            let count = total.wrapping_sub(self.taken.insert(place, total).unwrap_or(0));
            add(&mut hits, of, count);
        }
        hits
    }

    /// What was counted in all, or since [`Counters::clear`] was called last, of all tracers.
    #[must_use]
    pub fn read(&self) -> Vec<Hits> {
        let mut hits: Vec<Hits> = Vec::new();
        for (of, place, total) in self.look(|_, _| true) {
            let before = self.cleared.get(&place).copied().unwrap_or(0);
            add(&mut hits, of, total.wrapping_sub(before));
        }
        hits
    }

    /// A tracer's number is another's from now on. A task may still stand in a program that counts in
    /// its tables: who comes gets others, as long as there is room.
    pub fn forget(&mut self, tracer: u8) {
        let own = self.tables.iter_mut().filter(|table| table.tracer == tracer);
        own.for_each(|table| table.tracer = NOBODY);
    }

    /// Counters that are not 0, of the tables and sites that are wanted. In order.
    fn look(&self, wanted: impl Fn(&Table, usize) -> bool) -> Vec<Found> {
        let memory = self.memory.slice();
        let mut found = Vec::new();
        for table in self.tables.iter().filter(|table| table.tracer != NOBODY) {
            let vcpus = if table.stride == 0 { 1 } else { self.vcpus };
            for (&told, &site) in table.sites.iter().filter(|(_, site)| wanted(table, **site)) {
                for (vcpu, number) in (0..vcpus).zip(0_u32..) {
                    let place = table.place(told, vcpu);
                    let count = load(&memory, SIZE + place);
                    if count != 0 {
                        found.push(((table.tracer, number, site), place, count));
                    }
                }
            }
        }
        found.sort_unstable();
        found
    }
}

/// A counter: of whom (tracer, vCPU, site), where it is in the area, and what it says.
type Found = ((u8, u32, usize), u64, u64);

/// In place of a tracer that has a table.
const NOBODY: u8 = u8::MAX;

/// Adds to what is in order.
fn add(hits: &mut Vec<Hits>, (tracer, vcpu, site): (u8, u32, usize), count: u64) {
    if count == 0 {
        return;
    }
    match hits.last_mut() {
        Some(last) if (last.tracer, last.vcpu) == (tracer, vcpu) => match last.hits.last_mut() {
            // In another table.
            Some((same, total)) if *same == site => *total = total.saturating_add(count),
            _ => last.hits.push((site, count)),
        },
        _ => hits.push(Hits { tracer, vcpu, hits: vec![(site, count)] }),
    }
}

/// A counter at this offset in the annex; 0 where there is none.
fn load(memory: &VolatileSlice<'_>, offset: u64) -> u64 {
    let offset = usize::try_from(offset).unwrap_or(usize::MAX);
    memory.load(offset, Ordering::Relaxed).unwrap_or(0)
}
