//! What is to be traced, for which tracers.

use super::conditions::Conditional;
use super::events::{Patterns, TracedEvent};
use super::follow::Follow;
use super::histograms::Histogram;
use super::limits::Limits;
use super::triggers::Trigger;
use super::values::Wants;
use crate::kernel::Kernel;
use crate::relay::Values;
use crate::serve::Globs;
use crate::tracer::{Keeper, Part, Tally};
use std::collections::BTreeSet;
use vmtrace_trampolines::{Condition, Field, Overflow};

/// In place of a tracer's number: no record is on its account.
pub(super) const NOBODY: u8 = u8::MAX;

/// One request: which functions, to do what.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tracer {
    /// What it is called.
    pub name: String,
    /// Its functions as they were asked for.
    pub text: String,
    /// The same for functions that come later: those of modules.
    pub globs: Globs,
    /// Indices into [`Kernel::sites`](crate::kernel::Kernel::sites), and behind those
    /// numbers of sites of modules that are loaded; in order.
    pub sites: Vec<usize>,
    /// Whether it records where functions are left, too.
    pub graph: bool,
    /// Whether it counts calls instead of recording them.
    pub counts: bool,
    /// Whether it does that by caller.
    pub by_caller: bool,
    /// What it sorts calls by instead of recording them.
    pub histogram: Option<Histogram>,
    /// What it is to record of calls beside.
    pub wants: Wants,
    /// What that is for these sites.
    pub values: Values,
    /// Of which calls; `None` for all.
    pub condition: Option<Conditional>,
    /// Which part of the call tree, with `graph`.
    pub limits: Limits,
}

impl Tracer {
    /// The same of these sites.
    pub(super) fn with_sites(&self, sites: Vec<usize>) -> Self {
        Self {
            name: self.name.clone(),
            text: self.text.clone(),
            globs: self.globs.clone(),
            sites,
            graph: self.graph,
            counts: self.counts,
            by_caller: self.by_caller,
            histogram: self.histogram.clone(),
            wants: self.wants.clone(),
            values: self.values.clone(),
            condition: self.condition.clone(),
            limits: self.limits.clone(),
        }
    }

    /// Of which calls of the function at a site it records anything.
    pub(super) fn condition(&self, site: usize) -> Option<Condition> {
        self.condition.as_ref().and_then(|condition| condition.at(site))
    }

    /// Whether its records of the function at a site differ from those of others.
    pub(super) fn is_particular(&self, site: usize) -> bool {
        let general = self.condition.as_ref().is_none_or(Conditional::is_general);
        let sorted = self.histogram.as_ref().is_some_and(Histogram::is_particular);
        let limited = self.limits.is_particular(site);
        !general || sorted || limited || self.values.entries.contains_key(&site)
    }

    /// Its part at the entry of the function at a site, if it has one there.
    pub(super) fn entry_part(&self, number: u8, site: usize) -> Option<Part> {
        let nested = self.limits.entry(site);
        let Some(ends) = self.ends() else {
            return Some(Part {
                tracer: number,
                fields: self.entry_fields(site),
                condition: self.condition(site),
                counts: self.tally(site),
                nested,
                aid: false,
            });
        };
        let begin = ends.ends(site)?.begin(number, Keeper::Tracer(number))?;
        Some(Part { nested, ..begin })
    }

    /// What it counts at the entry of the function at a site instead of recording it. Which table is known when
    /// there is a guest.
    pub(super) fn tally(&self, site: usize) -> Option<Tally> {
        match &self.histogram {
            Some(histogram) => histogram.entry(site),
            None if self.by_caller => Some(Tally::Callers(0)),
            None => self.counts.then_some(Tally::Table(0)),
        }
    }

    /// What it wants of the entry at a site.
    pub(super) fn entry_fields(&self, site: usize) -> Vec<Field> {
        if self.histogram.is_some() {
            return Vec::new();
        }
        let values = self.values.entries.get(&site).map_or(&[][..], |recorded| &recorded.fields);
        let reads = values.iter().any(|field| matches!(field, Field::Read(_)));
        let own = [(self.graph, Field::Stack), (reads, Field::Failed)];
        let own = own.into_iter().filter_map(|(wanted, field)| wanted.then_some(field));
        own.chain(values.iter().copied()).collect()
    }

    /// What it wants of the return at a site.
    pub(super) fn return_fields(&self, site: u32) -> Vec<Field> {
        let value = self.values.results.contains_key(&(site as usize));
        let fields = [(true, Field::Stack), (value, Field::Value)];
        fields.into_iter().filter_map(|(wanted, field)| wanted.then_some(field)).collect()
    }
}

