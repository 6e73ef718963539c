//! Exits of functions of modules.
//!
//! The code is that of a loaded module: its returns have been rewritten for the processor, and its
//! static calls and static keys have their current state. So the module's tables decide which
//! instructions are returns, and which the kernel rewrites itself.

use std::collections::{BTreeMap, HashMap};

use crate::exits::module::{ModuleExits, ModulePiece, ModuleText};
use crate::exits::{After, Coverage, Exit, ExitKind, Missing};
use crate::read::index;
use crate::sites::SiteSection;
use crate::{Kernel, KernelError};

use super::marks::Marks;
use super::module_code::{ModuleCode, PieceCode};
use super::sweep::{Edge, How};

/// Bytes of a return, and of a jump that can be used.
const LEN: u8 = 5;

/// What is at an address outside of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outside {
    /// A function that tells itself where it is left.
    Traced,
    /// One that cannot be traced, to which the kernel's own functions jump, too, and whether it has
    /// an end that cannot be seen.
    Known(After, bool),
    /// Another one.
    Unseen,
    /// A thunk of indirect jumps.
    Thunk,
    /// A trampoline of a static call.
    StaticCall,
    /// No beginning of a function.
    Nothing,
}

pub(in crate::exits) fn find(
    kernel: &Kernel,
    text: &ModuleText,
) -> Result<ModuleExits, KernelError> {
    let exits = kernel.exits()?;
    let mut known: HashMap<u64, (After, bool)> = HashMap::new();
    for exit in exits.all() {
        if let (ExitKind::Jump { target }, true) = (exit.kind, exit.after != After::Nothing) {
            // That of all who jump there, if it is the target's.
            let coverage = exits.coverage(index(exit.site.into()));
            let hidden = coverage == Coverage::Partial(Missing::Beyond);
            known.entry(target).or_insert((exit.after, true)).1 &= hidden;
        }
    }
    let outside = |address: u64| {
        let names = || kernel.symbols().names_at(address);
        let sites = kernel.sites();
        let site = sites.binary_search_by_key(&address, |site| site.entry).ok();
        match site.and_then(|site| sites.get(site)) {
            Some(site) if site.section == SiteSection::Text && names().next().is_some() => {
                Outside::Traced
            }
            _ if text.others.binary_search(&address).is_ok() => Outside::Traced,
            _ if names().any(|name| name.starts_with("__x86_indirect_")) => Outside::Thunk,
            _ if names().any(|name| name.starts_with("__SCT__")) => Outside::StaticCall,
            _ => match (known.get(&address), names().next()) {
                (Some(&(after, hidden)), _) => Outside::Known(after, hidden),
                (None, Some(_)) => Outside::Unseen,
                (None, None) => Outside::Nothing,
            },
        }
    };
    Ok(Finder::new(text).find(&outside))
}

/// A piece of code, by its number.
struct Piece {
    end: u64,
    cold: bool,
    /// Of a part put elsewhere: the function's own piece.
    parent: Option<usize>,
    /// Of a part put elsewhere: other functions go there, too.
    shared: bool,
    missing: Option<Missing>,
    /// Where branches end.
    targets: Marks,
}

struct Finder<'a> {
    text: &'a ModuleText,
    pieces: Vec<Piece>,
    edges: Vec<Edge>,
    list: Vec<Exit>,
    missing: BTreeMap<u32, Missing>,
}

fn is_cold(name: &str) -> bool {
    name.ends_with(".cold") || name.contains(".cold.")
}

impl<'a> Finder<'a> {
    fn new(text: &'a ModuleText) -> Self {
        let ModuleCode { pieces, edges, .. } = ModuleCode::new(text, None);
        let piece = |(code, piece): (PieceCode, &ModulePiece)| Piece {
            end: code.range.end,
            cold: is_cold(&piece.name),
            parent: None,
            shared: false,
            missing: code.missing,
            targets: code.targets,
        };
        let pieces = pieces.into_iter().zip(&text.pieces).map(piece).collect();
        let mut finder = Self { text, pieces, edges, list: Vec::new(), missing: BTreeMap::new() };
        finder.join();
        finder
    }

