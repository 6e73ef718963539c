//! The relay: drains the rings while the guest runs, and writes the stream.
//!
//! A [`Relay`] is a thread with a [`Drain`], which does the work.

mod console;
mod context;
mod counts;
mod drain;
mod events;
mod exits;
mod jumps;
mod memo;
mod names;
mod order;
mod priority;
mod programs;
mod slides;
mod values;
mod waiting;

use crate::deadline::Pulse;
use crate::kernel::Kernel;
use crate::sandbox::{self, Thread};
use crate::serve::{Hub, Join, Patience, Unwritten, Watched};
use crate::stream::{Header, Mark, Stretch, Summary, VcpuTotals};
use crate::tracer::ring::RingReader;
use crate::tracer::{CallerHits, Duty, ExitWord, Guest, Hits, Module, Tasks};
use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{
    Receiver, RecvTimeoutError, Sender, SyncSender, TryRecvError, TrySendError, channel,
    sync_channel,
};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

pub use console::ConsoleLines;
pub use counts::Sorted;
pub use drain::{Drain, Left, SNAPSHOT_TIME, Snapshot};
pub use events::{EventFields, EventTarget, EventValue, From, Letter, OPERATION, OneCall, Part};
pub use exits::{ExitReader, ExitWriter, HostTimes, Scheduled, Scheduler, exit_log};
pub use names::resolver;
pub use slides::image;
pub use values::{Recorded, Values};
pub use waiting::nanoseconds;

/// Everything a relay needs.
pub struct Setup {
    /// How the stream begins.
    pub header: Header,
    /// Where it goes.
    pub stream: Hub,
    /// Consumers that come.
    pub joins: Receiver<Join>,
    /// The ring of each vCPU.
    pub readers: Vec<RingReader>,
    /// The exits of each vCPU, if they are traced: none or as many.
    pub exits: Vec<ExitReader>,
    /// The names of tasks.
    pub tasks: Tasks,
    /// The memory that they are in, while the guest runs.
    pub memory: Box<dyn Guest + Send>,
    /// The guest's kernel.
    pub kernel: Arc<Kernel>,
    /// What may write records from the start.
    pub targets: Targets,
    /// The guest's clock now.
    pub ticks: u64,
    /// The guest's console.
    pub console: ConsoleLines,
    /// Those who wait where a ring is full, if they do.
    pub waiting: Option<Box<dyn Waiting>>,
}

/// Those who write into rings and wait where there is no room.
pub trait Waiting: Send {
    /// There is room again.
    fn made_room(&self);
    /// Whether nobody takes what was written, so that no room can be made.
    fn close(&self, closed: bool);
    /// For how long somebody has waited since there was room last; `None` when nobody does.
    fn wanted_for(&self) -> Option<Duration>;
    /// When all stood still, since the last time, and for how long.
    fn stalls(&self) -> Vec<(Instant, Duration)>;
    /// For how long each has waited in all.
    fn waited(&self) -> Vec<Duration>;
}

/// What may write records, beside what the relay knows already.
#[derive(Clone, Debug, Default)]
pub struct Targets {
    /// Sites, indices into [`Kernel::sites`], and numbers of those of modules.
    pub sites: Vec<usize>,
    /// Exits.
    pub exits: Vec<ExitWord>,
    /// Events.
    pub events: Vec<EventTarget>,
    /// All programs that there are, by number.
    pub programs: Vec<Duty>,
    /// The tracers.
    pub tracers: Vec<TracerName>,
}

/// What the stream tells of a tracer.
#[derive(Clone, Debug)]
pub struct TracerName {
    /// Its number in records.
    pub number: u8,
    /// What it is called.
    pub name: String,
    /// What it traces.
    pub text: String,
    /// What its records have beside.
    pub values: Values,
}

/// Sites, as those of [`Targets`], that were traced, and when.
pub type TracedSites = (Stretch, Vec<usize>);

