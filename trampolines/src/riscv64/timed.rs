//! Compiles programs at the ends of calls whose starts were kept: they compute the duration before
//! anything is recorded.
//!
//! A call that does not match frees its place as well.

use super::Values;
use super::condition::{Reach, Tests, constant};
use super::operands::numbers::T4;
use super::operands::{Assembler, end, parts};
use super::sort::find_place;
use crate::branch::branch;
use crate::condition::{Condition, Operand};
use crate::histogram::{Calls, OPEN};
use crate::program::{Field, Program, ProgramError};
use dynasmrt::{DynasmApi, DynasmLabelApi, dynasm};

/// Gives the place of a call back, at its return, and leaves in [`DURATION`](super::operands::DURATION) how many ticks it took; goes on at the
/// next `leave` or ends if it has no place, or is not meant. `t0` and `t2` to `t5` are lost.
pub(super) fn timed(
    ops: &mut Assembler,
    program: &Program,
    calls: Calls,
    (values, reach): (&Values, Reach),
    endings: &mut Vec<usize>,
) -> Result<(), ProgramError> {
    let found = find_place(ops, calls)?;
    let (upper, lower) = parts(OPEN, calls.address)?;
    let meant = ops.new_dynamic_label();
    dynasm!(ops; .arch riscv64
        ; j >leave
        ; =>found
        ; ld t0, [t2, Calls::BEGAN]
    );
    // Most calls are too short, whatever else is asked for. One that seems to end before it has begun is looked at
    // below, as a long one. The branch lets no hart see the place free before this one has read it.
    if let Some(ticks) = program.condition.as_ref().and_then(Condition::longer_than) {
        dynasm!(ops; .arch riscv64; .feature Zicntr
            ; rdtime t3
            ; sub t3, t3, t0
        );
        constant(ops, T4, ticks.cast_signed());
        dynasm!(ops; .arch riscv64
            ; bltu t4, t3, >long
            ; sd zero, [t2]
        );
        endings.push(end(ops, program.point));
        dynasm!(ops; .arch riscv64; long:);
    }
    dynasm!(ops; .arch riscv64
        // Who takes the place next must not be seen by this.
        ; fence r, w
        ; sd zero, [t2]
        ; lui t3, upper
        ; ld t3, [t3, lower]
        // A branch does not reach the end of a long program.
        ; bgeu t0, t3, =>meant
        ; j >leave
        ; =>meant
    );
    let mut test = |ops: &mut Assembler| {
        if let Some(condition) = &program.condition {
            let meant = ops.new_dynamic_label();
            branch(&mut Tests::new(ops, values, reach), condition, (meant, true))?;
            endings.push(end(ops, program.point));
            dynasm!(ops; .arch riscv64; =>meant);
        }
        Ok::<_, ProgramError>(())
    };
    // Without a look at the clock if that is not asked for.
    let by_time = |operand| operand == Operand::Duration;
    let by_time = program.condition.as_ref().is_some_and(|condition| condition.looks_at(by_time));
    if !by_time {
        test(ops)?;
    }
    if by_time || program.fields.contains(&Field::Duration) {
        // Clocks of two harts may differ.
        let after = ops.new_dynamic_label();
        dynasm!(ops; .arch riscv64; .feature Zicntr
            ; rdtime a4
            ; bgeu a4, t0, =>after
            ; mv a4, t0
            ; =>after
            ; sub a4, a4, t0
        );
    }
    if by_time {
        test(ops)?;
    }
    Ok(())
}
