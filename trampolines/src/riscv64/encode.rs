//! Encodes the RV64 instructions of trampolines and patched sites, in their 4-byte forms (The
//! RISC-V Instruction Set Manual, volume I, chapter 37).
//!
//! They are encoded here and not by the assembler, so that an x86-64 build can make and test them
//! as well. A test on riscv64 compares them with the assembler's output.
#![warn(
    clippy::cast_sign_loss,
    clippy::cast_possible_truncation,
    clippy::cast_lossless,
    clippy::useless_conversion,
    clippy::unnecessary_cast
)]

/// An integer register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Register(u32);

impl Register {
    /// The register with this number; `None` from 32 on.
    #[must_use]
    pub const fn new(number: u8) -> Option<Self> {
        if number < 32 { Some(Self(number as u32)) } else { None }
    }
}

#[allow(missing_docs)]
pub mod register {
    use super::Register;
    pub const ZERO: Register = Register(0);
    pub const RA: Register = Register(1);
    pub const SP: Register = Register(2);
    pub const TP: Register = Register(4);
    pub const T0: Register = Register(5);
    pub const T1: Register = Register(6);
    pub const T2: Register = Register(7);
    pub const T3: Register = Register(28);
    pub const T4: Register = Register(29);
    pub const T5: Register = Register(30);
    pub const T6: Register = Register(31);
    pub const A2: Register = Register(12);
    pub const A7: Register = Register(17);
}
use register::ZERO;

/// `nop`
pub const NOP: u32 = addi(ZERO, ZERO, 0);
/// `ecall`
pub const ECALL: u32 = 0x0000_0073;
/// `fence.i`
pub const FENCE_I: u32 = 0x0000_100f;
/// `fence w, w`
pub const FENCE_W_W: u32 = 0x0110_000f;
/// `sfence.vma`: all addresses, all address spaces.
pub const SFENCE_VMA: u32 = 0x1200_0073;

const fn i_type(opcode: u32, funct3: u32, rd: Register, rs1: Register, imm: i32) -> u32 {
    debug_assert!(imm >= -2048 && imm < 2048);
    opcode | rd.0 << 7 | funct3 << 12 | rs1.0 << 15 | (imm.cast_unsigned() & 0xfff) << 20
}

const fn r_type(funct7: u32, funct3: u32, rd: Register, rs1: Register, rs2: Register) -> u32 {
    0x33 | rd.0 << 7 | funct3 << 12 | rs1.0 << 15 | rs2.0 << 20 | funct7 << 25
}

const fn s_type(funct3: u32, base: Register, source: Register, imm: i32) -> u32 {
    debug_assert!(imm >= -2048 && imm < 2048);
    let imm = imm.cast_unsigned();
    0x23 | (imm & 0x1f) << 7
        | funct3 << 12
        | base.0 << 15
        | source.0 << 20
        | (imm >> 5 & 0x7f) << 25
}

const fn b_type(funct3: u32, rs1: Register, rs2: Register, distance: i32) -> u32 {
    debug_assert!(distance >= -4096 && distance < 4096 && distance % 2 == 0);
    let d = distance.cast_unsigned();
    0x63 | (d >> 11 & 1) << 7
        | (d >> 1 & 0xf) << 8
        | funct3 << 12
        | rs1.0 << 15
        | rs2.0 << 20
        | (d >> 5 & 0x3f) << 25
        | (d >> 12 & 1) << 31
}

const fn amo(funct5: u32, rd: Register, address: Register, source: Register) -> u32 {
    0x2f | rd.0 << 7 | 3 << 12 | address.0 << 15 | source.0 << 20 | funct5 << 27
}

/// `lui rd, upper`: the low 20 bits of `upper` become bits 12 to 31.
#[must_use]
pub const fn lui(rd: Register, upper: u32) -> u32 {
    0x37 | rd.0 << 7 | upper << 12
}

/// `auipc rd, upper`
#[must_use]
pub const fn auipc(rd: Register, upper: u32) -> u32 {
    0x17 | rd.0 << 7 | upper << 12
}

