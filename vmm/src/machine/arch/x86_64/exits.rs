//! Why a vCPU has left the guest.

use kvm_ioctls::{Error, VcpuExit};

use super::layout;
use crate::machine::ExitCause;

/// As KVM tells it.
pub(super) fn cause(exit: &Result<VcpuExit<'_>, Error>) -> ExitCause {
    match exit {
        Ok(VcpuExit::IoOut(port, [_])) if *port == u16::from(layout::TRAP_PORT) => ExitCause::Trap,
        Ok(VcpuExit::IoOut(port, [_])) if *port == u16::from(layout::WAIT_PORT) => ExitCause::Full,
        Ok(VcpuExit::IoOut(port, _)) => ExitCause::Port { port: *port, write: true },
        Ok(VcpuExit::IoIn(port, _)) => ExitCause::Port { port: *port, write: false },
        Ok(VcpuExit::MmioWrite(address, _)) => ExitCause::Memory { address: *address, write: true },
        Ok(VcpuExit::MmioRead(address, _)) => ExitCause::Memory { address: *address, write: false },
        Ok(VcpuExit::X86Wrmsr(exit)) => ExitCause::Msr { index: exit.index },
        Ok(VcpuExit::Shutdown) => ExitCause::Shutdown,
        Ok(VcpuExit::Intr) => ExitCause::Kick,
        Err(error) if error.errno() == libc::EINTR => ExitCause::Kick,
        Err(error) if error.errno() == libc::EAGAIN => ExitCause::Other,
        Ok(VcpuExit::InternalError) | Err(_) => ExitCause::Error,
        Ok(_) => ExitCause::Other,
    }
}
