//! Latencies in a guest: how long tasks waited for a CPU, how long interrupts or preemption were
//! off, and what interrupted the tasks that ran.
//!
//! Each is computed from events, which have exact times of the guest's clock. A latency that lost
//! records may have affected is dropped and counted. The report has the longest one with what its
//! vCPU did meanwhile, histograms, sums, and those above a threshold.

mod exits;
mod kind;
mod lines;
mod noise;
mod page;
mod regions;
mod report;
mod rows;
#[cfg(test)]
mod tests;
mod waits;

use std::collections::{HashMap, VecDeque};
use std::io;

use crate::export::{Args, Event, Export, OutOfGuest, Tracepoint};
use crate::kernel::glob;
use crate::stream::{Header, Mark, MarkKind, Shown, Summary};

use super::{Analysis, Gaps, nanoseconds};
use exits::Exits;
pub use kind::{EventsOf, Kind};
use lines::Lines;
use noise::Noise;
use regions::Regions;
pub use report::{Episode, Histogram, Report, Sums};
pub use rows::Row;
use waits::Waits;

/// Most things with sums of their own.
const SUMS: usize = 1 << 16;
/// Most episodes over the threshold that are listed.
const LISTED: usize = 100_000;
/// Pauses that are remembered, of which an episode may have some.
const PAUSES: usize = 1024;
/// Most rows.
const ROWS: usize = 100_000;

/// How much is kept. What is told while a guest runs is an answer of bounded length, however long
/// it has run.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    /// Records of each vCPU.
    lines: usize,
    listed: usize,
    rows: usize,
    /// The newest are kept, and not the first.
    newest: bool,
}

impl Bounds {
    const WHOLE: Self = Self { lines: lines::KEPT, listed: LISTED, rows: ROWS, newest: false };
    const LIVE: Self = Self { lines: 500, listed: 500, rows: 60, newest: true };
    /// Most sums that are told.
    const LIVE_SUMS: usize = 100;
}

/// Makes a [`Report`].
#[derive(Debug)]
pub struct Latency {
    found: Found,
    finder: Finder,
}

/// What looks for episodes in the events of a trace.
#[derive(Debug)]
enum Finder {
    Waits(Waits),
    Regions(Regions),
    Noise(Noise),
}

impl Latency {
    /// Of this kind; episodes of at least so many nanoseconds are listed.
    #[must_use]
    pub fn new(kind: Kind, over: Option<u64>) -> Self {
        Self::with_bounds(kind, over, Bounds::WHOLE)
    }

    /// The same of a guest that runs: [`Latency::so_far`] can tell at any time what was found, in
    /// bounded length. Of the episodes that are listed the newest 500 are kept.
    #[must_use]
    pub fn live(kind: Kind, over: Option<u64>) -> Self {
        Self::with_bounds(kind, over, Bounds::LIVE)
    }

    fn with_bounds(kind: Kind, over: Option<u64>, bounds: Bounds) -> Self {
        let finder = match kind {
            Kind::Wakeup | Kind::WakeupRt => Finder::Waits(Waits::new(kind)),
            Kind::Irqsoff | Kind::Preemptoff | Kind::Preemptirqsoff => {
                Finder::Regions(Regions::new(kind))
            }
            Kind::Osnoise => Finder::Noise(Noise::default()),
        };
        Self { found: Found::new(kind, over, bounds), finder }
    }

    /// What was found by now; so many records came late. What has not ended is not in it but as a
    /// number.
    #[must_use]
    pub fn so_far(&self, late: u64) -> Report {
        let found = &self.found;
        let mut report = found.report.clone();
        let mut sums: Vec<_> = found.sums.values().collect();
        sums.sort_by(|a, b| Sums::longest_first(a, b));
        report.more_sums = sums.len().saturating_sub(Bounds::LIVE_SUMS) as u64;
        report.sums = sums.into_iter().take(Bounds::LIVE_SUMS).cloned().collect();
        report.rows.sort_by_key(|row| (row.ns, row.cpu));
        let old_rows = report.rows.len().saturating_sub(found.bounds.rows);
        report.rows.drain(..old_rows);
        report.other_rows += old_rows as u64;
        report.open = self.open();
        report.gaps.late = late;
        // It was joined where it was asked for, and goes on.
        (report.gaps.torn, report.gaps.joined) = (false, false);
        report.seen_ns = found.seen;
        report
    }

    /// Episodes that have not ended.
    fn open(&self) -> u64 {
        match &self.finder {
            Finder::Waits(waits) => waits.open(),
            Finder::Regions(regions) => regions.open(),
            Finder::Noise(noise) => noise.open(),
        }
    }

    /// What was found; so many records came late.
    #[must_use]
    pub fn finish(mut self, late: u64) -> Report {
        if let Finder::Noise(noise) = &mut self.finder {
            noise.end(&mut self.found);
        }
        let open = self.open();
        let Found { mut report, sums, .. } = self.found;
        report.gaps.late = late;
        report.open = open;
        let mut sums: Vec<_> = sums.into_values().collect();
        sums.sort_by(Sums::longest_first);
        report.sums = sums;
        report
    }
}

