//! Times that overlap.

use std::ops::{Add, Sub};

/// How much of a time others cover, which may overlap: each part of it counts once.
pub(crate) fn covered<T>((from, to): (T, T), others: impl Iterator<Item = (T, T)>) -> T
where
    T: Copy + Default + Ord + Add<Output = T> + Sub<Output = T>,
{
    let inside = others.map(|(start, end)| (start.max(from), end.min(to)));
    let mut inside: Vec<_> = inside.filter(|(start, end)| start < end).collect();
    inside.sort_unstable();
    let (mut sum, mut until) = (T::default(), from);
    for (start, end) in inside {
        let start = start.max(until);
        if end > start {
            sum = sum + (end - start);
            until = end;
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_covered_twice_counts_once() {
        let all = [(0, 5), (8, 12), (10, 11), (11, 14), (19, 30), (40, 50)];
        assert_eq!(covered((4, 20), all.into_iter()), 1 + 6 + 1);
        assert_eq!(covered((14, 19), all.into_iter()), 0);
    }
}
