//! One run: boots a machine, attaches the tracer, relays the records.
//!
//! This is where [`crate::machine`] and [`crate::tracer`] meet; neither knows the
//! other. The controller below is a small state machine over the machine's
//! events; the [`relay`](crate::relay) has a thread of its own.

mod aids;
mod anew;
mod annex;
mod anomaly;
mod apply;
mod arch;
mod attach;
mod clock;
mod conditions;
mod control;
mod controller;
mod counting;
mod duties;
mod ending;
mod ends;
mod events;
mod exits;
mod firing;
mod follow;
mod hang;
mod histograms;
mod history;
mod jumps;
mod latency;
mod limits;
mod literals;
mod module_events;
mod module_functions;
mod module_types;
mod modules;
mod notes;
mod plan;
mod points;
mod printk;
mod room;
mod selftest;
mod shares;
mod sharing;
mod switches;
mod tracing;
mod trigger_commands;
mod triggers;
mod tripwires;
mod values;
mod verdict;
mod vm;
mod way;

use crate::deadline::{self, Deadline};
use crate::kernel::{Kernel, KernelError};
use crate::machine::{Config, ConsoleSinks, Event, ExitReason, Far, Machine, MachineError};
use crate::relay::{ConsoleLines, nanoseconds};
use crate::serve::{ControlRequest, Join, Sink, Unwritten};
use crate::stream::{Exit, Mark, MarkKind, Summary};
use crate::tracer::TraceError;
use crate::tracer::annex::WITH_TABLES;
use crate::tracer::far_memory;
use controller::{Controller, Output};
use hang::HangWatch;
use std::io::Write;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};
use verdict::Verdict;

pub use conditions::{Conditional, ConditionalError, conditional};
pub use ends::{Doing, EndsError, Use};
pub use events::{
    EventError, Patterns, TracedEvent, UnknownEvent, add_events, events, has_only_arguments,
    is_meant_in,
};
pub use follow::{Follow, FollowError};
pub use histograms::{Histogram, HistogramError, histogram};
pub use latency::LastLatencies;
pub use limits::{Limits, Roots};
pub use plan::Plan;
pub use tracing::{Tracer, Tracing};
pub use triggers::{Called, Commands, Spot, SpotError, Trigger};
pub use values::{ValuesError, Wants, values};
use vm::Kvm;
pub use vm::{Paused, Stopped, Vm, Wake};

/// Gets bytes of the guest in pieces of any size.
pub type Listener = Box<dyn FnMut(&[u8]) + Send>;

/// What a run that does not end is said to have waited for.
const CONTROLLER: &str = "the run's main thread, which was to end it,";
const MACHINE: &str = "a thread of a vCPU or of a device";
/// How long events keep what is due from being seen to.
const LATE: Duration = Duration::from_secs(1);

/// One run.
pub struct Request {
    /// The machine; the annex and the watched register are filled in.
    pub machine: Config,
    /// Where the guest's console goes.
    pub console: Box<dyn Write + Send>,
    /// Whether lines of the console become marks of the stream.
    pub console_marks: bool,
    /// Gets what the agent says, in pieces.
    pub agent: Listener,
    /// What is done with the machine.
    pub work: Work,
}

/// What is done with a machine.
pub struct Work {
    /// The kernel that the machine boots.
    pub kernel: Arc<Kernel>,
    /// What to trace.
    pub tracing: Tracing,
    /// Where the trace stream goes in any case.
    pub stream: Sink,
    /// Consumers that come while it runs.
    pub joins: Receiver<Join>,
    /// Commands that come while it runs; the sender wakes the run after each.
    pub control: Receiver<ControlRequest>,
    /// Give up after this long.
    pub timeout: Option<Duration>,
    /// Take the guest for hung when a CPU of it could not be interrupted for so long; `None`: never.
    pub hang: Option<Duration>,
    /// Told what the run waits for.
    pub deadline: Deadline,
    /// Runs the commands of triggers.
    pub commands: Commands,
    /// Asked at the end.
    pub closing: Box<dyn Fn() -> Closing + Send>,
}

/// What only others know of how a run went.
#[derive(Clone, Debug, Default)]
pub struct Closing {
    /// The exit status of the command that the agent ran.
    pub run_status: Option<i32>,
    /// For the summary.
    pub notes: Vec<String>,
}

/// How a run went.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// As in the stream's last frame.
    pub summary: Summary,
    /// Why the guest is gone; `None` when it was stopped from outside.
    pub exit: Option<ExitReason>,
    /// What the primary output did not take in time at the end.
    pub unwritten: Unwritten,
    /// Why tracing has ended before that.
    pub anomaly: Option<String>,
    /// The trigger that has ended it.
    pub ended_by: Option<String>,
    /// Latencies that were measured by command when it ended.
    pub latencies: Option<LastLatencies>,
}

