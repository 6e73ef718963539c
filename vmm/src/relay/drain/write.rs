//! Writes what was taken from a ring.

use super::Drain;
use crate::relay::memo::Shape;
use crate::relay::names::{Functions, TaskNames};
use crate::relay::order::Order;
use crate::relay::slides::Meanings;
use crate::serve::Hub;
use crate::stream::{
    EntryRecord, ExitReason, Filler, LossReason, RecordBuffer, ReturnRecord, Symbol, Writer,
};
use crate::tracer::RawRecord;
use std::io;

/// Which exits are written though no record follows them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Last {
    /// None: records from before them may come.
    None,
    /// Those that were there before the ring was looked at.
    Certain,
    /// All: nobody writes records any more.
    All,
}

/// What is needed of records of which there is nothing else to tell.
struct Usual<'a> {
    functions: &'a Functions,
    tasks: &'a TaskNames,
    /// See [`Programs::stack_biases`](crate::relay::programs::Programs::stack_biases).
    biases: (u64, u64),
    /// Of all records of the batch.
    fields: &'a [u64],
    /// From this time on something else is to be told first.
    before: u64,
}

impl Usual<'_> {
    /// Writes the first of these records of which there is nothing else to tell, and to which nothing is
    /// unusual. How many.
    fn write(&self, records: &[RawRecord], order: &mut Order, batch: &mut RecordBuffer) -> usize {
        batch.fill(records.len(), |out| {
            let (mut last, mut behind, mut count) = (order.last(), 0, 0);
            for record in records {
                let Some(time) = self.write_one(record, last, out) else { break };
                behind += u64::from(record.timestamp < last);
                last = time;
                count += 1;
            }
            order.passed(last, behind);
            count
        })
    }

    /// Writes a record that comes after one of this time. Its time; `None` where it was not written.
    #[inline]
    fn write_one(&self, record: &RawRecord, last: u64, out: &mut Filler<'_>) -> Option<u64> {
        let known = self.functions.known(record)?;
        let (shape, tracer) = known.shape()?;
        let is_usual = record.fields == shape.fields() && record.timestamp < self.before;
        if !is_usual || !self.tasks.goes_on(record) {
            return None;
        }
        let &RawRecord { timestamp, caller, pid, extra, .. } = record;
        let (time, function) = (last.max(timestamp), known.function());
        let sp = |bias| Some(self.fields.get(extra as usize)?.wrapping_add(bias));
        let entry = || EntryRecord::new(time, function, caller, pid).of_tracer(tracer);
        let (entry_bias, return_bias) = self.biases;
        let has_room = match shape {
            Shape::Entry => out.push(&entry(), time),
            Shape::Frame => out.push(&entry().with_sp(sp(entry_bias)?), time),
            Shape::Return => {
                let ret = ReturnRecord::new(time, function, caller, pid, sp(return_bias)?);
                out.push(&ret.of_tracer(tracer), time)
            }
        };
        has_room.then_some(time)
    }
}

