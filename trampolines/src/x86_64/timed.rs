//! Compiles programs at the ends of calls whose starts were kept: they compute the duration before
//! anything is recorded.
//!
//! A call that does not match frees its place as well.

use super::Values;
use super::condition::Tests;
use super::operands::{Assembler, disp};
use super::sort::{Crowded, find_place};
use crate::branch::branch;
use crate::condition::{Condition, Operand};
use crate::histogram::{Calls, OPEN};
use crate::program::{Field, Program, ProgramError};
use dynasmrt::{DynasmApi, DynasmLabelApi, dynasm};

/// Gives the place of a call back and leaves in r9 how many ticks it took; goes on at `none` of what is returned if
/// it has no place, or is not meant. The registers that are used are saved: see [`restore`](super::sort::restore). At a
/// return what is returned is in rsi.
pub(super) fn timed(
    ops: &mut Assembler,
    program: &Program,
    calls: Calls,
    values: &Values,
) -> Result<Crowded, ProgramError> {
    let point = program.point;
    let crowded = find_place(ops, point, calls)?;
    let Crowded { none, places, .. } = crowded;
    let since = disp(OPEN, calls.address)?;
    // Most calls are too short, whatever else is asked for. One that seems to end before it has begun is looked at
    // below, as a long one.
    let short = program.condition.as_ref().and_then(Condition::longer_than).map(|ticks| {
        let short = ops.new_dynamic_label();
        let ticks = u32::try_from(ticks).unwrap_or(u32::MAX).cast_signed();
        dynasm!(ops; .arch x64
            ; rdtsc
            ; sub eax, [r11 + (places + Calls::BEGAN)]
            ; sbb edx, [r11 + (places + Calls::BEGAN + 4)]
            ; jne >long
            ; cmp eax, ticks
            ; jbe =>short
            ; long:
        );
        short
    });
    let crowded = Crowded { short, ..crowded };
    dynasm!(ops; .arch x64
        ; mov r9, [r11 + (places + Calls::BEGAN)]
        ; mov QWORD [r11 + places], 0
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
    Ok(crowded)
}

/// Counts one that cannot be told.
pub(super) fn untold(ops: &mut Assembler, calls: Calls) -> Result<(), ProgramError> {
    let counter = disp(OPEN, calls.address + Calls::UNTOLD)?;
    dynasm!(ops; .arch x64; lock inc QWORD [DWORD counter]);
    Ok(())
}
