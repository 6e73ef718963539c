//! Call sites: the entries of `__mcount_loc` and the functions they belong to.

use super::read::{index, u64_at};
use super::space::Space;
use super::symbols::Symbols;
use super::{Arch, KernelError};

/// How the kernel was built for function tracing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FtraceKind {
    /// x86: a 5-byte call or nop, after `endbr64` if there is one.
    Fentry,
    /// riscv64: nops for two instructions at the function's entry.
    Patchable,
    /// riscv64: the same, and 8 bytes before the entry for a pointer to the tracer's ops.
    CallOps,
}

impl FtraceKind {
    /// The word for it in machine-readable output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fentry => "fentry",
            Self::Patchable => "patchable",
            Self::CallOps => "call_ops",
        }
    }

    /// Where the function of a site can begin, of which the table has this: the first of these that
    /// has a name.
    pub fn entries(self, location: u64) -> [u64; 2] {
        match self {
            // As the kernel does: a function may begin with endbr64, before the call.
            Self::Fentry => [location, location.wrapping_sub(4)],
            Self::Patchable => [location; 2],
            Self::CallOps => [location.wrapping_add(8); 2],
        }
    }

    /// Bytes from what the table has of a site to the site's end.
    pub fn span(self) -> usize {
        match self {
            Self::Fentry => 5,
            Self::Patchable => 8,
            Self::CallOps => 16,
        }
    }
}

/// Which part of the kernel a site is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SiteSection {
    /// Code that stays.
    Text,
    /// Code that the kernel frees when it has started.
    InitText,
}

/// One traceable place: an entry of `__mcount_loc` that is not zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Site {
    /// The table's entry, a link address. x86: the patchable instruction. riscv64: the function's
    /// entry, or 8 bytes before it in a kernel with [`FtraceKind::CallOps`].
    pub location: u64,
    /// Link address of the function.
    pub entry: u64,
    /// Whether the code is freed after start-up.
    pub section: SiteSection,
}

/// What became of the entries of `__mcount_loc`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SiteStats {
    /// All entries.
    pub entries: usize,
    /// Zero: weak functions that the build found overridden.
    pub zero: usize,
    /// The others: `text + init_text`.
    pub sites: usize,
    /// In code that stays.
    pub text: usize,
    /// In code that is freed after start-up.
    pub init_text: usize,
    /// Sites of weak functions that were overridden but left in place: they have no symbol.
    pub unnamed: usize,
}

/// The sites of a kernel and, for each, the first symbol at its entry.
pub(super) struct Sites {
    pub(super) list: Vec<Site>,
    /// Number of the symbol, [`UNNAMED`] without one.
    pub(super) symbols: Vec<u32>,
    pub(super) stats: SiteStats,
    pub(super) kind: FtraceKind,
}

pub(super) const UNNAMED: u32 = u32::MAX;

impl Sites {
    pub(super) fn find(
        data: &[u8],
        space: &Space,
        arch: Arch,
        symbols: &Symbols,
    ) -> Result<Self, KernelError> {
        let table = match Table::by_symbols(data, space, arch, symbols)? {
            Some(table) => table,
            None => Table::by_content(data, space, arch).ok_or(KernelError::NoSites)?,
        };
        if table.locations.is_empty() {
            return Err(KernelError::NoSites);
        }
        let kind = match arch {
            Arch::X86_64 => FtraceKind::Fentry,
            Arch::Riscv64 => table.riscv_kind(symbols.addresses_slice()),
        };
        let init = symbols.address("_sinittext").zip(symbols.address("_einittext"));
        let mut sites = Self {
            list: Vec::with_capacity(table.locations.len()),
            symbols: Vec::with_capacity(table.locations.len()),
            stats: SiteStats { entries: table.entries, zero: table.zero, ..SiteStats::default() },
            kind,
        };
        let mut cursor = Cursor::new(symbols.addresses_slice());
        for &location in &table.locations {
            if !space.is_code(location) {
                return Err(KernelError::Damaged(format!(
                    "__mcount_loc names {location:#x}, where the kernel has no code"
                )));
            }
            let entries = kind.entries(location);
            let (entry, symbol) = cursor.exactly(&entries).unwrap_or_else(|| {
                let [first, second] = entries;
                let begins_before =
                    kind == FtraceKind::Fentry && starts_with_endbr(data, space, location);
                (if begins_before { second } else { first }, UNNAMED)
            });
            let in_init = init.is_some_and(|(start, end)| (start..end).contains(&location));
            let section = if in_init { SiteSection::InitText } else { SiteSection::Text };
            sites.stats.text += usize::from(!in_init);
            sites.stats.init_text += usize::from(in_init);
            sites.stats.unnamed += usize::from(symbol == UNNAMED);
            sites.list.push(Site { location, entry, section });
            sites.symbols.push(symbol);
        }
        sites.stats.sites = sites.list.len();
        Ok(sites)
    }
}

