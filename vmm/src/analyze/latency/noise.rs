//! Noise: what interrupts the tasks that run on vCPUs, as the kernel's osnoise tracer measures it
//! (Documentation/trace/osnoise-tracer.rst), but without a thread in the guest.
//!
//! osnoise measures with a thread that never sleeps. Here any running task takes its place: noise
//! is what keeps the task from running while it could. Interrupts of an idle CPU are in the sums,
//! but are no noise. Nested time counts once: the time of an interrupt in a softirq does not count
//! as the softirq's.

use std::collections::BTreeMap;

use crate::export::Tracepoint;
use crate::export::fields::in_form;
use crate::stream::Header;

use super::rows::{PERIOD, Row, Source};
use super::{Episode, Found, Kind, name, number, pid, task, text};

/// Noises that are no farther apart are one, in nanoseconds: osnoise's thread does not see
/// shorter gaps, either (`tracing_thresh`, 5 us where nobody has set it).
const JOINED: u64 = 5_000;
/// Most things at a time that take one CPU away: kernels have four levels.
const FRAMES: usize = 16;
/// Periods without an event after which a CPU is taken for idle: ticks come each second at least
/// while a task runs (`sched_tick_remote`, kernel/sched/core.c).
const SILENT: u64 = 60;
/// A task that is switched from in one of these states (`TASK_REPORT`, include/linux/sched.h) does
/// not want to run on.
const SLEEPS: i64 = 0xff;

/// Something that has the CPU now.
#[derive(Clone, Debug)]
struct Frame {
    source: Source,
    name: String,
    /// Nanoseconds.
    since: u64,
    /// For how long something inside of it had the CPU.
    inner: u64,
}

/// One noise, without a break.
#[derive(Clone, Debug)]
struct Stretch {
    /// Nanoseconds.
    since: u64,
    until: u64,
    /// The task that did not run.
    pid: u32,
    comm: String,
    /// What it was for the most part, and for how long.
    mostly: (String, u64),
}

#[derive(Clone, Debug, Default)]
struct Cpu {
    frames: Vec<Frame>,
    /// A task that could run, and does not.
    preempted: Option<u32>,
    /// The task that runs.
    current: Option<u32>,
    stretch: Option<Stretch>,
    row: Row,
    /// Beginning of the period, and up to where its times are counted.
    period: u64,
    counted: u64,
    /// Since when, in this row, nothing has taken the CPU from the task.
    free: u64,
}

/// What there is to tell of a moment.
#[derive(Clone, Copy)]
struct Moment<'a> {
    vcpu: u32,
    ns: u64,
    pid: u32,
    comm: Option<&'a str>,
}

/// What takes vCPUs away.
#[derive(Debug, Default)]
pub(super) struct Noise {
    cpus: BTreeMap<u32, Cpu>,
    /// Softirqs run in tasks and can be preempted: they are the tasks' time.
    real_time: bool,
    /// When the first period began.
    start: Option<u64>,
}

impl Noise {
    pub(super) fn begin(&mut self, header: &Header) {
        let is_rt = |part: &str| {
            part.strip_prefix("rt").is_some_and(|rest| rest.bytes().all(|c| c.is_ascii_digit()))
        };
        self.real_time = header.release.split(['-', '+', '.']).any(is_rt);
    }

    /// How many things have the CPU now.
    pub(super) fn open(&self) -> u64 {
        self.cpus.values().map(|cpu| cpu.frames.len() as u64).sum()
    }

    pub(super) fn lost(&mut self, vcpu: u32, found: &mut Found) {
        let Some(cpu) = self.cpus.get_mut(&vcpu) else { return };
        found.report.doubtful += cpu.frames.len() as u64;
        cpu.break_off(vcpu, found);
        (cpu.frames, cpu.preempted, cpu.current) = (Vec::new(), None, None);
    }

    /// Other events are traced from here on: nothing is known any more.
    pub(super) fn forget(&mut self, found: &mut Found) {
        found.report.doubtful += self.open();
        for (vcpu, mut cpu) in std::mem::take(&mut self.cpus) {
            cpu.break_off(vcpu, found);
            let until = cpu.counted;
            cpu.close_row(vcpu, until, found);
        }
        self.start = None;
    }

