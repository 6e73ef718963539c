//! Which of `t0` to `t6` and `a0` to `a7` hold something that code may still read.
//!
//! A call keeps none of them, is passed no more than `a0` to `a7`, and leaves no more than `a0` and
//! `a1`. So it takes no more than the function itself, and what the kernel's own tables add to its
//! instructions. Whatever cannot be followed counts as a reader of all.

use std::ops::Range;

use super::decode::{Instruction, Kind, RA};
use super::tables;
use super::text::Text;
use crate::Kernel;
use crate::read::index;

/// `t0` to `t6`, a bit each.
pub(crate) const TEMPORARY: u32 = 0xf000_00e0;
/// `a0` to `a7`: what calls may be passed, those of the firmware included.
const ARGUMENTS: u32 = 0x0003_fc00;
/// `a0` and `a1`: what functions may return.
const RETURNED: u32 = 0x0000_0c00;
const ALL: u32 = TEMPORARY | ARGUMENTS;

/// How often a function is gone through, at most: ten times what kernels need.
const ROUNDS: usize = 64;

/// What instructions alone do not say.
pub(crate) struct Flow {
    /// Where an instruction may go on instead, by its address.
    ways: Vec<(u64, u64)>,
    /// What may be replaced, by address; what replaces it may read these and jump there.
    replaced: Vec<(Range<u64>, u32, Vec<u64>)>,
}

impl Flow {
    /// Of a kernel's text.
    pub(crate) fn find(kernel: &Kernel, text: &Text<'_>) -> Result<Self, &'static str> {
        let detours = tables::exceptions(kernel)?.into_iter().chain(tables::jump_labels(kernel)?);
        let mut ways: Vec<(u64, u64)> = detours.map(|way| (way.from, way.to)).collect();
        ways.sort_unstable();
        let mut replaced = Vec::new();
        for tables::Alternative { old, new } in tables::alternatives(kernel)? {
            let (mut reads, mut targets) = (0, Vec::new());
            // Elsewhere it is not known.
            if !text.range.contains(&new.start) {
                reads = ALL;
            }
            for (address, instruction) in text.instructions(new) {
                reads |= instruction.reads;
                match instruction.kind {
                    Kind::Branch { distance, .. } | Kind::Jump { distance } => {
                        targets.push(address.wrapping_add_signed(distance.into()));
                    }
                    Kind::JumpRegister { .. } | Kind::Fixed => reads = ALL,
                    _ => {}
                }
            }
            replaced.push((old, reads, targets));
        }
        replaced.sort_unstable_by_key(|(old, ..)| old.start);
        Ok(Self { ways, replaced })
    }

    /// What may be replaced within a function.
    fn replaced(&self, function: &Range<u64>) -> &[(Range<u64>, u32, Vec<u64>)] {
        // Those that begin before the function end before it: they are of another.
        let first = self.replaced.partition_point(|(old, ..)| old.start < function.start);
        let end = self.replaced.partition_point(|(old, ..)| old.start < function.end);
        self.replaced.get(first..end).unwrap_or_default()
    }

    /// Goes through a function.
    pub(crate) fn live(&self, text: &Text<'_>, function: Range<u64>) -> Live {
        let instructions: Vec<(u64, Instruction)> = text.instructions(function.clone()).collect();
        let mut live = Live { function, before: Vec::new(), numbers: Vec::new() };
        live.before = vec![0; instructions.len()];
        live.numbers = vec![u32::MAX; index(live.function.end - live.function.start).div_ceil(2)];
        for (number, &(address, _)) in (0..).zip(&instructions) {
            if let Some(place) = live.place(address) {
                live.numbers[place] = number;
            }
        }
        let replaced = self.replaced(&live.function);
        let read = instructions.iter().fold(0, |set, (_, instruction)| set | instruction.reads);
        let read = replaced.iter().fold(read, |set, (_, reads, _)| set | reads);
        for round in 0.. {
            let mut changed = false;
            for (number, &(address, instruction)) in instructions.iter().enumerate().rev() {
                let mut after = self.after(&live, address, &instruction);
                let mut kills = 1_u32 << instruction.writes;
                for (old, reads, targets) in replaced {
                    if old.contains(&address) {
                        kills = 0;
                        after |= reads | live.at(address + u64::from(instruction.len));
                        after |= targets.iter().fold(0, |set, &target| set | live.at(target));
                    }
                }
                let before = (instruction.reads | after & !kills) & ALL;
                changed |= before != live.before[number];
                live.before[number] = before;
            }
            if !changed {
                break;
            }
            if round == ROUNDS {
                live.before.fill(ALL);
                break;
            }
        }
        // Who cannot be followed is still in the function, or calls another.
        live.before.iter_mut().for_each(|before| *before &= read | ARGUMENTS);
        live
    }

    /// What an instruction leaves that is read later.
    fn after(&self, live: &Live, address: u64, instruction: &Instruction) -> u32 {
        let next = address + u64::from(instruction.len);
        let to = |distance: i32| live.at(address.wrapping_add_signed(distance.into()));
        let mut after = match instruction.kind {
            Kind::Branch { distance, .. } => to(distance) | live.at(next),
            Kind::Jump { distance } if instruction.writes == 0 => to(distance),
            Kind::JumpRegister { .. } if instruction.is_ret() => RETURNED,
            Kind::Jump { .. } | Kind::JumpRegister { .. } if instruction.writes == RA => ARGUMENTS,
            Kind::Jump { .. } | Kind::JumpRegister { .. } => ALL,
            // `ecall` among others.
            Kind::Fixed => ARGUMENTS | live.at(next),
            _ => live.at(next),
        };
        let first = self.ways.partition_point(|&(from, _)| from < address);
        let own = self.ways.iter().skip(first).take_while(|(from, _)| *from == address);
        for &(_, to) in own {
            after |= live.at(to);
        }
        after
    }
}

/// Which are read later, before each instruction of a function.
pub(crate) struct Live {
    function: Range<u64>,
    before: Vec<u32>,
    /// Of each halfword, the number of the instruction that begins there.
    numbers: Vec<u32>,
}

impl Live {
    fn place(&self, address: u64) -> Option<usize> {
        let place = index(address.checked_sub(self.function.start)? / 2);
        (place < self.numbers.len()).then_some(place)
    }

