//! Layout of rings and records in the annex.
//!
//! A ring belongs to one guest CPU and is a run of [`CHUNK_SIZE`] chunks. Each chunk has its own
//! account, the [`Front`], at its upper end; records fill it **downwards** from there. So the end
//! of a record is known when it is reserved, whatever its length is, and the fields that all
//! records have are at fixed places below that end. A chunk is used up when a position in it is
//! below [`Ring::spent`]: one test of the position alone, and a record of [`MAX_RECORD`] bytes
//! always fits above it.
//!
//! Positions are 64-bit words. The low half is the low half of the address down to which the chunk
//! is in use. The high half counts laps from 1 on. Two rings share no address, and laps only grow,
//! so a position never repeats. That makes a reservation by one compare-and-exchange safe against
//! interrupts, NMIs, preemption and migration alike.
//!
//! A chunk is all zeros when it is opened. So a record is published when its [`Common::site`] is
//! not 0. A record that is only reserved, whose length is not known yet, is a run of zero words: a
//! reader that looks for the record below skips them, since the word that ends a record is written
//! first.
//!
//! ```text
//!  Control (per CPU)               chunk, at a multiple of its size
//!  head ── in use down to ────┐    ┌──────────────┐ + 0
//!                             │    │ free         │
//!                             └──► ├──────────────┤
//!                                  │ newest       │ each with its length and a word that
//!                                  │ ...          │ publishes it at its upper end
//!                                  │ oldest       │
//!                                  ├──────────────┤ + CHUNK_SIZE - FRONT_SIZE
//!                                  │ Front        │
//!                                  └──────────────┘
//! ```

use core::mem::{offset_of, size_of};

/// Bytes that every record has; those of further fields are below them.
pub const COMMON_SIZE: usize = size_of::<Common>();
/// Bytes of the longest record.
pub const MAX_RECORD: usize = 256;
/// Bytes of one control block.
pub const CONTROL_SIZE: usize = size_of::<Control>();
/// In place of a lap: a chunk that is about to be opened. See [`Front::state`].
pub const CLAIMED: u64 = u32::MAX as u64;
/// One lap in a position word.
pub const LAP: u64 = 1 << 32;
/// Bytes of a chunk.
pub const CHUNK_SIZE: usize = 16 << 10;
/// Bytes of a chunk's account, at its upper end.
pub const FRONT_SIZE: usize = size_of::<Front>();

const CHUNK: u64 = CHUNK_SIZE as u64;
const TOP: u64 = (CHUNK_SIZE - FRONT_SIZE) as u64;

/// The upper 32 bytes of every record.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Common {
    /// The guest's `current`, a `task_struct` pointer.
    pub task: u64,
    /// Low half of the address to which the function returns.
    pub caller: u32,
    /// `current->pid`.
    pub pid: u32,
    /// Raw clock (x86: TSC) at the hit, in ticks.
    pub timestamp: u64,
    /// Low half of an address that tells the site: for entries where the program returns to.
    /// Not 0; written last, which publishes the record.
    pub site: u32,
    /// See [`Info`]. Written first.
    pub info: u32,
}

/// What a record says of itself.
///
/// ```text
/// bits 0..5   its length in units of 8 bytes, less 1
/// bits 5..16  number of the program that wrote it
/// bits 16..24 for how many tracers, less 1 (overwrite only)
/// bits 24..32 overwrite: low bits of the lap; else [`Info::DRAINED`]
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info(pub u32);

impl Info {
    /// Highest number of a program.
    pub const MAX_PROGRAM: u16 = (1 << 11) - 1;
    /// The tag of records that are drained while the guest runs. As the upper byte of a word it is
    /// also [`MAX_RECORD`] shifted as trampolines of riscv64 shift a position.
    pub const DRAINED: u8 = 4;
    /// The bits of the length and of the tag: what records of one kind have in common.
    pub const SHAPE: u32 = 0xff00_001f;

