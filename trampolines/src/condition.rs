//! Conditions: which calls a program records. They are evaluated before a record is reserved, so
//! that a call that does not match costs a few instructions and writes nothing.

/// What must be true of a call.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Condition {
    /// All of these are; none is nothing to be false.
    All(Vec<Condition>),
    /// One of these at least is.
    Any(Vec<Condition>),
    /// A single one.
    Test(Test),
}

/// Something that is compared.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Test {
    /// An integer with a constant.
    Number {
        /// The integer.
        operand: Operand,
        /// How they must compare.
        relation: Relation,
        /// The constant, in the operand's own width and sign, extended to 64 bits.
        value: u64,
    },
    /// Whether the function returns into this one.
    Caller {
        /// Link address of the function.
        start: u64,
        /// Its length in bytes.
        len: u32,
        /// Whether it must, or must not.
        inside: bool,
    },
    /// Bytes of the task, such as its name.
    Bytes {
        /// Where they begin.
        offset: u32,
        /// What they must be; `None` is any but 0.
        bytes: Vec<Option<u8>>,
        /// Whether they must be that, or must not.
        equal: bool,
    },
    /// Whether the string behind an argument, a pointer of the kernel's own, is this as a task gets it for its name:
    /// what is behind [`Condition::MAX_BYTES`] less one is cut off.
    Text {
        /// Its number, as that of [`Field::Argument`](crate::Field::Argument): in a register.
        argument: u8,
        /// As in [`Test::Bytes`]; with the NUL at its end, unless more may follow.
        bytes: Vec<Option<u8>>,
    },
    /// Whether the task is in the set of those that are [followed](crate::family).
    Followed {
        /// Where in a task its process id is.
        pid: u32,
        /// Whether it must, or must not.
        inside: bool,
    },
}

/// An integer that a program can look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Operand {
    /// The number of the CPU: 4 bytes, unsigned.
    Cpu,
    /// 4 bytes of the task, signed, at this offset.
    Task(u32),
    /// An argument.
    Argument {
        /// Its number, as that of [`Field::Argument`](crate::Field::Argument).
        number: u8,
        /// 1, 2, 4 or 8.
        bytes: u8,
        /// Whether it has a sign.
        signed: bool,
    },
    /// What the function returns, at its return.
    Value {
        /// 1, 2, 4 or 8.
        bytes: u8,
        /// Whether it has a sign.
        signed: bool,
    },
    /// How long the call took, at its end: 8 bytes, unsigned. In ticks where a program looks at it; see
    /// [`Condition::in_ticks`].
    Duration,
}

impl Operand {
    /// Its size, and whether it has a sign.
    #[must_use]
    pub fn width(self) -> (u8, bool) {
        match self {
            Self::Cpu => (4, false),
            Self::Task(_) => (4, true),
            Self::Argument { bytes, signed, .. } | Self::Value { bytes, signed } => (bytes, signed),
            Self::Duration => (8, false),
        }
    }
}

/// How two integers compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Relation {
    /// They are the same.
    Equal,
    /// They are not.
    NotEqual,
    /// The operand is less.
    Less,
    /// The operand is not greater.
    LessEqual,
    /// The operand is greater.
    Greater,
    /// The operand is not less.
    GreaterEqual,
    /// They have bits in common.
    Common,
    /// They have none.
    NoneCommon,
}

impl Relation {
    /// What is true when this is not.
    #[must_use]
    pub fn inverse(self) -> Self {
        match self {
            Self::Equal => Self::NotEqual,
            Self::NotEqual => Self::Equal,
            Self::Less => Self::GreaterEqual,
            Self::LessEqual => Self::Greater,
            Self::Greater => Self::LessEqual,
            Self::GreaterEqual => Self::Less,
            Self::Common => Self::NoneCommon,
            Self::NoneCommon => Self::Common,
        }
    }
}

impl Condition {
    /// Most tests of one condition.
    pub const MAX_TESTS: usize = 64;
    /// Most bytes of a [`Test::Bytes`]: a task's name.
    pub const MAX_BYTES: usize = 16;

