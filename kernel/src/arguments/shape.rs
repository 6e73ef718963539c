//! How the bytes of a value are to be read.
//!
//! Nothing here needs a kernel image: who decodes records needs the same.

use std::borrow::Cow;
use std::fmt;
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

/// What a value is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shown<'a> {
    /// An integer.
    Signed(i64),
    /// An integer.
    Unsigned(u64),
    /// A truth value.
    Bool(bool),
    /// A character.
    Char(u8),
    /// The name of an enum's value, and the value.
    Name(&'a str, i64),
    /// An address.
    Pointer(u64),
    /// Text without its NUL; what is not UTF-8 is replaced.
    Text(Cow<'a, str>),
    /// Bytes, in the order of memory.
    Raw(&'a [u8]),
}

impl Shape {
    /// Reads a value from what was fetched for it. None when it is cut short; of text, all is
    /// taken that is there.
    pub fn show<'a>(&'a self, fetched: &'a [u8]) -> Option<Shown<'a>> {
        Some(match *self {
            Self::Signed { bytes } => Shown::Signed(signed(fetched, bytes)?),
            Self::Unsigned { bytes } => Shown::Unsigned(unsigned(fetched, bytes)?),
            Self::Bool => Shown::Bool(*fetched.first()? != 0),
            Self::Char => Shown::Char(*fetched.first()?),
            Self::Enum { bytes, signed: has_sign, ref names } => {
                let word = unsigned(fetched, bytes)?;
                let value = if has_sign { signed(fetched, bytes)? } else { word.cast_signed() };
                match names.iter().find(|(named, _)| *named == value) {
                    Some((_, name)) => Shown::Name(name, value),
                    None if has_sign => Shown::Signed(value),
                    None => Shown::Unsigned(word),
                }
            }
            Self::Pointer => Shown::Pointer(unsigned(fetched, 8)?),
            Self::Text => {
                let end = fetched.iter().position(|&byte| byte == 0).unwrap_or(fetched.len());
                Shown::Text(String::from_utf8_lossy(fetched.get(..end)?))
            }
            Self::Bits { shift, width, signed } => {
                let len = u8::try_from(fetched.len().min(8)).ok()?;
                if width == 0 || u32::from(shift) + u32::from(width) > 8 * u32::from(len) {
                    return None;
                }
                let rest = 64 - u32::from(width);
                let bits = unsigned(fetched, len)? >> shift << rest;
                match signed {
                    true => Shown::Signed(bits.cast_signed() >> rest),
                    false => Shown::Unsigned(bits >> rest),
                }
            }
            Self::Raw { bytes } => Shown::Raw(fetched.get(..bytes.into())?),
        })
    }
}

/// The low bytes of a word, 8 at most.
fn unsigned(fetched: &[u8], bytes: u8) -> Option<u64> {
    let bytes = usize::from(bytes);
    let low = fetched.get(..bytes).filter(|low| (1..=8).contains(&low.len()))?;
    Some(low.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte)))
}

fn signed(fetched: &[u8], bytes: u8) -> Option<i64> {
    let rest = 64 - 8 * u32::from(bytes.clamp(1, 8));
    Some((unsigned(fetched, bytes)? << rest).cast_signed() >> rest)
}

