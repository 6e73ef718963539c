//! Compiles programs that sort calls into histograms instead of recording them.
//!
//! A place among the open calls is taken by one locked instruction, and belongs to its call until that ends:
//! an interrupt or another CPU has a different stack pointer.

use super::Values;
use super::operands::{ARGUMENTS, Assembler, RDX, disp};
use crate::histogram::{Calls, Ended, MISSED, OPEN, SUM, Sorted};
use crate::program::{Histograms, Point, ProgramError};
use dynasmrt::{DynamicLabel, DynasmApi, DynasmLabelApi, dynasm};

const RSP: u8 = 4;
const R10: u8 = 10;

/// Bytes of a histogram up to a word.
const fn word(number: u8) -> i32 {
    8 * number as i32
}

/// Leaves the address of the histogram in rax, with the address that tells the site at rsp + `told`.
/// rdx is lost.
fn find(
    ops: &mut Assembler,
    histograms: Histograms,
    values: &Values,
    told: i32,
) -> Result<(), ProgramError> {
    let distance = disp("the distance of histograms", histograms.distance)?;
    dynasm!(ops; .arch x64; mov rax, [rsp + told]);
    if histograms.rounds {
        // The distance is a multiple of 8.
        dynasm!(ops; .arch x64; and rax, BYTE -8);
    }
    if histograms.stride == 0 {
        dynasm!(ops; .arch x64; mov rax, [rax + distance]);
    } else {
        let stride = disp("the size of a table of histograms", histograms.stride)?;
        let number = disp("the CPU number's offset", values.cpu)?;
        dynasm!(ops; .arch x64
            ; gs mov edx, [DWORD number]
            ; imul rdx, rdx, stride
            ; mov rax, [rax + rdx + distance]
        );
    }
    Ok(())
}

/// Leaves the first place of the call with the stack pointer in this register in r11, less the displacement that is
/// returned.
fn place(ops: &mut Assembler, register: u8, calls: Calls) -> Result<i32, ProgramError> {
    dynasm!(ops; .arch x64
        ; imul r11d, Rd(register), Calls::SPREAD
        ; shr r11d, BYTE Calls::SHIFT
        ; and r11d, BYTE Calls::MASK
    );
    disp(OPEN, calls.address + Calls::PLACES)
}

/// Puts rax into the histogram at `at`. rdx and r10 are lost.
fn put(ops: &mut Assembler, at: u8) {
    dynasm!(ops; .arch x64
        ; mov r10, -1
        ; bsr rdx, rax
        ; cmovz rdx, r10
        ; lock inc QWORD [Rq(at) + rdx * 8 + 8]
        ; lock add [Rq(at) + word(SUM)], rax
    );
}

/// An integer of so many bytes, whole, in rax. What is above its own bytes may be anything.
fn extend(ops: &mut Assembler, register: u8, bytes: u8, signed: bool) {
    match (bytes, signed) {
        (1, false) => dynasm!(ops; .arch x64; movzx eax, Rb(register)),
        (1, true) => dynasm!(ops; .arch x64; movsx rax, Rb(register)),
        (2, false) => dynasm!(ops; .arch x64; movzx eax, Rw(register)),
        (2, true) => dynasm!(ops; .arch x64; movsx rax, Rw(register)),
        (4, false) => dynasm!(ops; .arch x64; mov eax, Rd(register)),
        (4, true) => dynasm!(ops; .arch x64; movsxd rax, Rd(register)),
        _ => dynasm!(ops; .arch x64; mov rax, Rq(register)),
    }
}

/// Sorts an argument. r10, r11 and the flags are lost.
pub(super) fn sort(
    ops: &mut Assembler,
    histograms: Histograms,
    sorted: Sorted,
    values: &Values,
) -> Result<(), ProgramError> {
    let Sorted { number, bytes, signed } = sorted;
    dynasm!(ops; .arch x64; push rax; push rdx);
    find(ops, histograms, values, 16)?;
    dynasm!(ops; .arch x64; mov r11, rax);
    let register = match ARGUMENTS.get(usize::from(number)) {
        Some(&RDX) => {
            dynasm!(ops; .arch x64; mov rdx, [rsp]);
            RDX
        }
        Some(&register) => register,
        None => {
            // Above the function's return address.
            let from = 32 + 8 * (i32::from(number) - 6);
            dynasm!(ops; .arch x64; mov rdx, [rsp + from]);
            RDX
        }
    };
    extend(ops, register, bytes, signed);
    put(ops, 11);
    dynasm!(ops; .arch x64; pop rdx; pop rax);
    Ok(())
}

