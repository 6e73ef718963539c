//! riscv64.
#![allow(unsafe_code, reason = "a loop of known length")]

/// Number of the system call (scripts/syscall.tbl).
pub const KEXEC_FILE_LOAD: i64 = 294;

/// Executes two instructions `rounds` times.
pub fn spin(rounds: u32) {
    // SAFETY: touches nothing but a register.
    unsafe {
        core::arch::asm!(
            "2:", "addi {counter}, {counter}, -1", "bnez {counter}, 2b",
            counter = inout(reg) u64::from(rounds) => _,
            options(nomem, nostack)
        );
    }
}