/// What to trace.
#[derive(Clone, Debug)]
pub struct Tracing {
    /// Tracers by their numbers, which stand in records; a tracer that is gone leaves a gap.
    pub tracers: Vec<Option<Tracer>>,
    /// Begin when this site is first hit instead of right after `ftrace_init`.
    pub from: Option<usize>,
    /// What happens when a ring is full.
    pub overflow: Overflow,
    /// Bytes of each vCPU's ring; `None`: as many as fit beside the programs.
    pub buffer: Option<u64>,
    /// Sites of functions whose returns may be asked for later.
    pub returns: Vec<usize>,
    /// Patterns of functions of modules whose returns may be asked for later.
    pub returns_of_modules: Vec<String>,
    /// Functions (sites), each with another one in which calls of it were seen to go on by a jump through a pointer.
    pub learned: Vec<(u32, u32)>,
    /// Functions (sites) of [fixed calls](crate::kernel::Exits::fixed_calls) that are jumps in this guest; `None` while nobody
    /// has looked.
    pub directed: Option<BTreeSet<u32>>,
    /// Functions (sites) of the kernel of which not all known exits could be held.
    pub unheld: BTreeSet<u32>,
    /// Events of tracepoints, each of another one, or of other system calls.
    pub events: Vec<TracedEvent>,
    /// What they were asked for by: modules that come later may have others.
    pub patterns: Patterns,
    /// Which of these are recorded; `None` for all.
    pub events_if: Option<Condition>,
    /// How tasks are followed.
    pub follow: Option<Follow>,
    /// Where a task begins that has never run, as seen on its own stack: a site.
    pub begins: Option<usize>,
    /// Calls at which something is to be done.
    pub triggers: Vec<Trigger>,
    /// Whether records tell the state of the CPU.
    pub context: bool,
    /// Whether exits of vCPUs are traced.
    pub exits: bool,
}

impl Tracing {
    /// Most tracers of a trace at a time.
    pub const MAX_TRACERS: usize = 255;

    /// One tracer of these sites.
    #[must_use]
    pub fn of(sites: Vec<usize>, overflow: Overflow) -> Self {
        let (name, text) = (Self::default_name(0), "*".into());
        let tracer = Tracer { name, text, sites, ..Tracer::default() };
        Self {
            tracers: vec![Some(tracer)],
            from: None,
            overflow,
            buffer: None,
            returns: Vec::new(),
            returns_of_modules: Vec::new(),
            learned: Vec::new(),
            directed: None,
            unheld: BTreeSet::new(),
            events: Vec::new(),
            patterns: Patterns::default(),
            events_if: None,
            follow: None,
            begins: None,
            triggers: Vec::new(),
            context: false,
            exits: false,
        }
    }

    /// The name of a tracer that was given none.
    #[must_use]
    pub fn default_name(number: usize) -> String {
        format!("tracer{number}")
    }

    /// Those that are there, with their numbers.
    pub fn present(&self) -> impl Iterator<Item = (u8, &Tracer)> {
        let all = (0..=u8::MAX).zip(&self.tracers);
        all.filter_map(|(number, tracer)| Some((number, tracer.as_ref()?)))
    }

    /// Whether some tracer records only a part of the call tree.
    #[must_use]
    pub fn is_limited(&self) -> bool {
        self.present().any(|(_, tracer)| tracer.limits.is_limited())
    }

    /// Whether calls of initcalls are traced: then readers may want to know what these are.
    pub(super) fn calls_initcalls(&self, kernel: &Kernel) -> bool {
        let is_it = |site: &usize| {
            let site = kernel.sites().get(*site);
            site.and_then(|site| kernel.site_name(site)) == Some("do_one_initcall")
        };
        self.present().any(|(_, tracer)| tracer.sites.iter().any(is_it))
    }

