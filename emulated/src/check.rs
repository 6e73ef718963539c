//! The result of a check of the host, as text and as JSON.

use std::fmt;

use serde::{Deserialize, Serialize};

/// One check and its result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// What.
    pub name: String,
    /// Whether it is as it must be.
    pub ok: bool,
    /// What was found.
    pub detail: String,
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.detail)
    }
}
