//! vCPUs that wait for room in their rings: a program has found none for its record
//! ([`WAIT_INSTRUCTION`](super::WAIT_INSTRUCTION)).
//!
//! A wait is short. The guest's code looks again after it, and comes back if there still is none: so
//! interrupts are delivered meanwhile, and a vCPU that waits is paused like any other.
//!
//! If there is no room for long, because the output is not read, the guest must not see a CPU that
//! hangs. So all vCPUs wait then, a **stall**, and are told afterwards that they were stopped.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::lock::lock;

/// How long one wait is at most: room may have been made just before it began.
const WAIT: Duration = Duration::from_millis(1);
/// The same in a stall.
const STALL_WAIT: Duration = Duration::from_millis(20);
/// How long vCPUs wait one by one before all do.
const PATIENCE: Duration = Duration::from_millis(100);
/// Who looks again only after so long did not wait in between.
const AWAY: Duration = Duration::from_secs(1);

/// All vCPUs were stopped until there was room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stall {
    /// When that began.
    pub begun: Instant,
    /// For how long it was.
    pub time: Duration,
}

/// See the module.
pub struct Room {
    state: Mutex<State>,
    changed: Condvar,
    /// Somebody has waited since room was made last: a copy that costs nothing to read.
    wanted: AtomicBool,
    /// The same of [`State::stall`].
    stalled: AtomicBool,
}

struct State {
    /// For how long each vCPU has waited in all.
    waited: Vec<Duration>,
    /// When the first wait began since room was made, and when the last one ended.
    since: Option<(Instant, Instant)>,
    /// Nobody takes what was written.
    closed: bool,
    stall: Option<Instant>,
    stalls: Vec<Stall>,
}

impl Room {
    /// Of so many vCPUs.
    #[must_use]
    pub fn new(vcpus: usize) -> Room {
        let state = State {
            waited: vec![Duration::ZERO; vcpus],
            since: None,
            closed: false,
            stall: None,
            stalls: Vec::new(),
        };
        Room {
            state: Mutex::new(state),
            changed: Condvar::new(),
            wanted: AtomicBool::new(false),
            stalled: AtomicBool::new(false),
        }
    }

    // --- for vCPU threads ---

    /// vCPU `id` waits, unless there is something else to do. True: all vCPUs have to wait from now on.
    pub(super) fn wait(&self, id: usize, attention: impl Fn() -> bool) -> bool {
        let begun = Instant::now();
        let mut state = lock(&self.state);
        if attention() {
            return false;
        }
        self.wanted.store(true, Ordering::SeqCst);
        let since = match state.since {
            Some((since, last)) if begun.saturating_duration_since(last) < AWAY => since,
            _ => begun,
        };
        state.since = Some((since, begun));
        let stall = state.closed && begun.saturating_duration_since(since) >= PATIENCE;
        let begins = stall && state.stall.is_none();
        if begins {
            state.stall = Some(begun);
            self.stalled.store(true, Ordering::SeqCst);
        }
        // What kicks the others takes a lock that others hold when they take this one.
        if !begins {
            state = self.sleep(state, if stall { STALL_WAIT } else { WAIT });
        }
        let now = Instant::now();
        if let Some((_, last)) = &mut state.since {
            *last = now;
        }
        if let Some(waited) = state.waited.get_mut(id) {
            *waited += now.saturating_duration_since(begun);
        }
        begins
    }

    /// Whether all vCPUs have to wait.
    pub(super) fn is_stalled(&self) -> bool {
        self.stalled.load(Ordering::SeqCst)
    }

    /// Waits like the others do, who have found no room.
    pub(super) fn wait_with_all(&self, attention: impl Fn() -> bool) {
        let state = lock(&self.state);
        if state.stall.is_some() && !attention() {
            drop(self.sleep(state, STALL_WAIT));
        }
    }

