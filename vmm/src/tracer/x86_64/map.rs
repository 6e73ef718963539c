//! The annex in the guest's kernel half.
//!
//! It is mapped at …80000000 to …81000000: the 2 MiB entries of
//! `level2_kernel_pgt` below the lowest address at which a kernel is ever put
//! (16 MiB, arch/x86/boot/compressed/kaslr.c), so never used, at the same place
//! under KASLR, shared by every process, and in reach of a call from all kernel
//! and module text.

use crate::kernel::Kernel;
use crate::tracer::annex::{CODE, SIZE, WITH_TABLES};
use crate::tracer::counters::Area;
use crate::tracer::guest::{Guest, GuestError, Image};
use crate::tracer::paging::PMD_SIZE;

/// Where the annex begins in guest virtual memory.
pub(crate) const ADDRESS: u64 = 0xffff_ffff_8000_0000;

/// Where modules begin: the end of what the image's table maps, and of kernels that are never moved (no
/// RANDOMIZE_BASE) its middle (`KERNEL_IMAGE_SIZE`, arch/x86/include/asm/page_64_types.h).
const MODULES: u64 = 0xffff_ffff_c000_0000;
const MODULES_UNMOVED: u64 = 0xffff_ffff_a000_0000;
const STEP: usize = 2 << 20;

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
    for offset in (0..SIZE).step_by(STEP) {
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

/// Maps what lies behind the first [`SIZE`] bytes of guest-physical `annex`, read-write and never
/// executable, where the table of the kernel's text has the most room: its image lies anywhere in there.
/// Nothing if it has none.
///
/// # Errors
/// When guest memory cannot be used; then there may be entries that nobody needs.
pub(crate) fn map_tables(
    guest: &dyn Guest,
    (kernel, image): (&Kernel, &Image),
    text: u64,
    annex: u64,
) -> Result<Area, GuestError> {
    // It is there in kernels that can be moved alone (arch/x86/mm/kaslr.c).
    let moves = kernel.symbols().address("kernel_randomize_memory").is_some();
    let end = if moves { MODULES } else { MODULES_UNMOVED };
    let (_, model) = image.tables.pmd(guest, text)?;
    let most = (WITH_TABLES - SIZE) / PMD_SIZE;
    let (mut best, mut run) = ((0, 0), (ADDRESS, 0));
    for address in (ADDRESS..end).step_by(STEP) {
        let (_, entry) = image.tables.pmd(guest, address)?;
        run = if entry == 0 { (run.0, run.1 + 1) } else { (address + PMD_SIZE, 0) };
        if run.1 > best.1 && run.1 <= most {
            best = run;
        }
    }
    let (address, entries) = best;
    for entry in 0..entries {
        let (slot, _) = image.tables.pmd(guest, address + entry * PMD_SIZE)?;
        let flags = PRESENT | WRITABLE | ACCESSED | DIRTY | LARGE | NO_EXECUTE | (model & GLOBAL);
        guest.write(slot, &((annex + SIZE + entry * PMD_SIZE) | flags).to_le_bytes())?;
    }
    Ok(Area { address, len: entries * PMD_SIZE })
}

const _: () = assert!(STEP as u64 == PMD_SIZE);
