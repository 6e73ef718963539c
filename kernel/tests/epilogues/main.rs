//! The exits of the real riscv64 kernels in the cache, and what rewriting them does. Their versions
//! change, so nothing here depends on the numbers of one build.

// Small numbers are cut to size all over the place here.
#![allow(clippy::cast_possible_truncation, clippy::cast_precision_loss)]

#[path = "../builder/mod.rs"]
mod builder;
mod coverage;
mod execution;
#[path = "../hart/mod.rs"]
mod hart;
#[path = "../image/mod.rs"]
mod image;
mod kernels;
mod made;
mod part;
mod random;
mod writes;

/// Where the stubs are in these tests, and the handler that they call.
const STUB: u64 = 0xffff_ffff_8400_0000;
const HANDLER: u64 = STUB - 0x8_0000;
const ID: u32 = 0x1d1d_0001;
