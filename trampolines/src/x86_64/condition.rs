//! Compiles conditions: whether a call is recorded. They use `r10`, the flags and, where there are
//! arguments, `r11`, and write nothing.

use super::marks::BELOW;
use super::operands::{ARGUMENTS, Assembler, R10, disp};
use super::sort::SAVED;
use super::{Addressing, Values};
use crate::branch::{Branches, Way};
use crate::condition::{Operand, Relation, Test, of_text};
use crate::displacement::small;
use crate::family::{FAMILY, PID_BITS};
use crate::program::{Point, ProgramError};
use dynasmrt::{DynamicLabel, DynasmApi, DynasmLabelApi, dynasm};

/// What errors call a test that cannot be made there.
const UNKNOWN: &str = "is about what is not known";

const RAX: u8 = 0;
const RSI: u8 = 6;
const R9: u8 = 9;

/// What the tests of a condition are written with, and where they stand.
pub(super) struct Tests<'a> {
    pub(super) ops: &'a mut Assembler,
    pub(super) values: &'a Values,
    pub(super) point: Point,
    /// Whether what [`timed`](super::timed::timed) saves is saved, and r9 has the duration.
    pub(super) timed: bool,
}

impl Branches for Tests<'_> {
    fn label(&mut self) -> DynamicLabel {
        self.ops.new_dynamic_label()
    }

    fn bind(&mut self, label: DynamicLabel) {
        dynasm!(self.ops; .arch x64; =>label);
    }

    fn jump(&mut self, target: DynamicLabel) {
        dynasm!(self.ops; .arch x64; jmp =>target);
    }

    fn test(&mut self, test: &Test, (target, when): Way) -> Result<(), ProgramError> {
        let Self { ops, values, point, timed } = self;
        match *test {
            Test::Number { operand, relation, value } => {
                compare(ops, values, (*point, *timed), (operand, relation, value))?;
                let relation = if when { relation } else { relation.inverse() };
                jump(ops, relation, operand.width().1, target);
            }
            Test::Caller { start, len, inside } => {
                let start = disp("a function", start.wrapping_add(values.slide))?;
                // Below the return address into the function, or into the stub.
                match (point, timed) {
                    (Point::Return | Point::Probe, _) => dynasm!(ops; .arch x64; mov r10, [rsp]),
                    (Point::Beyond, _) => {
                        dynasm!(ops; .arch x64; mov r10, [rsp + BELOW]);
                    }
                    (_, false) => dynasm!(ops; .arch x64; mov r10, [rsp + 8]),
                    (_, true) => dynasm!(ops; .arch x64; mov r10, [rsp + 8 + SAVED]),
                }
                let len = disp("a function's length", len.into())?;
                dynasm!(ops; .arch x64; sub r10, start; cmp r10, len);
                let relation = if inside == when { Relation::Less } else { Relation::GreaterEqual };
                jump(ops, relation, false, target);
            }
            Test::Bytes { offset, ref bytes, equal } => {
                task(ops, values)?;
                let differ = if equal == when { ops.new_dynamic_label() } else { target };
                pieces(ops, disp("a task's member", offset.into())?, bytes, (4, differ));
                if equal == when {
                    dynasm!(ops; .arch x64; jmp =>target; =>differ);
                }
            }
            Test::Text { argument, ref bytes } => {
                let register = ARGUMENTS.get(usize::from(argument)).copied();
                let register = register.ok_or(ProgramError::Condition(UNKNOWN, *point))?;
                let differ = if when { ops.new_dynamic_label() } else { target };
                dynasm!(ops; .arch x64; mov r10, Rq(register));
                // Behind its end may be nothing.
                pieces(ops, 0, of_text(bytes), (1, differ));
                if when {
                    dynasm!(ops; .arch x64; jmp =>target; =>differ);
                }
            }
            Test::Followed { pid, inside } => {
                let family = family(values)?;
                task(ops, values)?;
                number(ops, R10, pid)?;
                dynasm!(ops; .arch x64; cmp BYTE [r10 + family], 0);
                let relation = if inside == when { Relation::NotEqual } else { Relation::Equal };
                jump(ops, relation, false, target);
            }
        }
        Ok(())
    }
}

