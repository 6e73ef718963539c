//! How long the end of a run waits for consumers that still read.

use std::time::{Duration, Instant};

/// The average number of bytes per second that a reader has to take from then on.
const RATE: u64 = 256 << 10;

/// Time for a reader after the end of what there is to read. One that takes nothing is left soon,
/// and so is one that takes a byte now and then: what it was to take is bounded.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    begin: Instant,
    grace: Duration,
}

impl Patience {
    /// How long a reader may take nothing when somebody wants an end.
    pub const WANTED: Duration = Duration::from_secs(5);
    /// The same when the guest has ended by itself: then a person may be reading by a pager.
    pub const BY_ITSELF: Duration = Duration::from_secs(60);

    /// It begins to run.
    #[must_use]
    pub fn new() -> Self {
        Self::of(Self::WANTED)
    }

    /// With another time for who takes nothing.
    #[must_use]
    pub fn of(grace: Duration) -> Self {
        Self { begin: Instant::now(), grace }
    }

    /// The time that is left for a reader who has taken so many bytes since then; `None` when it
    /// is over.
    #[must_use]
    pub fn left(&self, taken: u64) -> Option<Duration> {
        let earned = Duration::from_millis(taken.saturating_mul(1000) / RATE);
        let allowed = self.grace.saturating_add(earned);
        allowed.checked_sub(self.begin.elapsed()).filter(|left| !left.is_zero())
    }
}

impl Default for Patience {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_have_to_keep_up() {
        let patience = Patience::new();
        assert!(patience.left(0).unwrap() <= Patience::WANTED);
        assert!(patience.left(RATE).unwrap() > Patience::WANTED);
        assert!(patience.left(u64::MAX).is_some());
        assert_eq!(Patience::of(Duration::ZERO).left(0), None);
        assert_eq!(Patience::of(Duration::ZERO).left(10), None);
    }
}
