//! Getting a vCPU's thread out of guest mode.
//!
//! A kick is a real-time signal to the thread. It ends `KVM_RUN` if the thread is inside, and the
//! handler sets the `immediate_exit` byte of the thread's `kvm_run`, so that a `KVM_RUN` about to
//! be entered ends at once, too. A kick can so never be lost between the thread's look at the
//! machine's state and its entry: the thread clears the byte, looks, enters.
#![allow(unsafe_code)]

use std::any::Any;
use std::cell::Cell;
use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

use kvm_ioctls::VcpuFd;

use super::MachineError;

thread_local! {
    /// The `immediate_exit` byte of the vCPU that this thread runs; null for any other thread.
    // No lazy initialisation and no destructor: the signal handler reads it.
    static IMMEDIATE_EXIT: Cell<*const AtomicU8> = const { Cell::new(ptr::null()) };
}

/// The signal: one real-time signal among those no library is known to take.
pub(crate) fn number() -> libc::c_int {
    libc::SIGRTMIN() + 4
}

extern "C" fn handler(_: libc::c_int) {
    let flag = IMMEDIATE_EXIT.with(Cell::get);
    // SAFETY: null, or set by `receive_kicks`, whose guard keeps the vCPU and so the mapping of
    // its `kvm_run` alive until it has set this to null again; this runs on the same thread.
    if let Some(flag) = unsafe { flag.as_ref() } {
        flag.store(1, Ordering::SeqCst);
    }
}

/// Installs the handler, once per process.
pub(super) fn install() -> Result<(), MachineError> {
    static RESULT: OnceLock<Result<(), i32>> = OnceLock::new();
    let result = RESULT.get_or_init(|| {
        let mut action = MaybeUninit::<libc::sigaction>::zeroed();
        let action = action.as_mut_ptr();
        // SAFETY: all zeroes is a valid sigaction (default handler, no flags, empty mask).
        let action = unsafe { &mut *action };
        action.sa_sigaction = handler as *const () as usize;
        // KVM_RUN is not restarted in spite of this, other system calls should be.
        action.sa_flags = libc::SA_RESTART;
        // SAFETY: `action` is initialised, its handler async-signal-safe: it loads a
        // thread-local without initialiser and stores one byte.
        let failed = unsafe { libc::sigaction(number(), action, ptr::null_mut()) } != 0;
        if failed { Err(io::Error::last_os_error().raw_os_error().unwrap_or(0)) } else { Ok(()) }
    });
    result.map_err(|code| MachineError::System {
        what: "install the signal handler that stops vCPUs",
        source: io::Error::from_raw_os_error(code),
    })
}

/// A thread that can be kicked, while it lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Thread(libc::pthread_t);

impl Thread {
    /// The calling thread.
    pub(super) fn current() -> Thread {
        // SAFETY: cannot fail and has no precondition.
        Thread(unsafe { libc::pthread_self() })
    }

    /// Kicks the thread. The caller must know that it has not ended.
    pub(super) fn kick(self) {
        // SAFETY: the machine's control forgets a thread before it ends, under the lock that it
        // kicks under, so the thread exists. The signal has a handler: `install` comes first.
        unsafe { libc::pthread_kill(self.0, number()) };
    }
}

/// The `immediate_exit` byte of a vCPU, which the signal handler writes behind the compiler's back.
pub(super) struct ImmediateExit(*const AtomicU8);

// SAFETY: an atomic in shared memory; the owner of this keeps that memory mapped.
unsafe impl Send for ImmediateExit {}

impl ImmediateExit {
    /// For the vCPU of `fd`; must not be used after `fd` is closed.
    pub(super) fn new(fd: &mut VcpuFd) -> ImmediateExit {
        let byte: *mut u8 = &raw mut fd.get_kvm_run().immediate_exit;
        ImmediateExit(byte.cast_const().cast())
    }

    pub(super) fn set(&self, on: bool) {
        // SAFETY: the vCPU that owns `self` has not closed its fd, so `kvm_run` is mapped.
        unsafe { &*self.0 }.store(u8::from(on), Ordering::SeqCst);
    }
}

/// While it lives, kicks reach the vCPU of the calling thread.
pub(super) struct Kickable {
    // keeps the mapping that the handler writes to
    _vcpu: Arc<dyn Any>,
}

/// Lets kicks of the calling thread reach the vCPU of this byte; `vcpu` is its owner.
pub(super) fn receive_kicks(immediate_exit: &ImmediateExit, vcpu: Arc<dyn Any>) -> Kickable {
    IMMEDIATE_EXIT.with(|flag| flag.set(immediate_exit.0));
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: initialises the set it is given.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: the set is initialised, the number a valid one.
    unsafe { libc::sigaddset(set.as_mut_ptr(), number()) };
    // SAFETY: the set is initialised. Cannot fail for a valid `how`.
    unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), ptr::null_mut()) };
    Kickable { _vcpu: vcpu }
}

impl Drop for Kickable {
    fn drop(&mut self) {
        IMMEDIATE_EXIT.with(|flag| flag.set(ptr::null()));
    }
}
