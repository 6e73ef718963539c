//! The kernel's text, divided into functions, and sets of addresses in it.

use std::ops::Range;

use super::decode::Instruction;
use crate::exits::module::ModulePiece;
use crate::read::{index, wide};
use crate::{Kernel, SiteSection};

/// The code of the kernel that stays, and where functions begin in it.
pub(crate) struct Text<'a> {
    pub(crate) range: Range<u64>,
    bytes: &'a [u8],
    /// The first address of each function or piece of one, ascending.
    cuts: Vec<u64>,
}

impl<'a> Text<'a> {
    /// The error says what is missing.
    pub(crate) fn find(kernel: &'a Kernel) -> Result<Self, &'static str> {
        Self::between(kernel, "_stext", "_etext").ok_or("its symbols do not bound its text")
    }

    /// The code that the kernel frees, and of which nothing is rewritten; it may be missing.
    pub(crate) fn start_up(kernel: &'a Kernel) -> Option<Self> {
        Self::between(kernel, "_sinittext", "_einittext")
    }

    fn between(kernel: &'a Kernel, start: &str, end: &str) -> Option<Self> {
        let symbols = kernel.symbols();
        let range = symbols.address(start)?..symbols.address(end)?;
        let len = range.end.checked_sub(range.start).filter(|_| range.start % 2 == 0)?;
        let bytes = kernel.bytes(range.start, index(len))?;
        let all = symbols.addresses_slice();
        let first = all.partition_point(|&a| a < range.start);
        let last = all.partition_point(|&a| a < range.end);
        // What assemblers and compilers mark within functions is no function.
        let local = |i: usize| {
            let name = symbols.name(i);
            name.starts_with('$') || name.starts_with(".L")
        };
        let named = (first..last.max(first)).filter(|&i| !local(i)).map(|i| all[i]);
        // Overridden weak functions have a site and no symbol.
        let sites = kernel.sites().iter().filter(|site| site.section == SiteSection::Text);
        let sites = sites.flat_map(|site| [site.location, site.entry]);
        let mut cuts: Vec<u64> = named.chain(sites.filter(|a| range.contains(a))).collect();
        cuts.extend([range.start]);
        cuts.retain(|cut| cut % 2 == 0);
        cuts.sort_unstable();
        cuts.dedup();
        Some(Self { range, bytes, cuts })
    }

    /// Code of a module, in one piece from an address on, and what lies between its functions.
    pub(crate) fn of_module(start: u64, bytes: &'a [u8], pieces: &[ModulePiece]) -> Option<Self> {
        let range = start..start.checked_add(wide(bytes.len()))?;
        let ends = |piece: &ModulePiece| {
            [piece.start, piece.start.saturating_add(wide(piece.bytes.len()))]
        };
        let mut cuts: Vec<u64> = pieces.iter().flat_map(ends).chain([start]).collect();
        cuts.retain(|cut| cut % 2 == 0 && range.contains(cut));
        cuts.sort_unstable();
        cuts.dedup();
        start.is_multiple_of(2).then_some(Self { range, bytes, cuts })
    }

    /// The function that begins at an address.
    pub(crate) fn function(&self, entry: u64) -> Range<u64> {
        let next = self.cuts.partition_point(|&cut| cut <= entry);
        entry..self.cuts.get(next).copied().unwrap_or(self.range.end)
    }

    /// The function, or what else lies between two symbols, that an address is in.
    pub(crate) fn around(&self, address: u64) -> Range<u64> {
        let next = self.cuts.partition_point(|&cut| cut <= address);
        let start = next.checked_sub(1).and_then(|at| self.cuts.get(at)).copied();
        start.unwrap_or(self.range.start)..self.cuts.get(next).copied().unwrap_or(self.range.end)
    }

    /// All functions, and what else lies between two symbols.
    pub(crate) fn functions(&self) -> impl Iterator<Item = Range<u64>> {
        let ends = self.cuts.iter().skip(1).copied().chain([self.range.end]);
        self.cuts.iter().zip(ends).map(|(&start, end)| start..end)
    }

    pub(crate) fn instruction(&self, address: u64) -> Option<Instruction> {
        Instruction::at(self.bytes, index(address.checked_sub(self.range.start)?))
    }

    /// Whether an instruction of this length is one that stops.
    pub(crate) fn is_breakpoint(&self, address: u64, len: u8) -> bool {
        let bytes = self.bytes(address, len.into());
        bytes == Some(&[0x02, 0x90]) || bytes == Some(&[0x73, 0, 0x10, 0])
    }

    pub(crate) fn bytes(&self, address: u64, len: usize) -> Option<&'a [u8]> {
        let start = index(address.checked_sub(self.range.start)?);
        self.bytes.get(start..start.checked_add(len)?)
    }

    /// The instructions of a range, one after the other; it ends early where the text does.
    pub(crate) fn instructions(
        &self,
        range: Range<u64>,
    ) -> impl Iterator<Item = (u64, Instruction)> {
        let mut address = range.start;
        std::iter::from_fn(move || {
            let instruction = self.instruction(address).filter(|_| address < range.end)?;
            let here = address;
            address += u64::from(instruction.len);
            Some((here, instruction))
        })
    }
}

/// A set of places in the text: of halfwords, where instructions can begin.
pub(crate) struct Places {
    start: u64,
    words: Vec<u64>,
}

impl Places {
    pub(crate) fn within(range: &Range<u64>) -> Self {
        let halfwords = (range.end - range.start).div_ceil(2);
        Self { start: range.start, words: vec![0; index(halfwords.div_ceil(64))] }
    }

    /// Adds a place; none outside the range.
    pub(crate) fn insert(&mut self, address: u64) {
        if let Some(halfword) = address.checked_sub(self.start).map(|distance| distance / 2)
            && let Some(word) = self.words.get_mut(index(halfword / 64))
        {
            *word |= 1 << (halfword % 64);
        }
    }

    /// Adds all that is in a range and in the text.
    pub(crate) fn insert_all(&mut self, range: Range<u64>) {
        let end = range.end.min(self.start.saturating_add(wide(self.words.len()) * 128));
        let mut place = range.start.max(self.start);
        while place < end {
            self.insert(place);
            place += 2;
        }
    }

    pub(crate) fn contains(&self, address: u64) -> bool {
        let halfword = address.wrapping_sub(self.start) / 2;
        self.words.get(index(halfword / 64)).is_some_and(|word| word >> (halfword % 64) & 1 == 1)
    }

    /// Whether any place of a range is in it.
    pub(crate) fn any(&self, range: Range<u64>) -> bool {
        range.step_by(2).any(|address| self.contains(address))
    }

    /// Adds the places of a set over the same range.
    pub(crate) fn insert_places(&mut self, other: &Self) {
        for (word, more) in self.words.iter_mut().zip(&other.words) {
            *word |= more;
        }
    }
}
