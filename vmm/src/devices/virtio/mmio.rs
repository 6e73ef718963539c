//! The memory-mapped transport (virtio 1.2, section 4.2), version 2.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_ACKNOWLEDGE, VIRTIO_CONFIG_S_DRIVER, VIRTIO_CONFIG_S_DRIVER_OK,
    VIRTIO_CONFIG_S_FAILED, VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET,
    VIRTIO_F_VERSION_1,
};
use virtio_bindings::virtio_mmio as reg;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddress, GuestMemoryMmap};

use super::{Activation, Broken, Interrupt, VirtioDevice};
use crate::devices::{Device, Gate, IrqLine, Outcome};

const MAGIC: u32 = u32::from_le_bytes(*b"virt");
const VERSION: u32 = 2;
const VENDOR: u32 = u32::from_le_bytes(*b"VMTR");

/// Features of every device behind this transport.
const TRANSPORT_FEATURES: u64 =
    1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC;

/// Makes a [`VirtioDevice`] one with memory-mapped registers.
///
/// Misuse by the driver is ignored where the standard does not say otherwise; where the device
/// cannot go on it asks for a reset.
pub struct MmioTransport {
    interrupt: Arc<Interrupt>,
    memory: GuestMemoryMmap,
    gate: Arc<Gate>,
    state: Mutex<State>,
}

/// What the driver has said about a queue: as yet only numbers.
#[derive(Debug, Clone, Copy, Default)]
struct QueueSetup {
    size: u32,
    ready: bool,
    descriptors: u64,
    available: u64,
    used: u64,
}

struct State {
    device: Box<dyn VirtioDevice>,
    status: u32,
    device_features_select: u32,
    driver_features_select: u32,
    driver_features: u64,
    queue_select: u32,
    queues: Vec<QueueSetup>,
}

impl MmioTransport {
    /// Length of the registers and the configuration behind them, in bytes.
    pub const LENGTH: u32 = 0x1000;

