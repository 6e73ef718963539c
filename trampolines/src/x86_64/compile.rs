//! Compiles the path that every hit takes.

use super::condition::{Tests, follow};
use super::count::{Told, count, count_down};
use super::marks::{mark, marked, unmark};
use super::nesting::{behind, nested};
use super::operands::{
    ABOVE_SPENT, ARGUMENTS, Assembler, ENDING, Operands, R10, RDI, RDX, disp, exchange,
};
use super::read::{finish, read};
use super::slow::slow;
use super::sort::{SAVED, begin, crowded, end as end_sorted, restore, sort};
use super::timed::{timed, untold};
use super::{Addressing, Values, callers};
use crate::branch::branch;
use crate::context::part;
use crate::displacement::at;
use crate::layout::{below, control};
use crate::marks::MarkIf;
use crate::program::{Code, Counts, Field, Last, Overflow, Point, Program, ProgramError, Read};
use crate::reads::Reads;
use dynasmrt::{DynasmApi, DynasmLabelApi, dynasm};

/// Makes a program.
///
/// Its entry, and its way to another function: `r10`, `r11` and the flags are free; the stack has a
/// return address on top (into the function, behind the site; or into a stub) and that of the
/// function below it. All else is kept.
///
/// Where a function without a site returns: as at a way to another function, with `r10` and `r11` of its caller's between the
/// two return addresses.
///
/// Its return: entered by a jump with the low half of the site's address in `ecx`. `rcx`, `rsi`,
/// `rdi`, `r8` to `r11` and the flags are free, as they are to a caller.
///
/// As a tracepoint's probe: as any function of C.
///
/// # Errors
/// When there can be no such program.
pub fn compile(
    program: &Program,
    overflow: Overflow,
    values: &Values,
) -> Result<Code, ProgramError> {
    program.check()?;
    let operands = Operands::new(program, overflow, values)?;
    let mut ops = Assembler::new(0);
    let mut reads = Reads::default();
    let ends = ops.new_dynamic_label();
    let point = program.point;
    let mut site = None;
    if point == Point::Probe {
        ops.extend(ENDBR);
    }
    let unmarked = match program.counts {
        Some(Counts::Mark(marks, going)) => Some((marks, going, ops.new_dynamic_label())),
        _ => None,
    };
    let not_meant = unmarked.map_or(ends, |(_, _, label)| label);
    let test = |ops: &mut Assembler| match (&program.condition, program.since) {
        (Some(condition), None) => {
            branch(&mut Tests { ops, values, point, timed: false }, condition, (not_meant, false))
        }
        _ => Ok(()),
    };
    if let Some(marks) = program.marked {
        marked(&mut ops, point, marks, ends)?;
    }
    if !program.nests_first() {
        test(&mut ops)?;
    }
    let nested = match program.nesting {
        Some(nesting) => Some(nested(&mut ops, point, nesting, ends)?),
        None => None,
    };
    if program.nests_first() {
        test(&mut ops)?;
    }
    let since = match program.since {
        Some(calls) => Some(timed(&mut ops, program, calls, values)?),
        None => None,
    };
    let (mut stop, mut others, mut elsewhere) = (None, None, None);
    match (program.counts, program.point) {
        (Some(Counts::Up(counters)), _) => count(&mut ops, counters, values)?,
        (Some(Counts::ByCaller(of)), _) => {
            elsewhere = Some(callers::count(&mut ops, of, values)?);
        }
        (Some(Counts::Down { counter, trap, .. }), point) => {
            let others = since.as_ref().map_or(ends, |since| since.none);
            let told = Told { point, saved: since.is_some() };
            stop = Some(count_down(&mut ops, (counter, trap), told, others)?);
        }
        // Whether a task is followed takes so few instructions that nobody is noted as a stranger.
        (Some(Counts::Nothing | Counts::Forget), _) => {}
        (Some(Counts::Follow { argument, pid, inside }), _) => {
            follow(&mut ops, (argument, pid, inside), values)?;
        }
        (Some(Counts::Sort(histograms, sorted)), _) => sort(&mut ops, histograms, sorted, values)?,
        (Some(Counts::Begin(histograms, calls)), _) => {
            others = Some(begin(&mut ops, histograms, calls, values)?);
        }
        (Some(Counts::End(calls, ended)), point) => {
            others = Some(end_sorted(&mut ops, point, (calls, ended))?);
        }
        (Some(Counts::Untold(calls)), _) => untold(&mut ops, calls)?,
        (Some(Counts::Mark(marks, going)), _) => mark(&mut ops, (marks, going), not_meant)?,
        (None, Point::Tail) if since.is_some() => tail(&mut ops, program, &operands, values)?,
        (None, Point::Entry | Point::Tail | Point::Beyond | Point::Probe) => {
            site = entry(&mut ops, program, &operands, values, &mut reads)?;
        }
        (None, Point::Return) => {
            if since.is_none() {
                dynasm!(ops; .arch x64; mov rsi, rax; mov rdi, rdx);
            }
            end(&mut ops, program, &operands, values)?;
            if since.is_none() {
                dynasm!(ops; .arch x64; mov rax, rsi; mov rdx, rdi);
            }
        }
    }
    let sorted = matches!(program.counts, Some(Counts::End(..)));
    if let Some(saved) = since.as_ref().or(others.as_ref().filter(|_| sorted)) {
        restore(&mut ops, point, saved, ends);
    }
    let ending = ops.offset().0;
    dynasm!(ops; .arch x64; =>ends; .bytes ENDING);
    if let Some((marks, going, label)) = unmarked
        && going != MarkIf::Never
        && (going == MarkIf::Known || program.condition.is_some())
    {
        dynasm!(ops; .arch x64; =>label);
        unmark(&mut ops, marks)?;
        dynasm!(ops; .arch x64; jmp =>ends);
    }
    if program.counts.is_none() {
        slow(&mut ops, &operands);
    }
    if let Some(others) = others.or(since) {
        crowded(&mut ops, &others, values)?;
    }
    if let Some(elsewhere) = elsewhere {
        callers::elsewhere(&mut ops, &elsewhere, values)?;
    }
    if let Some(nested) = nested {
        behind(&mut ops, &nested)?;
    }
    let load = finish(reads, &mut ops, values, pointer(point))?;
    let bytes = ops.finalize().map_err(|error| ProgramError::Assembler(error.to_string()))?;
    Ok(Code { bytes, endings: [ending].into_iter().chain(load).collect(), stop, site })
}

