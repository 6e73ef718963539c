//! The thread that moves the bytes.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::muxer::{Muxer, Reach};
use super::rings::Rings;
use super::token::Token;
use super::{Limits, VsockError};
use crate::devices::Gate;
use crate::devices::virtio::Broken;
use vmtrace_system::private_socket::PrivateListener;

/// Events taken at a time.
const EVENTS: usize = 256;
/// Packets moved in one direction before it is the other's turn.
const BATCH: usize = 64;
/// Batches before others may have the lock.
const ROUNDS: usize = 16;

/// What the device, its thread and the host's side share.
pub(super) struct Shared {
    epoll: Arc<Epoll>,
    /// Rung by the guest through its queues, and by this process.
    pub(super) bell: EventFd,
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
        let system = |what| move |source: io::Error| VsockError::System { what, source };
        let epoll = Arc::new(Epoll::new().map_err(system("wait for events"))?);
        let bell = EventFd::new(EFD_NONBLOCK).map_err(system("make an event descriptor"))?;
        // By its edges: every ring is one, and nobody ever has to read it.
        let bell_events = EventSet::IN | EventSet::EDGE_TRIGGERED;
        let event = EpollEvent::new(bell_events, Token::Bell.pack());
        epoll
            .ctl(ControlOperation::Add, bell.as_raw_fd(), event)
            .map_err(system("wait for events"))?;
        let muxer = Muxer::new(cid, listener, reach, limits, Arc::clone(&epoll))
            .map_err(system("wait for clients"))?;
        let core = Mutex::new(Core { muxer, driver: None, driver_seen: false, ended: false });
        Ok(Shared { epoll, bell, core })
    }

    /// The lock. The thread holds it while it touches the queues, but never while it waits.
    pub(super) fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the thread look.
    pub(super) fn ring(&self) {
        // Fails only when it has been rung 2^64 times.
        let _ = self.bell.write(1);
    }
}

/// What the device's thread does, for those who do it themselves: tests, benchmarks, fuzzers.
pub struct Worker {
    shared: Arc<Shared>,
    events: Vec<EpollEvent>,
    /// There was more to do than one turn should.
    unfinished: bool,
}

impl Worker {
    pub(super) fn new(shared: Arc<Shared>) -> Worker {
        Worker { shared, events: vec![EpollEvent::default(); EVENTS], unfinished: false }
    }

    /// Runs until the device is gone.
    pub(super) fn run(mut self) {
        // A reader that is gone is an error of its connection, whatever the process makes of the
        // signal.
        let mut signals = SigSet::empty();
        signals.add(Signal::SIGPIPE);
        if let Err(errno) = signals.thread_block() {
            log::warn!("vsock: cannot block SIGPIPE: {errno}");
        }
        while self.turn(None) {}
    }

    /// Waits for something to do, at most so long, and does it; false when the device is gone.
    pub fn turn(&mut self, limit: Option<Duration>) -> bool {
        let count = self.wait(limit);
        let shared = Arc::clone(&self.shared);
        let mut core = shared.lock();
        loop {
            if core.ended {
                return false;
            }
            // Guest memory is not touched during a pause, and nobody shall wait for the lock
            // until that is over.
            let Some(gate) = core.driver.as_ref().map(|driver| Arc::clone(&driver.gate)) else {
                self.unfinished = core.work(&self.events[..count]);
                break;
            };
            if let Some(_pass) = gate.try_enter() {
                self.unfinished = core.work(&self.events[..count]);
                break;
            }
            drop(core);
            gate.wait_open();
            core = shared.lock();
        }
        let calls = std::mem::take(&mut core.muxer.calls);
        drop(core);
        for (service, incoming) in calls {
            (service.lock().unwrap_or_else(PoisonError::into_inner))(incoming);
        }
        true
    }

    /// The number of events.
    fn wait(&mut self, limit: Option<Duration>) -> usize {
        let deadline = self.shared.lock().muxer.next_deadline();
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let timeout = match left.into_iter().chain(limit).min() {
            _ if self.unfinished => 0,
            // Rounded up: too early would be for nothing.
            Some(time) => i32::try_from(time.as_micros().div_ceil(1000)).unwrap_or(i32::MAX),
            None => -1,
        };
        match self.shared.epoll.wait(timeout, &mut self.events) {
            Ok(count) => count,
            Err(error) => {
                if error.kind() != io::ErrorKind::Interrupted {
                    log::error!("vsock: {error}");
                }
                0
            }
        }
    }
}

impl Core {
    /// Sees to events and to the queues; whether there is more to do at once.
    fn work(&mut self, events: &[EpollEvent]) -> bool {
        for event in events {
            self.handle(Token::unpack(event.data()), event.event_set());
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
            Token::Bell => {}
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
