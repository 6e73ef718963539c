//! Tables in which programs count calls, after the rings in the annex.
//!
//! A table has a counter of 8 bytes for each function. The offset of a counter in the table follows
//! from the address of the function's site or record, so that a program needs no search. Each vCPU
//! has its own table, so that none waits for another. Only pages that hold used counters take memory
//! of the host.

mod callers;
mod marks;
mod nests;
mod resting;
mod stops;
mod told;
mod wipe;

pub use callers::CallerHits;
pub use told::SiteTables;

use super::annex::{Memory, SIZE};
use super::error::TraceError;
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use told::Told;
use vm_memory::{Bytes, VolatileSlice};
use vmtrace_trampolines as program;
use vmtrace_trampolines::family::{self, Strangers};
use vmtrace_trampolines::histogram::{Calls, MISSED, WORDS};

const PAGE: u64 = 4096;
/// Bytes of a counter.
const COUNTER: u64 = 8;
/// Functions that are further apart are in different memory: of the image's text, of its start-up code, of
/// modules.
const APART: u64 = 1 << 20;

/// Where tables can be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Area {
    /// Run-time address.
    pub(super) address: u64,
    /// Bytes.
    pub(super) len: u64,
}

/// What a table has for each function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// How often it was called.
    Calls,
    /// Where its histogram is.
    Histograms,
    /// How often it was called, by caller: a table of another form.
    Callers,
}

/// For whom calls are kept until they end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Keeper {
    /// A tracer, by its number.
    Tracer(u8),
    /// A trigger, by a number of its own.
    Trigger(u16),
}

/// Bytes of the histograms of so many functions: whole pages.
fn of_histograms(functions: usize, vcpus: u64) -> u64 {
    (functions as u64 * vcpus * WORDS * COUNTER).next_multiple_of(PAGE)
}

/// Whose places a table has for functions between these: whole pages of them.
fn span(low: u64, high: u64) -> (u64, u64) {
    (low / PAGE * PAGE, (high + COUNTER).next_multiple_of(PAGE))
}

/// A table for each vCPU.
#[derive(Clone, Debug)]
struct Table {
    tracer: u8,
    /// When it became nobody's: a number that grows.
    rests_since: u64,
    kind: Kind,
    /// Whose place is at the front: the lowest of these link addresses, and the first behind them.
    from: u64,
    to: u64,
    /// Of the first vCPU, from the start of the area.
    offset: u64,
    /// From one vCPU's to that of the next; 0 where all vCPUs have this one.
    stride: u64,
    rounds: bool,
    /// What tells the functions that are counted here (link addresses), with their sites.
    sites: Told,
    /// Of the same, where their histograms are: that of the first vCPU, from the start of the area.
    histograms: BTreeMap<u64, u64>,
}

impl Table {
    fn covers(&self, cluster: &[(u64, usize)]) -> bool {
        cluster.iter().all(|(told, _)| {
            (self.from..self.to).contains(told) && (self.rounds || told.is_multiple_of(COUNTER))
        })
    }

    /// For how many of the guest's vCPUs it has a part.
    fn vcpus(&self, all: u64) -> u64 {
        if self.stride == 0 { 1 } else { all }
    }

    /// What tells those of these functions that have no histograms yet.
    fn without_histograms(&self, cluster: &[(u64, usize)]) -> Vec<u64> {
        let all = cluster.iter().map(|&(told, _)| told);
        all.filter(|told| !self.histograms.contains_key(told)).collect()
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

/// What was sorted of a tracer's functions on a vCPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buckets {
    /// The tracer's number.
    pub tracer: u8,
    /// The vCPU on which the calls began.
    pub vcpu: u32,
    /// Sites (indices), words of their histograms (up to [`MISSED`]), and what these have: in order, none
    /// with 0.
    pub words: Vec<(usize, u8, u64)>,
}

/// What was counted and sorted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// How often functions were called.
    pub hits: Vec<Hits>,
    /// Histograms of others.
    pub buckets: Vec<Buckets>,
    /// How often functions of others were called by whom.
    pub callers: Vec<CallerHits>,
}

impl Counted {
    /// Whether there is nothing in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.hits.is_empty() && self.buckets.is_empty() && self.callers.is_empty()
    }
}

