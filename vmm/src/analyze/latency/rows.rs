//! Rows as the kernel's osnoise tracer prints them: how much of a vCPU tasks got in each second.

use serde::Serialize;

/// Length of a period, in nanoseconds: what osnoise has (`DEFAULT_SAMPLE_PERIOD`,
/// kernel/trace/trace_osnoise.c).
pub(super) const PERIOD: u64 = 1_000_000_000;

/// What takes a CPU away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Host,
    Nmi,
    Irq,
    Softirq,
    Thread,
}

/// One vCPU in one period; times are in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Row {
    /// The vCPU.
    pub cpu: u32,
    /// When the period ended.
    pub ns: u64,
    /// For how long of it there was a task to run.
    pub runtime_ns: u64,
    /// For how long of that the task did not run.
    pub noise_ns: u64,
    /// The longest time without a break.
    pub longest_ns: u64,
    /// How often vmtrace paused the guest or, where exits are traced, the vCPU was out of it.
    pub host: u64,
    /// How often an NMI came.
    pub nmi: u64,
    /// How often an interrupt came.
    pub irq: u64,
    /// How often a softirq ran.
    pub softirq: u64,
    /// How often another task took the CPU.
    pub thread: u64,
}

impl Row {
    pub(super) fn count(&mut self, source: Source) {
        *match source {
            Source::Host => &mut self.host,
            Source::Nmi => &mut self.nmi,
            Source::Irq => &mut self.irq,
            Source::Softirq => &mut self.softirq,
            Source::Thread => &mut self.thread,
        } += 1;
    }

    /// How much of the CPU the task had, in thousandths of a percent; none if there was no task.
    pub(super) fn available(&self) -> Option<u64> {
        let had = u128::from(self.runtime_ns.saturating_sub(self.noise_ns)) * 100_000;
        u64::try_from(had.checked_div(self.runtime_ns.into())?).ok()
    }
}