/// As C writes it: decimal integers, addresses in hex, names of enums, text in quotes.
impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Signed(value) => write!(f, "{value}"),
            Self::Unsigned(value) => write!(f, "{value}"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Name(name, _) => f.write_str(name),
            Self::Pointer(address) => write!(f, "{address:#x}"),
            Self::Char(byte) => match byte {
                0 => f.write_str("'\\0'"),
                b'\'' => f.write_str("'\\''"),
                byte => write!(f, "'{}'", byte.escape_ascii()),
            },
            Self::Text(ref text) => {
                f.write_str("\"")?;
                for c in text.chars() {
                    match c {
                        '"' | '\\' => write!(f, "\\{c}")?,
                        '\n' => f.write_str("\\n")?,
                        '\t' => f.write_str("\\t")?,
                        '\r' => f.write_str("\\r")?,
                        // Else a guest could steer the terminal.
                        c if c.is_control() => write!(f, "\\x{:02x}", u32::from(c))?,
                        c => write!(f, "{c}")?,
                    }
                }
                f.write_str("\"")
            }
            // A word, or an area of memory.
            Self::Raw(bytes) => match u8::try_from(bytes.len()).ok() {
                Some(len @ (1 | 2 | 4 | 8)) => {
                    write!(f, "{:#x}", unsigned(bytes, len).unwrap_or_default())
                }
                _ => {
                    for (i, byte) in bytes.iter().enumerate() {
                        let blank = if i == 0 { "" } else { " " };
                        write!(f, "{blank}{byte:02x}")?;
                    }
                    Ok(())
                }
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text(shape: &Shape, fetched: &[u8]) -> String {
        shape.show(fetched).map_or("none".to_owned(), |shown| shown.to_string())
    }

    // What every record shows goes through here: a wrong sign, or high bytes of a register taken
    // for the value's own, would be in all output.
    #[test]
    fn words_are_read_as_their_types_say() {
        let names: EnumNames =
            [(0, "READ".to_owned()), (-1, "NONE".to_owned()), (0, "ALIAS".to_owned())].into();
        let word = 0xffff_ffff_8000_00fe_u64.to_le_bytes();
        let one = [1, 0, 0, 0];
        let signed = Shape::Enum { bytes: 4, signed: true, names: names.clone() };
        let short = Shape::Enum { bytes: 1, signed: false, names };
        for (shape, bytes, expected) in [
            (Shape::Signed { bytes: 1 }, &word[..], "-2"),
            (Shape::Signed { bytes: 2 }, &word, "254"),
            (Shape::Signed { bytes: 4 }, &word, "-2147483394"),
            (Shape::Signed { bytes: 8 }, &word, "-2147483394"),
            (Shape::Unsigned { bytes: 1 }, &word, "254"),
            (Shape::Unsigned { bytes: 4 }, &word, "2147483902"),
            (Shape::Unsigned { bytes: 8 }, &word, "18446744071562068222"),
            (Shape::Unsigned { bytes: 8 }, &word[..7], "none"),
            (Shape::Unsigned { bytes: 9 }, &[0; 16], "none"),
            (Shape::Unsigned { bytes: 0 }, &word, "none"),
            (Shape::Bool, &word, "true"),
            (Shape::Bool, &[0, 1], "false"),
            (Shape::Bool, &[], "none"),
            (Shape::Char, b"a", "'a'"),
            (Shape::Char, b"\n", "'\\n'"),
            (Shape::Char, b"'", "'\\''"),
            (Shape::Char, &word, "'\\xfe'"),
            (Shape::Char, &[0], "'\\0'"),
            (signed.clone(), &[0; 8], "READ"),
            (signed.clone(), &[0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0], "NONE"),
            (signed, &word, "-2147483394"),
            (short, &word, "254"),
            (Shape::Pointer, &word, "0xffffffff800000fe"),
            (Shape::Pointer, &[0; 8], "0x0"),
            (Shape::Text, b"a\"b\\\n\x1b[m\xff\0rest", "\"a\\\"b\\\\\\n\\x1b[m\u{fffd}\""),
            (Shape::Text, b"cut", "\"cut\""),
            (Shape::Text, b"", "\"\""),
            (Shape::Bits { shift: 1, width: 3, signed: false }, &word[..1], "7"),
            (Shape::Bits { shift: 1, width: 3, signed: true }, &word[..1], "-1"),
            (Shape::Bits { shift: 0, width: 1, signed: true }, &one, "-1"),
            (Shape::Bits { shift: 0, width: 64, signed: false }, &word, "18446744071562068222"),
            (Shape::Bits { shift: 7, width: 2, signed: false }, &word[..1], "none"),
            (Shape::Bits { shift: 0, width: 0, signed: false }, &word, "none"),
            (Shape::Raw { bytes: 8 }, &word, "0xffffffff800000fe"),
            (Shape::Raw { bytes: 3 }, &word, "fe 00 00"),
            (Shape::Raw { bytes: 16 }, &word, "none"),
        ] {
            assert_eq!(text(&shape, bytes), expected, "{shape:?} {bytes:x?}");
        }
    }

    proptest! {
        // A shape may come out of a damaged stream.
        #[test]
        fn no_shape_panics(
            a in any::<u8>(),
            b in any::<u8>(),
            signed in any::<bool>(),
            bytes in prop::collection::vec(any::<u8>(), 0..20),
        ) {
            let names = EnumNames::from([]);
            for shape in [
                Shape::Signed { bytes: a },
                Shape::Unsigned { bytes: a },
                Shape::Bool,
                Shape::Char,
                Shape::Enum { bytes: a, signed, names },
                Shape::Pointer,
                Shape::Text,
                Shape::Bits { shift: a, width: b, signed },
                Shape::Raw { bytes: a },
            ] {
                text(&shape, &bytes);
            }
        }
    }
}
