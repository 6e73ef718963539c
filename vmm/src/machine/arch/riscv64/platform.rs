//! Devices of the machine and everything else that is one per machine.

use std::sync::Arc;

use kvm_ioctls::{VcpuFd, VmFd};
use vm_memory::GuestMemoryMmap;

use super::fdt::Wiring;
use super::interrupts::Interrupts;
use super::layout;
use super::sbi::{self, Answer, Call};
use crate::devices::{Bus, Device, Outcome, Plic, PvPanic, SerialPort};
use crate::machine::board::{self, Board, VirtioSet, VirtioSlot};
use crate::machine::{Annex, ConsoleSinks, MachineError};

/// See the module. Kept by every vCPU thread.
pub(in crate::machine) struct Platform {
    pub(super) registers: Bus,
    board: Board,
    virtio: Vec<VirtioSlot>,
    interrupts: Interrupts,
    memory: GuestMemoryMmap,
    /// What the guest runs in stays mapped while a vCPU thread may run it.
    _annex: Option<Annex>,
}

impl Platform {
    pub(in crate::machine) fn new(
        vm: &Arc<VmFd>,
        memory: &GuestMemoryMmap,
        annex: Option<&Annex>,
        sinks: ConsoleSinks,
        virtio: VirtioSet,
    ) -> Result<Platform, MachineError> {
        let interrupts = Interrupts::new(vm)?;
        let (console, agent) =
            (interrupts.line(layout::UART0_IRQ), interrupts.line(layout::UART1_IRQ));
        let board = Board::new(sinks, console, agent)?;
        let mut registers = Bus::new();
        let mut insert = |base, length, device: Arc<dyn Device>| {
            let overlap = || MachineError::Overlap("device registers");
            registers.insert(base, length, device).map_err(|_| overlap())
        };
        insert(layout::UART0, SerialPort::LENGTH, board.console())?;
        insert(layout::UART1, SerialPort::LENGTH, board.agent())?;
        insert(layout::PVPANIC, PvPanic::LENGTH, Arc::new(PvPanic))?;
        if let Some(plic) = interrupts.plic() {
            insert(layout::PLIC, Plic::LENGTH, plic)?;
        }
        let (base, irqs) = (layout::VIRTIO_MMIO, layout::VIRTIO_IRQ..=layout::LAST_IRQ);
        let line = |irq| Ok(interrupts.line(irq));
        let virtio = board::virtio_devices(vm, &mut registers, memory, virtio, base, irqs, line)?;
        Ok(Platform {
            registers,
            board,
            virtio,
            interrupts,
            memory: memory.clone(),
            _annex: annex.cloned(),
        })
    }

    pub(in crate::machine) fn board(&self) -> &Board {
        &self.board
    }

    /// The virtio devices, for those who announce them.
    pub(super) fn virtio(&self) -> &[VirtioSlot] {
        &self.virtio
    }

    /// Connects interrupts with all vCPUs there are.
    pub(super) fn connect(&self, vcpus: &[VcpuFd]) -> Result<Wiring, MachineError> {
        self.interrupts.connect(vcpus)
    }

    /// Answers a call of the SBI.
    pub(super) fn answer(&self, call: &Call) -> (Answer, Outcome) {
        let answer = sbi::answer(call, &self.memory);
        let outcome = match answer.output.as_slice() {
            [] => Outcome::Continue,
            output => self.board.console().print(output),
        };
        (answer, outcome)
    }

    /// There are no model-specific registers here.
    pub(in crate::machine) fn watch(&self, _: u32) -> Result<(), MachineError> {
        Err(MachineError::KvmCapability("model-specific registers, as only x86 has them"))
    }

    /// See [`Platform::watch`].
    pub(in crate::machine) fn watch_again(&self, index: u32) -> Result<(), MachineError> {
        self.watch(index)
    }

    /// Undoes [`Platform::watch`].
    pub(in crate::machine) fn end_watch(&self) {}
}
