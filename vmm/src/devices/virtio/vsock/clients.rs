//! Connections that still have to send a line: clients of the host's socket name the port that they
//! want, and the gateway says whether it has accepted the guest's connection.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::packet::Header;
use super::watch::{Token, Watched, Watches};
use vmtrace_system::ports;
use vmtrace_system::private_socket::PrivateListener;

/// How long a client may take to say what it wants.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long nobody is accepted after the system had no descriptors left.
const PAUSE: Duration = Duration::from_secs(1);
/// The longest line: `CONNECT 4294967295`, and some spaces.
const MAX_LINE: usize = 32;

struct Client {
    stream: Watched,
    line: Vec<u8>,
    deadline: Instant,
    /// It is the gateway, which was asked for this.
    asked: Option<Header>,
}

/// What a line says.
pub(super) enum Said {
    /// A client wants to this port of the guest.
    Wants(u32, Watched),
    /// The gateway has somebody for this request of the guest, or not.
    Accepts(Header, Watched),
    Refuses(Header),
}

/// See the module.
pub(super) struct Clients {
    listener: Option<PrivateListener>,
    watches: Watches,
    /// Whether the event loop tells of new ones.
    listening: bool,
    /// When to listen again.
    pause: Option<Instant>,
    waiting: HashMap<u32, Client>,
    next: u32,
}

impl Clients {
    pub(super) fn new(listener: Option<PrivateListener>, watches: Watches) -> Clients {
        let mut clients = Clients {
            listener,
            watches,
            listening: false,
            pause: None,
            waiting: HashMap::new(),
            next: 0,
        };
        clients.listen(true);
        clients
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    fn listen(&mut self, on: bool) {
        if let Some(listener) = &self.listener
            && on != self.listening
        {
            self.watches.listen(listener.listener(), on);
            self.listening = on;
        }
    }

    /// The event loop cannot listen: it is tried again later, at the time that is returned.
    pub(super) fn cannot_listen(&mut self) -> Instant {
        self.listening = false;
        *self.pause.insert(Instant::now() + PAUSE)
    }

    /// Accepts clients while there is room for some; the time by which the last of them must have
    /// said what it wants.
    pub(super) fn accept(&mut self, mut room: usize) -> Option<Instant> {
        let mut deadline = None;
        while room > 0 {
            match self.listener.as_ref()?.listener().accept() {
                Ok((stream, _)) => {
                    if stream.set_nonblocking(true).is_ok() {
                        deadline = Some(self.wait(stream, None));
                        room -= 1;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return deadline,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    log::warn!("vsock: cannot accept: {error}");
                    self.pause = Some(Instant::now() + PAUSE);
                    break;
                }
            }
        }
        self.listen(false);
        deadline.into_iter().chain(self.pause).min()
    }

    /// Waits for a line; until when.
    fn wait(&mut self, stream: UnixStream, asked: Option<Header>) -> Instant {
        let id = self.next;
        self.next = id.wrapping_add(1);
        let stream = self.watches.watch(stream, Token::Client(id));
        let deadline = Instant::now() + PATIENCE;
        self.waiting.insert(id, Client { stream, line: Vec::new(), deadline, asked });
        deadline
    }

    /// Asks the gateway at the other end for what the guest has requested; until when it may
    /// answer.
    pub(super) fn ask(
        &mut self,
        mut stream: UnixStream,
        request: &Header,
    ) -> std::io::Result<Instant> {
        // The socket is new: there is room for a line.
        stream.write_all(format!("CONNECT {}\n", request.dst_port).as_bytes())?;
        Ok(self.wait(stream, Some(*request)))
    }

    /// Nobody waits any more for what the gateway was asked for.
    pub(super) fn forget_asked(&mut self) {
        self.waiting.retain(|_, client| client.asked.is_none());
    }

    /// There is room, or was all the time.
    pub(super) fn resume(&mut self) {
        if self.pause.is_none() {
            self.listen(true);
        }
    }

    /// Somebody has said something. When it is the whole line: what it says.
    ///
    /// Not a byte behind the line is read: that belongs to the connection.
    pub(super) fn read(&mut self, id: u32) -> Option<Said> {
        let client = self.waiting.get_mut(&id)?;
        let whole = loop {
            let mut byte = [0];
            match (&*client.stream).read(&mut byte) {
                Ok(1) if byte[0] == b'\n' => break true,
                Ok(1) if client.line.len() < MAX_LINE => client.line.push(byte[0]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                _ => break false,
            }
        };
        let Client { stream, line, asked, .. } = self.waiting.remove(&id)?;
        match asked {
            Some(request) if whole && line == b"OK" => Some(Said::Accepts(request, stream)),
            Some(request) => Some(Said::Refuses(request)),
            None => Some(Said::Wants(ports::requested(&line).filter(|_| whole)?, stream)),
        }
    }

    /// Gives up those who have waited too long; requests of the guest among them are returned.
    pub(super) fn check_deadlines(&mut self, now: Instant) -> Vec<Header> {
        self.pause = self.pause.filter(|pause| *pause > now);
        let late = self.waiting.extract_if(|_, client| client.deadline <= now);
        late.filter_map(|(_, client)| client.asked).collect()
    }

    pub(super) fn deadlines(&self) -> impl Iterator<Item = Instant> {
        self.waiting.values().map(|client| client.deadline).chain(self.pause)
    }

    pub(super) fn close(&mut self) {
        self.waiting.clear();
        self.listener = None;
    }
}
