//! Encodings come from GNU as 2.40; those of extensions that it does not know (Zacas, Zcb) from the
//! manual.

use super::*;

const T2: u8 = 7;
const T3: u8 = 28;
const T4: u8 = 29;
const T5: u8 = 30;
const T6: u8 = 31;
const A0: u8 = 10;
const A1: u8 = 11;
const A2: u8 = 12;
const A3: u8 = 13;
const A4: u8 = 14;
const A5: u8 = 15;

fn decode(code: u32) -> Instruction {
    Instruction::at(&code.to_le_bytes(), 0).unwrap()
}

/// Length, registers read, register written.
#[track_caller]
fn plain(code: u32, len: u8, reads: &[u8], writes: u8) {
    let expected = Instruction::plain(len, reads.iter().copied(), writes);
    assert_eq!(decode(code), expected, "{code:#x}");
}

#[track_caller]
fn kind(code: u32, kind: Kind, reads: &[u8], writes: u8) {
    let len = if code & 3 == 3 { 4 } else { 2 };
    let expected = Instruction::new(len, kind, reads.iter().copied(), writes);
    assert_eq!(decode(code), expected, "{code:#x}");
}

#[test]
fn full_instructions_read_and_write_what_they_do() {
    plain(0xfff5_8503, 4, &[A1], A0); // lb a0, -1(a1)
    kind(0xff02_b303, Kind::Load, &[5], T1); // ld t1, -16(t0)
    plain(0x0310_000f, 4, &[], 0); // fence rw, w
    plain(0x0046_a00f, 4, &[A3], 0); // cbo.zero (a3)
    plain(0x005e_4393, 4, &[T3], T2); // xori t2, t3, 5
    plain(0x0037_871b, 4, &[A5], A4); // addiw a4, a5, 3
    plain(0xfe99_3c23, 4, &[18, 9], 0); // sd s1, -8(s2)
    plain(0x008e_b507, 4, &[T4], 0); // fld fa0, 8(t4)
    plain(0x00bf_2227, 4, &[T5], 0); // fsw fa1, 4(t5)
    plain(0x06e6_a7af, 4, &[A3, A4], A5); // amoadd.w.aqrl a5, a4, (a3)
    plain(0x28e6_b7af, 4, &[A3, A4, A5], A5); // amocas.d a5, a4, (a3)
    plain(0x01c3_8333, 4, &[T2, T3], T1); // add t1, t2, t3
    plain(0x03ff_0ebb, 4, &[T5, T6], T4); // mulw t4, t5, t6
    plain(0x0976_d8b7, 4, &[], 17); // lui a7, 0x976d
    plain(0x6ac5_f543, 4, &[], 0); // fmadd.d fa0, fa1, fa2, fa3
    plain(0xe205_0353, 4, &[], T1); // fmv.x.d t1, fa0
    plain(0xf203_0553, 4, &[T1], 0); // fmv.d.x fa0, t1
    plain(0xa2b5_23d3, 4, &[], T2); // feq.d t2, fa0, fa1
    plain(0xd22e_7553, 4, &[T3], 0); // fcvt.d.l fa0, t3
    plain(0xc225_7ed3, 4, &[], T4); // fcvt.l.d t4, fa0
    plain(0x0c03_f357, 4, &[T2], T1); // vsetvli t1, t2, e8, m1, ta, ma
    plain(0x020e_0007, 4, &[T3], 0); // vle8.v v0, (t3)
    plain(0x0bde_0007, 4, &[T3, T4], 0); // vlse8.v v0, (t3), t4
    plain(0x022f_40d7, 4, &[T5, 2], 0); // vadd.vx v1, v2, t5
    plain(0x12b5_0073, 4, &[A0, A1], 0); // sfence.vma a0, a1
    plain(0x1001_74f3, 4, &[], 9); // csrrci s1, sstatus, 2
    plain(0x1403_9373, 4, &[T2], T1); // csrrw t1, sscratch, t2
    plain(0x100e_2073, 4, &[T3], 0); // csrs sstatus, t3
    plain(0xc010_2e73, 4, &[], T3); // rdtime t3
}

#[test]
fn short_instructions_read_and_write_what_they_do() {
    plain(0x0808, 2, &[SP], A0); // c.addi4spn a0, sp, 16
    plain(0x2588, 2, &[A1], 0); // c.fld fa0, 8(a1)
    plain(0x42d0, 2, &[A3], A2); // c.lw a2, 4(a3)
    kind(0x6798, Kind::Load, &[A5], A4); // c.ld a4, 8(a5)
    plain(0x80c0, 2, &[9], 8); // c.lbu s0, 1(s1)
    plain(0x8da8, 2, &[A1, A0], 0); // c.sh a0, 2(a1)
    plain(0xa510, 2, &[A0], 0); // c.fsd fa2, 8(a0)
    plain(0xc24c, 2, &[A2, A1], 0); // c.sw a1, 4(a2)
    plain(0xe714, 2, &[A4, A3], 0); // c.sd a3, 8(a4)
    plain(0x23fd, 2, &[T2], T2); // c.addiw t2, 31
    plain(0x4e05, 2, &[], T3); // c.li t3, 1
    plain(0x7101, 2, &[SP], SP); // c.addi16sp sp, -512
    plain(0x7efd, 2, &[], T4); // c.lui t4, 0xfffff
    plain(0x810d, 2, &[A0], A0); // c.srli a0, 3
    plain(0x99fd, 2, &[A1], A1); // c.andi a1, -1
    plain(0x8e15, 2, &[A2, A3], A2); // c.sub a2, a3
    plain(0x9f3d, 2, &[A4, A5], A4); // c.addw a4, a5
    plain(0x9c45, 2, &[8, 9], 8); // c.mul s0, s1
    plain(0x9c61, 2, &[8], 8); // c.zext.b s0
    plain(0x0f1e, 2, &[T5], T5); // c.slli t5, 7
    plain(0x2542, 2, &[SP], 0); // c.fldsp fa0, 16(sp)
    plain(0x4f92, 2, &[SP], T6); // c.lwsp t6, 4(sp)
    plain(0x60a2, 2, &[SP], RA); // c.ldsp ra, 8(sp)
    plain(0x831e, 2, &[T2], T1); // c.mv t1, t2
    plain(0x9e76, 2, &[T3, T4], T3); // c.add t3, t4
    plain(0xa42a, 2, &[SP], 0); // c.fsdsp fa0, 8(sp)
    plain(0xc21a, 2, &[SP, T1], 0); // c.swsp t1, 4(sp)
    plain(0xe422, 2, &[SP, 8], 0); // c.sdsp s0, 8(sp)
}

