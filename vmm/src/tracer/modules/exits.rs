//! Exits of functions of modules. Like sites, they have numbers after those of the kernel's own,
//! and a module that is loaded again at the same address gets the same numbers again.

use super::numbered::Numbering;
use super::pages::place;
use super::read::Offsets;
use super::table::{Loaded, Modules};
use super::text::{self, ExitsError};
use crate::kernel::{Arch, Exit, ExitKind, Kernel, Missing, ModuleRewrite};
use crate::tracer::guest::Guest;
use crate::tracer::image::Image;
use crate::tracer::spot::Spot;
use rustc_hash::FxHashMap;
use std::ops::Range;
use std::sync::Arc;

/// Bytes that are written at one, where that can be done at any time, or else bytes of a return.
fn span(kernel: &Kernel) -> usize {
    match kernel.arch() {
        Arch::X86_64 => 5,
        Arch::Riscv64 => 2,
    }
}

/// A module of which nothing has run, so that its code can be rewritten.
#[derive(Clone, Copy, Debug)]
pub struct Fresh<'a> {
    /// Run-time address of its `struct module`.
    pub address: u64,
    /// Functions (sites) whose returns may be asked for, ascending.
    pub sites: &'a [usize],
    /// Where all vCPUs stand, and what else is in their registers; `None` when that is not known. What
    /// one of these words leads to is not written again.
    pub words: Option<&'a [u64]>,
}

/// What is known of where the functions of a module are left.
#[derive(Clone, Debug)]
pub struct ModuleCoverage {
    /// The module.
    pub module: Arc<str>,
    /// Its exits, with their numbers.
    pub exits: Vec<(usize, Exit)>,
    /// Sites with an exit that cannot be held; or why none is known.
    pub missing: Result<Vec<(usize, Missing)>, ExitsError>,
    /// Exits for which there is no room, or whose memory is not mapped.
    pub left_out: usize,
}

/// Why the ends of calls of a module's function are not all seen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unseen {
    /// An exit cannot be held, or there is none.
    #[error("{0}")]
    Missing(Missing),
    /// No exit of its module is known.
    #[error("{0}")]
    Unknown(#[from] ExitsError),
    /// There is no room for an exit.
    #[error("there is no room for all places where it is left")]
    NoPlace,
    /// Where exits must be rewritten before they run.
    #[error("nobody had asked for its returns before its module came (--returns GLOB does)")]
    Unasked,
}

/// By site, whether the function may be left by a jump to another one, or why the ends of its calls are not
/// all seen.
pub type Ends = FxHashMap<usize, Result<bool, Unseen>>;

impl Modules {
    /// How the functions of a module are left. Exits that are not `usable` are none.
    pub(in crate::tracer) fn ends(
        &self,
        kernel: &Kernel,
        loaded: &Loaded,
        usable: impl Fn(usize) -> bool,
    ) -> Ends {
        let rewritten = kernel.arch() == Arch::Riscv64;
        let first = |&site: &usize| {
            let is_asked = !rewritten || loaded.asked.binary_search(&site).is_ok();
            let is_known = is_asked && loaded.exits.is_some();
            let why = if is_known { Unseen::Missing(Missing::NoReturn) } else { Unseen::Unasked };
            (site, Err(why))
        };
        let mut ends: Ends = loaded.sites.iter().map(first).collect();
        if let Err(error) = &loaded.missing {
            ends.values_mut().for_each(|end| *end = Err(error.clone().into()));
            return ends;
        }
        let mut unplaced = loaded.unplaced.clone();
        for &number in loaded.exits.iter().flatten() {
            let Some(Numbering { what: exit, .. }) = self.exits.get(number) else { continue };
            let site = exit.site as usize;
            if !usable(number) {
                unplaced.push(site);
            }
            let Some(end) = ends.get_mut(&site) else { continue };
            let jumps = !matches!(exit.kind, ExitKind::Return);
            *end = Ok(jumps || matches!(end, Ok(true)));
        }
        let unplaced = unplaced.into_iter().map(|site| (site, Unseen::NoPlace));
        let missing = loaded.missing.iter().flatten();
        let missing = missing.map(|&(site, why)| (site, Unseen::Missing(why)));
        for (site, why) in unplaced.chain(missing) {
            if let Some(end) = ends.get_mut(&site).filter(|end| **end != Err(Unseen::Unasked)) {
                *end = Err(why);
            }
        }
        ends
    }

    /// An exit by its number, and where it is, if it is there.
    pub(in crate::tracer) fn exit(&self, number: usize) -> Option<(&Exit, Spot)> {
        let found = self.exits.get(number)?;
        let exit = &found.what;
        Some((exit, Spot::place(exit.address, (found.physical, found.beyond))))
    }

    /// Exits that are there, with their numbers.
    pub(in crate::tracer) fn exits(&self) -> impl Iterator<Item = (usize, &Exit)> {
        self.exits.present()
    }