/// What comes behind the program's ending.
pub(super) struct Crowded {
    pub(super) from: DynamicLabel,
    pub(super) to: DynamicLabel,
    /// Of a call that has no place.
    pub(super) none: DynamicLabel,
    /// Of a call that has one and is too short to be meant.
    pub(super) short: Option<DynamicLabel>,
    /// From r11 to its place.
    pub(super) places: i32,
    /// The register with its stack pointer.
    pub(super) key: u8,
    pub(super) missed: Missed,
}

/// Who counts a call that has no place.
#[derive(Clone, Copy)]
pub(super) enum Missed {
    /// None is looked for.
    Nobody,
    Histograms(Histograms),
    /// All of them together.
    Calls(Calls),
}

/// Takes a place for a call. r10, r11 and the flags are lost.
pub(super) fn begin(
    ops: &mut Assembler,
    histograms: Option<Histograms>,
    calls: Calls,
    values: &Values,
) -> Result<Crowded, ProgramError> {
    let [from, to, none] = [(); 3].map(|()| ops.new_dynamic_label());
    dynasm!(ops; .arch x64
        ; push rax
        ; push rdx
        ; lea r10, [rsp + 24]
    );
    let places = place(ops, R10, calls)?;
    dynasm!(ops; .arch x64
        ; xor eax, eax
        ; lock cmpxchg [r11 + places], r10
        ; jne =>from
        ; =>to
    );
    if let Some(histograms) = histograms {
        find(ops, histograms, values, 16)?;
        dynasm!(ops; .arch x64; mov [r11 + (places + Calls::HISTOGRAM)], rax);
    }
    dynasm!(ops; .arch x64
        ; rdtsc
        ; mov [r11 + (places + Calls::BEGAN)], eax
        ; mov [r11 + (places + Calls::BEGAN + 4)], edx
        ; =>none
        ; pop rdx
        ; pop rax
    );
    let missed = histograms.map_or(Missed::Calls(calls), Missed::Histograms);
    Ok(Crowded { from, to, none, short: None, places, key: R10, missed })
}

/// Bytes that are on the stack at the end of a call by a jump: rax, rdx, r9 and r11.
pub(super) const SAVED: i32 = 32;

/// Leaves in r11 the place of a call that ends, less `places` of what is returned; goes on at `none` of that if there
/// is none. Saves what [`restore`] puts back: at a return rax and rdx are in rsi and rdi.
pub(super) fn find_place(
    ops: &mut Assembler,
    point: Point,
    calls: Calls,
) -> Result<Crowded, ProgramError> {
    let [from, to, none] = [(); 3].map(|()| ops.new_dynamic_label());
    let key = if point == Point::Tail {
        dynasm!(ops; .arch x64
            ; push rax
            ; push rdx
            ; push r9
            ; push r11
            // Above what is SAVED and where the jump was; a literal has a displacement of one byte.
            ; lea r10, [rsp + 40]
        );
        R10
    } else {
        dynasm!(ops; .arch x64
            ; mov rsi, rax
            ; mov rdi, rdx
        );
        RSP
    };
    let places = place(ops, key, calls)?;
    dynasm!(ops; .arch x64
        ; cmp [r11 + places], Rq(key)
        ; jne =>from
        ; =>to
    );
    Ok(Crowded { from, to, none, short: None, places, key, missed: Missed::Nobody })
}

