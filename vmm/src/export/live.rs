//! The current activity in a trace: the functions with the most calls in an interval.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io;
use std::time::Duration;

use crate::stream::{Header, Loss, LossReason, Summary};

use super::counted::Counted;
use super::stats::share;
use super::times::{Function, Times};
use super::top::micros;
use super::{Event, Export, Name};

/// Most tracepoints that are told apart: more than any kernel has.
const TRACEPOINTS: usize = 1 << 16;

/// What comes first in a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Most calls.
    Calls,
    /// Most time of its own.
    Own,
    /// Most time, what it calls included.
    Total,
}

/// How much of a table is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// So many functions, events and counted functions each, and a line that tells of the others.
    Each(usize),
    /// So many lines in all.
    Lines(usize),
}

/// What happens in an interval: calls, self and total time by function, events by name, and what
/// has been lost since the trace began. Times are as in [`Top`](super::Top), of calls that end in
/// the interval. Memory is bounded: nothing is kept of a call that has ended.
#[derive(Debug)]
pub struct Live {
    times: Times,
    events: HashMap<u64, (String, u64)>,
    /// Events that there was no room for.
    other_events: u64,
    records: u64,
    lost: Vec<Lost>,
    /// The vCPUs whose losses are told; none: all.
    vcpus: Vec<u32>,
    counted: Counted,
    /// The trace has durations.
    timed: bool,
}

/// Records that are missing of a vCPU.
#[derive(Clone, Debug, Default)]
struct Lost {
    /// In the trace.
    trace: u64,
    /// Of this consumer alone.
    here: u64,
}

impl Live {
    /// Losses are told of these vCPUs, of none given all.
    #[must_use]
    pub fn new(vcpus: Vec<u32>) -> Self {
        Self {
            times: Times::without_percentiles(),
            events: HashMap::new(),
            other_events: 0,
            records: 0,
            lost: Vec::new(),
            vcpus,
            counted: Counted::default(),
            timed: false,
        }
    }

    /// Records that this consumer alone has missed.
    #[must_use]
    pub fn missed(&self) -> u64 {
        self.lost.iter().fold(0, |sum, lost| sum.saturating_add(lost.here))
    }

    /// The lines of the interval, which took so long. The next one begins.
    pub fn table(&mut self, took: Duration, order: Order, rows: Rows) -> Vec<String> {
        let functions = std::mem::take(&mut self.times.functions);
        let calls = std::mem::take(&mut self.times.entries);
        let other_calls = std::mem::take(&mut self.times.others);
        let events = std::mem::take(&mut self.events);
        let other_events = std::mem::take(&mut self.other_events);
        let records = std::mem::take(&mut self.records);
        let mut functions: Vec<_> = functions.into_values().collect();
        functions.sort_by(|a, b| {
            let key = |it: &Function| match order {
                Order::Calls => (it.calls, it.own_time, it.total),
                Order::Own => (it.own_time, it.total, it.calls),
                Order::Total => (it.total, it.own_time, it.calls),
            };
            key(b).cmp(&key(a)).then_with(|| a.name.cmp(&b.name))
        });
        self.timed |= functions.iter().any(|function| function.timed > 0);
        let mut events: Vec<_> = events.into_values().collect();
        events.sort_by(|(a, of_a), (b, of_b)| of_b.cmp(of_a).then_with(|| a.cmp(b)));
        let counted = self.counted.len();
        let [rows, event_rows, counted_rows] = rows.of([functions.len(), events.len(), counted]);
        let rate = |many| rate(many, took);

        let mut lines = vec![self.head(&rate(records), took)];
        if self.timed {
            lines.push("#   calls/s   share     self us    total us  function".to_owned());
        } else {
            lines.push("#   calls/s   share  function".to_owned());
        }
        for it in functions.iter().take(rows) {
            let mut line = format!("{:>11} {}", rate(it.calls), share(it.calls, calls));
            if self.timed {
                let known = |many: u64, time| if many == 0 { "-".into() } else { micros(time) };
                let (own, total) = (known(it.own, it.own_time), known(it.timed, it.total));
                let _ = write!(line, " {own:>11} {total:>11}");
            }
            lines.push(format!("{line}  {}", it.name));
        }
        let left = functions.iter().skip(rows).fold(0_u64, |sum, it| sum.saturating_add(it.calls));
        let left = (functions.len().saturating_sub(rows), left.saturating_add(other_calls));
        lines.extend(others(left, calls, &rate, "functions"));
        if !events.is_empty() || other_events > 0 {
            let all = events.iter().fold(other_events, |sum, (_, many)| sum.saturating_add(*many));
            lines.push("#  events/s   share  event".to_owned());
            for (name, many) in events.iter().take(event_rows) {
                lines.push(format!("{:>11} {}  {name}", rate(*many), share(*many, all)));
            }
            let left = events.iter().skip(event_rows);
            let left = left.fold(other_events, |sum, (_, many)| sum.saturating_add(*many));
            let left = (events.len().saturating_sub(event_rows), left);
            lines.extend(others(left, all, &rate, "events"));
        }
        lines.extend(self.counted.lines(counted_rows));
        lines
    }

