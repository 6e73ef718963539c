//! Makes what is written for an exit: the jumps in its window and landings, and its stub.

use crate::Kernel;
use crate::read::{index, wide};
use crate::riscv64::decode::{Condition, Instruction, Kind, T1};
use crate::riscv64::encode::{self, distance};

/// The register that the call in a stub links: `t1`, whichever the window was left by. All
/// displaced instructions have run by then, and none of `t0` to `t6` is alive at a return.
pub const LINK: u8 = T1;

/// An exit's window: the instructions that make room for a jump, up to the `ret`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Epilogue {
    /// Number of the function's site.
    pub site: u32,
    /// Link address of the window.
    pub start: u64,
    /// Its length, with the `ret`.
    pub len: u8,
    /// Link address of the `ret`.
    pub ret: u64,
    /// What stands before the `ret`.
    pub displaced: Vec<Displaced>,
    /// A register that neither they nor anybody behind their branches read: one of `t1` to `t6`.
    pub scratch: u8,
}

/// An instruction that runs in a stub instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Displaced {
    /// The same wherever it stands.
    Copy {
        /// The instruction, from the first byte on.
        bytes: [u8; 4],
        /// How many of the bytes it has: two or four.
        len: u8,
    },
    /// `auipc`
    Auipc {
        /// The register.
        rd: u8,
        /// The link address that it holds then.
        value: u64,
    },
    /// A branch to elsewhere in the function.
    Branch {
        /// The field of a branch that says when *not* to.
        unless: u8,
        /// The two registers that are compared.
        registers: [u8; 2],
        /// Link address of where it leads.
        to: u64,
    },
}

impl Displaced {
    /// None for what cannot be displaced.
    pub(super) fn new(address: u64, instruction: Instruction, bytes: &[u8]) -> Option<Self> {
        match instruction.kind {
            Kind::Plain | Kind::Load | Kind::AddImmediate { .. } => {
                let mut copy = [0; 4];
                let len = usize::from(instruction.len);
                copy.get_mut(..len)?.copy_from_slice(bytes.get(..len)?);
                Some(Self::Copy { bytes: copy, len: instruction.len })
            }
            Kind::Auipc { upper } => {
                let value = address.wrapping_add_signed(upper.into());
                Some(Self::Auipc { rd: instruction.writes, value })
            }
            Kind::Branch { condition, distance } => Some(Self::Branch {
                unless: condition.inverted().funct3,
                registers: [condition.rs1, condition.rs2],
                to: address.wrapping_add_signed(distance.into()),
            }),
            Kind::Jump { .. } | Kind::JumpRegister { .. } | Kind::Fixed => None,
        }
    }

    /// How long it is in a stub.
    fn len(&self) -> usize {
        match self {
            Self::Copy { len, .. } => usize::from(*len),
            Self::Auipc { .. } => 8,
            Self::Branch { .. } => 12,
        }
    }
}

/// A jump on the way from a window to its stub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Jump {
    /// Link address of where it is written: the window's start, or bytes of another window.
    pub at: u64,
    /// What is written.
    pub step: Step,
}

/// The kinds of jumps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// `c.j`
    Short {
        /// Link address of the next jump.
        to: u64,
    },
    /// `jal x0`
    Near {
        /// Link address of the next jump.
        to: u64,
    },
    /// `auipc; jr` by the scratch register to the stub.
    Far,
}

impl Step {
    fn len(self) -> u64 {
        match self {
            Self::Short { .. } => 2,
            Self::Near { .. } => 4,
            Self::Far => 8,
        }
    }
}

/// An exit, and how it is redirected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedExit {
    /// The exit.
    pub epilogue: Epilogue,
    /// Whether its function was not asked for: it lends its bytes to others.
    pub helper: bool,
    /// Bytes at the window's end where jumps of other exits are written.
    pub lent: u8,
    /// The jumps from the window to the stub; the first is at the window's start.
    pub jumps: Vec<Jump>,
}

