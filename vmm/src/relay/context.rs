//! Converts the state of a CPU from the form of programs to that of the stream.

use crate::kernel::{Arch, Kernel, NeedResched, PreemptCount};
use crate::stream::Context;
use vmtrace_trampolines::RawContext;

/// Parts of the count of preemptions (include/linux/preempt.h) that are the same in all versions.
mod part {
    pub(super) const PREEMPTION: u32 = 0xff;
    pub(super) const IN_SOFTIRQ: u32 = 0x100;
    pub(super) const SOFTIRQS_OFF: u32 = 0xfe00;
}

/// Others.
#[derive(Clone, Copy, Debug)]
struct Parts {
    hardirq: u32,
    nmi: u32,
    /// Clear where the CPU is to preempt (x86).
    no_resched: u32,
}

impl Parts {
    fn of(count: PreemptCount) -> Self {
        match count {
            PreemptCount::Narrow => Self { hardirq: 0xf_0000, nmi: 0xf0_0000, no_resched: 1 << 31 },
            // Where programs put that bit, of those that count bans on interrupts.
            PreemptCount::Wide => {
                Self { hardirq: 0xf00_0000, nmi: 0xf000_0000, no_resched: 1 << 23 }
            }
        }
    }
}

/// What the bits mean in one kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Meaning {
    /// Numbers of bits in the flags of the task as they are recorded.
    eager: u8,
    lazy: Option<u8>,
    parts: Parts,
    /// The count of preemptions tells whether the CPU is to preempt.
    folded: bool,
    /// Tracepoints switch preemption off once while they call their probes.
    counted: bool,
}

impl Meaning {
    /// In this kernel, if that is known.
    pub(super) fn of(kernel: &Kernel) -> Option<Self> {
        let has = |symbol| kernel.symbols().address(symbol).is_some();
        // Those before 6.13 had one, too, for probes that were called while a CPU was idle.
        let by_srcu = has("tracepoint_srcu")
            && kernel.btf().is_ok_and(|btf| btf.member_offset("tracepoint", "ext").is_some());
        let (folded, counted) =
            (kernel.arch() == Arch::X86_64, has("preempt_schedule") && !by_srcu);
        let parts = Parts::of(kernel.preempt_count());
        Some(Self::new(kernel.need_resched()?, parts, folded, counted))
    }

    fn new(need: NeedResched, parts: Parts, folded: bool, counted: bool) -> Self {
        // A byte that is not among the lower two is recorded in place of the second.
        let recorded = |bit| if need.far().is_some() { 8 + bit % 8 } else { bit };
        Self { eager: need.eager, lazy: need.lazy.map(recorded), parts, folded, counted }
    }

    /// As `tracing_gen_ctx_irq_test` makes it (kernel/trace/trace.c).
    pub(super) fn context(self, raw: RawContext) -> Context {
        let count = raw.preempt_count();
        let task = |bit: u8| raw.flags().checked_shr(bit.into()).unwrap_or(0) & 1 != 0;
        let flags = [
            (!raw.interrupts_on(), Context::IRQS_OFF),
            (self.lazy.is_some_and(task), Context::NEED_RESCHED_LAZY),
            (task(self.eager), Context::NEED_RESCHED),
            (count & self.parts.hardirq != 0, Context::HARDIRQ),
            (count & part::IN_SOFTIRQ != 0, Context::SOFTIRQ),
            (self.folded && count & self.parts.no_resched == 0, Context::PREEMPT_RESCHED),
            (count & self.parts.nmi != 0, Context::NMI),
            (count & part::SOFTIRQS_OFF != 0, Context::BH_OFF),
        ];
        let flags = flags.into_iter().fold(0, |all, (is, flag)| if is { all | flag } else { all });
        let preemption = u8::try_from(count & part::PREEMPTION).unwrap_or(u8::MAX);
        Context::new(flags, preemption, raw.migration())
    }

    /// The same at a tracepoint: of the code that came by it, as ftrace tells it
    /// (`tracing_gen_ctx_dec`, include/linux/trace_events.h). From 7.0 on tracepoints are guarded by
    /// SRCU and leave preemption as it is, those of system calls from 6.13 on.
    pub(super) fn context_of_event(self, raw: RawContext) -> Context {
        let off = self.counted && raw.preempt_count() & part::PREEMPTION != 0;
        self.context(RawContext(if off { raw.0 - (1 << 32) } else { raw.0 }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(folded: bool, lazy: Option<u8>, raw: u64) -> [String; 2] {
        shown_of(PreemptCount::Narrow, folded, lazy, raw)
    }

    fn shown_of(count: PreemptCount, folded: bool, lazy: Option<u8>, raw: u64) -> [String; 2] {
        let need = NeedResched { eager: 3, lazy };
        let meaning = Meaning::new(need, Parts::of(count), folded, true);
        let raw = RawContext(raw);
        [meaning.context(raw), meaning.context_of_event(raw)].map(|context| context.to_string())
    }

    // Each column is one of ftrace's: whoever compares the two must find the same.
    #[test]
    fn words_of_programs_become_the_columns_of_ftrace() {
        const ON: u64 = 1 << 9;
        assert_eq!(shown(true, None, 0x8000_0002_0000_0000), ["d..2.", "d..1."]);
        assert_eq!(shown(true, None, 0x0000_0000_0008_0000 | ON), [".N...", ".N..."]);
        assert_eq!(shown(true, Some(4), 0x8000_0001_0010_0000 | ON), [".l.1.", ".l..."]);
        assert_eq!(shown(false, None, 0x0000_0001_0010_0000 | ON), ["...1.", "....."]);
        assert_eq!(shown(false, None, 0x0001_0100_0008_0002), ["dnH.2", "dnH.2"]);
        // The second byte of the flags is then that with the lazy one, which is bit 19.
        assert_eq!(shown(true, Some(19), 0x8000_0001_0800_0000 | ON), [".l.1.", ".l..."]);
        assert_eq!(shown(true, Some(19), 0x8000_0001_f700_0000 | ON), ["...1.", "....."]);
        assert_eq!(shown(true, None, 0x8010_0201_0000_00ff), ["D.z1f", "D.z.f"]);
        assert_eq!(shown(true, None, 0x8000_0201_0000_0000 | ON), ["b..1.", "b...."]);
    }

    // 7.3 counts bans on interrupts where older ones count interrupts.
    #[test]
    fn a_wide_count_has_its_parts_elsewhere() {
        let shown = |raw| shown_of(PreemptCount::Wide, true, Some(4), raw);
        assert_eq!(shown(0x0080_0002_0000_0000), ["d..2.", "d..1."]);
        assert_eq!(shown(0x0000_0002_0008_0000), ["dN.2.", "dN.1."]);
        assert_eq!(shown(0x0180_0001_0000_0000), ["d.h1.", "d.h.."]);
        assert_eq!(shown(0x0180_0101_0000_0000), ["d.H1.", "d.H.."]);
        assert_eq!(shown(0x1080_0001_0000_0000), ["d.z1.", "d.z.."]);
        assert_eq!(shown(0x0080_0200_0000_0000), ["D....", "D...."]);
    }
}
