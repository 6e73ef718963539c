//! Takes locks of what vCPU threads share with the controller.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Takes a lock; a thread that panicked holding it left nothing that others could not use.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
