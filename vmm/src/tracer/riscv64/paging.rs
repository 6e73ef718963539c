//! Entries of page tables (The RISC-V Instruction Set Manual, volume II, Sv39 to Sv57).

/// The symbol of the kernel's own top-level table.
pub(crate) const KERNEL_ROOT: &str = "swapper_pg_dir";
/// The kernel is moved upwards, by whole pages of 2 MiB, within the 2 GiB of kernel and modules.
pub(crate) const MOST_SLIDE: u64 = 1 << 31;
pub(crate) const VALID: u64 = 1;
pub(crate) const READ: u64 = 1 << 1;
pub(crate) const WRITE: u64 = 1 << 2;
pub(crate) const EXECUTE: u64 = 1 << 3;
pub(crate) const GLOBAL: u64 = 1 << 5;
pub(crate) const ACCESSED: u64 = 1 << 6;
pub(crate) const DIRTY: u64 = 1 << 7;
const PAGE: u64 = (1 << 44) - 1;

pub(crate) const fn is_present(entry: u64) -> bool {
    entry & VALID != 0
}

/// Whether a valid entry maps memory and not a table. Level 1 is the last.
pub(crate) const fn is_leaf(entry: u64, level: u32) -> bool {
    level == 1 || entry & (READ | WRITE | EXECUTE) != 0
}

/// The guest-physical address in an entry.
pub(crate) const fn address(entry: u64) -> u64 {
    (entry >> 10 & PAGE) << 12
}

/// The root table and the number of levels, from `satp`; none while paging is off.
pub(crate) const fn root(satp: u64) -> (u64, u32) {
    let levels = match satp >> 60 {
        8 => 3,
        9 => 4,
        10 => 5,
        _ => 0,
    };
    ((satp & PAGE) << 12, levels)
}