impl Export for Latency {
    fn begin(&mut self, header: &Header) -> io::Result<()> {
        self.found.header = header.clone();
        self.found.lines.begin(header.vcpus);
        self.found.report.begin(header);
        if let Finder::Noise(noise) = &mut self.finder {
            noise.begin(header);
        }
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        let Self { found, finder } = self;
        found.report.gaps.event(&found.header, event);
        match event {
            Event::Mark(mark) if mark.kind == MarkKind::Events => {
                // What is open may end unseen, and what ends may have begun so.
                match finder {
                    Finder::Waits(waits) => waits.forget(found),
                    Finder::Regions(regions) => regions.forget(found),
                    Finder::Noise(noise) => noise.forget(found),
                }
                found.seen(mark.ticks);
                found.traced(&mark.text);
            }
            Event::Entry(entry) => {
                if let Finder::Regions(regions) = finder {
                    regions.state(entry.vcpu, entry.context, found);
                }
                found.lines.entry(found.at(entry.timestamp), entry);
            }
            Event::Return(ret) => found.lines.ret(found.at(ret.timestamp), ret),
            Event::Tracepoint(event) => {
                found.seen(event.timestamp);
                if !found.missing.is_empty() {
                    found.traced(name(event).unwrap_or_default());
                }
                found.lines.tracepoint(found.at(event.timestamp), event);
                if let Some(out) = OutOfGuest::of(event) {
                    let span = found.out_of_guest(event, &out);
                    if let Finder::Noise(noise) = finder {
                        noise.out_of_guest(event.vcpu, span, out.label(), found);
                    }
                    return Ok(());
                }
                match finder {
                    Finder::Waits(waits) => waits.event(event, found),
                    Finder::Regions(regions) => regions.event(event, found),
                    Finder::Noise(noise) => noise.event(event, found),
                }
            }
            Event::Loss(loss) => {
                // What ends an episode may be among the lost.
                match finder {
                    Finder::Waits(waits) => waits.lost(found),
                    Finder::Regions(regions) => regions.lost(loss.vcpu, found),
                    Finder::Noise(noise) => noise.lost(loss.vcpu, found),
                }
                found.lines.clear(loss.vcpu);
            }
            Event::Mark(mark) => {
                // Exits of vCPUs contain it.
                if let Some(pause) = found.pause(mark)
                    && found.exits.is_empty()
                    && let Finder::Noise(noise) = finder
                {
                    noise.paused(pause, found);
                }
            }
            Event::Tail(_) | Event::Unfinished(_) => {}
        }
        Ok(())
    }

    fn joined(&mut self, totals: &[(u64, u64)]) -> io::Result<()> {
        self.found.report.gaps.begin_at(totals);
        Ok(())
    }

    fn end(&mut self, summary: Option<&Summary>) -> io::Result<()> {
        self.found.report.gaps.end(summary);
        Ok(())
    }
}

impl Analysis for Latency {
    fn write(self, late: u64, json: bool, out: &mut dyn io::Write) -> io::Result<()> {
        let report = self.finish(late);
        if json { report.write_json(out) } else { report.write_text(out) }
    }

    fn cannot(&self) -> Option<String> {
        let Found { missing, report, .. } = &self.found;
        let kind = report.kind.name();
        (report.count == 0 && !missing.is_empty()).then(|| {
            format!(
                "--latency {kind} is made of events that the trace does not have: {}; record them \
                 with `vmtrace boot --latency {kind} -o FILE`",
                missing.join(", ")
            )
        })
    }

    fn lacks(&self) -> Option<String> {
        let Found { missing, report, .. } = &self.found;
        let kind = report.kind.name();
        (report.count != 0 && !missing.is_empty()).then(|| {
            format!(
                "--latency {kind}: the trace does not have {}, and the report not what they tell; \
                 record them with `vmtrace boot --latency {kind} -o FILE`",
                missing.join(", ")
            )
        })
    }
}

/// What was found so far.
#[derive(Debug)]
struct Found {
    header: Header,
    lines: Lines,
    /// Beginnings and ends of pauses, in nanoseconds.
    pauses: VecDeque<(u64, u64)>,
    exits: Exits,
    sums: HashMap<String, Sums>,
    bounds: Bounds,
    /// The first and the last moment of which something was seen, in nanoseconds.
    seen: Option<(u64, u64)>,
    /// Patterns of needed events of which none was traced so far.
    missing: Vec<&'static str>,
    report: Report,
}

impl Found {
    fn new(kind: Kind, over: Option<u64>, bounds: Bounds) -> Self {
        let needed = kind.events().iter().filter(|of| of.needed);
        Self {
            missing: needed.map(|of| of.pattern).collect(),
            header: Header::default(),
            lines: Lines::new(bounds.lines),
            pauses: VecDeque::new(),
            exits: Exits::default(),
            sums: HashMap::new(),
            bounds,
            seen: None,
            report: Report::new(kind, over),
        }
    }

