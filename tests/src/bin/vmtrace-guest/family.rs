//! Tasks that come to memory, process ids and names otherwise than by a shell.

use super::call_getppid;
use anyhow::{Result, bail, ensure};
use std::ffi::CString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// So many processes one after the other, which execute nothing: each calls getppid so often.
pub(crate) fn forks(count: u64, calls: u64) -> Result<()> {
    for _ in 0..count {
        // SAFETY: there is one thread, and the child only asks the kernel.
        let child = unsafe { libc::fork() };
        match child {
            0 => {
                (0..calls).for_each(|_| call_getppid());
                // SAFETY: ends this process.
                unsafe { libc::_exit(0) }
            }
            -1 => bail!("fork: {}", io::Error::last_os_error()),
            child => {
                let mut status = 0;
                // SAFETY: writes the status.
                let ended = unsafe { libc::waitpid(child, &raw mut status, 0) };
                ensure!(ended == child && status == 0, "process {ended} with status {status}");
            }
        }
    }
    Ok(())
}

/// Executes a program in a thread that had this name for a while: it gets the process id of the first thread.
pub(crate) fn executes(name: &str, program: &str, args: &[&str]) -> Result<()> {
    let named = |name: &str| {
        let name = CString::new(name)?;
        // SAFETY: a string that ends.
        let result = unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
        ensure!(result == 0, "{}", io::Error::last_os_error());
        Ok(())
    };
    let run = || {
        named(name)?;
        named("a-thread")?;
        Err::<(), _>(Command::new(program).args(args).exec().into())
    };
    std::thread::scope(|scope| scope.spawn(run).join().unwrap_or_else(|_| bail!("it panicked")))
}