/// Leaves the control block, or its distance from the gs base, in r11.
pub(super) fn find_control(ops: &mut Assembler, values: &Values) -> Result<(), ProgramError> {
    match values.addressing {
        Addressing::PerCpu { distance } => {
            dynasm!(ops; .arch x64; mov r11, QWORD distance.cast_signed());
        }
        Addressing::Shared { number, cpus, table } => {
            let number = disp("the CPU number's offset", number)?;
            let cpus = disp("the number of CPUs", cpus)?;
            let table = disp("the table of control blocks", table)?;
            dynasm!(ops; .arch x64
                ; gs mov r11d, [DWORD number]
                ; cmp r11d, cpus
                ; jae >out
                ; mov r11, [r11 * 8 + table]
            );
        }
    }
    Ok(())
}

/// Reserves; leaves the end of the record in r10 and the old position in rax. [`slow`] says what else is lost.
pub(super) fn reserve(ops: &mut Assembler, operands: &Operands) {
    let Operands { size, info, overwrite, shared, rings, .. } = *operands;
    const { assert!(control::HEAD == 0) };
    dynasm!(ops; .arch x64; reserve:);
    if shared {
        dynasm!(ops; .arch x64; mov rax, [r11]);
    } else {
        dynasm!(ops; .arch x64; gs mov rax, [r11]);
    }
    dynasm!(ops; .arch x64
        ; test eax, ABOVE_SPENT
        ; jz >slow
        ; lea r10, [rax - size]
    );
    exchange(ops, shared, R10);
    dynasm!(ops; .arch x64
        ; jne <reserve
        ; movsxd r10, eax
    );
    dynasm!(ops; .arch x64; mov DWORD [r10 + (rings + at(below::INFO))], info);
    if overwrite {
        dynasm!(ops; .arch x64
            ; shr rax, 32
            ; mov [r10 + (rings - 1)], al
        );
    }
}

