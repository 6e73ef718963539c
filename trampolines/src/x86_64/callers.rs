//! Compiles programs that count calls by caller instead of recording them.
//!
//! A place belongs to its pair for ever once it was taken by one locked instruction, and another one counts: an
//! interrupt in between, or a migration to another CPU, loses no call.

use super::Values;
use super::operands::{Assembler, disp};
use crate::callers::{CALLERS, Callers, SPREAD};
use crate::program::ProgramError;
use dynasmrt::{DynamicLabel, DynasmApi, DynasmLabelApi, dynasm};

/// Where a program goes on whose pair is not in the first of its places, and where it comes back to.
pub(super) struct Elsewhere {
    from: DynamicLabel,
    to: DynamicLabel,
    /// Of a call that was counted as one without a place.
    none: DynamicLabel,
    callers: Callers,
}

/// Leaves in rax how far the table of this CPU is from that of the first.
fn table(ops: &mut Assembler, callers: Callers, values: &Values) -> Result<(), ProgramError> {
    if callers.stride == 0 {
        dynasm!(ops; .arch x64; xor eax, eax);
        return Ok(());
    }
    let stride = disp("the size of a table of callers", callers.stride)?;
    let number = disp("the CPU number's offset", values.cpu)?;
    dynasm!(ops; .arch x64
        ; gs mov eax, [DWORD number]
        ; imul rax, rax, stride
    );
    Ok(())
}

/// Counts a call, with the address that tells the site on top of the stack and the caller's above it. r10, r11 and
/// the flags are lost.
pub(super) fn count(
    ops: &mut Assembler,
    callers: Callers,
    values: &Values,
) -> Result<Elsewhere, ProgramError> {
    const { assert!(Callers::PLACE == 1 << 4) };
    let [from, to, none] = [(); 3].map(|()| ops.new_dynamic_label());
    let mask = ((1_i32 << Callers::BITS) - 1) << 4;
    let shift = i8::try_from(64 - Callers::BITS - 4).unwrap_or(0);
    let pairs = disp(CALLERS, callers.address.wrapping_add(Callers::PLACES))?;
    let calls = disp(CALLERS, callers.address.wrapping_add(Callers::PLACES + Callers::CALLS))?;
    dynasm!(ops; .arch x64
        ; push rax
        ; mov r10, [rsp + 8]
        ; mov eax, [rsp + 16]
        ; shl r10, 32
        ; or r10, rax
        ; mov r11, QWORD SPREAD.cast_signed()
        ; imul r11, r10
        ; shr r11, shift
        ; and r11d, mask
    );
    if callers.stride != 0 {
        table(ops, callers, values)?;
        dynasm!(ops; .arch x64; add r11, rax);
    }
    dynasm!(ops; .arch x64
        ; cmp [r11 + pairs], r10
        ; jne =>from
        ; =>to
        ; lock inc QWORD [r11 + calls]
        ; =>none
        ; pop rax
    );
    Ok(Elsewhere { from, to, none, callers })
}

/// Looks for the pair in all of its places, and takes the first one that is free.
pub(super) fn elsewhere(
    ops: &mut Assembler,
    elsewhere: &Elsewhere,
    values: &Values,
) -> Result<(), ProgramError> {
    let Elsewhere { from, to, none, callers } = *elsewhere;
    let pairs = disp(CALLERS, callers.address.wrapping_add(Callers::PLACES))?;
    let crowded = disp(CALLERS, callers.address.wrapping_add(Callers::CROWDED))?;
    let size = i8::try_from(Callers::PLACE).unwrap_or(0);
    dynasm!(ops; .arch x64; =>from);
    for place in 0..Callers::TRIED {
        let other = ops.new_dynamic_label();
        if place > 0 {
            dynasm!(ops; .arch x64
                ; add r11, BYTE size
                ; cmp [r11 + pairs], r10
                ; je =>to
            );
        }
        // One that is another's is not locked.
        dynasm!(ops; .arch x64
            ; xor eax, eax
            ; cmp [r11 + pairs], rax
            ; jne =>other
            ; lock cmpxchg [r11 + pairs], r10
            ; je =>to
            // Taken at this moment, perhaps for this pair.
            ; cmp rax, r10
            ; je =>to
            ; =>other
        );
    }
    table(ops, callers, values)?;
    dynasm!(ops; .arch x64
        ; lock inc QWORD [rax + crowded]
        ; jmp =>none
    );
    Ok(())
}
