//! Finds what the state of a CPU consists of: the flags of a task that ask for a reschedule, and the parts of the
//! count of preemptions.
//!
//! The numbers of these flags (`TIF_NEED_RESCHED`, `TIF_NEED_RESCHED_LAZY`) differ between versions
//! and architectures. Distributions backport the newer ones, and type information has no macros.
//! The kernel's own `tracing_gen_ctx_irq_test` (kernel/trace/trace.c, since 5.12; before that
//! `tracing_generic_entry_update`), which makes ftrace's columns of context, tests exactly these two, so the
//! numbers are taken from its code.

use std::collections::BTreeSet;

use super::{Arch, Kernel, KernelError, Source};
use crate::read::index;

mod riscv64;
mod x86_64;

/// Numbers of bits in `thread_info.flags` of a task: less than 16 if both are, or the first less than 8 and
/// the other less than 32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NeedResched {
    /// The task is to be preempted at once (`TIF_NEED_RESCHED`).
    pub eager: u8,
    /// It is to be preempted at the next tick (`TIF_NEED_RESCHED_LAZY`), where the kernel has such.
    pub lazy: Option<u8>,
}

impl NeedResched {
    /// In every version the lazy one has the higher number.
    fn of(bits: &BTreeSet<u8>) -> Option<Self> {
        let mut bits = bits.iter().copied();
        let found = Self { eager: bits.next()?, lazy: bits.next() };
        let last = found.lazy.unwrap_or(found.eager);
        let within = last < 16 || (found.eager < 8 && last < 32);
        (bits.next().is_none() && within).then_some(found)
    }

    /// The byte of the flags (from the lowest on) that has the lazy one, if that is not among the
    /// lower 16: bit 19 in kernels of PREEMPT_RT up to 6.1.
    #[must_use]
    pub fn far(self) -> Option<u64> {
        self.lazy.filter(|&bit| bit >= 16).map(|bit| u64::from(bit / 8))
    }
}

/// How a kernel keeps its count of preemptions (include/linux/preempt.h): preemptions have bits 0 to 7 and
/// softirqs 8 to 15 in all versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PreemptCount {
    /// Interrupts have bits 16 to 19, NMIs 20 to 23, and on x86-64 the highest bit of 32 is clear where the
    /// CPU is to preempt.
    Narrow,
    /// Since 7.3: bans on interrupts have bits 16 to 23, interrupts 24 to 27, NMIs those from 28 on. On
    /// x86-64 it is a word of 64 bits, of which the highest one is clear where the CPU is to preempt.
    Wide,
}

impl Kernel {
    /// Which flags ask for a reschedule; `None` when the image does not show it.
    #[must_use]
    pub fn need_resched(&self) -> Option<NeedResched> {
        let code = self.context_code()?;
        let bits = match self.arch() {
            Arch::X86_64 => x86_64::tested(code),
            Arch::Riscv64 => riscv64::tested(code),
        };
        NeedResched::of(&bits)
    }

    /// How it keeps its count of preemptions.
    #[must_use]
    pub fn preempt_count(&self) -> PreemptCount {
        let by_code = match self.arch() {
            Arch::X86_64 => self.context_code().and_then(x86_64::preempt_count),
            Arch::Riscv64 => None,
        };
        by_code.unwrap_or_else(|| {
            // What brings interrupts back when there are no bans left (kernel/softirq.c, 7.3).
            let has = |name| self.symbols().address(name).is_some();
            if has("_local_interrupt_save_state") || has("local_interrupt_disable_state") {
                PreemptCount::Wide
            } else {
                PreemptCount::Narrow
            }
        })
    }

    /// What makes ftrace's columns of context.
    fn context_code(&self) -> Option<&[u8]> {
        /// The function has less than 200 bytes.
        const MAX: u64 = 1024;
        /// By its name since 5.12, and before.
        const NAMES: [&str; 2] = ["tracing_gen_ctx_irq_test", "tracing_generic_entry_update"];
        let start = NAMES.iter().find_map(|name| self.symbols().address(name))?;
        let len = self.symbols().next_after(start)?.checked_sub(start)?.min(MAX);
        self.bytes(start, index(len))
    }
}

impl Kernel {
    /// Whether records can tell the state of the CPU. Kernels before 5.11, and those without SMP, do not
    /// count bans on migration: there `migrate_disable` switches preemption off.
    ///
    /// # Errors
    /// What is not known of this kernel.
    pub fn check_context(&self) -> Result<(), KernelError> {
        let structs = self.structs()?;
        let count = match self.arch() {
            Arch::X86_64 if self.symbols().address("pcpu_hot").is_none() => {
                self.symbols().address("__preempt_count")
            }
            Arch::X86_64 => structs.member_offset("pcpu_hot", "preempt_count"),
            Arch::Riscv64 => structs.member_offset("thread_info", "preempt_count"),
        };
        let flags = structs.member_offset("thread_info", "flags");
        if structs.source() == Source::Image || flags.is_none() {
            Err(KernelError::NoContext("type information (BTF), which says where it is"))
        } else if count.is_none() {
            Err(KernelError::NoContext("a preemption count"))
        } else if self.need_resched().is_none() {
            Err(KernelError::NoContext(
                "code that shows which flags ask for a reschedule (tracing_gen_ctx_irq_test)",
            ))
        } else {
            Ok(())
        }
    }
}

/// What a register has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Value {
    /// The task that runs.
    Task,
    /// Its flags, shifted right by so many bits.
    Flags(u32),
}

impl Value {
    /// The number of the bit that is tested by this mask; none when it is not one of the flags, or
    /// several.
    fn bit(self, mask: u64) -> Option<u8> {
        match self {
            Self::Flags(shift) if mask.is_power_of_two() => {
                u8::try_from(shift.checked_add(mask.trailing_zeros())?).ok()
            }
            _ => None,
        }
    }

    fn shifted(self, by: u32) -> Option<Self> {
        match self {
            Self::Flags(shift) => shift.checked_add(by).filter(|it| *it < 64).map(Self::Flags),
            Self::Task => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // A bit that is not the one makes ftrace's second column wrong for ever.
    #[test]
    fn the_flags_are_those_that_the_kernels_own_function_tests() {
        let bits = |bits: &[u8]| NeedResched::of(&bits.iter().copied().collect());
        assert_eq!(bits(&[3]), Some(NeedResched { eager: 3, lazy: None }));
        assert_eq!(bits(&[5, 4]), Some(NeedResched { eager: 4, lazy: Some(5) }));
        assert_eq!((bits(&[]), bits(&[3, 4, 5]), bits(&[3, 32])), (None, None, None));
        // Both bytes must have room: that of the first and that of the other.
        assert_eq!((bits(&[9, 19]), bits(&[17])), (None, None));
        let rt = bits(&[3, 19]).unwrap();
        assert_eq!((rt.lazy, rt.far(), bits(&[3, 4]).unwrap().far()), (Some(19), Some(2), None));
    }
}
