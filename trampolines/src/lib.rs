//! The annex layout and the compiler of programs.
//!
//! [`layout`] is the one source of truth for what compiled programs, the VMM (reader of the rings)
//! and the tests agree on. A [`Program`] says what a site has to do. [`x86_64`] and [`riscv64`]
//! compile it, on any machine. They need facts that only the running guest has: where its rings
//! are, and where `current` is.

mod branch;
pub mod callers;
pub mod condition;
mod context;
mod displacement;
pub mod family;
pub mod histogram;
pub mod layout;
pub mod marks;
pub mod nesting;
mod program;
mod reads;
pub mod riscv64;
pub mod x86_64;

pub use condition::Condition;
pub use context::{ContextPlaces, RawContext};
pub use program::{
    Code, Counters, Counts, Field, Histograms, Last, Overflow, Point, Program, ProgramError, Read,
    Readable,
};
