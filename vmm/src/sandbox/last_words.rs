//! The handler of a forbidden system call: the call is not made, a line names it, and the process
//! ends.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::io::{self, Cursor, Write};
use std::ptr;

use libc::{c_int, c_void, siginfo_t};
use syscalls::Sysno;
use vmm_sys_util::signal::register_signal_handler;

use super::{OPTION, SandboxError, Thread};

/// The exit code of the process: that of shells for a process that died of `SIGSYS`.
pub const EXIT_CODE: u8 = 128 + 31;

/// How long the line may take, in ms: nobody may be reading.
const PATIENCE: c_int = 500;

thread_local! {
    // No lazy initialisation and no destructor: the signal handler reads it.
    static THREAD: Cell<Option<Thread>> = const { Cell::new(None) };
}

/// The calling thread is of this kind.
pub(super) fn this_is(thread: Thread) {
    THREAD.with(|cell| cell.set(Some(thread)));
}

/// Once per process.
pub(super) fn install() -> Result<(), SandboxError> {
    register_signal_handler(libc::SIGSYS, handler)
        .map_err(|error| SandboxError::system("handle SIGSYS")(error.into()))
}

/// Only does what may be done in a signal handler: nothing is allocated, no lock is taken.
extern "C" fn handler(_: c_int, info: *mut siginfo_t, _: *mut c_void) {
    // Of `struct siginfo` (include/uapi/asm-generic/siginfo.h) with 64-bit pointers: behind signo,
    // errno and code, at an aligned place, `_call_addr`, then `_syscall`.
    const SYSCALL: usize = 24;
    // SAFETY: the kernel gives a whole siginfo of 128 bytes to a handler with SA_SIGINFO.
    let number = unsafe { ptr::read_unaligned(info.byte_add(SYSCALL).cast::<c_int>()) };
    vmtrace_system::terminal::restore();
    let mut line = [0; 400];
    let length = write(&mut line, THREAD.with(Cell::get), number).unwrap_or(0);
    let mut stderr = libc::pollfd { fd: 2, events: libc::POLLOUT, revents: 0 };
    // SAFETY: one pollfd, as is said.
    if unsafe { libc::poll(&raw mut stderr, 1, PATIENCE) } == 1 {
        // SAFETY: `length` bytes of `line` are initialised; it is no matter if nobody reads them.
        unsafe { libc::write(2, line.as_ptr().cast(), length.min(line.len())) };
    }
    // SAFETY: ends the process at once, with nothing run on the way out.
    unsafe { libc::_exit(EXIT_CODE.into()) }
}

/// Returns how many bytes the line has.
fn write(line: &mut [u8], thread: Option<Thread>, number: c_int) -> io::Result<usize> {
    let mut line = Cursor::new(line);
    let name = usize::try_from(number).ok().and_then(Sysno::new).map_or("?", |call| call.name());
    let thread = thread.map_or("a", Thread::name);
    writeln!(
        line,
        "vmtrace: error: sandbox: {thread} thread may not make system call {number} ({name}): \
         vmtrace ends, and the trace is torn. This is a bug of vmtrace or the guest's attack; \
         {OPTION} runs without the filters (docs/security.md)"
    )?;
    usize::try_from(line.position()).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_names_thread_and_call() {
        let mut line = [0; 400];
        let execve = i32::try_from(libc::SYS_execve).unwrap();
        let length = write(&mut line, Some(Thread::Vcpu), execve).unwrap();
        let text = std::str::from_utf8(&line[..length]).unwrap();
        assert!(text.contains("vcpu thread") && text.contains(&format!("{execve} (execve)")));
        assert!(text.contains(OPTION) && text.ends_with('\n'), "{text}");
        // Numbers that nobody knows.
        for number in [-1, i32::MAX] {
            let length = write(&mut line, None, number).unwrap();
            let text = std::str::from_utf8(&line[..length]).unwrap();
            assert!(text.contains(&format!("{number} (?)")), "{text}");
        }
        assert!(write(&mut [0; 10], None, 0).is_err());
    }
}
