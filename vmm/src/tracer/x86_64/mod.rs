//! x86-64: sites are 5-byte nops or calls, the annex is mapped by 2 MiB entries.

pub(super) mod context;
pub(super) mod map;
pub(super) mod paging;
pub(super) mod site;

/// The kernel's own top-level page table.
pub(super) const KERNEL_ROOT: &str = "init_top_pgt";

/// Whether a kernel can have been moved by this much: upwards, by whole 2 MiB
/// pages, inside the 1 GiB of `KERNEL_IMAGE_SIZE`.
pub(super) fn is_slide(slide: u64) -> bool {
    slide < 1 << 30 && slide.is_multiple_of(2 << 20)
}
