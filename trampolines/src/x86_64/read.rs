//! Compiles reads of memory along pointers, which never fault.

use super::Values;
use super::operands::{Assembler, ENDING, disp};
use crate::program::{Last, ProgramError, Read, Readable};
use crate::reads::{Failure, Reads};
use dynasmrt::{DynasmApi, DynasmLabelApi, dynasm};

/// Reads from `pointer`, a register, for the field with this number, to this displacement. It, rax and r11 are lost.
pub(super) fn read(
    reads: &mut Reads,
    ops: &mut Assembler,
    (read, pointer): (&Read, u8),
    (index, to): (usize, i32),
) {
    let load = *reads.load.get_or_insert_with(|| ops.new_dynamic_label());
    let (from, back) = (ops.new_dynamic_label(), ops.new_dynamic_label());
    reads.failures.push(Failure { from, back, index, to });
    let add = |ops: &mut Assembler, offset: i32| {
        if offset != 0 {
            dynasm!(ops; .arch x64; add Rq(pointer), offset);
        }
    };
    for &hop in read.hops() {
        add(ops, hop);
        dynasm!(ops; .arch x64; call =>load; jae =>from; mov Rq(pointer), rax);
    }
    let (Last::Words { offset, words } | Last::Text { offset, words }) = read.last();
    add(ops, offset);
    for word in 0..i32::from(words) {
        if word > 0 {
            dynasm!(ops; .arch x64; add Rq(pointer), 8);
        }
        dynasm!(ops; .arch x64; call =>load);
        match read.last() {
            // A string that goes on where nothing can be read is cut.
            Last::Text { .. } if word > 0 => dynasm!(ops; .arch x64; jae =>back),
            _ => dynasm!(ops; .arch x64; jae =>from),
        }
        dynasm!(ops; .arch x64; mov [r10 + (to - 8 * word)], rax);
        if matches!(read.last(), Last::Text { .. }) && word + 1 < i32::from(words) {
            // Whether any byte is zero.
            dynasm!(ops; .arch x64
                ; mov r11, QWORD 0xfefe_fefe_fefe_feff_u64.cast_signed()
                ; add r11, rax
                ; not rax
                ; and r11, rax
                ; mov rax, QWORD 0x8080_8080_8080_8080_u64.cast_signed()
                ; test r11, rax
                ; jnz =>back
            );
        }
    }
    dynasm!(ops; .arch x64; =>back);
}

/// What follows the program, whose reads have their pointers in this register. Where in it is a return.
pub(super) fn finish(
    reads: Reads,
    ops: &mut Assembler,
    values: &Values,
    pointer: u8,
) -> Result<Option<usize>, ProgramError> {
    for failure in reads.failures {
        let (bit, Failure { from, back, to, .. }) = (failure.bit(), failure);
        dynasm!(ops; .arch x64; =>from; mov [r10 + to], Rq(pointer));
        if let Some(failed) = reads.failed {
            dynasm!(ops; .arch x64; or DWORD [r10 + failed], bit.cast_signed());
        }
        dynasm!(ops; .arch x64; jmp =>back);
    }
    let Some(load) = reads.load else { return Ok(None) };
    dynasm!(ops; .arch x64; =>load);
    load_word(ops, values, pointer).map(Some)
}

/// Leaves in rax the word that a register points to, and carry, or no carry where it may not be read. r11
/// is lost. Where its return is.
fn load_word(ops: &mut Assembler, values: &Values, pointer: u8) -> Result<usize, ProgramError> {
    let Readable { stack, .. } = values.readable;
    dynasm!(ops; .arch x64; clc);
    for (start, starts) in values.readable.starts() {
        dynasm!(ops; .arch x64
            ; mov r11, QWORD start.wrapping_neg().cast_signed()
            ; add r11, Rq(pointer)
        );
        match i32::try_from(starts) {
            Ok(starts) => dynasm!(ops; .arch x64; cmp r11, starts),
            Err(_) => dynasm!(ops; .arch x64; mov rax, QWORD starts.cast_signed(); cmp r11, rax),
        }
        dynasm!(ops; .arch x64; jb >readable);
    }
    if let Some((offset, len)) = stack {
        let current = disp("current's offset", values.current)?;
        let offset = disp("the offset of a task's stack", offset)?;
        let starts = disp("the size of a stack", len.saturating_sub(7))?;
        dynasm!(ops; .arch x64
            ; gs mov rax, [DWORD current]
            ; mov r11, Rq(pointer)
            ; sub r11, [rax + offset]
            ; cmp r11, starts
            ; jb >readable
        );
    }
    dynasm!(ops; .arch x64
        ; jmp >leave
        ; readable:
        // Carry stays set.
        ; mov rax, [Rq(pointer)]
        ; leave:
    );
    let ending = ops.offset().0;
    dynasm!(ops; .arch x64; .bytes ENDING);
    Ok(ending)
}
