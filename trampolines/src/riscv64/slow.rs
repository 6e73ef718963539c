//! What a hit does that finds its chunk used up: opens the next one, or drops the record.
//!
//! The account of a chunk is found from the position itself, so whatever happens to this task in
//! here, the exchange or the verdict "full" is about the ring that the position named.

use super::compile::{Assembler, SHIFT, SPENT_SHIFTED, at, leave};
use crate::layout::{CHUNK_SIZE, FRONT_SIZE, below, front};
use crate::program::Program;
use dynasmrt::{DynasmApi, DynasmLabelApi, dynasm};

/// From the last byte of a chunk to its account.
#[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "small constants")]
const fn account(field: usize) -> i32 {
    field as i32 - (FRONT_SIZE as i32 - 1)
}

#[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "small constants")]
const fn small(value: usize) -> i32 {
    value as i32
}

const CHUNK: i32 = small(CHUNK_SIZE);
const FRONT: i32 = small(FRONT_SIZE);

/// t3: the last byte of the chunk of position t2; t5: the position that opens the next one.
fn next_chunk(ops: &mut Assembler) {
    dynasm!(ops; .arch riscv64; .feature A, Zicntr
        ; sext.w t3, t2
        ; lui t4, CHUNK
        ; addi t4, t4, -1
        ; or t3, t3, t4
        ; ld t4, [t3, account(front::NEXT)]
        ; srli t5, t2, 32
        ; slli t5, t5, 32
        ; add t5, t5, t4
    );
}

/// Drops the record: t3 is the last byte of its chunk.
fn drop(ops: &mut Assembler, program: &Program) {
    dynasm!(ops; .arch riscv64; .feature A, Zicntr
        // Ends the reservation; if it succeeds, head stays what it was.
        ; sc.d zero, t2, [t1]
        ; addi t3, t3, account(front::DROPPED)
        ; addi t4, zero, i32::from(program.tracers)
        ; amoadd.d zero, t4, [t3]
    );
    leave(ops, program.point);
}

/// With the position in t2 and the control block in t1, as `reserve` leaves them.
pub(super) fn slow(ops: &mut Assembler, program: &Program) {
    dynasm!(ops; .arch riscv64; .feature A, Zicntr; slow:);
    next_chunk(ops);
    dynasm!(ops; .arch riscv64; .feature A, Zicntr
        ; sext.w t4, t5
        ; ld t6, [t4, small(front::ROOM)]
        ; bne t6, t5, >full
        // If head has moved on, or the store fails: look again.
        ; lr.d t6, [t1]
        ; bne t6, t2, <reserve
        ; sc.d t6, t5, [t1]
        ; j <reserve
        ; full:
    );
    drop(ops, program);
}

/// The same where records are overwritten: makes sure that all records of the chunk are finished
/// before it is opened again, and counts them. A chunk with an unfinished record is left out: its
/// writer will still write there.
///
/// A chunk's state is changed once for each lap, whoever does it: others that were interrupted
/// here, or interrupt, find it changed.
pub(super) fn overwrite(ops: &mut Assembler, program: &Program) {
    dynasm!(ops; .arch riscv64; .feature A, Zicntr; slow:);
    next_chunk(ops);
    dynasm!(ops; .arch riscv64; .feature A, Zicntr
        ; addi sp, sp, -32
        ; sd a0, [sp, 0]
        ; sd a1, [sp, 8]
        ; sd a2, [sp, 16]
        ; sd a3, [sp, 24]
        ; try_chunk:
        // t4: the account of the chunk to be opened; a0: its state; a1: the tag of its records.
        ; sext.w t4, t5
        ; ld a0, [t4, small(front::STATE)]
        ; srli a1, a0, 32
        ; srli a2, t5, 32
        ; beq a1, a2, >opened
        // a2: how many were overwritten; t6: where it is read.
        ; slli a2, a0, 32
        ; srli a2, a2, 32
        ; beqz a1, >counted
        ; andi a1, a1, 0xff
        ; mv t6, t4
        ; next_record:
        ; lwu a3, [t6, at(below::INFO)]
        ; srli t3, a3, 24
        ; bne t3, a1, >unfinished
        ; lw t3, [t6, at(below::SITE)]
        ; beqz t3, >unfinished
        ; srli t3, a3, 16
        ; andi t3, t3, 0xff
        ; add a2, a2, t3
        ; addi a2, a2, 1
        ; andi a3, a3, 31
        ; addi a3, a3, 1
        ; slli a3, a3, 3
        ; sub t6, t6, a3
        ; slliw t3, t6, SHIFT
        ; lui a3, SPENT_SHIFTED
        ; bltu a3, t3, <next_record
        ; counted:
        ; srli t3, t5, 32
        ; slli t3, t3, 32
        ; or a2, a2, t3
        ; addi t6, t4, small(front::STATE)
        // What was read of the records must not be older than this.
        ; fence rw, rw
        ; store:
        ; lr.d t3, [t6]
        ; bne t3, a0, <try_chunk
        ; sc.d t3, a2, [t6]
        ; bnez t3, <store
        ; opened:
        ; lr.d t3, [t1]
        ; bne t3, t2, >moved
        ; sc.d t3, t5, [t1]
        ; moved:
        ; ld a0, [sp, 0]
        ; ld a1, [sp, 8]
        ; ld a2, [sp, 16]
        ; ld a3, [sp, 24]
        ; addi sp, sp, 32
        ; j <reserve
        ; unfinished:
        ; ld t3, [t4, small(front::NEXT)]
        ; srli t5, t5, 32
        ; slli t5, t5, 32
        ; add t5, t5, t3
        // Once around: this chunk is the next one.
        ; sext.w t3, t2
        ; lui t6, CHUNK
        ; addi t6, t6, -1
        ; or t3, t3, t6
        ; addi a3, t3, 1 - FRONT
        ; sext.w t6, t5
        ; bne a3, t6, <try_chunk
        ; ld a0, [sp, 0]
        ; ld a1, [sp, 8]
        ; ld a2, [sp, 16]
        ; ld a3, [sp, 24]
        ; addi sp, sp, 32
    );
    drop(ops, program);
}
