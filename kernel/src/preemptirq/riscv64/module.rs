//! Counts these places in modules. Nothing takes their place: a `jal` does not reach the kernel's text
//! from there, and few modules have room for a landing.

use super::{INTERRUPTS, TP, source, store_offset};
use crate::exits::module::ModuleText;
use crate::preemptirq::{ModuleSwitches, UnusableSwitch};
use crate::read::wide;

/// Places that are counted of each kind: ten times what the largest module has.
const MOST: usize = 1 << 17;
const WHY: &str = "not done in modules of riscv64 kernels";
/// `sstatus`
const STATUS: u32 = 0x100;

/// Where it is plain that something is switched. The count of preemptions is at `count` in the current
/// task, if the kernel counts them.
pub(in crate::preemptirq) fn find(text: &ModuleText, count: Option<u64>) -> ModuleSwitches {
    let mut unusable = Vec::new();
    let mut counts = [0; 2];
    for piece in &text.pieces {
        let (mut at, mut before) = (0, 0);
        while let Some((len, word)) = instruction(&piece.bytes, at) {
            let address = piece.start.wrapping_add(wide(at));
            let [interrupts, preemption] = &mut counts;
            let own = match len {
                4 if switches(word) && !is_of_others(before, word) => Some((true, interrupts)),
                4 if count.is_some_and(|count| changes(word, count)) => Some((false, preemption)),
                _ => None,
            };
            if let Some((is_of_interrupts, count)) = own.filter(|(_, count)| **count < MOST) {
                *count += 1;
                unusable.push(UnusableSwitch { address, is_of_interrupts, why: WHY });
            }
            (at, before) = (at + len, word);
        }
    }
    ModuleSwitches { unusable, ..ModuleSwitches::default() }
}

/// The instruction at a place, and its length.
fn instruction(bytes: &[u8], at: usize) -> Option<(usize, u32)> {
    let half = |at: usize| Some(u16::from_le_bytes(*bytes.get(at..)?.first_chunk::<2>()?));
    let first = half(at)?;
    if first & 3 != 3 {
        return Some((2, first.into()));
    }
    Some((4, u32::from(first) | u32::from(half(at + 2)?) << 16))
}

/// `csrrs` and its like of `sstatus`: by an immediate with `SR_SIE`, or by a register.
fn switches(word: u32) -> bool {
    let known = word & 0x7f == 0x73 && word >> 20 == STATUS;
    match word >> 12 & 7 {
        2 | 3 => known && source(word) != 0,
        6 | 7 => known && i64::from(source(word)) & INTERRUPTS != 0,
        _ => false,
    }
}

/// Whether the register of such an instruction was loaded just before with bits that are not of interrupts, such as
/// `SR_SUM` for accesses to user memory.
fn is_of_others(before: u32, word: u32) -> bool {
    const LUI: u32 = 0x37;
    word >> 12 & 7 < 4 && before & 0x7f == LUI && before >> 7 & 31 == u32::from(source(word))
}

/// `sw` to the count of the current task.
fn changes(word: u32, count: u64) -> bool {
    word & 0x707f == 0x2023 && source(word) == TP && u64::from(store_offset(word)) == count
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exits::module::ModulePiece;

    #[test]
    fn what_is_plain_is_counted() {
        const BASE: u64 = 0xffff_ffff_0200_0000;
        let code: [&[u8]; 11] = [
            // c.nop
            &[0x01, 0x00],
            // csrrci a5, sstatus, 2; csrsi sstatus, 2; csrs sstatus, s1
            &0x1001_77f3_u32.to_le_bytes(),
            &0x1001_6073_u32.to_le_bytes(),
            &0x1004_a073_u32.to_le_bytes(),
            // csrr a5, sstatus; csrsi sstatus, 1; csrci sie, 2
            &0x1000_27f3_u32.to_le_bytes(),
            &0x1000_e073_u32.to_le_bytes(),
            &0x1041_7073_u32.to_le_bytes(),
            // sw a5, 8(tp); sw a5, 8(sp)
            &0x00f2_2423_u32.to_le_bytes(),
            &0x00f1_2423_u32.to_le_bytes(),
            // lui a4, 0x40; csrs sstatus, a4: accesses to user memory
            &0x0004_0737_u32.to_le_bytes(),
            &0x1007_2073_u32.to_le_bytes(),
        ];
        // Half an instruction at the end is none.
        let bytes = [&code.concat()[..], &[0x73, 0x70, 0x01]].concat();
        let piece = ModulePiece { start: BASE, bytes, ..ModulePiece::default() };
        let text = ModuleText { pieces: vec![piece], ..ModuleText::default() };
        let found = |count| {
            let found = find(&text, count);
            assert_eq!((found.list, found.torn), (vec![], 0));
            let place = |it: &UnusableSwitch| (it.address - BASE, it.is_of_interrupts);
            found.unusable.iter().map(place).collect::<Vec<_>>()
        };
        let all = [(2, true), (6, true), (10, true), (26, false)];
        assert_eq!(found(Some(8)), all);
        assert_eq!(found(None), all[..3]);
        assert_eq!(found(Some(16)), all[..3]);
    }
}