    /// Of a record of `size` bytes by `program` for `tracers` (1 to 256).
    #[must_use]
    pub const fn new(size: usize, program: u16, tracers: u16, tag: u8) -> Self {
        debug_assert!(size.is_multiple_of(8) && size >= COMMON_SIZE && size <= MAX_RECORD);
        debug_assert!(program <= Self::MAX_PROGRAM && tracers >= 1 && tracers <= 256);
        #[allow(clippy::cast_possible_truncation, reason = "at most 31")]
        let words = (size / 8 - 1) as u32;
        let tracers = (tracers - 1) as u32;
        Self(words | (program as u32) << 5 | tracers << 16 | (tag as u32) << 24)
    }

    /// Bytes of the record: 8 to [`MAX_RECORD`].
    #[must_use]
    pub const fn size(self) -> usize {
        ((self.0 & 31) as usize + 1) * 8
    }

    /// Who wrote it.
    #[must_use]
    pub const fn program(self) -> u16 {
        (self.0 >> 5 & 0x7ff) as u16
    }

    /// For how many tracers; 1 where records are drained.
    #[must_use]
    pub const fn tracers(self) -> u64 {
        (self.0 >> 16 & 0xff) as u64 + 1
    }

    /// The low bits of the lap, or [`Info::DRAINED`].
    #[must_use]
    pub const fn tag(self) -> u8 {
        (self.0 >> 24) as u8
    }
}

/// What trampolines exchange to reserve a record, one per CPU, 64 bytes.
///
/// Everything in here and in [`Front`] is guest-writable: the VMM checks whatever it reads back.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Control {
    /// Position down to which the chunk is in use.
    pub head: u64,
    /// Not 0: who finds the ring full waits for room, if its program can. Written by the VMM alone.
    pub wait: u64,
    reserved: [u64; 6],
}

/// The account of a chunk.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Front {
    /// What leads from the lap of a position in this chunk to the start of the next chunk: the low
    /// half of its address, and one lap if it is the ring's first. Set once by the VMM.
    pub next: u64,
    /// Drained rings: the position with which this chunk may be opened. Written by the VMM alone.
    pub room: u64,
    /// Records dropped after those in this chunk, because the next one was not free.
    pub dropped: u64,
    /// Overwritten rings: in the high half the lap in which the chunk was opened last (0: in none,
    /// it is free; [`CLAIMED`]: someone is clearing it, so there is nothing in it); in the low half
    /// how many records were overwritten in it, modulo 2^32.
    pub state: u64,
    reserved: [u64; 4],
}

/// Where a ring lies, and the arithmetic of its positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ring {
    address: u64,
    size: u64,
    spent: u64,
}

impl Ring {
    /// A ring of `size` bytes at guest virtual `address`, in which a chunk is used up below
    /// `spent` bytes. `None` unless it is of at least two chunks, all of it in the upper (or the
    /// lower) 2 GiB and not at their very end, and a longest record fits above `spent`.
    #[must_use]
    pub const fn new(address: u64, size: u64, spent: u64) -> Option<Self> {
        let upper = address >> 31;
        let sound = size.is_multiple_of(CHUNK)
            && size >= 2 * CHUNK
            && address.is_multiple_of(CHUNK)
            && (upper == 0 || upper == u64::MAX >> 31)
            && size < LAP
            && (address & (LAP - 1)) + size < LAP
            && spent >= MAX_RECORD as u64
            && spent <= 2 * MAX_RECORD as u64;
        if sound { Some(Self { address, size, spent }) } else { None }
    }

    /// Guest virtual address.
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// A chunk is used up at positions less than this many bytes from its beginning.
    #[must_use]
    pub const fn spent(&self) -> u64 {
        self.spent
    }

    /// How many chunks there are.
    #[must_use]
    pub const fn chunks(&self) -> u64 {
        self.size / CHUNK
    }

    /// Bytes of records that the ring holds, if none is wasted.
    #[must_use]
    pub const fn capacity(&self) -> u64 {
        self.chunks() * (TOP - self.spent)
    }

    const fn base(&self) -> u64 {
        self.address & (LAP - 1)
    }

    /// The position with which a chunk is opened in a lap.
    #[must_use]
    pub const fn opening(&self, chunk: u64, lap: u64) -> u64 {
        lap << 32 | (self.base() + chunk * CHUNK + TOP)
    }

