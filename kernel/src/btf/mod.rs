//! BTF: the kernel's description of its own types.
//!
//! Parsing notes the position of each type. Names are compared by their offsets, because the string
//! table holds every string once.

use std::collections::VecDeque;
use std::ops::Range;

use super::KernelError;
use super::read::{index, text_at, u16_at, u32_at};

mod functions;
mod types;
mod words;

pub(crate) use functions::{Functions, Named};
pub(crate) use types::{Int, Kind, Seen};
pub(crate) use words::{Word, Words};

/// The types of a kernel.
#[derive(Debug)]
pub struct Btf {
    bytes: Vec<u8>,
    strings: Range<usize>,
    /// Offset of each type; number 0 is `void` and has none.
    types: Vec<u32>,
}

const INT: u32 = 1;
const POINTER: u32 = 2;
const ARRAY: u32 = 3;
const STRUCT: u32 = 4;
const UNION: u32 = 5;
const ENUM: u32 = 6;
const FORWARD: u32 = 7;
const TYPEDEF: u32 = 8;
const VOLATILE: u32 = 9;
const CONST: u32 = 10;
const RESTRICT: u32 = 11;
const FUNCTION: u32 = 12;
const PROTOTYPE: u32 = 13;
const FLOAT: u32 = 16;
const DECLARATION_TAG: u32 = 17;
const TYPE_TAG: u32 = 18;
const ENUM64: u32 = 19;

/// Types refer to each other, damaged ones without end.
const DEPTH: usize = 32;

/// Unnamed types looked into for one member. The largest structures have a few dozen; damaged
/// ones hold each other, twice, and so on.
const UNNAMED: usize = 1000;

/// The fixed part of a type.
#[derive(Clone, Copy)]
struct Type {
    name: u32,
    kind: u32,
    members: usize,
    /// Member offsets carry a bit-field size.
    flag: bool,
    /// Size, or the number of the type referred to.
    size: u32,
    /// Offset behind the fixed part.
    rest: usize,
}

/// A member of a struct or union.
#[derive(Clone, Copy)]
pub(crate) struct Member {
    name: u32,
    /// Its type.
    pub(crate) number: u32,
    /// Where it begins in the struct that was asked for, in bits.
    pub(crate) bits: u32,
    /// How many bits it has, if it is a bit field; otherwise 0.
    pub(crate) width: u32,
}

impl Btf {
    /// Reads the contents of a `.BTF` section.
    pub fn parse(bytes: Vec<u8>) -> Result<Self, KernelError> {
        let (table, strings) = parts(&bytes)?;
        let mut types = vec![0];
        add_types(&bytes, table, &mut types)?;
        Ok(Self { bytes, strings, types })
    }

    /// These types and those of a module, whose `.BTF` section counts its types and strings from
    /// the end of the kernel's own (tools/lib/bpf: split BTF).
    ///
    /// # Errors
    /// When what the module has is damaged.
    pub(crate) fn with_split(&self, split: &[u8]) -> Result<Self, KernelError> {
        let (table, strings) = parts(split)?;
        let bad = |reason: &str| KernelError::BadBtf(reason.to_owned());
        let own = self.bytes.get(..self.strings.end).ok_or_else(|| bad("no strings"))?;
        let [table, more] = [table, strings].map(|part| split.get(part).unwrap_or_default());
        // Strings must be one run. Types keep their places.
        let bytes = [own, more, table].concat();
        if u32::try_from(bytes.len()).is_err() {
            return Err(bad("larger than 4 GiB"));
        }
        // As every writer of BTF has them.
        if self.types.iter().any(|&at| index(at.into()) >= own.len()) {
            return Err(bad("the kernel's strings are before its types"));
        }
        let mut types = self.types.clone();
        add_types(&bytes, own.len() + more.len()..bytes.len(), &mut types)?;
        Ok(Self { bytes, strings: self.strings.start..own.len() + more.len(), types })
    }

    /// The section's bytes, as `/sys/kernel/btf/vmlinux` shows them in the guest.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// How many types there are, `void` included.
    pub fn len(&self) -> usize {
        self.types.len()
    }

    /// Never.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The size of a struct or union.
    pub fn struct_size(&self, name: &str) -> Option<u32> {
        self.compound(name).map(|t| t.size)
    }

    /// Where a member lies in a struct or union, in bytes; for a bit field, the byte that its
    /// first bit is in. Members of unnamed structs and unions count as the outer one's own, and
    /// `a.b` is the member `b` of the member `a`.
    pub fn member_offset(&self, strukt: &str, member: &str) -> Option<u32> {
        let mut compound = self.compound(strukt)?;
        let mut bits = 0_u32;
        let mut path = member.split('.').peekable();
        while let Some(name) = path.next() {
            let member = self.member(compound, self.string_offset(name)?)?;
            bits = bits.checked_add(member.bits)?;
            if path.peek().is_some() {
                compound = self.resolve(member.number)?;
            }
        }
        Some(bits / 8)
    }

    /// A struct or union by name; a complete one always has a size and members.
    fn compound(&self, name: &str) -> Option<Type> {
        let name = self.string_offset(name)?;
        (1..self.types.len())
            .filter_map(|number| self.get(number))
            .find(|t| t.name == name && t.is_compound())
    }

    fn get(&self, number: usize) -> Option<Type> {
        if number == 0 {
            return None;
        }
        fixed_part(&self.bytes, index((*self.types.get(number)?).into()))
    }

