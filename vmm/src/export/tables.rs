//! What was counted: the tables at the end of the forms of text.

use std::io::{self, Write};

use super::called::CalledBy;
use super::counted::Counted;
use super::sorted::Sorted;

/// What was counted so far.
#[derive(Debug, Default)]
pub(super) struct Tables {
    pub(super) counted: Counted,
    pub(super) called: CalledBy,
    pub(super) sorted: Sorted,
}

impl Tables {
    /// Writes what there is of them to `out`, which gathers lines.
    ///
    /// # Errors
    /// When the output fails.
    pub(super) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        self.counted.write(out)?;
        self.called.write(out)?;
        self.sorted.write(out)
    }
}
