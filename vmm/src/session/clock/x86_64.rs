//! x86-64: `kvm_sched_clock_read` of arch/x86/kernel/kvmclock.c, made continuous by
//! kernel/sched/clock.c.

use super::{Shown, Variables};

/// The time that KVM gives to a vCPU: `struct pvclock_vcpu_time_info` of
/// arch/x86/include/asm/pvclock-abi.h.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pvclock {
    timestamp: u64,
    system_time: u64,
    mul: u32,
    shift: i8,
}

impl Pvclock {
    const SIZE: usize = 32;

    /// `None` while it is being written, before it first was, or when the clock is not the same for
    /// all vCPUs.
    fn parse(bytes: &[u8; Self::SIZE]) -> Option<Self> {
        const TSC_STABLE: u8 = 1;
        let word = |at: usize| bytes.get(at..)?.first_chunk().copied().map(u32::from_le_bytes);
        let wide = |at: usize| bytes.get(at..)?.first_chunk().copied().map(u64::from_le_bytes);
        let (version, mul) = (word(0)?, word(24)?);
        let [shift, flags] = *bytes.get(28..)?.first_chunk()?;
        let sound = version.is_multiple_of(2) && mul != 0 && flags & TSC_STABLE != 0;
        let (timestamp, system_time) = (wide(8)?, wide(16)?);
        sound.then_some(Self { timestamp, system_time, mul, shift: shift.cast_signed() })
    }

    /// Nanoseconds when the TSC shows `ticks` (`__pvclock_read_cycles`); `None` for what KVM never
    /// gives.
    fn at(self, ticks: u64) -> Option<i128> {
        let delta = u128::from(ticks.checked_sub(self.timestamp)?);
        let by = u32::from(self.shift.unsigned_abs());
        if by >= u64::BITS {
            return None;
        }
        // The kernel shifts 64 bits.
        let delta = if self.shift < 0 { delta >> by } else { delta << by };
        let delta = u64::try_from(delta).ok()?;
        let since = (u128::from(delta) * u128::from(self.mul)) >> 32;
        Some(i128::from(self.system_time) + i128::try_from(since).ok()?)
    }
}

/// What the clock of the log shows when the TSC shows `ticks`. `None` before it is stable: until then
/// each CPU's follows its tick (`sched_clock_local`).
pub(super) fn shown(variables: &Variables<'_>, ticks: u64) -> Option<Shown> {
    // Of a `struct static_key`, the number first.
    let stable = variables.first("__sched_clock_stable").map(i32::from_le_bytes)?;
    // That of the first CPU.
    let pvclock = Pvclock::parse(&variables.first("hv_clock_boot")?)?;
    let begun = variables.first("kvm_sched_clock_offset").map(u64::from_le_bytes)?;
    let offset = variables.first("__sched_clock_offset").map(i64::from_le_bytes)?;
    // A kernel that has another clock (`no-kvmclock`) has never asked this one when it began.
    if stable <= 0 || begun == 0 {
        return None;
    }
    let as_begun = pvclock.at(ticks)? - i128::from(begun);
    Some(Shown { now: as_begun + i128::from(offset), as_begun })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes(version: u32, of: Pvclock, flags: u8) -> [u8; Pvclock::SIZE] {
        let mut bytes = [0; Pvclock::SIZE];
        bytes[0..4].copy_from_slice(&version.to_le_bytes());
        bytes[8..16].copy_from_slice(&of.timestamp.to_le_bytes());
        bytes[16..24].copy_from_slice(&of.system_time.to_le_bytes());
        bytes[24..28].copy_from_slice(&of.mul.to_le_bytes());
        bytes[28] = of.shift.cast_unsigned();
        bytes[29] = flags;
        bytes
    }

    // 2.6 GHz: 2^32 / 1.3 after a shift by one to the right.
    const OF: Pvclock =
        Pvclock { timestamp: 26_000, system_time: 5_000, mul: 3_303_820_997, shift: -1 };

    #[test]
    fn time_is_as_the_kernel_computes_it() {
        assert_eq!(Pvclock::parse(&bytes(4, OF, 1)), Some(OF));
        assert_eq!(OF.at(26_000), Some(5_000));
        assert_eq!(OF.at(26_000 + 2_600_000_000), Some(1_000_005_000));
        assert_eq!(Pvclock { mul: 1 << 31, shift: 1, ..OF }.at(26_010), Some(5_010));
    }

    // A time that is not certain would be shown as if it were.
    #[test]
    fn what_is_not_certain_is_not_told() {
        assert_eq!(Pvclock::parse(&bytes(5, OF, 1)), None, "being written");
        assert_eq!(Pvclock::parse(&bytes(4, OF, 0)), None, "each vCPU has its own");
        assert_eq!(Pvclock::parse(&[0; 32]), None, "never written");
        assert_eq!(OF.at(25_999), None, "before it was written");
        assert_eq!(Pvclock { shift: 64, ..OF }.at(30_000), None);
        assert_eq!(Pvclock { shift: i8::MIN, ..OF }.at(30_000), None);
    }

    proptest! {
        #[test]
        fn anything_has_a_time_or_none(bytes: [u8; 32], ticks: u64) {
            if let Some(pvclock) = Pvclock::parse(&bytes) {
                let _ = pvclock.at(ticks);
            }
        }
    }
}
