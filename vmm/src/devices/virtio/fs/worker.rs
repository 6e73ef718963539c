//! Moves messages when the event loop calls it. It waits neither for the server nor for a pause.
//!
//! Each request gets a unique number, which replaces the guest's. So an answer finds exactly its
//! request, whatever number the guest has chosen, and an answer that arrives after a reset finds
//! none.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use event_manager::{EventSet, Events as Watched};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::GuestMemoryMmap;
use vmtrace_share::message::{ANSWER, Answer, MAX, REQUEST, Request, is_silent, opcode};
use vmtrace_system::say;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::{QUEUE_SIZE, Share};
use crate::devices::Gate;
use crate::devices::virtio::buffers::{Buffers, Chain};
use crate::devices::virtio::{Activation, Broken, Interrupt};
use crate::events::{Bell, EventOps, Events, MutEventSubscriber, watch};

/// The queue of high-priority requests, which comes first, and that of other requests (section 5.11.2).
pub(super) const QUEUES: usize = 2;

/// Messages moved before others have their turn.
const ROUNDS: usize = 64;

const BELL: u32 = 0;
const SERVER: u32 = 1;

/// What the device and the event loop share.
pub(super) struct Shared {
    /// Rung by the guest.
    pub(super) bell: Bell,
    core: Mutex<Core>,
}

/// Everything that is under the lock.
struct Core {
    tag: String,
    /// `None` when it is gone.
    server: Option<UnixStream>,
    /// While there is a driver.
    driver: Option<Driver>,
    /// The message that is on its way to the server, and how much of it has gone.
    sending: Vec<u8>,
    sent: usize,
    /// What came of the next answer.
    heard: Vec<u8>,
    /// The number of the next request.
    next: u64,
    /// The server has been told to begin, and not to forget everything.
    begun: bool,
}

struct Driver {
    memory: GuestMemoryMmap,
    queues: [Queue; QUEUES],
    interrupt: Arc<Interrupt>,
    gate: Arc<Gate>,
    /// Requests that have no answer yet, by our numbers.
    asked: HashMap<u64, Asked>,
}

/// A request that the server has.
struct Asked {
    queue: usize,
    head: u16,
    /// What the guest calls it.
    unique: u64,
    to_guest: Buffers,
}

impl Shared {
    pub(super) fn new(share: Share) -> io::Result<Shared> {
        share.server.set_nonblocking(true)?;
        let core = Core {
            tag: share.tag,
            server: Some(share.server),
            driver: None,
            sending: Vec::new(),
            sent: 0,
            heard: Vec::new(),
            next: 1,
            begun: false,
        };
        Ok(Shared { bell: Bell::new()?, core: Mutex::new(core) })
    }

    fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn activate(&self, active: Activation) -> Result<(), Broken> {
        let mut queues = active.queues.into_iter().flatten();
        let (Some(urgent), Some(requests)) = (queues.next(), queues.next()) else {
            return Err(Broken);
        };
        self.lock().driver = Some(Driver {
            memory: active.memory,
            queues: [urgent, requests],
            interrupt: active.interrupt,
            gate: active.gate,
            asked: HashMap::new(),
        });
        self.bell.ring();
        Ok(())
    }

    /// The driver is gone, and its files are closed.
    pub(super) fn reset(&self) {
        let mut core = self.lock();
        core.driver = None;
        if std::mem::take(&mut core.begun) {
            let mut header = Request::new_zeroed();
            header.length = u32::try_from(REQUEST).unwrap_or_default().into();
            header.opcode = opcode::DESTROY.into();
            core.sending.extend_from_slice(header.as_bytes());
        }
        drop(core);
        self.bell.ring();
    }