impl PlannedExit {
    /// The bytes to write for a stub at a link address, by address: the window, but for what it
    /// lends, and the landings in other windows. None where the stub is out of reach.
    pub fn writes(&self, stub: u64) -> Option<Vec<(u64, Vec<u8>)>> {
        let ranges = self.ranges();
        self.jumps
            .iter()
            .zip(ranges)
            .map(|(jump, (at, len))| {
                let mut bytes = match jump.step {
                    Step::Short { to } => {
                        encode::short_jump(distance(at, to))?.to_le_bytes().to_vec()
                    }
                    Step::Near { to } => encode::jal(0, distance(at, to))?.to_le_bytes().to_vec(),
                    Step::Far => encode::far_jump(self.epilogue.scratch, at, stub)?.to_vec(),
                };
                // Nobody runs the rest, but a kprobe's check and disassemblers walk over it.
                while bytes.len() < len {
                    bytes.extend(encode::SHORT_NOP.to_le_bytes());
                }
                Some((at, bytes))
            })
            .collect()
    }

    /// A jump from an address to another, as that in the window: none where that is out of reach.
    pub fn far_jump(&self, from: u64, to: u64) -> Option<[u8; 8]> {
        encode::far_jump(self.epilogue.scratch, from, to)
    }

    /// What the image holds where [`PlannedExit::writes`] writes, to be checked before.
    pub fn original(&self, kernel: &Kernel) -> Option<Vec<(u64, Vec<u8>)>> {
        self.ranges().map(|(at, len)| Some((at, kernel.bytes(at, len)?.to_vec()))).collect()
    }

    pub(super) fn ranges(&self) -> impl Iterator<Item = (u64, usize)> {
        self.jumps.iter().enumerate().map(|(i, jump)| {
            let own = u64::from(self.epilogue.len - self.lent);
            (jump.at, index(if i == 0 { own } else { jump.step.len() }))
        })
    }

    /// Where in the stub its call is, the only word that is ever changed.
    pub fn slot_offset(&self) -> usize {
        let displaced: usize = self.epilogue.displaced.iter().map(Displaced::len).sum();
        displaced.next_multiple_of(4)
    }

    /// How long the stub is.
    pub fn stub_len(&self) -> usize {
        self.slot_offset() + 12
    }

    /// The stub for a link address, which must be a multiple of four: the displaced instructions,
    /// the call of the common handler or nothing in its place, `ret`, and the exit's number. The
    /// handler returns by [`LINK`], and finds the number four bytes behind. None where it is out
    /// of reach.
    pub fn stub(&self, stub: u64, common: Option<u64>, id: u32) -> Option<Vec<u8>> {
        let mut code = Vec::with_capacity(self.stub_len());
        for displaced in &self.epilogue.displaced {
            let here = stub.checked_add(wide(code.len()))?;
            match *displaced {
                Displaced::Copy { bytes, len } => code.extend(bytes.get(..usize::from(len))?),
                Displaced::Auipc { rd, value } => {
                    code.extend(encode::load_address(rd, here, value)?);
                }
                Displaced::Branch { unless, registers: [rs1, rs2], to } => {
                    let unless = Condition { funct3: unless, rs1, rs2 };
                    code.extend(encode::branch_over_two(unless).to_le_bytes());
                    code.extend(encode::far_jump(self.epilogue.scratch, here + 4, to)?);
                }
            }
        }
        if code.len() % 4 != 0 {
            code.extend(encode::SHORT_NOP.to_le_bytes());
        }
        code.extend(self.slot(stub, common)?);
        code.extend(encode::RET.to_le_bytes());
        code.extend(id.to_le_bytes());
        Some(code)
    }

    /// What the stub's slot holds: see [`slot`].
    pub fn slot(&self, stub: u64, common: Option<u64>) -> Option<[u8; 4]> {
        slot(stub.checked_add(wide(self.slot_offset()))?, common)
    }
}

/// What a stub's slot at an address holds: the call of a handler, or nothing. None where it is out
/// of reach, and where the word could not be written at once.
pub fn slot(at: u64, handler: Option<u64>) -> Option<[u8; 4]> {
    let word = match handler {
        Some(handler) => encode::jal(LINK, distance(at, handler))?,
        None => encode::NOP,
    };
    at.is_multiple_of(4).then(|| word.to_le_bytes())
}