/// `addi rd, rs, imm`
#[must_use]
pub const fn addi(rd: Register, rs: Register, imm: i32) -> u32 {
    i_type(0x13, 0, rd, rs, imm)
}

/// `andi rd, rs, imm`
#[must_use]
pub const fn andi(rd: Register, rs: Register, imm: i32) -> u32 {
    i_type(0x13, 7, rd, rs, imm)
}

/// Loads a constant: `addi`, or `lui; addiw`.
pub fn li(rd: Register, value: i32) -> impl Iterator<Item = u32> {
    let upper = (value.wrapping_add(0x800).cast_unsigned()) >> 12;
    let lower = value.wrapping_sub((upper << 12).cast_signed());
    let far = upper != 0;
    let last = if far { i_type(0x1b, 0, rd, rd, lower) } else { addi(rd, ZERO, value) };
    far.then(|| lui(rd, upper)).into_iter().chain((lower != 0 || !far).then_some(last))
}

/// `mv rd, rs`
#[must_use]
pub const fn mv(rd: Register, rs: Register) -> u32 {
    addi(rd, rs, 0)
}

/// `sext.w rd, rs`
#[must_use]
pub const fn sext_w(rd: Register, rs: Register) -> u32 {
    i_type(0x1b, 0, rd, rs, 0)
}

/// `slli rd, rs, bits`
#[must_use]
pub const fn slli(rd: Register, rs: Register, bits: i32) -> u32 {
    i_type(0x13, 1, rd, rs, bits)
}

/// `srli rd, rs, bits`
#[must_use]
pub const fn srli(rd: Register, rs: Register, bits: i32) -> u32 {
    i_type(0x13, 5, rd, rs, bits)
}

/// `add rd, a, b`
#[must_use]
pub const fn add(rd: Register, a: Register, b: Register) -> u32 {
    r_type(0, 0, rd, a, b)
}

/// `or rd, a, b`
#[must_use]
pub const fn or(rd: Register, a: Register, b: Register) -> u32 {
    r_type(0, 6, rd, a, b)
}

/// `and rd, a, b`
#[must_use]
pub const fn and(rd: Register, a: Register, b: Register) -> u32 {
    r_type(0, 7, rd, a, b)
}

/// `lw rd, offset(base)`
#[must_use]
pub const fn lw(rd: Register, base: Register, offset: i32) -> u32 {
    i_type(0x03, 2, rd, base, offset)
}

/// `lbu rd, offset(base)`
#[must_use]
pub const fn lbu(rd: Register, base: Register, offset: i32) -> u32 {
    i_type(0x03, 4, rd, base, offset)
}

/// `ld rd, offset(base)`
#[must_use]
pub const fn ld(rd: Register, base: Register, offset: i32) -> u32 {
    i_type(0x03, 3, rd, base, offset)
}

/// `sw source, offset(base)`
#[must_use]
pub const fn sw(source: Register, base: Register, offset: i32) -> u32 {
    s_type(2, base, source, offset)
}

/// `sd source, offset(base)`
#[must_use]
pub const fn sd(source: Register, base: Register, offset: i32) -> u32 {
    s_type(3, base, source, offset)
}

/// `beq a, b, . + distance`
#[must_use]
pub const fn beq(a: Register, b: Register, distance: i32) -> u32 {
    b_type(0, a, b, distance)
}

/// `bne a, b, . + distance`
#[must_use]
pub const fn bne(a: Register, b: Register, distance: i32) -> u32 {
    b_type(1, a, b, distance)
}

/// `bgeu a, b, . + distance`
#[must_use]
pub const fn bgeu(a: Register, b: Register, distance: i32) -> u32 {
    b_type(7, a, b, distance)
}

/// `jal rd, . + distance`
#[must_use]
pub const fn jal(rd: Register, distance: i32) -> u32 {
    debug_assert!(distance >= -(1 << 20) && distance < 1 << 20 && distance % 2 == 0);
    let d = distance.cast_unsigned();
    0x6f | rd.0 << 7
        | (d >> 12 & 0xff) << 12
        | (d >> 11 & 1) << 20
        | (d >> 1 & 0x3ff) << 21
        | (d >> 20 & 1) << 31
}

