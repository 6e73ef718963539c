//! Who waited how long for a CPU: from being woken (`sched:sched_waking`, for new tasks
//! `sched:sched_wakeup_new`) to the switch to the task (`sched:sched_switch`).
//!
//! That is exact: both events carry the guest's clock, and a switch names the task it leads to. A
//! wake-up whose switch may be among lost records is dropped and counted. Kept are the longest one
//! with what its vCPU did meanwhile, histograms, sums by task, and those over a threshold.

mod lines;
mod page;
mod report;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::io;

use crate::export::{Args, Event, Export, Tracepoint};
use crate::stream::{Header, Mark, MarkKind, Shown, Summary};

use super::{Gaps, nanoseconds};
use lines::Lines;
pub use report::{Episode, Histogram, Report, TaskSums};

/// Events that wake-ups are made of.
pub const EVENTS: [&str; 3] =
    ["sched:sched_waking", "sched:sched_wakeup_new", "sched:sched_switch"];
/// Tasks with a priority below this are real-time ones (`MAX_RT_PRIO`, include/linux/sched/prio.h).
const REAL_TIME: i64 = 100;
/// Most tasks with sums of their own.
const TASKS: usize = 1 << 16;
/// Most tasks that wait at a time: more than a kernel has process ids would be a trace made up.
const WAITING: usize = 1 << 17;
/// Most wake-ups over the threshold that are listed.
const LISTED: usize = 1000;
/// Pauses that are remembered, of which a wait may have some.
const PAUSES: usize = 1024;

/// Whose waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// All tasks, from being woken to running
    #[value(name = "wakeup")]
    Wakeup,
    /// Only those of real-time tasks
    #[value(name = "wakeup_rt")]
    WakeupRt,
}

impl Kind {
    /// What the kernel calls the tracer.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Wakeup => "wakeup",
            Self::WakeupRt => "wakeup_rt",
        }
    }

    fn means(self, prio: Option<i64>) -> bool {
        self == Self::Wakeup || prio.is_some_and(|prio| prio < REAL_TIME)
    }
}

/// A task that was woken and does not run yet.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    /// Ticks.
    since: u64,
    /// The vCPU on which it was woken.
    by: u32,
    prio: Option<i64>,
}

/// Makes a [`Report`].
#[derive(Debug)]
pub struct Latency {
    kind: Kind,
    /// Nanoseconds.
    over: Option<u64>,
    header: Header,
    waiting: HashMap<u32, Waiting>,
    /// The task that runs on each vCPU, as far as that was seen.
    running: HashMap<u32, u32>,
    lines: Lines,
    /// Beginnings and ends of pauses, in nanoseconds.
    pauses: VecDeque<(u64, u64)>,
    tasks: HashMap<(u32, String), TaskSums>,
    report: Report,
}

impl Latency {
    /// Of these tasks; waits over so many nanoseconds are listed.
    #[must_use]
    pub fn new(kind: Kind, over: Option<u64>) -> Self {
        Self {
            kind,
            over,
            header: Header::default(),
            waiting: HashMap::new(),
            running: HashMap::new(),
            lines: Lines::default(),
            pauses: VecDeque::new(),
            tasks: HashMap::new(),
            report: Report::new(kind, over),
        }
    }

    /// What was found; so many records came late.
    #[must_use]
    pub fn finish(mut self, late: u64) -> Report {
        self.report.gaps.late = late;
        self.report.waiting = self.waiting.len() as u64;
        let mut tasks: Vec<_> = self.tasks.into_values().collect();
        tasks.sort_by_key(|task| (std::cmp::Reverse(task.longest_ns), task.pid));
        self.report.tasks = tasks;
        self.report
    }

    fn woken(&mut self, event: &Tracepoint<'_>) {
        let Some(pid) = number(event.fields, "pid").and_then(|pid| u32::try_from(pid).ok()) else {
            return;
        };
        let prio = number(event.fields, "prio");
        if !self.kind.means(prio) || self.waiting.len() >= WAITING {
            return;
        }
        // One that runs is kept from sleeping, and waits for nothing.
        if self.running.values().any(|running| *running == pid) {
            return;
        }
        // One that is woken again while it waits has waited since the first time.
        let (since, by) = (event.timestamp, event.vcpu);
        self.waiting.entry(pid).or_insert(Waiting { since, by, prio });
    }

