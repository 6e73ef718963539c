//! Compiles conditions: whether a call is recorded. They use `t3` to `t6`, and write nothing but which tasks are not
//! meant ([`Strangers`]).

use super::Values;
use super::encode::split;
use super::operands::numbers::{A0, T3, T4, T5, T6, TP};
use super::operands::{Assembler, DURATION, argument, load_word, parts};
use crate::branch::{Branches, Way, branch_by_tests};
use crate::condition::{Condition, Operand, Relation, Test, extended, of_text};
use crate::displacement::small;
use crate::family::{FAMILY, PID_BITS, Strangers};
use crate::program::ProgramError;
use dynasmrt::{DynamicLabel, DynasmApi, DynasmLabelApi, dynasm};

/// Loads a constant by as few instructions as usual ones take.
pub(super) fn constant(ops: &mut Assembler, register: u8, value: i64) {
    match (i32::try_from(value), split(value)) {
        (Ok(small @ -2048..2048), _) => {
            dynasm!(ops; .arch riscv64; addi X(register), zero, small);
        }
        (Ok(_), Some((upper, lower))) => {
            let upper = (upper << 12).cast_signed();
            dynasm!(ops; .arch riscv64; lui X(register), upper; addiw X(register), X(register), lower);
        }
        _ => dynasm!(ops; .arch riscv64; li X(register), value),
    }
}

/// How far the branches of a condition go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// As far as one instruction does: 4 KiB.
    Near,
    /// Over a jump.
    Far,
}

/// What the tests of a condition are written with.
pub(super) struct Tests<'a> {
    pub(super) ops: &'a mut Assembler,
    pub(super) values: &'a Values,
    pub(super) reach: Reach,
    /// Nothing is taken from what others have seen: this decides who is followed.
    pub(super) looks_itself: bool,
}

impl<'a> Tests<'a> {
    pub(super) fn new(ops: &'a mut Assembler, values: &'a Values, reach: Reach) -> Self {
        Self { ops, values, reach, looks_itself: false }
    }

    /// Where a branch is to go that leads to `target`. It is led on by what [`Tests::lead`] writes behind it.
    fn towards(&mut self, target: DynamicLabel) -> DynamicLabel {
        match self.reach {
            Reach::Near => target,
            Reach::Far => self.ops.new_dynamic_label(),
        }
    }

    /// See [`Tests::towards`], which has said `from`.
    fn lead(&mut self, from: DynamicLabel, target: DynamicLabel) {
        if from != target {
            dynasm!(self.ops; .arch riscv64; j >on; =>from; j =>target; on:);
        }
    }

    /// The condition that does not hold of strangers: these and members are known by one load, as their place has their
    /// task's address. Of others, all tests are made, and what comes of that is noted in the task's place, unless
    /// anybody has written there meanwhile, or the task has but a name (see [`Strangers`]). The reservation ends in any
    /// case (see [`super`]).
    fn of_strangers(
        &mut self,
        strangers: &Strangers,
        (target, when): Way,
    ) -> Result<(), ProgramError> {
        let [meant, named, out] = [(); 3].map(|()| self.ops.new_dynamic_label());
        let (no, yes) = if when { (out, target) } else { (target, out) };
        place(self.ops, (T6, TP), strangers)?;
        dynasm!(self.ops; .arch riscv64; ld t3, [t6]);
        self.is_own(no);
        dynasm!(self.ops; .arch riscv64; addi t3, t3, -MEMBER);
        self.is_own(yes);
        dynasm!(self.ops; .arch riscv64; .feature A; lr.d.aq t3, [t6]);
        let (lasting, names) = strangers.tests();
        // A test may be all that there is.
        self.looks_itself = true;
        branch_by_tests(self, &lasting, (meant, true))?;
        branch_by_tests(self, &names, (named, true))?;
        self.looks_itself = false;
        note(self.ops, strangers, 0)?;
        dynasm!(self.ops; .arch riscv64; j =>no);
        if names.tests().next().is_some() {
            dynasm!(self.ops; .arch riscv64; .feature A
                ; =>named
                ; ld t4, [t6]
                ; sc.d t3, t4, [t6]
                ; j =>yes
            );
        }
        dynasm!(self.ops; .arch riscv64; =>meant);
        note(self.ops, strangers, MEMBER)?;
        if when {
            dynasm!(self.ops; .arch riscv64; j =>target);
        }
        dynasm!(self.ops; .arch riscv64; =>out);
        Ok(())
    }