/// Task, pid and time. rax and rdx are lost.
pub(super) fn who_and_when(ops: &mut Assembler, values: &Values) -> Result<(), ProgramError> {
    let current = disp("current's offset", values.current)?;
    let pid = disp("the pid's offset", values.pid)?;
    let rings = values.rings;
    dynasm!(ops; .arch x64
        ; gs mov rdx, [DWORD current]
        ; mov [r10 + (rings + at(below::TASK))], rdx
        ; mov edx, [rdx + pid]
        ; mov [r10 + (rings + at(below::PID))], edx
        ; rdtsc
        ; mov [r10 + (rings + at(below::TIMESTAMP))], eax
        ; mov [r10 + (rings + at(below::TIMESTAMP) + 4)], edx
    );
    Ok(())
}

/// What an entry program may have in any register, by its number: pointers, above all. It is that of an argument that
/// was pushed, or of one that nobody needs.
const fn pointer(point: Point) -> u8 {
    if matches!(point, Point::Probe) { RDI } else { RDX }
}

/// Where an entry program finds what its function was given.
struct Given {
    /// See [`pointer`].
    pointer: u8,
    /// Bytes from the stack pointer to the function's return address.
    above: i32,
    /// The argument that `pointer` has.
    has: Option<u8>,
}

impl Given {
    /// The register that an argument is still in.
    fn register(&self, number: u8) -> Option<u8> {
        let register = ARGUMENTS.get(usize::from(number)).copied();
        register.filter(|&register| register != self.pointer)
    }

    /// Leaves an argument in `pointer`.
    fn load(&self, ops: &mut Assembler, number: u8) {
        let to = self.pointer;
        match (self.register(number), number.checked_sub(6)) {
            (Some(register), _) => dynasm!(ops; .arch x64; mov Rq(to), Rq(register)),
            // It was pushed last.
            (None, None) => dynasm!(ops; .arch x64; mov Rq(to), [rsp]),
            (None, Some(on_stack)) => {
                let from = self.above + 8 + 8 * i32::from(on_stack);
                dynasm!(ops; .arch x64; mov Rq(to), [rsp + from]);
            }
        }
    }
}

/// Memory along pointers that lead where they should. rax and what `given` has for pointers are lost.
fn known(ops: &mut Assembler, read: &Read, to: i32, given: &mut Given, linked: bool) {
    let (Last::Words { offset, words } | Last::Text { offset, words }) = read.last();
    // From the argument's own register, where it has one that is still what it was.
    let pointer = given.pointer;
    let first = match given.register(read.argument()) {
        Some(register) => register,
        None if given.has == Some(read.argument()) => pointer,
        None => {
            given.load(ops, read.argument());
            given.has = Some(read.argument());
            pointer
        }
    };
    if !read.hops().is_empty() {
        given.has = None;
    }
    if linked {
        dynasm!(ops; .arch x64; test Rq(first), Rq(first); jz >null);
    }
    let from = read.hops().iter().fold(first, |from, &hop| {
        dynasm!(ops; .arch x64; mov Rq(pointer), [Rq(from) + hop]);
        if linked {
            dynasm!(ops; .arch x64; test Rq(pointer), Rq(pointer); jz >null);
        }
        pointer
    });
    for word in 0..i32::from(words) {
        dynasm!(ops; .arch x64
            ; mov rax, [Rq(from) + (offset + 8 * word)]
            ; mov [r10 + (to - 8 * word)], rax
        );
    }
    if linked {
        dynasm!(ops; .arch x64; jmp >there; null:);
        for word in 0..i32::from(words) {
            dynasm!(ops; .arch x64; mov QWORD [r10 + (to - 8 * word)], 0);
        }
        dynasm!(ops; .arch x64; there:);
    }
}

