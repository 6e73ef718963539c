//! What a hit does that finds its chunk used up: opens the next one, or drops the record.
//!
//! The account of a chunk is found from the position itself, so whatever happens to this task in
//! here, the exchange or the verdict "full" is about the ring that the position named.

use super::compile::{ABOVE_SPENT, Assembler, Operands, exchange};
use crate::layout::{CHUNK_SIZE, FRONT_SIZE, below, front};
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

const LAST_BYTE: i32 = small(CHUNK_SIZE) - 1;

/// With the position in rax and the control block in r11, as `reserve` leaves them.
pub(super) fn slow(ops: &mut Assembler, operands: &Operands) {
    dynasm!(ops; .arch x64
        ; slow:
        // r10: the last byte of this chunk; rdx: the position that opens the next one.
        ; movsxd r10, eax
        ; or r10, LAST_BYTE
        ; mov rdx, rax
        ; shr rdx, 32
        ; shl rdx, 32
        ; add rdx, [r10 + account(front::NEXT)]
    );
    if operands.overwrite {
        overwrite(ops, operands);
    } else {
        dynasm!(ops; .arch x64
            ; movsxd r10, edx
            ; cmp rdx, [r10 + small(front::ROOM)]
            ; jne >full
        );
        exchange(ops, operands.shared);
        dynasm!(ops; .arch x64
            ; jmp <reserve
            ; full:
        );
    }
    dynasm!(ops; .arch x64
        ; movsxd r10, eax
        ; or r10, LAST_BYTE
        ; lock add QWORD [r10 + account(front::DROPPED)], operands.tracers
        ; jmp <out
    );
}

/// Makes sure that all records of the chunk are finished before it is opened again, and counts
/// them as overwritten. A chunk with an unfinished record is left out: its writer will still write
/// there. Falls through when there is no other.
///
/// A chunk's state is changed once for each lap, whoever does it: others that were interrupted
/// here, or interrupt, find it changed. Locked, since a task that was migrated may be among them;
/// that is once for a chunk.
fn overwrite(ops: &mut Assembler, operands: &Operands) {
    dynasm!(ops; .arch x64
        ; push rcx
        ; push rsi
        ; push rdi
        ; push r8
        ; push r9
        ; mov r8, rax
        ; try_chunk:
        // r9: the account of the chunk to be opened; rax: its state; rcx: where it is read.
        ; movsxd r9, edx
        ; mov rax, [r9 + small(front::STATE)]
        ; mov rsi, rax
        ; xor rsi, rdx
        ; shr rsi, 32
        ; jz >opened
        // edi: how many were overwritten.
        ; mov edi, eax
        ; mov rsi, rax
        ; shr rsi, 32
        ; jz >counted
        ; mov rcx, r9
        ; next_record:
        ; mov r10d, [rcx - small(below::INFO)]
        ; cmp DWORD [rcx - small(below::SITE)], 0
        ; je >unfinished
        // The upper byte is the tag.
        ; push r10
        ; shr r10d, 24
        ; cmp r10b, sil
        ; pop r10
        ; jne >unfinished
        ; push r10
        ; shr r10d, 16
        ; movzx r10d, r10b
        ; lea edi, [rdi + r10 + 1]
        ; pop r10
        ; and r10d, 31
        ; lea r10d, [r10 * 8 + 8]
        ; sub rcx, r10
        ; test ecx, ABOVE_SPENT
        ; jnz <next_record
        ; counted:
        ; mov rsi, rdx
        ; shr rsi, 32
        ; shl rsi, 32
        ; or rsi, rdi
        ; lock cmpxchg [r9 + small(front::STATE)], rsi
        ; jne <try_chunk
        ; opened:
        ; mov rax, r8
    );
    exchange(ops, operands.shared);
    dynasm!(ops; .arch x64
        ; pop r9
        ; pop r8
        ; pop rdi
        ; pop rsi
        ; pop rcx
        ; jmp <reserve
        ; unfinished:
        ; shr rdx, 32
        ; shl rdx, 32
        ; add rdx, [r9 + small(front::NEXT)]
        // Once around: this chunk is the next one.
        ; movsxd r10, r8d
        ; or r10, LAST_BYTE
        ; lea r10, [r10 - (small(FRONT_SIZE) - 1)]
        ; cmp r10d, edx
        ; jne <try_chunk
        ; mov rax, r8
        ; pop r9
        ; pop r8
        ; pop rdi
        ; pop rsi
        ; pop rcx
    );
}
