//! C types, with typedefs and qualifiers resolved.

use std::collections::VecDeque;

use super::super::read::{index, text_at, u32_at};
use super::{
    ARRAY, Btf, CONST, DEPTH, ENUM, ENUM64, FLOAT, FORWARD, INT, Member, POINTER, PROTOTYPE,
    RESTRICT, STRUCT, TYPE_TAG, TYPEDEF, Type, UNION, UNNAMED, VOLATILE,
};

/// What a type is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Void,
    Int(Int),
    /// To the type of this number.
    Pointer(u32),
    /// `count` is 0 where the length is not part of the type.
    Array {
        element: u32,
        count: u32,
    },
    /// A struct or union.
    Compound {
        union: bool,
        size: u32,
    },
    /// Of this many bytes.
    Enum {
        bytes: u32,
        signed: bool,
    },
    /// A struct or union of which only the name is known.
    Forward,
    Float {
        bytes: u32,
    },
    /// The type of a function.
    Prototype,
    /// A variable, a function: nothing that a value may have as its type.
    Other,
}

/// An integer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Int {
    pub(crate) bytes: u32,
    /// Fewer bits than its bytes have: a bit field of older type information, which begins this
    /// many bits behind where its member does.
    pub(crate) bits: u32,
    pub(crate) skip: u32,
    pub(crate) signed: bool,
    pub(crate) bool: bool,
}

impl Int {
    /// Whether it has fewer bits than its bytes.
    pub(crate) fn is_field(self) -> bool {
        self.bits > 0 && u64::from(self.bits) < 8 * u64::from(self.bytes)
    }
}

/// A type seen through typedefs and qualifiers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    /// The number of what is behind them.
    pub(crate) number: u32,
    pub(crate) kind: Kind,
    /// What was seen on the way.
    pub(crate) constant: bool,
    pub(crate) typedef: bool,
    /// The type tag `user`: what is there is a process's memory.
    pub(crate) user: bool,
}

impl Btf {
    /// Sees through typedefs and qualifiers. None for damaged types only.
    pub(crate) fn see(&self, number: u32) -> Option<Seen> {
        let (mut constant, mut typedef, mut user) = (false, false, false);
        let mut number = number;
        for _ in 0..DEPTH {
            if number == 0 {
                return Some(Seen { number, kind: Kind::Void, constant, typedef, user });
            }
            let this = self.get(index(number.into()))?;
            match this.kind {
                CONST => constant = true,
                TYPEDEF => typedef = true,
                TYPE_TAG => user |= self.text(this.name) == "user",
                VOLATILE | RESTRICT => {}
                _ => {
                    let kind = self.kind(this)?;
                    return Some(Seen { number, kind, constant, typedef, user });
                }
            }
            number = this.size;
        }
        None
    }

    fn kind(&self, this: Type) -> Option<Kind> {
        let at = |offset| u32_at(&self.bytes, this.rest + offset);
        Some(match this.kind {
            INT => {
                let encoding = at(0)?;
                Kind::Int(Int {
                    bytes: this.size,
                    bits: encoding & 0xff,
                    skip: encoding >> 16 & 0xff,
                    signed: encoding >> 24 & 1 != 0,
                    bool: encoding >> 24 & 4 != 0,
                })
            }
            POINTER => Kind::Pointer(this.size),
            ARRAY => Kind::Array { element: at(0)?, count: at(8)? },
            STRUCT | UNION => Kind::Compound { union: this.kind == UNION, size: this.size },
            ENUM | ENUM64 => Kind::Enum { bytes: this.size, signed: this.flag },
            FORWARD => Kind::Forward,
            FLOAT => Kind::Float { bytes: this.size },
            PROTOTYPE => Kind::Prototype,
            _ => Kind::Other,
        })
    }

    /// How large a value of a type is, in bytes; none for `void`, functions and what is only
    /// named.
    pub(crate) fn size_of(&self, number: u32) -> Option<u64> {
        let mut number = number;
        let mut count = 1_u64;
        for _ in 0..DEPTH {
            let size = match self.see(number)?.kind {
                Kind::Int(Int { bytes, .. })
                | Kind::Enum { bytes, .. }
                | Kind::Float { bytes }
                | Kind::Compound { size: bytes, .. } => bytes,
                Kind::Pointer(_) => 8,
                Kind::Array { element, count: own } => {
                    count = count.checked_mul(own.into())?;
                    number = element;
                    continue;
                }
                Kind::Void | Kind::Forward | Kind::Prototype | Kind::Other => return None,
            };
            return count.checked_mul(size.into());
        }
        None
    }

    /// The name of a type, without any typedef; empty for those without.
    pub(crate) fn name_of(&self, number: u32) -> &str {
        self.get(index(number.into())).map_or("", |this| self.text(this.name))
    }

    /// The type as C writes it, for messages: `struct file *`.
    pub(crate) fn describe(&self, number: u32) -> String {
        let mut stars = String::new();
        let mut number = number;
        let mut word = "";
        for _ in 0..DEPTH {
            let Some(this) = self.get(index(number.into())) else { break };
            word = match this.kind {
                STRUCT => "struct ",
                UNION => "union ",
                FORWARD => ["struct ", "union "][usize::from(this.flag)],
                ENUM | ENUM64 => "enum ",
                ARRAY => "array",
                PROTOTYPE => "function",
                POINTER => {
                    stars.push('*');
                    number = this.size;
                    continue;
                }
                VOLATILE | CONST | RESTRICT | TYPE_TAG => {
                    number = this.size;
                    continue;
                }
                _ => "",
            };
            break;
        }
        let name = match (self.name_of(number), word) {
            ("", "") => "void",
            ("", "array" | "function") => "",
            ("", _) => "without a name",
            (name, _) => name,
        };
        let blank = if stars.is_empty() { "" } else { " " };
        format!("{word}{name}{blank}{stars}")
    }

