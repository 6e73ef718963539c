//! Compiles marks of calls that have gone on in another function.

use super::operands::{Assembler, disp};
use crate::histogram::Calls;
use crate::marks::{MARKS, Marks};
use crate::program::{Point, ProgramError};
use dynasmrt::{DynamicLabel, DynasmApi, DynasmLabelApi, dynasm};

const RSP: u8 = 4;
const R11: u8 = 11;
const LESS: i32 = Marks::LESS as i32;

/// Leaves the number of the place of what is in this register in r10. Returns the table's displacement.
fn place(ops: &mut Assembler, register: u8, marks: Marks) -> Result<i32, ProgramError> {
    const SHIFT: i8 = 32 - Marks::BITS;
    dynasm!(ops; .arch x64
        ; imul r10d, Rd(register), Calls::SPREAD
        ; shr r10d, BYTE SHIFT
    );
    disp(MARKS, marks.address)
}

/// Marks a call that is left by a jump. r10 and the flags are lost.
pub(super) fn mark(ops: &mut Assembler, marks: Marks) -> Result<(), ProgramError> {
    let places = place(ops, RSP, marks)?;
    dynasm!(ops; .arch x64; mov [r10 * 8 + places], rsp);
    Ok(())
}

/// Takes back what may have been left by another call that was where this one is, and goes on at `ends`. r10 and the flags
/// are lost.
pub(super) fn unmark(
    ops: &mut Assembler,
    marks: Marks,
    ends: DynamicLabel,
) -> Result<(), ProgramError> {
    let places = place(ops, RSP, marks)?;
    dynasm!(ops; .arch x64
        ; cmp [r10 * 8 + places], rsp
        ; jne =>ends
        ; mov QWORD [r10 * 8 + places], 0
        ; jmp =>ends
    );
    Ok(())
}

/// Takes the mark of the call that ends; goes on at `ends` if it has none. r10 and the flags are lost, at a return r11, too.
pub(super) fn marked(
    ops: &mut Assembler,
    point: Point,
    marks: Marks,
    ends: DynamicLabel,
) -> Result<(), ProgramError> {
    let key = if point == Point::Tail {
        RSP
    } else {
        dynasm!(ops; .arch x64; lea r11, [rsp - LESS]);
        R11
    };
    let places = place(ops, key, marks)?;
    dynasm!(ops; .arch x64
        ; cmp [r10 * 8 + places], Rq(key)
        ; jne =>ends
        ; mov QWORD [r10 * 8 + places], 0
    );
    Ok(())
}