impl Drain {
    /// Writes the raw records of one vCPU, with the names they need before them, exits that were before
    /// them, and those that are `last`.
    pub(super) fn write(&mut self, vcpu: usize, last: Last) -> io::Result<()> {
        if self.slides.differ() {
            self.as_first();
        }
        self.batch.clear();
        let Some(order) = self.orders.get_mut(vcpu) else { return Ok(()) };
        let mut earliest = None;
        let mut invalid = 0;
        let mut symbols = Vec::new();
        let cpu = u32::try_from(vcpu).unwrap_or(u32::MAX);
        // None come while this goes on.
        let has_exits = self.exits.waiting(vcpu) > 0;
        let promised = self.marked.saturating_add(1);
        let last = match last {
            Last::None => 0,
            Last::Certain => self.exits.certain(vcpu),
            Last::All => u64::MAX,
        };
        let mut next = 0;
        loop {
            // An exit of the same time comes before.
            let before = self.exits.next_ticks(vcpu).unwrap_or(u64::MAX);
            let Self { raw, functions, tasks, programs, batch, .. } = self;
            let biases = programs.stack_biases();
            let usual = Usual { functions, tasks, biases, fields: &raw.extra, before };
            let records = raw.records.get(next..).unwrap_or_default();
            let first = records.first().map(|record| record.timestamp.max(order.last()));
            let count = usual.write(records, order, batch);
            earliest = earliest.or(first.filter(|_| count > 0));
            next += count;
            let record = self.raw.records.get(next);
            next += 1;
            let until = record.map_or(last, |record| record.timestamp);
            while has_exits
                && let Some((dropped, exit)) = self.exits.next(vcpu, until, &mut self.writer)?
            {
                if dropped > 0 {
                    // They are missing at this very place.
                    hand_over(&mut self.writer, cpu, &mut self.batch, &mut symbols)?;
                    self.writer.loss(cpu, dropped, LossReason::Exits)?;
                }
                // That of a preemption says nothing of the guest's clock.
                let is_exact = exit.reason != ExitReason::Preempted;
                let ticks = if is_exact { exit.ticks } else { exit.ticks.max(promised) };
                let time = order.pass_at(ticks);
                if is_exact {
                    earliest.get_or_insert(time);
                }
                exit.write(&mut self.batch, time);
            }
            let Some(record) = record else { break };
            let known = self.functions.known(record);
            let format = self.programs.format(record);
            if let (Some(format), Some(known)) = (format, known) {
                let place = known.place();
                if let Some(task) = self.tasks.of(&*self.memory, record) {
                    self.writer.task(task)?;
                }
                let time = order.pass(record);
                earliest.get_or_insert(time);
                format.write(&mut self.batch, time, record, self.raw.fields(record), &place);
                continue;
            }
            if !self.events.is_empty()
                && let Some(format) = format
                && let Some(event) = self.events.find(record.site, self.raw.fields(record))
            {
                let Some(event) = event else { continue };
                if let Some((symbol, told)) = self.events.first(&self.kernel, event) {
                    self.writer.symbols([symbol])?;
                    self.writer.values(&told)?;
                }
                symbols.extend(self.callers.name(&self.kernel, &self.modules, record.caller));
                if let Some(task) = self.tasks.of(&*self.memory, record) {
                    self.writer.task(task)?;
                }
                let time = order.pass(record);
                earliest.get_or_insert(time);
                let fields = self.raw.fields(record);
                self.events.write(event, &mut self.batch, time, record, fields);
                let context = match self.events.is_in_place(event) {
                    true => format.context_in_place(fields),
                    false => format.context_of_event(fields),
                };
                if let Some(context) = context {
                    self.batch.with_context(context);
                }
                continue;
            }
            let place = format.and_then(|format| self.functions.place(format.point, record.site));
            let (Some(format), Some(place)) = (format, place) else {
                // Only the guest itself can have put this there.
                invalid += 1;
                continue;
            };
            let fields = self.raw.fields(record);
            let place = format.refine(place, fields);
            // Most of the functions that are traced are never called: those that are get
            // their names now.
            if place.fresh {
                let symbol = self.functions.symbol(&self.kernel, &self.modules, place.function);
                symbols.extend(symbol);
            }
            if format.tells_targets() {
                let pair = (place.function, place.target);
                self.jumps.note((self.functions.link(pair.0), self.functions.link(pair.1)));
            }
            if place.target != 0 {
                symbols.extend(self.callers.name(&self.kernel, &self.modules, place.target));
            }
            symbols.extend(self.callers.name(&self.kernel, &self.modules, record.caller));
            if let Some(task) = self.tasks.of(&*self.memory, record) {
                self.writer.task(task)?;
            }
            if format.has_values {
                for (tracer, of) in format.valued() {
                    if let Some(told) = self.untold.first(place.function, tracer, of) {
                        self.writer.values(&told)?;
                    }
                }
            }
            let time = order.pass(record);
            earliest.get_or_insert(time);
            format.write(&mut self.batch, time, record, fields, &place);
            if format.is_plain() {
                self.functions.keep(record, &place, format.shape());
            }
        }
        if let Some(early) = earliest.and_then(|time| (self.marked + 1).checked_sub(time)) {
            // The guest's clock is not where it was thought: it is behind.
            self.clock.set_back(early);
        }
        hand_over(&mut self.writer, cpu, &mut self.batch, &mut symbols)?;
        if let Some(total) = self.invalid.get_mut(vcpu) {
            *total += invalid;
        }
        self.lost(vcpu, invalid, LossReason::Invalid)
    }

    /// Makes addresses of what was taken those of the first kernel.
    #[cold]
    fn as_first(&mut self) {
        let known = Meanings {
            programs: &self.programs,
            functions: &self.functions,
            events: &self.events,
            untold: &self.untold,
        };
        self.slides.batch(&mut self.raw, &known);
    }
}

/// Writes what was gathered of one vCPU, with the names that it needs before it.
fn hand_over(
    writer: &mut Writer<Hub>,
    vcpu: u32,
    batch: &mut RecordBuffer,
    symbols: &mut Vec<Symbol<'_>>,
) -> io::Result<()> {
    if !symbols.is_empty() {
        writer.symbols(std::mem::take(symbols))?;
    }
    if !batch.is_empty() {
        writer.records(vcpu, batch)?;
        batch.clear();
    }
    Ok(())
}
