//! The annex: memory outside the guest's RAM map for code, controls and rings.
//!
//! ```text
//!  0 MiB  code: programs, stubs, table of control blocks (x86-64)  read-execute
//!  2 MiB  control blocks                                           read-write
//!  4 MiB  rings                                                    read-write
//! 16 MiB  tables of counters, mapped where the guest has room         read-write
//!         rings that do not fit above, mapped in a hole of their own  read-write
//! ```
//!
//! The architecture decides where the guest has it mapped. On riscv64 the first 2 MiB are for exits
//! only, and are mapped after the others.

use super::error::TraceError;
use super::paging::PMD_SIZE;
use vm_memory::{Bytes, VolatileSlice};
use vmtrace_trampolines::layout::{
    CHUNK_SIZE, CONTROL_SIZE, Control, FRONT_SIZE, Front, Info, Ring, front,
};

/// Guest-physical bytes that the annex needs; a multiple of 2 MiB.
pub const SIZE: u64 = 16 << 20;
/// The same with tables of counters behind it, of which what nobody counts in takes no memory.
pub const WITH_TABLES: u64 = SIZE + (512 << 20);
/// Bytes at its front that are code and constants; the rest is data.
pub(super) const CODE: u64 = PMD_SIZE;
/// The smallest ring that can be asked for: one of two chunks.
pub const LEAST_BUFFER: u64 = 2 * CHUNK_SIZE as u64;
/// The largest.
pub const MOST_BUFFER: u64 = 1 << 30;
/// Most CPUs for which the annex has rings.
pub const MAX_CPUS: u64 = 64;

const CONTROLS: u64 = CODE;
const CONTROLS_SIZE: u64 = 2 << 20;
const RINGS: u64 = CONTROLS + CONTROLS_SIZE;
/// Of the table of control blocks in the code area; programs lie before it.
pub(super) const TABLE: u64 = CODE - 4096;
/// Control blocks where CPUs are told by their number: more than a kernel has numbers, so that a
/// program need not look.
const NUMBERS: u64 = 4096;
/// riscv64 with CALL_OPS: one `ftrace_ops` for each program, and one for traps.
pub(super) const OPS: u64 = CONTROLS + CONTROLS_SIZE / 2;
/// Bytes for one `ftrace_ops`.
pub(super) const OPS_SIZE: u64 = 256;
/// Where a CPU that is none of ours finds a ring that is always full.
const FULL: u64 = RINGS - FRONT_SIZE as u64;

/// The annex as the VMM has it mapped; shared with the running guest.
pub trait Memory: Send + Sync {
    /// All of it.
    fn slice(&self) -> VolatileSlice<'_>;
    /// Where it is in guest-physical memory, a multiple of 2 MiB.
    fn guest_address(&self) -> u64;
    /// Where what lies behind its first [`WITH_TABLES`] bytes is instead, if there is any.
    fn far_guest_address(&self) -> Option<u64> {
        None
    }
}

/// Where rings are that do not fit into the annex's first [`SIZE`] bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hole {
    /// The first position in it, sign-extended.
    pub positions: u64,
    /// From positions to run-time addresses.
    pub distance: i32,
    /// Its bytes.
    pub len: u64,
}

impl Hole {
    /// Run-time address of its beginning.
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.positions.wrapping_add_signed(self.distance as i64)
    }

    pub(super) fn too_small(&self, cpus: u64, size: u64) -> TraceError {
        const CHUNK: u64 = CHUNK_SIZE as u64;
        let most = (self.len / cpus.max(1) / CHUNK * CHUNK).min(MOST_BUFFER);
        TraceError::Buffer { size, most, cpus }
    }
}

/// What is to be mapped into a [`Hole`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Far {
    pub(super) guest_address: u64,
    /// Bytes, a multiple of 2 MiB.
    pub(super) len: u64,
}

/// How large a ring can be that the annex has for each of so many CPUs without memory of its own.
#[must_use]
pub fn usual_buffer(cpus: u64) -> u64 {
    const CHUNK: u64 = CHUNK_SIZE as u64;
    (SIZE - RINGS) / cpus.max(1) / CHUNK * CHUNK
}

/// Bytes of memory that rings of this size need beside the annex's first [`WITH_TABLES`]: none, where
/// they fit in there.
#[must_use]
pub fn far_size(cpus: u64, buffer: Option<u64>) -> u64 {
    match buffer {
        Some(size) if size > usual_buffer(cpus) => {
            size.saturating_mul(cpus).checked_next_multiple_of(PMD_SIZE).unwrap_or(u64::MAX)
        }
        _ => 0,
    }
}

