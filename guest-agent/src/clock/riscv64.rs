//! The `time` counter.

/// Its value.
#[allow(unsafe_code)]
pub(crate) fn ticks() -> u64 {
    let ticks;
    // SAFETY: Linux lets programs read the counter, and reading it touches no memory.
    unsafe {
        std::arch::asm!("rdtime {}", out(reg) ticks, options(nomem, nostack, preserves_flags));
    };
    ticks
}
