//! Making vCPUs.

use kvm_bindings::{Msrs, kvm_msr_entry, kvm_regs};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};

use super::load::Boot;
use super::{cpuid, layout, tables};
use crate::machine::MachineError;

/// Model-specific registers as firmware leaves them: index and value.
const MSRS: [(u32, u64); 12] = [
    (0x174, 0),               // SYSENTER_CS
    (0x175, 0),               // SYSENTER_ESP
    (0x176, 0),               // SYSENTER_EIP
    (0xc000_0081, 0),         // STAR
    (0xc000_0082, 0),         // LSTAR
    (0xc000_0083, 0),         // CSTAR
    (0xc000_0084, 0),         // SYSCALL_MASK
    (0xc000_0102, 0),         // KERNEL_GS_BASE
    (0x10, 0),                // TSC: all vCPUs start at 0 together
    (0x1a0, 1),               // MISC_ENABLE: fast strings
    (0x2ff, 1 << 11 | 6),     // MTRR default type: enabled, write-back
    (0x277, 0x7040600070406), // PAT: its reset value
];

/// Offsets of local vector table entries in a local APIC's registers.
const LVT_LINT0: usize = 0x350;
const LVT_LINT1: usize = 0x360;
const DELIVERY_NMI: u8 = 4;
const DELIVERY_EXTERNAL: u8 = 7;

/// Flags register: nothing but the bit that is always set.
const RFLAGS: u64 = 2;

/// Makes vCPU `id` of `count`. All but the first wait for it to start them.
pub(in crate::machine) fn create_vcpu(
    kvm: &Kvm,
    vm: &VmFd,
    id: u8,
    count: u8,
) -> Result<VcpuFd, MachineError> {
    let fd = vm.create_vcpu(u64::from(id)).map_err(MachineError::kvm("make a vCPU"))?;
    let leaves = cpuid::leaves(kvm, id, count)?;
    fd.set_cpuid2(&leaves).map_err(MachineError::kvm("make the kind of CPU it offers"))?;
    set_msrs(&fd)?;
    set_local_interrupts(&fd)?;
    Ok(fd)
}

/// Makes the first vCPU ready to boot.
pub(in crate::machine) fn start_at(fd: &VcpuFd, boot: &Boot) -> Result<(), MachineError> {
    let mut sregs = fd.get_sregs().map_err(MachineError::kvm("read system registers"))?;
    tables::use_them(&mut sregs);
    fd.set_sregs(&sregs).map_err(MachineError::kvm("set system registers"))?;
    let regs = kvm_regs {
        rflags: RFLAGS,
        rip: boot.entry,
        rsp: layout::BOOT_STACK,
        rbp: layout::BOOT_STACK,
        rsi: layout::ZERO_PAGE,
        ..Default::default()
    };
    fd.set_regs(&regs).map_err(MachineError::kvm("set registers"))
}

fn set_msrs(fd: &VcpuFd) -> Result<(), MachineError> {
    let entries = MSRS.map(|(index, data)| kvm_msr_entry { index, data, ..Default::default() });
    let what = "set model-specific registers";
    let msrs = Msrs::from_entries(&entries).map_err(|_| MachineError::TooManyLeaves)?;
    let count = fd.set_msrs(&msrs).map_err(MachineError::kvm(what))?;
    // KVM stops at the first that it does not know.
    match MSRS.get(count) {
        None => Ok(()),
        Some((index, _)) => Err(MachineError::NoMsr(*index)),
    }
}

/// Wires a local APIC's two pins as firmware does: legacy interrupts and NMI.
fn set_local_interrupts(fd: &VcpuFd) -> Result<(), MachineError> {
    let mut lapic = fd.get_lapic().map_err(MachineError::kvm("read a local APIC"))?;
    for (offset, mode) in [(LVT_LINT0, DELIVERY_EXTERNAL), (LVT_LINT1, DELIVERY_NMI)] {
        // Bits 8 to 10 of the entry are the delivery mode: the low bits of its second byte.
        let byte = lapic.regs[offset + 1].cast_unsigned() & !7 | mode;
        lapic.regs[offset + 1] = byte.cast_signed();
    }
    fd.set_lapic(&lapic).map_err(MachineError::kvm("set a local APIC"))
}
