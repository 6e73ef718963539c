//! What every machine has, whatever its architecture: serial ports, virtio devices, and the
//! judgement why a guest is gone.

use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use kvm_ioctls::{IoEventAddress, VmFd};
use virtio_bindings::virtio_mmio::VIRTIO_MMIO_QUEUE_NOTIFY;
use vm_memory::GuestMemoryMmap;

use super::{AgentSink, ConsoleSinks, ExitReason, MachineError};
use crate::devices::virtio::blk::{Block, Disk};
use crate::devices::virtio::fs::Fs;
use crate::devices::virtio::vsock::Vsock;
use crate::devices::virtio::{MmioTransport, Rng, VirtioDevice};
use crate::devices::{Bus, Gate, IrqLine, OutputPump, PanicWatch, PumpWriter, SerialPort};

/// How long a slow console may keep an exit from being reported.
const FLUSH_LIMIT: Duration = Duration::from_secs(2);

/// Serial ports and what is behind them.
pub(super) struct Board {
    console: Arc<SerialPort>,
    agent: Arc<SerialPort>,
    output: OutputPump,
    panic: Arc<PanicWatch>,
}

impl Board {
    /// A console and the agent's port, with their interrupts.
    pub(super) fn new(
        sinks: ConsoleSinks,
        console_irq: Arc<dyn IrqLine>,
        agent_irq: Arc<dyn IrqLine>,
    ) -> Result<Board, MachineError> {
        let panic = Arc::new(PanicWatch::default());
        let output = OutputPump::new(sinks.console).map_err(|source| MachineError::System {
            what: "start the console's thread",
            source,
        })?;
        let out = Box::new(Heard { sink: sinks.heard, out: output.writer() });
        let console = Arc::new(SerialPort::new(console_irq, out, Some(Arc::clone(&panic))));
        let agent = Arc::new(SerialPort::new(agent_irq, Box::new(AgentWriter(sinks.agent)), None));
        Ok(Board { console, agent, output, panic })
    }

    pub(super) fn console(&self) -> Arc<SerialPort> {
        Arc::clone(&self.console)
    }

    pub(super) fn agent(&self) -> Arc<SerialPort> {
        Arc::clone(&self.agent)
    }

    pub(super) fn panic_watch(&self) -> &PanicWatch {
        &self.panic
    }

    /// Waits until the console's sink has what the guest wrote.
    pub(super) fn flush(&self) {
        self.output.flush(FLUSH_LIMIT);
    }

    /// The true reason of an exit, once everything the guest said about it has arrived.
    pub(super) fn last_words(&self, reason: ExitReason) -> ExitReason {
        self.flush();
        match (reason, self.panic.message()) {
            (reason @ ExitReason::InternalError(_), _) | (reason, None) => reason,
            (_, Some(message)) => ExitReason::Panic { message },
        }
    }
}

/// Output that someone hears when it is made.
struct Heard {
    sink: AgentSink,
    out: PumpWriter,
}

impl Write for Heard {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (self.sink)(bytes);
        self.out.write_all(bytes).map(|()| bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// A virtio device, as the guest finds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct VirtioSlot {
    /// Guest-physical address of its registers.
    pub(super) base: u32,
    /// Its interrupt.
    pub(super) irq: u32,
}

/// Virtio devices beside those that every machine has, and what they share.
pub(super) struct VirtioSet {
    pub(super) gate: Arc<Gate>,
    pub(super) vsock: Option<Vsock>,
    pub(super) disks: Vec<Disk>,
    pub(super) shares: Vec<Fs>,
}

/// Virtio devices, each with the next range of registers from `base` on and the next of these
/// interrupts; `line` makes the line of one.
pub(super) fn virtio_devices(
    vm: &VmFd,
    registers: &mut Bus,
    memory: &GuestMemoryMmap,
    set: VirtioSet,
    base: u32,
    interrupts: impl IntoIterator<Item = u32>,
    line: impl Fn(u32) -> Result<Arc<dyn IrqLine>, MachineError>,
) -> Result<Vec<VirtioSlot>, MachineError> {
    let entropy = File::open("/dev/urandom")
        .map_err(|source| MachineError::System { what: "open /dev/urandom", source })?;
    let mut devices: Vec<Box<dyn VirtioDevice>> = vec![Box::new(Rng::new(Box::new(entropy)))];
    devices.extend(set.vsock.map(|device| -> Box<dyn VirtioDevice> { Box::new(device) }));
    for (number, disk) in set.disks.into_iter().enumerate() {
        let device = Block::new(number, disk)
            .map_err(|source| MachineError::System { what: "start a disk's thread", source })?;
        devices.push(Box::new(device));
    }
    devices
        .extend(set.shares.into_iter().map(|share| -> Box<dyn VirtioDevice> { Box::new(share) }));
    let mut slots = Vec::new();
    let mut interrupts = interrupts.into_iter();
    for (index, device) in (0..).zip(devices) {
        let base = base + index * MmioTransport::LENGTH;
        let irq = interrupts.next().ok_or(MachineError::TooManyDevices)?;
        connect_doorbell(vm, &*device, base)?;
        let gate = Arc::clone(&set.gate);
        let transport = MmioTransport::new(device, memory.clone(), gate, line(irq)?);
        registers
            .insert(base.into(), MmioTransport::LENGTH.into(), Arc::new(transport))
            .map_err(|_| MachineError::Overlap("device registers"))?;
        slots.push(VirtioSlot { base, irq });
    }
    Ok(slots)
}

/// Has KVM ring a device's bell where the vCPU would have to exit for it otherwise.
fn connect_doorbell(vm: &VmFd, device: &dyn VirtioDevice, base: u32) -> Result<(), MachineError> {
    let Some(bell) = device.doorbell() else { return Ok(()) };
    let register = IoEventAddress::Mmio(u64::from(base + VIRTIO_MMIO_QUEUE_NOTIFY));
    for (queue, _) in (0_u32..).zip(device.queue_sizes()) {
        vm.register_ioevent(bell, &register, queue)
            .map_err(MachineError::kvm("connect a device's queue"))?;
    }
    Ok(())
}

struct AgentWriter(AgentSink);

impl Write for AgentWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (self.0)(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
