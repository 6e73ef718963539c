//! Features that only the riscv64 trampolines have.
#![cfg(target_arch = "riscv64")]
#![allow(unsafe_code, reason = "runs machine code in this process")]

mod common;

use common::FakeGuest;
use common::arch::Addressing;
use vmtrace_trampolines::Overflow;
use vmtrace_trampolines::riscv64::encode::register::*;
use vmtrace_trampolines::riscv64::encode::*;

// The sc.d of an interrupted trampoline would store its older position: records
// that came in between would be written over.
#[test]
fn no_reservation_outlives_a_hit() {
    for overflow in [Overflow::Drop, Overflow::Overwrite] {
        let guest = FakeGuest::new(1, 1 << 15, Addressing, overflow);
        guest.set_current(0, 1);
        // The last ones find the ring full.
        for hit in 0..2 * (1 << 15) / 32 {
            assert!(!guest.hit_inside_a_reservation(hit, 0), "{overflow:?}, hit {hit}");
        }
        assert_eq!(guest.dropped(0) != 0, overflow == Overflow::Drop);
    }
}

// A clobbered argument register would make the traced kernel function misbehave.
#[test]
fn all_registers_but_temporaries_survive() {
    for overflow in [Overflow::Drop, Overflow::Overwrite] {
        let guest = FakeGuest::new(1, 1 << 15, Addressing, overflow);
        let task = guest.set_current(0, 1);
        // Enough to take the slow path and, with Drop, the full path.
        for round in 0..3000_u64 {
            let mut a: [u64; 8] = core::array::from_fn(|n| round << n ^ n as u64);
            let before = a;
            let (mut sum, sp): (u64, u64);
            // SAFETY: calls a function that keeps all registers but ra and t0 to
            // t6, by this very test; the others are compared and put back.
            unsafe {
                core::arch::asm!(
                    "addi sp, sp, -112",
                    "sd s0, 0(sp)", "sd s1, 8(sp)", "sd s2, 16(sp)", "sd s3, 24(sp)",
                    "sd s4, 32(sp)", "sd s5, 40(sp)", "sd s6, 48(sp)", "sd s7, 56(sp)",
                    "sd s8, 64(sp)", "sd s9, 72(sp)", "sd s10, 80(sp)", "sd s11, 88(sp)",
                    "sd tp, 96(sp)", "sd gp, 104(sp)",
                    "mv s11, sp",
                    "mv tp, t1",
                    "li s0, 100", "li s1, 101", "li s2, 102", "li s3, 103", "li s4, 104",
                    "li s5, 105", "li s6, 106", "li s7, 107", "li s8, 108", "li s9, 109",
                    "mv s10, t1",
                    "jalr ra, 0(t2)",
                    "xor t2, s10, tp", "xor t3, s11, sp", "or t2, t2, t3",
                    "ld t3, 104(sp)", "xor t3, t3, gp", "or t2, t2, t3",
                    "addi s0, s0, -100", "addi s1, s1, -101", "addi s2, s2, -102",
                    "addi s3, s3, -103", "addi s4, s4, -104", "addi s5, s5, -105",
                    "addi s6, s6, -106", "addi s7, s7, -107", "addi s8, s8, -108",
                    "addi s9, s9, -109",
                    "or t2, t2, s0", "or t2, t2, s1", "or t2, t2, s2", "or t2, t2, s3",
                    "or t2, t2, s4", "or t2, t2, s5", "or t2, t2, s6", "or t2, t2, s7",
                    "or t2, t2, s8", "or t2, t2, s9",
                    "ld s0, 0(sp)", "ld s1, 8(sp)", "ld s2, 16(sp)", "ld s3, 24(sp)",
                    "ld s4, 32(sp)", "ld s5, 40(sp)", "ld s6, 48(sp)", "ld s7, 56(sp)",
                    "ld s8, 64(sp)", "ld s9, 72(sp)", "ld s10, 80(sp)", "ld s11, 88(sp)",
                    "ld tp, 96(sp)",
                    "addi sp, sp, 112",
                    "mv t3, sp",
                    inout("t1") task => _, inout("t2") guest.site(round) => sum,
                    inout("a0") a[0], inout("a1") a[1], inout("a2") a[2], inout("a3") a[3],
                    inout("a4") a[4], inout("a5") a[5], inout("a6") a[6], inout("a7") a[7],
                    out("t3") sp, out("ra") _, out("t0") _, out("t4") _, out("t5") _,
                    out("t6") _,
                );
            }
            assert_eq!((a, sum), (before, 0));
            assert_ne!(sp, 0);
        }
    }
}

