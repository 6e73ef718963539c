//! Exits of vCPUs.
#![allow(unsafe_code)]

use kvm_bindings::{KVM_EXIT_RISCV_SBI, KVM_SYSTEM_EVENT_RESET, KVM_SYSTEM_EVENT_SHUTDOWN};
use kvm_ioctls::{VcpuExit, VcpuFd};

use super::exits::cause;
use super::registers::{Register, registers};
use super::sbi::{self, Call};
use super::{Platform, TRAP_INSTRUCTION};
use crate::machine::exits::ExitLog;
use crate::machine::vcpu::Step;
use crate::machine::{ExitCause, ExitReason, MachineError};

/// Where the trap is that the vCPU has just completed, if it was one.
pub(in crate::machine) fn trap_address(fd: &VcpuFd) -> Option<u64> {
    Register::PC.find(fd).map(|pc| pc.wrapping_sub(TRAP_INSTRUCTION.len() as u64))
}

/// What looked like a trap was the guest's own call: nobody answers it.
pub(in crate::machine) fn refuse_trap(fd: &VcpuFd) -> Result<(), MachineError> {
    Register::A0.set(fd, sbi::NOT_SUPPORTED.cast_unsigned())?;
    Register::A1.set(fd, 0)
}

/// Whether a vCPU that has made a call is in kernel mode. It is: calls of user mode are the guest's own kernel's.
pub(in crate::machine) fn is_in_kernel(_: &VcpuFd) -> bool {
    true
}

/// Tells the guest that it was stopped. Its watchdogs go by a clock that stood still, or by none.
pub(in crate::machine) fn paused(_: &VcpuFd) -> Result<(), MachineError> {
    Ok(())
}

/// What an exit leaves to do once the vCPU can be used again.
enum Todo {
    Step(Step),
    Sbi,
    Died(String),
}

/// Enters the guest and does what it wants of its devices.
pub(in crate::machine) fn run(fd: &mut VcpuFd, platform: &Platform, exits: &mut ExitLog) -> Step {
    let exit = fd.run();
    exits.left(|| cause(&exit));
    let todo = match exit {
        Ok(VcpuExit::MmioWrite(address, data)) => {
            Todo::Step(platform.registers.write(address, data).into())
        }
        Ok(VcpuExit::MmioRead(address, data)) => {
            platform.registers.read(address, data);
            Todo::Step(Step::Continue)
        }
        Ok(VcpuExit::Unsupported(KVM_EXIT_RISCV_SBI)) => Todo::Sbi,
        Ok(VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_SHUTDOWN, _)) => {
            Todo::Step(Step::Exit(ExitReason::PowerOff))
        }
        Ok(VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_RESET, _)) => {
            Todo::Step(Step::Exit(ExitReason::Reset))
        }
        Ok(VcpuExit::Intr) => Todo::Step(Step::Continue),
        Ok(other) => Todo::Died(format!("KVM exit {other:?}")),
        Err(e) if e.errno() == libc::EINTR => Todo::Step(Step::Interrupted),
        Err(e) if e.errno() == libc::EAGAIN => Todo::Step(Step::Continue),
        Err(e) => Todo::Died(format!("KVM_RUN failed: {e}")),
    };
    match todo {
        Todo::Step(step) => step,
        Todo::Sbi => call(fd, platform, exits),
        Todo::Died(what) => {
            let registers = registers(fd).map_or_else(|e| e.to_string(), |r| format!("{r:x?}"));
            Step::Exit(ExitReason::InternalError(format!("{what}; {registers}")))
        }
    }
}

/// Answers a call of the SBI that KVM leaves to us; it takes effect when the vCPU runs again.
fn call(fd: &mut VcpuFd, platform: &Platform, exits: &mut ExitLog) -> Step {
    // SAFETY: the exit was for KVM_EXIT_RISCV_SBI, with which KVM fills this member; any bits are
    // valid for it.
    let exit = unsafe { &mut fd.get_kvm_run().__bindgen_anon_1.riscv_sbi };
    let call =
        Call { extension: exit.extension_id, function: exit.function_id, arguments: exit.args };
    if matches!(call.extension, sbi::TRAP | sbi::WAIT) {
        let is_trap = call.extension == sbi::TRAP;
        exits.is_for(if is_trap { ExitCause::Trap } else { ExitCause::Full });
        // Where a function was about to begin, these are its arguments.
        exit.ret = [call.arguments[0], call.arguments[1]];
        return if is_trap { Step::Trap } else { Step::Full };
    }
    exits.is_for(ExitCause::Sbi { extension: call.extension });
    let (answer, then) = platform.answer(&call);
    exit.ret = [answer.error.cast_unsigned(), answer.value];
    then.into()
}
