//! The relay: drains the rings while the guest runs, and writes the stream.
//!
//! A [`Relay`] is a thread with a [`Drain`], which does the work.

mod console;
mod drain;
mod names;
mod order;
mod priority;
mod programs;
mod values;

use crate::kernel::Kernel;
use crate::serve::{Hub, Join};
use crate::stream::{Header, Mark, Summary, VcpuTotals};
use crate::tracer::ring::RingReader;
use crate::tracer::{Duty, ExitWord, Guest, Tasks};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use console::ConsoleLines;
pub use drain::Drain;
pub use names::resolver;
pub use values::{Recorded, Values};

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
}

/// What may write records, beside what the relay knows already.
#[derive(Clone, Debug, Default)]
pub struct Targets {
    /// Sites, indices into [`Kernel::sites`].
    pub sites: Vec<usize>,
    /// Exits.
    pub exits: Vec<ExitWord>,
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

enum Command {
    Mark(Mark),
    /// These may write records from now on.
    Targets(Box<Targets>, Sender<()>),
    Status(Sender<Status>),
    Clear(Sender<u64>),
    Finish(Box<Summary>),
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
    commands: Sender<Command>,
    thread: Option<JoinHandle<io::Result<Summary>>>,
}

impl Relay {
    /// Starts it.
    ///
    /// # Errors
    /// When there is no thread for it. What goes wrong later, [`Relay::error`] tells.
    pub fn start(setup: Setup) -> io::Result<Self> {
        let (commands, receiver) = channel();
        let clock = Clock::of(&setup);
        let thread = std::thread::Builder::new().name("relay".into()).spawn(move || {
            priority::raise();
            Drain::new(setup, clock)?.run(&receiver)
        })?;
        Ok(Self { clock, commands, thread: Some(thread) })
    }

    /// Puts a mark into the stream.
    pub fn mark(&self, mark: Mark) {
        // A relay that has failed says so at the next look.
        let _ = self.commands.send(Command::Mark(mark));
    }

    /// The guest's clock, about.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.clock.ticks(Duration::ZERO)
    }

    /// To be called before sites and exits are enabled. Returns when their records are known for
    /// what they are: the relay may be in the middle of the rings, and would take the first for the
    /// guest's inventions.
    pub fn targets(&self, targets: Targets) {
        let (done, receiver) = channel();
        if self.commands.send(Command::Targets(Box::new(targets), done)).is_ok() {
            // A relay that has failed says so at the next look.
            let _ = receiver.recv();
        }
    }

    /// How it stands; `None` when the relay has failed.
    #[must_use]
    pub fn status(&self) -> Option<Status> {
        let (sender, receiver) = channel();
        self.commands.send(Command::Status(sender)).ok()?;
        receiver.recv().ok()
    }

    /// Forgets what is in the rings; returns how many records, `None` when the relay has failed.
    #[must_use]
    pub fn clear(&self) -> Option<u64> {
        let (sender, receiver) = channel();
        self.commands.send(Command::Clear(sender)).ok()?;
        receiver.recv().ok()
    }

    /// The error with which the thread has ended early.
    pub fn error(&mut self) -> Option<io::Error> {
        if !self.thread.as_ref()?.is_finished() {
            return None;
        }
        self.join(Summary::default()).err()
    }

    /// Drains the rest, for the guest is at rest for good, and writes the end.
    ///
    /// # Errors
    /// When the primary output fails.
    pub fn finish(mut self, summary: Summary) -> io::Result<Summary> {
        self.join(summary)
    }

    fn join(&mut self, summary: Summary) -> io::Result<Summary> {
        let _ = self.commands.send(Command::Finish(Box::new(summary)));
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            Some(Err(_)) => Err(io::Error::other("the relay's thread panicked")),
            None => Err(io::Error::other("the relay has ended")),
        }
    }
}
