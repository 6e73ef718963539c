//! The event loop: one thread that waits on the descriptors of all subscribers.
//!
//! A subscriber ([`MutEventSubscriber`] of `event-manager`) registers the descriptors that it waits
//! on, and is called when one of them is ready. It must return soon and never block. A [`Bell`],
//! which other threads ring, and a [`Timer`] call it as well.
//!
//! A descriptor must be removed from the loop ([`EventOps::remove`]) before it is closed.

mod bell;
mod signals;
mod timer;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::sandbox::{self, Thread};
use event_manager::{EventManager, RemoteEndpoint, SubscriberId};
use nix::sys::signal::{SigSet, Signal};

pub use bell::Bell;
pub use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
pub use signals::Signals;
pub use timer::Timer;

/// A subscriber.
pub type Subscriber = Box<dyn MutEventSubscriber + Send>;

/// Events taken at a time.
const EVENTS: usize = 256;

/// A manager of subscribers.
///
/// # Errors
/// When the system has no descriptors left.
pub(crate) fn manager() -> io::Result<EventManager<Subscriber>> {
    EventManager::new_with_capacity(EVENTS).map_err(io::Error::other)
}

/// The thread. Dropping this ends it, and drops its subscribers.
pub struct EventLoop {
    handle: Handle,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl EventLoop {
    /// Starts its thread.
    ///
    /// # Errors
    /// When the system has no descriptors or threads left.
    pub fn start(kind: Thread) -> io::Result<Self> {
        let mut manager = manager()?;
        let handle = Handle { endpoint: manager.remote_endpoint() };
        let ended = Arc::new(AtomicBool::new(false));
        let thread = std::thread::Builder::new().name(kind.name().to_owned()).spawn({
            let ended = Arc::clone(&ended);
            move || {
                sandbox::enter(kind);
                // A reader that is gone is an error of its connection, whatever the process makes
                // of the signal.
                let mut signals = SigSet::empty();
                signals.add(Signal::SIGPIPE);
                if let Err(errno) = signals.thread_block() {
                    log::warn!("events: cannot block SIGPIPE: {errno}");
                }
                while !ended.load(Ordering::SeqCst) {
                    if let Err(error) = manager.run() {
                        log::error!("events: {error}");
                        return;
                    }
                }
            }
        })?;
        Ok(Self { handle, ended, thread: Some(thread) })
    }

    /// For those who subscribe.
    #[must_use]
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }
}

impl Drop for EventLoop {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        let _ = self.handle.endpoint.kick();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            log::error!("events: the thread panicked");
        }
    }
}

/// How other threads reach an event loop; clones are the same.
#[derive(Clone)]
pub struct Handle {
    endpoint: RemoteEndpoint<Subscriber>,
}

impl Handle {
    /// Adds a subscriber, and waits until it is in. Not to be called by a subscriber.
    ///
    /// # Errors
    /// When the loop has ended.
    pub fn add(&self, subscriber: Subscriber) -> io::Result<Subscription> {
        let id = self
            .endpoint
            .call_blocking(move |ops| Ok::<_, event_manager::Error>(ops.add_subscriber(subscriber)))
            .map_err(io::Error::other)?;
        Ok(Subscription { endpoint: self.endpoint.clone(), id: Some(id) })
    }

    /// Has something done after this time, unless the loop has ended by then. From any thread.
    pub fn after(&self, time: Duration, what: impl FnOnce() + Send + 'static) {
        let due = Instant::now().checked_add(time);
        let later = Timer::new().map(|timer| Later { timer, due, what: Some(what) });
        let added = later.map(|later| {
            self.endpoint.fire(move |ops| {
                ops.add_subscriber(Box::new(later));
            })
        });
        match added {
            Ok(Ok(())) => {}
            Ok(Err(error)) => log::warn!("events: cannot make a timer: {error}"),
            Err(error) => log::warn!("events: cannot make a timer: {error}"),
        }
    }
}

/// A subscriber that is in a loop. Dropping this takes it out, some time later.
pub struct Subscription {
    endpoint: RemoteEndpoint<Subscriber>,
    id: Option<SubscriberId>,
}

impl Subscription {
    /// The subscriber stays in as long as the loop runs.
    pub fn keep(mut self) {
        self.id = None;
    }

    /// Takes the subscriber out, and waits until it is gone. Not to be called by a subscriber.
    pub fn close(mut self) {
        if let Some(id) = self.id.take() {
            // It fails when the loop is gone, and the subscriber with it.
            let _ = self.endpoint.call_blocking(move |ops| ops.remove_subscriber(id).map(drop));
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        if let Some(id) = self.id.take() {
            let _ = self.endpoint.fire(move |ops| drop(ops.remove_subscriber(id)));
        }
    }
}

/// Waits for what there is; there is nobody to tell but the log when it cannot.
pub fn watch(ops: &mut EventOps<'_>, events: Events) {
    if let Err(error) = ops.add(events) {
        log::error!("events: {error}");
    }
}

/// See [`Handle::after`].
struct Later<F> {
    timer: Timer,
    due: Option<Instant>,
    what: Option<F>,
}

impl<F: FnOnce()> MutEventSubscriber for Later<F> {
    fn process(&mut self, _: Events, ops: &mut EventOps<'_>) {
        let _ = ops.remove(self.timer.events(0));
        if let Some(what) = self.what.take() {
            what();
        }
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        watch(ops, self.timer.events(0));
        self.timer.set(self.due);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Sender, channel};

    struct Rung {
        bell: Bell,
        told: Sender<&'static str>,
    }

    impl MutEventSubscriber for Rung {
        fn process(&mut self, _: Events, _: &mut EventOps<'_>) {
            self.told.send("rung").unwrap();
        }

        fn init(&mut self, ops: &mut EventOps<'_>) {
            watch(ops, self.bell.events(0));
        }
    }

    impl Drop for Rung {
        fn drop(&mut self) {
            self.told.send("gone").unwrap();
        }
    }

    #[test]
    fn bells_call_subscribers_until_they_are_closed() {
        let events = EventLoop::start(Thread::Events).unwrap();
        let (told, hears) = channel();
        let bell = Bell::new().unwrap();
        let rung = Rung { bell: bell.clone(), told };
        let subscription = events.handle().add(Box::new(rung)).unwrap();
        for _ in 0..3 {
            bell.ring();
            assert_eq!(hears.recv(), Ok("rung"));
        }
        subscription.close();
        assert_eq!(hears.try_recv(), Ok("gone"));
        bell.ring();
        assert!(hears.recv().is_err());
    }

    // The end of a run must not wait for timers, and what they would do must not happen after it.
    #[test]
    fn what_is_for_later_happens_then_or_never() {
        let events = EventLoop::start(Thread::Events).unwrap();
        let (told, hears) = channel();
        let late = told.clone();
        events.handle().after(Duration::from_secs(3600), move || late.send("late").unwrap());
        let begin = Instant::now();
        events.handle().after(Duration::from_millis(20), move || told.send("soon").unwrap());
        assert_eq!(hears.recv(), Ok("soon"));
        assert!(begin.elapsed() >= Duration::from_millis(20));
        let handle = events.handle();
        drop(events);
        assert!(hears.recv().is_err());
        assert!(begin.elapsed() < Duration::from_secs(1000));
        assert!(
            handle
                .add(Box::new(Later { timer: Timer::new().unwrap(), due: None, what: Some(|| ()) }))
                .is_err()
        );
    }
}
