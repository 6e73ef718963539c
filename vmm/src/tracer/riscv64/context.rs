//! Finds the data of the running kernel that trampolines need.

use crate::kernel::Kernel;
use crate::tracer::error::TraceError;
use crate::tracer::members::Members;
use vmtrace_trampolines::ContextPlaces;

/// Offsets in a task, which `tp` points to in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Context {
    /// Of the number of the CPU that it runs on (`thread_info.cpu`).
    pub(crate) cpu: u64,
    /// Of `pid`.
    pub(crate) pid: u64,
    /// Where the state of the CPU is, if that is known.
    pub(crate) state: Option<ContextPlaces>,
}

impl Context {
    /// From the layout of a task.
    pub(crate) fn find(kernel: &Kernel) -> Result<Self, TraceError> {
        let members = Members::of(kernel)?;
        let thread_info = members.offset("task_struct", "thread_info")?;
        let count = members.offset("thread_info", "preempt_count").ok();
        Ok(Self {
            cpu: thread_info + members.offset("thread_info", "cpu")?,
            state: count.and_then(|offset| {
                members.context(thread_info + offset, None, kernel.need_resched())
            }),
            pid: members.offset("task_struct", "pid")?,
        })
    }
}
