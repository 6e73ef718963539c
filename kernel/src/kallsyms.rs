//! kallsyms: finds the kernel's own symbol table in its image, without other information.
//!
//! Symbol names are compressed: each byte of a name stands for a token of `token_table`, which
//! `token_index` indexes. `names` holds a length and that many bytes for each symbol, `markers` the
//! position of every 256th. These four are found by their rigid structure. The addresses have three
//! layouts, and a table in one may look plausible in the two others. So an interpretation is
//! accepted only if `linux_banner` then points at the banner.

use super::read::{array_at, i32_at, index, u16_at, u32_at, u64_at, wide};
use super::sites::Table;
use super::space::Space;
use super::symbols::{Builder, Symbols};
use super::{Arch, KernelError, image::RISCV_BASE};

/// What the banner begins with in every kernel.
pub(super) const BANNER: &[u8] = b"Linux version ";

/// Symbols that share a marker.
const STRIDE: usize = 256;

/// Reads the symbols of a kernel; none if there are no tables at all.
pub(super) fn read(data: &[u8], space: &Space, arch: Arch) -> Result<Option<Symbols>, KernelError> {
    // The digits occur in symbol names, and so each is its own token: this is in every table.
    const DIGITS: &[u8] = b"0\x001\x002\x003\x004\x005\x006\x007\x008\x009\0";
    /// There is one place in a real kernel; damaged images must not cost more than this.
    const TRIALS: usize = 64;
    let mut found_tables = false;
    for zero in memchr::memmem::find_iter(data, DIGITS).take(TRIALS) {
        let Some(tokens) = Tokens::around(data, zero) else { continue };
        let Some(names) = Names::before(data, tokens.start) else { continue };
        let Some(builder) = names.expand(data, &tokens) else { continue };
        found_tables = true;
        // The number of symbols fills its place up to the next label.
        let alignment = names.start - names.count_at;
        let after = tokens.end.next_multiple_of(alignment);
        let tables = Tables { data, space, arch, after, count_at: names.count_at, alignment };
        if let Some(symbols) = tables.with_addresses(builder) {
            return Ok(Some(symbols));
        }
    }
    if found_tables { Err(KernelError::UnknownKallsyms) } else { Ok(None) }
}

/// `token_table` and `token_index`.
struct Tokens<'a> {
    /// Offset of `token_table`.
    start: usize,
    /// Offset behind `token_index`.
    end: usize,
    text: [&'a [u8]; 256],
}

impl<'a> Tokens<'a> {
    /// The tables around the token of the digit zero.
    fn around(data: &'a [u8], zero: usize) -> Option<Self> {
        const ZERO: usize = b'0' as usize;
        let mut end = zero;
        for _ in ZERO..256 {
            end += token(data, end)?.len() + 1;
        }
        // Labels were aligned to 8 bytes once, and are to 4 now.
        [4, 8].into_iter().find_map(|alignment| {
            let indices = end.next_multiple_of(alignment);
            let at = |i: usize| u16_at(data, indices + 2 * i).map(usize::from);
            let start = zero.checked_sub(at(ZERO)?)?;
            let mut text = [&data[..0]; 256];
            let mut position = 0;
            for (i, text) in text.iter_mut().enumerate() {
                if at(i)? != position {
                    return None;
                }
                *text = token(data, start + position)?;
                position += text.len() + 1;
            }
            let ascii = text.iter().all(|t| t.is_ascii());
            ascii.then_some(Self { start, end: indices + 512, text })
        })
    }
}

/// The token at an offset, without its NUL.
fn token(data: &[u8], offset: usize) -> Option<&[u8]> {
    /// A token is a piece of a symbol name.
    const LIMIT: usize = 512;
    let tail = data.get(offset..)?;
    let tail = &tail[..tail.len().min(LIMIT)];
    memchr::memchr(0, tail).map(|end| &tail[..end])
}

/// How a name's length is written.
#[derive(Clone, Copy)]
enum Lengths {
    /// Two bytes above 127, since Linux 6.1.
    Leb128,
    /// Always one byte.
    Byte,
}

impl Lengths {
    /// A name's length, and how many bytes tell it.
    fn at(self, data: &[u8], offset: usize) -> Option<(usize, usize)> {
        let low = usize::from(*data.get(offset)?);
        match self {
            Self::Leb128 if low & 0x80 != 0 => {
                let high = usize::from(*data.get(offset + 1)?);
                Some(((low & 0x7f) | (high << 7), 2))
            }
            _ => Some((low, 1)),
        }
    }
}

/// `num_syms`, `names` and `markers`.
struct Names {
    /// Offset of `num_syms`.
    count_at: usize,
    count: usize,
    /// Offset of `names`.
    start: usize,
    lengths: Lengths,
}

