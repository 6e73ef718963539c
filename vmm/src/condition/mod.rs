//! Parses conditions, such as `pid == 1 && count > 4096`.
//!
//! ```text
//! condition  = both, { "||", both } ;
//! both       = one, { "&&", one } ;
//! one        = "!", one | "(", condition, ")" | comparison ;
//! comparison = operand, [ relation, value ] ;           operand alone: it is not 0
//! relation   = "==" | "!=" | "<" | "<=" | ">" | ">=" | "&" ;
//! value      = word | '"', text, '"' | "'", text, "'" ;
//! ```
//!
//! The operands and their possible values depend on the function: see [`session`](crate::session).

mod parse;

pub use parse::ConditionError;

use std::fmt;
use std::str::FromStr;
use vmtrace_trampolines::condition::Relation;

/// The operand that is not 0 for tasks that are followed.
pub const FOLLOWED: &str = "followed";

/// The operand that is what a function returns, and the same as `--arg` has it.
pub const VALUE: &str = "retval";
/// See [`VALUE`].
pub const RETURNED: &str = "$ret";

/// The operand that is how long a call took.
pub const DURATION: &str = "duration";

/// Whether an operand is only known when a function is left.
#[must_use]
pub fn is_of_ends(operand: &str) -> bool {
    matches!(operand, VALUE | RETURNED | DURATION)
}

/// A condition, and how it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    text: String,
    expression: Expression,
}

/// Its parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expression {
    /// All of these.
    All(Vec<Expression>),
    /// One of these at least.
    Any(Vec<Expression>),
    /// Not this.
    Not(Box<Expression>),
    /// A single comparison.
    Compare(Comparison),
}

impl Expression {
    fn is_about(&self, kind: &impl Fn(&str) -> bool) -> bool {
        match self {
            Self::All(list) | Self::Any(list) => list.iter().any(|one| one.is_about(kind)),
            Self::Not(one) => one.is_about(kind),
            Self::Compare(one) => kind(&one.operand),
        }
    }
}

/// A comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Comparison {
    /// What is compared.
    pub operand: String,
    /// How.
    pub relation: Relation,
    /// With what.
    pub value: String,
    /// Where in the text it stands, bytes.
    pub at: usize,
}

impl Condition {
    /// Most comparisons of one condition.
    pub const MAX: usize = vmtrace_trampolines::Condition::MAX_TESTS;

    /// How it was written.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Its parts.
    #[must_use]
    pub fn expression(&self) -> &Expression {
        &self.expression
    }

    /// Whether it looks at an operand of this kind.
    pub fn is_about(&self, kind: impl Fn(&str) -> bool) -> bool {
        self.expression.is_about(&kind)
    }

    /// Whether it looks at what is only known when a function is left.
    #[must_use]
    pub fn is_of_ends(&self) -> bool {
        self.is_about(is_of_ends)
    }

    /// Whether it looks at what functions return.
    #[must_use]
    pub fn tells_value(&self) -> bool {
        self.is_about(|operand| matches!(operand, VALUE | RETURNED))
    }

    /// All of these at once; `None` for none.
    ///
    /// # Errors
    /// When they are too long together.
    pub fn all(conditions: &[&Self]) -> Result<Option<Self>, ConditionError> {
        match conditions {
            [] => Ok(None),
            [one] => Ok(Some((*one).clone())),
            _ => {
                let each: Vec<_> = conditions.iter().map(|one| format!("({})", one.text)).collect();
                each.join(" && ").parse().map(Some)
            }
        }
    }

    /// Where something stands in it, for messages.
    pub(crate) fn place(&self, at: usize) -> String {
        parse::place(&self.text, at)
    }
}

impl FromStr for Condition {
    type Err = ConditionError;

    fn from_str(text: &str) -> Result<Self, ConditionError> {
        let text = text.trim();
        let expression = parse::parse(text)?;
        Ok(Self { text: text.to_owned(), expression })
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
