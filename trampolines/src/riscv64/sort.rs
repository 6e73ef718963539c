//! Compiles programs that sort calls into histograms instead of recording them.
//!
//! A place among the open calls is taken by `lr.d`/`sc.d`, and belongs to its call until that ends: an
//! interrupt or another hart has a different stack pointer. Every reservation ends with an `sc.d` (see
//! [`super`]).

use super::Values;
use super::condition::constant;
use super::operands::numbers::{A0, SP, T2, T3, T4, T5, T6};
use super::operands::{Assembler, Word, argument, find_counter, parts, take};
use crate::histogram::{Calls, Ended, MISSED, OPEN, SUM, Sorted};
use crate::program::{Histograms, ProgramError};
use dynasmrt::{DynamicLabel, DynasmApi, DynasmLabelApi, dynasm};

/// Bytes of a histogram up to a word.
const fn word(number: u8) -> i32 {
    8 * number as i32
}

/// Leaves the address of the histogram in t3. t4 is lost.
fn find(ops: &mut Assembler, histograms: Histograms, values: &Values) -> Result<(), ProgramError> {
    find_counter(ops, histograms, values)?;
    dynasm!(ops; .arch riscv64; ld t3, [t3]);
    Ok(())
}

/// Leaves where something of the open calls is in t3.
fn address(ops: &mut Assembler, address: u64) -> Result<(), ProgramError> {
    let (upper, lower) = parts(OPEN, address)?;
    dynasm!(ops; .arch riscv64; lui t3, upper; addi t3, t3, lower);
    Ok(())
}

/// Leaves the first place of the call with this stack pointer in t2. t3 is lost.
fn place(ops: &mut Assembler, calls: Calls) -> Result<(), ProgramError> {
    let (upper, lower) = parts(OPEN, calls.address + Calls::PLACES)?;
    constant(ops, T2, Calls::SPREAD.into());
    dynasm!(ops; .arch riscv64; .feature M
        ; mulw t2, t2, sp
        ; srliw t2, t2, Calls::SHIFT.cast_unsigned().into()
        ; andi t2, t2, i32::from(Calls::MASK)
        ; lui t3, upper
        ; add t2, t2, t3
    );
    if lower != 0 {
        dynasm!(ops; .arch riscv64; addi t2, t2, lower);
    }
    Ok(())
}

/// Puts t5 into the histogram at t4. t2, t3 and t6 are lost.
fn put(ops: &mut Assembler) {
    let done = ops.new_dynamic_label();
    // Its length in bits, by halves.
    dynasm!(ops; .arch riscv64
        ; mv t6, zero
        ; beqz t5, =>done
        ; mv t2, t5
        ; addi t6, t6, 8
    );
    for half in [32_u32, 16, 8, 4, 2, 1] {
        let lower = ops.new_dynamic_label();
        let bytes = 8 * half.cast_signed();
        dynasm!(ops; .arch riscv64
            ; srli t3, t2, half
            ; beqz t3, =>lower
            ; mv t2, t3
            ; addi t6, t6, bytes
            ; =>lower
        );
    }
    dynasm!(ops; .arch riscv64; .feature A
        ; =>done
        ; add t6, t6, t4
        ; addi t2, zero, 1
        ; amoadd.d zero, t2, [t6]
        ; addi t4, t4, word(SUM)
        ; amoadd.d zero, t5, [t4]
    );
}

/// An integer of so many bytes, whole, in t5. What is above its own bytes may be anything.
fn extend(ops: &mut Assembler, register: u8, bytes: u8, signed: bool) {
    let unused = 64 - 8 * u32::from(bytes.clamp(1, 8));
    match (bytes, signed) {
        (8, _) => dynasm!(ops; .arch riscv64; mv X(T5), X(register)),
        (_, true) => dynasm!(ops; .arch riscv64
            ; slli t5, X(register), unused
            ; srai t5, t5, unused
        ),
        (_, false) => dynasm!(ops; .arch riscv64
            ; slli t5, X(register), unused
            ; srli t5, t5, unused
        ),
    }
}

/// Sorts an argument. `t2` to `t6` are lost.
pub(super) fn sort(
    ops: &mut Assembler,
    histograms: Histograms,
    sorted: Sorted,
    values: &Values,
) -> Result<(), ProgramError> {
    let Sorted { number, bytes, signed } = sorted;
    find(ops, histograms, values)?;
    dynasm!(ops; .arch riscv64; mv t4, t3);
    let register = argument(ops, number);
    extend(ops, register, bytes, signed);
    put(ops);
    Ok(())
}