    /// All vCPUs were paused.
    pub(super) fn paused(&mut self, (start, end): (u64, u64), found: &mut Found) {
        for (&vcpu, cpu) in &mut self.cpus {
            cpu.out(vcpu, (start, end), "paused by vmtrace".to_owned(), found);
        }
    }

    /// A vCPU was out of the guest.
    pub(super) fn out_of_guest(
        &mut self,
        vcpu: u32,
        times: (u64, u64),
        label: String,
        found: &mut Found,
    ) {
        let Some(cpu) = self.cpus.get_mut(&vcpu) else { return };
        cpu.out(vcpu, times, label, found);
    }

    /// The trace ends.
    pub(super) fn end(&mut self, found: &mut Found) {
        for (&vcpu, cpu) in &mut self.cpus {
            cpu.break_off(vcpu, found);
            let until = cpu.counted;
            cpu.close_row(vcpu, until, found);
        }
        found.report.rows.sort_by_key(|row| (row.ns, row.cpu));
    }

    pub(super) fn event(&mut self, event: &Tracepoint<'_>, found: &mut Found) {
        let (vcpu, ns) = (event.vcpu, found.at(event.timestamp));
        let start = *self.start.get_or_insert(ns);
        let now = Moment { vcpu, ns, pid: event.pid, comm: event.comm };
        let cpu = self.cpus.entry(vcpu).or_insert_with(|| Cpu {
            period: start,
            counted: ns,
            free: ns,
            ..Cpu::default()
        });
        cpu.roll(vcpu, ns, found);
        if cpu.current.is_none() {
            cpu.current = Some(event.pid);
            cpu.free = cpu.free.max(ns);
        }
        let fields = event.fields;
        match name(event) {
            Some("sched:sched_switch") => self.switched(event, now, found),
            Some("irq:irq_handler_entry") => {
                cpu.push(Source::Irq, handler(event), now, found);
            }
            Some("irq:irq_handler_exit") => {
                let number = number(fields, "irq").unwrap_or(-1);
                cpu.left(Source::Irq, &format!("irq {number}"), now, found);
            }
            Some("irq:softirq_entry") if !self.real_time => {
                cpu.push(Source::Softirq, softirq(event), now, found);
            }
            Some("irq:softirq_exit") if !self.real_time => {
                cpu.left(Source::Softirq, &softirq(event), now, found);
            }
            Some("nmi:nmi_handler") => {
                let took = number(fields, "delta_ns").and_then(|ns| u64::try_from(ns).ok());
                let begun = Moment { ns: ns.saturating_sub(took.unwrap_or(0)), ..now };
                cpu.told_at_its_end(begun.ns, ns);
                cpu.push(Source::Nmi, "NMI".to_owned(), begun, found);
                cpu.pop(now, found);
            }
            Some(other) => {
                let Some(vector) = other.strip_prefix("irq_vectors:") else { return };
                if let Some(vector) = vector.strip_suffix("_entry") {
                    cpu.push(Source::Irq, vector.to_owned(), now, found);
                } else if let Some(vector) = vector.strip_suffix("_exit") {
                    cpu.left(Source::Irq, vector, now, found);
                }
            }
            None => {}
        }
    }