    /// Goes to a label if t3 has the task that runs.
    fn is_own(&mut self, target: DynamicLabel) {
        let to = self.towards(target);
        dynasm!(self.ops; .arch riscv64; beq t3, tp, =>to);
        self.lead(to, target);
    }
}

/// What the place of a task has that is meant, from its address on.
const MEMBER: i32 = 1;
/// What is added to the place of a task that is to be looked at again: nothing that it had.
const FORGOTTEN: i32 = 2;

/// Puts the task, or that it is a member, into its place at t6, for which there is a reservation; what is there if
/// nothing can be noted now. t3 and t4 are lost.
fn note(ops: &mut Assembler, strangers: &Strangers, more: i32) -> Result<(), ProgramError> {
    let (open, lower) = parts(FAMILY, strangers.address + Strangers::OPEN)?;
    dynasm!(ops; .arch riscv64; .feature A
        ; lui t3, open
        ; ld t3, [t3, lower]
        ; addi t4, tp, more
        ; bnez t3, >put
        // The same if nobody writes meanwhile.
        ; ld t4, [t6]
        ; put:
        ; sc.d t3, t4, [t6]
    );
    Ok(())
}

/// Leaves a task's place among strangers in a register; the task is in another one. t3 is lost.
fn place(
    ops: &mut Assembler,
    (to, task): (u8, u8),
    strangers: &Strangers,
) -> Result<(), ProgramError> {
    const ABOVE: u32 = 64 - Strangers::BITS - Strangers::SHIFT;
    let (upper, lower) = parts(FAMILY, strangers.address)?;
    if lower != 0 {
        return Err(ProgramError::Table(FAMILY, 4096));
    }
    dynasm!(ops; .arch riscv64
        ; slli X(to), X(task), ABOVE
        ; srli X(to), X(to), ABOVE + Strangers::SHIFT
        ; lui t3, upper
        ; add X(to), X(to), t3
    );
    Ok(())
}

/// Lets the task in the first argument be looked at again. What was written before that is seen by whoever finds
/// the place so. t3 to t6 are lost.
pub(super) fn forget(ops: &mut Assembler, values: &Values) -> Result<(), ProgramError> {
    let Some(strangers) = &values.strangers else { return Ok(()) };
    place(ops, (T6, A0), strangers)?;
    dynasm!(ops; .arch riscv64; .feature A
        ; addi t4, zero, FORGOTTEN
        ; amoadd.d.rl zero, t4, [t6]
    );
    Ok(())
}

impl Branches for Tests<'_> {
    fn label(&mut self) -> DynamicLabel {
        self.ops.new_dynamic_label()
    }

    fn bind(&mut self, label: DynamicLabel) {
        dynasm!(self.ops; .arch riscv64; =>label);
    }

    fn jump(&mut self, target: DynamicLabel) {
        dynasm!(self.ops; .arch riscv64; j =>target);
    }

    fn quickly(&mut self, condition: &Condition, way: Way) -> Result<bool, ProgramError> {
        match &self.values.strangers {
            Some(strangers) if strangers.members == *condition && !self.looks_itself => {
                self.of_strangers(strangers, way).map(|()| true)
            }
            _ => Ok(false),
        }
    }

    fn test(&mut self, test: &Test, (target, when): Way) -> Result<(), ProgramError> {
        // What goes there by a jump reaches it.
        let jumps = match test {
            Test::Bytes { equal, .. } => *equal == when,
            Test::Text { .. } => when,
            _ => false,
        };
        let to = if jumps { target } else { self.towards(target) };
        self.one(test, (to, when))?;
        self.lead(to, target);
        Ok(())
    }
}

