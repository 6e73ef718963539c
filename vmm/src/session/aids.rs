//! Ends of calls that go on, by a jump, in functions whose own calls their tracer does not have.
//!
//! Such a call is marked where it jumps, and the returns of those functions are recorded where there is a mark: they end
//! what has jumped, as far as it takes. Only of the kernel's own functions: what a module brings comes too late. Where
//! jumps through pointers lead is learned when it happens ([`jumps`](super::jumps)).

use super::duties::Sets;
use super::tracing::{Tracer, Tracing};
use crate::kernel::{After, Coverage, Exit, ExitKind, Exits, Kernel};
use crate::tracer::{Keeper, Part, Tally};
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::{BTreeMap, BTreeSet};
use vmtrace_trampolines::Field;
use vmtrace_trampolines::marks::MarkIf;

/// Who marks calls at which exits, and who sees by the ends of which functions those of its own.
#[derive(Debug, Default)]
pub(super) struct Aids {
    /// Exits (addresses) at which calls go on elsewhere, with the tracers' numbers, in order, and whether they see ends of
    /// what that is: they mark calls there.
    jumps: FxHashMap<u64, Vec<(u8, bool)>>,
    /// Functions (link addresses) whose ends are seen, by the numbers of tracers of which calls were seen to go on there by a
    /// jump through a pointer: such calls are marked.
    targets: BTreeMap<u8, Vec<u64>>,
    /// Who marks calls at all.
    keeping: BTreeSet<u8>,
    /// Functions (sites), in the same way.
    sites: FxHashMap<u32, Vec<u8>>,
    /// Groups of functions without a site.
    groups: FxHashMap<u32, Vec<u8>>,
}

/// Those of functions that have a site: the others come last.
fn with_site(exits: &[Exit]) -> &[Exit] {
    let count = exits.partition_point(|exit| exit.site != Exit::NO_SITE);
    exits.get(..count).unwrap_or_default()
}

/// The site of the function at a link address, if it has exits.
fn site_at(exits: &[Exit], function: u64) -> Option<u32> {
    let first = exits.partition_point(|exit| exit.function < function);
    exits.get(first).filter(|exit| exit.function == function).map(|exit| exit.site)
}

/// The exits of the function at a site.
fn exits_of(exits: &[Exit], site: u32) -> &[Exit] {
    let first = exits.partition_point(|exit| exit.site < site);
    let behind = exits.get(first..).unwrap_or_default();
    let count = behind.iter().take_while(|exit| exit.site == site).count();
    behind.get(..count).unwrap_or_default()
}

/// Where it goes on in a function that tells itself where it is left.
fn goes_to(exit: &Exit) -> Option<u64> {
    match (exit.kind, exit.after) {
        (ExitKind::Jump { target }, After::Nothing) => Some(target),
        _ => None,
    }
}

impl Tracer {
    /// Whether it records calls until they end. What looks at durations is over at the jump.
    fn pairs_calls(&self) -> bool {
        self.graph && self.histogram.is_none() && self.ends().is_none()
    }

    /// Whether it has the function at a site.
    fn has(&self, site: u32) -> bool {
        self.sites.binary_search(&(site as usize)).is_ok()
    }

    /// Whether it sees by others where its calls end. Not if it knows how deep calls are: a level is given back at the
    /// jump, since one whose mark is lost would be open for what comes then.
    fn wants_aid(&self) -> bool {
        self.pairs_calls() && !self.limits.is_limited()
    }
}

/// Adds an item to a list in order. Whether it was not there.
fn insert<T: Ord>(list: &mut Vec<T>, item: T) -> bool {
    let place = list.binary_search(&item);
    place.map_err(|place| list.insert(place, item)).is_err()
}

/// Functions of a tracer's, at most: by chance a few of so many share a place in its table, and one of the two is not there.
const MOST_TARGETS: usize = 256;

/// Whose calls are marked at an exit; who only sees to it that nobody takes what another call has left for the mark of this
/// one; and whose calls may end there although they are of other functions.
#[derive(Debug, Default)]
pub(super) struct AtExit<'a> {
    pub(super) marking: Vec<u8>,
    pub(super) clearing: Vec<u8>,
    pub(super) ending: &'a [u8],
}

