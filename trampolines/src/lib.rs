//! The annex layout and the trampolines of vmtrace.
//!
//! [`layout`] is the one source of truth for what trampolines (assembly),
//! the VMM (reader of the rings) and the tests agree on. What is only known when
//! a guest runs (where its rings are, where `current` is) is filled into templates
//! on x86-64 ([`Template::instantiate`]) and generated in on riscv64, where
//! instructions are easy to encode.

#![no_std]

#[cfg(any(test, doc))]
extern crate std;

pub mod layout;
pub mod riscv64;
mod template;
pub mod x86_64;

pub use template::{Fixup, Template, TemplateError};

/// What happens when a ring is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overflow {
    /// The new record is dropped and counted.
    Drop,
    /// The oldest record is overwritten: a flight recorder.
    Overwrite,
}
