//! All connections of the device, and the choice of the one that sends the next packet.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::clients::{Clients, Said};
use super::connection::{Aborted, Connection, Fate, Requester};
use super::key::Key;
use super::packet::{HOST_CID, Header, TYPE_STREAM, op};
use super::rings::{Slot, Span};
use super::watch::{Token, Watched, Watches};
use super::{ConnectError, Incoming, Limits};
use crate::events::EventSet;
use vmtrace_system::ports::beside;
use vmtrace_system::private_socket::{PrivateListener, connect_now};

/// Resets for what is no connection that wait for the guest's buffers. With more than that the
/// guest's packets have to wait.
const MAX_REPLIES: usize = 256;
/// With so many connections, further ones get smaller buffers: each is bounded, but so should be
/// their sum.
const MANY_CONNECTIONS: usize = 256;
/// First of the ports that the host's side of its own connections gets, as in Firecracker.
const FIRST_PORT: u32 = 1 << 30;
/// `VMADDR_PORT_ANY` is no port.
const NO_PORT: u32 = u32::MAX;

/// Somebody in this process who takes connections to a port.
pub(super) type Service = Arc<Mutex<dyn FnMut(Incoming) + Send>>;

/// Where the host's ports are that are no services.
pub(super) struct Reach {
    /// Asked for all of them.
    pub(super) gateway: Option<PathBuf>,
    /// Without a gateway: their paths are this one with the port appended.
    pub(super) socket: Option<PathBuf>,
}

/// See the module.
pub(super) struct Muxer {
    guest_cid: u64,
    pub(super) limits: Limits,
    pub(super) watches: Watches,
    connections: HashMap<Key, Connection>,
    /// Those that have something for the guest, each once.
    ready: VecDeque<Key>,
    /// Resets for the guest.
    replies: VecDeque<Header>,
    /// Connections that the guest's side has left, with bytes for the host's side.
    rests: HashMap<u32, Connection>,
    next_rest: u32,
    next_port: u32,
    services: HashMap<u32, Service>,
    /// Calls to make when nobody holds a lock.
    pub(super) calls: Vec<(Service, Incoming)>,
    pub(super) clients: Clients,
    reach: Reach,
    /// When some deadline will have passed, or earlier.
    next_deadline: Option<Instant>,
}

impl Muxer {
    pub(super) fn new(
        guest_cid: u32,
        listener: Option<PrivateListener>,
        reach: Reach,
        limits: Limits,
    ) -> Muxer {
        let watches = Watches::default();
        Muxer {
            guest_cid: guest_cid.into(),
            limits,
            clients: Clients::new(listener, watches.clone()),
            watches,
            connections: HashMap::new(),
            ready: VecDeque::new(),
            replies: VecDeque::new(),
            rests: HashMap::new(),
            next_rest: 0,
            next_port: FIRST_PORT,
            services: HashMap::new(),
            calls: Vec::new(),
            reach,
            next_deadline: None,
        }
    }

    /// Connections, and everything else that takes up a descriptor.
    pub(super) fn load(&self) -> usize {
        self.connections.len() + self.rests.len() + self.clients.len()
    }

    pub(super) fn is_full(&self) -> bool {
        self.load() >= self.limits.connections
    }

    /// Has connections to `port` go to `service`; whether nobody had it.
    pub(super) fn serve(&mut self, port: u32, service: Service) -> bool {
        if self.services.contains_key(&port) || port == NO_PORT {
            return false;
        }
        self.services.insert(port, service);
        true
    }

    // --- the guest's packets ---

    /// Whether a packet of the guest can be taken now.
    pub(super) fn takes_packets(&self) -> bool {
        self.replies.len() < MAX_REPLIES
    }

    /// Takes a packet of the guest.
    pub(super) fn take(&mut self, header: &Header, payload: Span<'_>) {
        if header.src_cid.get() != self.guest_cid {
            // Forged; an answer would go to somebody else.
            return;
        }
        let key = Key { local: header.dst_port.get(), guest: header.src_port.get() };
        let operation = header.op.get();
        let known = header.dst_cid.get() == HOST_CID && header.kind.get() == TYPE_STREAM;
        match self.connections.get_mut(&key).filter(|_| known) {
            Some(_) if operation == op::RST => self.forget(key, ConnectError::Refused),
            Some(connection) => match connection.take(header, payload) {
                Fate::Keep => self.attend(key),
                Fate::Reset => self.reset(key, ConnectError::Refused),
            },
            None if operation == op::RST => {}
            None if known && operation == op::REQUEST => match self.reach(key, header) {
                Reached::Host(stream) => {
                    let stream = self.watches.watch(stream, Token::Connection(key));
                    self.accept(header, stream);
                }
                Reached::Asked => {}
                Reached::Nobody => self.replies.push_back(header.reset()),
            },
            None => self.replies.push_back(header.reset()),
        }
    }

