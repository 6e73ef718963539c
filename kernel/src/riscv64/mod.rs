//! The machine code of riscv64 kernels: instructions, the text they are in, and the tables by which
//! the kernel itself changes it.

pub(crate) mod decode;
pub(crate) mod encode;
pub(crate) mod flow;
pub(crate) mod tables;
pub(crate) mod text;