    /// Finds a member by name.
    fn member(&self, compound: Type, name: u32) -> Option<Member> {
        // Breadth first: a member of the outer type comes before any further in.
        let mut queue = VecDeque::from([(0_u32, compound)]);
        for _ in 0..UNNAMED {
            let (base, compound) = queue.pop_front()?;
            for member in self.members(compound) {
                let Some(bits) = base.checked_add(member.bits) else { continue };
                if member.name == name {
                    return Some(Member { bits, ..member });
                }
                if member.name == 0 && queue.len() < UNNAMED {
                    queue.extend(self.resolve(member.number).map(|inner| (bits, inner)));
                }
            }
        }
        None
    }

    fn members(&self, compound: Type) -> impl Iterator<Item = Member> {
        (0..compound.members).map_while(move |i| {
            let at = compound.rest + 12 * i;
            let offset = u32_at(&self.bytes, at + 8)?;
            Some(Member {
                name: u32_at(&self.bytes, at)?,
                number: u32_at(&self.bytes, at + 4)?,
                bits: if compound.flag { offset & 0x00ff_ffff } else { offset },
                width: if compound.flag { offset >> 24 } else { 0 },
            })
        })
    }

    /// The struct or union behind a type, seen through typedefs and qualifiers.
    fn resolve(&self, number: u32) -> Option<Type> {
        let mut current = self.get(index(number.into()))?;
        for _ in 0..DEPTH {
            match current.kind {
                STRUCT | UNION => return Some(current),
                TYPEDEF | VOLATILE | CONST | RESTRICT | TYPE_TAG => {
                    current = self.get(index(current.size.into()))?;
                }
                _ => return None,
            }
        }
        None
    }

    /// Where a string stands in the string table.
    fn string_offset(&self, text: &str) -> Option<u32> {
        if text.is_empty() {
            return None;
        }
        let strings = &self.bytes[self.strings.clone()];
        let entry = [b"\0", text.as_bytes(), b"\0"].concat();
        let before = memchr::memmem::find(strings, &entry)?;
        u32::try_from(before + 1).ok()
    }

    /// The name of a type, for messages and tests.
    pub fn type_name(&self, number: u32) -> Option<&str> {
        let name = index(self.get(index(number.into()))?.name.into());
        text_at(&self.bytes[self.strings.clone()], name, 512)
    }
}

/// Where types and strings are in a `.BTF` section.
fn parts(bytes: &[u8]) -> Result<(Range<usize>, Range<usize>), KernelError> {
    const MAGIC: u16 = 0xeb9f;
    let bad = |reason: &str| KernelError::BadBtf(reason.to_owned());
    if u16_at(bytes, 0) != Some(MAGIC) || bytes.get(2) != Some(&1) {
        return Err(bad("no BTF header of version 1"));
    }
    let field =
        |offset| u32_at(bytes, offset).map(|v| index(v.into())).ok_or_else(|| bad("short header"));
    let header = field(4)?;
    let part = |offset: usize, len: usize| {
        let start = header.checked_add(offset)?;
        let end = start.checked_add(len)?;
        (end <= bytes.len()).then_some(start..end)
    };
    let table = part(field(8)?, field(12)?).ok_or_else(|| bad("the types are cut off"))?;
    let strings = part(field(16)?, field(20)?).ok_or_else(|| bad("the strings are cut off"))?;
    if u32::try_from(bytes.len()).is_err() {
        return Err(bad("larger than 4 GiB"));
    }
    Ok((table, strings))
}

/// Adds where each type of a table begins.
fn add_types(bytes: &[u8], table: Range<usize>, types: &mut Vec<u32>) -> Result<(), KernelError> {
    let bad = |reason: &str| KernelError::BadBtf(reason.to_owned());
    let mut position = table.start;
    while position < table.end {
        let Some(fixed) = fixed_part(bytes, position) else {
            return Err(bad("a type is cut off"));
        };
        let Some(extra) = fixed.extra() else {
            let kind = fixed.kind;
            return Err(KernelError::BadBtf(format!(
                "type {} of unknown kind {kind}",
                types.len()
            )));
        };
        types.extend(u32::try_from(position));
        position = fixed.rest + extra;
    }
    if position != table.end {
        return Err(bad("the last type is cut off"));
    }
    Ok(())
}

fn fixed_part(bytes: &[u8], at: usize) -> Option<Type> {
    let info = u32_at(bytes, at + 4)?;
    Some(Type {
        name: u32_at(bytes, at)?,
        kind: (info >> 24) & 0x1f,
        members: index((info & 0xffff).into()),
        flag: info >> 31 == 1,
        size: u32_at(bytes, at + 8)?,
        rest: at + 12,
    })
}

impl Type {
    fn is_compound(self) -> bool {
        matches!(self.kind, STRUCT | UNION)
    }

    /// How many bytes follow the fixed part.
    fn extra(self) -> Option<usize> {
        /// Variables, and the sections that they are in.
        const VARIABLE: u32 = 14;
        const SECTION: u32 = 15;
        Some(match self.kind {
            POINTER | FORWARD | TYPEDEF | VOLATILE | CONST | RESTRICT | FUNCTION | FLOAT
            | TYPE_TAG => 0,
            INT | VARIABLE | DECLARATION_TAG => 4,
            ARRAY => 12,
            ENUM | PROTOTYPE => 8 * self.members,
            STRUCT | UNION | SECTION | ENUM64 => 12 * self.members,
            _ => return None,
        })
    }
}
