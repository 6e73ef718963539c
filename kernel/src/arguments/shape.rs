//! The interpretation of a value's bytes.

use std::sync::Arc;

/// The values of an enum and their names, shared between all values of that type.
pub type EnumNames = Arc<[(i64, String)]>;

/// How the bytes of a value are to be read. All is little-endian; of a word larger than the
/// value, the value is the low bytes, and what the others hold is undefined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shape {
    /// An integer of 1, 2, 4 or 8 bytes.
    Signed {
        /// Its size.
        bytes: u8,
    },
    /// An integer of 1, 2, 4 or 8 bytes.
    Unsigned {
        /// Its size.
        bytes: u8,
    },
    /// One byte, true unless 0.
    Bool,
    /// One byte of text.
    Char,
    /// An integer whose values have names.
    Enum {
        /// Its size.
        bytes: u8,
        /// Whether it has negative values.
        signed: bool,
        /// The names, in the order of the declaration; of several for one value, the first holds.
        names: EnumNames,
    },
    /// An address of 8 bytes.
    Pointer,
    /// Text up to the first NUL, or as much of it as was fetched.
    Text,
    /// A bit field: `width` bits from bit `shift` on, of a word of up to 8 bytes.
    Bits {
        /// The lowest bit.
        shift: u8,
        /// How many bits, 1 to 64.
        width: u8,
        /// Whether the highest bit is a sign.
        signed: bool,
    },
    /// Bytes of which no more is known.
    Raw {
        /// How many.
        bytes: u8,
    },
}