/// The state of the CPU, to this displacement. rax and rdx are lost. Comparisons leave the flag of
/// interrupts as it is.
pub(super) fn context(ops: &mut Assembler, values: &Values, to: i32) -> Result<(), ProgramError> {
    let places = values.context.ok_or(ProgramError::Unknown(Field::Context))?;
    let current = disp("current's offset", values.current)?;
    let flags = disp("the offset of a task's flags", places.flags)?;
    let count = disp("the offset of the count of preemptions", places.preempt_count)?;
    const { assert!(part::MIGRATION == 0 && part::INTERRUPTS == 1) };
    dynasm!(ops; .arch x64
        ; pushfq
        ; pop rdx
        ; mov [r10 + to], dx
        ; gs mov rax, [DWORD current]
        ; mov edx, [rax + flags]
        ; mov [r10 + to + part::FLAGS], dx
    );
    if let Some(migration) = places.migration {
        let migration = disp("the offset of a task's bans on migration", migration)?;
        dynasm!(ops; .arch x64
            ; mov dl, [rax + migration]
            ; mov [r10 + to + part::MIGRATION], dl
        );
    } else {
        dynasm!(ops; .arch x64; mov BYTE [r10 + to + part::MIGRATION], 0);
    }
    dynasm!(ops; .arch x64
        ; gs mov edx, [DWORD count]
        ; mov [r10 + to + part::PREEMPT_COUNT], edx
    );
    if let Some(resched) = places.resched {
        let resched = disp("the offset of the bit that asks for a reschedule", resched)?;
        dynasm!(ops; .arch x64
            ; gs mov dl, [DWORD resched]
            ; mov [r10 + to + part::RESCHED], dl
        );
    }
    if let Some(lazy) = places.lazy {
        let lazy = disp("the offset of a task's lazy flag", lazy)?;
        dynasm!(ops; .arch x64
            ; mov dl, [rax + lazy]
            ; mov [r10 + to + part::LAZY], dl
        );
    }
    if let Some(softirq) = places.softirq {
        let second = disp("the offset of a task's softirqs", softirq.wrapping_add(1))?;
        dynasm!(ops; .arch x64
            ; mov dl, [rax + second]
            ; mov [r10 + to + part::SOFTIRQ], dl
        );
    }
    Ok(())
}

/// Records an entry, or what has the stack of one. Where what tells the site belongs, if nothing else does.
fn entry(
    ops: &mut Assembler,
    program: &Program,
    operands: &Operands,
    values: &Values,
    reads: &mut Reads,
) -> Result<Option<usize>, ProgramError> {
    // Bytes on the stack beside rax and rdx, and below the return address into the stub.
    let mut more = 0;
    let kept = if program.point == Point::Beyond { BEYOND } else { 0 };
    let in_place = operands.in_place;
    if program.fields.contains(&Field::Target) {
        dynasm!(ops; .arch x64; push r11);
        more = 8;
    }
    if !in_place {
        dynasm!(ops; .arch x64
            ; push rax
            ; push rdx
        );
    }
    let above = if in_place { 0 } else { more + kept + 24 };
    let mut given = Given { pointer: pointer(program.point), above, has: None };
    find_control(ops, values)?;
    reserve(ops, operands);
    dynasm!(ops; .arch x64
        ; mov Rq(given.pointer), [rsp + above]
        ; mov [r10 + (values.rings + at(below::CALLER))], Rd(given.pointer)
    );
    // The state of the CPU comes last: rdx is lost.
    let is_context = |(_, (field, _)): &(usize, (Field, usize))| *field == Field::Context;
    let (last, places): (Vec<_>, Vec<_>) = program.places().enumerate().partition(is_context);
    for (index, (field, below)) in places.into_iter().chain(last) {
        let to = values.rings + at(below);
        let keeps = match field {
            Field::Known(_)
            | Field::Linked(_)
            | Field::Failed
            | Field::Variable(_)
            | Field::Task { .. } => true,
            Field::Argument(number) => given.register(number).is_some(),
            _ => false,
        };
        if !keeps {
            given.has = None;
        }
        match field {
            Field::Stack if more == 0 => dynasm!(ops; .arch x64; mov [r10 + to], rsp),
            Field::Stack => {
                dynasm!(ops; .arch x64; lea rdx, [rsp + more]; mov [r10 + to], rdx);
            }
            Field::Target => dynasm!(ops; .arch x64; mov rdx, [rsp + 16]; mov [r10 + to], rdx),
            Field::Argument(number) => {
                let register = given.register(number).unwrap_or_else(|| {
                    given.load(ops, number);
                    given.pointer
                });
                dynasm!(ops; .arch x64; mov [r10 + to], Rq(register));
            }
            // Reads that fail come after it.
            Field::Failed => dynasm!(ops; .arch x64; mov QWORD [r10 + to], 0),
            Field::Context => context(ops, values, to)?,
            Field::Read(wanted) => {
                given.load(ops, wanted.argument());
                read(reads, ops, (&wanted, given.pointer), (index, to));
            }
            Field::Known(wanted) => known(ops, &wanted, to, &mut given, false),
            Field::Linked(wanted) => known(ops, &wanted, to, &mut given, true),
            Field::Variable(link) => {
                let at = disp("a variable", link.wrapping_add(values.slide))?;
                dynasm!(ops; .arch x64; mov rax, [DWORD at]; mov [r10 + to], rax);
            }
            Field::Task { offset, words } => {
                let current = disp("current's offset", values.current)?;
                let from = disp("a task's offset", offset.into())?;
                for word in (0..words).map(|word| 8 * i32::from(word)) {
                    dynasm!(ops; .arch x64
                        ; gs mov rax, [DWORD current]
                        ; mov rax, [rax + from.wrapping_add(word)]
                        ; mov [r10 + (to - word)], rax
                    );
                }
            }
            Field::Value | Field::Duration => {
                return Err(ProgramError::Field(field, program.point));
            }
        }
    }
    reads.failed = program.below(Field::Failed).map(|below| values.rings + at(below));
    who_and_when(ops, values)?;
    let site = values.rings + at(below::SITE);
    if in_place {
        dynasm!(ops; .arch x64; mov DWORD [r10 + site], NOWHERE);
        let immediate = ops.offset().0 - size_of_val(&NOWHERE);
        dynasm!(ops; .arch x64; out:);
        return Ok(Some(immediate));
    }
    dynasm!(ops; .arch x64
        ; mov rdx, [rsp + more + 16]
        ; mov [r10 + site], edx
        ; out:
        ; pop rdx
        ; pop rax
    );
    if more != 0 {
        dynasm!(ops; .arch x64; pop r11);
    }
    Ok(None)
}

