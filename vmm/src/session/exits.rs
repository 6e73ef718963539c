//! Times in which vCPUs did not run: from the machine to the relay.

mod clock;

use super::vm::Vm;
use crate::machine::{ExitCause, ExitObserver, Preemptions, Seen, VcpuExit};
use crate::relay::{ExitReader, ExitWriter, exit_log};
use crate::stream::{ExitDir, ExitReason, HostExit};
use clock::GuestClock;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The exits of all vCPUs, for the relay.
pub(super) struct Observed {
    readers: Vec<ExitReader>,
    clock: Arc<Mutex<GuestClock>>,
}

impl Observed {
    /// Those that begin from now on are traced. The guest's clock showed so many ticks between these two
    /// moments.
    pub(super) fn begin(mut self, read: (Instant, Instant), ticks: u64) -> Vec<ExitReader> {
        lock(&self.clock).read(read, ticks);
        self.readers.iter_mut().for_each(ExitReader::begin);
        self.readers
    }
}

/// Has the exits of all vCPUs observed. If the host does not tell when it runs others in place of a vCPU,
/// why.
pub(super) fn observe(machine: &mut dyn Vm) -> (Observed, Option<String>) {
    let refused = Preemptions::of_this_thread().err();
    let clock = Arc::new(Mutex::new(GuestClock::new(machine.clock_hz())));
    let (tellers, readers): (Vec<_>, Vec<_>) = (0..machine.vcpus())
        .map(|_| {
            let (writer, reader) = exit_log();
            let teller = Arc::new(Mutex::new(Teller {
                writer,
                clock: Arc::clone(&clock),
                preemptions: None,
                since: None,
            }));
            let source = Arc::clone(&teller);
            (teller, reader.with_source(move || lock(&source).preemptions()))
        })
        .unzip();
    let asks = refused.is_none();
    let observers = tellers.into_iter().map(|teller| Box::new(Observer { teller, asks }) as Box<_>);
    machine.observe_exits(observers.collect());
    (Observed { readers, clock }, refused.map(|why| not_told(&why)))
}

