//! Tasks that are followed: a set of process ids, which grows with each fork of a task in it.

/// Bytes of a set: one for each possible process id (`PID_MAX_LIMIT` of 64-bit kernels). It is 1 if the task
/// is followed, else 0. So a plain store is enough, and no store of another CPU can be lost.
pub const SIZE: u64 = 1 << PID_BITS;

pub(crate) const PID_BITS: u32 = 22;
/// What errors call the set.
pub(crate) const FAMILY: &str = "the set of tasks that are followed";
