//! Calls counted by caller: the layout of the tables.

/// Tables in which calls are counted by function and caller, one for each CPU: a place of [`Callers::PLACE`] bytes
/// for each pair, found by the pair. It is taken by one locked exchange, and is that pair's as long as somebody counts
/// there.
///
/// ```text
/// + 0   calls whose pair found no place
/// + 64  places: the pair, or 0; how many calls
/// ```
///
/// A pair has the low half of the address that tells the function's site in its upper half, and that of the return
/// address of the function's caller in its lower half: what records have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Callers {
    /// Of CPU 0's: a multiple of 64; with the length of a table a sign-extended number of 32 bits.
    pub address: u64,
    /// Bytes from a CPU's table to that of the next one: a multiple of 4096, less than 2 GiB, and not below
    /// [`Callers::SIZE`]. With 0 all CPUs have one table.
    pub stride: u64,
}

impl Callers {
    /// Bytes of a place.
    pub const PLACE: u64 = 16;
    /// Places in which a pair can be: the one that it is spread to and those behind it.
    pub const TRIED: u64 = 8;
    /// Where calls are counted whose pair found no place.
    pub const CROWDED: u64 = 0;
    /// Where the first place is.
    pub const PLACES: u64 = 64;
    /// How many places a table has: pairs are spread over all but the last of them.
    pub const COUNT: u64 = (1 << Self::BITS) + Self::TRIED - 1;
    /// Bytes of a table: whole pages.
    pub const SIZE: u64 = (Self::PLACES + Self::COUNT * Self::PLACE).next_multiple_of(4096);
    /// Where in a place its calls are.
    pub const CALLS: u64 = 8;
    /// Bits that number a place.
    pub(crate) const BITS: u32 = 16;

    /// The pair of a site, told by this address, and a caller.
    #[must_use]
    pub const fn pair(told: u64, caller: u64) -> u64 {
        told << 32 | caller & 0xffff_ffff
    }

    /// The number of the first place in which a pair can be.
    #[must_use]
    pub const fn first(pair: u64) -> u64 {
        pair.wrapping_mul(SPREAD) >> (64 - Self::BITS)
    }
}

/// What spreads pairs: 2^64 divided by the golden ratio.
pub(crate) const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// What errors call [`Callers`].
pub(crate) const CALLERS: &str = "the table of callers";
