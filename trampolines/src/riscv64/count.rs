//! Compiles programs that count instead of recording.
//!
//! One atomic instruction counts, so an interruption after the CPU's number was read loses no call:
//! a task that was migrated then counts in the table of its former CPU.

use super::condition::{Reach, Tests, follow, forget};
use super::nesting::nested;
use super::operands::{Assembler, Registers, end as end_program, find_counter, parts, registers};
use super::sort::{begin, end, sort};
use super::timed::timed;
use super::{Values, callers};
use crate::branch::branch;
use crate::program::{Code, Counts, Point, Program, ProgramError, STOPS};
use dynasmrt::{DynamicLabel, DynasmApi, DynasmLabelApi, dynasm};

/// Makes a program that was checked. `t3` and `t4` are lost, and `t5` and `t6` where there is a condition; where calls are
/// sorted or their beginnings are looked for, what [`compile`](super::compile) says.
pub(super) fn count(
    program: &Program,
    counts: Counts,
    (values, reach): (&Values, Reach),
) -> Result<Code, ProgramError> {
    let mut ops = Assembler::new(0);
    let (point, leave) = (program.point, ops.new_dynamic_label());
    let mut endings = Vec::new();
    let looks_itself = matches!(counts, Counts::Follow { .. });
    let test = |ops: &mut Assembler, endings: &mut Vec<usize>| {
        let (Some(condition), None) = (&program.condition, program.since) else { return Ok(()) };
        // Unlike a record, what counts is so short that a branch reaches its end, but for what looks at levels.
        if program.nesting.is_none() {
            return branch(
                &mut Tests { looks_itself, ..Tests::new(ops, values, reach) },
                condition,
                (leave, false),
            );
        }
        let meant = ops.new_dynamic_label();
        branch(
            &mut Tests { looks_itself, ..Tests::new(ops, values, reach) },
            condition,
            (meant, true),
        )?;
        endings.push(end_program(ops, point));
        dynasm!(ops; .arch riscv64; =>meant);
        Ok(())
    };
    if !program.nests_first() {
        test(&mut ops, &mut endings)?;
    }
    if let Some(nesting) = program.nesting {
        nested(&mut ops, point, nesting, leave)?;
    }
    if program.nests_first() {
        test(&mut ops, &mut endings)?;
    }
    if let Some(calls) = program.since {
        timed(&mut ops, program, calls, (values, reach), &mut endings)?;
    }
    let stop = match counts {
        Counts::Up(counters) => {
            find_counter(&mut ops, counters, values)?;
            dynasm!(ops; .arch riscv64; .feature A
                ; addi t4, zero, 1
                ; amoadd.d zero, t4, [t3]
            );
            None
        }
        Counts::ByCaller(of) => {
            callers::count(&mut ops, of, values, leave)?;
            None
        }
        Counts::Down { counter, trap, .. } => {
            Some(count_down(&mut ops, (counter, trap), point, leave)?)
        }
        Counts::Nothing => None,
        Counts::Follow { argument, pid, inside } => {
            follow(&mut ops, (argument, pid, inside), values)?;
            None
        }
        Counts::Forget => {
            forget(&mut ops, values)?;
            None
        }
        Counts::Sort(histograms, sorted) => {
            sort(&mut ops, histograms, sorted, values)?;
            None
        }
        Counts::Begin(histograms, calls) => {
            begin(&mut ops, histograms, calls, values, leave)?;
            None
        }
        // There are no tail calls.
        Counts::Untold(_) | Counts::Mark(..) => {
            return Err(ProgramError::Counts("is for jumps to other functions"));
        }
        Counts::End(calls, ended) => {
            end(&mut ops, (calls, ended), leave)?;
            None
        }
    };
    dynasm!(ops; .arch riscv64; leave: ; =>leave);
    endings.push(end_program(&mut ops, point));
    let bytes = ops.finalize().map_err(|error| ProgramError::Assembler(error.to_string()))?;
    Ok(Code { bytes, endings, stop, site: None })
}

/// Counts down to 0, with a trap at that call; goes on at `leave` at others. Where the trap is. At a return `t0` is
/// lost, and `a7` is free.
fn count_down(
    ops: &mut Assembler,
    (counter, trap): (u64, &[u8]),
    point: Point,
    leave: DynamicLabel,
) -> Result<usize, ProgramError> {
    let (upper, lower) = parts(STOPS, counter)?;
    dynasm!(ops; .arch riscv64; .feature A
        ; lui t3, upper
        ; addi t3, t3, lower
        ; addi t4, zero, -1
        ; amoadd.d t3, t4, [t3]
        ; add t3, t3, t4
        ; bnez t3, =>leave
    );
    let returns = point.returns();
    if returns {
        let Registers { link, .. } = registers(point);
        dynasm!(ops; .arch riscv64; lwu t0, [X(link), 4]);
    } else {
        dynasm!(ops; .arch riscv64; mv t1, a7);
    }
    let stop = ops.offset().0;
    ops.extend(trap);
    if !returns {
        dynasm!(ops; .arch riscv64; mv a7, t1);
    }
    Ok(stop)
}
