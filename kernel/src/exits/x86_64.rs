//! Exits of x86-64 functions.
//!
//! The kernel's code is divided into pieces at its symbols and sites. Each piece is disassembled
//! once, to find the branches that leave it. Then each unlikely part that the compiler has moved
//! elsewhere (`.cold`) is assigned to the one function that jumps there. Last, each branch out of a
//! piece is classified: it stays inside the function, it is an exit, or it shows that exits are
//! missing.

use std::ops::Range;

use crate::read::index;
use crate::sites::SiteSection;
use crate::{Kernel, KernelError, elf};

use super::{After, Exit, ExitKind, Exits, Missing, ReturnStats};

mod beyond;
mod marks;
pub(in crate::exits) mod module;
mod module_code;
mod orc;
mod pieces;
mod sweep;
mod tables;

pub(crate) use module_code::ModuleCode;
use orc::{Depth, Orc};
use pieces::{Kind, Pieces};
pub(crate) use sweep::{CountPlace, Counted};
use sweep::{Edge, How, Sweep};
pub(crate) use tables::{Patches, Tables};

/// Finds the exits of all functions whose sites are in code that stays.
pub(super) fn find(kernel: &Kernel) -> Result<Exits, KernelError> {
    // Without the symbols of data the tables of what is rewritten cannot be found.
    if !crate::has_data(kernel.symbols()) {
        return Err(KernelError::FunctionSymbols);
    }
    let tables = Tables { kernel };
    let returns = tables.returns()?.filter(|list| !list.is_empty());
    let thunk = kernel.symbols().address("__x86_return_thunk");
    let (returns, thunk) = returns.zip(thunk).ok_or(KernelError::NoReturnSites)?;
    let Survey { text, patches, mut pieces, sweep } = Survey::new(&tables, None)?;
    pieces.join(&sweep.edges, kernel.symbols());

    let mut finder = Finder {
        kernel,
        text,
        orc: Orc::find(&tables)?,
        orphans: Vec::new(),
        retpolines: tables.retpolines()?,
        patches,
        pieces,
        returns,
        thunk,
        list: Vec::new(),
        missing: vec![None; kernel.sites().len()],
        fixed: Vec::new(),
    };
    finder.run(&sweep);
    finder.follow(&sweep);
    Ok(finder.finish())
}

/// All code that stays, disassembled once.
pub(crate) struct Survey<'a> {
    pub(crate) text: Range<u64>,
    pub(crate) patches: Patches,
    pieces: Pieces,
    sweep: Sweep<'a>,
}

impl<'a> Survey<'a> {
    /// With the changes of the count at this offset from the gs base, if one is given.
    ///
    /// # Errors
    /// When the code or a table is not within the image, or the layout of a table is not known.
    pub(crate) fn new(tables: &Tables<'a>, count: Option<CountPlace>) -> Result<Self, KernelError> {
        let kernel = tables.kernel;
        let (text, bytes) = text(kernel)?;
        let patches = tables.patches(&text)?;
        let mut pieces = Pieces::new(kernel, &text);
        let mut sweep = Sweep::new(&text, bytes, kernel.symbols().address("__fentry__"));
        sweep.count = count;
        for number in 0..pieces.len() {
            pieces.sweep(number, kernel, &mut sweep);
        }
        for &(from, target) in &patches.ways {
            sweep.targets.set(target);
            if let Some(piece) = pieces.at(from) {
                sweep.edges.push(Edge { from, target, piece, len: 0, how: How::Table });
            }
        }
        patches.nexts.iter().for_each(|&next| sweep.targets.set(next));
        Ok(Self { text, patches, pieces, sweep })
    }

    /// Where the count is changed, ascending.
    pub(crate) fn counted(&self) -> &[Counted] {
        &self.sweep.counted
    }

    /// Whether something leads into `count` bytes from an address on.
    pub(crate) fn is_led_into(&self, address: u64, count: u8) -> bool {
        self.sweep.targets.any(address, count)
    }
}

/// The code that stays: its addresses and bytes.
fn text(kernel: &Kernel) -> Result<(Range<u64>, &[u8]), KernelError> {
    let symbols = kernel.symbols();
    let bounds = symbols.address("_stext").zip(symbols.address("_etext"));
    let range = bounds
        .map(|(start, end)| start..end)
        .or_else(|| elf::section_addresses(kernel.vmlinux(), ".text"))
        .unwrap_or_default();
    let len = range.end.checked_sub(range.start).filter(|&len| len > 0);
    let bytes = len.and_then(|len| kernel.bytes(range.start, index(len)));
    let bytes = bytes.ok_or_else(|| {
        KernelError::Damaged(format!(
            "code at {:#x} to {:#x} is not within the image",
            range.start, range.end
        ))
    })?;
    Ok((range, bytes))
}

