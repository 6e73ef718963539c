//! Numbers of places of modules: those where functions are left, and those that switch interrupts or
//! preemption.

use rustc_hash::FxHashMap;
use std::hash::Hash;

/// All of a kind that there were.
#[derive(Debug)]
pub(super) struct Numbered<T> {
    /// How many the kernel itself has, once somebody has asked.
    pub(super) first: usize,
    pub(super) list: Vec<Numbering<T>>,
    numbers: FxHashMap<T, usize>,
    most: usize,
}

#[derive(Debug)]
pub(super) struct Numbering<T> {
    pub(super) what: T,
    pub(super) physical: u64,
    pub(super) beyond: Option<u64>,
    pub(super) present: bool,
}

impl<T: Copy + Eq + Hash> Numbered<T> {
    /// So many in all at most: a guest that keeps loading modules cannot fill the host's memory.
    pub(super) fn new(most: usize) -> Self {
        Self { first: 0, list: Vec::new(), numbers: FxHashMap::default(), most }
    }

    /// Whether one has a number, or gets one.
    pub(super) fn has_room(&self, what: &T) -> bool {
        self.list.len() < self.most || self.numbers.contains_key(what)
    }

    /// Of one that is there now, at this guest-physical address and on the page there.
    pub(super) fn number(
        &mut self,
        what: T,
        (physical, beyond): (u64, Option<u64>),
    ) -> Option<usize> {
        let known = Numbering { what, physical, beyond, present: true };
        if let Some(&number) = self.numbers.get(&what) {
            *self.slot(number)? = known;
            return Some(number);
        }
        if self.list.len() >= self.most {
            return None;
        }
        let number = self.first + self.list.len();
        self.list.push(known);
        self.numbers.insert(what, number);
        Some(number)
    }

    pub(super) fn get(&self, number: usize) -> Option<&Numbering<T>> {
        self.list.get(number.checked_sub(self.first)?).filter(|found| found.present)
    }

    /// Those that are there, with their numbers.
    pub(super) fn present(&self) -> impl Iterator<Item = (usize, &T)> {
        let all = (self.first..).zip(&self.list);
        all.filter(|(_, found)| found.present).map(|(number, found)| (number, &found.what))
    }

    pub(super) fn slot(&mut self, number: usize) -> Option<&mut Numbering<T>> {
        self.list.get_mut(number.checked_sub(self.first)?)
    }

    pub(super) fn forget<'a>(&mut self, numbers: impl Iterator<Item = &'a usize>) {
        for &number in numbers {
            if let Some(known) = self.slot(number) {
                known.present = false;
            }
        }
    }
}
