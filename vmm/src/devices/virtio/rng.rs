//! An entropy device: the host's random numbers for the guest (virtio 1.2, section 5.4).

use std::io::{Read, Write as _};

use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::GuestMemoryMmap;

use super::{Activation, Broken, VirtioDevice};

const QUEUE_SIZES: [u16; 1] = [64];
/// The most that one request gets, in bytes: buffers are the guest's, and could be huge.
const MAX_REQUEST: usize = 4096;
/// How often the queue is looked at again for what was added meanwhile: a driver that adds without
/// end shall not keep the vCPU here.
const MAX_ROUNDS: usize = 16;

/// See the module.
pub struct Rng {
    source: Box<dyn Read + Send>,
    active: Option<(Queue, Activation)>,
}

impl Rng {
    /// A device that gets its bytes from `source`.
    #[must_use]
    pub fn new(source: Box<dyn Read + Send>) -> Rng {
        Rng { source, active: None }
    }

    fn serve(
        source: &mut dyn Read,
        queue: &mut Queue,
        memory: &GuestMemoryMmap,
    ) -> Result<(), Broken> {
        let mut bytes = [0; MAX_REQUEST];
        for _ in 0..QUEUE_SIZES[0] {
            let Some(chain) = queue.iter(memory)?.next() else { break };
            let head = chain.head_index();
            let mut writer = chain.writer(memory)?;
            let wanted = writer.available_bytes().min(MAX_REQUEST);
            let got = source.read(&mut bytes[..wanted]).unwrap_or(0);
            writer.write_all(&bytes[..got]).map_err(|_| Broken)?;
            queue.add_used(memory, head, u32::try_from(got).unwrap_or(0))?;
        }
        Ok(())
    }
}

impl VirtioDevice for Rng {
    fn device_id(&self) -> u32 {
        VIRTIO_ID_RNG
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn activate(&mut self, mut active: Activation) -> Result<(), Broken> {
        let queue = active.queues.pop().flatten().ok_or(Broken)?;
        self.active = Some((queue, active));
        Ok(())
    }

    fn notify(&mut self, _queue: usize) -> Result<(), Broken> {
        let Some((queue, active)) = &mut self.active else { return Ok(()) };
        let memory = &active.memory;
        for _ in 0..MAX_ROUNDS {
            queue.disable_notification(memory)?;
            Self::serve(&mut *self.source, queue, memory)?;
            // True if something came after all.
            if !queue.enable_notification(memory)? {
                break;
            }
        }
        if queue.needs_notification(memory)? {
            active.interrupt.used_buffers();
        }
        Ok(())
    }

    fn reset(&mut self) {
        self.active = None;
    }
}
