//! Answers that a connection has no room for yet: nobody waits until they are taken.

use crate::events::Bell;
use std::io::{ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

/// An answer on its way.
#[derive(Debug)]
pub(super) struct Unsent {
    stream: UnixStream,
    text: Vec<u8>,
    sent: usize,
}

impl Unsent {
    /// Of `text`, on a connection that never blocks.
    pub(super) fn new(stream: UnixStream, text: Vec<u8>) -> Self {
        Self { stream, text, sent: 0 }
    }

    pub(super) fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Whether nothing is left to do.
    pub(super) fn send(&mut self) -> bool {
        while let Some(rest) = self.text.get(self.sent..).filter(|rest| !rest.is_empty()) {
            match (&self.stream).write(rest) {
                Ok(0) => return true,
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return error.kind() != ErrorKind::WouldBlock,
            }
        }
        true
    }
}

/// Where the rest of answers is put, for an event loop that sends it; clones are the same.
#[derive(Clone, Debug)]
pub(super) struct Outbox {
    bell: Bell,
    unsent: Arc<Mutex<Vec<Unsent>>>,
}

impl Outbox {
    /// One whose event loop is called by this bell.
    pub(super) fn new(bell: Bell) -> Self {
        Self { bell, unsent: Arc::default() }
    }

    /// Sends what there is room for, and has the rest sent.
    pub(super) fn send(&self, mut answer: Unsent) {
        if !answer.send() {
            self.unsent.lock().unwrap_or_else(PoisonError::into_inner).push(answer);
            self.bell.ring();
        }
    }

    /// What is to be sent.
    pub(super) fn take(&self) -> Vec<Unsent> {
        std::mem::take(&mut self.unsent.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
