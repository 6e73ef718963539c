//! The checks on riscv64, and the few instructions that the virtual machine executes.
#![allow(unsafe_code)]

use std::arch::global_asm;
use std::io::Write;

use kvm_bindings::{KVM_REG_RISCV, KVM_REG_RISCV_CORE, KVM_REG_RISCV_TIMER, KVM_REG_SIZE_U64};
use kvm_ioctls::{Cap, Kvm, VcpuExit, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::checks::{Step, give_memory};
use super::{Failed, Reporter};

pub(super) const NEEDED: [(Cap, &str); 4] = [
    (Cap::UserMemory, "USER_MEMORY"),
    (Cap::OneReg, "ONE_REG"),
    (Cap::MpState, "MP_STATE"),
    (Cap::ImmediateExit, "IMMEDIATE_EXIT"),
];

// Where things are in the virtual machine's memory.
pub(super) const BASE: u64 = 0x8000_0000;
pub(super) const MEMORY: usize = 2 << 20;
/// An address without memory: stores to it exit, and are messages to the probe.
const WORDS: u64 = 0x1000_0000;

const WRONG: u32 = 0x100;
const DONE: u32 = 0x101;

pub(super) const STEPS: [&str; 5] = [
    "supervisor mode",
    "atomic instructions",
    "traps into the virtual machine",
    "virtual memory",
    "calls of the SBI",
];

/// Iterations of the loop at the end, two instructions each.
pub(super) const LOOPS: u32 = 1_000_000;

/// A vendor's call of the SBI, which KVM must hand to its user.
const CALL: u64 = 0x0976_d000;

global_asm!(
    r#"
    .pushsection .rodata.vmtrace_probe, "a"
    .balign 4
    .option push
    .option arch, rv64imac_zicsr_zifencei
    .option norelax
    .global vmtrace_probe_start
    .global vmtrace_probe_end
vmtrace_probe_start:
    li      s0, {words}
    sw      zero, 0(s0)

    # lr, sc, amo: every lock
    li      t0, 1
    sw      t0, 0(s0)
    auipc   s1, 0x10
    andi    s1, s1, -8
    li      t1, 0x11
    sd      t1, 0(s1)
1:  lr.d    t2, (s1)
    addi    t2, t2, 0x22
    sc.d    t3, t2, (s1)
    bnez    t3, 1b
    amoadd.d t2, t1, (s1)
    ld      t2, 0(s1)
    li      t3, 0x44
    bne     t2, t3, 9f

    # ebreak goes to the virtual machine itself
    li      t0, 2
    sw      t0, 0(s0)
    lla     t1, 2f
    csrw    stvec, t1
    ebreak
    j       9f
    .balign 4
2:  csrr    t1, scause
    li      t2, 3
    bne     t1, t2, 9f

    # Sv39: 1 GiB pages, where they are
    li      t0, 3
    sw      t0, 0(s0)
    auipc   s2, 0x20
    srli    s2, s2, 12
    slli    s2, s2, 12
    li      t1, 0x200000cf
    sd      t1, 16(s2)
    li      t1, 0xcf
    sd      t1, 0(s2)
    srli    t1, s2, 12
    li      t2, 8
    slli    t2, t2, 60
    or      t1, t1, t2
    csrw    satp, t1
    sfence.vma
    ld      t2, 0(s1)
    bne     t2, t3, 9f
    fence.i
    csrw    satp, zero
    sfence.vma

    # a call for our ears; its answer comes from us
    li      t0, 4
    sw      t0, 0(s0)
    li      a7, {call}
    li      a0, 7
    ecall
    li      t1, 8
    bne     a0, t1, 9f

    li      t0, 5
    sw      t0, 0(s0)
    li      t1, {loops}
6:  addi    t1, t1, -1
    bnez    t1, 6b
    li      t0, {done}
    sw      t0, 0(s0)
7:  j       7b
9:  li      t0, {wrong}
    sw      t0, 0(s0)
    j       7b
vmtrace_probe_end:
    .option pop
    .popsection
    "#,
    words = const WORDS,
    call = const CALL,
    loops = const LOOPS,
    done = const DONE,
    wrong = const WRONG,
);

unsafe extern "C" {
    static vmtrace_probe_start: u8;
    static vmtrace_probe_end: u8;
}

/// The instructions.
fn code() -> &'static [u8] {
    let start = &raw const vmtrace_probe_start;
    let length = (&raw const vmtrace_probe_end).addr() - start.addr();
    // SAFETY: the assembler made these bytes between the two symbols, in a section that is never written.
    unsafe { std::slice::from_raw_parts(start, length) }
}

