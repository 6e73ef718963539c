//! What is to be traced, for which tracers.

use super::conditions::Conditional;
use super::events::{Patterns, TracedEvent};
use super::follow::Follow;
use super::histograms::Histogram;
use super::triggers::Trigger;
use super::values::Wants;
use crate::kernel::{Exit, ExitKind, Kernel};
use crate::relay::Values;
use crate::serve::Globs;
use crate::tracer::{Duty, Part, Tally};
use rustc_hash::FxHashMap;
use vmtrace_trampolines::{Condition, Field, Overflow, Point, ProgramError};

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
        }
    }

    /// Of which calls of the function at a site it records anything.
    fn condition(&self, site: usize) -> Option<Condition> {
        self.condition.as_ref().and_then(|condition| condition.at(site))
    }

    /// Whether its records of the function at a site differ from those of others.
    fn is_particular(&self, site: usize) -> bool {
        let general = self.condition.as_ref().is_none_or(Conditional::is_general);
        let sorted = self.histogram.as_ref().is_some_and(Histogram::is_particular);
        !general || sorted || self.values.entries.contains_key(&site)
    }

    /// Its part at the entry of the function at a site, if it has one there.
    fn entry_part(&self, number: u8, site: usize) -> Option<Part> {
        let Some(ends) = self.ends() else {
            return Some(Part {
                tracer: number,
                fields: self.entry_fields(site),
                condition: self.condition(site),
                counts: self.tally(site),
            });
        };
        ends.ends(site)?.begin(number)
    }

    /// What it counts at the entry of the function at a site instead of recording it. Which table is known when
    /// there is a guest.
    fn tally(&self, site: usize) -> Option<Tally> {
        match &self.histogram {
            Some(histogram) => histogram.entry(site),
            None if self.by_caller => Some(Tally::Callers(0)),
            None => self.counts.then_some(Tally::Table(0)),
        }
    }

    /// What it wants of the entry at a site.
    fn entry_fields(&self, site: usize) -> Vec<Field> {
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
    /// Events of tracepoints, each of another one, or of other system calls.
    pub events: Vec<TracedEvent>,
    /// What they were asked for by: modules that come later may have others.
    pub patterns: Patterns,
    /// Which of these are recorded; `None` for all.
    pub events_if: Option<Condition>,
    /// How tasks are followed.
    pub follow: Option<Follow>,
    /// Calls at which something is to be done.
    pub triggers: Vec<Trigger>,
    /// Whether records tell the state of the CPU.
    pub context: bool,
    /// Whether exits of vCPUs are traced.
    pub exits: bool,
}

/// What every site has to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Each once.
    pub duties: Vec<Duty>,
    /// Sites in order, each with the index of its duty.
    pub sites: Vec<(usize, u32)>,
    /// Exits (indices into [`Exits::all`](crate::kernel::Exits::all)) with that of theirs.
    pub exits: Vec<(usize, u32)>,
    /// Events (indices into [`Tracing::events`]) with that of theirs.
    pub events: Vec<(usize, u32)>,
}

impl Plan {
    /// The sites alone.
    #[must_use]
    pub fn indices(&self) -> Vec<usize> {
        self.sites.iter().map(|&(site, _)| site).collect()
    }