    /// A transport for `device`, whose queues are in `memory`, which is guarded by `gate`.
    #[must_use]
    pub fn new(
        device: Box<dyn VirtioDevice>,
        memory: GuestMemoryMmap,
        gate: Arc<Gate>,
        irq: Arc<dyn IrqLine>,
    ) -> MmioTransport {
        let mut state = State {
            device,
            status: 0,
            device_features_select: 0,
            driver_features_select: 0,
            driver_features: 0,
            queue_select: 0,
            queues: Vec::new(),
        };
        state.forget();
        let interrupt = Arc::new(Interrupt::new(irq));
        MmioTransport { interrupt, memory, gate, state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read_register(&self, offset: u32) -> u32 {
        let state = self.lock();
        match offset {
            reg::VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            reg::VIRTIO_MMIO_VERSION => VERSION,
            reg::VIRTIO_MMIO_DEVICE_ID => state.device.device_id(),
            reg::VIRTIO_MMIO_VENDOR_ID => VENDOR,
            reg::VIRTIO_MMIO_DEVICE_FEATURES => {
                half(state.features(), state.device_features_select)
            }
            reg::VIRTIO_MMIO_QUEUE_NUM_MAX => state.max_size().map_or(0, u32::from),
            reg::VIRTIO_MMIO_QUEUE_READY => state.queue().map_or(0, |queue| queue.ready.into()),
            reg::VIRTIO_MMIO_INTERRUPT_STATUS => self.interrupt.status(),
            reg::VIRTIO_MMIO_STATUS if self.interrupt.is_broken() => {
                state.status | VIRTIO_CONFIG_S_NEEDS_RESET
            }
            reg::VIRTIO_MMIO_STATUS => state.status,
            // There is no shared memory: a length of -1 says so.
            reg::VIRTIO_MMIO_SHM_LEN_LOW
            | reg::VIRTIO_MMIO_SHM_LEN_HIGH
            | reg::VIRTIO_MMIO_SHM_BASE_LOW
            | reg::VIRTIO_MMIO_SHM_BASE_HIGH => u32::MAX,
            // Configurations here never change by themselves.
            _ => 0,
        }
    }

    fn write_register(&self, offset: u32, value: u32) {
        let mut state = self.lock();
        match offset {
            reg::VIRTIO_MMIO_DEVICE_FEATURES_SEL => state.device_features_select = value,
            reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL => state.driver_features_select = value,
            reg::VIRTIO_MMIO_DRIVER_FEATURES => state.accept_features(value),
            reg::VIRTIO_MMIO_QUEUE_SEL => state.queue_select = value,
            reg::VIRTIO_MMIO_QUEUE_NUM => state.set_up(|queue| queue.size = value),
            reg::VIRTIO_MMIO_QUEUE_READY => state.set_ready(value == 1),
            reg::VIRTIO_MMIO_QUEUE_DESC_LOW => state.set_up(|q| set_low(&mut q.descriptors, value)),
            reg::VIRTIO_MMIO_QUEUE_DESC_HIGH => {
                state.set_up(|q| set_high(&mut q.descriptors, value));
            }
            reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW => state.set_up(|q| set_low(&mut q.available, value)),
            reg::VIRTIO_MMIO_QUEUE_AVAIL_HIGH => {
                state.set_up(|q| set_high(&mut q.available, value));
            }
            reg::VIRTIO_MMIO_QUEUE_USED_LOW => state.set_up(|q| set_low(&mut q.used, value)),
            reg::VIRTIO_MMIO_QUEUE_USED_HIGH => state.set_up(|q| set_high(&mut q.used, value)),
            reg::VIRTIO_MMIO_QUEUE_NOTIFY => {
                let queue = usize::try_from(value).unwrap_or(usize::MAX);
                if state.active() && state.queues.get(queue).is_some_and(|queue| queue.ready) {
                    let result = state.device.notify(queue);
                    self.check(&mut state, result);
                }
            }
            reg::VIRTIO_MMIO_INTERRUPT_ACK => self.interrupt.acknowledge(value),
            reg::VIRTIO_MMIO_STATUS if value == 0 => {
                state.forget();
                self.interrupt.forget();
            }
            reg::VIRTIO_MMIO_STATUS => self.advance(&mut state, value),
            _ => {}
        }
    }

    /// The driver sets bits of the status. It cannot clear any but by a reset.
    fn advance(&self, state: &mut State, value: u32) {
        let news = value & !state.status;
        let has = |state: &State, bits: u32| state.status & bits == bits;
        let early = VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER;
        state.status |= news & (early | VIRTIO_CONFIG_S_FAILED);
        if news & VIRTIO_CONFIG_S_FEATURES_OK != 0 && has(state, early) {
            let accepted = state.driver_features;
            if accepted & !state.features() == 0 && accepted & 1 << VIRTIO_F_VERSION_1 != 0 {
                state.status |= VIRTIO_CONFIG_S_FEATURES_OK;
            }
        }
        let ready = early | VIRTIO_CONFIG_S_FEATURES_OK;
        if news & VIRTIO_CONFIG_S_DRIVER_OK != 0 && has(state, ready) {
            state.status |= VIRTIO_CONFIG_S_DRIVER_OK;
            let result = self.activate(state);
            self.check(state, result);
        }
    }

    fn activate(&self, state: &mut State) -> Result<(), Broken> {
        let features = state.driver_features;
        let mut queues = Vec::new();
        for (setup, max) in state.queues.iter().zip(state.device.queue_sizes()) {
            let queue = setup.ready.then(|| setup.queue(*max, features, &self.memory));
            queues.push(queue.transpose()?);
        }
        let (memory, gate) = (self.memory.clone(), Arc::clone(&self.gate));
        let interrupt = Arc::clone(&self.interrupt);
        state.device.activate(Activation { memory, queues, features, interrupt, gate })
    }

    fn check(&self, state: &mut State, result: Result<(), Broken>) {
        if result.is_err() {
            state.status |= VIRTIO_CONFIG_S_NEEDS_RESET;
            self.interrupt.config_changed();
        }
    }
}

impl State {
    fn features(&self) -> u64 {
        self.device.features() | TRANSPORT_FEATURES
    }

    fn active(&self) -> bool {
        let bits = VIRTIO_CONFIG_S_DRIVER_OK | VIRTIO_CONFIG_S_NEEDS_RESET;
        self.status & bits == VIRTIO_CONFIG_S_DRIVER_OK
    }

    /// Everything is as it was made.
    fn forget(&mut self) {
        self.device.reset();
        self.status = 0;
        self.device_features_select = 0;
        self.driver_features_select = 0;
        self.driver_features = 0;
        self.queue_select = 0;
        let queue = |max: &u16| QueueSetup { size: (*max).into(), ..QueueSetup::default() };
        self.queues = self.device.queue_sizes().iter().map(queue).collect();
    }

    fn selected(&self) -> usize {
        usize::try_from(self.queue_select).unwrap_or(usize::MAX)
    }

    fn queue(&self) -> Option<&QueueSetup> {
        self.queues.get(self.selected())
    }

    fn max_size(&self) -> Option<u16> {
        self.device.queue_sizes().get(self.selected()).copied()
    }

    fn accept_features(&mut self, value: u32) {
        if self.status & VIRTIO_CONFIG_S_FEATURES_OK != 0 {
            return;
        }
        match self.driver_features_select {
            0 => set_low(&mut self.driver_features, value),
            1 => set_high(&mut self.driver_features, value),
            _ => {}
        }
    }

    /// Changes the selected queue, if that is allowed now.
    fn set_up(&mut self, change: impl FnOnce(&mut QueueSetup)) {
        let (selected, running) = (self.selected(), self.status & VIRTIO_CONFIG_S_DRIVER_OK != 0);
        match self.queues.get_mut(selected) {
            Some(queue) if !running && !queue.ready => change(queue),
            _ => {}
        }
    }

    fn set_ready(&mut self, ready: bool) {
        let (selected, running) = (self.selected(), self.status & VIRTIO_CONFIG_S_DRIVER_OK != 0);
        match self.queues.get_mut(selected) {
            Some(queue) if !running => queue.ready = ready,
            _ => {}
        }
    }
}

impl QueueSetup {
    /// The queue that the driver has set up, if it can be one.
    fn queue(self, max: u16, features: u64, memory: &GuestMemoryMmap) -> Result<Queue, Broken> {
        let mut queue = Queue::new(max)?;
        queue.try_set_size(u16::try_from(self.size).map_err(|_| Broken)?)?;
        queue.try_set_desc_table_address(GuestAddress(self.descriptors))?;
        queue.try_set_avail_ring_address(GuestAddress(self.available))?;
        queue.try_set_used_ring_address(GuestAddress(self.used))?;
        queue.set_event_idx(features & 1 << VIRTIO_RING_F_EVENT_IDX != 0);
        queue.set_ready(true);
        if queue.is_valid(memory) { Ok(queue) } else { Err(Broken) }
    }
}

impl Device for MmioTransport {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let config = u64::from(reg::VIRTIO_MMIO_CONFIG);
        match (u32::try_from(offset), data.len()) {
            _ if offset >= config => self.lock().device.read_config(offset - config, data),
            (Ok(offset), 4) => data.copy_from_slice(&self.read_register(offset).to_le_bytes()),
            // Registers are 32 bits wide.
            _ => {}
        }
    }

    fn write(&self, offset: u64, data: &[u8]) -> Outcome {
        let config = u64::from(reg::VIRTIO_MMIO_CONFIG);
        match (u32::try_from(offset), <[u8; 4]>::try_from(data)) {
            _ if offset >= config => self.lock().device.write_config(offset - config, data),
            (Ok(offset), Ok(value)) => self.write_register(offset, u32::from_le_bytes(value)),
            _ => {}
        }
        Outcome::Continue
    }
}

fn half(value: u64, select: u32) -> u32 {
    let shifted = match select {
        0 => value,
        1 => value >> 32,
        _ => 0,
    };
    #[expect(clippy::cast_possible_truncation, reason = "one half")]
    let half = shifted as u32;
    half
}

fn set_low(value: &mut u64, low: u32) {
    *value = *value & !0xffff_ffff | u64::from(low);
}

fn set_high(value: &mut u64, high: u32) {
    *value = *value & 0xffff_ffff | u64::from(high) << 32;
}

#[cfg(test)]
#[path = "mmio_tests.rs"]
mod tests;
