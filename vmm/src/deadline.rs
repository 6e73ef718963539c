//! The deadline of a run: a thread that only waits for time to pass.
//!
//! A run has many parts, and each may hang: a thread that does not end, an output that accepts
//! nothing, an emulated host that is stuck. Most have their own time limits. This one catches the
//! rest: the code that ends a run declares each step and how long it may take. If a step takes
//! longer, a message names it and the process ends.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use vmtrace_system::{private_socket, say, terminal};

use crate::sandbox::{self, Thread};

/// How long a step of the end may make no progress.
pub const TIME: Duration = Duration::from_secs(30);
/// How long the run may take to see that it is to end: it may be in the middle of a pause.
pub const STEP: Duration = Duration::from_secs(60);
/// How often the thread looks.
const LOOK: Duration = Duration::from_millis(500);
/// What a look counts for at most. A process that is stopped, or does not get to run, is not late.
const MOST: Duration = Duration::from_millis(1000);
/// How long a reader of standard error may keep the last line from being written.
const LINE_TIME: Duration = Duration::from_millis(500);

/// What a run waits for, for whoever sees to it; clones are the same.
#[derive(Clone)]
pub struct Deadline(Arc<Shared>);

/// The thread, until this is dropped.
pub struct Guard(Deadline);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// A signal has asked for an end, whoever else sees it.
    asked: Arc<AtomicBool>,
}

#[derive(Default)]
struct State {
    part: String,
    /// For how long it may go on; `None`: for ever.
    left: Option<Duration>,
    /// For how long it may do so in any case.
    allowed: Duration,
    /// How much it got last.
    given: Duration,
    /// How much it gets when somebody wants an end.
    hurry: Duration,
    /// Signals ask for something else from now on.
    closed: bool,
    /// With what the process would end, and with what if something is lost.
    code: u8,
    failed: u8,
    /// Tells what would be lost.
    lost: Option<Lost>,
    /// What is tried once when the part is late, and how long the part may take after that.
    remedy: Option<(Remedy, Duration)>,
    over: bool,
}

/// Tells what would be lost, without waiting for anybody.
pub type Lost = Box<dyn Fn() -> Option<String> + Send>;

/// Makes a part end that is late, without waiting for it.
pub type Remedy = Box<dyn FnOnce() + Send>;

/// A part has not ended in time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Late {
    /// Which.
    pub part: String,
    /// How long it had.
    pub time: Duration,
    /// With what the process is to end.
    pub code: u8,
    /// What is lost, if anybody knows.
    pub lost: Option<String>,
}

impl Guard {
    /// Starts the thread; nothing has a deadline yet. Once somebody wants an end, what the run does
    /// then has so long as `hurry`. The process ends when a part is late: with `failed` until another code is
    /// known, and where something is lost.
    ///
    /// # Errors
    /// When the system has no thread left.
    pub fn start(hurry: Duration, failed: u8) -> io::Result<Self> {
        let guard = Self::start_with(hurry, failed, LOOK, |late| end(&late))?;
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&guard.0.0.asked))?;
        }
        Ok(guard)
    }

    /// The same that looks so often, and does that when a part is late.
    pub(crate) fn start_with(
        hurry: Duration,
        failed: u8,
        look: Duration,
        late: impl FnOnce(Late) + Send + 'static,
    ) -> io::Result<Self> {
        let state = State { hurry, code: failed, failed, ..State::default() };
        let shared = Arc::new(Shared { state: Mutex::new(state), ..Shared::default() });
        let watching = Arc::clone(&shared);
        std::thread::Builder::new().name(Thread::Watchdog.name().into()).spawn(move || {
            sandbox::enter(Thread::Watchdog);
            if let Some(what) = watching.watch(look) {
                late(what);
            }
        })?;
        Ok(Self(Deadline(shared)))
    }

    /// For those who tell what the run does.
    #[must_use]
    pub fn deadline(&self) -> Deadline {
        self.0.clone()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.state().over = true;
        self.0.0.changed.notify_all();
    }
}

impl Deadline {
    /// One that nobody looks at.
    #[must_use]
    pub fn never() -> Self {
        Self(Arc::default())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }

    /// From now on the run does this, and may take so long for it.
    pub fn begin(&self, part: impl Into<String>, time: Duration) {
        self.set(part.into(), Some(time));
    }

    /// The same without a limit, until somebody asks for the end.
    pub fn begin_open(&self, part: impl Into<String>) {
        self.set(part.into(), None);
    }

    fn set(&self, part: String, left: Option<Duration>) {
        let mut state = self.state();
        state.part = part;
        state.left = left;
        state.given = left.unwrap_or_default();
        state.remedy = None;
        drop(state);
        self.0.changed.notify_all();
    }

