//! Templates of machine code and how they are made concrete.

use core::fmt;

/// Kinds of holes.
pub(crate) const HOLES: usize = 7;

/// A hole in a template that is filled when it is instantiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fixup {
    /// 8 bytes: what, added to a CPU's gs base, gives its control block.
    ControlFromGs,
    /// 4 bytes, sign-extended: offset of `current` from the gs base.
    Current,
    /// 4 bytes: offset of `pid` in `struct task_struct`.
    Pid,
    /// 4 bytes, sign-extended: minus the distance between two rings.
    RingMask,
    /// 4 bytes, sign-extended: offset of the CPU number from the gs base.
    CpuNumber,
    /// 4 bytes: number of entries in the control table.
    CpuCount,
    /// 4 bytes, sign-extended: address of the table of control blocks.
    ControlTable,
}

impl Fixup {
    /// In the order of a template's table of holes.
    pub(crate) const ALL: [Self; HOLES] = [
        Self::ControlFromGs,
        Self::Current,
        Self::Pid,
        Self::RingMask,
        Self::CpuNumber,
        Self::CpuCount,
        Self::ControlTable,
    ];

    const fn width(self) -> usize {
        match self {
            Self::ControlFromGs => 8,
            _ => 4,
        }
    }
}

/// Why a template could not be made concrete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TemplateError {
    /// A hole has no value.
    Missing(Fixup),
    /// A value does not fit its hole.
    Range(Fixup, u64),
    /// This build has no such trampoline.
    Absent,
    /// The output is shorter than the code.
    Space {
        /// Bytes needed.
        needed: usize,
    },
}

impl fmt::Display for TemplateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(hole) => write!(f, "trampoline: no value for {hole:?}"),
            Self::Range(hole, value) => {
                write!(f, "trampoline: {value:#x} does not fit {hole:?}")
            }
            Self::Absent => f.write_str("trampoline: not in a build for another architecture"),
            Self::Space { needed } => write!(f, "trampoline: {needed} bytes needed"),
        }
    }
}

impl core::error::Error for TemplateError {}

/// Position-independent machine code with holes.
#[derive(Clone, Copy, Debug)]
pub struct Template {
    pub(crate) code: &'static [u8],
    /// Offset of each hole in the order of [`Fixup::ALL`]; `u32::MAX`: none.
    pub(crate) holes: &'static [u32; HOLES],
}

impl Template {
    /// The code, holes unfilled.
    #[must_use]
    pub const fn code(&self) -> &'static [u8] {
        self.code
    }

    /// Copies the code to the front of `out` and fills every hole. Returns the
    /// length of the code.
    ///
    /// # Errors
    /// When there is no code, a hole has no value in `values`, a value does not fit, or `out` is
    /// too short; `out` is then unusable.
    pub fn instantiate(
        &self,
        out: &mut [u8],
        values: &[(Fixup, u64)],
    ) -> Result<usize, TemplateError> {
        let needed = self.code.len();
        if needed == 0 {
            return Err(TemplateError::Absent);
        }
        let out = out.get_mut(..needed).ok_or(TemplateError::Space { needed })?;
        out.copy_from_slice(self.code);
        for (hole, &offset) in Fixup::ALL.into_iter().zip(self.holes) {
            if offset == u32::MAX {
                continue;
            }
            let value = values
                .iter()
                .find_map(|&(name, value)| (name == hole).then_some(value))
                .ok_or(TemplateError::Missing(hole))?;
            let width = hole.width();
            // All 4-byte holes are sign-extended by the instruction.
            let upper = value >> 31;
            if width == 4 && upper != 0 && upper != u64::MAX >> 31 {
                return Err(TemplateError::Range(hole, value));
            }
            let start = offset as usize;
            out.get_mut(start..start + width)
                .ok_or(TemplateError::Space { needed: start + width })?
                .copy_from_slice(&value.to_le_bytes()[..width]);
        }
        Ok(needed)
    }
}
