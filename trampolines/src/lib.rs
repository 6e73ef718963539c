//! The annex layout and the trampolines of vmtrace.
//!
//! [`layout`] is the one source of truth for what trampolines (assembly),
//! the VMM (reader of the rings) and the tests agree on. The trampolines are
//! position-fixed templates: [`Template::instantiate`] fills in what is only
//! known when a guest runs (where its rings are, where `current` is).

#![no_std]

#[cfg(any(test, doc))]
extern crate std;

pub mod layout;
mod template;
pub mod x86_64;

pub use template::{Fixup, Template, TemplateError};