    /// Has every record tell the state of the CPU.
    fn add_context(&mut self) {
        let parts = self.duties.iter_mut().flat_map(|duty| &mut duty.parts);
        let recorded = parts.filter(|part| part.counts.is_none());
        recorded.for_each(|part| part.fields.push(Field::Context));
    }
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
            events: Vec::new(),
            patterns: Patterns::default(),
            events_if: None,
            follow: None,
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
        self.present().any(|(_, tracer)| tracer.graph)
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
        let graphs = self.present().filter(|(_, tracer)| tracer.graph);
        let mut sites = self.returns.clone();
        sites.extend(graphs.flat_map(|(_, tracer)| &tracer.sites));
        sites.sort_unstable();
        sites.dedup();
        sites
    }

    /// Every site and every one of these `exits` once, with what it has to do for all of its
    /// tracers together.
    #[must_use]
    pub fn plan(&self, exits: &[Exit]) -> Plan {
        self.plan_with(&[], exits)
    }

    /// The same with exits of modules, which have indices behind those.
    #[must_use]
    pub fn plan_with(&self, of_modules: &[(usize, Exit)], exits: &[Exit]) -> Plan {
        let mut plan = self.plan_functions(of_modules, exits);
        self.plan_events(&mut plan);
        if self.context {
            plan.add_context();
        }
        self.plan_always(&mut plan);
        plan
    }

    fn plan_functions(&self, of_modules: &[(usize, Exit)], exits: &[Exit]) -> Plan {
        let mut present: Vec<_> = self.present().filter(|(_, t)| !t.sites.is_empty()).collect();
        if let [(number, tracer)] = present[..]
            && !tracer.graph
            && !tracer.counts
            && tracer.histogram.is_none()
            && tracer.condition.is_none()
            && tracer.values.entries.is_empty()
        {
            let sites = tracer.sites.iter().map(|&site| (site, 0)).collect();
            return Plan { duties: vec![Duty::entry(vec![number])], sites, ..Plan::default() };
        }
        present.sort_unstable_by_key(|&(number, _)| number);
        let mut all: Vec<(usize, u8)> = present
            .iter()
            .flat_map(|(number, tracer)| tracer.sites.iter().map(move |&site| (site, *number)))
            .collect();
        all.sort_unstable();
        all.dedup();
        let mut duties = Duties::default();
        let mut plan = Plan::default();
        plan.sites.reserve(all.len());
        let mut sets = Sets::default();
        // By site, the set of those that want its returns.
        let mut graphed = vec![Sets::NONE; all.last().map_or(0, |&(site, _)| site + 1)];
        let mut entries: FxHashMap<u32, Option<u32>> = FxHashMap::default();
        let mut numbers: Vec<u8> = Vec::new();
        for of_site in all.chunk_by(|a, b| a.0 == b.0) {
            let Some(&(site, _)) = of_site.first() else { continue };
            numbers.clear();
            numbers.extend(of_site.iter().map(|&(_, number)| number));
            let tracers = numbers.iter().filter_map(|&number| self.numbered(number));
            let mut duty = || {
                let part = |(tracer, wants): (u8, &Tracer)| wants.entry_part(tracer, site);
                let parts: Vec<_> = tracers.clone().filter_map(part).collect();
                let point = Point::Entry;
                (!parts.is_empty()).then(|| duties.index(Duty { point, parts }))
            };
            // Most sites do what others with the same tracers do.
            let own = tracers.clone().any(|(_, t)| t.is_particular(site));
            let duty =
                if own { duty() } else { *entries.entry(sets.id(&numbers)).or_insert_with(duty) };
            // Where ends alone are looked at, nothing is to be done here.
            plan.sites.extend(duty.map(|duty| (site, duty)));
            numbers.retain(|&number| self.numbered(number).is_some_and(|(_, t)| t.graph));
            if let (false, Some(set)) = (numbers.is_empty(), graphed.get_mut(site)) {
                *set = sets.id(&numbers);
            }
        }
        // Who jumps to what cannot be traced ends where that does.
        let mut aided: FxHashMap<u32, u32> = FxHashMap::default();
        let mut leaving: FxHashMap<(u32, Way), u32> = FxHashMap::default();
        let of_modules = of_modules.iter().map(|(index, exit)| (*index, exit));
        for (index, exit) in of_modules.chain(exits.iter().enumerate()) {
            let group = exit.after.group();
            let set = match (exit.site, group) {
                // They come last: behind those of modules, too.
                (Exit::NO_SITE, Some(group)) => aided.get(&group).copied(),
                (site, _) => graphed.get(site as usize).copied(),
            };
            let Some(set) = set.filter(|&set| set != Sets::NONE) else { continue };
            if let (true, Some(group)) = (exit.site != Exit::NO_SITE, group) {
                let both = aided.get(&group).map_or(set, |&before| sets.union(before, set));
                aided.insert(group, both);
            }
            let way = Way::of(exit);
            let duty = || self.leave(sets.get(set), exit, way);
            let site = exit.site as usize;
            let mut tracers = sets.get(set).iter().filter_map(|&number| self.numbered(number));
            let own = tracers.any(|(_, tracer)| match &tracer.histogram {
                Some(histogram) => histogram.is_particular(),
                None if tracer.ends().is_some() => true,
                None => way == Way::Return && tracer.values.results.contains_key(&site),
            });
            let known = leaving.get(&(set, way)).filter(|_| !own);
            let duty = match known {
                Some(&duty) => duty,
                None => {
                    let duty = duty();
                    if duty.parts.is_empty() {
                        continue;
                    }
                    duties.index(duty)
                }
            };
            if !own {
                leaving.insert((set, way), duty);
            }
            plan.exits.push((index, duty));
        }
        plan.duties = duties.all;
        plan
    }

    /// What an exit has to do for these tracers.
    fn leave(&self, tracers: &[u8], exit: &Exit, way: Way) -> Duty {
        let fields = |tracer: &Tracer| match way {
            Way::Return => tracer.return_fields(exit.site),
            Way::Aid | Way::Jump => vec![Field::Stack],
            Way::Indirect => vec![Field::Stack, Field::Target],
        };
        let point = match way {
            Way::Return | Way::Aid => Point::Return,
            Way::Jump | Way::Indirect => Point::Tail,
        };
        let parts = tracers.iter().filter_map(|&number| self.numbered(number));
        // Only conditions that hold at every function are of tracers that want returns.
        let site = exit.site as usize;
        let part = |(tracer, wants): (u8, &Tracer)| match &wants.histogram {
            None if wants.ends().is_some() => wants.end_part(tracer, exit, way),
            // What has begun is what is meant.
            Some(histogram) => {
                let counts = Some(histogram.exit(site, way)?);
                Some(Part { tracer, fields: Vec::new(), condition: None, counts })
            }
            None => {
                let condition = wants.condition(site);
                Some(Part { tracer, fields: fields(wants), condition, counts: None })
            }
        };
        Duty { point, parts: parts.filter_map(part).collect() }
    }

    pub(super) fn numbered(&self, number: u8) -> Option<(u8, &Tracer)> {
        let tracer = self.tracers.get(usize::from(number)).and_then(Option::as_ref);
        tracer.map(|tracer| (number, tracer))
    }

    /// Whether each function's record has room for all that its tracers want.
    ///
    /// # Errors
    /// Why not, for one of them.
    pub fn check(&self) -> Result<(), (usize, ProgramError)> {
        let plan = self.plan(&[]);
        let mut failed: Vec<Option<ProgramError>> = vec![];
        let check = |duty: &Duty| {
            duty.records().iter().find_map(|one| one.program(0, None, None).check().err())
        };
        failed.extend(plan.duties.iter().map(check));
        for (site, duty) in plan.sites {
            if let Some(Some(error)) = failed.get(duty as usize) {
                return Err((site, error.clone()));
            }
        }
        Ok(())
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
    fn of(exit: &Exit) -> Self {
        match exit.kind {
            ExitKind::Return if exit.site == Exit::NO_SITE => Self::Aid,
            ExitKind::Return => Self::Return,
            ExitKind::Jump { .. } => Self::Jump,
            ExitKind::Indirect { .. } => Self::Indirect,
        }
    }
}

