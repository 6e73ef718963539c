//! The annex: memory outside the guest's RAM map for code, controls and rings.
//!
//! ```text
//! …80000000  code: trampoline, table of control blocks     read-execute
//! …80200000  control blocks, spaced as the gs bases are    read-write
//! …80400000  rings, at multiples of their stride           read-write
//! …81000000
//! ```

use super::arch::map;
use super::trace::TraceError;
use vm_memory::{Bytes, VolatileSlice};
use vmtrace_trampolines::layout::{CHUNK_SIZE, CONTROL_SIZE, Control, Header, Ring, header};

/// Guest-physical bytes that the annex needs; a multiple of 2 MiB.
pub const SIZE: u64 = map::SIZE;
/// Most CPUs for which the annex has rings.
pub const MAX_CPUS: u64 = 64;

const CONTROLS: u64 = map::CODE;
const CONTROLS_SIZE: u64 = 2 << 20;
const RINGS: u64 = CONTROLS + CONTROLS_SIZE;
/// Of the table of control blocks in the code area; trampolines lie before it.
const TABLE: u64 = map::CODE - 4096;

/// The annex as the VMM has it mapped; shared with the running guest.
pub trait Memory: Send + Sync {
    /// All of it.
    fn slice(&self) -> VolatileSlice<'_>;
    /// Where it is in guest-physical memory, a multiple of 2 MiB.
    fn guest_address(&self) -> u64;
}

/// How a trampoline finds the control block of its CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Addressing {
    /// The block is at gs base + this (wrapping), on every CPU.
    PerCpu(u64),
    /// By CPU number, through the table at this guest virtual address.
    Table(u64),
}

/// What lies where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// One ring for each CPU.
    pub rings: Vec<Ring>,
    /// Offset in the annex of each CPU's control block.
    pub controls: Vec<u64>,
    /// How trampolines get at the control blocks.
    pub addressing: Addressing,
}

impl Layout {
    /// For CPUs with these gs bases.
    ///
    /// # Errors
    /// With no CPU, or more than [`MAX_CPUS`].
    pub fn new(gs_bases: &[u64]) -> Result<Self, TraceError> {
        let cpus = gs_bases.len() as u64;
        if cpus == 0 || cpus > MAX_CPUS {
            return Err(TraceError::Cpus(cpus));
        }
        let rings = rings(cpus).ok_or(TraceError::Cpus(cpus))?;
        // One constant must lead from every gs base to a block of its own.
        let lowest = gs_bases.iter().copied().min().unwrap_or(0);
        let mut offsets: Vec<_> = gs_bases.iter().map(|base| base - lowest).collect();
        let sound = offsets.iter().all(|&offset| {
            offset.is_multiple_of(CONTROL_SIZE as u64)
                && offset <= CONTROLS_SIZE - CONTROL_SIZE as u64
        });
        let mut unique = offsets.clone();
        unique.sort_unstable();
        unique.dedup();
        let addressing = if sound && unique.len() == offsets.len() {
            Addressing::PerCpu((map::ADDRESS + CONTROLS).wrapping_sub(lowest))
        } else {
            offsets = (0..cpus).map(|cpu| cpu * CONTROL_SIZE as u64).collect();
            Addressing::Table(map::ADDRESS + TABLE)
        };
        let controls = offsets.into_iter().map(|offset| CONTROLS + offset).collect();
        Ok(Self { rings, controls, addressing })
    }

    /// Offset in the annex of `ring`.
    #[must_use]
    pub fn offset(ring: &Ring) -> u64 {
        ring.address() - map::ADDRESS
    }

    /// Writes headers, control blocks, the table and `code` into a fresh annex.
    ///
    /// # Errors
    /// When the memory is too small, or the code too long.
    pub fn install(&self, memory: &VolatileSlice<'_>, code: &[u8]) -> Result<(), TraceError> {
        if code.len() as u64 > TABLE || (memory.len() as u64) < SIZE {
            return Err(TraceError::Annex);
        }
        let write = |offset: u64, bytes: &[u8]| {
            let offset = usize::try_from(offset).map_err(|_| TraceError::Annex)?;
            memory.write_slice(bytes, offset).map_err(|_| TraceError::Annex)
        };
        write(0, code)?;
        for ((cpu, ring), &control) in (0..).zip(&self.rings).zip(&self.controls) {
            let Header { base, end, room, .. } = ring.header();
            let start = Self::offset(ring);
            write(start + header::BASE as u64, &base.to_le_bytes())?;
            write(start + header::END as u64, &end.to_le_bytes())?;
            write(start + header::DROPPED as u64, &[0; 8])?;
            write(start + header::ROOM as u64, &room.to_le_bytes())?;
            let Control { head, .. } = ring.control();
            write(control, &head.to_le_bytes())?;
            write(TABLE + 8 * cpu, &(map::ADDRESS + control).to_le_bytes())?;
        }
        Ok(())
    }
}

/// The largest equal rings that fit.
fn rings(cpus: u64) -> Option<Vec<Ring>> {
    let (start, end) = (map::ADDRESS + RINGS, map::ADDRESS + SIZE);
    let mut stride = (SIZE - RINGS).next_power_of_two();
    while stride >= 2 * CHUNK_SIZE as u64 {
        let first = start.next_multiple_of(stride);
        if first + cpus * stride <= end {
            return (0..cpus).map(|cpu| Ring::new(first + cpu * stride, stride)).collect();
        }
        stride /= 2;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    // Overlapping rings or blocks would mix the records of two CPUs.
    #[test]
    fn every_cpu_count_gets_rings_of_its_own() {
        for cpus in 1..=MAX_CPUS {
            let bases: Vec<_> = (0..cpus).map(|cpu| 0xffff_8880_3fc0_0000 + (cpu << 15)).collect();
            let layout = Layout::new(&bases).unwrap();
            assert!(matches!(layout.addressing, Addressing::PerCpu(_)), "{cpus}");
            let mut end = RINGS;
            for ring in &layout.rings {
                assert!(Layout::offset(ring) >= end, "{cpus}");
                end = Layout::offset(ring) + ring.stride();
            }
            assert!(end <= SIZE, "{cpus}");
        }
        assert!(Layout::new(&[]).is_err());
        assert!(Layout::new(&[0; 65]).is_err());
    }

    #[test]
    fn the_usual_counts_get_large_rings() {
        let stride = |cpus| rings(cpus).unwrap()[0].stride();
        assert_eq!(
            (stride(1), stride(2), stride(4), stride(8)),
            (8 << 20, 4 << 20, 2 << 20, 1 << 20)
        );
    }

    #[test]
    fn gs_bases_lead_to_their_blocks() {
        let bases = [0xffff_8880_7dc0_0000, 0xffff_8880_7dd0_0000];
        let layout = Layout::new(&bases).unwrap();
        let Addressing::PerCpu(distance) = layout.addressing else { panic!() };
        for (base, control) in bases.iter().zip(&layout.controls) {
            assert_eq!(base.wrapping_add(distance), map::ADDRESS + control);
        }
    }

    #[test]
    fn bases_that_no_constant_serves_go_through_the_table() {
        for bases in [[0x1000, 0x1000], [0x1000, 0x1008], [0x1000, 0x4000_0000]] {
            let layout = Layout::new(&bases).unwrap();
            assert!(matches!(layout.addressing, Addressing::Table(_)), "{bases:x?}");
            assert_ne!(layout.controls[0], layout.controls[1]);
        }
    }
}
