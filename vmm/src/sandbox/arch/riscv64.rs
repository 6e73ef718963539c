//! riscv64.

use kvm_bindings::{kvm_interrupt, kvm_irq_level, kvm_one_reg};
use syscalls::Sysno;
use vmm_sys_util::ioctl::_IOC_WRITE as WRITE;

use super::kvm;

/// Of every thread: the C library asks what the processor can do. Code that is written for the guest is
/// flushed from the caches of instructions.
pub(in crate::sandbox) const COMMON: &[Sysno] = &[Sysno::riscv_hwprobe, Sysno::riscv_flush_icache];
/// Of event loops.
pub(in crate::sandbox) const EVENTS: &[Sysno] = &[];
/// Names of files: looks.
pub(in crate::sandbox) const LOOKS: &[Sysno] = &[];
/// Names of files: removal.
pub(in crate::sandbox) const REMOVAL: &[Sysno] = &[];
/// Names of files: what the controller does besides.
pub(in crate::sandbox) const RENAMING: &[Sysno] = &[];

/// What a stopped vCPU is asked, and told.
pub(in crate::sandbox) const VCPU_REQUESTS: &[u64] =
    &[kvm(WRITE, 0xab, size_of::<kvm_one_reg>()), kvm(WRITE, 0xac, size_of::<kvm_one_reg>())];
/// What raises an interrupt: `KVM_IRQ_LINE`, `KVM_INTERRUPT`.
pub(in crate::sandbox) const INTERRUPT_REQUESTS: &[u64] =
    &[kvm(WRITE, 0x61, size_of::<kvm_irq_level>()), kvm(WRITE, 0x86, size_of::<kvm_interrupt>())];