    /// The members of a struct or union as they are written, unnamed ones too, which have no
    /// name.
    pub(crate) fn members_of(&self, number: u32) -> impl Iterator<Item = (&str, Member)> {
        let compound = self.get(index(number.into())).filter(|this| this.is_compound());
        let members = compound.into_iter().flat_map(|this| self.members(this));
        members.map(|member| (self.text(member.name), member))
    }

    /// A member by its name, those of unnamed members last; the whole struct's bit offset.
    pub(crate) fn member_of(&self, number: u32, name: &str) -> Option<Member> {
        self.walk(number, |found, _| found == name)
    }

    /// The names of all members, those of unnamed members too.
    pub(crate) fn member_names(&self, number: u32) -> Vec<&str> {
        const MOST: usize = 10_000;
        let mut names = Vec::new();
        self.walk(number, |name, _| {
            names.extend(Some(name).filter(|name| !name.is_empty()));
            names.len() >= MOST
        });
        names
    }

    /// The first member that is wanted, from the outside in.
    fn walk<'a>(
        &'a self,
        number: u32,
        mut wanted: impl FnMut(&'a str, &Member) -> bool,
    ) -> Option<Member> {
        /// Members looked at. The largest structures have some hundred; damaged ones hold each
        /// other without end.
        const MOST: usize = 100_000;
        let compound = self.get(index(number.into())).filter(|this| this.is_compound())?;
        let mut queue = VecDeque::from([(0_u32, compound)]);
        let mut left = MOST;
        while let Some((base, compound)) = queue.pop_front() {
            for member in self.members(compound) {
                left = usize::checked_sub(left, 1)?;
                let Some(bits) = base.checked_add(member.bits) else { continue };
                let name = self.text(member.name);
                if wanted(name, &member) {
                    return Some(Member { bits, ..member });
                }
                if name.is_empty() && queue.len() < UNNAMED {
                    queue.extend(self.resolve(member.number).map(|inner| (bits, inner)));
                }
            }
        }
        None
    }

    /// The names and values of an enum.
    pub(crate) fn enumerators(&self, number: u32) -> impl Iterator<Item = (i64, &str)> {
        let found = self.get(index(number.into()));
        let this = found.filter(|this| matches!(this.kind, ENUM | ENUM64));
        this.into_iter().flat_map(move |this| {
            (0..this.members).map_while(move |which| self.enumerator_at(this, which))
        })
    }

    /// One of an enum's values, and its name.
    pub(super) fn enumerator_at(&self, this: Type, which: usize) -> Option<(i64, &str)> {
        let step = if this.kind == ENUM { 8 } else { 12 };
        let at = this.rest + step * which;
        let low = u32_at(&self.bytes, at + 4)?;
        let value = match (this.kind, this.flag) {
            (ENUM, true) => low.cast_signed().into(),
            (ENUM, false) => low.into(),
            _ => {
                let high = u32_at(&self.bytes, at + 8)?;
                (u64::from(high) << 32 | u64::from(low)).cast_signed()
            }
        };
        Some((value, self.text(u32_at(&self.bytes, at)?)))
    }

    /// The value of an enumerator, of whichever enum.
    pub(crate) fn enumerator(&self, name: &str) -> Option<i64> {
        let numbers = (1..self.types.len()).filter_map(|number| u32::try_from(number).ok());
        let mut all = numbers.flat_map(|number| self.enumerators(number));
        all.find_map(|(value, known)| (known == name).then_some(value))
    }

    /// The parameters of a function's type, as name and type, and what it returns.
    pub(crate) fn signature(&self, number: u32) -> Option<(Vec<(&str, u32)>, u32)> {
        /// More than any function of any kernel has.
        const MOST: usize = 64;
        let this = self.get(index(number.into()))?;
        if this.kind != PROTOTYPE || this.members > MOST {
            return None;
        }
        let parameter = |i: usize| {
            let at = this.rest + 8 * i;
            Some((self.text(u32_at(&self.bytes, at)?), u32_at(&self.bytes, at + 4)?))
        };
        let mut parameters: Vec<_> = (0..this.members).map(parameter).collect::<Option<_>>()?;
        // The dots of a variadic function.
        if parameters.last() == Some(&("", 0)) {
            parameters.pop();
        }
        Some((parameters, this.size))
    }

    /// The only complete struct or union of a name, if there is no other.
    pub(crate) fn complete(&self, forward: u32) -> Option<u32> {
        let name = self.get(index(forward.into()))?.name;
        let mut found = (1..self.types.len()).filter(|&number| {
            self.get(number).is_some_and(|this| this.is_compound() && this.name == name)
        });
        let number = found.next().filter(|_| name != 0)?;
        found.next().is_none().then(|| u32::try_from(number).ok()).flatten()
    }

    /// A name, which is to be shown on terminals: what cannot be one is none.
    pub(super) fn text(&self, name: u32) -> &str {
        /// Longer than any name in C.
        const LONGEST: usize = 512;
        let strings = self.bytes.get(self.strings.clone()).unwrap_or_default();
        let text = text_at(strings, index(name.into()), LONGEST).unwrap_or_default();
        // `unsigned char` is a name, too.
        let is_part = |byte: u8| byte.is_ascii_graphic() || byte == b' ';
        if text.bytes().all(is_part) { text } else { "" }
    }
}
