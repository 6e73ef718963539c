//! Where the running kernel keeps what a trampoline needs.

use crate::kernel::Kernel;
use crate::tracer::trace::TraceError;

/// Offsets in a task, which `tp` points to in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Context {
    /// Of the number of the CPU that it runs on (`thread_info.cpu`).
    pub(crate) cpu: u64,
    /// Of `pid`.
    pub(crate) pid: u64,
    /// Of `comm`.
    pub(crate) comm: u64,
}

impl Context {
    /// From the layout of a task.
    pub(crate) fn find(kernel: &Kernel) -> Result<Self, TraceError> {
        let structs = kernel.structs().map_err(|error| TraceError::Kernel(error.to_string()))?;
        let member = |strukt: &'static str, name: &'static str| {
            structs.member_offset(strukt, name).ok_or(TraceError::NoMember(strukt, name))
        };
        Ok(Self {
            cpu: member("task_struct", "thread_info")? + member("thread_info", "cpu")?,
            pid: member("task_struct", "pid")?,
            comm: member("task_struct", "comm")?,
        })
    }
}
