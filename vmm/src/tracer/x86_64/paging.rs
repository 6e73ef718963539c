//! Page tables as the processor walks them (Intel SDM vol. 3, 4.5).

use crate::tracer::guest::{Guest, GuestError};

const PRESENT: u64 = 1;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// Bytes mapped by an entry of the third level from the top (4 levels).
pub(crate) const PMD_SIZE: u64 = 2 << 20;

/// A root table and the number of levels under it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageTables {
    root: u64,
    levels: u32,
}

/// Where a walk ended without a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WalkError {
    /// No present entry at this level (1 is the last).
    #[error("not mapped (no entry at level {0})")]
    NotPresent(u32),
    /// A larger or smaller page than asked for.
    #[error("mapped by a page of another size (level {0})")]
    OtherSize(u32),
}

impl PageTables {
    /// From the control registers: CR3 and CR4.
    #[must_use]
    pub fn from_registers(cr3: u64, cr4: u64) -> Self {
        const LA57: u64 = 1 << 12;
        Self { root: cr3 & ADDRESS, levels: if cr4 & LA57 == 0 { 4 } else { 5 } }
    }

    /// The same number of levels under another root (guest-physical).
    #[must_use]
    pub fn with_root(self, root: u64) -> Self {
        Self { root, ..self }
    }

    /// Follows `address` down to `stop` (1: 4 KiB, 2: 2 MiB) or to a larger page.
    /// Returns the guest-physical address of the entry, the entry and its level.
    fn walk(
        &self,
        guest: &dyn Guest,
        address: u64,
        stop: u32,
    ) -> Result<(u64, u64, u32), GuestError> {
        let mut table = self.root;
        let mut level = self.levels;
        loop {
            let index = address >> (12 + 9 * (level - 1)) & 511;
            let slot = table + index * 8;
            let entry = guest.read_u64(slot)?;
            let leaf = level == 1 || (level <= 3 && entry & LARGE != 0);
            if level == stop || (leaf && entry & PRESENT != 0) {
                return Ok((slot, entry, level));
            }
            if entry & PRESENT == 0 {
                return Err(GuestError::Unmapped { address, cause: WalkError::NotPresent(level) });
            }
            table = entry & ADDRESS;
            level -= 1;
        }
    }

    /// The guest-physical address behind virtual `address`.
    ///
    /// # Errors
    /// When it is not mapped, or a table is no RAM.
    pub fn translate(&self, guest: &dyn Guest, address: u64) -> Result<u64, GuestError> {
        let (_, entry, level) = self.walk(guest, address, 1)?;
        if entry & PRESENT == 0 {
            return Err(GuestError::Unmapped { address, cause: WalkError::NotPresent(level) });
        }
        let offset_mask = (1_u64 << (12 + 9 * (level - 1))) - 1;
        Ok((entry & ADDRESS & !offset_mask) | (address & offset_mask))
    }

    /// The 2 MiB entry for `address`, present or not: where it is, what it holds.
    ///
    /// # Errors
    /// When a table above it is missing or a 1 GiB page is in its place.
    pub(crate) fn pmd(&self, guest: &dyn Guest, address: u64) -> Result<(u64, u64), GuestError> {
        let (slot, entry, level) = self.walk(guest, address, 2)?;
        if level != 2 {
            return Err(GuestError::Unmapped { address, cause: WalkError::OtherSize(level) });
        }
        Ok((slot, entry))
    }
}
