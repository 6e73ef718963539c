//! From the rings to the stream.

use super::names::{Callers, Functions, TaskNames};
use super::programs::Programs;
use super::values::Untold;
use super::{Clock, Command, Setup, Status, Targets, TracerName};
use crate::kernel::Kernel;
use crate::serve::{Hub, Join};
use crate::stream::{EntryRecord, LossReason, RecordBuffer, Summary, Tracer, Writer};
use crate::tracer::ring::RingReader;
use crate::tracer::{Guest, RawBatch};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

/// Records taken from one ring at a time.
const BATCH: usize = 8192;
/// Rest between two passes while records come, and while none do. A ring of 4 MiB
/// takes 5 ms to fill at 25 million records a second.
const BUSY_REST: Duration = Duration::from_micros(500);
const IDLE_REST: Duration = Duration::from_millis(3);
/// A flight recorder is read at the end; until then marks and consumers come, and tasks are
/// looked at.
const RECORDER_REST: Duration = Duration::from_millis(20);
/// A record can be this late: its writer was interrupted before it committed.
const LATE: Duration = Duration::from_millis(2);

/// What the relay's thread does, for those who do it themselves: tests and benchmarks.
pub struct Drain {
    writer: Writer<Hub>,
    joins: Receiver<Join>,
    readers: Vec<RingReader>,
    tasks: TaskNames,
    memory: Box<dyn Guest + Send>,
    kernel: Arc<Kernel>,
    functions: Functions,
    callers: Callers,
    clock: Clock,
    programs: Programs,
    untold: Untold,
    raw: RawBatch,
    batch: RecordBuffer,
    invalid: Vec<u64>,
    /// The time of each vCPU's last record.
    last: Vec<u64>,
    /// Whether records are taken out before the end.
    live: bool,
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
        let Setup { targets, .. } = setup;
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
            callers: Callers::new(header.slide),
            invalid: vec![0; readers.len()],
            last: vec![0; readers.len()],
            live: readers.iter().any(|reader| !reader.overwrites()),
            readers,
            tasks: TaskNames::new(tasks),
            memory,
            kernel,
            clock,
            programs: Programs::default(),
            untold: Untold::default(),
            raw: RawBatch::with_capacity(BATCH),
            batch: RecordBuffer::with_capacity(BATCH * size_of::<EntryRecord>()),
        };
        drain.targets(&targets)?;
        Ok(drain)
    }

    /// Drains until it is told to finish.
    pub(super) fn run(mut self, commands: &Receiver<Command>) -> io::Result<Summary> {
        loop {
            self.join()?;
            let busy = self.pass()?;
            let rest = match (busy, self.live) {
                (true, _) => BUSY_REST,
                (false, true) => IDLE_REST,
                (false, false) => RECORDER_REST,
            };
            match commands.recv_timeout(rest) {
                Ok(Command::Mark(mark)) => self.writer.mark(&mark)?,
                Ok(Command::Targets(targets, done)) => {
                    // What was written before is of those that were there before.
                    self.pass()?;
                    self.targets(&targets)?;
                    let _ = done.send(());
                }
                Ok(Command::Status(answer)) => {
                    let vcpus = self.writer.totals().to_vec();
                    let consumers = self.writer.get_mut().consumers();
                    // Who asked may have given up.
                    let _ = answer.send(Status { vcpus, consumers });
                }
                Ok(Command::Clear(answer)) => {
                    let cleared = self.clear()?;
                    let _ = answer.send(cleared);
                }
                Ok(Command::Finish(summary)) => return self.finish(*summary),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(io::Error::other("the controller is gone"));
                }
            }
        }
    }

    /// This may write records from now on.
    fn targets(&mut self, targets: &Targets) -> io::Result<()> {
        self.functions.add(&self.kernel, &targets.sites);
        self.functions.add_exits(&targets.exits);
        self.programs.set(&self.kernel, targets);
        let values = targets.tracers.iter().map(|tracer| (tracer.number, tracer.values.clone()));
        self.untold.set(&self.kernel, self.writer.header().slide, values);
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
        for vcpu in 0..self.readers.len() {
            let Some(reader) = self.readers.get_mut(vcpu) else { break };
            let overwrites = reader.overwrites();
            let (cleared, lost) = reader.clear();
            total += cleared;
            self.lost(vcpu, lost, reason(overwrites))?;
        }
        Ok(total)
    }

    /// Takes from every ring until each was seen empty. Whether there was anything.
    ///
    /// # Errors
    /// When the primary output fails.
    pub fn pass(&mut self) -> io::Result<bool> {
        let until = self.clock.ticks(LATE);
        self.tasks.start_pass();
        if !self.live {
            self.look()?;
        }
        let mut any = false;
        for vcpu in 0..self.readers.len() {
            // A vCPU that outruns the relay must not starve the others.
            for _ in 0..16 {
                self.raw.clear();
                let Some(reader) = self.readers.get_mut(vcpu) else { break };
                let lost = reader.drain(&mut self.raw);
                let more = !self.raw.has_room() || lost > 0;
                any |= !self.raw.records.is_empty();
                self.write(vcpu)?;
                self.lost(vcpu, lost, LossReason::Full)?;
                if !more {
                    break;
                }
            }
        }
        self.writer.watermark(until)?;
        Ok(any)
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

    /// Writes the raw records of one vCPU, with the names they need before them.
    fn write(&mut self, vcpu: usize) -> io::Result<()> {
        self.batch.clear();
        let mut last = self.last.get(vcpu).copied().unwrap_or(0);
        let mut invalid = 0;
        let mut symbols = Vec::new();
        let records = &self.raw.records;
        for (index, record) in records.iter().enumerate() {
            let format = self.programs.format(record);
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
                symbols.extend(self.functions.symbol(&self.kernel, place.function));
            }
            if place.target != 0 {
                symbols.extend(self.callers.name(&self.kernel, place.target));
            }
            symbols.extend(self.callers.name(&self.kernel, record.caller));
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
            let next = records.get(index + 1).map_or(u64::MAX, |next| next.timestamp);
            last = time(record.timestamp, next, last);
            format.write(&mut self.batch, last, record, fields, &place);
        }
        if !symbols.is_empty() {
            self.writer.symbols(symbols)?;
        }
        if !self.batch.is_empty() {
            self.writer.records(u32::try_from(vcpu).unwrap_or(u32::MAX), &self.batch)?;
        }
        if let Some(known) = self.last.get_mut(vcpu) {
            *known = last;
        }
        if let Some(total) = self.invalid.get_mut(vcpu) {
            *total += invalid;
        }
        self.lost(vcpu, invalid, LossReason::Invalid)
    }

    /// The guest is at rest for good: takes everything, and ends the stream.
    ///
    /// # Errors
    /// When the primary output fails.
    pub fn finish(mut self, mut summary: Summary) -> io::Result<Summary> {
        while self.pass()? {}
        for vcpu in 0..self.readers.len() {
            self.raw.clear();
            let Some(reader) = self.readers.get_mut(vcpu) else { break };
            let (lost, unfinished) = reader.finish(&mut self.raw);
            let unfinished =
                unfinished.into_iter().map(|program| self.programs.tracers(program)).sum();
            let Some(reader) = self.readers.get(vcpu) else { break };
            let corrupt = reader.corrupt();
            let reason = reason(reader.overwrites());
            self.lost(vcpu, lost, reason)?;
            self.lost(vcpu, unfinished, LossReason::Unfinished)?;
            self.write(vcpu)?;
            summary.notes.extend(corrupt.map(|corrupt| corrupt.to_string()));
            if let Some(&count) = self.invalid.get(vcpu).filter(|&&count| count > 0) {
                summary.notes.push(format!(
                    "the ring of vCPU {vcpu} held {count} records of no traced function: \
                     the guest wrote to it"
                ));
            }
        }
        self.writer.watermark(u64::MAX)?;
        // Whoever asked in time gets at least the end.
        self.join()?;
        let summary = self.writer.end(&summary)?;
        self.writer.flush()?;
        self.writer.get_mut().finish();
        Ok(summary)
    }
}