/// `j . + distance`
#[must_use]
pub const fn j(distance: i32) -> u32 {
    jal(ZERO, distance)
}

/// `jalr rd, offset(base)`
#[must_use]
pub const fn jalr(rd: Register, base: Register, offset: i32) -> u32 {
    i_type(0x67, 0, rd, base, offset)
}

/// `jr base`
#[must_use]
pub const fn jr(base: Register) -> u32 {
    jalr(ZERO, base, 0)
}

/// `lr.d rd, (address)`
#[must_use]
pub const fn lr_d(rd: Register, address: Register) -> u32 {
    amo(0b00010, rd, address, ZERO)
}

/// `sc.d rd, source, (address)`
#[must_use]
pub const fn sc_d(rd: Register, source: Register, address: Register) -> u32 {
    amo(0b00011, rd, address, source)
}

/// `amoadd.d rd, source, (address)`
#[must_use]
pub const fn amoadd_d(rd: Register, source: Register, address: Register) -> u32 {
    amo(0, rd, address, source)
}

/// `rdtime rd`
#[must_use]
pub const fn rdtime(rd: Register) -> u32 {
    0x73 | rd.0 << 7 | 2 << 12 | 0xc01 << 20
}

/// The number of `sstatus` (of a guest: its own).
pub const SSTATUS: u32 = 0x100;

/// `csrr rd, csr`
#[must_use]
pub const fn csrr(rd: Register, csr: u32) -> u32 {
    csrrs(rd, csr, ZERO)
}

/// `csrrs rd, csr, rs`
#[must_use]
pub const fn csrrs(rd: Register, csr: u32, rs: Register) -> u32 {
    0x73 | rd.0 << 7 | 2 << 12 | rs.0 << 15 | csr << 20
}

/// `csrrsi rd, csr, bits`; below 32.
#[must_use]
pub const fn csrrsi(rd: Register, csr: u32, bits: i32) -> u32 {
    0x73 | rd.0 << 7 | 6 << 12 | (bits.cast_unsigned() & 0x1f) << 15 | csr << 20
}

/// `csrrci rd, csr, bits`; below 32.
#[must_use]
pub const fn csrrci(rd: Register, csr: u32, bits: i32) -> u32 {
    0x73 | rd.0 << 7 | 7 << 12 | (bits.cast_unsigned() & 0x1f) << 15 | csr << 20
}

/// The immediates of `auipc` or `lui` (20 bits) and of the instruction after it
/// (12 bits, signed) that add up to `distance`. `None` beyond 2 GiB.
#[must_use]
pub const fn split(distance: i64) -> Option<(u32, i32)> {
    let upper = (distance + 0x800) >> 12;
    if upper < -(1 << 19) || upper >= 1 << 19 {
        return None;
    }
    #[allow(clippy::cast_possible_truncation, reason = "20 and 12 bits, checked above")]
    let (upper, lower) = (upper as i32, (distance - (upper << 12)) as i32);
    Some((upper.cast_unsigned() & 0xf_ffff, lower))
}

#[cfg(test)]
mod tests {
    use super::register::*;
    use super::*;
    use proptest::prelude::*;

