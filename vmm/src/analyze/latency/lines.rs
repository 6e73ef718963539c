//! Keeps the latest records, to show what a vCPU did while a task waited.

use std::collections::VecDeque;

use crate::export::{Entry, Return, Tracepoint};
use crate::stream::Context;

/// Records that are kept of each vCPU, and shown of one episode.
pub(super) const KEPT: usize = 1 << 14;
/// Columns by which a call stands to the right of its caller, and most callers that are shown so.
const INDENT: usize = 2;
const DEEPEST: u32 = 40;

/// A record as a line: what the page shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Line {
    /// Nanoseconds.
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
#[derive(Debug)]
pub(super) struct Lines {
    vcpus: Vec<VecDeque<Line>>,
    kept: usize,
}

impl Lines {
    /// So many of each.
    pub(super) fn new(kept: usize) -> Self {
        Self { vcpus: Vec::new(), kept }
    }

    pub(super) fn begin(&mut self, vcpus: u32) {
        let vcpus = usize::try_from(vcpus).unwrap_or(0);
        self.vcpus = std::iter::repeat_with(VecDeque::new).take(vcpus).collect();
    }

    fn of(&mut self, vcpu: u32) -> Option<&mut VecDeque<Line>> {
        self.vcpus.get_mut(usize::try_from(vcpu).ok()?)
    }

    pub(super) fn clear(&mut self, vcpu: u32) {
        if let Some(lines) = self.of(vcpu) {
            lines.clear();
        }
    }

    fn push(
        &mut self,
        (vcpu, at): (u32, u64),
        (pid, comm): (u32, Option<&str>),
        context: Option<Context>,
        text: String,
    ) {
        let comm = comm.unwrap_or("<...>").to_owned();
        let kept = self.kept;
        let Some(lines) = self.of(vcpu) else { return };
        if lines.len() == kept {
            lines.pop_front();
        }
        lines.push_back(Line { at, pid, comm, context, text });
    }

    pub(super) fn entry(&mut self, at: u64, entry: &Entry<'_>) {
        let label = entry.function.label();
        let text = match (entry.place, &entry.caller) {
            (Some(place), _) => format!("{}{label}() {{", indent(place.depth)),
            (None, Some(caller)) => format!("{label} <-{}", caller.label()),
            (None, None) => label,
        };
        let task = (entry.pid, entry.comm);
        self.push((entry.vcpu, at), task, entry.context, text);
    }

    pub(super) fn ret(&mut self, at: u64, ret: &Return<'_>) {
        let took = ret.duration_ns.map(|ns| format!(" {}.{:03} us", ns / 1000, ns % 1000));
        let (indent, label) = (indent(ret.depth), ret.function.label());
        let text = format!("{indent}}} /* {label}{} */", took.unwrap_or_default());
        self.push((ret.vcpu, at), (ret.pid, ret.comm), ret.context, text);
    }

    pub(super) fn tracepoint(&mut self, at: u64, event: &Tracepoint<'_>) {
        let label = event.event.label();
        let name = label.split_once(':').map_or(&*label, |(_, name)| name);
        let text = match event.caller {
            // Their one field is the address of that.
            Some(caller) if label.starts_with("preemptirq:") && caller.symbol.is_some() => {
                format!("{name} <-{}", caller.label())
            }
            _ => format!("{name}: {}", event.text()),
        };
        self.push((event.vcpu, at), (event.pid, event.comm), event.context, text);
    }

    /// Of a vCPU, between these nanoseconds, both included.
    pub(super) fn between(&self, vcpu: u32, since: u64, until: u64) -> Seen {
        let lines = usize::try_from(vcpu).ok().and_then(|it| self.vcpus.get(it));
        let Some(lines) = lines else { return Seen::default() };
        let cut = lines.len() == self.kept && lines.front().is_some_and(|line| line.at > since);
        let meant = lines.iter().filter(|line| (since..=until).contains(&line.at));
        Seen { lines: meant.cloned().collect(), cut }
    }
}

fn indent(depth: u32) -> String {
    " ".repeat(INDENT * usize::try_from(depth.min(DEEPEST)).unwrap_or(0))
}
