//! x86-64.

use kvm_bindings::{kvm_msr_filter, kvm_msrs, kvm_regs, kvm_sregs};
use syscalls::Sysno;
use vmm_sys_util::ioctl::{_IOC_NONE as NONE, _IOC_READ as READ, _IOC_WRITE as WRITE};

use super::kvm;

/// Of every thread: what others know by newer names.
pub(in crate::sandbox) const COMMON: &[Sysno] =
    &[Sysno::poll, Sysno::select, Sysno::time, Sysno::dup2];
/// Of event loops.
pub(in crate::sandbox) const EVENTS: &[Sysno] = &[Sysno::epoll_wait];
/// Names of files: looks.
pub(in crate::sandbox) const LOOKS: &[Sysno] =
    &[Sysno::open, Sysno::stat, Sysno::lstat, Sysno::access, Sysno::readlink, Sysno::getrlimit];
/// Names of files: removal.
pub(in crate::sandbox) const REMOVAL: &[Sysno] = &[Sysno::unlink];
/// Names of files: what the controller does besides.
pub(in crate::sandbox) const RENAMING: &[Sysno] = &[Sysno::rename];

/// What a stopped vCPU is asked, and told.
pub(in crate::sandbox) const VCPU_REQUESTS: &[u64] = &[
    kvm(READ, 0x81, size_of::<kvm_regs>()),
    kvm(WRITE, 0x82, size_of::<kvm_regs>()),
    kvm(READ, 0x83, size_of::<kvm_sregs>()),
    kvm(WRITE, 0x84, size_of::<kvm_sregs>()),
    kvm(READ | WRITE, 0x88, size_of::<kvm_msrs>()),
    kvm(WRITE, 0x89, size_of::<kvm_msrs>()),
    // KVM_GET_TSC_KHZ, KVM_KVMCLOCK_CTRL
    kvm(NONE, 0xa3, 0),
    kvm(NONE, 0xad, 0),
    // KVM_X86_SET_MSR_FILTER
    kvm(WRITE, 0xc6, size_of::<kvm_msr_filter>()),
];
/// What raises an interrupt: nothing, an event descriptor does.
pub(in crate::sandbox) const INTERRUPT_REQUESTS: &[u64] = &[];
