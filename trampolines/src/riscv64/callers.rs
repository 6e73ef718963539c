//! Compiles programs that count calls by caller instead of recording them.
//!
//! A place is taken by `lr.d`/`sc.d` and belongs to its pair for ever; one atomic instruction counts. Every
//! reservation ends with an `sc.d` (see [`super`]).

use super::Values;
use super::condition::constant;
use super::operands::numbers::{T2, T3, T4, T6};
use super::operands::{Assembler, Word, load_word, parts, take};
use crate::callers::{CALLERS, Callers, SPREAD};
use crate::program::ProgramError;
use dynasmrt::{DynamicLabel, DynasmApi, DynasmLabelApi, dynasm};

/// Counts a call, with the address that tells the site in `t0` and the caller's in `ra`; goes on at `leave` if it has
/// no place. `t2` to `t6` are lost.
pub(super) fn count(
    ops: &mut Assembler,
    callers: Callers,
    values: &Values,
    leave: DynamicLabel,
) -> Result<(), ProgramError> {
    const { assert!(Callers::PLACE == 1 << 4 && Callers::CROWDED == 0) };
    let found = ops.new_dynamic_label();
    let (places, size) = (small(Callers::PLACES), small(Callers::PLACE));
    let (upper, lower) = parts(CALLERS, callers.address)?;
    // The table of this hart, in t5.
    dynasm!(ops; .arch riscv64; lui t5, upper);
    if lower != 0 {
        dynasm!(ops; .arch riscv64; addi t5, t5, lower);
    }
    if callers.stride != 0 {
        load_word(ops, "the CPU number's offset", values.cpu)?;
        // Whole pages: no lower part.
        let (stride, _) = parts("the size of a table of callers", callers.stride)?;
        dynasm!(ops; .arch riscv64; .feature M
            ; lui t4, stride
            ; mul t3, t3, t4
            ; add t5, t5, t3
        );
    }
    constant(ops, T3, SPREAD.cast_signed());
    dynasm!(ops; .arch riscv64; .feature M
        ; slli t2, ra, 32
        ; srli t2, t2, 32
        ; slli t4, t0, 32
        ; or t2, t2, t4
        ; mul t3, t3, t2
        ; srli t3, t3, 64 - Callers::BITS
        ; slli t3, t3, 4
        ; add t3, t3, t5
        ; addi t3, t3, places
    );
    for place in 0..Callers::TRIED {
        let other = ops.new_dynamic_label();
        if place > 0 {
            dynasm!(ops; .arch riscv64; addi t3, t3, size);
        }
        dynasm!(ops; .arch riscv64; .feature A
            ; ld t4, [t3]
            ; beq t4, t2, =>found
            // One that is another's needs no reservation.
            ; bnez t4, =>other
        );
        take(ops, &Word { at: T3, own: T2, found: T4, spare: T6 }, found);
        // Another has taken it at this moment, perhaps for this pair.
        dynasm!(ops; .arch riscv64; beq t4, t2, =>found; =>other);
    }
    let calls = small(Callers::CALLS);
    dynasm!(ops; .arch riscv64; .feature A
        ; addi t4, zero, 1
        ; amoadd.d zero, t4, [t5]
        ; j =>leave
        ; =>found
        ; addi t3, t3, calls
        ; addi t4, zero, 1
        ; amoadd.d zero, t4, [t3]
    );
    Ok(())
}

/// A number of a table's layout.
fn small(number: u64) -> i32 {
    i32::try_from(number).unwrap_or(0)
}
