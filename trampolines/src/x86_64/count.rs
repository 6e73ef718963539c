//! Compiles programs that count instead of recording.
//!
//! One locked instruction counts, so an interruption after the CPU's number was read loses no call:
//! a task that was migrated then counts in the table of its former CPU.

use super::Values;
use super::operands::{Assembler, disp};
use super::sort::SAVED;
use crate::program::{Counters, Point, ProgramError, STOPS};
use dynasmrt::{DynamicLabel, DynasmApi, DynasmLabelApi, dynasm};

/// With the address that tells the site on top of the stack. r10, r11 and the flags are lost.
pub(super) fn count(
    ops: &mut Assembler,
    counters: Counters,
    values: &Values,
) -> Result<(), ProgramError> {
    let distance = disp("the distance of counters", counters.distance)?;
    dynasm!(ops; .arch x64; mov r10, [rsp]);
    if counters.rounds {
        // The distance is a multiple of 8.
        dynasm!(ops; .arch x64; and r10, BYTE -8);
    }
    if counters.stride == 0 {
        dynasm!(ops; .arch x64; lock inc QWORD [r10 + distance]);
    } else {
        let stride = disp("the size of a table of counters", counters.stride)?;
        let number = disp("the CPU number's offset", values.cpu)?;
        dynasm!(ops; .arch x64
            ; gs mov r11d, [DWORD number]
            ; imul r11, r11, stride
            ; lock inc QWORD [r10 + r11 + distance]
        );
    }
    Ok(())
}

/// Where a program has what tells the site.
#[derive(Clone, Copy)]
pub(super) struct Told {
    pub(super) point: Point,
    /// Whether [`find_place`](super::sort::find_place) has saved registers.
    pub(super) saved: bool,
}

/// The same down to 0, with a trap at that call; goes on at `others` at others. Where the trap is. r10 and the flags
/// are lost.
pub(super) fn count_down(
    ops: &mut Assembler,
    (counter, trap): (u64, &[u8]),
    Told { point, saved }: Told,
    others: DynamicLabel,
) -> Result<usize, ProgramError> {
    let counter = disp(STOPS, counter)?;
    dynasm!(ops; .arch x64
        ; lock dec QWORD [DWORD counter]
        ; jnz BYTE =>others
    );
    match (point, saved) {
        (Point::Return, _) => dynasm!(ops; .arch x64; mov r10d, ecx),
        (Point::Tail, true) => dynasm!(ops; .arch x64; mov r10, [rsp + SAVED]),
        (Point::Entry | Point::Tail | Point::Beyond | Point::Probe, _) => {
            dynasm!(ops; .arch x64; mov r10, [rsp]);
        }
    }
    let stop = ops.offset().0;
    ops.extend(trap);
    Ok(stop)
}
