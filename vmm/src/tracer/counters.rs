//! Tables in which programs count calls, behind the rings in the annex.
//!
//! A table has a counter of 8 bytes for each function, as far behind its start as what tells the
//! function is behind the first one: no search leads a program there. Each vCPU has its own, so that
//! none waits for another. Only what is counted takes memory of the host.

use super::annex::{Memory, SIZE};
use super::arch;
use super::trace::TraceError;
use crate::kernel::Kernel;
use rustc_hash::{FxHashMap, FxHashSet};
use std::sync::Arc;
use vm_memory::{Bytes, VolatileSlice};
use vmtrace_trampolines as program;

const PAGE: u64 = 4096;
/// Bytes of a counter.
const COUNTER: u64 = 8;

/// Where tables can be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Area {
    /// Run-time address.
    pub(super) address: u64,
    /// Bytes.
    pub(super) len: u64,
}

/// A table for each vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
}

impl Table {
    fn covers(&self, (low, high): (u64, u64)) -> bool {
        self.from <= low && high < self.to
    }

    /// Of a function of which this tells (link address), from the start of the area.
    fn place(&self, told: u64, vcpu: u64) -> Option<u64> {
        let inside = told.checked_sub(self.from).filter(|_| told < self.to)?;
        let inside = if self.rounds { inside & !(COUNTER - 1) } else { inside };
        Some(self.offset + vcpu * self.stride + inside)
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
    /// Strides are powers of two.
    power: bool,
    vcpus: u64,
    used: u64,
    shared: bool,
    tables: Vec<Table>,
    /// What was taken of a counter: by its place in the area.
    taken: FxHashMap<u64, u64>,
}

impl Counters {
    pub(super) fn new(memory: &Arc<dyn Memory>, area: Area, vcpus: u64, power: bool) -> Self {
        let memory = Arc::clone(memory);
        let (tables, taken) = (Vec::new(), FxHashMap::default());
        Self { memory, area, power, vcpus, used: 0, shared: false, tables, taken }
    }

    /// The number of a table of this tracer's in which these sites (indices) have their places,
    /// which is made if there is none.
    ///
    /// # Errors
    /// When there is no room, or two of them cannot be told apart; nothing has changed then.
    pub fn table(
        &mut self,
        kernel: &Kernel,
        tracer: u8,
        sites: &[usize],
    ) -> Result<u16, TraceError> {
        let told = told(kernel, sites.iter().copied());
        let told: Vec<u64> = told.map(|(_, told)| told).collect();
        let range = (told.iter().min().copied(), told.iter().max().copied());
        let (Some(low), Some(high)) = range else { return Err(TraceError::NotCounted) };
        let is_its = |table: &Table| table.tracer == tracer && table.covers((low, high));
        if let Some(found) = self.tables.iter().rposition(is_its) {
            return u16::try_from(found).map_err(|_| TraceError::Counters(self.vcpus));
        }
        let full = TraceError::Counters(self.vcpus);
        let rounds = told.iter().any(|told| !told.is_multiple_of(COUNTER));
        let mut places: FxHashSet<u64> = FxHashSet::default();
        if !told.iter().all(|told| places.insert(told / COUNTER)) {
            return Err(TraceError::NotCounted);
        }
        let (from, to) = (low / PAGE * PAGE, (high + COUNTER).next_multiple_of(PAGE));
        let span = to - from;
        let own = if self.power { span.next_power_of_two() } else { span };
        let all = own.checked_mul(self.vcpus).filter(|_| self.vcpus > 1);
        let stride = all.filter(|&all| self.has_room(all)).map_or(0, |_| own);
        let all = if stride == 0 { span } else { stride * self.vcpus };
        if !self.has_room(all) || self.tables.len() >= usize::from(u16::MAX) {
            return self.inherit(kernel, tracer, (low, high)).ok_or(full);
        }
        self.shared |= stride == 0 && self.vcpus > 1;
        let offset = self.used;
        self.used += all;
        self.tables.push(Table { tracer, from, to, offset, stride, rounds });
        u16::try_from(self.tables.len() - 1).map_err(|_| full)
    }