enum Command {
    Mark(Mark),
    /// These may write records from now on.
    Targets(Box<Targets>, Sender<bool>),
    /// Take all that was written before, and say whether that is so.
    Take(Sender<bool>),
    Exits(Vec<ExitWord>, Sender<()>),
    Module(Arc<Module>),
    Status(Sender<Status>),
    /// Say so in the stream when it has all records up to this time.
    Reach(u64),
    Watch(Box<Watched>, Sender<io::Result<()>>),
    Clear(Sender<u64>),
    Snapshot(Sender<Snapshot>),
    Traced(Vec<TracedSites>),
    Counted(Vec<Hits>, Vec<CallerHits>, Vec<Sorted>),
    Leave(u64, Sender<Left>),
    Enter(Vec<RingReader>, Tasks, Sender<()>),
    Finish(Box<Summary>, Grace),
}

/// Commands that may wait.
const COMMANDS: usize = 1024;

/// How long the end of a stream waits for its outputs.
#[derive(Clone, Debug, Default)]
pub struct Grace {
    /// That with the primary output.
    patience: Cell<Patience>,
    hurry: Arc<AtomicBool>,
}

impl Grace {
    /// An output may take nothing for so long.
    #[must_use]
    pub fn of(time: Duration) -> Self {
        Self { patience: Cell::new(Patience::of(time)), hurry: Arc::default() }
    }

    /// The time that is left for an output that has taken so many bytes since the end began.
    fn left(&self, taken: u64) -> Option<Duration> {
        let left = self.patience.get().left(taken);
        if self.hurry.swap(false, Ordering::Relaxed) {
            self.patience.set(Patience::new());
        }
        left
    }
}

/// How a stream has ended.
#[derive(Clone, Debug)]
pub struct End {
    /// As in its last frame.
    pub summary: Summary,
    /// What its primary output did not take in time.
    pub unwritten: Unwritten,
}

/// The guest's clock by the host's: good enough for what is not a record.
#[derive(Clone, Copy)]
struct Clock {
    hz: u64,
    started: (Instant, u64),
}

impl Clock {
    fn of(setup: &Setup) -> Self {
        Self { hz: setup.header.clock_hz, started: (Instant::now(), setup.ticks) }
    }

    /// What it showed `margin` ago.
    fn ticks(&self, margin: Duration) -> u64 {
        let (instant, ticks) = self.started;
        let passed = instant.elapsed().saturating_sub(margin).as_nanos();
        let passed = passed * u128::from(self.hz) / 1_000_000_000;
        ticks.saturating_add(u64::try_from(passed).unwrap_or(u64::MAX))
    }

    /// What it showed then.
    fn ticks_at(&self, then: Instant) -> u64 {
        let (instant, ticks) = self.started;
        let nanoseconds =
            |passed: Duration| passed.as_nanos() * u128::from(self.hz) / 1_000_000_000;
        let ticks_of = |passed| u64::try_from(nanoseconds(passed)).unwrap_or(u64::MAX);
        match instant.checked_duration_since(then) {
            Some(before) => ticks.saturating_sub(ticks_of(before)),
            None => ticks.saturating_add(ticks_of(then.duration_since(instant))),
        }
    }

    /// It was seen to be so many ticks behind.
    fn set_back(&mut self, ticks: u64) {
        self.started.1 = self.started.1.saturating_sub(ticks);
    }
}

/// What a relay tells of itself.
#[derive(Debug)]
pub struct Status {
    /// Totals of what was relayed so far.
    pub vcpus: Vec<VcpuTotals>,
    /// How many consumers there are.
    pub consumers: usize,
}

/// The relay's thread.
pub struct Relay {
    clock: Clock,
    commands: SyncSender<Command>,
    /// Marks that there was no room for.
    lost_marks: AtomicU64,
    corrupt: Arc<OnceLock<String>>,
    consumers: Arc<AtomicUsize>,
    jumps: jumps::Told,
    pulse: Pulse,
    done: Receiver<io::Result<End>>,
}

/// Calls on the way out, also of a panic.
struct OnExit<F: Fn()>(F);

impl<F: Fn()> Drop for OnExit<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

