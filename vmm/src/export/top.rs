//! Where the time goes, by function.

use std::collections::HashMap;
use std::io::{self, Write};

use hdrhistogram::Histogram;

use crate::stream::{Header, Summary};

use super::stats::label;
use super::{Entry, Event, Export, Name, Return};

/// Most functions that are told apart: more than any kernel has.
const FUNCTIONS: usize = 1 << 20;
/// Most functions that have percentiles: a distribution takes up to 20 KiB.
const DISTRIBUTIONS: usize = 1 << 14;
/// Longest duration that percentiles tell apart, in nanoseconds: about an hour.
const LONGEST: u64 = 1 << 42;
/// Most calls around one that are looked at.
const DEEP: usize = 4096;

/// Where the time goes: for each function calls, total and self time and percentiles, the one with
/// the most time of its own first.
///
/// The total time of a function is that of its outermost calls, what it calls included; its self
/// time is that without the calls in it, so far as they were traced. Calls whose duration is not
/// certain have no time, and those that contain one no self time.
#[derive(Debug)]
pub struct Top<W> {
    out: W,
    functions: HashMap<u64, Function>,
    distributions: usize,
    open: HashMap<u64, Open>,
    entries: u64,
    others: u64,
    lost: u64,
}

#[derive(Debug, Default)]
struct Function {
    name: String,
    calls: u64,
    /// Calls with a duration.
    timed: u64,
    /// Calls whose self time is known.
    own: u64,
    total: u64,
    own_time: u64,
    longest: u64,
    times: Option<Histogram<u32>>,
}

/// A call that has not ended.
#[derive(Debug)]
struct Open {
    function: u64,
    parent: Option<u64>,
    /// Nanoseconds of the calls in it.
    inner: u64,
    /// One of them has no duration.
    doubtful: bool,
}

impl<W: Write> Top<W> {
    /// The list to `out`, when the stream has ended.
    pub fn new(out: W) -> Self {
        Self {
            out,
            functions: HashMap::new(),
            distributions: 0,
            open: HashMap::new(),
            entries: 0,
            others: 0,
            lost: 0,
        }
    }

    fn function(&mut self, name: &Name<'_>) -> Option<&mut Function> {
        if self.functions.len() >= FUNCTIONS && !self.functions.contains_key(&name.address) {
            return None;
        }
        Some(
            self.functions
                .entry(name.address)
                .or_insert_with(|| Function { name: label(name), ..Function::default() }),
        )
    }

    fn entry(&mut self, entry: &Entry<'_>) {
        self.entries += 1;
        match self.function(&entry.function) {
            Some(function) => function.calls += 1,
            None => self.others += 1,
        }
        if let Some(place) = entry.place {
            let (function, parent) = (entry.function.address, place.parent);
            let open = Open { function, parent, inner: 0, doubtful: false };
            self.open.insert(place.frame, open);
        }
    }

    /// Whether the function is open around a call.
    fn is_inside(&self, function: u64, mut parent: Option<u64>) -> bool {
        for _ in 0..DEEP {
            let Some(open) = parent.and_then(|parent| self.open.get(&parent)) else { return false };
            if open.function == function {
                return true;
            }
            parent = open.parent;
        }
        false
    }

    /// Takes a call out that has ended, after `took` nanoseconds if that is certain.
    fn close(&mut self, frame: u64, took: Option<u64>) -> Option<Open> {
        let open = self.open.remove(&frame)?;
        if let Some(parent) = open.parent.and_then(|parent| self.open.get_mut(&parent)) {
            match took {
                Some(took) => parent.inner = parent.inner.saturating_add(took),
                None => parent.doubtful = true,
            }
        }
        Some(open)
    }

    fn ret(&mut self, ret: &Return<'_>) {
        let open = ret.frame.and_then(|frame| self.close(frame, ret.duration_ns));
        let (Some(took), Some(open)) = (ret.duration_ns, open) else { return };
        let inside = self.is_inside(open.function, open.parent);
        let room = self.distributions < DISTRIBUTIONS;
        let Some(function) = self.function(&ret.function) else { return };
        function.timed += 1;
        function.longest = function.longest.max(took);
        if !inside {
            function.total = function.total.saturating_add(took);
        }
        if !open.doubtful {
            function.own += 1;
            function.own_time = function.own_time.saturating_add(took.saturating_sub(open.inner));
        }
        let begins = function.times.is_none() && room;
        if begins {
            // The bounds are right, so that there is one.
            function.times = Histogram::new_with_bounds(1, LONGEST, 2).ok();
        }
        if let Some(times) = &mut function.times {
            times.saturating_record(took.max(1));
        }
        self.distributions += usize::from(begins);
    }
}

impl<W: Write> Export for Top<W> {
    fn begin(&mut self, _: &Header) -> io::Result<()> {
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        match event {
            Event::Entry(entry) => self.entry(entry),
            Event::Return(ret) => self.ret(ret),
            Event::Unfinished(unfinished) => {
                self.close(unfinished.place.frame, None);
            }
            Event::Loss(loss) => self.lost = self.lost.saturating_add(loss.count),
            Event::Tail(_) | Event::Mark(_) => {}
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn end(&mut self, _: Option<&Summary>) -> io::Result<()> {
        let Self { out, functions, entries, others, lost, .. } = self;
        let mut functions: Vec<_> = functions.values().collect();
        functions.sort_by(|a, b| {
            let key = |it: &Function| (it.own_time, it.total, it.calls);
            key(b).cmp(&key(a)).then_with(|| a.name.cmp(&b.name))
        });
        writeln!(
            out,
            "# {entries} calls of {} functions, {lost} records lost; times in us",
            functions.len()
        )?;
        writeln!(
            out,
            "#    self       total     calls     timed         p50         p90         p99         max  function"
        )?;
        for function in functions {
            let known = |many: u64, time: u64| if many == 0 { "-".into() } else { micros(time) };
            let times = function.times.as_ref().filter(|times| !times.is_empty());
            // A bucket's end may be behind the longest in it.
            let quantile = |part: f64| {
                times.map_or_else(
                    || "-".to_owned(),
                    |times| micros(times.value_at_quantile(part).min(function.longest)),
                )
            };
            writeln!(
                out,
                "{:>9} {:>11} {:>9} {:>9} {:>11} {:>11} {:>11} {:>11}  {}",
                known(function.own, function.own_time),
                known(function.timed, function.total),
                function.calls,
                function.timed,
                quantile(0.5),
                quantile(0.9),
                quantile(0.99),
                known(function.timed, function.longest),
                function.name,
            )?;
        }
        if *others > 0 {
            writeln!(out, "{others:>31}  others")?;
        }
        out.flush()
    }
}

fn micros(nanoseconds: u64) -> String {
    format!("{}.{:03}", nanoseconds / 1000, nanoseconds % 1000)
}
