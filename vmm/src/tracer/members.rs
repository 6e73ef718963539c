//! Offsets in the guest's structures.

use super::error::TraceError;
use crate::kernel::{Kernel, NeedResched, Structs};
use vmtrace_trampolines::ContextPlaces;

/// Offsets of members of the guest's structures.
pub(super) struct Members<'a>(&'a Structs);

impl<'a> Members<'a> {
    pub(super) fn of(kernel: &'a Kernel) -> Result<Self, TraceError> {
        kernel.structs().map(Self).map_err(|error| TraceError::Kernel(error.to_string()))
    }

    /// The offset of a member, in bytes.
    pub(super) fn offset(
        &self,
        strukt: &'static str,
        member: &'static str,
    ) -> Result<u64, TraceError> {
        self.0.member_offset(strukt, member).ok_or(TraceError::NoMember(strukt, member))
    }

    /// Where the state of a CPU is, if the layout tells; `preempt_count` and `resched` as in
    /// [`ContextPlaces`].
    pub(super) fn context(
        &self,
        preempt_count: u64,
        resched: Option<u64>,
        need: Option<NeedResched>,
    ) -> Option<ContextPlaces> {
        let known = |strukt, member| self.0.member_offset(strukt, member);
        let flags = known("task_struct", "thread_info")? + known("thread_info", "flags")?;
        Some(ContextPlaces {
            flags,
            lazy: need.and_then(NeedResched::far).map(|byte| flags + byte),
            preempt_count,
            resched,
            migration: known("task_struct", "migration_disabled"),
            softirq: known("task_struct", "softirq_disable_cnt"),
        })
    }

    /// The size of a struct, in bytes.
    pub(super) fn size(&self, strukt: &'static str) -> Result<u64, TraceError> {
        self.0.size(strukt).ok_or(TraceError::NoMember(strukt, "(size)"))
    }
}
