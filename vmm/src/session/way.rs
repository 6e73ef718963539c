//! Ways out of functions.

use super::Tracing;
use crate::kernel::{After, Coverage, Exit, ExitKind, Kernel};
use std::collections::{BTreeMap, BTreeSet};
use vmtrace_trampolines::Point;

/// By what a function is left, as far as it matters to what is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Way {
    Return,
    /// A return of a function that is not traced.
    Aid,
    Jump,
    Indirect,
}

impl Way {
    /// That of an exit.
    pub(super) fn of(exit: &Exit) -> Self {
        match exit.kind {
            ExitKind::Return if exit.site == Exit::NO_SITE => Self::Aid,
            ExitKind::Return => Self::Return,
            ExitKind::Jump { .. } => Self::Jump,
            ExitKind::Indirect { .. } => Self::Indirect,
        }
    }

    /// That of programs there.
    pub(super) fn point(self) -> Point {
        match self {
            Self::Return | Self::Aid => Point::Return,
            Self::Jump | Self::Indirect => Point::Tail,
        }
    }
}

impl Tracing {
    /// Functions (sites) with all of their exits known of which a tracer sees calls, but not all of their ends: they may
    /// be left by a jump to a function (link address) whose returns are seen only by who traces it, too.
    #[must_use]
    pub fn jumping(&self, kernel: &Kernel) -> BTreeMap<usize, u64> {
        let mut found = BTreeMap::new();
        let Ok(exits) = kernel.exits() else { return found };
        let tracers = self.present().map(|(_, tracer)| tracer);
        for tracer in tracers.filter(|tracer| tracer.graph && tracer.histogram.is_none()) {
            let entry = |site: &usize| kernel.sites().get(*site).map(|site| site.entry);
            let traced: BTreeSet<u64> = tracer.sites.iter().filter_map(entry).collect();
            let whole = |site: &&usize| exits.coverage(**site) == Coverage::Whole;
            for &site in tracer.sites.iter().filter(whole) {
                let elsewhere = exits.of(site).iter().find_map(|exit| match exit.kind {
                    ExitKind::Jump { target } if exit.after == After::Nothing => {
                        (!traced.contains(&target)).then_some(target)
                    }
                    _ => None,
                });
                found.extend(elsewhere.map(|target| (site, target)));
            }
        }
        found
    }
}