    /// Before the instruction at this address; all where that is none of the function's.
    pub(crate) fn at(&self, address: u64) -> u32 {
        let number = self.place(address).and_then(|place| self.numbers.get(place));
        let before = number.and_then(|&number| self.before.get(index(u64::from(number))));
        before.copied().unwrap_or(ALL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::read::wide;

    const T0: u32 = 1 << 5;
    const T1: u32 = 1 << 6;
    const A0: u32 = 1 << 10;

    fn live(code: &[u32]) -> Vec<u32> {
        let bytes: Vec<u8> = code.iter().flat_map(|word| word.to_le_bytes()).collect();
        let text = Text::of_module(0x1000, &bytes, &[]).unwrap();
        let flow = Flow { ways: Vec::new(), replaced: Vec::new() };
        let live = flow.live(&text, 0x1000..0x1000 + wide(bytes.len()));
        (0..wide(code.len())).map(|at| live.at(0x1000 + 4 * at)).collect()
    }

    // From GNU as 2.40.
    const ADDI_T0_T1: u32 = 0x0013_0293;
    const ADDI_T1_A0: u32 = 0x0015_0313;
    const RET: u32 = 0x0000_8067;
    const CALL: u32 = 0x0000_00ef;
    const BACK_8: u32 = 0xfe05_1ce3; // bnez a0, -8
    const JR_A0: u32 = 0x0005_0067;
    const LI_A0: u32 = 0x0010_0513;
    const ECALL: u32 = 0x0000_0073;

    // A register that is read later would be lost.
    #[test]
    fn what_is_read_before_it_is_written_is_live() {
        let of = |code: &[u32], registers| -> Vec<u32> {
            live(code).iter().map(|set| set & registers).collect()
        };
        let temporary = |code: &[u32]| of(code, TEMPORARY);
        assert_eq!(temporary(&[ADDI_T0_T1, RET]), [T1, 0]);
        assert_eq!(temporary(&[ADDI_T1_A0, ADDI_T0_T1, RET]), [0, T1, 0]);
        assert_eq!(temporary(&[ADDI_T0_T1, BACK_8, RET]), [T1, T1, 0]);
        assert_eq!(temporary(&[RET, ADDI_T0_T1, ADDI_T1_A0, BACK_8, RET]), [0, T1, 0, T1, 0]);
        let first = |code: &[u32]| of(code, ARGUMENTS)[0];
        assert_eq!(first(&[LI_A0, RET]), RETURNED & !A0);
        assert_eq!(first(&[LI_A0, ADDI_T1_A0, CALL, RET]), ARGUMENTS & !A0);
        assert_eq!(first(&[LI_A0, ECALL, LI_A0, RET]), ARGUMENTS & !A0);
    }

    // A call keeps none; where a jump leads that cannot be followed, all may be read that the function
    // reads.
    #[test]
    fn calls_and_jumps_end_what_is_known() {
        assert_eq!(live(&[CALL, ADDI_T0_T1, RET]), [ARGUMENTS, T1 | RETURNED, RETURNED]);
        let all = |set: u32| set | ARGUMENTS;
        assert_eq!(live(&[ADDI_T0_T1, ADDI_T1_A0, JR_A0]), [all(T1), all(0), all(T1)]);
        assert_eq!(live(&[ADDI_T0_T1]), [all(T1)]);
    }

    // The other way of a jump label or an exception reads what the first does not.
    #[test]
    fn other_ways_are_followed() {
        let code = [0x13, ADDI_T1_A0, RET, ADDI_T0_T1, RET]; // nop
        let bytes: Vec<u8> = code.iter().flat_map(|word| word.to_le_bytes()).collect();
        let text = Text::of_module(0, &bytes, &[]).unwrap();
        let flow = Flow { ways: vec![(0, 12)], replaced: vec![(4..8, T0, vec![12])] };
        let live = flow.live(&text, 0..20);
        // What may be replaced need not write.
        assert_eq!([live.at(0) & TEMPORARY, live.at(4) & TEMPORARY], [T0 | T1; 2]);
    }
}
