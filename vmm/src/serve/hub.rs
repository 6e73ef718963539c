//! Where the relay's stream ends: the primary output, and any number of consumers.

use super::consumer::{Consumer, Join, Resolve, wait_for_all};
use super::queue::{Chunk, Queue};
use super::request::Origin;
use super::server::refuse;
use crate::events::{EventLoop, Subscription};
use std::io::{Result, Write};
use std::sync::Arc;

/// What a consumer of the host may be behind by before it loses records; bytes. One of the
/// guest has a quarter of it: no guest shall have much of the host's memory.
const QUEUE: usize = 64 << 20;
/// Consumers at once, of the host and of the guest each.
const MAX_CONSUMERS: usize = 32;
const MAX_GUEST_CONSUMERS: usize = 8;

/// The sink of the relay's stream writer. It is given whole frames only.
///
/// The primary output gets every byte, and the relay waits for it. Consumers never make it
/// wait.
pub struct Hub {
    primary: Box<dyn Write + Send>,
    consumers: Vec<Place>,
    /// Serves all consumers, once there was one. Making text of a stream is work, which sockets
    /// of the guest and the console shall not wait for.
    events: Option<EventLoop>,
    vcpus: usize,
    capacity: usize,
    resolve: Resolve,
}

struct Place {
    queue: Arc<Queue>,
    origin: Origin,
    _subscription: Subscription,
}

impl Hub {
    /// A hub for the stream of a machine with so many vCPUs.
    #[must_use]
    pub fn new(primary: Box<dyn Write + Send>, vcpus: usize, resolve: Resolve) -> Self {
        Self { primary, consumers: Vec::new(), events: None, vcpus, capacity: QUEUE, resolve }
    }

    /// The same with another limit for what consumers may be behind by, in bytes.
    #[must_use]
    pub fn with_capacity(mut self, bytes: usize) -> Self {
        self.capacity = bytes;
        self
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
        let events = match &mut self.events {
            Some(events) => events,
            none => none.insert(EventLoop::start("consumers")?),
        };
        let queue = Arc::new(Queue::new(capacity, self.vcpus)?);
        queue.push_first(first.into());
        let consumer = Consumer::new(Arc::clone(&queue), join, Arc::clone(&self.resolve))?;
        let subscription = events.handle().add(Box::new(consumer))?;
        self.consumers.push(Place { queue, origin, _subscription: subscription });
        Ok(())
    }

    /// How many consumers there are.
    #[must_use]
    pub fn consumers(&self) -> usize {
        self.consumers.iter().filter(|consumer| !consumer.queue.is_left()).count()
    }

    /// The stream has ended: lets every consumer take the rest, if it does in time.
    pub fn finish(&mut self) {
        let places = std::mem::take(&mut self.consumers);
        let queues: Vec<_> = places.iter().map(|place| Arc::clone(&place.queue)).collect();
        wait_for_all(&queues);
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.finish();
    }
}

impl Write for Hub {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        self.primary.write_all(bytes)?;
        if !self.consumers.is_empty() {
            let chunk: Chunk = bytes.into();
            self.consumers.retain(|consumer| consumer.queue.push(&chunk));
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> Result<()> {
        self.primary.flush()
    }
}
