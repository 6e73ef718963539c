//! Which part of the call tree is recorded: what functions call, down to a depth.

use super::values::Known;
use super::way::Way;
use crate::kernel::{Exit, ExitKind, Kernel};
use crate::serve::Globs;
use crate::tracer::Nested;
use rustc_hash::FxHashSet;
use std::fmt;
use vmtrace_trampolines::nesting::Call;

/// The part of the call tree that a tracer of entries and returns records. The guest decides, at each call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// So many levels: `max_graph_depth` of ftrace.
    pub depth: Option<u8>,
    /// Only these and what they call: `set_graph_function` of ftrace. `None`: all.
    pub roots: Option<Roots>,
    /// Sites of functions whose ends are not all seen, in order: whether their calls are over is not known.
    pub endless: Vec<usize>,
}

/// Functions that are recorded with all that they call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Roots {
    /// As they were asked for: also those of modules that come later.
    pub globs: Globs,
    /// Their sites, in order: the tracer has them, too.
    pub sites: Vec<usize>,
}

/// What a task comes by first, on its own stack, where that can be traced: `ret_from_fork` where it is no assembly
/// (arch/x86/kernel/process.c since 6.6), and what that of each architecture calls first (kernel/sched/core.c).
const BEGINS: [&str; 2] = ["ret_from_fork", "schedule_tail"];

impl Limits {
    /// Where tasks begin: see [`Tracing::begins`](super::Tracing::begins).
    #[must_use]
    pub fn begins(kernel: &Kernel) -> Option<usize> {
        BEGINS.iter().find_map(|name| kernel.site_of(name))
    }

    /// Whether there are any.
    #[must_use]
    pub fn is_limited(&self) -> bool {
        self.depth.is_some() || self.roots.is_some()
    }

    /// These sites and those of its roots, in order.
    #[must_use]
    pub fn with_roots(&self, mut sites: Vec<usize>) -> Vec<usize> {
        if let Some(roots) = &self.roots {
            sites.extend(&roots.sites);
            sites.sort_unstable();
            sites.dedup();
        }
        sites
    }

    /// The same of patterns of functions, which may match what comes later.
    #[must_use]
    pub fn globs(&self, globs: &Globs) -> Globs {
        let Globs { mut filter, notrace } = globs.clone();
        // Without a pattern all functions are meant.
        if let (Some(roots), false) = (&self.roots, filter.is_empty()) {
            let more = roots.globs.filter.iter().filter(|root| !globs.filter.contains(*root));
            filter.extend(more.cloned());
        }
        Globs { filter, notrace }
    }

    /// Learns whose ends are not all seen of the functions at these sites, which are all that the tracer has. Roots that
    /// are not among them were left out for that, or for a condition on how calls end.
    pub fn learn(&mut self, kernel: &Kernel, sites: &[usize]) {
        self.learn_anew(kernel, sites);
    }

    pub(super) fn learn_anew(&mut self, known: &dyn Known, sites: &[usize]) {
        self.endless.clear();
        let roots = self.roots.as_mut().map(|roots| std::mem::take(&mut roots.sites));
        self.learn_more(known, sites, roots.unwrap_or_default());
    }

    /// The same of functions beside those that are known, with these roots among them.
    pub(super) fn learn_more(&mut self, known: &dyn Known, sites: &[usize], roots: Vec<usize>) {
        if !self.is_limited() {
            return;
        }
        self.endless.extend(sites.iter().filter(|&&site| known.leaves(site).is_err()));
        self.endless.extend(roots.iter().filter(|site| sites.binary_search(site).is_err()));
        self.endless.sort_unstable();
        self.endless.dedup();
        if let Some(known) = &mut self.roots {
            known.sites.extend(roots);
            known.sites.sort_unstable();
        }
    }

    /// Learns that exits of these functions (sites, in order) are not held, of which its tracer has those that `is_there`
    /// says. Whether that is news.
    pub(super) fn learn_unheld(
        &mut self,
        sites: &[usize],
        is_there: impl Fn(&usize) -> bool,
    ) -> bool {
        if !self.is_limited() {
            return false;
        }
        let before = self.endless.len();
        self.endless.extend(sites.iter().filter(|site| is_there(site)));
        self.endless.sort_unstable();
        self.endless.dedup();
        self.endless.len() > before
    }