    /// The guest's request has got to somebody.
    fn accept(&mut self, request: &Header, stream: Watched) {
        let key = Key { local: request.dst_port.get(), guest: request.src_port.get() };
        stream.hand_over(Token::Connection(key));
        let connection = Connection::accepted(request, key, stream, self.buffer());
        self.insert(key, connection);
    }

    /// The host's end of a connection of the guest, if anybody takes it.
    fn reach(&mut self, key: Key, request: &Header) -> Reached {
        let Key { local: port, guest: guest_port } = key;
        if self.is_full() || port == NO_PORT {
            return Reached::Nobody;
        }
        if let Some(service) = self.services.get(&port) {
            let Ok((ours, stream)) = pair() else { return Reached::Nobody };
            self.calls.push((Arc::clone(service), Incoming { stream, port, guest_port }));
            return Reached::Host(ours);
        }
        let Reach { gateway, socket } = &self.reach;
        let Some(path) = gateway.clone().or(socket.as_deref().map(|socket| beside(socket, port)))
        else {
            return Reached::Nobody;
        };
        match connect_now(&path).map(UnixStream::from) {
            Ok(stream) if gateway.is_some() => match self.clients.ask(stream, request) {
                Ok(deadline) => {
                    self.note_deadline(Some(deadline));
                    Reached::Asked
                }
                Err(error) => {
                    log::warn!("vsock: {}: {error}", path.display());
                    Reached::Nobody
                }
            },
            Ok(stream) => Reached::Host(stream),
            Err(errno) => {
                log::debug!("vsock: {}: {errno}", path.display());
                Reached::Nobody
            }
        }
    }

    // --- the host's connections ---

    /// Asks the guest for a connection to `port`.
    pub(super) fn request(
        &mut self,
        port: u32,
        stream: Watched,
        requester: Requester,
        limit: Duration,
    ) {
        let key = Key { local: self.free_port(port), guest: port };
        stream.hand_over(Token::Connection(key));
        let mut connection =
            Connection::requested(key, self.guest_cid, stream, requester, self.buffer());
        connection.deadline = Some(Instant::now() + limit.min(self.limits.connect_time));
        self.insert(key, connection);
    }

    /// As [`Muxer::request`], of a socket that is not waited for yet.
    pub(super) fn request_for(
        &mut self,
        port: u32,
        stream: UnixStream,
        requester: Requester,
        limit: Duration,
    ) {
        let token = Token::Connection(Key { local: NO_PORT, guest: port });
        let stream = self.watches.watch(stream, token);
        self.request(port, stream, requester, limit);
    }

    /// A port of the host's that is in no connection to this port of the guest's.
    fn free_port(&mut self, guest: u32) -> u32 {
        loop {
            let local = self.next_port;
            // Half of all ports, far more than there can be connections.
            self.next_port = ((local + 1) % (1 << 31)) | FIRST_PORT;
            if !self.connections.contains_key(&Key { local, guest }) {
                return local;
            }
        }
    }

    /// A client has said what it wants, or the gateway what it has.
    pub(super) fn on_said(&mut self, said: Said) {
        match said {
            Said::Wants(port, stream) => {
                self.request(port, stream, Requester::Client, self.limits.connect_time);
            }
            Said::Refuses(request) => self.replies.push_back(request.reset()),
            Said::Accepts(request, stream) => {
                let key = Key { local: request.dst_port.get(), guest: request.src_port.get() };
                // A guest that asks twice has one connection, and not another under its feet.
                if !self.connections.contains_key(&key) {
                    self.accept(&request, stream);
                }
            }
        }
    }

    // --- connections come and go ---

    /// Bytes that may be kept for a new connection.
    fn buffer(&self) -> u32 {
        let many = self.load() >= MANY_CONNECTIONS;
        if many { self.limits.buffer / 4 } else { self.limits.buffer }
    }

    fn insert(&mut self, key: Key, connection: Connection) {
        self.note_deadline(connection.deadline);
        self.connections.insert(key, connection);
        self.attend(key);
    }

    /// The event loop cannot wait for this.
    pub(super) fn cannot_watch(&mut self, token: Token) {
        match token {
            Token::Connection(key) => self.reset(key, ConnectError::Host),
            Token::Listener => {
                let again = self.clients.cannot_listen();
                self.note_deadline(Some(again));
            }
            // Its time will run out.
            Token::Client(_) | Token::Rest(_) | Token::Bell | Token::Timer => {}
        }
    }

    /// Something about the connection has changed.
    fn attend(&mut self, key: Key) {
        let Some(connection) = self.connections.get_mut(&key) else { return };
        if connection.has_packet() && !connection.queued {
            connection.queued = true;
            self.ready.push_back(key);
        }
    }