    /// The very first position.
    #[must_use]
    pub const fn start(&self) -> u64 {
        self.opening(0, 1)
    }

    /// The account with which a chunk starts out.
    #[must_use]
    pub const fn front(&self, chunk: u64) -> Front {
        let last = chunk + 1 == self.chunks();
        let next = if last { self.opening(0, 1) } else { self.opening(chunk + 1, 0) };
        let state = if chunk == 0 { LAP } else { 0 };
        Front { next, room: self.opening(chunk, 1), dropped: 0, state, reserved: [0; 4] }
    }

    /// The control block with which the ring starts.
    #[must_use]
    pub const fn control(&self) -> Control {
        Control { head: self.start(), wait: 0, reserved: [0; 6] }
    }

    /// Whether a head can be at `position`.
    #[must_use]
    pub const fn is_position(&self, position: u64) -> bool {
        let offset = (position & (LAP - 1)).wrapping_sub(self.base());
        offset < self.size
            && offset.is_multiple_of(8)
            && offset % CHUNK <= TOP
            && position >> 32 != 0
    }

    /// The number of the chunk of a position.
    #[must_use]
    pub const fn chunk(&self, position: u64) -> u64 {
        (position & (LAP - 1)).wrapping_sub(self.base()) / CHUNK % self.chunks()
    }

    /// Byte offset in the ring of a position; that of its end where it can be none.
    #[must_use]
    pub const fn offset(&self, position: u64) -> u64 {
        let offset = (position & (LAP - 1)).wrapping_sub(self.base());
        if offset < self.size { offset } else { self.size }
    }

    /// Byte offset in the ring of a chunk's account.
    #[must_use]
    pub const fn front_offset(&self, chunk: u64) -> u64 {
        chunk * CHUNK + TOP
    }

    /// Whether the chunk of a position is used up there.
    #[must_use]
    pub const fn is_spent(&self, position: u64) -> bool {
        position % CHUNK < self.spent
    }

    /// The position at which the chunk after that of `position` is opened.
    #[must_use]
    pub const fn next_opening(&self, position: u64) -> u64 {
        let chunk = self.chunk(position);
        let lap = position >> 32;
        if chunk + 1 == self.chunks() {
            self.opening(0, lap.wrapping_add(1) & (LAP - 1))
        } else {
            self.opening(chunk + 1, lap)
        }
    }

    /// Positions in the order in which they come: laps, chunks, bytes.
    #[must_use]
    pub const fn order(&self, position: u64) -> u128 {
        let lap = (position >> 32) as u128;
        let down = (CHUNK - position % CHUNK) as u128;
        (lap * self.chunks() as u128 + self.chunk(position) as u128) * CHUNK as u128 + down
    }
}

/// Offsets in [`Control`], bytes.
pub mod control {
    use super::{Control, offset_of};
    /// [`Control::head`]
    pub const HEAD: usize = offset_of!(Control, head);
    /// [`Control::wait`]
    pub const WAIT: usize = offset_of!(Control, wait);
}

/// Offsets in [`Front`], bytes.
pub mod front {
    use super::{Front, offset_of};
    /// [`Front::next`]
    pub const NEXT: usize = offset_of!(Front, next);
    /// [`Front::room`]
    pub const ROOM: usize = offset_of!(Front, room);
    /// [`Front::dropped`]
    pub const DROPPED: usize = offset_of!(Front, dropped);
    /// [`Front::state`]
    pub const STATE: usize = offset_of!(Front, state);
}

/// How far below the end of a record its fields are, bytes.
pub mod below {
    use super::{COMMON_SIZE, Common, offset_of};
    /// [`Common::task`]
    pub const TASK: usize = COMMON_SIZE - offset_of!(Common, task);
    /// [`Common::caller`]
    pub const CALLER: usize = COMMON_SIZE - offset_of!(Common, caller);
    /// [`Common::pid`]
    pub const PID: usize = COMMON_SIZE - offset_of!(Common, pid);
    /// [`Common::timestamp`]
    pub const TIMESTAMP: usize = COMMON_SIZE - offset_of!(Common, timestamp);
    /// [`Common::site`]
    pub const SITE: usize = COMMON_SIZE - offset_of!(Common, site);
    /// [`Common::info`]
    pub const INFO: usize = COMMON_SIZE - offset_of!(Common, info);
}

