//! What differs between architectures: the same item names for each, re-exported here.

#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
pub use x86_64::*;

#[cfg(target_arch = "riscv64")]
mod riscv64;
#[cfg(target_arch = "riscv64")]
pub use riscv64::*;

#[cfg(not(any(target_arch = "x86_64", target_arch = "riscv64")))]
compile_error!("vmtrace runs on x86_64 and riscv64");