    /// All tests, in the order in which they are made.
    pub fn tests(&self) -> Box<dyn Iterator<Item = &Test> + '_> {
        match self {
            Self::All(list) | Self::Any(list) => Box::new(list.iter().flat_map(Self::tests)),
            Self::Test(test) => Box::new(std::iter::once(test)),
        }
    }

    /// Whether it looks at such an operand.
    pub fn looks_at(&self, kind: impl Fn(Operand) -> bool) -> bool {
        self.tests().any(|test| matches!(test, Test::Number { operand, .. } if kind(*operand)))
    }

    /// What a duration is greater than whenever this holds; `None` where that is not told by single tests of it.
    pub(crate) fn longer_than(&self) -> Option<u64> {
        match self {
            Self::All(list) => list.iter().filter_map(Self::longer_than).max(),
            Self::Any(list) => {
                list.iter().map(Self::longer_than).reduce(|a, b| Some(a?.min(b?))).flatten()
            }
            &Self::Test(Test::Number { operand: Operand::Duration, relation, value }) => {
                match relation {
                    Relation::Greater => Some(value),
                    Relation::Equal | Relation::GreaterEqual => value.checked_sub(1),
                    _ => None,
                }
            }
            Self::Test(_) => None,
        }
    }

    /// The same with durations in ticks of a clock with so many a second, where they were in nanoseconds:
    /// exactly, so that a number of ticks is longer than the one if and only if it is longer than the other.
    #[must_use]
    pub fn in_ticks(&self, ticks_per_second: u64) -> Self {
        let all = |list: &[Self]| list.iter().map(|one| one.in_ticks(ticks_per_second)).collect();
        match self {
            Self::All(list) => Self::All(all(list)),
            Self::Any(list) => Self::Any(all(list)),
            &Self::Test(Test::Number { operand: Operand::Duration, relation, value }) => {
                const SECOND: u128 = 1_000_000_000;
                let ticks = u128::from(value) * u128::from(ticks_per_second);
                // Whole ticks that are less are those below the next whole one; of equal ones likewise.
                let ticks = match relation {
                    Relation::Less | Relation::GreaterEqual => ticks.div_ceil(SECOND),
                    _ => ticks / SECOND,
                };
                let value = u64::try_from(ticks).unwrap_or(u64::MAX);
                Self::Test(Test::Number { operand: Operand::Duration, relation, value })
            }
            Self::Test(test) => Self::Test(test.clone()),
        }
    }
}

/// What to compare of a [`Test::Text`]: the last byte of a name is 0 however long the string is.
pub(crate) fn of_text(bytes: &[Option<u8>]) -> &[Option<u8>] {
    bytes.get(..Condition::MAX_BYTES - 1).unwrap_or(bytes)
}

/// The low `bytes` of a value as the whole value of an integer of that size.
#[must_use]
pub fn extended(value: u64, bytes: u8, signed: bool) -> u64 {
    let unused = 64 - 8 * u32::from(bytes.clamp(1, 8));
    let upper = value << unused;
    if signed { (upper.cast_signed() >> unused).cast_unsigned() } else { upper >> unused }
}

#[cfg(test)]
mod tests {
    use super::*;

    // A call that a program takes for too short, and is not, is missing.
    #[test]
    fn a_duration_that_is_implied_is_one_that_is_asked_for() {
        let test =
            |operand, relation, value| Condition::Test(Test::Number { operand, relation, value });
        let duration = |relation, value| test(Operand::Duration, relation, value);
        let other = || test(Operand::Cpu, Relation::Greater, 7);
        let (all, any) = (Condition::All, Condition::Any);
        let cases = [
            (duration(Relation::Greater, 5), Some(5)),
            (duration(Relation::GreaterEqual, 5), Some(4)),
            (duration(Relation::Equal, 5), Some(4)),
            (duration(Relation::GreaterEqual, 0), None),
            (duration(Relation::NotEqual, 5), None),
            (duration(Relation::Less, 5), None),
            (duration(Relation::LessEqual, 5), None),
            (duration(Relation::Common, 5), None),
            (other(), None),
            (all(vec![]), None),
            (any(vec![]), None),
            (all(vec![other(), duration(Relation::Greater, 5)]), Some(5)),
            (any(vec![other(), duration(Relation::Greater, 5)]), None),
            (any(vec![duration(Relation::Greater, 9), duration(Relation::Greater, 5)]), Some(5)),
            (all(vec![duration(Relation::Greater, 9), duration(Relation::Greater, 5)]), Some(9)),
            (
                all(vec![
                    any(vec![duration(Relation::Greater, 9), other()]),
                    duration(Relation::Less, 50),
                ]),
                None,
            ),
        ];
        for (condition, implied) in cases {
            assert_eq!(condition.longer_than(), implied, "{condition:?}");
        }
    }
}