    /// Numbers of the exits of a module (by the address of its `struct module`), or of those in a
    /// part of its memory (run-time addresses).
    pub(in crate::tracer) fn exits_of(
        &self,
        image: &Image,
        address: u64,
        range: Option<&Range<u64>>,
    ) -> Vec<usize> {
        let exits = self.find(address).and_then(|loaded| loaded.exits.as_deref());
        let is_in = |number: &usize| {
            let exit = self.exits.get(*number).map(|found| image.runtime(found.what.address));
            exit.is_some_and(|exit| range.is_none_or(|range| range.contains(&exit)))
        };
        exits.unwrap_or_default().iter().copied().filter(is_in).collect()
    }

    /// What is in this memory (run-time addresses) is gone: exits with these numbers, and functions
    /// in which others might be looked for.
    pub(in crate::tracer) fn forget_exits(
        &mut self,
        address: u64,
        range: &Range<u64>,
        numbers: &[usize],
    ) {
        self.exits.forget(numbers.iter());
        for loaded in self.loaded.iter_mut().filter(|loaded| loaded.is_at(address)) {
            loaded.symbols.retain(|symbol| !range.contains(&symbol.address));
            if let Some(exits) = &mut loaded.exits {
                exits.retain(|&exit| self.exits.get(exit).is_some());
            }
        }
    }

    /// Whether the exits of a function (site) were asked for when its module came.
    pub(in crate::tracer) fn was_asked(&self, site: usize) -> bool {
        self.loaded.iter().any(|loaded| loaded.asked.binary_search(&site).is_ok())
    }

    /// Looks for the exits of modules in which nobody has done so yet, or, where they must be
    /// rewritten, of the fresh one; how much was found of each, and what is to be rewritten.
    pub(in crate::tracer) fn find_exits(
        &mut self,
        guest: &dyn Guest,
        image: &Image,
        kernel: &Kernel,
        offsets: &Offsets,
        fresh: Option<Fresh<'_>>,
    ) -> Vec<(ModuleCoverage, Vec<ModuleRewrite>)> {
        let mut all = Vec::new();
        for at in 0..self.loaded.len() {
            let Some(loaded) = self.loaded.get_mut(at).filter(|it| it.exits.is_none()) else {
                continue;
            };
            if kernel.arch() == Arch::Riscv64 {
                let Some(fresh) = fresh.filter(|fresh| loaded.is_at(fresh.address)) else {
                    continue;
                };
                loaded.asked = fresh.sites.to_vec();
                if fresh.sites.is_empty() {
                    loaded.exits = Some(Vec::new());
                    continue;
                }
            }
            let Some(loaded) = self.loaded.get(at) else { continue };
            let found = self.look(guest, image, kernel, offsets, loaded);
            let mut rewrites = Vec::new();
            if let Ok(exits) = kernel.exits() {
                self.exits.first = exits.all().len();
            }
            let module = Arc::clone(&loaded.name);
            let (exits, missing) = (Vec::new(), Ok(Vec::new()));
            let mut coverage = ModuleCoverage { module, exits, missing, left_out: 0 };
            let mut unplaced = Vec::new();
            match found {
                Ok(found) => {
                    rewrites = found.rewrites;
                    for exit in found.list {
                        let at = place(guest, image, image.runtime(exit.address), span(kernel));
                        match at.and_then(|at| self.exits.number(exit, at)) {
                            Some(number) => coverage.exits.push((number, exit)),
                            None => unplaced.push(exit.site as usize),
                        }
                    }
                    let missing = found.missing.into_iter();
                    coverage.missing =
                        Ok(missing.map(|(site, missing)| (site as usize, missing)).collect());
                }
                Err(error) => coverage.missing = Err(error),
            }
            coverage.left_out = unplaced.len();
            if let Some(loaded) = self.loaded.get_mut(at) {
                loaded.exits = Some(coverage.exits.iter().map(|&(number, _)| number).collect());
                loaded.missing.clone_from(&coverage.missing);
                loaded.unplaced = unplaced;
            }
            all.push((coverage, rewrites));
        }
        all
    }

    fn look(
        &self,
        guest: &dyn Guest,
        image: &Image,
        kernel: &Kernel,
        offsets: &Offsets,
        loaded: &Loaded,
    ) -> Result<crate::kernel::ModuleExits, ExitsError> {
        let functions = self.functions_of(image, loaded);
        let mut text =
            text::read_with_exits(guest, image, &offsets.text, loaded.address, &functions)?;
        let others = self.present().map(|(_, function)| function.site.entry);
        text.others = others.collect();
        text.others.sort_unstable();
        let wanted = loaded.asked.iter().filter_map(|&site| u32::try_from(site).ok());
        text.wanted = wanted.collect();
        let entry = |address: u64| {
            let mut word = [0; 4];
            image.read(guest, image.runtime(address), &mut word).ok()?;
            Some(i32::from_le_bytes(word))
        };
        kernel.module_exits(&text, &entry).map_err(|error| ExitsError::Kernel(error.to_string()))
    }
}
