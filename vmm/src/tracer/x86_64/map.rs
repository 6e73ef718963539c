//! The annex in the guest's kernel half.
//!
//! It is mapped at …80000000 to …81000000: the 2 MiB entries of
//! `level2_kernel_pgt` below the lowest address at which a kernel is ever put
//! (16 MiB, arch/x86/boot/compressed/kaslr.c), so never used, at the same place
//! under KASLR, shared by every process, and in reach of a call from all kernel
//! and module text.

use crate::tracer::annex::{CODE, SIZE};
use crate::tracer::guest::{Guest, GuestError, Image};
use crate::tracer::paging::PMD_SIZE;

/// Where the annex begins in guest virtual memory.
pub(crate) const ADDRESS: u64 = 0xffff_ffff_8000_0000;

const PRESENT: u64 = 1;
const WRITABLE: u64 = 1 << 1;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;
const GLOBAL: u64 = 1 << 8;
const NO_EXECUTE: u64 = 1 << 63;

/// Maps guest-physical `annex` into the kernel: the front read-execute, the rest
/// read-write and never executable.
///
/// # Errors
/// When an entry is already in use, or the kernel's text is not mapped by 2 MiB
/// pages; then nothing is left changed.
pub(crate) fn map(
    guest: &dyn Guest,
    image: &Image,
    text: u64,
    annex: u64,
) -> Result<(), GuestError> {
    // Whether kernel pages are global depends on page-table isolation.
    let (_, model) = image.tables.pmd(guest, text)?;
    if model & (PRESENT | LARGE) != PRESENT | LARGE {
        return Err(GuestError::Mismatch(format!(
            "kernel text at {text:#x} is not mapped by a 2 MiB page (entry {model:#x})"
        )));
    }
    let mut entries = Vec::new();
    for offset in (0..SIZE).step_by(usize::try_from(PMD_SIZE).unwrap_or(usize::MAX)) {
        let (slot, old) = image.tables.pmd(guest, ADDRESS + offset)?;
        if old != 0 {
            return Err(GuestError::Mismatch(format!(
                "the guest uses {:#x} itself (entry {old:#x}): no place for the annex",
                ADDRESS + offset
            )));
        }
        let flags = PRESENT | ACCESSED | LARGE | (model & GLOBAL);
        let access = if offset < CODE { 0 } else { WRITABLE | DIRTY | NO_EXECUTE };
        entries.push((slot, (annex + offset) | flags | access));
    }
    for (slot, entry) in entries {
        guest.write(slot, &entry.to_le_bytes())?;
    }
    Ok(())
}
