//! The losses that a trace itself reports.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::export::Event;
use crate::stream::{Header, Loss, Summary};

use super::nanoseconds;

/// What is missing in a trace.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Gaps {
    /// Records that were lost.
    pub lost: u64,
    /// Of which vCPUs, and when.
    pub vcpus: Vec<LostOf>,
    /// The trace has no end.
    pub torn: bool,
    /// The stream was joined late: the beginning is missing.
    pub joined: bool,
    /// Records that were played behind later ones.
    pub late: u64,
    #[serde(skip)]
    open: BTreeMap<u32, usize>,
    #[serde(skip)]
    last: BTreeMap<u32, u64>,
}

/// Records that a vCPU lost.
#[derive(Clone, Debug, Serialize)]
pub struct LostOf {
    /// The vCPU.
    pub cpu: u32,
    /// How many, in all gaps.
    pub lost: u64,
    /// Not before that, in nanoseconds.
    pub since_ns: u64,
    /// Not after that, in nanoseconds; none for the end of the trace.
    pub until_ns: Option<u64>,
}

impl Gaps {
    /// Of a trace whose end was not seen yet.
    pub(super) fn new() -> Self {
        Self { torn: true, ..Self::default() }
    }

    /// The stream begins where there had been so many records and losses of each vCPU.
    pub(super) fn begin_at(&mut self, totals: &[(u64, u64)]) {
        self.joined = totals.iter().any(|&totals| totals != (0, 0));
    }

    /// The stream has ended, with a summary or without.
    pub(super) fn end(&mut self, summary: Option<&Summary>) {
        self.torn = summary.is_none();
    }

    /// Looks at every event.
    pub(super) fn event(&mut self, header: &Header, event: &Event<'_>) {
        match event {
            Event::Entry(entry) => self.record(header, entry.vcpu, entry.timestamp),
            Event::Return(ret) => self.record(header, ret.vcpu, ret.timestamp),
            Event::Tail(tail) => self.record(header, tail.vcpu, tail.timestamp),
            Event::Tracepoint(event) => self.record(header, event.vcpu, event.timestamp),
            Event::Loss(loss) => self.loss(loss),
            Event::Unfinished(_) | Event::Mark(_) => {}
        }
    }

    fn record(&mut self, header: &Header, vcpu: u32, ticks: u64) {
        let at = nanoseconds(header, ticks);
        self.last.insert(vcpu, at);
        if self.open.is_empty() {
            return;
        }
        if let Some(of) = self.open.remove(&vcpu).and_then(|index| self.vcpus.get_mut(index)) {
            of.until_ns = Some(at);
        }
    }

    fn loss(&mut self, loss: &Loss) {
        self.lost = self.lost.saturating_add(loss.count);
        let cpu = loss.vcpu;
        let index = self.vcpus.iter().position(|of| of.cpu == cpu).unwrap_or_else(|| {
            let since_ns = self.last.get(&cpu).copied().unwrap_or(0);
            self.vcpus.push(LostOf { cpu, lost: 0, since_ns, until_ns: None });
            self.vcpus.len() - 1
        });
        if let Some(of) = self.vcpus.get_mut(index) {
            of.lost = of.lost.saturating_add(loss.count);
            of.until_ns = None;
        }
        self.open.insert(cpu, index);
    }

    /// Whether nothing is missing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lost == 0 && !self.torn && !self.joined && self.late == 0
    }

    /// What is missing, for people: a sentence each.
    #[must_use]
    pub fn sentences(&self) -> Vec<String> {
        let mut all = Vec::new();
        if self.torn {
            all.push("the trace is torn: its end is missing".to_owned());
        }
        if self.joined {
            all.push("the stream was joined late: its beginning is missing".to_owned());
        }
        for of in &self.vcpus {
            let since = super::seconds(of.since_ns);
            let until = of.until_ns.map_or("the end".to_owned(), super::seconds);
            all.push(format!(
                "vCPU {} lost {} records between {since} and {until}",
                of.cpu, of.lost
            ));
        }
        if self.late > 0 {
            all.push(format!(
                "{} records came late, so that their order is not certain",
                self.late
            ));
        }
        all
    }
}
