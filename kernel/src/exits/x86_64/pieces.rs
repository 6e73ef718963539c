//! The kernel's code, divided at its symbols and sites, and the function to which each piece
//! belongs.

use std::ops::Range;

use crate::Kernel;
use crate::exits::Missing;
use crate::read::index;
use crate::sites::SiteSection;
use crate::symbols::Symbols;

use super::sweep::{Edge, Sweep};

/// What a piece of code is, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Code,
    /// The unlikely part of a function, which the compiler put elsewhere.
    Cold,
    /// A trampoline, which the kernel directs to where its static call goes.
    StaticCall,
    /// Jumps through a register, instead of an indirect jump.
    Thunk(u8),
    /// What fills the room before a function.
    Padding,
}

struct Piece {
    start: u64,
    /// Where the code that belongs to it ends, once it is disassembled.
    end: u64,
    kind: Kind,
    missing: Option<Missing>,
    /// The traced function that begins here, and never one that was overridden.
    site: Option<u32>,
    /// Of a part put elsewhere: the function's own piece.
    parent: Option<u32>,
    /// Of a part put elsewhere: other functions go there too.
    shared: bool,
    /// An overridden function, which has a site but no name.
    dead: bool,
}

/// All pieces, by address.
pub(super) struct Pieces {
    list: Vec<Piece>,
    text: Range<u64>,
}

impl Pieces {
    pub(super) fn new(kernel: &Kernel, text: &Range<u64>) -> Self {
        let symbols = kernel.symbols();
        let mut list: Vec<Piece> = Vec::new();
        let first = symbols.addresses_slice().partition_point(|&a| a < text.start);
        for (i, &start) in symbols.addresses_slice().iter().enumerate().skip(first) {
            if start >= text.end {
                break;
            }
            let kind = kind(symbols.name(i));
            match list.last_mut().filter(|last| last.start == start) {
                Some(last) if last.kind == Kind::Code => last.kind = kind,
                Some(_) => {}
                None => list.push(Piece::new(start, kind)),
            }
        }
        let named = list.len();
        for (i, site) in kernel.sites().iter().enumerate() {
            if site.section != SiteSection::Text || !text.contains(&site.entry) {
                continue;
            }
            match list[..named].binary_search_by_key(&site.entry, |piece| piece.start) {
                Ok(at) => {
                    list[at].site = list[at].site.or_else(|| u32::try_from(i).ok());
                    list[at].kind = Kind::Code;
                }
                Err(_) => list.push(Piece { dead: true, ..Piece::new(site.entry, Kind::Code) }),
            }
        }
        list.sort_by_key(|piece| piece.start);
        for i in 0..list.len() {
            list[i].end = list.get(i + 1).map_or(text.end, |next| next.start);
        }
        Self { list, text: text.clone() }
    }

    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    /// Disassembles a piece.
    pub(super) fn sweep(&mut self, number: usize, kernel: &Kernel, sweep: &mut Sweep<'_>) {
        let piece = &mut self.list[number];
        let Ok(number) = u32::try_from(number) else { return };
        if piece.dead || !matches!(piece.kind, Kind::Code | Kind::Cold) {
            return;
        }
        let location = piece.site.and_then(|site| kernel.sites().get(index(site.into())));
        let location = location.map(|site| site.location);
        let swept = sweep.piece(number, &(piece.start..piece.end), location);
        piece.end = swept.end;
        piece.missing = swept.missing;
    }

    /// The piece that covers an address.
    pub(super) fn at(&self, address: u64) -> Option<u32> {
        if !self.text.contains(&address) {
            return None;
        }
        let after = self.list.partition_point(|piece| piece.start <= address);
        u32::try_from(after.checked_sub(1)?).ok()
    }
}