impl Aids {
    /// Of the kernel's exits, sorted by site, with those without a site last, and whether those of a site are all that it
    /// has; and by site the set of tracers that have the returns there.
    ///
    /// Only where all ends are seen: who has left by another one leaves its mark, which would be taken for that of whoever
    /// its caller calls next.
    pub(super) fn of(
        tracing: &Tracing,
        (exits, is_whole): (&[Exit], &dyn Fn(u32) -> bool),
        graphed: &[u32],
        sets: &Sets,
    ) -> Self {
        let mut aids = Self::default();
        if !tracing.wants_aid() {
            return aids;
        }
        let exits = with_site(exits);
        let set = |site: u32| graphed.get(site as usize).copied().filter(|&set| set != Sets::NONE);
        let has = |site, number| {
            set(site).is_some_and(|set| sets.get(set).binary_search(&number).is_ok())
        };
        let mut open: Vec<(u32, u8)> = Vec::new();
        let mut known: FxHashMap<(u32, u8), bool> = FxHashMap::default();
        // Whether a tracer lacks the end of a function, and sees it by others.
        let mut is_aided = |site: u32, number: u8| {
            let wants = tracing.numbered(number).is_some_and(|(_, tracer)| tracer.wants_aid());
            let closes = || closes(exits, site, |site| has(site, number), is_whole);
            wants && !has(site, number) && *known.entry((site, number)).or_insert_with(closes)
        };
        for exit in exits {
            let (Some(own), Some(target)) = (set(exit.site), goes_to(exit)) else { continue };
            let site = site_at(exits, target);
            // Most often all is traced by the same.
            if site.is_some_and(|site| set(site) == Some(own)) {
                continue;
            }
            for &number in sets.get(own) {
                let is_seen = match site {
                    Some(site) if has(site, number) => continue,
                    Some(site) if is_aided(site, number) => {
                        aids.keeping.insert(number);
                        open.push((site, number));
                        true
                    }
                    _ => false,
                };
                insert(aids.jumps.entry(exit.address).or_default(), (number, is_seen));
            }
        }
        for &(function, site) in &tracing.learned {
            let Some(own) = set(function) else { continue };
            let Some(first) = exits_of(exits, site).first() else { continue };
            for &number in sets.get(own) {
                if is_aided(site, number) {
                    let targets = aids.targets.entry(number).or_default();
                    // Who is marked already stays so.
                    if targets.len() < MOST_TARGETS && !targets.contains(&first.function) {
                        targets.push(first.function);
                        aids.keeping.insert(number);
                        open.push((site, number));
                    }
                }
            }
        }
        while let Some((site, number)) = open.pop() {
            if has(site, number) || !insert(aids.sites.entry(site).or_default(), number) {
                continue;
            }
            for exit in exits_of(exits, site) {
                let next = goes_to(exit).and_then(|target| site_at(exits, target));
                open.extend(next.map(|site| (site, number)));
                if let Some(group) = exit.after.group() {
                    insert(aids.groups.entry(group).or_default(), number);
                }
            }
        }
        aids
    }

