//! What is to be traced, on account of which tracer.

use crate::tracer::Ops;
use std::collections::BTreeSet;
use vmtrace_trampolines::Overflow;

/// What to trace.
#[derive(Clone, Debug)]
pub struct Tracing {
    /// The sites of each tracer, indices into [`Kernel::sites`](crate::kernel::Kernel::sites).
    /// A site that several have belongs to the first of them. Those of the first can
    /// change while the guest runs.
    pub tracers: Vec<Vec<usize>>,
    /// Begin when this site is first hit instead of right after `ftrace_init`.
    pub from: Option<usize>,
    /// What happens when a ring is full.
    pub overflow: Overflow,
}

impl Tracing {
    /// Most tracers of a trace.
    pub const MAX_TRACERS: usize = Ops::COUNT as usize;

    /// Every site once, in order, with the ops of its tracer. Tracers beyond
    /// [`Tracing::MAX_TRACERS`] have none.
    #[must_use]
    pub fn sites(&self) -> Vec<(usize, Ops)> {
        let tracers = self.tracers.iter().zip((0..=u8::MAX).map_while(Ops::new));
        let mut all: Vec<_> =
            tracers.flat_map(|(sites, ops)| sites.iter().map(move |&site| (site, ops))).collect();
        all.sort_unstable();
        all.dedup_by_key(|(site, _)| *site);
        all
    }

    /// From what is held to what is to be held: sites to give back, and to take after
    /// that. A site that changes its tracer is in both.
    pub(super) fn changes(
        &self,
        held: impl Iterator<Item = (usize, Ops)>,
    ) -> (Vec<usize>, Vec<(usize, Ops)>) {
        let wanted: BTreeSet<_> = self.sites().into_iter().collect();
        let held: BTreeSet<_> = held.collect();
        let leave = held.difference(&wanted).map(|&(site, _)| site).collect();
        (leave, wanted.difference(&held).copied().collect())
    }

    /// Sites of every tracer, of those in `sites`.
    #[must_use]
    pub fn counts(&self, sites: impl IntoIterator<Item = (usize, Ops)>) -> Vec<u64> {
        let mut counts = vec![0; self.tracers.len().min(Self::MAX_TRACERS)];
        for (_, ops) in sites {
            if let Some(count) = counts.get_mut(usize::from(ops.number())) {
                *count += 1;
            }
        }
        counts
    }

    /// Whether nothing is to be traced.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tracers.iter().all(Vec::is_empty)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tracing(tracers: Vec<Vec<usize>>) -> Tracing {
        Tracing { tracers, from: None, overflow: Overflow::Drop }
    }

    // Two tracers on one site would have its second literal refused as the guest's.
    #[test]
    fn a_site_is_the_first_tracers_that_has_it() {
        let tracing = tracing(vec![vec![5, 6], vec![1, 5], vec![], vec![1, 2]]);
        let sites: Vec<_> = tracing.sites().into_iter().map(|(s, ops)| (s, ops.number())).collect();
        assert_eq!(sites, [(1, 1), (2, 3), (5, 0), (6, 0)]);
        assert_eq!(tracing.counts(tracing.sites()), [2, 1, 0, 1]);
    }

    // A live filter that takes a site from another tracer, and one that lets it go again.
    #[test]
    fn a_site_can_change_its_tracer() {
        let ops = |number| Ops::new(number).unwrap();
        let mut tracing = tracing(vec![vec![5, 6], vec![1]]);
        let held = tracing.sites();
        tracing.tracers[0] = vec![1, 6];
        assert_eq!(tracing.changes(held.into_iter()), (vec![1, 5], vec![(1, ops(0))]));
        let held = tracing.sites();
        tracing.tracers[0] = vec![6];
        assert_eq!(tracing.changes(held.into_iter()), (vec![1], vec![(1, ops(1))]));
    }

    #[test]
    fn there_are_no_more_tracers_than_ops() {
        let tracing = tracing((0..300).map(|site| vec![site]).collect());
        assert_eq!(tracing.sites().len(), Tracing::MAX_TRACERS);
        assert_eq!(tracing.counts(tracing.sites()), vec![1; Tracing::MAX_TRACERS]);
    }

    #[test]
    fn tracers_without_sites_are_nothing() {
        assert!(tracing(vec![]).is_empty() && tracing(vec![vec![], vec![]]).is_empty());
        assert!(!tracing(vec![vec![], vec![1]]).is_empty());
    }
}
