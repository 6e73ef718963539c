//! Controls and rings in the guest's kernel half.
//!
//! They are mapped by the 2 MiB entries behind `_end`: above the kernel's image
//! nothing is ever put (modules and BPF are below it, arch/riscv/include/asm/
//! pgtable.h), and the table is shared by every process.

use super::paging::{ACCESSED, DIRTY, GLOBAL, READ, VALID, WRITE};
use crate::kernel::Kernel;
use crate::tracer::annex::{CODE, SIZE};
use crate::tracer::guest::{Guest, GuestError, Image};
use crate::tracer::paging::PMD_SIZE;
use crate::tracer::trace::TraceError;

/// The run-time address of the annex: its first 2 MiB, which are for code, are not
/// mapped here and so may overlap the kernel's last.
pub(super) fn address(kernel: &Kernel, image: &Image) -> Result<u64, TraceError> {
    let end = kernel.symbols().address("_end").ok_or(TraceError::NoSymbol("_end"))?;
    Ok(image.runtime(end).next_multiple_of(PMD_SIZE) - CODE)
}

/// Maps all of guest-physical `annex` but its front at `address`: read-write, never
/// executable.
///
/// # Errors
/// When an entry is already in use, or there is no table for it; then nothing is
/// left changed.
pub(super) fn map(
    guest: &dyn Guest,
    image: &Image,
    address: u64,
    annex: u64,
) -> Result<(), GuestError> {
    // Accessed and dirty from the start: a processor may leave setting them to the
    // kernel, which would not know what to do about these.
    const FLAGS: u64 = VALID | READ | WRITE | GLOBAL | ACCESSED | DIRTY;
    let mut entries = Vec::new();
    for offset in (CODE..SIZE).step_by(usize::try_from(PMD_SIZE).unwrap_or(usize::MAX)) {
        let virt = address.wrapping_add(offset);
        let (slot, old) = image.tables.pmd(guest, virt)?;
        if old != 0 {
            return Err(GuestError::Mismatch(format!(
                "the guest uses {virt:#x} itself (entry {old:#x}): no place for the annex"
            )));
        }
        entries.push((slot, (annex + offset) >> 12 << 10 | FLAGS));
    }
    for (slot, entry) in entries {
        guest.write_u64(slot, entry)?;
    }
    Ok(())
}
