//! The clock of records, read by a program in the guest.

#[cfg(target_arch = "riscv64")]
mod riscv64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "riscv64")]
pub(crate) use riscv64::ticks;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::ticks;

#[cfg(not(any(target_arch = "x86_64", target_arch = "riscv64")))]
compile_error!("the agent knows the clock of x86_64 and riscv64 only");
