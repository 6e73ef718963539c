//! The calls that a chart has room for: the longest ones, and entries, merged with their
//! neighbours.

use super::End;

/// A call. None is longer than those around it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Call {
    /// Nanoseconds.
    pub(super) since: u64,
    pub(super) duration: u64,
    pub(super) task: u32,
    pub(super) depth: u32,
    pub(super) name: u32,
    pub(super) vcpu: u32,
    pub(super) end: End,
}

/// An entry without a return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Instant {
    pub(super) at: u64,
    /// So many from here on are shown as this one.
    pub(super) count: u64,
    pub(super) task: u32,
    pub(super) depth: u32,
    pub(super) name: u32,
    pub(super) vcpu: u32,
}

/// What a page has room for.
#[derive(Debug, Default)]
pub(super) struct Kept {
    pub(super) calls: Vec<Call>,
    /// Shorter calls are not kept.
    least: u64,
    left_out: u64,
    pub(super) instants: Vec<Instant>,
    /// Those of one stretch of so many bits of nanoseconds are one.
    bits: u32,
    entries: u64,
}

impl Kept {
    /// Most calls, and most entries.
    pub(super) const MOST: usize = 100_000;

    pub(super) fn call(&mut self, call: Call) {
        if call.duration < self.least {
            self.left_out += 1;
            return;
        }
        self.calls.push(call);
        if self.calls.len() >= 2 * Self::MOST {
            self.cut();
        }
    }

    /// Leaves out the shortest. What is around a call comes before it.
    fn cut(&mut self) {
        if self.calls.len() <= Self::MOST {
            return;
        }
        let order = |call: &Call| (u64::MAX - call.duration, call.since, call.depth);
        let (_, first, _) = self.calls.select_nth_unstable_by_key(Self::MOST, order);
        self.least = first.duration.saturating_add(1);
        self.left_out += u64::try_from(self.calls.len() - Self::MOST).unwrap_or(0);
        self.calls.truncate(Self::MOST);
    }

    pub(super) fn instant(&mut self, instant: Instant) {
        self.entries += 1;
        self.instants.push(instant);
        if self.instants.len() >= 2 * Self::MOST {
            self.merge();
        }
    }

    /// Merges those of a task, a depth and a stretch of time, which is made longer until there is room.
    fn merge(&mut self) {
        self.instants.sort_unstable_by_key(|it| (it.task, it.depth, it.at));
        while self.instants.len() > Self::MOST && self.bits < 63 {
            self.bits += 1;
            let bits = self.bits;
            self.instants.dedup_by(|next, first| {
                let same = (next.task, next.depth, next.at >> bits)
                    == (first.task, first.depth, first.at >> bits);
                if same {
                    first.count += next.count;
                }
                same
            });
        }
        // More tasks than there is room for.
        self.instants.truncate(Self::MOST);
    }

    /// Nothing follows: brings all in the order of tasks, depths and times.
    pub(super) fn finish(&mut self) {
        self.cut();
        self.calls.sort_unstable_by_key(|it| (it.task, it.depth, it.since));
        if self.instants.len() > Self::MOST || self.bits > 0 {
            self.merge();
        }
        self.instants.sort_unstable_by_key(|it| (it.task, it.depth, it.at));
    }

    /// Whether there were entries without a return, and calls.
    pub(super) fn had(&self) -> (u64, bool) {
        (self.entries, !self.calls.is_empty())
    }

    pub(super) fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.left_out > 0 {
            notes.push(format!(
                "{} calls of at most {} ns: left out, the page has room for the {} longest",
                self.left_out,
                self.least - 1,
                Self::MOST
            ));
        }
        if self.bits > 0 {
            let shown: u64 = self.instants.iter().map(|it| it.count).sum();
            notes.push(format!(
                "{} entries without a return: merged to {}, of {} ns each",
                shown,
                self.instants.len(),
                1_u64 << self.bits
            ));
            if shown < self.entries {
                let rest = self.entries - shown;
                notes.push(format!("{rest} entries without a return: left out"));
            }
        }
        notes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // A chart without the calls around a call would be wrong.
    #[test]
    fn the_longest_and_what_is_around_them_stay() {
        let mut kept = Kept::default();
        let most = u64::try_from(Kept::MOST).expect("small");
        let call = |since, duration, depth| Call {
            since,
            duration,
            task: 0,
            depth,
            name: 0,
            vcpu: 0,
            end: End::Seen,
        };
        for number in 0..3 * most {
            let at = number * 1000;
            kept.call(call(at, number % 900, 1));
            kept.call(call(at, number % 900, 0));
        }
        kept.finish();
        assert_eq!(kept.calls.len(), Kept::MOST);
        assert_eq!(kept.left_out, 5 * most);
        let outer: rustc_hash::FxHashSet<_> =
            kept.calls.iter().filter(|it| it.depth == 0).map(|it| it.since).collect();
        let inner = kept.calls.iter().filter(|it| it.depth == 1);
        assert!(inner.clone().count() > 1000);
        // But for those of one length, of which some were seen too late.
        let alone = inner.filter(|it| !outer.contains(&it.since));
        assert!(alone.clone().all(|it| it.duration + 1 >= kept.least), "{:?}", kept.least);
        assert!(kept.notes()[0].starts_with(&format!("{} calls of at most ", 5 * most)));
    }

    #[test]
    fn entries_are_merged_and_counted() {
        let mut kept = Kept::default();
        let most = u64::try_from(Kept::MOST).expect("small");
        for at in 0..5 * most {
            let task = u32::try_from(at % 3).expect("small");
            kept.instant(Instant { at, count: 1, task, depth: 0, name: 0, vcpu: 0 });
        }
        kept.finish();
        assert!(kept.instants.len() <= Kept::MOST && kept.instants.len() > Kept::MOST / 4);
        assert_eq!(kept.instants.iter().map(|it| it.count).sum::<u64>(), 5 * most);
        assert_eq!(kept.notes().len(), 1);
        // More tasks than there is room for.
        let mut kept = Kept::default();
        for task in 0..u32::try_from(2 * most).expect("small") {
            kept.instant(Instant { at: 5, count: 1, task, depth: 0, name: 0, vcpu: 0 });
        }
        kept.finish();
        assert_eq!(kept.instants.len(), Kept::MOST);
        assert!(kept.notes()[1].starts_with(&format!("{most} entries without a return: left out")));
    }
}