fn starts_with_endbr(data: &[u8], space: &Space, location: u64) -> bool {
    space.array(data, location.wrapping_sub(4)) == Some([0xf3, 0x0f, 0x1e, 0xfa])
}

/// Finds symbols for ascending addresses in one pass over both.
struct Cursor<'a> {
    addresses: &'a [u64],
    /// The first symbol within [`Cursor::BACK`] before the last address asked for.
    position: usize,
}

impl<'a> Cursor<'a> {
    /// No candidate lies further from a location.
    const BACK: u64 = 16;

    fn new(addresses: &'a [u64]) -> Self {
        Self { addresses, position: 0 }
    }

    /// The first of `wanted` that has a symbol, and the number of its first symbol.
    fn exactly(&mut self, wanted: &[u64]) -> Option<(u64, u32)> {
        let low = wanted.first()?.saturating_sub(Self::BACK);
        // Most steps are short; a jump over other sections' symbols happens once or twice.
        while self.addresses.get(self.position).is_some_and(|&a| a < low) {
            self.position += 1;
        }
        let near = &self.addresses[self.position..];
        wanted.iter().find_map(|&address| {
            let i = near.iter().take_while(|&&a| a <= address).position(|&a| a == address)?;
            Some((address, u32::try_from(self.position + i).ok()?))
        })
    }
}

/// `__mcount_loc` as the file has it, zeros taken out, ascending.
pub(super) struct Table {
    entries: usize,
    zero: usize,
    locations: Vec<u64>,
}

impl Table {
    /// Between the symbols that the linker script puts around it.
    fn by_symbols(
        data: &[u8],
        space: &Space,
        arch: Arch,
        symbols: &Symbols,
    ) -> Result<Option<Self>, KernelError> {
        let (Some(start), Some(stop)) =
            (symbols.address("__start_mcount_loc"), symbols.address("__stop_mcount_loc"))
        else {
            return Ok(None);
        };
        let damaged = || {
            KernelError::Damaged(format!(
                "__mcount_loc at {start:#x} to {stop:#x} is not within the image"
            ))
        };
        let len = stop.checked_sub(start).map(index).ok_or_else(damaged)?;
        if len < 8 {
            return Ok(None);
        }
        let bytes = space.bytes(data, start, len).ok_or_else(damaged)?;
        let mut words: Vec<u64> =
            bytes.as_chunks::<8>().0.iter().map(|&w| u64::from_le_bytes(w)).collect();
        if arch == Arch::Riscv64 {
            relocate(data, space, symbols, start, &mut words);
        }
        Ok(Some(Self::new(words)))
    }

    fn new(mut words: Vec<u64>) -> Self {
        let entries = words.len();
        words.retain(|&w| w != 0);
        let zero = entries - words.len();
        if !words.is_sorted() {
            words.sort_unstable();
        }
        words.dedup();
        Self { entries, zero, locations: words }
    }

