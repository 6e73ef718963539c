//! The run state that vCPU threads and the controller share.
//!
//! A vCPU thread runs guest code only after [`Control::checkpoint`] let it, and comes back there
//! when it is kicked. Whoever wants vCPUs to stop changes the state, kicks, and waits. No thread
//! ever polls; the wait for vCPUs kicks again at intervals, so that it depends on no single signal.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::lock::lock;
use super::signal::Thread;
use super::{Event, ExitReason, MachineError, Room};

/// How long vCPUs are given to stop. Far above what any needs, even emulated.
pub(super) const STOP_LIMIT: Duration = Duration::from_secs(10);
/// When vCPUs that have not stopped are kicked again.
const KICK_AGAIN: Duration = Duration::from_millis(20);

/// What a vCPU thread is to do at a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Go {
    /// Enter the guest.
    Run,
    /// End the thread.
    End,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The thread does not exist yet.
    New,
    /// In guest mode, or on the way in or out.
    Running(Thread),
    /// Waiting at a checkpoint, nothing pending.
    Parked(Thread),
    /// The thread has ended as asked.
    Ended,
    /// The thread has ended otherwise.
    Died,
}

struct VcpuState {
    phase: Phase,
    /// Parked on an event that the controller has not dealt with.
    held: bool,
}

struct State {
    vcpus: Vec<VcpuState>,
    pausing: bool,
    stopping: bool,
    exited: bool,
    /// Addresses of armed traps. Only changed while all vCPUs are stopped.
    traps: BTreeSet<u64>,
    /// The watched register has not been written yet.
    watching: bool,
    /// The controller was woken, and has not seen it yet.
    woken: bool,
    events: Sender<Event>,
}

/// See the module.
pub(super) struct Control {
    state: Mutex<State>,
    /// A vCPU parked or ended.
    stopped: Condvar,
    /// A vCPU may run, or must end.
    resumed: Condvar,
    /// Some vCPU should look at the state: a copy of it that costs nothing to read.
    attention: AtomicBool,
    room: Arc<Room>,
    /// How long vCPUs are given to stop.
    limit: Duration,
}

impl State {
    fn may_run(&self, id: usize) -> bool {
        !self.pausing && !self.exited && !self.vcpus[id].held
    }

    fn kick_running(&self) {
        for vcpu in &self.vcpus {
            if let Phase::Running(thread) = vcpu.phase {
                thread.kick();
            }
        }
    }

    fn running(&self) -> Vec<usize> {
        let running = |id: &usize| matches!(self.vcpus[*id].phase, Phase::Running(_));
        (0..self.vcpus.len()).filter(running).collect()
    }

    fn send(&self, event: Event) {
        // Without a receiver the machine is being dropped, and nobody is left to tell.
        let _ = self.events.send(event);
    }
}

