//! The checks on x86-64, and the few instructions that the virtual machine executes.
#![allow(unsafe_code)]

use std::arch::global_asm;
use std::io::Write;

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_segment};
use kvm_ioctls::{Cap, Kvm, VcpuExit, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::checks::{Step, give_memory};
use super::{Failed, Reporter};

pub(super) const NEEDED: [(Cap, &str); 11] = [
    (Cap::UserMemory, "USER_MEMORY"),
    (Cap::Irqchip, "IRQCHIP"),
    (Cap::Pit2, "PIT2"),
    (Cap::Irqfd, "IRQFD"),
    (Cap::SetTssAddr, "SET_TSS_ADDR"),
    (Cap::ExtCpuid, "EXT_CPUID"),
    (Cap::GetTscKhz, "GET_TSC_KHZ"),
    (Cap::ImmediateExit, "IMMEDIATE_EXIT"),
    (Cap::X86UserSpaceMsr, "X86_USER_SPACE_MSR"),
    (Cap::X86MsrFilter, "X86_MSR_FILTER"),
    (Cap::KvmclockCtrl, "KVMCLOCK_CTRL"),
];

// Where things are in the virtual machine's memory.
pub(super) const BASE: u64 = 0;
pub(super) const MEMORY: usize = 2 << 20;
const PML4: u64 = 0x1000;
const PDPT: u64 = 0x2000;
const PD: u64 = 0x3000;
const GDT: u64 = 0x4000;
const IDT: u64 = 0x5000;
const CODE: u64 = 0x8000;
const STACK_TOP: u64 = 0x1_0000;
/// Beyond what is used, as KVM wants it on Intel processors.
const TSS: usize = 0xfffb_d000;

const PORT_STEP: u16 = 0xf0;
const PORT_DONE: u16 = 0xf1;
const PORT_WRONG: u16 = 0xf2;

pub(super) const STEPS: [&str; 5] = [
    "64-bit ring 0",
    "lock cmpxchg16b",
    "int3 through the IDT",
    "xsave and xrstor",
    "writing MSRs",
];

/// Iterations of the loop at the end, two instructions each.
pub(super) const LOOPS: u32 = 1_000_000;

global_asm!(
    r#"
    .pushsection .rodata.vmtrace_probe, "a"
    .global vmtrace_probe_start
    .global vmtrace_probe_int3
    .global vmtrace_probe_end
vmtrace_probe_start:
    xor eax, eax
    out {step}, al

    # cmpxchg16b: the kernel's slab allocator
    mov al, 1
    out {step}, al
    mov rdi, 0x14000
    mov qword ptr [rdi], 0x11
    mov qword ptr [rdi + 8], 0x22
    mov eax, 0x11
    mov edx, 0x22
    mov ebx, 0x33
    mov ecx, 0x44
    lock cmpxchg16b xmmword ptr [rdi]
    jnz 9f
    cmp qword ptr [rdi], 0x33
    jne 9f
    cmp qword ptr [rdi + 8], 0x44
    jne 9f

    # int3: how the kernel tests its own patching at boot
    mov al, 2
    out {step}, al
    mov qword ptr [rdi + 16], 0
    int3
    cmp qword ptr [rdi + 16], 1
    jne 9f

    # xsave, xrstor: every switch between programs
    mov al, 3
    out {step}, al
    mov eax, 1
    xor ecx, ecx
    cpuid
    bt ecx, 26
    jnc 5f
    mov rax, cr4
    or eax, 0x40600
    mov cr4, rax
    xor ecx, ecx
    mov eax, 3
    xor edx, edx
    xsetbv
    mov rsi, 0x11000
    mov rbx, 0x123456789abcdef0
    movq xmm0, rbx
    mov eax, 3
    xor edx, edx
    xsave64 [rsi]
    pxor xmm0, xmm0
    mov eax, 3
    xor edx, edx
    xrstor64 [rsi]
    movq rax, xmm0
    cmp rax, rbx
    jne 9f
5:
    # MSRs and the TLB
    mov al, 4
    out {step}, al
    mov ecx, 0xc0000082
    mov eax, 0x1000
    mov edx, 0xffffffff
    wrmsr
    xor eax, eax
    xor edx, edx
    rdmsr
    cmp eax, 0x1000
    jne 9f
    cmp edx, 0xffffffff
    jne 9f
    mov rax, cr3
    mov cr3, rax
    invlpg [rdi]

    mov al, 5
    out {step}, al
    mov ecx, {loops}
6:
    dec ecx
    jnz 6b
    out {done}, al
    hlt
9:
    out {wrong}, al
    hlt

vmtrace_probe_int3:
    inc qword ptr [rdi + 16]
    iretq
vmtrace_probe_end:
    .popsection
    "#,
    step = const PORT_STEP,
    done = const PORT_DONE,
    wrong = const PORT_WRONG,
    loops = const LOOPS,
);

unsafe extern "C" {
    static vmtrace_probe_start: u8;
    static vmtrace_probe_int3: u8;
    static vmtrace_probe_end: u8;
}

/// The instructions, and where in them the handler of int3 is.
fn code() -> (&'static [u8], usize) {
    let start = &raw const vmtrace_probe_start;
    let length = (&raw const vmtrace_probe_end).addr() - start.addr();
    let handler = (&raw const vmtrace_probe_int3).addr() - start.addr();
    // SAFETY: the assembler made these bytes between the two symbols, in a section that is never written.
    (unsafe { std::slice::from_raw_parts(start, length) }, handler)
}

/// What KVM has for it: x86-64 has all that there is from the start.
pub(super) fn devices<W: Write>(_: &mut Reporter<W>, _: &Kvm, _: &VcpuFd) -> Result<(), Failed> {
    Ok(())
}

/// The virtual machine, ready to run, and what it has. `memory` is all of its memory.
pub(super) fn machine(
    kvm: &Kvm,
    memory: &GuestMemoryMmap<()>,
) -> Result<((VmFd, VcpuFd), String), String> {
    let error = |what: &'static str| move |e: kvm_ioctls::Error| format!("cannot {what}: {e}");
    let write =
        |at: u64, value: u64| memory.write_obj(value, GuestAddress(at)).map_err(|e| e.to_string());
    // The first 2 MiB, where they are.
    write(PML4, PDPT | 3)?;
    write(PDPT, PD | 3)?;
    write(PD, 0x83)?;
    write(GDT + 8, 0x00af_9b00_0000_ffff)?;
    write(GDT + 16, 0x00cf_9300_0000_ffff)?;
    let (code, handler) = code();
    memory.write_slice(code, GuestAddress(CODE)).map_err(|e| e.to_string())?;
    let handler = CODE + u64::try_from(handler).map_err(|e| e.to_string())?;
    // An interrupt gate; all addresses have 16 bits.
    write(IDT + 3 * 16, handler | 0x8e00_0008_0000)?;
    write(IDT + 3 * 16 + 8, 0)?;

    let vm = kvm.create_vm().map_err(error("make it"))?;
    vm.set_tss_address(TSS).map_err(error("place its task state segment"))?;
    vm.create_irq_chip().map_err(error("make interrupt controllers"))?;
    give_memory(&vm, memory)?;
    let vcpu = vm.create_vcpu(0).map_err(error("make a vCPU"))?;
    let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(error("read CPUID"))?;
    vcpu.set_cpuid2(&cpuid).map_err(error("set CPUID"))?;
    registers(&vcpu).map_err(error("set registers"))?;
    Ok(((vm, vcpu), "interrupt controllers, one vCPU".to_owned()))
}

/// 64-bit mode, ring 0, interrupts off.
fn registers(vcpu: &VcpuFd) -> Result<(), kvm_ioctls::Error> {
    let mut sregs = vcpu.get_sregs()?;
    let flat = |selector: u16, kind: u8, long: u8| kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_: kind,
        present: 1,
        db: 1 - long,
        s: 1,
        l: long,
        g: 1,
        ..Default::default()
    };
    sregs.cs = flat(8, 11, 1);
    let data = flat(16, 3, 0);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    (sregs.gdt.base, sregs.gdt.limit) = (GDT, 23);
    (sregs.idt.base, sregs.idt.limit) = (IDT, 4095);
    sregs.cr3 = PML4;
    // Physical address extension; SSE with its exceptions.
    sregs.cr4 = 0x620;
    // Paging, write protection, numeric errors, extension type, monitor coprocessor, protection.
    sregs.cr0 = 0x8001_0033;
    // Long mode enabled and active, no-execute.
    sregs.efer = 0xd00;
    vcpu.set_sregs(&sregs)?;
    let mut regs = vcpu.get_regs()?;
    (regs.rip, regs.rsp, regs.rflags) = (CODE, STACK_TOP, 2);
    vcpu.set_regs(&regs)
}

/// Runs to the next word of the virtual machine.
pub(super) fn step(vcpu: &mut VcpuFd) -> Result<Step, String> {
    loop {
        return match vcpu.run() {
            Ok(VcpuExit::IoOut(PORT_STEP, &[step])) => Ok(Step::Reached(step.into())),
            Ok(VcpuExit::IoOut(PORT_WRONG, _)) => Ok(Step::Wrong),
            Ok(VcpuExit::IoOut(PORT_DONE, _)) => Ok(Step::Done),
            Ok(VcpuExit::InternalError) => Err("KVM cannot execute it (internal error)".to_owned()),
            Ok(VcpuExit::Shutdown) => Err("the virtual machine crashed (triple fault)".to_owned()),
            Ok(exit) => Err(format!("unexpected exit ({exit:?})")),
            Err(e) if e.errno() == libc::EINTR => continue,
            Err(e) => Err(e.to_string()),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_code_fits() {
        let (code, handler) = code();
        assert!(handler < code.len() && code.len() < 0x1000);
    }
}
