//! Resolves the addresses in records, and puts their names into the stream.

use super::memo::{End, Known, Memo, Place, Shape};
use crate::kernel::{After, Kernel, Site};
use crate::serve::{Globs, Resolve};
use crate::stream::{AddressSet, Header, Symbol, Task};
use crate::tracer::{ExitWord, Guest, Module, ModuleFunction, RawRecord, Tasks, return_address};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use vmtrace_trampolines::Point;

/// Traced functions by what trampolines write for them.
#[derive(Debug)]
pub(super) struct Functions {
    /// How far behind the entry of its function each of these is, with [`UNNAMED`] until its
    /// name is in the stream.
    back: FxHashMap<u32, u8>,
    /// The same of exits: what is left there, fresh until its name is in the stream.
    exits: FxHashMap<u32, Place>,
    /// Those of the latest records.
    memo: Memo,
    slide: u64,
}

const UNNAMED: u8 = 0x80;

impl Functions {
    /// Of no sites, in a kernel that runs at `slide`.
    pub(super) fn new(slide: u64) -> Self {
        let (back, exits) = (FxHashMap::default(), FxHashMap::default());
        Self { back, exits, memo: Memo::default(), slide }
    }

    /// Adds the sites with these indices.
    pub(super) fn add(&mut self, kernel: &Kernel, modules: &ModuleNames, sites: &[usize]) {
        self.memo.forget();
        // Those that were traced before are there.
        self.back.reserve(sites.len().saturating_sub(self.back.len()));
        for &index in sites {
            let Some(site) = modules.site(kernel, index) else { continue };
            if let Some((written, back)) = self.written(kernel, &site) {
                self.back.entry(written).or_insert(back | UNNAMED);
            }
        }
    }

    /// A module was loaded: what is written by those of its functions that are in the place of
    /// others is theirs from now on.
    pub(super) fn renew(&mut self, kernel: &Kernel, module: &Module) {
        self.memo.forget();
        for (_, function) in &module.functions {
            if let Some((written, back)) = self.written(kernel, &function.site)
                && let Some(known) = self.back.get_mut(&written)
            {
                *known = back | UNNAMED;
            }
        }
    }

    /// The link address of what has this low half where the kernel runs.
    pub(super) fn link(&self, low: u32) -> u64 {
        (Header::TOP_4_GIB | u64::from(low)).wrapping_sub(self.slide)
    }

    /// What a site writes, and how far behind the entry of its function that is.
    fn written(&self, kernel: &Kernel, site: &Site) -> Option<(u32, u8)> {
        let at = return_address(kernel, site);
        let low = at.wrapping_add(self.slide).wrapping_sub(Header::TOP_4_GIB);
        let back = u8::try_from(at.wrapping_sub(site.entry)).ok();
        Some((u32::try_from(low).ok()?, back.filter(|back| (1..UNNAMED).contains(back))?))
    }

    /// Adds exits.
    pub(super) fn add_exits(&mut self, exits: &[ExitWord]) {
        self.memo.forget();
        self.exits.reserve(exits.len().saturating_sub(self.exits.len()));
        let low = |address: u64| {
            let low = address.wrapping_add(self.slide).wrapping_sub(Header::TOP_4_GIB);
            u32::try_from(low).unwrap_or(0)
        };
        for exit in exits {
            let target = if exit.target == 0 { 0 } else { low(exit.target) };
            let end = match exit.after {
                After::Leaf => End::Last,
                After::Group(_) if exit.is_aid => End::Aid,
                After::Group(_) | After::Nothing => End::Usual,
            };
            let function = low(exit.function);
            let place = Place { function, fresh: true, target, end };
            // Modules come to the place of others.
            let known = self.exits.entry(exit.word).or_insert(place);
            if (Place { fresh: true, ..*known }) != place {
                *known = place;
            }
        }
    }

    /// What is known of a record that was kept, and has not changed since: its caller is named, too.
    #[inline]
    pub(super) fn known(&self, record: &RawRecord) -> Option<Known> {
        self.memo.find(record)
    }

