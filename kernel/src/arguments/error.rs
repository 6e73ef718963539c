//! Errors in what a user asks for, each with its place and a remedy.

use std::fmt;
use std::ops::Range;

use super::{Last, Near, NoPrototype};

/// Why a path names no value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathError {
    /// The path as given.
    pub text: String,
    /// The part of it that is wrong, in bytes; empty at its end where something is missing.
    pub at: Range<usize>,
    /// What is wrong.
    pub problem: PathProblem,
}

impl std::error::Error for PathError {}

impl fmt::Display for PathError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { text, at, problem } = self;
        let part = text.get(at.clone()).unwrap_or_default();
        // Counted from 1, as editors do.
        let character = text.get(..at.start).map_or(0, |before| before.chars().count()) + 1;
        match part {
            _ if part == text => write!(f, "'{text}': {problem}"),
            "" => write!(f, "'{text}' at its character {character}: {problem}"),
            _ => write!(f, "'{text}' at '{part}' (character {character}): {problem}"),
        }
    }
}

/// What is wrong with a path.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathProblem {
    /// The function has no known parameters.
    #[error("the parameters of {function} are not known: {why}; trace it without its parameters")]
    NoPrototype {
        /// The function, or what stands for it.
        function: String,
        /// Why.
        why: NoPrototype,
    },
    /// Not what the grammar has at this place.
    #[error("{expected} is expected here")]
    Syntax {
        /// What could be there.
        expected: &'static str,
    },
    /// A number that is too large for what it is.
    #[error("not a number from {least} to {most}")]
    Number {
        /// The smallest possible.
        least: u32,
        /// The largest possible.
        most: u32,
    },
    /// The function has no such parameter.
    #[error("{function} has no such parameter{names}")]
    Parameter {
        /// The function.
        function: String,
        /// Names that are like it.
        names: Near,
    },
    /// The function returns `void`, or nothing in a register.
    #[error("{function} returns no value in a register; take one of its parameters")]
    NoResult {
        /// The function.
        function: String,
    },
    /// The struct has no such member.
    #[error("{within} has no such member{names}")]
    Member {
        /// The struct or union.
        within: String,
        /// Names that are like it.
        names: Near,
    },
    /// A member of what has none.
    #[error("the value before it has type {of} and has no members")]
    NoMembers {
        /// Its type.
        of: String,
    },
    /// A pointer to a pointer: `->` is not enough.
    #[error("the value before it has type {of}; write [0] first")]
    PointerToPointer {
        /// Its type.
        of: String,
    },
    /// `->` behind what is no pointer.
    #[error("the value before it has type {of}, which is not a pointer; write '.'")]
    NoPointer {
        /// Its type.
        of: String,
    },
    /// An index behind what is neither array nor pointer.
    #[error("the value before it has type {of}, which has no elements")]
    NoElements {
        /// Its type.
        of: String,
    },
    /// An index past the end.
    #[error("the array has {count} elements, from [0] to [{}]", count.saturating_sub(1))]
    Bounds {
        /// How many.
        count: u32,
    },
    /// A struct of which only the name is known.
    #[error("{of} is not described in the kernel's type information")]
    Incomplete {
        /// The type.
        of: String,
    },
    /// Memory of a process, which is not read.
    #[error("it points into a process's memory, which is not read; take the pointer itself")]
    User,
    /// More than a record has room for.
    #[error("{of} has {size} bytes, more than {}; take a member{names}", Last::MOST_BYTES)]
    Large {
        /// The type.
        of: String,
        /// Its size.
        size: u64,
        /// Its first members.
        names: Near,
    },
    /// An array of more than a record has room for, or of no known length.
    #[error("the array does not fit into a record; take one of its elements, such as [0]")]
    LargeArray,
    /// A longest length for what is no text.
    #[error("{of} is not a string and takes no length")]
    NotText {
        /// The type.
        of: String,
    },
    /// The rest of a struct that is returned in two registers.
    #[error("it is in the second register of the result, and only the first is read")]
    SecondRegister,
    /// A value that no word has as a whole.
    #[error(
        "it is passed in no register or stack slot that has all of it; take one of its members"
    )]
    NoWord,
    /// No value of any use.
    #[error("{of} has no value that can be shown")]
    NoValue {
        /// The type.
        of: String,
    },
    /// Beyond 2 GiB.
    #[error("it is too far from the address in the pointer")]
    Far,
    /// More pointers than tracing follows.
    #[error("more than {} pointers to follow", super::Fetch::MOST_HOPS)]
    Long,
    /// Types that contradict each other.
    #[error("the kernel's type information is damaged here")]
    Damaged,
}

/// Why an argument of `--arg` cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// No colon.
    #[error("'{text}' names no values; write 'FUNCTION: PATH, PATH...'")]
    NoPaths {
        /// As given.
        text: String,
    },
    /// Nothing before the colon, or several words.
    #[error("'{function}' before the colon is not a function; write 'FUNCTION: PATH, PATH...'")]
    NoFunction {
        /// What stands before the colon.
        function: String,
    },
    /// Two values of one name.
    #[error("'{name}' is given twice; give one another name: LABEL={name}")]
    Twice {
        /// The name.
        name: String,
    },
    /// A path that no kernel could have.
    #[error(transparent)]
    Path(#[from] PathError),
    /// No function of the name.
    #[error(
        "no traceable function matches '{function}'{names}; functions of modules are named by \
         'GLOB:mod:NAME: PATH, ...'"
    )]
    Unknown {
        /// The pattern.
        function: String,
        /// Names that are like it.
        names: Near,
    },
}