fn not_told(why: &std::io::Error) -> String {
    format!(
        "the time in which the host runs others in place of a vCPU is not known: perf_event_open: {why} \
         (sysctl kernel.perf_event_paranoid=2 permits it)"
    )
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sees what its vCPU's thread does.
struct Observer {
    teller: Arc<Mutex<Teller>>,
    /// Whether it asks for preemptions.
    asks: bool,
}

/// Tells the next thing of a thread's preemptions, if there is any.
type Next = Box<dyn FnMut() -> Option<Seen> + Send>;

/// Tells the relay what is known of a vCPU, on the vCPU's thread and on the relay's.
struct Teller {
    writer: ExitWriter,
    clock: Arc<Mutex<GuestClock>>,
    preemptions: Option<Next>,
    /// The vCPU is on an exit that will be told.
    since: Option<Instant>,
}

impl Teller {
    /// Tells which there were, but those in an exit: that contains them.
    fn preemptions(&mut self) {
        let Some(next) = &mut self.preemptions else { return };
        let is_on = self.writer.is_on();
        while let Some(seen) = next() {
            match seen {
                _ if !is_on => {}
                Seen::Preempted { from, .. } if self.since.is_some_and(|since| from >= since) => {}
                Seen::Preempted { from, until } => {
                    self.writer.begin();
                    let ticks = lock(&self.clock).ticks_at(until);
                    self.writer.put(ticks.map(|ticks| HostExit {
                        ticks,
                        duration_ns: nanoseconds(until.saturating_duration_since(from)),
                        reason: ExitReason::Preempted,
                        dir: ExitDir::None,
                        address: 0,
                    }));
                }
                // Each has two switches.
                Seen::Lost(switches) => self.writer.drop_some(switches.div_ceil(2)),
            }
        }
    }
}

impl ExitObserver for Observer {
    fn starts(&mut self) {
        if self.asks {
            match Preemptions::of_this_thread() {
                Ok(mut own) => {
                    lock(&self.teller).preemptions = Some(Box::new(move || own.next()));
                }
                Err(why) => log::warn!("of one vCPU {}", not_told(&why)),
            }
        }
    }

    fn wants(&self) -> bool {
        lock(&self.teller).writer.is_on()
    }

    fn left(&mut self, since: Instant) {
        lock(&self.teller).since = Some(since);
    }

    fn begins(&mut self) {
        let mut teller = lock(&self.teller);
        teller.preemptions();
        teller.writer.begin();
    }

    fn exited(&mut self, exit: Option<VcpuExit>) {
        let mut teller = lock(&self.teller);
        if let Some(exit) = &exit {
            lock(&teller.clock).read(exit.read, exit.ticks);
        }
        teller.writer.put(exit.map(|exit| told(&exit)));
        teller.since = None;
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// As the stream tells it.
fn told(exit: &VcpuExit) -> HostExit {
    let dir = |write| if write { ExitDir::Out } else { ExitDir::In };
    let (reason, dir, address) = match exit.cause {
        ExitCause::Port { port, write } => (ExitReason::Io, dir(write), port.into()),
        ExitCause::Memory { address, write } => (ExitReason::Mmio, dir(write), address),
        ExitCause::Msr { index } => (ExitReason::Msr, ExitDir::Out, index.into()),
        ExitCause::Sbi { extension } => (ExitReason::Sbi, ExitDir::None, extension),
        ExitCause::Trap => (ExitReason::Trap, ExitDir::None, 0),
        ExitCause::Full => (ExitReason::Full, ExitDir::None, 0),
        ExitCause::Kick => (ExitReason::Kick, ExitDir::None, 0),
        ExitCause::Shutdown => (ExitReason::Shutdown, ExitDir::None, 0),
        ExitCause::Error => (ExitReason::Error, ExitDir::None, 0),
        ExitCause::Other => (ExitReason::Other, ExitDir::None, 0),
    };
    HostExit { ticks: exit.ticks, duration_ns: nanoseconds(exit.duration), reason, dir, address }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    const MS: Duration = Duration::from_millis(1);

    // A vCPU does not run once for two reasons at a time: the sums of reasons would be more than the time.
    #[test]
    fn preemptions_in_an_exit_are_part_of_it() {
        let start = Instant::now();
        let clock = Arc::new(Mutex::new(GuestClock::new(1_000_000)));
        let (writer, reader) = exit_log();
        let known = Arc::new(Mutex::new(VecDeque::new()));
        let own = Arc::clone(&known);
        let preemptions = Some(Box::new(move || lock(&own).pop_front()) as Next);
        let teller = Teller { writer, clock: Arc::clone(&clock), preemptions, since: None };
        let teller = Arc::new(Mutex::new(teller));
        let mut observer = Observer { teller: Arc::clone(&teller), asks: false };
        let preempted = |from, until| {
            let (from, until) = (start + from * MS, start + until * MS);
            lock(&known).push_back(Seen::Preempted { from, until });
        };
        // Before the trace.
        preempted(1, 2);
        lock(&known).push_back(Seen::Lost(9));
        let source = Arc::clone(&teller);
        let reader = reader.with_source(move || lock(&source).preemptions());
        let read = (start + 10 * MS, start + 10 * MS);
        let readers = Observed { readers: vec![reader], clock }.begin(read, 10_000);
        assert!(observer.wants() && lock(&known).is_empty());
        preempted(12, 15);
        observer.left(start + 20 * MS);
        preempted(21, 23);
        observer.begins();
        // While the clock is read: the exit is over.
        preempted(30, 31);
        let (read, cause) = ((start + 30 * MS, start + 30 * MS), ExitCause::Kick);
        let exit = VcpuExit { ticks: 30_000, read, duration: 10 * MS, cause };
        observer.exited(Some(exit));
        preempted(40, 44);
        lock(&known).push_back(Seen::Lost(3));
        let (seen, dropped) = readers.into_iter().next().expect("one").all();
        let seen: Vec<_> = seen
            .iter()
            .map(|exit| (exit.ticks, exit.duration_ns / 1_000_000, exit.reason))
            .collect();
        use ExitReason::{Kick, Preempted};
        let wanted = [(15_000, 3, Preempted), (30_000, 10, Kick), (31_000, 1, Preempted)];
        assert_eq!(seen, [&wanted[..], &[(44_000, 4, Preempted)]].concat());
        assert_eq!(dropped, 2, "three switches");
    }
}
