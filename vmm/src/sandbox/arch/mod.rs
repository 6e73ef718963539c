//! Differences between architectures: system calls that only some have, and KVM's ioctls.

#[cfg(target_arch = "riscv64")]
mod riscv64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "riscv64")]
pub(super) use riscv64::*;
#[cfg(target_arch = "x86_64")]
pub(super) use x86_64::*;

use kvm_bindings::{KVMIO, kvm_mp_state};
use libc::c_uint;
use vmm_sys_util::ioctl::{_IOC_NONE, _IOC_READ, ioctl_expr};

/// Number of a request of KVM (include/uapi/linux/kvm.h) with an argument of so many bytes.
#[allow(clippy::cast_possible_truncation, reason = "the kernel takes requests as 32 bits")]
const fn kvm(direction: c_uint, number: c_uint, size: usize) -> u64 {
    ioctl_expr(direction, KVMIO, number, size as c_uint) & 0xffff_ffff
}

/// Enters the guest.
pub(super) const KVM_RUN: u64 = kvm(_IOC_NONE, 0x80, 0);
/// Whether the guest has started a vCPU.
pub(super) const KVM_GET_MP_STATE: u64 = kvm(_IOC_READ, 0x98, size_of::<kvm_mp_state>());
