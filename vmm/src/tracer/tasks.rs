//! Names of tasks, read from the guest while it runs.

use super::guest::{Guest, Image};
use std::collections::HashMap;

/// `TASK_COMM_LEN`
const COMM: usize = 16;

/// Reads and remembers `task_struct.comm`.
#[derive(Debug)]
pub struct Tasks {
    /// Without it nothing is read.
    image: Option<Image>,
    comm: u64,
    /// By task address: the pid that was seen with it, and its name.
    known: HashMap<u64, (u32, [u8; COMM])>,
}

impl Tasks {
    /// A hostile guest can make up any number of tasks.
    const MAX: usize = 1 << 16;

    pub(super) fn new(image: Image, comm: u64) -> Self {
        Self { image: Some(image), comm, known: HashMap::new() }
    }

    /// Of a guest that was never attached to.
    #[must_use]
    pub fn none() -> Self {
        Self { image: None, comm: 0, known: HashMap::new() }
    }

    /// Reads the name of `task`; returns it when it is new or has changed since
    /// the last call for that task and pid.
    pub fn refresh(&mut self, guest: &dyn Guest, task: u64, pid: u32) -> Option<String> {
        let mut comm = [0; COMM];
        // A task that is gone or made up keeps its last name, if any.
        self.image.as_ref()?.read(guest, task.wrapping_add(self.comm), &mut comm).ok()?;
        if self.known.get(&task) == Some(&(pid, comm)) {
            return None;
        }
        if self.known.len() >= Self::MAX {
            self.known.clear();
        }
        self.known.insert(task, (pid, comm));
        let len = comm.iter().position(|&byte| byte == 0).unwrap_or(COMM);
        Some(String::from_utf8_lossy(comm.get(..len).unwrap_or_default()).into_owned())
    }
}
