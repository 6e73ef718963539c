//! Compiles how deep a call is nested.

use super::marks::BELOW;
use super::operands::{Assembler, disp};
use crate::nesting::{Call, NESTS, Nesting};
use crate::program::{Point, ProgramError};
use dynasmrt::{DynamicLabel, DynasmApi, DynasmLabelApi, dynasm};

/// What comes behind the program's ending.
pub(super) struct Behind {
    nesting: Nesting,
    point: Point,
    kind: Kind,
    /// Of calls that are not meant.
    ends: DynamicLabel,
}

enum Kind {
    /// The first level is not free.
    Taken {
        from: DynamicLabel,
        to: DynamicLabel,
    },
    /// Something that may be left over.
    Above(DynamicLabel),
    /// A jump has to be gone on with as it was.
    Jump(DynamicLabel),
    Nothing,
}

/// Displacement of a level's call in the row in r11.
fn level(nesting: Nesting, number: u8) -> Result<i32, ProgramError> {
    disp(NESTS, nesting.address + Nesting::ROWS + 8 * (u64::from(number) - 1))
}

/// Leaves in r11 where the row of the stack is, from the first row, with r11 saved at a jump.
fn row(ops: &mut Assembler, point: Point, nesting: Nesting) {
    let row = nesting.row_bits();
    let shift = i8::try_from(u32::from(nesting.stack_bits) - row).unwrap_or(0);
    let mask = ((1_i32 << Nesting::BITS) - 1) << row;
    // The stack pointer at the function's entry.
    match point {
        Point::Entry => dynasm!(ops; .arch x64; lea r11, [rsp + 8]),
        Point::Tail => dynasm!(ops; .arch x64; lea r11, [rsp + 16]),
        Point::Return | Point::Probe => dynasm!(ops; .arch x64; mov r11, rsp),
        Point::Beyond => dynasm!(ops; .arch x64; lea r11, [rsp + BELOW]),
    }
    dynasm!(ops; .arch x64; shr r11, shift; and r11d, mask);
}

/// Goes on at `ends` if the call is not meant. r10, r11 and the flags are lost; at a jump r10 and the flags.
pub(super) fn nested(
    ops: &mut Assembler,
    point: Point,
    nesting: Nesting,
    ends: DynamicLabel,
) -> Result<Behind, ProgramError> {
    let meant = ops.new_dynamic_label();
    let kind = match point {
        Point::Entry if nesting.call == Call::Fresh => fresh(ops, nesting, ends)?,
        Point::Entry => enter(ops, nesting, meant, ends)?,
        Point::Tail => {
            let out = ops.new_dynamic_label();
            dynasm!(ops; .arch x64; push r11);
            row(ops, point, nesting);
            let stays = nesting.call != Call::Ends;
            if nesting.depth.is_none() {
                let first = level(nesting, 1)?;
                dynasm!(ops; .arch x64
                    ; mov r10, [r11 + first]
                    ; sub r10, rsp
                    ; sub r10, 16
                );
                if !stays {
                    clear_own(ops, first);
                }
                dynasm!(ops; .arch x64
                    ; cmp r10, nesting.stack()
                    ; jae =>out
                    ; =>meant
                );
            } else {
                dynasm!(ops; .arch x64; lea r10, [rsp + 16]);
                find(ops, nesting, (out, meant))?;
            }
            dynasm!(ops; .arch x64; pop r11);
            Kind::Jump(out)
        }
        Point::Probe => return Err(ProgramError::Nesting("is not for tracepoints", point)),
        Point::Return | Point::Beyond => {
            row(ops, point, nesting);
            if nesting.depth.is_none() {
                let above = ops.new_dynamic_label();
                let first = level(nesting, 1)?;
                from_own(ops, point, first);
                clear_own(ops, first);
                dynasm!(ops; .arch x64
                    ; cmp r10, nesting.stack()
                    ; jae =>above
                    ; =>meant
                );
                Kind::Above(above)
            } else {
                let above = ops.new_dynamic_label();
                match point {
                    Point::Beyond => dynasm!(ops; .arch x64; lea r10, [rsp + BELOW]),
                    _ => dynasm!(ops; .arch x64; mov r10, rsp),
                }
                find(ops, nesting, (above, meant))?;
                Kind::Above(above)
            }
        }
    };
    Ok(Behind { nesting, point, kind, ends })
}

