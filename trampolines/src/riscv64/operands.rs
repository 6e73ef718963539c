//! The assembler and operands that all parts of a program use.

use super::Values;
use super::encode::register::{T3, TP};
use super::encode::{Register, lbu, ld, lw, split};
use crate::layout::MAX_RECORD;
use crate::program::{Counters, Point, ProgramError};
use dynasmrt::riscv::RiscvRelocation;
use dynasmrt::{DynamicLabel, DynasmApi, DynasmLabelApi, VecAssembler, dynasm};

pub(super) type Assembler = VecAssembler<RiscvRelocation>;

/// Bits to shift a position by, so that its offset in its chunk is at the top of a word.
pub(super) const SHIFT: u32 = 18;
/// [`MAX_RECORD`] shifted like that.
#[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "small constants")]
pub(super) const SPENT_SHIFTED: i32 = (MAX_RECORD << SHIFT) as i32;

/// Numbers of registers.
pub(super) mod numbers {
    pub(in crate::riscv64) const SP: u8 = 2;
    pub(in crate::riscv64) const TP: u8 = 4;
    pub(in crate::riscv64) const A0: u8 = 10;
    pub(in crate::riscv64) const T2: u8 = 7;
    pub(in crate::riscv64) const T3: u8 = 28;
    pub(in crate::riscv64) const T4: u8 = 29;
    pub(in crate::riscv64) const T5: u8 = 30;
    pub(in crate::riscv64) const T6: u8 = 31;
}

/// a4, which what records keeps: how many ticks a call took.
pub(super) const DURATION: u8 = 14;

/// `value` for `lui` and the instruction after it, sign-extended from 32 bits.
pub(super) fn parts(what: &'static str, value: u64) -> Result<(i32, i32), ProgramError> {
    let (upper, lower) = split(value.cast_signed()).ok_or(ProgramError::Range(what, value))?;
    Ok(((upper << 12).cast_signed(), lower))
}

/// Numbers of registers that depend on how a program is entered.
pub(super) struct Registers {
    /// What it was entered with, which tells the site.
    pub(super) link: u8,
    /// The control block, once it was found.
    pub(super) control: u8,
}

/// t0 and t1: one of the two has what the program was entered with.
pub(super) const fn registers(point: Point) -> Registers {
    match point {
        Point::Entry | Point::Tail | Point::Probe => Registers { link: 5, control: 6 },
        Point::Return | Point::Beyond => Registers { link: 6, control: 5 },
    }
}

/// The register with an argument; one of the stack is loaded into t3.
pub(super) fn argument(ops: &mut Assembler, number: u8) -> u8 {
    if let Some(on_stack) = number.checked_sub(8) {
        let from = 8 * i32::from(on_stack);
        dynasm!(ops; .arch riscv64; .feature A, Zicntr; ld t3, [sp, from]);
        return 28;
    }
    10 + number
}

/// `lw t3, offset(tp)` for offsets of up to 31 bits.
pub(super) fn load_word(
    ops: &mut Assembler,
    what: &'static str,
    offset: u64,
) -> Result<(), ProgramError> {
    load(ops, what, offset, lw)
}

/// `lbu t3, offset(tp)` for offsets of up to 31 bits.
pub(super) fn load_byte(
    ops: &mut Assembler,
    what: &'static str,
    offset: u64,
) -> Result<(), ProgramError> {
    load(ops, what, offset, lbu)
}

/// `ld t3, offset(tp)` for offsets of up to 31 bits.
pub(super) fn load_double(
    ops: &mut Assembler,
    what: &'static str,
    offset: u64,
) -> Result<(), ProgramError> {
    load(ops, what, offset, ld)
}

fn load(
    ops: &mut Assembler,
    what: &'static str,
    offset: u64,
    instruction: fn(Register, Register, i32) -> u32,
) -> Result<(), ProgramError> {
    let (upper, lower) = parts(what, offset)?;
    let base = if upper == 0 {
        TP
    } else {
        dynasm!(ops; .arch riscv64; lui t3, upper; add t3, t3, tp);
        T3
    };
    ops.extend(instruction(T3, base, lower).to_le_bytes());
    Ok(())
}

/// Ends a program; where.
pub(super) fn end(ops: &mut Assembler, point: Point) -> usize {
    let ending = ops.offset().0;
    // Harts predict what is jumped to by ra from calls: a function's return must stay one.
    match point {
        Point::Entry | Point::Tail | Point::Probe => dynasm!(ops; .arch riscv64; jr t0),
        Point::Return | Point::Beyond => dynasm!(ops; .arch riscv64; ret),
    }
    ending
}

/// Leaves the counter's address in t3. t4 is lost.
pub(super) fn find_counter(
    ops: &mut Assembler,
    counters: Counters,
    values: &Values,
) -> Result<(), ProgramError> {
    const T0: u8 = 5;
    const T3: u8 = 28;
    let Counters { distance, stride, rounds } = counters;
    // The register with the sum as far as it goes.
    let mut sum = T0;
    if stride != 0 {
        load_word(ops, "the CPU number's offset", values.cpu)?;
        if stride.is_power_of_two() {
            dynasm!(ops; .arch riscv64; slli t3, t3, stride.trailing_zeros());
        } else {
            // Whole pages: no lower part.
            let (stride, _) = parts("the size of a table of counters", stride)?;
            dynasm!(ops; .arch riscv64; .feature M; lui t4, stride; mul t3, t3, t4);
        }
        dynasm!(ops; .arch riscv64; add t3, t3, t0);
        sum = T3;
    }
    // What one instruction cannot add comes in two parts.
    let near = distance.cast_signed().clamp(-(1 << 31), (1 << 31) - 4096);
    let near = if near == distance.cast_signed() { 0 } else { near.cast_unsigned() };
    let rest = distance.wrapping_sub(near);
    let (upper, lower) = parts("the distance of counters", rest)?;
    for upper in [parts("the distance of counters", near)?.0, upper] {
        if upper != 0 {
            dynasm!(ops; .arch riscv64; lui t4, upper; add t3, X(sum), t4);
            sum = T3;
        }
    }
    if rounds {
        // The distance is a multiple of 8.
        dynasm!(ops; .arch riscv64; andi t3, X(sum), -8);
        sum = T3;
    }
    if lower != 0 || sum != T3 {
        dynasm!(ops; .arch riscv64; addi t3, X(sum), lower);
    }
    Ok(())
}

/// A word that many may take, and registers (numbers).
pub(super) struct Word {
    /// What has its address.
    pub(super) at: u8,
    /// What it gets.
    pub(super) own: u8,
    /// What has what it had, behind the jump to `taken` that is not done.
    pub(super) found: u8,
    /// What is lost.
    pub(super) spare: u8,
}

/// Puts `own` into a word that has 0, and goes on at `taken`. The reservation ends in either case (see [`super`]).
pub(super) fn take(ops: &mut Assembler, word: &Word, taken: DynamicLabel) {
    let Word { at, own, found, spare } = *word;
    let [again, other] = [(); 2].map(|()| ops.new_dynamic_label());
    dynasm!(ops; .arch riscv64; .feature A
        ; =>again
        ; lr.d X(found), [X(at)]
        ; bnez X(found), =>other
        ; sc.d X(found), X(own), [X(at)]
        ; beqz X(found), =>taken
        ; j =>again
        ; =>other
        ; sc.d X(spare), X(found), [X(at)]
    );
}