impl Tests<'_> {
    /// Makes a test, with a target in reach.
    fn one(&mut self, test: &Test, (target, when): Way) -> Result<(), ProgramError> {
        let Self { ops, values, .. } = self;
        match *test {
            Test::Number { operand, relation, value } => {
                let relation = if when { relation } else { relation.inverse() };
                let register = load(ops, values, operand)?;
                // A word of 4 bytes is sign-extended in a register, with or without a sign.
                let value = match operand.width() {
                    (4, _) => extended(value, 4, true),
                    _ => value,
                };
                constant(ops, T4, value.cast_signed());
                jump(ops, register, relation, operand.width().1, target);
            }
            Test::Caller { start, len, inside } => {
                let start = start.wrapping_add(values.slide);
                constant(ops, T4, start.cast_signed());
                dynasm!(ops; .arch riscv64; sub t3, ra, t4);
                constant(ops, T4, len.into());
                let relation = if inside == when { Relation::Less } else { Relation::GreaterEqual };
                jump(ops, T3, relation, false, target);
            }
            Test::Bytes { offset, ref bytes, equal } => {
                let differ = if equal == when { ops.new_dynamic_label() } else { target };
                task_bytes(ops, offset, bytes, differ)?;
                if equal == when {
                    dynasm!(ops; .arch riscv64; j =>target; =>differ);
                }
            }
            Test::Text { argument, ref bytes } => {
                let differ = if when { ops.new_dynamic_label() } else { target };
                // Behind its end may be nothing.
                pieces(ops, (A0 + argument, 0), of_text(bytes), (|_| 1, differ));
                if when {
                    dynasm!(ops; .arch riscv64; j =>target; =>differ);
                }
            }
            Test::Followed { pid, inside } => {
                load_word(ops, "a task's member", pid.into())?;
                let lower = family(ops, values)?;
                dynasm!(ops; .arch riscv64; lbu t4, [t4, lower]);
                if inside == when {
                    dynasm!(ops; .arch riscv64; bnez t4, =>target);
                } else {
                    dynasm!(ops; .arch riscv64; beqz t4, =>target);
                }
            }
        }
        Ok(())
    }
}

/// Leaves in t4 the address in the set of tasks that are followed of the process id in t3, less the offset
/// that is returned. t5 is lost.
fn family(ops: &mut Assembler, values: &Values) -> Result<i32, ProgramError> {
    const ABOVE: u32 = 64 - PID_BITS;
    let (upper, lower) = parts(FAMILY, values.followed.ok_or(ProgramError::NotFollowed)?)?;
    dynasm!(ops; .arch riscv64
        ; slli t4, t3, ABOVE
        ; srli t4, t4, ABOVE
        ; lui t5, upper
        ; add t4, t4, t5
    );
    Ok(lower)
}

/// Puts a task into the set, an argument or the one that runs, or takes it out. t3 to t5 are lost.
pub(super) fn follow(
    ops: &mut Assembler,
    (argument, pid, inside): (Option<u8>, u32, bool),
    values: &Values,
) -> Result<(), ProgramError> {
    match argument {
        None => load_word(ops, "a task's member", pid.into())?,
        Some(argument) => {
            let (upper, lower) = parts("a task's member", pid.into())?;
            dynasm!(ops; .arch riscv64; lui t3, upper; add t3, t3, X(A0 + argument); lw t3, [t3, lower]);
        }
    }
    let lower = family(ops, values)?;
    if inside {
        dynasm!(ops; .arch riscv64; addi t5, zero, 1; sb t5, [t4, lower]);
    } else {
        dynasm!(ops; .arch riscv64; sb zero, [t4, lower]);
    }
    Ok(())
}

/// The register with the whole value of an operand.
fn load(ops: &mut Assembler, values: &Values, operand: Operand) -> Result<u8, ProgramError> {
    match operand {
        Operand::Cpu => load_word(ops, "the CPU number's offset", values.cpu)?,
        Operand::Task(offset) => load_word(ops, "a task's member", offset.into())?,
        Operand::Duration => return Ok(DURATION),
        Operand::Argument { bytes, signed, .. } | Operand::Value { bytes, signed } => {
            let register = match operand {
                Operand::Argument { number, .. } => argument(ops, number),
                _ => A0,
            };
            let unused = 64 - 8 * u32::from(bytes.clamp(1, 8));
            match (bytes, signed) {
                (8, _) => return Ok(register),
                (4, _) => dynasm!(ops; .arch riscv64; sext.w t3, X(register)),
                (_, true) => dynasm!(ops; .arch riscv64
                    ; slli t3, X(register), unused
                    ; srai t3, t3, unused
                ),
                (_, false) => dynasm!(ops; .arch riscv64
                    ; slli t3, X(register), unused
                    ; srli t3, t3, unused
                ),
            }
        }
    }
    Ok(T3)
}

