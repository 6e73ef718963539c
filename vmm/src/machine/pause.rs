//! A machine whose vCPUs are all stopped.

use std::time::{Duration, Instant};

use kvm_bindings::{KVM_MP_STATE_HALTED, KVM_MP_STATE_RUNNABLE};

use super::lock::lock;
use super::{Machine, MachineError, Registers, arch};

/// Where a vCPU is to go. All addresses are guest virtual.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Detour {
    /// Its next instruction.
    pub address: u64,
    /// The stack pointer.
    pub stack: u64,
    /// The return address, where that is in a register.
    pub returns_to: u64,
    /// Where exceptions go: x86-64 a table of [`Detour::GATES`] descriptors, riscv64 an address for
    /// all, a multiple of 4.
    pub faults: u64,
}

impl Detour {
    /// Descriptors of an interrupt descriptor table that has no more than the processor's own
    /// exceptions.
    pub const GATES: usize = 32;
}

/// What a vCPU had before [`Paused::divert`]; by default that of none.
#[derive(Debug, Default)]
pub struct Diverted(arch::Kept);

/// All vCPUs are out of guest mode, their I/O is complete, no device touches guest memory, and that
/// stays so until this is dropped.
///
/// Registers can be read and changed, guest memory and code be changed without the guest seeing
/// an intermediate state. vCPUs parked on an event stay parked after the pause, too, until they are
/// released.
pub struct Paused<'a> {
    machine: &'a Machine,
    entered: Instant,
    stopped: Instant,
}

impl<'a> Paused<'a> {
    pub(super) fn new(machine: &'a Machine) -> Result<Paused<'a>, MachineError> {
        let entered = Instant::now();
        machine.control.pause()?;
        // From here on, dropping it resumes.
        let paused = Paused { machine, entered, stopped: Instant::now() };
        // Now that no vCPU can be waiting for a device any more.
        machine.gate.close();
        for vcpu in &machine.vcpus {
            arch::paused(&lock(vcpu).fd)?;
        }
        Ok(paused)
    }

    /// When the pause was asked for.
    #[must_use]
    pub fn entered_at(&self) -> Instant {
        self.entered
    }

    /// How long it took until all vCPUs had stopped.
    #[must_use]
    pub fn latency(&self) -> Duration {
        self.stopped.duration_since(self.entered)
    }

    /// Time since the pause was asked for.
    #[must_use]
    pub fn duration(&self) -> Duration {
        self.entered.elapsed()
    }

    /// Number of vCPUs.
    #[must_use]
    pub fn vcpus(&self) -> usize {
        self.machine.vcpus.len()
    }

    fn with<T>(
        &self,
        vcpu: usize,
        f: impl FnOnce(&kvm_ioctls::VcpuFd) -> Result<T, MachineError>,
    ) -> Result<T, MachineError> {
        f(&lock(self.machine.vcpus.get(vcpu).ok_or(MachineError::NoVcpu(vcpu))?).fd)
    }

    /// Registers of a vCPU. One that the guest has not started shows those of a reset.
    pub fn registers(&self, vcpu: usize) -> Result<Registers, MachineError> {
        self.with(vcpu, arch::registers)
    }

    /// Whether the guest has not started this vCPU, or has stopped it. (On x86-64 a guest that stops one
    /// only lets it wait with interrupts off.)
    pub fn is_stopped(&self, vcpu: usize) -> Result<bool, MachineError> {
        let state = |fd: &kvm_ioctls::VcpuFd| {
            fd.get_mp_state().map_err(MachineError::kvm("tell whether a vCPU is started"))
        };
        self.with(vcpu, state)
            .map(|state| !matches!(state.mp_state, KVM_MP_STATE_RUNNABLE | KVM_MP_STATE_HALTED))
    }

    /// Moves a vCPU to another instruction.
    pub fn set_rip(&self, vcpu: usize, address: u64) -> Result<(), MachineError> {
        self.with(vcpu, |fd| arch::set_program_counter(fd, address))
    }

    /// Sends a vCPU somewhere else, which is to be for a while only. Returns what it had, for
    /// [`Paused::put_back`].
    pub fn divert(&self, vcpu: usize, detour: &Detour) -> Result<Diverted, MachineError> {
        self.with(vcpu, |fd| arch::divert(fd, detour)).map(Diverted)
    }

    /// Gives a vCPU back all registers that [`Paused::divert`] or programs of the guest change.
    pub fn put_back(&self, vcpu: usize, diverted: &Diverted) -> Result<(), MachineError> {
        self.with(vcpu, |fd| arch::put_back(fd, &diverted.0))
    }

    /// The vCPU's clock now, in units of 1/[`Machine::clock_hz`] s: what the guest would read.
    /// It goes on during a pause.
    pub fn tsc(&self, vcpu: usize) -> Result<u64, MachineError> {
        self.with(vcpu, arch::clock)
    }

    /// Makes the instruction at this guest-virtual address a trap. The caller writes
    /// [`TRAP_INSTRUCTION`](super::TRAP_INSTRUCTION) there, before or after, within this pause.
    /// False if it is one already.
    pub fn arm_trap(&self, address: u64) -> bool {
        self.machine.control.set_trap(address, true)
    }

    /// The instruction at this guest-virtual address is a trap no longer. The caller puts the
    /// original bytes back within this pause. False if it was none.
    ///
    /// vCPUs that hit the trap before are parked on their events with the program counter at
    /// `address`: once released they run the original instruction.
    pub fn disarm_trap(&self, address: u64) -> bool {
        self.machine.control.set_trap(address, false)
    }
}

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        self.machine.gate.open();
        self.machine.control.resume();
    }
}
