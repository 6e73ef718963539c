//! The evidence in a trace, and its gaps.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::export::Entry;
use crate::stream::{Stretch, TracedOf};

use super::rule::Functions;

/// Missing records.
#[derive(Debug, Default)]
pub(super) struct Losses {
    /// How many.
    count: u64,
    /// vCPUs of which they are, until there is a record again.
    open: HashSet<u32>,
    /// When the latest of them may have been, of those that are over.
    until: Option<u64>,
    /// Records that were not played in their order.
    pub(super) late: u64,
    /// The stream begins in the middle of the trace.
    pub(super) joined: bool,
    /// The stream has no end.
    pub(super) torn: bool,
}

impl Losses {
    pub(super) fn lost(&mut self, vcpu: u32, count: u64) {
        if count > 0 {
            self.count = self.count.saturating_add(count);
            self.open.insert(vcpu);
        }
    }

    #[inline]
    pub(super) fn record(&mut self, vcpu: u32, ticks: u64) {
        if !self.open.is_empty() && self.open.remove(&vcpu) {
            self.until = self.until.max(Some(ticks));
        }
    }

    /// Whether anything may be missing of what was so far.
    pub(super) fn any(&self) -> bool {
        self.count > 0 || self.joined
    }

    /// Whether anything may be missing from these ticks to now.
    pub(super) fn since(&self, ticks: u64) -> bool {
        !self.open.is_empty() || self.until.is_some_and(|until| until >= ticks)
    }

    /// At most so many records are missing.
    pub(super) fn most(&self) -> u64 {
        if self.joined || self.torn { u64::MAX } else { self.count }
    }

    /// What is missing in all, for people; `None` for nothing.
    pub(super) fn text(&self) -> Option<String> {
        if self.torn {
            Some("the trace is torn: its end is missing".to_owned())
        } else if self.joined {
            Some("the stream was joined late: the beginning of the trace is missing".to_owned())
        } else if self.count > 0 {
            Some(format!("{} records were lost, and may have been of it", self.count))
        } else {
            None
        }
    }

    /// The same where the order matters.
    pub(super) fn text_of_order(&self) -> Option<String> {
        self.text().or_else(|| {
            let late = self.late;
            (late > 0).then(|| {
                format!(
                    "{late} records came late, so that their order is not certain: write the \
                     trace to a file (-o) and check that"
                )
            })
        })
    }
}

/// Which functions were traced when.
#[derive(Debug, Default)]
pub(super) struct Coverage {
    /// From the first to the last moment at which any was.
    window: Option<(u64, u64)>,
    /// Of the functions that rules are about.
    stretches: BTreeMap<(String, TracedOf), Vec<(u64, u64)>>,
    seen: HashSet<String>,
}

impl Coverage {
    pub(super) fn window(&mut self, stretch: &Stretch) {
        if stretch.of == TracedOf::Entries {
            let (since, until) = self.window.unwrap_or((stretch.since, stretch.until));
            self.window = Some((since.min(stretch.since), until.max(stretch.until)));
        }
    }

    pub(super) fn traced(&mut self, stretch: &Stretch, name: &str) {
        let key = (name.to_owned(), stretch.of);
        self.stretches.entry(key).or_default().push((stretch.since, stretch.until));
    }

    /// One was called.
    pub(super) fn saw(&mut self, name: &str) {
        if !self.seen.contains(name) {
            self.seen.insert(name.to_owned());
        }
    }

    pub(super) fn finish(&mut self) {
        for stretches in self.stretches.values_mut() {
            stretches.sort_unstable();
        }
    }

    /// Whether a function was traced as long as any was.
    fn is_whole(&self, stretches: &[(u64, u64)]) -> bool {
        let Some((mut at, end)) = self.window else { return false };
        for &(since, until) in stretches {
            if since > at {
                return false;
            }
            at = at.max(until);
        }
        at >= end
    }

    /// Of which of these it cannot be known whether they were ever called, for people.
    pub(super) fn missing(&self, functions: &Functions) -> Option<String> {
        let known = || self.stretches.keys().map(|(name, _)| name).chain(&self.seen);
        let missing = functions.0.iter().find(|&pattern| {
            let one = Functions(vec![pattern.clone()]);
            !known().any(|name| one.matches(name))
        })?;
        Some(if self.window.is_none() {
            format!(
                "{missing} has no record, and the trace does not say which functions were traced: \
                 only calls that match a condition (--if, --pid, --comm), or none; or it is of an \
                 older vmtrace"
            )
        } else {
            format!(
                "{missing} was not traced: the kernel has no such function (see vmtrace \
                 functions), or the filters leave it out (-f {missing})"
            )
        })
    }

    /// One of these that was not traced all the time, for people.
    pub(super) fn partial(&self, functions: &Functions) -> Option<String> {
        self.window?;
        let mut entries = self.stretches.iter().filter(|((_, of), _)| *of == TracedOf::Entries);
        let ((name, _), _) = entries
            .find(|((name, _), stretches)| functions.matches(name) && !self.is_whole(stretches))?;
        Some(format!("{name} was traced for a part of the time only"))
    }

    /// Whether returns were traced of any that match each of the globs, at any time.
    pub(super) fn has_returns(&self, functions: &Functions) -> bool {
        let mut returning = self.stretches.keys().filter(|(_, of)| *of == TracedOf::Returns);
        returning.any(|(name, _)| functions.matches(name))
    }
}

/// Several tracers record one call several times.
#[derive(Debug, Default)]
pub(super) struct Doubles {
    /// The last entry of each vCPU.
    last: HashMap<u32, (u64, u64, Box<str>)>,
}

impl Doubles {
    /// Whether an entry is not that of another tracer for the same call.
    #[inline]
    pub(super) fn entry(&mut self, entry: &Entry<'_>) -> bool {
        // Without a name there is one tracer so far.
        let Some(tracer) = entry.tracer else { return true };
        let call = (entry.timestamp, entry.function.address);
        if let Some((ticks, address, first)) = self.last.get(&entry.vcpu)
            && (*ticks, *address) == call
        {
            return **first == *tracer;
        }
        self.last.insert(entry.vcpu, (call.0, call.1, tracer.into()));
        true
    }
}
