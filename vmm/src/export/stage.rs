//! Turns ordered items into events with names, depths and durations.

use crate::stream::{
    CallerCount, Count, Counts, CountsOf, Decoder, Frame, Header, HistogramOf, Loss, Mark,
    MarkKind, Plain, Record, Stretch, Summary, Traced,
};

use super::ahead::{Ahead, Held, Kind};
use super::error::PlayError;
use super::front::Behind;
use super::names::Tasks;
use super::pairing::{Call, Choice, Pairing, Step};
use super::tell::{Present, Teller, Telling};
use super::waiting::{Other, Waiting};
use super::{Called, Event, Export, SortedBy};

/// Where items become events.
#[derive(Debug)]
pub(super) struct Stage<E> {
    pub(super) teller: Teller<E>,
    pub(super) pairing: Pairing,
    /// What waits, by queue: of vCPUs, and of marks.
    waiting: Vec<Waiting>,
}

impl<E: Export> Stage<E> {
    pub(super) fn new(export: E) -> Self {
        let (ahead, tasks, present) = (Ahead::default(), Tasks::default(), Present::default());
        let teller = Teller { export, ahead, tasks, present };
        Self { teller, pairing: Pairing::new(0), waiting: Vec::new() }
    }

    /// Takes a frame that does not wait: names, formats, and what is told beside events.
    ///
    /// # Errors
    /// When there are too many names, or the output fails.
    pub(super) fn frame(&mut self, header: &Header, frame: &Frame<'_>) -> Result<(), PlayError> {
        self.teller.ahead.learn(frame)?;
        match frame {
            // With another start than the frame's, if that was asked for.
            Frame::Header(_) => {
                let max_depth = self.pairing.max_depth;
                self.pairing = Pairing::new(usize::try_from(header.vcpus).unwrap_or(0));
                self.pairing.max_depth = max_depth;
                let queues = usize::try_from(header.vcpus).unwrap_or(0) + 1;
                self.waiting = (0..queues).map(|_| Waiting::default()).collect();
                self.teller.export.begin(header).map_err(PlayError::Output)
            }
            Frame::Symbols(_) => {
                self.waiting.iter_mut().for_each(Waiting::rename);
                Ok(())
            }
            Frame::Tasks(list) => {
                list.clone().for_each(|task| self.teller.tasks.insert(&task));
                if self.teller.tasks.is_crowded() {
                    self.sweep_tasks();
                }
                Ok(())
            }
            Frame::Join(totals) => self.teller.export.joined(totals).map_err(PlayError::Output),
            Frame::Traced(traced) => self.traced(header, traced),
            Frame::Counts(counts) => self.counts(header, counts),
            _ => Ok(()),
        }
    }

    /// Names of tasks are in use of records that wait, and of present tasks.
    #[cold]
    fn sweep_tasks(&mut self) {
        self.teller.tasks.sweep(self.waiting.iter().flat_map(Waiting::slots));
    }

