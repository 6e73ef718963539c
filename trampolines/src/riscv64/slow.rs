//! Compiles the path of a hit that finds its chunk used up: it opens the next one, waits for it, or
//! drops the record.
//!
//! The account of a chunk is found from the position itself. So whatever happens to the task
//! meanwhile, the exchange, or the result "full", concerns the ring that the position names.

use super::operands::{Assembler, Registers, SHIFT, SPENT_SHIFTED, registers};
use crate::displacement::{account, at, small};
use crate::layout::{self, CHUNK_SIZE, CLAIMED, FRONT_SIZE, below, front};
use crate::program::Program;
use dynasmrt::{DynasmApi, DynasmLabelApi, dynasm};

const CHUNK: i32 = small(CHUNK_SIZE);
const FRONT: i32 = small(FRONT_SIZE);
const _: () = assert!((CHUNK_SIZE - FRONT_SIZE).is_multiple_of(64), "cleared by so many bytes");
const _: () = assert!(CLAIMED == u32::MAX as u64, "known by its sign extension");

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
    let Registers { control, .. } = registers(program.point);
    dynasm!(ops; .arch riscv64; .feature A, Zicntr
        // Ends the reservation; if it succeeds, head stays what it was.
        ; sc.d zero, t2, [X(control)]
        ; addi t3, t3, account(front::DROPPED)
        ; addi t4, zero, i32::from(program.tracers)
        ; amoadd.d zero, t4, [t3]
        ; j <leave
    );
}

/// With the position in t2 and the control block in its register, as `reserve` leaves them.
pub(super) fn slow(ops: &mut Assembler, program: &Program, wait: Option<&'static [u8]>) {
    let Registers { control, .. } = registers(program.point);
    dynasm!(ops; .arch riscv64; .feature A, Zicntr; slow:);
    next_chunk(ops);
    dynasm!(ops; .arch riscv64; .feature A, Zicntr
        ; sext.w t4, t5
        ; ld t6, [t4, small(front::ROOM)]
        ; bne t6, t5, >full
        // If head has moved on, or the store fails: look again.
        ; lr.d t6, [X(control)]
        ; bne t6, t2, <reserve
        ; sc.d t6, t5, [X(control)]
        ; j <reserve
        ; full:
    );
    if let Some(instructions) = wait {
        // Waits a while and looks again, unless nobody makes room any more.
        dynasm!(ops; .arch riscv64; .feature A, Zicntr
            ; ld t6, [X(control), small(layout::control::WAIT)]
            ; beqz t6, >drop
            ; mv t6, a7
        );
        ops.extend(instructions);
        dynasm!(ops; .arch riscv64; .feature A, Zicntr
            ; mv a7, t6
            ; j <reserve
            ; drop:
        );
    }
    drop(ops, program);
}

/// The same where records are overwritten: takes the next chunk all of whose records are finished,
/// counts and clears them, and opens it. A chunk with an unfinished record is left out: its writer
/// will still write there. So is one that someone else is about to open: that may be who was
/// interrupted here, and never goes on before this returns.
///
/// Clearing is what makes unfinished records known: what fields of an earlier lap have left in
/// place of a record that is only reserved may look like a finished one. Whoever claims a chunk has
/// it for himself, so that a record in it is never cleared that came after. When head has meanwhile
/// gone elsewhere the chunk is given back, as one that was never opened.
pub(super) fn overwrite(ops: &mut Assembler, program: &Program) {
    let Registers { control, .. } = registers(program.point);
    dynasm!(ops; .arch riscv64; .feature A, Zicntr; slow:);
    next_chunk(ops);
    dynasm!(ops; .arch riscv64; .feature A, Zicntr
        ; addi sp, sp, -32
        ; sd a0, [sp, 0]
        ; sd a1, [sp, 8]
        ; sd a2, [sp, 16]
        ; sd a3, [sp, 24]
        ; try_chunk:
        // t4: the account of the chunk to be opened; a0: its state; a2: how many were overwritten;
        // t6: where it is read. The state is read before the head is compared: while head is where
        // it was, nobody has opened a chunk since, so that the state is no newer than that. The
        // other way round, whoever is interrupted between the two for a whole chunk takes one for
        // used up that was opened in this very lap.
        ; sext.w t4, t5
        ; ld a0, [t4, small(front::STATE)]
        ; fence r, r
        // Who was away for long must not take chunks that are newer than where he looked.
        ; ld t3, [X(control), 0]
        ; bne t3, t2, >moved
        ; slli a2, a0, 32
        ; srli a2, a2, 32
        ; srai a1, a0, 32
        ; beqz a1, >claim
        // CLAIMED
        ; addi a1, a1, 1
        ; beqz a1, >next
        ; mv t6, t4
        ; next_record:
        ; lw t3, [t6, at(below::SITE)]
        ; beqz t3, >next
        ; lwu a3, [t6, at(below::INFO)]
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
        ; slli a2, a2, 32
        ; srli a2, a2, 32
        ; claim:
        ; addi a1, zero, -1
        ; slli a1, a1, 32
        ; or a1, a1, a2
        ; addi t6, t4, small(front::STATE)
        // What was read of the records must not be older than this.
        ; fence rw, rw
        ; store:
        ; lr.d t3, [t6]
        ; bne t3, a0, <try_chunk
        ; sc.d t3, a1, [t6]
        ; bnez t3, <store
        // From the chunk's beginning to its account.
        ; lui a3, CHUNK
        ; sub a3, t4, a3
        ; addi a3, a3, FRONT
        ; clear:
        ; sd zero, [a3, 0]
        ; sd zero, [a3, 8]
        ; sd zero, [a3, 16]
        ; sd zero, [a3, 24]
        ; sd zero, [a3, 32]
        ; sd zero, [a3, 40]
        ; sd zero, [a3, 48]
        ; sd zero, [a3, 56]
        ; addi a3, a3, 64
        ; bne a3, t4, <clear
        ; srli t3, t5, 32
        ; slli t3, t3, 32
        ; or t3, t3, a2
        ; fence w, w
        ; sd t3, [t4, small(front::STATE)]
        // Nor may a record in the chunk be older than that it was cleared and opened.
        ; fence w, w
        ; open:
        ; lr.d t3, [X(control)]
        ; bne t3, t2, >given_back
        ; sc.d t3, t5, [X(control)]
        ; bnez t3, <open
        ; moved:
        ; ld a0, [sp, 0]
        ; ld a1, [sp, 8]
        ; ld a2, [sp, 16]
        ; ld a3, [sp, 24]
        ; addi sp, sp, 32
        ; j <reserve
        ; given_back:
        ; sd a2, [t4, small(front::STATE)]
        ; j <moved
        ; next:
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
