//! Transfers exits of vCPUs from the vCPUs' threads to the stream.
//!
//! A vCPU's thread announces an exit, reads the guest's clock, and puts the exit into a queue that
//! never blocks it. The relay merges the exit with the records of that vCPU. A vCPU that is out of
//! the guest writes no records, so an exit follows all records that were begun before it. Between
//! two exits the host may run others in place of the vCPU: the relay asks for that itself.

mod clock;

use super::nanoseconds;
use crate::stream::{ExitDir, ExitReason, ExitsOf, HostExit, LossReason, Writer};
use clock::GuestClock;
use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Write};
use std::mem;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Exits that a queue has room for: what vCPUs do between two passes of the relay, and much more.
const QUEUE: usize = 1 << 15;
/// Exits of a vCPU that wait for its records, of a flight recorder until it is written.
const WAITING: usize = 1 << 16;
/// Preemptions that wait for the end of the exit that they may be in.
const UNDECIDED: usize = 1 << 12;
/// By how much the time of a preemption may be wrong, with much to spare.
const UNCERTAIN: Duration = Duration::from_millis(2);

/// What is known of a vCPU's thread by the host's scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheduled {
    /// It could have gone on, and others ran in its place.
    Preempted {
        /// Since then,
        from: Instant,
        /// until then.
        until: Instant,
    },
    /// It was preempted once at least, and it is not known when.
    Unknown,
}

/// Tells what has been found and not been told yet.
pub type Scheduler = Box<dyn FnMut() -> Option<Scheduled> + Send>;

/// When an exit was, by the host's clock.
#[derive(Clone, Copy, Debug)]
pub struct HostTimes {
    /// Since then the vCPU was out of the guest, until then at least.
    pub out: (Instant, Instant),
    /// The guest's clock was read not before the first of these, nor after the second.
    pub read: (Instant, Instant),
}

/// What both ends know.
struct Shared {
    on: AtomicBool,
    /// Exits that the writer began to tell, and those it is done with.
    begun: AtomicU64,
    done: AtomicU64,
    /// Those of them that it had to drop.
    dropped: AtomicU64,
    /// A moment before all others.
    base: Instant,
    /// Nanoseconds from that to when the exit began that is not told yet; 0: there is none.
    open: AtomicU64,
    /// What knows of preemptions; locked by the reader, and once when it is put there.
    scheduler: Mutex<Option<Scheduler>>,
    /// Why there is none.
    refused: OnceLock<String>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("on", &self.on).finish_non_exhaustive()
    }
}

/// An exit, and how many before it were dropped.
pub(super) type Told = (u64, HostExit);

/// Where the thread of a vCPU puts exits.
#[derive(Debug)]
pub struct ExitWriter {
    shared: Arc<Shared>,
    queue: SyncSender<(Told, Option<HostTimes>)>,
    /// Dropped since the last one that was not.
    dropped: u64,
}

/// Where the relay takes them.
#[derive(Debug)]
pub struct ExitReader {
    shared: Arc<Shared>,
    queue: Receiver<(Told, Option<HostTimes>)>,
    waiting: VecDeque<Told>,
    /// Preemptions that may be part of an exit that is not over.
    undecided: Vec<(Instant, Instant)>,
    /// When the vCPU was out of the guest: the last time, and in a look those since then.
    out: Vec<(Instant, Instant)>,
    /// Of those dropped, so many were told or forgotten.
    known: u64,
    /// Of a flight recorder: no longer kept, and not told yet.
    overwritten: u64,
    /// What was written, by reason.
    sums: Vec<(ExitReason, ExitsOf)>,
    /// Those up to this time may be written though no record follows them.
    certain: u64,
}

/// The two ends of the exits of one vCPU.
#[must_use]
pub fn exit_log() -> (ExitWriter, ExitReader) {
    exit_log_of(QUEUE)
}

fn exit_log_of(room: usize) -> (ExitWriter, ExitReader) {
    let shared = Arc::new(Shared {
        on: AtomicBool::new(false),
        begun: AtomicU64::new(0),
        done: AtomicU64::new(0),
        dropped: AtomicU64::new(0),
        base: Instant::now(),
        open: AtomicU64::new(0),
        scheduler: Mutex::new(None),
        refused: OnceLock::new(),
    });
    let (sender, queue) = sync_channel(room);
    let writer = ExitWriter { shared: Arc::clone(&shared), queue: sender, dropped: 0 };
    let reader = ExitReader {
        shared,
        queue,
        waiting: VecDeque::new(),
        undecided: Vec::new(),
        out: Vec::new(),
        known: 0,
        overwritten: 0,
        sums: Vec::new(),
        certain: 0,
    };
    (writer, reader)
}

