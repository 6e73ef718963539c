//! All modules that are loaded or were, and the numbers of their sites.

use super::numbered::Numbered;
use super::read::{self, ModuleError, ModuleSymbol, Offsets, Raw};
use super::switches::Switched;
use super::text::{ExitsError, Function};
use crate::kernel::preemptirq::SwitchSite;
use crate::kernel::{Exit, Kernel, Missing, Site, SiteSection};
use crate::tracer::guest::Guest;
use crate::tracer::image::Image;
use crate::tracer::spot::Spot;
use rustc_hash::FxHashMap;
use std::ops::Range;
use std::sync::Arc;

/// The most sites of modules, unloaded ones included, so that a guest that keeps loading modules
/// cannot fill the host's memory.
const MOST: usize = 1 << 20;

/// The same of places that switch interrupts or preemption: several times those for which there are
/// stubs. A guest waits while all of them are gone through.
const MOST_SWITCHES: usize = 1 << 15;

/// A function of a module that can be traced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleFunction {
    /// The module's name.
    pub module: Arc<str>,
    /// The function's names, the one that the kernel prints first.
    pub names: Vec<Box<str>>,
    /// Its site, by addresses as if the module were linked with the kernel.
    pub site: Site,
    /// Bytes of it; 0 when not known.
    pub size: u32,
    /// Guest-physical address of the site, and of the next page where it goes on there.
    pub(super) pages: (u64, Option<u64>),
}

impl ModuleFunction {
    /// The name that the kernel would print.
    #[must_use]
    pub fn name(&self) -> &str {
        self.names.first().map_or("", |name| name)
    }
}

/// A module as it was loaded.
#[derive(Clone, Debug)]
pub struct Module {
    /// Run-time address of its `struct module`.
    pub address: u64,
    /// Its name.
    pub name: Arc<str>,
    /// Numbers of its sites, with what they are.
    pub functions: Vec<(usize, Arc<ModuleFunction>)>,
    /// All of its functions, by address.
    pub symbols: Vec<ModuleSymbol>,
    /// Sites whose function has no name or whose memory is not mapped, which are not traced.
    pub left_out: usize,
}

/// What names a site for as long as a guest runs.
type Key = (Arc<str>, u64, Box<str>);

/// All modules.
#[derive(Debug)]
pub(in crate::tracer) struct Modules {
    /// How many sites the kernel itself has.
    pub(super) first: usize,
    pub(super) functions: Vec<(Arc<ModuleFunction>, bool)>,
    numbers: FxHashMap<Key, usize>,
    pub(super) loaded: Vec<Loaded>,
    pub(super) exits: Numbered<Exit>,
    pub(super) switches: Numbered<SwitchSite>,
}

/// A module that is loaded.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// Run-time address of its `struct module`.
    pub(super) address: u64,
    /// Its name.
    pub name: Arc<str>,
    /// Numbers of its sites.
    pub sites: Vec<usize>,
    /// All of its functions that are there, by address.
    pub(super) symbols: Vec<ModuleSymbol>,
    /// Numbers of its exits; `None`: nobody has looked for them yet.
    pub(super) exits: Option<Vec<usize>>,
    /// Sites of functions whose exits were asked for when nothing of it had run, ascending.
    pub(super) asked: Vec<usize>,
    /// Sites with an exit that cannot be held, or without any; or why none is known.
    pub(super) missing: Result<Vec<(usize, Missing)>, ExitsError>,
    /// Sites of exits for which there is no room, or whose memory is not mapped.
    pub(super) unplaced: Vec<usize>,
    /// What of it switches interrupts and preemption; `None`: nobody has looked for that yet.
    pub(super) switched: Option<Switched>,
}

impl Loaded {
    /// Run-time address of its `struct module`.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Whether its `struct module` is at this run-time address.
    #[must_use]
    pub fn is_at(&self, address: u64) -> bool {
        self.address == address
    }

    /// Sites with an exit that cannot be held, or without any, as far as somebody has looked.
    ///
    /// # Errors
    /// Why no exit is known.
    pub fn missing(&self) -> Result<&[(usize, Missing)], &ExitsError> {
        self.missing.as_deref()
    }

    /// How many exits have no number or no memory.
    #[must_use]
    pub fn unplaced(&self) -> usize {
        self.unplaced.len()
    }
}

impl Modules {
    pub(in crate::tracer) fn new(kernel: &Kernel) -> Self {
        Self {
            first: kernel.sites().len(),
            functions: Vec::new(),
            numbers: FxHashMap::default(),
            loaded: Vec::new(),
            exits: Numbered::new(MOST),
            switches: Numbered::new(MOST_SWITCHES),
        }
    }

    /// Where a site is, of the kernel or of a module that is loaded.
    pub(in crate::tracer) fn spot(
        &self,
        kernel: &Kernel,
        image: &Image,
        site: usize,
    ) -> Option<Spot> {
        match kernel.sites().get(site) {
            Some(&site) => Some(Spot::kernel(image, site)),
            None => {
                let (function, present) = self.functions.get(site.checked_sub(self.first)?)?;
                let (physical, beyond) = function.pages;
                present.then_some(Spot { site: function.site, physical, beyond })
            }
        }
    }

    /// Whether a site is one of a module.
    pub(in crate::tracer) fn is_of_module(&self, site: usize) -> bool {
        site >= self.first
    }

    /// Those that are loaded.
    pub(in crate::tracer) fn loaded(&self) -> &[Loaded] {
        &self.loaded
    }

    /// Functions that are there.
    pub(in crate::tracer) fn present(&self) -> impl Iterator<Item = (usize, &Arc<ModuleFunction>)> {
        let all = (self.first..).zip(&self.functions);
        all.filter_map(|(number, (function, present))| present.then_some((number, function)))
    }

