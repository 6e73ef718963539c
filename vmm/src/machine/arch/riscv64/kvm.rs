//! What KVM must be able to do.

use kvm_ioctls::Cap;

/// What is needed, with names for error messages.
pub(in crate::machine) const NEEDED_CAPABILITIES: &[(Cap, &str)] = &[
    (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
    (Cap::OneReg, "KVM_CAP_ONE_REG"),
    (Cap::MpState, "KVM_CAP_MP_STATE"),
    (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT (Linux 4.12)"),
];