    /// The same at an exit of a module's function: where it goes on no ends are looked for.
    pub(super) fn at_module(&self, exit: &Exit, own: &[u8]) -> AtExit<'_> {
        let keeping = own.iter().copied().filter(|number| self.keeping.contains(number));
        let clearing = match (exit.kind, exit.after) {
            (ExitKind::Indirect { .. }, _) | (ExitKind::Jump { .. }, After::Nothing) => {
                keeping.collect()
            }
            _ => Vec::new(),
        };
        AtExit { clearing, ..AtExit::default() }
    }

    /// What is done at an exit of a function of which these have the returns.
    pub(super) fn at(&self, exit: &Exit, own: &[u8]) -> AtExit<'_> {
        let keeping = || own.iter().copied().filter(|number| self.keeping.contains(number));
        let (marking, clearing) = match (exit.kind, exit.after) {
            (ExitKind::Indirect { .. }, _) => {
                keeping().partition(|number| self.targets.contains_key(number))
            }
            (ExitKind::Jump { .. }, After::Nothing) => {
                let jumps = self.jumps.get(&exit.address).map_or(&[][..], Vec::as_slice);
                let meant = |seen| {
                    keeping()
                        .filter(move |&number| jumps.binary_search(&(number, seen)).is_ok())
                        .collect()
                };
                (meant(true), meant(false))
            }
            _ => Default::default(),
        };
        let ending = match (exit.kind, exit.after) {
            (ExitKind::Return, After::Group(group)) => self.groups.get(&group),
            (ExitKind::Return, _) | (ExitKind::Jump { .. }, After::Leaf) => {
                self.sites.get(&exit.site)
            }
            _ => None,
        };
        AtExit { marking, clearing, ending: ending.map_or(&[], Vec::as_slice) }
    }

    /// A tracer's part where it marks calls that are left: of those that it records there.
    pub(super) fn mark(tracing: &Tracing, number: u8, exit: &Exit) -> Option<Part> {
        let (tracer, wants) = tracing.numbered(number)?;
        let condition = wants.condition(exit.site as usize);
        let going = match exit.kind {
            ExitKind::Indirect { .. } => MarkIf::Known,
            _ => MarkIf::Always,
        };
        Some(Part { tracer, condition, counts: Some(Tally::Mark(going)), ..Part::default() })
    }

    /// What [`Plan::targets`](super::plan::Plan::targets) are.
    pub(super) fn targets(self) -> BTreeMap<Keeper, Vec<u64>> {
        let keeper = |tracer| Part { tracer, ..Part::default() }.keeper();
        self.targets.into_iter().map(|(tracer, targets)| (keeper(tracer), targets)).collect()
    }
}

/// A tracer's part where its calls go on in what ends are not seen of.
pub(super) fn clear(tracer: u8) -> Part {
    Part { tracer, counts: Some(Tally::Mark(MarkIf::Never)), ..Part::default() }
}

/// A tracer's part where calls end that it has marked.
pub(super) fn end(tracer: u8) -> Part {
    Part { tracer, fields: vec![Field::Stack], aid: true, ..Part::default() }
}

/// Whether all ends of the function at a site are known, but for static calls for security modules.
fn is_known(exits: &Exits, site: u32) -> bool {
    let is_fixed = exits.fixed_calls().binary_search_by_key(&site, |&(it, _)| it).is_ok();
    is_fixed || exits.coverage(site as usize) == Coverage::Whole
}

impl Tracing {
    /// Whether all ends of the function at a site are seen.
    pub(super) fn sees_ends(&self, exits: &Exits, site: u32) -> bool {
        let is_seen = match &self.directed {
            Some(directed) => is_known(exits, site) && !directed.contains(&site),
            // What a static call leads to is not known yet.
            None => exits.coverage(site as usize) == Coverage::Whole,
        };
        is_seen && !self.unheld.contains(&site)
    }

    /// Whether a tracer sees ends of its calls by those of others.
    pub(super) fn wants_aid(&self) -> bool {
        self.present().any(|(_, tracer)| tracer.wants_aid())
    }

    /// Whether a tracer sees calls of a function (site) end by those of others, and has not those of another one.
    pub(super) fn lacks_ends(&self, function: u32, of: u32) -> bool {
        let mut tracers = self.present().map(|(_, tracer)| tracer);
        tracers.any(|tracer| tracer.wants_aid() && tracer.has(function) && !tracer.has(of))
    }

    /// Whether somebody records calls of a function (site) until they end.
    pub(super) fn pairs_calls_of(&self, function: u32) -> bool {
        self.present().any(|(_, tracer)| tracer.pairs_calls() && tracer.has(function))
    }

    /// Functions (sites) of which calls were seen to go on through a pointer where their tracer sees no end of them, each
    /// with such a function (link address).
    pub(super) fn not_followed(&self, kernel: &Kernel) -> BTreeMap<u32, u64> {
        let mut found = BTreeMap::new();
        // Whoever traces no ends has not looked for exits, which takes a second.
        if self.learned.is_empty() {
            return found;
        }
        let Ok(exits) = kernel.exits() else { return found };
        let all = with_site(exits.all());
        let is_whole = |site: u32| self.sees_ends(exits, site);
        for (_, tracer) in self.present().filter(|(_, tracer)| tracer.pairs_calls()) {
            for &(function, target) in &self.learned {
                let has = |site: u32| tracer.has(site);
                let is_seen =
                    has(target) || tracer.wants_aid() && closes(all, target, has, is_whole);
                if has(function)
                    && !is_seen
                    && let Some(target) = kernel.sites().get(target as usize)
                {
                    found.entry(function).or_insert(target.entry);
                }
            }
        }
        found
    }