impl Relay {
    /// Starts it; `ended` is called when its thread is about to end, for whatever reason, and when
    /// there is a ring that programs cannot have left so (see [`Relay::corrupt`]), or [`Relay::jumps`] has something.
    ///
    /// # Errors
    /// When there is no thread for it. What goes wrong later, [`Relay::error`] tells.
    pub fn start(setup: Setup, ended: impl Fn() + Send + 'static) -> io::Result<Self> {
        let (commands, receiver) = sync_channel(COMMANDS);
        let (end, done) = channel();
        let corrupt = Arc::<OnceLock<String>>::default();
        let found = Arc::clone(&corrupt);
        let consumers = Arc::<AtomicUsize>::default();
        let seen = Arc::clone(&consumers);
        let jumps = jumps::Told::default();
        let jumped = jumps.clone();
        let pulse = Pulse::default();
        let beats = pulse.clone();
        let clock = Clock::of(&setup);
        std::thread::Builder::new().name(Thread::Relay.name().into()).spawn(move || {
            // Dropped last: whoever is called finds that there will be nothing more.
            let ended = OnExit(ended);
            let end = end;
            priority::raise();
            sandbox::enter(Thread::Relay);
            let tell = |what: String| {
                if found.set(what).is_ok() {
                    (ended.0)();
                }
            };
            let drain = Drain::new(setup, clock);
            let drain = drain.map(|drain| drain.with_pulse(beats).telling_jumps(jumped));
            let notice = || (ended.0)();
            let _ = end.send(drain.and_then(|drain| drain.run(&receiver, (&tell, &notice), &seen)));
        })?;
        let lost_marks = AtomicU64::new(0);
        Ok(Self { clock, commands, lost_marks, corrupt, consumers, jumps, pulse, done })
    }

    /// Puts a mark into the stream.
    pub fn mark(&self, mark: Mark) {
        // A relay that has failed says so at the next look.
        let _ = self.commands.send(Command::Mark(mark));
    }

    /// The same with a mark of which there may be any number. False: too many wait, and this one is
    /// lost and counted.
    pub fn try_mark(&self, mark: Mark) -> bool {
        // A relay that has failed says so at the next look.
        let full =
            matches!(self.commands.try_send(Command::Mark(mark)), Err(TrySendError::Full(_)));
        if full {
            self.lost_marks.fetch_add(1, Ordering::Relaxed);
        }
        !full
    }