/// Compares a register with t4.
fn jump(ops: &mut Assembler, register: u8, relation: Relation, signed: bool, target: DynamicLabel) {
    let (a, b) = match relation {
        Relation::LessEqual | Relation::Greater => (T4, register),
        _ => (register, T4),
    };
    match (relation, signed) {
        (Relation::Equal, _) => dynasm!(ops; .arch riscv64; beq X(a), X(b), =>target),
        (Relation::NotEqual, _) => dynasm!(ops; .arch riscv64; bne X(a), X(b), =>target),
        (Relation::Less | Relation::Greater, true) => {
            dynasm!(ops; .arch riscv64; blt X(a), X(b), =>target);
        }
        (Relation::Less | Relation::Greater, false) => {
            dynasm!(ops; .arch riscv64; bltu X(a), X(b), =>target);
        }
        (Relation::LessEqual | Relation::GreaterEqual, true) => {
            dynasm!(ops; .arch riscv64; bge X(a), X(b), =>target);
        }
        (Relation::LessEqual | Relation::GreaterEqual, false) => {
            dynasm!(ops; .arch riscv64; bgeu X(a), X(b), =>target);
        }
        (Relation::Common, _) => {
            dynasm!(ops; .arch riscv64; and t4, X(a), X(b); bnez t4, =>target);
        }
        (Relation::NoneCommon, _) => {
            dynasm!(ops; .arch riscv64; and t4, X(a), X(b); beqz t4, =>target);
        }
    }
}

/// Goes to `differ` unless these bytes are at an offset of the task, as many at once as an aligned
/// load takes. Tasks are aligned themselves.
fn task_bytes(
    ops: &mut Assembler,
    offset: u32,
    bytes: &[Option<u8>],
    differ: DynamicLabel,
) -> Result<(), ProgramError> {
    let (upper, mut lower) = parts("a task's member", offset.into())?;
    dynasm!(ops; .arch riscv64; lui t3, upper; add t3, t3, tp);
    // All of them have to be in reach of the lower part.
    if lower >= 2048 - small(Condition::MAX_BYTES) {
        dynasm!(ops; .arch riscv64; addi t3, t3, lower);
        lower = 0;
    }
    let aligned = |at: u32| match offset.wrapping_add(at) {
        at if at.is_multiple_of(4) => 4,
        at if at.is_multiple_of(2) => 2,
        _ => 1,
    };
    pieces(ops, (T3, lower), bytes, (aligned, differ));
    Ok(())
}

/// The same from what a register points to, plus an offset; as many bytes at once at each of them as is said.
fn pieces(
    ops: &mut Assembler,
    (base, offset): (u8, i32),
    bytes: &[Option<u8>],
    (aligned, differ): (impl Fn(u32) -> usize, DynamicLabel),
) {
    let (mut rest, mut at) = (bytes, 0);
    while !rest.is_empty() {
        let most = aligned(at);
        let known: Vec<u8> = rest.iter().map_while(|byte| *byte).take(most).collect();
        let here = offset + i32::from(u8::try_from(at).unwrap_or(u8::MAX));
        let len = match known[..] {
            [a, b, c, d] => {
                let word = i32::from_le_bytes([a, b, c, d]);
                constant(ops, T5, word.into());
                dynasm!(ops; .arch riscv64; lw t4, [X(base), here]; bne t4, t5, =>differ);
                4
            }
            [a, b, ..] => {
                let word = u16::from_le_bytes([a, b]);
                constant(ops, T5, word.into());
                dynasm!(ops; .arch riscv64; lhu t4, [X(base), here]; bne t4, t5, =>differ);
                2
            }
            [a] => {
                constant(ops, T5, a.into());
                dynasm!(ops; .arch riscv64; lbu t4, [X(base), here]; bne t4, t5, =>differ);
                1
            }
            [] => {
                dynasm!(ops; .arch riscv64; lbu t4, [X(base), here]; beqz t4, =>differ);
                1
            }
        };
        rest = rest.get(len as usize..).unwrap_or_default();
        at += len;
    }
}
