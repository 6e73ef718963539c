//! Calls in the kernel's code.

/// A call in the kernel's code, or a jump to a function in its place. Link addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Call {
    /// Of its first instruction.
    pub(super) link: u64,
    /// The function.
    pub(super) target: u64,
    /// It is a jump.
    pub(super) jumps: bool,
}
