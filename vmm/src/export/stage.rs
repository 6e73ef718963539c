//! Turns ordered items into events with names, depths and durations.

use crate::stream::{
    CallerCount, Count, Counts, CountsOf, Decoder, Frame, Header, HistogramOf, Mark, MarkKind,
    Stretch, Summary, Traced,
};

use super::ahead::{Ahead, Held, Item, Kind};
use super::error::PlayError;
use super::front::Behind;
use super::pairing::{self, Call, Choice, Pairing, Step};
use super::values::{Args, Returned};
use super::{Called, Entry, Event, Export, Place, Return, SortedBy, Tail, Tracepoint, Unfinished};

/// What is known of the values of the present record.
#[derive(Debug, Default)]
struct Present {
    format: Option<u32>,
    failed: u64,
    words: Vec<u64>,
}

/// Where items become events.
#[derive(Debug)]
pub(super) struct Stage<E> {
    pub(super) export: E,
    pub(super) ahead: Ahead,
    pub(super) pairing: Pairing,
    /// What the present record turned out to be.
    steps: Vec<Step>,
    present: Present,
    /// Room for what waited beside an item.
    words: Vec<u64>,
}

/// Whether beginnings or ends of calls may not have been seen from a mark on.
fn changes(mark: &Mark) -> bool {
    match mark.kind {
        MarkKind::Exit
        | MarkKind::Agent
        | MarkKind::Note
        | MarkKind::Console
        | MarkKind::Events
        | MarkKind::Clock
        | MarkKind::User => false,
        // What is missed while tracing is paused the mark of its end tells.
        MarkKind::Pause => false,
        // Of functions of a module that comes or goes no call is open.
        MarkKind::Filter => !mark.text.starts_with("module "),
        _ => true,
    }
}

impl<E: Export> Stage<E> {
    pub(super) fn new(export: E) -> Self {
        Self {
            export,
            ahead: Ahead::default(),
            pairing: Pairing::new(0),
            steps: Vec::new(),
            present: Present::default(),
            words: Vec::new(),
        }
    }

    /// Takes a frame that does not wait: names, formats, and what is told beside events.
    ///
    /// # Errors
    /// When there are too many names, or the output fails.
    pub(super) fn frame(&mut self, header: &Header, frame: &Frame<'_>) -> Result<(), PlayError> {
        self.ahead.learn(frame)?;
        match frame {
            // With another start than the frame's, if that was asked for.
            Frame::Header(_) => {
                let max_depth = self.pairing.max_depth;
                self.pairing = Pairing::new(usize::try_from(header.vcpus).unwrap_or(0));
                self.pairing.max_depth = max_depth;
                self.export.begin(header).map_err(PlayError::Output)
            }
            Frame::Join(totals) => self.export.joined(totals).map_err(PlayError::Output),
            Frame::Traced(traced) => self.traced(header, traced),
            Frame::Counts(counts) => self.counts(header, counts),
            _ => Ok(()),
        }
    }

    /// Tells the next item, in time order. `words` is what waited beside it: see [`Ahead::take`].
    ///
    /// # Errors
    /// When the output fails.
    pub(super) fn give(
        &mut self,
        header: &Header,
        queue: usize,
        item: &Item,
        words: &[u64],
    ) -> Result<(), PlayError> {
        let vcpu = u32::try_from(queue).unwrap_or(u32::MAX);
        let event = match item {
            Item::Record(held) if held.has_format => {
                return self.record_with_values(header, vcpu, held, words);
            }
            Item::Record(held) => return self.record(header, vcpu, held, &mut words.iter()),
            Item::Loss(loss) => {
                self.pairing.loss(loss.vcpu);
                Event::Loss(*loss)
            }
            Item::Mark(mark) => {
                // Calls of a kernel that is gone (kexec) do not end in the next one.
                if mark.kind == MarkKind::Attach {
                    self.finish(header)?;
                }
                if changes(mark) {
                    self.pairing.change();
                }
                Event::Mark(mark)
            }
        };
        self.export.event(&event).map_err(PlayError::Output)
    }

    #[inline]
    fn record(
        &mut self,
        header: &Header,
        vcpu: u32,
        held: &Held,
        words: &mut std::slice::Iter<'_, u64>,
    ) -> Result<(), PlayError> {
        let mut next = |there: bool| if there { words.next().copied() } else { None };
        let sp = next(held.has_sp);
        let value = next(held.has_value);
        let took = next(held.kind.is_whole());
        if held.kind == Kind::Event {
            self.event(header, vcpu, held)
        } else if held.has_sp {
            self.pair(header, vcpu, held, sp.unwrap_or(0), (value, took))
        } else {
            self.pairing.plain(vcpu);
            self.entry(header, vcpu, held, None)
        }
    }