/// All tables of a guest.
#[derive(Clone)]
pub struct Counters {
    memory: Arc<dyn Memory>,
    area: Area,
    /// Tasks that are known not to be meant, from the start of the area.
    strangers: Option<u64>,
    /// The page of stops, from the start of the area.
    stops: Option<u64>,
    /// Strides are powers of two.
    power: bool,
    vcpus: u64,
    used: u64,
    shared: bool,
    tables: Vec<Table>,
    /// How often tracers have left theirs.
    forgotten: u64,
    callers: callers::Tables,
    /// Calls that are open, by who waits for their ends: from the start of the area. Who takes a number has the
    /// same as the one before, as programs at returns have.
    open: BTreeMap<Keeper, u64>,
    /// What tells how deep calls are, in the same way, with the depth.
    nests: BTreeMap<Keeper, (Option<u8>, u64)>,
    /// Marks of calls that go on in functions whose own calls are not traced, in the same way.
    marks: BTreeMap<Keeper, u64>,
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
        let (open, nests, marks) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let (used, shared) = (0, false);
        Self {
            memory,
            area,
            strangers: None,
            stops,
            power,
            vcpus,
            used,
            shared,
            tables,
            forgotten: 0,
            callers: callers::Tables::default(),
            open,
            nests,
            marks,
            taken,
            cleared,
        }
    }

    /// The numbers of tables of this tracer's and kind in which these sites have their places; tables that
    /// there are not yet are made. `told` is what tells a site's function (link address).
    ///
    /// # Errors
    /// When there is no room, or two of them cannot be told apart.
    pub(super) fn tables(
        &mut self,
        (tracer, kind): (u8, Kind),
        mut told: Vec<(u64, usize)>,
    ) -> Result<SiteTables, TraceError> {
        told.sort_unstable();
        if kind == Kind::Histograms {
            self.open_calls(Keeper::Tracer(tracer))?;
        }
        let mut found = Vec::with_capacity(told.len());
        for cluster in told.chunk_by(|(before, _), (next, _)| next - before <= APART) {
            let table = self.table((tracer, kind), cluster)?;
            found.extend(cluster.iter().map(|&(_, site)| (site, table)));
        }
        Ok(found.into())
    }

    /// Makes room for somebody's calls that are open, if there is none yet.
    ///
    /// # Errors
    /// When there is not so much.
    pub fn open_calls(&mut self, keeper: Keeper) -> Result<(), TraceError> {
        if !self.open.contains_key(&keeper) {
            let offset = self.room(Calls::SIZE).ok_or(TraceError::Counters(self.vcpus))?;
            self.open.insert(keeper, offset);
        }
        Ok(())
    }

    /// How many calls of somebody's have found no place among those that are open, and of how many it could not be
    /// told whether they were meant; counted from 0 again.
    pub fn take_untold(&mut self, keeper: Keeper) -> [u64; 2] {
        let Some(&offset) = self.open.get(&keeper) else { return [0; 2] };
        [Calls::CROWDED, Calls::UNTOLD].map(|word| self.take_word(offset + word))
    }

    /// What was added to a word of the area, where nothing else is, since this was called last.
    fn take_word(&mut self, word: u64) -> u64 {
        let total = load(&self.memory.slice(), SIZE + word);
        total.saturating_sub(self.taken.insert(word, total).unwrap_or(0))
    }

    /// So many bytes, at a multiple of a page's.
    fn room(&mut self, bytes: u64) -> Option<u64> {
        let bytes = bytes.checked_next_multiple_of(PAGE)?;
        let offset = self.used;
        self.has_room(bytes).then(|| self.used += bytes)?;
        Some(offset)
    }

    /// The number of one for sites that are close to each other.
    fn table(
        &mut self,
        (tracer, kind): (u8, Kind),
        cluster: &[(u64, usize)],
    ) -> Result<u16, TraceError> {
        let is_its =
            |table: &Table| (table.tracer, table.kind) == (tracer, kind) && table.covers(cluster);
        let found = match self.tables.iter().rposition(is_its) {
            Some(found) => found,
            None => match self.rested(kind, cluster) {
                Some(found) => self.inherit(found, tracer),
                None => self.make((tracer, kind), cluster)?,
            },
        };
        let Some(table) = self.tables.get_mut(found) else { return Err(TraceError::NotCounted) };
        if !table.sites.add(cluster, COUNTER) {
            return Err(TraceError::NotCounted);
        }
        if kind == Kind::Histograms {
            self.give_histograms(found, cluster)?;
        }
        u16::try_from(found).map_err(|_| TraceError::Counters(self.vcpus))
    }

    /// Gives each of these functions its histograms, if it has none, and tells programs where they are.
    fn give_histograms(
        &mut self,
        number: usize,
        cluster: &[(u64, usize)],
    ) -> Result<(), TraceError> {
        let full = TraceError::Counters(self.vcpus);
        let Some(table) = self.tables.get(number) else { return Err(full) };
        let vcpus = table.vcpus(self.vcpus);
        let new = table.without_histograms(cluster);
        let size = vcpus * WORDS * COUNTER;
        let Some(first) = self.room(of_histograms(new.len(), vcpus)) else { return Err(full) };
        let Some(table) = self.tables.get_mut(number) else { return Err(full) };
        let memory = self.memory.slice();
        for (told, histogram) in new.into_iter().zip((0..).map(|n| first + n * size)) {
            for vcpu in 0..vcpus {
                let address = self.area.address.wrapping_add(histogram + vcpu * WORDS * COUNTER);
                let place = usize::try_from(SIZE + table.place(told, vcpu)).unwrap_or(usize::MAX);
                let stored = memory.store(address, place, Ordering::Relaxed);
                stored.map_err(|_| TraceError::Counters(self.vcpus))?;
            }
            table.histograms.insert(told, histogram);
        }
        Ok(())
    }

    /// Where programs note which tasks are followed, none so far; `None` when there is no room.
    pub(super) fn family(&mut self) -> Option<u64> {
        self.room(family::SIZE).map(|offset| self.area.address.wrapping_add(offset))
    }

    /// Where programs note tasks that are known not to be meant: none so far, and none until it is
    /// [said](Counters::note_strangers) that they can; `None` when there is no room.
    pub(super) fn strangers(&mut self) -> Option<u64> {
        let offset = self.room(Strangers::SIZE)?;
        self.strangers = Some(offset);
        Some(self.area.address.wrapping_add(offset))
    }

    /// Lets programs note such tasks, or forgets those that they have. No program may run.
    pub(super) fn note_strangers(&self, noted: bool) {
        let Some(offset) = self.strangers else { return };
        let memory = self.memory.slice();
        let at = usize::try_from(SIZE + offset + Strangers::OPEN).unwrap_or(usize::MAX);
        // It is memory of the annex, as the tables are.
        let _ = memory.store(u64::from(noted), at, Ordering::Relaxed);
        if !noted {
            let _ = wipe::clear(&memory, SIZE + offset..SIZE + offset + Strangers::OPEN);
        }
    }

    /// Where programs keep somebody's calls that are open.
    #[must_use]
    pub fn calls(&self, keeper: Keeper) -> Option<Calls> {
        let offset = self.open.get(&keeper)?;
        Some(Calls { address: self.area.address.wrapping_add(*offset) })
    }

    /// These begin at these ticks, or have other functions from then on: of calls that began before, ends may have been
    /// those of others.
    pub fn begin_calls(&self, keepers: impl IntoIterator<Item = Keeper>, ticks: u64) {
        let memory = self.memory.slice();
        for keeper in keepers {
            self.begin_nests(keeper);
            let Some(offset) = self.open.get(&keeper) else { continue };
            let at = usize::try_from(SIZE + offset).unwrap_or(usize::MAX);
            // It is memory of the annex, as the tables are.
            let _ = memory.store(ticks, at, Ordering::Relaxed);
        }
    }

    fn make(
        &mut self,
        (tracer, kind): (u8, Kind),
        cluster: &[(u64, usize)],
    ) -> Result<usize, TraceError> {
        let full = TraceError::Counters(self.vcpus);
        let (Some((low, _)), Some((high, _))) = (cluster.first(), cluster.last()) else {
            return Err(TraceError::NotCounted);
        };
        let rounds = cluster.iter().any(|(told, _)| !told.is_multiple_of(COUNTER));
        let (from, to) = span(*low, *high);
        let span = to - from;
        let own = if self.power { span.next_power_of_two() } else { span };
        let all = own.checked_mul(self.vcpus).filter(|_| self.vcpus > 1);
        // With histograms of all, which come behind it.
        let has_room = |bytes: u64, vcpus| {
            let histograms = if kind == Kind::Histograms { cluster.len() } else { 0 };
            let more = of_histograms(histograms, vcpus);
            self.tables.len() < usize::from(u16::MAX) && self.has_room(bytes.saturating_add(more))
        };
        let stride = all.filter(|&all| has_room(all, self.vcpus)).map_or(0, |_| own);
        let all = if stride == 0 { span } else { stride * self.vcpus };
        if stride == 0 {
            let is_better = |&found: &usize| {
                let table = self.tables.get(found);
                !has_room(all, 1) || table.is_some_and(|it| it.vcpus(self.vcpus) > 1)
            };
            if let Some(found) = self.smallest(kind, cluster).filter(is_better) {
                return Ok(self.inherit(found, tracer));
            }
            if !has_room(all, 1) {
                return Err(full);
            }
        }
        self.shared |= stride == 0 && self.vcpus > 1;
        let offset = self.used;
        self.used += all;
        let sites = Told::default();
        let histograms = BTreeMap::new();
        let rests_since = 0;
        self.tables.push(Table {
            tracer,
            rests_since,
            kind,
            from,
            to,
            offset,
            stride,
            rounds,
            sites,
            histograms,
        });
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

    /// Whether there is nothing to count in.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tables.is_empty() && self.callers.is_empty()
    }

    /// Lets [`Counters::read`] begin anew, and [`Counters::take`] with it: how many calls it will
    /// not have.
    pub fn clear(&mut self) -> u64 {
        let all = self.look(|_, _| true);
        self.begin_anew(&all);
        let called = self.look_callers(|_, _| true);
        self.cleared.extend(called.iter().map(|&(_, place, total)| (place, total)));
        let Counted { hits, buckets, callers } = self.have_taken(all, called);
        let crowded = self.take_crowded(None);
        let calls = hits.iter().flat_map(|hits| &hits.hits).map(|(_, hits)| hits);
        let called = callers.iter().flat_map(|hits| &hits.hits).map(|(.., hits)| hits);
        let calls = calls.chain(called).chain([&crowded]);
        let words = buckets.iter().flat_map(|buckets| &buckets.words);
        let sorted = words.filter(|(_, word, _)| is_calls(*word)).map(|(_, _, calls)| calls);
        calls.chain(sorted).fold(0, |sum, calls| sum.saturating_add(*calls))
    }

    fn begin_anew(&mut self, all: &[Found]) {
        self.cleared.extend(all.iter().map(|&(_, place, total)| (place, total)));
    }

    /// What was counted since this was called last, of one tracer or of all.
    #[must_use]
    pub fn take(&mut self, tracer: Option<u8>) -> Counted {
        let all = self.look(|table, _| tracer.is_none_or(|tracer| table.tracer == tracer));
        let called = self.look_callers(|of, _| tracer.is_none_or(|tracer| of == tracer));
        self.have_taken(all, called)
    }

    /// The same of sites that are gone, which are forgotten.
    #[must_use]
    pub fn take_gone(&mut self, gone: &[usize]) -> Counted {
        let gone: FxHashSet<usize> = gone.iter().copied().collect();
        let all = self.look(|_, site| gone.contains(&site));
        // Callers may be gone, too: who takes their place has another name.
        let called = self.look_callers(|_, _| true);
        self.callers.forget_sites(&gone);
        // Who gets one that is nobody's begins anew at all places that it has had.
        for table in self.tables.iter_mut().filter(|table| table.tracer != NOBODY) {
            table.sites.retain(|site| !gone.contains(&site));
        }
        // What comes to their places begins at 0.
        self.begin_anew(&all);
        let of_gone = called.iter().filter(|((_, _, site, _), ..)| gone.contains(site));
        self.cleared.extend(of_gone.map(|&(_, place, total)| (place, total)));
        self.have_taken(all, called)
    }

    fn have_taken(&mut self, all: Vec<Found>, called: Vec<callers::Found>) -> Counted {
        let mut counted = Counted::default();
        for (of, place, total) in all {
            let count = total.wrapping_sub(self.taken.insert(place, total).unwrap_or(0));
            counted.add(of, count);
        }
        for (of, place, total) in called {
            let count = total.wrapping_sub(self.taken.insert(place, total).unwrap_or(0));
            callers::add(&mut counted.callers, (of, count));
        }
        counted
    }

    /// What was counted in all, or since [`Counters::clear`] was called last, of all tracers.
    #[must_use]
    pub fn read(&self) -> Counted {
        let mut counted = Counted::default();
        for (of, place, total) in self.look(|_, _| true) {
            let before = self.cleared.get(&place).copied().unwrap_or(0);
            counted.add(of, total.wrapping_sub(before));
        }
        for (of, place, total) in self.look_callers(|_, _| true) {
            let before = self.cleared.get(&place).copied().unwrap_or(0);
            callers::add(&mut counted.callers, (of, total.wrapping_sub(before)));
        }
        counted
    }

    /// Counters that are not 0, of the tables and sites that are wanted. In order.
    fn look(&self, wanted: impl Fn(&Table, usize) -> bool) -> Vec<Found> {
        let memory = self.memory.slice();
        let mut found = Vec::new();
        for table in self.tables.iter().filter(|table| table.tracer != NOBODY) {
            let vcpus = table.vcpus(self.vcpus);
            for (told, site) in table.sites.iter().filter(|&(_, site)| wanted(table, site)) {
                for (vcpu, number) in (0..vcpus).zip(0_u32..) {
                    let mut look = |place, word| {
                        let count = load(&memory, SIZE + place);
                        if count != 0 {
                            found.push(((table.tracer, number, site, word), place, count));
                        }
                    };
                    match (table.kind, table.histograms.get(&told)) {
                        (Kind::Calls, _) => look(table.place(told, vcpu), CALLS),
                        (Kind::Histograms, Some(first)) => {
                            let first = first + vcpu * WORDS * COUNTER;
                            (0..=MISSED).for_each(|word| {
                                look(first + u64::from(word) * COUNTER, word);
                            });
                        }
                        (Kind::Histograms, None) | (Kind::Callers, _) => {}
                    }
                }
            }
        }
        found.sort_unstable();
        found
    }
}

