//! Converts positions in chunks and records to displacements of instructions, on any architecture.

use crate::layout::FRONT_SIZE;

/// A size or an offset of the layout.
#[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "small constants")]
pub(crate) const fn small(value: usize) -> i32 {
    value as i32
}

/// How far below its end a field of a record is.
pub(crate) const fn at(below: usize) -> i32 {
    -small(below)
}

/// From the last byte of a chunk to its account.
pub(crate) const fn account(field: usize) -> i32 {
    small(field) - (small(FRONT_SIZE) - 1)
}
