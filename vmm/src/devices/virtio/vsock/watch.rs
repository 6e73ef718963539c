//! The sockets that the device watches on the host's side.
//!
//! Any thread may add and remove sockets under the device's lock. The thread of the event loop
//! applies these changes when it next holds the lock. A socket is closed only after the loop has
//! removed it.

use std::collections::HashMap;
use std::ops::Deref;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::key::Key;
use crate::events::{EventOps, EventSet, Events};

/// What an event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Token {
    /// The queues, or somebody in this process.
    Bell,
    /// Some time has come.
    Timer,
    /// The host's socket.
    Listener,
    /// Somebody who has connected there and not said where to.
    Client(u32),
    /// The rest of a connection.
    Rest(u32),
    Connection(Key),
}

/// Data of events that are no stream's.
pub(super) const BELL: u32 = 0;
pub(super) const TIMER: u32 = 1;
const LISTENER: u32 = 2;
const FIRST_STREAM: u32 = 3;

/// By edges, so that the loop never has to be told what is of interest just now. Room to write is
/// always among it: it is also how the other end's wish to receive no more is noticed.
const STREAM_EVENTS: EventSet =
    EventSet::IN.union(EventSet::OUT).union(EventSet::READ_HANG_UP).union(EventSet::EDGE_TRIGGERED);

#[derive(Debug)]
enum Change {
    Add(RawFd, u32),
    /// The same again: what is true already is told once more.
    Again(RawFd, u32),
    /// It is closed after that.
    Remove(UnixStream),
    Listen(RawFd, bool),
}

#[derive(Debug, Default)]
struct Inner {
    changes: Vec<Change>,
    tokens: HashMap<u32, Token>,
    next: u32,
}

/// See the module; clones are the same.
#[derive(Clone, Debug, Default)]
pub(super) struct Watches(Arc<Mutex<Inner>>);

impl Watches {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the loop tell of everything that happens to a socket.
    pub(super) fn watch(&self, stream: UnixStream, token: Token) -> Watched {
        let mut inner = self.lock();
        let mut id = inner.next.max(FIRST_STREAM);
        while inner.tokens.contains_key(&id) {
            id = id.wrapping_add(1).max(FIRST_STREAM);
        }
        inner.next = id.wrapping_add(1);
        inner.tokens.insert(id, token);
        inner.changes.push(Change::Add(stream.as_raw_fd(), id));
        drop(inner);
        Watched { stream: Some(stream), id, watches: self.clone() }
    }

    /// Has the loop tell of new clients, or not: they would be told of again and again.
    pub(super) fn listen(&self, listener: &impl AsRawFd, on: bool) {
        self.lock().changes.push(Change::Listen(listener.as_raw_fd(), on));
    }

    /// What an event with this data is about; `None` when it is over.
    pub(super) fn token(&self, data: u32) -> Option<Token> {
        match data {
            BELL => Some(Token::Bell),
            TIMER => Some(Token::Timer),
            LISTENER => Some(Token::Listener),
            id => self.lock().tokens.get(&id).copied(),
        }
    }

    /// Tells the loop what has changed; returns what it cannot wait for.
    pub(super) fn apply(&self, ops: &mut EventOps<'_>) -> Vec<Token> {
        let mut inner = self.lock();
        let mut failed = Vec::new();
        for change in std::mem::take(&mut inner.changes) {
            let done = match &change {
                Change::Add(fd, id) => ops.add(Events::with_data_raw(*fd, *id, STREAM_EVENTS)),
                Change::Again(fd, id) => ops.modify(Events::with_data_raw(*fd, *id, STREAM_EVENTS)),
                Change::Remove(stream) => {
                    // It may never have got in.
                    let _ = ops.remove(Events::empty(stream));
                    Ok(())
                }
                Change::Listen(fd, true) => {
                    ops.add(Events::with_data_raw(*fd, LISTENER, EventSet::IN))
                }
                Change::Listen(fd, false) => ops.remove(Events::empty_raw(*fd)),
            };
            if let Err(error) = done {
                log::warn!("vsock: {error}");
                failed.extend(match change {
                    Change::Add(_, id) | Change::Again(_, id) => inner.tokens.get(&id).copied(),
                    Change::Listen(..) => Some(Token::Listener),
                    Change::Remove(_) => None,
                });
            }
        }
        failed
    }

    /// There is no loop any more: closes what waits for that.
    pub(super) fn close(&self) {
        self.lock().changes.clear();
    }
}

/// A socket of which the loop tells, until this is dropped.
#[derive(Debug)]
pub(super) struct Watched {
    /// There until it is dropped.
    stream: Option<UnixStream>,
    id: u32,
    watches: Watches,
}

impl Watched {
    /// It is another's from now on, who is told of what has happened to it already.
    pub(super) fn hand_over(&self, token: Token) {
        let mut inner = self.watches.lock();
        inner.tokens.insert(self.id, token);
        inner.changes.push(Change::Again(self.as_raw_fd(), self.id));
    }
}

impl Deref for Watched {
    type Target = UnixStream;

    fn deref(&self) -> &UnixStream {
        match &self.stream {
            Some(stream) => stream,
            None => unreachable!("only a drop takes it"),
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let mut inner = self.watches.lock();
        inner.tokens.remove(&self.id);
        inner.changes.extend(self.stream.take().map(Change::Remove));
    }
}
