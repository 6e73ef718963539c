//! What differs between architectures: the same item names for each, re-exported here.

#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
pub use x86_64::*;

#[cfg(not(target_arch = "x86_64"))]
compile_error!("vmtrace runs on x86_64 only, so far");
