//! Reads names of tasks from the guest while it runs.

use super::guest::{Guest, GuestError};

use super::error::TraceError;
use super::image::Image;
use super::members::Members;
use crate::kernel::Kernel;
use std::collections::HashMap;

/// `TASK_COMM_LEN`
const COMM: usize = 16;

/// Where a task has what (`struct task_struct`).
#[derive(Clone, Copy, Debug)]
pub struct Offsets {
    /// Of `pid`, in bytes, as the others.
    pub pid: u64,
    /// Of `tgid`.
    pub tgid: u64,
    /// Of `comm`.
    pub comm: u64,
}

impl Offsets {
    /// From the kernel's types.
    ///
    /// # Errors
    /// When they do not say.
    pub fn find(kernel: &Kernel) -> Result<Self, TraceError> {
        let members = Members::of(kernel)?;
        Ok(Self {
            pid: members.offset("task_struct", "pid")?,
            tgid: members.offset("task_struct", "tgid")?,
            comm: members.offset("task_struct", "comm")?,
        })
    }
}

/// What a task says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Task {
    /// Its thread group: what user space calls a process.
    pub tgid: u32,
    /// Its name, with NULs up to the end.
    pub comm: [u8; COMM],
}

/// Reads and remembers what tasks say of themselves.
#[derive(Debug)]
pub struct Tasks {
    /// Without them nothing is read.
    place: Option<(Image, Offsets)>,
    /// By task address: the pid that was seen with it, and the rest.
    known: HashMap<u64, (u32, Task)>,
}

impl Tasks {
    /// A hostile guest can make up any number of tasks.
    const MAX: usize = 1 << 16;

    pub(super) fn new(image: Image, offsets: Offsets) -> Self {
        Self { place: Some((image, offsets)), known: HashMap::new() }
    }

    /// Of a guest that was never attached to.
    #[must_use]
    pub fn none() -> Self {
        Self { place: None, known: HashMap::new() }
    }

    /// Reads the `task` that had this pid; returns it when it is new or has changed since
    /// the last call for that task and pid.
    ///
    /// `None` as well for one that is gone: its memory may be another task's by now, which
    /// its pid tells.
    pub fn refresh(&mut self, guest: &dyn Guest, task: u64, pid: u32) -> Option<Task> {
        let found = self.read(guest, task, pid).ok()??;
        if self.known.get(&task) == Some(&(pid, found)) {
            return None;
        }
        if self.known.len() >= Self::MAX {
            self.known.clear();
        }
        self.known.insert(task, (pid, found));
        Some(found)
    }

    fn read(&self, guest: &dyn Guest, task: u64, pid: u32) -> Result<Option<Task>, GuestError> {
        let Some((image, offsets)) = &self.place else { return Ok(None) };
        let word = |offset| {
            let mut bytes = [0; 4];
            image.read(guest, task.wrapping_add(offset), &mut bytes)?;
            Ok(u32::from_le_bytes(bytes))
        };
        let mut comm = [0; COMM];
        image.read(guest, task.wrapping_add(offsets.comm), &mut comm)?;
        let tgid = word(offsets.tgid)?;
        // Last, as the guest runs: a task that came in between has another one.
        let is_it = word(offsets.pid)? == pid;
        Ok(is_it.then_some(Task { tgid, comm }))
    }
}
