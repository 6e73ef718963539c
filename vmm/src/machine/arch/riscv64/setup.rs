//! Making vCPUs.

use kvm_bindings::KVM_RISCV_SBI_EXT_ID_KVM_RISCV_SBI_EXT_DBCN;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};

use super::load::Boot;
use super::registers::Register;
use crate::machine::MachineError;

/// Makes vCPU `id`, a hart of that number. All but the first wait for it to start them.
pub(in crate::machine) fn create_vcpu(
    _: &Kvm,
    vm: &VmFd,
    id: u8,
    _: u8,
) -> Result<VcpuFd, MachineError> {
    let fd = vm.create_vcpu(u64::from(id)).map_err(MachineError::kvm("make a vCPU"))?;
    // KVM lets guests use what the host has, but not its state, by default (up to Linux 7.2). Hosts
    // without Smstateen have no such register.
    let _ = Register::SSTATEEN0.set(&fd, u64::MAX);
    // Off by default; hosts before Linux 6.6 do not have it. Costs early messages only.
    let _ = Register::sbi(KVM_RISCV_SBI_EXT_ID_KVM_RISCV_SBI_EXT_DBCN).set(&fd, 1);
    Ok(fd)
}

/// Makes the first vCPU ready to boot (Documentation/arch/riscv/boot.rst).
pub(in crate::machine) fn start_at(fd: &VcpuFd, boot: &Boot) -> Result<(), MachineError> {
    Register::PC.set(fd, boot.entry)?;
    // Number of this hart.
    Register::A0.set(fd, 0)?;
    Register::A1.set(fd, boot.device_tree)
}
