//! Which stubs of exits of modules there are, and which of them others can have.
//!
//! A stub holds instructions of a module's function, so a context can stand in it as long as it can
//! stand in the function, and no longer: until the kernel frees the module's code. From then on the
//! stub's place is free, once no vCPU is seen in it.

use super::free_list::FreeList;
use crate::kernel::epilogues::Epilogue;
use crate::tracer::edit::SkipReason;
use crate::tracer::guest::{Guest, GuestError, WalkError};
use crate::tracer::image::Image;
use crate::tracer::spot::PAGE;
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

/// The stubs of exits of modules.
#[derive(Debug, Default)]
pub(super) struct OfModules {
    /// What of the area nobody has.
    pub(super) free: FreeList,
    /// Run-time addresses of relays that nobody has.
    pub(super) relays: Vec<u64>,
    /// Bytes of relays in all.
    pub(super) relay_bytes: u64,
    /// All that there are. A stub depends on nothing but this.
    pub(super) made: HashMap<Epilogue, Made>,
    /// Of each exit that was to be rewritten and is there, by its number, the slot of its stub, or why
    /// it was left alone.
    slots: FxHashMap<usize, Result<u64, SkipReason>>,
    /// How often a module, or a part of its code, has gone.
    departures: u64,
}

/// A stub, and the relay to it.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) way: Way,
    /// Offset in the area, and all of its code, with an empty slot.
    pub(super) at: u64,
    pub(super) stub: Vec<u8>,
    /// Code of the relay.
    pub(super) relay: [u8; 8],
    pub(super) owner: Owner,
    /// Guest-physical address of the page in which the window begins; `None` when it has none.
    pub(super) page: Option<u64>,
}

impl Made {
    /// Where the stub is in the area.
    pub(super) fn range(&self) -> Range<u64> {
        self.at..self.at.saturating_add(self.stub.len() as u64)
    }

    /// Whether any of these words is an address in the stub (which are at the run-time address `area`)
    /// or in the relay.
    fn is_held(&self, area: u64, words: &[u64]) -> bool {
        let stub = (area.wrapping_add(self.at), self.stub.len() as u64);
        let relay = (self.way.relay, self.relay.len() as u64);
        let is_in = |word: u64, (start, len): (u64, u64)| word.wrapping_sub(start) < len;
        words.iter().any(|&word| is_in(word, stub) || is_in(word, relay))
    }
}

/// From a window on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Way {
    /// Run-time address.
    pub(super) relay: u64,
    /// Offset in the area.
    pub(super) slot: u64,
}

/// Whose code leads to a stub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// That of the module with its `struct module` at this run-time address.
    Module(u64),
    /// That of a module that has told that it goes (the how manieth did), and may still run.
    Going(u64),
    /// The same; its memory is another module's by now.
    Gone(u64),
}

impl Owner {
    fn departure(self) -> Option<u64> {
        match self {
            Self::Module(_) => None,
            Self::Going(nth) | Self::Gone(nth) => Some(nth),
        }
    }
}

impl OfModules {
    pub(super) fn new((start, end): (u64, u64)) -> Self {
        Self { free: FreeList::new(start..end), ..Self::default() }
    }

    /// Offset in the area of an exit's slot; `None` when it was not to be rewritten.
    pub(super) fn slot(&self, exit: usize) -> Option<Result<u64, SkipReason>> {
        self.slots.get(&exit).copied()
    }

    /// Exit number `exit` has this slot now.
    pub(super) fn set_slot(&mut self, exit: usize, slot: Result<u64, SkipReason>) {
        self.slots.insert(exit, slot);
    }

