//! Names for events: each is looked up once per address or task, not once per record.

use std::collections::HashMap;
use std::num::NonZeroU64;

use crate::stream::{
    Dictionaries, DictionaryFull, Header, HostExit, RawSymbol, RawTracer, Task, Tracer,
};

use super::{Name, printable};

/// The name of the first tracer, if it was not told.
const UNNAMED: &str = "tracer0";

/// The name of a tracer that was not told.
pub(crate) fn unnamed(number: u8) -> String {
    format!("tracer{number}")
}

/// Symbols by 32-bit address, with a cache before the ordered table.
#[derive(Debug)]
pub(super) struct Symbols {
    table: Dictionaries,
    names: Vec<Known>,
    /// Names that there were, with those that were replaced.
    named: u64,
    /// Index by the symbol's address.
    index: HashMap<u64, u32>,
    cache: Box<[Cached]>,
}

/// A symbol's printable name and module.
#[derive(Debug)]
struct Known {
    name: Box<str>,
    module: Box<str>,
    /// Of no other name of the stream.
    number: Option<NonZeroU64>,
}

#[derive(Clone, Copy, Debug)]
struct Cached {
    address: u32,
    /// [`EMPTY`], [`UNKNOWN`] or an index of `names`.
    index: u32,
}

const EMPTY: u32 = u32::MAX;
/// No index: nobody has looked yet.
pub(super) const LATER: u32 = EMPTY;
const UNKNOWN: u32 = u32::MAX - 1;
const CACHE: usize = 1 << 14;
const NOT_CACHED: Cached = Cached { address: 0, index: EMPTY };

impl Default for Symbols {
    fn default() -> Self {
        Self {
            table: Dictionaries::new(),
            names: Vec::new(),
            named: 0,
            index: HashMap::new(),
            cache: vec![NOT_CACHED; CACHE].into(),
        }
    }
}

impl Symbols {
    /// Whether the symbol gives another name to an address that has one.
    pub(super) fn renames(&self, symbol: &RawSymbol<'_>) -> bool {
        symbol.with_text(|new| {
            let old = self.table.symbol(new.address).filter(|old| old.address == new.address);
            old.is_some_and(|old| (old.name, old.module) != (new.name, new.module))
        })
    }

    pub(super) fn extend<'a>(
        &mut self,
        symbols: impl Iterator<Item = RawSymbol<'a>>,
    ) -> Result<(), DictionaryFull> {
        // An address may have been unknown, or found in another symbol.
        self.cache.fill(NOT_CACHED);
        for symbol in symbols {
            self.insert(&symbol)?;
        }
        Ok(())
    }

    fn insert(&mut self, symbol: &RawSymbol<'_>) -> Result<(), DictionaryFull> {
        symbol.with_text(|symbol| {
            if self.table.insert_symbol(symbol)? {
                self.named += 1;
                let name = Known {
                    name: printable(symbol.name).into(),
                    module: printable(symbol.module).into(),
                    number: NonZeroU64::new(self.named),
                };
                let next = u32::try_from(self.names.len()).map_err(|_| DictionaryFull)?;
                let index = *self.index.entry(symbol.address).or_insert(next);
                if index == next {
                    self.names.push(name);
                } else if let Some(known) = self.names.get_mut(position(index)) {
                    *known = name;
                }
            }
            Ok(())
        })
    }

    /// The index of the symbol that an address is in, for [`Symbols::name`].
    #[inline]
    pub(super) fn index(&mut self, header: &Header, address: u32) -> u32 {
        let slot = position(address.wrapping_mul(0x9e37_79b1) >> 18) & (CACHE - 1);
        let cached = self.cache[slot];
        if cached.address == address && cached.index != EMPTY {
            return cached.index;
        }
        let symbol = self.table.symbol(header.address(address));
        let index = symbol.and_then(|symbol| self.index.get(&symbol.address));
        let index = index.copied().unwrap_or(UNKNOWN);
        self.cache[slot] = Cached { address, index };
        index
    }

    #[inline]
    pub(super) fn name(&self, header: &Header, address: u32, index: u32) -> Name<'_> {
        let symbol = self.names.get(position(index));
        Name {
            address: header.address(address),
            symbol: symbol.map(|known| (&*known.name, &*known.module)),
            number: symbol.and_then(|known| known.number),
        }
    }
}