    /// The guest knows that the connection is over.
    fn forget(&mut self, key: Key, reason: ConnectError) {
        let Some(connection) = self.connections.remove(&key) else { return };
        let Some(rest) = connection.into_rest(reason, &self.limits) else { return };
        let id = self.next_rest;
        self.next_rest = id.wrapping_add(1);
        self.note_deadline(rest.deadline);
        rest.stream().hand_over(Token::Rest(id));
        self.rests.insert(id, rest);
    }

    /// The connection is over; the guest gets to know.
    fn reset(&mut self, key: Key, reason: ConnectError) {
        if let Some(connection) = self.connections.get_mut(&key) {
            self.replies.extend(connection.reset());
            self.forget(key, reason);
        }
    }

    /// The driver has forgotten all connections.
    pub(super) fn forget_all(&mut self) {
        let keys: Vec<_> = self.connections.keys().copied().collect();
        for key in keys {
            self.forget(key, ConnectError::NoDriver);
        }
        self.ready.clear();
        self.replies.clear();
        self.clients.forget_asked();
    }

    /// The device is gone, and with it everything that it had of the host.
    pub(super) fn close(&mut self) {
        self.forget_all();
        self.rests.clear();
        self.services.clear();
        self.calls.clear();
        self.clients.close();
        self.watches.close();
    }

    // --- what happens on the host's side ---

    pub(super) fn on_connection(&mut self, key: Key, events: EventSet) {
        let Some(connection) = self.connections.get_mut(&key) else { return };
        if events.contains(EventSet::OUT) {
            connection.writable();
        }
        let readable = events.intersects(EventSet::IN | EventSet::READ_HANG_UP);
        let hung_up = events.intersects(EventSet::HANG_UP | EventSet::ERROR);
        let fate = connection.readable(readable, hung_up);
        match fate {
            Fate::Keep => self.attend(key),
            Fate::Reset => self.reset(key, ConnectError::Refused),
        }
    }

    pub(super) fn on_rest(&mut self, id: u32) {
        let Some(rest) = self.rests.get_mut(&id) else { return };
        if rest.flush() > 0 {
            rest.deadline = Some(Instant::now() + self.limits.linger_time);
        }
        if rest.is_over() {
            self.rests.remove(&id);
        }
    }

    pub(super) fn note_deadline(&mut self, deadline: Option<Instant>) {
        self.next_deadline = [self.next_deadline, deadline].into_iter().flatten().min();
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.next_deadline
    }

    /// Ends what has taken too long.
    pub(super) fn check_deadlines(&mut self, now: Instant) {
        if self.next_deadline.is_none_or(|next| next > now) {
            return;
        }
        let late = |deadline: Option<Instant>| deadline.is_some_and(|deadline| deadline <= now);
        let over = self.connections.iter().filter(|(_, connection)| late(connection.deadline));
        let over: Vec<_> = over.map(|(key, _)| *key).collect();
        for key in over {
            self.reset(key, ConnectError::TimedOut);
        }
        self.rests.retain(|_, rest| !late(rest.deadline));
        let unanswered = self.clients.check_deadlines(now);
        self.replies.extend(unanswered.iter().map(Header::reset));
        let connections = self.connections.values().chain(self.rests.values());
        let deadlines = connections.filter_map(|connection| connection.deadline);
        self.next_deadline = deadlines.chain(self.clients.deadlines()).min();
    }

    // --- packets for the guest ---

    pub(super) fn has_packets(&self) -> bool {
        !self.replies.is_empty() || !self.ready.is_empty()
    }

    /// Fills a buffer of the driver's; with how many bytes, if there was anything for it.
    pub(super) fn fill(&mut self, slot: &mut Slot<'_>) -> Option<u32> {
        let header = self.next_packet(&mut slot.payload)?;
        slot.header.write(zerocopy::IntoBytes::as_bytes(&header));
        Some(header.len.get() + u32::try_from(Header::LENGTH).unwrap_or_default())
    }

    fn next_packet(&mut self, payload: &mut Span<'_>) -> Option<Header> {
        loop {
            if let Some(reply) = self.replies.pop_front() {
                return Some(reply);
            }
            let key = self.ready.pop_front()?;
            let Some(connection) = self.connections.get_mut(&key) else { continue };
            connection.queued = false;
            let packet = connection.next_packet(payload, &self.limits);
            let deadline = connection.deadline;
            match packet {
                Ok(packet) => {
                    self.note_deadline(deadline);
                    // To the end of the queue: everyone's turn comes.
                    self.attend(key);
                    if packet.is_some() {
                        return packet;
                    }
                }
                Err(Aborted) => self.reset(key, ConnectError::Refused),
            }
        }
    }
}

/// What became of a request of the guest.
enum Reached {
    Host(UnixStream),
    /// The gateway will answer.
    Asked,
    Nobody,
}

/// Two ends: ours, which never blocks, and the consumer's.
fn pair() -> io::Result<(UnixStream, UnixStream)> {
    let (ours, theirs) = UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    Ok((ours, theirs))
}