/// A counter: of whom (tracer, vCPU, site, word of a histogram or [`CALLS`]), where it is in the area, and
/// what it says.
type Found = ((u8, u32, usize, u8), u64, u64);

/// In place of a word of a histogram.
const CALLS: u8 = u8::MAX;
/// In place of a tracer that has a table.
const NOBODY: u8 = u8::MAX;

/// Whether a word of a histogram has calls, and not the sum of their values.
fn is_calls(word: u8) -> bool {
    word != program::histogram::SUM
}

impl Counted {
    /// Adds to what is in order.
    fn add(&mut self, (tracer, vcpu, site, word): (u8, u32, usize, u8), count: u64) {
        if count == 0 {
            return;
        }
        if word != CALLS {
            match self.buckets.last_mut() {
                Some(last) if (last.tracer, last.vcpu) == (tracer, vcpu) => {
                    last.words.push((site, word, count));
                }
                _ => self.buckets.push(Buckets { tracer, vcpu, words: vec![(site, word, count)] }),
            }
            return;
        }
        match self.hits.last_mut() {
            Some(last) if (last.tracer, last.vcpu) == (tracer, vcpu) => {
                match last.hits.last_mut() {
                    // In another table.
                    Some((same, total)) if *same == site => *total = total.saturating_add(count),
                    _ => last.hits.push((site, count)),
                }
            }
            _ => self.hits.push(Hits { tracer, vcpu, hits: vec![(site, count)] }),
        }
    }
}

/// A counter at this offset in the annex; 0 where there is none.
fn load(memory: &VolatileSlice<'_>, offset: u64) -> u64 {
    let offset = usize::try_from(offset).unwrap_or(usize::MAX);
    memory.load(offset, Ordering::Relaxed).unwrap_or(0)
}
