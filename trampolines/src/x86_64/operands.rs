//! The assembler and operands that all parts of a program use.

use super::{Addressing, SPENT, Values};
use crate::displacement::small;
use crate::layout::CHUNK_SIZE;
use crate::program::{Overflow, Point, Program, ProgramError};
use dynasmrt::x64::X64Relocation;
use dynasmrt::{DynasmApi, VecAssembler, dynasm};

pub(super) type Assembler = VecAssembler<X64Relocation>;

/// The bits of a position that are all clear where a chunk is used up.
#[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "small constants")]
pub(super) const ABOVE_SPENT: i32 = small(CHUNK_SIZE - 1) & !(SPENT as i32 - 1);
/// A return, and room for a jump to the kernel's return thunk in its place.
pub(super) const ENDING: [u8; 5] = [0xc3, 0xcc, 0xcc, 0xcc, 0xcc];

/// The calling convention's registers for integers: rdi, rsi, rdx, rcx, r8, r9.
pub(super) const ARGUMENTS: [u8; 6] = [7, 6, RDX, 1, 8, 9];
pub(super) const RDX: u8 = 2;
pub(super) const RDI: u8 = 7;
pub(super) const R10: u8 = 10;

/// A value as the sign-extended displacement or address of an instruction.
pub(super) fn disp(what: &'static str, value: u64) -> Result<i32, ProgramError> {
    i32::try_from(value.cast_signed()).map_err(|_| ProgramError::Range(what, value))
}

/// What a program needs, as operands of instructions.
pub(super) struct Operands {
    pub(super) size: i32,
    pub(super) info: i32,
    pub(super) overwrite: bool,
    /// What makes the CPU wait for room.
    pub(super) wait: Option<&'static [u8]>,
    pub(super) tracers: i32,
    pub(super) shared: bool,
    /// Arguments are in their registers: rdx is not saved, and rdi is free.
    pub(super) in_place: bool,
    /// From the sign-extended low half of a position to memory: [`Values::rings`].
    pub(super) rings: i32,
}

impl Operands {
    /// Of a program that was checked.
    ///
    /// # Errors
    /// When rings cannot be where they are said to be.
    pub(super) fn new(
        program: &Program,
        overflow: Overflow,
        values: &Values,
    ) -> Result<Self, ProgramError> {
        let rings = values.rings;
        let within = i32::MIN + small(CHUNK_SIZE) <= rings && rings <= i32::MAX - small(CHUNK_SIZE);
        if !within || rings % small(CHUNK_SIZE) != 0 {
            let rings = i64::from(rings).cast_unsigned();
            return Err(ProgramError::Range("the distance of the rings", rings));
        }
        Ok(Self {
            rings,
            size: small(program.size()),
            info: program.info(overflow).0.cast_signed(),
            overwrite: !overflow.drains(),
            wait: match overflow {
                Overflow::Block(wait) => Some(wait),
                Overflow::Drop | Overflow::Overwrite => None,
            },
            tracers: program.tracers.into(),
            shared: matches!(values.addressing, Addressing::Shared { .. }),
            in_place: program.point == Point::Probe,
        })
    }
}

/// Head, from rax to what a register has.
pub(super) fn exchange(ops: &mut Assembler, shared: bool, to: u8) {
    if shared {
        dynasm!(ops; .arch x64; lock cmpxchg [r11], Rq(to));
    } else {
        dynasm!(ops; .arch x64; gs cmpxchg [r11], Rq(to));
    }
}
