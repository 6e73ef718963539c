//! What each site and each exit has to do, for all tracers together.

use super::aids::{self, Aids, AtExit};
use super::duties::{Duties, Sets};
use super::follow::Follow;
use super::limits::{Entered, Going};
use super::tracing::{Tracer, Tracing};
use super::triggers::Trigger;
use super::way::Way;
use crate::kernel::Exit;
use crate::tracer::{Duty, Keeper, Part, Tally};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};
use vmtrace_trampolines::{Field, Point, ProgramError};

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
    /// Functions (link addresses) in which calls of these go on that are marked, at jumps through pointers.
    pub targets: BTreeMap<Keeper, Vec<u64>>,
}

impl Plan {
    /// Every site and every one of these `exits` once, with what it has to do for all tracers together.
    #[must_use]
    pub fn of(tracing: &Tracing, exits: &[Exit]) -> Self {
        Self::with_modules(tracing, &[], exits, &|_| true)
    }

    /// The same with exits of modules, which have indices behind those. `is_whole`: whether all exits of the function at
    /// a site are among `exits`.
    #[must_use]
    pub fn with_modules(
        tracing: &Tracing,
        of_modules: &[(usize, Exit)],
        exits: &[Exit],
        is_whole: &dyn Fn(u32) -> bool,
    ) -> Self {
        let mut plan = Self::of_functions(tracing, of_modules, exits, is_whole);
        plan.add_events(tracing);
        if tracing.context {
            plan.add_context();
        }
        plan.add_first(tracing);
        plan.add_always(tracing);
        plan.add_ends(tracing, of_modules, exits);
        plan
    }

    /// What sites and exits have to do although nothing is traced: for triggers, and to follow tasks.
    pub(super) fn untraced(
        tracing: &Tracing,
        of_modules: &[(usize, Exit)],
        exits: &[Exit],
    ) -> Self {
        let mut plan = Self::default();
        plan.add_always(tracing);
        plan.add_ends(tracing, of_modules, exits);
        plan
    }

