//! Counts how often each function was entered.

use std::io::{self, Write};

use rustc_hash::FxHashMap;

use crate::stream::{Header, Summary};

use super::{Event, Export, Name};

/// Most functions that are told apart: more than any kernel has.
const FUNCTIONS: usize = 1 << 20;

/// How often each function was entered: a list, the most frequent first.
#[derive(Debug)]
pub struct Stats<W> {
    out: W,
    counts: FxHashMap<u64, Count>,
    total: u64,
    others: u64,
    lost: u64,
    several: Several,
}

/// Whether calls are of more than one tracer.
#[derive(Debug, Default)]
pub(super) struct Several {
    first: Option<Box<str>>,
    more: bool,
}

impl Several {
    /// A call is of this tracer.
    pub(super) fn see(&mut self, tracer: Option<&str>) {
        let Some(tracer) = tracer.filter(|_| !self.more) else { return };
        match &self.first {
            Some(first) => self.more = **first != *tracer,
            None => self.first = Some(tracer.into()),
        }
    }

    /// Says so.
    pub(super) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        if self.more {
            let what =
                "# of several tracers: a call that more than one saw is there for each; --tracer";
            writeln!(out, "{what} shows those of one")?;
        }
        Ok(())
    }
}

#[derive(Debug)]
struct Count {
    name: String,
    entries: u64,
}

impl<W: Write> Stats<W> {
    /// Statistics to `out`, when the stream has ended.
    pub fn new(out: W) -> Self {
        let several = Several::default();
        Self { out, counts: FxHashMap::default(), total: 0, others: 0, lost: 0, several }
    }

    fn add(&mut self, tracer: Option<&str>, function: &Name<'_>, entries: u64) {
        self.several.see(tracer);
        self.total = self.total.saturating_add(entries);
        if self.counts.len() >= FUNCTIONS && !self.counts.contains_key(&function.address) {
            self.others = self.others.saturating_add(entries);
            return;
        }
        let new = || Count { name: function.label(), entries: 0 };
        let count = self.counts.entry(function.address).or_insert_with(new);
        count.entries = count.entries.saturating_add(entries);
    }
}

impl<W: Write> Export for Stats<W> {
    fn begin(&mut self, _: &Header) -> io::Result<()> {
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        match event {
            Event::Entry(entry) => self.add(entry.tracer, &entry.function, 1),
            // Of such a call there is no entry.
            Event::Return(ret) if ret.whole => self.add(ret.tracer, &ret.function, 1),
            Event::Loss(loss) => self.lost = self.lost.saturating_add(loss.count),
            // Only entries are counted.
            _ => {}
        }
        Ok(())
    }

    fn looks_at_calls(&self) -> bool {
        false
    }

    fn counts(
        &mut self,
        _: u32,
        tracer: Option<&str>,
        hits: &mut dyn Iterator<Item = (Name<'_>, u64)>,
    ) -> io::Result<()> {
        let hits = hits.filter(|(_, hits)| *hits > 0);
        hits.for_each(|(function, hits)| self.add(tracer, &function, hits));
        Ok(())
    }

    fn end(&mut self, _: Option<&Summary>) -> io::Result<()> {
        let Self { out, counts, total, others, lost, several } = self;
        let mut counts: Vec<_> = counts.values().collect();
        counts.sort_by(|a, b| b.entries.cmp(&a.entries).then_with(|| a.name.cmp(&b.name)));
        let functions = counts.len();
        writeln!(out, "# {total} entries of {functions} functions, {lost} lost")?;
        writeln!(out, "#  entries   share  function")?;
        for Count { name, entries } in counts {
            writeln!(out, "{entries:>10} {}  {name}", share(*entries, *total))?;
        }
        if *others > 0 {
            writeln!(out, "{others:>10}         others")?;
        }
        several.write(out)?;
        out.flush()
    }
}

/// How much of `total` that is, in percent.
pub(crate) fn share(part: u64, total: u64) -> String {
    let total = u128::from(total).max(1);
    let permille = (u128::from(part) * 1000 + total / 2) / total;
    format!("{:>4}.{}%", permille / 10, permille % 10)
}
