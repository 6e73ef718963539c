//! Accepts connections, reads the first line of each, and passes the connection to its handler.

use super::consumer::Join;
use super::guests::GuestReaders;
use super::request::{Control, LINE_MAX, Origin, Request};
use super::unsent::{Outbox, Unsent};
use crate::events::{
    Bell, EventOps, EventSet, Events, Handle, MutEventSubscriber, Subscription, Timer, watch,
};
use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, SyncSender, TrySendError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use vmtrace_system::private_socket::{PrivateListener, SocketError};

/// A connection that asks for nothing is closed after this time.
const ASK_TIME: Duration = Duration::from_secs(10);
/// How long a long answer may take to be taken.
const ANSWER_TIME: Duration = Duration::from_secs(60);
/// Connections that have not asked yet, of the host and of the guest each.
const MAX_ASKING: usize = 64;
/// How long nobody is accepted after the system had no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// What a command comes to: text for people, or why not.
pub type Answer = Result<String, String>;

/// A command on its way to the controller.
#[derive(Debug)]
pub struct ControlRequest {
    /// What to do.
    pub command: Control,
    /// Who wants to know what it came to.
    pub reply: Reply,
}

/// Who waits for an answer. Dropped without one it says that the trace has ended.
#[derive(Debug)]
pub struct Reply(Option<Waits>);

#[derive(Debug)]
enum Waits {
    /// For a line; what there is no room for is sent from there.
    Connection(UnixStream, Option<Outbox>),
    /// This process itself.
    Here(Sender<Answer>),
}

impl Reply {
    /// To a connection, which takes what there is room for if it does not block.
    #[must_use]
    pub fn to(stream: UnixStream) -> Self {
        Self(Some(Waits::Connection(stream, None)))
    }

    /// To a connection that does not block.
    fn over(stream: UnixStream, outbox: Outbox) -> Self {
        Self(Some(Waits::Connection(stream, Some(outbox))))
    }

    /// To this process itself: the answer is put there.
    pub(crate) fn here() -> (Self, Receiver<Answer>) {
        let (sender, answer) = channel();
        (Self(Some(Waits::Here(sender))), answer)
    }

    /// Nobody waits.
    #[must_use]
    pub fn nobody() -> Self {
        Self(None)
    }

    /// Who waits, and what is to be sent there; for those who can wait until that is taken. `None`: nothing
    /// is left to send.
    pub(super) fn into_parts(mut self, answer: Answer) -> Option<(UnixStream, Vec<u8>)> {
        let stream = match self.0.take()? {
            Waits::Connection(stream, _) => stream,
            Waits::Here(sender) => {
                let _ = sender.send(answer);
                return None;
            }
        };
        Some((stream, format!("{}\n", worded(answer)).into_bytes()))
    }

    /// Answers. This never waits: what the connection has no room for is sent by the event loop.
    pub fn send(mut self, answer: Answer) {
        match self.0.take() {
            None => {}
            Some(Waits::Here(sender)) => {
                let _ = sender.send(answer);
            }
            Some(Waits::Connection(stream, Some(outbox))) => {
                outbox.send(Unsent::new(stream, line(answer)));
            }
            Some(Waits::Connection(mut stream, None)) => {
                // Who does not wait for the answer does not get it.
                let _ = stream.write_all(&line(answer));
            }
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if self.0.is_some() {
            Self(self.0.take()).send(Err(ENDED.into()));
        }
    }
}

const ENDED: &str = "the trace has ended";

/// Connects a client to the agent in the guest, which answers from then on.
pub type PassToAgent = Arc<dyn Fn(UnixStream) + Send + Sync>;

/// Those who deal with requests. The channels are bounded: what does not fit is refused.
#[derive(Clone)]
pub struct Services {
    /// The relay.
    pub joins: SyncSender<Join>,
    /// The controller.
    pub control: SyncSender<ControlRequest>,
    /// Makes the controller look.
    pub wake: Arc<dyn Fn() + Send + Sync>,
    /// The way to the agent, if there is one.
    pub agent: Option<PassToAgent>,
    /// Who in the guest may read.
    pub readers: GuestReaders,
}

impl Services {
    /// Services without an agent, and closed to readers in the guest.
    #[must_use]
    pub fn new(
        joins: SyncSender<Join>,
        control: SyncSender<ControlRequest>,
        wake: Arc<dyn Fn() + Send + Sync>,
    ) -> Self {
        Self { joins, control, wake, agent: None, readers: GuestReaders::default() }
    }