    /// Calls that have not ended, so far as is known.
    #[cfg(test)]
    pub(super) fn open(&self) -> usize {
        self.times.open()
    }

    fn head(&self, records: &str, took: Duration) -> String {
        let vcpus = self.lost.len();
        let plural = if vcpus == 1 { "" } else { "s" };
        let seconds = took.as_secs_f64();
        let mut line = format!("# {seconds:.2} s, {vcpus} vCPU{plural}: {records} records/s");
        let mut told = |what: &str, of: &dyn Fn(&Lost) -> u64| {
            let sum = self.lost.iter().fold(0_u64, |sum, lost| sum.saturating_add(of(lost)));
            let _ = write!(line, ", {what} {sum}");
            let mut each = (0..).zip(&self.lost).filter(|(_, lost)| of(lost) > 0);
            if let Some((vcpu, lost)) = each.next() {
                let _ = write!(line, " (vcpu{vcpu} {}", of(lost));
                for (vcpu, lost) in each {
                    let _ = write!(line, ", vcpu{vcpu} {}", of(lost));
                }
                line.push(')');
            }
        };
        told("lost so far", &|lost| lost.trace);
        if self.missed() > 0 {
            told("missed here", &|lost| lost.here);
        }
        line
    }

    fn lose(&mut self, loss: &Loss) {
        let lost = usize::try_from(loss.vcpu).ok().and_then(|vcpu| self.lost.get_mut(vcpu));
        let Some(lost) = lost else { return };
        let lost = match loss.reason {
            LossReason::Consumer => &mut lost.here,
            _ => &mut lost.trace,
        };
        *lost = lost.saturating_add(loss.count);
    }
}

impl Rows {
    /// Rows of functions, of events, and of what was counted, of which there are so many.
    pub(super) fn of(self, [functions, events, counted]: [usize; 3]) -> [usize; 3] {
        let lines = match self {
            Self::Each(most) => return [functions, events, counted].map(|many| many.min(most)),
            Self::Lines(lines) => lines,
        };
        // What each has besides: headings, two of counts.
        let heads = 2 + usize::from(events > 0) + 2 * usize::from(counted > 0);
        let room = lines.saturating_sub(heads);
        // A line for what is left out is one of its rows.
        let rows =
            |room: usize, many: usize| if many > room { room.saturating_sub(1) } else { many };
        let counts = counted.min(room / 4);
        let unused = room.saturating_sub(functions.saturating_add(counts));
        let event = events.min(unused.max(room / 4));
        let function = room.saturating_sub(event + counts);
        [rows(function, functions), rows(event, events), rows(counts, counted)]
    }
}

/// The line of those that have no row, if there are any.
fn others(
    (kinds, many): (usize, u64),
    all: u64,
    rate: &dyn Fn(u64) -> String,
    what: &str,
) -> Option<String> {
    // Those that there was no room for have no number.
    let name = if kinds == 0 { "others".to_owned() } else { format!("{kinds} more {what}") };
    (kinds > 0 || many > 0).then(|| format!("{:>11} {}  ({name})", rate(many), share(many, all)))
}

/// So many in a time, a second, with one digit behind the point.
fn rate(many: u64, took: Duration) -> String {
    let nanoseconds = took.as_nanos().max(1);
    let tenths = (u128::from(many) * 10_000_000_000 + nanoseconds / 2) / nanoseconds;
    format!("{}.{}", tenths / 10, tenths % 10)
}

impl Export for Live {
    fn begin(&mut self, header: &Header) -> io::Result<()> {
        self.lost = vec![Lost::default(); usize::try_from(header.vcpus).unwrap_or(0)];
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        match event {
            Event::Entry(entry) => self.times.entry(entry),
            Event::Return(ret) => self.times.ret(ret),
            Event::Tail(_) => {}
            Event::Tracepoint(tracepoint) => {
                let event = &tracepoint.event;
                let known = self.events.contains_key(&event.address);
                if known || self.events.len() < TRACEPOINTS {
                    let new = || (event.label(), 0);
                    let (_, many) = self.events.entry(event.address).or_insert_with(new);
                    *many += 1;
                } else {
                    self.other_events += 1;
                }
            }
            Event::Unfinished(unfinished) => {
                self.times.unfinished(unfinished);
                return Ok(());
            }
            Event::Loss(loss) => {
                self.lose(loss);
                return Ok(());
            }
            Event::Mark(_) => return Ok(()),
        }
        self.records += 1;
        Ok(())
    }

    fn counts(
        &mut self,
        vcpu: u32,
        tracer: Option<&str>,
        hits: &mut dyn Iterator<Item = (Name<'_>, u64)>,
    ) -> io::Result<()> {
        self.counted.add(vcpu, tracer, hits);
        Ok(())
    }

    fn joined(&mut self, totals: &[(u64, u64)]) -> io::Result<()> {
        for ((vcpu, lost), (_, before)) in (0..).zip(&mut self.lost).zip(totals) {
            if self.vcpus.is_empty() || self.vcpus.contains(&vcpu) {
                lost.trace = lost.trace.saturating_add(*before);
            }
        }
        Ok(())
    }

    fn end(&mut self, _: Option<&Summary>) -> io::Result<()> {
        Ok(())
    }
}
