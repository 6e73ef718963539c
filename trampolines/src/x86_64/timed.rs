//! What ends calls whose beginnings were kept: how long each took, before anything is recorded of it.
//!
//! A call that is not meant gives its place back all the same.

use super::Values;
use super::compile::{context, find_control, reserve, who_and_when};
use super::condition::Tests;
use super::operands::{Assembler, Operands, disp};
use super::sort::{Crowded, Missed, place};
use crate::branch::branch;
use crate::condition::Operand;
use crate::displacement::at;
use crate::histogram::{Calls, OPEN};
use crate::layout::below;
use crate::program::{Field, Point, Program, ProgramError};
use dynasmrt::{DynasmApi, DynasmLabelApi, dynasm};

/// Bytes that are on the stack at the end of a call by a jump: rax, rdx, r9 and r11.
pub(super) const SAVED: i32 = 32;

/// Gives the place of a call back and leaves in r9 how many ticks it took; goes on at `none` of what is returned if
/// it has no place, or is not meant. The registers that are used are saved: see [`restore`]. At a return what is
/// returned is in rsi.
pub(super) fn timed(
    ops: &mut Assembler,
    program: &Program,
    calls: Calls,
    values: &Values,
) -> Result<Crowded, ProgramError> {
    let [from, to, none] = [(); 3].map(|()| ops.new_dynamic_label());
    let point = program.point;
    if point == Point::Tail {
        dynasm!(ops; .arch x64
            ; push rax
            ; push rdx
            ; push r9
            ; push r11
            ; lea r10, [rsp + (SAVED + 8)]
        );
    } else {
        dynasm!(ops; .arch x64
            ; mov rsi, rax
            ; mov rdi, rdx
            ; mov r10, rsp
        );
    }
    place(ops, calls)?;
    let since = disp(OPEN, calls.address)?;
    dynasm!(ops; .arch x64
        ; cmp [r11], r10
        ; jne =>from
        ; =>to
        ; mov r9, [r11 + Calls::BEGAN]
        ; mov QWORD [r11], 0
        ; cmp r9, [DWORD since]
        ; jb =>none
    );
    let test = |ops: &mut Assembler| match &program.condition {
        Some(condition) => {
            branch(&mut Tests { ops, values, point, timed: true }, condition, (none, false))
        }
        None => Ok(()),
    };
    // Without a look at the clock if that is not asked for.
    let by_time = |operand| operand == Operand::Duration;
    let by_time = program.condition.as_ref().is_some_and(|condition| condition.looks_at(by_time));
    if !by_time {
        test(ops)?;
    }
    if by_time || program.fields.contains(&Field::Duration) {
        dynasm!(ops; .arch x64
            ; rdtsc
            ; shl rdx, 32
            ; or rax, rdx
            // Clocks of two CPUs may differ.
            ; xor edx, edx
            ; sub rax, r9
            ; cmovb rax, rdx
            ; mov r9, rax
        );
    }
    if by_time {
        test(ops)?;
    }
    Ok(Crowded { from, to, none, missed: Missed::Nobody })
}

/// Puts back what [`timed`] has saved.
pub(super) fn restore(ops: &mut Assembler, point: Point, crowded: &Crowded) {
    let none = crowded.none;
    dynasm!(ops; .arch x64; =>none);
    if point == Point::Tail {
        dynasm!(ops; .arch x64
            ; pop r11
            ; pop r9
            ; pop rdx
            ; pop rax
        );
    } else {
        dynasm!(ops; .arch x64
            ; mov rax, rsi
            ; mov rdx, rdi
        );
    }
}

/// Records a call that is left for another function, behind [`timed`].
pub(super) fn tail(
    ops: &mut Assembler,
    program: &Program,
    operands: &Operands,
    values: &Values,
) -> Result<(), ProgramError> {
    find_control(ops, values)?;
    reserve(ops, operands);
    dynasm!(ops; .arch x64
        ; mov rdx, [rsp + (SAVED + 8)]
        ; mov [r10 + (values.rings + at(below::CALLER))], edx
    );
    for (field, below) in program.places() {
        let to = values.rings + at(below);
        match field {
            // As if nothing but rax and rdx were saved.
            Field::Stack => dynasm!(ops; .arch x64
                ; lea rdx, [rsp + (SAVED - 16)]
                ; mov [r10 + to], rdx
            ),
            Field::Target => dynasm!(ops; .arch x64; mov rdx, [rsp]; mov [r10 + to], rdx),
            Field::Duration => dynasm!(ops; .arch x64; mov [r10 + to], r9),
            Field::Failed => dynasm!(ops; .arch x64; mov QWORD [r10 + to], 0),
            Field::Context => context(ops, values, to)?,
            Field::Value | Field::Argument(_) | Field::Read(_) | Field::Known(_) => {
                return Err(ProgramError::Field(field, program.point));
            }
        }
    }
    who_and_when(ops, values)?;
    dynasm!(ops; .arch x64
        ; mov rdx, [rsp + SAVED]
        ; mov [r10 + (values.rings + at(below::SITE))], edx
        ; out:
    );
    Ok(())
}

/// Counts one that cannot be told.
pub(super) fn untold(ops: &mut Assembler, calls: Calls) -> Result<(), ProgramError> {
    let counter = disp(OPEN, calls.address + Calls::UNTOLD)?;
    dynasm!(ops; .arch x64; lock inc QWORD [DWORD counter]);
    Ok(())
}