/// Leaves in r10 how far a level's call is above that which returns, and in the flags whether it is that.
fn from_own(ops: &mut Assembler, point: Point, level: i32) {
    dynasm!(ops; .arch x64; mov r10, [r11 + level]; sub r10, rsp);
    if point == Point::Beyond {
        dynasm!(ops; .arch x64; sub r10, BELOW);
    }
}

/// If the flags say that the level is the call's own, ends it.
fn clear_own(ops: &mut Assembler, level: i32) {
    dynasm!(ops; .arch x64; jne >other; mov QWORD [r11 + level], 0; other:);
}

/// Ends the call with the stack pointer in r10, with all levels from the outermost one on that it has, as far as they
/// do not stay.
fn find(
    ops: &mut Assembler,
    nesting: Nesting,
    (none, meant): (DynamicLabel, DynamicLabel),
) -> Result<(), ProgramError> {
    let levels = 1..=nesting.levels();
    let found: Vec<_> = levels.clone().map(|_| ops.new_dynamic_label()).collect();
    let stays = |number| match nesting.call {
        Call::GoesOn => true,
        Call::MayGoOn => number == 1,
        _ => false,
    };
    for (number, &found) in levels.clone().zip(&found) {
        let level = level(nesting, number)?;
        let to = if stays(number) { meant } else { found };
        dynasm!(ops; .arch x64; cmp [r11 + level], r10; je =>to);
    }
    dynasm!(ops; .arch x64; jmp =>none);
    clear(ops, nesting, levels.zip(found).filter(|&(number, _)| !stays(number)))?;
    dynasm!(ops; .arch x64; =>meant);
    Ok(())
}

/// Empties levels, from that on to whose label a jump leads.
fn clear(
    ops: &mut Assembler,
    nesting: Nesting,
    levels: impl Iterator<Item = (u8, DynamicLabel)>,
) -> Result<(), ProgramError> {
    for (number, label) in levels {
        let level = level(nesting, number)?;
        dynasm!(ops; .arch x64; =>label; mov QWORD [r11 + level], 0);
    }
    Ok(())
}

/// Compares how far a level's call is above that which is entered with the length of a stack: it is open if that is
/// below.
fn compare(ops: &mut Assembler, nesting: Nesting, number: u8) -> Result<(), ProgramError> {
    let level = level(nesting, number)?;
    dynasm!(ops; .arch x64
        ; mov r10, [r11 + level]
        ; sub r10, rsp
        ; sub r10, 8
        ; cmp r10, nesting.stack()
    );
    Ok(())
}

fn enter(
    ops: &mut Assembler,
    nesting: Nesting,
    meant: DynamicLabel,
    ends: DynamicLabel,
) -> Result<Kind, ProgramError> {
    row(ops, Point::Entry, nesting);
    let is_root = nesting.call.is_root();
    let Some(depth) = nesting.depth else {
        compare(ops, nesting, 1)?;
        if !is_root {
            dynasm!(ops; .arch x64; jae =>ends; =>meant);
            return Ok(Kind::Nothing);
        }
        dynasm!(ops; .arch x64; jb =>meant);
        let taken = begin(ops, nesting)?;
        dynasm!(ops; .arch x64; =>meant);
        return Ok(taken);
    };
    let cleared: Vec<_> = (1..=depth).map(|_| ops.new_dynamic_label()).collect();
    if let (Call::Root { again: true }, Some(&first)) = (nesting.call, cleared.first()) {
        let level = level(nesting, 1)?;
        dynasm!(ops; .arch x64; lea r10, [rsp + 8]; cmp [r11 + level], r10; je =>first);
    }
    // Most calls are too deep. What a function goes on in is deeper, as what it calls.
    compare(ops, nesting, depth)?;
    dynasm!(ops; .arch x64; jb =>ends);
    let mut kind = Kind::Nothing;
    for (number, &deeper) in (1..=depth).zip(&cleared) {
        let next = ops.new_dynamic_label();
        if number < depth {
            compare(ops, nesting, number)?;
            dynasm!(ops; .arch x64; jb =>next);
        }
        match number {
            1 if is_root => kind = begin(ops, nesting)?,
            1 => dynasm!(ops; .arch x64; jmp =>ends),
            _ => {
                let level = level(nesting, number)?;
                own(ops, nesting, 0);
                dynasm!(ops; .arch x64; mov [r11 + level], r10);
            }
        }
        if number > 1 || is_root {
            dynasm!(ops; .arch x64; jmp =>deeper);
        }
        dynasm!(ops; .arch x64; =>next);
    }
    clear(ops, nesting, (2..=depth).zip(cleared.iter().copied()))?;
    if let Some(&last) = cleared.last() {
        dynasm!(ops; .arch x64; =>last);
    }
    dynasm!(ops; .arch x64; =>meant);
    Ok(kind)
}

