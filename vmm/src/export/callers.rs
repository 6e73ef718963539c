//! The callers of a function, and how often each calls it.

use std::collections::HashMap;
use std::io::{self, Write};

use crate::stream::{Header, Summary};

use super::stats::share;
use super::{Called, Event, Export, Name};

/// Most pairs of function and caller that are told apart.
const PAIRS: usize = 1 << 20;

/// Who calls the functions of a trace, and how often: for each function a list, the most frequent
/// first.
#[derive(Debug)]
pub struct Callers<W> {
    out: W,
    /// By function and caller.
    counts: HashMap<(String, String), u64>,
    others: u64,
    lost: u64,
}

impl<W: Write> Callers<W> {
    /// Lists to `out`, when the stream has ended.
    pub fn new(out: W) -> Self {
        Self { out, counts: HashMap::new(), others: 0, lost: 0 }
    }

    fn add(&mut self, function: &Name<'_>, caller: Option<&Name<'_>>, calls: u64) {
        let caller = caller.map_or_else(|| "?".to_owned(), Name::label);
        let pair = (function.label(), caller);
        let full = self.counts.len() >= PAIRS;
        match self.counts.get_mut(&pair) {
            // A guest can make up any count.
            Some(count) => *count = count.saturating_add(calls),
            None if full => self.others = self.others.saturating_add(calls),
            None => {
                self.counts.insert(pair, calls);
            }
        }
    }
}

impl<W: Write> Export for Callers<W> {
    fn begin(&mut self, _: &Header) -> io::Result<()> {
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        match event {
            Event::Entry(entry) => self.add(&entry.function, entry.caller.as_ref(), 1),
            Event::Loss(loss) => self.lost = self.lost.saturating_add(loss.count),
            _ => {}
        }
        Ok(())
    }

    fn callers(
        &mut self,
        _: u32,
        _: Option<&str>,
        hits: &mut dyn Iterator<Item = Called<'_>>,
    ) -> io::Result<()> {
        let hits = hits.filter(|it| it.hits > 0);
        hits.for_each(|it| self.add(&it.function, it.caller.as_ref(), it.hits));
        Ok(())
    }

    fn end(&mut self, _: Option<&Summary>) -> io::Result<()> {
        let mut functions: HashMap<&str, Vec<(u64, &str)>> = HashMap::new();
        for ((function, caller), count) in &self.counts {
            functions.entry(function).or_default().push((*count, caller));
        }
        let total = |callers: &[(u64, &str)]| {
            callers.iter().fold(0_u64, |sum, (count, _)| sum.saturating_add(*count))
        };
        let mut functions: Vec<_> =
            functions.into_iter().map(|(name, callers)| (total(&callers), name, callers)).collect();
        functions.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(b.1)));
        let out = &mut self.out;
        writeln!(out, "# {} functions, {} lost", functions.len(), self.lost)?;
        for (calls, name, mut callers) in functions {
            callers.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(b.1)));
            writeln!(out, "{name}: {calls} calls")?;
            for (count, caller) in callers {
                writeln!(out, "{count:>10} {}  {caller}", share(count, calls))?;
            }
        }
        if self.others > 0 {
            writeln!(out, "{:>10}         others", self.others)?;
        }
        out.flush()
    }
}
