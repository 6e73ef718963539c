//! The table of functions by calls and time.

use std::io::{self, Write};

use crate::stream::{Header, Summary};

use super::stats::Several;
use super::times::{Function, Times};
use super::{Event, Export, Name};

/// Where the time goes: for each function calls, total and self time and percentiles, the one with
/// the most time of its own first.
///
/// The total time of a function is that of its outermost calls, what it calls included; its self
/// time is that without the calls in it, so far as they were traced. Calls whose duration is not
/// certain have no time, and those that contain one no self time. Calls that were counted, not recorded, are
/// among the calls.
#[derive(Debug)]
pub struct Top<W> {
    out: W,
    times: Times,
    lost: u64,
    several: Several,
}

impl<W: Write> Top<W> {
    /// The list to `out`, when the stream has ended.
    pub fn new(out: W) -> Self {
        Self { out, times: Times::default(), lost: 0, several: Several::default() }
    }
}

impl<W: Write> Export for Top<W> {
    fn begin(&mut self, _: &Header) -> io::Result<()> {
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        match event {
            Event::Entry(entry) => {
                self.several.see(entry.tracer);
                self.times.entry(entry);
            }
            Event::Return(ret) => {
                self.several.see(ret.tracer);
                self.times.ret(ret);
            }
            Event::Unfinished(unfinished) => self.times.unfinished(unfinished),
            Event::Loss(loss) => self.lost = self.lost.saturating_add(loss.count),
            Event::Tail(_) | Event::Tracepoint(_) | Event::Mark(_) => {}
        }
        Ok(())
    }

    fn counts(
        &mut self,
        _: u32,
        tracer: Option<&str>,
        hits: &mut dyn Iterator<Item = (Name<'_>, u64)>,
    ) -> io::Result<()> {
        let hits = hits.filter(|(_, hits)| *hits > 0);
        hits.for_each(|(function, hits)| {
            self.several.see(tracer);
            self.times.counted(&function, hits);
        });
        Ok(())
    }

    fn end(&mut self, _: Option<&Summary>) -> io::Result<()> {
        let Self { out, times, lost, several } = self;
        let Times { functions, entries, others, .. } = times;
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
        several.write(out)?;
        out.flush()
    }
}

pub(super) fn micros(nanoseconds: u64) -> String {
    format!("{}.{:03}", nanoseconds / 1000, nanoseconds % 1000)
}
