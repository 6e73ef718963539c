//! Forwards standard input to the guest's console.

use super::interactive::{Keys, Typed};
use crate::events::{EventOps, EventSet, Events, MutEventSubscriber, Timer, watch};
use crate::machine::SerialInput;
use nix::errno::Errno;
use std::io::{self, Stdin};
use std::time::{Duration, Instant};

/// The time until a full console is tried again.
const AGAIN: Duration = Duration::from_millis(10);

const STDIN: u32 = 0;
const TIMER: u32 = 1;

/// From the standard input to the console, as fast as the guest takes it.
pub(super) struct Input {
    stdin: Stdin,
    keys: Box<dyn Keys>,
    /// Told of what is not for the guest.
    other: Box<dyn FnMut(&Typed) + Send>,
    console: SerialInput,
    timer: Timer,
    /// What the console has not taken yet.
    rest: Vec<u8>,
    watched: Watched,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Watched {
    Yes,
    /// While there is a rest.
    No,
    /// Files are always ready, and cannot be waited for.
    Never,
    Ended,
}

impl Input {
    pub(super) fn new(
        console: SerialInput,
        keys: Box<dyn Keys>,
        other: impl FnMut(&Typed) + Send + 'static,
    ) -> io::Result<Self> {
        let (timer, rest, watched) = (Timer::new()?, Vec::new(), Watched::No);
        let other = Box::new(other);
        Ok(Self { stdin: io::stdin(), keys, other, console, timer, rest, watched })
    }

    /// Reads once; that does not wait, since there is something, or the end.
    fn read(&mut self, ops: &mut EventOps<'_>) {
        let mut bytes = [0; 1024];
        // Not by the buffer of `Stdin`: of what is in there nobody tells.
        match nix::unistd::read(&self.stdin, &mut bytes) {
            Ok(count @ 1..) => {
                let typed = self.keys.take(bytes.get(..count).unwrap_or_default());
                (self.other)(&typed);
                self.rest.extend(typed.keys);
            }
            Err(Errno::EINTR) => {}
            Ok(_) | Err(_) => {
                self.unwatch(ops);
                self.watched = Watched::Ended;
            }
        }
    }

    fn unwatch(&mut self, ops: &mut EventOps<'_>) {
        if self.watched == Watched::Yes {
            let _ = ops.remove(Events::empty(&self.stdin));
            self.watched = Watched::No;
        }
    }

    fn watch(&mut self, ops: &mut EventOps<'_>) {
        if self.watched == Watched::No {
            let added = ops.add(Events::with_data(&self.stdin, STDIN, EventSet::IN));
            self.watched = if added.is_ok() { Watched::Yes } else { Watched::Never };
        }
    }

    /// Gives the console what it takes.
    fn push(&mut self, ops: &mut EventOps<'_>) {
        let taken = self.console.push(&self.rest);
        self.rest.drain(..taken.min(self.rest.len()));
        if self.rest.is_empty() {
            self.watch(ops);
        } else {
            self.unwatch(ops);
        }
        let again = match self.watched {
            _ if !self.rest.is_empty() => Some(AGAIN),
            Watched::Never => Some(Duration::ZERO),
            _ => None,
        };
        self.timer.set(again.map(|after| Instant::now() + after));
    }
}

impl MutEventSubscriber for Input {
    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        let ready = events.data() == STDIN || self.watched == Watched::Never;
        if ready && self.rest.is_empty() {
            self.read(ops);
        }
        self.push(ops);
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        watch(ops, self.timer.events(TIMER));
        self.push(ops);
    }
}
