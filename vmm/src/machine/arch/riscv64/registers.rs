//! Registers of a vCPU, one ioctl each (Documentation/virt/kvm/api.rst, 4.68).

use kvm_bindings::{
    KVM_REG_RISCV, KVM_REG_RISCV_CONFIG, KVM_REG_RISCV_CORE, KVM_REG_RISCV_CSR,
    KVM_REG_RISCV_ISA_EXT, KVM_REG_RISCV_SBI_EXT, KVM_REG_RISCV_TIMER, KVM_REG_SIZE_U64,
};
use kvm_ioctls::VcpuFd;

use crate::machine::{Detour, MachineError};

/// x1, the return address, and x2, the stack pointer.
const RA: u32 = 1;
const SP: u32 = 2;

/// What KVM calls a register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Register(u64);

impl Register {
    /// `satp` modes and the like: what kind of hart this is.
    pub(super) const SATP_MODE: Register = Register::new(KVM_REG_RISCV_CONFIG, 6);
    pub(super) const CBOM_BLOCK_SIZE: Register = Register::new(KVM_REG_RISCV_CONFIG, 1);
    pub(super) const CBOZ_BLOCK_SIZE: Register = Register::new(KVM_REG_RISCV_CONFIG, 5);
    pub(super) const PC: Register = Register::core(0);
    /// x10.
    pub(super) const A0: Register = Register::core(10);
    /// x11.
    pub(super) const A1: Register = Register::core(11);
    pub(super) const SSTATUS: Register = Register::csr(0);
    pub(super) const SIE: Register = Register::csr(1);
    pub(super) const STVEC: Register = Register::csr(2);
    pub(super) const SEPC: Register = Register::csr(4);
    pub(super) const SCAUSE: Register = Register::csr(5);
    pub(super) const STVAL: Register = Register::csr(6);
    pub(super) const SATP: Register = Register::csr(8);
    /// State of extensions, where the host has Smstateen.
    pub(super) const SSTATEEN0: Register = Register::csr(kvm_bindings::KVM_REG_RISCV_CSR_SMSTATEEN);
    pub(super) const TIMER_FREQUENCY: Register = Register::new(KVM_REG_RISCV_TIMER, 0);
    pub(super) const TIME: Register = Register::new(KVM_REG_RISCV_TIMER, 1);

    const fn new(kind: u32, index: u32) -> Register {
        Register(KVM_REG_RISCV.cast_unsigned() | KVM_REG_SIZE_U64 | kind as u64 | index as u64)
    }

    /// `pc` (0) or x1 to x31.
    pub(super) const fn core(index: u32) -> Register {
        Register::new(KVM_REG_RISCV_CORE, index)
    }

    const fn csr(index: u32) -> Register {
        Register::new(KVM_REG_RISCV_CSR, index)
    }

    /// Whether the vCPU has an extension of the instruction set.
    pub(super) const fn isa(id: u32) -> Register {
        Register::new(KVM_REG_RISCV_ISA_EXT, id)
    }

    /// Whether the vCPU has an extension of the SBI.
    pub(super) const fn sbi(id: u32) -> Register {
        Register::new(KVM_REG_RISCV_SBI_EXT, id)
    }

    /// Its value; `None` if this KVM or this vCPU does not have it.
    pub(super) fn find(self, fd: &VcpuFd) -> Option<u64> {
        self.get(fd).ok()
    }

    pub(super) fn get(self, fd: &VcpuFd) -> Result<u64, MachineError> {
        let mut bytes = [0; 8];
        fd.get_one_reg(self.0, &mut bytes).map_err(MachineError::kvm("read a register"))?;
        Ok(u64::from_le_bytes(bytes))
    }

    pub(super) fn set(self, fd: &VcpuFd, value: u64) -> Result<(), MachineError> {
        fd.set_one_reg(self.0, &value.to_le_bytes())
            .map(drop)
            .map_err(MachineError::kvm("set a register"))
    }
}

/// Registers of a stopped vCPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Registers {
    /// Program counter.
    pub pc: u64,
    /// `x[0]` is always 0; `x[1]` is the return address, `x[2]` the stack pointer, `x[4]` the
    /// task while in the kernel, `x[10]` to `x[17]` arguments.
    pub x: [u64; 32],
    /// Supervisor status.
    pub sstatus: u64,
    /// Enabled interrupts.
    pub sie: u64,
    /// Trap vector.
    pub stvec: u64,
    /// Where the last trap came from.
    pub sepc: u64,
    /// Why.
    pub scause: u64,
    /// What about.
    pub stval: u64,
    /// Root and kind of the page tables.
    pub satp: u64,
}

/// Reads all registers. The vCPU must be stopped.
pub(in crate::machine) fn registers(fd: &VcpuFd) -> Result<Registers, MachineError> {
    let mut x = [0; 32];
    for (index, register) in (0..).zip(&mut x).skip(1) {
        *register = Register::core(index).get(fd)?;
    }
    Ok(Registers {
        pc: Register::PC.get(fd)?,
        x,
        sstatus: Register::SSTATUS.get(fd)?,
        sie: Register::SIE.get(fd)?,
        stvec: Register::STVEC.get(fd)?,
        sepc: Register::SEPC.get(fd)?,
        scause: Register::SCAUSE.get(fd)?,
        stval: Register::STVAL.get(fd)?,
        satp: Register::SATP.get(fd)?,
    })
}

/// Moves a stopped vCPU to another instruction.
pub(in crate::machine) fn set_program_counter(
    fd: &VcpuFd,
    address: u64,
) -> Result<(), MachineError> {
    Register::PC.set(fd, address)
}

/// What a vCPU had before it was sent away.
#[derive(Debug, Default)]
pub(in crate::machine) struct Kept(Registers);

/// Sends a stopped vCPU somewhere else.
pub(in crate::machine) fn divert(fd: &VcpuFd, detour: &Detour) -> Result<Kept, MachineError> {
    let kept = Kept(registers(fd)?);
    Register::STVEC.set(fd, detour.faults)?;
    Register::core(RA).set(fd, detour.returns_to)?;
    Register::core(SP).set(fd, detour.stack)?;
    Register::PC.set(fd, detour.address)?;
    Ok(kept)
}

/// Gives a stopped vCPU back what it had.
pub(in crate::machine) fn put_back(fd: &VcpuFd, Kept(kept): &Kept) -> Result<(), MachineError> {
    for (index, &value) in (0..).zip(&kept.x).skip(1) {
        Register::core(index).set(fd, value)?;
    }
    Register::SSTATUS.set(fd, kept.sstatus)?;
    Register::STVEC.set(fd, kept.stvec)?;
    Register::SEPC.set(fd, kept.sepc)?;
    Register::SCAUSE.set(fd, kept.scause)?;
    Register::STVAL.set(fd, kept.stval)?;
    Register::PC.set(fd, kept.pc)
}

/// What the guest would read from `time`.
pub(in crate::machine) fn clock(fd: &VcpuFd) -> Result<u64, MachineError> {
    Register::TIME.get(fd)
}

/// Rate of `time` in Hz.
pub(in crate::machine) fn clock_hz(fd: &VcpuFd) -> Result<u64, MachineError> {
    Register::TIMER_FREQUENCY.get(fd)
}
