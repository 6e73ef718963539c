//! One connection: a stream socket on the host's side, packets on the guest's.

use std::collections::VecDeque;
use std::io::{ErrorKind, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::time::Instant;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, send};

use super::credit::Credit;
use super::key::Key;
use super::packet::{
    HOST_CID, Header, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, TYPE_STREAM, op,
};
use super::rings::Span;
use super::watch::Watched;
use super::{ConnectError, Limits};

/// The side that waits for the guest to accept.
pub(super) enum Requester {
    /// A client of the host's socket, which is told its port.
    Client,
    /// A client of a service of this process, which is told that, or why not.
    Passed(Refusal),
}

/// What a client is told when the guest cannot be connected to; one line.
pub(super) type Refusal = Box<dyn FnOnce(ConnectError) -> String + Send>;

/// What becomes of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(super) enum Fate {
    /// It goes on.
    Keep,
    /// It is over; the guest gets a reset.
    Reset,
}

/// See the module.
pub(super) struct Connection {
    key: Key,
    guest_cid: u64,
    stream: Watched,
    /// Until the guest has accepted.
    requester: Option<Requester>,
    credit: Credit,
    /// What the host's side has not taken yet, within the credit that the guest was given.
    to_host: VecDeque<u8>,
    /// The request or response that opens it, until it is sent.
    opening: Option<u16>,
    /// There may be something to read.
    readable: bool,
    /// The host's side has sent its last.
    ended: bool,
    /// The host's side is gone altogether.
    hung_up: bool,
    /// The host's side takes no more.
    deaf: bool,
    /// What the guest was told that the host will not do any more; bits of a shutdown.
    told: u32,
    /// What the guest will not do any more.
    guest_done: u32,
    /// The guest was asked for credit.
    asked: bool,
    /// The guest asks for its credit.
    tell: bool,
    /// In the queue of those that have something for the guest.
    pub(super) queued: bool,
    /// When it is reset if nothing happens.
    pub(super) deadline: Option<Instant>,
}

impl Connection {
    fn new(key: Key, guest_cid: u64, stream: Watched, opening: u16, buffer: u32) -> Self {
        Connection {
            key,
            guest_cid,
            stream,
            requester: None,
            credit: Credit::new(buffer),
            to_host: VecDeque::new(),
            opening: Some(opening),
            readable: false,
            ended: false,
            hung_up: false,
            deaf: false,
            told: 0,
            guest_done: 0,
            asked: false,
            tell: false,
            queued: false,
            deadline: None,
        }
    }

    /// The guest has asked for it with this packet.
    pub(super) fn accepted(request: &Header, key: Key, stream: Watched, buffer: u32) -> Self {
        let guest_cid = request.src_cid.get();
        let mut connection = Connection::new(key, guest_cid, stream, op::RESPONSE, buffer);
        connection.credit.guest_says(request);
        connection
    }

    /// The host asks for it.
    pub(super) fn requested(
        key: Key,
        guest_cid: u64,
        stream: Watched,
        requester: Requester,
        buffer: u32,
    ) -> Connection {
        let mut connection = Connection::new(key, guest_cid, stream, op::REQUEST, buffer);
        connection.requester = Some(requester);
        connection
    }

    pub(super) fn stream(&self) -> &Watched {
        &self.stream
    }

    /// A packet that begins so.
    fn header(&mut self, operation: u16) -> Header {
        let mut header = Header {
            src_cid: HOST_CID.into(),
            dst_cid: self.guest_cid.into(),
            src_port: self.key.local.into(),
            dst_port: self.key.guest.into(),
            kind: TYPE_STREAM.into(),
            op: operation.into(),
            ..Header::default()
        };
        self.credit.tell(&mut header);
        self.tell = false;
        header
    }

    /// The packet that ends it, unless the guest does not know of it.
    pub(super) fn reset(&mut self) -> Option<Header> {
        (self.opening != Some(op::REQUEST)).then(|| self.header(op::RST))
    }

    /// Takes a packet of the guest, other than a reset.
    pub(super) fn take(&mut self, header: &Header, payload: Span<'_>) -> Fate {
        self.credit.guest_says(header);
        if self.credit.room() > 0 {
            self.asked = false;
        }
        match (header.op.get(), self.requester.take()) {
            (op::RESPONSE, Some(requester)) => self.open(&requester),
            (_, Some(requester)) => {
                self.requester = Some(requester);
                Fate::Reset
            }
            (op::RW, None) => self.take_data(payload),
            (op::SHUTDOWN, None) => self.take_shutdown(header.flags.get() & SHUTDOWN_BOTH),
            (op::CREDIT_UPDATE, None) => Fate::Keep,
            (op::CREDIT_REQUEST, None) => {
                self.tell = true;
                Fate::Keep
            }
            _ => Fate::Reset,
        }
    }

