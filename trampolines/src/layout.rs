//! Layout of rings and records in the annex.
//!
//! A ring is a [`Header`] and a run of [`Record`] slots of one guest CPU; beside
//! it the CPU has a [`Control`] block, found from its gs base. Positions in a
//! ring are 64-bit words: the low half is the low half of a slot's guest virtual
//! address, the high half counts laps. They only grow, they can be compared as
//! integers, and since two rings share no address, a position also names its
//! ring. That is what makes a reservation by one compare-and-exchange safe
//! against interrupts, NMIs, preemption and migration at once.
//!
//! A ring is handed out in chunks. A position at a multiple of the chunk size
//! means: this chunk is used up, see the ring's header whether the next one is
//! free. So the common case needs no limit to compare with.
//!
//! ```text
//!  Control (per CPU)                    ring, at a multiple of the stride
//!  head ── next slot to reserve ───┐    ┌─────────────────┐ base
//!                                  │    │ Header: base,   │
//!                                  │    │ end, dropped,   │
//!                                  │    │ room (by VMM)   │
//!                                  │    ├─────────────────┤ base + HEADER_SIZE
//!                                  └──► │ 32-byte slots   │ committed when
//!                                       │                 │ `function` != 0
//!                                       ├─────────────────┤ chunk
//!                                       │ unused          │
//!                                       ├─────────────────┤ chunk + HEADER_SIZE
//!                                       │ slots           │
//!                                       └─────────────────┘ end
//! ```

use core::mem::{offset_of, size_of};

/// Bytes of one record slot.
pub const RECORD_SIZE: usize = size_of::<Record>();
/// Bytes of one control block.
pub const CONTROL_SIZE: usize = size_of::<Control>();
/// One lap in a position word.
pub const LAP: u64 = 1 << 32;

/// One entry record, written by the trampoline, 32 bytes.
///
/// `function` is written last and publishes the record (x86 keeps stores in
/// order). The reader sets it back to 0 before it hands the slot back.
#[repr(C, align(32))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Raw clock (x86: TSC) at the hit, in ticks.
    pub timestamp: u64,
    /// Low half of the return address into the function, i.e. site + 5 on x86.
    pub function: u32,
    /// Low half of the address the function returns to.
    pub caller: u32,
    /// The guest's `current`, a `task_struct` pointer.
    pub task: u64,
    /// `current->pid`.
    pub pid: u32,
    /// Overwrite policy only: the lap in which the slot was written.
    pub lap: u32,
}

/// What trampolines exchange to reserve a slot, one per CPU, 64 bytes.
///
/// Everything in here and in [`Header`] is guest-writable: the VMM checks
/// whatever it reads back.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Control {
    /// Position of the next slot to reserve, or the end of a used-up chunk.
    pub head: u64,
    reserved: [u64; 7],
}

/// First bytes of every ring. A ring starts at a multiple of the ring stride, so
/// that its header is found from any position in it.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Low half of the ring's address. Set once by the VMM.
    pub base: u64,
    /// Low half of the address after the ring. Set once by the VMM.
    pub end: u64,
    /// Records dropped because the ring was full. Written by trampolines.
    pub dropped: u64,
    reserved: [u64; 5],
    /// First chunk that may not be opened: one lap after the chunk that is being
    /// drained. Written by the VMM alone; on a cache line of its own.
    pub room: u64,
    reserved_room: [u64; 7],
}

/// Bytes of a ring's header, and of the unused front of every other chunk.
pub const HEADER_SIZE: usize = size_of::<Header>();
/// Bytes of a chunk.
pub const CHUNK_SIZE: usize = 16 << 10;
/// Slots in a chunk.
pub const CHUNK_SLOTS: u64 = ((CHUNK_SIZE - HEADER_SIZE) / RECORD_SIZE) as u64;

const CHUNK: u64 = CHUNK_SIZE as u64;
const FRONT: u64 = HEADER_SIZE as u64;
const SLOT: u64 = RECORD_SIZE as u64;

