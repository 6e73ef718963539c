//! What KVM must be able to do.

use kvm_ioctls::{Cap, Kvm};

use crate::machine::MachineError;

/// What is needed, with names for error messages.
pub(in crate::machine) const NEEDED_CAPABILITIES: &[(Cap, &str)] = &[
    (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
    (Cap::OneReg, "KVM_CAP_ONE_REG"),
    (Cap::MpState, "KVM_CAP_MP_STATE"),
    (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT (Linux 4.12)"),
];

/// Every processor has pages of all sizes, and 41 bits of guest-physical addresses at least.
#[expect(clippy::unnecessary_wraps, reason = "other architectures have such as cannot")]
pub(in crate::machine) fn check_far(_: &Kvm, _: u64) -> Result<(), MachineError> {
    Ok(())
}
