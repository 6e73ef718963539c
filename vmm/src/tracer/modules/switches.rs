//! What of modules switches interrupts and preemption. These places have numbers after those of the
//! kernel's own, and one that comes again at its address gets the same number again.

use super::pages::place;
use super::read::Offsets;
use super::table::{Loaded, Modules};
use super::text::{self, ExitsError};
use crate::kernel::Kernel;
use crate::kernel::preemptirq::{ModuleSwitches, SwitchSite};
use crate::tracer::guest::Guest;
use crate::tracer::image::Image;
use crate::tracer::spot::Spot;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Why places are left alone that could be replaced.
const UNMAPPED: &str = "their memory is not mapped";
const TOO_MANY: &str = "modules have too many";

/// What of a module that is loaded switches something.
#[derive(Clone, Debug, Default)]
pub(super) struct Switched {
    /// Numbers of what can be held.
    pub(super) places: Vec<usize>,
    /// Not all of its code could be read, or was as it will be.
    is_partial: bool,
}

/// What was found in a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundSwitches {
    /// The module.
    pub module: Arc<str>,
    /// How many places can be held.
    pub places: usize,
    /// How many others there are, of interrupts and of preemption, by why they cannot; or why none is
    /// known.
    pub unusable: Result<BTreeMap<&'static str, [usize; 2]>, ExitsError>,
    /// Functions, and parts of them, of which nothing is known: they have a breakpoint, or what is no
    /// instruction.
    pub torn: usize,
}

impl FoundSwitches {
    fn is_partial(&self) -> bool {
        self.torn > 0 || self.unusable.is_err()
    }
}

impl Modules {
    /// A place by its number, and where it is, if it is there.
    pub(in crate::tracer) fn switch(&self, number: usize) -> Option<(&SwitchSite, Spot)> {
        let found = self.switches.get(number)?;
        let site = &found.what;
        Some((site, Spot::place(site.address, (found.physical, found.beyond))))
    }

    /// Places that are there, with their numbers.
    pub(in crate::tracer) fn switches(&self) -> impl Iterator<Item = (usize, &SwitchSite)> {
        self.switches.present()
    }

    /// The names of the modules that have places, by their numbers.
    pub(in crate::tracer) fn modules_of_switches(&self) -> FxHashMap<usize, &Arc<str>> {
        let mut all = FxHashMap::default();
        for loaded in &self.loaded {
            let places = loaded.switched.iter().flat_map(|switched| &switched.places);
            all.extend(places.map(|&number| (number, &loaded.name)));
        }
        all
    }

    /// Numbers of the places of a module (by the address of its `struct module`), or of those in a part
    /// of its memory (run-time addresses).
    pub(in crate::tracer) fn switches_of(
        &self,
        image: &Image,
        address: u64,
        range: Option<&Range<u64>>,
    ) -> Vec<usize> {
        let switched = self.find(address).and_then(|loaded| loaded.switched.as_ref());
        let is_in = |number: &usize| {
            let at = self.switches.get(*number).map(|found| image.runtime(found.what.address));
            at.is_some_and(|at| range.is_none_or(|range| range.contains(&at)))
        };
        let places = switched.map(|switched| &switched.places[..]).unwrap_or_default();
        places.iter().copied().filter(is_in).collect()
    }

    /// Places with these numbers, of a module, are gone.
    pub(in crate::tracer) fn forget_switches(&mut self, address: u64, numbers: &[usize]) {
        self.switches.forget(numbers.iter());
        for loaded in self.loaded.iter_mut().filter(|loaded| loaded.is_at(address)) {
            if let Some(switched) = &mut loaded.switched {
                switched.places.retain(|&place| self.switches.get(place).is_some());
            }
        }
    }

    /// Looks for such places in modules in which nobody has done so yet, or (`again`) in which not all
    /// was seen. `count` is where the count of preemptions is, if that is known.
    pub(in crate::tracer) fn find_switches(
        &mut self,
        guest: &dyn Guest,
        image: &Image,
        (kernel, first): (&Kernel, usize),
        (offsets, count): (&Offsets, Option<u64>),
        again: bool,
    ) -> Vec<FoundSwitches> {
        self.switches.first = first;
        let mut all = Vec::new();
        for at in 0..self.loaded.len() {
            let is_due = |it: &&Loaded| match &it.switched {
                None => true,
                Some(switched) => again && switched.is_partial,
            };
            let Some(loaded) = self.loaded.get(at).filter(is_due) else { continue };
            let (address, module) = (loaded.address, Arc::clone(&loaded.name));
            let functions = self.functions_of(image, loaded);
            let look = || {
                let text = text::read(guest, image, &offsets.text, address, &functions)?;
                Ok(kernel.module_switches(&text, count, image.slide))
            };
            let mut found = look();
            if again && found.as_ref().is_ok_and(|found| found.torn > 0) {
                // What a guest that runs was about to change is changed by now.
                found = look();
            }
            let mut switched =
                self.loaded.get(at).and_then(|it| it.switched.clone()).unwrap_or_default();
            let told = self.number_switches((guest, image), module, found, &mut switched.places);
            switched.is_partial = told.is_partial();
            if let Some(loaded) = self.loaded.get_mut(at) {
                loaded.switched = Some(switched);
            }
            all.push(told);
        }
        all
    }

    /// Gives numbers to what was found in a module, of which these `places` were known before.
    fn number_switches(
        &mut self,
        (guest, image): (&dyn Guest, &Image),
        module: Arc<str>,
        found: Result<ModuleSwitches, ExitsError>,
        places: &mut Vec<usize>,
    ) -> FoundSwitches {
        let (list, unusable, torn) = match found {
            Ok(ModuleSwitches { list, unusable, torn }) => (list, unusable, torn),
            Err(error) => {
                return FoundSwitches {
                    module,
                    places: places.len(),
                    unusable: Err(error),
                    torn: 0,
                };
            }
        };
        let mut left = BTreeMap::new();
        let mut leave = |why: &'static str, is_of_interrupts: bool| {
            let [interrupts, preemption] = left.entry(why).or_insert([0; 2]);
            *if is_of_interrupts { interrupts } else { preemption } += 1;
        };
        unusable.iter().for_each(|place| leave(place.why, place.is_of_interrupts));
        for site in list {
            let is_of_interrupts = site.kind.switch().is_of_interrupts();
            // To find where one is takes time, and the guest waits.
            if !self.switches.has_room(&site) {
                leave(TOO_MANY, is_of_interrupts);
                continue;
            }
            let at = place(guest, image, image.runtime(site.address), site.kind.size().into());
            let number = at.ok_or(UNMAPPED);
            match number.and_then(|at| self.switches.number(site, at).ok_or(TOO_MANY)) {
                Ok(number) => places.push(number),
                Err(why) => leave(why, is_of_interrupts),
            }
        }
        places.sort_unstable();
        places.dedup();
        FoundSwitches { module, places: places.len(), unusable: Ok(left), torn }
    }
}