    /// Records are the last of a queue from here on, with what is beside them.
    pub(super) fn hold_all<'a>(
        &mut self,
        queue: usize,
        mut records: Vec<Held>,
        beside: impl Iterator<Item = &'a u64>,
    ) {
        let Some(waiting) = self.waiting.get_mut(queue) else { return };
        for held in &mut records {
            held.slot = self.teller.tasks.slot(held.pid);
        }
        waiting.add_all(records);
        waiting.beside.extend(beside);
    }

    /// Tells the next item, in time order: the first of that queue.
    ///
    /// # Errors
    /// When the output fails.
    #[inline]
    pub(super) fn next(&mut self, header: &Header, queue: usize) -> Result<(), PlayError> {
        let Some(waiting) = self.waiting.get_mut(queue) else { return Ok(()) };
        if let Some(held) = waiting.next() {
            return self.record(header, queue, &held);
        }
        match waiting.next_other() {
            Some(Other::Loss(loss)) => {
                self.pairing.loss(loss.vcpu);
                self.teller.export.event(&Event::Loss(loss)).map_err(PlayError::Output)
            }
            Some(Other::Mark(mark)) => self.mark(header, &mark),
            None => Ok(()),
        }
    }

    fn mark(&mut self, header: &Header, mark: &Mark) -> Result<(), PlayError> {
        // Calls of a kernel that is gone (kexec) do not end in the next one.
        if mark.kind == MarkKind::Attach {
            self.finish(header)?;
        }
        if mark.leaves_calls_uncertain() {
            self.pairing.change();
        }
        self.teller.export.event(&Event::Mark(mark)).map_err(PlayError::Output)
    }

    #[inline]
    fn record(&mut self, header: &Header, queue: usize, held: &Held) -> Result<(), PlayError> {
        let vcpu = u32::try_from(queue).unwrap_or(u32::MAX);
        let (mut value, mut took) = (None, None);
        if held.has_more() {
            (value, took) = self.take_beside(queue, held);
        }
        let told = if held.kind() == Kind::Event {
            self.teller.event(header, vcpu, held)
        } else if held.has_sp() {
            self.pair(header, vcpu, held, (value, took))
        } else {
            self.pairing.plain(vcpu);
            self.teller.entry(header, vcpu, held, None)
        };
        if held.has_format() {
            self.teller.present.format = None;
            self.teller.present.words.clear();
        }
        told
    }

    /// Takes what is beside a record: its value and its duration; and its values are the present ones.
    #[inline(never)]
    fn take_beside(&mut self, queue: usize, held: &Held) -> (Option<u64>, Option<u64>) {
        let Some(waiting) = self.waiting.get_mut(queue) else { return (None, None) };
        let mut next = |there: bool| if there { waiting.beside.pop_front() } else { None };
        let numbers = (next(held.has_value()), next(held.kind().is_whole()));
        if held.has_format()
            && let Some((format, failed)) = waiting.values(&mut self.teller.present.words)
        {
            (self.teller.present.format, self.teller.present.failed) = (Some(format), failed);
        }
        numbers
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
            self.teller.export.event(&Event::Mark(mark)).map_err(PlayError::Output)?;
        }
        self.teller.export.end(summary).map_err(PlayError::Output)
    }

    /// Tells which functions were traced, if their tracer is wanted.
    fn traced(&mut self, header: &Header, traced: &Traced<'_>) -> Result<(), PlayError> {
        let Some(of) =
            traced.of.filter(|_| self.teller.ahead.selection.wants_tracer(traced.tracer))
        else {
            return Ok(());
        };
        let Traced { since, until, tracer, .. } = *traced;
        let functions: Vec<_> = traced
            .functions()
            .map(|at| (at, self.teller.ahead.symbols.index(header, at)))
            .collect();
        let symbols = &self.teller.ahead.symbols;
        let mut names = functions.iter().map(|&(at, index)| symbols.name(header, at, index));
        let stretch = Stretch { since, until, tracer, of };
        self.teller.export.traced(&stretch, &mut names).map_err(PlayError::Output)
    }

    /// Tells what was counted, of those functions and tracers that are wanted.
    fn counts(&mut self, header: &Header, counts: &Counts<'_>) -> Result<(), PlayError> {
        self.teller.ahead.tracers.see(counts.tracer);
        if !self.teller.ahead.selection.wants_tracer(counts.tracer) {
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
            if self.teller.ahead.selection.wants_plain(&mut self.teller.ahead.symbols, header, at) {
                wanted.push((at, self.teller.ahead.symbols.index(header, at), hits));
            }
        }
        let symbols = &self.teller.ahead.symbols;
        let mut hits = wanted.iter().map(|&(at, of, hits)| (symbols.name(header, at, of), hits));
        let tracer = self.teller.ahead.tracers.name(counts.tracer);
        self.teller.export.counts(counts.vcpu, tracer, &mut hits).map_err(PlayError::Output)
    }

    fn callers(&mut self, header: &Header, counts: &Counts<'_>) -> Result<(), PlayError> {
        let mut wanted = Vec::new();
        for it in counts.callers() {
            if self.teller.ahead.selection.wants_plain(
                &mut self.teller.ahead.symbols,
                header,
                it.function,
            ) {
                let function = self.teller.ahead.symbols.index(header, it.function);
                wanted.push((it, function, self.teller.ahead.symbols.index(header, it.caller)));
            }
        }
        let symbols = &self.teller.ahead.symbols;
        let mut hits =
            wanted.iter().map(|&(CallerCount { function, caller, hits }, of, by)| Called {
                function: symbols.name(header, function, of),
                caller: (caller != 0).then(|| symbols.name(header, caller, by)),
                hits,
            });
        let tracer = self.teller.ahead.tracers.name(counts.tracer);
        self.teller.export.callers(counts.vcpu, tracer, &mut hits).map_err(PlayError::Output)
    }

    fn sorted(
        &mut self,
        header: &Header,
        counts: &Counts<'_>,
        of: HistogramOf,
    ) -> Result<(), PlayError> {
        let mut wanted = Vec::new();
        for it in counts.buckets() {
            if self.teller.ahead.selection.wants_plain(
                &mut self.teller.ahead.symbols,
                header,
                it.function,
            ) {
                wanted.push((it, self.teller.ahead.symbols.index(header, it.function)));
            }
        }
        let symbols = &self.teller.ahead.symbols;
        let mut words = wanted
            .iter()
            .map(|&(it, of)| (symbols.name(header, it.function, of), it.bucket, it.hits));
        let tracer = self.teller.ahead.tracers.name(counts.tracer);
        let by = SortedBy { vcpu: counts.vcpu, tracer, of, name: counts.name };
        self.teller.export.sorted(&by, &mut words).map_err(PlayError::Output)
    }

    /// Tells what was left open.
    fn finish(&mut self, header: &Header) -> Result<(), PlayError> {
        let mut steps = Vec::new();
        self.pairing.finish(&mut steps);
        steps.iter().try_for_each(|step| match step {
            Step::Left(frame) => self.teller.unfinished(header, frame),
            _ => Ok(()),
        })
    }

    fn pair(
        &mut self,
        header: &Header,
        vcpu: u32,
        held: &Held,
        (value, took): (Option<u64>, Option<u64>),
    ) -> Result<(), PlayError> {
        let call = Call {
            timestamp: held.timestamp,
            vcpu,
            pid: held.pid,
            tracer: held.tracer(),
            function: held.function,
            other: held.other,
            sp: held.sp,
        };
        let choice: Choice = self.teller.ahead.selection.choice(
            &mut self.teller.ahead.symbols,
            header,
            held.function,
        );
        let Self { pairing, teller, .. } = self;
        let mut steps = Telling { teller, header, vcpu, held, value, failed: None };
        match held.kind() {
            Kind::Entry => pairing.enter(&call, choice, &mut steps),
            Kind::Return => pairing.leave(&call, choice, &mut steps),
            Kind::Whole => pairing.whole(&call, choice, (false, took), &mut steps),
            Kind::WholeTail => pairing.whole(&call, choice, (true, took), &mut steps),
            Kind::Aid => pairing.leave_others(&call, &mut steps),
            Kind::Tail => pairing.jump(&call, choice, &mut steps),
            Kind::Last => pairing.jump_last(&call, choice, &mut steps),
            Kind::Event => {}
        }
        steps.failed.map_or(Ok(()), |error| Err(*error))
    }
}

