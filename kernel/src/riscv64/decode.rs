//! Decodes as much of RV64GC as moving instructions needs: their length, where they jump, and which
//! integer registers they read and write (The RISC-V Instruction Set Manual, volume I). Vector, Zcb
//! and Zimop instructions are only told apart from others.
//!
//! Where the encoding does not decide it, a register counts as read: that is safe, since it only
//! excludes choices.

use crate::read::{u16_at, u32_at};

pub(crate) const RA: u8 = 1;
pub(crate) const SP: u8 = 2;
pub(crate) const T1: u8 = 6;

/// The registers that an unknown instruction may read.
const ALL: u32 = u32::MAX;

/// One instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Instruction {
    /// In bytes.
    pub(crate) len: u8,
    /// The integer registers that it reads, a bit each.
    pub(crate) reads: u32,
    /// The integer register that it writes; zero for none.
    pub(crate) writes: u8,
    pub(crate) kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The same wherever it stands.
    Plain,
    /// `addi`, plain too, which may complete an address.
    AddImmediate {
        base: u8,
        immediate: i16,
    },
    /// `ld`, plain too, which may load where to jump.
    Load,
    Auipc {
        upper: i32,
    },
    Branch {
        condition: Condition,
        distance: i32,
    },
    /// `jal`, a call if it writes a register.
    Jump {
        distance: i32,
    },
    /// `jalr`, likewise.
    JumpRegister {
        base: u8,
        distance: i16,
    },
    /// Where it stands matters, or it is not known: traps, `lr` and `sc`, unknown encodings.
    Fixed,
}

/// What a branch compares, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Condition {
    /// The field of the instruction: `beq`, `bne`, -, -, `blt`, `bge`, `bltu`, `bgeu`.
    pub(crate) funct3: u8,
    /// The first register.
    pub(crate) rs1: u8,
    /// The second register.
    pub(crate) rs2: u8,
}

impl Condition {
    /// The opposite.
    #[must_use]
    pub(crate) fn inverted(self) -> Self {
        Self { funct3: self.funct3 ^ 1, ..self }
    }
}

impl Instruction {
    /// The instruction at an offset; none past the end.
    pub(crate) fn at(code: &[u8], offset: usize) -> Option<Self> {
        let low = u16_at(code, offset)?;
        match low & 3 {
            3 => match low & 0x7f {
                // Longer ones exist in the manual only.
                0x1f | 0x5f => Some(Self::fixed(6)),
                0x3f | 0x7f => Some(Self::fixed(8)),
                _ => u32_at(code, offset).map(full),
            },
            quadrant => Some(match quadrant {
                0 => quadrant0(low),
                1 => quadrant1(low),
                _ => quadrant2(low),
            }),
        }
    }

    /// Whether this is a `ret`.
    pub(crate) fn is_ret(&self) -> bool {
        self.writes == 0 && self.kind == Kind::JumpRegister { base: RA, distance: 0 }
    }

    fn new(len: u8, kind: Kind, reads: impl IntoIterator<Item = u8>, writes: u8) -> Self {
        let reads = reads.into_iter().fold(0, |set, register| set | 1 << register) & !1;
        Self { len, reads, writes, kind }
    }

    fn plain(len: u8, reads: impl IntoIterator<Item = u8>, writes: u8) -> Self {
        Self::new(len, Kind::Plain, reads, writes)
    }

    fn fixed(len: u8) -> Self {
        Self { len, reads: ALL, writes: 0, kind: Kind::Fixed }
    }
}

/// A field of an instruction: `width` bits from `start` on.
fn field(word: u32, start: u32, width: u32) -> u32 {
    word >> start & ((1 << width) - 1)
}

#[allow(clippy::cast_possible_truncation, reason = "5 bits")]
fn register(word: u32, start: u32) -> u8 {
    field(word, start, 5) as u8
}

/// One of the eight registers that short forms know.
#[allow(clippy::cast_possible_truncation, reason = "3 bits")]
fn short(word: u32, start: u32) -> u8 {
    8 + field(word, start, 3) as u8
}

/// A number whose sign is bit `bits - 1`.
fn signed(value: u32, bits: u32) -> i32 {
    (value << (32 - bits)).cast_signed() >> (32 - bits)
}

#[allow(clippy::cast_possible_truncation, reason = "12 bits")]
fn immediate12(word: u32) -> i16 {
    (word.cast_signed() >> 20) as i16
}

