//! Devices of the machine and everything else that is one per machine.

use std::sync::Arc;

use kvm_bindings::{KVM_PIT_SPEAKER_DUMMY, kvm_enable_cap, kvm_pit_config};
use kvm_ioctls::{
    Cap, MsrExitReason, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VmFd,
};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::layout;
use crate::devices::{
    Bus, Device, I8042, IrqLine, PowerControl, PvPanic, ResetControl, SerialPort,
};
use crate::machine::board::{self, Board, VirtioSet, VirtioSlot};
use crate::machine::{Annex, ConsoleSinks, MachineError};

/// See the module. Kept by every vCPU thread.
pub(in crate::machine) struct Platform {
    pub(super) ports: Bus,
    pub(super) registers: Bus,
    vm: Arc<VmFd>,
    board: Board,
    virtio: Vec<VirtioSlot>,
    /// What the guest runs in stays mapped while a vCPU thread may run it.
    _memory: (GuestMemoryMmap, Option<Annex>),
}

impl Platform {
    pub(in crate::machine) fn new(
        vm: &Arc<VmFd>,
        memory: &GuestMemoryMmap,
        annex: Option<&Annex>,
        sinks: ConsoleSinks,
        virtio: VirtioSet,
    ) -> Result<Platform, MachineError> {
        create_interrupt_controllers(vm)?;
        let line = |gsi| EdgeIrq::new(vm, gsi).map(|line| -> Arc<dyn IrqLine> { Arc::new(line) });
        let board = Board::new(sinks, line(layout::COM1_GSI)?, line(layout::COM2_GSI)?)?;
        let mut ports = Bus::new();
        let mut port = |base: u16, length, device: Arc<dyn Device>| {
            let overlap = || MachineError::Overlap("I/O ports");
            ports.insert(u64::from(base), length, device).map_err(|_| overlap())
        };
        port(layout::COM1, SerialPort::LENGTH, board.console())?;
        port(layout::COM2, SerialPort::LENGTH, board.agent())?;
        port(layout::I8042, layout::I8042_LENGTH, Arc::new(I8042))?;
        port(layout::POWER, PowerControl::LENGTH, Arc::new(PowerControl))?;
        port(layout::PVPANIC, PvPanic::LENGTH, Arc::new(PvPanic))?;
        port(layout::RESET_CONTROL, 1, Arc::new(ResetControl))?;
        let mut registers = Bus::new();
        let (base, gsis) = (layout::VIRTIO_MMIO, layout::VIRTIO_GSIS);
        let virtio = board::virtio_devices(vm, &mut registers, memory, virtio, base, gsis, line)?;
        Ok(Platform {
            ports,
            registers,
            vm: Arc::clone(vm),
            board,
            virtio,
            _memory: (memory.clone(), annex.cloned()),
        })
    }

    pub(in crate::machine) fn board(&self) -> &Board {
        &self.board
    }

    /// The virtio devices, for those who announce them.
    pub(super) fn virtio(&self) -> &[VirtioSlot] {
        &self.virtio
    }

    /// Makes KVM stop vCPUs that write this model-specific register.
    pub(in crate::machine) fn watch(&self, index: u32) -> Result<(), MachineError> {
        if !self.vm.check_extension(Cap::X86UserSpaceMsr)
            || !self.vm.check_extension(Cap::X86MsrFilter)
        {
            return Err(MachineError::KvmCapability("KVM_CAP_X86_USER_SPACE_MSR (Linux 5.10)"));
        }
        let mut cap = kvm_enable_cap { cap: Cap::X86UserSpaceMsr as u32, ..Default::default() };
        cap.args[0] = u64::from(MsrExitReason::Filter.bits());
        self.vm.enable_cap(&cap).map_err(MachineError::kvm("report writes of registers"))?;
        self.watch_again(index)
    }

    /// Does the same again, after [`Platform::end_watch`].
    pub(in crate::machine) fn watch_again(&self, index: u32) -> Result<(), MachineError> {
        // One register; a bit of 0 denies, and a denied write ends in an exit.
        let range = MsrFilterRange {
            flags: MsrFilterRangeFlags::WRITE,
            base: index,
            msr_count: 1,
            bitmap: &[0],
        };
        self.vm
            .set_msr_filter(MsrFilterDefaultAction::ALLOW, &[range])
            .map_err(MachineError::kvm("watch a register"))
    }

    /// Undoes [`Platform::watch`].
    pub(in crate::machine) fn end_watch(&self) {
        if let Err(e) = self.vm.set_msr_filter(MsrFilterDefaultAction::ALLOW, &[]) {
            // Costs an exit for every further write, nothing else.
            log::warn!("cannot end the watch of a register: {e}");
        }
    }
}

fn create_interrupt_controllers(vm: &VmFd) -> Result<(), MachineError> {
    vm.set_identity_map_address(layout::KVM_IDENTITY_MAP)
        .map_err(MachineError::kvm("place its identity map"))?;
    let tss = usize::try_from(layout::KVM_TSS).unwrap_or(usize::MAX);
    vm.set_tss_address(tss).map_err(MachineError::kvm("place its task state segment"))?;
    vm.create_irq_chip().map_err(MachineError::kvm("make interrupt controllers"))?;
    let pit = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
    vm.create_pit2(pit).map_err(MachineError::kvm("make a timer"))
}

/// An edge-triggered interrupt line, by an event descriptor that KVM listens to.
struct EdgeIrq(EventFd);

impl EdgeIrq {
    fn new(vm: &VmFd, gsi: u32) -> Result<EdgeIrq, MachineError> {
        let event = EventFd::new(EFD_NONBLOCK)
            .map_err(|source| MachineError::System { what: "make an event descriptor", source })?;
        vm.register_irqfd(&event, gsi).map_err(MachineError::kvm("connect an interrupt"))?;
        Ok(EdgeIrq(event))
    }
}

impl IrqLine for EdgeIrq {
    fn assert(&self) {
        // Fails only when 2^64 interrupts are pending.
        let _ = self.0.write(1);
    }

    fn deassert(&self) {}
}
