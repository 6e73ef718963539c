//! Functions in which calls have gone on by a jump through a pointer, for who wants to see where these end.

use rustc_hash::FxHashSet;
use std::sync::{Arc, Mutex, PoisonError};

/// Pairs that are told, at most: what a guest writes into its rings may be anything.
const MOST: usize = 1 << 16;

/// Functions (link addresses), each with one in which calls of it went on, that nobody has asked for yet.
#[derive(Clone, Debug, Default)]
pub(super) struct Told(Arc<Mutex<Vec<(u64, u64)>>>);

impl Told {
    /// Those that were told since this was called last.
    pub(super) fn take(&self) -> Vec<(u64, u64)> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn push(&self, pair: (u64, u64)) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(pair);
    }
}

/// Tells each once.
#[derive(Debug, Default)]
pub(super) struct Jumps {
    seen: FxHashSet<(u64, u64)>,
    told: Told,
    /// Whether there is something new.
    fresh: bool,
}

impl Jumps {
    pub(super) fn telling(told: Told) -> Self {
        Self { told, ..Self::default() }
    }

    /// A call of a function goes on in another one.
    #[inline]
    pub(super) fn note(&mut self, pair: (u64, u64)) {
        if self.seen.len() < MOST && self.seen.insert(pair) {
            self.told.push(pair);
            self.fresh = true;
        }
    }

    /// Whether something was told since this was called last.
    pub(super) fn take_fresh(&mut self) -> bool {
        std::mem::take(&mut self.fresh)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // A guest that invents functions must not fill our memory, nor wake the controller for ever.
    #[test]
    fn each_pair_is_told_once_and_not_any_number() {
        let told = Told::default();
        let mut jumps = Jumps::telling(told.clone());
        for pair in [(1, 5), (2, 5), (1, 5), (1, 6)] {
            jumps.note(pair);
        }
        assert!(jumps.take_fresh() && !jumps.take_fresh());
        assert_eq!(told.take(), [(1, 5), (2, 5), (1, 6)]);
        jumps.note((1, 5));
        assert!(!jumps.take_fresh());
        (0..2 * MOST as u64).for_each(|function| jumps.note((3, function)));
        assert_eq!(told.take().len(), MOST - 3);
    }
}
