//! The ports of a connection.

/// The identity of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    /// The host's port.
    pub(super) local: u32,
    /// The guest's port.
    pub(super) guest: u32,
}