/// How a trampoline finds the control block of its CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Addressing {
    /// The block is at gs base + this (wrapping), on every CPU.
    PerCpu(u64),
    /// By CPU number, through the table at this guest virtual address.
    Table(u64),
    /// By CPU number: the blocks lie side by side from this guest virtual address on.
    Array(u64),
}

/// What lies where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Guest virtual address of the annex.
    pub address: u64,
    /// One ring for each CPU.
    pub rings: Vec<Ring>,
    /// Offset in the annex of each CPU's control block.
    pub controls: Vec<u64>,
    /// How trampolines get at the control blocks.
    pub addressing: Addressing,
    /// From what positions are when they are sign-extended to run-time addresses.
    pub distance: i32,
    /// What the sign-extended position of the annex's first byte would be.
    origin: u64,
}

impl Layout {
    /// For CPUs with these gs bases, in an annex at this guest virtual address, with chunks that are
    /// used up below `spent`.
    ///
    /// # Errors
    /// With no CPU, or more than [`MAX_CPUS`].
    pub fn per_cpu(address: u64, gs_bases: &[u64], spent: u64) -> Result<Self, TraceError> {
        let cpus = gs_bases.len() as u64;
        let rings = rings(address, cpus, spent)?;
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
            Addressing::PerCpu((address + CONTROLS).wrapping_sub(lowest))
        } else {
            offsets = array(cpus);
            Addressing::Table(address + TABLE)
        };
        let controls = offsets.into_iter().map(|offset| CONTROLS + offset).collect();
        Ok(Self { address, rings, controls, addressing, distance: 0, origin: address })
    }

    /// For CPUs that are told by their number, in an annex at this guest virtual
    /// address.
    ///
    /// # Errors
    /// With no CPU, or more than [`MAX_CPUS`].
    pub fn numbered(address: u64, cpus: u64, spent: u64) -> Result<Self, TraceError> {
        let rings = rings(address, cpus, spent)?;
        let controls = array(cpus).into_iter().map(|offset| CONTROLS + offset).collect();
        let addressing = Addressing::Array(address + CONTROLS);
        Ok(Self { address, rings, controls, addressing, distance: 0, origin: address })
    }

    /// The same with rings of `size` bytes, which are in this hole if they do not fit beside the rest.
    ///
    /// # Errors
    /// With a size that is none, or when the hole is too small.
    pub fn with_buffer(mut self, size: u64, hole: &Hole) -> Result<Self, TraceError> {
        let cpus = self.rings.len() as u64;
        let spent = self.rings.first().map_or(0, Ring::spent);
        let far = far_size(cpus, Some(size));
        let start = if far == 0 {
            self.address + RINGS
        } else if far <= hole.len {
            self.distance = hole.distance;
            self.origin = hole.positions.wrapping_sub(WITH_TABLES);
            hole.positions
        } else {
            return Err(hole.too_small(cpus, size));
        };
        let ring = |cpu| Ring::new(start + cpu * size, size, spent);
        let rings = (0..cpus).map(ring).collect::<Option<_>>();
        self.rings = rings.ok_or_else(|| hole.too_small(cpus, size))?;
        Ok(self)
    }

    /// What is to be mapped beside the annex, when its rings are there.
    ///
    /// # Errors
    /// When there is no such memory.
    pub(super) fn far(&self, memory: &dyn Memory) -> Result<Option<Far>, TraceError> {
        let Some(ring) = self.rings.first().filter(|ring| self.offset(ring) >= WITH_TABLES) else {
            return Ok(None);
        };
        let len = far_size(self.rings.len() as u64, Some(ring.size()));
        let guest_address = memory.far_guest_address().ok_or(TraceError::Annex)?;
        Ok(Some(Far { guest_address, len }))
    }

    /// Offset in the annex of `ring`.
    #[must_use]
    pub fn offset(&self, ring: &Ring) -> u64 {
        ring.address().wrapping_sub(self.origin)
    }

    /// Writes control blocks, accounts of chunks and the table into a fresh annex.
    ///
    /// # Errors
    /// When the memory is too small.
    pub fn install(&self, memory: &VolatileSlice<'_>) -> Result<(), TraceError> {
        let far = self.rings.last().map_or(0, |ring| self.offset(ring) + ring.size());
        if (memory.len() as u64) < SIZE.max(far) {
            return Err(TraceError::Annex);
        }
        let write = |offset: u64, word: u64| {
            let offset = usize::try_from(offset).map_err(|_| TraceError::Annex)?;
            memory.write_slice(&word.to_le_bytes(), offset).map_err(|_| TraceError::Annex)
        };
        let account = |at: u64, account: &Front| {
            write(at + front::NEXT as u64, account.next)?;
            write(at + front::ROOM as u64, account.room)?;
            write(at + front::DROPPED as u64, account.dropped)?;
            write(at + front::STATE as u64, account.state)
        };
        if let Addressing::Array(_) = self.addressing {
            // Its next chunk is itself, in which there is never room.
            let full = (self.address + FULL) & u64::from(u32::MAX);
            let next = full | 1 << 32;
            let mut always_full = Front::default();
            (always_full.next, always_full.state) = (next, 1 << 32);
            account(FULL, &always_full)?;
            let head = 1 << 32 | (full & !(CHUNK_SIZE as u64 - 1));
            for number in 0..NUMBERS {
                write(CONTROLS + number * CONTROL_SIZE as u64, head)?;
            }
        }
        for ((cpu, ring), &control) in (0..).zip(&self.rings).zip(&self.controls) {
            let start = self.offset(ring);
            for chunk in 0..ring.chunks() {
                account(start + ring.front_offset(chunk), &ring.front(chunk))?;
            }
            let Control { head, .. } = ring.control();
            write(control, head)?;
            if let Addressing::Table(_) = self.addressing {
                write(TABLE + 8 * cpu, self.address + control)?;
            }
        }
        Ok(())
    }
}