    /// The piece that covers an address.
    fn at(&self, address: u64) -> Option<usize> {
        let after = self.text.pieces.partition_point(|piece| piece.start <= address);
        let at = after.checked_sub(1)?;
        self.pieces.get(at).filter(|piece| address < piece.end)?;
        Some(at)
    }

    fn start(&self, piece: usize) -> u64 {
        self.text.pieces.get(piece).map_or(0, |piece| piece.start)
    }

    /// Gives each part put elsewhere to the function that goes there, or, if none is seen to, to the
    /// only one of its name. A part that two functions go to is of no use to either.
    fn join(&mut self) {
        let ways: Vec<(usize, usize)> = self
            .edges
            .iter()
            .filter_map(|edge| Some((usize::try_from(edge.piece).ok()?, self.at(edge.target)?)))
            .filter(|&(from, to)| from != to && self.pieces.get(to).is_some_and(|to| to.cold))
            .collect();
        for &(from, to) in &ways {
            if let Some(piece) = self.pieces.get_mut(to) {
                piece.parent.get_or_insert(from);
            }
        }
        let mut names: HashMap<&str, Option<usize>> = HashMap::new();
        for (number, piece) in self.text.pieces.iter().enumerate() {
            names.entry(&piece.name).and_modify(|only| *only = None).or_insert(Some(number));
        }
        for (piece, own) in self.pieces.iter_mut().zip(&self.text.pieces) {
            if piece.cold && piece.parent.is_none() {
                let name = own.name.split_once(".cold").map(|(name, _)| name);
                piece.parent = name.and_then(|name| names.get(name).copied().flatten());
            }
        }
        for (from, to) in ways {
            if self.root(from) != self.root(to)
                && let Some(piece) = self.pieces.get_mut(to)
            {
                piece.shared = true;
                piece.missing.get_or_insert(Missing::StrayJump);
                // Who goes there ends there, too.
                if let Some(site) = self.site_of_root(from) {
                    self.missing.entry(site).or_insert(Missing::StrayJump);
                }
            }
        }
    }

    /// The function that a piece belongs to, by the number of its own piece.
    fn root(&self, piece: usize) -> usize {
        /// A part goes to another one at most; more would be a ring.
        const DEEPEST: usize = 4;
        let parent = |&piece: &usize| self.pieces.get(piece).and_then(|piece| piece.parent);
        std::iter::successors(Some(piece), parent).take(DEEPEST).last().unwrap_or(piece)
    }

    fn site_of_root(&self, piece: usize) -> Option<u32> {
        let root = self.text.pieces.get(self.root(piece))?;
        root.site.map(|(site, _)| site)
    }

    fn find(mut self, outside: &dyn Fn(u64) -> Outside) -> ModuleExits {
        for edge in std::mem::take(&mut self.edges) {
            let Ok(piece) = usize::try_from(edge.piece) else { continue };
            let Some(site) = self.site_of_root(piece) else { continue };
            if self.pieces.get(piece).is_none_or(|piece| piece.shared) {
                continue;
            }
            match self.judge(piece, &edge, outside) {
                Ok(None) => {}
                Ok(Some((kind, after))) => match self.check(piece, &edge) {
                    Ok(()) => {
                        let (address, function) = (edge.from, self.start(self.root(piece)));
                        self.list.push(Exit { address, function, site, kind, after });
                        if self.is_unseen(kind, outside) {
                            self.missing.entry(site).or_insert(Missing::Beyond);
                        }
                    }
                    Err(missing) => {
                        self.missing.entry(site).or_insert(missing);
                    }
                },
                Err(missing) => {
                    self.missing.entry(site).or_insert(missing);
                }
            }
        }
        for (number, piece) in self.pieces.iter().enumerate() {
            if let (Some(missing), Some(site)) = (piece.missing, self.site_of_root(number)) {
                self.missing.entry(site).or_insert(missing);
            }
        }
        self.list.sort_unstable_by_key(|exit| (exit.site, exit.address));
        for (site, _) in self.text.pieces.iter().filter_map(|piece| piece.site) {
            let first = self.list.partition_point(|exit| exit.site < site);
            if self.list.get(first).is_none_or(|exit| exit.site != site) {
                self.missing.entry(site).or_insert(Missing::NoReturn);
            }
        }
        let missing = self.missing.into_iter().collect();
        ModuleExits { list: self.list, missing, rewrites: Vec::new() }
    }

