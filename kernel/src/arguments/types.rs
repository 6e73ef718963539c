//! Derives the shape of a value from its type.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use super::super::btf::{Btf, Int, Kind, Seen};
use super::shape::{EnumNames, Shape};

/// The limit of nested structures, since damaged ones may be endless.
const DEPTH: usize = 32;

/// The names of enums that have been asked for, by the numbers of the types.
#[derive(Debug)]
pub(super) struct Enums {
    known: HashMap<u32, EnumNames>,
    /// How many more bytes names may have: in damaged information they could fill the memory.
    room: usize,
}

impl Default for Enums {
    fn default() -> Self {
        /// Ten times what all enums of a kernel come to.
        const ROOM: usize = 64 << 20;
        Self { known: HashMap::new(), room: ROOM }
    }
}

impl Enums {
    /// None is a name too many: the values are shown as numbers.
    fn names(&mut self, btf: &Btf, number: u32) -> EnumNames {
        if let Some(names) = self.known.get(&number) {
            return names.clone();
        }
        let mut names = Vec::new();
        for (value, name) in btf.enumerators(number) {
            let size = name.len() + size_of::<(i64, String)>();
            let Some(room) = self.room.checked_sub(size) else { break };
            self.room = room;
            names.push((value, name.to_owned()));
        }
        let names: EnumNames = names.into();
        self.known.insert(number, names.clone());
        names
    }
}

/// Text that a pointer leads to, or that an array holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Letters {
    /// `char`.
    Plain,
    /// `unsigned char`, by that name.
    Unsigned,
    /// Another type of one byte, `u8` for one: rather data.
    Bytes,
    /// No bytes at all.
    None,
}

/// The types of a kernel and how their values are shown.
#[derive(Clone, Copy)]
pub(super) struct Types<'a> {
    pub(super) btf: &'a Btf,
    pub(super) enums: &'a Mutex<Enums>,
}

impl Types<'_> {
    /// How a scalar is shown. None for all others, and for integers of 16 bytes.
    pub(super) fn scalar(&self, seen: Seen) -> Option<Shape> {
        let word = |bytes: u32| match bytes {
            1 | 2 | 4 | 8 => u8::try_from(bytes).ok(),
            _ => None,
        };
        Some(match seen.kind {
            Kind::Int(Int { bytes: 1, bool: true, .. }) => Shape::Bool,
            Kind::Int(Int { bytes: 1, .. }) if self.btf.name_of(seen.number) == "char" => {
                Shape::Char
            }
            Kind::Int(int) if int.signed => Shape::Signed { bytes: word(int.bytes)? },
            Kind::Int(int) => Shape::Unsigned { bytes: word(int.bytes)? },
            Kind::Pointer(_) => Shape::Pointer,
            Kind::Enum { bytes, signed } => {
                let bytes = word(bytes)?;
                let mut enums = self.enums.lock().unwrap_or_else(PoisonError::into_inner);
                Shape::Enum { bytes, signed, names: enums.names(self.btf, seen.number) }
            }
            _ => return None,
        })
    }

    /// The type itself, or what is the only member of such a struct, as `kuid_t` and `atomic_t`
    /// are: then the value is the member's.
    pub(super) fn inner(&self, number: u32) -> Option<Seen> {
        let mut seen = self.btf.see(number)?;
        for _ in 0..DEPTH {
            let Kind::Compound { size, .. } = seen.kind else { break };
            let mut members = self.btf.members_of(seen.number);
            let (Some((_, only)), None) = (members.next(), members.next()) else { break };
            let whole = self.btf.size_of(only.number) == Some(size.into());
            match self.btf.see(only.number) {
                // Arrays stay a struct: there is no value in them that could stand for it.
                Some(inner) if whole && only.bits == 0 && only.width == 0 => match inner.kind {
                    Kind::Array { .. } => break,
                    _ => seen = inner,
                },
                _ => break,
            }
        }
        Some(seen)
    }

    /// What text elements of this type would be.
    pub(super) fn letters(&self, element: u32) -> Letters {
        match self.btf.see(element) {
            Some(Seen { kind: Kind::Int(Int { bytes: 1, bool, .. }), number, typedef, .. }) => {
                match self.btf.name_of(number) {
                    "char" => Letters::Plain,
                    "unsigned char" | "signed char" if !typedef => Letters::Unsigned,
                    _ if bool => Letters::None,
                    _ => Letters::Bytes,
                }
            }
            _ => Letters::None,
        }
    }

    /// Whether a pointer to this leads to text that does not change, and in the kernel:
    /// `const char *`. A `char *` may be room for text to come.
    pub(super) fn is_text(&self, target: u32) -> bool {
        let constant = self.btf.see(target).is_some_and(|seen| seen.constant && !seen.user);
        constant && self.letters(target) == Letters::Plain
    }
}
