//! vCPUs: their registers and their exits.
#![allow(unsafe_code)]

use kvm_bindings::{
    KVM_INTERNAL_ERROR_DELIVERY_EV, KVM_INTERNAL_ERROR_EMULATION, Msrs, kvm_msr_entry, kvm_regs,
    kvm_sregs,
};
use kvm_ioctls::{VcpuExit, VcpuFd};

use super::exits::cause;
use super::{Platform, layout};
use crate::machine::exits::ExitLog;
use crate::machine::vcpu::Step;
use crate::machine::{Detour, ExitReason, MachineError};

const MSR_TSC: u32 = 0x10;

/// Registers of a stopped vCPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Registers {
    pub rax: u64,
    pub rbx: u64,
    pub rcx: u64,
    pub rdx: u64,
    pub rsi: u64,
    pub rdi: u64,
    pub rbp: u64,
    pub rsp: u64,
    pub r8: u64,
    pub r9: u64,
    pub r10: u64,
    pub r11: u64,
    pub r12: u64,
    pub r13: u64,
    pub r14: u64,
    pub r15: u64,
    pub rip: u64,
    pub rflags: u64,
    pub cr0: u64,
    pub cr2: u64,
    pub cr3: u64,
    pub cr4: u64,
    pub efer: u64,
    /// Base of the GS segment: per-CPU data while in the kernel.
    pub gs_base: u64,
    pub fs_base: u64,
    /// Interrupt descriptor table.
    pub idt_base: u64,
    /// Its last byte's offset.
    pub idt_limit: u16,
    pub gdt_base: u64,
    pub cs: u16,
    pub ss: u16,
}

impl Registers {
    fn new(regs: &kvm_regs, sregs: &kvm_sregs) -> Registers {
        Registers {
            rax: regs.rax,
            rbx: regs.rbx,
            rcx: regs.rcx,
            rdx: regs.rdx,
            rsi: regs.rsi,
            rdi: regs.rdi,
            rbp: regs.rbp,
            rsp: regs.rsp,
            r8: regs.r8,
            r9: regs.r9,
            r10: regs.r10,
            r11: regs.r11,
            r12: regs.r12,
            r13: regs.r13,
            r14: regs.r14,
            r15: regs.r15,
            rip: regs.rip,
            rflags: regs.rflags,
            cr0: sregs.cr0,
            cr2: sregs.cr2,
            cr3: sregs.cr3,
            cr4: sregs.cr4,
            efer: sregs.efer,
            gs_base: sregs.gs.base,
            fs_base: sregs.fs.base,
            idt_base: sregs.idt.base,
            idt_limit: sregs.idt.limit,
            gdt_base: sregs.gdt.base,
            cs: sregs.cs.selector,
            ss: sregs.ss.selector,
        }
    }
}

/// Reads all registers. The vCPU must be stopped.
pub(in crate::machine) fn registers(fd: &VcpuFd) -> Result<Registers, MachineError> {
    let regs = fd.get_regs().map_err(MachineError::kvm("read registers"))?;
    let sregs = fd.get_sregs().map_err(MachineError::kvm("read system registers"))?;
    Ok(Registers::new(&regs, &sregs))
}

/// Moves a stopped vCPU to another instruction.
pub(in crate::machine) fn set_program_counter(
    fd: &VcpuFd,
    address: u64,
) -> Result<(), MachineError> {
    let mut regs = fd.get_regs().map_err(MachineError::kvm("read registers"))?;
    regs.rip = address;
    fd.set_regs(&regs).map_err(MachineError::kvm("set registers"))
}

/// What a vCPU had before it was sent away.
#[derive(Debug, Default)]
pub(in crate::machine) struct Kept {
    regs: kvm_regs,
    sregs: kvm_sregs,
}

/// Sends a stopped vCPU somewhere else.
pub(in crate::machine) fn divert(fd: &VcpuFd, detour: &Detour) -> Result<Kept, MachineError> {
    let regs = fd.get_regs().map_err(MachineError::kvm("read registers"))?;
    let sregs = fd.get_sregs().map_err(MachineError::kvm("read system registers"))?;
    let mut to = sregs;
    to.idt.base = detour.faults;
    // Sixteen bytes each; the limit is the last byte's offset.
    to.idt.limit = u16::try_from(Detour::GATES * 16 - 1).unwrap_or(u16::MAX);
    fd.set_sregs(&to).map_err(MachineError::kvm("set system registers"))?;
    let to = kvm_regs { rip: detour.address, rsp: detour.stack, ..regs };
    fd.set_regs(&to).map_err(MachineError::kvm("set registers"))?;
    Ok(Kept { regs, sregs })
}

/// Gives a stopped vCPU back what it had.
pub(in crate::machine) fn put_back(fd: &VcpuFd, kept: &Kept) -> Result<(), MachineError> {
    fd.set_sregs(&kept.sregs).map_err(MachineError::kvm("set system registers"))?;
    fd.set_regs(&kept.regs).map_err(MachineError::kvm("set registers"))
}

/// Where the trap instruction is that the vCPU has just completed, if it was one.
pub(in crate::machine) fn trap_address(fd: &VcpuFd) -> Option<u64> {
    let length = super::TRAP_INSTRUCTION.len() as u64;
    fd.get_regs().ok().map(|regs| regs.rip.wrapping_sub(length))
}

/// What looked like a trap was the guest's own access to a port that nothing is at.
pub(in crate::machine) fn refuse_trap(_: &VcpuFd) -> Result<(), MachineError> {
    Ok(())
}