/// An instruction of four bytes.
fn full(word: u32) -> Instruction {
    let (rd, rs1, rs2) = (register(word, 7), register(word, 15), register(word, 20));
    let funct3 = field(word, 12, 3);
    let new = |kind, reads: &[u8], rd| Instruction::new(4, kind, reads.iter().copied(), rd);
    let plain = |reads: &[u8], rd| new(Kind::Plain, reads, rd);
    match word & 0x7f {
        // LOAD, MISC-MEM, OP-IMM, OP-IMM-32
        0x03 if funct3 == 3 => new(Kind::Load, &[rs1], rd),
        0x03 | 0x1b => plain(&[rs1], rd),
        0x0f => plain(&[rs1], 0),
        0x13 if funct3 == 0 => {
            new(Kind::AddImmediate { base: rs1, immediate: immediate12(word) }, &[rs1], rd)
        }
        0x13 => plain(&[rs1], rd),
        // As a landing pad it marks its place.
        0x17 if rd == 0 => Instruction::fixed(4),
        0x17 => new(Kind::Auipc { upper: (word & !0xfff).cast_signed() }, &[], rd),
        // Loads and stores of floating-point numbers, and of vectors with a stride.
        0x07 | 0x27 if matches!(funct3, 1..=4) => plain(&[rs1], 0),
        0x07 | 0x27 => plain(&[rs1, rs2], 0),
        0x23 => plain(&[rs1, rs2], 0),
        0x2f => atomic(word, rd, rs1, rs2),
        0x33 | 0x3b => plain(&[rs1, rs2], rd),
        0x37 => plain(&[], rd),
        0x43 | 0x47 | 0x4b | 0x4f => plain(&[], 0),
        // Comparisons, conversions to integers, moves to integer registers.
        0x53 if matches!(field(word, 27, 5), 0b10100 | 0b11000 | 0b11100) => plain(&[], rd),
        0x53 => plain(&[rs1], 0),
        // Vectors: `vsetvl` and what moves an element to an integer register.
        0x57 if matches!(funct3, 2 | 7) => plain(&[rs1, rs2], rd),
        0x57 | 0x77 => plain(&[rs1, rs2], 0),
        0x63 if !matches!(funct3, 2 | 3) => {
            let condition = Condition { funct3: funct3.to_le_bytes()[0], rs1, rs2 };
            let distance = field(word, 31, 1) << 12
                | field(word, 7, 1) << 11
                | field(word, 25, 6) << 5
                | field(word, 8, 4) << 1;
            new(Kind::Branch { condition, distance: signed(distance, 13) }, &[rs1, rs2], 0)
        }
        0x67 if funct3 == 0 => {
            new(Kind::JumpRegister { base: rs1, distance: immediate12(word) }, &[rs1], rd)
        }
        0x6f => {
            let distance = field(word, 31, 1) << 20
                | field(word, 12, 8) << 12
                | field(word, 20, 1) << 11
                | field(word, 21, 10) << 1;
            new(Kind::Jump { distance: signed(distance, 21) }, &[], rd)
        }
        0x73 => system(word, rd, rs1, rs2),
        _ => Instruction::fixed(4),
    }
}

fn atomic(word: u32, rd: u8, rs1: u8, rs2: u8) -> Instruction {
    match (field(word, 27, 5), field(word, 12, 3)) {
        // Nothing may come between `lr` and `sc`.
        (0b00010 | 0b00011, _) => {
            Instruction { kind: Kind::Fixed, ..Instruction::plain(4, [rs1, rs2], rd) }
        }
        // `amocas` compares with what is in rd; of 16 bytes, with a pair of registers.
        (0b00101, 4) => Instruction::plain(4, [rs1, rs2, rs2 | 1, rd, rd | 1], rd),
        (0b00101, _) => Instruction::plain(4, [rs1, rs2, rd], rd),
        _ => Instruction::plain(4, [rs1, rs2], rd),
    }
}

fn system(word: u32, rd: u8, rs1: u8, rs2: u8) -> Instruction {
    match (field(word, 12, 3), field(word, 25, 7)) {
        // `sfence.vma`, `sinval.vma`, `sfence.*.inval*`; `hfence.*` and their like.
        (0, 0x09 | 0x0b | 0x0c | 0x11 | 0x13 | 0x31 | 0x33) => Instruction::plain(4, [rs1, rs2], 0),
        // `ecall`, `ebreak`, `sret`, `wfi`: they read no register.
        (0, _) => Instruction { reads: 0, ..Instruction::fixed(4) },
        (1..=3, _) => Instruction::plain(4, [rs1], rd),
        (5..=7, _) => Instruction::plain(4, [], rd),
        _ => Instruction::plain(4, [rs1, rs2], rd),
    }
}