/// Why a run could not be made.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The machine failed.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// The kernel is unusable.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// Tracing cannot be as it was asked for.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The trace could not be written.
    #[error("the trace cannot be written")]
    Stream(#[source] std::io::Error),
    /// A thread could not be started.
    #[error("no thread for the relay")]
    Thread(#[source] std::io::Error),
}

/// Handles of a run that is under way, for other threads.
pub struct Handles {
    /// Wakes the controller.
    pub waker: crate::machine::Waker,
    /// The guest's console input.
    pub console: crate::machine::SerialInput,
    /// The agent's input.
    pub agent: crate::machine::SerialInput,
}

/// Boots, traces, and returns when the guest is gone, `stop` says so at a wake-up,
/// or the time is up. `started` gets handles for other threads once the machine
/// exists.
///
/// # Errors
/// When the machine cannot be made or the trace not be written. What goes wrong
/// with tracing alone lets the guest live and is a note in the summary.
pub fn run(
    request: Request,
    started: impl FnOnce(Handles),
    stop: impl FnMut() -> bool,
) -> Result<Outcome, SessionError> {
    let Request { machine, console, console_marks, agent, work } = request;
    let (kernel, tracing, deadlines) = (&work.kernel, &work.tracing, work.deadline.clone());
    // Parsed now: later the guest would wait for it.
    kernel.check_traceable()?;
    let far = far_memory(kernel.arch(), machine.cpus.into(), tracing.buffer)?;
    let config = Config {
        annex: WITH_TABLES,
        far: far.map(|(size, offset)| Far { size, offset }),
        watch_msr: arch::WATCHED_MSR,
        ..machine
    };
    let lines = ConsoleLines::default();
    let heard: Listener = if console_marks {
        let lines = lines.clone();
        Box::new(move |bytes| lines.feed(bytes))
    } else {
        Box::new(|_| ())
    };
    let machine = Machine::new(config, ConsoleSinks { console, agent, heard })?;
    started(Handles {
        waker: machine.waker(),
        console: machine.serial_input(),
        agent: machine.agent_input(),
    });
    let mut machine = Kvm::new(machine);
    // Dropped before it, however this ends: that waits for its threads.
    let _threads = deadlines.at_drop(MACHINE, deadline::STEP);
    let outcome = attend(&mut machine, work, lines, stop)?;
    deadlines.begin(MACHINE, deadline::STEP);
    machine.stop();
    Ok(outcome)
}

/// Starts a machine, attends to what it tells and to what others want of it, and returns when the guest is
/// gone, `stop` says so at a wake-up, or the time is up. `lines` of the guest's console become marks.
///
/// # Errors
/// As [`run`].
pub fn attend(
    machine: &mut dyn Vm,
    work: Work,
    lines: ConsoleLines,
    mut stop: impl FnMut() -> bool,
) -> Result<Outcome, SessionError> {
    let Work { kernel, tracing, stream, joins, control, timeout, hang, .. } = work;
    let Work { deadline: deadlines, commands, closing, .. } = work;
    let (exits, untold) = if tracing.exits { exits::observe(machine) } else { (Vec::new(), None) };
    let mut controller = Controller::new(
        kernel,
        tracing,
        Output { primary: stream, joins, console: lines, exits },
        commands,
        deadlines.clone(),
        HangWatch::new(hang, Instant::now()),
    );
    untold.into_iter().for_each(|what| controller.note(what));
    controller.loaded(machine);
    machine.start()?;
    match timeout {
        Some(timeout) => deadlines.begin(CONTROLLER, timeout.saturating_add(deadline::STEP)),
        None => deadlines.begin_open(CONTROLLER),
    }
    // Beyond any clock is never.
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let (end, exit) = loop {
        let halted = controller.verdict.deadline();
        let counts = controller.counts_deadline();
        let wait = deadline.into_iter().chain(halted).chain(counts);
        let wait = wait.chain(controller.test_deadline()).chain(controller.end_deadline());
        let wait = wait.chain(controller.jumps_deadline());
        let wait = wait.chain(controller.hang_deadline()).min();
        match next(machine.events(), wait) {
            Ok(Event::MsrWrite { vcpu, value, .. }) => {
                controller.entry_known(machine, vcpu, value);
                let _ = machine.release(vcpu);
            }
            Ok(Event::Trap { vcpu, address }) => {
                controller.trapped(machine, vcpu, address)?;
                if controller.verdict.halts {
                    break told(&controller.verdict, ExitReason::Halt);
                }
                // Nothing comes behind the call at which the run ends.
                if controller.ended_by.is_none() {
                    let _ = machine.release(vcpu);
                }
            }
            Ok(Event::Stray { vcpu, address }) => {
                controller.strayed(machine, address);
                let _ = machine.release(vcpu);
            }
            Ok(Event::Panics { vcpu, crash_kernel }) => {
                controller.panic_told(machine, crash_kernel);
                let _ = machine.release(vcpu);
            }
            Ok(Event::Exit(reason)) => {
                break told(&controller.verdict, reason);
            }
            Ok(Event::Wake) => {
                machine.awake();
                for request in control.try_iter() {
                    controller.request(machine, request);
                }
                controller.await_end(Duration::ZERO);
                if stop() {
                    break (Exit::Stopped, None);
                }
            }
            Err(RecvTimeoutError::Timeout) => {
                controller.await_end(Duration::ZERO);
                controller.test_overdue(machine);
                if halted.is_some_and(|deadline| Instant::now() >= deadline) {
                    break (Exit::Panic, controller.verdict.panic());
                }
                if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                    // A guest that has panicked meanwhile is not late but dead.
                    let panic = controller.verdict.panic();
                    break (panic.as_ref().map_or(Exit::Timeout, |_| Exit::Panic), panic);
                }
                if let Some(message) = controller.look_for_hang(machine) {
                    // A crash kernel that hangs is of a guest that has panicked.
                    break told(&controller.verdict, ExitReason::Hang { message });
                }
            }
            Err(RecvTimeoutError::Disconnected) => break (Exit::Unknown, None),
        }
        if controller.ended_by.is_some() {
            break (Exit::Stopped, None);
        }
        controller.prepare_ahead(machine);
        controller.tell_counts();
        controller.follow_jumps(machine);
        controller.look_at_rings(machine);
        if let Some(error) = controller.relay_error() {
            controller.detach(machine);
            return Err(SessionError::Stream(error));
        }
    };
    deadlines.begin("giving back what is traced", deadline::STEP);
    controller.detach(machine);
    if let Some(reason @ (ExitReason::Panic { .. } | ExitReason::Hang { .. })) = &exit {
        controller.note(reason.to_string());
    }
    let text = exit.as_ref().map_or_else(|| end.as_str().to_owned(), ToString::to_string);
    controller.mark(machine, MarkKind::Exit, Duration::ZERO, text);
    let anomaly = std::mem::take(&mut controller.anomaly).take();
    let ended_by = controller.ended_by.take();
    let (summary, unwritten, latencies) = controller.finish(machine, end, closing(), stop)?;
    Ok(Outcome { summary, exit, unwritten, anomaly, ended_by, latencies })
}

