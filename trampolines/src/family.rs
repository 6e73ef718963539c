//! Tasks that are followed: a set of process ids, which grows with each fork of a task in it.

/// Bytes of a set: one for each process id that there can be (`PID_MAX_LIMIT` of 64-bit kernels), which is 1
/// where the task is followed and else 0. So a store is enough, and no other CPU's can be lost.
pub const SIZE: u64 = 1 << PID_BITS;

pub(crate) const PID_BITS: u32 = 22;
/// What errors call the set.
pub(crate) const FAMILY: &str = "the set of tasks that are followed";
