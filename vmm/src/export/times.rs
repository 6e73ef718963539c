//! Durations of the calls of each function.

use std::collections::HashMap;

use hdrhistogram::Histogram;

use super::{Entry, Name, Return, Unfinished};

/// Most functions that are told apart: more than any kernel has.
const FUNCTIONS: usize = 1 << 20;
/// Most functions that have percentiles: a distribution takes up to 20 KiB.
const DISTRIBUTIONS: usize = 1 << 14;
/// Longest duration that percentiles tell apart, in nanoseconds: about an hour.
const LONGEST: u64 = 1 << 42;
/// Most calls that have not ended: twice as many as pairing knows of. An end that is not shown here,
/// of another vCPU than its entry, would leave a call open for good.
const OPEN: usize = 1 << 19;
/// Most calls around one that are looked at.
const DEEP: usize = 4096;

/// How long calls of each function take, by its address.
///
/// The total time of a function is that of its outermost calls, what it calls included; its self
/// time is that without the calls in it, so far as they were traced. Calls whose duration is not
/// certain have no time, and those that contain one no self time.
#[derive(Debug, Default)]
pub(crate) struct Times {
    pub(crate) functions: HashMap<u64, Function>,
    distributions: usize,
    open: HashMap<u64, Open>,
    /// All calls.
    pub(crate) entries: u64,
    /// Of them, those of functions that there was no room for.
    pub(crate) others: u64,
}

/// What is known of a function's calls; times are in nanoseconds.
#[derive(Debug, Default)]
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) calls: u64,
    /// Calls with a duration.
    pub(crate) timed: u64,
    /// Calls whose self time is known.
    pub(crate) own: u64,
    pub(crate) total: u64,
    pub(crate) own_time: u64,
    pub(crate) longest: u64,
    pub(crate) times: Option<Histogram<u32>>,
}

/// A call that has not ended.
#[derive(Debug)]
struct Open {
    function: u64,
    parent: Option<u64>,
    /// Nanoseconds of the calls in it.
    inner: u64,
    /// One of them has no duration.
    doubtful: bool,
}

impl Times {
    /// Without distributions, which take most of the memory.
    pub(crate) fn without_percentiles() -> Self {
        Self { distributions: DISTRIBUTIONS, ..Self::default() }
    }

    /// Calls that have not ended.
    #[cfg(test)]
    pub(super) fn open(&self) -> usize {
        self.open.len()
    }

    /// Forgets the older half of the calls that have not ended.
    #[cold]
    fn forget(&mut self) {
        let mut frames: Vec<_> = self.open.keys().copied().collect();
        let middle = frames.len() / 2;
        let (_, &mut limit, _) = frames.select_nth_unstable(middle);
        self.open.retain(|frame, _| *frame >= limit);
    }

    fn function(&mut self, name: &Name<'_>) -> Option<&mut Function> {
        if self.functions.len() >= FUNCTIONS && !self.functions.contains_key(&name.address) {
            return None;
        }
        Some(
            self.functions
                .entry(name.address)
                .or_insert_with(|| Function { name: name.label(), ..Function::default() }),
        )
    }

    /// A function was entered so often.
    pub(crate) fn counted(&mut self, function: &Name<'_>, hits: u64) {
        self.entries = self.entries.saturating_add(hits);
        match self.function(function) {
            Some(function) => function.calls = function.calls.saturating_add(hits),
            None => self.others = self.others.saturating_add(hits),
        }
    }

    /// A function was entered.
    pub(crate) fn entry(&mut self, entry: &Entry<'_>) {
        self.counted(&entry.function, 1);
        if let Some(place) = entry.place {
            if self.open.len() >= OPEN {
                self.forget();
            }
            let (function, parent) = (entry.function.address, place.parent);
            let open = Open { function, parent, inner: 0, doubtful: false };
            self.open.insert(place.frame, open);
        }
    }

    /// Whether the function is open around a call.
    fn is_inside(&self, function: u64, mut parent: Option<u64>) -> bool {
        for _ in 0..DEEP {
            let Some(open) = parent.and_then(|parent| self.open.get(&parent)) else { return false };
            if open.function == function {
                return true;
            }
            parent = open.parent;
        }
        false
    }

    /// Takes a call out that has ended, after `took` nanoseconds if that is certain.
    fn close(&mut self, frame: u64, took: Option<u64>) -> Option<Open> {
        let open = self.open.remove(&frame)?;
        if let Some(parent) = open.parent.and_then(|parent| self.open.get_mut(&parent)) {
            match took {
                Some(took) => parent.inner = parent.inner.saturating_add(took),
                None => parent.doubtful = true,
            }
        }
        Some(open)
    }

    /// A function returned.
    pub(crate) fn ret(&mut self, ret: &Return<'_>) {
        let open = ret.frame.and_then(|frame| self.close(frame, ret.duration_ns));
        if ret.whole {
            self.counted(&ret.function, 1);
        }
        let Some(took) = ret.duration_ns.filter(|_| open.is_some() || ret.whole) else { return };
        let inside = open.as_ref().is_some_and(|open| self.is_inside(open.function, open.parent));
        let room = self.distributions < DISTRIBUTIONS;
        let Some(function) = self.function(&ret.function) else { return };
        function.timed += 1;
        function.longest = function.longest.max(took);
        if !inside {
            function.total = function.total.saturating_add(took);
        }
        // What was called in one without an entry is not known.
        if let Some(open) = open.filter(|open| !open.doubtful) {
            function.own += 1;
            function.own_time = function.own_time.saturating_add(took.saturating_sub(open.inner));
        }
        let begins = function.times.is_none() && room;
        if begins {
            // The bounds are right, so that there is one.
            function.times = Histogram::new_with_bounds(1, LONGEST, 2).ok();
        }
        if let Some(times) = &mut function.times {
            times.saturating_record(took.max(1));
        }
        self.distributions += usize::from(begins);
    }

    /// A function was left, nobody knows when.
    pub(crate) fn unfinished(&mut self, unfinished: &Unfinished<'_>) {
        self.close(unfinished.place.frame, None);
    }
}