    /// What the run does goes on as it should: it may take as long again as it was given.
    pub fn renew(&self) {
        let mut state = self.state();
        state.left = state.left.map(|_| state.given);
    }

    /// What the run does now may take so long from here, whatever its limit is.
    pub fn allow(&self, time: Duration) {
        let mut state = self.state();
        state.allowed = state.allowed.max(time);
    }

    /// Somebody wants the end.
    pub fn hurry(&self) {
        self.state().hurry();
        self.0.changed.notify_all();
    }

    /// The run has ended, and what follows has no limit but those that are set: a signal is not about it.
    pub fn run_has_ended(&self) {
        self.state().closed = true;
        self.begin_open("what follows the run");
    }

    /// What the process would end with.
    pub fn set_code(&self, code: u8) {
        self.state().code = code;
    }

    /// What would be lost.
    pub fn set_lost(&self, lost: Lost) {
        self.state().lost = Some(lost);
    }

    /// When the part that runs now is late, this is tried first, and the part may take so long for its end.
    pub fn set_remedy(&self, remedy: Remedy, time: Duration) {
        self.state().remedy = Some((remedy, time));
    }

    /// Begins this part when the guard is dropped: for what drops themselves wait for.
    #[must_use]
    pub fn at_drop(&self, part: &'static str, time: Duration) -> AtDrop {
        AtDrop { deadline: self.clone(), part, time }
    }
}

/// Told by a thread that goes on as it should; clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Pulse(Arc<AtomicU64>);