fn position(index: u32) -> usize {
    usize::try_from(index).unwrap_or(usize::MAX)
}

/// Names of tasks. A record is given its task when it is read, because the task may have
/// another name by the time that the record is printed.
#[derive(Debug)]
pub(super) struct Tasks {
    current: HashMap<u32, u32>,
    /// Names, and ids of thread groups; 0 when not known.
    slots: Vec<Option<(Box<str>, u32)>>,
    free: Vec<u32>,
    /// Processes that were asked for, with their slots.
    recent: Box<[(u32, u32)]>,
}

/// Enough for the processes of a busy second.
const RECENT: usize = 1 << 10;

impl Default for Tasks {
    fn default() -> Self {
        Self {
            current: HashMap::new(),
            slots: Vec::new(),
            free: Vec::new(),
            recent: vec![NOT_RECENT; RECENT].into(),
        }
    }
}

/// The slot of tasks without a name.
const NAMELESS: u32 = u32::MAX;
/// No process, and no slot.
const NOT_RECENT: (u32, u32) = (0, u32::MAX - 1);

/// What is shown of records that are of no task.
fn nobody(pid: u32) -> Option<&'static str> {
    match pid {
        // As ftrace does; the idle tasks of all CPUs share this pid.
        0 => Some("<idle>"),
        HostExit::PID => Some("<host>"),
        _ => None,
    }
}

fn comm_of(task: &Task) -> String {
    printable(&String::from_utf8_lossy(task.comm()))
}

/// The name that is shown of a process: nothing for one that nobody has named.
pub(crate) fn task_name(pid: u32, known: Option<&Task>) -> String {
    nobody(pid).map(str::to_owned).or_else(|| known.map(comm_of)).unwrap_or_default()
}

impl Tasks {
    pub(super) fn insert(&mut self, task: &Task) {
        let comm = comm_of(task);
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            u32::try_from(self.slots.len() - 1).unwrap_or(NAMELESS)
        });
        if let Some(free) = self.slots.get_mut(position(slot)) {
            *free = Some((comm.into(), task.tgid));
        }
        self.current.insert(task.pid, slot);
        self.recent[position(task.pid) % RECENT] = NOT_RECENT;
    }

    /// Where the present name of a process is.
    #[inline]
    pub(super) fn slot(&mut self, pid: u32) -> u32 {
        let recent = &mut self.recent[position(pid) % RECENT];
        if recent.0 != pid || *recent == NOT_RECENT {
            *recent = (pid, self.current.get(&pid).copied().unwrap_or(NAMELESS));
        }
        recent.1
    }

    #[inline]
    pub(super) fn comm(&self, pid: u32, slot: u32) -> Option<&str> {
        if let Some(name) = nobody(pid) {
            return Some(name);
        }
        self.slots.get(position(slot))?.as_ref().map(|(comm, _)| &**comm)
    }

    /// The id of the thread group, if it is known.
    #[inline]
    pub(super) fn tgid(&self, slot: u32) -> Option<u32> {
        let (_, tgid) = self.slots.get(position(slot))?.as_ref()?;
        Some(*tgid).filter(|tgid| *tgid != 0)
    }

    /// Whether [`Tasks::sweep`] is worth its cost.
    pub(super) fn is_crowded(&self) -> bool {
        self.slots.len() - self.free.len() > 2 * self.current.len() + 4096
    }

    /// Frees the slots that are neither current nor in use by one of the records. Returns which these are.
    pub(super) fn sweep(&mut self, in_use: impl Iterator<Item = u32>) -> Vec<u32> {
        let mut keep = vec![false; self.slots.len()];
        for slot in in_use.chain(self.current.values().copied()) {
            if let Some(keep) = keep.get_mut(position(slot)) {
                *keep = true;
            }
        }
        let unused = keep.iter().enumerate().filter(|(_, keep)| !**keep);
        let unused = unused.filter_map(|(index, _)| u32::try_from(index).ok());
        let freed =
            unused.filter(|slot| self.slots.get(position(*slot)).is_some_and(Option::is_some));
        let freed: Vec<_> = freed.collect();
        self.release(&freed);
        freed
    }

    /// Frees the slots that another one has found to be unused, which has been told of the same tasks.
    pub(super) fn release(&mut self, unused: &[u32]) {
        for slot in unused {
            if let Some(known) = self.slots.get_mut(position(*slot)) {
                *known = None;
                self.free.push(*slot);
            }
        }
    }
}

