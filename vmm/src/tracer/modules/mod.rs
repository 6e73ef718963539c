//! Modules of the guest's kernel: which are loaded, and their sites.
//!
//! A site of a module has a number after those of the kernel's own. It keeps that number, and gets it
//! again when the module is loaded again at the same address, so that earlier records of it stay
//! valid.

mod exits;
mod numbered;
mod pages;
mod read;
mod switches;
mod table;
mod text;

pub use exits::{Ends, Fresh, ModuleCoverage, Unseen};
pub(super) use pages::place;
pub(super) use read::Offsets;
pub use read::{ModuleError, ModuleSymbol};
pub use switches::FoundSwitches;
pub(super) use table::Modules;
pub use table::{Loaded, Module, ModuleFunction};
pub use text::ExitsError;
