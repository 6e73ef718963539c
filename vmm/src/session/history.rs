//! Which functions have been traced when, for those who must know that one was not called.

use super::controller::{Controller, Stage};
use crate::relay::TracedSites;
use crate::stream::{Stretch, TracedOf};
use crate::tracer::{Among, Part, Tally};
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::ops::Range;

/// A tracer, what it traces, and a site.
type Key = (u8, TracedOf, usize);

/// Sites of stretches that have ended, at most: a guest that updates its own ftrace ends stretches as
/// often as it likes.
const MOST: usize = 4 << 20;

/// What is traced, since when, and what has been.
#[derive(Debug, Default)]
pub(super) struct History {
    /// In order.
    open: Vec<(Key, u64)>,
    /// Sites that follow each other are one range: most are of stretches of every function.
    closed: BTreeMap<Stretch, Vec<Range<u32>>>,
    /// Sites in there, and those that there was no room for.
    kept: usize,
    forgotten: usize,
}

impl History {
    /// From `ticks` on these are traced, and nothing else.
    fn change(&mut self, mut now: Vec<Key>, ticks: u64) {
        now.sort_unstable();
        now.dedup();
        let before = std::mem::take(&mut self.open);
        let (mut before, mut now) = (before.into_iter().peekable(), now.into_iter().peekable());
        loop {
            let order = match (before.peek(), now.peek()) {
                (None, None) => break,
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (Some((old, _)), Some(new)) => old.cmp(new),
            };
            match order {
                Ordering::Less => {
                    if let Some((key, since)) = before.next() {
                        self.close(key, since, ticks);
                    }
                }
                Ordering::Equal => {
                    self.open.extend(before.next());
                    now.next();
                }
                Ordering::Greater => self.open.extend(now.next().map(|key| (key, ticks))),
            }
        }
    }

    fn close(&mut self, (tracer, of, site): Key, since: u64, until: u64) {
        // What is open at the end is not forgotten: there are no more of these than sites.
        if self.kept >= MOST && until < u64::MAX {
            self.forgotten += 1;
            return;
        }
        let Ok(site) = u32::try_from(site) else { return };
        self.kept += 1;
        let sites = self.closed.entry(Stretch { since, until, tracer, of }).or_default();
        match sites.last_mut().filter(|last| last.end == site) {
            Some(last) => last.end = last.end.saturating_add(1),
            None => sites.push(site..site.saturating_add(1)),
        }
    }

    /// What the summary says of stretches that are not told. Rules about these times are undecided.
    pub(super) fn note(&self) -> Option<String> {
        (self.forgotten > 0).then(|| {
            format!(
                "what was traced changed so often that {} of the times are not recorded",
                self.forgotten
            )
        })
    }

    /// All of it, up to the end of the trace.
    pub(super) fn finish(mut self) -> Vec<TracedSites> {
        for (key, since) in std::mem::take(&mut self.open) {
            self.close(key, since, u64::MAX);
        }
        let sites = |ranges: Vec<Range<u32>>| {
            ranges.into_iter().flatten().filter_map(|site| usize::try_from(site).ok()).collect()
        };
        self.closed.into_iter().map(|(stretch, ranges)| (stretch, sites(ranges))).collect()
    }
}

/// Whether calls may leave neither a record nor a count.
fn sorts(part: &Part) -> bool {
    // Some of those that are counted by caller may have found no place.
    let sorts = matches!(
        part.counts,
        Some(Tally::Callers(_) | Tally::Sort(..) | Tally::Begin(_) | Tally::End(_))
    );
    // Nor if only the end of a call says whether it is meant, or what it is called in.
    sorts || part.needs_open_calls() || part.needs_marks() || part.nested.is_some()
}

impl Controller {
    /// What is traced has changed at `ticks`, or may have.
    pub(super) fn note_traced(&mut self, ticks: u64) {
        let mut now = Vec::new();
        if let Stage::Attached { attachment, .. } = &self.stage {
            let programs = attachment.duties();
            let tracers = |program: u16| {
                let duty = programs.get(usize::from(program));
                let parts = duty.into_iter().flat_map(|duty| &duty.parts);
                // That such a tracer has no record of a call does not say that there was none.
                let is_told = |part: &&Part| part.condition.is_none() && !sorts(part);
                parts.filter(is_told).map(|part| part.tracer)
            };
            for (site, program) in attachment.sites() {
                now.extend(tracers(program).map(|tracer| (tracer, TracedOf::Entries, site)));
            }
            let mut entries = Among::new(now);
            let mut returns = Vec::new();
            for (exit, program) in attachment.exits() {
                let Some(site) = self.site_of_exit(exit) else { continue };
                for tracer in tracers(program) {
                    // Those of others only help to see the ends of these.
                    let entry = (tracer, TracedOf::Entries, site);
                    if entries.contains(&entry) {
                        returns.push((tracer, TracedOf::Returns, site));
                    }
                }
            }
            now = entries.into_sorted();
            now.append(&mut returns);
        }
        self.history.change(now, ticks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // A function that was traced for a part of the time may have been called in the rest.
    #[test]
    fn every_stretch_is_told_once() {
        let mut history = History::default();
        let entry = |site| (0, TracedOf::Entries, site);
        history.change(vec![entry(7), entry(3)], 10);
        history.change(vec![entry(3), entry(7), (0, TracedOf::Returns, 3)], 20);
        history.change(vec![entry(7), (1, TracedOf::Entries, 7)], 30);
        history.change(vec![entry(3), entry(7), entry(7)], 40);
        let stretch = |since, until, tracer, of| Stretch { since, until, tracer, of };
        let (entries, returns) = (TracedOf::Entries, TracedOf::Returns);
        let expected = [
            (stretch(10, 30, 0, entries), vec![3]),
            (stretch(10, u64::MAX, 0, entries), vec![7]),
            (stretch(20, 30, 0, returns), vec![3]),
            (stretch(30, 40, 1, entries), vec![7]),
            (stretch(40, u64::MAX, 0, entries), vec![3]),
        ];
        assert_eq!(history.finish(), expected);
        assert!(History::default().finish().is_empty());
    }

    // The guest decides how often: memory of the host must not grow with it, and nothing be silently left
    // out.
    #[test]
    fn what_is_kept_is_bounded() {
        let mut history = History::default();
        let some = 1 << 20;
        for ticks in 0..8 {
            let now = if ticks % 2 == 0 { some } else { 0 };
            history.change((0..now).map(|site| (0, TracedOf::Entries, site)).collect(), ticks);
        }
        assert_eq!((history.kept, history.note()), (MOST, None));
        // Nor with how many functions there are.
        assert!(history.closed.values().all(|ranges| ranges.len() == 1));
        history.change(vec![(0, TracedOf::Entries, 1)], 8);
        history.change(vec![(0, TracedOf::Entries, 2)], 9);
        assert!(history.note().is_some_and(|note| note.contains("1 of the times")));
        let told = history.finish();
        assert_eq!(told.len(), 5);
        assert_eq!(told.last().map(|(stretch, _)| stretch.until), Some(u64::MAX));
    }
}
