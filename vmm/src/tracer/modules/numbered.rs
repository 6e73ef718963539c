//! Numbers of the exits of modules.

use crate::kernel::Exit;
use rustc_hash::FxHashMap;

/// Exits of modules in all, as of their sites.
const MOST: usize = 1 << 20;

/// All that there were.
#[derive(Debug, Default)]
pub(super) struct Numbered {
    /// How many exits the kernel itself has, once somebody has asked.
    pub(super) first: usize,
    pub(super) list: Vec<Numbering>,
    numbers: FxHashMap<Exit, usize>,
}

#[derive(Debug)]
pub(super) struct Numbering {
    pub(super) exit: Exit,
    pub(super) physical: u64,
    pub(super) beyond: Option<u64>,
    pub(super) present: bool,
}

impl Numbered {
    /// Of one that is there now, at this guest-physical address and on the page there.
    pub(super) fn number(
        &mut self,
        exit: Exit,
        (physical, beyond): (u64, Option<u64>),
    ) -> Option<usize> {
        let known = Numbering { exit, physical, beyond, present: true };
        if let Some(&number) = self.numbers.get(&exit) {
            *self.slot(number)? = known;
            return Some(number);
        }
        if self.list.len() >= MOST {
            return None;
        }
        let number = self.first + self.list.len();
        self.list.push(known);
        self.numbers.insert(exit, number);
        Some(number)
    }

    pub(super) fn get(&self, number: usize) -> Option<&Numbering> {
        self.list.get(number.checked_sub(self.first)?).filter(|found| found.present)
    }

    pub(super) fn slot(&mut self, number: usize) -> Option<&mut Numbering> {
        self.list.get_mut(number.checked_sub(self.first)?)
    }

    pub(super) fn forget<'a>(&mut self, numbers: impl Iterator<Item = &'a usize>) {
        for &number in numbers {
            if let Some(exit) = self.slot(number) {
                exit.present = false;
            }
        }
    }
}
