//! Reads an image and a plan without the code under test.

// Small numbers are cut to size all over the place here.
#![allow(unreachable_pub, clippy::cast_possible_truncation)]

use std::ops::Range;

use vmtrace_kernel::epilogues::{Plan, PlannedExit};
use vmtrace_kernel::{Kernel, SiteSection};

/// The window of an exit.
pub fn window(exit: &PlannedExit) -> Range<u64> {
    exit.epilogue.start..exit.epilogue.start + u64::from(exit.epilogue.len)
}

/// The windows of a plan, by address.
pub struct Windows(pub Vec<Range<u64>>);

impl Windows {
    pub fn of(plan: &Plan) -> Self {
        let windows: Vec<_> = plan.exits.iter().map(window).collect();
        assert!(windows.is_sorted_by(|a, b| a.end <= b.start));
        Self(windows)
    }

    /// The window that begins at an address or next before it.
    pub fn before(&self, address: u64) -> Option<&Range<u64>> {
        self.0[..self.0.partition_point(|window| window.start <= address)].last()
    }

    /// Whether an address is in a window, but for its start.
    pub fn inside(&self, address: u64) -> bool {
        self.before(address)
            .is_some_and(|window| window.contains(&address) && window.start != address)
    }

    pub fn touches(&self, range: Range<u64>) -> bool {
        range.step_by(2).any(|a| self.before(a).is_some_and(|window| window.contains(&a)))
    }

    pub fn around(&self, range: &Range<u64>) -> bool {
        self.before(range.start).is_some_and(|window| window.end >= range.end)
    }
}

/// The traced functions and their sites' numbers.
pub fn functions(kernel: &Kernel) -> impl Iterator<Item = (u32, Range<u64>)> {
    let sites = kernel.sites();
    let text = (0..).zip(sites).filter(|(_, site)| site.section == SiteSection::Text);
    text.map(move |(number, site)| {
        let symbol = kernel.symbols().next_after(site.entry).unwrap_or(u64::MAX);
        let next = sites.get(number as usize + 1).map_or(u64::MAX, |next| next.location);
        (number, site.entry..symbol.min(next))
    })
}

/// The entries of a table of two distances each, as addresses.
pub fn pairs<const N: usize>(kernel: &Kernel, start: &str, end: &str) -> Vec<(u64, u64)> {
    let [start, end] = [start, end].map(|name| kernel.symbols().address(name).unwrap());
    let bytes = kernel.bytes(start, (end - start) as usize).unwrap();
    let entries = bytes.as_chunks::<N>().0.iter().zip((start..).step_by(N));
    let entries = entries.map(|(entry, at)| {
        let to = |i: usize| {
            let distance = i32::from_le_bytes(entry[i..i + 4].try_into().unwrap());
            (at + i as u64).wrapping_add_signed(distance.into())
        };
        (to(0), to(4))
    });
    entries.collect()
}

/// What is replaced at start-up, and by what.
pub fn alternatives(kernel: &Kernel) -> Vec<(Range<u64>, Range<u64>)> {
    let start = kernel.symbols().address("__alt_start").unwrap();
    let pairs = pairs::<16>(kernel, "__alt_start", "__alt_end");
    let with_len = pairs.into_iter().zip((start..).step_by(16)).map(|((old, new), entry)| {
        let len = kernel.bytes(entry + 10, 2).unwrap();
        let len = u64::from(u16::from_le_bytes(len.try_into().unwrap()));
        (old..old + len, new..new + len)
    });
    with_len.collect()
}

/// The text, read once more without the decoder under test.
pub struct Code<'a> {
    kernel: &'a Kernel,
    range: Range<u64>,
}

impl<'a> Code<'a> {
    pub fn of(kernel: &'a Kernel) -> Self {
        let [start, end] = ["_stext", "_etext"].map(|name| kernel.symbols().address(name).unwrap());
        Self { kernel, range: start..end }
    }

    /// From symbol to symbol.
    pub fn all(&self) -> impl Iterator<Item = Range<u64>> {
        let symbols = self.kernel.symbols().iter().map(|symbol| symbol.address);
        let mut cuts: Vec<u64> = symbols.filter(|address| self.range.contains(address)).collect();
        cuts.dedup();
        cuts.push(self.range.end);
        (1..cuts.len()).map(move |i| cuts[i - 1]..cuts[i])
    }

    pub fn instructions(&self, range: Range<u64>) -> impl Iterator<Item = (u64, u32)> {
        let bytes = self.kernel.bytes(range.start, (range.end - range.start) as usize).unwrap();
        let mut at = 0;
        std::iter::from_fn(move || {
            let low = bytes.get(at..at + 2)?;
            let full = low[0] & 3 == 3;
            let word = if full { bytes.get(at..at + 4)? } else { low };
            let here = range.start + at as u64;
            at += word.len();
            Some((here, word.iter().rev().fold(0, |word, &byte| word << 8 | u32::from(byte))))
        })
    }

    /// Where `auipc` and an `addi` next to it lead, if the function jumps by a register.
    pub fn tables(&self, function: Range<u64>) -> Vec<u64> {
        let mut upper: Option<(u32, u64)> = None;
        let mut tables = Vec::new();
        let mut jumps = false;
        for (address, word) in self.instructions(function) {
            let rd = word >> 7 & 31;
            if word & 0x7f == 0x17 {
                let high = i64::from((word & !0xfff).cast_signed());
                upper = Some((rd, address.wrapping_add_signed(high)));
                continue;
            }
            if let Some((register, upper)) = upper.take()
                && (word & 0x707f, word >> 15 & 31) == (0x13, register)
            {
                tables.push(upper.wrapping_add_signed(i64::from(word.cast_signed() >> 20)));
            }
            jumps |= word & 3 == 2 && word & 0xf07f == 0x8002 && rd > 1;
        }
        tables.retain(|table| jumps && !self.range.contains(table));
        tables
    }
}

/// Where a branch or a `jal` leads.
pub fn branch_target(address: u64, word: u32) -> Option<u64> {
    let bit = |from: u32, to: u32| (word >> from & 1) << to;
    let bits = |from: u32, width: u32, to: u32| (word >> from & ((1 << width) - 1)) << to;
    let (distance, width) = match (word & 0x7f, word & 0xe003) {
        (0x63, _) => (bits(8, 4, 1) | bits(25, 6, 5) | bit(7, 11) | bit(31, 12), 13),
        (0x6f, _) => (bits(21, 10, 1) | bit(20, 11) | bits(12, 8, 12) | bit(31, 20), 21),
        (_, 0xa001) => (
            bits(3, 3, 1)
                | bit(11, 4)
                | bit(2, 5)
                | bit(7, 6)
                | bit(6, 7)
                | bits(9, 2, 8)
                | bit(8, 10)
                | bit(12, 11),
            12,
        ),
        (_, 0xc001 | 0xe001) => {
            (bits(3, 2, 1) | bits(10, 2, 3) | bit(2, 5) | bits(5, 2, 6) | bit(12, 8), 9)
        }
        _ => return None,
    };
    let distance = (distance << (32 - width)).cast_signed() >> (32 - width);
    Some(address.wrapping_add_signed(distance.into()))
}
