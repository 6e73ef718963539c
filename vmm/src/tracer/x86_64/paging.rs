//! Entries of page tables (Intel SDM vol. 3, 4.5).

/// The symbol of the kernel's own top-level table.
pub(crate) const KERNEL_ROOT: &str = "init_top_pgt";
/// `KERNEL_IMAGE_SIZE`: the kernel is moved upwards in it, by whole pages of 2 MiB.
pub(crate) const MOST_SLIDE: u64 = 1 << 30;
const PRESENT: u64 = 1;
const LARGE: u64 = 1 << 7;
pub(crate) const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

pub(crate) const fn is_present(entry: u64) -> bool {
    entry & PRESENT != 0
}

/// Whether a present entry maps memory and not a table. Level 1 is the last.
pub(crate) const fn is_leaf(entry: u64, level: u32) -> bool {
    level == 1 || (level <= 3 && entry & LARGE != 0)
}

/// The guest-physical address in an entry.
pub(crate) const fn address(entry: u64) -> u64 {
    entry & ADDRESS
}

/// The root table and the number of levels, from CR3 and CR4.
pub(crate) const fn root(cr3: u64, cr4: u64) -> (u64, u32) {
    const LA57: u64 = 1 << 12;
    (cr3 & ADDRESS, if cr4 & LA57 == 0 { 4 } else { 5 })
}