/// In place of what tells the site, until that is known. Not 0, which no record has.
const NOWHERE: i32 = 1;

/// With what is returned in rsi and rdi, where it stays, and the duration in r9, if it is known.
fn end(
    ops: &mut Assembler,
    program: &Program,
    operands: &Operands,
    values: &Values,
) -> Result<(), ProgramError> {
    find_control(ops, values)?;
    reserve(ops, operands);
    dynasm!(ops; .arch x64
        ; mov rdx, [rsp]
        ; mov [r10 + (values.rings + at(below::CALLER))], edx
    );
    for (field, below) in program.places() {
        let to = values.rings + at(below);
        match field {
            Field::Stack => dynasm!(ops; .arch x64; mov [r10 + to], rsp),
            Field::Value => dynasm!(ops; .arch x64; mov [r10 + to], rsi),
            Field::Duration => dynasm!(ops; .arch x64; mov [r10 + to], r9),
            Field::Failed => dynasm!(ops; .arch x64; mov QWORD [r10 + to], 0),
            Field::Context => context(ops, values, to)?,
            Field::Argument(_)
            | Field::Target
            | Field::Read(_)
            | Field::Known(_)
            | Field::Linked(_)
            | Field::Variable(_)
            | Field::Task { .. } => {
                return Err(ProgramError::Field(field, Point::Return));
            }
        }
    }
    who_and_when(ops, values)?;
    dynasm!(ops; .arch x64
        ; mov [r10 + (values.rings + at(below::SITE))], ecx
        ; out:
    );
    Ok(())
}

/// Records a call that is left for another function, behind [`timed`].
fn tail(
    ops: &mut Assembler,
    program: &Program,
    operands: &Operands,
    values: &Values,
) -> Result<(), ProgramError> {
    find_control(ops, values)?;
    reserve(ops, operands);
    dynasm!(ops; .arch x64
        ; mov rdx, [rsp + (SAVED + 8)]
        ; mov [r10 + (values.rings + at(below::CALLER))], edx
    );
    for (field, below) in program.places() {
        let to = values.rings + at(below);
        match field {
            // As if nothing but rax and rdx were saved.
            Field::Stack => dynasm!(ops; .arch x64
                ; lea rdx, [rsp + (SAVED - 16)]
                ; mov [r10 + to], rdx
            ),
            Field::Target => dynasm!(ops; .arch x64; mov rdx, [rsp]; mov [r10 + to], rdx),
            Field::Duration => dynasm!(ops; .arch x64; mov [r10 + to], r9),
            Field::Failed => dynasm!(ops; .arch x64; mov QWORD [r10 + to], 0),
            Field::Context => context(ops, values, to)?,
            Field::Value
            | Field::Argument(_)
            | Field::Read(_)
            | Field::Known(_)
            | Field::Linked(_)
            | Field::Variable(_)
            | Field::Task { .. } => {
                return Err(ProgramError::Field(field, program.point));
            }
        }
    }
    who_and_when(ops, values)?;
    dynasm!(ops; .arch x64
        ; mov rdx, [rsp + SAVED]
        ; mov [r10 + (values.rings + at(below::SITE))], edx
        ; out:
    );
    Ok(())
}

