//! The code after a program that its reads of memory need, on any architecture: failure paths, and a subroutine.

use dynasmrt::DynamicLabel;

/// Reads so far.
#[derive(Default)]
pub(crate) struct Reads {
    /// Displacement of the word that says which failed.
    pub(crate) failed: Option<i32>,
    pub(crate) failures: Vec<Failure>,
    /// The subroutine that loads a word, once there is a use for it.
    pub(crate) load: Option<DynamicLabel>,
}

/// Where a read goes on that failed, and where then.
pub(crate) struct Failure {
    pub(crate) from: DynamicLabel,
    pub(crate) back: DynamicLabel,
    /// Number of the field.
    pub(crate) index: usize,
    /// Displacement of its first word.
    pub(crate) to: i32,
}

impl Failure {
    /// What it adds to the word that says which failed.
    pub(crate) fn bit(&self) -> u32 {
        1_u32.checked_shl(u32::try_from(self.index).unwrap_or(32)).unwrap_or(0)
    }
}