/// Defines a function that returns what the assembler makes of an instruction.
macro_rules! assembled {
    ($text:literal) => {{
        let word: u32;
        // SAFETY: jumps over the instruction and loads it.
        unsafe {
            core::arch::asm!(
                ".option push", ".option norvc",
                "j 2f",
                ".balign 4",
                concat!("1: ", $text),
                "2: la {0}, 1b",
                "lwu {0}, 0({0})",
                ".option pop",
                out(reg) word,
            );
        }
        word
    }};
}

// Every form that a trampoline or a site is made of.
#[test]
fn encodings_are_those_of_the_assembler() {
    assert_eq!(NOP, assembled!("nop"));
    assert_eq!(ECALL, assembled!("ecall"));
    assert_eq!(FENCE_I, assembled!("fence.i"));
    assert_eq!(FENCE_W_W, assembled!("fence w, w"));
    assert_eq!(SFENCE_VMA, assembled!("sfence.vma"));
    assert_eq!(lui(T4, 0xfff00), assembled!("lui t4, 0xfff00"));
    assert_eq!(auipc(T0, 0xfedcb), assembled!("auipc t0, 0xfedcb"));
    assert_eq!(addi(T3, T2, -1), assembled!("addi t3, t2, -1"));
    assert_eq!(mv(T1, A7), assembled!("mv t1, a7"));
    assert_eq!(sext_w(T3, T2), assembled!("sext.w t3, t2"));
    assert_eq!(slli(T3, T2, 50), assembled!("slli t3, t2, 50"));
    assert_eq!(srli(T5, T2, 32), assembled!("srli t5, t2, 32"));
    assert_eq!(add(T1, T1, T2), assembled!("add t1, t1, t2"));
    assert_eq!(or(T5, T5, T4), assembled!("or t5, t5, t4"));
    assert_eq!(and(T3, T3, T4), assembled!("and t3, t3, t4"));
    assert_eq!(lw(T1, TP, 32), assembled!("lw t1, 32(tp)"));
    assert_eq!(ld(T1, T0, -16), assembled!("ld t1, -16(t0)"));
    assert_eq!(sw(RA, T2, 12), assembled!("sw ra, 12(t2)"));
    assert_eq!(sd(TP, SP, -2048), assembled!("sd tp, -2048(sp)"));
    assert_eq!(beq(T3, ZERO, 0x7fe), assembled!("beqz t3, . + 0x7fe"));
    assert_eq!(bne(T4, T5, -4096), assembled!("bne t4, t5, . - 4096"));
    assert_eq!(bgeu(T6, T2, 0xffe), assembled!("bgeu t6, t2, . + 0xffe"));
    assert_eq!(j(-0x1234), assembled!("j . - 0x1234"));
    assert_eq!(jal(RA, 0xf_fffe), assembled!("jal ra, . + 0xffffe"));
    assert_eq!(jalr(T0, T0, -1), assembled!("jalr t0, -1(t0)"));
    assert_eq!(jr(T0), assembled!("jr t0"));
    assert_eq!(lr_d(T2, T1), assembled!("lr.d t2, (t1)"));
    assert_eq!(sc_d(T3, T5, T1), assembled!("sc.d t3, t5, (t1)"));
    assert_eq!(amoadd_d(ZERO, T4, T3), assembled!("amoadd.d x0, t4, (t3)"));
    assert_eq!(rdtime(T3), assembled!("rdtime t3"));
}
