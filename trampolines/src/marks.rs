//! Marks of calls that have gone on in another function: the layout of their tables.

use crate::histogram::Calls;

/// Calls that have gone on, by a jump, in a function whose own calls are not traced: so its return is recorded where it
/// is theirs, and nowhere else. A mark is found by the stack pointer at the function's entry, which no other open call
/// has.
///
/// Each stack pointer has one place, and who comes later takes it: marks of calls whose ends are never seen need no care,
/// and who loses one to another has no end. So many are open at a time that this is one in thousands.
///
/// ```text
/// + 0              places of 8 bytes: the stack pointer less 8, or 0
/// + Marks::TARGETS places of 8 bytes: the run-time address of a function in which calls go on that jump through a pointer,
///                  and of which all ends are looked at, or 0
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Marks {
    /// A multiple of 4096; with its length a sign-extended number of 32 bits.
    pub address: u64,
}

impl Marks {
    /// Bytes of the tables.
    pub const SIZE: u64 = Self::TARGETS + 8 * Self::TARGET_PLACES;
    /// Where that of functions begins.
    pub const TARGETS: u64 = 8 << Self::BITS;
    /// Its places.
    pub const TARGET_PLACES: u64 = 1 << Self::TARGET_BITS;
    /// Bits that number one of those.
    pub(crate) const TARGET_BITS: i8 = 12;
    /// Bits that number a place.
    pub(crate) const BITS: i8 = 15;
    /// What stands in a place is so much below the stack pointer: that is where programs have it at a jump.
    pub const LESS: u8 = 8;

    /// The place of a function among functions, which it may share with others: one of them can be there.
    #[must_use]
    pub fn target_place(address: u64) -> u64 {
        #[allow(clippy::cast_possible_truncation, reason = "the low half")]
        let spread = (address as u32).wrapping_mul(Calls::SPREAD.cast_unsigned());
        u64::from(spread >> (32 - Self::TARGET_BITS))
    }
}

/// Which calls are marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MarkIf {
    /// All.
    Always,
    /// Those that go on in a function of the [table](Marks::TARGETS), at a jump through a pointer (x86-64).
    Known,
    /// None: only what another call may have left is taken back.
    Never,
}

/// What errors call the table.
pub(crate) const MARKS: &str = "the table of marks";