    /// Whether nobody tells the end of the function that is jumped to.
    fn is_unseen(&self, kind: ExitKind, outside: &dyn Fn(u64) -> Outside) -> bool {
        let ExitKind::Jump { target } = kind else { return false };
        match self.at(target).and_then(|piece| self.text.pieces.get(piece)) {
            Some(piece) => piece.site.is_none(),
            None => matches!(outside(target), Outside::Unseen | Outside::Known(_, true)),
        }
    }

    /// What a branch is: nothing, an exit, or what tells that there is one that cannot be used.
    fn judge(
        &self,
        piece: usize,
        edge: &Edge,
        outside: &dyn Fn(u64) -> Outside,
    ) -> Result<Option<(ExitKind, After)>, Missing> {
        let text = self.text;
        if text.static_calls.binary_search(&edge.from).is_ok() {
            return Err(Missing::StaticCall);
        }
        let listed = text.returns.binary_search(&edge.from).is_ok();
        match edge.how {
            How::Return | How::Jump if listed => {
                return Ok(Some((ExitKind::Return, After::Nothing)));
            }
            How::Return => return Err(Missing::UnlistedReturn),
            How::Indirect => return Err(Missing::IndirectJump),
            _ => {}
        }
        let to = self.at(edge.target);
        let begins = to.is_some_and(|to| self.start(to) == edge.target);
        if let Some(to) = to
            && self.root(to) == self.root(piece)
            && !(begins && self.root(to) == to)
        {
            return Ok(None);
        }
        // Its way is among the others.
        if edge.how != How::Table && text.labels.binary_search(&edge.from).is_ok() {
            return Ok(None);
        }
        let after = match to {
            Some(to) if !begins || self.pieces.get(to).is_none_or(|piece| piece.cold) => {
                return Err(Missing::StrayJump);
            }
            Some(_) => After::Nothing,
            None => match outside(edge.target) {
                Outside::Traced | Outside::Unseen => After::Nothing,
                Outside::Known(after, _) => after,
                Outside::Thunk => return Err(Missing::IndirectJump),
                Outside::StaticCall => return Err(Missing::StaticCall),
                Outside::Nothing => return Err(Missing::StrayJump),
            },
        };
        match edge.how {
            How::Table => Err(Missing::Replaced),
            How::Conditional => Err(Missing::ConditionalJump),
            How::Jump if edge.len == LEN => {
                Ok(Some((ExitKind::Jump { target: edge.target }, after)))
            }
            _ => Err(Missing::ShortJump),
        }
    }

