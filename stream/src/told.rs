//! The counts that were reported so far, for the summary and for consumers that join late.

use std::collections::{BTreeMap, HashSet};

use super::counts::{Bucket, CallerCount, Count, HistogramOf, cut};
use super::summary::Counted;

/// The most counters that are kept: more than any kernel has functions. Readers of text have the
/// same limit.
const MOST: usize = 1 << 20;

/// vCPU, tracer, and what histograms are of: which argument.
type Histograms = (u32, u8, HistogramOf, String);
/// By function and number.
type Words = BTreeMap<(u32, u8), u64>;

/// Sums of all counts of a stream.
#[derive(Debug, Default)]
pub(super) struct Told {
    /// By vCPU and tracer, by function.
    sums: BTreeMap<(u32, u8), BTreeMap<u32, u64>>,
    /// By vCPU and tracer, by function and caller.
    callers: BTreeMap<(u32, u8), BTreeMap<(u32, u32), u64>>,
    /// Words of histograms by vCPU, tracer and what they are of, by function and number.
    sorted: BTreeMap<Histograms, Words>,
    /// Numbers in all of them.
    numbers: usize,
    functions: HashSet<u32>,
    calls: u64,
}

impl Told {
    /// These are told.
    pub(super) fn add(&mut self, vcpu: u32, tracer: u8, counts: &[Count]) {
        for &Count { function, hits } in counts {
            self.sum_up(function, hits);
            let sums = self.sums.entry((vcpu, tracer)).or_default();
            if let Some(sum) = sums.get_mut(&function) {
                *sum = sum.saturating_add(hits);
            } else if self.numbers < MOST {
                sums.insert(function, hits);
                self.numbers += 1;
            }
        }
    }

    /// These are told, by caller.
    pub(super) fn add_callers(&mut self, vcpu: u32, tracer: u8, counts: &[CallerCount]) {
        for &CallerCount { function, caller, hits } in counts {
            self.sum_up(function, hits);
            let sums = self.callers.entry((vcpu, tracer)).or_default();
            if let Some(sum) = sums.get_mut(&(function, caller)) {
                *sum = sum.saturating_add(hits);
            } else if self.numbers < MOST {
                sums.insert((function, caller), hits);
                self.numbers += 1;
            }
        }
    }

    fn sum_up(&mut self, function: u32, hits: u64) {
        // A guest can make up any count.
        self.calls = self.calls.saturating_add(hits);
        if self.functions.len() < MOST {
            self.functions.insert(function);
        }
    }

    /// Words of these histograms are told.
    pub(super) fn sort(
        &mut self,
        (vcpu, tracer): (u32, u8),
        (of, name): (HistogramOf, &str),
        buckets: &[Bucket],
    ) {
        let sums = self.sorted.entry((vcpu, tracer, of, cut(name).to_owned())).or_default();
        for &Bucket { function, bucket, hits } in buckets {
            if let Some(sum) = sums.get_mut(&(function, bucket)) {
                *sum = sum.wrapping_add(hits);
            } else if self.numbers < MOST {
                sums.insert((function, bucket), hits);
                self.numbers += 1;
            }
        }
    }

    /// The number is another tracer's from now on.
    pub(super) fn forget_tracer(&mut self, tracer: u8) {
        self.sums.retain(|(_, of), _| *of != tracer);
        self.callers.retain(|(_, of), _| *of != tracer);
        self.sorted.retain(|(_, of, ..), _| *of != tracer);
        self.count();
    }

    /// The place of so many bytes is another function's from now on.
    pub(super) fn forget_function(&mut self, function: u32, size: u32) {
        let gone = self.sums.values_mut().filter_map(|sums| sums.remove(&function)).count();
        self.numbers -= gone;
        if !self.sorted.is_empty() || !self.callers.is_empty() {
            for sums in self.callers.values_mut() {
                let gone = |caller: u32| caller.wrapping_sub(function) < size;
                sums.retain(|&(of, caller), _| of != function && !gone(caller));
            }
            for words in self.sorted.values_mut() {
                words.retain(|(of, _), _| *of != function);
            }
            self.count();
        }
    }

