//! Functions that cannot be traced, but to which traced functions jump, so that they return in
//! their place.
//!
//! They have no site (`notrace`, as are out-of-line copies of inline functions, all of lib/, and
//! assembly). The returns of such a function end the calls that jumped to it. The returns of one
//! that calls nothing need not be traced: between the jump and its end nothing else is recorded.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use crate::exits::{After, Exit, ExitKind, Missing};

use super::sweep::{Edge, How, Sweep};
use super::{Finder, Kind, Verdict};

/// Sections whose code must never be instrumented (include/asm-generic/vmlinux.lds.h).
const QUIET: [(&str, &str); 3] = [
    ("__noinstr_text_start", "__noinstr_text_end"),
    ("__entry_text_start", "__entry_text_end"),
    ("__cpuidle_text_start", "__cpuidle_text_end"),
];

/// A function without a site, by the number of its piece.
#[derive(Default)]
struct Node {
    /// Link addresses of its returns.
    returns: Vec<u64>,
    /// Others without a site that it goes on to.
    next: Vec<u32>,
    /// It calls or goes on to what may be traced.
    calls: bool,
    /// It has an end that cannot be seen.
    hidden: bool,
}

impl Finder<'_> {
    /// Adds the returns of functions that traced ones jump to, and says what follows these jumps.
    pub(super) fn follow(&mut self, sweep: &Sweep<'_>) {
        let mut edges: Vec<(u32, &Edge)> =
            sweep.edges.iter().map(|edge| (self.pieces.root(edge.piece), edge)).collect();
        edges.sort_by_key(|&(root, _)| root);
        let calling: BTreeSet<u32> =
            sweep.callers.iter().map(|&piece| self.pieces.root(piece)).collect();

        let (mut jumps, mut lost) = (Vec::new(), Vec::new());
        for (number, exit) in self.list.iter().enumerate() {
            let ExitKind::Jump { target } = exit.kind else { continue };
            let traced = self.pieces.at(target).and_then(|piece| self.pieces.site(piece));
            match self.untraced(target) {
                Some(piece) => jumps.push((number, piece)),
                None if traced.is_none() => lost.push(exit.site),
                None => {}
            }
        }
        // Code that is not what it seems to be.
        lost.into_iter().for_each(|site| self.miss(site, Missing::Beyond));
        // Where code may run with the page tables of a process, or with its gs base.
        let quiet = QUIET.iter().filter_map(|(start, end)| {
            let symbols = self.kernel.symbols();
            Some(symbols.address(start)?..symbols.address(end)?)
        });
        let quiet: Vec<_> = quiet.collect();
        let mut nodes: BTreeMap<u32, Node> = BTreeMap::new();
        let mut open: Vec<u32> = jumps.iter().map(|&(_, piece)| piece).collect();
        while let Some(piece) = open.pop() {
            if nodes.contains_key(&piece) {
                continue;
            }
            let first = edges.partition_point(|&(root, _)| root < piece);
            let own = edges[first..].iter().take_while(|&&(root, _)| root == piece);
            let mut node = self.node(own.map(|&(_, edge)| edge), calling.contains(&piece), sweep);
            if quiet.iter().any(|range| range.contains(&self.pieces.start(piece))) {
                node.hidden |= !std::mem::take(&mut node.returns).is_empty();
            }
            open.extend(&node.next);
            nodes.insert(piece, node);
        }

        let groups = groups(&nodes);
        for (number, piece) in jumps {
            let reached = reach(&nodes, piece);
            let reached = || reached.iter().filter_map(|piece| nodes.get(piece));
            let leaf = !reached().any(|node| node.calls);
            let hidden = !leaf && reached().any(|node| node.hidden);
            let Some(exit) = self.list.get_mut(number) else { continue };
            exit.after = match groups.get(&piece) {
                Some(&group) if !leaf => After::Group(group),
                _ => After::Leaf,
            };
            let site = exit.site;
            if hidden {
                self.miss(site, Missing::Beyond);
            }
        }
        let used: BTreeSet<u32> = self.list.iter().filter_map(|exit| exit.after.group()).collect();
        for (piece, node) in nodes {
            let Some(&group) = groups.get(&piece).filter(|group| used.contains(group)) else {
                continue;
            };
            let function = self.pieces.start(piece);
            self.list.extend(node.returns.into_iter().map(|address| Exit {
                address,
                function,
                site: Exit::NO_SITE,
                kind: ExitKind::Return,
                after: After::Group(group),
            }));
        }
    }

    /// The piece of a function that has no site.
    fn untraced(&self, target: u64) -> Option<u32> {
        let piece = self.pieces.at(target)?;
        let starts = self.pieces.start(piece) == target;
        let code = self.pieces.kind(piece) == Kind::Code && !self.pieces.is_dead(piece, target);
        (starts && code && self.pieces.site(piece).is_none()).then_some(piece)
    }

    fn node<'e>(
        &self,
        edges: impl Iterator<Item = &'e Edge>,
        calls: bool,
        sweep: &Sweep<'_>,
    ) -> Node {
        let mut node = Node { calls, ..Node::default() };
        for edge in edges {
            let verdict = match self.judge(edge) {
                Verdict::Exit(kind) => self.check(edge, kind, sweep),
                verdict => verdict,
            };
            match verdict {
                Verdict::Nothing => {}
                Verdict::Exit(ExitKind::Return) => node.returns.push(edge.from),
                // No hook is needed where it jumps on, only where that ends.
                _ if matches!(edge.how, How::Indirect) => (node.calls, node.hidden) = (true, true),
                _ if edge.target == self.thunk || edge.how == How::Return => node.hidden = true,
                // No hook is needed where it jumps on, only where that ends.
                _ => match self.untraced(edge.target) {
                    Some(next) => node.next.push(next),
                    // A traced one, which says so itself; or who knows where.
                    None => node.calls = true,
                },
            }
        }
        node
    }
}

/// Those that a function goes on to, itself among them.
fn reach(nodes: &BTreeMap<u32, Node>, from: u32) -> BTreeSet<u32> {
    let (mut seen, mut open) = (BTreeSet::new(), vec![from]);
    while let Some(piece) = open.pop() {
        if seen.insert(piece) {
            open.extend(nodes.get(&piece).into_iter().flat_map(|node| &node.next));
        }
    }
    seen
}

/// The number of the group of each: functions that go on to the same are in one.
fn groups(nodes: &BTreeMap<u32, Node>) -> BTreeMap<u32, u32> {
    let mut ways: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for (&piece, node) in nodes {
        for &next in &node.next {
            ways.entry(piece).or_default().push(next);
            ways.entry(next).or_default().push(piece);
        }
    }
    let mut groups = BTreeMap::new();
    for (&first, number) in nodes.keys().zip(0_u32..) {
        let mut open = vec![first];
        while let Some(piece) = open.pop() {
            if let Entry::Vacant(free) = groups.entry(piece) {
                free.insert(number);
                open.extend(ways.get(&piece).into_iter().flatten());
            }
        }
    }
    groups
}
