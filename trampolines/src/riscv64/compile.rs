//! Compiles the path that every hit takes.

use super::Values;
use super::condition::{Reach, Tests};
use super::count::count;
use super::encode::{SSTATUS, csrr, register};
use super::nesting::nested;
use super::operands::{
    Assembler, DURATION, Registers, SHIFT, SPENT_SHIFTED, argument, end, load_byte, load_double,
    load_word, parts, registers,
};
use super::read::{finish, known, read};
use super::slow::{overwrite, slow};
use super::timed::timed;
use crate::branch::branch;
use crate::context::part;
use crate::displacement::at;
use crate::layout::{CONTROL_SIZE, below};
use crate::program::{Code, Field, Overflow, Program, ProgramError};
use crate::reads::Reads;
use dynasmrt::{DynasmApi, DynasmLabelApi, dynasm};

/// Makes a program.
///
/// Its entry: called with the return address into the function in `t0` and that of the function in
/// `ra`. `t1` to `t6` are free; all else is kept, `sp` is not used but where the next chunk is
/// opened.
///
/// Its return: entered by `jal t1`, 4 bytes behind which a word names the site, with the function's
/// return address in `ra`, to which it goes. `t0`, `t2` to `t6` and `a2` to `a7` are free.
///
/// # Errors
/// When there can be no such program.
pub fn compile(
    program: &Program,
    overflow: Overflow,
    values: &Values,
) -> Result<Code, ProgramError> {
    program.check()?;
    // There are no tail calls.
    if program.marked.is_some() {
        return Err(ProgramError::Counts("is for jumps to other functions"));
    }
    let make = |reach| match program.counts {
        Some(counts) => count(program, counts, (values, reach)),
        None => record(program, overflow, (values, reach)),
    };
    // Only long lists of names are longer than a branch reaches.
    match make(Reach::Near) {
        Err(ProgramError::Assembler(_)) => make(Reach::Far),
        made => made,
    }
}

