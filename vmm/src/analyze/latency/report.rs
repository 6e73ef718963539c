//! The data of a latency report.

use std::cmp::Ordering;
use std::collections::VecDeque;
use std::io::{self, Write};

use serde::Serialize;

use crate::stream::{Context, Header};

use super::lines::Seen;
use super::{Gaps, Kind, Row};

/// Classes of durations: below 1 us, below 2 us, and so on up to 2^22 us (4.2 s) and more.
pub(super) const CLASSES: usize = 24;

/// How many episodes there were of which length, on one vCPU.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Histogram {
    /// The vCPU.
    pub cpu: u32,
    /// How many were below 1 us, below 2 us, below 4 us and so on; the last is all that is longer.
    pub below_us: [u64; CLASSES],
}

impl Histogram {
    pub(super) fn add(&mut self, nanoseconds: u64) {
        let class = (nanoseconds / 1000).checked_ilog2().map_or(0, |log| log + 1);
        let class = usize::try_from(class).unwrap_or(CLASSES).min(CLASSES - 1);
        self.below_us[class] += 1;
    }
}

/// One latency; times are in nanoseconds since the clock's start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Episode {
    /// Of which kind: `irqsoff`, `wakeup` and so on.
    pub kind: &'static str,
    /// When it ended.
    pub ns: u64,
    /// The vCPU; of a wait the one on which the task ran then.
    pub cpu: u32,
    /// The task that waited, or that ran when it ended; of a noise the task that did not run.
    pub pid: u32,
    /// Its name.
    pub comm: String,
    /// Its priority, as the kernel has it (0 to 99: real time), if known.
    pub prio: Option<i64>,
    /// How long it was.
    pub duration_ns: u64,
    /// For how long of that its vCPU did not run because of its host: vmtrace had all vCPUs paused,
    /// or, where exits were traced, this one was out of the guest for whatever reason.
    pub host_ns: u64,
    /// For how long of that vmtrace had all vCPUs paused.
    pub paused_ns: u64,
    /// When it began.
    pub since_ns: u64,
    /// Where the task was woken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub woken_on: Option<u32>,
    /// Where in the kernel it began.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started: Option<String>,
    /// Where in the kernel it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<String>,
    /// What it was for the most part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mostly: Option<String>,
}

impl Episode {
    pub(super) fn of(kind: Kind) -> Self {
        Self { kind: kind.name(), ..Self::default() }
    }
}

/// Episodes of one thing: of waits a task, of times where they began, of noises what made them.
/// Times are in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Sums {
    /// Its name.
    pub name: String,
    /// Of a task, its priority at the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prio: Option<i64>,
    /// How many.
    pub count: u64,
    /// All together.
    pub total_ns: u64,
    /// The longest.
    pub longest_ns: u64,
    /// When that ended.
    pub at_ns: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Sums {
    /// Their order.
    pub(super) fn longest_first(one: &Self, other: &Self) -> Ordering {
        other.longest_ns.cmp(&one.longest_ns).then_with(|| one.name.cmp(&other.name))
    }
}

/// What was found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// `irqsoff`, `wakeup` and so on.
    pub latency: &'static str,
    /// The guest's kernel.
    pub release: String,
    /// How many vCPUs it has.
    pub vcpus: u32,
    /// How many episodes there were.
    pub count: u64,
    /// The longest.
    pub longest: Option<Episode>,
    /// By vCPU.
    pub histograms: Vec<Histogram>,
    /// The longest first.
    pub sums: Vec<Sums>,
    /// Of a report of what was found so far: sums that are not among these.
    #[serde(skip_serializing_if = "is_zero")]
    pub more_sums: u64,
    /// Episodes of things for which there was no room.
    pub other_sums: u64,
    /// Of noise: what tasks got of the vCPUs, second by second.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rows: Vec<Row>,
    /// Those for which there was no room.
    pub other_rows: u64,
    /// The threshold of the list, in nanoseconds.
    pub over_ns: Option<u64>,
    /// Those that took at least that long, in their order.
    #[serde(skip)]
    pub listed: VecDeque<Episode>,
    /// Those of them for which there was no room.
    pub unlisted: u64,
    /// Episodes of which not all records are there.
    pub doubtful: u64,
    /// Episodes that had not ended when the trace did.
    pub open: u64,
    /// Records whose CPU was in another state than the events tell.
    pub differing: u64,
    /// Of a report of a guest that goes on: from when to when it is, in nanoseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seen_ns: Option<(u64, u64)>,
    /// Not all that had happened by then was seen: the output of the trace was too slow.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub behind: bool,
    /// Exits of vCPUs that were traced: the host's time contains these where there are any.
    pub exits: u64,
    /// What is missing in the trace.
    pub gaps: Gaps,
    #[serde(skip)]
    pub(super) kind: Kind,
    /// Whether its records tell the state of the CPU.
    #[serde(skip)]
    pub(super) context: bool,
    #[serde(skip)]
    pub(super) lines: Seen,
}

impl Report {
    pub(super) fn new(kind: Kind, over_ns: Option<u64>) -> Self {
        Self {
            latency: kind.name(),
            release: String::new(),
            vcpus: 0,
            count: 0,
            longest: None,
            histograms: Vec::new(),
            sums: Vec::new(),
            more_sums: 0,
            other_sums: 0,
            rows: Vec::new(),
            other_rows: 0,
            over_ns,
            listed: VecDeque::new(),
            unlisted: 0,
            doubtful: 0,
            open: 0,
            differing: 0,
            seen_ns: None,
            behind: false,
            exits: 0,
            gaps: Gaps::new(),
            kind,
            context: false,
            lines: Seen::default(),
        }
    }

    pub(super) fn begin(&mut self, header: &Header) {
        self.release.clone_from(&header.release);
        self.vcpus = header.vcpus;
        self.context = Context::is_in(header);
        self.histograms =
            (0..header.vcpus).map(|cpu| Histogram { cpu, ..<_>::default() }).collect();
    }

    /// That of a vCPU.
    pub(super) fn histogram(&mut self, cpu: u32) -> &mut Histogram {
        let index = self.histograms.iter().position(|of| of.cpu == cpu);
        let index = index.unwrap_or_else(|| {
            self.histograms.push(Histogram { cpu, ..Histogram::default() });
            self.histograms.len() - 1
        });
        &mut self.histograms[index]
    }

    /// JSON lines: a `latency` for each episode over the threshold, in their order, and then a
    /// `latencies` with all the rest.
    ///
    /// # Errors
    /// When the output fails.
    pub fn write_json(&self, out: &mut dyn Write) -> io::Result<()> {
        #[derive(Serialize)]
        struct Line<'a, T> {
            event: &'static str,
            #[serde(flatten)]
            of: &'a T,
        }
        for episode in &self.listed {
            serde_json::to_writer(&mut *out, &Line { event: "latency", of: episode })?;
            writeln!(out)?;
        }
        serde_json::to_writer(&mut *out, &Line { event: "latencies", of: self })?;
        writeln!(out)
    }
}