    /// The server may end.
    pub(super) fn end(&self) {
        let mut core = self.lock();
        core.driver = None;
        if let Some(server) = core.server.take() {
            let _ = server.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Moves what there is to be moved, within bounds; whether there may be more.
    pub(super) fn turn(&self) -> bool {
        let mut core = self.lock();
        // Guest memory is not touched during a pause. The bell rings when it is over.
        let gate = core.driver.as_ref().map(|driver| Arc::clone(&driver.gate));
        let pass = gate.as_ref().map(|gate| gate.enter(&self.bell));
        if matches!(pass, Some(None)) {
            return false;
        }
        for _ in 0..ROUNDS {
            match core.step() {
                Ok(true) => {}
                Ok(false) => return false,
                Err(Broken) => {
                    if let Some(driver) = core.driver.take() {
                        driver.interrupt.needs_reset();
                    }
                }
            }
        }
        true
    }
}

/// The device as a subscriber of an event loop.
pub(super) struct Mover {
    shared: Arc<Shared>,
    /// The same socket: it must not be closed before the loop has let go of it.
    server: UnixStream,
}

impl Mover {
    pub(super) fn new(shared: &Arc<Shared>) -> io::Result<Mover> {
        let core = shared.lock();
        let server = core.server.as_ref().ok_or(ErrorKind::NotConnected)?.try_clone()?;
        drop(core);
        Ok(Mover { shared: Arc::clone(shared), server })
    }
}

impl MutEventSubscriber for Mover {
    fn process(&mut self, _: Events, _: &mut EventOps<'_>) {
        if self.shared.turn() {
            // Others have their turn first.
            self.shared.bell.ring();
        }
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        watch(ops, self.shared.bell.events(BELL));
        // Edges, since there may be something while nothing can be done about it: in a pause.
        let both = EventSet::IN | EventSet::OUT | EventSet::EDGE_TRIGGERED;
        watch(ops, Watched::with_data(&self.server.as_fd(), SERVER, both));
        // What was there before.
        self.shared.bell.ring();
    }
}

impl Core {
    /// Whether anything was done.
    fn step(&mut self) -> Result<bool, Broken> {
        let sent = self.send();
        let heard = self.hear()?;
        let taken = self.sending.is_empty() && self.take()?;
        Ok(sent | heard | taken)
    }

    /// The server's socket does not do what it should.
    fn lose(&mut self, why: &dyn std::fmt::Display) {
        if self.server.take().is_some() {
            say!(
                "vmtrace: share {}: {why}: from now on the guest gets errors (EIO) there",
                self.tag
            );
        }
    }

    fn send(&mut self) -> bool {
        let Some(mut server) = self.server.as_ref() else {
            self.sending.clear();
            return false;
        };
        let rest = self.sending.get(self.sent..).unwrap_or_default();
        if rest.is_empty() {
            return false;
        }
        match server.write(rest) {
            Ok(count) => self.sent += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
            Err(error) => self.lose(&error),
        }
        if self.sent >= self.sending.len() || self.server.is_none() {
            (self.sent, self.sending) = (0, Vec::new());
        }
        true
    }

    /// Takes what the server says, up to the end of one answer.
    fn hear(&mut self) -> Result<bool, Broken> {
        let Some(mut server) = self.server.as_ref() else { return self.refuse_all() };
        let length = self.heard.len();
        let wanted = match Answer::read_from_prefix(&self.heard) {
            Ok((answer, _)) => usize::try_from(answer.length.get()).unwrap_or(usize::MAX),
            Err(_) => ANSWER,
        };
        if !(ANSWER..=ANSWER + MAX).contains(&wanted) {
            self.lose(&"its server has sent something that is not an answer");
            return Ok(true);
        }
        if length < wanted {
            self.heard.resize(wanted, 0);
            let read = server.read(&mut self.heard[length..]);
            self.heard.truncate(length + read.as_ref().copied().unwrap_or(0));
            match read {
                Ok(0) => self.lose(&"its server has ended"),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) => self.lose(&error),
            }
            return Ok(true);
        }
        let mut answer = std::mem::take(&mut self.heard);
        let Ok((mut header, _)) = Answer::read_from_prefix(&answer) else { return Ok(true) };
        let Some(driver) = &mut self.driver else { return Ok(true) };
        // None: of a driver that is gone.
        if let Some(asked) = driver.asked.remove(&header.unique.get()) {
            header.unique = asked.unique.into();
            answer[..ANSWER].copy_from_slice(header.as_bytes());
            driver.answer(asked, &answer)?;
        }
        Ok(true)
    }

    /// Nobody answers any more.
    fn refuse_all(&mut self) -> Result<bool, Broken> {
        let Some(driver) = &mut self.driver else { return Ok(false) };
        let all = std::mem::take(&mut driver.asked);
        let any = !all.is_empty();
        for asked in all.into_values() {
            let answer = Answer::bare(asked.unique, libc::EIO);
            driver.answer(asked, answer.as_bytes())?;
        }
        Ok(any)
    }

    /// Takes a request of the guest's, if there is one.
    fn take(&mut self) -> Result<bool, Broken> {
        let Some(driver) = &mut self.driver else { return Ok(false) };
        if driver.asked.len() >= usize::from(QUEUE_SIZE) * QUEUES {
            return Err(Broken);
        }
        let mut found = None;
        for (index, queue) in driver.queues.iter_mut().enumerate() {
            if let Some(chain) = next(queue, &driver.memory)? {
                found = Some((index, chain));
                break;
            }
        }
        let Some((queue, Chain { head, mut from_guest, to_guest })) = found else {
            return Ok(false);
        };
        let length = usize::try_from(from_guest.length).unwrap_or(usize::MAX);
        let mut message = vec![0; length.min(MAX)];
        let read = from_guest.read(&driver.memory, &mut message);
        let header = Request::read_from_prefix(&message).ok().map(|(header, _)| header);
        let unique = header.map_or(0, |header| header.unique.get());
        let mut asked = Asked { queue, head, unique, to_guest };
        let Some(mut header) = header.filter(|header| {
            read.is_ok() && u64::from(header.length.get()) == message.len() as u64 && length <= MAX
        }) else {
            driver.answer(asked, Answer::bare(unique, libc::EINVAL).as_bytes())?;
            return Ok(true);
        };
        let kind = header.opcode.get();
        let silent = is_silent(kind);
        if self.server.is_none() {
            let answer = Answer::bare(unique, libc::EIO);
            driver.answer(asked, if silent { &[] } else { answer.as_bytes() })?;
            return Ok(true);
        }
        self.begun = (self.begun || kind == opcode::INIT) && kind != opcode::DESTROY;
        header.unique = self.next.into();
        message[..REQUEST].copy_from_slice(header.as_bytes());
        self.sending = message;
        if silent {
            asked.to_guest = Buffers::default();
            driver.answer(asked, &[])?;
        } else {
            driver.asked.insert(self.next, asked);
        }
        self.next += 1;
        Ok(true)
    }
}

/// The next chain of a queue.
fn next(queue: &mut Queue, memory: &GuestMemoryMmap) -> Result<Option<Chain>, Broken> {
    loop {
        queue.disable_notification(memory)?;
        if let Some(chain) = queue.iter(memory)?.next() {
            return Chain::new(chain, QUEUE_SIZE).map(Some);
        }
        // True if something came after all.
        if !queue.enable_notification(memory)? {
            return Ok(None);
        }
    }
}

impl Driver {
    /// Gives a request back, with as much of the answer as there is room for: all, or an error.
    fn answer(&mut self, asked: Asked, answer: &[u8]) -> Result<(), Broken> {
        let Asked { queue, head, unique, mut to_guest } = asked;
        let fits = answer.len() as u64 <= to_guest.length;
        let error = Answer::bare(unique, libc::EIO);
        let answer = if fits { answer } else { error.as_bytes() };
        let mut written = 0;
        if answer.len() as u64 <= to_guest.length {
            to_guest.write(&self.memory, answer).map_err(|_| Broken)?;
            written = u32::try_from(answer.len()).unwrap_or_default();
        }
        let queue = self.queues.get_mut(queue).ok_or(Broken)?;
        queue.add_used(&self.memory, head, written)?;
        if queue.needs_notification(&self.memory)? {
            self.interrupt.used_buffers();
        }
        Ok(())
    }
}
