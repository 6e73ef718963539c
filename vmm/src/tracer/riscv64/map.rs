//! Controls, rings and the code that exits lead to in the guest's kernel half.
//!
//! They are mapped by the 2 MiB entries after `_end`: nothing is ever mapped above the kernel's
//! image (modules and BPF are below it, arch/riscv/include/asm/pgtable.h), and every process shares
//! this table.
//!
//! Rings that do not fit there are in the upper three quarters of the same 2 GiB, which are for the
//! kernel's image only (Documentation/arch/riscv/vm-layout.rst). They are mapped by entries of that
//! table up to its end, and after that by one for 1 GiB. With three levels of tables the latter is an
//! entry of the root. Every process has a copy of the kernel's root; the entry is written before there
//! are processes.

use super::paging::{ACCESSED, DIRTY, EXECUTE, GLOBAL, READ, VALID, WRITE};
use crate::kernel::Kernel;
use crate::tracer::annex::{CODE, Far, Hole, SIZE, WITH_TABLES};
use crate::tracer::counters::Area;
use crate::tracer::error::TraceError;
use crate::tracer::guest::{Guest, GuestError};
use crate::tracer::image::Image;
use crate::tracer::paging::{PMD_SIZE, PUD_SIZE};

/// Where large rings are: the last 2 MiB have no position, and errors as pointers.
pub(super) const HOLE: Hole =
    Hole { positions: 0xffff_ffff_a000_0000, distance: 0, len: (1536 << 20) - PMD_SIZE };
/// Where the kernel's table of entries for 2 MiB ends.
const TABLE_END: u64 = 0xffff_ffff_c000_0000;
/// How far behind a multiple of 1 GiB of guest-physical memory the rings begin.
pub(super) const FAR_OFFSET: u64 = 512 << 20;

/// The link address of the annex, which moves with the kernel: its first 2 MiB, which are for code,
/// are mapped behind the others, so that these may overlap the kernel's last.
pub(super) fn link(kernel: &Kernel) -> Result<u64, TraceError> {
    let end = kernel.symbols().address("_end").ok_or(TraceError::NoSymbol("_end"))?;
    Ok(end.next_multiple_of(PMD_SIZE) - CODE)
}

/// The address of the code of an annex at `address`.
pub(super) fn code(address: u64) -> u64 {
    address.wrapping_add(SIZE)
}

/// Maps guest-physical `annex` at `address`: read-write and never executable, but for its front,
/// which is read-execute and mapped behind it, if there is to be code.
///
/// # Errors
/// When an entry is already in use, or there is no table for it; then nothing is
/// left changed.
pub(super) fn map(
    guest: &dyn Guest,
    image: &Image,
    address: u64,
    annex: u64,
    with_code: bool,
    far: Option<Far>,
) -> Result<(), GuestError> {
    // Accessed and dirty from the start: a processor may leave setting them to the
    // kernel, which would not know what to do about these.
    const FLAGS: u64 = VALID | READ | GLOBAL | ACCESSED;
    let step = usize::try_from(PMD_SIZE).unwrap_or(usize::MAX);
    let data = (CODE..SIZE).step_by(step);
    let data = data.map(|offset| (address.wrapping_add(offset), offset, WRITE | DIRTY));
    let code = with_code.then_some((code(address), 0, EXECUTE));
    let mut entries = Vec::new();
    for (virt, offset, access) in data.chain(code) {
        let (slot, old) = image.tables.pmd(guest, virt)?;
        if old != 0 {
            return Err(GuestError::Mismatch(format!(
                "the guest uses {virt:#x} itself (entry {old:#x}): no place for the annex"
            )));
        }
        entries.push((slot, (annex + offset) >> 12 << 10 | FLAGS | access));
    }
    if let Some(far) = far {
        if far.guest_address % PUD_SIZE != FAR_OFFSET {
            return Err(GuestError::Mismatch(format!(
                "memory at guest-physical {:#x} cannot be mapped by pages of 1 GiB",
                far.guest_address
            )));
        }
        let mut offset = 0;
        while offset < far.len {
            let virt = HOLE.address() + offset;
            let in_table = virt < TABLE_END;
            let found = if in_table {
                image.tables.pmd(guest, virt)?
            } else {
                image.tables.pud(guest, virt)?
            };
            let (slot, old) = found;
            if old != 0 {
                return Err(GuestError::Mismatch(format!(
                    "the guest uses {virt:#x} itself (entry {old:#x}): no place for rings of this size, \
                     leave out --buffer"
                )));
            }
            entries.push((slot, (far.guest_address + offset) >> 12 << 10 | FLAGS | WRITE | DIRTY));
            offset += if in_table { PMD_SIZE } else { PUD_SIZE };
        }
    }
    for (slot, entry) in entries {
        guest.write_u64(slot, entry)?;
    }
    Ok(())
}

/// Maps what lies behind the first [`SIZE`] bytes of guest-physical `annex`, read-write and never
/// executable, behind all of an annex at `address`, as far as there is room; nothing if there is none.
///
/// # Errors
/// When guest memory cannot be used; then there may be entries that nobody needs.
pub(super) fn map_tables(
    guest: &dyn Guest,
    image: &Image,
    address: u64,
    annex: u64,
) -> Result<Area, GuestError> {
    const FLAGS: u64 = VALID | READ | WRITE | GLOBAL | ACCESSED | DIRTY;
    let start = code(address).wrapping_add(CODE);
    let mut len = 0;
    while len < WITH_TABLES - SIZE {
        // The kernel's half ends there, or the table does.
        let virt = start.wrapping_add(len);
        let Ok((slot, 0)) = image.tables.pmd(guest, virt) else { break };
        if virt < start {
            break;
        }
        guest.write_u64(slot, (annex + SIZE + len) >> 12 << 10 | FLAGS)?;
        len += PMD_SIZE;
    }
    Ok(Area { address: start, len })
}