/// Where a ring lies, and the arithmetic of its positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ring {
    address: u64,
    stride: u64,
}

impl Ring {
    /// A ring of `stride` bytes at guest virtual `address`. `None` unless the
    /// stride is a power of two of at least two chunks, the address a multiple
    /// of it, and all of the ring in the upper (or the lower) 2 GiB and not at
    /// their very end.
    #[must_use]
    pub const fn new(address: u64, stride: u64) -> Option<Self> {
        let upper = address >> 31;
        let sound = stride.is_power_of_two()
            && stride >= 2 * CHUNK
            && address & (stride - 1) == 0
            && (upper == 0 || upper == u64::MAX >> 31)
            && (address & (LAP - 1)) + stride < LAP;
        if sound { Some(Self { address, stride }) } else { None }
    }

    /// Guest virtual address.
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Bytes from this ring to the next.
    #[must_use]
    pub const fn stride(&self) -> u64 {
        self.stride
    }

    /// Slots in the ring.
    #[must_use]
    pub const fn slots(&self) -> u64 {
        self.stride / CHUNK * CHUNK_SLOTS
    }

    const fn base(&self) -> u64 {
        self.address & (LAP - 1)
    }

    /// The position of the very first slot.
    #[must_use]
    pub const fn start(&self) -> u64 {
        self.base() + FRONT
    }

    /// The header with which the ring starts.
    #[must_use]
    pub fn header(&self) -> Header {
        Header {
            base: self.base(),
            end: self.base() + self.stride,
            room: self.room(self.start()),
            ..Header::default()
        }
    }

    /// The control block with which the ring starts.
    #[must_use]
    pub fn control(&self) -> Control {
        Control { head: self.start(), ..Control::default() }
    }

    /// Whether a head can be at `position`: at a slot or at the end of a chunk.
    #[must_use]
    pub const fn is_position(&self, position: u64) -> bool {
        let offset = (position & (LAP - 1)).wrapping_sub(self.base());
        let in_chunk = offset % CHUNK;
        offset > 0
            && offset <= self.stride
            && offset.is_multiple_of(SLOT)
            && (in_chunk == 0 || in_chunk >= FRONT)
    }

    /// The slot at which the record with `position` is: a position at the end of
    /// a chunk becomes the first slot of the next.
    #[must_use]
    pub const fn slot(&self, position: u64) -> u64 {
        if position & (CHUNK - 1) != 0 {
            position
        } else if position & (LAP - 1) == self.base() + self.stride {
            ((position >> 32).wrapping_add(1) << 32) | self.start()
        } else {
            position.wrapping_add(FRONT)
        }
    }

    /// Byte offset in the ring of a slot's position.
    #[must_use]
    pub const fn offset(&self, position: u64) -> u64 {
        (position & (LAP - 1)).wrapping_sub(self.base()) & (self.stride - 1)
    }

    /// Slots from `position` to the end of its chunk.
    #[must_use]
    pub const fn left_in_chunk(&self, position: u64) -> u64 {
        (CHUNK - (position & (CHUNK - 1))) / SLOT
    }

    /// The slots of a chunk that have been reserved when the head is at `position` in it, or at
    /// its end: where the first is, and how many there are.
    #[must_use]
    pub const fn reserved_in_chunk(&self, position: u64) -> (u64, u64) {
        let end = match position & (CHUNK - 1) {
            0 => CHUNK,
            end => end,
        };
        (position.wrapping_sub(end).wrapping_add(FRONT), end.saturating_sub(FRONT) / SLOT)
    }

    /// What [`Header::room`] is while the next slot to drain is at `tail`.
    #[must_use]
    pub const fn room(&self, tail: u64) -> u64 {
        (tail & !(CHUNK - 1)).wrapping_add(LAP)
    }