    /// The stream has been told all that a reader needs of such records.
    pub(super) fn keep(&mut self, record: &RawRecord, place: &Place, shape: Option<(Shape, u8)>) {
        self.memo.keep(record, place, shape);
    }

    /// Which function a record with this word is of; `None` for what neither site nor exit writes.
    #[inline]
    pub(super) fn place(&mut self, point: Point, written: u32) -> Option<Place> {
        if point == Point::Entry {
            let (function, fresh) = self.entry(written)?;
            return Some(Place { function, fresh, target: 0, end: End::Usual });
        }
        let place = self.exits.get_mut(&written)?;
        let found = *place;
        place.fresh = false;
        Some(found)
    }

    /// The low half of the entry address of that function.
    pub(super) fn function(&self, point: Point, written: u32) -> Option<u32> {
        if point == Point::Entry {
            let back = self.back.get(&written)? & !UNNAMED;
            return Some(written.wrapping_sub(u32::from(back)));
        }
        self.exits.get(&written).map(|place| place.function)
    }

    /// The low half of the entry address, and whether the stream has no name for it
    /// yet; `None` for what no site writes.
    fn entry(&mut self, written: u32) -> Option<(u32, bool)> {
        let back = self.back.get_mut(&written)?;
        let fresh = *back & UNNAMED != 0;
        *back &= !UNNAMED;
        Some((written.wrapping_sub(u32::from(*back)), fresh))
    }

    /// Low halves of the entry addresses of sites with these indices.
    pub(super) fn entries(
        &self,
        kernel: &Kernel,
        modules: &ModuleNames,
        sites: &[usize],
    ) -> impl Iterator<Item = u32> {
        sites.iter().filter_map(|&index| self.entry_of(kernel, modules, index))
    }

    /// The low half of the entry address of the site with this index.
    pub(super) fn entry_of(
        &self,
        kernel: &Kernel,
        modules: &ModuleNames,
        index: usize,
    ) -> Option<u32> {
        let site = modules.site(kernel, index)?;
        let low = site.entry.wrapping_add(self.slide).wrapping_sub(Header::TOP_4_GIB);
        u32::try_from(low).ok()
    }

    /// The symbol of a function by the low half of its entry address.
    pub(super) fn symbol<'a>(
        &self,
        kernel: &'a Kernel,
        modules: &'a ModuleNames,
        entry: u32,
    ) -> Option<Symbol<'a>> {
        let address = Header::TOP_4_GIB | u64::from(entry);
        let link = address.wrapping_sub(self.slide);
        match kernel.symbols().primary_at(link) {
            Some(name) => Some(Symbol::new(address, size(kernel, link), name)),
            None => modules.lookup(address).filter(|symbol| symbol.address == address),
        }
    }
}

/// Functions of modules.
#[derive(Debug, Default)]
pub(super) struct ModuleNames {
    /// By the numbers of their sites.
    sites: FxHashMap<usize, Arc<ModuleFunction>>,
    /// Bytes, name and module by run-time address. Of modules that are gone until others take
    /// their place: their records may still be in the rings.
    names: BTreeMap<u64, (u32, Box<str>, Arc<str>)>,
}

impl ModuleNames {
    /// Who loads others for ever must not fill our memory.
    const MOST: usize = 1 << 20;

    /// A module was loaded.
    pub(super) fn add(&mut self, module: &Module) {
        let functions = module.functions.iter();
        self.sites.extend(functions.map(|(index, function)| (*index, Arc::clone(function))));
        if self.names.len() + module.symbols.len() > Self::MOST {
            self.names.clear();
        }
        for symbol in &module.symbols {
            let end = symbol.address.saturating_add(u64::from(symbol.size.max(1)));
            let over: Vec<u64> = self.names.range(symbol.address..end).map(|(&at, _)| at).collect();
            for at in over {
                self.names.remove(&at);
            }
        }
        self.names.extend(module.symbols.iter().map(|symbol| {
            (symbol.address, (symbol.size, symbol.name.clone(), Arc::clone(&module.name)))
        }));
    }

    /// A site of the kernel, or of a module that was loaded.
    pub(super) fn site(&self, kernel: &Kernel, index: usize) -> Option<Site> {
        let own = kernel.sites().get(index).copied();
        own.or_else(|| self.sites.get(&index).map(|function| function.site))
    }

