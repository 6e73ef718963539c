//! riscv64: the `sched_clock` that all architectures without one of their own have
//! (kernel/time/sched_clock.c).

use super::{Shown, Variables};

/// What it is computed from: `struct clock_data` with its two `struct clock_read_data`, of which one
/// is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ClockData {
    epoch_ns: u64,
    epoch_cycles: u64,
    mask: u64,
    mult: u32,
    shift: u32,
}

impl ClockData {
    const SIZE: usize = 104;

    /// `None` if this is another variable, or the clock is still that of the tick: it has not this
    /// rate.
    fn parse(bytes: &[u8; Self::SIZE], hz: u64) -> Option<Self> {
        const READ_DATA: usize = 8;
        const READ_DATA_SIZE: usize = 40;
        const RATE: usize = READ_DATA + 2 * READ_DATA_SIZE + 8;
        let word = |at: usize| bytes.get(at..)?.first_chunk().copied().map(u32::from_le_bytes);
        let wide = |at: usize| bytes.get(at..)?.first_chunk().copied().map(u64::from_le_bytes);
        // Its lowest bit says which of the two.
        let used = if word(0)?.is_multiple_of(2) { 0 } else { 1 };
        let at = READ_DATA + used * READ_DATA_SIZE;
        let data = Self {
            epoch_ns: wide(at)?,
            epoch_cycles: wide(at + 8)?,
            mask: wide(at + 16)?,
            mult: word(at + 32)?,
            shift: word(at + 36)?,
        };
        let sound = wide(RATE)? == hz && data.mult != 0 && data.shift < u64::BITS;
        sound.then_some(data)
    }

    /// Nanoseconds when the counter shows `ticks` (`sched_clock`).
    fn at(self, ticks: u64) -> Option<i128> {
        let cycles = ticks.wrapping_sub(self.epoch_cycles) & self.mask;
        let since = cycles.checked_mul(self.mult.into())? >> self.shift;
        Some(i128::from(self.epoch_ns) + i128::from(since))
    }
}

/// What the clock of the log shows when `time` shows `ticks`.
pub(super) fn shown(variables: &Variables<'_>, ticks: u64, hz: u64) -> Option<Shown> {
    let data = variables.all("cd").find_map(|bytes| ClockData::parse(&bytes, hz))?;
    let now = data.at(ticks)?;
    Some(Shown { now, as_begun: now })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HZ: u64 = 10_000_000;

    /// Both halves, the second one a second later.
    fn bytes(seq: u32, rate: u64) -> [u8; ClockData::SIZE] {
        let mut bytes = [0; ClockData::SIZE];
        bytes[0..4].copy_from_slice(&seq.to_le_bytes());
        for (at, seconds) in [(8, 1_u64), (48, 2)] {
            bytes[at..at + 8].copy_from_slice(&(seconds * 1_000_000_000).to_le_bytes());
            bytes[at + 8..at + 16].copy_from_slice(&(seconds * HZ + 777).to_le_bytes());
            bytes[at + 16..at + 24].copy_from_slice(&u64::MAX.to_le_bytes());
            bytes[at + 32..at + 36].copy_from_slice(&(100_u32 << 20).to_le_bytes());
            bytes[at + 36..at + 40].copy_from_slice(&20_u32.to_le_bytes());
        }
        bytes[96..104].copy_from_slice(&rate.to_le_bytes());
        bytes
    }

    #[test]
    fn time_is_as_the_kernel_computes_it() {
        for seq in [4, 5] {
            let data = ClockData::parse(&bytes(seq, HZ), HZ).unwrap();
            assert_eq!(data.epoch_ns, if seq == 4 { 1_000_000_000 } else { 2_000_000_000 });
            assert_eq!(data.at(3 * HZ + 777), Some(3_000_000_000));
            assert_eq!(data.at(3 * HZ + 778), Some(3_000_000_100));
        }
    }

    // Others are called `cd`, too, and before the counter is found this is the tick's.
    #[test]
    fn another_clock_is_not_taken_for_it() {
        assert_eq!(ClockData::parse(&bytes(4, 250), HZ), None);
        assert_eq!(ClockData::parse(&[0; 104], HZ), None);
        let data = ClockData::parse(&bytes(4, HZ), HZ).unwrap();
        assert_eq!(ClockData { mult: u32::MAX, ..data }.at(u64::MAX / 2), None);
    }

    proptest! {
        #[test]
        fn anything_has_a_time_or_none(words: [u64; 13], ticks: u64) {
            let mut bytes = [0; ClockData::SIZE];
            for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
                to.copy_from_slice(&word.to_le_bytes());
            }
            if let Some(data) = ClockData::parse(&bytes, words[12]) {
                let _ = data.at(ticks);
            }
        }
    }
}
