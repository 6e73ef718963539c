//! Compiles reads of memory along pointers, which never fault.

use super::Values;
use super::operands::numbers::T3;
use super::operands::{Assembler, parts};
use crate::program::{Last, ProgramError, Read};
use crate::reads::{Failure, Reads};
use dynasmrt::{DynasmApi, DynasmLabelApi, dynasm};

/// `t3 += offset`; t4 is lost.
fn add(ops: &mut Assembler, offset: i32) -> Result<(), ProgramError> {
    match offset {
        0 => {}
        -2048..2048 => dynasm!(ops; .arch riscv64; addi t3, t3, offset),
        _ => {
            let (upper, lower) = parts("an offset", i64::from(offset).cast_unsigned())?;
            dynasm!(ops; .arch riscv64; lui t4, upper; addi t4, t4, lower; add t3, t3, t4);
        }
    }
    Ok(())
}

/// Reads from the pointer in t3 for the field with this number, to this displacement. t1 and
/// t3 to t6 are lost.
pub(super) fn read(
    reads: &mut Reads,
    ops: &mut Assembler,
    read: &Read,
    (index, to): (usize, i32),
) -> Result<(), ProgramError> {
    let load = *reads.load.get_or_insert_with(|| ops.new_dynamic_label());
    let (from, back) = (ops.new_dynamic_label(), ops.new_dynamic_label());
    reads.failures.push(Failure { from, back, index, to });
    for &hop in read.hops() {
        add(ops, hop)?;
        dynasm!(ops; .arch riscv64; jal t6, =>load; beqz t4, =>from; mv t3, t5);
    }
    let (Last::Words { offset, words } | Last::Text { offset, words }) = read.last();
    add(ops, offset)?;
    for word in 0..i32::from(words) {
        if word > 0 {
            dynasm!(ops; .arch riscv64; addi t3, t3, 8);
        }
        dynasm!(ops; .arch riscv64; jal t6, =>load);
        match read.last() {
            // A string that goes on where nothing can be read is cut.
            Last::Text { .. } if word > 0 => dynasm!(ops; .arch riscv64; beqz t4, =>back),
            _ => dynasm!(ops; .arch riscv64; beqz t4, =>from),
        }
        let to = to - 8 * word;
        dynasm!(ops; .arch riscv64; sd t5, [t2, to]);
        if matches!(read.last(), Last::Text { .. }) && word + 1 < i32::from(words) {
            // Whether any byte is zero.
            const ONES: i32 = 0x0101_0101;
            dynasm!(ops; .arch riscv64
                ; lui t4, ONES & !0xfff
                ; addi t4, t4, ONES & 0xfff
                ; slli t6, t4, 32
                ; add t4, t4, t6
                ; sub t6, t5, t4
                ; not t5, t5
                ; and t5, t5, t6
                ; slli t4, t4, 7
                ; and t5, t5, t4
                ; bnez t5, =>back
            );
        }
    }
    dynasm!(ops; .arch riscv64; =>back);
    Ok(())
}

/// Reads from the pointer in a register, along pointers that lead where they should, to this
/// displacement. t3 to t5 are lost. Loads are aligned if all pointers are.
pub(super) fn known(
    ops: &mut Assembler,
    read: &Read,
    (first, to): (u8, i32),
    linked: bool,
) -> Result<(), ProgramError> {
    let mut from = first;
    if linked {
        dynasm!(ops; .arch riscv64; beqz X(first), >null);
    }
    for &hop in read.hops() {
        let hop = within_reach(ops, &mut from, (hop, hop))?;
        dynasm!(ops; .arch riscv64; ld t3, [X(from), hop]);
        if linked {
            dynasm!(ops; .arch riscv64; beqz t3, >null);
        }
        from = T3;
    }
    let (Last::Words { offset, words } | Last::Text { offset, words }) = read.last();
    let words = i32::from(words);
    // Where the first word is in those that are loaded, in bits.
    let begin = 8 * (offset & 7).cast_unsigned();
    let loaded = words + i32::from(begin != 0);
    let at = offset & !7;
    let at = within_reach(ops, &mut from, (at, at + 8 * (loaded - 1)))?;
    for word in 0..words {
        let (at, to) = (at + 8 * word, to - 8 * word);
        dynasm!(ops; .arch riscv64; ld t4, [X(from), at]);
        if begin != 0 {
            let next = at + 8;
            dynasm!(ops; .arch riscv64
                ; ld t5, [X(from), next]
                ; srli t4, t4, begin
                ; slli t5, t5, 64 - begin
                ; or t4, t4, t5
            );
        }
        dynasm!(ops; .arch riscv64; sd t4, [t2, to]);
    }
    if linked {
        dynasm!(ops; .arch riscv64; j >there; null:);
        for word in 0..words {
            dynasm!(ops; .arch riscv64; sd zero, [t2, to - 8 * word]);
        }
        dynasm!(ops; .arch riscv64; there:);
    }
    Ok(())
}