    fn of_functions(
        tracing: &Tracing,
        of_modules: &[(usize, Exit)],
        exits: &[Exit],
        is_whole: &dyn Fn(u32) -> bool,
    ) -> Self {
        let mut present: Vec<_> = tracing.present().filter(|(_, t)| !t.sites.is_empty()).collect();
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
            let tracers = numbers.iter().filter_map(|&number| tracing.numbered(number));
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
            numbers.retain(|&number| tracing.numbered(number).is_some_and(|(_, t)| t.graph));
            if let (false, Some(set)) = (numbers.is_empty(), graphed.get_mut(site)) {
                *set = sets.id(&numbers);
            }
        }
        // Who jumps to what cannot be traced ends where that does.
        let mut aided: FxHashMap<u32, u32> = FxHashMap::default();
        let mut leaving: FxHashMap<(u32, Way, Going, [u32; 3]), u32> = FxHashMap::default();
        let aids = Aids::of(tracing, (exits, is_whole), &graphed, &sets);
        let entered = Entered::of(
            present.iter().filter(|(_, it)| it.limits.is_limited()).map(|(_, it)| &it.sites[..]),
            numbered(of_modules, exits).map(|(_, exit)| exit),
        );
        for (at, (index, exit)) in numbered(of_modules, exits).enumerate() {
            let group = exit.after.group();
            let set = match (exit.site, group) {
                // They come last: behind those of modules, too.
                (Exit::NO_SITE, Some(group)) => aided.get(&group).copied(),
                (site, _) => graphed.get(site as usize).copied(),
            };
            let of_module = at < of_modules.len();
            let set = set.unwrap_or(Sets::NONE);
            let at_exit = match of_module {
                true => aids.at_module(exit, sets.get(set)),
                false => aids.at(exit, sets.get(set)),
            };
            let AtExit { marking, clearing, ending } = &at_exit;
            if set == Sets::NONE && ending.is_empty() {
                continue;
            }
            if let (true, true, Some(group)) =
                (set != Sets::NONE, exit.site != Exit::NO_SITE, group)
            {
                let both = aided.get(&group).map_or(set, |&before| sets.union(before, set));
                aided.insert(group, both);
            }
            let way = Way::of(exit);
            let going = entered.going(exit, of_module);
            let aided = [marking, clearing, *ending].map(|numbers| sets.id(numbers));
            let duty = || {
                let Duty { point, mut parts } = leave(tracing, sets.get(set), exit, (way, going));
                parts.extend(marking.iter().filter_map(|&it| Aids::mark(tracing, it, exit)));
                parts.extend(clearing.iter().map(|&number| aids::clear(number)));
                let others = ending.iter().filter(|it| !sets.get(set).contains(it));
                parts.extend(others.map(|&number| aids::end(number)));
                Duty { point, parts }
            };
            let site = exit.site as usize;
            let mut tracers = sets.get(set).iter().filter_map(|&number| tracing.numbered(number));
            let own = tracers.any(|(_, tracer)| match &tracer.histogram {
                Some(histogram) => histogram.is_particular(),
                None if tracer.ends().is_some() => true,
                None => way == Way::Return && tracer.values.results.contains_key(&site),
            });
            let known = leaving.get(&(set, way, going, aided)).filter(|_| !own);
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
                leaving.insert((set, way, going, aided), duty);
            }
            plan.exits.push((index, duty));
        }
        plan.duties = duties.all;
        plan.targets = aids.targets();
        plan
    }

    /// Whether each function's record has room for all that its tracers want.
    ///
    /// # Errors
    /// Why not, for one of them.
    pub fn check(&self) -> Result<(), (usize, ProgramError)> {
        let mut failed: Vec<Option<ProgramError>> = vec![];
        let check = |duty: &Duty| {
            duty.records().iter().find_map(|one| one.program(0, None, None).check().err())
        };
        failed.extend(self.duties.iter().map(check));
        for &(site, duty) in &self.sites {
            if let Some(Some(error)) = failed.get(duty as usize) {
                return Err((site, error.clone()));
            }
        }
        Ok(())
    }

    /// How many functions are looked at where they are left alone: their sites are not taken.
    pub(super) fn only_left(&self, tracing: &Tracing) -> usize {
        let tracers = tracing.present().filter(|(_, tracer)| tracer.ends().is_some());
        let tracers = tracers.flat_map(|(_, tracer)| &tracer.sites);
        let triggers = tracing.triggers.iter().filter(|trigger| trigger.waits_for_end());
        let triggers = triggers.flat_map(|trigger| &trigger.sites);
        let mut sites: Vec<usize> = tracers.chain(triggers).copied().collect();
        sites.sort_unstable();
        sites.dedup();
        let taken = |site: &usize| self.sites.binary_search_by_key(site, |(site, _)| *site).is_ok();
        sites.iter().filter(|site| !taken(site)).count()
    }

    /// The same without what depends on how calls are nested: nobody knows that until their ends are seen.
    pub(super) fn without_nested(&self) -> Self {
        self.of_parts(|part| part.nested.is_none())
    }

    /// The same without the marks of these, and what looks for them.
    pub(super) fn without_marks(&self, of: &BTreeSet<Keeper>) -> Self {
        self.of_parts(|part| !part.needs_marks() || !of.contains(&part.keeper()))
    }

    /// The same with these parts alone.
    fn of_parts(&self, is_left: impl Fn(&Part) -> bool) -> Self {
        let mut duties = Duties::default();
        let left: Vec<Option<u32>> = self
            .duties
            .iter()
            .map(|duty| {
                let parts = duty.parts.iter().filter(|part| is_left(part));
                let parts: Vec<_> = parts.cloned().collect();
                (!parts.is_empty()).then(|| duties.index(Duty { point: duty.point, parts }))
            })
            .collect();
        let those = |places: &[(usize, u32)]| {
            let duty = |of: u32| left.get(of as usize).copied().flatten();
            places.iter().filter_map(|&(place, of)| Some((place, duty(of)?))).collect()
        };
        let [sites, exits, events] = [&self.sites, &self.exits, &self.events].map(|it| those(it));
        Self { duties: duties.all, sites, exits, events, targets: self.targets.clone() }
    }

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

    /// Adds the events: equal duties are one.
    fn add_events(&mut self, tracing: &Tracing) {
        for (index, duty) in tracing.event_duties().enumerate() {
            let known = self.duties.iter().position(|other| *other == duty);
            let number = known.unwrap_or(self.duties.len());
            if known.is_none() {
                self.duties.push(duty);
            }
            self.events.push((index, u32::try_from(number).unwrap_or(u32::MAX)));
        }
    }

    /// Adds what is to be done where tasks begin, for tracers of parts of the call tree.
    fn add_first(&mut self, tracing: &Tracing) {
        let Some(site) = tracing.begins else { return };
        // One of functions of modules alone may get its sites later.
        let limited = tracing.present();
        let part = |(tracer, of): (u8, &Tracer)| {
            let counts = Some(Tally::Nothing);
            let nested = Some(of.limits.first()?);
            Some(Part { tracer, counts, nested, ..Part::default() })
        };
        let parts: Vec<_> = limited.filter_map(part).collect();
        if !parts.is_empty() {
            self.add_before(BTreeMap::from([(site, parts)]));
        }
    }

    /// Adds what sites have to do in any case, before all else: who starts to trace traces this
    /// very call.
    fn add_always(&mut self, tracing: &Tracing) {
        let follows = tracing.follow.as_ref().map(Follow::parts);
        let mut wanted: BTreeMap<usize, Vec<Part>> = follows.into_iter().flatten().collect();
        for trigger in unfired(tracing) {
            for &site in &trigger.sites {
                if let Some(part) = trigger.part(site) {
                    wanted.entry(site).or_default().push(part);
                }
            }
        }
        if !wanted.is_empty() {
            self.add_before(wanted);
        }
    }

    /// Adds what sites have to do before all else.
    fn add_before(&mut self, mut wanted: BTreeMap<usize, Vec<Part>>) {
        let mut duties = Duties::behind(std::mem::take(&mut self.duties));
        let point = Point::Entry;
        for (site, of) in &mut self.sites {
            let Some(mut parts) = wanted.remove(site) else { continue };
            let planned = duties.all.get(*of as usize);
            parts.extend(planned.into_iter().flat_map(|duty| duty.parts.clone()));
            // What is noted of a task here, where it is recorded, is forgotten with the rest.
            parts.sort_by_key(|part| part.counts == Some(Tally::Forget));
            *of = duties.index(Duty { point, parts });
        }
        for (site, parts) in wanted {
            self.sites.push((site, duties.index(Duty { point, parts })));
        }
        self.sites.sort_unstable();
        self.duties = duties.all;
    }

    /// Adds what exits have to do in any case, before all else: where functions are left at which a trigger waits.
    fn add_ends(&mut self, tracing: &Tracing, of_modules: &[(usize, Exit)], exits: &[Exit]) {
        let mut wanted: FxHashMap<usize, Vec<&Trigger>> = FxHashMap::default();
        for trigger in unfired(tracing).into_iter().filter(|it| it.ends().is_some()) {
            for &site in &trigger.sites {
                wanted.entry(site).or_default().push(trigger);
            }
        }
        if wanted.is_empty() {
            return;
        }
        let known: FxHashMap<usize, usize> =
            self.exits.iter().enumerate().map(|(at, &(exit, _))| (exit, at)).collect();
        let mut duties = Duties::behind(std::mem::take(&mut self.duties));
        for (index, exit) in numbered(of_modules, exits) {
            let Some(triggers) = wanted.get(&(exit.site as usize)) else { continue };
            let way = Way::of(exit);
            let parts = triggers.iter().filter_map(|trigger| trigger.end_part(exit, way));
            let mut parts: Vec<Part> = parts.collect();
            if parts.is_empty() {
                continue;
            }
            let point = way.point();
            match known.get(&index).and_then(|&at| self.exits.get_mut(at)) {
                Some((_, of)) => {
                    let planned = duties.all.get(*of as usize);
                    parts.extend(planned.into_iter().flat_map(|duty| duty.parts.clone()));
                    *of = duties.index(Duty { point, parts });
                }
                None => self.exits.push((index, duties.index(Duty { point, parts }))),
            }
        }
        self.exits.sort_unstable();
        self.duties = duties.all;
    }
}

