//! Kinds of latencies, and the events that must be traced for each.

/// A kind of latency. The names are those of the kernel's tracers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Kind {
    /// Interrupts off
    Irqsoff,
    /// Preemption off
    Preemptoff,
    /// Interrupts or preemption off
    Preemptirqsoff,
    /// Tasks that wait for a CPU, from being woken to running
    Wakeup,
    /// Real-time tasks that wait for a CPU
    WakeupRt,
    /// What takes CPUs away from tasks: interrupts, softirqs, other tasks, and vmtrace itself
    Osnoise,
}

/// Events that a kind is made of: a full name or a glob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventsOf {
    /// Its name or names.
    pub pattern: &'static str,
    /// Without it nothing is found; the others are not on every architecture.
    pub needed: bool,
}

const fn needed(pattern: &'static str) -> EventsOf {
    EventsOf { pattern, needed: true }
}

const fn helpful(pattern: &'static str) -> EventsOf {
    EventsOf { pattern, needed: false }
}

impl Kind {
    /// What the kernel calls the tracer.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Irqsoff => "irqsoff",
            Self::Preemptoff => "preemptoff",
            Self::Preemptirqsoff => "preemptirqsoff",
            Self::Wakeup => "wakeup",
            Self::WakeupRt => "wakeup_rt",
            Self::Osnoise => "osnoise",
        }
    }

    /// What must be traced.
    #[must_use]
    pub fn events(self) -> &'static [EventsOf] {
        const WAITS: [EventsOf; 3] = [
            needed("sched:sched_waking"),
            needed("sched:sched_wakeup_new"),
            needed("sched:sched_switch"),
        ];
        const IRQS: [EventsOf; 4] = [
            needed("preemptirq:irq_disable"),
            needed("preemptirq:irq_enable"),
            needed("sched:sched_switch"),
            needed("power:cpu_idle"),
        ];
        const PREEMPTION: [EventsOf; 4] = [
            needed("preemptirq:preempt_disable"),
            needed("preemptirq:preempt_enable"),
            needed("sched:sched_switch"),
            needed("power:cpu_idle"),
        ];
        const BOTH: [EventsOf; 3] =
            [needed("preemptirq:*"), needed("sched:sched_switch"), needed("power:cpu_idle")];
        const NOISE: [EventsOf; 8] = [
            needed("sched:sched_switch"),
            needed("irq:irq_handler_entry"),
            needed("irq:irq_handler_exit"),
            needed("irq:softirq_entry"),
            needed("irq:softirq_exit"),
            // Of x86.
            helpful("irq_vectors:*_entry"),
            helpful("irq_vectors:*_exit"),
            helpful("nmi:nmi_handler"),
        ];
        match self {
            Self::Irqsoff => &IRQS,
            Self::Preemptoff => &PREEMPTION,
            Self::Preemptirqsoff => &BOTH,
            Self::Wakeup | Self::WakeupRt => &WAITS,
            Self::Osnoise => &NOISE,
        }
    }

    /// What episodes are called, many of them.
    pub(super) fn plural(self) -> &'static str {
        match self {
            Self::Wakeup | Self::WakeupRt => "waits",
            Self::Irqsoff | Self::Preemptoff | Self::Preemptirqsoff => "times",
            Self::Osnoise => "noises",
        }
    }

    /// What there was none of.
    pub(super) fn none(self) -> &'static str {
        match self {
            Self::Wakeup => "no task was woken and ran",
            Self::WakeupRt => "no real-time task was woken and ran",
            Self::Irqsoff => "interrupts were never seen to be off",
            Self::Preemptoff => "preemption was never seen to be off",
            Self::Preemptirqsoff => "neither interrupts nor preemption were seen to be off",
            Self::Osnoise => "nothing was seen to take a CPU from a task",
        }
    }
}
