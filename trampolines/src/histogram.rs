//! Histograms: the layout of buckets, and of the calls that have not ended yet.

/// Words of 8 bytes that a histogram takes: [`BUCKETS`], [`SUM`], [`MISSED`], and room up to a cache line.
pub const WORDS: u64 = 72;
/// A bucket for 0, and one for each length in bits: number *n* has values from 2^(*n* - 1) on.
pub const BUCKETS: u8 = 65;
/// The word with the sum of all values, modulo 2^64.
pub const SUM: u8 = BUCKETS;
/// The word with the calls whose value could not be had: no place for them among those that are open, or
/// left for another function which then returned.
pub const MISSED: u8 = SUM + 1;

/// Calls that are open: a place of [`Calls::PLACE`] bytes for each, found by the stack pointer at
/// the function's entry, which no other open call has. So one that sleeps, or goes on on another CPU, is found again.
///
/// ```text
/// + 0   ticks: calls that began before are not of interest any more
/// + 8   calls that found no place, where no histogram counts them
/// + 16  calls whose end could not be told: Counts::Untold
/// + 4096  places: the stack pointer, or 0; ticks at the entry; address of the histogram; 8 bytes unused
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Calls {
    /// A multiple of 64 (of 4096, so that riscv64 needs no instruction for the lower part of an address); with its
    /// length a sign-extended number of 32 bits.
    pub address: u64,
}

impl Calls {
    /// Bytes of a place.
    pub const PLACE: u64 = 32;
    /// Places in which a call can be: that of its stack pointer and those behind it.
    pub const TRIED: u64 = 4;
    /// Bytes of all.
    pub const SIZE: u64 = Self::PLACES + ((1 << Self::BITS) + Self::TRIED) * Self::PLACE;
    /// Where calls are counted that found no place.
    pub const CROWDED: u64 = 8;
    /// Where calls are counted whose end could not be told.
    pub const UNTOLD: u64 = 16;
    /// Where the first place is: a page behind what only few look at.
    pub const PLACES: u64 = 4096;
    /// Bits that number a place.
    pub(crate) const BITS: u32 = 15;
    /// What spreads stack pointers: their low 32 bits times this, modulo 2^32, whose upper bits number a place. 2^32
    /// divided by the golden ratio, as 32 bits are loaded by fewer instructions than 64.
    pub(crate) const SPREAD: i32 = 0x9e37_79b9_u32.cast_signed();
    /// Bits to shift that by, and what to keep of it, for bytes from the first place on.
    pub(crate) const SHIFT: i8 = 12;
    pub(crate) const MASK: i8 = -32;
    /// Where in a place is when the call began, and where its histogram is.
    pub(crate) const BEGAN: i32 = 8;
    pub(crate) const HISTOGRAM: i32 = 16;
}

/// What errors call [`Calls`].
pub(crate) const OPEN: &str = "the table of open calls";

/// What is sorted at the end of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ended {
    /// How long it took, in nanoseconds: ticks times `multiplier`, shifted right. A tail call ends
    /// the function that makes it.
    Duration {
        /// Not 0.
        multiplier: u32,
        /// 0 to 32.
        shift: u8,
    },
    /// What it returned: an integer of 1, 2, 4 or 8 bytes.
    Value {
        /// Its size.
        bytes: u8,
        /// Whether it has a sign: then negative ones are in the last bucket.
        signed: bool,
    },
}

impl Ended {
    /// Durations in nanoseconds of a clock with so many ticks a second; `None` where a tick is more than two
    /// seconds, or there is no clock.
    #[must_use]
    pub fn duration(ticks_per_second: u64) -> Option<Self> {
        const SECOND: u128 = 1_000_000_000;
        let per_second = u128::from(ticks_per_second);
        if per_second == 0 {
            return None;
        }
        if SECOND.is_multiple_of(per_second) {
            let multiplier = u32::try_from(SECOND / per_second).ok()?;
            return Some(Self::Duration { multiplier, shift: 0 });
        }
        // The most exact that fits.
        (0..=32_u8).rev().find_map(|shift| {
            let multiplier = ((SECOND << shift) + per_second / 2) / per_second;
            let multiplier = u32::try_from(multiplier).ok().filter(|&multiplier| multiplier > 0)?;
            Some(Self::Duration { multiplier, shift })
        })
    }
}

/// An argument that is sorted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sorted {
    /// Its number, as that of [`Field::Argument`](crate::Field::Argument).
    pub number: u8,
    /// 1, 2, 4 or 8.
    pub bytes: u8,
    /// Whether it has a sign: then negative ones are in the last bucket.
    pub signed: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    // Of the last call, places behind its own are tried, too: they must not be another table's.
    #[test]
    fn all_places_that_are_tried_are_in_the_table() {
        assert_eq!(Calls::SIZE, 4096 + (32_768 + 4) * 32);
        let last = (u32::MAX >> Calls::SHIFT).cast_signed() & i32::from(Calls::MASK);
        assert_eq!(u64::from(last.cast_unsigned()), 32_767 * Calls::PLACE);
    }
}