impl Pulse {
    /// It goes on.
    pub fn beat(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// How often it has told so.
    #[must_use]
    pub fn beats(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// See [`Deadline::at_drop`].
pub struct AtDrop {
    deadline: Deadline,
    part: &'static str,
    time: Duration,
}

impl Drop for AtDrop {
    fn drop(&mut self) {
        self.deadline.begin(self.part, self.time);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread: `None` when the run is over.
    fn watch(&self, look: Duration) -> Option<Late> {
        let mut state = self.lock();
        loop {
            let before = Instant::now();
            let waited = self.changed.wait_timeout(state, look);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if state.over {
                return None;
            }
            if self.asked.swap(false, Ordering::Relaxed) && !state.closed {
                state.hurry();
            }
            state.pass(before.elapsed().min(MOST));
            if state.is_late() {
                if let Some((remedy, time)) = state.remedy.take() {
                    remedy();
                    state.left = Some(time);
                    continue;
                }
                let State { part, given, code, failed, lost, .. } = &mut *state;
                let (part, time, code, failed) = (std::mem::take(part), *given, *code, *failed);
                let lost = lost.take();
                // Whoever comes now is not to wait for this thread.
                drop(state);
                let lost = lost.and_then(|lost| lost());
                let code = if lost.is_some() { failed } else { code };
                return Some(Late { part, time, code, lost });
            }
        }
    }
}

impl State {
    fn hurry(&mut self) {
        if self.left.is_none_or(|left| left > self.hurry) {
            (self.left, self.given) = (Some(self.hurry), self.hurry);
        }
    }

    fn pass(&mut self, time: Duration) {
        self.left = self.left.map(|left| left.saturating_sub(time));
        self.allowed = self.allowed.saturating_sub(time);
    }

    fn is_late(&self) -> bool {
        self.left.is_some_and(|left| left.is_zero()) && self.allowed.is_zero()
    }
}

impl fmt::Display for Late {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { part, time, lost, .. } = self;
        write!(f, "the run did not end in time: {part} took more than {} s", time.as_secs())?;
        lost.iter().try_for_each(|lost| write!(f, "; {lost}"))
    }
}

/// Ends the process, as a normal end would leave things.
fn end(late: &Late) {
    terminal::restore();
    // Whoever reads standard error may be what is stuck.
    say::in_time(&format!("vmtrace: error: {late}\n"), LINE_TIME);
    private_socket::remove_all();
    // Not `std::process::exit`, which waits where another thread is on its way out.
    signal_hook::low_level::exit(late.code.into());
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};

    const SHORT: Duration = Duration::from_millis(50);
    const LONG: Duration = Duration::from_secs(3600);
    const FAILED: u8 = 1;

    fn guard() -> (Guard, Deadline, Receiver<Late>) {
        let (late, lates) = channel();
        let start = |late| Guard::start_with(STEP, FAILED, Duration::from_millis(5), late);
        let guard = start(move |what| late.send(what).unwrap()).unwrap();
        let deadline = guard.deadline();
        (guard, deadline, lates)
    }

    #[test]
    fn a_part_that_never_ends_is_named() {
        let (_guard, deadline, lates) = guard();
        deadline.set_lost(Box::new(|| None));
        deadline.begin("one that ends", LONG);
        deadline.begin("the relay", SHORT);
        deadline.set_code(7);
        let late = lates.recv().unwrap();
        assert_eq!((&*late.part, late.time, late.code), ("the relay", SHORT, 7));
        assert!(late.to_string().contains("the relay"), "{late}");
    }

    // Else a run that hangs is cut off, and nobody learns why it hung.
    #[test]
    fn a_remedy_comes_first_and_is_for_one_part() {
        let (_guard, deadline, lates) = guard();
        let (tried, tries) = channel();
        let remedy = |part| {
            let tried = tried.clone();
            Box::new(move || tried.send(part).unwrap())
        };
        deadline.begin("a part that ends", LONG);
        deadline.set_remedy(remedy("one that ends"), LONG);
        deadline.begin("the host", SHORT);
        assert_eq!(lates.recv().unwrap().part, "the host");
        assert!(tries.try_recv().is_err(), "the part was over");

        let (late, lates) = channel();
        let late = move |what| late.send(what).unwrap();
        let guard = Guard::start_with(SHORT, FAILED, Duration::from_millis(5), late).unwrap();
        let deadline = guard.deadline();
        deadline.begin_open("the host");
        deadline.set_remedy(remedy("the host"), 2 * SHORT);
        deadline.hurry();
        let late = lates.recv().unwrap();
        assert_eq!((tries.try_recv(), late.time), (Ok("the host"), SHORT));
        assert!(tries.try_recv().is_err(), "it is tried once");
    }

    // Not even where the guest's command has succeeded.
    #[test]
    fn what_loses_something_is_no_success() {
        let (_guard, deadline, lates) = guard();
        deadline.set_code(0);
        deadline.set_lost(Box::new(|| Some("the rest is lost".to_owned())));
        deadline.begin("the relay", SHORT);
        let late = lates.recv().unwrap();
        assert_eq!(late.code, FAILED);
        assert!(late.to_string().ends_with("; the rest is lost"), "{late}");
    }

    // Else a slow reader's output would be torn. (This thread itself may be kept waiting for longer than it may
    // be silent: that says nothing.)
    #[test]
    fn what_goes_on_is_not_late() {
        let goes_on = || {
            let (guard, deadline, lates) = guard();
            let begun = Instant::now();
            deadline.begin("an output", SHORT);
            let (mut before, mut silent) = (begun, Duration::ZERO);
            while begun.elapsed() < 10 * SHORT {
                deadline.renew();
                silent = silent.max(before.elapsed());
                before = Instant::now();
                if lates.try_recv().is_ok() {
                    assert!(silent >= SHORT, "late after {silent:?}");
                    return None;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            deadline.allow(LONG);
            Some((guard, deadline, lates))
        };
        let (_guard, deadline, lates) = (0..50).find_map(|_| goes_on()).expect("a quiet moment");
        assert_eq!(lates.recv_timeout(4 * SHORT), Err(RecvTimeoutError::Timeout));
        deadline.begin_open("the guest");
        deadline.renew();
        assert_eq!(lates.recv_timeout(4 * SHORT), Err(RecvTimeoutError::Timeout));
    }

    #[test]
    fn a_run_that_is_over_has_no_deadline() {
        let (guard, deadline, lates) = guard();
        deadline.begin("the end", SHORT);
        drop(guard);
        assert_eq!(lates.recv(), Err(std::sync::mpsc::RecvError), "the thread has ended");
        Deadline::never().begin("anything", Duration::ZERO);
    }

    // What sees to signals may be what is stuck.
    #[test]
    fn a_signal_is_a_deadline_for_a_run_without_one() {
        let guard = Guard::start(LONG, FAILED).unwrap();
        let deadline = guard.deadline();
        deadline.begin_open("the guest");
        let signal = || nix::sys::signal::raise(nix::sys::signal::Signal::SIGHUP).unwrap();
        signal();
        while deadline.state().left.is_none() {
            std::thread::sleep(Duration::from_millis(5));
        }
        // Less stays less.
        deadline.begin("the end", TIME);
        deadline.hurry();
        assert!(deadline.state().left <= Some(TIME));
        // One that has ended the run does not end what is made of its trace.
        signal();
        deadline.run_has_ended();
        while deadline.0.asked.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(deadline.state().left, None);
    }

    // A process that was stopped for an hour goes on where it was.
    #[test]
    fn time_in_which_the_process_does_not_run_hardly_counts() {
        let mut state = State { left: Some(2 * MOST), ..State::default() };
        state.pass(LONG.min(MOST));
        assert!(!state.is_late());
        state.pass(LONG.min(MOST));
        assert!(state.is_late());
    }

    // A drop that waits is part of the end, also where an error leads there.
    #[test]
    fn drops_have_a_deadline() {
        let (_guard, deadline, lates) = guard();
        drop(deadline.at_drop("the machine", SHORT));
        assert_eq!(lates.recv().unwrap().part, "the machine");
    }
}