/// Makes a program that was checked, and records.
fn record(
    program: &Program,
    overflow: Overflow,
    (values, reach): (&Values, Reach),
) -> Result<Code, ProgramError> {
    let mut ops = Assembler::new(0);
    let Registers { link, control } = registers(program.point);
    let returns = program.point.returns();
    let leave = ops.new_dynamic_label();
    let mut endings = Vec::new();
    let test = |ops: &mut Assembler, endings: &mut Vec<usize>| {
        let (Some(condition), None) = (&program.condition, program.since) else { return Ok(()) };
        let record = ops.new_dynamic_label();
        branch(&mut Tests::new(ops, values, reach), condition, (record, true))?;
        // A branch does not reach the end of a long program, and a jump would be one instruction more.
        endings.push(end(ops, program.point));
        dynasm!(ops; .arch riscv64; =>record);
        Ok::<_, ProgramError>(())
    };
    if !program.nests_first() {
        test(&mut ops, &mut endings)?;
    }
    if let Some(nesting) = program.nesting {
        nested(&mut ops, program.point, nesting, leave)?;
    }
    if program.nests_first() {
        test(&mut ops, &mut endings)?;
    }
    if let Some(calls) = program.since {
        timed(&mut ops, program, calls, (values, reach), &mut endings)?;
    }
    find_control(&mut ops, control, values)?;
    reserve(&mut ops, program, overflow)?;
    dynasm!(ops; .arch riscv64; .feature A, Zicntr
        ; sw ra, [t2, at(below::CALLER)]
        ; sd tp, [t2, at(below::TASK)]
    );
    load_word(&mut ops, "the pid's offset", values.pid)?;
    dynasm!(ops; .arch riscv64; .feature A, Zicntr; sw t3, [t2, at(below::PID)]);
    let mut reads = Reads::default();
    for (index, (field, below)) in program.places().enumerate() {
        let to = at(below);
        match field {
            Field::Stack => dynasm!(ops; .arch riscv64; .feature A, Zicntr; sd sp, [t2, to]),
            Field::Value => dynasm!(ops; .arch riscv64; .feature A, Zicntr; sd a0, [t2, to]),
            Field::Duration => {
                dynasm!(ops; .arch riscv64; .feature A, Zicntr; sd X(DURATION), [t2, to]);
            }
            // There are no tail calls.
            Field::Target => return Err(ProgramError::Field(field, program.point)),
            Field::Argument(number) => {
                let register = argument(&mut ops, number);
                dynasm!(ops; .arch riscv64; .feature A, Zicntr; sd X(register), [t2, to]);
            }
            // Reads that fail come after it.
            Field::Failed => dynasm!(ops; .arch riscv64; .feature A, Zicntr; sd zero, [t2, to]),
            Field::Context => context(&mut ops, values, to)?,
            Field::Read(wanted) => {
                let register = argument(&mut ops, wanted.argument());
                dynasm!(ops; .arch riscv64; .feature A, Zicntr; mv t3, X(register));
                read(&mut reads, &mut ops, &wanted, (index, to))?;
            }
            Field::Known(wanted) | Field::Linked(wanted) => {
                let register = argument(&mut ops, wanted.argument());
                let linked = matches!(field, Field::Linked(_));
                known(&mut ops, &wanted, (register, to), linked)?;
            }
            Field::Variable(link) => {
                let (upper, lower) = parts("a variable", link.wrapping_add(values.slide))?;
                dynasm!(ops; .arch riscv64; .feature A, Zicntr
                    ; lui t3, upper
                    ; ld t3, [t3, lower]
                    ; sd t3, [t2, to]
                );
            }
            Field::Task { offset, words } => {
                for word in (0..words).map(|word| 8 * i32::from(word)) {
                    let from = u64::from(offset).wrapping_add_signed(word.into());
                    load_double(&mut ops, "a task's offset", from)?;
                    dynasm!(ops; .arch riscv64; sd t3, [t2, to - word]);
                }
            }
        }
    }
    reads.failed = program.below(Field::Failed).map(at);
    dynasm!(ops; .arch riscv64; .feature A, Zicntr
        ; rdtime t3
        ; sd t3, [t2, at(below::TIMESTAMP)]
    );
    if returns {
        dynasm!(ops; .arch riscv64; .feature A, Zicntr; lwu t3, [X(link), 4]);
    }
    // Stores may overtake each other here; what publishes the record must not.
    dynasm!(ops; .arch riscv64; .feature A, Zicntr; fence w, w);
    if returns {
        dynasm!(ops; .arch riscv64; .feature A, Zicntr; sw t3, [t2, at(below::SITE)]);
    } else {
        dynasm!(ops; .arch riscv64; .feature A, Zicntr; sw X(link), [t2, at(below::SITE)]);
    }
    dynasm!(ops; .arch riscv64; leave: ; =>leave);
    endings.push(end(&mut ops, program.point));
    match overflow {
        Overflow::Drop => slow(&mut ops, program, None),
        Overflow::Block(wait) => slow(&mut ops, program, Some(wait)),
        Overflow::Overwrite => overwrite(&mut ops, program),
    }
    finish(reads, &mut ops, values)?;
    let bytes = ops.finalize().map_err(|error| ProgramError::Assembler(error.to_string()))?;
    Ok(Code { bytes, endings, stop: None, site: None })
}

