//! The latest records, so that it is known what a vCPU did while somebody waited.

use std::collections::VecDeque;

use crate::export::{Entry, Tracepoint};
use crate::stream::{Context, Header};

/// Records that are kept of each vCPU, and shown of one wait.
const KEPT: usize = 1 << 14;

/// A record as a line: what the page shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Line {
    /// Ticks.
    pub(super) at: u64,
    pub(super) pid: u32,
    pub(super) comm: String,
    pub(super) context: Option<Context>,
    pub(super) text: String,
}

/// What was seen on a vCPU between two moments.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) lines: Vec<Line>,
    /// The beginning is not there any more.
    pub(super) cut: bool,
}

/// The latest records of each vCPU.
#[derive(Debug, Default)]
pub(super) struct Lines {
    vcpus: Vec<VecDeque<Line>>,
}

impl Lines {
    pub(super) fn begin(&mut self, header: &Header) {
        let vcpus = usize::try_from(header.vcpus).unwrap_or(0);
        self.vcpus = std::iter::repeat_with(VecDeque::new).take(vcpus).collect();
    }

    pub(super) fn clear(&mut self) {
        self.vcpus.iter_mut().for_each(VecDeque::clear);
    }

    fn push(&mut self, vcpu: u32, line: Line) {
        let Some(lines) = usize::try_from(vcpu).ok().and_then(|it| self.vcpus.get_mut(it)) else {
            return;
        };
        if lines.len() == KEPT {
            lines.pop_front();
        }
        lines.push_back(line);
    }

    pub(super) fn entry(&mut self, entry: &Entry<'_>) {
        let caller = entry.caller.as_ref().map(|caller| format!(" <-{}", caller.label()));
        let text = entry.function.label() + &caller.unwrap_or_default();
        let comm = entry.comm.unwrap_or("<...>").to_owned();
        let (at, pid, context) = (entry.timestamp, entry.pid, entry.context);
        self.push(entry.vcpu, Line { at, pid, comm, context, text });
    }

    pub(super) fn tracepoint(&mut self, event: &Tracepoint<'_>) {
        let label = event.event.label();
        let name = label.split_once(':').map_or(&*label, |(_, name)| name);
        let text = format!("{name}: {}", event.text());
        let comm = event.comm.unwrap_or("<...>").to_owned();
        let (at, pid, context) = (event.timestamp, event.pid, event.context);
        self.push(event.vcpu, Line { at, pid, comm, context, text });
    }

    /// Of a vCPU, between these ticks, both included.
    pub(super) fn between(&self, vcpu: u32, since: u64, until: u64) -> Seen {
        let lines = usize::try_from(vcpu).ok().and_then(|it| self.vcpus.get(it));
        let Some(lines) = lines else { return Seen::default() };
        let cut = lines.len() == KEPT && lines.front().is_some_and(|line| line.at > since);
        let meant = lines.iter().filter(|line| (since..=until).contains(&line.at));
        Seen { lines: meant.cloned().collect(), cut }
    }
}