/// How the guest has ended, by what its kernel has said before.
fn told(verdict: &Verdict, reason: ExitReason) -> (Exit, Option<ExitReason>) {
    let reason = verdict.of(reason);
    (end_of(&reason), Some(reason))
}

fn end_of(reason: &ExitReason) -> Exit {
    match reason {
        ExitReason::PowerOff => Exit::Poweroff,
        ExitReason::Reset => Exit::Reset,
        ExitReason::TripleFault => Exit::TripleFault,
        ExitReason::Panic { .. } => Exit::Panic,
        ExitReason::Halt => Exit::Halt,
        ExitReason::Hang { .. } => Exit::Hang,
        ExitReason::InternalError(_) => Exit::Unknown,
    }
}

/// The next event, or that it is time to look at what is due. What has happened by then comes first, but for no
/// longer than [`LATE`]: of a guest that runs into traps all the time, or of commands, there is always another event.
fn next(events: &Receiver<Event>, due: Option<Instant>) -> Result<Event, RecvTimeoutError> {
    let Some(due) = due else { return events.recv_timeout(Duration::from_secs(3600)) };
    let now = Instant::now();
    if now.saturating_duration_since(due) > LATE {
        return Err(RecvTimeoutError::Timeout);
    }
    events.recv_timeout(due.saturating_duration_since(now))
}

fn mark(ticks: u64, kind: MarkKind, duration: Duration, text: String) -> Mark {
    let duration_ns = nanoseconds(duration);
    Mark { ticks, kind, duration_ns, text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    // Else `--timeout` ends no run whose guest keeps vmtrace busy.
    #[test]
    fn what_is_due_is_seen_to_though_there_is_always_another_event() {
        let (sender, events) = channel();
        (0..3).for_each(|_| sender.send(Event::Wake).unwrap());
        let now = Instant::now();
        let before = |time| now.checked_sub(time);
        // What has happened in time is not overlooked.
        assert!(matches!(next(&events, Some(now)), Ok(Event::Wake)));
        assert!(matches!(next(&events, None), Ok(Event::Wake)));
        let late = next(&events, before(2 * LATE));
        assert!(matches!(late, Err(RecvTimeoutError::Timeout)), "{late:?}");
        assert!(matches!(next(&events, before(LATE / 2)), Ok(Event::Wake)));
        drop(sender);
        let gone = next(&events, Some(now));
        assert!(matches!(gone, Err(RecvTimeoutError::Disconnected)), "{gone:?}");
    }
}
