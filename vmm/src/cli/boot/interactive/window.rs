//! Sends the size of the user's terminal to the guest's console, by the agent.

use super::keys::Size;
use crate::events::{Bell, EventOps, Events, MutEventSubscriber, Timer, watch};
use crate::machine::SerialInput;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The time until a full port is tried again.
const AGAIN: Duration = Duration::from_millis(10);

const CHANGED: u32 = 0;
const TIMER: u32 = 1;

/// Clones are the same.
#[derive(Clone)]
pub(in crate::cli::boot) struct Window(Arc<Shared>);

struct Shared {
    size: Mutex<Option<Size>>,
    /// Before that its port would lose what comes, or send it back.
    agent_is_up: AtomicBool,
    changed: Bell,
}

impl Window {
    /// Of a size that nobody has told yet.
    pub(in crate::cli::boot) fn new() -> io::Result<Self> {
        let (size, agent_is_up) = (Mutex::default(), AtomicBool::default());
        Ok(Self(Arc::new(Shared { size, agent_is_up, changed: Bell::new()? })))
    }

    /// It has this size now.
    pub(in crate::cli::boot) fn resize(&self, size: Size) {
        *self.0.size.lock().unwrap_or_else(PoisonError::into_inner) = Some(size);
        self.0.changed.ring();
    }

    /// The agent has said hello.
    pub(in crate::cli::boot) fn agent_is_up(&self) {
        self.0.agent_is_up.store(true, Ordering::SeqCst);
        self.0.changed.ring();
    }

    /// The size that the agent has not been told, as it wants it.
    fn news(&self) -> Option<String> {
        if !self.0.agent_is_up.load(Ordering::SeqCst) {
            return None;
        }
        let size = self.0.size.lock().unwrap_or_else(PoisonError::into_inner).take();
        size.map(|Size { rows, columns }| format!("vmtrace 1 size {rows} {columns}\n"))
    }
}

/// Tells the agent.
pub(in crate::cli::boot) struct Teller {
    window: Window,
    agent: SerialInput,
    timer: Timer,
    /// What the port has not taken yet.
    rest: Vec<u8>,
}

impl Teller {
    pub(in crate::cli::boot) fn new(window: Window, agent: SerialInput) -> io::Result<Self> {
        Ok(Self { window, agent, timer: Timer::new()?, rest: Vec::new() })
    }
}

impl MutEventSubscriber for Teller {
    fn process(&mut self, _: Events, _: &mut EventOps<'_>) {
        // Behind a rest: half a line is none.
        self.rest.extend(self.window.news().into_iter().flat_map(String::into_bytes));
        let taken = self.agent.push(&self.rest);
        self.rest.drain(..taken.min(self.rest.len()));
        self.timer.set((!self.rest.is_empty()).then(|| Instant::now() + AGAIN));
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        watch(ops, self.window.0.changed.events(CHANGED));
        watch(ops, self.timer.events(TIMER));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agent_is_told_once_it_is_there_and_only_the_newest() {
        let window = Window::new().unwrap();
        let size = |rows| Size { rows, columns: 80 };
        window.resize(size(24));
        assert_eq!(window.news(), None);
        window.resize(size(25));
        window.agent_is_up();
        assert_eq!(window.news().as_deref(), Some("vmtrace 1 size 25 80\n"));
        assert_eq!(window.news(), None);
        window.resize(size(26));
        assert_eq!(window.news().as_deref(), Some("vmtrace 1 size 26 80\n"));
    }
}
