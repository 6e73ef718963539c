//! The device as its transport sees it, and the handle of those in this process who use it.

use std::os::unix::net::UnixStream;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;
use vmm_sys_util::eventfd::EventFd;

use super::connection::Requester;
use super::muxer::{Reach, pair};
use super::rings::Rings;
use super::worker::{Driver, Shared, Worker};
use super::{ConnectError, GUEST_CID, Incoming, Options, PortTaken, VsockError};
use crate::devices::virtio::{Activation, Broken, VirtioDevice};
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
    thread: Option<JoinHandle<()>>,
}

/// The host's side, for this process; clones are the same.
#[derive(Clone)]
pub struct Host {
    shared: Arc<Shared>,
}

impl Vsock {
    /// A device with a thread of its own.
    ///
    /// # Errors
    /// If the CID is reserved, if the socket cannot be made, or if the system has no descriptors
    /// or threads left.
    pub fn new(options: &Options) -> Result<(Vsock, Host), VsockError> {
        let (mut device, host, worker) = Vsock::without_thread(options)?;
        let thread = std::thread::Builder::new().name("vsock".into()).spawn(|| worker.run());
        device.thread =
            Some(thread.map_err(|source| VsockError::System { what: "start a thread", source })?);
        Ok((device, host))
    }

    /// A device that does something only when its worker is given its turn.
    ///
    /// # Errors
    /// As [`Vsock::new`].
    pub fn without_thread(options: &Options) -> Result<(Vsock, Host, Worker), VsockError> {
        let Options { cid, socket, gateway, limits } = options;
        if !(GUEST_CID..u32::MAX).contains(cid) {
            return Err(VsockError::Cid(*cid));
        }
        raise_descriptor_limit();
        let listener = socket.as_deref().map(PrivateListener::bind).transpose()?;
        let reach = Reach { gateway: gateway.clone(), socket: socket.clone() };
        let shared = Arc::new(Shared::new(*cid, listener, reach, limits.clone())?);
        let device = Vsock { cid: *cid, shared: Arc::clone(&shared), thread: None };
        Ok((device, Host { shared: Arc::clone(&shared) }, Worker::new(shared)))
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
        let config = u64::from(self.cid).to_le_bytes();
        let rest = usize::try_from(offset).ok().and_then(|offset| config.get(offset..));
        for (to, from) in data.iter_mut().zip(rest.unwrap_or_default()) {
            *to = *from;
        }
    }

    fn activate(&mut self, active: Activation) -> Result<(), Broken> {
        let gate = Arc::clone(&active.gate);
        let rings = Rings::new(active)?;
        let mut core = self.shared.lock();
        core.driver = Some(Driver { rings, gate });
        core.driver_seen = true;
        drop(core);
        // There may be packets already.
        self.shared.ring();
        Ok(())
    }

    fn notify(&mut self, _queue: usize) -> Result<(), Broken> {
        self.shared.ring();
        Ok(())
    }

    fn doorbell(&self) -> Option<&EventFd> {
        Some(&self.shared.bell)
    }

    fn reset(&mut self) {
        let mut core = self.shared.lock();
        core.driver = None;
        core.muxer.forget_all();
    }
}

impl Drop for Vsock {
    fn drop(&mut self) {
        {
            let mut core = self.shared.lock();
            core.ended = true;
            core.driver = None;
            core.muxer.close();
        }
        self.shared.ring();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            log::error!("vsock: the thread panicked");
        }
    }
}

impl Host {
    /// Has `service` called for every connection of the guest to `port`.
    ///
    /// The device's thread calls it, and moves no bytes meanwhile: it should pass the connection
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

    /// Connects to a port of the guest; waits for its answer, at most `limit` and at most
    /// [`Limits::connect_time`](super::Limits::connect_time). The stream is blocking.
    ///
    /// Not to be called by a service, nor by whoever keeps the machine paused: both keep the
    /// guest's answer away.
    ///
    /// # Errors
    /// If the guest has no driver, refuses, or does not answer.
    pub fn connect(&self, port: u32, limit: Duration) -> Result<UnixStream, ConnectError> {
        let (reply, answer) = sync_channel(1);
        {
            let mut core = self.shared.lock();
            if core.ended {
                return Err(ConnectError::Ended);
            }
            if core.driver.is_none() {
                return Err(ConnectError::NoDriver);
            }
            if core.muxer.is_full() {
                return Err(ConnectError::TooMany);
            }
            let (ours, theirs) = pair().map_err(|_| ConnectError::Host)?;
            core.muxer.request(port, ours, Requester::Service(reply, theirs));
        }
        self.shared.ring();
        match answer.recv_timeout(limit) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Timeout) => Err(ConnectError::TimedOut),
            Err(RecvTimeoutError::Disconnected) => Err(ConnectError::Ended),
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