    /// Roots in which nothing is recorded, since their ends are not all seen, or not looked at.
    #[must_use]
    pub fn endless_roots(&self) -> Vec<usize> {
        let roots = self.roots.iter().flat_map(|roots| &roots.sites).copied();
        roots.filter(|&site| self.is_endless(site)).collect()
    }

    /// Some sites are no more.
    pub(super) fn retain(&mut self, is_there: impl Fn(&usize) -> bool) {
        self.endless.retain(&is_there);
        if let Some(roots) = &mut self.roots {
            roots.sites.retain(is_there);
        }
    }

    fn is_endless(&self, site: usize) -> bool {
        self.endless.binary_search(&site).is_ok()
    }

    fn is_root(&self, site: usize) -> bool {
        self.roots.as_ref().is_none_or(|roots| roots.sites.binary_search(&site).is_ok())
    }

    /// Whether a program at the entry of the function at a site is another than those of most.
    pub(super) fn is_particular(&self, site: usize) -> bool {
        self.is_limited() && (self.is_endless(site) || self.roots.is_some() && self.is_root(site))
    }

    /// How calls of the function at a site must be nested where they are entered.
    pub(super) fn entry(&self, site: usize) -> Option<Nested> {
        let again = self.roots.is_some();
        self.nested(match (self.is_endless(site), self.is_root(site)) {
            // A root among them would be open for all that its caller calls.
            (true, _) => Call::Endless { root: !again },
            (false, true) => Call::Root { again },
            (false, false) => Call::Inner,
        })
    }

    /// The same where they are left. `timed`: only for who knows when they began.
    pub(super) fn end(&self, way: Way, going: Going, timed: bool) -> Option<Nested> {
        self.nested(match (way, going) {
            (Way::Return | Way::Aid, _) | (_, Going::Ends) => Call::Ends,
            // Where that ends nothing is done by who looks at durations.
            (_, Going::Aided) if timed => Call::Ends,
            (_, Going::On | Going::Aided) => Call::GoesOn,
            // Where all calls are roots, each begins its own.
            (_, Going::Anywhere) if self.roots.is_none() => Call::Ends,
            (_, Going::Anywhere) => Call::MayGoOn,
        })
    }

    /// The same of the first call of a task: that is no call of the tracer.
    pub(super) fn first(&self) -> Option<Nested> {
        self.nested(Call::Fresh)
    }

    fn nested(&self, call: Call) -> Option<Nested> {
        self.is_limited().then_some(Nested { depth: self.depth, call })
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(roots) = &self.roots {
            write!(f, " in calls of {}", roots.globs.filter.join(","))?;
        }
        match self.depth {
            Some(1) => f.write_str(", 1 level"),
            Some(depth) => write!(f, ", {depth} levels"),
            None => Ok(()),
        }
    }
}

/// What becomes of a call where it leaves a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Going {
    /// It ends, as far as it is seen.
    Ends,
    /// It goes on in a function that is traced.
    On,
    /// It goes on in one that is not, whose end is seen.
    Aided,
    /// It goes on, and who knows where.
    Anywhere,
}

/// Functions that some tracer with limits sees entered (link addresses): it has their sites.
#[derive(Debug, Default)]
pub(super) struct Entered(Option<FxHashSet<u64>>);

