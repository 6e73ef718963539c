//! What only the x86-64 trampolines have.
#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code, reason = "runs machine code in this process")]

mod common;

use common::FakeGuest;
use common::arch::Addressing;
use vmtrace_trampolines::Overflow;

const VARIANTS: [(Addressing, Overflow); 4] = [
    (Addressing::PerCpu, Overflow::Drop),
    (Addressing::PerCpu, Overflow::Overwrite),
    (Addressing::Shared, Overflow::Drop),
    (Addressing::Shared, Overflow::Overwrite),
];

// A clobbered argument register would make the traced kernel function misbehave.
#[test]
fn all_registers_but_r10_r11_and_flags_survive() {
    for (addressing, overflow) in VARIANTS {
        let guest = FakeGuest::new(1, 1 << 15, addressing, overflow);
        guest.set_current(0, 1);
        // Enough to take the slow path and, with Drop, the full path.
        for round in 0..3000_u64 {
            let (mut rax, mut rcx, mut rdx) = (round, !round, round << 32);
            let (mut rsi, mut rdi, mut r8, mut r9) = (1_u64, 2_u64, 3_u64, 4_u64);
            let target = guest.site(0);
            let (rbx, mut sum): (u64, u64) = (0x1234_5678_9abc_def0, 0);
            // SAFETY: calls a function that keeps all registers, by this very test;
            // the clobbers cover a C function should it not.
            unsafe {
                core::arch::asm!(
                    "push rbx", "push r12", "push r13", "push r14", "push r15",
                    "mov rbx, 0x123456789abcdef0",
                    "mov r13, rbx", "mov r14, rbx", "mov r15, rbx",
                    "call r12",
                    "xor r13, rbx", "xor r14, rbx", "xor r15, rbx",
                    "or r13, r14", "or r13, r15",
                    "mov r10, r13", "mov r11, rbx",
                    "pop r15", "pop r14", "pop r13", "pop r12", "pop rbx",
                    in("r12") target,
                    inout("rax") rax, inout("rcx") rcx, inout("rdx") rdx,
                    inout("rsi") rsi, inout("rdi") rdi, inout("r8") r8, inout("r9") r9,
                    out("r10") sum, out("r11") _,
                );
            }
            let _ = rbx;
            assert_eq!((rax, rcx, rdx), (round, !round, round << 32));
            assert_eq!((rsi, rdi, r8, r9, sum), (1, 2, 3, 4, 0));
        }
    }
}