/// The stub at `address` of the return of a function without a site: calls a `program` of [`Point::Beyond`] with what its caller
/// may have kept in `r10` and `r11` saved, and returns by `leave`, the guest's own instruction. What the program returns to
/// ([`BEYOND_CALL`]) names it. `None` when the program is out of reach.
#[must_use]
pub fn beyond_stub(address: u64, program: u64, leave: [u8; 5]) -> Option<[u8; 18]> {
    let mut code = [0; 18];
    // push r10; push r11
    code[..4].copy_from_slice(&[0x41, 0x52, 0x41, 0x53]);
    code[4..9].copy_from_slice(&jump(0xe8, address.wrapping_add(4), program)?);
    // pop r11; pop r10
    code[9..13].copy_from_slice(&[0x41, 0x5b, 0x41, 0x5a]);
    code[13..].copy_from_slice(&leave);
    Some(code)
}

/// Bytes from a [`beyond_stub`] to where its call returns to.
pub const BEYOND_CALL: u64 = 9;
/// Bytes from a [`beyond_stub`] to where it returns.
pub const BEYOND_RETURN: u64 = 13;
/// Bytes that it has on the stack.
pub(super) const BEYOND: i32 = 16;

/// `endbr64`: what kernels call through pointers begins with it.
const ENDBR: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];

/// Bytes from a program of [`Point::Probe`] to where a direct call may enter it. The address of that tells the site.
pub const PROBE_CALLED: u64 = ENDBR.len() as u64;

pub(super) fn jump(opcode: u8, from: u64, to: u64) -> Option<[u8; 5]> {
    let distance = to.wrapping_sub(from.wrapping_add(5)).cast_signed();
    let [a, b, c, d] = i32::try_from(distance).ok()?.to_le_bytes();
    Some([opcode, a, b, c, d])
}

/// The stub at `address` to which the return at `site` jumps: names it and goes on to `program`.
/// `None` when that is out of reach.
#[must_use]
pub fn return_stub(address: u64, site: u64, program: u64) -> Option<[u8; 10]> {
    let mut code = [0; 10];
    #[allow(clippy::cast_possible_truncation, reason = "the low half")]
    let site = (site as u32).to_le_bytes();
    code[0] = 0xb9; // mov ecx, imm32
    code[1..5].copy_from_slice(&site);
    code[5..].copy_from_slice(&jump(0xe9, address.wrapping_add(5), program)?);
    Some(code)
}

/// The stub at `address` to which a tail jump goes: calls `program`, then jumps on to `target`.
/// What it returns to names it. `None` when either is out of reach.
#[must_use]
pub fn tail_stub(address: u64, program: u64, target: u64) -> Option<[u8; 10]> {
    let mut code = [0; 10];
    code[..5].copy_from_slice(&jump(0xe8, address, program)?);
    code[5..].copy_from_slice(&jump(0xe9, address.wrapping_add(5), target)?);
    Some(code)
}

/// The stub at `address` for a tail jump through the register with this number, which goes on by
/// `jump_on`: calls a `program` that records where to ([`Field::Target`]) and keeps `r11`. What it
/// returns to ([`INDIRECT_CALL`]) names it. `None` when the program is out of reach.
#[must_use]
pub fn indirect_stub(address: u64, program: u64, register: u8, jump_on: &[u8]) -> Option<Vec<u8>> {
    const CALL: u64 = 3;
    // mov r11, register
    let mut code = vec![0x49 | register >> 3 << 2, 0x89, 0xc3 | (register & 7) << 3];
    code.extend(jump(0xe8, address.wrapping_add(CALL), program)?);
    if register == R10 {
        // Programs use it: mov r10, r11
        code.extend(RESTORE);
    }
    code.extend(jump_on);
    Some(code)
}

const RESTORE: [u8; 3] = [0x4d, 0x89, 0xda];

/// Bytes from an [`indirect_stub`] to where its call returns to.
pub const INDIRECT_CALL: u64 = 8;

/// Bytes from an [`indirect_stub`] to the jump with which it goes on.
#[must_use]
pub const fn indirect_jump(register: u8) -> u64 {
    INDIRECT_CALL + if register == R10 { RESTORE.len() as u64 } else { 0 }
}
