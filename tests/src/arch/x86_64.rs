//! x86-64.
#![allow(unsafe_code, reason = "a loop of known length")]

/// Number of the system call (arch/x86/entry/syscalls/syscall_64.tbl).
pub const KEXEC_FILE_LOAD: i64 = 320;

/// Executes two instructions `rounds` times.
pub fn spin(rounds: u32) {
    // SAFETY: touches nothing but a register.
    unsafe {
        core::arch::asm!(
            "2:", "dec {counter:e}", "jnz 2b",
            counter = inout(reg) rounds => _,
            options(nomem, nostack)
        );
    }
}