/// Whether a stopped vCPU is in kernel mode: its privilege level is that of the stack segment (Intel SDM, volume 3,
/// 26.3.1.5, "SS.DPL").
pub(in crate::machine) fn is_in_kernel(fd: &VcpuFd) -> bool {
    fd.get_sregs().is_ok_and(|sregs| sregs.ss.dpl == 0)
}

/// What the guest would read from its time stamp counter.
pub(in crate::machine) fn clock(fd: &VcpuFd) -> Result<u64, MachineError> {
    let entry = kvm_msr_entry { index: MSR_TSC, ..Default::default() };
    let mut msrs = Msrs::from_entries(&[entry]).map_err(|_| MachineError::NoClock)?;
    let count = fd.get_msrs(&mut msrs).map_err(MachineError::kvm("read the clock"))?;
    match msrs.as_slice() {
        [entry] if count == 1 => Ok(entry.data),
        _ => Err(MachineError::NoClock),
    }
}

/// Rate of the time stamp counter in Hz.
pub(in crate::machine) fn clock_hz(fd: &VcpuFd) -> Result<u64, MachineError> {
    let khz = fd.get_tsc_khz().map_err(MachineError::kvm("report the rate of the clock"))?;
    Ok(u64::from(khz) * 1000)
}

/// Tells the guest that it was stopped, so that its watchdogs do not blame it.
pub(in crate::machine) fn paused(fd: &VcpuFd) -> Result<(), MachineError> {
    match fd.kvmclock_ctrl() {
        // The guest has no kvmclock (yet).
        Err(e) if e.errno() == libc::EINVAL => Ok(()),
        result => result.map_err(MachineError::kvm("tell the guest of a pause")),
    }
}

/// What an exit leaves to do once the vCPU can be used again.
enum Todo {
    Step(Step),
    Write { index: u32, value: u64 },
    Died(String),
    InternalError,
}

/// Enters the guest and does what it wants of its devices.
pub(in crate::machine) fn run(fd: &mut VcpuFd, platform: &Platform, exits: &mut ExitLog) -> Step {
    let exit = fd.run();
    exits.left(|| cause(&exit));
    let todo = match exit {
        Ok(VcpuExit::IoOut(port, &[_])) if port == u16::from(layout::TRAP_PORT) => {
            Todo::Step(Step::Trap)
        }
        Ok(VcpuExit::IoOut(port, &[_])) if port == u16::from(layout::WAIT_PORT) => {
            Todo::Step(Step::Full)
        }
        Ok(VcpuExit::IoOut(port, data)) => {
            Todo::Step(platform.ports.write(u64::from(port), data).into())
        }
        Ok(VcpuExit::IoIn(port, data)) => {
            platform.ports.read(u64::from(port), data);
            Todo::Step(Step::Continue)
        }
        Ok(VcpuExit::MmioWrite(address, data)) => {
            Todo::Step(platform.registers.write(address, data).into())
        }
        Ok(VcpuExit::MmioRead(address, data)) => {
            platform.registers.read(address, data);
            Todo::Step(Step::Continue)
        }
        Ok(VcpuExit::X86Wrmsr(exit)) => Todo::Write { index: exit.index, value: exit.data },
        Ok(VcpuExit::Intr | VcpuExit::IrqWindowOpen) => Todo::Step(Step::Continue),
        Ok(VcpuExit::Shutdown) => Todo::Step(Step::Exit(ExitReason::TripleFault)),
        Ok(VcpuExit::InternalError) => Todo::InternalError,
        Ok(other) => Todo::Died(format!("KVM exit {other:?}")),
        Err(e) if e.errno() == libc::EINTR => Todo::Step(Step::Interrupted),
        // A vCPU that has just been started by another one.
        Err(e) if e.errno() == libc::EAGAIN => Todo::Step(Step::Continue),
        Err(e) => Todo::Died(format!("KVM_RUN failed: {e}")),
    };
    match todo {
        Todo::Step(step) => step,
        Todo::Write { index, value } => write_register(fd, index, value),
        Todo::Died(what) => died(fd, &what),
        Todo::InternalError => {
            let what = internal_error(fd);
            died(fd, &what)
        }
    }
}

fn died(fd: &VcpuFd, what: &str) -> Step {
    let registers = registers(fd).map_or_else(|e| e.to_string(), |r| format!("{r:x?}"));
    Step::Exit(ExitReason::InternalError(format!("{what}; {registers}")))
}

/// What KVM says about an exit for an internal error.
fn internal_error(fd: &mut VcpuFd) -> String {
    // SAFETY: the exit was for KVM_EXIT_INTERNAL_ERROR, with which KVM fills this member; any bits
    // are valid for it.
    let internal = unsafe { fd.get_kvm_run().__bindgen_anon_1.internal };
    let kind = match internal.suberror {
        KVM_INTERNAL_ERROR_EMULATION => "it cannot emulate an instruction",
        KVM_INTERNAL_ERROR_DELIVERY_EV => "it cannot deliver an event",
        _ => "no further kind",
    };
    let count = usize::try_from(internal.ndata).map_or(0, |n| n.min(internal.data.len()));
    let data = &internal.data[..count];
    format!("KVM internal error {} ({kind}), data {data:x?}", internal.suberror)
}

/// Does the register write that KVM has left to us.
fn write_register(fd: &mut VcpuFd, index: u32, value: u64) -> Step {
    let entry = kvm_msr_entry { index, data: value, ..Default::default() };
    let done = Msrs::from_entries(&[entry])
        .is_ok_and(|msrs| fd.set_msrs(&msrs).is_ok_and(|count| count == 1));
    // Otherwise the guest gets the fault that it would have got.
    fd.get_kvm_run().__bindgen_anon_1.msr.error = u8::from(!done);
    if done { Step::MsrWrite { index, value } } else { Step::Continue }
}
