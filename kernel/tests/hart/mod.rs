//! A model of a RISC-V hart that can run the ends of functions. It is independent of the code under
//! test, and does not use its decoder.
//!
//! Jumps, branches, loads, stores, `addi`, `auipc` and `lui` are executed. Any other instruction
//! only has to be deterministic: its result is a number computed from the instruction and its
//! inputs.

// Registers and immediates are cut to size all over the place here.
#![allow(unreachable_pub, clippy::cast_possible_truncation, clippy::cast_sign_loss)]

use std::collections::BTreeMap;

/// Code, data and registers.
pub struct Hart<F> {
    /// Registers; the first stays zero.
    pub x: [u64; 32],
    pub pc: u64,
    /// What was stored, byte by byte. All other memory holds what its address gives.
    pub stores: BTreeMap<u64, u8>,
    /// What else was done: fences and their like.
    pub effects: Vec<u64>,
    code: F,
}

impl<F: Fn(u64) -> u16> Hart<F> {
    /// The code is given by halfwords.
    pub fn new(x: [u64; 32], pc: u64, code: F) -> Self {
        Self { x, pc, stores: BTreeMap::new(), effects: Vec::new(), code }
    }

    /// Four bytes of code.
    pub fn word(&self, address: u64) -> u32 {
        u32::from((self.code)(address)) | u32::from((self.code)(address + 2)) << 16
    }

    /// Runs one instruction.
    pub fn step(&mut self) {
        let low = (self.code)(self.pc);
        if low & 3 == 3 {
            let word = self.word(self.pc);
            self.run(word, 4);
        } else {
            self.run(expand(low).unwrap_or_else(|| panic!("{:#x}: {low:#x}", self.pc)), 2);
        }
    }

    fn run(&mut self, word: u32, len: u64) {
        let field = |start: u32, width: u32| word >> start & ((1 << width) - 1);
        let [rd, rs1, rs2] = [7, 15, 20].map(|start| field(start, 5) as usize);
        let (a, b) = (self.x[rs1], self.x[rs2]);
        let immediate = i64::from(word.cast_signed() >> 20);
        let upper = i64::from((word & !0xfff).cast_signed()) as u64;
        let width = 1 << field(12, 2);
        let mut next = self.pc.wrapping_add(len);
        let mut result = None;
        match (field(0, 7), field(12, 3)) {
            (0x03, _) => result = Some(self.load(a.wrapping_add_signed(immediate), width)),
            (0x0f, _) => self.effects.push(mix(&[word.into(), a])),
            (0x13, 0) => result = Some(a.wrapping_add_signed(immediate)),
            (0x17, _) => result = Some(self.pc.wrapping_add(upper)),
            (0x37, _) => result = Some(upper),
            (0x23, _) => {
                let offset = immediate & !0x1f | i64::from(field(7, 5));
                self.store(a.wrapping_add_signed(offset), b, width);
            }
            (0x2f, _) => {
                result = Some(mix(&[word.into(), a, b, self.load(a, width)]));
                self.store(a, mix(&[word.into(), a, b]), width);
            }
            // Operations between registers, and with immediates.
            (0x33 | 0x3b, _) => {
                result = Some(mix(&[(word >> 25).into(), field(0, 7).into(), a, b]));
            }
            (0x13 | 0x1b, _) => result = Some(mix(&[(word >> 20).into(), field(12, 3).into(), a])),
            (0x63, funct3) => {
                let taken = match funct3 {
                    0 => a == b,
                    1 => a != b,
                    4 => a.cast_signed() < b.cast_signed(),
                    5 => a.cast_signed() >= b.cast_signed(),
                    6 => a < b,
                    7 => a >= b,
                    _ => panic!("{word:#x}"),
                };
                let offset = (word.cast_signed() >> 31) << 12
                    | (field(7, 1) << 11 | field(25, 6) << 5 | field(8, 4) << 1).cast_signed();
                if taken {
                    next = self.pc.wrapping_add_signed(offset.into());
                }
            }
            (0x67, 0) => {
                result = Some(next);
                next = a.wrapping_add_signed(immediate) & !1;
            }
            (0x6f, _) => {
                let offset = (word.cast_signed() >> 31) << 20
                    | (field(12, 8) << 12 | field(20, 1) << 11 | field(21, 10) << 1).cast_signed();
                result = Some(next);
                next = self.pc.wrapping_add_signed(offset.into());
            }
            // Control registers: by register, by immediate; fences of address translation.
            (0x73, 1..=3) => {
                self.effects.push(mix(&[word.into(), a]));
                result = Some(mix(&[word.into(), a, 0x73]));
            }
            (0x73, 5..=7) => {
                self.effects.push(word.into());
                result = Some(mix(&[word.into(), 0x73]));
            }
            (0x73, 0) if matches!(word >> 25, 0x09 | 0x0b | 0x0c | 0x11 | 0x31) => {
                self.effects.push(mix(&[word.into(), a, b]));
            }
            _ => panic!("{:#x}: {word:#x}", self.pc),
        }
        if let Some(result) = result
            && rd != 0
        {
            self.x[rd] = result;
        }
        self.pc = next;
    }

    fn load(&self, address: u64, width: u64) -> u64 {
        let byte = |address: u64| {
            let unknown = || mix(&[address]) as u8;
            self.stores.get(&address).copied().unwrap_or_else(unknown)
        };
        (0..width).rev().fold(0, |value, i| value << 8 | u64::from(byte(address.wrapping_add(i))))
    }

    fn store(&mut self, address: u64, value: u64, width: u64) {
        for i in 0..width {
            self.stores.insert(address.wrapping_add(i), (value >> (8 * i)) as u8);
        }
    }
}