    /// Functions (sites) with all of their exits known of which a tracer sees calls, but not all of their ends: they may
    /// be left by a jump to a function (link address) whose ends are not all seen unless that is traced, too.
    #[must_use]
    pub fn jumping(&self, kernel: &Kernel) -> BTreeMap<usize, u64> {
        let mut found = BTreeMap::new();
        let Ok(exits) = kernel.exits() else { return found };
        let all = with_site(exits.all());
        let tracers = self.present().map(|(_, tracer)| tracer);
        for tracer in tracers.filter(|tracer| tracer.pairs_calls()) {
            let entry = |site: &usize| kernel.sites().get(*site).map(|site| site.entry);
            let traced: FxHashSet<u64> = tracer.sites.iter().filter_map(entry).collect();
            // Most guests have no security module where a static call is the last thing that a function does.
            let is_whole = |site: u32| match &self.directed {
                Some(_) => self.sees_ends(exits, site),
                None => is_known(exits, site),
            };
            let whole = |site: &&usize| exits.coverage(**site) == Coverage::Whole;
            for &site in tracer.sites.iter().filter(whole) {
                let jumps = exits.of(site).iter().filter_map(goes_to);
                let mut elsewhere = jumps.filter(|target| !traced.contains(target));
                let unseen = |target: &u64| {
                    let closes = |site| {
                        tracer.wants_aid() && closes(all, site, |site| tracer.has(site), is_whole)
                    };
                    !site_at(all, *target).is_some_and(closes)
                };
                found.extend(elsewhere.find(unseen).map(|target| (site, target)));
            }
        }
        found
    }
}