    /// The function that contains a run-time address.
    fn lookup(&self, address: u64) -> Option<Symbol<'_>> {
        let (&start, (size, name, module)) = self.names.range(..=address).next_back()?;
        let inside = address - start < u64::from((*size).max(1));
        inside.then_some(Symbol { address: start, size: *size, name, module })
    }
}

/// From globs to functions of a kernel that runs at `slide`, by any of their names.
#[must_use]
pub fn resolver(kernel: &Arc<Kernel>, slide: u64) -> Resolve {
    let kernel = Arc::clone(kernel);
    Arc::new(move |globs: &Globs| {
        let selection = kernel.select_with_report(&globs.filter, &globs.notrace);
        let sites = selection.sites.iter().filter_map(|&index| kernel.sites().get(index));
        let low = |site: &Site| {
            let address = site.entry.wrapping_add(slide).wrapping_sub(Header::TOP_4_GIB);
            u32::try_from(address).ok()
        };
        sites.filter_map(low).collect()
    })
}

/// Bytes up to the next symbol.
fn size(kernel: &Kernel, start: u64) -> u32 {
    let end = kernel.symbols().next_after(start).unwrap_or(start);
    u32::try_from(end - start).unwrap_or(0)
}

/// Says of tasks what they say of themselves, while they are there.
#[derive(Debug)]
pub(super) struct TaskNames {
    tasks: Tasks,
    /// Those (addresses, pids) that were looked at in this pass, and the last of them.
    seen: HashSet<(u64, u32)>,
    last: (u64, u32),
}

impl TaskNames {
    pub(super) fn new(tasks: Tasks) -> Self {
        Self { tasks, seen: HashSet::new(), last: (0, 0) }
    }

    /// Looks at every task again.
    pub(super) fn start_pass(&mut self) {
        self.seen.clear();
        self.last = (0, 0);
    }

    /// Whether nothing is new of the task of a record, since the one before was of the same.
    #[inline]
    pub(super) fn goes_on(&self, record: &RawRecord) -> bool {
        (record.task, record.pid) == self.last
    }

    /// What is new of the task of a record, in this guest.
    #[inline]
    pub(super) fn of(&mut self, guest: &dyn Guest, record: &RawRecord) -> Option<Task> {
        // Most often the one before goes on.
        if self.goes_on(record) { None } else { self.look(guest, (record.task, record.pid)) }
    }

    #[inline(never)]
    fn look(&mut self, guest: &dyn Guest, (task, pid): (u64, u32)) -> Option<Task> {
        self.last = (task, pid);
        if !self.seen.insert((task, pid)) {
            return None;
        }
        let found = self.tasks.refresh(guest, task, pid)?;
        Some(Task::new(pid, found.tgid, &found.comm))
    }
}

/// Names callers as they turn up.
#[derive(Debug)]
pub(super) struct Callers {
    seen: AddressSet,
    slide: u64,
}

impl Callers {
    pub(super) fn new(slide: u64) -> Self {
        Self { seen: AddressSet::default(), slide }
    }

