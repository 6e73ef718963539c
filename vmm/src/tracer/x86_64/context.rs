//! Finds the data of the running kernel that trampolines need.

use crate::kernel::{Kernel, PreemptCount};
use crate::tracer::error::TraceError;
use crate::tracer::guest::{Guest, GuestError};
use crate::tracer::image::Image;
use crate::tracer::members::Members;
use vmtrace_trampolines::ContextPlaces;

/// Places a trampoline reads, relative to the gs base or in a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Context {
    /// Offset of `current` from the gs base.
    pub(crate) current: u64,
    /// Offset of the CPU number from the gs base.
    pub(crate) cpu_number: u64,
    /// Offset of `pid` in `struct task_struct`.
    pub(crate) pid: u64,
    /// Offset of the count of preemptions from the gs base, if that is known.
    pub(crate) preempt_count: Option<u64>,
    /// Where the state of the CPU is, if that is known.
    pub(crate) state: Option<ContextPlaces>,
}

impl Context {
    /// From symbols and the layout of structures. 6.2 to 6.14 keep both words in `pcpu_hot`, others
    /// in variables of their own.
    pub(crate) fn find(kernel: &Kernel, image: &Image) -> Result<Self, TraceError> {
        let members = Members::of(kernel)?;
        let symbols = kernel.symbols();
        // Per-CPU symbols are offsets from 0 up to 6.14, link addresses later.
        let per_cpu = |address: u64| {
            if address >> 63 == 0 { address } else { image.runtime(address) }
        };
        let variable = |name| symbols.address(name).map(per_cpu).ok_or(TraceError::NoSymbol(name));
        let (current, cpu_number, count) = if let Some(hot) = symbols.address("pcpu_hot") {
            (
                per_cpu(hot) + members.offset("pcpu_hot", "current_task")?,
                per_cpu(hot) + members.offset("pcpu_hot", "cpu_number")?,
                members.offset("pcpu_hot", "preempt_count").map(|offset| per_cpu(hot) + offset),
            )
        } else {
            (variable("current_task")?, variable("cpu_number")?, variable("__preempt_count"))
        };
        let preempt_count = count.ok();
        // The last byte of a word of 64 bits.
        let is_wide = kernel.preempt_count() == PreemptCount::Wide;
        let resched = preempt_count.filter(|_| is_wide).map(|count| count + 7);
        let need = kernel.need_resched();
        let state = preempt_count.and_then(|count| members.context(count, resched, need));
        let pid = members.offset("task_struct", "pid")?;
        Ok(Self { current, cpu_number, pid, preempt_count, state })
    }
}

/// The gs base of each of the first `cpus` CPUs (`__per_cpu_offset`).
pub(crate) fn gs_bases(
    guest: &dyn Guest,
    kernel: &Kernel,
    image: &Image,
    cpus: u64,
) -> Result<Vec<u64>, TraceError> {
    let table = kernel
        .symbols()
        .address("__per_cpu_offset")
        .ok_or(TraceError::NoSymbol("__per_cpu_offset"))?;
    (0..cpus)
        .map(|cpu| guest.read_u64(image.physical_of(table) + 8 * cpu))
        .collect::<Result<_, GuestError>>()
        .map_err(TraceError::Guest)
}
