//! Drains rings into the stream.

mod anew;
mod rest;
mod write;

pub use anew::Left;
pub use rest::{SNAPSHOT_TIME, Snapshot};
use write::Last;

use super::events::Events;
use super::exits::Exits;
use super::jumps::{Jumps, Told};
use super::names::{Callers, Functions, ModuleNames, TaskNames};
use super::order::{Order, WAITING};
use super::programs::Programs;
use super::slides::Slides;
use super::values::Untold;
use super::waiting::{Waits, nanoseconds};
use super::{
    Clock, Command, ConsoleLines, End, Grace, Setup, Status, Targets, TracedSites, TracerName,
    counts,
};
use crate::deadline::Pulse;
use crate::kernel::Kernel;
use crate::serve::{Hub, Join};
use crate::stream::{
    EntryRecord, LossReason, Mark, MarkKind, RecordBuffer, Summary, Tracer, Writer,
};
use crate::tracer::ring::RingReader;
use crate::tracer::{Guest, RawBatch};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

/// Records taken from one ring at a time.
const BATCH: usize = 2048;
/// Rest between two passes while a ring gets full, and while none does. A ring of 4 MiB
/// takes 5 ms to fill at 25 million records a second.
const BUSY_REST: Duration = Duration::from_micros(500);
const IDLE_REST: Duration = Duration::from_millis(3);
/// A ring of which so much was taken in a pass, one part of so many, may get full in a longer rest. Who passes more often
/// takes the CPU from the guest where there is but one.
const MUCH: u64 = 16;
/// A flight recorder is read at the end; until then marks and consumers come, and tasks are
/// looked at.
const RECORDER_REST: Duration = Duration::from_millis(20);
/// Commands between two passes.
const COMMANDS: usize = 256;
/// Passes in which the last records of before are to be followed by others.
const MORE_PASSES: usize = 4;
/// By how much the guest's clock may be behind what is thought.
const LATE: Duration = Duration::from_millis(2);

/// What the relay's thread does, for those who do it themselves: tests and benchmarks.
pub struct Drain {
    writer: Writer<Hub>,
    joins: Receiver<Join>,
    readers: Vec<RingReader>,
    /// Whether one of them would soon be full.
    has_much: bool,
    exits: Exits,
    tasks: TaskNames,
    memory: Box<dyn Guest + Send>,
    kernel: Arc<Kernel>,
    functions: Functions,
    events: Events,
    modules: ModuleNames,
    callers: Callers,
    slides: Slides,
    clock: Clock,
    console: ConsoleLines,
    /// Lines of it that were left out.
    unheard: u64,
    /// Marks that were left out.
    unmarked: u64,
    /// Functions in which calls go on.
    jumps: Jumps,
    programs: Programs,
    untold: Untold,
    raw: RawBatch,
    batch: RecordBuffer,
    invalid: Vec<u64>,
    /// The records of each vCPU on their way.
    orders: Vec<Order>,
    /// All records of each vCPU up to this time have been written.
    written: Vec<u64>,
    /// The highest watermark so far.
    marked: u64,
    /// Somebody wants to know when all records up to this time have been written.
    reach: Option<u64>,
    /// Whether records are taken out before the end.
    live: bool,
    /// To be told before the end.
    traced: Vec<TracedSites>,
    waits: Waits,
    pulse: Pulse,
}

impl Drain {
    /// Begins the stream.
    ///
    /// # Errors
    /// When the primary output fails.
    pub fn start(setup: Setup) -> io::Result<Self> {
        let clock = Clock::of(&setup);
        Self::new(setup, clock)
    }

    pub(super) fn new(setup: Setup, clock: Clock) -> io::Result<Self> {
        let Setup { header, stream, joins, readers, tasks, memory, kernel, .. } = setup;
        let Setup { targets, console, waiting, exits, .. } = setup;
        let mut writer = Writer::new(stream, &header)?;
        // Who waits already gets the very bytes that a file gets.
        while let Ok(join) = joins.try_recv() {
            add(&mut writer, Vec::new(), join);
        }
        writer.flush()?;
        let mut drain = Self {
            writer,
            joins,
            functions: Functions::new(header.slide),
            events: Events::default(),
            modules: ModuleNames::default(),
            callers: Callers::new(header.slide),
            slides: Slides::new(&kernel, header.slide),
            invalid: vec![0; readers.len()],
            orders: readers.iter().map(|_| Order::default()).collect(),
            written: vec![0; readers.len()],
            marked: 0,
            reach: None,
            live: readers.iter().any(|reader| !reader.overwrites()),
            has_much: false,
            readers,
            exits: Exits::new(exits, header.clock_hz, clock.started),
            tasks: TaskNames::new(tasks),
            memory,
            kernel,
            clock,
            console,
            unheard: 0,
            unmarked: 0,
            traced: Vec::new(),
            waits: Waits::new(waiting),
            jumps: Jumps::default(),
            pulse: Pulse::default(),
            programs: Programs::default(),
            untold: Untold::default(),
            raw: RawBatch::with_capacity(BATCH),
            batch: RecordBuffer::with_capacity(BATCH * size_of::<EntryRecord>()),
        };
        drain.targets(&targets)?;
        Ok(drain)
    }