    /// A module is loaded: gives numbers to its sites. Whatever was at its address is gone.
    fn add(&mut self, image: &Image, raw: Raw) -> Module {
        let name: Arc<str> = raw.name.into();
        let mut module = Module {
            address: raw.address,
            name: Arc::clone(&name),
            functions: Vec::with_capacity(raw.sites.len()),
            symbols: raw.symbols,
            left_out: raw.left_out,
        };
        for found in raw.sites {
            let first = found.names.first().cloned().unwrap_or_default();
            let link = |address: u64| address.wrapping_sub(image.slide);
            let site = Site {
                location: link(found.location),
                entry: link(found.entry),
                section: SiteSection::Text,
            };
            let function = Arc::new(ModuleFunction {
                module: Arc::clone(&name),
                names: found.names,
                site,
                size: found.size,
                pages: found.pages,
            });
            let key = (Arc::clone(&name), found.location, first);
            let number = match self.numbers.get(&key) {
                Some(&number) => number,
                None if self.functions.len() >= MOST => {
                    module.left_out += 1;
                    continue;
                }
                None => {
                    let number = self.first + self.functions.len();
                    self.functions.push((Arc::clone(&function), false));
                    self.numbers.insert(key, number);
                    number
                }
            };
            match self.slot(number) {
                Some(slot) if !slot.1 => *slot = (Arc::clone(&function), true),
                // Two of one name at one place are one.
                _ => continue,
            }
            module.functions.push((number, function));
        }
        let sites = module.functions.iter().map(|&(number, _)| number).collect();
        let symbols = module.symbols.clone();
        self.loaded.push(Loaded {
            address: raw.address,
            name,
            sites,
            symbols,
            exits: None,
            asked: Vec::new(),
            missing: Ok(Vec::new()),
            unplaced: Vec::new(),
            switched: None,
        });
        module
    }

    /// All are gone with their kernel. Numbers stay those of the same sites.
    pub(in crate::tracer) fn end(&mut self) {
        let all: Vec<u64> = self.loaded.iter().map(|loaded| loaded.address).collect();
        for address in all {
            self.remove(address);
        }
        self.functions.iter_mut().for_each(|(_, present)| *present = false);
    }

    /// All functions of a module that are there.
    pub(super) fn functions_of<'a>(&self, image: &Image, loaded: &'a Loaded) -> Vec<Function<'a>> {
        let of = |number: &usize| {
            let function = number.checked_sub(self.first).and_then(|at| self.functions.get(at));
            function.map(|(function, _)| function.site)
        };
        let sites: FxHashMap<u64, (u32, u64)> = loaded
            .sites
            .iter()
            .filter_map(|number| {
                let site = of(number)?;
                let location = image.runtime(site.location);
                Some((image.runtime(site.entry), (u32::try_from(*number).ok()?, location)))
            })
            .collect();
        loaded
            .symbols
            .iter()
            .map(|symbol| Function {
                start: symbol.address,
                size: symbol.size,
                name: &symbol.name,
                site: sites.get(&symbol.address).copied(),
            })
            .collect()
    }

    fn slot(&mut self, number: usize) -> Option<&mut (Arc<ModuleFunction>, bool)> {
        self.functions.get_mut(number.checked_sub(self.first)?)
    }

    /// The module with its `struct module` at this address, and its sites.
    pub(in crate::tracer) fn find(&self, address: u64) -> Option<&Loaded> {
        self.loaded.iter().find(|loaded| loaded.address == address)
    }

    /// Sites of a module (by the address of its `struct module`) in this memory (run-time addresses).
    pub(in crate::tracer) fn within(
        &self,
        image: &Image,
        address: u64,
        range: Range<u64>,
    ) -> Vec<usize> {
        let sites = self.find(address).map(|loaded| &loaded.sites[..]).unwrap_or_default();
        let is_in = |&&number: &&usize| {
            let function = number.checked_sub(self.first).and_then(|at| self.functions.get(at));
            function
                .is_some_and(|(function, _)| range.contains(&image.runtime(function.site.location)))
        };
        sites.iter().filter(is_in).copied().collect()
    }

    /// These sites are gone.
    pub(in crate::tracer) fn forget(&mut self, sites: &[usize]) {
        for &site in sites {
            if let Some((_, present)) = self.slot(site) {
                *present = false;
            }
        }
        for loaded in &mut self.loaded {
            loaded.sites.retain(|site| !sites.contains(site));
        }
    }

    /// The module with its `struct module` at this address is gone, with all of its sites.
    pub(in crate::tracer) fn remove(&mut self, address: u64) -> Option<Loaded> {
        let at = self.loaded.iter().position(|loaded| loaded.address == address)?;
        let loaded = self.loaded.swap_remove(at);
        for &site in &loaded.sites {
            if let Some((_, present)) = self.slot(site) {
                *present = false;
            }
        }
        self.exits.forget(loaded.exits.iter().flatten());
        self.switches.forget(loaded.switched.iter().flat_map(|it| &it.places));
        Some(loaded)
    }
}

impl Modules {
    /// Reads the module whose `struct module` is at this run-time address. Whatever was there is
    /// gone.
    ///
    /// # Errors
    /// Why it cannot be read.
    pub(in crate::tracer) fn load(
        &mut self,
        guest: &dyn Guest,
        image: &Image,
        offsets: &Offsets,
        address: u64,
    ) -> Result<Module, ModuleError> {
        let raw = read::read(guest, image, offsets, address)?;
        Ok(self.add(image, raw))
    }
}
