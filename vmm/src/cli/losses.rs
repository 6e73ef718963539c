//! Warnings about lost records.

use std::cell::Cell;
use std::io;

use crate::export::{Called, Event, Export, Name, SortedBy, write_losses};
use crate::stream::{Header, LossReason, Stretch, Summary};
use vmtrace_system::say;

/// An export that also counts what this consumer alone has missed.
pub(super) struct Counted<'a> {
    pub(super) export: Box<dyn Export + 'a>,
    pub(super) missed: &'a Cell<u64>,
}

impl Export for Counted<'_> {
    fn begin(&mut self, header: &Header) -> io::Result<()> {
        self.export.begin(header)
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        if let Event::Loss(loss) = event
            && loss.reason == LossReason::Consumer
        {
            self.missed.set(self.missed.get().saturating_add(loss.count));
        }
        self.export.event(event)
    }

    fn looks_at_calls(&self) -> bool {
        self.export.looks_at_calls()
    }

    fn traced(
        &mut self,
        stretch: &Stretch,
        functions: &mut dyn Iterator<Item = Name<'_>>,
    ) -> io::Result<()> {
        self.export.traced(stretch, functions)
    }

    fn counts(
        &mut self,
        vcpu: u32,
        tracer: Option<&str>,
        hits: &mut dyn Iterator<Item = (Name<'_>, u64)>,
    ) -> io::Result<()> {
        self.export.counts(vcpu, tracer, hits)
    }

    fn callers(
        &mut self,
        vcpu: u32,
        tracer: Option<&str>,
        hits: &mut dyn Iterator<Item = Called<'_>>,
    ) -> io::Result<()> {
        self.export.callers(vcpu, tracer, hits)
    }

    fn sorted(
        &mut self,
        by: &SortedBy<'_>,
        words: &mut dyn Iterator<Item = (Name<'_>, u8, u64)>,
    ) -> io::Result<()> {
        self.export.sorted(by, words)
    }

    fn joined(&mut self, totals: &[(u64, u64)]) -> io::Result<()> {
        self.export.joined(totals)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.export.flush()
    }

    fn end(&mut self, summary: Option<&Summary>) -> io::Result<()> {
        self.export.end(summary)
    }

    fn notes(&self) -> Vec<String> {
        self.export.notes()
    }
}

/// Tells of losses on standard error, if there are many; what was printed goes before.
pub(super) fn tell(summary: &Summary, missed: u64) -> io::Result<()> {
    let mut text = Vec::new();
    write_losses(&mut text, summary, missed)?;
    say::text(&text);
    Ok(())
}