/// Lets offsets from the first to the last be those of instructions, from a register that may become
/// t3; t4 may be lost. Returns the first as it then is.
fn within_reach(
    ops: &mut Assembler,
    from: &mut u8,
    (first, last): (i32, i32),
) -> Result<i32, ProgramError> {
    const REACH: std::ops::Range<i32> = -2048..2048;
    if REACH.contains(&first) && REACH.contains(&last) {
        return Ok(first);
    }
    let (upper, lower) = parts("an offset", i64::from(first).cast_unsigned())?;
    dynasm!(ops; .arch riscv64; lui t4, upper; addi t4, t4, lower; add t3, X(*from), t4);
    *from = T3;
    Ok(0)
}

/// What follows the program.
pub(super) fn finish(
    reads: Reads,
    ops: &mut Assembler,
    values: &Values,
) -> Result<(), ProgramError> {
    for failure in reads.failures {
        let (bit, Failure { from, back, to, .. }) = (failure.bit(), failure);
        dynasm!(ops; .arch riscv64; =>from; sd t3, [t2, to]);
        if let Some(failed) = reads.failed {
            let (upper, lower) = parts("a field's number", bit.into())?;
            dynasm!(ops; .arch riscv64
                ; lw t4, [t2, failed]
                ; lui t5, upper
                ; addi t5, t5, lower
                ; or t4, t4, t5
                ; sw t4, [t2, failed]
            );
        }
        dynasm!(ops; .arch riscv64; j =>back);
    }
    let Some(load) = reads.load else { return Ok(()) };
    dynasm!(ops; .arch riscv64; =>load);
    load_word(ops, values)
}

/// Leaves in t5 the word that t3 points to, and in t4 whether it may be read. Entered by a call
/// that links t6; t1 is lost. Loads are aligned: others may be exceptions.
fn load_word(ops: &mut Assembler, values: &Values) -> Result<(), ProgramError> {
    for (start, starts) in values.readable.starts() {
        dynasm!(ops; .arch riscv64
            ; li t4, start.cast_signed()
            ; sub t4, t3, t4
            ; li t5, starts.cast_signed()
            ; bltu t4, t5, >readable
        );
    }
    if let Some((offset, len)) = values.readable.stack {
        let (upper, lower) = parts("the offset of a task's stack", offset)?;
        dynasm!(ops; .arch riscv64
            ; lui t4, upper
            ; add t4, t4, tp
            ; ld t4, [t4, lower]
            ; sub t4, t3, t4
            ; li t5, len.saturating_sub(7).cast_signed()
            ; bltu t4, t5, >readable
        );
    }
    dynasm!(ops; .arch riscv64
        ; mv t4, zero
        ; jr t6
        ; readable:
        ; andi t1, t3, 7
        ; slli t1, t1, 3
        ; andi t4, t3, -8
        ; ld t5, [t4, 0]
        ; beqz t1, >aligned
        ; srl t5, t5, t1
        ; ld t4, [t4, 8]
        ; neg t1, t1
        ; sll t4, t4, t1
        ; or t5, t5, t4
        ; aligned:
        ; addi t4, zero, 1
        ; jr t6
    );
    Ok(())
}
