//! Those who have connected to the host's socket and not yet said to which port they want.

use std::collections::HashMap;
use std::io::{ErrorKind, Read};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::muxer::Token;
use crate::private_socket::PrivateListener;

/// How long a client may take to say what it wants.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long nobody is accepted after the system had no descriptors left.
const PAUSE: Duration = Duration::from_secs(1);
/// The longest request: `CONNECT 4294967295`, and some spaces.
const MAX_LINE: usize = 32;

struct Client {
    stream: UnixStream,
    line: Vec<u8>,
    deadline: Instant,
}

/// See the module.
pub(super) struct Clients {
    listener: Option<PrivateListener>,
    epoll: Arc<Epoll>,
    /// Whether epoll tells of new ones.
    listening: bool,
    /// When to listen again.
    pause: Option<Instant>,
    waiting: HashMap<u32, Client>,
    next: u32,
}

impl Clients {
    pub(super) fn new(
        listener: Option<PrivateListener>,
        epoll: Arc<Epoll>,
    ) -> std::io::Result<Clients> {
        let mut clients = Clients {
            listener,
            epoll,
            listening: false,
            pause: None,
            waiting: HashMap::new(),
            next: 0,
        };
        clients.listen(true)?;
        Ok(clients)
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Has epoll tell of new clients, or not: they would be told of again and again.
    fn listen(&mut self, on: bool) -> std::io::Result<()> {
        let Some(listener) = &self.listener else { return Ok(()) };
        if on != self.listening {
            let operation = if on { ControlOperation::Add } else { ControlOperation::Delete };
            let event = EpollEvent::new(EventSet::IN, Token::Listener.pack());
            self.epoll.ctl(operation, listener.listener().as_raw_fd(), event)?;
            self.listening = on;
        }
        Ok(())
    }

    /// Accepts clients while there is room for some; the time by which the last of them must have
    /// said what it wants.
    pub(super) fn accept(&mut self, mut room: usize) -> Option<Instant> {
        let listener = self.listener.as_ref()?;
        let mut deadline = None;
        while room > 0 {
            match listener.listener().accept() {
                Ok((stream, _)) => {
                    let due = Instant::now() + PATIENCE;
                    let id = self.next;
                    let event = EpollEvent::new(EventSet::IN, Token::Client(id).pack());
                    let fd = stream.as_raw_fd();
                    if stream.set_nonblocking(true).is_ok()
                        && self.epoll.ctl(ControlOperation::Add, fd, event).is_ok()
                    {
                        self.next = id.wrapping_add(1);
                        let client = Client { stream, line: Vec::new(), deadline: due };
                        self.waiting.insert(id, client);
                        deadline = Some(due);
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
        if self.listen(false).is_err() {
            log::warn!("vsock: cannot stop listening for a while");
        }
        deadline.into_iter().chain(self.pause).min()
    }

    /// There is room, or was all the time.
    pub(super) fn resume(&mut self) {
        if !self.listening && self.pause.is_none() && self.listen(true).is_err() {
            self.pause = Some(Instant::now() + PAUSE);
        }
    }

    /// A client has said something. When it has said it all: where it wants to.
    ///
    /// Not a byte behind the line is read: that belongs to the connection.
    pub(super) fn read(&mut self, id: u32) -> Option<(u32, UnixStream)> {
        let client = self.waiting.get_mut(&id)?;
        let done = loop {
            let mut byte = [0];
            match (&client.stream).read(&mut byte) {
                Ok(1) if byte[0] == b'\n' => break parse(&client.line),
                Ok(1) if client.line.len() < MAX_LINE => client.line.push(byte[0]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                _ => break None,
            }
        };
        let stream = self.waiting.remove(&id)?.stream;
        let event = EpollEvent::default();
        self.epoll.ctl(ControlOperation::Delete, stream.as_raw_fd(), event).ok()?;
        Some((done?, stream))
    }

    pub(super) fn check_deadlines(&mut self, now: Instant) {
        self.waiting.retain(|_, client| client.deadline > now);
        self.pause = self.pause.filter(|pause| *pause > now);
    }

    pub(super) fn deadlines(&self) -> impl Iterator<Item = Instant> {
        self.waiting.values().map(|client| client.deadline).chain(self.pause)
    }

    pub(super) fn close(&mut self) {
        self.waiting.clear();
        self.listener = None;
    }
}

/// The port of a request: `CONNECT` in any case, and a number.
fn parse(line: &[u8]) -> Option<u32> {
    let mut words = std::str::from_utf8(line).ok()?.split_ascii_whitespace();
    let (command, port, rest) = (words.next()?, words.next()?, words.next());
    if !command.eq_ignore_ascii_case("CONNECT") || rest.is_some() || port.starts_with('+') {
        return None;
    }
    port.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_understood_or_refused() {
        for (line, port) in [
            ("CONNECT 52", Some(52)),
            ("connect 4294967295\r", Some(u32::MAX)),
            ("CONNECT 4294967296", None),
            ("CONNECT -1", None),
            ("CONNECT +1", None),
            ("CONNECT", None),
            ("CONNECT 1 2", None),
            ("GET / HTTP/1.1", None),
            ("", None),
        ] {
            assert_eq!(parse(line.as_bytes()), port, "{line}");
        }
        assert_eq!(parse(b"CONNECT \xff"), None);
    }
}
