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
use std::ops::Range;
use std::sync::Arc;

/// What of a module that is loaded switches something.
#[derive(Clone, Debug, Default)]
pub(super) struct Switched {
    /// Numbers of what can be held.
    pub(super) places: Vec<usize>,
}

/// What was found in a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundSwitches {
    /// The module.
    pub module: Arc<str>,
    /// How many places can be held.
    pub places: usize,
    /// How many others there are, of interrupts and of preemption: without room for a jump, or
    /// without a number or memory; or why none is known.
    pub unusable: Result<[usize; 2], ExitsError>,
    /// Why most of those others cannot be held.
    pub why: &'static str,
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

    /// The name of the module that has a place, by its number.
    pub(in crate::tracer) fn module_of_switch(&self, number: usize) -> Option<&Arc<str>> {
        let has = |loaded: &&Loaded| {
            loaded.switched.as_ref().is_some_and(|it| it.places.contains(&number))
        };
        self.loaded.iter().find(has).map(|loaded| &loaded.name)
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

    /// Looks for such places in modules in which nobody has done so yet. `count` is where the count of
    /// preemptions is, if that is known.
    pub(in crate::tracer) fn find_switches(
        &mut self,
        guest: &dyn Guest,
        image: &Image,
        (kernel, first): (&Kernel, usize),
        offsets: &Offsets,
        count: Option<u64>,
    ) -> Vec<FoundSwitches> {
        self.switches.first = first;
        let mut all = Vec::new();
        for at in 0..self.loaded.len() {
            let Some(loaded) = self.loaded.get(at).filter(|it| it.switched.is_none()) else {
                continue;
            };
            let functions = self.functions_of(image, loaded);
            let text = text::read(guest, image, &offsets.text, loaded.address, &functions);
            let found = text.map(|text| kernel.module_switches(&text, count, image.slide));
            let module = Arc::clone(&loaded.name);
            let mut switched = Switched::default();
            let mut told = FoundSwitches { module, places: 0, unusable: Ok([0; 2]), why: "" };
            match found {
                Ok(ModuleSwitches { list, unusable, why }) => {
                    told.why = why;
                    let mut left = unusable.map(|own| own.len());
                    for site in list {
                        let address = image.runtime(site.address);
                        let at = place(guest, image, address, site.kind.size().into());
                        match at.and_then(|at| self.switches.number(site, at)) {
                            Some(number) => switched.places.push(number),
                            None => {
                                let [interrupts, preemption] = &mut left;
                                let is_of_interrupts = site.kind.switch().is_of_interrupts();
                                *if is_of_interrupts { interrupts } else { preemption } += 1;
                            }
                        }
                    }
                    told.places = switched.places.len();
                    told.unusable = Ok(left);
                }
                Err(error) => told.unusable = Err(error),
            }
            if let Some(loaded) = self.loaded.get_mut(at) {
                loaded.switched = Some(switched);
            }
            all.push(told);
        }
        all
    }
}