impl Entered {
    pub(super) fn of<'a>(
        sites: impl Iterator<Item = &'a [usize]>,
        exits: impl Iterator<Item = &'a Exit>,
    ) -> Self {
        let limited: Vec<_> = sites.collect();
        if limited.is_empty() {
            return Self(None);
        }
        let is_entered = |exit: &&Exit| {
            limited.iter().any(|sites| sites.binary_search(&(exit.site as usize)).is_ok())
        };
        Self(Some(exits.filter(is_entered).map(|exit| exit.function).collect()))
    }

    /// What becomes of the call there. Of those that leave functions of modules it is the same whether the plan is of
    /// all functions or of that module alone.
    pub(super) fn going(&self, exit: &Exit, of_module: bool) -> Going {
        let Some(known) = &self.0 else { return Going::Ends };
        match exit.kind {
            ExitKind::Return => Going::Ends,
            ExitKind::Indirect { .. } => Going::Anywhere,
            ExitKind::Jump { .. } if exit.after.group().is_some() => Going::Aided,
            ExitKind::Jump { .. } if of_module => Going::Anywhere,
            ExitKind::Jump { target } if known.contains(&target) => Going::On,
            ExitKind::Jump { .. } => Going::Ends,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::plan::Plan;
    use super::super::tracing::Tracer;
    use super::super::tracing::tests::tracing;
    use super::*;
    use crate::kernel::After;
    use crate::tracer::{Duty, Part, Tally};

    fn tracer(depth: Option<u8>, roots: Option<&[usize]>) -> Tracer {
        let roots = roots.map(|sites| Roots { sites: sites.to_vec(), ..Roots::default() });
        let limits = Limits { depth, roots, endless: vec![3] };
        Tracer { sites: vec![1, 2, 3], graph: true, limits, ..Tracer::default() }
    }

    fn exit(site: u32, kind: ExitKind) -> Exit {
        let function = 100 * u64::from(site);
        Exit { address: 0, function, site, kind, after: After::Nothing }
    }

    const fn jump(target: u64) -> ExitKind {
        ExitKind::Jump { target }
    }

    // A root that is taken for another function records nothing; another one that is taken for a root records what
    // nobody wants. One whose end is not seen would be open for ever.
    #[test]
    fn only_roots_begin() {
        let calls = |depth, roots| {
            let tracer = tracer(depth, roots);
            [1, 2, 3].map(|site| {
                let nested = tracer.limits.entry(site)?;
                assert_eq!(nested.depth, depth);
                Some(nested.call)
            })
        };
        let (root, every) = (Call::Root { again: true }, Call::Root { again: false });
        let endless = |root| Some(Call::Endless { root });
        let rooted = [Some(Call::Inner), Some(root), endless(false)];
        assert_eq!(calls(Some(3), Some(&[2, 3])), rooted);
        assert_eq!(calls(None, Some(&[2])), rooted);
        assert_eq!(calls(Some(3), None), [Some(every), Some(every), endless(true)]);
        assert_eq!(calls(None, None), [None; 3]);
        assert_eq!(tracer(None, Some(&[2, 3])).limits.endless_roots(), [3]);
    }

    // A root whose place nobody takes stays open; one that is taken as ended loses what it goes on in.
    #[test]
    fn a_root_goes_on_in_functions_that_are_traced() {
        let exits = [exit(1, ExitKind::Return), exit(9, ExitKind::Return)];
        let rooted = [tracer(None, Some(&[2]))];
        let entered = Entered::of([&rooted[0].sites[..]].into_iter(), exits.iter());
        let going = |kind| entered.going(&exit(2, kind), false);
        assert_eq!([jump(100), jump(900)].map(going), [Going::On, Going::Ends]);
        let indirect = ExitKind::Indirect { register: 0, len: 5 };
        assert_eq!([indirect, ExitKind::Return].map(going), [Going::Anywhere, Going::Ends]);
        let aided = Exit { after: After::Group(4), ..exit(2, jump(900)) };
        assert_eq!(entered.going(&aided, false), Going::Aided);
        assert_eq!(entered.going(&exit(2, jump(100)), true), Going::Anywhere);
        let all = [Going::Ends, Going::On, Going::Aided, Going::Anywhere];
        let calls = |tracer: &Tracer, timed| {
            all.map(|going| tracer.limits.end(Way::Jump, going, timed).unwrap().call)
        };
        use Call::{Ends, GoesOn, MayGoOn};
        assert_eq!(calls(&rooted[0], false), [Ends, GoesOn, GoesOn, MayGoOn]);
        assert_eq!(calls(&rooted[0], true), [Ends, GoesOn, Ends, MayGoOn]);
        assert_eq!(calls(&tracer(Some(2), None), false), [Ends, GoesOn, GoesOn, Ends]);
        let returned = rooted[0].limits.end(Way::Return, Going::On, false).unwrap();
        assert_eq!(returned.call, Ends);
    }

    // Sites and exits that share a duty with those of others would be recorded as those are.
    #[test]
    fn roots_and_what_goes_on_have_duties_of_their_own() {
        let mut tracing = tracing(&[&[]]);
        tracing.tracers = vec![Some(tracer(Some(2), Some(&[2])))];
        assert!(tracing.is_limited());
        let return_of = |site| exit(site, ExitKind::Return);
        let exits = [return_of(1), exit(2, jump(100)), exit(1, jump(900)), return_of(2)];
        let plan = Plan::of(&tracing, &exits);
        let of = |places: &[(usize, u32)]| -> Vec<(usize, Call)> {
            let call = |duty: u32| {
                let [part] = &plan.duties[duty as usize].parts[..] else { panic!("{plan:?}") };
                part.nested.unwrap().call
            };
            places.iter().map(|&(place, duty)| (place, call(duty))).collect()
        };
        let (root, endless) = (Call::Root { again: true }, Call::Endless { root: false });
        assert_eq!(of(&plan.sites), [(1, Call::Inner), (2, root), (3, endless)]);
        let ends = [(0, Call::Ends), (1, Call::GoesOn), (2, Call::Ends), (3, Call::Ends)];
        assert_eq!(of(&plan.exits), ends);
        assert_eq!(plan.keepers().len(), 1, "it begins anew when it gets others");
        assert_eq!(plan.without_nested(), Plan::default());
        // Where a task begins, nothing is open of who had its stack.
        tracing.begins = Some(2);
        let plan = Plan::of(&tracing, &exits);
        let parts = |at: usize| &plan.duties[plan.sites[at].1 as usize].parts[..];
        let fresh = Some(Nested { depth: Some(2), call: Call::Fresh });
        assert!(
            matches!(parts(1), [first, of_root] if first.nested == fresh && of_root.counts.is_none())
        );
        tracing.begins = Some(9);
        let plan = Plan::of(&tracing, &exits);
        let parts = &plan.duties[plan.sites[3].1 as usize].parts[..];
        assert!(
            matches!(parts, [Part { tracer: 0, counts: Some(Tally::Nothing), nested, .. }] if *nested == fresh)
        );
        assert_eq!(plan.recorded(), [1, 2, 3], "no record is of it");
        tracing.begins = None;
        // What others do there is done from the beginning.
        tracing.tracers.push(Some(Tracer { sites: vec![2, 4], ..Tracer::default() }));
        let before = Plan::of(&tracing, &exits).without_nested();
        assert_eq!((before.sites, before.exits.len()), (vec![(2, 0), (4, 0)], 0));
        assert!(before.duties == [Duty::entry(vec![1])]);
    }

    // An exit that was left alone leaves its level open.
    #[test]
    fn functions_whose_exits_are_not_held_are_endless() {
        let Tracer { sites, mut limits, .. } = tracer(Some(2), None);
        let is_there = |site: &usize| sites.contains(site);
        assert!(limits.learn_unheld(&[2, 3, 8], is_there));
        assert_eq!(limits.endless, [2, 3]);
        assert!(!limits.learn_unheld(&[2], is_there), "it is known");
        let mut all = Limits::default();
        assert!(!all.learn_unheld(&[2], is_there), "all calls are recorded");
    }

    #[test]
    fn limits_are_told() {
        let text = |depth, roots: Option<&str>| {
            let globs = |glob: &str| Globs { filter: vec![glob.to_owned()], ..Globs::default() };
            let roots = roots.map(|glob| Roots { globs: globs(glob), sites: vec![] });
            Limits { depth, roots, endless: vec![] }.to_string()
        };
        assert_eq!(text(None, None), "");
        assert_eq!(text(Some(1), None), ", 1 level");
        assert_eq!(text(Some(3), Some("vfs_read")), " in calls of vfs_read, 3 levels");
    }

    // A root that only -f could name would have to be named twice, also where it is a module's.
    #[test]
    fn roots_are_traced_with_the_others() {
        let mut limits = tracer(None, Some(&[2, 7])).limits;
        assert_eq!(limits.with_roots(vec![3, 2, 1]), [1, 2, 3, 7]);
        assert_eq!(Limits::default().with_roots(vec![1, 3]), [1, 3]);
        let globs = |all: &[&str]| Globs {
            filter: all.iter().map(ToString::to_string).collect(),
            notrace: vec!["n".to_owned()],
        };
        limits.roots = Some(Roots { globs: globs(&["x:mod:y"]), sites: vec![2, 7] });
        assert_eq!(limits.globs(&globs(&["vfs_*"])), globs(&["vfs_*", "x:mod:y"]));
        assert_eq!(limits.globs(&globs(&[])), globs(&[]), "all functions already");
        limits.retain(|&site| site > 3);
        assert_eq!((limits.endless.len(), limits.roots.unwrap().sites), (0, vec![7]));
    }
}
