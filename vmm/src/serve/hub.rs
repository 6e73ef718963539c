//! Where the relay's stream ends: the primary output, and any number of consumers.

use super::consumer::{self, Join, Resolve};
use super::queue::{Chunk, Queue};
use super::request::Origin;
use super::server::refuse;
use std::io::{Result, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What a consumer of the host may be behind by before it loses records; bytes. One of the
/// guest has a quarter of it: no guest shall have much of the host's memory.
const QUEUE: usize = 64 << 20;
/// Consumers at once, of the host and of the guest each.
const MAX_CONSUMERS: usize = 32;
const MAX_GUEST_CONSUMERS: usize = 8;
/// At the end: how long a consumer may take nothing before it is left.
const PATIENCE: Duration = Duration::from_secs(5);

/// The sink of the relay's stream writer. It is given whole frames only.
///
/// The primary output gets every byte, and the relay waits for it. Consumers never make it
/// wait.
pub struct Hub {
    primary: Box<dyn Write + Send>,
    consumers: Vec<Consumer>,
    vcpus: usize,
    capacity: usize,
    resolve: Resolve,
}

struct Consumer {
    queue: Arc<Queue>,
    stream: UnixStream,
    origin: Origin,
    thread: JoinHandle<()>,
}

impl Hub {
    /// A hub for the stream of a machine with so many vCPUs.
    #[must_use]
    pub fn new(primary: Box<dyn Write + Send>, vcpus: usize, resolve: Resolve) -> Self {
        Self { primary, consumers: Vec::new(), vcpus, capacity: QUEUE, resolve }
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
    /// When there is no thread for it.
    pub fn add(&mut self, first: Vec<u8>, join: Join) -> Result<()> {
        self.consumers.retain(|consumer| !consumer.thread.is_finished());
        let origin = join.origin;
        let (most, capacity) = match origin {
            Origin::Host => (MAX_CONSUMERS, self.capacity),
            Origin::Guest => (MAX_GUEST_CONSUMERS, self.capacity / 4),
        };
        if self.consumers.iter().filter(|consumer| consumer.origin == origin).count() >= most {
            refuse(&join.stream, &format!("there are {most} consumers already"));
            return Ok(());
        }
        let queue = Arc::new(Queue::new(capacity, self.vcpus));
        queue.push_first(first.into());
        let stream = join.stream.try_clone()?;
        let thread = std::thread::Builder::new().name("consumer".into()).spawn({
            let (queue, resolve) = (Arc::clone(&queue), Arc::clone(&self.resolve));
            move || consumer::feed(&queue, join, &resolve)
        })?;
        self.consumers.push(Consumer { queue, stream, origin, thread });
        Ok(())
    }

    /// How many consumers there are.
    #[must_use]
    pub fn consumers(&self) -> usize {
        self.consumers.iter().filter(|consumer| !consumer.thread.is_finished()).count()
    }

    /// The stream has ended: lets every consumer take the rest, as long as it takes anything.
    pub fn finish(&mut self) {
        let consumers = std::mem::take(&mut self.consumers);
        consumers.iter().for_each(|consumer| consumer.queue.end());
        for consumer in consumers {
            let mut seen = (consumer.queue.taken(), Instant::now());
            while !consumer.thread.is_finished() {
                std::thread::sleep(Duration::from_millis(2));
                let taken = consumer.queue.taken();
                if taken != seen.0 {
                    seen = (taken, Instant::now());
                } else if seen.1.elapsed() > PATIENCE {
                    consumer.queue.leave();
                    let _ = consumer.stream.shutdown(Shutdown::Both);
                }
            }
            let _ = consumer.stream.shutdown(Shutdown::Both);
            // It has ended; a panic in it was its own.
            let _ = consumer.thread.join();
        }
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