    /// How many slots lie before `position`, from the very first lap on.
    #[must_use]
    pub const fn count(&self, position: u64) -> u64 {
        let slot = self.slot(position);
        let offset = self.offset(slot);
        (slot >> 32)
            .wrapping_mul(self.slots())
            .wrapping_add(offset / CHUNK * CHUNK_SLOTS)
            .wrapping_add((offset % CHUNK).saturating_sub(FRONT) / SLOT)
    }
}

/// Offsets in [`Control`], bytes.
pub mod control {
    use super::{Control, offset_of};
    /// [`Control::head`]
    pub const HEAD: usize = offset_of!(Control, head);
}

/// Offsets in [`Header`], bytes.
pub mod header {
    use super::{Header, offset_of};
    /// [`Header::base`]
    pub const BASE: usize = offset_of!(Header, base);
    /// [`Header::end`]
    pub const END: usize = offset_of!(Header, end);
    /// [`Header::dropped`]
    pub const DROPPED: usize = offset_of!(Header, dropped);
    /// [`Header::room`]
    pub const ROOM: usize = offset_of!(Header, room);
}

/// Offsets in [`Record`], bytes.
pub mod record {
    use super::{Record, offset_of};
    /// [`Record::timestamp`]
    pub const TIMESTAMP: usize = offset_of!(Record, timestamp);
    /// [`Record::function`]
    pub const FUNCTION: usize = offset_of!(Record, function);
    /// [`Record::caller`]
    pub const CALLER: usize = offset_of!(Record, caller);
    /// [`Record::task`]
    pub const TASK: usize = offset_of!(Record, task);
    /// [`Record::pid`]
    pub const PID: usize = offset_of!(Record, pid);
    /// [`Record::lap`]
    pub const LAP: usize = offset_of!(Record, lap);
}

const _: () = assert!(RECORD_SIZE == 32 && CONTROL_SIZE == 64 && HEADER_SIZE == 128);
const _: () = assert!(CHUNK_SIZE.is_power_of_two() && HEADER_SIZE.is_multiple_of(RECORD_SIZE));

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ADDRESS: u64 = 0xffff_ffff_8040_0000;

    #[test]
    fn rings_must_be_addressable_by_sign_extension() {
        assert!(Ring::new(ADDRESS, 1 << 20).is_some());
        assert!(Ring::new(0x4000_0000, 1 << 20).is_some());
        assert!(Ring::new(0x8000_0000, 1 << 20).is_none(), "would sign-extend to elsewhere");
        assert!(Ring::new(ADDRESS + 4096, 1 << 20).is_none(), "unaligned");
        assert!(Ring::new(ADDRESS, CHUNK).is_none(), "a ring of one chunk could never be drained");
        assert!(Ring::new(0xffff_ffff_fff0_0000, 1 << 20).is_none(), "end would overflow");
    }

    proptest! {
        // A slot skipped or named twice would lose or invent a record.
        #[test]
        fn walking_the_ring_counts_every_slot_once(shift in 15_u32..20, steps in 1_u64..200_000) {
            let ring = Ring::new(ADDRESS, 1 << shift).unwrap();
            let mut position = ring.start();
            for step in 0..steps {
                prop_assert_eq!(ring.count(position), step);
                prop_assert!(ring.is_position(position));
                let (first, count) = ring.reserved_in_chunk(position);
                prop_assert!(count <= CHUNK_SLOTS);
                prop_assert_eq!(ring.count(first) + count, step);
                let slot = ring.slot(position);
                prop_assert!(ring.offset(slot) + SLOT <= ring.stride());
                position = slot + SLOT;
            }
        }

        #[test]
        fn arithmetic_on_hostile_positions_does_not_panic(position: u64) {
            let ring = Ring::new(ADDRESS, 1 << 16).unwrap();
            let _ = (ring.is_position(position), ring.count(position), ring.room(position));
            prop_assert!(ring.reserved_in_chunk(position).1 <= CHUNK_SLOTS);
            prop_assert!(ring.offset(ring.slot(position)) < ring.stride());
        }
    }
}