/// Takes a place for a call. `t1` to `t6` are lost.
pub(super) fn begin(
    ops: &mut Assembler,
    histograms: Option<Histograms>,
    calls: Calls,
    values: &Values,
    leave: DynamicLabel,
) -> Result<(), ProgramError> {
    let has_place = ops.new_dynamic_label();
    place(ops, calls)?;
    for place in 0..Calls::TRIED {
        if place > 0 {
            let size = i32::try_from(Calls::PLACE).unwrap_or(0);
            dynasm!(ops; .arch riscv64; addi t2, t2, size);
        }
        take(ops, &Word { at: T2, own: SP, found: T3, spare: T4 }, has_place);
        // One with this stack pointer is left over of a call that has ended unseen.
        dynasm!(ops; .arch riscv64; beq t3, sp, =>has_place);
    }
    if let Some(histograms) = histograms {
        find(ops, histograms, values)?;
        let missed = word(MISSED);
        dynasm!(ops; .arch riscv64; addi t3, t3, missed);
    } else {
        address(ops, calls.address + Calls::CROWDED)?;
    }
    dynasm!(ops; .arch riscv64; .feature A
        ; addi t4, zero, 1
        ; amoadd.d zero, t4, [t3]
        ; j =>leave
        ; =>has_place
    );
    if let Some(histograms) = histograms {
        find(ops, histograms, values)?;
        dynasm!(ops; .arch riscv64; sd t3, [t2, Calls::HISTOGRAM]);
    }
    dynasm!(ops; .arch riscv64; .feature Zicntr
        ; rdtime t3
        ; sd t3, [t2, Calls::BEGAN]
    );
    Ok(())
}

/// Goes on at what is returned with the place of a call that ends in `t2`, or falls through if it has none. `t3` is lost,
/// and what [`place`] loses.
pub(super) fn find_place(ops: &mut Assembler, calls: Calls) -> Result<DynamicLabel, ProgramError> {
    let found = ops.new_dynamic_label();
    place(ops, calls)?;
    for place in 0..Calls::TRIED {
        if place > 0 {
            let size = i32::try_from(Calls::PLACE).unwrap_or(0);
            dynasm!(ops; .arch riscv64; addi t2, t2, size);
        }
        dynasm!(ops; .arch riscv64
            ; ld t3, [t2]
            ; beq t3, sp, =>found
        );
    }
    Ok(found)
}

/// Gives the place of a call back, at its return, and sorts it. `t0` and `t2` to `t6` are lost.
pub(super) fn end(
    ops: &mut Assembler,
    (calls, ended): (Calls, Ended),
    leave: DynamicLabel,
) -> Result<(), ProgramError> {
    let found = find_place(ops, calls)?;
    let (upper, lower) = parts(OPEN, calls.address)?;
    dynasm!(ops; .arch riscv64; .feature Zicntr
        ; j =>leave
        ; =>found
        ; ld t0, [t2, Calls::BEGAN]
        ; ld t4, [t2, Calls::HISTOGRAM]
        // Who takes the place next must not be seen by these.
        ; fence r, w
        ; sd zero, [t2]
        ; lui t3, upper
        ; ld t3, [t3, lower]
        ; bltu t0, t3, =>leave
    );
    match ended {
        Ended::Duration { multiplier, shift } => {
            // Clocks of two harts may differ.
            let after = ops.new_dynamic_label();
            dynasm!(ops; .arch riscv64; .feature Zicntr
                ; rdtime t5
                ; bgeu t5, t0, =>after
                ; mv t5, t0
                ; =>after
                ; sub t5, t5, t0
            );
            constant(ops, T3, multiplier.into());
            if shift == 0 {
                dynasm!(ops; .arch riscv64; .feature M; mul t5, t5, t3);
            } else {
                let (down, up) = (u32::from(shift), 64 - u32::from(shift));
                dynasm!(ops; .arch riscv64; .feature M
                    ; mulhu t6, t5, t3
                    ; mul t5, t5, t3
                    ; srli t5, t5, down
                    ; slli t6, t6, up
                    ; or t5, t5, X(T6)
                );
            }
        }
        Ended::Value { bytes, signed } => extend(ops, A0, bytes, signed),
    }
    put(ops);
    Ok(())
}