    /// [`Stage::record`] of one that has values.
    #[inline(never)]
    fn record_with_values(
        &mut self,
        header: &Header,
        vcpu: u32,
        held: &Held,
        words: &[u64],
    ) -> Result<(), PlayError> {
        let (numbers, values) = words.split_at(held.numbers().min(words.len()));
        if let [head, failed, values @ ..] = values {
            self.present.format = u32::try_from(head >> 8).ok();
            self.present.failed = *failed;
            self.present.words.extend_from_slice(values);
        }
        let given = self.record(header, vcpu, held, &mut numbers.iter());
        self.present.format = None;
        self.present.words.clear();
        given
    }

    /// Nothing follows but perhaps a word about the order of what was shown, and the summary.
    ///
    /// # Errors
    /// When the output fails.
    pub(super) fn end(
        &mut self,
        header: &Header,
        note: Option<&Mark>,
        summary: Option<&Summary>,
    ) -> Result<(), PlayError> {
        self.finish(header)?;
        if let Some(mark) = note {
            self.export.event(&Event::Mark(mark)).map_err(PlayError::Output)?;
        }
        self.export.end(summary).map_err(PlayError::Output)
    }

    /// Tells which functions were traced, if their tracer is wanted.
    fn traced(&mut self, header: &Header, traced: &Traced<'_>) -> Result<(), PlayError> {
        let Some(of) = traced.of.filter(|_| self.ahead.selection.wants_tracer(traced.tracer))
        else {
            return Ok(());
        };
        let Traced { since, until, tracer, .. } = *traced;
        let functions: Vec<_> =
            traced.functions().map(|at| (at, self.ahead.symbols.index(header, at))).collect();
        let symbols = &self.ahead.symbols;
        let mut names = functions.iter().map(|&(at, index)| symbols.name(header, at, index));
        let stretch = Stretch { since, until, tracer, of };
        self.export.traced(&stretch, &mut names).map_err(PlayError::Output)
    }

    /// Tells what was counted, of those functions and tracers that are wanted.
    fn counts(&mut self, header: &Header, counts: &Counts<'_>) -> Result<(), PlayError> {
        self.ahead.tracers.see(counts.tracer);
        if !self.ahead.selection.wants_tracer(counts.tracer) {
            return Ok(());
        }
        match counts.of {
            Some(CountsOf::Entries) => {}
            Some(CountsOf::Callers) => return self.callers(header, counts),
            Some(CountsOf::Sorted(of)) => return self.sorted(header, counts, of),
            None => return Ok(()),
        }
        let mut wanted = Vec::new();
        for Count { function: at, hits } in counts.counts() {
            // As an entry of which nobody knows where in the call graph it is.
            if self.ahead.selection.wants_plain(&mut self.ahead.symbols, header, at) {
                wanted.push((at, self.ahead.symbols.index(header, at), hits));
            }
        }
        let symbols = &self.ahead.symbols;
        let mut hits = wanted.iter().map(|&(at, of, hits)| (symbols.name(header, at, of), hits));
        let tracer = self.ahead.tracers.name(counts.tracer);
        self.export.counts(counts.vcpu, tracer, &mut hits).map_err(PlayError::Output)
    }

    fn callers(&mut self, header: &Header, counts: &Counts<'_>) -> Result<(), PlayError> {
        let mut wanted = Vec::new();
        for it in counts.callers() {
            if self.ahead.selection.wants_plain(&mut self.ahead.symbols, header, it.function) {
                let function = self.ahead.symbols.index(header, it.function);
                wanted.push((it, function, self.ahead.symbols.index(header, it.caller)));
            }
        }
        let symbols = &self.ahead.symbols;
        let mut hits =
            wanted.iter().map(|&(CallerCount { function, caller, hits }, of, by)| Called {
                function: symbols.name(header, function, of),
                caller: (caller != 0).then(|| symbols.name(header, caller, by)),
                hits,
            });
        let tracer = self.ahead.tracers.name(counts.tracer);
        self.export.callers(counts.vcpu, tracer, &mut hits).map_err(PlayError::Output)
    }

    fn sorted(
        &mut self,
        header: &Header,
        counts: &Counts<'_>,
        of: HistogramOf,
    ) -> Result<(), PlayError> {
        let mut wanted = Vec::new();
        for it in counts.buckets() {
            if self.ahead.selection.wants_plain(&mut self.ahead.symbols, header, it.function) {
                wanted.push((it, self.ahead.symbols.index(header, it.function)));
            }
        }
        let symbols = &self.ahead.symbols;
        let mut words = wanted
            .iter()
            .map(|&(it, of)| (symbols.name(header, it.function, of), it.bucket, it.hits));
        let tracer = self.ahead.tracers.name(counts.tracer);
        let by = SortedBy { vcpu: counts.vcpu, tracer, of, name: counts.name };
        self.export.sorted(&by, &mut words).map_err(PlayError::Output)
    }