/// Sets of tracers (sorted numbers), each once.
#[derive(Default)]
struct Sets {
    all: Vec<Vec<u8>>,
    known: FxHashMap<Vec<u8>, u32>,
}

impl Sets {
    /// In place of one.
    const NONE: u32 = u32::MAX;

    fn id(&mut self, set: &[u8]) -> u32 {
        if let Some(&id) = self.known.get(set) {
            return id;
        }
        let id = u32::try_from(self.all.len()).unwrap_or(Self::NONE);
        self.all.push(set.to_vec());
        self.known.insert(set.to_vec(), id);
        id
    }

    fn get(&self, id: u32) -> &[u8] {
        self.all.get(id as usize).map_or(&[], Vec::as_slice)
    }

    fn union(&mut self, a: u32, b: u32) -> u32 {
        if a == b {
            return a;
        }
        let mut both = [self.get(a), self.get(b)].concat();
        both.sort_unstable();
        both.dedup();
        self.id(&both)
    }
}

/// Duties, each once.
#[derive(Default)]
pub(super) struct Duties {
    pub(super) all: Vec<Duty>,
    known: FxHashMap<Duty, u32>,
}

impl Duties {
    /// New ones behind these, which keep their places.
    pub(super) fn behind(all: Vec<Duty>) -> Self {
        Self { all, ..Self::default() }
    }