impl Names {
    /// Searches for the markers backwards from `end`, for one array of 3 bytes a symbol may stand
    /// between, and for the names before the markers.
    fn before(data: &[u8], end: usize) -> Option<Self> {
        /// Room for two million symbols.
        const REACH: usize = 8 << 20;
        /// What merely looks like markers is rare.
        const TRIALS: usize = 16;
        let lowest = end.saturating_sub(REACH);
        let mut trials = TRIALS;
        let mut position = end & !3;
        while position >= lowest + 4 && trials > 0 {
            position -= 4;
            if u32_at(data, position) != Some(0) {
                continue;
            }
            let markers = marker_run(data, position, end);
            if markers < 4 {
                continue;
            }
            trials -= 1;
            // What follows the markers may happen to look like two more of them.
            for markers in (markers.saturating_sub(2)..=markers).rev() {
                if let Some(names) = Self::with_markers(data, position, markers) {
                    return Some(names);
                }
            }
        }
        None
    }

    /// The names that `count` markers at `markers` belong to.
    fn with_markers(data: &[u8], markers: usize, count: usize) -> Option<Self> {
        let last = index(u32_at(data, markers + 4 * (count - 1))?.into());
        // The last marker's share of the names lies between `start + last` and the markers.
        let highest = markers.checked_sub(last)? & !3;
        let lowest = highest.saturating_sub(MARKER_STEP);
        (lowest..=highest).rev().step_by(4).find_map(|start| {
            // The number of symbols stands before the names, in a word of 4 or of 8 bytes.
            let [four, eight] = [4, 8].map(|gap| start.checked_sub(gap));
            [four, eight.filter(|_| u32_at(data, start - 4) == Some(0))]
                .into_iter()
                .flatten()
                .find_map(|count_at| {
                    let symbols = index(u32_at(data, count_at)?.into());
                    if symbols.div_ceil(STRIDE) != count {
                        return None;
                    }
                    let lengths = [Lengths::Leb128, Lengths::Byte]
                        .into_iter()
                        .find(|&lengths| walk(data, start, symbols, lengths, markers).is_some())?;
                    Some(Self { count_at, count: symbols, start, lengths })
                })
        })
    }

    /// Writes out all names; each begins with its type letter.
    fn expand(&self, data: &[u8], tokens: &Tokens<'_>) -> Option<Builder> {
        let mut builder = Builder::with_capacity(self.count);
        let mut position = self.start;
        for _ in 0..self.count {
            let (len, head) = self.lengths.at(data, position)?;
            position += head;
            if !builder.begin() {
                return None;
            }
            for &byte in data.get(position..position + len)? {
                builder.arena.extend_from_slice(tokens.text[usize::from(byte)]);
            }
            position += len;
        }
        Some(builder)
    }
}

/// The most that 256 names take: 512 bytes each and two of length.
const MARKER_STEP: usize = STRIDE * 514;

/// How many words from `offset` on look like markers: zero, then ascending in plausible steps.
fn marker_run(data: &[u8], offset: usize, end: usize) -> usize {
    // Each symbol takes two bytes at least: a length and one token.
    const STEPS: std::ops::RangeInclusive<usize> = 2 * STRIDE..=MARKER_STEP;
    let mut previous = 0;
    let mut count = 1;
    while offset + 4 * (count + 1) <= end {
        let Some(next) = u32_at(data, offset + 4 * count).map(|m| index(m.into())) else { break };
        if !next.checked_sub(previous).is_some_and(|step| STEPS.contains(&step)) {
            break;
        }
        previous = next;
        count += 1;
    }
    count
}

/// Steps through all names; succeeds if every marker is met and the names end at the markers.
fn walk(data: &[u8], start: usize, count: usize, lengths: Lengths, markers: usize) -> Option<()> {
    let mut position = start;
    for i in 0..count {
        if i % STRIDE == 0 {
            let marker = u32_at(data, markers + 4 * (i / STRIDE))?;
            if index(marker.into()) != position - start {
                return None;
            }
        }
        let (len, head) = lengths.at(data, position)?;
        position += head + len;
        if len == 0 || position > markers {
            return None;
        }
    }
    (markers - position < 8).then_some(())
}

/// How addresses are written.
#[derive(Clone, Copy, Debug)]
enum Encoding {
    /// 32-bit offsets, absolute where not negative, else down from the base. With per-CPU
    /// symbols that begin at zero (x86 until 6.14).
    AbsolutePerCpu(u64),
    /// 32-bit unsigned offsets from the base.
    Base(u64),
    /// 32-bit signed distances from the word itself (7.2).
    Relative,
}

/// Where the addresses may be, and the means to tell.
struct Tables<'a> {
    data: &'a [u8],
    space: &'a Space,
    arch: Arch,
    /// Offset of the label behind `token_index`, where they stand since 6.4.
    after: usize,
    /// Offset of `num_syms`, before which they stood until then.
    count_at: usize,
    /// Of labels: 8, and 4 in the newest kernels. A reading that is a word off looks right too.
    alignment: usize,
}