/// The state of the CPU, to this displacement. t3 is lost.
fn context(ops: &mut Assembler, values: &Values, to: i32) -> Result<(), ProgramError> {
    const { assert!(part::MIGRATION == 0 && part::INTERRUPTS == 1) };
    let places = values.context.ok_or(ProgramError::Unknown(Field::Context))?;
    ops.extend(csrr(register::T3, SSTATUS).to_le_bytes());
    dynasm!(ops; .arch riscv64; .feature A, Zicntr; sb t3, [t2, to + part::INTERRUPTS]);
    if let Some(migration) = places.migration {
        load_byte(ops, "the offset of a task's bans on migration", migration)?;
        dynasm!(ops; .arch riscv64; .feature A, Zicntr; sb t3, [t2, to + part::MIGRATION]);
    } else {
        dynasm!(ops; .arch riscv64; .feature A, Zicntr; sb zero, [t2, to + part::MIGRATION]);
    }
    load_word(ops, "the offset of a task's flags", places.flags)?;
    dynasm!(ops; .arch riscv64; .feature A, Zicntr; sh t3, [t2, to + part::FLAGS]);
    if let Some(lazy) = places.lazy {
        load_byte(ops, "the offset of a task's lazy flag", lazy)?;
        dynasm!(ops; .arch riscv64; .feature A, Zicntr; sb t3, [t2, to + part::LAZY]);
    }
    load_word(ops, "the offset of the count of preemptions", places.preempt_count)?;
    dynasm!(ops; .arch riscv64; .feature A, Zicntr; sw t3, [t2, to + part::PREEMPT_COUNT]);
    if let Some(softirq) = places.softirq {
        load_byte(ops, "the offset of a task's softirqs", softirq.wrapping_add(1))?;
        dynasm!(ops; .arch riscv64; .feature A, Zicntr; sb t3, [t2, to + part::SOFTIRQ]);
    }
    Ok(())
}

/// Leaves the control block of this CPU in its register.
fn find_control(ops: &mut Assembler, control: u8, values: &Values) -> Result<(), ProgramError> {
    let (controls, lower) = parts("the control blocks", values.controls)?;
    load_word(ops, "the CPU number's offset", values.cpu)?;
    dynasm!(ops; .arch riscv64; .feature A, Zicntr
        ; slli X(control), t3, CONTROL_SIZE.trailing_zeros()
        ; lui t2, controls
    );
    if lower != 0 {
        dynasm!(ops; .arch riscv64; .feature A, Zicntr; addi t2, t2, lower);
    }
    dynasm!(ops; .arch riscv64; .feature A, Zicntr; add X(control), X(control), t2);
    Ok(())
}

/// Reserves; leaves the end of the record in t2. Between lr.d and sc.d is only what the
/// architecture guarantees to succeed in the end.
fn reserve(ops: &mut Assembler, program: &Program, overflow: Overflow) -> Result<(), ProgramError> {
    const { assert!(crate::layout::control::HEAD == 0) };
    let Registers { control, .. } = registers(program.point);
    let size = at(program.size());
    let info = program.info(overflow).0;
    let (upper, lower) = parts("the record's head", i64::from(info.cast_signed()).cast_unsigned())?;
    dynasm!(ops; .arch riscv64; .feature A, Zicntr
        ; reserve:
        ; lr.d t2, [X(control)]
        ; slliw t3, t2, SHIFT
    );
    match overflow {
        // The upper part of what the record says of itself is the limit, too.
        Overflow::Drop | Overflow::Block(_) => dynasm!(ops; .arch riscv64; .feature A, Zicntr
            ; lui t4, upper
            ; bgeu t4, t3, >slow
        ),
        Overflow::Overwrite => dynasm!(ops; .arch riscv64; .feature A, Zicntr
            ; lui t4, SPENT_SHIFTED
            ; bgeu t4, t3, >slow
        ),
    }
    dynasm!(ops; .arch riscv64; .feature A, Zicntr
        ; addi t3, t2, size
        ; sc.d t3, t3, [X(control)]
        ; bnez t3, <reserve
    );
    if overflow == Overflow::Overwrite {
        dynasm!(ops; .arch riscv64; .feature A, Zicntr; srli t3, t2, 32);
    }
    dynasm!(ops; .arch riscv64; .feature A, Zicntr; sext.w t2, t2);
    if overflow == Overflow::Overwrite {
        dynasm!(ops; .arch riscv64; .feature A, Zicntr; lui t4, upper);
    }
    dynasm!(ops; .arch riscv64; .feature A, Zicntr
        ; addi t4, t4, lower
        ; sw t4, [t2, at(below::INFO)]
    );
    if overflow == Overflow::Overwrite {
        dynasm!(ops; .arch riscv64; .feature A, Zicntr; sb t3, [t2, -1]);
    }
    Ok(())
}