    /// A module goes, or what of it is in `range` (run-time addresses): these exits. Its code may
    /// run until the kernel frees it.
    pub(super) fn leave(
        &mut self,
        image: &Image,
        module: u64,
        range: Option<&Range<u64>>,
        exits: &[usize],
    ) {
        for exit in exits {
            self.slots.remove(exit);
        }
        self.departures += 1;
        let is_in = |start| range.is_none_or(|range| range.contains(&image.runtime(start)));
        for (epilogue, made) in &mut self.made {
            if made.owner == Owner::Module(module) && is_in(epilogue.start) {
                made.owner = Owner::Going(self.departures);
            }
        }
    }

    /// A module has come, with functions at these run-time addresses: the kernel has freed the code
    /// that was in these pages before.
    pub(super) fn come(&mut self, image: &Image, functions: &mut dyn Iterator<Item = u64>) {
        let pages: FxHashSet<u64> = functions.map(|function| function / PAGE).collect();
        for (epilogue, made) in &mut self.made {
            if let Owner::Going(nth) = made.owner
                && pages.contains(&(image.runtime(epilogue.start) / PAGE))
            {
                made.owner = Owner::Gone(nth);
            }
        }
    }
}

/// What makes room when there is none: stubs of modules that are gone, those first that went first.
/// All vCPUs stand still as long as there is one of these.
pub(super) struct Reclaim<'a> {
    guest: &'a dyn Guest,
    image: &'a Image,
    /// All that vCPUs hold in their registers; `None` when that is not known.
    words: Option<&'a [u64]>,
    /// Run-time address of the area.
    area: u64,
    /// Departures that were not looked at yet, once it is known which there are.
    left: Option<BTreeSet<u64>>,
    /// Guest-physical addresses of pages by run-time addresses, as far as anybody has asked.
    pages: FxHashMap<u64, Option<Page>>,
}

/// Where a page of code is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Page {
    At(u64),
    Unmapped,
}

impl<'a> Reclaim<'a> {
    pub(super) fn new(
        guest: &'a dyn Guest,
        image: &'a Image,
        words: Option<&'a [u64]>,
        area: u64,
    ) -> Self {
        Self { guest, image, words, area, left: None, pages: FxHashMap::default() }
    }

    /// Takes the stubs and relays of one more departure back: those whose code the kernel has freed,
    /// where no vCPU is seen, and which are as they were left (`is_intact`). False when there are no
    /// more departures.
    pub(super) fn next(
        &mut self,
        of_modules: &mut OfModules,
        is_intact: &dyn Fn(&Made) -> bool,
    ) -> bool {
        let Some(words) = self.words else { return false };
        let left = self.left.get_or_insert_with(|| {
            of_modules.made.values().filter_map(|made| made.owner.departure()).collect()
        });
        let Some(nth) = left.pop_first() else { return false };
        let OfModules { free, relays, made, .. } = of_modules;
        made.retain(|epilogue, made| {
            if made.owner.departure() != Some(nth) {
                return true;
            }
            let is_freed = matches!(made.owner, Owner::Gone(_))
                || self.is_freed(self.image.runtime(epilogue.start), made.page);
            if !is_freed || made.is_held(self.area, words) {
                return true;
            }
            if is_intact(made) {
                free.give(made.range());
                relays.push(made.way.relay);
            } else {
                let at = self.area.wrapping_add(made.at);
                log::warn!("the stub at {at:#x} was changed by others, and is not used again");
            }
            false
        });
        true
    }

    /// Whether the kernel has freed the code at a run-time address, which was in this page: code of
    /// a module is never moved.
    fn is_freed(&mut self, address: u64, before: Option<u64>) -> bool {
        let page = address & !(PAGE - 1);
        let now = *self.pages.entry(page).or_insert_with(|| {
            match self.image.tables.translate(self.guest, page) {
                Ok(physical) => Some(Page::At(physical)),
                Err(GuestError::Unmapped { cause: WalkError::NotPresent(_), .. }) => {
                    Some(Page::Unmapped)
                }
                // That says nothing.
                Err(_) => None,
            }
        });
        match now {
            Some(Page::Unmapped) => true,
            Some(Page::At(physical)) => before != Some(physical),
            None => false,
        }
    }
}