impl Tables<'_> {
    fn with_addresses(&self, builder: Builder) -> Option<Symbols> {
        let count = builder.len();
        let banner = (0..count)
            .find(|&i| builder.text(i).is_some_and(|text| text.get(1..) == Some(b"linux_banner")));
        let candidates = self.candidates(count);
        if let Some(banner) = banner {
            let right = candidates.into_iter().find(|&(offset, encoding)| {
                self.address(offset, encoding, banner)
                    .and_then(|address| self.space.bytes(self.data, address, BANNER.len()))
                    == Some(BANNER)
            })?;
            return builder.finish_with(self.addresses(right, count)?);
        }
        // Without CONFIG_KALLSYMS_ALL there are only functions: then the right reading is the
        // one that puts them where the call sites are.
        let sites = Table::by_content(self.data, self.space, self.arch)?;
        let readings = candidates.into_iter().filter_map(|c| self.addresses(c, count));
        let (hits, addresses) = readings.map(|a| (sites.hits(&a), a)).max_by_key(|r| r.0)?;
        (hits * 2 > sites.len()).then(|| builder.finish_with(addresses)).flatten()
    }

    /// Every place and encoding that the layouts known so far allow.
    fn candidates(&self, count: usize) -> Vec<(usize, Encoding)> {
        let mut candidates = Vec::new();
        let mut with_base = |offset: usize, base: u64| {
            // A relocatable RISC-V kernel fills the base in when it starts.
            for base in [base, RISCV_BASE] {
                candidates.push((offset, Encoding::AbsolutePerCpu(base)));
                candidates.push((offset, Encoding::Base(base)));
                if base != 0 || self.arch != Arch::Riscv64 {
                    break;
                }
            }
        };
        // Offsets, padding, base, number of symbols.
        let size = (4 * count).next_multiple_of(self.alignment);
        if let Some(base_at) = self.count_at.checked_sub(8)
            && let Some(offset) = base_at.checked_sub(size)
            && let Some(base) = u64_at(self.data, base_at)
        {
            with_base(offset, base);
        }
        // Token index, offsets, padding, base.
        if let Some(base) = u64_at(self.data, self.after + size) {
            with_base(self.after, base);
        }
        // Token index, distances.
        candidates.push((self.after, Encoding::Relative));
        candidates
    }

    fn address(&self, offset: usize, encoding: Encoding, i: usize) -> Option<u64> {
        let at = offset + 4 * i;
        let word = i32_at(self.data, at)?;
        let own = if matches!(encoding, Encoding::Relative) { self.space.address(at)? } else { 0 };
        Some(encoding.decode(word, own))
    }

    fn addresses(&self, (offset, encoding): (usize, Encoding), count: usize) -> Option<Vec<u64>> {
        let words = self.data.get(offset..offset.checked_add(4 * count)?)?;
        let (words, _) = words.as_chunks::<4>();
        let first = self.space.address(offset).unwrap_or(0);
        let own = (0..).map(|i| first.wrapping_add(4 * wide(i)));
        Some(
            words
                .iter()
                .zip(own)
                .map(|(&word, own)| encoding.decode(i32::from_le_bytes(word), own))
                .collect(),
        )
    }
}

impl Encoding {
    /// The address that `word` stands for, itself being at address `own`.
    fn decode(self, word: i32, own: u64) -> u64 {
        match self {
            Self::AbsolutePerCpu(base) => match u64::try_from(word) {
                Ok(absolute) => absolute,
                Err(_) => base.wrapping_sub(1).wrapping_add_signed(-i64::from(word)),
            },
            Self::Base(base) => base.wrapping_add(u64::from(word.cast_unsigned())),
            Self::Relative => own.wrapping_add_signed(word.into()),
        }
    }
}

/// The banner itself: where `linux_banner` points, or else the first text that looks like it.
pub(super) fn banner(data: &[u8], space: &Space, symbols: Option<&Symbols>) -> Option<String> {
    let known = symbols
        .and_then(|s| s.address("linux_banner"))
        .and_then(|address| space.offset(address))
        .map(|(offset, _)| offset)
        .filter(|&offset| data[offset..].starts_with(BANNER));
    // The kernel also has a format string of that beginning, which goes on with a percent sign.
    let release = |&offset: &usize| {
        array_at::<1>(data, offset + BANNER.len()).is_some_and(|[c]| c.is_ascii_digit())
    };
    let offset = known.or_else(|| memchr::memmem::find_iter(data, BANNER).find(release))?;
    super::read::text_at(data, offset, 4096).map(|text| text.trim_end().to_owned())
}
