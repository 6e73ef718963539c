//! How long tasks waited for a CPU: from the wakeup (`sched:sched_waking`, for new tasks
//! `sched:sched_wakeup_new`) to the switch to the task (`sched:sched_switch`).

use std::collections::HashMap;

use crate::export::Tracepoint;

use super::{Episode, Found, Kind, name, number, pid, task, text};

/// Tasks with a priority below this are real-time ones (`MAX_RT_PRIO`, include/linux/sched/prio.h).
const REAL_TIME: i64 = 100;
/// Most tasks that wait at a time: more than a kernel has process ids would be a trace made up.
const WAITING: usize = 1 << 17;

/// A task that was woken and does not run yet.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    /// Nanoseconds.
    since: u64,
    /// The vCPU on which it was woken.
    by: u32,
    prio: Option<i64>,
}

/// Tasks that wait.
#[derive(Debug)]
pub(super) struct Waits {
    kind: Kind,
    waiting: HashMap<u32, Waiting>,
    /// The task that runs on each vCPU, as far as that was seen.
    running: HashMap<u32, u32>,
}

impl Waits {
    pub(super) fn new(kind: Kind) -> Self {
        Self { kind, waiting: HashMap::new(), running: HashMap::new() }
    }

    /// How many tasks wait.
    pub(super) fn open(&self) -> u64 {
        self.waiting.len() as u64
    }

    pub(super) fn lost(&mut self, found: &mut Found) {
        found.report.doubtful += self.open();
        self.waiting.clear();
        self.running.clear();
    }

    pub(super) fn event(&mut self, event: &Tracepoint<'_>, found: &mut Found) {
        // What runs on a vCPU is not known before its first switch is seen.
        self.running.entry(event.vcpu).or_insert(event.pid);
        match name(event) {
            Some("sched:sched_waking" | "sched:sched_wakeup_new") => self.woken(event, found),
            Some("sched:sched_switch") => self.switched(event, found),
            _ => {}
        }
    }

    /// Other events are traced from here on: nothing is known any more.
    pub(super) fn forget(&mut self, found: &mut Found) {
        self.lost(found);
    }

    fn means(&self, prio: Option<i64>) -> bool {
        self.kind == Kind::Wakeup || prio.is_some_and(|prio| prio < REAL_TIME)
    }

    fn woken(&mut self, event: &Tracepoint<'_>, found: &Found) {
        let Some(pid) = pid(event.fields, "pid") else { return };
        let prio = number(event.fields, "prio");
        if !self.means(prio) || self.waiting.len() >= WAITING {
            return;
        }
        // One that runs is kept from sleeping, and waits for nothing.
        if self.running.values().any(|running| *running == pid) {
            return;
        }
        // One that is woken again while it waits has waited since the first time.
        let (since, by) = (found.at(event.timestamp), event.vcpu);
        self.waiting.entry(pid).or_insert(Waiting { since, by, prio });
    }

    fn switched(&mut self, event: &Tracepoint<'_>, found: &mut Found) {
        let fields = event.fields;
        let Some(next) = pid(fields, "next_pid") else { return };
        // What has run until now was not waiting.
        if let Some(prev) = pid(fields, "prev_pid") {
            self.waiting.remove(&prev);
        }
        self.running.insert(event.vcpu, next);
        let Some(Waiting { since, by, prio }) = self.waiting.remove(&next) else { return };
        let ns = found.at(event.timestamp);
        let comm = text(fields, "next_comm").unwrap_or_else(|| "<...>".to_owned());
        let prio = number(fields, "next_prio").or(prio);
        let duration_ns = ns.saturating_sub(since);
        found.sum(&task(&comm, next), prio, duration_ns, ns);
        let episode = Episode {
            cpu: event.vcpu,
            pid: next,
            comm,
            prio,
            since_ns: since,
            ns,
            duration_ns,
            woken_on: Some(by),
            ..Episode::of(self.kind)
        };
        found.add(episode);
    }
}