    /// Serves, in this event loop, processes of the host on a unix socket at `path`, for the owner
    /// of this process alone; and whoever the server is given.
    ///
    /// # Errors
    /// When there cannot be a socket.
    pub fn serve(self, events: &Handle, path: Option<&Path>) -> Result<Server, SocketError> {
        let system = |source| SocketError::System {
            path: path.unwrap_or(Path::new("the trace's server")).to_owned(),
            source,
        };
        let listener = path.map(PrivateListener::bind).transpose()?;
        let door = Door {
            bell: Bell::new().map_err(system)?,
            waiting: Arc::default(),
            readers: self.readers,
        };
        let asking = Asking {
            services: self,
            outbox: Outbox::new(door.bell.clone()),
            unsent: HashMap::new(),
            door: door.clone(),
            timer: Timer::new().map_err(system)?,
            listener,
            listening: false,
            listen_again: None,
            askers: HashMap::new(),
            next: FIRST_ASKER,
        };
        let subscription = events.add(Box::new(asking)).map_err(system)?;
        Ok(Server { door, subscription: Some(subscription) })
    }

    /// Has the controller do something; whether it will get to it.
    ///
    /// # Errors
    /// Why it will not.
    pub fn control(&self, command: Control, reply: Reply) -> Result<(), (Reply, &'static str)> {
        match self.control.try_send(ControlRequest { command, reply }) {
            Ok(()) => {
                (self.wake)();
                Ok(())
            }
            Err(TrySendError::Full(request)) => {
                Err((request.reply, "too many commands at once; try again later"))
            }
            Err(TrySendError::Disconnected(request)) => Err((request.reply, ENDED)),
        }
    }

    /// Deals with what somebody has asked for.
    fn serve_line(&self, asker: Asker, heard: Result<(), String>, outbox: &Outbox) {
        let Asker { stream, origin, reads, line, .. } = asker;
        let line = heard.and_then(|()| {
            std::str::from_utf8(&line).map_err(|_| "the first line is not UTF-8".to_owned())
        });
        let asked =
            line.and_then(|line| Request::parse(line, origin).map_err(|error| error.to_string()));
        match asked {
            Err(error) => refuse(&stream, &error),
            Ok(Request::Stream(request)) => {
                if let Err(reason) = reads {
                    return refuse(&stream, reason);
                }
                match self.joins.try_send(Join { stream, request, origin }) {
                    Ok(()) => {}
                    Err(TrySendError::Full(join)) => {
                        refuse(&join.stream, "too many consumers at once; try again later");
                    }
                    Err(TrySendError::Disconnected(join)) => refuse(&join.stream, ENDED),
                }
            }
            Ok(Request::Control(command)) => {
                let reply = Reply::over(stream, outbox.clone());
                if let Err((reply, error)) = self.control(command, reply) {
                    reply.send(Err(error.into()));
                }
            }
            Ok(Request::Agent) => match &self.agent {
                Some(pass) => pass(stream),
                None => refuse(&stream, "this run has no connection to an agent: see --modules"),
            },
        }
    }
}

/// Lets connections in that others have accepted; clones are the same.
#[derive(Clone)]
pub struct Door {
    bell: Bell,
    waiting: Arc<Mutex<Vec<Caller>>>,
    readers: GuestReaders,
}

/// A new connection.
struct Caller {
    stream: UnixStream,
    origin: Origin,
    /// Whether it may read the trace, or why not.
    reads: Result<(), &'static str>,
}

impl Door {
    /// Deals with a new connection of the guest, from its port `guest_port`.
    pub fn take_guest(&self, stream: UnixStream, guest_port: u32) {
        let reads = self.readers.check(guest_port);
        let caller = Caller { stream, origin: Origin::Guest, reads };
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).push(caller);
        self.bell.ring();
    }