    fn count(&mut self) {
        let sorted = self.sorted.values().map(BTreeMap::len);
        let callers = self.callers.values().map(BTreeMap::len);
        let sums = self.sums.values().map(BTreeMap::len);
        self.numbers = sums.chain(callers).chain(sorted).sum();
    }

    /// Words of histograms of tracers and functions that have the names that they had.
    pub(super) fn sorted(
        &self,
    ) -> impl Iterator<Item = ((u32, u8), (HistogramOf, &str), Vec<Bucket>)> {
        self.sorted.iter().map(|((vcpu, tracer, of, name), words)| {
            let bucket = |(&(function, bucket), &hits): (&(u32, u8), &u64)| Bucket {
                function,
                bucket,
                hits,
            };
            ((*vcpu, *tracer), (*of, name.as_str()), words.iter().map(bucket).collect())
        })
    }

    /// Of tracers and functions that have the names that they had: by vCPU and tracer.
    pub(super) fn sums(&self) -> impl Iterator<Item = (u32, u8, Vec<Count>)> {
        self.sums.iter().map(|(&(vcpu, tracer), sums)| {
            let count = |(&function, &hits): (&u32, &u64)| Count { function, hits };
            (vcpu, tracer, sums.iter().map(count).collect())
        })
    }

    /// The same by caller: of those that have the names that they had, too.
    pub(super) fn callers(&self) -> impl Iterator<Item = (u32, u8, Vec<CallerCount>)> {
        self.callers.iter().map(|(&(vcpu, tracer), sums)| {
            let count = |(&(function, caller), &hits): (&(u32, u32), &u64)| CallerCount {
                function,
                caller,
                hits,
            };
            (vcpu, tracer, sums.iter().map(count).collect())
        })
    }

    /// All in all; `None` where nothing was counted.
    pub(super) fn all(&self) -> Option<Counted> {
        let functions = self.functions.len() as u64;
        (self.calls > 0).then_some(Counted { functions, calls: self.calls })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tells one number of each kind.
    fn tell(told: &mut Told, tracer: u8, function: u32) {
        told.add(0, tracer, &[Count { function, hits: 1 }]);
        told.add_callers(0, tracer, &[CallerCount { function, caller: 7, hits: 1 }]);
        let bucket = Bucket { function, bucket: 3, hits: 1 };
        told.sort((0, tracer), (HistogramOf::Durations, ""), &[bucket]);
    }

    fn functions(told: &Told) -> [Vec<u32>; 3] {
        let sums = told.sums().flat_map(|(.., counts)| counts).map(|it| it.function);
        let callers = told.callers().flat_map(|(.., counts)| counts).map(|it| it.function);
        let sorted = told.sorted().flat_map(|(.., words)| words).map(|it| it.function);
        [sums.collect(), callers.collect(), sorted.collect()]
    }

    // A guest that makes up functions and callers must not fill our memory.
    #[test]
    fn no_more_numbers_are_kept_than_there_may_be() {
        let mut told = Told { numbers: MOST - 3, ..Told::default() };
        for function in [1, 2, 1] {
            tell(&mut told, 0, function);
        }
        assert_eq!(told.numbers, MOST);
        assert_eq!(functions(&told), [[1], [1], [1]]);
        assert_eq!(told.sums().map(|(.., counts)| counts[0].hits).sum::<u64>(), 2);
    }

    // Each would be taken for one of the tracer that has the number now.
    #[test]
    fn nothing_is_left_of_a_tracer_that_is_gone() {
        let mut told = Told::default();
        for tracer in [0, 1] {
            tell(&mut told, tracer, tracer.into());
        }
        told.forget_tracer(0);
        assert_eq!(functions(&told), [[1], [1], [1]]);
        assert_eq!(told.numbers, 3);
        let mut told = Told::default();
        told.add(0, 0, &[1, 2].map(|function| Count { function, hits: 1 }));
        told.forget_function(1, 16);
        assert_eq!((functions(&told)[0].clone(), told.numbers), (vec![2], 1));
    }
}