    /// The same, which tells that it goes on.
    pub(super) fn with_pulse(mut self, pulse: Pulse) -> Self {
        self.writer.get_mut().set_pulse(pulse.clone());
        self.pulse = pulse;
        self
    }

    /// The same, which tells in which functions calls go on.
    pub(super) fn telling_jumps(mut self, told: Told) -> Self {
        self.jumps = Jumps::telling(told);
        self
    }

    /// Drains until it is told to finish; `tell` is called with what is wrong with a ring, `notice` when there are such
    /// functions, and `consumers` is how many there are.
    pub(super) fn run(
        mut self,
        commands: &Receiver<Command>,
        (tell, notice): (&dyn Fn(String), &dyn Fn()),
        consumers: &AtomicUsize,
    ) -> io::Result<End> {
        loop {
            self.join()?;
            consumers.store(self.writer.get_mut().consumers(), Ordering::Relaxed);
            if let Some(corrupt) = self.readers.iter().find_map(RingReader::corrupt) {
                tell(corrupt.to_string());
            }
            // Without room records are better off in their rings: what gets too much is counted
            // there, or waits.
            let room = self.has_room();
            self.waits.close(!room);
            if room {
                self.pass()?;
            }
            if self.jumps.take_fresh() {
                notice();
            }
            let busy = room && self.has_much();
            let rest = match (busy, self.live) {
                (true, _) => BUSY_REST,
                (false, true) => IDLE_REST,
                (false, false) => RECORDER_REST,
            };
            let first = match commands.recv_timeout(rest) {
                Ok(command) => Some(command),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(io::Error::other("the controller is gone"));
                }
            };
            // One for each pass would not keep up with a guest that makes marks.
            for command in first.into_iter().chain(commands.try_iter().take(COMMANDS)) {
                if let Some((summary, grace)) = self.obey(command)? {
                    return self.finish(summary, &grace);
                }
            }
        }
    }

    /// What is to be told at the end, once it is time for that.
    fn obey(&mut self, command: Command) -> io::Result<Option<(Summary, Grace)>> {
        match command {
            Command::Mark(mark) => self.mark(&mark)?,
            Command::Module(module) => {
                self.take_all()?;
                let module = self.slides.module(module);
                self.functions.renew(&self.kernel, &module);
                self.modules.add(&module);
                // What was unknown may have a name now, or another one.
                self.callers.forget();
            }
            Command::Exits(exits, done) => {
                self.take_all()?;
                self.functions.add_exits(&self.slides.exits(&exits));
                let _ = done.send(());
            }
            Command::Targets(targets, done) => {
                let all = self.take_all()?;
                self.targets(&targets)?;
                let _ = done.send(all);
            }
            Command::Take(answer) => {
                let all = self.take_all()?;
                let _ = answer.send(all);
            }
            Command::Reach(ticks) => self.reach = self.reach.max(Some(ticks)),
            Command::Watch(watched, done) => {
                let first = self.writer.join()?;
                let _ = done.send(self.writer.get_mut().watch(first, *watched));
            }
            Command::Status(answer) => {
                let vcpus = self.writer.totals().to_vec();
                let consumers = self.writer.get_mut().consumers();
                // Who asked may have given up.
                let _ = answer.send(Status { vcpus, consumers });
            }
            Command::Clear(answer) => {
                let cleared = self.clear()?;
                let _ = answer.send(cleared);
            }
            Command::Snapshot(answer) => {
                let taken = self.snapshot()?;
                let _ = answer.send(taken);
            }
            Command::Leave(next, answer) => {
                let left = self.leave_rings()?;
                self.slides.enter(next);
                let _ = answer.send(left);
            }
            Command::Enter(readers, tasks, done) => {
                self.enter_rings(readers, tasks);
                let _ = done.send(());
            }
            Command::Traced(traced) => self.traced = traced,
            Command::Counted(counted, called, sorted) => {
                self.take_all()?;
                let called = self.slides.callers(called);
                let names = (&self.functions, &*self.kernel, &self.modules);
                counts::write(&mut self.writer, names, &counted)?;
                counts::write_callers(&mut self.writer, names, &mut self.callers, &called)?;
                counts::write_sorted(&mut self.writer, names, &sorted)?;
            }
            Command::Finish(summary, grace) => return Ok(Some((*summary, grace))),
        }
        Ok(None)
    }

    /// What was written before is of those that were there before. Whether that is all of it: not what is in a
    /// flight recorder, or stands behind a record that is not finished.
    fn take_all(&mut self) -> io::Result<bool> {
        let written: Vec<_> = self.readers.iter_mut().map(RingReader::position).collect();
        if self.writer.get_mut().primary().is_stuffed() {
            self.give_up()?;
        } else {
            self.pass()?;
        }
        let mut readers = self.readers.iter().zip(written);
        if !readers.all(|(reader, until)| until.is_some_and(|it| reader.has_taken(it))) {
            return Ok(false);
        }
        // A guest that goes on to write has some wait for later ones: these may be of before.
        let taken: Vec<_> = self.readers.iter().map(|reader| reader.totals().records).collect();
        for _ in 0..MORE_PASSES {
            if self.has_passed(&taken) || self.writer.get_mut().primary().is_stuffed() {
                break;
            }
            self.pass()?;
        }
        Ok(self.has_passed(&taken))
    }

    /// Whether all have gone that had been taken when each reader had taken so many records in all.
    fn has_passed(&self, taken: &[u64]) -> bool {
        let mut vcpus = self.orders.iter().zip(&self.readers).zip(taken);
        vcpus.all(|((order, reader), before)| {
            !order.waits() || reader.totals().records.saturating_sub(*before) >= WAITING as u64
        })
    }

    /// Waits until the primary output has all that was written so far, or has failed.
    pub fn wait_for_output(&mut self) {
        self.writer.get_mut().primary().wait_until_written();
    }

    /// Whether a vCPU's ring is a flight recorder; between two kernels, whether it was.
    fn overwrites(&self, vcpu: usize) -> bool {
        self.readers.get(vcpu).map_or(!self.live, RingReader::overwrites)
    }

    fn has_room(&mut self) -> bool {
        self.writer.get_mut().primary().has_room()
    }

    fn mark(&mut self, mark: &Mark) -> io::Result<()> {
        let primary = self.writer.get_mut().primary();
        // Whoever asked for a user's mark was told that it is there, and no guest makes any.
        let is_left_out = match mark.kind {
            MarkKind::User => primary.is_overfull(),
            _ => primary.is_stuffed(),
        };
        if is_left_out {
            self.unmarked += 1;
            return Ok(());
        }
        self.writer.mark(mark)
    }

    /// This may write records from now on.
    fn targets(&mut self, targets: &Targets) -> io::Result<()> {
        let targets = &*self.slides.targets(targets);
        self.functions.add(&self.kernel, &self.modules, &targets.sites);
        self.functions.add_exits(&targets.exits);
        self.events.add(self.writer.header().slide, targets);
        self.programs.set(&self.kernel, targets);
        let values = targets.tracers.iter().map(|tracer| (tracer.number, tracer.values.clone()));
        self.untold.set(&self.kernel, &self.modules, self.writer.header().slide, values);
        for TracerName { number, name, text, .. } in &targets.tracers {
            self.writer.tracer(Tracer { number: *number, name, description: text })?;
        }
        Ok(())
    }

    /// Lets those in who wait.
    fn join(&mut self) -> io::Result<()> {
        while let Ok(join) = self.joins.try_recv() {
            let first = self.writer.join()?;
            add(&mut self.writer, first, join);
        }
        Ok(())
    }

    /// Forgets what is in the rings.
    fn clear(&mut self) -> io::Result<u64> {
        let mut total = 0;
        for vcpu in 0..self.orders.len() {
            if let Some(reader) = self.readers.get_mut(vcpu) {
                let overwrites = reader.overwrites();
                let (cleared, lost) = reader.clear();
                total += cleared;
                self.lost(vcpu, lost, reason(overwrites))?;
            }
            total += self.exits.clear(vcpu, &mut self.writer)?;
        }
        Ok(total)
    }

    /// Takes from every ring until each was seen empty. Whether there was anything.
    ///
    /// # Errors
    /// When the primary output fails.
    pub fn pass(&mut self) -> io::Result<bool> {
        // Not later: what is reserved after a ring was seen empty has a later time than this.
        let now = self.clock.ticks(LATE);
        self.pulse.beat();
        self.tasks.start_pass();
        self.hear()?;
        if !self.live {
            self.look()?;
        }
        let mut any = false;
        self.has_much = false;
        for vcpu in 0..self.orders.len() {
            let mut taken = 0;
            // Between two kernels there is no ring.
            let mut empty = self.readers.get(vcpu).is_none();
            // Before the ring: when that is empty then, it has had all records from before them.
            let overwrites = self.overwrites(vcpu);
            let settled = self.exits.take(vcpu, overwrites, now);
            let certain = if overwrites { Last::None } else { Last::Certain };
            // A vCPU that outruns the relay must not starve the others.
            for _ in 0..64 {
                self.raw.clear();
                let Some(reader) = self.readers.get_mut(vcpu) else {
                    any |= self.exits.waiting(vcpu) > 0 && !overwrites;
                    // Nobody writes records.
                    self.write(vcpu, if overwrites { Last::None } else { Last::All })?;
                    break;
                };
                let Some(order) = self.orders.get_mut(vcpu) else { break };
                order.resume(&mut self.raw);
                let (before, held) = (self.raw.records.len(), self.raw.bytes());
                let lost = reader.drain(&mut self.raw);
                let more = !self.raw.has_room() || lost > 0;
                any |= self.raw.records.len() > before;
                taken += self.raw.bytes() - held;
                self.has_much |= lost > 0 || taken >= reader.capacity() / MUCH;
                // Only now: what interrupted the writer of a record that was taken is to be seen.
                empty = reader.is_empty();
                order.settle(&mut self.raw, empty || lost > 0);
                // Those that are before records that have just been taken.
                self.exits.take_more(vcpu, overwrites);
                self.write(vcpu, if empty { certain } else { Last::None })?;
                self.lost(vcpu, lost, LossReason::Full)?;
                if !more {
                    break;
                }
            }
            // What a flight recorder keeps is earlier than now.
            let all = empty && settled && self.exits.waiting(vcpu) == 0;
            let last = self.orders.get(vcpu).map_or(0, Order::last);
            if let Some(written) = self.written.get_mut(vcpu) {
                // Of a ring in which a writer stands it is known that no earlier ones come.
                let until = if all { now } else { last.saturating_sub(1) };
                *written = until.max(*written);
            }
        }
        self.waits.passed(&self.readers, any);
        let until = self.written.iter().copied().min().unwrap_or(now).max(self.marked);
        // Also where it stays: readers learn by it that there has been a pass.
        if self.reach.is_some_and(|reach| reach <= until) {
            (self.reach, self.marked) = (None, until);
            self.writer.tell_watermark(until)?;
        } else if until > self.marked || any {
            self.marked = until;
            self.writer.watermark(until)?;
        } else {
            self.writer.flush()?;
        }
        Ok(any)
    }

    /// Whether so much was there in the last pass that a ring may get full before a later one.
    #[must_use]
    pub fn has_much(&self) -> bool {
        self.has_much
    }

    /// Makes marks of the lines of the console, and of when all vCPUs waited.
    fn hear(&mut self) -> io::Result<()> {
        let (lines, dropped) = self.console.take();
        self.unheard += dropped;
        for line in lines {
            let ticks = self.clock.ticks_at(line.ended);
            let kind = MarkKind::Console;
            self.mark(&Mark { ticks, kind, duration_ns: 0, text: line.text })?;
        }
        for (begun, time) in self.waits.stalls() {
            // As those of other pauses: when they were over.
            let ticks = self.clock.ticks_at(begun + time);
            let duration_ns = nanoseconds(time);
            let text = "the output of the trace took nothing".to_owned();
            self.mark(&Mark { ticks, kind: MarkKind::Pause, duration_ns, text })?;
        }
        Ok(())
    }

    /// Has a look at who writes records that are taken out at the end: by then most tasks are
    /// gone.
    fn look(&mut self) -> io::Result<()> {
        for reader in &mut self.readers {
            self.raw.clear();
            reader.newest(&mut self.raw);
            for record in &self.raw.records {
                if let Some(task) = self.tasks.of(&*self.memory, record) {
                    self.writer.task(task)?;
                }
            }
        }
        Ok(())
    }

    fn lost(&mut self, vcpu: usize, count: u64, reason: LossReason) -> io::Result<()> {
        if count == 0 {
            return Ok(());
        }
        self.writer.loss(u32::try_from(vcpu).unwrap_or(u32::MAX), count, reason)
    }

    /// Nothing is traced any more: takes everything, and ends the stream. An output that does not
    /// take it in time is left; what was lost by that is counted.
    ///
    /// # Errors
    /// When the primary output fails.
    pub fn finish(mut self, mut summary: Summary, grace: &Grace) -> io::Result<End> {
        self.console.finish();
        self.waits.end(&self.readers);
        let begun = self.writer.get_mut().primary().taken();
        let pulse = self.pulse.clone();
        let left = |taken: u64| {
            pulse.beat();
            grace.left(taken.saturating_sub(begun))
        };
        if let Some(given_up) = self.take_until_stuck(left)? {
            summary.notes.push(format!(
                "the output of the trace was stuck at the end: {given_up} records were left \
                 in the rings, and count as lost"
            ));
        }
        if self.unmarked > 0 {
            summary.notes.push(format!(
                "{} marks are not in the trace: its output was stuck",
                self.unmarked
            ));
        }
        if self.unheard > 0 {
            summary.notes.push(format!(
                "{} lines of the console came too fast and are not in the trace",
                self.unheard
            ));
        }
        let mut left_there = 0;
        for vcpu in 0..self.orders.len() {
            left_there += self.take_rest(vcpu, left)?;
            let corrupt = self.readers.get(vcpu).and_then(RingReader::corrupt);
            summary.exits.extend(self.exits.end(vcpu, &mut self.writer)?);
            summary.notes.extend(self.exits.refused(vcpu));
            // Most often that has been told, when it was found.
            let corrupt = corrupt.map(|corrupt| corrupt.to_string());
            let told = |what: &String| summary.notes.iter().any(|note| note.contains(what));
            summary.notes.extend(corrupt.filter(|what| !told(what)));
            let behind = self.orders.get(vcpu).map_or(0, Order::behind);
            if behind > 0 {
                summary.notes.push(format!(
                    "vCPU {vcpu} wrote {behind} records with a time before that of an earlier one, \
                     and were given that time: the guest has set its clock back"
                ));
            }
            if let Some(&count) = self.invalid.get(vcpu).filter(|&&count| count > 0) {
                summary.notes.push(format!(
                    "the ring of vCPU {vcpu} held {count} records of no traced function: \
                     the guest wrote to it"
                ));
            }
        }
        if left_there > 0 {
            summary.notes.push(format!(
                "the output of the trace was stuck at the end: {left_there} records were left in the flight \
                 recorder, and count as lost"
            ));
        }
        self.writer.watermark(u64::MAX)?;
        // Whoever asked in time gets at least the end.
        self.join()?;
        self.tell_traced()?;
        std::mem::take(&mut self.waits).tell(&mut summary);
        let summary = self.writer.end(&summary)?;
        self.writer.flush()?;
        let unwritten = self.writer.get_mut().finish(left)?;
        Ok(End { summary, unwritten })
    }

    /// What is in the rings is lost. Returns how many records.
    fn give_up(&mut self) -> io::Result<u64> {
        let mut total = 0;
        for vcpu in 0..self.orders.len() {
            if self.overwrites(vcpu) {
                // Taken at the end, as far as the output takes it.
                continue;
            }
            if let Some(reader) = self.readers.get_mut(vcpu) {
                let (cleared, lost) = reader.clear();
                total += cleared;
                self.lost(vcpu, cleared.saturating_add(lost), LossReason::Full)?;
            }
            total += self.exits.give_up(vcpu, &mut self.writer)?;
        }
        Ok(total)
    }
}

impl Drain {
    /// Says which functions were traced. Not before: most are never called, and all of their names
    /// at once would keep the rings waiting.
    fn tell_traced(&mut self) -> io::Result<()> {
        for (stretch, sites) in std::mem::take(&mut self.traced) {
            let (kernel, modules) = (&self.kernel, &self.modules);
            let entries: Vec<u32> = self.functions.entries(kernel, modules, &sites).collect();
            let name = |&entry: &u32| self.functions.symbol(kernel, modules, entry);
            self.writer.symbols(entries.iter().filter_map(name))?;
            self.writer.traced(&stretch, &entries)?;
        }
        Ok(())
    }
}

fn add(writer: &mut Writer<Hub>, first: Vec<u8>, join: Join) {
    if let Err(error) = writer.get_mut().add(first, join) {
        log::warn!("a consumer is not served: {error}");
    }
}

fn reason(overwrites: bool) -> LossReason {
    if overwrites { LossReason::Overwritten } else { LossReason::Full }
}