    fn waiting(&self) -> Vec<Caller> {
        std::mem::take(&mut self.waiting.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Serves requests. Dropping this lets nobody in any more, and removes the socket.
pub struct Server {
    door: Door,
    subscription: Option<Subscription>,
}

impl Server {
    /// For connections from elsewhere.
    #[must_use]
    pub fn door(&self) -> Door {
        self.door.clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(subscription) = self.subscription.take() {
            subscription.close();
        }
    }
}

const BELL: u32 = 0;
const TIMER: u32 = 1;
const LISTENER: u32 = 2;
const FIRST_ASKER: u32 = 3;

/// A connection that has still to say what it wants.
struct Asker {
    stream: UnixStream,
    origin: Origin,
    reads: Result<(), &'static str>,
    line: Vec<u8>,
    deadline: Instant,
}

/// All of them.
struct Asking {
    services: Services,
    door: Door,
    timer: Timer,
    listener: Option<PrivateListener>,
    listening: bool,
    /// When to listen again.
    listen_again: Option<Instant>,
    askers: HashMap<u32, Asker>,
    /// Answers that were too long, each with when it must have been taken.
    outbox: Outbox,
    unsent: HashMap<u32, (Unsent, Instant)>,
    next: u32,
}

impl Asking {
    fn listen(&mut self, ops: &mut EventOps<'_>, on: bool) {
        let Some(listener) = &self.listener else { return };
        if on != self.listening {
            let events = Events::with_data(listener.listener(), LISTENER, EventSet::IN);
            let done = if on { ops.add(events) } else { ops.remove(events) };
            self.listening = on == done.is_ok();
        }
        let wait = || Instant::now() + ACCEPT_PAUSE;
        self.listen_again = (!self.listening).then(wait);
    }

    fn accept(&mut self, ops: &mut EventOps<'_>) {
        loop {
            let Some(listener) = &self.listener else { return };
            match listener.listener().accept() {
                Ok((stream, _)) => {
                    self.admit(ops, Caller { stream, origin: Origin::Host, reads: Ok(()) });
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    // Out of descriptors, most likely: not a reason to burn a CPU.
                    log::warn!("a connection cannot be accepted: {error}");
                    self.listen(ops, false);
                    return;
                }
            }
        }
    }

    fn admit(&mut self, ops: &mut EventOps<'_>, caller: Caller) {
        let Caller { stream, origin, reads } = caller;
        if self.askers.values().filter(|asker| asker.origin == origin).count() >= MAX_ASKING {
            refuse(&stream, "too many connections at once; try again later");
            return;
        }
        let id = self.next_id();
        let events = Events::with_data(&stream, id, EventSet::IN);
        let admitted = stream.set_nonblocking(true).is_ok() && ops.add(events).is_ok();
        if !admitted || self.is_taken(id) {
            refuse(&stream, "vmtrace has no resources left");
            return;
        }
        let deadline = Instant::now() + ASK_TIME;
        self.askers.insert(id, Asker { stream, origin, reads, line: Vec::new(), deadline });
    }

    fn next_id(&mut self) -> u32 {
        let id = self.next;
        self.next = id.wrapping_add(1).max(FIRST_ASKER);
        id
    }

    fn is_taken(&self, id: u32) -> bool {
        self.askers.contains_key(&id) || self.unsent.contains_key(&id)
    }

    /// Sends the rest of an answer whenever there is room.
    fn post(&mut self, ops: &mut EventOps<'_>, mut unsent: Unsent) {
        let id = self.next_id();
        let events =
            Events::with_data(unsent.stream(), id, EventSet::OUT | EventSet::EDGE_TRIGGERED);
        if self.unsent.len() >= MAX_ASKING || self.is_taken(id) || ops.add(events).is_err() {
            return;
        }
        // What it has taken since is not an edge any more.
        if unsent.send() {
            let _ = ops.remove(Events::empty(unsent.stream()));
        } else {
            self.unsent.insert(id, (unsent, Instant::now() + ANSWER_TIME));
        }
    }

    /// There may be room. `gone`: nobody is there any more.
    fn send(&mut self, ops: &mut EventOps<'_>, id: u32, gone: bool) {
        if self.unsent.get_mut(&id).is_some_and(|(unsent, _)| unsent.send() || gone)
            && let Some((unsent, _)) = self.unsent.remove(&id)
        {
            let _ = ops.remove(Events::empty(unsent.stream()));
        }
    }

    /// Somebody may have asked.
    fn hear(&mut self, ops: &mut EventOps<'_>, id: u32) {
        let Some(asker) = self.askers.get_mut(&id) else { return };
        let line = match asker.read_line() {
            Ok(false) => return,
            Ok(true) => Ok(()),
            Err(error) => Err(error.to_string()),
        };
        self.pass_on(ops, id, line);
    }

    fn pass_on(&mut self, ops: &mut EventOps<'_>, id: u32, heard: Result<(), String>) {
        let Some(asker) = self.askers.remove(&id) else { return };
        let _ = ops.remove(Events::empty(&asker.stream));
        self.services.serve_line(asker, heard, &self.outbox);
    }

    fn check_deadlines(&mut self, ops: &mut EventOps<'_>) {
        let now = Instant::now();
        let late = self.askers.iter().filter(|(_, asker)| asker.deadline <= now);
        let late: Vec<_> = late.map(|(id, _)| *id).collect();
        for id in late {
            self.pass_on(ops, id, Err("no request came in time".into()));
        }
        if self.listen_again.is_some_and(|again| again <= now) {
            self.listen(ops, true);
        }
        let slow = self.unsent.iter().filter(|(_, (_, deadline))| *deadline <= now);
        let slow: Vec<u32> = slow.map(|(id, _)| *id).collect();
        slow.into_iter().for_each(|id| self.send(ops, id, true));
        let deadlines = self.askers.values().map(|asker| asker.deadline);
        let deadlines = deadlines.chain(self.unsent.values().map(|(_, deadline)| *deadline));
        self.timer.set(deadlines.chain(self.listen_again).min());
    }
}

impl MutEventSubscriber for Asking {
    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        match events.data() {
            BELL => {
                for caller in self.door.waiting() {
                    self.admit(ops, caller);
                }
                for unsent in self.outbox.take() {
                    self.post(ops, unsent);
                }
            }
            TIMER => {}
            LISTENER => self.accept(ops),
            id if self.unsent.contains_key(&id) => {
                let gone = events.event_set().intersects(EventSet::HANG_UP | EventSet::ERROR);
                self.send(ops, id, gone);
            }
            id => self.hear(ops, id),
        }
        self.check_deadlines(ops);
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        watch(ops, self.door.bell.events(BELL));
        watch(ops, self.timer.events(TIMER));
        self.listen(ops, true);
    }
}

impl Asker {
    /// Reads the first line without its end, and not a byte more: what follows may be another's.
    /// Whether it is whole.
    fn read_line(&mut self) -> io::Result<bool> {
        loop {
            let mut byte = [0];
            match (&self.stream).read(&mut byte) {
                Ok(0) => {
                    return Err(io::Error::other(
                        "the connection ended before the end of its first line",
                    ));
                }
                Ok(_) if byte == [b'\n'] => return Ok(true),
                Ok(_) if self.line.len() >= LINE_MAX => {
                    return Err(io::Error::other("the first line is too long"));
                }
                Ok(_) => self.line.extend(byte),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

fn worded(answer: Answer) -> String {
    match answer {
        Ok(text) => format!("OK {text}"),
        Err(error) => format!("ERR {}", error.replace('\n', " ")),
    }
}

/// An answer as it is sent.
fn line(answer: Answer) -> Vec<u8> {
    format!("{}\n", worded(answer).trim_end()).into_bytes()
}

pub(super) fn refuse(mut stream: &UnixStream, reason: &str) {
    // Who does not wait for the answer does not get it. A new connection has room for it.
    let _ = stream.write_all(&line(Err(reason.to_owned())));
}