    /// Tells what was left open.
    fn finish(&mut self, header: &Header) -> Result<(), PlayError> {
        let mut steps = std::mem::take(&mut self.steps);
        self.pairing.finish(&mut steps);
        let told = steps.iter().try_for_each(|step| match step {
            Step::Left(frame) => self.unfinished(header, frame),
            _ => Ok(()),
        });
        steps.clear();
        self.steps = steps;
        told
    }

    fn pair(
        &mut self,
        header: &Header,
        vcpu: u32,
        held: &Held,
        sp: u64,
        (value, took): (Option<u64>, Option<u64>),
    ) -> Result<(), PlayError> {
        let call = Call {
            timestamp: held.timestamp,
            vcpu,
            pid: held.pid,
            tracer: held.tracer,
            function: held.function,
            other: held.other,
            sp,
        };
        let choice: Choice =
            self.ahead.selection.choice(&mut self.ahead.symbols, header, held.function);
        let mut steps = std::mem::take(&mut self.steps);
        match held.kind {
            Kind::Whole => self.pairing.whole(&call, choice, (false, took), &mut steps),
            Kind::WholeTail => self.pairing.whole(&call, choice, (true, took), &mut steps),
            Kind::Entry => self.pairing.enter(&call, choice, &mut steps),
            Kind::Return => self.pairing.leave(&call, choice, &mut steps),
            Kind::Aid => self.pairing.leave_others(&call, &mut steps),
            Kind::Tail => self.pairing.jump(&call, choice, &mut steps),
            Kind::Last => self.pairing.jump_last(&call, choice, &mut steps),
            Kind::Event => {}
        }
        let told = steps.iter().try_for_each(|step| self.tell(header, vcpu, held, value, step));
        steps.clear();
        self.steps = steps;
        told
    }

    fn tell(
        &mut self,
        header: &Header,
        vcpu: u32,
        held: &Held,
        value: Option<u64>,
        step: &Step,
    ) -> Result<(), PlayError> {
        let hides = self.ahead.selection.min_duration.is_some();
        match *step {
            Step::Left(frame) | Step::Evicted(frame) => self.unfinished(header, &frame),
            Step::Entered { id, parent, depth, shown } if shown && !hides => {
                self.entry(header, vcpu, held, Some(Place { frame: id, parent, depth }))
            }
            Step::Tailed { depth, shown } if shown && !hides => {
                let function_index = self.ahead.symbols.index(header, held.function);
                let target_index = self.ahead.symbols.index(header, held.other);
                let target = self.ahead.symbols.name(header, held.other, target_index);
                let event = Event::Tail(Tail {
                    timestamp: held.timestamp,
                    vcpu,
                    pid: held.pid,
                    comm: self.ahead.tasks.comm(held.pid, held.slot),
                    function: self.ahead.symbols.name(header, held.function, function_index),
                    target: (held.other != 0).then_some(target),
                    tracer: self.ahead.tracers.name(held.tracer),
                    depth,
                    context: held.context,
                });
                self.export.event(&event).map_err(PlayError::Output)
            }
            Step::Returned { frame, depth, ticks, shown } if shown => {
                let duration_ns = ticks.map(|ticks| header.duration_ns(ticks));
                if duration_ns < self.ahead.selection.min_duration {
                    return Ok(());
                }
                let function = frame.map_or(held.function, |frame| frame.function);
                let index = self.ahead.symbols.index(header, function);
                let fields =
                    self.present.format.and_then(|format| self.ahead.formats.fields(format));
                let shape = fields.and_then(|fields| fields.first()).map(|field| &field.shape);
                let event = Event::Return(Return {
                    timestamp: held.timestamp,
                    vcpu,
                    pid: held.pid,
                    comm: self.ahead.tasks.comm(held.pid, held.slot),
                    tgid: self.ahead.tasks.tgid(held.slot),
                    function: self.ahead.symbols.name(header, function, index),
                    tracer: self.ahead.tracers.name(held.tracer),
                    depth,
                    duration_ns,
                    value: value.map(|raw| Returned { raw, shape }),
                    frame: frame.filter(|_| !hides).map(|frame| frame.id),
                    whole: frame.is_none() && ticks.is_some(),
                    context: held.context,
                });
                self.export.event(&event).map_err(PlayError::Output)
            }
            _ => Ok(()),
        }
    }