    fn switched(&mut self, event: &Tracepoint<'_>, now: Moment<'_>, found: &mut Found) {
        let fields = event.fields;
        let (Some(prev), Some(next)) = (pid(fields, "prev_pid"), pid(fields, "next_pid")) else {
            return;
        };
        for (&vcpu, cpu) in &mut self.cpus {
            if vcpu == now.vcpu {
                cpu.out_of_interrupts(found);
                if !cpu.frames.is_empty() {
                    cpu.pop(now, found);
                }
                if cpu.current == Some(0) {
                    cpu.free = cpu.free.max(now.ns);
                }
                cpu.current = Some(next);
            } else if cpu.preempted == Some(next) {
                // It runs elsewhere: nobody waits for this one.
                cpu.preempted = None;
                if cpu.frames.first().is_some_and(|frame| frame.source == Source::Thread) {
                    cpu.roll(vcpu, now.ns, found);
                    cpu.let_go(Moment { vcpu, ..now }, found);
                }
            }
        }
        let Some(cpu) = self.cpus.get_mut(&now.vcpu) else { return };
        let could_run = number(fields, "prev_state").is_some_and(|state| state & SLEEPS == 0);
        if cpu.preempted.is_none() && prev != 0 && could_run {
            cpu.preempted = Some(prev);
        }
        if next == 0 || cpu.preempted == Some(next) {
            cpu.preempted = None;
        }
        if cpu.preempted.is_some() {
            let comm = text(fields, "next_comm").unwrap_or_else(|| "<...>".to_owned());
            cpu.push(Source::Thread, task(&comm, next), now, found);
        }
    }
}

impl Cpu {
    /// The host had it from then to then. That is the task's time as well, whatever comes next.
    fn out(&mut self, vcpu: u32, (start, end): (u64, u64), label: String, found: &mut Found) {
        let begun = Moment { vcpu, ns: start, pid: self.current.unwrap_or(0), comm: None };
        self.roll(vcpu, start, found);
        self.push(Source::Host, label, begun, found);
        self.roll(vcpu, end, found);
        self.pop(Moment { ns: end, ..begun }, found);
    }

    /// Something takes the CPU.
    fn push(&mut self, source: Source, name: String, now: Moment<'_>, found: &mut Found) {
        if self.frames.len() >= FRAMES {
            found.report.doubtful += 1;
            self.frames.remove(0);
        }
        // An idle CPU is nobody's.
        if self.frames.is_empty() && (now.pid != 0 || source == Source::Thread) {
            let joins = |stretch: &Stretch| now.ns.saturating_sub(stretch.until) <= JOINED;
            if !self.stretch.as_ref().is_some_and(joins) {
                self.finish(now.vcpu, found);
                self.stretch = Some(Stretch {
                    since: now.ns,
                    until: now.ns,
                    pid: now.pid,
                    comm: now.comm.unwrap_or("<...>").to_owned(),
                    mostly: (name.clone(), 0),
                });
            }
        } else if self.frames.is_empty() {
            self.finish(now.vcpu, found);
        }
        self.frames.push(Frame { source, name, since: now.ns, inner: 0 });
    }

    /// The innermost gives the CPU back.
    fn pop(&mut self, now: Moment<'_>, found: &mut Found) {
        let Some(frame) = self.frames.pop() else { return };
        let whole = now.ns.saturating_sub(frame.since);
        let own = whole.saturating_sub(frame.inner);
        if let Some(around) = self.frames.last_mut() {
            around.inner = around.inner.saturating_add(whole);
        }
        found.sum(&frame.name, None, own, now.ns);
        if self.frames.is_empty() {
            self.free = self.free.max(now.ns);
        }
        let Some(stretch) = &mut self.stretch else { return };
        self.row.count(frame.source);
        stretch.until = now.ns;
        if own > stretch.mostly.1 {
            stretch.mostly = (frame.name, own);
        }
        let longest = stretch.until.saturating_sub(stretch.since);
        self.row.longest_ns = self.row.longest_ns.max(longest);
    }

    /// The task that took the CPU has it to itself from now on. An interrupt that has come meanwhile goes on.
    fn let_go(&mut self, now: Moment<'_>, found: &mut Found) {
        let inside = self.frames.split_off(self.frames.len().min(1));
        if let (Some(task), Some(first)) = (self.frames.last_mut(), inside.first()) {
            task.inner = task.inner.saturating_add(now.ns.saturating_sub(first.since));
        }
        self.pop(now, found);
        self.frames = inside;
    }

    /// What is told when it is over took the CPU from then to then, which is counted as the task's time already.
    fn told_at_its_end(&mut self, since: u64, until: u64) {
        if self.frames.is_empty() && self.has_task() {
            self.row.noise_ns += until.saturating_sub(since.max(self.free));
        }
    }

    fn has_task(&self) -> bool {
        self.current.is_some_and(|pid| pid != 0)
    }