/// What KVM has for it.
pub(super) fn devices<W: Write>(
    report: &mut Reporter<W>,
    kvm: &Kvm,
    vcpu: &VcpuFd,
) -> Result<(), Failed> {
    report.check("interrupt controllers", || {
        let found = if kvm.check_extension(Cap::Irqchip) {
            "the host's (AIA)"
        } else {
            "none in KVM; ours (PLIC) will do"
        };
        Ok(((), found.to_owned()))
    })?;
    report.check("clock", || {
        let hz = register(vcpu, KVM_REG_RISCV_TIMER)?;
        Ok(((), format!("{hz} Hz")))
    })
}

/// The virtual machine, ready to run, and what it has. `memory` is all of its memory.
pub(super) fn machine(
    kvm: &Kvm,
    memory: &GuestMemoryMmap<()>,
) -> Result<((VmFd, VcpuFd), String), String> {
    let error = |what: &'static str| move |e: kvm_ioctls::Error| format!("cannot {what}: {e}");
    memory.write_slice(code(), GuestAddress(BASE)).map_err(|e| e.to_string())?;
    let vm = kvm.create_vm().map_err(error("make it"))?;
    give_memory(&vm, memory)?;
    let vcpu = vm.create_vcpu(0).map_err(error("make a vCPU"))?;
    let pc = KVM_REG_RISCV.cast_unsigned() | KVM_REG_SIZE_U64 | u64::from(KVM_REG_RISCV_CORE);
    vcpu.set_one_reg(pc, &BASE.to_le_bytes()).map_err(error("set registers"))?;
    Ok(((vm, vcpu), "one vCPU".to_owned()))
}

/// The first register of a kind.
fn register(vcpu: &VcpuFd, kind: u32) -> Result<u64, String> {
    let mut bytes = [0; 8];
    let id = KVM_REG_RISCV.cast_unsigned() | KVM_REG_SIZE_U64 | u64::from(kind);
    vcpu.get_one_reg(id, &mut bytes).map_err(|e| e.to_string())?;
    Ok(u64::from_le_bytes(bytes))
}

/// Runs to the next word of the virtual machine.
pub(super) fn step(vcpu: &mut VcpuFd) -> Result<Step, String> {
    loop {
        match vcpu.run() {
            Ok(VcpuExit::MmioWrite(WORDS, data)) => {
                let word = <[u8; 4]>::try_from(data).map_or(WRONG, u32::from_le_bytes);
                return Ok(match word {
                    DONE => Step::Done,
                    WRONG => Step::Wrong,
                    step => Step::Reached(usize::try_from(step).unwrap_or(0)),
                });
            }
            Ok(VcpuExit::Unsupported(kvm_bindings::KVM_EXIT_RISCV_SBI)) => {
                // SAFETY: the exit was for KVM_EXIT_RISCV_SBI, with which KVM fills this member; any bits
                // are valid for it.
                let call = unsafe { &mut vcpu.get_kvm_run().__bindgen_anon_1.riscv_sbi };
                if call.extension_id != CALL {
                    return Err(format!("a call of {:#x} instead", call.extension_id));
                }
                call.ret = [call.args[0] + 1, 0];
            }
            Ok(exit) => return Err(format!("unexpected exit ({exit:?})")),
            Err(e) if e.errno() == libc::EINTR => {}
            Err(e) => return Err(e.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_code_fits() {
        assert!((64..0x1000).contains(&code().len()));
    }
}