    fn entry(
        &mut self,
        header: &Header,
        vcpu: u32,
        held: &Held,
        place: Option<Place>,
    ) -> Result<(), PlayError> {
        let (function, caller) = (held.function, held.other);
        let function_index = self.ahead.symbols.index(header, function);
        let caller_index = self.ahead.symbols.index(header, caller);
        let fields = self.present.format.and_then(|format| self.ahead.formats.fields(format));
        let Present { failed, words, .. } = &self.present;
        let event = Event::Entry(Entry {
            timestamp: held.timestamp,
            vcpu,
            pid: held.pid,
            comm: self.ahead.tasks.comm(held.pid, held.slot),
            tgid: self.ahead.tasks.tgid(held.slot),
            function: self.ahead.symbols.name(header, function, function_index),
            caller: (caller != 0).then(|| self.ahead.symbols.name(header, caller, caller_index)),
            tracer: self.ahead.tracers.name(held.tracer),
            place,
            args: fields.map(|fields| Args { fields, failed: *failed, words }),
            context: held.context,
        });
        self.export.event(&event).map_err(PlayError::Output)
    }

    fn event(&mut self, header: &Header, vcpu: u32, held: &Held) -> Result<(), PlayError> {
        let (event, caller) = (held.function, held.other);
        let event_index = self.ahead.symbols.index(header, event);
        let caller_index = self.ahead.symbols.index(header, caller);
        let format = self.present.format;
        let fields = format.and_then(|format| self.ahead.formats.fields(format));
        let Present { failed, words, .. } = &self.present;
        let event = Event::Tracepoint(Tracepoint {
            timestamp: held.timestamp,
            vcpu,
            pid: held.pid,
            comm: self.ahead.tasks.comm(held.pid, held.slot),
            tgid: self.ahead.tasks.tgid(held.slot),
            event: self.ahead.symbols.name(header, event, event_index),
            caller: (caller != 0).then(|| self.ahead.symbols.name(header, caller, caller_index)),
            fields: fields.map(|fields| Args { fields, failed: *failed, words }),
            print: format.and_then(|format| self.ahead.formats.print(format)),
            context: held.context,
        });
        self.export.event(&event).map_err(PlayError::Output)
    }

    fn unfinished(&mut self, header: &Header, frame: &pairing::Frame) -> Result<(), PlayError> {
        if !frame.shown || self.ahead.selection.min_duration.is_some() {
            return Ok(());
        }
        let index = self.ahead.symbols.index(header, frame.function);
        let slot = self.ahead.tasks.slot(frame.pid);
        let event = Event::Unfinished(Unfinished {
            vcpu: frame.vcpu,
            pid: frame.pid,
            comm: self.ahead.tasks.comm(frame.pid, slot),
            function: self.ahead.symbols.name(header, frame.function, index),
            tracer: self.ahead.tracers.name(frame.tracer),
            place: Place { frame: frame.id, parent: None, depth: frame.depth },
        });
        self.export.event(&event).map_err(PlayError::Output)
    }
}

impl<E: Export> Behind for Stage<E> {
    fn ahead(&mut self) -> &mut Ahead {
        &mut self.ahead
    }

    #[inline]
    fn give(&mut self, header: &Header, queue: usize, item: Item) -> Result<(), PlayError> {
        let mut words = std::mem::take(&mut self.words);
        if let Item::Record(held) = &item {
            self.ahead.take(queue, held, &mut words);
        }
        let given = Stage::give(self, header, queue, &item, &words);
        words.clear();
        self.words = words;
        given
    }

    fn frame(&mut self, header: &Header, frame: &Frame<'_>, _: &Decoder) -> Result<(), PlayError> {
        Stage::frame(self, header, frame)
    }

    fn see(&mut self, tracer: u8) -> Result<(), PlayError> {
        self.ahead.tracers.see(tracer);
        Ok(())
    }

    fn sweep_tasks(&mut self, in_use: Vec<u32>) -> Result<(), PlayError> {
        self.ahead.tasks.sweep(in_use.into_iter());
        Ok(())
    }

    fn sweep_formats(&mut self) -> Result<(), PlayError> {
        self.ahead.formats.sweep();
        Ok(())
    }

    fn flush(&mut self) -> Result<(), PlayError> {
        self.export.flush().map_err(PlayError::Output)
    }

    fn end(
        &mut self,
        header: &Header,
        note: Option<Mark>,
        summary: Option<&Summary>,
    ) -> Result<(), PlayError> {
        Stage::end(self, header, note.as_ref(), summary)
    }
}
