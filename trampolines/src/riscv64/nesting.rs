//! Compiles how deep a call is nested. There are no tail calls: a function that goes on in another one ends where that
//! does.

use super::operands::numbers::{T2, T3, T4, T5};
use super::operands::{Assembler, Word, parts, take};
use crate::nesting::{Call, NESTS, Nesting};
use crate::program::{Point, ProgramError};
use dynasmrt::{DynamicLabel, DynasmApi, DynasmLabelApi, dynasm};

/// Goes on at `leave` if the call is not meant. t2 to t5 are lost.
pub(super) fn nested(
    ops: &mut Assembler,
    point: Point,
    nesting: Nesting,
    leave: DynamicLabel,
) -> Result<(), ProgramError> {
    row(ops, nesting)?;
    match (point, nesting.depth) {
        (Point::Return | Point::Beyond, None) => left(ops, nesting, leave),
        (Point::Return | Point::Beyond, Some(_)) => left_level(ops, nesting, leave),
        (Point::Entry, _) if nesting.call == Call::Fresh => fresh(ops, nesting, leave),
        (Point::Entry, None) => entered(ops, nesting, leave)?,
        (Point::Entry, Some(depth)) => entered_level(ops, (nesting, depth), leave)?,
        (Point::Tail | Point::Probe, _) => {
            return Err(ProgramError::Nesting("is not for jumps or tracepoints", point));
        }
    }
    Ok(())
}

/// Bytes from what t2 has to a level.
fn level(number: u8) -> i32 {
    ROWS + 8 * (i32::from(number) - 1)
}

/// Bytes before the rows.
const ROWS: i32 = 64;
const _: () = assert!(Nesting::ROWS == 64);

/// Leaves where the row of the stack is in t2, from the first row to the table. t3 is lost.
fn row(ops: &mut Assembler, nesting: Nesting) -> Result<(), ProgramError> {
    // A multiple of a page: there is no lower part.
    let (upper, _) = parts(NESTS, nesting.address)?;
    let (bits, row) = (u32::from(nesting.stack_bits), nesting.row_bits());
    dynasm!(ops; .arch riscv64
        ; srli t2, sp, bits
        ; slli t2, t2, 64 - Nesting::BITS
        ; srli t2, t2, 64 - Nesting::BITS - row
        ; lui t3, upper
        ; add t2, t2, t3
    );
    Ok(())
}

/// Leaves in t3 how far a level's call is above this one, and 0 in t4 where it is open: of this stack and not below.
fn above(ops: &mut Assembler, nesting: Nesting, number: u8) {
    let bits = u32::from(nesting.stack_bits);
    dynasm!(ops; .arch riscv64
        ; ld t3, [t2, level(number)]
        ; sub t3, t3, sp
        ; srli t4, t3, bits
    );
}

fn entered(ops: &mut Assembler, nesting: Nesting, leave: DynamicLabel) -> Result<(), ProgramError> {
    let meant = ops.new_dynamic_label();
    above(ops, nesting, 1);
    dynasm!(ops; .arch riscv64; beqz t4, =>meant);
    if nesting.call.is_root() {
        own(ops, nesting);
        begin(ops, nesting, leave)?;
    } else {
        // A branch does not reach the end of a long program.
        dynasm!(ops; .arch riscv64; j =>leave);
    }
    dynasm!(ops; .arch riscv64; =>meant);
    Ok(())
}

fn entered_level(
    ops: &mut Assembler,
    (nesting, depth): (Nesting, u8),
    leave: DynamicLabel,
) -> Result<(), ProgramError> {
    let room = ops.new_dynamic_label();
    let is_root = nesting.call.is_root();
    let cleared: Vec<_> = (1..=depth).map(|_| ops.new_dynamic_label()).collect();
    if let (Call::Root { again: true }, Some(&first)) = (nesting.call, cleared.first()) {
        dynasm!(ops; .arch riscv64; ld t3, [t2, level(1)]; beq t3, sp, =>first);
    }
    // Most calls are too deep. What a function goes on in is deeper, as what it calls.
    above(ops, nesting, depth);
    dynasm!(ops; .arch riscv64; bnez t4, =>room; j =>leave; =>room);
    own(ops, nesting);
    for (number, &deeper) in (1..=depth).zip(&cleared) {
        let next = ops.new_dynamic_label();
        if number < depth {
            above(ops, nesting, number);
            dynasm!(ops; .arch riscv64; beqz t4, =>next);
        }
        match number {
            1 if is_root => begin(ops, nesting, leave)?,
            1 => dynasm!(ops; .arch riscv64; j =>leave),
            _ => dynasm!(ops; .arch riscv64; sd t5, [t2, level(number)]),
        }
        if number > 1 || is_root {
            dynasm!(ops; .arch riscv64; j =>deeper);
        }
        dynasm!(ops; .arch riscv64; =>next);
    }
    clear(ops, (2..=depth).zip(cleared.iter().copied()));
    if let Some(&last) = cleared.last() {
        dynasm!(ops; .arch riscv64; =>last);
    }
    Ok(())
}

