//! What was told of counts so far: for the summary, and for who joins late.

use std::collections::{BTreeMap, HashSet};

use super::counts::Count;
use super::summary::Counted;

/// Most numbers that are kept, as readers of text do: more than any kernel has.
const MOST: usize = 1 << 20;

/// Sums of all counts of a stream.
#[derive(Debug, Default)]
pub(super) struct Told {
    /// By vCPU and tracer, by function.
    sums: BTreeMap<(u32, u8), BTreeMap<u32, u64>>,
    /// Numbers in there.
    numbers: usize,
    functions: HashSet<u32>,
    calls: u64,
}

impl Told {
    /// These are told.
    pub(super) fn add(&mut self, vcpu: u32, tracer: u8, counts: &[Count]) {
        for &Count { function, hits } in counts {
            // A guest can make up any count.
            self.calls = self.calls.saturating_add(hits);
            if self.functions.len() < MOST {
                self.functions.insert(function);
            }
            let sums = self.sums.entry((vcpu, tracer)).or_default();
            if let Some(sum) = sums.get_mut(&function) {
                *sum = sum.saturating_add(hits);
            } else if self.numbers < MOST {
                sums.insert(function, hits);
                self.numbers += 1;
            }
        }
    }

    /// The number is another tracer's from now on.
    pub(super) fn forget_tracer(&mut self, tracer: u8) {
        self.sums.retain(|(_, of), _| *of != tracer);
        self.numbers = self.sums.values().map(BTreeMap::len).sum();
    }

    /// The place is another function's from now on.
    pub(super) fn forget_function(&mut self, function: u32) {
        let gone = self.sums.values_mut().filter_map(|sums| sums.remove(&function)).count();
        self.numbers -= gone;
    }

    /// Of tracers and functions that have the names that they had: by vCPU and tracer.
    pub(super) fn sums(&self) -> impl Iterator<Item = (u32, u8, Vec<Count>)> {
        self.sums.iter().map(|(&(vcpu, tracer), sums)| {
            let count = |(&function, &hits): (&u32, &u64)| Count { function, hits };
            (vcpu, tracer, sums.iter().map(count).collect())
        })
    }

    /// All in all; `None` where nothing was counted.
    pub(super) fn all(&self) -> Option<Counted> {
        let functions = self.functions.len() as u64;
        (self.calls > 0).then_some(Counted { functions, calls: self.calls })
    }
}
