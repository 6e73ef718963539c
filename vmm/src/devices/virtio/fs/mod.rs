//! A file system device (virtio 1.2, section 5.11) without DAX. It forwards FUSE messages of the
//! guest to a [`Share`]'s socket, and the answers to the guest. Another process (`vmtrace-share`)
//! accesses the files. This device only moves bytes, as a subscriber of the event loop.

#[cfg(test)]
mod tests;
mod worker;

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use virtio_bindings::virtio_ids::VIRTIO_ID_FS;
use vmm_sys_util::eventfd::EventFd;
use zerocopy::little_endian::U32;
use zerocopy::{Immutable, IntoBytes};

use super::{Activation, Broken, VirtioDevice, read_part};
use crate::events::{Handle, Subscription};
use worker::{Mover, Shared};

/// Bytes of a tag (section 5.11.4).
pub const MAX_TAG: usize = 36;

/// Descriptors of a queue, and of a request at most: 1 MiB of pages, and headers.
const QUEUE_SIZE: u16 = 512;

/// A directory that somebody serves.
#[derive(Debug)]
pub struct Share {
    /// What the guest mounts it by, at most [`MAX_TAG`] bytes.
    pub tag: String,
    /// Who answers: one FUSE message after the other, in both directions.
    pub server: UnixStream,
}

/// `struct virtio_fs_config`
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct Config {
    tag: [u8; MAX_TAG],
    request_queues: U32,
}

/// The device. Dropping it ends the connection to the server.
pub struct Fs {
    config: Config,
    shared: Arc<Shared>,
    _subscription: Option<Subscription>,
}

impl Fs {
    /// A device whose bytes this event loop moves.
    ///
    /// # Errors
    /// If the system has no descriptors left, or the loop has ended.
    pub fn new(share: Share, events: &Handle) -> io::Result<Fs> {
        let mut device = Fs::unserved(share)?;
        device._subscription = Some(events.add(Box::new(Mover::new(&device.shared)?))?);
        Ok(device)
    }

    /// A device that does something only when its worker is given its turn.
    ///
    /// # Errors
    /// As [`Fs::new`].
    pub fn with_worker(share: Share) -> io::Result<(Fs, Worker)> {
        let device = Fs::unserved(share)?;
        let worker = Worker(Arc::clone(&device.shared));
        Ok((device, worker))
    }

    fn unserved(share: Share) -> io::Result<Fs> {
        let mut tag = [0; MAX_TAG];
        for (to, from) in tag.iter_mut().zip(share.tag.bytes()) {
            *to = from;
        }
        let config = Config { tag, request_queues: U32::new(1) };
        Ok(Fs { config, shared: Arc::new(Shared::new(share)?), _subscription: None })
    }
}

impl VirtioDevice for Fs {
    fn device_id(&self) -> u32 {
        VIRTIO_ID_FS
    }

    /// What nobody waits for, and requests.
    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE; worker::QUEUES]
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_part(self.config.as_bytes(), offset, data);
    }

    fn activate(&mut self, active: Activation) -> Result<(), Broken> {
        self.shared.activate(active)
    }

    fn notify(&mut self, _queue: usize) -> Result<(), Broken> {
        self.shared.bell.ring();
        Ok(())
    }

    fn doorbell(&self) -> Option<&EventFd> {
        Some(self.shared.bell.descriptor())
    }

    fn reset(&mut self) {
        self.shared.reset();
    }
}

impl Drop for Fs {
    fn drop(&mut self) {
        self.shared.end();
    }
}

/// The event loop's part, for those who give it its turns themselves: tests.
pub struct Worker(Arc<Shared>);

impl Worker {
    /// Does what there is to do now.
    pub fn turn(&mut self) {
        while self.0.turn() {}
    }
}
