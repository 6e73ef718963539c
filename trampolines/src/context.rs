//! The state of the CPU when a call was made.

/// Where a kernel keeps the data of [`Field::Context`](crate::Field::Context): byte offsets in a
/// task, with one exception.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextPlaces {
    /// Of its flags (`thread_info.flags`).
    pub flags: u64,
    /// Of the count of preemptions, 32 bits (x86-64: of the CPU, from the gs base).
    pub preempt_count: u64,
    /// Of the byte whose highest bit is clear where the CPU is to preempt, from the gs base as well: where
    /// that is not the highest of the count (x86-64 since 7.3).
    pub resched: Option<u64>,
    /// Of the count of bans on its migration (`migration_disabled`), 16 bits; without one the count is
    /// recorded as 0.
    pub migration: Option<u64>,
    /// Of its count of softirqs, where the count of preemptions has none (`softirq_disable_cnt`,
    /// PREEMPT_RT).
    pub softirq: Option<u64>,
    /// Of the byte of its flags that has the lazy one, where that is not among the lower 16
    /// (PREEMPT_RT of 5.x and 6.1).
    pub lazy: Option<u64>,
}

/// The word that programs record of it.
///
/// ```text
/// bits 0..8    count of bans on migration, its low byte
/// bit 9        interrupts are on
/// bits 16..32  flags of the task, the lower 16; bits 24..32 are of the byte with the lazy flag, where
///              that is another one
/// bits 32..64  count of preemptions as the kernel keeps it; bits 40..48 of PREEMPT_RT are of the
///              task's own count of softirqs, and bits 48..56 since 7.3 those of
///              [`ContextPlaces::resched`] in place of bans on interrupts
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawContext(pub u64);

/// Where in the word its parts are, in bytes.
pub(crate) mod part {
    pub(crate) const MIGRATION: i32 = 0;
    /// The byte whose bit 1 says whether interrupts are on: the second one of RFLAGS, and the
    /// first one of `sstatus`.
    pub(crate) const INTERRUPTS: i32 = 1;
    pub(crate) const FLAGS: i32 = 2;
    pub(crate) const LAZY: i32 = 3;
    pub(crate) const PREEMPT_COUNT: i32 = 4;
    pub(crate) const SOFTIRQ: i32 = 5;
    pub(crate) const RESCHED: i32 = 6;
}

#[allow(clippy::cast_possible_truncation, reason = "parts of a word")]
impl RawContext {
    /// Whether interrupts are on.
    #[must_use]
    pub fn interrupts_on(self) -> bool {
        self.0 >> 9 & 1 != 0
    }

    /// The lower flags of the task, or those of two of its bytes.
    #[must_use]
    pub fn flags(self) -> u16 {
        (self.0 >> 16) as u16
    }

    /// The count of preemptions (include/linux/preempt.h).
    #[must_use]
    pub fn preempt_count(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// The count of bans on migration, modulo 256.
    #[must_use]
    pub fn migration(self) -> u8 {
        self.0 as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // A latency would be blamed on code that has interrupts on.
    #[test]
    fn interrupts_are_on_where_one_flag_says_so() {
        assert!(RawContext(1 << 9).interrupts_on());
        assert!(!RawContext(!(1 << 9)).interrupts_on());
    }
}
