//! The device as its transport uses it, and the handle by which code of this process uses it.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;
use vmm_sys_util::eventfd::EventFd;

use super::connection::Requester;
use super::muxer::Reach;
use super::rings::Rings;
use super::worker::{Driver, Mover, Shared, Worker, system};
use super::{ConnectError, GUEST_CID, Incoming, Options, PortTaken, VsockError};
use crate::devices::virtio::{Activation, Broken, VirtioDevice, read_part};
use crate::events::{Handle, Subscription};
use vmtrace_system::private_socket::PrivateListener;
use vmtrace_system::raise_descriptor_limit;

/// Receive, transmit, events.
const QUEUE_SIZES: [u16; 3] = [256, 256, 16];
/// `VIRTIO_VSOCK_F_STREAM`.
const FEATURE_STREAM: u64 = 1 << 0;

/// The device. Dropping it ends all connections and removes the host's socket.
pub struct Vsock {
    cid: u32,
    shared: Arc<Shared>,
    /// Its place in an event loop.
    subscription: Option<Subscription>,
}

/// The host's side, for this process; clones are the same.
#[derive(Clone)]
pub struct Host {
    shared: Arc<Shared>,
}

impl Vsock {
    /// A device that this event loop serves.
    ///
    /// # Errors
    /// If the CID is reserved, if the socket cannot be made, or if the system has no descriptors
    /// left.
    pub fn new(options: &Options, events: &Handle) -> Result<(Vsock, Host), VsockError> {
        let mut device = Vsock::unserved(options)?;
        let host = Host { shared: Arc::clone(&device.shared) };
        let mover = Box::new(Mover::new(Arc::clone(&device.shared))?);
        let subscription = events.add(mover).map_err(system("wait for events"))?;
        device.subscription = Some(subscription);
        Ok((device, host))
    }

    /// A device that does something only when its worker is given its turn.
    ///
    /// # Errors
    /// As [`Vsock::new`].
    pub fn with_worker(options: &Options) -> Result<(Vsock, Host, Worker), VsockError> {
        let device = Vsock::unserved(options)?;
        let host = Host { shared: Arc::clone(&device.shared) };
        let worker = Worker::new(Arc::clone(&device.shared))?;
        Ok((device, host, worker))
    }

    fn unserved(options: &Options) -> Result<Vsock, VsockError> {
        let Options { cid, socket, gateway, limits } = options;
        if !(GUEST_CID..u32::MAX).contains(cid) {
            return Err(VsockError::Cid(*cid));
        }
        raise_descriptor_limit();
        let listener = socket.as_deref().map(PrivateListener::bind).transpose()?;
        let reach = Reach { gateway: gateway.clone(), socket: socket.clone() };
        let shared = Arc::new(Shared::new(*cid, listener, reach, limits.clone())?);
        Ok(Vsock { cid: *cid, shared, subscription: None })
    }
}

impl VirtioDevice for Vsock {
    fn device_id(&self) -> u32 {
        VIRTIO_ID_VSOCK
    }

    fn features(&self) -> u64 {
        FEATURE_STREAM
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_part(&u64::from(self.cid).to_le_bytes(), offset, data);
    }

    fn activate(&mut self, active: Activation) -> Result<(), Broken> {
        let gate = Arc::clone(&active.gate);
        let rings = Rings::new(active)?;
        let mut core = self.shared.lock();
        core.driver = Some(Driver { rings, gate });
        core.driver_seen = true;
        drop(core);
        // There may be packets already.
        self.shared.bell.ring();
        Ok(())
    }

    fn notify(&mut self, _queue: usize) -> Result<(), Broken> {
        self.shared.bell.ring();
        Ok(())
    }

    fn doorbell(&self) -> Option<&EventFd> {
        Some(self.shared.bell.descriptor())
    }

    fn reset(&mut self) {
        let mut core = self.shared.lock();
        core.driver = None;
        core.muxer.forget_all();
        drop(core);
        // Sockets are closed there.
        self.shared.bell.ring();
    }
}

impl Drop for Vsock {
    fn drop(&mut self) {
        if let Some(subscription) = self.subscription.take() {
            subscription.close();
        }
        let mut core = self.shared.lock();
        core.ended = true;
        core.driver = None;
        core.muxer.close();
    }
}

impl Host {
    /// Has `service` called for every connection of the guest to `port`.
    ///
    /// The event loop calls it, and does nothing else meanwhile: it should pass the connection
    /// on and return. Dropping the connection closes it.
    ///
    /// # Errors
    /// If the port has a service already.
    pub fn listen(
        &self,
        port: u32,
        service: impl FnMut(Incoming) + Send + 'static,
    ) -> Result<(), PortTaken> {
        let service = Arc::new(Mutex::new(service));
        if self.shared.lock().muxer.serve(port, service) { Ok(()) } else { Err(PortTaken(port)) }
    }

    /// Connects a client to a port of the guest, and returns at once. The client reads `OK` and a
    /// newline, and from then on what the guest sends; or `ERR`, a space and what `refusal` makes
    /// of the error (one line), and then the end. The guest has to answer within `limit`, and
    /// within [`Limits::connect_time`](super::Limits::connect_time).
    pub fn pass(
        &self,
        client: UnixStream,
        port: u32,
        limit: Duration,
        refusal: impl FnOnce(ConnectError) -> String + Send + 'static,
    ) {
        let mut core = self.shared.lock();
        let error = match core.driver {
            _ if core.ended => Some(ConnectError::Ended),
            None => Some(ConnectError::NoDriver),
            Some(_) if core.muxer.is_full() => Some(ConnectError::TooMany),
            Some(_) => client.set_nonblocking(true).err().map(|_| ConnectError::Host),
        };
        match error {
            None => {
                let requester = Requester::Passed(Box::new(refusal));
                core.muxer.request_for(port, client, requester, limit);
                drop(core);
                self.shared.bell.ring();
            }
            Some(error) => {
                // Who does not wait for the answer does not get it.
                let _ = (&client).write_all(format!("ERR {}\n", refusal(error)).as_bytes());
            }
        }
    }

    /// Whether the guest has ever had a driver for the device.
    #[must_use]
    pub fn driver_seen(&self) -> bool {
        self.shared.lock().driver_seen
    }

    /// Connections at present, with those that are being opened or closed.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.shared.lock().muxer.load()
    }
}