fn quadrant0(code: u16) -> Instruction {
    let word = u32::from(code);
    let (high, low) = (short(word, 7), short(word, 2));
    match field(word, 13, 3) {
        // Zeros trap, and fill gaps.
        0 if word == 0 => Instruction { reads: 0, ..Instruction::fixed(2) },
        0 if field(word, 5, 8) == 0 => Instruction::fixed(2),
        0 => Instruction::plain(2, [SP], low),
        // c.fld and c.fsd
        1 | 5 => Instruction::plain(2, [high], 0),
        2 => Instruction::plain(2, [high], low),
        3 => Instruction::new(2, Kind::Load, [high], low),
        // Zcb: bytes and halfwords
        4 => match field(word, 10, 3) {
            0 | 1 => Instruction::plain(2, [high], low),
            2 | 3 => Instruction::plain(2, [high, low], 0),
            _ => Instruction::fixed(2),
        },
        _ => Instruction::plain(2, [high, low], 0),
    }
}

fn quadrant1(code: u16) -> Instruction {
    let word = u32::from(code);
    let rd = register(word, 7);
    let small = signed(field(word, 12, 1) << 5 | field(word, 2, 5), 6);
    match field(word, 13, 3) {
        0 => {
            #[allow(clippy::cast_possible_truncation, reason = "6 bits")]
            let kind = Kind::AddImmediate { base: rd, immediate: small as i16 };
            Instruction::new(2, kind, [rd], rd)
        }
        1 if rd == 0 => Instruction::fixed(2),
        1 => Instruction::plain(2, [rd], rd),
        2 => Instruction::plain(2, [], rd),
        // c.addi16sp, and Zcmop where c.lui would load zero.
        3 if rd == SP || small == 0 => Instruction::plain(2, [rd], if rd == SP { SP } else { 0 }),
        3 => Instruction::plain(2, [], rd),
        4 => {
            let (high, low) = (short(word, 7), short(word, 2));
            match field(word, 10, 2) {
                3 if field(word, 12, 1) == 1 && field(word, 5, 2) == 3 => {
                    Instruction::plain(2, [high], high)
                }
                3 => Instruction::plain(2, [high, low], high),
                _ => Instruction::plain(2, [high], high),
            }
        }
        5 => {
            let distance = field(word, 12, 1) << 11
                | field(word, 8, 1) << 10
                | field(word, 9, 2) << 8
                | field(word, 6, 1) << 7
                | field(word, 7, 1) << 6
                | field(word, 2, 1) << 5
                | field(word, 11, 1) << 4
                | field(word, 3, 3) << 1;
            Instruction::new(2, Kind::Jump { distance: signed(distance, 12) }, [], 0)
        }
        branch => {
            let distance = field(word, 12, 1) << 8
                | field(word, 5, 2) << 6
                | field(word, 2, 1) << 5
                | field(word, 10, 2) << 3
                | field(word, 3, 2) << 1;
            let rs1 = short(word, 7);
            let condition = Condition { funct3: u8::from(branch == 7), rs1, rs2: 0 };
            let kind = Kind::Branch { condition, distance: signed(distance, 9) };
            Instruction::new(2, kind, [rs1], 0)
        }
    }
}

fn quadrant2(code: u16) -> Instruction {
    let word = u32::from(code);
    let (rd, rs2) = (register(word, 7), register(word, 2));
    match field(word, 13, 3) {
        0 => Instruction::plain(2, [rd], rd),
        1 | 5 => Instruction::plain(2, [SP], 0),
        2 | 3 if rd == 0 => Instruction::fixed(2),
        2 | 3 => Instruction::plain(2, [SP], rd),
        4 => match (field(word, 12, 1), rd, rs2) {
            (0, 0, 0) => Instruction::fixed(2),
            // c.ebreak
            (1, 0, 0) => Instruction { reads: 0, ..Instruction::fixed(2) },
            (link, base, 0) => {
                let kind = Kind::JumpRegister { base, distance: 0 };
                Instruction::new(2, kind, [base], if link == 1 { RA } else { 0 })
            }
            (0, rd, rs2) => Instruction::plain(2, [rs2], rd),
            (_, rd, rs2) => Instruction::plain(2, [rd, rs2], rd),
        },
        _ => Instruction::plain(2, [SP, rs2], 0),
    }
}

#[cfg(test)]
mod tests;