/// All exits with their indices: those of modules first.
fn numbered<'a>(
    of_modules: &'a [(usize, Exit)],
    exits: &'a [Exit],
) -> impl Iterator<Item = (usize, &'a Exit)> {
    of_modules.iter().map(|(index, exit)| (*index, exit)).chain(exits.iter().enumerate())
}

/// Triggers that are still to come, in the order in which they look at a call.
fn unfired(tracing: &Tracing) -> Vec<&Trigger> {
    let mut unfired: Vec<_> = tracing.triggers.iter().filter(|it| !it.fired).collect();
    unfired.sort_by_key(|it| it.place());
    unfired
}

/// What an exit has to do for these tracers.
fn leave(tracing: &Tracing, tracers: &[u8], exit: &Exit, (way, going): (Way, Going)) -> Duty {
    let fields = |tracer: &Tracer| match way {
        Way::Return => tracer.return_fields(exit.site),
        Way::Aid | Way::Jump => vec![Field::Stack],
        Way::Indirect => vec![Field::Stack, Field::Target],
    };
    let point = way.point();
    let parts = tracers.iter().filter_map(|&number| tracing.numbered(number));
    // Only conditions that hold at every function are of tracers that want returns.
    let site = exit.site as usize;
    let part = |(tracer, wants): (u8, &Tracer)| match &wants.histogram {
        None if wants.ends().is_some() => {
            let nested = wants.limits.end(way, going, true);
            Some(Part { nested, ..wants.end_part(tracer, exit, way)? })
        }
        // What has begun is what is meant.
        Some(histogram) => {
            let counts = Some(histogram.exit(site, way)?);
            Some(Part { tracer, counts, ..Part::default() })
        }
        None => {
            let condition = wants.condition(site);
            let nested = wants.limits.end(way, going, false);
            Some(Part { tracer, fields: fields(wants), condition, nested, ..Part::default() })
        }
    };
    Duty { point, parts: parts.filter_map(part).collect() }
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
    use super::super::tracing::NOBODY;
    use super::super::tracing::tests::{planned, tracing};
    use super::*;
    use crate::kernel::{After, ExitKind};
    use crate::serve::{Globs, TriggerAction};
    use crate::tracer::Tally;
    use vmtrace_trampolines::Overflow;

    // A site that left a tracer out would silently lose its records.
    #[test]
    fn a_site_works_for_all_of_its_tracers() {
        let mut tracing = tracing(&[&[5, 6], &[1, 5], &[], &[1, 5]]);
        let all = [(1, vec![1, 3]), (5, vec![0, 1, 3]), (6, vec![0])];
        assert_eq!(planned(&tracing), all);
        assert_eq!(Plan::of(&tracing, &[]).duties.len(), 3);
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
        let plan = Plan::of(&tracing, &exits);
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
        let plan = Plan::with_modules(&tracing, &of_modules, &own, &|_| true);
        let tracers = |duty: u32| {
            let duty = &plan.duties[duty as usize];
            (duty.point, duty.parts.iter().map(|part| part.tracer).collect::<Vec<_>>())
        };
        let mut exits: Vec<_> =
            plan.exits.iter().map(|&(exit, duty)| (exit, tracers(duty))).collect();
        exits.sort_unstable_by_key(|&(exit, _)| exit);
        let expected = [
            (0, (Point::Return, vec![0])),
            (1, (Point::Beyond, vec![0])),
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
            let plan = Plan::of(tracing, &[]);
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

    fn trigger(number: u16, action: TriggerAction, sites: &[usize]) -> Trigger {
        let (text, sites) = ("x".to_owned(), sites.to_vec());
        Trigger {
            id: u32::from(number) + 1,
            action,
            text,
            sites,
            globs: Globs::default(),
            condition: None,
            call: 1,
            left: 1,
            number,
            kept: number,
            command: None,
            live: false,
            fired: false,
        }
    }

    // A trigger behind the records of its site starts to trace one call late; a tracer that is lost at a
    // trigger's site has a hole there.
    #[test]
    fn triggers_come_before_what_else_a_site_does() {
        let mut tracing = Tracing::of(vec![2, 5, 7], Overflow::Drop);
        tracing.triggers =
            vec![trigger(0, TriggerAction::Start, &[5, 6]), trigger(1, TriggerAction::End, &[5])];
        let stops = |plan: &Plan| {
            let of = |of: u32| plan.duties[of as usize].parts.iter();
            let kind = |part: &Part| match part.counts {
                Some(Tally::Stop { number, .. }) => (part.tracer, Some(number)),
                _ => (part.tracer, None),
            };
            let all = plan.sites.iter().map(|&(site, duty)| (site, of(duty).map(kind).collect()));
            all.collect::<Vec<(usize, Vec<_>)>>()
        };
        let (first, second, own) = ((NOBODY, Some(0)), (NOBODY, Some(1)), (0, None));
        let all = [(2, vec![own]), (5, vec![first, second, own]), (6, vec![first]), (7, vec![own])];
        assert_eq!(stops(&Plan::of(&tracing, &[])), all);
        let alone = [(5, vec![first, second]), (6, vec![first])];
        assert_eq!(stops(&Plan::untraced(&tracing, &[], &[])), alone);
        assert!(tracing.waits_for_start());
        tracing.triggers[0].fired = true;
        let all = [(2, vec![own]), (5, vec![second, own]), (7, vec![own])];
        assert_eq!(stops(&Plan::of(&tracing, &[])), all);
        assert!(!tracing.waits_for_start());
    }

    // A call at which tracing starts is made again, and all before that trigger count it twice: a mark comes a call
    // early, or tracing starts at another. Nothing comes behind the end of a run.
    #[test]
    fn who_starts_first_counts_first_and_who_ends_comes_last() {
        let mut tracing = Tracing::of(vec![7], Overflow::Drop);
        let order = [
            (TriggerAction::Mark, 1, false),
            (TriggerAction::Start, 9, false),
            (TriggerAction::End, 1, true),
            (TriggerAction::Mark, 1, true),
            (TriggerAction::Start, 3, true),
            (TriggerAction::Stop, 1, true),
        ];
        let all = (0..).zip(order).map(|(number, (action, left, live))| Trigger {
            left,
            live,
            ..trigger(number, action, &[5])
        });
        tracing.triggers = all.collect();
        let plan = Plan::untraced(&tracing, &[], &[]);
        let stops: Vec<_> = plan.duties[0].parts.iter().map(|part| part.counts).collect();
        let stop = |number| Some(Tally::Stop { number, since: None });
        assert_eq!(stops, [4, 1, 5, 3, 0, 2].map(stop));
    }
}
