//! Programs: what a site has to do, as a description that no architecture is in.

use crate::layout::{COMMON_SIZE, Info, MAX_RECORD};

/// What happens when a ring is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Overflow {
    /// The new record is dropped and counted.
    Drop,
    /// The oldest record is overwritten: a flight recorder.
    Overwrite,
}

/// How a program is entered, and how it goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Point {
    /// Called at a function's entry, by the site itself.
    Entry,
    /// Called where a function is left for another one, by a stub that jumps on.
    Tail,
    /// In place of a function's return: ends it.
    Return,
}

/// What a record has beside what all have, 8 bytes each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Field {
    /// The stack pointer (of x86-64: see [`stack_bias`](crate::x86_64::stack_bias)).
    Stack,
    /// An integer argument by its number, from 0 on: as the calling convention passes it.
    Argument(u8),
    /// What the function returns.
    Value,
    /// Where a tail call through a pointer goes (x86-64: what `r11` had).
    Target,
}

/// What a site has to do: write one record with these fields.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Program {
    /// Its number, in every record: up to [`Info::MAX_PROGRAM`].
    pub number: u16,
    /// On account of how many tracers: 1 to 256.
    pub tracers: u16,
    /// Where it runs.
    pub point: Point,
    /// From the end of a record downwards, below what all have.
    pub fields: Vec<Field>,
}

/// Why a program cannot be compiled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    /// Something of the guest is out of the reach of an instruction.
    #[error("{0} ({1:#x}) cannot be encoded")]
    Range(&'static str, u64),
    /// The record would be too long.
    #[error("a record of {0} bytes is too long (at most {MAX_RECORD})")]
    TooLong(usize),
    /// There is no such thing at this point.
    #[error("{0:?} is not known at {1:?}")]
    Field(Field, Point),
    /// Numbers are used up.
    #[error("a program cannot have number {0} or {1} tracers")]
    Number(u16, u16),
    /// The assembler refused it.
    #[error("the program cannot be assembled: {0}")]
    Assembler(String),
}

impl Program {
    /// Bytes of its record.
    #[must_use]
    pub fn size(&self) -> usize {
        COMMON_SIZE + 8 * self.fields.len()
    }

    /// How far below the end of a record a field is, in bytes.
    #[must_use]
    pub fn below(&self, field: Field) -> Option<usize> {
        let index = self.fields.iter().position(|&other| other == field)?;
        Some(COMMON_SIZE + 8 * (index + 1))
    }

    /// What its records say of themselves. `overwrite` records get the tag of their lap later.
    pub(crate) fn info(&self, overflow: Overflow) -> Info {
        match overflow {
            Overflow::Drop => Info::new(self.size(), self.number, 1, Info::DRAINED),
            Overflow::Overwrite => Info::new(self.size(), self.number, self.tracers, 0),
        }
    }

    /// Whether it can be compiled at all.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self) -> Result<(), ProgramError> {
        if self.size() > MAX_RECORD {
            return Err(ProgramError::TooLong(self.size()));
        }
        if self.number > Info::MAX_PROGRAM || !(1..=256).contains(&self.tracers) {
            return Err(ProgramError::Number(self.number, self.tracers));
        }
        for &field in &self.fields {
            let known = match field {
                Field::Stack => true,
                Field::Argument(_) => self.point != Point::Return,
                Field::Value => self.point == Point::Return,
                Field::Target => self.point == Point::Tail,
            };
            if !known {
                return Err(ProgramError::Field(field, self.point));
            }
        }
        Ok(())
    }
}

/// Machine code that can lie anywhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Code {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Where in it are the returns (x86-64: of 5 bytes, `ret` and four `int3`, so that a jump to
    /// the kernel's return thunk can take the place of each).
    pub endings: Vec<usize>,
}