    /// The number of the tracer with this name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<u8> {
        self.present().find(|(_, tracer)| tracer.name == name).map(|(number, _)| number)
    }

    /// Adds a tracer under a number that is free; `None` when there are too many. The first number
    /// is that of the filter.
    ///
    /// A number that comes again shares the programs that were made for it. In a flight recorder
    /// records of its last owner are still there, and would get the new name: there it comes again
    /// only when there is no other.
    pub fn add(&mut self, tracer: Tracer) -> Option<u8> {
        let free = self.tracers.iter().skip(1).position(Option::is_none).map(|free| free + 1);
        let fresh = (self.tracers.len() < Self::MAX_TRACERS).then_some(self.tracers.len().max(1));
        let number = match self.overflow {
            Overflow::Drop | Overflow::Block(_) => free.or(fresh)?,
            Overflow::Overwrite => fresh.or(free)?,
        };
        if number >= self.tracers.len() {
            self.tracers.resize(number + 1, None);
        }
        *self.tracers.get_mut(number)? = Some(tracer);
        u8::try_from(number).ok()
    }

    /// Whether returns are to be traced at all.
    #[must_use]
    pub fn wants_exits(&self) -> bool {
        self.leaving().next().is_some()
    }

    /// Whether tracepoints tell any of the events.
    pub(super) fn has_tracepoints(&self) -> bool {
        let waits = self.patterns.of_modules().next().is_some();
        waits || self.events.iter().any(|event| event.hooks().is_some())
    }

    /// Whether returns are to be traced, or may be asked for later.
    #[must_use]
    pub fn may_want_exits(&self) -> bool {
        self.wants_exits() || !self.returns.is_empty() || !self.returns_of_modules.is_empty()
    }

    /// Whether there is something that can only be held when the kernel has patched its alternatives.
    pub(super) fn waits_for_alternatives(&self) -> bool {
        self.wants_exits() || self.events.iter().any(|event| event.switch().is_some())
    }

    /// Sites of functions whose returns are asked for, or may be later; in order.
    #[must_use]
    pub fn returning(&self) -> Vec<usize> {
        let mut sites = self.returns.clone();
        sites.extend(self.leaving().flat_map(|(_, sites)| sites));
        sites.sort_unstable();
        sites.dedup();
        sites
    }

    pub(super) fn numbered(&self, number: u8) -> Option<(u8, &Tracer)> {
        let tracer = self.tracers.get(usize::from(number)).and_then(Option::as_ref);
        tracer.map(|tracer| (number, tracer))
    }

    /// Whether nothing is to be traced, now or when a module is loaded.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let of_functions = |tracer: &Tracer| !tracer.sites.is_empty() || tracer.names_modules();
        !self.exits
            && self.events.is_empty()
            && self.patterns.of_modules().next().is_none()
            && !self.present().any(|(_, tracer)| of_functions(tracer))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::plan::Plan;
    use super::*;

    pub(in crate::session) fn tracing(sites: &[&[usize]]) -> Tracing {
        let tracer = |(number, sites): (usize, &&[usize])| {
            let name = Tracing::default_name(number);
            Some(Tracer { name, sites: sites.to_vec(), ..Tracer::default() })
        };
        let tracers = sites.iter().enumerate().map(tracer).collect();
        Tracing {
            tracers,
            from: None,
            overflow: Overflow::Drop,
            buffer: None,
            returns: Vec::new(),
            returns_of_modules: Vec::new(),
            learned: Vec::new(),
            directed: None,
            unheld: BTreeSet::new(),
            events: Vec::new(),
            patterns: Patterns::default(),
            events_if: None,
            follow: None,
            begins: None,
            triggers: Vec::new(),
            context: false,
            exits: false,
        }
    }

    pub(in crate::session) fn planned(tracing: &Tracing) -> Vec<(usize, Vec<u8>)> {
        let plan = Plan::of(tracing, &[]);
        let tracers =
            |duty: u32| plan.duties[duty as usize].parts.iter().map(|part| part.tracer).collect();
        plan.sites.iter().map(|&(site, duty)| (site, tracers(duty))).collect()
    }

    // Numbers that are not used again would fill the guest with programs.
    #[test]
    fn numbers_are_used_again() {
        for overflow in [Overflow::Drop, Overflow::Overwrite] {
            let mut tracing = tracing(&[&[1]]);
            tracing.overflow = overflow;
            let tracer = tracing.tracers[0].clone().unwrap();
            assert_eq!(tracing.add(tracer.clone()), Some(1));
            tracing.tracers[1] = None;
            // Records of the one before are still in a flight recorder.
            let second = if overflow == Overflow::Drop { 1 } else { 2 };
            assert_eq!(tracing.add(tracer.clone()), Some(second));
            for number in second + 1..=254 {
                assert_eq!(tracing.add(tracer.clone()), Some(number));
            }
            if overflow == Overflow::Overwrite {
                assert_eq!(tracing.add(tracer.clone()), Some(1));
            }
            assert_eq!(tracing.add(tracer.clone()), None);
            tracing.tracers[7] = None;
            assert_eq!(tracing.add(tracer), Some(7));
            assert_eq!(planned(&tracing)[0].1.len(), Tracing::MAX_TRACERS);
        }
        let mut nothing = tracing(&[]);
        assert_eq!(nothing.add(Tracer { name: "a".to_owned(), ..Tracer::default() }), Some(1));
        assert!(nothing.tracers[0].is_none(), "the filter's place");
    }

    #[test]
    fn tracers_without_sites_are_nothing() {
        assert!(tracing(&[]).is_empty() && tracing(&[&[], &[]]).is_empty());
        assert!(!tracing(&[&[], &[1]]).is_empty());
    }
}