    fn has_room(&self, bytes: u64) -> bool {
        self.used.checked_add(bytes).is_some_and(|end| end <= self.area.len)
    }

    /// Whether there is a table in which all vCPUs count, for want of room: its counts are those of vCPU 0.
    /// Told once.
    pub fn tell_shared(&mut self) -> bool {
        std::mem::take(&mut self.shared)
    }

    /// The number of a table that is nobody's any more, with what it says by now taken.
    fn inherit(&mut self, kernel: &Kernel, tracer: u8, range: (u64, u64)) -> Option<u16> {
        let is_free = |table: &Table| table.tracer == NOBODY && table.covers(range);
        let found = self.tables.iter().position(is_free)?;
        self.tables.get_mut(found)?.tracer = tracer;
        let _ = self.take(kernel, Some(tracer));
        u16::try_from(found).ok()
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

    /// What was counted since this was called last, of one tracer or of all.
    #[must_use]
    pub fn take(&mut self, kernel: &Kernel, tracer: Option<u8>) -> Vec<Hits> {
        let mut all = self.look(kernel, tracer);
        all.retain(|(_, place, total)| self.taken.get(place).copied().unwrap_or(0) != *total);
        let mut hits: Vec<Hits> = Vec::new();
        for ((tracer, vcpu, site), place, total) in all {
            let count = total.wrapping_sub(self.taken.insert(place, total).unwrap_or(0));
            add(&mut hits, (tracer, vcpu, site), count);
        }
        hits
    }

    /// What was counted since [`Counters::take`] was called last, of all tracers.
    #[must_use]
    pub fn read(&self, kernel: &Kernel) -> Vec<Hits> {
        let mut hits: Vec<Hits> = Vec::new();
        for (of, place, total) in self.look(kernel, None) {
            let taken = self.taken.get(&place).copied().unwrap_or(0);
            add(&mut hits, of, total.wrapping_sub(taken));
        }
        hits
    }

    /// A tracer's number is another's from now on.
    pub fn forget(&mut self, tracer: u8) {
        // A task may still stand in a program that counts there: who comes gets other tables, as long
        // as there is room.
        let own: Vec<usize> = (0..self.tables.len())
            .filter(|&table| self.tables.get(table).is_some_and(|table| table.tracer == tracer))
            .collect();
        for table in own {
            if let Some(table) = self.tables.get_mut(table) {
                table.tracer = NOBODY;
            }
        }
    }

    /// Counters that are not 0: of whom, where, and what they say. In order.
    fn look(&self, kernel: &Kernel, tracer: Option<u8>) -> Vec<((u8, u32, usize), u64, u64)> {
        let memory = self.memory.slice();
        let mut found = Vec::new();
        let wanted = |table: &&Table| {
            table.tracer != NOBODY && tracer.is_none_or(|tracer| table.tracer == tracer)
        };
        for table in self.tables.iter().filter(wanted) {
            for (site, told) in told(kernel, 0..kernel.sites().len()) {
                let vcpus = if table.stride == 0 { 1 } else { self.vcpus };
                for (vcpu, number) in (0..vcpus).zip(0_u32..) {
                    let Some(place) = table.place(told, vcpu) else { continue };
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

/// In place of a tracer that has a table.
const NOBODY: u8 = u8::MAX;

/// What tells programs the functions of these sites (link addresses); those of modules are nowhere.
fn told<'a>(
    kernel: &'a Kernel,
    sites: impl Iterator<Item = usize> + 'a,
) -> impl Iterator<Item = (usize, u64)> + 'a {
    let target = arch::of(kernel.arch());
    sites.filter_map(move |site| Some((site, target.return_address(kernel.sites().get(site)?))))
}

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
    memory.load(offset, std::sync::atomic::Ordering::Relaxed).unwrap_or(0)
}