    fn open(&mut self, requester: &Requester) -> Fate {
        self.deadline = None;
        let accepted = match requester {
            // The socket is new: there is room for a line.
            Requester::Client => {
                (&*self.stream).write_all(format!("OK {}\n", self.key.local).as_bytes()).is_ok()
            }
            Requester::Passed(_) => (&*self.stream).write_all(b"OK\n").is_ok(),
        };
        if accepted { Fate::Keep } else { Fate::Reset }
    }

    fn take_data(&mut self, mut payload: Span<'_>) -> Fate {
        let length = payload.len();
        if self.guest_done & SHUTDOWN_SEND != 0 || self.credit.received(bytes(length)).is_err() {
            return Fate::Reset;
        }
        if self.to_host.is_empty() && !self.deaf {
            match payload.send(&self.stream) {
                Ok(count) => self.credit.forwarded(bytes(count)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => self.deaf = true,
            }
        }
        if self.deaf {
            // Lost, as it would be on the way to a process that is gone.
            self.credit.forwarded(bytes(payload.len()));
        } else {
            payload.append_to(&mut self.to_host);
        }
        Fate::Keep
    }

    fn take_shutdown(&mut self, flags: u32) -> Fate {
        self.guest_done |= flags;
        if self.guest_done == SHUTDOWN_BOTH {
            // What is left for the host's side is delivered all the same: see `into_rest`.
            return Fate::Reset;
        }
        if flags & SHUTDOWN_RECEIVE != 0 {
            let _ = self.stream.shutdown(Shutdown::Read);
        }
        self.pass_end_on();
        Fate::Keep
    }

    /// Tells the host's side that no more will come, once it has everything.
    fn pass_end_on(&mut self) {
        if self.guest_done & SHUTDOWN_SEND != 0 && self.to_host.is_empty() {
            let _ = self.stream.shutdown(Shutdown::Write);
        }
    }

    /// The host's side may have something to read, or is gone.
    pub(super) fn readable(&mut self, readable: bool, hung_up: bool) -> Fate {
        self.readable |= readable || hung_up;
        self.hung_up |= hung_up;
        // Nobody is left to hear that the guest accepts.
        if self.requester.is_some() && self.hung_up { Fate::Reset } else { Fate::Keep }
    }

    /// The host's side may have room, or does not want anything any more.
    pub(super) fn writable(&mut self) {
        self.flush();
        let open = self.requester.is_none() && self.guest_done & SHUTDOWN_SEND == 0 && !self.deaf;
        if open && self.to_host.is_empty() {
            // Nothing tells the two apart but an attempt to write.
            self.deaf = self.takes_nothing();
        }
    }

    /// Whether nothing can be sent to the host's side any more.
    fn takes_nothing(&self) -> bool {
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        let nothing = send(self.stream.as_raw_fd(), &[], flags);
        matches!(nothing, Err(Errno::EPIPE | Errno::ECONNRESET))
    }

    /// Writes to the host's side what it takes; returns how many bytes.
    pub(super) fn flush(&mut self) -> usize {
        let before = self.to_host.len();
        while !self.to_host.is_empty() && !self.deaf {
            let (first, _) = self.to_host.as_slices();
            match (&*self.stream).write(first) {
                Ok(count) => {
                    self.to_host.drain(..count);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => self.deaf = true,
            }
        }
        if self.deaf {
            self.to_host.clear();
        }
        if self.to_host.is_empty() {
            self.to_host = VecDeque::new();
            self.pass_end_on();
        }
        let written = before - self.to_host.len();
        self.credit.forwarded(bytes(written));
        written
    }

    /// Whether bytes wait for room on the host's side.
    pub(super) fn has_output(&self) -> bool {
        !self.to_host.is_empty()
    }

    /// Whether the host's side may have something that the guest would take.
    fn has_input(&self) -> bool {
        self.readable
            && !self.ended
            && self.requester.is_none()
            && self.guest_done & SHUTDOWN_RECEIVE == 0
    }

    /// What the host will not do any more.
    fn host_done(&self) -> u32 {
        let ended = self.ended || self.guest_done & SHUTDOWN_RECEIVE != 0;
        if self.requester.is_some() {
            return 0;
        }
        if self.hung_up && ended {
            return SHUTDOWN_BOTH;
        }
        let send = if self.ended { SHUTDOWN_SEND } else { 0 };
        let receive = if self.deaf { SHUTDOWN_RECEIVE } else { 0 };
        send | receive
    }

    /// Whether there is something for the guest.
    pub(super) fn has_packet(&self) -> bool {
        self.opening.is_some()
            || self.has_input() && (self.credit.room() > 0 || !self.asked)
            || self.host_done() & !self.told != 0
            || self.tell
            || self.credit.must_tell()
    }

    /// The next packet for the guest, its data in `payload`, if there is one after all.
    ///
    /// Fails if the connection is over because of the host's side.
    pub(super) fn next_packet(
        &mut self,
        payload: &mut Span<'_>,
        limits: &Limits,
    ) -> Result<Option<Header>, Aborted> {
        if let Some(operation) = self.opening.take() {
            return Ok(Some(self.header(operation)));
        }
        if self.has_input() {
            let room = self.credit.room() as usize;
            if room > 0 {
                match payload.receive(&self.stream, room) {
                    Ok(0) => {
                        self.ended = true;
                        // The event of a socket that is closed may be yet to come. A guest that hears
                        // of one direction first may send in between, and succeed.
                        self.hung_up |= self.takes_nothing();
                    }
                    Ok(count) => {
                        self.credit.sent(bytes(count));
                        let header = self.header(op::RW);
                        return Ok(Some(Header { len: bytes(count).into(), ..header }));
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => self.readable = false,
                    Err(_) => return Err(Aborted),
                }
            } else if !self.asked {
                self.asked = true;
                return Ok(Some(self.header(op::CREDIT_REQUEST)));
            }
        }
        let done = self.host_done();
        if done & !self.told != 0 {
            self.told = done;
            if done == SHUTDOWN_BOTH {
                self.deadline = Some(Instant::now() + limits.close_time);
            }
            let header = self.header(op::SHUTDOWN);
            return Ok(Some(Header { flags: done.into(), ..header }));
        }
        if self.tell || self.credit.must_tell() {
            return Ok(Some(self.header(op::CREDIT_UPDATE)));
        }
        Ok(None)
    }

    /// The guest's side is gone: what remains is to deliver what it sent. `None` if there is
    /// nothing to deliver or nobody to deliver it to.
    pub(super) fn into_rest(mut self, reason: ConnectError, limits: &Limits) -> Option<Connection> {
        if let Some(Requester::Passed(refusal)) = self.requester.take() {
            // Who does not wait any more does not need to know.
            let _ = (&*self.stream).write_all(format!("ERR {}\n", refusal(reason)).as_bytes());
        }
        self.guest_done = SHUTDOWN_BOTH;
        self.deadline = Some(Instant::now() + limits.linger_time);
        (self.has_output() && !self.deaf).then_some(self)
    }

    /// Whether a [`Connection::into_rest`] has done its work.
    pub(super) fn is_over(&self) -> bool {
        self.deaf || self.to_host.is_empty()
    }
}

/// The host's side has thrown the connection away.
#[derive(Debug)]
pub(super) struct Aborted;

/// No packet and no buffer comes near 4 GiB.
fn bytes(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::virtio::vsock::watch::{Token, Watches};
    use std::os::unix::net::UnixStream;
    use vm_memory::{GuestAddress, GuestMemoryMmap};

    const KEY: Key = Key { local: 1024, guest: 9 };

    /// A connection that the guest has asked for and was told of, and the host's other end.
    fn opened() -> (Connection, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let stream = Watches::default().watch(ours, Token::Connection(KEY));
        let request = Header { buf_alloc: (1 << 16).into(), ..Header::default() };
        let mut connection = Connection::accepted(&request, KEY, stream, 1 << 16);
        assert_eq!(next(&mut connection).unwrap().op.get(), op::RESPONSE);
        (connection, theirs)
    }

    fn next(connection: &mut Connection) -> Option<Header> {
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 4096)]).unwrap();
        let mut payload = Span::of_all(&memory);
        connection.next_packet(&mut payload, &Limits::default()).unwrap()
    }

    // A guest that is told of one direction alone is right to send, and its byte is lost (EPIPE was
    // due). The kernel's own vsock_test found that in CI.
    #[test]
    fn a_socket_that_is_closed_ends_both_directions_at_once() {
        let (mut connection, theirs) = opened();
        // What the loop has seen so far is data; it closes before that is looked at.
        assert_eq!(connection.readable(true, false), Fate::Keep);
        drop(theirs);
        let end = next(&mut connection).unwrap();
        assert_eq!((end.op.get(), end.flags.get()), (op::SHUTDOWN, SHUTDOWN_BOTH));
    }

    #[test]
    fn one_that_has_sent_its_last_still_receives() {
        let (mut connection, theirs) = opened();
        theirs.shutdown(Shutdown::Write).unwrap();
        assert_eq!(connection.readable(true, false), Fate::Keep);
        let end = next(&mut connection).unwrap();
        assert_eq!((end.op.get(), end.flags.get()), (op::SHUTDOWN, SHUTDOWN_SEND));
        drop(theirs);
        assert_eq!(connection.readable(true, true), Fate::Keep);
        assert_eq!(next(&mut connection).unwrap().flags.get(), SHUTDOWN_BOTH);
    }
}