impl<E: Export> Behind for Stage<E> {
    fn ahead(&mut self) -> &mut Ahead {
        &mut self.teller.ahead
    }

    #[inline]
    fn hold(
        &mut self,
        header: &Header,
        queue: usize,
        record: &Record<'_>,
        unknown: &mut u64,
    ) -> Option<(u64, usize)> {
        let waiting = self.waiting.get_mut(queue)?;
        let (mut held, words) =
            self.teller.ahead.hold(header, record, unknown, &mut waiting.beside)?;
        held.slot = self.teller.tasks.slot(held.pid);
        waiting.add(held);
        Some((held.timestamp, words))
    }

    #[inline]
    fn hold_plain(&mut self, header: &Header, queue: usize, record: &Plain<'_>) -> Option<u64> {
        let waiting = self.waiting.get_mut(queue)?;
        let mut held = self.teller.ahead.hold_plain(header, record)?;
        held.slot = self.teller.tasks.slot(held.pid);
        waiting.add(held);
        Some(held.timestamp)
    }

    fn held(&mut self, _: usize) -> Result<(), PlayError> {
        Ok(())
    }

    fn hold_loss(&mut self, queue: usize, loss: Loss) -> Result<(), PlayError> {
        if let Some(waiting) = self.waiting.get_mut(queue) {
            waiting.add_other(Other::Loss(loss));
        }
        Ok(())
    }

    fn hold_mark(&mut self, queue: usize, mark: Box<Mark>) -> Result<(), PlayError> {
        if let Some(waiting) = self.waiting.get_mut(queue) {
            waiting.add_other(Other::Mark(mark));
        }
        Ok(())
    }

    #[inline]
    fn next(&mut self, header: &Header, queue: usize) -> Result<(), PlayError> {
        Stage::next(self, header, queue)
    }

    fn frame(&mut self, header: &Header, frame: &Frame<'_>, _: &Decoder) -> Result<(), PlayError> {
        Stage::frame(self, header, frame)
    }

    fn see(&mut self, tracer: u8) -> Result<(), PlayError> {
        self.teller.ahead.tracers.see(tracer);
        Ok(())
    }

    fn sweep_formats(&mut self) -> Result<(), PlayError> {
        self.teller.ahead.formats.sweep();
        Ok(())
    }

    fn flush(&mut self) -> Result<(), PlayError> {
        self.teller.export.flush().map_err(PlayError::Output)
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