/// A number that depends on all of these and their order.
pub fn mix(values: &[u64]) -> u64 {
    values.iter().fold(0x9e37_79b9_7f4a_7c15, |hash, &value| {
        let mixed = (hash ^ value).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ mixed >> 29).wrapping_mul(0x94d0_49bb_1331_11eb) ^ mixed >> 31
    })
}

/// The four-byte form of a two-byte instruction; none for floating point and what is not known.
fn expand(half: u16) -> Option<u32> {
    let word = u32::from(half);
    let field = |start: u32, width: u32| word >> start & ((1 << width) - 1);
    // Bits of the instruction in the order of the immediate's, the highest first.
    let gather = |bits: &[u32]| bits.iter().fold(0, |value, &bit| value << 1 | field(bit, 1));
    let signed = |value: u32, bits: u32| (value << (32 - bits)).cast_signed() >> (32 - bits);
    let i_type = |opcode: u32, funct3: u32, rd: u32, rs1: u32, immediate: i32| {
        opcode | rd << 7 | funct3 << 12 | rs1 << 15 | immediate.cast_unsigned() << 20
    };
    let r_type = |opcode: u32, funct3: u32, funct7: u32, rd: u32, rs2: u32| {
        opcode | rd << 7 | funct3 << 12 | rd << 15 | rs2 << 20 | funct7 << 25
    };
    let s_type = |funct3: u32, rs1: u32, rs2: u32, immediate: u32| {
        0x23 | (immediate & 31) << 7 | funct3 << 12 | rs1 << 15 | rs2 << 20 | (immediate >> 5) << 25
    };
    let (rd, rs2) = (field(7, 5), field(2, 5));
    let (high, low) = (8 + field(7, 3), 8 + field(2, 3));
    let small = signed(gather(&[12, 6, 5, 4, 3, 2]), 6);
    let word_offset = gather(&[5, 12, 11, 10, 6]) << 2;
    let double_offset = gather(&[6, 5, 12, 11, 10]) << 3;
    let expanded = match (field(0, 2), field(13, 3)) {
        (0, 0) if word != 0 => {
            let immediate = gather(&[10, 9, 8, 7, 12, 11, 5, 6]) << 2;
            i_type(0x13, 0, low, 2, immediate.cast_signed())
        }
        (0, 2) => i_type(0x03, 2, low, high, word_offset.cast_signed()),
        (0, 3) => i_type(0x03, 3, low, high, double_offset.cast_signed()),
        (0, 6) => s_type(2, high, low, word_offset),
        (0, 7) => s_type(3, high, low, double_offset),
        (1, 0) => i_type(0x13, 0, rd, rd, small),
        (1, 1) => i_type(0x1b, 0, rd, rd, small),
        (1, 2) => i_type(0x13, 0, rd, 0, small),
        (1, 3) if rd == 2 => i_type(0x13, 0, 2, 2, signed(gather(&[12, 4, 3, 5, 2, 6]), 6) << 4),
        (1, 3) => 0x37 | rd << 7 | (small << 12).cast_unsigned(),
        (1, 4) => match (field(10, 2), field(12, 1), field(5, 2)) {
            (0, ..) => i_type(0x13, 5, high, high, small & 63),
            (1, ..) => i_type(0x13, 5, high, high, small & 63 | 1 << 10),
            (2, ..) => i_type(0x13, 7, high, high, small),
            (_, 0, 0) => r_type(0x33, 0, 0x20, high, low),
            (_, 0, 1) => r_type(0x33, 4, 0, high, low),
            (_, 0, 2) => r_type(0x33, 6, 0, high, low),
            (_, 0, _) => r_type(0x33, 7, 0, high, low),
            (_, _, 0) => r_type(0x3b, 0, 0x20, high, low),
            (_, _, 1) => r_type(0x3b, 0, 0, high, low),
            _ => return None,
        },
        (1, 5) => {
            let offset = signed(gather(&[12, 8, 10, 9, 6, 7, 2, 11, 5, 4, 3]) << 1, 12);
            let bits = offset.cast_unsigned();
            0x6f | (bits & 0xff000)
                | (bits >> 11 & 1) << 20
                | (bits >> 1 & 0x3ff) << 21
                | (bits >> 20 & 1) << 31
        }
        (1, funct3) => {
            let offset = signed(gather(&[12, 6, 5, 2, 11, 10, 4, 3]) << 1, 9).cast_unsigned();
            0x63 | (funct3 - 6) << 12
                | high << 15
                | (offset >> 11 & 1) << 7
                | (offset >> 1 & 15) << 8
                | (offset >> 5 & 63) << 25
                | (offset >> 12 & 1) << 31
        }
        (2, 0) => i_type(0x13, 1, rd, rd, small & 63),
        (2, 2) => i_type(0x03, 2, rd, 2, gather(&[3, 2, 12, 6, 5, 4]).cast_signed() << 2),
        (2, 3) => i_type(0x03, 3, rd, 2, gather(&[4, 3, 2, 12, 6, 5]).cast_signed() << 3),
        (2, 4) => match (field(12, 1), rd, rs2) {
            (_, 0, _) => return None,
            (link, rs1, 0) => i_type(0x67, 0, link, rs1, 0),
            (0, rd, rs2) => i_type(0x13, 0, rd, rs2, 0),
            (_, rd, rs2) => r_type(0x33, 0, 0, rd, rs2),
        },
        (2, 6) => s_type(2, 2, rs2, gather(&[8, 7, 12, 11, 10, 9]) << 2),
        (2, 7) => s_type(3, 2, rs2, gather(&[9, 8, 7, 12, 11, 10]) << 3),
        _ => return None,
    };
    Some(expanded)
}