    fn switched(&mut self, event: &Tracepoint<'_>) {
        let fields = event.fields;
        let Some(pid) = number(fields, "next_pid").and_then(|pid| u32::try_from(pid).ok()) else {
            return;
        };
        // What has run until now was not waiting.
        if let Some(prev) = number(fields, "prev_pid").and_then(|pid| u32::try_from(pid).ok()) {
            self.waiting.remove(&prev);
        }
        self.running.insert(event.vcpu, pid);
        let Some(Waiting { since, by, prio }) = self.waiting.remove(&pid) else { return };
        let (from, to) =
            (nanoseconds(&self.header, since), nanoseconds(&self.header, event.timestamp));
        let ns = to.saturating_sub(from);
        let overlap = |&(start, end): &(u64, u64)| end.min(to).saturating_sub(start.max(from));
        let episode = Episode {
            pid,
            comm: text(fields, "next_comm").unwrap_or_else(|| "<...>".to_owned()),
            prio: number(fields, "next_prio").or(prio),
            cpu: event.vcpu,
            woken_on: by,
            since_ns: from,
            until_ns: to,
            ns,
            paused_ns: self.pauses.iter().map(overlap).sum::<u64>().min(ns),
        };
        self.report.histogram(event.vcpu).add(ns);
        self.report.count += 1;
        self.sum(&episode);
        if self.over.is_some_and(|over| ns >= over) {
            if self.report.listed.len() < LISTED {
                self.report.listed.push(episode.clone());
            } else {
                self.report.unlisted += 1;
            }
        }
        if self.report.longest.as_ref().is_none_or(|longest| ns > longest.ns) {
            self.report.lines = self.lines.between(event.vcpu, since, event.timestamp);
            self.report.longest = Some(episode);
        }
    }

    fn sum(&mut self, episode: &Episode) {
        let key = (episode.pid, episode.comm.clone());
        if self.tasks.len() >= TASKS && !self.tasks.contains_key(&key) {
            self.report.other_tasks += 1;
            return;
        }
        let sums = self.tasks.entry(key).or_insert_with(|| TaskSums {
            pid: episode.pid,
            comm: episode.comm.clone(),
            prio: episode.prio,
            ..TaskSums::default()
        });
        sums.count += 1;
        sums.total_ns = sums.total_ns.saturating_add(episode.ns);
        if episode.ns >= sums.longest_ns {
            (sums.longest_ns, sums.at_ns) = (episode.ns, episode.until_ns);
        }
    }

    fn mark(&mut self, mark: &Mark) {
        let paused = matches!(mark.kind, MarkKind::Pause | MarkKind::Attach | MarkKind::Filter);
        if !paused || mark.duration_ns == 0 {
            return;
        }
        if self.pauses.len() == PAUSES {
            self.pauses.pop_front();
        }
        let start = nanoseconds(&self.header, mark.ticks);
        self.pauses.push_back((start, start.saturating_add(mark.duration_ns)));
    }
}

impl Export for Latency {
    fn begin(&mut self, header: &Header) -> io::Result<()> {
        self.header = header.clone();
        self.lines.begin(header);
        self.report.begin(header);
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        self.report.gaps.event(&self.header, event);
        match event {
            Event::Entry(entry) => self.lines.entry(entry),
            Event::Tracepoint(event) => {
                self.lines.tracepoint(event);
                match event.event.symbol {
                    Some(("sched:sched_waking" | "sched:sched_wakeup_new", _)) => self.woken(event),
                    Some(("sched:sched_switch", _)) => self.switched(event),
                    _ => {}
                }
            }
            Event::Loss(_) => {
                // Their switches may be among the lost.
                self.report.doubtful += self.waiting.len() as u64;
                self.waiting.clear();
                self.running.clear();
                self.lines.clear();
            }
            Event::Mark(mark) => self.mark(mark),
            Event::Return(_) | Event::Tail(_) | Event::Unfinished(_) => {}
        }
        Ok(())
    }

    fn joined(&mut self, totals: &[(u64, u64)]) -> io::Result<()> {
        self.report.gaps.begin_at(totals);
        Ok(())
    }

    fn end(&mut self, summary: Option<&Summary>) -> io::Result<()> {
        self.report.gaps.end(summary);
        Ok(())
    }
}

fn field<'a>(fields: Option<Args<'a>>, name: &str) -> Option<Shown<'a>> {
    fields?.iter().find(|(known, _)| *known == name).and_then(|(_, shown)| shown)
}

fn number(fields: Option<Args<'_>>, name: &str) -> Option<i64> {
    match field(fields, name)? {
        Shown::Signed(number) => Some(number),
        Shown::Unsigned(number) => i64::try_from(number).ok(),
        _ => None,
    }
}

fn text(fields: Option<Args<'_>>, name: &str) -> Option<String> {
    match field(fields, name)? {
        Shown::Text(bytes) => Some(crate::export::printable(&String::from_utf8_lossy(&bytes))),
        _ => None,
    }
}
