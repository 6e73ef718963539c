//! Nested calls: the layout of what tells how deep a call is, by kernel stack.

use crate::program::{Point, ProgramError};

/// What errors call the table of [`Nesting`].
pub(crate) const NESTS: &str = "the table of nested calls";

/// Only calls that are nested so: in a call of a root, and not too deep.
///
/// The table has a row for each kernel stack, found by the stack pointer at a function's entry. A row has the stack
/// pointers of the calls that are open there, outermost first: they do not rise from one level to the next, and what is
/// below the stack pointer is left over of a call that has ended unseen. So nothing has to be counted down, and calls
/// that begin and end while they are not looked at do no harm.
///
/// ```text
/// + 0   roots that found the row of their stack in use by another stack
/// + 64  rows: the stack pointer of each level's call, or 0
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nesting {
    /// Of the table: a multiple of 4096; with its length a sign-extended number of 32 bits.
    pub address: u64,
    /// The length of a kernel stack is 2 to this: 12 to 20.
    pub stack_bits: u8,
    /// Calls of one more level are left out; `None`: of no level.
    pub depth: Option<u8>,
    /// What the program's call is.
    pub call: Call,
}

/// A call, as far as it matters to how deep others are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Call {
    /// One that begins the first level if that is not open, and else the next one.
    Root {
        /// One with the stack pointer of the first level begins that again: who had it went on in something whose end was
        /// not seen.
        again: bool,
    },
    /// One that begins the next level if the first one is open.
    Inner,
    /// One whose end is not seen. Its level has its stack pointer less one, so that what its caller calls next begins that
    /// level again, as it is not below.
    Endless {
        /// It may begin the first level.
        root: bool,
    },
    /// One that is left, with all that has gone on in its place.
    Ends,
    /// One that is left for a function that looks at the table as well: that is a level deeper, and ends both.
    GoesOn,
    /// One that may be left so: only the first level stays.
    MayGoOn,
}

impl Nesting {
    /// Most levels.
    pub const MAX_DEPTH: u8 = 16;
    /// Where roots are counted that found no row.
    pub const CROWDED: u64 = 0;
    /// Where the first row is.
    pub const ROWS: u64 = 64;
    /// Bits that number a row: stacks that are 512 MiB apart have the same.
    pub(crate) const BITS: u32 = 15;

    /// Bytes of the table for this depth.
    #[must_use]
    pub fn size(depth: Option<u8>) -> u64 {
        Self::ROWS + (1 << (Self::BITS + row_bits(depth)))
    }

    /// Levels that are kept.
    pub(crate) fn levels(self) -> u8 {
        self.depth.unwrap_or(1)
    }

    /// The length of a row is 2 to this.
    pub(crate) fn row_bits(self) -> u32 {
        row_bits(self.depth)
    }

    /// Bytes of a stack.
    pub(crate) fn stack(self) -> i32 {
        1 << self.stack_bits.min(20)
    }

    pub(crate) fn check(self, point: Point) -> Result<(), ProgramError> {
        let refused = |what| Err(ProgramError::Nesting(what, point));
        if !(12..=20).contains(&self.stack_bits) {
            return refused("knows stacks of 4 KiB to 1 MiB");
        }
        if !(1..=Self::MAX_DEPTH).contains(&self.levels()) {
            return refused("has 1 to 16 levels");
        }
        if !self.address.is_multiple_of(4096) {
            return refused("needs a table at a multiple of 4096");
        }
        let is_there = match self.call {
            Call::Root { .. } | Call::Inner | Call::Endless { .. } => point == Point::Entry,
            Call::Ends => point != Point::Entry,
            Call::GoesOn | Call::MayGoOn => point == Point::Tail,
        };
        if !is_there {
            return refused("is for calls that do other things there");
        }
        let end = self.address.wrapping_add(Self::size(self.depth));
        let reached = |address: u64| i32::try_from(address.cast_signed()).is_ok();
        if !reached(self.address) || !reached(end) || end < self.address {
            return Err(ProgramError::Range(NESTS, self.address));
        }
        Ok(())
    }
}

fn row_bits(depth: Option<u8>) -> u32 {
    3 + u32::from(depth.unwrap_or(1)).next_power_of_two().trailing_zeros()
}
