//! Symbols by address and by name.
//!
//! A kernel has up to 200,000 of them, so their names are in one allocation.

use std::hash::{BuildHasher as _, RandomState};
use std::path::Path;
use std::sync::OnceLock;

use super::KernelError;
use super::read::index;

/// All symbols of a kernel, sorted by address; symbols of one address stand in the kernel's own
/// order, the first being the one that the kernel prints.
#[derive(Debug)]
pub struct Symbols {
    addresses: Vec<u64>,
    /// Where each symbol begins in the arena, and the arena's end.
    starts: Vec<u32>,
    /// For each symbol its type letter, then its name.
    arena: String,
    by_name: OnceLock<NameIndex>,
}

/// One symbol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Symbol<'a> {
    /// Link address, or the offset in the per-CPU area for the per-CPU symbols of older kernels.
    pub address: u64,
    /// Type letter as in `nm`; newer kernels say `T` for writable data too.
    pub kind: char,
    /// The name.
    pub name: &'a str,
}

impl Symbols {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.addresses.len()
    }

    /// Never, for the symbols of a [`super::Kernel`].
    pub fn is_empty(&self) -> bool {
        self.addresses.is_empty()
    }

    /// All of them, by address.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Symbol<'_>> {
        (0..self.len()).map(|i| self.get(i))
    }

    /// The address of a symbol; the lowest one where several functions share a name.
    pub fn address(&self, name: &str) -> Option<u64> {
        self.addresses(name).next()
    }

    /// The addresses of all symbols of this name, ascending.
    pub fn addresses(&self, name: &str) -> impl Iterator<Item = u64> {
        let by_name = self.by_name.get_or_init(|| NameIndex::new(self));
        by_name.find(self, name).map(|i| self.addresses[i])
    }

    /// The names at exactly this address, the one that the kernel prints first.
    pub fn names_at(&self, address: u64) -> impl Iterator<Item = &str> {
        let first = self.addresses.partition_point(|&a| a < address);
        let found = self.addresses.get(first) == Some(&address);
        self.names_from(if found { first } else { self.len() })
    }

    /// The symbol that covers an address: its primary name and where it starts.
    ///
    /// The end of a symbol is the start of the next, as in the kernel. Per-CPU offsets (low) and
    /// the kernel's addresses (high) never cover each other.
    pub fn lookup(&self, address: u64) -> Option<(&str, u64)> {
        let after = self.addresses.partition_point(|&a| a <= address);
        let start = self.addresses[after.checked_sub(1)?];
        let next = self.addresses.get(after);
        let last_of_half = next.is_none_or(|&next| is_high(next) != is_high(start));
        if is_high(start) != is_high(address) || (last_of_half && address != start) {
            return None;
        }
        self.primary_at(start).map(|name| (name, start))
    }

    /// The address of the next symbol: where one that starts at `address` ends.
    pub fn next_after(&self, address: u64) -> Option<u64> {
        let after = self.addresses.partition_point(|&a| a <= address);
        self.addresses.get(after).copied()
    }

    /// The name at exactly this address that the kernel would print.
    pub fn primary_at(&self, address: u64) -> Option<&str> {
        let mut names = self.names_at(address).peekable();
        let first = names.peek().copied();
        names.find(|name| !is_marker(name)).or(first)
    }

    pub(super) fn addresses_slice(&self) -> &[u64] {
        &self.addresses
    }

    /// The names that share the address of symbol number `first`, from there on.
    pub(super) fn names_from(&self, first: usize) -> impl Iterator<Item = &str> + Clone {
        let address = self.addresses.get(first).copied();
        let same = move |&i: &usize| self.addresses.get(i).copied() == address;
        (first..self.len()).take_while(same).map(|i| self.name(i))
    }

    fn get(&self, i: usize) -> Symbol<'_> {
        let kind = char::from(self.arena.as_bytes()[index(self.starts[i].into())]);
        Symbol { address: self.addresses[i], kind, name: self.name(i) }
    }

    pub(super) fn name(&self, i: usize) -> &str {
        let (start, end) = (self.starts[i], self.starts[i + 1]);
        &self.arena[index(start.into()) + 1..index(end.into())]
    }

    /// Reads `address type name` lines, as `System.map` and `nm` have them.
    pub(super) fn from_system_map(path: &Path) -> Result<Self, KernelError> {
        /// Ten times what the largest distribution kernels have.
        const LIMIT: u64 = 128 << 20;
        let bad = |reason: String| KernelError::SystemMap { path: path.to_owned(), reason };
        let read = |error: std::io::Error| bad(error.to_string());
        if std::fs::metadata(path).map_err(read)?.len() > LIMIT {
            return Err(KernelError::TooLarge { what: "the System.map", limit: LIMIT >> 20 });
        }
        let text = std::fs::read(path).map_err(read)?;
        let text = String::from_utf8(text).map_err(|_| bad("not a text file".to_owned()))?;
        // What Debian's package linux-image has in the place of it.
        if text.contains("The real System.map is in the linux-image") {
            return Err(bad(
                "this is a placeholder: the symbols are in the file of the same name of Debian's \
                 package linux-image-...-dbg; kernels of Debian need none"
                    .to_owned(),
            ));
        }
        Self::parse_system_map(&text)
            .map_err(|line| bad(format!("line {line} is not 'address type name'")))?
            .ok_or_else(|| bad("no symbols in it".to_owned()))
    }

    /// The error is the number of the first line that is not understood.
    fn parse_system_map(text: &str) -> Result<Option<Self>, usize> {
        let mut builder = Builder::default();
        for (number, line) in text.lines().enumerate() {
            let mut words = line.split_ascii_whitespace();
            let (address, kind, name) = (words.next(), words.next(), words.next());
            let (Some(address), Some(&[kind]), Some(name)) =
                (address, kind.map(str::as_bytes), name)
            else {
                return Err(number + 1);
            };
            let address = u64::from_str_radix(address, 16).map_err(|_| number + 1)?;
            // Undefined weak symbols have no address; the kernel leaves them out as well.
            if !matches!(kind, b'U' | b'w' | b'v') {
                builder.push(address, kind, name.as_bytes());
            }
        }
        Ok(builder.finish_ranked())
    }
}

