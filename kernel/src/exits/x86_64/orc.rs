//! Finds the depth of the stack at an instruction, from the kernel's unwind tables (ORC).
//!
//! `.orc_unwind_ip` has a relative address of 4 bytes for each entry of `.orc_unwind`. An entry has
//! 6 bytes: the offset from a register to the stack at the function's call, another offset, and
//! packed numbers, the lowest four bits of which name the register
//! (arch/x86/include/asm/orc_types.h). The number of the stack pointer depends on the version; it
//! is found from the entries at the starts of functions.

use crate::read::{i32_at, u16_at, wide};
use crate::sites::SiteSection;
use crate::{Kernel, KernelError};

use super::tables::Tables;

/// What the tables say of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Depth {
    /// The stack is as at the function's entry.
    Entry,
    /// The stack is otherwise.
    Other,
    /// Nothing: it is not code that runs, or the build was told not to look.
    Undefined,
}

/// The tables, sorted by the build.
pub(super) struct Orc<'a> {
    start: u64,
    distances: &'a [u8],
    entries: &'a [u8],
    stack_pointer: u16,
}

impl<'a> Orc<'a> {
    /// None where the kernel has none, or none that fit each other: nothing is known then.
    pub(super) fn find(tables: &Tables<'a>) -> Result<Option<Self>, KernelError> {
        let addresses = ["__start_orc_unwind_ip", "__stop_orc_unwind_ip"];
        let addresses = tables.bytes(addresses, ".orc_unwind_ip")?;
        let entries = tables.bytes(["__start_orc_unwind", "__stop_orc_unwind"], ".orc_unwind")?;
        let Some(((start, distances), (_, entries))) = addresses.zip(entries) else {
            return Ok(None);
        };
        let fit = !distances.is_empty()
            && distances.len() % 4 == 0
            && entries.len() / 6 == distances.len() / 4;
        let mut orc = Self { start, distances, entries, stack_pointer: 0 };
        let number = fit.then(|| orc.learn(tables.kernel)).flatten();
        Ok(number.map(|number| {
            orc.stack_pointer = number;
            orc
        }))
    }

    /// The stack pointer's number: at nearly every entry the stack is 8 bytes above it, where
    /// the return address ends.
    fn learn(&self, kernel: &Kernel) -> Option<u16> {
        let mut counts = [0_usize; 16];
        let mut sites = 0;
        for site in kernel.sites().iter().filter(|site| site.section == SiteSection::Text) {
            sites += 1;
            if let Some((8, number)) = self.entry(site.entry) {
                counts[usize::from(number)] += 1;
            }
        }
        (1..16).find(|&number| counts[usize::from(number)] * 10 > sites * 9)
    }

    pub(super) fn at(&self, address: u64) -> Depth {
        match self.entry(address) {
            None | Some((_, 0)) => Depth::Undefined,
            Some((8, number)) if number == self.stack_pointer => Depth::Entry,
            Some(_) => Depth::Other,
        }
    }

    /// Offset and register that hold at an address; register 0 is none.
    fn entry(&self, address: u64) -> Option<(u16, u16)> {
        // If the table is not sorted, this ends somewhere all the same.
        let (mut low, mut high) = (0, self.distances.len() / 4);
        while low < high {
            let middle = low.midpoint(high);
            if self.address(middle).is_some_and(|found| found <= address) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        let i = low.checked_sub(1)?;
        Some((u16_at(self.entries, i * 6)?, u16_at(self.entries, i * 6 + 4)? & 15))
    }

    fn address(&self, i: usize) -> Option<u64> {
        let distance = i32_at(self.distances, i * 4)?;
        Some(self.start.wrapping_add(wide(i) * 4).wrapping_add_signed(distance.into()))
    }
}
