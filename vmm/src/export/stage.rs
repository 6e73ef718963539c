//! Turns ordered items into events with names, depths and durations.

use crate::stream::{
    CallerCount, Count, Counts, CountsOf, Decoder, Frame, Header, HistogramOf, Loss, Mark, Plain,
    Record, Stretch, Summary, Traced,
};

use super::ahead::{Ahead, Held, Kind};
use super::error::PlayError;
use super::front::Behind;
use super::names::Tasks;
use super::pairing::{Call, Choice, Pairing, Step, Steps};
use super::tell::{Present, Teller, Telling, Told};
use super::waiting::{Other, Waiting};
use super::{Absent, Called, Event, Export, SortedBy};

/// Where items become events.
#[derive(Debug)]
pub(super) struct Stage<E> {
    pub(super) teller: Teller<E>,
    pub(super) pairing: Pairing,
    /// What waits, by queue: of vCPUs, and of marks.
    waiting: Vec<Waiting>,
    /// Whether any record told where in the call graph it is.
    pub(super) framed: bool,
    /// What the record of the last item returned.
    value: Option<u64>,
}

/// What a record turned out to be, to be told in this order.
#[derive(Clone, Copy, Debug)]
pub(super) struct Item {
    pub(super) held: Held,
    pub(super) told: Told,
    pub(super) vcpu: u16,
    /// Whether it is of the same record as the item before.
    pub(super) again: bool,
}

// There are thousands in what is handed over at a time.
const _: () = assert!(size_of::<Item>() <= 96);

impl<E: Export> Stage<E> {
    pub(super) fn new(export: E) -> Self {
        let (ahead, tasks, present) = (Ahead::default(), Tasks::default(), Present::default());
        let teller = Teller { export, ahead, tasks, present };
        let (pairing, waiting) = (Pairing::new(0), Vec::new());
        Self { teller, pairing, waiting, framed: false, value: None }
    }

    /// An unused pairing for a stream, which looks at calls if anything depends on that.
    pub(super) fn new_pairing(&self, header: &Header) -> Pairing {
        let by_calls = self.teller.ahead.selection.is_of_calls();
        let mut new = self.pairing.again(header);
        new.is_idle =
            !by_calls && new.max_depth == u32::MAX && !self.teller.export.looks_at_calls();
        new
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
                Absent::check_cpus(&self.teller.ahead.selection.cpus, header.vcpus)?;
                self.pairing = self.new_pairing(header);
                self.waiting = Waiting::queues(header);
                self.teller.export.begin(header).map_err(PlayError::Output)
            }
            Frame::Tasks(list) => {
                list.clone().for_each(|task| self.teller.tasks.insert(&task));
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
        let _ = self.teller.tasks.sweep(self.waiting.iter().flat_map(Waiting::slots));
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

    /// Tells what a record turned out to be for who has found the order and the calls. What is beside it is
    /// next in `beside`, unless it is the record of the one before.
    ///
    /// # Errors
    /// When the output fails.
    #[inline]
    pub(super) fn tell<'a>(
        &mut self,
        header: &Header,
        item: &Item,
        beside: &mut impl Iterator<Item = &'a u64>,
    ) -> Result<(), PlayError> {
        let Item { vcpu, again, ref held, ref told } = *item;
        if !again {
            self.value = None;
            if self.teller.present.format.is_some() {
                self.teller.present.clear();
            }
            if held.has_more() {
                self.value = if held.has_value() { beside.next().copied() } else { None };
                if held.has_format() {
                    self.teller.present.read(beside);
                }
            }
        }
        self.teller.tell(header, vcpu.into(), held, self.value, told)
    }

    /// Tells of what is no record.
    ///
    /// # Errors
    /// When the output fails.
    pub(super) fn show(&mut self, event: &Event<'_>) -> Result<(), PlayError> {
        self.teller.export.event(event).map_err(PlayError::Output)
    }

    fn mark(&mut self, header: &Header, mark: &Mark) -> Result<(), PlayError> {
        let left = self.pairing.mark(mark);
        self.tell_left(header, &left)?;
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
            self.teller.tell(header, vcpu, held, None, &Told::Event)
        } else if held.has_sp() {
            self.framed = true;
            self.pair(header, vcpu, held, (value, took))
        } else {
            self.pairing.plain(vcpu);
            self.teller.tell(header, vcpu, held, None, &Told::Plain)
        };
        if held.has_format() {
            self.teller.present.clear();
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
        self.tell_left(header, &steps)
    }

    fn tell_left(&mut self, header: &Header, steps: &[Step]) -> Result<(), PlayError> {
        let none = Held::default();
        let mut left = steps.iter().filter_map(|step| Told::of(step, 0));
        left.try_for_each(|told| self.teller.tell(header, 0, &none, None, &told))
    }

    fn pair(
        &mut self,
        header: &Header,
        vcpu: u32,
        held: &Held,
        (value, took): (Option<u64>, Option<u64>),
    ) -> Result<(), PlayError> {
        let choice: Choice = self.teller.ahead.selection.choice(
            &mut self.teller.ahead.symbols,
            header,
            held.function,
        );
        let Self { pairing, teller, .. } = self;
        let mut steps = Telling { teller, header, vcpu, held, value, failed: None };
        pair(pairing, (vcpu, held), choice, took, &mut steps);
        steps.failed.map_or(Ok(()), |error| Err(*error))
    }
}

/// Tells `steps` what a record with a stack pointer turns out to be.
#[inline]
pub(super) fn pair(
    pairing: &mut Pairing,
    (vcpu, held): (u32, &Held),
    choice: Choice,
    took: Option<u64>,
    steps: &mut impl Steps,
) {
    let call = Call {
        timestamp: held.timestamp,
        vcpu,
        pid: held.pid,
        tracer: held.tracer(),
        function: held.function,
        other: held.other,
        sp: held.sp,
    };
    match held.kind() {
        kind if pairing.is_idle && !kind.is_whole() => pairing.pass(kind, choice, steps),
        Kind::Entry => pairing.enter(&call, choice, steps),
        Kind::Return => pairing.leave(&call, choice, steps),
        Kind::Whole => pairing.whole(&call, choice, (false, took), steps),
        Kind::WholeTail => pairing.whole(&call, choice, (true, took), steps),
        Kind::Aid => pairing.leave_others(&call, steps),
        Kind::Tail => pairing.jump(&call, choice, steps),
        Kind::Last => pairing.jump_last(&call, choice, steps),
        Kind::Event => {}
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
        Stage::frame(self, header, frame)?;
        match frame {
            Frame::Symbols(_) => self.waiting.iter_mut().for_each(Waiting::rename),
            Frame::Tasks(_) if self.teller.tasks.is_crowded() => self.sweep_tasks(),
            _ => {}
        }
        Ok(())
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