/// Leaves the task in r10.
fn task(ops: &mut Assembler, values: &Values) -> Result<(), ProgramError> {
    let current = disp("current's offset", values.current)?;
    dynasm!(ops; .arch x64; gs mov r10, [DWORD current]);
    Ok(())
}

/// Where the set of tasks that are followed is.
fn family(values: &Values) -> Result<i32, ProgramError> {
    let address = values.followed.ok_or(ProgramError::NotFollowed)?;
    disp(FAMILY, address)
}

/// Leaves the process id of the task in a register in r10, within those that a set has.
fn number(ops: &mut Assembler, task: u8, pid: u32) -> Result<(), ProgramError> {
    const PIDS: i32 = (1 << PID_BITS) - 1;
    let pid = disp("a task's member", pid.into())?;
    dynasm!(ops; .arch x64; mov r10d, [Rq(task) + pid]; and r10d, PIDS);
    Ok(())
}

/// Puts a task into the set, an argument or the one that runs, or takes it out. r10 and the flags are lost.
pub(super) fn follow(
    ops: &mut Assembler,
    (argument, pid, inside): (Option<u8>, u32, bool),
    values: &Values,
) -> Result<(), ProgramError> {
    let family = family(values)?;
    let register = match argument {
        None => {
            task(ops, values)?;
            R10
        }
        Some(argument) => {
            let register = ARGUMENTS.get(usize::from(argument)).copied();
            register.ok_or(ProgramError::Counts("follows tasks that are in registers"))?
        }
    };
    number(ops, register, pid)?;
    dynasm!(ops; .arch x64; mov BYTE [r10 + family], i8::from(inside));
    Ok(())
}

/// Sets the flags.
fn compare(
    ops: &mut Assembler,
    values: &Values,
    (point, timed): (Point, bool),
    (operand, relation, value): (Operand, Relation, u64),
) -> Result<(), ProgramError> {
    let bits = matches!(relation, Relation::Common | Relation::NoneCommon);
    #[allow(clippy::cast_possible_truncation, reason = "operands of up to 4 bytes")]
    let low = value as u32;
    let low = low.cast_signed();
    match operand {
        Operand::Cpu => {
            let number = match values.addressing {
                Addressing::Shared { number, .. } => number,
                Addressing::PerCpu { .. } => values.cpu,
            };
            let number = disp("the CPU number's offset", number)?;
            if bits {
                dynasm!(ops; .arch x64; gs test DWORD [DWORD number], low);
            } else {
                dynasm!(ops; .arch x64; gs cmp DWORD [DWORD number], low);
            }
        }
        Operand::Task(offset) => {
            let offset = disp("a task's member", offset.into())?;
            task(ops, values)?;
            if bits {
                dynasm!(ops; .arch x64; test DWORD [r10 + offset], low);
            } else {
                dynasm!(ops; .arch x64; cmp DWORD [r10 + offset], low);
            }
        }
        Operand::Value { bytes, signed } => {
            let register = if timed { RSI } else { RAX };
            integer(ops, register, (bytes, signed), (value, bits));
        }
        Operand::Duration => integer(ops, R9, (8, false), (value, bits)),
        Operand::Argument { number, bytes, signed } => {
            let register = if let Some(&register) = ARGUMENTS.get(usize::from(number)) {
                register
            } else {
                // Above the function's return address, and that into it.
                let below = if point == Point::Probe { 8 } else { 16 };
                let from = below + 8 * (i32::from(number) - 6);
                dynasm!(ops; .arch x64; mov r10, [rsp + from]);
                R10
            };
            integer(ops, register, (bytes, signed), (value, bits));
        }
    }
    Ok(())
}

