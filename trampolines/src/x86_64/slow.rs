//! Compiles the path of a hit that finds its chunk used up: it opens the next one, waits for it, or
//! drops the record.
//!
//! The account of a chunk is found from the position itself. So whatever happens to the task
//! meanwhile, the exchange, or the result "full", concerns the ring that the position names.

use super::operands::{ABOVE_SPENT, Assembler, Operands, RDX, exchange};
use crate::displacement::{account, small};
use crate::layout::{CHUNK_SIZE, CLAIMED, FRONT_SIZE, below, control, front};
use dynasmrt::{DynasmApi, DynasmLabelApi, dynasm};

const LAST_BYTE: i32 = small(CHUNK_SIZE) - 1;
/// [`CLAIMED`], sign-extended.
#[allow(clippy::cast_possible_truncation, reason = "-1")]
const CLAIMED_LAP: i32 = CLAIMED as i32;
const _: () = assert!(CLAIMED_LAP == -1);

/// With the position in rax and the control block in r11, as `reserve` leaves them.
pub(super) fn slow(ops: &mut Assembler, operands: &Operands) {
    let rings = operands.rings;
    dynasm!(ops; .arch x64; slow:);
    if operands.in_place {
        dynasm!(ops; .arch x64; mov rdi, rdx);
    }
    dynasm!(ops; .arch x64
        // r10: the last byte of this chunk; rdx: the position that opens the next one.
        ; movsxd r10, eax
        ; or r10, LAST_BYTE
        ; mov rdx, rax
        ; shr rdx, 32
        ; shl rdx, 32
        ; add rdx, [r10 + (rings + account(front::NEXT))]
    );
    if operands.overwrite {
        overwrite(ops, operands);
    } else {
        dynasm!(ops; .arch x64
            ; movsxd r10, edx
            ; cmp rdx, [r10 + (rings + small(front::ROOM))]
            ; jne >full
        );
        exchange(ops, operands.shared, RDX);
        again(ops, operands);
        dynasm!(ops; .arch x64; full:);
        if let Some(instruction) = operands.wait {
            wait(ops, operands, instruction);
        }
    }
    dynasm!(ops; .arch x64
        ; movsxd r10, eax
        ; or r10, LAST_BYTE
        ; lock add QWORD [r10 + (rings + account(front::DROPPED))], operands.tracers
        ; jmp <out
    );
}

/// Tries to reserve once more.
fn again(ops: &mut Assembler, operands: &Operands) {
    if operands.in_place {
        dynasm!(ops; .arch x64; mov rdx, rdi);
    }
    dynasm!(ops; .arch x64; jmp <reserve);
}

/// Waits a while and looks again, unless nobody makes room any more.
fn wait(ops: &mut Assembler, operands: &Operands, instruction: &[u8]) {
    let word = small(control::WAIT);
    if operands.shared {
        dynasm!(ops; .arch x64; cmp DWORD [r11 + word], 0);
    } else {
        dynasm!(ops; .arch x64; gs cmp DWORD [r11 + word], 0);
    }
    dynasm!(ops; .arch x64; je >drop);
    ops.extend(instruction);
    again(ops, operands);
    dynasm!(ops; .arch x64; drop:);
}

/// Takes the next chunk all of whose records are finished, counts and clears them, and opens it. A
/// chunk with an unfinished record is left out: its writer will still write there. So is one that
/// someone else is about to open: that may be who was interrupted here, and never goes on before
/// this returns. Falls through when there is no other.
///
/// Clearing is what makes unfinished records known: what fields of an earlier lap have left in
/// place of a record that is only reserved may look like a finished one. Whoever claims a chunk has
/// it for himself, so that a record in it is never cleared that came after. When head has meanwhile
/// gone elsewhere the chunk is given back, as one that was never opened.
///
/// Locked, since a task that was migrated may be among those; that is once for a chunk.
fn overwrite(ops: &mut Assembler, operands: &Operands) {
    let rings = operands.rings;
    dynasm!(ops; .arch x64
        ; push rcx
        ; push rsi
        ; push rdi
        ; push r8
        ; mov r8, rax
        ; try_chunk:
    );
    // The state is read before the head is compared: while head is where it was, nobody has opened a
    // chunk since, so that the state is no newer than that. Otherwise, whoever is interrupted
    // between the two for a whole chunk takes one for used up that was opened in this very lap.
    dynasm!(ops; .arch x64
        ; movsxd r10, edx
        ; mov rax, [r10 + (rings + small(front::STATE))]
    );
    // Who was away for long must not take chunks that are newer than where he looked.
    if operands.shared {
        dynasm!(ops; .arch x64; cmp [r11], r8);
    } else {
        dynasm!(ops; .arch x64; gs cmp [r11], r8);
    }
    dynasm!(ops; .arch x64
        ; jne >moved
        // r10: the account of the chunk to be opened; rax: its state; esi: how many were
        // overwritten; rcx: where it is read.
        ; mov esi, eax
        ; mov rcx, rax
        ; shr rcx, 32
        ; jz >claim
        ; cmp ecx, CLAIMED_LAP
        ; je >next
        ; mov rcx, r10
        ; next_record:
        ; cmp DWORD [rcx + (rings - small(below::SITE))], 0
        ; je >next
        ; movzx edi, BYTE [rcx + (rings - small(below::INFO) + 2)]
        ; lea esi, [rsi + rdi + 1]
        ; mov edi, [rcx + (rings - small(below::INFO))]
        ; and edi, 31
        ; lea edi, [rdi * 8 + 8]
        ; sub rcx, rdi
        ; test ecx, ABOVE_SPENT
        ; jnz <next_record
        ; claim:
        ; mov rcx, CLAIMED_LAP
        ; shl rcx, 32
        ; or rcx, rsi
        ; lock cmpxchg [r10 + (rings + small(front::STATE))], rcx
        ; jne <try_chunk
        ; lea rdi, [r10 + rings]
        ; and rdi, -small(CHUNK_SIZE)
        ; mov ecx, small(CHUNK_SIZE - FRONT_SIZE) / 8
        ; xor eax, eax
        ; rep stosq
        ; mov rcx, rdx
        ; shr rcx, 32
        ; shl rcx, 32
        ; or rcx, rsi
        ; mov [r10 + (rings + small(front::STATE))], rcx
        ; mov rax, r8
    );
    exchange(ops, operands.shared, RDX);
    dynasm!(ops; .arch x64
        ; je >moved
        ; mov [r10 + (rings + small(front::STATE))], rsi
        ; moved:
        ; pop r8
        ; pop rdi
        ; pop rsi
        ; pop rcx
    );
    again(ops, operands);
    dynasm!(ops; .arch x64
        ; next:
        ; shr rdx, 32
        ; shl rdx, 32
        ; add rdx, [r10 + (rings + small(front::NEXT))]
        // Once around: this chunk is the next one.
        ; mov eax, r8d
        ; or eax, LAST_BYTE
        ; sub eax, small(FRONT_SIZE) - 1
        ; cmp eax, edx
        ; jne <try_chunk
        ; mov rax, r8
        ; pop r8
        ; pop rdi
        ; pop rsi
        ; pop rcx
    );
}
