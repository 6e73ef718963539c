//! How long interrupts or preemption were off on each vCPU (`preemptirq:*`).
//!
//! As in the kernel's own tracers (kernel/trace/trace_irqsoff.c), the time of an idle CPU
//! (`power:cpu_idle`) does not count, but what its interrupts hold off does. Records that have the state of their CPU are compared with
//! the events. If something was off before the events were traced, its beginning is unknown: that
//! region is left out, and the event at its end tells the state.

use std::collections::BTreeMap;

use crate::export::Tracepoint;
use crate::stream::Context;

use super::{Episode, Found, Kind, name, number, pid};

/// `state` of `power:cpu_idle` when idling ends (`PWR_EVENT_EXIT`, include/trace/events/power.h).
const IDLE_ENDS: i64 = 0xffff_ffff;

/// Since when, and where that began.
#[derive(Clone, Debug)]
struct Begun {
    /// Nanoseconds.
    since: u64,
    place: String,
}

/// What is known of a vCPU.
#[derive(Clone, Debug, Default)]
struct Cpu {
    /// None: not known yet.
    irqs_off: Option<bool>,
    preempt_off: Option<bool>,
    idle: Option<bool>,
    /// It idles, but interrupts were turned off meanwhile: by one that came. (How an idle CPU has them
    /// while it sleeps is its own affair.)
    woken: bool,
    begun: Option<Begun>,
    /// The task that runs, and its priority.
    task: Option<(u32, Option<i64>)>,
}

impl Cpu {
    /// Whether it is off, as far as that is known.
    fn is_off(&self, kind: Kind) -> Option<bool> {
        if self.idle? {
            return Some(self.woken && kind != Kind::Preemptoff);
        }
        match kind {
            Kind::Irqsoff => self.irqs_off,
            Kind::Preemptoff => self.preempt_off,
            _ => match (self.irqs_off, self.preempt_off) {
                (Some(true), _) | (_, Some(true)) => Some(true),
                (Some(false), Some(false)) => Some(false),
                _ => None,
            },
        }
    }

    /// What was off is on.
    fn ended(&mut self, kind: Kind, event: &Tracepoint<'_>, found: &mut Found) {
        let Some(Begun { since, place: started }) = self.begun.take() else { return };
        let ns = found.at(event.timestamp);
        let duration_ns = ns.saturating_sub(since);
        found.sum(&started, None, duration_ns, ns);
        let prio = self.task.as_ref().filter(|task| task.0 == event.pid).and_then(|task| task.1);
        found.add(Episode {
            cpu: event.vcpu,
            pid: event.pid,
            comm: event.comm.unwrap_or("<...>").to_owned(),
            prio,
            since_ns: since,
            ns,
            duration_ns,
            started: Some(started),
            ended: Some(place(event)),
            ..Episode::of(kind)
        });
    }
}

/// Times in which something is off.
#[derive(Debug)]
pub(super) struct Regions {
    kind: Kind,
    cpus: BTreeMap<u32, Cpu>,
}

impl Regions {
    pub(super) fn new(kind: Kind) -> Self {
        Self { kind, cpus: BTreeMap::new() }
    }

    /// How many have not ended.
    pub(super) fn open(&self) -> u64 {
        self.cpus.values().filter(|cpu| cpu.begun.is_some()).count() as u64
    }

    /// Other events are traced from here on: nothing is known any more.
    pub(super) fn forget(&mut self, found: &mut Found) {
        found.report.doubtful += self.open();
        self.cpus.clear();
    }

    pub(super) fn lost(&mut self, vcpu: u32, found: &mut Found) {
        if self.cpus.remove(&vcpu).is_some_and(|cpu| cpu.begun.is_some()) {
            found.report.doubtful += 1;
        }
    }

