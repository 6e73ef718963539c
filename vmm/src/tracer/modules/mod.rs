//! Modules of the guest's kernel: which are loaded, and their sites.
//!
//! A site of a module has a number after those of the kernel's own. It keeps that number, and gets it
//! again when the module is loaded again at the same address, so that earlier records of it stay
//! valid.

mod exits;
mod read;
mod text;

use super::exits::ExitEdit;
use super::guest::{GuestError, Image};
use super::patch::Edit;
use super::view::{View, word};
use crate::kernel::{Exit, Kernel, Site, SiteSection};
use rustc_hash::FxHashMap;
use std::ops::Range;
use std::sync::Arc;

pub use exits::ModuleCoverage;
pub use read::{ModuleError, ModuleSymbol};
pub(super) use read::{Offsets, place};
pub use text::ExitsError;

/// The most sites of modules, unloaded ones included, so that a guest that keeps loading modules
/// cannot fill the host's memory.
const MOST: usize = 1 << 20;
/// Bytes of a page.
pub(super) const PAGE: u64 = 4096;

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

/// Where a site is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spot {
    pub(super) site: Site,
    /// Guest-physical address.
    pub(super) physical: u64,
    /// That of the next page, where the site goes on there.
    pub(super) beyond: Option<u64>,
}

impl Spot {
    /// Of a site of the kernel itself, which is in one piece.
    pub(super) fn kernel(image: &Image, site: Site) -> Self {
        Self { site, physical: image.physical_of(site.location), beyond: None }
    }

    /// Of all sites of the kernel itself.
    pub(super) fn all(kernel: &Kernel, image: &Image) -> Vec<Self> {
        kernel.sites().iter().map(|&site| Self::kernel(image, site)).collect()
    }

    /// Of an exit of the kernel itself.
    #[inline]
    pub(super) fn exit(image: &Image, exit: &Exit) -> Self {
        let (location, section) = (exit.address, SiteSection::Text);
        Self::kernel(image, Site { location, entry: location, section })
    }

    /// Where bytes of it are, counted from its beginning on: guest-physical addresses, and which of
    /// these bytes are there.
    fn pieces(&self, bytes: &Range<usize>) -> [(u64, Range<usize>); 2] {
        let len = bytes.len();
        let physical = self.physical.wrapping_add(bytes.start as u64);
        let Some(beyond) = self.beyond else {
            return [(physical, 0..len), (physical, len..len)];
        };
        let on_first = usize::try_from(PAGE - self.physical % PAGE).unwrap_or(bytes.end);
        let first = on_first.saturating_sub(bytes.start).min(len);
        let next = beyond.wrapping_add((bytes.start + first).saturating_sub(on_first) as u64);
        [(physical, 0..first), (next, first..len)]
    }

    /// Up to eight of its bytes, counted from its beginning on.
    #[inline(always)]
    pub(super) fn load<const N: usize>(
        &self,
        view: &View<'_>,
        start: usize,
    ) -> Result<[u8; N], GuestError> {
        match (self.beyond, u8::try_from(N)) {
            // Most sites: a guest waits while a hundred thousand of them are read.
            (None, Ok(len @ 0..=8)) => {
                let word = view.load(self.physical.wrapping_add(start as u64), len)?.to_le_bytes();
                Ok(std::array::from_fn(|at| word[at]))
            }
            _ => self.load_pieces(view, start),
        }
    }

    /// Its first sixteen bytes, as two words.
    #[inline(always)]
    pub(super) fn load_words(&self, view: &View<'_>) -> Result<[u64; 2], GuestError> {
        if self.beyond.is_none() {
            return view.load_words(self.physical);
        }
        Ok([self.load(view, 0)?, self.load(view, 8)?].map(u64::from_le_bytes))
    }

    /// Up to eight of its bytes from its beginning on, as [`word`] has them.
    #[inline(always)]
    pub(super) fn load_word(&self, view: &View<'_>, len: u8) -> Result<u64, GuestError> {
        if self.beyond.is_none() {
            return view.load(self.physical, len);
        }
        let bytes = self.load_pieces::<8>(view, 0)?;
        Ok(word(&bytes[..usize::from(len.min(8))]))
    }

    #[cold]
    fn load_pieces<const N: usize>(
        &self,
        view: &View<'_>,
        start: usize,
    ) -> Result<[u8; N], GuestError> {
        let mut found = [0; N];
        for (physical, place) in self.pieces(&(start..start + N)) {
            view.read(physical, found.get_mut(place).unwrap_or_default())?;
        }
        Ok(found)
    }

    /// Writes bytes of it, counted from its beginning on.
    #[inline]
    pub(super) fn store(
        &self,
        view: &View<'_>,
        start: usize,
        bytes: &[u8],
    ) -> Result<(), GuestError> {
        if let (None, Ok(len @ 1..=8)) = (self.beyond, u8::try_from(bytes.len())) {
            return view.store(self.physical.wrapping_add(start as u64), word(bytes), len);
        }
        for (physical, place) in self.pieces(&(start..start + bytes.len())) {
            view.write(physical, bytes.get(place).unwrap_or_default())?;
        }
        Ok(())
    }

    /// What puts the low `len` bytes of a word in the place of its own, one to eight from its
    /// beginning on; `None` when that cannot be.
    #[inline(always)]
    pub(super) fn exchange(&self, original: u64, ours: u64, len: u8) -> Option<ExitEdit> {
        if self.beyond.is_none() {
            return Edit::of_words(self.physical, original, ours, len).map(Into::into);
        }
        self.exchange_pieces(&original.to_le_bytes(), &ours.to_le_bytes(), len)
    }