/// When a record was written: its own time, unless it was interrupted between reserving its slot and
/// reading the clock. Then that of the `next` one, which came in between: no later, as the function
/// was entered before. `last` is the time of the one before.
fn time(own: u64, next: u64, last: u64) -> u64 {
    // A clock that was set back is behind what came before, too.
    if own > next && next >= last { next } else { own }
}

fn add(writer: &mut Writer<Hub>, first: Vec<u8>, join: Join) {
    if let Err(error) = writer.get_mut().add(first, join) {
        log::warn!("a consumer is not served: {error}");
    }
}

fn reason(overwrites: bool) -> LossReason {
    if overwrites { LossReason::Overwritten } else { LossReason::Full }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ordered(times: &[u64], mut last: u64) -> Vec<u64> {
        let next = |index| times.get(index + 1).copied().unwrap_or(u64::MAX);
        let mut time = |(index, &own)| {
            last = time(own, next(index), last);
            last
        };
        times.iter().enumerate().map(&mut time).collect()
    }

    // Consumers draw the records of a vCPU one after the other.
    #[test]
    fn an_interrupted_record_is_no_later_than_what_interrupted_it() {
        assert_eq!(ordered(&[10, 90, 20, 30, 95], 5), [10, 20, 20, 30, 95]);
        assert_eq!(ordered(&[90, 20], 20), [20, 20]);
    }

    // A guest can set its clock: that shows, and all before it keeps its time.
    #[test]
    fn a_clock_that_was_set_back_stays_so() {
        assert_eq!(ordered(&[100, 110, 5, 6], 90), [100, 110, 5, 6]);
        assert_eq!(ordered(&[3, 4], 110), [3, 4]);
    }
}
