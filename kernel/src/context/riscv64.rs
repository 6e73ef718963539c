//! Finds the flags that a function tests, on riscv64: `tp` points to the task, whose first word
//! holds the flags.

use std::collections::{BTreeSet, HashMap};

use super::Value;
use crate::read::{u16_at, u32_at};
use crate::riscv64::decode::Instruction;

const TP: u8 = 4;

/// Bits of the flags that the code tests one by one.
pub(super) fn tested(code: &[u8]) -> BTreeSet<u8> {
    let mut bits = BTreeSet::new();
    let mut values = HashMap::from([(TP, Value::Task)]);
    let mut offset = 0;
    while let Some(instruction) = Instruction::at(code, offset) {
        let step = Step::at(code, offset, &instruction);
        let from = |register| values.get(&register).copied();
        let result = match step {
            Step::Move(source) => from(source),
            Step::Load { base, offset } if from(base) == Some(Value::Task) => {
                (offset < 8).then_some(Value::Flags(8 * offset))
            }
            Step::ShiftRight { source, by } => from(source).and_then(|value| value.shifted(by)),
            Step::And { source, mask } => {
                bits.extend(from(source).and_then(|value| value.bit(mask)));
                None
            }
            Step::Load { .. } | Step::Other => None,
        };
        if instruction.writes != 0 {
            match result {
                Some(value) => values.insert(instruction.writes, value),
                None => values.remove(&instruction.writes),
            };
        }
        offset += usize::from(instruction.len.max(2));
    }
    bits
}

/// What an instruction does, as far as that matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Move(u8),
    Load { base: u8, offset: u32 },
    ShiftRight { source: u8, by: u32 },
    And { source: u8, mask: u64 },
    Other,
}

impl Step {
    fn at(code: &[u8], offset: usize, instruction: &Instruction) -> Self {
        match instruction.len {
            2 => u16_at(code, offset).map_or(Self::Other, |half| Self::short(half.into())),
            4 => u32_at(code, offset).map_or(Self::Other, Self::full),
            _ => Self::Other,
        }
    }

    fn full(word: u32) -> Self {
        let source = word.to_le_bytes();
        let source = (source[2] & 0xf) << 1 | source[1] >> 7;
        let immediate = word >> 20;
        match (word & 0x7f, word >> 12 & 7) {
            // lb, lh, lw, ld, lbu, lhu, lwu
            (0x03, _) => Self::Load { base: source, offset: immediate },
            (0x13, 0) if immediate == 0 => Self::Move(source),
            (0x13, 5) if immediate >> 6 == 0 => Self::ShiftRight { source, by: immediate },
            (0x1b, 5) if immediate >> 5 == 0 => Self::ShiftRight { source, by: immediate },
            (0x13, 7) if immediate < 0x800 => Self::And { source, mask: immediate.into() },
            _ => Self::Other,
        }
    }

    /// The RISC-V Instruction Set Manual, volume I, chapter 28.
    fn short(half: u32) -> Self {
        let [low, high, ..] = half.to_le_bytes();
        // The eight registers that most short forms know.
        let short = 8 + ((high & 3) << 1 | low >> 7);
        let immediate = half >> 7 & 0x20 | half >> 2 & 0x1f;
        match (half & 3, half >> 13, half >> 10 & 3) {
            // c.lw, c.ld
            (0, 2, _) => {
                let offset = half >> 7 & 0x38 | half >> 4 & 4 | half << 1 & 0x40;
                Self::Load { base: short, offset }
            }
            (0, 3, _) => Self::Load { base: short, offset: half >> 7 & 0x38 | half << 1 & 0xc0 },
            // c.srli, c.andi
            (1, 4, 0) => Self::ShiftRight { source: short, by: immediate },
            // The upper bit is its sign.
            (1, 4, 2) if immediate < 0x20 => Self::And { source: short, mask: immediate.into() },
            // c.mv
            (2, 4, _) if half >> 12 & 1 == 0 && half >> 2 & 0x1f != 0 => {
                Self::Move(low >> 2 & 0x1f)
            }
            _ => Self::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bits(code: &[u16]) -> Vec<u8> {
        let code: Vec<u8> = code.iter().flat_map(|half| half.to_le_bytes()).collect();
        tested(&code).into_iter().collect()
    }

    // As compilers of several years write it.
    #[test]
    fn the_flags_are_told_from_the_count_of_preemptions() {
        // lw a4, 8(tp); mv a5, tp; ld a5, 0(a5); andi a4, a4, 256; li a2, 15; srli a5, a5, 1;
        // andi a5, a5, 4
        let by_shift = [0x2703, 0x0082, 0x8792, 0x639c, 0x7713, 0x1007, 0x463d, 0x8385, 0x8b91];
        assert_eq!(bits(&by_shift), [3]);
        // ld a2, 0(tp); ld a5, 0(tp); srli a2, a2, 2; srli a5, a5, 4; andi a2, a2, 4;
        // andi a5, a5, 2
        let both = [0x3603, 0x0002, 0x3783, 0x0002, 0x8209, 0x8391, 0x8a11, 0x8b89];
        assert_eq!(bits(&both), [4, 5]);
        // ld a5, 0(tp); li a5, 8; andi a5, a5, 8
        assert_eq!(bits(&[0x3783, 0x0002, 0x47a1, 0x8ba1]), [0_u8; 0]);
    }
}
