//! The annex in the guest's kernel half.
//!
//! It is mapped at …80000000 to …81000000, by the 2 MiB entries of `level2_kernel_pgt` below the
//! lowest load address of a kernel (16 MiB, arch/x86/boot/compressed/kaslr.c). These are never used
//! otherwise, are at the same place under KASLR, are shared by every process, and are in reach of a
//! call from all kernel and module text.
//!
//! Rings that do not fit there are at …00000000 to …80000000, an unused hole in the kernel's memory map
//! (Documentation/arch/x86/x86_64/mm.rst). KASLR does not move its neighbours (arch/x86/mm/kaslr.c). Two
//! entries of `level3_kernel_pgt`, shared by every process, map it. Each maps 1 GiB directly, since a
//! table of smaller pages would have to be in memory that the kernel manages.

use crate::kernel::Kernel;
use crate::tracer::annex::{CODE, Far, Hole, SIZE, WITH_TABLES};
use crate::tracer::counters::Area;
use crate::tracer::guest::{Guest, GuestError};
use crate::tracer::image::Image;
use crate::tracer::paging::{PMD_SIZE, PUD_SIZE};

/// Where the annex begins in guest virtual memory.
pub(crate) const ADDRESS: u64 = 0xffff_ffff_8000_0000;

/// Where large rings are mapped, by entries for 1 GiB each.
const FAR: u64 = 0xffff_ffff_0000_0000;

/// How far behind a multiple of 1 GiB of guest-physical memory the rings begin.
pub(crate) const FAR_OFFSET: u64 = PMD_SIZE;

/// Where large rings are. Their positions are those of the upper 2 GiB, all but the last 2 MiB: so a
/// displacement leads from what is sign-extended to any field below the rings' addresses.
pub(crate) const HOLE: Hole =
    Hole { positions: ADDRESS, distance: -0x7fe0_0000, len: (2 << 30) - PMD_SIZE };

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
    far: Option<Far>,
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
    if let Some(far) = far {
        // The rings begin at the same distance from a multiple of 1 GiB in both.
        let physical = far.guest_address.wrapping_sub(HOLE.address() - FAR);
        if !physical.is_multiple_of(PUD_SIZE) {
            return Err(GuestError::Mismatch(format!(
                "memory at guest-physical {:#x} cannot be mapped by pages of 1 GiB",
                far.guest_address
            )));
        }
        let end = HOLE.address() - FAR + far.len;
        for offset in (0..end).step_by(1 << 30) {
            let (slot, old) = image.tables.pud(guest, FAR + offset)?;
            if old != 0 {
                return Err(GuestError::Mismatch(format!(
                    "the guest uses {:#x} itself (entry {old:#x}): no place for rings of this size, leave \
                     out --buffer",
                    FAR + offset
                )));
            }
            let flags = PRESENT | WRITABLE | ACCESSED | DIRTY | LARGE | NO_EXECUTE;
            entries.push((slot, (physical + offset) | flags | (model & GLOBAL)));
        }
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

const _: () = assert!(STEP as u64 == PMD_SIZE && 1 << 30 == PUD_SIZE);
const _: () = assert!(HOLE.address() == FAR + FAR_OFFSET && HOLE.address() + HOLE.len == ADDRESS);
