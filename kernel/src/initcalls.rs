//! The kernel's initcalls, by level (include/asm-generic/vmlinux.lds.h, `INIT_CALLS`).
//!
//! Each level is a table between two symbols. An entry is an address, or the distance from itself to
//! the function (`CONFIG_HAVE_ARCH_PREL32_RELOCATIONS`). The form is the one by which all entries
//! name functions.

use super::Kernel;
use super::read::{i32_at, index, u64_at, wide};

/// The beginnings of the tables, in their order, and what the kernel calls the levels.
const LEVELS: [(&str, &str); 10] = [
    ("__initcall_start", "early"),
    ("__initcall0_start", "pure"),
    ("__initcall1_start", "core"),
    ("__initcall2_start", "postcore"),
    ("__initcall3_start", "arch"),
    ("__initcall4_start", "subsys"),
    ("__initcall5_start", "fs"),
    ("__initcallrootfs_start", "rootfs"),
    ("__initcall6_start", "device"),
    ("__initcall7_start", "late"),
];
const END: &str = "__initcall_end";
/// Bytes of all tables: more than any kernel has.
const MOST: u64 = 1 << 20;

/// A function that the kernel calls once while it boots (`do_one_initcall`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Initcall<'a> {
    /// Its link address.
    pub address: u64,
    /// Its name.
    pub name: &'a str,
    /// The level that it is of, such as `subsys`.
    pub level: &'static str,
}

impl Kernel {
    /// All initcalls of the image itself, in the order in which they are called; empty when its
    /// symbols do not tell where they are (`CONFIG_KALLSYMS_ALL`), or they are not what they should
    /// be.
    pub fn initcalls(&self) -> Vec<Initcall<'_>> {
        self.read_initcalls::<4>().or_else(|| self.read_initcalls::<8>()).unwrap_or_default()
    }

    fn read_initcalls<const SIZE: usize>(&self) -> Option<Vec<Initcall<'_>>> {
        let symbols = self.symbols();
        let last = symbols.address(END)?;
        let known = |(symbol, level)| Some((symbols.address(symbol)?, level));
        let starts: Vec<(u64, &str)> = LEVELS.into_iter().filter_map(known).collect();
        let mut calls = Vec::new();
        for (number, &(start, level)) in starts.iter().enumerate() {
            let end = starts.get(number + 1).map_or(last, |&(next, _)| next);
            let length = end.checked_sub(start).filter(|&length| length <= MOST)?;
            let table = self.bytes(start, index(length))?;
            for (place, entry) in table.chunks(SIZE).enumerate() {
                let address = if SIZE == 4 {
                    let here = start.wrapping_add(wide(place * SIZE));
                    here.wrapping_add_signed(i32_at(entry, 0)?.into())
                } else {
                    u64_at(entry, 0)?
                };
                calls.push(Initcall { address, name: symbols.primary_at(address)?, level });
            }
        }
        Some(calls)
    }
}
