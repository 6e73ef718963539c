//! The differences between two traces: functions that only one has called, numbers and durations of
//! calls, and where the calls of a task diverge.
//!
//! Functions and tasks are identified by their names, since the kernels may differ.

mod page;
mod profile;
mod report;
#[cfg(test)]
mod tests;

pub use profile::Profile;
pub use report::{Calls, Difference, Parting, Point, Side, Times, Whole};

/// What counts as noise. Times that differ by less than either are equal, and so are counts that
/// differ by less than the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Noise {
    /// Percent of the larger one.
    pub percent: u32,
    /// Nanoseconds.
    pub nanoseconds: u64,
}

impl Noise {
    fn is_part(self, a: u64, b: u64) -> bool {
        let larger = u128::from(a.max(b));
        u128::from(a.abs_diff(b)) * 100 <= larger * u128::from(self.percent)
    }

    /// Whether counts are equal.
    fn hides_counts(self, a: u64, b: u64) -> bool {
        self.is_part(a, b)
    }

    /// Whether times are equal, in nanoseconds.
    fn hides_times(self, a: u64, b: u64) -> bool {
        a.abs_diff(b) < self.nanoseconds || self.is_part(a, b)
    }
}
