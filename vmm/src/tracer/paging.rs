//! Walks page tables as the processor does. Both architectures have 512 entries of 8 bytes in a
//! table of 4 KiB; only the meaning of an entry differs.

use super::arch::{self, Target};
use super::guest::{Guest, GuestError};
use super::{riscv64, x86_64};
use crate::kernel::Arch;

/// Bytes mapped by an entry of the second level from the bottom.
pub(super) const PMD_SIZE: u64 = 2 << 20;
/// The same of the third.
pub(super) const PUD_SIZE: u64 = 1 << 30;

/// A root table and the number of levels under it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageTables {
    arch: Arch,
    root: u64,
    levels: u32,
}

/// Where a walk ended without a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WalkError {
    /// The guest has not turned paging on.
    #[error("paging is off")]
    Off,
    /// No present entry at this level (1 is the last).
    #[error("not mapped (no entry at level {0})")]
    NotPresent(u32),
    /// A larger or smaller page than asked for.
    #[error("mapped by a page of another size (level {0})")]
    OtherSize(u32),
}

impl PageTables {
    /// x86-64, from CR3 and CR4.
    #[must_use]
    pub fn x86_64(cr3: u64, cr4: u64) -> Self {
        let (root, levels) = x86_64::paging::root(cr3, cr4);
        Self { arch: Arch::X86_64, root, levels }
    }

    /// riscv64, from `satp`.
    #[must_use]
    pub fn riscv64(satp: u64) -> Self {
        let (root, levels) = riscv64::paging::root(satp);
        Self { arch: Arch::Riscv64, root, levels }
    }

    /// Of a guest that has not turned paging on: nothing is mapped.
    #[must_use]
    pub fn none(arch: Arch) -> Self {
        Self { arch, root: 0, levels: 0 }
    }

    /// The same number of levels under another root (guest-physical).
    #[must_use]
    pub fn with_root(self, root: u64) -> Self {
        Self { root, ..self }
    }

    /// How many levels there are.
    pub(super) fn levels(&self) -> u32 {
        self.levels
    }

    /// Whose they are.
    pub(super) fn of(&self) -> Arch {
        self.arch
    }

    fn arch(&self) -> &'static dyn Target {
        arch::of(self.arch)
    }

    /// Follows `address` down to `stop` (1: 4 KiB, 2: 2 MiB) or to a larger page.
    /// Returns the guest-physical address of the entry, the entry and its level.
    fn walk(
        &self,
        guest: &dyn Guest,
        address: u64,
        stop: u32,
    ) -> Result<(u64, u64, u32), GuestError> {
        let arch = self.arch();
        let unmapped = |cause| GuestError::Unmapped { address, cause };
        let mut table = self.root;
        for level in (stop..=self.levels).rev() {
            let index = address >> (12 + 9 * (level - 1)) & 511;
            let slot = table.wrapping_add(index * 8);
            let entry = guest.read_u64(slot)?;
            let present = arch.is_present(entry);
            if level == stop || (present && arch.is_leaf(entry, level)) {
                return Ok((slot, entry, level));
            }
            if !present {
                return Err(unmapped(WalkError::NotPresent(level)));
            }
            table = arch.address(entry);
        }
        Err(unmapped(WalkError::Off))
    }

    /// The guest-physical address behind virtual `address`.
    ///
    /// # Errors
    /// When it is not mapped, or a table is no RAM.
    pub fn translate(&self, guest: &dyn Guest, address: u64) -> Result<u64, GuestError> {
        let arch = self.arch();
        let (_, entry, level) = self.walk(guest, address, 1)?;
        if !arch.is_present(entry) {
            return Err(GuestError::Unmapped { address, cause: WalkError::NotPresent(level) });
        }
        let offset_mask = (1_u64 << (12 + 9 * (level - 1))) - 1;
        Ok((arch.address(entry) & !offset_mask) | (address & offset_mask))
    }

    /// What is mapped of `[start, end)`, page by page: run-time address, bytes and guest-physical
    /// address of each present page. Ends early in tables that map more than so many pages.
    pub(super) fn pages(
        &self,
        guest: &dyn Guest,
        (start, end): (u64, u64),
        mut each: impl FnMut(u64, u64, u64),
    ) {
        /// 64 GiB by pages of 2 MiB, beside 64 MiB by small ones.
        const MOST: usize = 48 << 10;
        let arch = self.arch();
        let mut address = start;
        for _ in 0..MOST {
            if address >= end {
                break;
            }
            let (found, level) = match self.walk(guest, address, 1) {
                Ok((_, entry, level)) => {
                    (arch.is_present(entry).then(|| arch.address(entry)), level)
                }
                Err(GuestError::Unmapped { cause: WalkError::NotPresent(level), .. }) => {
                    (None, level)
                }
                Err(_) => break,
            };
            let size = 1_u64 << (12 + 9 * (level - 1));
            let inside = address & (size - 1);
            let len = (size - inside).min(end - address);
            if let Some(page) = found {
                each(address, len, (page & !(size - 1)) + inside);
            }
            let Some(next) = address.checked_add(len) else { break };
            address = next;
        }
    }

    /// The 1 GiB entry for `address`, present or not: where it is, what it holds.
    ///
    /// # Errors
    /// When a table above it is missing.
    pub(super) fn pud(&self, guest: &dyn Guest, address: u64) -> Result<(u64, u64), GuestError> {
        let (slot, entry, level) = self.walk(guest, address, 3)?;
        if level != 3 {
            return Err(GuestError::Unmapped { address, cause: WalkError::OtherSize(level) });
        }
        Ok((slot, entry))
    }

    /// The 2 MiB entry for `address`, present or not: where it is, what it holds.
    ///
    /// # Errors
    /// When a table above it is missing or a 1 GiB page is in its place.
    pub(super) fn pmd(&self, guest: &dyn Guest, address: u64) -> Result<(u64, u64), GuestError> {
        let (slot, entry, level) = self.walk(guest, address, 2)?;
        if level != 2 {
            return Err(GuestError::Unmapped { address, cause: WalkError::OtherSize(level) });
        }
        Ok((slot, entry))
    }
}
