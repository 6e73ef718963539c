//! Moves the bytes when the event loop calls it.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use event_manager::{EventManager, SubscriberOps};

use super::muxer::{Muxer, Reach};
use super::rings::Rings;
use super::watch::{BELL, TIMER, Token};
use super::{Limits, VsockError};
use crate::devices::Gate;
use crate::devices::virtio::Broken;
use crate::events::{
    Bell, EventOps, EventSet, Events, MutEventSubscriber, Subscriber, Timer, manager, watch,
};
use vmtrace_system::private_socket::PrivateListener;

/// Packets moved in one direction before it is the other's turn.
const BATCH: usize = 64;
/// Batches before others may have the lock.
const ROUNDS: usize = 16;

/// What the device, the event loop and the host's side share.
pub(super) struct Shared {
    /// Rung by the guest through its queues, and by this process.
    pub(super) bell: Bell,
    core: Mutex<Core>,
}

/// Everything that is under the lock.
pub(super) struct Core {
    pub(super) muxer: Muxer,
    /// While there is a driver.
    pub(super) driver: Option<Driver>,
    /// There has been a driver.
    pub(super) driver_seen: bool,
    /// The device is gone.
    pub(super) ended: bool,
}

pub(super) struct Driver {
    pub(super) rings: Rings,
    pub(super) gate: Arc<Gate>,
}

impl Shared {
    pub(super) fn new(
        cid: u32,
        listener: Option<PrivateListener>,
        reach: Reach,
        limits: Limits,
    ) -> Result<Shared, VsockError> {
        let bell = Bell::new().map_err(system("make an event descriptor"))?;
        let muxer = Muxer::new(cid, listener, reach, limits);
        let core = Mutex::new(Core { muxer, driver: None, driver_seen: false, ended: false });
        Ok(Shared { bell, core })
    }

    /// The lock. The event loop holds it while it touches the queues, but never while it waits.
    pub(super) fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) fn system(what: &'static str) -> impl Fn(io::Error) -> VsockError {
    move |source| VsockError::System { what, source }
}

/// The device as a subscriber of an event loop.
pub(super) struct Mover {
    shared: Arc<Shared>,
    timer: Timer,
    /// What has happened and was not seen to yet, since the machine is paused.
    happened: Vec<(Token, EventSet)>,
}

impl Mover {
    pub(super) fn new(shared: Arc<Shared>) -> Result<Mover, VsockError> {
        let timer = Timer::new().map_err(system("make a timer"))?;
        Ok(Mover { shared, timer, happened: Vec::new() })
    }
}

impl MutEventSubscriber for Mover {
    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        let mut core = self.shared.lock();
        if let Some(token) = core.muxer.watches.token(events.data()) {
            self.happened.push((token, events.event_set()));
        }
        if core.ended {
            return;
        }
        // Guest memory is not touched during a pause, and nobody shall wait for the lock, or the
        // loop, until that is over.
        let gate = core.driver.as_ref().map(|driver| Arc::clone(&driver.gate));
        let pass = gate.as_ref().map(|gate| gate.enter(&self.shared.bell));
        if matches!(pass, Some(None)) {
            return;
        }
        if core.work(self.happened.drain(..)) {
            // Others have their turn first.
            self.shared.bell.ring();
        }
        for token in core.muxer.watches.apply(ops) {
            core.muxer.cannot_watch(token);
            self.shared.bell.ring();
        }
        self.timer.set(core.muxer.next_deadline());
        let calls = std::mem::take(&mut core.muxer.calls);
        drop(pass);
        drop(core);
        for (service, incoming) in calls {
            (service.lock().unwrap_or_else(PoisonError::into_inner))(incoming);
        }
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        watch(ops, self.shared.bell.events(BELL));
        watch(ops, self.timer.events(TIMER));
        // What was there before.
        self.shared.bell.ring();
    }
}

/// A loop of the device's own, for those who give it its turns themselves: tests, benchmarks,
/// fuzzers.
pub struct Worker {
    shared: Arc<Shared>,
    manager: EventManager<Subscriber>,
}

impl Worker {
    pub(super) fn new(shared: Arc<Shared>) -> Result<Worker, VsockError> {
        let mut manager = manager().map_err(system("wait for events"))?;
        manager.add_subscriber(Box::new(Mover::new(Arc::clone(&shared))?));
        Ok(Worker { shared, manager })
    }

    /// Waits for something to do, at most so long, and does it; false when the device is gone.
    pub fn turn(&mut self, limit: Option<Duration>) -> bool {
        if self.shared.lock().ended {
            return false;
        }
        // Rounded up: too early would be for nothing.
        let limit = limit.map_or(-1, |limit| {
            i32::try_from(limit.as_micros().div_ceil(1000)).unwrap_or(i32::MAX)
        });
        if let Err(error) = self.manager.run_with_timeout(limit) {
            log::error!("vsock: {error}");
        }
        !self.shared.lock().ended
    }
}

impl Core {
    /// Sees to events and to the queues; whether there is more to do at once.
    fn work(&mut self, happened: impl Iterator<Item = (Token, EventSet)>) -> bool {
        for (token, events) in happened {
            self.handle(token, events);
        }
        self.muxer.check_deadlines(Instant::now());
        let unfinished = match &mut self.driver {
            None => false,
            Some(driver) => match driver.rings.exchange(&mut self.muxer) {
                Ok(unfinished) => unfinished,
                Err(Broken) => {
                    driver.rings.needs_reset();
                    self.driver = None;
                    self.muxer.forget_all();
                    false
                }
            },
        };
        if !self.muxer.is_full() {
            self.muxer.clients.resume();
        }
        unfinished
    }

    fn handle(&mut self, token: Token, events: EventSet) {
        match token {
            Token::Bell | Token::Timer => {}
            Token::Listener => {
                let room = self.muxer.limits.connections.saturating_sub(self.muxer.load());
                let deadline = self.muxer.clients.accept(room);
                self.muxer.note_deadline(deadline);
            }
            Token::Client(id) => {
                if let Some(said) = self.muxer.clients.read(id)
                    && self.driver.is_some()
                {
                    self.muxer.on_said(said);
                }
            }
            Token::Rest(id) => self.muxer.on_rest(id),
            Token::Connection(key) => self.muxer.on_connection(key, events),
        }
    }
}

impl Rings {
    /// Moves packets in both directions; whether there are more.
    fn exchange(&mut self, muxer: &mut Muxer) -> Result<bool, Broken> {
        for _ in 0..ROUNDS {
            let more = self.take_packets(muxer)?;
            let more = self.give_packets(muxer)? || more && muxer.takes_packets();
            if !more {
                self.tell()?;
                return Ok(false);
            }
        }
        self.tell()?;
        Ok(true)
    }

    /// Whether there may be more.
    fn take_packets(&mut self, muxer: &mut Muxer) -> Result<bool, Broken> {
        for _ in 0..BATCH {
            if !muxer.takes_packets() {
                return Ok(true);
            }
            if !self.receive(|header, payload| muxer.take(&header, payload))?
                && !self.await_packets()?
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether more can be given now.
    fn give_packets(&mut self, muxer: &mut Muxer) -> Result<bool, Broken> {
        for _ in 0..BATCH {
            if !muxer.has_packets() {
                return Ok(false);
            }
            let Some(mut slot) = self.slot()? else {
                if self.await_slots()? {
                    continue;
                }
                return Ok(false);
            };
            let head = slot.head;
            match muxer.fill(&mut slot) {
                Some(bytes) => self.use_slot(head, bytes)?,
                None => self.put_back(),
            }
        }
        Ok(true)
    }
}
