//! The state of the CPU when a record was written.

use std::fmt;

use super::header::Header;

/// The state of a CPU: what ftrace's columns `irqs-off`, `need-resched`, `hardirq/softirq`,
/// `preempt-depth` and `migrate-disable` show (Documentation/trace/ftrace.rst). Shown as ftrace
/// shows it: `d..2.`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Context {
    /// Bits of this type's constants, which are those of ftrace's `common_flags` (`enum
    /// trace_flag_type`, include/linux/trace_events.h).
    pub flags: u8,
    /// How often preemption is off in bits 0 to 3, and how often migration is in bits 4 to 7, 15
    /// for more: ftrace's `common_preempt_count`.
    pub depths: u8,
}

impl Context {
    /// Interrupts are off.
    pub const IRQS_OFF: u8 = 0x01;
    /// The task is to be preempted at the next tick (`TIF_NEED_RESCHED_LAZY`).
    pub const NEED_RESCHED_LAZY: u8 = 0x02;
    /// It is to be preempted (`TIF_NEED_RESCHED`).
    pub const NEED_RESCHED: u8 = 0x04;
    /// In a hard interrupt.
    pub const HARDIRQ: u8 = 0x08;
    /// In a softirq.
    pub const SOFTIRQ: u8 = 0x10;
    /// The CPU knows that it is to preempt (`PREEMPT_NEED_RESCHED`, x86).
    pub const PREEMPT_RESCHED: u8 = 0x20;
    /// In a non-maskable interrupt.
    pub const NMI: u8 = 0x40;
    /// Softirqs are off.
    pub const BH_OFF: u8 = 0x80;

    /// Key of [`Header::extra`](crate::Header::extra) in streams whose records have it.
    pub const HEADER: &str = "context";

    /// With these flags and depths, of which those above 15 are 15.
    #[must_use]
    pub fn new(flags: u8, preemption: u8, migration: u8) -> Self {
        Self { flags, depths: preemption.min(15) | migration.min(15) << 4 }
    }

    /// What the header of a stream has whose records tell it.
    #[must_use]
    pub fn header() -> (String, String) {
        (Self::HEADER.to_owned(), "ftrace".to_owned())
    }

    /// Whether records of a stream tell it, by its header.
    #[must_use]
    pub fn is_in(header: &Header) -> bool {
        header.extra.iter().any(|(key, _)| key == Self::HEADER)
    }

    /// As a word of a record.
    #[must_use]
    pub(crate) fn word(self) -> u64 {
        u16::from_le_bytes([self.flags, self.depths]).into()
    }

    /// From a word of a record; other bits mean nothing yet.
    #[must_use]
    pub(crate) fn of(word: u64) -> Self {
        let [flags, depths, ..] = word.to_le_bytes();
        Self { flags, depths }
    }

    fn has(self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// How often preemption is off, at most 15.
    #[must_use]
    pub fn preemption(self) -> u8 {
        self.depths & 15
    }

    /// How often migration is off, at most 15.
    #[must_use]
    pub fn migration(self) -> u8 {
        self.depths >> 4
    }

    /// The five columns, as ftrace prints them (`trace_print_lat_fmt`,
    /// kernel/trace/trace_output.c).
    #[must_use]
    pub fn columns(self) -> [u8; 5] {
        let interrupts = match (self.has(Self::IRQS_OFF), self.has(Self::BH_OFF)) {
            (true, true) => b'D',
            (true, false) => b'd',
            (false, true) => b'b',
            (false, false) => b'.',
        };
        let [eager, lazy, cpu] =
            [Self::NEED_RESCHED, Self::NEED_RESCHED_LAZY, Self::PREEMPT_RESCHED]
                .map(|flag| self.has(flag));
        let resched = match (eager, lazy, cpu) {
            (true, true, true) => b'B',
            (true, false, true) => b'N',
            (false, true, true) => b'L',
            (true, true, false) => b'b',
            (true, false, false) => b'n',
            (false, false, true) => b'p',
            (false, true, false) => b'l',
            (false, false, false) => b'.',
        };
        let [hard, soft, nmi] =
            [Self::HARDIRQ, Self::SOFTIRQ, Self::NMI].map(|flag| self.has(flag));
        let inside = match (nmi, hard, soft) {
            (true, true, _) => b'Z',
            (true, false, _) => b'z',
            (false, true, true) => b'H',
            (false, true, false) => b'h',
            (false, false, true) => b's',
            (false, false, false) => b'.',
        };
        [interrupts, resched, inside, depth(self.preemption()), depth(self.migration())]
    }
}

/// A digit of base 16; ftrace shows no zeros.
fn depth(depth: u8) -> u8 {
    match depth {
        0 => b'.',
        1..=9 => b'0' + depth,
        _ => b'a' + (depth & 15).saturating_sub(10),
    }
}

impl fmt::Display for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.columns().map(char::from);
        columns.iter().try_for_each(|column| write!(f, "{column}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Lines of ftrace itself (Documentation/trace/ftrace.rst, and guests): who reads one reads the
    // other.
    #[test]
    fn columns_are_those_of_ftrace() {
        let shown =
            |flags, preemption, migration| Context::new(flags, preemption, migration).to_string();
        assert_eq!(shown(0, 0, 0), ".....");
        assert_eq!(shown(Context::IRQS_OFF, 2, 0), "d..2.");
        assert_eq!(shown(Context::IRQS_OFF | Context::BH_OFF, 1, 3), "D..13");
        assert_eq!(shown(Context::BH_OFF, 200, 10), "b..fa");
        let both = Context::NEED_RESCHED | Context::PREEMPT_RESCHED;
        assert_eq!(shown(both | Context::HARDIRQ | Context::SOFTIRQ, 15, 0), ".NHf.");
        assert_eq!(shown(Context::NEED_RESCHED | Context::SOFTIRQ, 0, 0), ".ns..");
        assert_eq!(shown(Context::PREEMPT_RESCHED | Context::HARDIRQ, 0, 0), ".ph..");
        let lazy = Context::NEED_RESCHED_LAZY;
        assert_eq!(shown(lazy | Context::NMI, 9, 0), ".lz9.");
        assert_eq!(shown(lazy | Context::PREEMPT_RESCHED | Context::NMI | 8, 0, 0), ".LZ..");
        assert_eq!(shown(lazy | Context::NEED_RESCHED, 0, 0), ".b...");
        assert_eq!(shown(lazy | both, 0, 0), ".B...");
    }

    #[test]
    fn words_keep_all_of_it() {
        for flags in 0..=255 {
            let context = Context { flags, depths: !flags };
            assert_eq!(Context::of(context.word() | 0xdead << 16), context);
        }
    }
}