    /// What began as this gives the CPU back; what was inside of it has ended unseen.
    fn left(&mut self, source: Source, name: &str, now: Moment<'_>, found: &mut Found) {
        let is_it = |frame: &Frame| {
            let own = frame.name.strip_prefix(name);
            frame.source == source
                && own.is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
        };
        let Some(index) = self.frames.iter().rposition(is_it) else { return };
        found.report.doubtful += (self.frames.len() - index - 1) as u64;
        self.frames.truncate(index + 1);
        self.pop(now, found);
    }

    /// Tasks are switched outside of interrupts: what still seems to be inside has ended unseen.
    fn out_of_interrupts(&mut self, found: &mut Found) {
        let tasks = usize::from(self.frames.first().is_some_and(|it| it.source == Source::Thread));
        found.report.doubtful += self.frames.len().saturating_sub(tasks) as u64;
        self.frames.truncate(tasks);
        if self.frames.is_empty() {
            self.free = self.free.max(self.counted);
        }
        // One of which nothing is known but that it began.
        if tasks == 0 && self.stretch.as_ref().is_some_and(|it| it.until <= it.since) {
            self.stretch = None;
        }
    }

    /// Nothing more is seen of the noise: one that has not ended is left out.
    fn break_off(&mut self, vcpu: u32, found: &mut Found) {
        match self.frames.is_empty() {
            true => self.finish(vcpu, found),
            false => self.stretch = None,
        }
    }

    /// The noise is over.
    fn finish(&mut self, vcpu: u32, found: &mut Found) {
        let Some(Stretch { since, until, pid, comm, mostly }) = self.stretch.take() else { return };
        let episode = Episode {
            cpu: vcpu,
            pid,
            comm,
            since_ns: since,
            ns: until,
            duration_ns: until.saturating_sub(since),
            mostly: Some(mostly.0),
            ..Episode::of(Kind::Osnoise)
        };
        found.add(episode);
    }

    /// Counts what has passed, and ends periods.
    fn roll(&mut self, vcpu: u32, now: u64, found: &mut Found) {
        while now.saturating_sub(self.period) >= PERIOD {
            let until = self.period.saturating_add(PERIOD);
            // A noise that goes on.
            if let Some(stretch) = self.stretch.as_ref().filter(|_| !self.frames.is_empty()) {
                let longest = until.saturating_sub(stretch.since.max(self.period));
                self.row.longest_ns = self.row.longest_ns.max(longest);
            }
            self.close_row(vcpu, until, found);
            // Of an idle CPU nothing is heard for long; of another one not for so long.
            let whole = now.saturating_sub(until) / PERIOD;
            let is_silent = self.current == Some(0) || whole > SILENT;
            let skipped = if is_silent { whole * PERIOD } else { 0 };
            self.period = until.saturating_add(skipped);
            self.counted = self.counted.max(self.period);
            self.free = self.free.max(self.period);
        }
        self.pass(now);
    }

    /// Counts a time in which nothing has changed.
    fn pass(&mut self, until: u64) {
        let passed = until.saturating_sub(self.counted);
        if self.has_task() {
            self.row.runtime_ns += passed;
            if self.stretch.is_some() && !self.frames.is_empty() {
                self.row.noise_ns += passed;
            }
        }
        self.counted = self.counted.max(until);
    }

    fn close_row(&mut self, vcpu: u32, until: u64, found: &mut Found) {
        self.pass(until);
        let row = Row { cpu: vcpu, ns: until, ..std::mem::take(&mut self.row) };
        if row.runtime_ns == 0 {
            return;
        }
        found.row(row);
    }
}

fn handler(event: &Tracepoint<'_>) -> String {
    let number = number(event.fields, "irq").unwrap_or(-1);
    match text(event.fields, "name") {
        Some(name) => format!("irq {number} {name}"),
        None => format!("irq {number}"),
    }
}

fn softirq(event: &Tracepoint<'_>) -> String {
    let name = in_form(event, "vec").or_else(|| Some(number(event.fields, "vec")?.to_string()));
    format!("softirq {}", name.as_deref().unwrap_or("?"))
}
