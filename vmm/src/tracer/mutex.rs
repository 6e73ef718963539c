//! What the guest's kernel calls the functions that take and release a mutex.

/// Of these the kernel has some: the second with lockdep, the third with PREEMPT_RT before 5.15
/// (include/linux/mutex_rt.h of its patch).
pub(super) const LOCKS: [&str; 3] = ["mutex_lock", "mutex_lock_nested", "_mutex_lock"];

/// The same of those that release one.
pub(super) const UNLOCKS: [&str; 2] = ["mutex_unlock", "_mutex_unlock"];