    /// The symbol that contains return address `caller` (low half), at its first
    /// call for that address.
    pub(super) fn name<'a>(
        &mut self,
        kernel: &'a Kernel,
        modules: &'a ModuleNames,
        caller: u32,
    ) -> Option<Symbol<'a>> {
        if !self.seen.insert(caller) {
            return None;
        }
        let address = Header::TOP_4_GIB | u64::from(caller);
        let link = address.wrapping_sub(self.slide);
        // Of the return address itself, as ftrace has it.
        match kernel.symbols().lookup(link) {
            Some((name, start)) => {
                Some(Symbol::new(start.wrapping_add(self.slide), size(kernel, start), name))
            }
            None => modules.lookup(address),
        }
    }

    /// Names may have come, or changed.
    pub(super) fn forget(&mut self) {
        self.seen.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tracer::ModuleSymbol;

    // Modules come to the place of others: their returns would be those of functions that are gone.
    #[test]
    fn exits_of_modules_take_the_place_of_others() {
        let mut functions = Functions::new(0);
        let exit = |function: u64| ExitWord {
            word: 0x1010,
            function: Header::TOP_4_GIB | function,
            target: 0,
            after: After::Nothing,
            is_aid: false,
        };
        let place = |functions: &mut Functions| {
            let place = functions.place(Point::Return, 0x1010).unwrap();
            (place.function, place.fresh)
        };
        functions.add_exits(&[exit(0x1000)]);
        assert_eq!(place(&mut functions), (0x1000, true));
        functions.add_exits(&[exit(0x1000)]);
        assert_eq!(place(&mut functions), (0x1000, false), "it has its name");
        let record = RawRecord { site: 0x1010, ..RawRecord::default() };
        let known = functions.place(Point::Return, 0x1010).unwrap();
        functions.keep(&record, &known, None);
        assert_eq!(functions.known(&record).map(Known::place), Some(known));
        functions.add_exits(&[exit(0x100c)]);
        assert!(functions.known(&record).is_none(), "of the one that is gone");
        assert_eq!(place(&mut functions), (0x100c, true));
    }

    // The reader must know that such a return is no call's own.
    #[test]
    fn ends_of_functions_are_what_is_behind_them() {
        let mut functions = Functions::new(0);
        let exit = |word, after, is_aid| ExitWord {
            word,
            function: Header::TOP_4_GIB + 0x1000,
            target: 0,
            after,
            is_aid,
        };
        functions.add_exits(&[
            exit(1, After::Nothing, false),
            exit(2, After::Leaf, false),
            exit(3, After::Group(1), false),
            exit(4, After::Group(1), true),
        ]);
        let ends = [1, 2, 3, 4].map(|word| functions.place(Point::Tail, word).unwrap().end);
        assert_eq!(ends, [End::Usual, End::Last, End::Usual, End::Aid]);
    }

    // A module comes to the place of another: its callers would have the names of functions that are gone.
    #[test]
    fn functions_of_modules_are_found_by_every_byte_of_them() {
        let module = |name: &str, symbols: &[(u64, u32, &str)]| Module {
            address: 0,
            name: name.into(),
            functions: Vec::new(),
            symbols: symbols
                .iter()
                .map(|&(address, size, name)| ModuleSymbol { address, size, name: name.into() })
                .collect(),
            left_out: 0,
        };
        let mut names = ModuleNames::default();
        names.add(&module("one", &[(0x1000, 16, "a"), (0x1010, 16, "b"), (0x1020, 0, "c")]));
        let found = |names: &ModuleNames, address| {
            names.lookup(address).map(|symbol| (symbol.address, symbol.name.to_owned()))
        };
        assert_eq!(found(&names, 0xfff), None);
        assert_eq!(found(&names, 0x100f), Some((0x1000, "a".into())));
        assert_eq!(found(&names, 0x1010), Some((0x1010, "b".into())));
        assert_eq!(found(&names, 0x1020), Some((0x1020, "c".into())));
        assert_eq!(found(&names, 0x1021), None);
        names.add(&module("two", &[(0x1008, 16, "d")]));
        assert_eq!(found(&names, 0x1007), Some((0x1000, "a".into())));
        assert_eq!(found(&names, 0x1017), Some((0x1008, "d".into())));
        assert_eq!(found(&names, 0x101f), None, "it is in the place of the other one");
    }

    // Only what a site writes may become a record: rings are guest-writable.
    #[test]
    fn only_what_sites_write_is_a_function() {
        let back = [(0x1005, 5 | UNNAMED), (0x1008, 9 | UNNAMED)].into_iter().collect();
        let mut functions = Functions { back, ..Functions::new(0) };
        assert_eq!(functions.entry(0x1005), Some((0x1000, true)));
        assert_eq!(functions.entry(0x1008), Some((0xfff, true)));
        assert_eq!(functions.entry(0x1005), Some((0x1000, false)));
        for other in [0, 0x1004, 0x1006, 0x1009, u32::MAX] {
            assert_eq!(functions.entry(other), None, "{other:#x}");
        }
    }
}
