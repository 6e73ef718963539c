//! Compiles marks of calls that have gone on in another function.

use super::compile::BEYOND;
use super::operands::{Assembler, disp};
use crate::histogram::Calls;
use crate::marks::{MARKS, MarkIf, Marks};
use crate::program::{Point, ProgramError};
use dynasmrt::{DynamicLabel, DynasmApi, DynasmLabelApi, dynasm};

const RSP: u8 = 4;
const R11: u8 = 11;
const LESS: i32 = Marks::LESS as i32;
/// From a program's stack pointer to that of a function without a site when it returns.
pub(super) const BELOW: i32 = BEYOND + 8;

/// Leaves the number of the place of what is in this register, of so many bits, in r10.
fn place(ops: &mut Assembler, register: u8, bits: i8) {
    let shift = 32 - bits;
    dynasm!(ops; .arch x64
        ; imul r10d, Rd(register), Calls::SPREAD
        ; shr r10d, BYTE shift
    );
}

/// Marks a call that is left by a jump, or goes on at `unmarked`. r10 and the flags are lost.
pub(super) fn mark(
    ops: &mut Assembler,
    (marks, going): (Marks, MarkIf),
    unmarked: DynamicLabel,
) -> Result<(), ProgramError> {
    match going {
        MarkIf::Always => {}
        MarkIf::Known => {
            place(ops, R11, Marks::TARGET_BITS);
            let targets = disp(MARKS, marks.address.wrapping_add(Marks::TARGETS))?;
            // Stubs leave there where it goes, and tests of what is known at a jump keep it.
            dynasm!(ops; .arch x64; cmp [r10 * 8 + targets], r11; jne =>unmarked);
        }
        MarkIf::Never => {
            dynasm!(ops; .arch x64; =>unmarked);
            return unmark(ops, marks);
        }
    }
    place(ops, RSP, Marks::BITS);
    let places = disp(MARKS, marks.address)?;
    dynasm!(ops; .arch x64; mov [r10 * 8 + places], rsp);
    Ok(())
}

/// Takes back what may have been left by another call that was where this one is. r10 and the flags are lost.
pub(super) fn unmark(ops: &mut Assembler, marks: Marks) -> Result<(), ProgramError> {
    place(ops, RSP, Marks::BITS);
    let places = disp(MARKS, marks.address)?;
    dynasm!(ops; .arch x64
        ; cmp [r10 * 8 + places], rsp
        ; jne >nothing
        ; mov QWORD [r10 * 8 + places], 0
        ; nothing:
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
    let key = match point {
        Point::Tail => RSP,
        Point::Beyond => {
            dynasm!(ops; .arch x64; lea r11, [rsp + (BELOW - LESS)]);
            R11
        }
        Point::Entry | Point::Return | Point::Probe => {
            dynasm!(ops; .arch x64; lea r11, [rsp - LESS]);
            R11
        }
    };
    place(ops, key, Marks::BITS);
    let places = disp(MARKS, marks.address)?;
    dynasm!(ops; .arch x64
        ; cmp [r10 * 8 + places], Rq(key)
        ; jne =>ends
        ; mov QWORD [r10 * 8 + places], 0
    );
    Ok(())
}