/// How far behind others of its address the kernel would put a symbol, by type letter and name (`compare_symbols` of
/// scripts/kallsyms.c).
fn rank(text: &[u8]) -> (bool, bool, usize) {
    let Some((kind, name)) = text.split_first() else { return (true, true, usize::MAX) };
    let by_linker = name.len() >= 8
        && name.strip_prefix(b"__").is_some_and(|rest| {
            [&b"start_"[..], b"stop_", b"end_"].iter().any(|begin| rest.starts_with(begin))
                || name.ends_with(b"_start")
                || name.ends_with(b"_end")
        });
    let underscores = name.iter().take_while(|&&byte| byte == b'_').count();
    (kind.eq_ignore_ascii_case(&b'W'), by_linker, underscores)
}

fn is_high(address: u64) -> bool {
    address >> 63 == 1
}

/// Names that the build puts on the padding before functions.
fn is_marker(name: &str) -> bool {
    name.starts_with("__pfx_") || name.starts_with("__cfi_")
}

/// Collects symbols in any order.
#[derive(Debug, Default)]
pub(super) struct Builder {
    addresses: Vec<u64>,
    starts: Vec<u32>,
    pub(super) arena: Vec<u8>,
}

impl Builder {
    /// No kernel's names need more; it also keeps every position within 32 bits.
    pub(super) const ARENA_LIMIT: usize = 128 << 20;

    pub(super) fn with_capacity(symbols: usize) -> Self {
        Self {
            addresses: Vec::new(),
            starts: Vec::with_capacity(symbols + 1),
            // Type letter and name come to 20 to 25 bytes a symbol in today's kernels.
            arena: Vec::with_capacity(symbols * 26),
        }
    }

    /// The next symbol's type letter and name are what will be appended to `arena` from here.
    /// False when there is no more room.
    pub(super) fn begin(&mut self) -> bool {
        let start = u32::try_from(self.arena.len()).ok();
        self.starts.extend(start);
        start.is_some() && self.arena.len() <= Self::ARENA_LIMIT
    }

    pub(super) fn push(&mut self, address: u64, kind: u8, name: &[u8]) {
        if self.arena.len() + name.len() < Self::ARENA_LIMIT && self.begin() {
            self.arena.push(kind);
            self.arena.extend_from_slice(name);
            self.addresses.push(address);
        }
    }

    /// Type letter and name of a symbol that has been completed.
    pub(super) fn text(&self, i: usize) -> Option<&[u8]> {
        let start = index((*self.starts.get(i)?).into());
        let end = self.starts.get(i + 1).map_or(self.arena.len(), |&end| index(end.into()));
        self.arena.get(start..end)
    }

    pub(super) fn len(&self) -> usize {
        self.starts.len()
    }

    /// Gives all symbols begun so far their addresses.
    pub(super) fn finish_with(mut self, addresses: Vec<u64>) -> Option<Symbols> {
        self.addresses = addresses;
        self.finish()
    }

