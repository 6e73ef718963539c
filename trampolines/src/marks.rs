//! Marks of calls that have gone on in another function: the layout of their table.

/// Calls that have gone on, by a jump, in a function whose own calls are not traced: so its return is recorded where it
/// is theirs, and nowhere else. A mark is found by the stack pointer at the function's entry, which no other open call
/// has.
///
/// Each stack pointer has one place, and who comes later takes it: marks of calls whose ends are never seen need no care,
/// and who loses one to another has no end. So many are open at a time that this is one in thousands.
///
/// ```text
/// + 0   places of 8 bytes: the stack pointer less 8, or 0
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Marks {
    /// A multiple of 4096; with its length a sign-extended number of 32 bits.
    pub address: u64,
}

impl Marks {
    /// Bytes of the table.
    pub const SIZE: u64 = 8 << Self::BITS;
    /// Bits that number a place.
    pub(crate) const BITS: i8 = 15;
    /// What stands in a place is so much below the stack pointer: that is where programs have it at a jump.
    pub const LESS: u8 = 8;
}

/// What errors call the table.
pub(crate) const MARKS: &str = "the table of marks";