/// Offsets of blocks side by side.
fn array(cpus: u64) -> Vec<u64> {
    (0..cpus).map(|cpu| cpu * CONTROL_SIZE as u64).collect()
}

/// The largest equal rings that fit into an annex at `address`.
fn rings(address: u64, cpus: u64, spent: u64) -> Result<Vec<Ring>, TraceError> {
    if cpus == 0 || cpus > MAX_CPUS {
        return Err(TraceError::Cpus(cpus));
    }
    let size = usual_buffer(cpus);
    let ring = |cpu| Ring::new(address + RINGS + cpu * size, size, spent);
    (0..cpus).map(ring).collect::<Option<_>>().ok_or(TraceError::Annex)
}

const _: () = assert!(
    CONTROLS + NUMBERS * CONTROL_SIZE as u64 <= OPS
        && OPS + (Info::MAX_PROGRAM as u64 + 2) * OPS_SIZE <= RINGS - CHUNK_SIZE as u64
);

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESS: u64 = 0xffff_ffff_8000_0000;

    // Overlapping rings or blocks would mix the records of two CPUs.
    #[test]
    fn every_cpu_count_gets_rings_of_its_own() {
        for cpus in 1..=MAX_CPUS {
            let bases: Vec<_> = (0..cpus).map(|cpu| 0xffff_8880_3fc0_0000 + (cpu << 15)).collect();
            let layout = Layout::per_cpu(ADDRESS, &bases, 256).unwrap();
            assert!(matches!(layout.addressing, Addressing::PerCpu(_)), "{cpus}");
            let mut end = RINGS;
            for ring in &layout.rings {
                assert!(layout.offset(ring) >= end, "{cpus}");
                end = layout.offset(ring) + ring.size();
            }
            assert!(end <= SIZE, "{cpus}");
        }
        assert!(Layout::per_cpu(ADDRESS, &[], 256).is_err());
        assert!(Layout::per_cpu(ADDRESS, &[0; 65], 256).is_err());
    }

    #[test]
    fn the_usual_counts_get_large_rings() {
        let size = |cpus| rings(ADDRESS, cpus, 256).unwrap()[0].size();
        assert_eq!((size(1), size(2), size(3), size(64)), (12 << 20, 6 << 20, 4 << 20, 192 << 10));
    }

    // Rings that overlap each other or the rest of the annex, or lie where positions do not lead.
    #[test]
    fn rings_of_any_size_have_a_place() {
        let holes = [
            Hole { positions: 0xffff_ffff_8000_0000, distance: -0x7fe0_0000, len: 2046 << 20 },
            Hole { positions: 0xffff_ffff_a000_0000, distance: 0, len: 1534 << 20 },
        ];
        for hole in holes {
            for (cpus, size) in
                [(1, LEAST_BUFFER), (1, MOST_BUFFER), (3, 257 << 20), (64, 16 << 10)]
            {
                let bases: Vec<_> =
                    (0..cpus).map(|cpu| 0xffff_8880_3fc0_0000 + (cpu << 15)).collect();
                let layout = Layout::per_cpu(ADDRESS, &bases, 256).unwrap();
                let layout = layout.with_buffer(size, &hole);
                if size < LEAST_BUFFER {
                    assert!(matches!(layout, Err(TraceError::Buffer { .. })));
                    continue;
                }
                let layout = layout.unwrap();
                let far = far_size(cpus, Some(size));
                let (start, end) = match far {
                    0 => (RINGS, SIZE),
                    _ => (WITH_TABLES, WITH_TABLES + far),
                };
                assert_eq!(layout.distance, if far == 0 { 0 } else { hole.distance });
                let mut at = start;
                for ring in &layout.rings {
                    assert_eq!((layout.offset(ring), ring.size()), (at, size));
                    at += size;
                }
                assert!(at <= end, "{cpus} {size:#x}");
            }
            assert_eq!(hole.address() % (2 << 20), 0);
        }
        let layout = Layout::per_cpu(ADDRESS, &[0, 1 << 15], 256).unwrap();
        assert!(matches!(layout.with_buffer(1 << 30, &holes[0]), Err(TraceError::Buffer { .. })));
        assert_eq!(far_size(2, None), 0);
        assert_eq!(far_size(2, Some(usual_buffer(2))), 0);
        assert_eq!(far_size(2, Some(usual_buffer(2) + CHUNK_SIZE as u64)), 14 << 20);
    }

    #[test]
    fn gs_bases_lead_to_their_blocks() {
        let bases = [0xffff_8880_7dc0_0000, 0xffff_8880_7dd0_0000];
        let layout = Layout::per_cpu(ADDRESS, &bases, 256).unwrap();
        let Addressing::PerCpu(distance) = layout.addressing else { panic!() };
        for (base, control) in bases.iter().zip(&layout.controls) {
            assert_eq!(base.wrapping_add(distance), ADDRESS + control);
        }
    }

    #[test]
    fn bases_that_no_constant_serves_go_through_the_table() {
        for bases in [[0x1000, 0x1000], [0x1000, 0x1008], [0x1000, 0x4000_0000]] {
            let layout = Layout::per_cpu(ADDRESS, &bases, 256).unwrap();
            assert!(matches!(layout.addressing, Addressing::Table(_)), "{bases:x?}");
            assert_ne!(layout.controls[0], layout.controls[1]);
        }
    }

    // A CPU whose block is that of another ring writes its records where another one does, and one that is none of
    // ours must find no room.
    #[test]
    fn cpus_find_their_rings_by_their_numbers() {
        let layout = Layout::numbered(ADDRESS, 3, 264).unwrap();
        let Addressing::Array(array) = layout.addressing else { panic!() };
        let mut bytes = vec![0; usize::try_from(SIZE).unwrap()];
        let memory = VolatileSlice::from(&mut bytes[..]);
        let small = memory.subslice(0, memory.len() - 1).unwrap();
        assert!(layout.install(&small).is_err());
        layout.install(&memory).unwrap();
        let word = |at: u64| -> u64 { memory.read_obj(usize::try_from(at).unwrap()).unwrap() };
        let account = |at: u64| {
            [front::NEXT, front::ROOM, front::DROPPED, front::STATE].map(|it| word(at + it as u64))
        };
        // Where the chunk before all rings is used up, behind which it comes again.
        let used_up = 1 << 32 | 0x8000_0000 | (RINGS - CHUNK_SIZE as u64);
        for number in 0..NUMBERS {
            let ring = layout.rings.get(usize::try_from(number).unwrap());
            let head = ring.map_or(used_up, |ring| ring.control().head);
            assert_eq!(word(array - ADDRESS + number * CONTROL_SIZE as u64), head, "{number}");
        }
        let again = 1 << 32 | 0x8000_0000 | (RINGS - FRONT_SIZE as u64);
        assert_eq!(account(RINGS - FRONT_SIZE as u64), [again, 0, 0, 1 << 32]);
        for (ring, chunk) in
            layout.rings.iter().flat_map(|it| (0..it.chunks()).map(move |n| (it, n)))
        {
            let Front { next, room, dropped, state, .. } = ring.front(chunk);
            let at = layout.offset(ring) + ring.front_offset(chunk);
            assert_eq!(account(at), [next, room, dropped, state], "{chunk}");
        }
        let controls = layout.controls.iter().map(|control| ADDRESS + control);
        assert!(controls.eq((0..3).map(|cpu| array + cpu * CONTROL_SIZE as u64)));
    }

    // The kernels' images end anywhere: rings must fit behind each.
    #[test]
    fn rings_fit_wherever_the_annex_begins() {
        for address in (0..64).map(|pmd| 0xffff_ffff_8200_0000 + pmd * PMD_SIZE) {
            for cpus in [1, 2, 3, 8, MAX_CPUS] {
                let layout = Layout::numbered(address, cpus, 264).unwrap();
                let first = layout.rings.first().unwrap();
                let last = layout.rings.last().unwrap();
                assert!(layout.offset(first) >= RINGS);
                assert!(layout.offset(last) + last.size() <= SIZE);
            }
        }
    }
}
