//! Transfers exits of vCPUs from the vCPUs' threads to the stream.
//!
//! A vCPU's thread announces an exit, reads the guest's clock, and puts the exit into a queue that
//! never blocks it. The relay merges the exit with the records of that vCPU. A vCPU that is out of
//! the guest writes no records, so an exit follows all records that were begun before it.

use crate::stream::{ExitReason, ExitsOf, HostExit, LossReason, Writer};
use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

/// Exits that a queue has room for: what vCPUs do between two passes of the relay, and much more.
const QUEUE: usize = 1 << 15;
/// Exits of a vCPU that wait for its records, of a flight recorder until it is written.
const WAITING: usize = 1 << 16;

/// What both ends know.
#[derive(Debug, Default)]
struct Shared {
    on: AtomicBool,
    /// Exits that the writer began to tell, and those it is done with.
    begun: AtomicU64,
    done: AtomicU64,
    /// Those of them that it had to drop.
    dropped: AtomicU64,
}

/// An exit, and how many before it were dropped.
pub(super) type Told = (u64, HostExit);

/// Where the thread of a vCPU puts exits.
#[derive(Debug)]
pub struct ExitWriter {
    shared: Arc<Shared>,
    queue: SyncSender<Told>,
    /// Dropped since the last one that was not.
    dropped: u64,
}

/// Where the relay takes them.
#[derive(Debug)]
pub struct ExitReader {
    shared: Arc<Shared>,
    queue: Receiver<Told>,
    waiting: VecDeque<Told>,
    /// Of those dropped, so many were told or forgotten.
    known: u64,
    /// Of a flight recorder: no longer kept, and not told yet.
    overwritten: u64,
    /// What was written, by reason.
    sums: Vec<(ExitReason, ExitsOf)>,
    source: Option<Source>,
    /// Those up to this time may be written though no record follows them.
    certain: u64,
}

/// Has all put into a queue that is known by now.
struct Source(Box<dyn FnMut() + Send>);

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Source")
    }
}

/// The two ends of the exits of one vCPU.
#[must_use]
pub fn exit_log() -> (ExitWriter, ExitReader) {
    exit_log_of(QUEUE)
}

