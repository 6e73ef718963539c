//! Is KVM here, and can it do what is needed?

use std::io;

use kvm_ioctls::{Cap, Kvm};

use crate::machine::MachineError;

/// What is needed, with names for error messages.
const NEEDED: [(Cap, &str); 4] = [
    (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
    (Cap::OneReg, "KVM_CAP_ONE_REG"),
    (Cap::MpState, "KVM_CAP_MP_STATE"),
    (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT (Linux 4.12)"),
];

/// Opens `/dev/kvm` and checks what it offers.
pub(in crate::machine) fn open_kvm() -> Result<Kvm, MachineError> {
    let kvm = Kvm::new().map_err(|e| match e.errno() {
        libc::ENOENT | libc::ENODEV | libc::ENXIO => MachineError::NoKvm,
        libc::EACCES | libc::EPERM => MachineError::KvmPermission,
        code => MachineError::KvmOpen(io::Error::from_raw_os_error(code)),
    })?;
    let version = kvm.get_api_version();
    if version != 12 {
        return Err(MachineError::KvmApi(version));
    }
    for (cap, name) in NEEDED {
        if !kvm.check_extension(cap) {
            return Err(MachineError::KvmCapability(name));
        }
    }
    Ok(kvm)
}
