//! Pseudo-random numbers from a seed.

/// xorshift.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// The seed is not 0.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 bits.
    pub fn word(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Less than `bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.word() >> 16).unwrap_or(0) % bound
    }
}