fn exit_log_of(room: usize) -> (ExitWriter, ExitReader) {
    let shared = Arc::<Shared>::default();
    let (sender, queue) = sync_channel(room);
    let writer = ExitWriter { shared: Arc::clone(&shared), queue: sender, dropped: 0 };
    let reader = ExitReader {
        shared,
        queue,
        waiting: VecDeque::new(),
        known: 0,
        overwritten: 0,
        sums: Vec::new(),
        source: None,
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

    /// To be called before the clock is read for the next [`ExitWriter::put`].
    pub fn begin(&mut self) {
        self.shared.begun.fetch_add(1, Ordering::SeqCst);
    }

    /// Puts an exit there, or counts it where there is no room, or no exit.
    pub fn put(&mut self, exit: Option<HostExit>) {
        let put = exit.map(|exit| self.queue.try_send((self.dropped, exit)));
        match put {
            Some(Ok(())) => self.dropped = 0,
            // The trace has ended.
            Some(Err(TrySendError::Disconnected(_))) => {}
            Some(Err(TrySendError::Full(_))) | None => self.drop_some(1),
        }
        self.shared.done.fetch_add(1, Ordering::SeqCst);
    }

    /// So many more are not known, but that they were there.
    pub fn drop_some(&mut self, count: u64) {
        self.dropped += count;
        self.shared.dropped.fetch_add(count, Ordering::SeqCst);
    }
}

impl ExitReader {
    /// `source` is called each time before the reader looks: it has the writer put there what is not from the
    /// vCPU's own thread, and must be quick.
    #[must_use]
    pub fn with_source(mut self, source: impl FnMut() + Send + 'static) -> Self {
        self.source = Some(Source(Box::new(source)));
        self
    }

    /// Exits that begin from now on are traced.
    pub fn begin(&mut self) {
        if let Some(Source(forget)) = &mut self.source {
            forget();
        }
        self.shared.on.store(true, Ordering::Relaxed);
    }

    /// Takes what is there. Whether all that was begun before is: any other exit reads its clock
    /// later than now. `overwrites`: the newest are kept, else the oldest.
    fn take(&mut self, overwrites: bool) -> bool {
        if let Some(Source(tell)) = &mut self.source {
            tell();
        }
        let done = self.shared.done.load(Ordering::SeqCst);
        let settled = self.shared.begun.load(Ordering::SeqCst) == done;
        while overwrites || self.waiting.len() < WAITING {
            let Ok(told) = self.queue.try_recv() else { return settled };
            if self.waiting.len() == WAITING
                && let Some((dropped, _)) = self.waiting.pop_front()
            {
                self.known += dropped;
                self.overwritten += 1 + dropped;
            }
            self.waiting.push_back(told);
        }
        false
    }

    /// Those that wait may be written as soon as all records before them are. The time of a preemption is not
    /// exact: a record of after it may have an earlier one, unless it is of before `certain` ticks.
    fn settle(&mut self, certain: u64) {
        let is_certain =
            |exit: &HostExit| exit.reason != ExitReason::Preempted || exit.ticks <= certain;
        let known = self.waiting.iter().take_while(|(_, exit)| is_certain(exit));
        self.certain = known.last().map_or(0, |(_, exit)| exit.ticks);
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
    fn clear(&mut self) -> (u64, u64) {
        let mut cleared = 0;
        loop {
            self.take(false);
            cleared += self.waiting.len() as u64;
            if self.waiting.is_empty() {
                return (cleared, self.dropped());
            }
            self.waiting.clear();
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
    /// The stream was told what they are.
    told: bool,
}

impl Exits {
    pub(super) fn new(readers: Vec<ExitReader>) -> Self {
        Self { readers, told: false }
    }

    /// [`ExitReader::take`]; until `now` in ticks everything is known.
    pub(super) fn take(&mut self, vcpu: usize, overwrites: bool, now: u64) -> bool {
        let Some(exits) = self.readers.get_mut(vcpu) else { return true };
        let settled = exits.take(overwrites);
        if !overwrites {
            exits.settle(now);
        }
        settled
    }

    /// Takes more: of these it is not known yet whether other records are before them.
    pub(super) fn take_more(&mut self, vcpu: usize, overwrites: bool) {
        if let Some(exits) = self.readers.get_mut(vcpu) {
            exits.take(overwrites);
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

    /// [`ExitReader::next`], of which the stream has been told all that a reader needs.
    pub(super) fn next<W: Write>(
        &mut self,
        vcpu: usize,
        until: u64,
        writer: &mut Writer<W>,
    ) -> io::Result<Option<Told>> {
        let next = self.readers.get_mut(vcpu).and_then(|exits| exits.next(until));
        if next.is_some() && !std::mem::replace(&mut self.told, true) {
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
        let (cleared, dropped) = self.readers.get_mut(vcpu).map_or((0, 0), ExitReader::clear);
        lost(writer, vcpu, dropped, LossReason::Exits)?;
        Ok(cleared)
    }

    /// What there is is lost: how many.
    pub(super) fn give_up<W: Write>(
        &mut self,
        vcpu: usize,
        writer: &mut Writer<W>,
    ) -> io::Result<u64> {
        let (cleared, dropped) = self.readers.get_mut(vcpu).map_or((0, 0), ExitReader::clear);
        lost(writer, vcpu, cleared + dropped, LossReason::Exits)?;
        Ok(cleared)
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
        let overwritten = exits.map_or(0, |exits| std::mem::take(&mut exits.overwritten));
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
impl ExitReader {
    /// All that there is, and how many are missing.
    pub(crate) fn all(mut self) -> (Vec<HostExit>, u64) {
        self.take(false);
        let waiting = std::mem::take(&mut self.waiting);
        (waiting.into_iter().map(|(_, exit)| exit).collect(), self.dropped())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::ExitDir;

    fn put(writer: &mut ExitWriter, ticks: u64) {
        let (reason, dir) = (ExitReason::Kick, ExitDir::None);
        writer.begin();
        writer.put(Some(HostExit { ticks, duration_ns: ticks, reason, dir, address: 0 }));
    }

    // Whoever begins anew does not want what was before; that something is missing is told.
    #[test]
    fn what_is_cleared_is_forgotten_and_losses_are_not() {
        let (mut writer, mut reader) = exit_log_of(3);
        (1..=5).for_each(|at| put(&mut writer, at));
        assert!(reader.take(false));
        put(&mut writer, 6);
        assert_eq!(reader.clear(), (4, 2));
        assert_eq!(reader.clear(), (0, 0));
        put(&mut writer, 7);
        assert!(reader.take(false));
        assert_eq!(reader.next(6), None);
        assert_eq!(reader.next(7).map(|(dropped, exit)| (dropped, exit.ticks)), Some((0, 7)));
        assert_eq!((reader.next(u64::MAX), reader.dropped()), (None, 0));
    }

    // Those that were dropped before one that is not kept are lost with it, and are told once.
    #[test]
    fn what_was_dropped_is_told_once_in_a_flight_recorder() {
        let (mut writer, mut reader) = exit_log_of(1);
        (1..=3).for_each(|at| put(&mut writer, at));
        for at in 0..WAITING as u64 {
            assert!(reader.take(true));
            put(&mut writer, at);
        }
        assert!(reader.take(true));
        assert_eq!((reader.waiting.len(), reader.overwritten), (WAITING, 1));
        put(&mut writer, 9);
        assert!(reader.take(true));
        assert_eq!((reader.overwritten, reader.dropped()), (4, 0));
    }

    // A count that is not told is a trace that is said to be whole.
    #[test]
    fn what_is_forgotten_or_given_up_is_counted() {
        let header = crate::stream::sample::header();
        for give_up in [false, true] {
            let (mut writer, reader) = exit_log_of(3);
            (1..=5).for_each(|at| put(&mut writer, at));
            let mut exits = Exits::new(vec![reader]);
            let mut stream = Writer::new(Vec::new(), &header).unwrap();
            let count = match give_up {
                true => exits.give_up(0, &mut stream),
                false => exits.clear(0, &mut stream),
            };
            assert_eq!((count.unwrap(), exits.waiting(0)), (3, 0));
            assert_eq!(stream.totals()[0].lost, if give_up { 5 } else { 2 });
        }
    }

    // What is being told, or has to wait in its queue, keeps watermarks back.
    #[test]
    fn all_is_taken_only_if_nothing_was_begun() {
        let (mut writer, mut reader) = exit_log();
        writer.begin();
        assert!(!reader.take(false));
        writer.put(None);
        assert!(reader.take(false));
        for at in 0..2 * WAITING as u64 {
            put(&mut writer, at);
            if at % 1000 == 0 {
                reader.take(false);
            }
        }
        assert_eq!(reader.waiting.len(), WAITING);
        assert!(!reader.take(false));
        while reader.next(u64::MAX).is_some() {}
        assert!(reader.take(false));
        let sums: Vec<_> = reader.sums(3).collect();
        let [kicks] = &sums[..] else { panic!("{sums:?}") };
        assert_eq!((kicks.cpu, &*kicks.reason, kicks.count), (3, "kick", WAITING as u64));
        assert_eq!(kicks.max_ns, WAITING as u64 - 1);
    }
}