/// Names of tracers, which nobody needs as long as there is only one.
#[derive(Debug, Default)]
pub(super) struct Tracers {
    names: Vec<Box<str>>,
    /// Whether there is another than the first.
    several: bool,
}

impl Tracers {
    /// Whether [`Tracers::see`] of this one would change anything.
    #[inline]
    pub(super) fn is_new(&self, number: u8) -> bool {
        number != 0 && self.names.len() <= usize::from(number)
    }

    /// A record is of this one.
    #[inline]
    pub(super) fn see(&mut self, number: u8) {
        if number != 0 {
            self.grow(number);
        }
    }

    fn grow(&mut self, number: u8) -> Option<&mut Box<str>> {
        self.several |= number != 0;
        let index = usize::from(number);
        while self.names.len() <= index {
            let next = u8::try_from(self.names.len()).unwrap_or(u8::MAX);
            self.names.push(unnamed(next).into());
        }
        self.names.get_mut(index)
    }

    /// Whether it is told another name of a tracer than it has had.
    pub(super) fn renames(&self, tracer: &RawTracer<'_>) -> bool {
        let changed = tracer.with_text(|tracer| {
            let known = self.names.get(usize::from(tracer.number)).map(|name| &**name);
            known != Some(&*printable(tracer.name))
        });
        changed.unwrap_or(false)
    }

    pub(super) fn insert(&mut self, tracer: Tracer<'_>) {
        if let Some(name) = self.grow(tracer.number) {
            *name = printable(tracer.name).into();
        }
    }

    /// All names; of a stream that tells none that of its only tracer.
    pub(super) fn all(&self) -> impl Iterator<Item = &str> + Clone {
        let first = self.names.is_empty().then_some(UNNAMED);
        first.into_iter().chain(self.names.iter().map(|name| &**name))
    }

    /// The name of a tracer, if there are several.
    #[inline]
    pub(super) fn name(&self, number: u8) -> Option<&str> {
        if !self.several {
            return None;
        }
        self.names.get(usize::from(number)).map(|name| &**name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_renamed_task_keeps_its_old_name_for_older_records() {
        let mut tasks = Tasks::default();
        tasks.insert(&Task::new(5, 5, b"sh"));
        let old = tasks.slot(5);
        tasks.insert(&Task::new(5, 5, b"ls\x1b[2J"));
        assert_eq!(tasks.comm(5, old), Some("sh"));
        assert_eq!(tasks.comm(5, tasks.current[&5]), Some("ls?[2J"));
        assert_eq!(tasks.comm(6, NAMELESS), None);
        assert_eq!(tasks.comm(0, NAMELESS), Some("<idle>"));
        tasks.sweep(std::iter::once(old));
        assert_eq!(tasks.comm(5, old), Some("sh"));
        tasks.sweep(std::iter::empty());
        assert_eq!(tasks.comm(5, old), None);
        assert_eq!(tasks.free, [old]);
    }

    #[test]
    fn renaming_for_ever_needs_no_more_memory() {
        let mut tasks = Tasks::default();
        for round in 0..100_000u32 {
            tasks.insert(&Task::new(round % 3, 0, round.to_string().as_bytes()));
            if tasks.is_crowded() {
                tasks.sweep(std::iter::empty());
            }
        }
        assert!(tasks.slots.len() < 10_000);
    }
}
