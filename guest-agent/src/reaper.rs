//! Child processes and their exit statuses. Only this module waits for children, so that each status
//! reaches the code that started the child.

use std::collections::HashMap;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;

/// Instead of a process: any child.
const ALL: libc::pid_t = -1;

/// Starts children and learns how they end.
///
/// Whoever waits here first looks without reaping, then takes the lock, and only then reaps. A spawn holds that lock: it
/// cannot be overtaken by the end of its own child, nor can a process that was reaped be signalled.
#[derive(Debug)]
pub struct Reaper {
    /// Where the status of a child that lives goes.
    children: Mutex<HashMap<libc::pid_t, PipeWriter>>,
    spawned: Condvar,
    /// Other people's orphans are reaped as well.
    everything: bool,
}

impl Reaper {
    /// For an ordinary process.
    pub fn new() -> Arc<Self> {
        Arc::new(Self::of(false))
    }

    /// For process 1 (or a subreaper), which gets the orphans of its descendants. Nothing else in the process may
    /// have children then.
    ///
    /// # Errors
    /// When there can be no thread.
    pub fn of_everything() -> io::Result<Arc<Self>> {
        let reaper = Arc::new(Self::of(true));
        let waiting = Arc::clone(&reaper);
        start_thread("reaper", move || waiting.reap_everything())?;
        Ok(reaper)
    }

    fn of(everything: bool) -> Self {
        Self { children: Mutex::default(), spawned: Condvar::new(), everything }
    }

    fn children(&self) -> MutexGuard<'_, HashMap<libc::pid_t, PipeWriter>> {
        self.children.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a process.
    ///
    /// # Errors
    /// When that fails.
    pub fn spawn(self: &Arc<Self>, command: &mut Command) -> io::Result<Child> {
        let (ended, status) = io::pipe()?;
        let mut children = self.children();
        let id = command.spawn()?.id();
        let pid = libc::pid_t::try_from(id).map_err(io::Error::other)?;
        children.insert(pid, status);
        drop(children);
        if self.everything {
            self.spawned.notify_all();
        } else {
            let reaper = Arc::clone(self);
            start_thread("wait", move || {
                wait_for(pid, WaitPidFlag::empty());
                reaper.reap(pid);
            })?;
        }
        Ok(Child { pid, ended, reaper: Arc::clone(self) })
    }

    fn reap_everything(&self) {
        loop {
            if wait_for(ALL, WaitPidFlag::empty()) {
                self.reap(ALL);
                continue;
            }
            // No children, and so no descendants.
            let mut children = self.children();
            if !wait_for(ALL, WaitPidFlag::WNOHANG) {
                // If there are entries, somebody else took their statuses.
                children.clear();
                drop(self.spawned.wait(children));
            }
        }
    }

    /// Reaps `pid`, or whoever has ended.
    fn reap(&self, pid: libc::pid_t) {
        let mut children = self.children();
        while let Some((pid, status)) = reap_one(pid) {
            if let Some(mut waiting) = children.remove(&pid) {
                // Nobody may be interested any more.
                let _ = waiting.write_all(&status.to_ne_bytes());
            }
        }
        // Somebody else took the status (or SIGCHLD is ignored): whoever waits sees an end without one.
        children.remove(&pid);
    }
}

/// A child, which need not be waited for.
#[derive(Debug)]
pub struct Child {
    pid: libc::pid_t,
    ended: PipeReader,
    reaper: Arc<Reaper>,
}

impl Child {
    /// Waits for the end.
    ///
    /// # Errors
    /// When it cannot be known.
    pub fn wait(&mut self) -> io::Result<ExitStatus> {
        let mut status = [0; 4];
        self.ended.read_exact(&mut status)?;
        Ok(ExitStatus::from_raw(i32::from_ne_bytes(status)))
    }

    /// Readable when [`Self::wait`] will not wait.
    pub fn ended(&self) -> BorrowedFd<'_> {
        self.ended.as_fd()
    }

    /// For a child with a process group of its own that lives: a signal for the group.
    pub fn signal_group(&self, signal: Signal) {
        let children = self.reaper.children();
        if children.contains_key(&self.pid) {
            // It exists: it is not reaped yet. Members may still be beyond our rights.
            let _ = killpg(Pid::from_raw(self.pid), signal);
        }
    }
}

/// Waits until a child can be reaped, if there is one. (The call gives no status: nix fails on real-time
/// signals, after the kernel has done what it was asked to do.)
fn wait_for(pid: libc::pid_t, flags: WaitPidFlag) -> bool {
    loop {
        let id = if pid == ALL { Id::All } else { Id::Pid(Pid::from_raw(pid)) };
        match waitid(id, WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | flags) {
            Err(Errno::EINTR) => {}
            Err(Errno::ECHILD) => return false,
            _ => return true,
        }
    }
}

#[allow(unsafe_code)] // nix's `waitpid` fails on real-time signals
fn reap_one(pid: libc::pid_t) -> Option<(libc::pid_t, i32)> {
    let mut status = 0;
    // SAFETY: waitpid writes one int through the pointer, which is valid for it.
    let reaped = unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) };
    (reaped > 0).then_some((reaped, status))
}

pub(crate) fn start_thread(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    // Many may live at once, in guests of little memory.
    let builder = std::thread::Builder::new().name(name.to_owned()).stack_size(256 << 10);
    builder.spawn(body).map(drop)
}