    /// None without symbols, or where there is not one address, type letter and text for each.
    pub(super) fn finish(mut self) -> Option<Symbols> {
        let count = self.addresses.len();
        let complete = count == self.starts.len()
            && (0..count).all(|i| self.text(i).is_some_and(|text| !text.is_empty()));
        if count == 0 || !complete {
            return None;
        }
        if !self.addresses.is_sorted() {
            self.sort_by_key(|_| ());
        }
        self.starts.push(u32::try_from(self.arena.len()).ok()?);
        let arena = String::from_utf8(self.arena).ok()?;
        let boundary = |&s: &u32| {
            let start = index(s.into());
            // The type letter must be one byte, for the name to start after it.
            arena.is_char_boundary(start) && arena.is_char_boundary((start + 1).min(arena.len()))
        };
        if !self.starts.iter().all(boundary) {
            return None;
        }
        let (addresses, starts) = (self.addresses, self.starts);
        Some(Symbols { addresses, starts, arena, by_name: OnceLock::new() })
    }

    /// Of symbols that are not in the kernel's own order: those of an address come as it would have them.
    pub(super) fn finish_ranked(mut self) -> Option<Symbols> {
        if self.addresses.len() == self.starts.len() {
            self.sort_by_key(rank);
        }
        self.finish()
    }

    /// By address, and within an address by what their texts are worth; stable, so that what is worth the same stays in its
    /// order.
    fn sort_by_key<K: Ord>(&mut self, worth: impl Fn(&[u8]) -> K) {
        let mut order: Vec<usize> = (0..self.addresses.len()).collect();
        order.sort_by_cached_key(|&i| (self.addresses[i], worth(self.text(i).unwrap_or_default())));
        let mut sorted = Self::with_capacity(order.len());
        for i in order {
            if sorted.begin() {
                sorted.arena.extend_from_slice(self.text(i).unwrap_or_default());
                sorted.addresses.push(self.addresses[i]);
            }
        }
        *self = sorted;
    }
}

/// An open-addressing hash table from name to symbol number. Its keys live in the arena, which
/// the standard map cannot express.
#[derive(Debug)]
struct NameIndex {
    hasher: RandomState,
    /// Number of the lowest symbol of a name, plus one; zero is free. A power of two of slots.
    slots: Vec<u32>,
    /// For each symbol, the next of the same name in the same form.
    next: Vec<u32>,
}

impl NameIndex {
    fn new(symbols: &Symbols) -> Self {
        let slots = vec![0; (symbols.len() * 2).next_power_of_two()];
        let mut index = Self { hasher: RandomState::new(), slots, next: vec![0; symbols.len()] };
        // Backwards, so that the lowest comes to stand at the head of its chain.
        for i in (0..symbols.len()).rev() {
            let slot = index.slot(symbols, symbols.name(i));
            index.next[i] = index.slots[slot];
            index.slots[slot] = u32::try_from(i + 1).unwrap_or(0);
        }
        index
    }

    /// The slot that holds the name, or the free one where it belongs.
    fn slot(&self, symbols: &Symbols, name: &str) -> usize {
        let mask = self.slots.len() - 1;
        let mut slot = index(self.hasher.hash_one(name)) & mask;
        while let Some(i) = symbol_number(self.slots[slot])
            && symbols.name(i) != name
        {
            slot = (slot + 1) & mask;
        }
        slot
    }

    fn find(&self, symbols: &Symbols, name: &str) -> impl Iterator<Item = usize> {
        let head = symbol_number(self.slots[self.slot(symbols, name)]);
        std::iter::successors(head, |&i| symbol_number(self.next[i]))
    }
}

fn symbol_number(link: u32) -> Option<usize> {
    link.checked_sub(1).map(|i| index(i.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    // Records would have names of places where nothing is called, and `-f set_reset_devices` would list `_sinittext`.
    #[test]
    fn symbols_of_one_address_come_in_the_kernels_order() {
        let text = "\
ffffffff81000010 T __cpuidle_text_end
ffffffff81000010 T rest_init
ffffffff81000020 T __lock_text_start
ffffffff81000020 T _raw_write_unlock_irqrestore
ffffffff81000030 T _sinittext
ffffffff81000030 t set_reset_devices
ffffffff81000000 W abort
ffffffff81000000 T __split_text_end
ffffffff81000040 T __pfx_vfs_read
ffffffff81000050 t second
ffffffff81000050 t first
";
        let symbols = Symbols::parse_system_map(text).unwrap().unwrap();
        let names = [0x00, 0x10, 0x20, 0x30, 0x40, 0x50]
            .map(|at| symbols.primary_at(0xffff_ffff_8100_0000 + at).unwrap());
        let expected = [
            "__split_text_end",
            "rest_init",
            "_raw_write_unlock_irqrestore",
            "set_reset_devices",
            "__pfx_vfs_read",
            "second",
        ];
        assert_eq!(names, expected);
        let all = symbols.names_at(0xffff_ffff_8100_0020).collect::<Vec<_>>();
        assert_eq!(all, ["_raw_write_unlock_irqrestore", "__lock_text_start"], "none is lost");
    }
}
