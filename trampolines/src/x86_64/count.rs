//! What counts instead of recording.
//!
//! One locked instruction counts, so nothing that comes between it and the look at the CPU's number
//! loses a call: a task that was migrated counts in the table of the CPU that it came from.

use super::Values;
use super::operands::{Assembler, disp};
use crate::program::{Counters, ProgramError};
use dynasmrt::{DynasmApi, dynasm};

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
