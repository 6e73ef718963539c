//! The scheduling priority of the relay.
#![allow(unsafe_code, reason = "setpriority has no safe wrapper")]

/// Lets the calling thread run before vCPUs that keep every CPU busy: a ring that is
/// not drained loses records. Without the right to do so (`CAP_SYS_NICE`) nothing
/// changes.
pub(super) fn raise() {
    const NICE: i32 = -15;
    // SAFETY: takes no pointers; who = 0 is the calling thread (setpriority(2), NOTES).
    let result = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) };
    if result != 0 {
        log::debug!("the relay runs at normal priority: {}", std::io::Error::last_os_error());
    }
}