    #[cold]
    fn exchange_pieces(&self, original: &[u8], ours: &[u8], len: u8) -> Option<ExitEdit> {
        let [(first, here), (next, there)] = self.pieces(&(0..usize::from(len)));
        let part = |physical, place: Range<usize>| {
            Edit::new(physical, original.get(place.clone())?, ours.get(place)?)
        };
        let beyond = match there.is_empty() {
            true => None,
            false => Some(Box::new(part(next, there)?)),
        };
        Some(ExitEdit { first: part(first, here)?, beyond })
    }

    /// Adds what puts bytes of ours in the place of as many of its own, or more, counted from its
    /// beginning on; `None` when that cannot be.
    #[inline(always)]
    pub(super) fn replace(
        &self,
        start: usize,
        original: &[u8],
        ours: &[u8],
        edits: &mut Vec<Edit>,
    ) -> Option<()> {
        if self.beyond.is_some() {
            return self.replace_pieces(start, original, ours, edits);
        }
        let physical = self.physical.wrapping_add(start as u64);
        edits.push(Edit::new(physical, original.get(..ours.len())?, ours)?);
        Some(())
    }

    #[cold]
    fn replace_pieces(
        &self,
        start: usize,
        original: &[u8],
        ours: &[u8],
        edits: &mut Vec<Edit>,
    ) -> Option<()> {
        for (physical, place) in self.pieces(&(start..start + ours.len())) {
            let (original, ours) = (original.get(place.clone())?, ours.get(place)?);
            if !ours.is_empty() {
                edits.push(Edit::new(physical, original, ours)?);
            }
        }
        Some(())
    }
}

/// What names a site for as long as a guest runs.
type Key = (Arc<str>, u64, Box<str>);

/// All modules.
#[derive(Debug, Default)]
pub(super) struct Modules {
    /// How many sites the kernel itself has.
    first: usize,
    functions: Vec<(Arc<ModuleFunction>, bool)>,
    numbers: FxHashMap<Key, usize>,
    loaded: Vec<Loaded>,
    exits: exits::Numbered,
}

/// A module that is loaded.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// Run-time address of its `struct module`.
    address: u64,
    /// Its name.
    pub name: Arc<str>,
    /// Numbers of its sites.
    pub sites: Vec<usize>,
    /// All of its functions that are there, by address.
    symbols: Vec<ModuleSymbol>,
    /// Numbers of its exits; `None`: nobody has looked for them yet.
    exits: Option<Vec<usize>>,
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
}

impl Modules {
    pub(super) fn new(kernel: &Kernel) -> Self {
        Self { first: kernel.sites().len(), ..Self::default() }
    }

    /// Where a site is, of the kernel or of a module that is loaded.
    pub(super) fn spot(&self, kernel: &Kernel, image: &Image, site: usize) -> Option<Spot> {
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
    pub(super) fn is_of_module(&self, site: usize) -> bool {
        site >= self.first
    }

    /// Those that are loaded.
    pub(super) fn loaded(&self) -> &[Loaded] {
        &self.loaded
    }

    /// Functions that are there.
    pub(super) fn present(&self) -> impl Iterator<Item = (usize, &Arc<ModuleFunction>)> {
        let all = (self.first..).zip(&self.functions);
        all.filter_map(|(number, (function, present))| present.then_some((number, function)))
    }

    /// A module is loaded: gives numbers to its sites. Whatever was at its address is gone.
    fn add(&mut self, image: &Image, raw: read::Raw) -> Module {
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
        self.loaded.push(Loaded { address: raw.address, name, sites, symbols, exits: None });
        module
    }

    fn slot(&mut self, number: usize) -> Option<&mut (Arc<ModuleFunction>, bool)> {
        self.functions.get_mut(number.checked_sub(self.first)?)
    }

    /// The module with its `struct module` at this address, and its sites.
    pub(super) fn find(&self, address: u64) -> Option<&Loaded> {
        self.loaded.iter().find(|loaded| loaded.address == address)
    }

    /// Sites of a module (by the address of its `struct module`) in this memory (run-time addresses).
    pub(super) fn within(&self, image: &Image, address: u64, range: Range<u64>) -> Vec<usize> {
        let sites = self.find(address).map(|loaded| &loaded.sites[..]).unwrap_or_default();
        let is_in = |&&number: &&usize| {
            let function = number.checked_sub(self.first).and_then(|at| self.functions.get(at));
            function
                .is_some_and(|(function, _)| range.contains(&image.runtime(function.site.location)))
        };
        sites.iter().filter(is_in).copied().collect()
    }

    /// These sites are gone.
    pub(super) fn forget(&mut self, sites: &[usize]) {
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
    pub(super) fn remove(&mut self, address: u64) -> Option<Loaded> {
        let at = self.loaded.iter().position(|loaded| loaded.address == address)?;
        let loaded = self.loaded.swap_remove(at);
        for &site in &loaded.sites {
            if let Some((_, present)) = self.slot(site) {
                *present = false;
            }
        }
        self.exits.forget(loaded.exits.iter().flatten());
        Some(loaded)
    }
}

impl Modules {
    /// Reads the module whose `struct module` is at this run-time address. Whatever was there is
    /// gone.
    ///
    /// # Errors
    /// Why it cannot be read.
    pub(super) fn load(
        &mut self,
        guest: &dyn super::Guest,
        image: &Image,
        offsets: &Offsets,
        address: u64,
    ) -> Result<Module, ModuleError> {
        let raw = read::read(guest, image, offsets, address)?;
        Ok(self.add(image, raw))
    }
}