    pub(super) fn index(&mut self, duty: Duty) -> u32 {
        let next = u32::try_from(self.all.len()).unwrap_or(u32::MAX);
        *self.known.entry(duty).or_insert_with_key(|duty| {
            self.all.push(duty.clone());
            next
        })
    }
}

/// From what is held to what is to be held (sites with their programs): sites to give back, and to
/// take after that. A site that changes its program is in both.
pub(super) fn changes(
    held: impl Iterator<Item = (usize, u16)> + Clone,
    wanted: &[(usize, u16)],
) -> (Vec<usize>, Vec<(usize, u16)>) {
    // A guest waits while tens of thousands are compared. Nearly always all stays as it is.
    if held.clone().eq(wanted.iter().copied()) {
        return (Vec::new(), Vec::new());
    }
    // Sorted lists and no trees.
    let sorted = |mut list: Vec<(usize, u16)>| {
        list.sort_unstable();
        list
    };
    let (held, wanted) = (sorted(held.collect()), sorted(wanted.to_vec()));
    let (mut leave, mut take) = (Vec::new(), Vec::new());
    let (mut old, mut new) = (held.into_iter().peekable(), wanted.into_iter().peekable());
    loop {
        match (old.peek(), new.peek()) {
            (None, None) => return (leave, take),
            (Some(a), Some(b)) if a == b => {
                old.next();
                new.next();
            }
            (Some(a), b) if b.is_none_or(|b| a < b) => {
                leave.extend(old.next().map(|(place, _)| place));
            }
            _ => take.extend(new.next()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::After;

    fn tracing(sites: &[&[usize]]) -> Tracing {
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
            events: Vec::new(),
            patterns: Patterns::default(),
            events_if: None,
            follow: None,
            triggers: Vec::new(),
            context: false,
            exits: false,
        }
    }

    fn planned(tracing: &Tracing) -> Vec<(usize, Vec<u8>)> {
        let plan = tracing.plan(&[]);
        let tracers =
            |duty: u32| plan.duties[duty as usize].parts.iter().map(|part| part.tracer).collect();
        plan.sites.iter().map(|&(site, duty)| (site, tracers(duty))).collect()
    }

    // A site that left a tracer out would silently lose its records.
    #[test]
    fn a_site_works_for_all_of_its_tracers() {
        let mut tracing = tracing(&[&[5, 6], &[1, 5], &[], &[1, 5]]);
        let all = [(1, vec![1, 3]), (5, vec![0, 1, 3]), (6, vec![0])];
        assert_eq!(planned(&tracing), all);
        assert_eq!(tracing.plan(&[]).duties.len(), 3);
        tracing.tracers[1] = None;
        assert_eq!(planned(&tracing), [(1, vec![3]), (5, vec![0, 3]), (6, vec![0])]);
        tracing.tracers[0] = None;
        assert_eq!(planned(&tracing), [(1, vec![3]), (5, vec![3])]);
    }

    // A return for a tracer that has no entries of it, or the other way round, has no duration.
    #[test]
    fn exits_work_for_those_tracers_that_want_them() {
        let mut tracing = tracing(&[&[5, 6], &[5], &[7]]);
        tracing.tracers[1].as_mut().unwrap().graph = true;
        let exit = |site, kind| {
            let after = After::Nothing;
            Exit { address: 0, function: u64::from(site), site, kind, after }
        };
        let jump = ExitKind::Jump { target: 1 };
        let exits = [(5, ExitKind::Return), (5, jump), (6, jump), (7, ExitKind::Return)];
        let exits = exits.map(|(site, kind)| exit(site, kind));
        assert!(tracing.wants_exits());
        tracing.returns = vec![9, 5];
        assert_eq!(tracing.returning(), [5, 9]);
        let plan = tracing.plan(&exits);
        let duty = |index: u32| {
            let duty = &plan.duties[index as usize];
            let tracers: Vec<_> = duty.parts.iter().map(|part| part.tracer).collect();
            (duty.point, tracers, duty.fields().len())
        };
        let sites: Vec<_> = plan.sites.iter().map(|&(site, index)| (site, duty(index))).collect();
        let entry = |tracers: &[u8], fields| (Point::Entry, tracers.to_vec(), fields);
        assert_eq!(sites, [(5, entry(&[0, 1], 1)), (6, entry(&[0], 0)), (7, entry(&[2], 0))]);
        let exits: Vec<_> = plan.exits.iter().map(|&(exit, index)| (exit, duty(index))).collect();
        assert_eq!(exits, [(0, (Point::Return, vec![1], 1)), (1, (Point::Tail, vec![1], 1))]);
    }

    // A function of a module that jumps to one that cannot be traced ends where that does.
    #[test]
    fn exits_of_modules_are_planned_with_those_that_they_need() {
        let mut tracing = tracing(&[&[5, 90], &[91]]);
        tracing.tracers.iter_mut().flatten().for_each(|tracer| tracer.graph = true);
        let exit = |site, kind, after| Exit { address: 0, function: 1, site, kind, after };
        let jump = ExitKind::Jump { target: 1 };
        let own = [
            exit(5, ExitKind::Return, After::Nothing),
            exit(Exit::NO_SITE, ExitKind::Return, After::Group(3)),
            exit(Exit::NO_SITE, ExitKind::Return, After::Group(4)),
        ];
        let of_modules = [
            (70, exit(90, jump, After::Group(3))),
            (71, exit(91, ExitKind::Return, After::Nothing)),
            (72, exit(92, ExitKind::Return, After::Nothing)),
        ];
        let plan = tracing.plan_with(&of_modules, &own);
        let tracers = |duty: u32| {
            let duty = &plan.duties[duty as usize];
            (duty.point, duty.parts.iter().map(|part| part.tracer).collect::<Vec<_>>())
        };
        let mut exits: Vec<_> =
            plan.exits.iter().map(|&(exit, duty)| (exit, tracers(duty))).collect();
        exits.sort_unstable_by_key(|&(exit, _)| exit);
        let expected = [
            (0, (Point::Return, vec![0])),
            (1, (Point::Return, vec![0])),
            (70, (Point::Tail, vec![0])),
            (71, (Point::Return, vec![1])),
        ];
        assert_eq!(exits, expected);
    }

    // The only tracer there is takes a short way.
    #[test]
    fn who_counts_is_planned_so() {
        let mut tracing = tracing(&[&[5, 6], &[6]]);
        tracing.tracers[0].as_mut().unwrap().counts = true;
        let counts = |tracing: &Tracing| {
            let plan = tracing.plan(&[]);
            let parts = |duty: u32| plan.duties[duty as usize].parts.clone();
            let counts = |part: &Part| (part.tracer, part.counts.is_some());
            let all = plan.sites.iter().map(|&(site, duty)| (site, parts(duty)));
            all.map(|(site, parts)| (site, parts.iter().map(counts).collect())).collect::<Vec<_>>()
        };
        assert_eq!(counts(&tracing), [(5, vec![(0, true)]), (6, vec![(0, true), (1, false)])]);
        tracing.tracers[1] = None;
        assert_eq!(counts(&tracing), [(5, vec![(0, true)]), (6, vec![(0, true)])]);
    }

    // Code for a combination must be as if a tracer that is gone had never been.
    #[test]
    fn sites_change_their_programs() {
        let held = [(1, 0), (5, 1), (6, 0)];
        assert_eq!(changes(held.into_iter(), &[(1, 0), (5, 0)]), (vec![5, 6], vec![(5, 0)]));
        assert_eq!(changes(held.into_iter(), &held), (vec![], vec![]));
        let any_order = [(6, 0), (1, 0), (5, 1)];
        assert_eq!(changes(any_order.into_iter(), &[(7, 1), (1, 0)]), (vec![5, 6], vec![(7, 1)]));
        let (leave, take) = changes(held.into_iter(), &any_order);
        assert_eq!((leave, take), (vec![], vec![]));
        assert_eq!(changes([].into_iter(), &held), (vec![], held.to_vec()));
        assert_eq!(changes(held.into_iter(), &[]), (vec![1, 5, 6], vec![]));
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
