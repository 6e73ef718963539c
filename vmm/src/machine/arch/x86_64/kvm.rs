//! What KVM must be able to do.

use kvm_ioctls::Cap;

/// What is needed, with names for error messages.
pub(in crate::machine) const NEEDED_CAPABILITIES: &[(Cap, &str)] = &[
    (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
    (Cap::Irqchip, "KVM_CAP_IRQCHIP (interrupt controllers in the kernel)"),
    (Cap::Pit2, "KVM_CAP_PIT2"),
    (Cap::Irqfd, "KVM_CAP_IRQFD"),
    (Cap::SetTssAddr, "KVM_CAP_SET_TSS_ADDR"),
    (Cap::ExtCpuid, "KVM_CAP_EXT_CPUID"),
    (Cap::GetTscKhz, "KVM_CAP_GET_TSC_KHZ"),
    (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT (Linux 4.12)"),
];
