//! Exits of functions of modules. They are found in a loaded module's code in memory, since its
//! tables are there and in no image.

use super::{Exit, Missing};
use crate::epilogues::patch::PlannedExit;

/// The code of a module in a guest, and what its tables say of it. All addresses are as if it were
/// linked with the kernel.
#[derive(Clone, Debug, Default)]
pub struct ModuleText {
    /// Its functions, and the parts of them that the compiler put elsewhere, ascending.
    pub pieces: Vec<ModulePiece>,
    /// Instructions that `.return_sites` names, ascending.
    pub returns: Vec<u64>,
    /// Instructions of static calls, ascending.
    pub static_calls: Vec<u64>,
    /// Instructions that are a nop or a jump, by a static key, ascending.
    pub labels: Vec<u64>,
    /// Ways from an instruction to another that the code does not show.
    pub ways: Vec<(u64, u64)>,
    /// Its code by address, each part in one piece (riscv64).
    pub regions: Vec<(u64, Vec<u8>)>,
    /// Instructions that stop in its own code, ascending (riscv64).
    pub traps: Vec<u64>,
    /// Sites of functions whose exits are to be rewritten, ascending (riscv64).
    pub wanted: Vec<u32>,
    /// Entries of functions of other modules that can be traced, ascending.
    pub others: Vec<u64>,
}

/// A function of a module, or a part of one.
#[derive(Clone, Debug, Default)]
pub struct ModulePiece {
    /// Where it begins.
    pub start: u64,
    /// All of it.
    pub bytes: Vec<u8>,
    /// Its name.
    pub name: Box<str>,
    /// Number and place of its site, if it can be traced.
    pub site: Option<(u32, u64)>,
}

impl ModulePiece {
    /// Its bytes from an address on.
    pub(crate) fn from(&self, address: u64) -> Option<&[u8]> {
        self.bytes.get(usize::try_from(address.checked_sub(self.start)?).ok()?..)
    }
}

/// The exits of a module's functions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModuleExits {
    /// All that can be used.
    pub list: Vec<Exit>,
    /// Sites with an exit that cannot be used, or without any, each once.
    pub missing: Vec<(u32, Missing)>,
    /// What is to be rewritten for them, by address (riscv64).
    pub rewrites: Vec<ModuleRewrite>,
}

/// An exit of a module that is to be rewritten.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleRewrite {
    /// How.
    pub exit: PlannedExit,
    /// What is there where [`PlannedExit::writes`] writes.
    pub original: Vec<Vec<u8>>,
}