/// Whether a call that goes on in the function at a site is seen to end, wherever that goes on: in functions that the
/// tracer has, or in others of which all exits are known.
fn closes(
    exits: &[Exit],
    site: u32,
    has: impl Fn(u32) -> bool,
    is_whole: impl Fn(u32) -> bool,
) -> bool {
    let (mut seen, mut open) = (FxHashSet::from_iter([site]), vec![site]);
    while let Some(site) = open.pop() {
        let own = exits_of(exits, site);
        if own.is_empty() || !is_whole(site) {
            return false;
        }
        for exit in own {
            if matches!(exit.kind, ExitKind::Indirect { .. }) {
                return false;
            }
            let Some(target) = goes_to(exit) else { continue };
            match site_at(exits, target) {
                None => return false,
                Some(next) if has(next) => {}
                Some(next) => open.extend(seen.insert(next).then_some(next)),
            }
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::super::limits::Limits;
    use super::super::plan::Plan;
    use super::super::tracing::tests::tracing;
    use super::*;
    use vmtrace_trampolines::Point;
    use vmtrace_trampolines::nesting::Call;

    /// Of a function whose address is 100 times its site's number.
    fn exit(site: u32, kind: ExitKind, after: After) -> Exit {
        let function = 100 * u64::from(site);
        let at = match kind {
            ExitKind::Return => 1,
            ExitKind::Jump { target } => target / 100 + 2,
            ExitKind::Indirect { .. } => 99,
        };
        Exit { address: function + at, function, site, kind, after }
    }

    fn jump(site: u32, target: u64) -> Exit {
        exit(site, ExitKind::Jump { target: 100 * target }, After::Nothing)
    }

    fn ret(site: u32) -> Exit {
        exit(site, ExitKind::Return, After::Nothing)
    }

    fn to_group(site: u32, group: u32) -> Exit {
        exit(site, ExitKind::Jump { target: 1 }, After::Group(group))
    }

    const INDIRECT: ExitKind = ExitKind::Indirect { register: 0, len: 5 };

    /// By exit what is done there: who records, who marks, and whose calls end.
    fn done(plan: &Plan) -> Vec<(usize, Point, [Vec<u8>; 3])> {
        let of = |&(exit, duty): &(usize, u32)| {
            let duty = &plan.duties[duty as usize];
            let those = |kind: fn(&Part) -> bool| {
                duty.parts.iter().filter(|part| kind(part)).map(|part| part.tracer).collect()
            };
            let marks = those(|part| matches!(part.counts, Some(Tally::Mark(_))));
            let ends = those(|part| part.aid);
            let records = those(|part| part.counts.is_none() && !part.aid);
            (exit, duty.point, [records, marks, ends])
        };
        plan.exits.iter().map(of).collect()
    }

    fn graph(sites: &[&[usize]]) -> Tracing {
        let mut tracing = tracing(sites);
        tracing.tracers.iter_mut().flatten().for_each(|tracer| tracer.graph = true);
        tracing
    }

    // Without the ends of what it goes on in, a call is open until its caller returns, and all that comes meanwhile is
    // nested in it.
    #[test]
    fn calls_end_in_functions_that_are_not_traced() {
        // 1 goes on in 2, that in 3 (and on in 1, which is traced), in a leaf, and in a group; 4 is nobody's.
        let mut exits = vec![
            jump(1, 2),
            ret(2),
            jump(2, 3),
            jump(2, 1),
            exit(2, ExitKind::Jump { target: 50 }, After::Leaf),
            to_group(2, 7),
            ret(3),
            ret(4),
            exit(Exit::NO_SITE, ExitKind::Return, After::Group(7)),
            exit(Exit::NO_SITE, ExitKind::Return, After::Group(8)),
        ];
        let tracing = graph(&[&[1], &[3]]);
        let (one, other, none) = (|| vec![0], || vec![1], Vec::new);
        let end = |exit, point| (exit, point, [none(), none(), one()]);
        let expected = [
            (0, Point::Tail, [one(), one(), none()]),
            end(1, Point::Return),
            end(4, Point::Tail),
            (6, Point::Return, [other(), none(), one()]),
            end(8, Point::Beyond),
        ];
        assert_eq!(done(&Plan::of(&tracing, &exits)), expected);
        // Who traces all of them has no need of it.
        let all = done(&Plan::of(&graph(&[&[1, 2, 3]]), &exits));
        assert!(all.iter().all(|(_, _, [_, marks, ends])| marks.is_empty() && ends.is_empty()));
        // Who leaves by an end that is not seen would leave its mark for another call.
        let is_alone = |plan: &Plan| {
            let of_marks = |part: &Part| part.needs_marks();
            !plan.duties.iter().flat_map(|duty| &duty.parts).any(of_marks)
        };
        let plan = |exits: &[Exit], is_whole: &dyn Fn(u32) -> bool| {
            Plan::with_modules(&tracing, &[], exits, is_whole)
        };
        assert!(!is_alone(&plan(&exits, &|site| site == 2 || site == 3)));
        assert!(is_alone(&plan(&exits, &|site| site != 3)));
        exits.insert(7, exit(3, INDIRECT, After::Nothing));
        assert!(is_alone(&plan(&exits, &|_| true)));
        // Nor has who records no returns, or looks at durations.
        let plain = Plan::of(&super::super::tracing::tests::tracing(&[&[1], &[3]]), &exits);
        assert_eq!(plain.exits, []);
    }

    // A call that went on elsewhere would leave its mark for another one, whose end would be taken for its own: only those are
    // marked that go to what ends are seen of.
    #[test]
    fn calls_end_in_what_they_were_seen_to_go_on_in() {
        let exits = [
            exit(1, INDIRECT, After::Nothing),
            ret(1),
            jump(2, 3),
            ret(2),
            ret(3),
            ret(4),
            exit(5, INDIRECT, After::Nothing),
            exit(6, INDIRECT, After::Nothing),
            ret(7),
        ];
        let mut tracing = graph(&[&[1, 6], &[4]]);
        let none = Plan::of(&tracing, &exits);
        assert!(!none.duties.iter().flat_map(|duty| &duty.parts).any(Part::needs_marks));
        // It has 6 itself, 4 is another one's, 5 goes on who knows where, and 9 is none of them.
        tracing.learned = vec![(1, 4), (1, 2), (1, 5), (1, 6), (1, 9), (9, 7)];
        let plan = Plan::of(&tracing, &exits);
        let (one, none, both) = (|| vec![0], Vec::new, || vec![1]);
        let expected = [
            (0, Point::Tail, [one(), one(), none()]),
            (1, Point::Return, [one(), none(), none()]),
            (3, Point::Return, [none(), none(), one()]),
            (4, Point::Return, [none(), none(), one()]),
            (5, Point::Return, [both(), none(), one()]),
            // Where it goes on there it is marked, too.
            (7, Point::Tail, [one(), one(), none()]),
        ];
        assert_eq!(done(&plan), expected);
        let keeper = Part::default().keeper();
        let mark_if = |plan: &Plan, exit: usize| {
            let duty = plan.exits.iter().find(|(at, _)| *at == exit).unwrap().1;
            let parts = &plan.duties[duty as usize].parts;
            parts.iter().find_map(|part| match part.counts {
                Some(Tally::Mark(mark_if)) => Some(mark_if),
                _ => None,
            })
        };
        // By when they were seen: none makes room for another one.
        assert_eq!(plan.targets, BTreeMap::from([(keeper, vec![400, 200])]));
        assert_eq!(mark_if(&plan, 0), Some(MarkIf::Known));
        assert_eq!(plan.exits[0].1, plan.exits[5].1, "a program for all");
        // No more than there is room for.
        let count = 2 + u32::try_from(MOST_TARGETS).unwrap();
        let first = [exit(1, INDIRECT, After::Nothing)];
        let exits: Vec<_> = first.into_iter().chain((2..=count).map(ret)).collect();
        let mut tracing = graph(&[&[1]]);
        tracing.learned = (2..=count).map(|to| (1, to)).collect();
        let plan = Plan::of(&tracing, &exits);
        assert_eq!(
            (plan.targets[&keeper].len(), plan.exits.len()),
            (MOST_TARGETS, 1 + MOST_TARGETS)
        );
        // Who goes on where ends are not seen has no use for what another call has left, if there is anything.
        let exits = [
            exit(1, INDIRECT, After::Nothing),
            jump(1, 2),
            jump(1, 3),
            jump(1, 4),
            exit(2, INDIRECT, After::Nothing),
            ret(3),
            ret(4),
        ];
        let mut tracing = graph(&[&[1, 4], &[5]]);
        let plan = Plan::of(&tracing, &exits);
        let found = [0, 1, 2, 3].map(|exit| mark_if(&plan, exit));
        let (always, never) = (Some(MarkIf::Always), Some(MarkIf::Never));
        assert_eq!(found, [never, never, always, None], "not where it goes on in its own");
        tracing = graph(&[&[1, 3, 4], &[5]]);
        let plan = Plan::of(&tracing, &exits);
        assert!(!plan.duties.iter().flat_map(|duty| &duty.parts).any(Part::needs_marks));
        let tracing = graph(&[&[1, 2]]);
        assert!(tracing.lacks_ends(1, 3) && !tracing.lacks_ends(1, 2) && !tracing.lacks_ends(3, 4));
    }

    // A level whose end is not seen is open for what the caller calls next.
    #[test]
    fn levels_are_given_back_where_a_call_jumps() {
        let mut tracing = graph(&[&[1]]);
        let limits = Limits { depth: Some(2), ..Limits::default() };
        tracing.tracers[0].as_mut().unwrap().limits = limits;
        let plan = Plan::of(&tracing, &[jump(1, 2), ret(2)]);
        let [(0, duty)] = plan.exits[..] else { panic!("{plan:?}") };
        let [part] = &plan.duties[duty as usize].parts[..] else { panic!("{plan:?}") };
        assert_eq!(part.nested.map(|nested| nested.call), Some(Call::Ends));
    }

    // Without room for marks there are calls without an end; without tracing there would be nothing.
    #[test]
    fn a_plan_can_do_without_marks() {
        let plan = Plan::of(&graph(&[&[1], &[1]]), &[jump(1, 2), ret(2)]);
        let keeper = |number| Part { tracer: number, ..Part::default() }.keeper();
        let without = plan.without_marks(&[keeper(0)].into());
        let expected = [
            (0, Point::Tail, [vec![0, 1], vec![1], vec![]]),
            (1, Point::Return, [vec![], vec![], vec![1]]),
        ];
        assert_eq!(done(&without), expected);
        let without = plan.without_marks(&[keeper(0), keeper(1)].into());
        assert_eq!(done(&without), [(0, Point::Tail, [vec![0, 1], vec![], vec![]])]);
        assert_eq!(without.sites.len(), 1);
    }
}