impl ExitWriter {
    /// Whether exits are traced now.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.shared.on.load(Ordering::Relaxed)
    }

    /// The relay learns of preemptions from this, or not, for this reason.
    pub fn scheduler(&self, scheduler: Result<Scheduler, String>) {
        match scheduler {
            Ok(own) => *self.shared.scheduler() = Some(own),
            Err(why) => drop(self.shared.refused.set(why)),
        }
    }

    /// An exit has begun that will be told: preemptions from here on may be part of it.
    pub fn left(&mut self, since: Instant) {
        let since = nanoseconds(since.saturating_duration_since(self.shared.base)).max(1);
        self.shared.open.store(since, Ordering::SeqCst);
    }

    /// To be called before the clock is read for the next [`ExitWriter::put`].
    pub fn begin(&mut self) {
        self.shared.begun.fetch_add(1, Ordering::SeqCst);
    }

    /// Puts an exit there, or counts it where there is no room, or no exit.
    pub fn put(&mut self, exit: Option<HostExit>) {
        self.put_with(exit, None);
    }

    /// The same with its times by the host's clock.
    pub fn put_with(&mut self, exit: Option<HostExit>, times: Option<HostTimes>) {
        let put = exit.map(|exit| self.queue.try_send(((self.dropped, exit), times)));
        match put {
            Some(Ok(())) => self.dropped = 0,
            // The trace has ended.
            Some(Err(TrySendError::Disconnected(_))) => {}
            Some(Err(TrySendError::Full(_))) | None => {
                self.dropped += 1;
                self.shared.dropped.fetch_add(1, Ordering::SeqCst);
            }
        }
        // Who sees that it is over finds it in the queue.
        self.shared.open.store(0, Ordering::SeqCst);
        self.shared.done.fetch_add(1, Ordering::SeqCst);
    }
}

impl Shared {
    fn scheduler(&self) -> MutexGuard<'_, Option<Scheduler>> {
        self.scheduler.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Since when an exit goes on.
    fn open(&self) -> Option<Instant> {
        let since = self.open.load(Ordering::SeqCst);
        (since > 0).then(|| self.base + Duration::from_nanos(since))
    }
}

impl ExitReader {
    /// Exits that begin from now on are traced.
    pub fn begin(&self) {
        // What was before is of no interest.
        if let Some(scheduler) = &mut *self.shared.scheduler() {
            while scheduler().is_some() {}
        }
        self.shared.on.store(true, Ordering::Relaxed);
    }

    /// Takes what is there. Whether all that was begun before is: any other exit reads its clock
    /// later than now. `overwrites`: the newest are kept, else the oldest.
    fn take(&mut self, overwrites: bool, clock: &mut GuestClock) -> bool {
        let done = self.shared.done.load(Ordering::SeqCst);
        let settled = self.shared.begun.load(Ordering::SeqCst) == done;
        let all = self.take_exits(overwrites, clock);
        let mut preempted = mem::take(&mut self.undecided);
        if let Some(scheduler) = &mut *self.shared.scheduler() {
            while let Some(seen) = scheduler() {
                match seen {
                    Scheduled::Preempted { from, until } => preempted.push((from, until)),
                    Scheduled::Unknown => drop(self.shared.dropped.fetch_add(1, Ordering::SeqCst)),
                }
            }
        }
        if !preempted.is_empty() {
            // An exit that is not open now, but was when one of these was, is in the queue by now.
            let open = self.shared.open();
            if self.take_exits(overwrites, clock) {
                for one in preempted {
                    self.decide(one, open, (overwrites, clock));
                }
            } else {
                // There is no room for the exits that they may be in.
                let forgotten = preempted.len().saturating_sub(UNDECIDED);
                preempted.truncate(UNDECIDED);
                self.undecided = preempted;
                self.shared.dropped.fetch_add(forgotten as u64, Ordering::SeqCst);
            }
        }
        self.out.drain(..self.out.len().saturating_sub(1));
        settled && all
    }

    /// The exits in the queue, and when the vCPU was out of the guest. Whether those are all.
    fn take_exits(&mut self, overwrites: bool, clock: &mut GuestClock) -> bool {
        while overwrites || self.waiting.len() < WAITING {
            let Ok(((dropped, exit), times)) = self.queue.try_recv() else { return true };
            if let Some(times) = times {
                clock.read(times.read, exit.ticks);
                self.out.push(times.out);
            }
            // It is over when the exit begins, whatever the two clocks say.
            for (_, before) in self.waiting.iter_mut().rev() {
                if before.reason != ExitReason::Preempted || before.ticks <= exit.ticks {
                    break;
                }
                before.ticks = exit.ticks;
            }
            self.make_room();
            self.waiting.push_back((dropped, exit));
        }
        false
    }

    /// The oldest goes where there are too many.
    fn make_room(&mut self) {
        if self.waiting.len() >= WAITING
            && let Some((dropped, _)) = self.waiting.pop_front()
        {
            self.known += dropped;
            self.overwritten += 1 + dropped;
        }
    }

