//! Checks that KVM is there and has the needed features.

use std::io;

use kvm_ioctls::Kvm;

use super::arch::NEEDED_CAPABILITIES;
use crate::machine::MachineError;

/// Opens `/dev/kvm` and checks what it offers.
pub(super) fn open_kvm() -> Result<Kvm, MachineError> {
    let kvm = Kvm::new().map_err(|e| match e.errno() {
        libc::ENOENT | libc::ENODEV | libc::ENXIO => MachineError::NoKvm,
        libc::EACCES | libc::EPERM => MachineError::KvmPermission,
        code => MachineError::KvmOpen(io::Error::from_raw_os_error(code)),
    })?;
    let version = kvm.get_api_version();
    if version != 12 {
        return Err(MachineError::KvmApi(version));
    }
    for &(cap, name) in NEEDED_CAPABILITIES {
        if !kvm.check_extension(cap) {
            return Err(MachineError::KvmCapability(name));
        }
    }
    Ok(kvm)
}