    /// What must hold for an exit to be written over.
    fn check(&self, piece: usize, edge: &Edge) -> Result<(), Missing> {
        let Some(piece) = self.pieces.get(piece) else { return Err(Missing::Undecoded) };
        if edge.from.saturating_add(LEN.into()) > piece.end {
            return Err(Missing::UnlistedReturn);
        }
        let behind = edge.from + 1;
        let within = |list: &[u64]| {
            let first = list.partition_point(|&at| at < behind);
            list.get(first).is_some_and(|&at| at < edge.from + u64::from(LEN))
        };
        if within(&self.text.labels) || within(&self.text.static_calls) {
            return Err(Missing::Replaced);
        }
        if piece.targets.any(behind, LEN - 1) {
            return Err(Missing::BranchInside);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: u64 = 0xffff_ffff_c000_0000;
    const COLD: u64 = BASE + 0x100;
    const OTHER: u64 = BASE + 0x200;
    const TRACED: u64 = BASE - 0x1000;
    const KNOWN: u64 = BASE - 0x2000;
    const UNSEEN: u64 = BASE - 0x3000;
    const THUNK: u64 = BASE - 0x4000;
    const TRAMPOLINE: u64 = BASE - 0x5000;
    const SITE: [u8; 5] = [0x0f, 0x1f, 0x44, 0, 0];
    const RETURN: [u8; 5] = [0xc3, 0xcc, 0xcc, 0xcc, 0xcc];

    fn outside(address: u64) -> Outside {
        match address {
            TRACED => Outside::Traced,
            KNOWN => Outside::Known(After::Group(3), false),
            UNSEEN => Outside::Unseen,
            THUNK => Outside::Thunk,
            TRAMPOLINE => Outside::StaticCall,
            _ => Outside::Nothing,
        }
    }

    fn jump(from: u64, to: u64) -> Vec<u8> {
        let distance = i32::try_from(to.wrapping_sub(from + 5).cast_signed()).unwrap();
        [[0xe9].as_slice(), &distance.to_le_bytes()].concat()
    }

    /// A function of the module, or a part: code behind its site, if it has one.
    fn piece(start: u64, name: &str, site: Option<u32>, code: &[u8]) -> ModulePiece {
        let before: &[u8] = if site.is_some() { &SITE } else { &[] };
        let (bytes, name) = ([before, code].concat(), name.into());
        ModulePiece { start, bytes, name, site: site.map(|site| (site, start)) }
    }

    /// One function, 7, with a site and this code behind it.
    fn function(code: &[u8]) -> ModuleText {
        ModuleText { pieces: vec![piece(BASE, "f", Some(7), code)], ..ModuleText::default() }
    }

    type Left = (u64, ExitKind, After);

    fn found(text: &ModuleText) -> (Vec<Left>, Vec<(u32, Missing)>) {
        let ModuleExits { list, missing, .. } = Finder::new(text).find(&outside);
        assert!(list.iter().all(|exit| (exit.site, exit.function) == (7, BASE)));
        let list = list.iter().map(|exit| (exit.address, exit.kind, exit.after));
        (list.collect(), missing)
    }

    // What is taken for an exit is written over; what is overlooked is a call without an end.
    #[test]
    fn functions_of_modules_are_left_by_returns_and_jumps() {
        let (returns, thunk) = (BASE + 5, BASE + 0xc);
        let jumps = [TRACED, KNOWN, UNSEEN, BASE].map(|target| ExitKind::Jump { target });
        let mut code = RETURN.to_vec();
        // je to the jump of a return.
        code.extend([0x74, 0]);
        code.extend(jump(thunk, BASE - 0x6000));
        for (at, to) in (BASE + 0x11..).step_by(5).zip([TRACED, KNOWN, UNSEEN, BASE]) {
            code.extend(jump(at, to));
        }
        let mut text = function(&code);
        text.returns = vec![returns, thunk];
        let (list, missing) = found(&text);
        let nothing = After::Nothing;
        let mut expected =
            vec![(returns, ExitKind::Return, nothing), (thunk, ExitKind::Return, nothing)];
        let afters = [nothing, After::Group(3), nothing, nothing];
        let jumps = (BASE + 0x11..).step_by(5).zip(jumps).zip(afters);
        expected.extend(jumps.map(|((at, kind), after)| (at, kind, after)));
        assert_eq!((list, missing), (expected, vec![(7, Missing::Beyond)]));
    }

    // The module's own tables say what is a return, and what the kernel writes itself.
    #[test]
    fn what_cannot_be_held_is_missing() {
        let at = BASE + 5;
        let missing = |text: &ModuleText, why: Missing| {
            let (list, missing) = found(text);
            assert_eq!((list, missing), (vec![], vec![(7, why)]));
        };
        missing(&function(&RETURN), Missing::UnlistedReturn);
        missing(&function(&[0xff, 0xe0, 0xcc, 0x66, 0x90]), Missing::IndirectJump);
        missing(&function(&jump(at, THUNK)), Missing::IndirectJump);
        missing(&function(&jump(at, TRAMPOLINE)), Missing::StaticCall);
        missing(&function(&jump(at, TRACED + 1)), Missing::StrayJump);
        missing(&function(&[0x0f, 0x0b]), Missing::NoReturn);
        missing(&function(&[0x06]), Missing::Undecoded);
        let conditional = [&[0x0f, 0x84][..], &jump(at + 1, TRACED)[1..]].concat();
        missing(&function(&conditional), Missing::ConditionalJump);
        // To the function behind.
        let mut short = function(&[0xeb, 0]);
        short.pieces.push(piece(BASE + 7, "g", None, &RETURN));
        missing(&short, Missing::ShortJump);
        let mut text = function(&jump(at, TRACED));
        text.static_calls = vec![at];
        missing(&text, Missing::StaticCall);
        // Into it: from a table, and from the function's own code.
        let mut text = function(&RETURN);
        text.returns = vec![at];
        text.ways = vec![(BASE, at + 2)];
        missing(&text, Missing::BranchInside);
        let mut text = function(&[&[0x74, 2][..], &RETURN].concat());
        text.returns = vec![at + 2];
        missing(&text, Missing::BranchInside);
        // Not as long as what is written over it.
        let mut text = function(&[0xc3]);
        text.returns = vec![at];
        missing(&text, Missing::UnlistedReturn);
    }

    // A part that stands elsewhere is the function's that goes there, whatever its key says now.
    #[test]
    fn parts_put_elsewhere_belong_to_their_function() {
        let label = BASE + 5;
        let mut text = function(&[&[0x0f, 0x1f, 0x44, 0, 0][..], &RETURN].concat());
        let cold = [jump(COLD, TRACED), jump(COLD + 5, BASE + 10)].concat();
        text.pieces.push(piece(COLD, "other.cold", None, &cold));
        text.returns = vec![BASE + 10];
        text.labels = vec![label];
        text.ways = vec![(label, COLD)];
        let nothing = After::Nothing;
        let expected = vec![
            (BASE + 10, ExitKind::Return, nothing),
            (COLD, ExitKind::Jump { target: TRACED }, nothing),
        ];
        assert_eq!(found(&text), (expected.clone(), vec![]));
        // Switched on.
        text.pieces[0].bytes[5..10].copy_from_slice(&jump(label, COLD));
        assert_eq!(found(&text), (expected.clone(), vec![]));
        // By its name alone.
        text.pieces[0].bytes[5..10].copy_from_slice(&SITE);
        text.pieces[1].name = "f.cold".into();
        text.ways.clear();
        assert_eq!(found(&text), (expected, vec![]));
        // Of two: of no use to either.
        text.ways = vec![(label, COLD)];
        text.pieces.push(piece(OTHER, "g", None, &jump(OTHER, COLD)));
        let (list, missing) = found(&text);
        assert_eq!(list, [(BASE + 10, ExitKind::Return, nothing)]);
        assert_eq!(missing, [(7, Missing::StrayJump)]);
    }

    // Tables and code of modules are the guest's word.
    #[test]
    fn any_code_and_tables_are_looked_through() {
        let mut state = 0x2545_f491_4f6c_dd1d_u64;
        let mut next = |below: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % below
        };
        for _ in 0..2000 {
            let mut text = ModuleText::default();
            let mut start = BASE;
            for number in 0..next(6) {
                let bytes = (0..next(64)).map(|_| {
                    [0xe9, 0xc3, 0x74, 0xeb, 0x90, next(256).to_le_bytes()[0]]
                        [usize::try_from(next(6)).unwrap()]
                });
                let bytes: Vec<u8> = bytes.collect();
                let site = (next(2) == 0).then(|| (u32::try_from(number).unwrap(), start));
                let name = if next(3) == 0 { "f.cold" } else { "f" }.into();
                text.pieces.push(ModulePiece { start, bytes, name, site });
                start = start.wrapping_add(next(80));
            }
            let mut list = |count| {
                let mut list: Vec<u64> =
                    (0..next(count)).map(|_| BASE.wrapping_add(next(300))).collect();
                list.sort_unstable();
                list
            };
            text.returns = list(40);
            text.labels = list(5);
            text.static_calls = list(5);
            text.ways = list(5).into_iter().zip(list(5)).collect();
            let ModuleExits { list, .. } = Finder::new(&text).find(&outside);
            for exit in list {
                let of = text.pieces.iter().find(|piece| {
                    let end = piece.start + u64::try_from(piece.bytes.len()).unwrap();
                    (piece.start..end).contains(&exit.address) && exit.address + 5 <= end
                });
                assert!(of.is_some(), "{exit:?} is not within a function: {text:x?}");
            }
        }
    }
}