    /// A preemption waits for its records unless it is part of an exit: of one of those that are over, or,
    /// which is not known yet, of the one that is open.
    fn decide(
        &mut self,
        (from, until): (Instant, Instant),
        open: Option<Instant>,
        (overwrites, clock): (bool, &GuestClock),
    ) {
        let begun = self.out.partition_point(|&(since, _)| since <= from);
        let last = begun.checked_sub(1).and_then(|last| self.out.get(last));
        if last.is_some_and(|&(_, end)| from < end) {
            return;
        }
        if open.is_some_and(|since| from >= since) {
            // Of so many in one exit the last ones are in it as well.
            if self.undecided.len() < UNDECIDED {
                self.undecided.push((from, until));
            }
            return;
        }
        if !overwrites && self.waiting.len() >= WAITING {
            self.shared.dropped.fetch_add(1, Ordering::SeqCst);
            return;
        }
        let ticks = clock.ticks_at(until);
        let exit = HostExit {
            ticks,
            duration_ns: nanoseconds(until.saturating_duration_since(from)),
            reason: ExitReason::Preempted,
            dir: ExitDir::None,
            address: 0,
        };
        self.make_room();
        let later = self.waiting.iter().rev().take_while(|(_, other)| other.ticks > ticks).count();
        self.waiting.insert(self.waiting.len() - later, (0, exit));
    }

    /// Those that wait may be written as soon as all records before them are. The time of a preemption is not
    /// exact: a record of after it may have an earlier one, unless it is of before `certain` ticks.
    fn settle(&mut self, certain: u64) {
        let is_certain =
            |exit: &HostExit| exit.reason != ExitReason::Preempted || exit.ticks <= certain;
        let known = self.waiting.iter().take_while(|(_, exit)| is_certain(exit));
        // A guest may set its clock back.
        self.certain = known.map(|(_, exit)| exit.ticks).max().unwrap_or(0);
    }

    /// The next one that was not after that time, and how many were dropped before it.
    fn next(&mut self, until: u64) -> Option<Told> {
        let (dropped, exit) = self.waiting.pop_front_if(|(_, exit)| exit.ticks <= until)?;
        self.known += dropped;
        let known = self.sums.iter().position(|(reason, _)| *reason == exit.reason);
        let index = known.unwrap_or_else(|| {
            let reason = exit.reason.name().to_owned();
            self.sums.push((exit.reason, ExitsOf { reason, ..ExitsOf::default() }));
            self.sums.len() - 1
        });
        if let Some((_, sums)) = self.sums.get_mut(index) {
            sums.count += 1;
            sums.total_ns = sums.total_ns.saturating_add(exit.duration_ns);
            sums.max_ns = sums.max_ns.max(exit.duration_ns);
        }
        Some((dropped, exit))
    }

    /// Forgets all: how many, and how many were dropped before and not told yet.
    fn clear(&mut self, clock: &mut GuestClock) -> (u64, u64) {
        let mut cleared = 0;
        loop {
            self.take(false, clock);
            cleared += self.waiting.len() as u64;
            if self.waiting.is_empty() {
                return (cleared, self.dropped());
            }
            self.waiting.clear();
            self.undecided.clear();
        }
    }

    /// How many were dropped and not told yet, with whom all that wait are told.
    fn dropped(&mut self) -> u64 {
        let all = self.shared.dropped.load(Ordering::SeqCst);
        let dropped = all.saturating_sub(self.known);
        self.known = all;
        dropped
    }

    /// What was written of this vCPU.
    fn sums(&mut self, cpu: u32) -> impl Iterator<Item = ExitsOf> {
        self.sums.sort_by_key(|(reason, _)| *reason);
        self.sums.iter().map(move |(_, sums)| ExitsOf { cpu, ..sums.clone() })
    }
}

/// The exits of all vCPUs on their way to the stream, if they are traced.
#[derive(Debug)]
pub(super) struct Exits {
    readers: Vec<ExitReader>,
    clock: GuestClock,
    /// The stream was told what they are.
    told: bool,
}

impl Exits {
    /// The guest's clock has `hz` ticks in a second, and showed about so many at that moment.
    pub(super) fn new(readers: Vec<ExitReader>, hz: u64, about: (Instant, u64)) -> Self {
        Self { readers, clock: GuestClock::new(hz, about, UNCERTAIN), told: false }
    }

    /// [`ExitReader::take`]; until `now` in ticks everything is known.
    pub(super) fn take(&mut self, vcpu: usize, overwrites: bool, now: u64) -> bool {
        let Some(exits) = self.readers.get_mut(vcpu) else { return true };
        let settled = exits.take(overwrites, &mut self.clock);
        if !overwrites {
            let before = Instant::now().checked_sub(UNCERTAIN);
            exits.settle(before.map_or(0, |before| self.clock.ticks_at(before)).min(now));
        }
        settled
    }