/// Empties the row if what it has is of this very stack.
fn fresh(ops: &mut Assembler, nesting: Nesting, ends: DynamicLabel) -> Result<Kind, ProgramError> {
    row(ops, Point::Entry, nesting);
    let stack = nesting.stack();
    let first = level(nesting, 1)?;
    dynasm!(ops; .arch x64
        ; mov r10, [r11 + first]
        ; sub r10, rsp
        ; add r10, stack - 8
        ; cmp r10, 2 * stack
        ; jae =>ends
    );
    for number in 1..=nesting.levels() {
        let level = level(nesting, number)?;
        dynasm!(ops; .arch x64; mov QWORD [r11 + level], 0);
    }
    Ok(Kind::Nothing)
}

/// Leaves in r10 what a level has for the call that is entered. So many bytes are on the stack.
fn own(ops: &mut Assembler, nesting: Nesting, more: i32) {
    let less = i32::from(nesting.call.less());
    dynasm!(ops; .arch x64; lea r10, [rsp + (8 + more - less)]);
}

/// Begins the first level. Another stack may have the same row.
fn begin(ops: &mut Assembler, nesting: Nesting) -> Result<Kind, ProgramError> {
    let [from, to] = [(); 2].map(|()| ops.new_dynamic_label());
    let first = level(nesting, 1)?;
    dynasm!(ops; .arch x64
        ; push rax
        ; xor eax, eax
    );
    own(ops, nesting, 8);
    dynasm!(ops; .arch x64
        ; lock cmpxchg [r11 + first], r10
        ; pop rax
        ; jne =>from
        ; =>to
    );
    Ok(Kind::Taken { from, to })
}

/// What is seldom done.
pub(super) fn behind(ops: &mut Assembler, behind: &Behind) -> Result<(), ProgramError> {
    let Behind { nesting, point, ref kind, ends } = *behind;
    let stack = nesting.stack();
    let first = level(nesting, 1)?;
    match *kind {
        Kind::Taken { from, to } => {
            let crowded = disp(NESTS, nesting.address + Nesting::CROWDED)?;
            dynasm!(ops; .arch x64
                ; =>from
                ; mov r10, [r11 + first]
                ; sub r10, rsp
                ; add r10, stack
                ; cmp r10, stack + 8
                ; jae >others
                // Of this very stack, and below: left over.
            );
            own(ops, nesting, 0);
            dynasm!(ops; .arch x64
                ; mov [r11 + first], r10
                ; jmp =>to
                ; others:
                ; lock inc QWORD [DWORD crowded]
                ; jmp =>ends
            );
        }
        // Of this very stack and below the function that ends now: left over.
        Kind::Above(label) => {
            dynasm!(ops; .arch x64; =>label);
            if nesting.depth.is_some() {
                from_own(ops, point, first);
            }
            dynasm!(ops; .arch x64; add r10, stack; jnc =>ends);
            let levels: Vec<_> =
                (1..=nesting.levels()).map(|number| (number, ops.new_dynamic_label())).collect();
            clear(ops, nesting, levels.into_iter())?;
            dynasm!(ops; .arch x64; jmp =>ends);
        }
        Kind::Jump(out) => dynasm!(ops; .arch x64; =>out; pop r11; jmp =>ends),
        Kind::Nothing => {}
    }
    Ok(())
}