impl Pieces {
    /// Gives each part put elsewhere to the function that goes there, or, if none is seen to,
    /// the one of its name. A part that two functions go to is of no use to either.
    pub(super) fn join(&mut self, edges: &[Edge], symbols: &Symbols) {
        for edge in edges {
            if let Some(to) = self.at(edge.target)
                && to != edge.piece
            {
                let to = &mut self.list[index(to.into())];
                if to.kind == Kind::Cold {
                    to.parent.get_or_insert(edge.piece);
                }
            }
        }
        for i in 0..self.list.len() {
            if self.list[i].kind == Kind::Cold && self.list[i].parent.is_none() {
                self.list[i].parent = self.by_name(self.list[i].start, symbols);
            }
        }
        for edge in edges {
            if let Some(to) = self.at(edge.target)
                && self.kind(to) == Kind::Cold
                && self.root(to) != self.root(edge.piece)
            {
                let to = &mut self.list[index(to.into())];
                to.shared = true;
                to.missing.get_or_insert(Missing::StrayJump);
            }
        }
    }

    fn by_name(&self, cold: u64, symbols: &Symbols) -> Option<u32> {
        let (name, _) = symbols.names_at(cold).find_map(|name| name.split_once(".cold"))?;
        let mut functions = symbols.addresses(name);
        let only = functions.next().filter(|_| functions.next().is_none())?;
        self.at(only).filter(|&piece| self.start(piece) == only)
    }

    /// The function that a piece belongs to, by the number of its own piece.
    pub(super) fn root(&self, piece: u32) -> u32 {
        /// A part goes to another one at most; more would be a ring.
        const DEEPEST: usize = 4;
        let parent = |&piece: &u32| self.list.get(index(piece.into())).and_then(|p| p.parent);
        std::iter::successors(Some(piece), parent).take(DEEPEST).last().unwrap_or(piece)
    }

    /// The traced function that a piece belongs to.
    pub(super) fn site(&self, piece: u32) -> Option<u32> {
        self.list.get(index(piece.into())).filter(|piece| !piece.shared)?;
        self.site_of_root(piece)
    }

    fn site_of_root(&self, piece: u32) -> Option<u32> {
        self.list.get(index(self.root(piece).into())).and_then(|piece| piece.site)
    }

    pub(super) fn start(&self, piece: u32) -> u64 {
        self.list.get(index(piece.into())).map_or(0, |piece| piece.start)
    }

    pub(super) fn kind(&self, piece: u32) -> Kind {
        self.list.get(index(piece.into())).map_or(Kind::Code, |piece| piece.kind)
    }

    /// Whether an address is in code of an overridden function, which may stand behind that of
    /// another one.
    pub(super) fn is_dead(&self, piece: u32, address: u64) -> bool {
        let piece = self.list.get(index(piece.into()));
        piece.is_some_and(|p| p.dead || (p.missing.is_none() && address >= p.end))
    }

    /// What is wrong with the code of traced functions itself.
    pub(super) fn faults(&self) -> Vec<(u32, Missing)> {
        let numbers = (0_u32..).zip(&self.list);
        let faults = numbers.filter_map(|(number, piece)| {
            let missing = piece.missing?;
            Some((self.site_of_root(number)?, missing))
        });
        faults.collect()
    }
}

impl Piece {
    fn new(start: u64, kind: Kind) -> Self {
        Self {
            start,
            end: start,
            kind,
            missing: None,
            site: None,
            parent: None,
            shared: false,
            dead: false,
        }
    }
}

fn kind(name: &str) -> Kind {
    if let Some(register) = name.strip_prefix("__x86_indirect_thunk_") {
        return register_number(register).map_or(Kind::Code, Kind::Thunk);
    }
    match name {
        _ if name.starts_with("__SCT__") => Kind::StaticCall,
        _ if name.starts_with("__pfx_") || name.starts_with("__cfi_") => Kind::Padding,
        _ if name.ends_with(".cold") || name.contains(".cold.") => Kind::Cold,
        _ => Kind::Code,
    }
}

fn register_number(name: &str) -> Option<u8> {
    const NAMES: [&str; 16] = [
        "rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12",
        "r13", "r14", "r15",
    ];
    NAMES.iter().position(|&known| known == name).and_then(|number| u8::try_from(number).ok())
}
