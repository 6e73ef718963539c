//! Why a vCPU has left the guest.

use kvm_bindings::KVM_EXIT_RISCV_SBI;
use kvm_ioctls::{Error, VcpuExit};

use crate::machine::ExitCause;

/// As KVM tells it; of which extension a call is, its arguments say.
pub(super) fn cause(exit: &Result<VcpuExit<'_>, Error>) -> ExitCause {
    match exit {
        Ok(VcpuExit::MmioWrite(address, _)) => ExitCause::Memory { address: *address, write: true },
        Ok(VcpuExit::MmioRead(address, _)) => ExitCause::Memory { address: *address, write: false },
        Ok(VcpuExit::Unsupported(KVM_EXIT_RISCV_SBI)) => ExitCause::Sbi { extension: 0 },
        Ok(VcpuExit::SystemEvent(..)) => ExitCause::Shutdown,
        Ok(VcpuExit::Intr) => ExitCause::Kick,
        Err(error) if error.errno() == libc::EINTR => ExitCause::Kick,
        Err(error) if error.errno() == libc::EAGAIN => ExitCause::Other,
        Err(_) => ExitCause::Error,
        Ok(_) => ExitCause::Other,
    }
}
