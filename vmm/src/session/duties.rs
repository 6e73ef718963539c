//! What sites have to do, and for whom, each once.

use crate::tracer::Duty;
use rustc_hash::FxHashMap;

/// Sets of tracers (sorted numbers), each once.
#[derive(Default)]
pub(super) struct Sets {
    all: Vec<Vec<u8>>,
    known: FxHashMap<Vec<u8>, u32>,
}

impl Sets {
    /// In place of one.
    pub(super) const NONE: u32 = u32::MAX;

    pub(super) fn id(&mut self, set: &[u8]) -> u32 {
        if let Some(&id) = self.known.get(set) {
            return id;
        }
        let id = u32::try_from(self.all.len()).unwrap_or(Self::NONE);
        self.all.push(set.to_vec());
        self.known.insert(set.to_vec(), id);
        id
    }

    pub(super) fn get(&self, id: u32) -> &[u8] {
        self.all.get(id as usize).map_or(&[], Vec::as_slice)
    }

    pub(super) fn union(&mut self, a: u32, b: u32) -> u32 {
        if a == b {
            return a;
        }
        let mut both = [self.get(a), self.get(b)].concat();
        both.sort_unstable();
        both.dedup();
        self.id(&both)
    }
}

/// Duties, each once.
#[derive(Default)]
pub(super) struct Duties {
    pub(super) all: Vec<Duty>,
    known: FxHashMap<Duty, u32>,
}

impl Duties {
    /// New ones behind these, which keep their places.
    pub(super) fn behind(all: Vec<Duty>) -> Self {
        Self { all, ..Self::default() }
    }

    pub(super) fn index(&mut self, duty: Duty) -> u32 {
        let next = u32::try_from(self.all.len()).unwrap_or(u32::MAX);
        *self.known.entry(duty).or_insert_with_key(|duty| {
            self.all.push(duty.clone());
            next
        })
    }
}