    /// The guest's clock, about.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.clock.ticks(Duration::ZERO)
    }

    /// To be called before sites and exits are enabled. Returns when their records are known for
    /// what they are: the relay may be in the middle of the rings, and would take the first for the
    /// guest's inventions. Whether all that was written before has been taken.
    pub fn targets(&self, targets: Targets) -> bool {
        // A relay that has failed says so at the next look.
        self.ask(|done| Command::Targets(Box::new(targets), done)).unwrap_or(false)
    }

    /// Whether all that was written before has been taken.
    #[must_use]
    pub fn take_all(&self) -> bool {
        self.ask(Command::Take).unwrap_or(false)
    }

    /// These exits may write records from now on, beside all that the relay was told before.
    pub fn exits(&self, exits: Vec<ExitWord>) {
        // A relay that has failed says so at the next look.
        self.ask(|done| Command::Exits(exits, done));
    }

    /// Has the stream tell by a watermark when it has all records up to this time, in ticks of the
    /// guest's clock: of a guest that does nothing it would have none.
    pub fn reach(&self, ticks: u64) {
        // A relay that has failed says so at the next look.
        let _ = self.commands.send(Command::Reach(ticks));
    }

    /// Lets something look at the stream from here on.
    ///
    /// # Errors
    /// When the system has no descriptors or threads left, or the relay has failed.
    pub fn watch(&self, watched: Watched) -> io::Result<()> {
        self.ask(|done| Command::Watch(Box::new(watched), done)).unwrap_or_else(|| Err(gone()))
    }

    /// A module is loaded. To be called before its sites are enabled.
    pub fn module(&self, module: Arc<Module>) {
        let _ = self.commands.send(Command::Module(module));
    }

    /// What was traced when, which the stream tells at its end.
    pub fn traced(&self, traced: Vec<TracedSites>) {
        let _ = self.commands.send(Command::Traced(traced));
    }

    /// Counts for the stream, which are written when this comes; what is counted later adds to them.
    pub fn counted(&self, counted: Vec<Hits>, callers: Vec<CallerHits>, sorted: Vec<Sorted>) {
        let _ = self.commands.send(Command::Counted(counted, callers, sorted));
    }

    /// How many consumers there were a moment ago.
    #[must_use]
    pub fn consumers(&self) -> usize {
        self.consumers.load(Ordering::Relaxed)
    }

    /// How it stands; `None` when the relay has failed.
    #[must_use]
    pub fn status(&self) -> Option<Status> {
        self.ask(Command::Status)
    }

    /// Forgets what is in the rings; returns how many records, `None` when the relay has failed.
    #[must_use]
    pub fn clear(&self) -> Option<u64> {
        self.ask(Command::Clear)
    }

    /// Writes what a flight recorder has; `None` when the relay has failed. All vCPUs are paused: what
    /// is overwritten meanwhile would be half another record. This takes as long as the output takes
    /// for what does not fit in its queue, within bounds.
    #[must_use]
    pub fn snapshot(&self) -> Option<Snapshot> {
        self.ask(Command::Snapshot)
    }

    /// The guest's kernel is gone, and nobody writes to its rings any more: takes all that is there, and looks
    /// no more at them. What is told from then on is of another one, of the same image, that runs at the slide
    /// `next`. `None` when the relay has failed. This takes as long as a snapshot.
    #[must_use]
    pub fn leave(&self, next: u64) -> Option<Left> {
        self.ask(|answer| Command::Leave(next, answer))
    }

    /// The other kernel writes to these rings from now on; to be called after [`Relay::leave`].
    pub fn enter(&self, readers: Vec<RingReader>, tasks: Tasks) {
        // A relay that has failed says so at the next look.
        self.ask(|done| Command::Enter(readers, tasks, done));
    }

    /// The relay waits for nobody, so that the answer comes soon.
    fn ask<T>(&self, command: impl FnOnce(Sender<T>) -> Command) -> Option<T> {
        let (sender, receiver) = channel();
        self.commands.send(command(sender)).ok()?;
        receiver.recv().ok()
    }

    /// Functions (link addresses), each with one in which calls of it have gone on by a jump through a pointer: each pair
    /// once, unless there are too many.
    #[must_use]
    pub fn jumps(&self) -> Vec<(u64, u64)> {
        self.jumps.take()
    }

    /// What is wrong with a ring, once that was found.
    #[must_use]
    pub fn corrupt(&self) -> Option<String> {
        self.corrupt.get().cloned()
    }

    /// The error with which the thread has ended early.
    pub fn error(&mut self) -> Option<io::Error> {
        match self.done.try_recv() {
            Ok(end) => end.err(),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(gone()),
        }
    }

    /// Nothing is traced any more: lets the thread drain the rest and end the stream. An output may
    /// take nothing for `time`, and is waited for as long as it goes on to take something.
    #[must_use]
    pub fn finish(self, mut summary: Summary, time: Duration) -> Ending {
        let lost = self.lost_marks.load(Ordering::Relaxed);
        if lost > 0 {
            summary.notes.push(format!("{lost} marks are not in the trace: too many came at once"));
        }
        let grace = Grace::of(time);
        let hurry = Arc::clone(&grace.hurry);
        let _ = self.commands.send(Command::Finish(Box::new(summary), grace));
        Ending { done: self.done, hurry, pulse: self.pulse }
    }
}

/// A relay that has been told to finish.
pub struct Ending {
    done: Receiver<io::Result<End>>,
    hurry: Arc<AtomicBool>,
    pulse: Pulse,
}

impl Ending {
    /// How it has ended; `None` when it has not within `time`.
    ///
    /// # Errors
    /// When the primary output fails.
    pub fn wait(&self, time: Duration) -> Option<io::Result<End>> {
        match self.done.recv_timeout(time) {
            Ok(end) => Some(end),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(Err(gone())),
        }
    }

    /// How often the thread has told that it goes on: it does so while it waits for outputs, too, as
    /// long as these have time.
    #[must_use]
    pub fn beats(&self) -> u64 {
        self.pulse.beats()
    }

    /// Somebody does not want to wait so long any more.
    pub fn hurry(&self) {
        self.hurry.store(true, Ordering::Relaxed);
    }
}

fn gone() -> io::Error {
    io::Error::other("the relay's thread has ended without reporting anything")
}