    /// The longest ascending run of words that all point at patchable instructions: for kernels
    /// whose symbols do not name the table.
    pub(super) fn by_content(data: &[u8], space: &Space, arch: Arch) -> Option<Self> {
        /// A kernel with function tracing has tens of thousands.
        const FEWEST: usize = 64;
        let code = space.code_bounds()?;
        let pointer = |word: &[u8; 8]| {
            let address = u64::from_le_bytes(*word);
            code.contains(&address).then_some(address)
        };
        let mut best: &[[u8; 8]] = &[];
        for segment in space.segments() {
            let skip = segment.address.next_multiple_of(8) - segment.address;
            let bytes = &data[segment.offset..segment.offset + segment.len];
            let mut rest = bytes.get(index(skip)..).unwrap_or_default().as_chunks::<8>().0;
            while let Some(start) = rest.iter().position(|word| pointer(word).is_some()) {
                rest = &rest[start..];
                let mut previous = 0;
                let run = rest.iter().take_while(|&word| match pointer(word) {
                    Some(address) if address > previous => {
                        previous = address;
                        true
                    }
                    _ => false,
                });
                let (run, after) = rest.split_at(run.count());
                rest = after;
                if run.len() < FEWEST.max(best.len() + 1) {
                    continue;
                }
                let at_site = |word: &&[u8; 8]| {
                    pointer(word).is_some_and(|address| patchable(data, space, arch, address))
                };
                if run.iter().filter(at_site).count() * 10 >= run.len() * 9 {
                    best = run;
                }
            }
        }
        (!best.is_empty()).then(|| Self::new(best.iter().map(|&w| u64::from_le_bytes(w)).collect()))
    }

    pub(super) fn len(&self) -> usize {
        self.locations.len()
    }

    /// How many sites have a function at one of the distances that occur.
    pub(super) fn hits(&self, addresses: &[u64]) -> usize {
        let mut sorted = addresses.to_vec();
        sorted.sort_unstable();
        let mut cursor = Cursor::new(&sorted);
        let hit = |&&l: &&u64| cursor.exactly(&[l, l.wrapping_sub(4), l.wrapping_add(8)]).is_some();
        self.locations.iter().filter(hit).count()
    }

    /// Whether the functions begin at the locations or 8 bytes after them.
    fn riscv_kind(&self, addresses: &[u64]) -> FtraceKind {
        let count = |distance: u64| {
            let mut cursor = Cursor::new(addresses);
            self.locations
                .iter()
                .filter(|l| cursor.exactly(&[l.wrapping_add(distance)]).is_some())
                .count()
        };
        if count(8) > count(0) { FtraceKind::CallOps } else { FtraceKind::Patchable }
    }
}

/// Whether the bytes at a location are what compilers leave there for ftrace.
fn patchable(data: &[u8], space: &Space, arch: Arch, location: u64) -> bool {
    match arch {
        Arch::X86_64 => {
            let code: Option<[u8; 5]> = space.array(data, location);
            matches!(code, Some([0xe8, ..] | [0x0f, 0x1f, 0x44, 0, 0]))
        }
        Arch::Riscv64 => {
            const COMPRESSED: [u8; 8] = [1, 0, 1, 0, 1, 0, 1, 0];
            const FULL: [u8; 8] = [0x13, 0, 0, 0, 0x13, 0, 0, 0];
            matches!(space.array(data, location), Some(COMPRESSED | FULL))
        }
    }
}

/// Fills in the words that a relocatable RISC-V kernel gets only when it starts: in the file they
/// are zero, and the values stand in `.rela.dyn`.
pub(super) fn relocate(
    data: &[u8],
    space: &Space,
    symbols: &Symbols,
    start: u64,
    words: &mut [u64],
) {
    const RELATIVE: u64 = 3;
    for entry in relocations(data, space, symbols) {
        let (Some(place), Some(RELATIVE), Some(value)) =
            (u64_at(entry, 0), u64_at(entry, 8), u64_at(entry, 16))
        else {
            continue;
        };
        let word = place.checked_sub(start).filter(|distance| distance % 8 == 0);
        if let Some(word) = word.and_then(|distance| words.get_mut(index(distance / 8))) {
            *word = value;
        }
    }
}

/// What a relocatable RISC-V kernel relocates itself with; empty for others.
pub(super) fn relocations<'a>(data: &'a [u8], space: &Space, symbols: &Symbols) -> &'a [[u8; 24]] {
    let bounds = symbols.address("__rela_dyn_start").zip(symbols.address("__rela_dyn_end"));
    let bytes = bounds.and_then(|(start, end)| {
        let len = index(end.checked_sub(start)?);
        space.bytes(data, start, len)
    });
    bytes.unwrap_or_default().as_chunks().0
}
