//! Which of `t0` to `t6` and `a0` to `a7` hold something that code may still read.
//!
//! A call keeps none of them, is passed no more than `a0` to `a7`, and leaves no more than `a0` and
//! `a1`. So it takes no more than the function itself, and what the kernel's own tables add to its
//! instructions. Whatever leaves the function otherwise counts as a reader of all. (Some assembly
//! keeps more across a call of its own: `ra` in `t6` where user memory is copied. It switches nothing.)

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
/// Bytes of a function at most: ten times what kernels have.
const LONGEST: u64 = 1 << 20;
/// Jumps in what replaces other code, and alternatives that may be at one place, at most.
const MOST: usize = 8;

/// What instructions alone do not say.
pub(crate) struct Flow {
    /// Where an instruction may go on instead, by its address.
    ways: Vec<(u64, u64)>,
    /// Where these lead.
    led: Vec<u64>,
    replaced: Vec<Replaced>,
    /// Bytes of the longest of these.
    longest: u64,
}

/// Instructions that may be replaced.
struct Replaced {
    old: Range<u64>,
    /// What others in their place may read.
    reads: u32,
    /// Where others may jump.
    targets: Vec<u64>,
}

impl Flow {
    /// Of a kernel's text.
    pub(crate) fn find(kernel: &Kernel, text: &Text<'_>) -> Result<Self, &'static str> {
        let mut ways = Vec::new();
        for detour in tables::exceptions(kernel)? {
            ways.push((detour.from, detour.to));
        }
        for label in tables::jump_labels(kernel)? {
            ways.extend(self::label(label.from, label.to));
        }
        let mut replaced = Vec::new();
        for tables::Alternative { old, new } in tables::alternatives(kernel)? {
            let (mut reads, mut targets) = (0, Vec::new());
            // Elsewhere it is not known.
            if !text.range.contains(&new.start) {
                reads = ALL;
            }
            for (address, it) in text.instructions(new.clone()) {
                reads |= it.reads;
                match it.kind {
                    Kind::Branch { distance, .. } | Kind::Jump { distance }
                        if targets.len() < MOST =>
                    {
                        let to = address.wrapping_add_signed(distance.into());
                        // Within itself it goes wherever it is.
                        let from = if new.contains(&to) { new.start } else { old.start };
                        targets.push(old.start.wrapping_add(to.wrapping_sub(from)));
                    }
                    Kind::Plain | Kind::AddImmediate { .. } | Kind::Load | Kind::Auipc { .. } => {}
                    // `lr` and `sc`
                    Kind::Fixed if it.reads != 0 => {}
                    _ => reads = ALL,
                }
            }
            if !old.is_empty() {
                replaced.push(Replaced { old, reads, targets });
            }
        }
        Ok(Self::new(ways, replaced))
    }

    fn new(mut ways: Vec<(u64, u64)>, mut replaced: Vec<Replaced>) -> Self {
        ways.sort_unstable();
        // Behind an instruction all is as it left it.
        let jumps = ways.iter().filter(|(from, to)| to.wrapping_sub(*from) != 4);
        let mut led: Vec<u64> = jumps.map(|&(_, to)| to).collect();
        led.sort_unstable();
        replaced.sort_unstable_by_key(|it| it.old.start);
        let longest = replaced.iter().map(|it| it.old.end - it.old.start).max().unwrap_or(0);
        Self { ways, led, replaced, longest }
    }

    /// Whether an exception or a jump label leads to an address.
    pub(crate) fn leads_to(&self, address: u64) -> bool {
        self.led.binary_search(&address).is_ok()
    }

    /// What may replace an instruction; `None` if that is too much to look at.
    fn replaced(&self, address: u64) -> Option<impl Iterator<Item = &Replaced>> {
        let earliest = address.saturating_sub(self.longest);
        let first = self.replaced.partition_point(|it| it.old.start < earliest);
        let end = self.replaced.partition_point(|it| it.old.start <= address);
        let near = self.replaced.get(first..end).unwrap_or_default();
        let around = move |it: &&Replaced| it.old.contains(&address);
        (near.len() <= MOST).then(|| near.iter().filter(around))
    }

    /// Goes through a function.
    pub(crate) fn live(&self, text: &Text<'_>, function: Range<u64>) -> Live {
        let mut live = Live { function, before: Vec::new(), numbers: Vec::new(), behind: ALL };
        let len = live.function.end.saturating_sub(live.function.start);
        if len > LONGEST {
            return live;
        }
        let instructions: Vec<_> = text.instructions(live.function.clone()).collect();
        live.before = vec![0; instructions.len()];
        live.numbers = vec![u32::MAX; index(len).div_ceil(2)];
        for (number, &(address, _)) in (0..).zip(&instructions) {
            if let Some(place) = live.place(address) {
                live.numbers[place] = number;
            }
        }
        let is_nop = |it: &Instruction| {
            it.writes == 0 && matches!(it.kind, Kind::Plain | Kind::AddImmediate { .. })
        };
        let last = instructions.iter().rev().find(|(_, it)| !is_nop(it));
        if last.is_some_and(|&(at, it)| text.is_breakpoint(at, it.len)) {
            // `BUG` does not go on.
            live.behind = 0;
        }
        // Who jumps to where that cannot be followed is still in the function, or calls another.
        let read = instructions.iter().fold(ARGUMENTS, |set, &(address, it)| {
            let others = self.replaced(address).map(|all| all.fold(0, |set, it| set | it.reads));
            set | it.reads | others.unwrap_or(ALL)
        });
        for round in 0.. {
            let mut changed = false;
            for (number, &(address, instruction)) in instructions.iter().enumerate().rev() {
                let before = self.before(&live, (address, &instruction), read);
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
        live
    }

    /// What is read from an instruction on.
    fn before(&self, live: &Live, (address, it): (u64, &Instruction), unknown: u32) -> u32 {
        let next = address + u64::from(it.len);
        let mut after = Self::after(live, (address, it), unknown);
        let first = self.ways.partition_point(|&(from, _)| from < address);
        for &(_, to) in self.ways.iter().skip(first).take_while(|(from, _)| *from == address) {
            after |= live.at(to);
        }
        // Where a load or a store faults, the kernel writes what it should have loaded.
        let mut kills = 1_u32 << it.writes;
        let Some(replaced) = self.replaced(address) else { return ALL };
        for Replaced { reads, targets, .. } in replaced {
            kills = 0;
            after |= reads | live.at(next);
            after |= targets.iter().fold(0, |set, &target| set | live.at(target));
        }
        (it.reads | after & !kills) & ALL
    }

    /// What an instruction leaves that is read later.
    fn after(live: &Live, (address, it): (u64, &Instruction), unknown: u32) -> u32 {
        let next = address + u64::from(it.len);
        let to = |distance: i32| live.at(address.wrapping_add_signed(distance.into()));
        match it.kind {
            Kind::Branch { distance, .. } => to(distance) | live.at(next),
            Kind::Jump { distance } if it.writes == 0 => to(distance),
            Kind::JumpRegister { .. } if it.is_ret() => RETURNED,
            Kind::Jump { .. } | Kind::JumpRegister { .. } if it.writes == RA => ARGUMENTS,
            Kind::JumpRegister { .. } if it.writes == 0 => unknown,
            Kind::Jump { .. } | Kind::JumpRegister { .. } => ALL,
            // `ecall` among others, and not `lr` and `sc`.
            Kind::Fixed if it.reads == 0 => ARGUMENTS | live.at(next),
            _ => live.at(next),
        }
    }
}

/// The ways from a jump label: it is a jump or a nop, whichever the image has.
fn label(from: u64, to: u64) -> Vec<(u64, u64)> {
    vec![(from, to), (from, from.saturating_add(4))]
}

/// Which are read later, before each instruction of a function.
pub(crate) struct Live {
    function: Range<u64>,
    before: Vec<u32>,
    /// Of each halfword, the number of the instruction that begins there.
    numbers: Vec<u32>,
    /// Behind the last one.
    behind: u32,
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
        let unknown = if address == self.function.end { self.behind } else { ALL };
        before.copied().unwrap_or(unknown)
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
        let flow = Flow::new(Vec::new(), Vec::new());
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
    const JUMP_8: u32 = 0x0080_006f;
    const LI_A0: u32 = 0x0010_0513;
    const EBREAK: u32 = 0x0010_0073;
    const NOP: u32 = 0x0000_0013;
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
        // Out of the function.
        assert_eq!(temporary(&[ADDI_T0_T1, BACK_8, RET]), [TEMPORARY & !T0, TEMPORARY, 0]);
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
        assert_eq!(live(&[ADDI_T0_T1]), [ALL & !T0]);
        assert_eq!(live(&[ADDI_T0_T1, EBREAK, NOP]), [all(T1), ARGUMENTS, 0]);
    }

    // The other way of a jump label or an exception reads what the first does not.
    #[test]
    fn other_ways_are_followed() {
        let code = [0x13, ADDI_T1_A0, RET, ADDI_T0_T1, RET]; // nop
        let bytes: Vec<u8> = code.iter().flat_map(|word| word.to_le_bytes()).collect();
        let text = Text::of_module(0, &bytes, &[]).unwrap();
        let replaced = |reads| Replaced { old: 4..8, reads, targets: vec![12] };
        let flow = Flow::new(vec![(0, 12)], vec![replaced(T0)]);
        let live = flow.live(&text, 0..20);
        // What may be replaced need not write.
        assert_eq!([live.at(0) & TEMPORARY, live.at(4) & TEMPORARY], [T0 | T1; 2]);
        assert!(flow.leads_to(12) && !flow.leads_to(8));
        // A label may be a jump in the image, and a nop later.
        let code = [JUMP_8, ADDI_T0_T1, RET];
        let bytes: Vec<u8> = code.iter().flat_map(|word| word.to_le_bytes()).collect();
        let text = Text::of_module(0, &bytes, &[]).unwrap();
        let flow = Flow::new(label(0, 8), Vec::new());
        assert_eq!(flow.live(&text, 0..12).at(0) & TEMPORARY, T1);
        assert!(flow.leads_to(8) && !flow.leads_to(4));
        // It may be replaced by what reads something that nothing else does.
        let code = [JR_A0, 0x13, RET];
        let bytes: Vec<u8> = code.iter().flat_map(|word| word.to_le_bytes()).collect();
        let text = Text::of_module(0, &bytes, &[]).unwrap();
        let flow = Flow::new(Vec::new(), vec![replaced(T0)]);
        assert_eq!(flow.live(&text, 0..12).at(0) & TEMPORARY, T0);
        let text = Text::of_module(0, &[0; 20], &[]).unwrap();
        // More than a kernel has at one place, and a function longer than any.
        let flow = Flow::new(Vec::new(), (0..9).map(|_| replaced(0)).collect());
        assert_eq!(flow.live(&text, 0..20).at(4), ALL);
        assert_eq!(flow.live(&text, 0..2 << 20).at(0), ALL);
    }
}