    /// A record tells the state of its CPU: where that is another, something was not seen.
    pub(super) fn state(&mut self, vcpu: u32, context: Option<Context>, found: &mut Found) {
        let Some((irqs, preempt)) = is_off(context) else { return };
        let cpu = self.cpus.entry(vcpu).or_default();
        let (irqs_matter, preempt_matters) =
            (self.kind != Kind::Preemptoff, self.kind != Kind::Irqsoff);
        let differs = |matters: bool, known: Option<bool>, told: bool| {
            matters && known.is_some_and(|known| known != told)
        };
        let differs = differs(irqs_matter, cpu.irqs_off, irqs)
            || differs(preempt_matters, cpu.preempt_off, preempt);
        if differs {
            found.report.differing += 1;
            cpu.begun = None;
        }
        (cpu.irqs_off, cpu.preempt_off) = (Some(irqs), Some(preempt));
        cpu.woken &= irqs;
    }

    pub(super) fn event(&mut self, event: &Tracepoint<'_>, found: &mut Found) {
        let kind = self.kind;
        let cpu = self.cpus.entry(event.vcpu).or_default();
        if event.pid != 0 {
            cpu.idle.get_or_insert(false);
        }
        match name(event) {
            // These come only where it was on.
            Some("preemptirq:irq_disable") if cpu.irqs_off.is_none() && is_interrupt(event) => {
                cpu.irqs_off = Some(false);
            }
            Some("preemptirq:preempt_disable") => {
                cpu.preempt_off.get_or_insert(false);
            }
            _ => {}
        }
        let was_off = cpu.is_off(kind);
        let mut again = false;
        match name(event) {
            Some("preemptirq:irq_disable") => {
                // An interrupt comes only while they are on: they were, and the record of that is not
                // written yet. Where preemption is off as well, that was no end.
                let was_on = match kind {
                    Kind::Irqsoff => true,
                    Kind::Preemptirqsoff => {
                        cpu.preempt_off == Some(false) || cpu.idle == Some(true)
                    }
                    _ => false,
                };
                again = was_on && cpu.irqs_off == Some(true) && is_interrupt(event);
                cpu.irqs_off = Some(true);
                cpu.woken = cpu.idle == Some(true);
            }
            Some("preemptirq:irq_enable") => {
                cpu.irqs_off = Some(false);
                cpu.woken = false;
            }
            Some("preemptirq:preempt_disable") => cpu.preempt_off = Some(true),
            Some("preemptirq:preempt_enable") => cpu.preempt_off = Some(false),
            Some("power:cpu_idle") => {
                let state = number(event.fields, "state");
                cpu.idle = Some(state.map(|state| state & IDLE_ENDS) != Some(IDLE_ENDS));
                cpu.woken = false;
            }
            Some("sched:sched_switch") => {
                let next = pid(event.fields, "next_pid");
                cpu.task = next.map(|pid| (pid, number(event.fields, "next_prio")));
            }
            _ => {}
        }
        let is_off = cpu.is_off(kind) == Some(true);
        if (was_off == Some(true) && !is_off) || again {
            cpu.ended(kind, event, found);
        }
        // Where it is not known that it was on, this may be in the midst of something longer.
        if is_off && (was_off == Some(false) || again) {
            cpu.begun = Some(Begun { since: found.at(event.timestamp), place: place(event) });
        }
    }
}

/// Whether it is told where an interrupt or exception comes.
fn is_interrupt(event: &Tracepoint<'_>) -> bool {
    let place = place(event);
    // x86-64, riscv64.
    place.starts_with("asm_") || place == "handle_exception"
}

/// Where an event was; others than `preemptirq:*` are places of their own.
fn place(event: &Tracepoint<'_>) -> String {
    let switches = name(event).is_some_and(|name| name.starts_with("preemptirq:"));
    let caller = event.caller.filter(|_| switches).map(|caller| caller.label());
    caller.unwrap_or_else(|| {
        let text = event.text();
        let named = text.split_whitespace().find_map(|word| word.strip_prefix("caller="));
        named.map_or_else(|| event.event.label(), str::to_owned)
    })
}

/// Whether interrupts are off, and preemption, if a record tells. Interrupts and softirqs are
/// not preempted either, though the depth leaves them out.
fn is_off(context: Option<Context>) -> Option<(bool, bool)> {
    const INSIDE: u8 = Context::HARDIRQ | Context::SOFTIRQ | Context::NMI | Context::BH_OFF;
    let context = context?;
    let preempt_off = context.preemption() > 0 || context.flags & INSIDE != 0;
    Some((context.flags & Context::IRQS_OFF != 0, preempt_off))
}
