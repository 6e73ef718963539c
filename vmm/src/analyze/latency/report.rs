//! What was found of waits.

use std::io::{self, Write};

use serde::Serialize;

use crate::stream::Header;

use super::lines::Seen;
use super::{Gaps, Kind, page};

/// Classes of durations: below 1 us, below 2 us, and so on up to 2^22 us (4.2 s) and more.
pub(super) const CLASSES: usize = 24;

/// How many waits there were of which length, on one vCPU.
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

/// One wait; times are in nanoseconds since the clock's start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Episode {
    /// Process id.
    pub pid: u32,
    /// Its name.
    pub comm: String,
    /// Its priority, as the kernel has it (0 to 99: real time).
    pub prio: Option<i64>,
    /// Where it ran then.
    pub cpu: u32,
    /// Where it was woken.
    pub woken_on: u32,
    /// When it was woken.
    pub since_ns: u64,
    /// When it ran.
    pub until_ns: u64,
    /// How long that took.
    pub ns: u64,
    /// For how long of that vmtrace had all vCPUs paused.
    pub paused_ns: u64,
}

/// Waits of one task; times are in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TaskSums {
    /// Process id.
    pub pid: u32,
    /// Its name.
    pub comm: String,
    /// Its priority at the first.
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

/// What was found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// `wakeup` or `wakeup_rt`.
    pub latency: &'static str,
    /// The guest's kernel.
    pub release: String,
    /// How many vCPUs it has.
    pub vcpus: u32,
    /// How many waits there were.
    pub count: u64,
    /// The longest.
    pub longest: Option<Episode>,
    /// By vCPU.
    pub histograms: Vec<Histogram>,
    /// By task, the longest first.
    pub tasks: Vec<TaskSums>,
    /// Waits of tasks for which there was no room.
    pub other_tasks: u64,
    /// The threshold of the list, in nanoseconds.
    pub over_ns: Option<u64>,
    /// Those that took at least that long, in their order.
    pub listed: Vec<Episode>,
    /// Those of them for which there was no room.
    pub unlisted: u64,
    /// Waits in which records were lost.
    pub doubtful: u64,
    /// Tasks that waited when the trace ended.
    pub waiting: u64,
    /// What is missing in the trace.
    pub gaps: Gaps,
    #[serde(skip)]
    pub(super) header: Header,
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
            tasks: Vec::new(),
            other_tasks: 0,
            over_ns,
            listed: Vec::new(),
            unlisted: 0,
            doubtful: 0,
            waiting: 0,
            gaps: Gaps::new(),
            header: Header::default(),
            lines: Seen::default(),
        }
    }

    pub(super) fn begin(&mut self, header: &Header) {
        self.release.clone_from(&header.release);
        self.vcpus = header.vcpus;
        self.header = header.clone();
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

    /// One page: the longest wait as the kernel's latency tracers print it, then the rest.
    ///
    /// # Errors
    /// When the output fails.
    pub fn write_text(&self, out: &mut dyn Write) -> io::Result<()> {
        page::write(self, out)
    }

    /// One JSON object, on a line.
    ///
    /// # Errors
    /// When the output fails.
    pub fn write_json(&self, out: &mut dyn Write) -> io::Result<()> {
        serde_json::to_writer(&mut *out, self)?;
        writeln!(out)
    }
}