const _: () = assert!(COMMON_SIZE == 32 && CONTROL_SIZE == 64 && FRONT_SIZE == 64);
const _: () = assert!(CHUNK_SIZE.is_power_of_two() && MAX_RECORD.is_power_of_two());
const _: () = assert!(MAX_RECORD / 8 == 32, "the length has 5 bits");

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ADDRESS: u64 = 0xffff_ffff_8040_0000;

    #[test]
    fn rings_must_be_addressable_by_sign_extension() {
        let ring = |address, size| Ring::new(address, size, 256);
        assert!(ring(ADDRESS, 1 << 20).is_some());
        assert!(ring(0x4000_0000, 1 << 20).is_some());
        assert!(ring(0x8000_0000, 1 << 20).is_none(), "would sign-extend to elsewhere");
        assert!(ring(ADDRESS + 4096, 1 << 20).is_none(), "unaligned");
        assert!(ring(ADDRESS, CHUNK).is_none(), "a ring of one chunk could never be drained");
        assert!(ring(0xffff_ffff_fff0_0000, 1 << 20).is_none(), "end would overflow");
        assert!(Ring::new(ADDRESS, 1 << 20, 128).is_none(), "a record would not fit");
    }

    // A head of a hostile guest that is taken for one at the ring's end is read behind it.
    #[test]
    fn a_ring_ends_where_it_ends() {
        let ring = Ring::new(ADDRESS, 3 * CHUNK, 264).unwrap();
        assert_eq!(ring.capacity(), 3 * (CHUNK - 64 - 264));
        let at = |offset: u64| 1 << 32 | ((ADDRESS & (LAP - 1)) + offset);
        assert!(ring.is_position(at(3 * CHUNK - 64)));
        assert!(!ring.is_position(at(3 * CHUNK - 56)), "in the last account");
        assert!(!ring.is_position(at(3 * CHUNK)));
        assert!(!ring.is_position(at(0) - 8) && !ring.is_position(at(1)));
        assert!(!ring.is_position(at(8) & (LAP - 1)), "in no lap");
    }

    #[test]
    fn what_a_record_says_of_itself_is_read_back() {
        assert_eq!(Info::MAX_PROGRAM, 2047, "11 bits");
        for (size, program, tracers, tag) in [(32, 0, 1, 4), (256, 2047, 256, 255), (72, 9, 3, 0)] {
            let info = Info::new(size, program, tracers, tag);
            assert_eq!((info.size(), info.program()), (size, program));
            assert_eq!((info.tracers(), info.tag()), (u64::from(tracers), tag));
        }
    }

    proptest! {
        // A place used twice or a chunk left out would lose or invent a record.
        #[test]
        fn walking_the_ring_goes_through_every_chunk(
            chunks in 2_u64..40, sizes in prop::collection::vec(4_u64..33, 1..4000)
        ) {
            let ring = Ring::new(ADDRESS, chunks * CHUNK, 256).unwrap();
            let mut position = ring.start();
            let mut order = ring.order(position);
            for size in sizes {
                prop_assert!(ring.is_position(position));
                if ring.is_spent(position) {
                    let front = ring.front(ring.chunk(position));
                    let next = (position & !(LAP - 1)) + front.next;
                    prop_assert_eq!(next, ring.next_opening(position));
                    position = next;
                    prop_assert!(!ring.is_spent(position));
                } else {
                    position -= size * 8;
                }
                prop_assert!(ring.order(position) > order);
                order = ring.order(position);
            }
        }

        #[test]
        fn arithmetic_on_hostile_positions_does_not_panic(position: u64) {
            let ring = Ring::new(ADDRESS, 1 << 16, 264).unwrap();
            let _ = (ring.is_position(position), ring.order(position), ring.is_spent(position));
            prop_assert!(ring.chunk(position) < ring.chunks());
            prop_assert!(ring.offset(position) <= ring.size());
            prop_assert!(ring.is_position(ring.next_opening(position)) || position >> 32 == 0
                || position >> 32 == LAP - 1);
        }
    }
}
