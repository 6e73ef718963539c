//! Walks page tables as the processor does. Both architectures have 512 entries of 8 bytes in a
//! table of 4 KiB; only the meaning of an entry differs.

use super::guest::{Guest, GuestError, WalkError};
use super::riscv64::paging as riscv64;
use super::x86_64::paging as x86_64;
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

impl PageTables {
    /// x86-64, from CR3 and CR4.
    #[must_use]
    pub fn x86_64(cr3: u64, cr4: u64) -> Self {
        let (root, levels) = x86_64::root(cr3, cr4);
        Self { arch: Arch::X86_64, root, levels }
    }

    /// riscv64, from `satp`.
    #[must_use]
    pub fn riscv64(satp: u64) -> Self {
        let (root, levels) = riscv64::root(satp);
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

    /// The symbol of the kernel's own top-level table.
    pub(super) fn kernel_root(&self) -> &'static str {
        match self.arch {
            Arch::X86_64 => x86_64::KERNEL_ROOT,
            Arch::Riscv64 => riscv64::KERNEL_ROOT,
        }
    }

    /// Whether a kernel can have been moved by this much.
    pub(super) fn is_slide(&self, slide: u64) -> bool {
        let most = match self.arch {
            Arch::X86_64 => x86_64::MOST_SLIDE,
            Arch::Riscv64 => riscv64::MOST_SLIDE,
        };
        slide < most && slide.is_multiple_of(PMD_SIZE)
    }

    /// Whether an entry is in use.
    fn is_present(&self, entry: u64) -> bool {
        match self.arch {
            Arch::X86_64 => x86_64::is_present(entry),
            Arch::Riscv64 => riscv64::is_present(entry),
        }
    }

    /// Whether a present entry of this level maps memory and not a table.
    fn is_leaf(&self, entry: u64, level: u32) -> bool {
        match self.arch {
            Arch::X86_64 => x86_64::is_leaf(entry, level),
            Arch::Riscv64 => riscv64::is_leaf(entry, level),
        }
    }

    /// The guest-physical address in an entry.
    fn address(&self, entry: u64) -> u64 {
        match self.arch {
            Arch::X86_64 => x86_64::address(entry),
            Arch::Riscv64 => riscv64::address(entry),
        }
    }

    /// Follows `address` down to `stop` (1: 4 KiB, 2: 2 MiB) or to a larger page.
    /// Returns the guest-physical address of the entry, the entry and its level.
    fn walk(
        &self,
        guest: &dyn Guest,
        address: u64,
        stop: u32,
    ) -> Result<(u64, u64, u32), GuestError> {
        let unmapped = |cause| GuestError::Unmapped { address, cause };
        let mut table = self.root;
        for level in (stop..=self.levels).rev() {
            let index = address >> (12 + 9 * (level - 1)) & 511;
            let slot = table.wrapping_add(index * 8);
            let entry = guest.read_u64(slot)?;
            let present = self.is_present(entry);
            if level == stop || (present && self.is_leaf(entry, level)) {
                return Ok((slot, entry, level));
            }
            if !present {
                return Err(unmapped(WalkError::NotPresent(level)));
            }
            table = self.address(entry);
        }
        Err(unmapped(WalkError::Off))
    }

    /// The guest-physical address behind virtual `address`.
    ///
    /// # Errors
    /// When it is not mapped, or a table is no RAM.
    pub fn translate(&self, guest: &dyn Guest, address: u64) -> Result<u64, GuestError> {
        let (_, entry, level) = self.walk(guest, address, 1)?;
        if !self.is_present(entry) {
            return Err(GuestError::Unmapped { address, cause: WalkError::NotPresent(level) });
        }
        let offset_mask = (1_u64 << (12 + 9 * (level - 1))) - 1;
        Ok((self.address(entry) & !offset_mask) | (address & offset_mask))
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
        let mut address = start;
        for _ in 0..MOST {
            if address >= end {
                break;
            }
            let (found, level) = match self.walk(guest, address, 1) {
                Ok((_, entry, level)) => {
                    (self.is_present(entry).then(|| self.address(entry)), level)
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
