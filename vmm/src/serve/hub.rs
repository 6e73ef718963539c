//! Distributes the relay's stream to the primary output and any number of consumers.

use super::consumer::{Consumer, Join, Resolve};
use super::patience::Patience;
use super::primary::{Primary, Sink, Unwritten};
use super::queue::{Chunk, Queue};
use super::request::Origin;
use super::server::refuse;
use super::watcher::Watched;
use crate::deadline::Pulse;
use crate::events::{EventLoop, Subscription};
use crate::sandbox::Thread;
use crate::stream::frame_spans;
use std::io::{Result, Write};
use std::sync::Arc;
use std::time::Duration;

/// How many bytes a consumer of the host may be behind before it loses records. A consumer of the
/// guest has a quarter of it, so that no guest takes much of the host's memory.
const QUEUE: usize = 64 << 20;
/// Consumers at once, of the host and of the guest each.
const MAX_CONSUMERS: usize = 32;
const MAX_GUEST_CONSUMERS: usize = 8;

/// The sink of the relay's stream writer. It is given whole frames only.
///
/// The primary output gets every byte: records are left in their rings while
/// [`Hub::has_room`] is false. Neither it nor consumers ever make the relay wait.
pub struct Hub {
    primary: Primary,
    consumers: Vec<Place>,
    /// What looks at the stream within vmtrace.
    watchers: Vec<(Arc<Queue>, Subscription)>,
    /// Serves all consumers, once there was one. Making text of a stream is work, which sockets
    /// of the guest and the console shall not wait for.
    events: Option<EventLoop>,
    vcpus: usize,
    capacity: usize,
    resolve: Resolve,
    /// Told while consumers are waited for.
    pulse: Pulse,
}

struct Place {
    queue: Arc<Queue>,
    origin: Origin,
    _subscription: Subscription,
}

impl Hub {
    /// A hub for the stream of a machine with so many vCPUs.
    ///
    /// # Errors
    /// When the system has no thread left.
    pub fn new(primary: impl Into<Sink>, vcpus: usize, resolve: Resolve) -> Result<Self> {
        let primary = Primary::start(primary)?;
        Ok(Self {
            primary,
            consumers: Vec::new(),
            watchers: Vec::new(),
            events: None,
            vcpus,
            capacity: QUEUE,
            resolve,
            pulse: Pulse::default(),
        })
    }

    /// The same with another limit for what consumers may be behind by, in bytes.
    #[must_use]
    pub fn with_capacity(mut self, bytes: usize) -> Self {
        self.capacity = bytes;
        self
    }

    /// The same with another limit for what may wait for the primary output, in bytes.
    #[must_use]
    pub fn with_room(mut self, bytes: usize) -> Self {
        self.primary.set_capacity(bytes);
        self
    }

    /// Has somebody told that the wait for consumers goes on.
    pub(crate) fn set_pulse(&mut self, pulse: Pulse) {
        self.pulse = pulse;
    }

    /// Adds a consumer, or refuses it when there are too many; `first` is what
    /// [`Writer::join`](crate::stream::Writer::join) gave, or nothing before the first byte of
    /// the stream.
    ///
    /// # Errors
    /// When the system has no descriptors or threads left.
    pub fn add(&mut self, first: Vec<u8>, join: Join) -> Result<()> {
        self.consumers.retain(|consumer| !consumer.queue.is_left());
        let origin = join.origin;
        let (most, capacity) = match origin {
            Origin::Host => (MAX_CONSUMERS, self.capacity),
            Origin::Guest => (MAX_GUEST_CONSUMERS, self.capacity / 4),
        };
        if self.consumers.iter().filter(|consumer| consumer.origin == origin).count() >= most {
            refuse(&join.stream, &format!("there are {most} consumers already"));
            return Ok(());
        }
        let queue = Arc::new(Queue::new(capacity, self.vcpus)?);
        queue.push_first(first.into());
        let consumer = Consumer::new(Arc::clone(&queue), join, Arc::clone(&self.resolve))?;
        let subscription = self.events()?.handle().add(Box::new(consumer))?;
        self.consumers.push(Place { queue, origin, _subscription: subscription });
        Ok(())
    }

    /// Lets something look at the stream, as a consumer that does not count as one.
    ///
    /// # Errors
    /// When the system has no descriptors or threads left.
    pub fn watch(&mut self, first: Vec<u8>, watched: Watched) -> Result<()> {
        let (watcher, queue) = watched.subscriber(first);
        let subscription = self.events()?.handle().add(watcher)?;
        self.watchers.push((queue, subscription));
        Ok(())
    }

    #[cfg(test)]
    pub(super) fn watchers(&self) -> usize {
        self.watchers.len()
    }

    fn events(&mut self) -> Result<&EventLoop> {
        Ok(match &mut self.events {
            Some(events) => events,
            none => none.insert(EventLoop::start(Thread::Consumers)?),
        })
    }

    /// How many consumers there are.
    #[must_use]
    pub fn consumers(&self) -> usize {
        self.consumers.iter().filter(|consumer| !consumer.queue.is_left()).count()
    }

    /// The primary output.
    #[must_use]
    pub fn primary(&self) -> &Primary {
        &self.primary
    }

    /// The stream has ended: lets the primary output and every consumer take the rest, if they do
    /// in time. `patience` is that with the primary output: see [`Primary::wait_for_room`].
    /// Returns what the primary output did not take.
    ///
    /// # Errors
    /// When the primary output fails.
    pub fn finish(&mut self, patience: impl Fn(u64) -> Option<Duration>) -> Result<Unwritten> {
        let places = std::mem::take(&mut self.consumers);
        places.iter().for_each(|place| place.queue.end());
        self.watchers.iter().for_each(|(queue, _)| queue.end());
        let of_consumers = Patience::new();
        let unwritten = self.primary.finish(patience);
        places.iter().for_each(|place| place.queue.wait_over(&of_consumers, &self.pulse));
        // Somebody may want to know what they have made of the stream.
        self.watchers.iter().for_each(|(queue, _)| queue.wait_over(&of_consumers, &self.pulse));
        unwritten
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        // After an error: what was written before is still to come out.
        let (patience, begun) = (Patience::new(), self.primary.taken());
        let _ = self.finish(|taken| patience.left(taken.saturating_sub(begun)));
    }
}

impl Write for Hub {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        let records = frame_spans(bytes).filter_map(|span| span.records);
        self.primary.push(bytes, records.map(|(_, count)| u64::from(count)).sum())?;
        if !self.consumers.is_empty() || !self.watchers.is_empty() {
            let chunk: Chunk = bytes.into();
            self.consumers.retain(|consumer| consumer.queue.push(&chunk));
            self.watchers.retain(|(queue, _)| queue.push(&chunk));
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}