/// Empties levels, from that on to whose label a jump leads.
fn clear(ops: &mut Assembler, levels: impl Iterator<Item = (u8, DynamicLabel)>) {
    for (number, label) in levels {
        dynasm!(ops; .arch riscv64; =>label; sd zero, [t2, level(number)]);
    }
}

/// Leaves in t5 what a level has for the call that is entered.
fn own(ops: &mut Assembler, nesting: Nesting) {
    let less = i32::from(nesting.call.less());
    dynasm!(ops; .arch riscv64; addi t5, sp, -less);
}

/// Begins the first level with t5. Another stack may have the same row.
fn begin(ops: &mut Assembler, nesting: Nesting, leave: DynamicLabel) -> Result<(), ProgramError> {
    let [others, taken] = [(); 2].map(|()| ops.new_dynamic_label());
    const { assert!(Nesting::CROWDED == 0) };
    let (upper, _) = parts(NESTS, nesting.address)?;
    let bits = u32::from(nesting.stack_bits);
    dynasm!(ops; .arch riscv64; addi t2, t2, ROWS);
    take(ops, &Word { at: T2, own: T5, found: T3, spare: T4 }, taken);
    dynasm!(ops; .arch riscv64; .feature A
        // Of this very stack, and below: left over.
        ; sub t3, sp, t3
        ; srli t3, t3, bits
        ; bnez t3, =>others
        ; sd t5, [t2]
        ; j =>taken
        ; =>others
        ; lui t3, upper
        ; addi t4, zero, 1
        ; amoadd.d zero, t4, [t3]
        ; j =>leave
        ; =>taken
        ; addi t2, t2, -ROWS
    );
    Ok(())
}

/// Empties the row if what it has is of this very stack.
fn fresh(ops: &mut Assembler, nesting: Nesting, leave: DynamicLabel) {
    let own = ops.new_dynamic_label();
    above(ops, nesting, 1);
    dynasm!(ops; .arch riscv64; beqz t4, =>own);
    left_over(ops, nesting, leave);
    dynasm!(ops; .arch riscv64; =>own);
    empty(ops, nesting);
}

fn left(ops: &mut Assembler, nesting: Nesting, leave: DynamicLabel) {
    let [own, meant] = [(); 2].map(|()| ops.new_dynamic_label());
    above(ops, nesting, 1);
    dynasm!(ops; .arch riscv64; beqz t3, =>own; beqz t4, =>meant);
    left_over(ops, nesting, leave);
    dynasm!(ops; .arch riscv64; =>own; sd zero, [t2, level(1)]; =>meant);
}

/// Goes on at `leave`, with an empty row if the first level is of this very stack and below the function that ends now,
/// by what t3 says of it: left over.
fn left_over(ops: &mut Assembler, nesting: Nesting, leave: DynamicLabel) {
    let not = ops.new_dynamic_label();
    let bits = u32::from(nesting.stack_bits);
    dynasm!(ops; .arch riscv64
        ; sub t3, zero, t3
        ; srli t3, t3, bits
        ; bnez t3, =>not
    );
    empty(ops, nesting);
    dynasm!(ops; .arch riscv64; =>not; j =>leave);
}

fn empty(ops: &mut Assembler, nesting: Nesting) {
    for number in 1..=nesting.levels() {
        dynasm!(ops; .arch riscv64; sd zero, [t2, level(number)]);
    }
}

/// Ends the call with all levels from the outermost one on that it has: that of what it has gone on in is deeper.
fn left_level(ops: &mut Assembler, nesting: Nesting, leave: DynamicLabel) {
    let levels = 1..=nesting.levels();
    let found: Vec<_> = levels.clone().map(|_| ops.new_dynamic_label()).collect();
    for (number, &found) in levels.clone().zip(&found) {
        dynasm!(ops; .arch riscv64; ld t3, [t2, level(number)]; beq t3, sp, =>found);
    }
    above(ops, nesting, 1);
    left_over(ops, nesting, leave);
    clear(ops, levels.zip(found));
}