    /// Takes more: of these it is not known yet whether other records are before them.
    pub(super) fn take_more(&mut self, vcpu: usize, overwrites: bool) {
        if let Some(exits) = self.readers.get_mut(vcpu) {
            exits.take(overwrites, &mut self.clock);
        }
    }

    /// Up to then they may be written though no record follows them, in ticks.
    pub(super) fn certain(&self, vcpu: usize) -> u64 {
        self.readers.get(vcpu).map_or(0, |exits| exits.certain)
    }

    /// How many wait.
    pub(super) fn waiting(&self, vcpu: usize) -> u64 {
        self.readers.get(vcpu).map_or(0, |exits| exits.waiting.len() as u64)
    }

    /// The time of the next one; none where none waits.
    pub(super) fn next_ticks(&self, vcpu: usize) -> Option<u64> {
        self.readers.get(vcpu)?.waiting.front().map(|(_, exit)| exit.ticks)
    }

    /// [`ExitReader::next`], of which the stream has been told all that a reader needs.
    pub(super) fn next<W: Write>(
        &mut self,
        vcpu: usize,
        until: u64,
        writer: &mut Writer<W>,
    ) -> io::Result<Option<Told>> {
        let next = self.readers.get_mut(vcpu).and_then(|exits| exits.next(until));
        if next.is_some() && !mem::replace(&mut self.told, true) {
            let (symbol, format) = HostExit::told(writer.header().address_base);
            writer.symbols([symbol])?;
            writer.values(&format)?;
        }
        Ok(next)
    }

    /// Takes what there is, and tells what is not kept any more: how many wait then.
    pub(super) fn gather<W: Write>(
        &mut self,
        vcpu: usize,
        overwrites: bool,
        writer: &mut Writer<W>,
    ) -> io::Result<u64> {
        self.take_more(vcpu, overwrites);
        self.tell_overwritten(vcpu, writer)?;
        Ok(self.waiting(vcpu))
    }

    /// Forgets all: how many.
    pub(super) fn clear<W: Write>(
        &mut self,
        vcpu: usize,
        writer: &mut Writer<W>,
    ) -> io::Result<u64> {
        self.tell_overwritten(vcpu, writer)?;
        let (cleared, dropped) = self.forget(vcpu);
        lost(writer, vcpu, dropped, LossReason::Exits)?;
        Ok(cleared)
    }

    /// What there is is lost: how many.
    pub(super) fn give_up<W: Write>(
        &mut self,
        vcpu: usize,
        writer: &mut Writer<W>,
    ) -> io::Result<u64> {
        let (cleared, dropped) = self.forget(vcpu);
        lost(writer, vcpu, cleared + dropped, LossReason::Exits)?;
        Ok(cleared)
    }

    /// [`ExitReader::clear`].
    fn forget(&mut self, vcpu: usize) -> (u64, u64) {
        let exits = self.readers.get_mut(vcpu);
        exits.map_or((0, 0), |exits| exits.clear(&mut self.clock))
    }

    /// Why nothing is known of a vCPU's preemptions, if there is a reason.
    pub(super) fn refused(&self, vcpu: usize) -> Option<String> {
        let why = self.readers.get(vcpu)?.shared.refused.get()?;
        Some(format!("vCPU {vcpu}: {why}"))
    }

    /// All is written. What was, for the summary.
    pub(super) fn end<W: Write>(
        &mut self,
        vcpu: usize,
        writer: &mut Writer<W>,
    ) -> io::Result<Vec<ExitsOf>> {
        let Some(exits) = self.readers.get_mut(vcpu) else { return Ok(Vec::new()) };
        lost(writer, vcpu, exits.dropped(), LossReason::Exits)?;
        Ok(exits.sums(u32::try_from(vcpu).unwrap_or(u32::MAX)).collect())
    }

    fn tell_overwritten<W: Write>(
        &mut self,
        vcpu: usize,
        writer: &mut Writer<W>,
    ) -> io::Result<()> {
        let exits = self.readers.get_mut(vcpu);
        let overwritten = exits.map_or(0, |exits| mem::take(&mut exits.overwritten));
        lost(writer, vcpu, overwritten, LossReason::Overwritten)
    }
}

fn lost<W: Write>(
    writer: &mut Writer<W>,
    vcpu: usize,
    count: u64,
    reason: LossReason,
) -> io::Result<()> {
    if count == 0 {
        return Ok(());
    }
    writer.loss(u32::try_from(vcpu).unwrap_or(u32::MAX), count, reason)
}

impl Drop for ExitReader {
    fn drop(&mut self) {
        self.shared.on.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
