//! Where the running kernel keeps what a trampoline needs.

use crate::kernel::Kernel;
use crate::tracer::members::Members;
use crate::tracer::trace::TraceError;

/// Offsets in a task, which `tp` points to in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Context {
    /// Of the number of the CPU that it runs on (`thread_info.cpu`).
    pub(crate) cpu: u64,
    /// Of `pid`.
    pub(crate) pid: u64,
}

impl Context {
    /// From the layout of a task.
    pub(crate) fn find(kernel: &Kernel) -> Result<Self, TraceError> {
        let members = Members::of(kernel)?;
        Ok(Self {
            cpu: members.offset("task_struct", "thread_info")?
                + members.offset("thread_info", "cpu")?,
            pid: members.offset("task_struct", "pid")?,
        })
    }
}