/// Behind [`find_place`]: puts back what that has saved. Goes on at `ends`, which is behind it.
pub(super) fn restore(ops: &mut Assembler, point: Point, crowded: &Crowded, ends: DynamicLabel) {
    let Crowded { none, short, places, .. } = *crowded;
    dynasm!(ops; .arch x64; =>none);
    put_back(ops, point);
    if let Some(short) = short {
        dynasm!(ops; .arch x64
            ; jmp =>ends
            ; =>short
            ; mov QWORD [r11 + places], 0
        );
        put_back(ops, point);
    }
}

fn put_back(ops: &mut Assembler, point: Point) {
    if point == Point::Tail {
        dynasm!(ops; .arch x64
            ; pop r11
            ; pop r9
            ; pop rdx
            ; pop rax
        );
    } else {
        dynasm!(ops; .arch x64
            ; mov rax, rsi
            ; mov rdx, rdi
        );
    }
}

/// Gives the place of a call back and sorts it. At a return r9 to r11, rsi, rdi and the flags are lost;
/// at a tail call r10 and the flags.
pub(super) fn end(
    ops: &mut Assembler,
    point: Point,
    (calls, ended): (Calls, Ended),
) -> Result<Crowded, ProgramError> {
    let crowded = find_place(ops, point, calls)?;
    let Crowded { none, places, .. } = crowded;
    let since = disp(OPEN, calls.address)?;
    dynasm!(ops; .arch x64
        ; mov r10, [r11 + (places + Calls::BEGAN)]
        ; mov r9, [r11 + (places + Calls::HISTOGRAM)]
        ; mov QWORD [r11 + places], 0
        ; cmp r10, [DWORD since]
        ; jb =>none
    );
    match ended {
        Ended::Duration { multiplier, shift } => {
            dynasm!(ops; .arch x64
                ; rdtsc
                ; shl rdx, 32
                ; or rax, rdx
                // Clocks of two CPUs may differ.
                ; xor edx, edx
                ; sub rax, r10
                ; cmovb rax, rdx
                ; mov r10d, multiplier.cast_signed()
                ; mul r10
            );
            if shift != 0 {
                dynasm!(ops; .arch x64; shrd rax, rdx, shift.cast_signed());
            }
            put(ops, 9);
        }
        // What is returned in its place is another function's.
        Ended::Value { .. } if point == Point::Tail => {
            dynasm!(ops; .arch x64; lock inc QWORD [r9 + word(MISSED)]);
        }
        Ended::Value { bytes, signed } => {
            const RSI: u8 = 6;
            extend(ops, RSI, bytes, signed);
            put(ops, 9);
        }
    }
    Ok(crowded)
}

/// Looks at the other places in which a call can be.
pub(super) fn crowded(
    ops: &mut Assembler,
    crowded: &Crowded,
    values: &Values,
) -> Result<(), ProgramError> {
    let Crowded { from, to, none, places, key, missed, .. } = *crowded;
    let size = i8::try_from(Calls::PLACE).unwrap_or(0);
    dynasm!(ops; .arch x64; =>from);
    if matches!(missed, Missed::Nobody) {
        for _ in 1..Calls::TRIED {
            dynasm!(ops; .arch x64
                ; add r11, BYTE size
                ; cmp [r11 + places], Rq(key)
                ; je =>to
            );
        }
        dynasm!(ops; .arch x64; jmp =>none);
        return Ok(());
    }
    // One with this stack pointer is left over of a call that has ended unseen.
    dynasm!(ops; .arch x64; cmp rax, Rq(R10); je =>to);
    for _ in 1..Calls::TRIED {
        dynasm!(ops; .arch x64
            ; add r11, BYTE size
            ; xor eax, eax
            ; lock cmpxchg [r11 + places], r10
            ; je =>to
            ; cmp rax, r10
            ; je =>to
        );
    }
    match missed {
        Missed::Nobody => {}
        Missed::Histograms(histograms) => {
            find(ops, histograms, values, 16)?;
            dynasm!(ops; .arch x64; lock inc QWORD [rax + word(MISSED)]);
        }
        Missed::Calls(calls) => {
            let counter = disp(OPEN, calls.address + Calls::CROWDED)?;
            dynasm!(ops; .arch x64; lock inc QWORD [DWORD counter]);
        }
    }
    dynasm!(ops; .arch x64; jmp =>none);
    Ok(())
}