impl Control {
    pub(super) fn new(
        vcpus: usize,
        watching: bool,
        events: Sender<Event>,
        limit: Duration,
    ) -> Control {
        let room = Arc::new(Room::new(vcpus));
        let vcpus = (0..vcpus).map(|_| VcpuState { phase: Phase::New, held: false }).collect();
        let state = State {
            vcpus,
            pausing: false,
            stopping: false,
            exited: false,
            traps: BTreeSet::new(),
            watching,
            woken: false,
            events,
        };
        Control {
            state: Mutex::new(state),
            stopped: Condvar::new(),
            resumed: Condvar::new(),
            attention: AtomicBool::new(false),
            room,
            limit,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn update_attention(&self, state: &State) {
        let attention = state.pausing || state.stopping || state.exited;
        self.attention.store(attention, Ordering::SeqCst);
        if attention {
            self.room.interrupt();
        }
    }

    // --- for vCPU threads ---

    /// Whether [`Control::checkpoint`] must be visited before the guest is entered again.
    pub(super) fn attention(&self) -> bool {
        self.attention.load(Ordering::SeqCst)
    }

    /// Makes the calling thread the one of vCPU `id`, until the guard is dropped.
    pub(super) fn register(&self, id: usize) -> Registration<'_> {
        self.state().vcpus[id].phase = Phase::Running(Thread::current());
        Registration { control: self, id, finished: false }
    }

    /// Waits until vCPU `id` may run. Its I/O must be complete and nobody must hold its lock.
    pub(super) fn checkpoint(&self, id: usize) -> Go {
        let thread = Thread::current();
        let mut state = self.state();
        loop {
            if state.stopping {
                return Go::End;
            }
            if state.may_run(id) {
                state.vcpus[id].phase = Phase::Running(thread);
                return Go::Run;
            }
            if state.vcpus[id].phase != Phase::Parked(thread) {
                state.vcpus[id].phase = Phase::Parked(thread);
                self.stopped.notify_all();
            }
            state = wait(&self.resumed, state);
        }
    }

    /// Holds vCPU `id` at its next checkpoint until it is released, and says so.
    pub(super) fn hold(&self, id: usize, event: Event) {
        let mut state = self.state();
        state.vcpus[id].held = true;
        state.send(event);
    }

    /// Whether a trap is armed at this address.
    pub(super) fn is_armed(&self, address: u64) -> bool {
        self.state().traps.contains(&address)
    }

    /// The watched register is to be seen once more.
    pub(super) fn begin_watch(&self) {
        self.state().watching = true;
    }

    /// Whether the caller is the first to see the watched register written.
    pub(super) fn take_watch(&self) -> bool {
        std::mem::take(&mut self.state().watching)
    }

    /// Lets no vCPU run any more. Whether the caller is the first to say so, and so the one to
    /// [`Control::announce`].
    pub(super) fn exit(&self) -> bool {
        let mut state = self.state();
        if std::mem::replace(&mut state.exited, true) {
            return false;
        }
        self.update_attention(&state);
        state.kick_running();
        true
    }

    /// Tells the controller why the guest is gone.
    pub(super) fn announce(&self, reason: ExitReason) {
        self.state().send(Event::Exit(reason));
    }

    /// What vCPUs wait for.
    pub(super) fn room(&self) -> &Arc<Room> {
        &self.room
    }

    /// Lets all that are in the guest look at everything.
    pub(super) fn kick(&self) {
        self.state().kick_running();
    }

    // --- for the controller ---

    /// Once for any number of calls, until the controller has [`Control::awake`].
    pub(super) fn wake(&self) {
        let mut state = self.state();
        if !std::mem::replace(&mut state.woken, true) {
            state.send(Event::Wake);
        }
    }

    /// The controller looks at everything from now on.
    pub(super) fn awake(&self) {
        self.state().woken = false;
    }

    /// Stops all vCPUs.
    pub(super) fn pause(&self) -> Result<(), MachineError> {
        let mut state = self.state();
        if state.pausing {
            return Err(MachineError::AlreadyPaused);
        }
        state.pausing = true;
        self.update_attention(&state);
        let (mut state, running) = self.wait_stopped(state);
        let died = state.vcpus.iter().position(|vcpu| vcpu.phase == Phase::Died);
        let error = match died {
            Some(id) => MachineError::VcpuDied(id),
            None if running.is_empty() => return Ok(()),
            None => MachineError::PauseTimeout { vcpus: running, seconds: self.limit.as_secs() },
        };
        self.unpause(&mut state);
        Err(error)
    }

    pub(super) fn resume(&self) {
        self.unpause(&mut self.state());
    }

    fn unpause(&self, state: &mut State) {
        state.pausing = false;
        self.update_attention(state);
        self.resumed.notify_all();
    }

    /// Lets a vCPU that is parked on an event go on, now or when the current pause is over.
    pub(super) fn release(&self, id: usize) -> Result<(), MachineError> {
        let mut state = self.state();
        let vcpu = state.vcpus.get_mut(id).ok_or(MachineError::NoVcpu(id))?;
        if !std::mem::take(&mut vcpu.held) {
            return Err(MachineError::NotParked(id));
        }
        self.resumed.notify_all();
        Ok(())
    }

    /// Arms or disarms a trap; all vCPUs must be stopped. Whether that changed anything.
    pub(super) fn set_trap(&self, address: u64, armed: bool) -> bool {
        let traps = &mut self.state().traps;
        if armed { traps.insert(address) } else { traps.remove(&address) }
    }

    /// Ends all vCPU threads. Those that do not end in time are returned.
    pub(super) fn stop(&self) -> Vec<usize> {
        let mut state = self.state();
        state.stopping = true;
        self.update_attention(&state);
        self.resumed.notify_all();
        let limit = Instant::now() + self.limit;
        let left = |state: &State| {
            let alive = |v: &VcpuState| matches!(v.phase, Phase::Running(_) | Phase::Parked(_));
            let ids = (0..state.vcpus.len()).filter(|id| alive(&state.vcpus[*id]));
            ids.collect::<Vec<_>>()
        };
        while !left(&state).is_empty() && Instant::now() < limit {
            state.kick_running();
            state = wait_for(&self.stopped, state, KICK_AGAIN);
        }
        left(&state)
    }

    /// Kicks running vCPUs until none is left, one has died, or the time is up; returns those left.
    fn wait_stopped<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
    ) -> (MutexGuard<'a, State>, Vec<usize>) {
        let limit = Instant::now() + self.limit;
        state.kick_running();
        let mut kick = Instant::now() + KICK_AGAIN;
        loop {
            let running = state.running();
            let died = state.vcpus.iter().any(|vcpu| vcpu.phase == Phase::Died);
            let now = Instant::now();
            if running.is_empty() || died || now >= limit {
                return (state, running);
            }
            if now >= kick {
                state.kick_running();
                kick = now + KICK_AGAIN;
            }
            state = wait_for(&self.stopped, state, kick.saturating_duration_since(now));
        }
    }
}

/// The calling thread is a vCPU's; see [`Control::register`].
pub(super) struct Registration<'a> {
    control: &'a Control,
    id: usize,
    finished: bool,
}

impl Registration<'_> {
    /// The thread ends because it was told to.
    pub(super) fn finish(mut self) {
        self.finished = true;
    }
}

impl Drop for Registration<'_> {
    fn drop(&mut self) {
        let phase = if self.finished { Phase::Ended } else { Phase::Died };
        // From here on nobody kicks this thread.
        self.control.state().vcpus[self.id].phase = phase;
        if !self.finished && self.control.exit() {
            let what = format!("the thread of vCPU {} died", self.id);
            self.control.announce(ExitReason::InternalError(what));
        }
        self.control.stopped.notify_all();
    }
}

fn wait<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condition.wait(guard).unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn wait_for<'a, T>(
    condition: &Condvar,
    guard: MutexGuard<'a, T>,
    time: Duration,
) -> MutexGuard<'a, T> {
    condition.wait_timeout(guard, time).unwrap_or_else(std::sync::PoisonError::into_inner).0
}

#[cfg(test)]
#[path = "control_tests.rs"]
mod tests;
