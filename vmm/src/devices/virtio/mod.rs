//! Virtio devices (virtio 1.2), without the legacy interface.
//!
//! A device implements [`VirtioDevice`]; [`MmioTransport`] presents it to the guest. The guest
//! controls rings and everything in them: `virtio-queue` or the device checks whatever is read from
//! there.

pub mod blk;
mod buffers;
pub mod fs;
mod mmio;
mod rng;
#[cfg(test)]
mod test_line;
pub mod vsock;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use virtio_bindings::virtio_mmio::{VIRTIO_MMIO_INT_CONFIG, VIRTIO_MMIO_INT_VRING};
use virtio_queue::Queue;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;

pub use mmio::MmioTransport;
pub use rng::Rng;

use super::{Gate, IrqLine};

/// A device behind a transport. Called under the transport's lock, by vCPU threads.
pub trait VirtioDevice: Send {
    /// The kind of device (virtio 1.2, section 5).
    fn device_id(&self) -> u32;

    /// Feature bits of this kind of device. The transport adds what every device here has:
    /// `VERSION_1`, event indices, indirect descriptors.
    fn features(&self) -> u64 {
        0
    }

    /// The most descriptors that each of its queues can have, powers of two.
    fn queue_sizes(&self) -> &[u16];

    /// Reads its configuration; what it does not have stays zero.
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let _ = (offset, data);
    }

    /// Writes its configuration.
    fn write_config(&mut self, offset: u64, data: &[u8]) {
        let _ = (offset, data);
    }

    /// The driver is ready: from now on, until [`VirtioDevice::reset`], the queues are the
    /// device's.
    fn activate(&mut self, active: Activation) -> Result<(), Broken>;

    /// The driver has put something into this queue. Only called while the device is active.
    fn notify(&mut self, queue: usize) -> Result<(), Broken>;

    /// An event that may be signalled instead of [`VirtioDevice::notify`], for any queue and at
    /// any time, so that KVM can do it without the vCPU's leaving the guest for long.
    fn doorbell(&self) -> Option<&EventFd> {
        None
    }

    /// Forgets everything since it was made. When this returns, the queues are touched no more.
    fn reset(&mut self);
}

/// Reads what a configuration has from there on; what it does not have stays as it is.
fn read_part(config: &[u8], offset: u64, data: &mut [u8]) {
    let rest = usize::try_from(offset).ok().and_then(|offset| config.get(offset..));
    for (to, from) in data.iter_mut().zip(rest.unwrap_or_default()) {
        *to = *from;
    }
}

/// What a device gets when its driver is ready.
pub struct Activation {
    /// The guest's RAM.
    pub memory: GuestMemoryMmap,
    /// A queue for each size, `None` where the driver has set none up. Valid, that is within RAM.
    pub queues: Vec<Option<Queue>>,
    /// The negotiated feature bits.
    pub features: u64,
    /// How the device tells its driver.
    pub interrupt: Arc<Interrupt>,
    /// Where a thread of the device's own must enter before it touches the memory. vCPU threads
    /// must not.
    pub gate: Arc<Gate>,
}

/// The device cannot go on because of what its driver did; only a reset helps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the driver made an error that only a reset clears")]
pub struct Broken;

impl From<virtio_queue::Error> for Broken {
    fn from(error: virtio_queue::Error) -> Broken {
        log::debug!("virtio: {error}");
        Broken
    }
}

/// A device's interrupt and what it stands for.
pub struct Interrupt {
    /// Locked while the line changes, too: a device's thread may raise what a vCPU acknowledges.
    status: Mutex<u32>,
    needs_reset: AtomicBool,
    line: Arc<dyn IrqLine>,
}

impl Interrupt {
    fn new(line: Arc<dyn IrqLine>) -> Interrupt {
        let needs_reset = AtomicBool::new(false);
        Interrupt { status: Mutex::new(0), needs_reset, line }
    }

    /// Buffers of some queue have been used.
    pub fn used_buffers(&self) {
        self.raise(VIRTIO_MMIO_INT_VRING);
    }

    /// The configuration has changed.
    pub fn config_changed(&self) {
        self.raise(VIRTIO_MMIO_INT_CONFIG);
    }

    /// The device is broken: what [`Broken`] is to a caller, for a thread of the device's own.
    pub fn needs_reset(&self) {
        self.needs_reset.store(true, Ordering::SeqCst);
        self.config_changed();
    }

    fn is_broken(&self) -> bool {
        self.needs_reset.load(Ordering::SeqCst)
    }

    /// The driver has reset the device.
    fn forget(&self) {
        self.needs_reset.store(false, Ordering::SeqCst);
        self.acknowledge(u32::MAX);
    }

    fn lock(&self) -> MutexGuard<'_, u32> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn raise(&self, bit: u32) {
        let mut status = self.lock();
        *status |= bit;
        self.line.assert();
    }

    fn status(&self) -> u32 {
        *self.lock()
    }

    fn acknowledge(&self, bits: u32) {
        let mut status = self.lock();
        *status &= !bits;
        if *status == 0 {
            self.line.deassert();
        }
    }
}