    /// Ticks in nanoseconds since the clock's start.
    fn at(&self, ticks: u64) -> u64 {
        nanoseconds(&self.header, ticks)
    }

    /// Something was seen of this moment, in ticks.
    fn seen(&mut self, ticks: u64) {
        let at = self.at(ticks);
        let (since, until) = self.seen.unwrap_or((at, at));
        self.seen = Some((since, until.max(at)));
    }

    /// These events are traced, perhaps with others.
    fn traced(&mut self, names: &str) {
        // Of many not all are named, but all that latencies are made of.
        let names = match names.rsplit_once(" and ") {
            Some((named, rest)) if rest.ends_with(" more") => named,
            _ => names,
        };
        self.missing.retain(|it| !names.split(", ").any(|name| glob::matches(it, name)));
    }

    /// A period has ended.
    fn row(&mut self, row: Row) {
        let (rows, most) = (&mut self.report.rows, self.bounds.rows);
        if self.bounds.newest && rows.len() >= 2 * most {
            rows.drain(..most);
            self.report.other_rows += most as u64;
        }
        if rows.len() < most || self.bounds.newest {
            rows.push(row);
        } else {
            self.report.other_rows += 1;
        }
    }

    /// An episode has ended. Its `host_ns` is found here.
    fn add(&mut self, mut episode: Episode) {
        let (from, to) = (episode.since_ns, episode.ns);
        let covered = |spans: &mut dyn Iterator<Item = (u64, u64)>| {
            crate::export::covered((from, to), spans).min(episode.duration_ns)
        };
        let paused_ns = covered(&mut self.pauses.iter().copied());
        // A pause is an exit of each vCPU.
        let host_ns = match self.exits.is_empty() {
            true => paused_ns,
            false => covered(&mut self.exits.of(episode.cpu, from).iter().copied()),
        };
        (episode.host_ns, episode.paused_ns) = (host_ns, paused_ns);
        let report = &mut self.report;
        let ns = episode.duration_ns;
        report.histogram(episode.cpu).add(ns);
        report.count += 1;
        if report.over_ns.is_some_and(|over| ns >= over) {
            if self.bounds.newest && report.listed.len() >= self.bounds.listed {
                report.listed.pop_front();
                report.unlisted += 1;
            }
            if report.listed.len() < self.bounds.listed {
                report.listed.push_back(episode.clone());
            } else {
                report.unlisted += 1;
            }
        }
        if report.longest.as_ref().is_none_or(|longest| ns > longest.duration_ns) {
            report.lines = self.lines.between(episode.cpu, from, to);
            report.longest = Some(episode);
        }
    }

    /// For so long this was the cause, until then.
    fn sum(&mut self, name: &str, prio: Option<i64>, ns: u64, at_ns: u64) {
        if self.sums.len() >= SUMS && !self.sums.contains_key(name) {
            self.report.other_sums += 1;
            return;
        }
        if !self.sums.contains_key(name) {
            let sums = Sums { name: name.to_owned(), prio, ..Sums::default() };
            self.sums.insert(name.to_owned(), sums);
        }
        let Some(sums) = self.sums.get_mut(name) else { return };
        sums.count += 1;
        sums.total_ns = sums.total_ns.saturating_add(ns);
        if ns >= sums.longest_ns {
            (sums.longest_ns, sums.at_ns) = (ns, at_ns);
        }
    }

    /// The beginning and the end of an exit.
    fn out_of_guest(&mut self, event: &Tracepoint<'_>, out: &OutOfGuest<'_>) -> (u64, u64) {
        let end = self.at(event.timestamp);
        let span = (end.saturating_sub(out.duration_ns), end);
        self.exits.add(event.vcpu, span);
        self.report.exits += 1;
        span
    }

    /// The beginning and the end of a pause, if that is what the mark says.
    fn pause(&mut self, mark: &Mark) -> Option<(u64, u64)> {
        let stood_still_ns = mark.stood_still_ns();
        if stood_still_ns == 0 {
            return None;
        }
        if self.pauses.len() == PAUSES {
            self.pauses.pop_front();
        }
        let end = self.at(mark.ticks);
        let pause = (end.saturating_sub(stood_still_ns), end);
        self.pauses.push_back(pause);
        Some(pause)
    }
}

/// A task as lists name it.
fn task(comm: &str, pid: u32) -> String {
    format!("{comm}-{pid}")
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

/// A process id.
fn pid(fields: Option<Args<'_>>, name: &str) -> Option<u32> {
    number(fields, name).and_then(|pid| u32::try_from(pid).ok())
}

fn text(fields: Option<Args<'_>>, name: &str) -> Option<String> {
    match field(fields, name)? {
        Shown::Text(bytes) => Some(crate::export::printable(&String::from_utf8_lossy(&bytes))),
        _ => None,
    }
}

/// The name of an event, such as `sched:sched_switch`.
fn name<'a>(event: &Tracepoint<'a>) -> Option<&'a str> {
    event.event.symbol.map(|(name, _)| name)
}