/// Trampolines of static calls that are directed once.
const FIXED_CALLS: &str = "__SCT__lsm_static_call_";

/// Judges the branches that leave pieces of code.
struct Finder<'a> {
    kernel: &'a Kernel,
    text: Range<u64>,
    /// Pieces with code that nothing known leads to, ascending.
    orphans: Vec<u32>,
    orc: Option<Orc<'a>>,
    /// None in kernels that jump through registers directly.
    retpolines: Option<Vec<u64>>,
    patches: Patches,
    pieces: Pieces,
    returns: Vec<u64>,
    thunk: u64,
    list: Vec<Exit>,
    missing: Vec<Option<Missing>>,
    /// Static calls that are directed once, by site.
    fixed: Vec<(u32, u64)>,
}

/// What a branch is.
enum Verdict {
    /// It stays in the function, or is never executed.
    Nothing,
    Exit(ExitKind),
    Missing(Missing),
    /// A static call that is directed once.
    Fixed,
}

impl Finder<'_> {
    fn run(&mut self, sweep: &Sweep<'_>) {
        let orphans = sweep.blocks.iter().filter(|block| {
            !block.start.clone().any(|at| sweep.targets.is_set(at))
                && self.depth(*block.start.end()) != Some(Depth::Undefined)
        });
        self.orphans = orphans.map(|block| block.piece).collect();
        for edge in &sweep.edges {
            let Some(site) = self.pieces.site(edge.piece) else { continue };
            let verdict = match self.judge(edge) {
                Verdict::Exit(kind) => self.check(edge, kind, sweep),
                verdict => verdict,
            };
            match verdict {
                Verdict::Nothing => {}
                Verdict::Exit(kind) => {
                    let function = self.pieces.start(self.pieces.root(edge.piece));
                    let (address, after) = (edge.from, After::Nothing);
                    self.list.push(Exit { address, function, site, kind, after });
                }
                Verdict::Missing(missing) => self.miss(site, missing),
                Verdict::Fixed => self.fixed.push((site, edge.from)),
            }
        }
    }

    /// Notes what a function lacks; what was found first stays.
    fn miss(&mut self, site: u32, missing: Missing) {
        if let Some(place) = self.missing.get_mut(index(site.into())) {
            place.get_or_insert(missing);
        }
    }

    fn judge(&self, edge: &Edge) -> Verdict {
        if self.is_dead(edge) {
            return Verdict::Nothing;
        }
        match edge.how {
            How::Indirect => return Verdict::Missing(Missing::IndirectJump),
            How::Return => return Verdict::Missing(Missing::UnlistedReturn),
            _ => {}
        }
        let (target, symbols) = (edge.target, self.kernel.symbols());
        let to = self.pieces.at(target).map(|piece| (piece, self.pieces.start(piece) == target));
        if let Some((piece, start)) = to
            && self.pieces.root(piece) == self.pieces.root(edge.piece)
            && !(start && self.pieces.root(piece) == piece)
        {
            return Verdict::Nothing;
        }
        let kind = match to {
            Some((piece, true)) => self.pieces.kind(piece),
            Some((_, false)) => return Verdict::Missing(Missing::StrayJump),
            // Not exits: tests that are replaced before long, which have their own place.
            None if edge.how != How::Table && self.patches.bytes.is_set(edge.from) => {
                return Verdict::Nothing;
            }
            None if symbols.names_at(target).next().is_none() => {
                return Verdict::Missing(Missing::StrayJump);
            }
            None => Kind::Code,
        };
        match (edge.how, kind) {
            (How::Table, _) => Verdict::Missing(Missing::Replaced),
            (_, Kind::Cold | Kind::Padding) => Verdict::Missing(Missing::StrayJump),
            (How::Conditional, _) => Verdict::Missing(Missing::ConditionalJump),
            (How::Short, _) => Verdict::Missing(Missing::ShortJump),
            (_, Kind::StaticCall) => {
                let is_fixed = symbols.names_at(target).any(|name| name.starts_with(FIXED_CALLS));
                let is_listed = self.patches.static_calls.binary_search(&edge.from).is_ok();
                match self.depth(edge.from) {
                    Some(Depth::Entry) if is_fixed && is_listed && edge.len == 5 => Verdict::Fixed,
                    _ => Verdict::Missing(Missing::StaticCall),
                }
            }
            (_, Kind::Thunk(register)) => self.indirect(edge, register),
            (_, Kind::Code) if target == self.thunk => match self.returns.binary_search(&edge.from)
            {
                // clang puts a prefix before the jump; the kernel makes the return at the first byte.
                Ok(_) if matches!(edge.len, 5 | 6) => Verdict::Exit(ExitKind::Return),
                _ => Verdict::Missing(Missing::UnlistedReturn),
            },
            (_, Kind::Code) => match self.depth(edge.from) {
                Some(Depth::Entry) | None if edge.len == 5 => {
                    Verdict::Exit(ExitKind::Jump { target })
                }
                _ => Verdict::Missing(Missing::StrayJump),
            },
        }
    }

    /// A jump through a register may be a tail call or a computed goto: the stack's depth tells,
    /// and that there is no code for a goto to lead to.
    fn indirect(&self, edge: &Edge, register: u8) -> Verdict {
        let listed = self.retpolines.as_ref().is_some_and(|l| l.binary_search(&edge.from).is_ok());
        let leaves = self.depth(edge.from) == Some(Depth::Entry);
        let goto = self.orphans.binary_search(&edge.piece).is_ok();
        if listed && leaves && !goto && matches!(edge.len, 5 | 6) {
            return Verdict::Exit(ExitKind::Indirect { register, len: edge.len });
        }
        Verdict::Missing(Missing::IndirectJump)
    }

    /// What must hold for an exit to be written over.
    fn check(&self, edge: &Edge, kind: ExitKind, sweep: &Sweep<'_>) -> Verdict {
        if self.patches.bytes.any(edge.from, edge.len) {
            return Verdict::Missing(Missing::Replaced);
        }
        if sweep.targets.any(edge.from.wrapping_add(1), edge.len - 1) {
            return Verdict::Missing(Missing::BranchInside);
        }
        Verdict::Exit(kind)
    }

    fn depth(&self, address: u64) -> Option<Depth> {
        self.orc.as_ref().map(|orc| orc.at(address))
    }

    /// Code behind a function that belonged to an overridden one: the build found no way there.
    fn is_dead(&self, edge: &Edge) -> bool {
        let undefined = |address| self.depth(address) == Some(Depth::Undefined);
        undefined(edge.from) && !undefined(self.pieces.start(edge.piece))
    }

    fn finish(mut self) -> Exits {
        let mut stats = ReturnStats { listed: self.returns.len(), ..ReturnStats::default() };
        self.list.sort_unstable_by_key(|exit| exit.address);
        let mut found = self.list.iter().filter(|e| e.kind == ExitKind::Return).peekable();
        let mut unusable = Vec::new();
        for &address in &self.returns {
            if found.next_if(|exit| exit.address == address).is_some() {
                stats.exits += 1;
                continue;
            }
            let piece = self.pieces.at(address);
            let count = match piece.map(|piece| (piece, self.pieces.site(piece))) {
                None => &mut stats.outside,
                Some((piece, _)) if self.pieces.kind(piece) == Kind::StaticCall => {
                    &mut stats.trampolines
                }
                Some((piece, site)) => {
                    let edge = Edge { from: address, target: 0, piece, len: 5, how: How::Jump };
                    match site {
                        _ if self.pieces.is_dead(piece, address) || self.is_dead(&edge) => {
                            &mut stats.dead
                        }
                        None => &mut stats.untraced,
                        Some(site) => {
                            unusable.push(site);
                            &mut stats.unusable
                        }
                    }
                }
            };
            *count += 1;
        }
        // Those that were met in the code have been noted with a better reason.
        unusable.into_iter().for_each(|site| self.miss(site, Missing::Undecoded));
        for (site, missing) in self.pieces.faults() {
            self.miss(site, missing);
        }
        for (i, site) in self.kernel.sites().iter().enumerate() {
            if site.section == SiteSection::InitText || !self.text.contains(&site.entry) {
                self.missing[i] = Some(Missing::InitText);
            } else if self.kernel.site_name(site).is_none() {
                self.missing[i] = Some(Missing::Dead);
            }
        }
        let missing = |site: u32| self.missing.get(index(site.into())).copied().flatten();
        self.fixed.retain(|&(site, _)| missing(site).is_none());
        self.fixed.sort_unstable();
        for &(site, _) in &self.fixed {
            if let Some(place) = self.missing.get_mut(index(site.into())) {
                *place = Some(Missing::StaticCall);
            }
        }
        Exits { fixed_calls: self.fixed, ..Exits::new(self.list, self.missing, stats) }
    }
}