#[test]
fn addresses_and_jumps_have_their_distances() {
    let add = |base, immediate| Kind::AddImmediate { base, immediate };
    kind(0x8005_8513, add(A1, -2048), &[A1], A0); // addi a0, a1, -2048
    kind(0x7ff1_0113, add(SP, 2047), &[SP], SP); // addi sp, sp, 2047
    kind(0x0001, add(0, 0), &[], 0); // c.nop
    kind(0x1301, add(T1, -32), &[T1], T1); // c.addi t1, -32
    kind(0xffff_f317, Kind::Auipc { upper: -4096 }, &[], T1); // auipc t1, 0xfffff
    let branch = |funct3, rs1, rs2, distance| Kind::Branch {
        condition: Condition { funct3, rs1, rs2 },
        distance,
    };
    kind(0x80b5_0063, branch(0, A0, A1, -4096), &[A0, A1], 0); // beq a0, a1, .-4096
    kind(0x7e73_7fe3, branch(7, T1, T2, 4094), &[T1, T2], 0); // bgeu t1, t2, .+4094
    kind(0x000d_c663, branch(4, 27, 0, 12), &[27], 0); // bltz s11, .+12
    kind(0xd101, branch(0, A0, 0, -256), &[A0], 0); // c.beqz a0, .-256
    kind(0xecfd, branch(1, 9, 0, 254), &[9], 0); // c.bnez s1, .+254
    kind(0xcfa9, branch(0, A5, 0, 90), &[A5], 0); // c.beqz a5, .+90
    let jump = |distance| Kind::Jump { distance };
    kind(0x8000_00ef, jump(-0x10_0000), &[], RA); // jal ra, .-1048576
    kind(0x7fff_f06f, jump(0xf_fffe), &[], 0); // j .+1048574
    kind(0xb001, jump(-2048), &[], 0); // c.j .-2048
    kind(0xaffd, jump(2046), &[], 0); // c.j .+2046
    kind(0xa2a9, jump(330), &[], 0); // c.j .+330
    let register = |base, distance| Kind::JumpRegister { base, distance };
    kind(0xffc3_00e7, register(T1, -4), &[T1], RA); // jalr ra, -4(t1)
    kind(0x0003_0067, register(T1, 0), &[T1], 0); // jr t1
    kind(0x8302, register(T1, 0), &[T1], 0); // c.jr t1
    kind(0x9782, register(A5, 0), &[A5], RA); // c.jalr a5
    assert!(decode(0x0000_8067).is_ret() && decode(0x8082).is_ret()); // ret, c.ret
    assert!(!decode(0x0003_0067).is_ret() && !decode(0x9082).is_ret()); // c.jalr ra
}

#[test]
fn what_cannot_be_moved_is_fixed() {
    // lr.d, sc.w, ecall, ebreak, sret, wfi, lpad 1, custom-0, longer than 4 bytes
    let codes = [
        0x1005_b52f,
        0x18d7_262f,
        0x0000_0073,
        0x0010_0073,
        0x1020_0073,
        0x1050_0073,
        0x0000_1017,
        0x0000_100b,
        0x0000_001f,
        0x0000_003f,
        0x0000_007f,
    ];
    for code in codes {
        assert_eq!(decode(code).kind, Kind::Fixed, "{code:#x}");
    }
    // c.unimp, c.ebreak
    for code in [0, 0x9002] {
        assert_eq!((decode(code).len, decode(code).kind), (2, Kind::Fixed), "{code:#x}");
    }
    // What only stops reads nothing; of what is not known, nothing can be said.
    assert_eq!((decode(0).reads, decode(0x9002).reads), (0, 0));
    assert_eq!(decode(0x0000_100b).reads, ALL);
}

#[test]
fn nothing_is_read_past_the_end() {
    assert_eq!(Instruction::at(&[0x13], 0), None);
    assert_eq!(Instruction::at(&[0x13, 0, 0], 0), None);
    assert_eq!(Instruction::at(&[1, 0], 2), None);
    assert_eq!(Instruction::at(&[1, 0], usize::MAX), None);
}

proptest::proptest! {
    // Every halfword and word decodes to something of a length that its low bits tell.
    #[test]
    fn lengths_are_those_of_the_low_bits(code: u32) {
        let len = decode(code).len;
        let expected = match (code & 3, code >> 2 & 7) {
            (3, 7) => if code >> 5 & 1 == 0 { 6 } else { 8 },
            (3, _) => 4,
            _ => 2,
        };
        proptest::prop_assert_eq!(len, expected);
        proptest::prop_assert!(decode(code).writes < 32 && decode(code).reads & 1 == 0
            || decode(code).reads == ALL);
    }
}