    // From `riscv64-linux-gnu-objdump` of Debian kernels, and of GNU as.
    #[test]
    fn encodings_are_those_of_the_assembler() {
        assert_eq!(NOP, 0x0000_0013);
        assert_eq!(ld(T1, T0, -16), 0xff02_b303);
        assert_eq!(ld(T1, T1, 192), 0x0c03_3303);
        assert_eq!(bne(T1, ZERO, 0x58), 0x0403_1c63);
        assert_eq!(addi(T1, T0, -8), 0xff82_8313);
        assert_eq!(jr(T0), 0x0002_8067);
        assert_eq!(jalr(T0, T0, 0), 0x0002_82e7);
        assert_eq!(lr_d(T2, T1), 0x1003_33af);
        assert_eq!(sc_d(T3, T3, T1), 0x19c3_3e2f);
        assert_eq!(amoadd_d(ZERO, T4, T3), 0x01de_302f);
        assert_eq!(rdtime(T3), 0xc010_2e73);
        assert_eq!(csrr(T3, SSTATUS), 0x1000_2e73);
        assert_eq!(csrrs(ZERO, SSTATUS, T1), 0x1003_2073);
        assert_eq!(csrrsi(ZERO, SSTATUS, 2), 0x1001_6073);
        assert_eq!(csrrci(T1, SSTATUS, 2), 0x1001_7373);
        assert_eq!(andi(T1, T2, 32), 0x0203_f313);
        let li = |value| li(T1, value).collect::<Vec<_>>();
        assert_eq!(li(512), [0x2000_0313]);
        assert_eq!(li(65536), [0x0001_0337]);
        assert_eq!(li(2048), [0x0000_1337, 0x8003_031b]);
        assert_eq!(li(-2049), [0xffff_f337, 0x7ff3_031b]);
        assert_eq!(lbu(T3, TP, 1560), 0x6182_4e03);
        assert_eq!(j(-4), 0xffdf_f06f);
        assert_eq!(lui(A7, 0x0976d), 0x0976_d8b7);
        assert_eq!(auipc(T0, 0xfedcb), 0xfedc_b297);
        assert_eq!(mv(T1, A7), 0x0008_8313);
        assert_eq!(sext_w(T3, T2), 0x0003_8e1b);
        assert_eq!(slli(T3, T2, 50), 0x0323_9e13);
        assert_eq!(srli(T5, T2, 32), 0x0203_df13);
        assert_eq!(add(T1, T1, T2), 0x0073_0333);
        assert_eq!(or(T5, T5, T4), 0x01df_6f33);
        assert_eq!(and(T3, T3, T4), 0x01de_7e33);
        assert_eq!(lw(T1, TP, 32), 0x0202_2303);
        assert_eq!(sw(RA, T2, 12), 0x0013_a623);
        assert_eq!(sd(TP, SP, -2048), 0x8041_3023);
        assert_eq!(sd(T6, T5, 2047), 0x7fff_3fa3);
        assert_eq!(beq(T3, ZERO, 0x7fe), 0x7e0e_0f63);
        assert_eq!(bne(T4, T5, -4096), 0x81ee_9063);
        assert_eq!(bgeu(T6, T2, 0xffe), 0x7e7f_ffe3);
        assert_eq!(j(-0x1234), 0xdcdf_e06f);
        assert_eq!(jal(RA, 0xf_fffe), 0x7fff_f0ef);
        assert_eq!(jalr(T0, T0, -1), 0xfff2_82e7);
        assert_eq!(amoadd_d(T4, T5, T6), 0x01ef_beaf);
    }

    // A program that is just in reach and is refused is a function that cannot be traced.
    #[test]
    fn split_reaches_as_far_as_instructions_do() {
        assert_eq!(split(-(1 << 31) - 0x800), Some((0x8_0000, -0x800)));
        assert_eq!(split((1 << 31) - 0x801), Some((0x7_ffff, 0x7ff)));
        assert_eq!((split(-(1 << 31) - 0x801), split((1 << 31) - 0x800)), (None, None));
    }

    proptest! {
        #[test]
        fn split_adds_up(distance in -(1_i64 << 31)..(1 << 31) - 0x800) {
            let (upper, lower) = split(distance).unwrap();
            prop_assert!((-2048..2048).contains(&lower));
            let upper = i64::from((upper << 12).cast_signed());
            prop_assert_eq!(upper + i64::from(lower), distance);
        }

        #[test]
        fn split_refuses_what_is_out_of_reach(distance in (1_i64 << 31)..(1 << 40)) {
            prop_assert!(split(distance).is_none() && split(-distance - 0x1000).is_none());
        }
    }
}