/// Compares an integer of so many bytes in a register, or its bits. What is above its own bytes may be
/// anything.
fn integer(
    ops: &mut Assembler,
    register: u8,
    (bytes, signed): (u8, bool),
    (value, bits): (u64, bool),
) {
    #[allow(clippy::cast_possible_truncation, reason = "operands of up to 4 bytes")]
    let low = (value as u32).cast_signed();
    let register = match (bytes, signed) {
        (1, false) => {
            dynasm!(ops; .arch x64; movzx r10d, Rb(register));
            R10
        }
        (1, true) => {
            dynasm!(ops; .arch x64; movsx r10d, Rb(register));
            R10
        }
        (2, false) => {
            dynasm!(ops; .arch x64; movzx r10d, Rw(register));
            R10
        }
        (2, true) => {
            dynasm!(ops; .arch x64; movsx r10d, Rw(register));
            R10
        }
        _ => register,
    };
    match (bytes, i32::try_from(value.cast_signed()), bits) {
        (8, Ok(value), false) => dynasm!(ops; .arch x64; cmp Rq(register), value),
        (8, Ok(value), true) => dynasm!(ops; .arch x64; test Rq(register), value),
        (8, Err(_), _) => {
            dynasm!(ops; .arch x64; mov r11, QWORD value.cast_signed());
            if bits {
                dynasm!(ops; .arch x64; test Rq(register), r11);
            } else {
                dynasm!(ops; .arch x64; cmp Rq(register), r11);
            }
        }
        (_, _, false) => dynasm!(ops; .arch x64; cmp Rd(register), low),
        (_, _, true) => dynasm!(ops; .arch x64; test Rd(register), low),
    }
}

fn jump(ops: &mut Assembler, relation: Relation, signed: bool, target: DynamicLabel) {
    match (relation, signed) {
        (Relation::Equal | Relation::NoneCommon, _) => dynasm!(ops; .arch x64; je =>target),
        (Relation::NotEqual | Relation::Common, _) => dynasm!(ops; .arch x64; jne =>target),
        (Relation::Less, true) => dynasm!(ops; .arch x64; jl =>target),
        (Relation::Less, false) => dynasm!(ops; .arch x64; jb =>target),
        (Relation::LessEqual, true) => dynasm!(ops; .arch x64; jle =>target),
        (Relation::LessEqual, false) => dynasm!(ops; .arch x64; jbe =>target),
        (Relation::Greater, true) => dynasm!(ops; .arch x64; jg =>target),
        (Relation::Greater, false) => dynasm!(ops; .arch x64; ja =>target),
        (Relation::GreaterEqual, true) => dynasm!(ops; .arch x64; jge =>target),
        (Relation::GreaterEqual, false) => dynasm!(ops; .arch x64; jae =>target),
    }
}

/// Goes to `differ` unless these bytes are at an offset of what r10 points to, as many at once as an
/// instruction can compare, and `most` at most.
fn pieces(
    ops: &mut Assembler,
    offset: i32,
    bytes: &[Option<u8>],
    (most, differ): (usize, DynamicLabel),
) {
    let mut rest = bytes;
    let mut at = offset;
    while !rest.is_empty() {
        let known: Vec<u8> = rest.iter().map_while(|byte| *byte).take(most).collect();
        let len = match known[..] {
            [a, b, c, d] => {
                let word = i32::from_le_bytes([a, b, c, d]);
                dynasm!(ops; .arch x64; cmp DWORD [r10 + at], word; jne =>differ);
                4
            }
            [a, b, ..] => {
                let word = i16::from_le_bytes([a, b]);
                dynasm!(ops; .arch x64; cmp WORD [r10 + at], word; jne =>differ);
                2
            }
            [a] => {
                let byte = i8::from_le_bytes([a]);
                dynasm!(ops; .arch x64; cmp BYTE [r10 + at], byte; jne =>differ);
                1
            }
            [] => {
                dynasm!(ops; .arch x64; cmp BYTE [r10 + at], 0; je =>differ);
                1
            }
        };
        rest = rest.get(len..).unwrap_or_default();
        at += small(len);
    }
}