    fn sleep<'a>(&self, state: MutexGuard<'a, State>, time: Duration) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0
    }

    /// There is something else to do for vCPUs that wait.
    pub(super) fn interrupt(&self) {
        drop(lock(&self.state));
        self.changed.notify_all();
    }

    // --- for who makes room ---

    /// There is room again.
    pub fn made(&self) {
        if !self.wanted.swap(false, Ordering::SeqCst) {
            return;
        }
        let mut state = lock(&self.state);
        state.since = None;
        self.end_stall(&mut state);
        drop(state);
        self.changed.notify_all();
    }

    /// Whether nobody takes what was written, so that no room can be made.
    pub fn close(&self, closed: bool) {
        let mut state = lock(&self.state);
        state.closed = closed;
        if !closed {
            self.end_stall(&mut state);
            drop(state);
            self.changed.notify_all();
        }
    }

    fn end_stall(&self, state: &mut State) {
        if let Some(begun) = state.stall.take() {
            self.stalled.store(false, Ordering::SeqCst);
            state.stalls.push(Stall { begun, time: begun.elapsed() });
        }
    }

    /// For how long vCPUs have waited since room was made last; `None` when none does.
    #[must_use]
    pub fn wanted_for(&self) -> Option<Duration> {
        if !self.wanted.load(Ordering::SeqCst) {
            return None;
        }
        let (since, last) = lock(&self.state).since?;
        (last.elapsed() < AWAY).then(|| since.elapsed())
    }

    /// What stalls have ended since the last time.
    #[must_use]
    pub fn stalls(&self) -> Vec<Stall> {
        std::mem::take(&mut lock(&self.state).stalls)
    }

    /// For how long each vCPU has waited in all.
    #[must_use]
    pub fn waited(&self) -> Vec<Duration> {
        lock(&self.state).waited.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn never() -> bool {
        false
    }

    /// Lets vCPU 0 wait until that has some effect.
    fn wait_until(room: &Room, done: impl Fn() -> bool) {
        while !done() {
            room.wait(0, never);
        }
    }

    // A guest whose other CPUs run on sees one that hangs: watchdogs cry, or kill it.
    #[test]
    fn all_wait_where_nobody_takes_anything() {
        let room = Room::new(2);
        room.close(true);
        let begun = Instant::now();
        let begins = (0..).find(|_| room.wait(0, never));
        assert!(begins.is_some() && begun.elapsed() >= PATIENCE && room.is_stalled());
        assert!(!room.wait(0, never), "once is enough");
        room.wait_with_all(never);
        assert_eq!(room.stalls(), []);
        room.close(false);
        assert!(!room.is_stalled());
        let [stall] = room.stalls()[..] else { panic!() };
        assert!(stall.begun >= begun + PATIENCE && stall.time > Duration::ZERO);
        let [first, second] = room.waited()[..] else { panic!() };
        assert!(first > Duration::ZERO && second == Duration::ZERO);
    }

    // Where room is made all the time the others run on, however long one waits in all: it is
    // they who may have what is missing.
    #[test]
    fn who_is_served_does_not_stop_others() {
        let room = Room::new(1);
        let begun = Instant::now();
        while begun.elapsed() < 2 * PATIENCE {
            assert!(!room.wait(0, never));
            room.made();
        }
        room.close(true);
        assert!(!room.wait(0, never));
        room.made();
        assert!(!room.is_stalled() && room.wanted_for().is_none());
        room.close(false);
        // Nor where a reader is slow to make room that it could make.
        let begun = Instant::now();
        wait_until(&room, || begun.elapsed() > 2 * PATIENCE);
        assert!(!room.is_stalled() && room.wanted_for().is_none_or(|time| time > PATIENCE));
    }

    // A pause waits for vCPUs, and the guest's room may never come.
    #[test]
    fn whoever_is_wanted_elsewhere_does_not_wait() {
        let room = Room::new(1);
        assert!(!room.wait(0, || true));
        assert_eq!((room.waited(), room.wanted_for()), (vec![Duration::ZERO], None));
        room.close(true);
        wait_until(&room, || room.is_stalled());
        let wanted = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !wanted.load(Ordering::SeqCst) {
                    room.wait_with_all(|| wanted.load(Ordering::SeqCst));
                }
            });
            wanted.store(true, Ordering::SeqCst);
            room.interrupt();
        });
        // What was long ago is no wait of now.
        let mut state = lock(&room.state);
        let past = Instant::now().checked_sub(2 * AWAY).unwrap();
        state.since = Some((past, past));
        state.stall = None;
        drop(state);
        assert_eq!(room.wanted_for(), None);
        assert!(!room.wait(0, never));
    }
}
