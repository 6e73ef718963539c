//! Histograms of calls in each format, and the tables at the end of the text output.

use std::collections::BTreeMap;
use std::io::{self, Write};

use super::Name;
use super::names::unnamed;
use crate::stream::{Bucket, HistogramOf};

/// Most words that are kept: more than any kernel's functions have.
const MOST: usize = 4 << 20;
/// Characters of the longest bar.
const BAR: u64 = 40;

/// Of which calls a part of a histogram is.
#[derive(Clone, Copy, Debug)]
pub struct SortedBy<'a> {
    /// The vCPU on which they began.
    pub vcpu: u32,
    /// For which tracer, if there are several.
    pub tracer: Option<&'a str>,
    /// What is sorted.
    pub of: HistogramOf,
    /// Which argument.
    pub name: &'a str,
}

impl SortedBy<'_> {
    /// What is sorted, as people call it.
    #[must_use]
    pub fn label(&self) -> &str {
        self.of.label(self.name)
    }
}

/// The words of one histogram by their numbers: see [`Bucket::bucket`].
#[derive(Debug, Default)]
pub(crate) struct Words(BTreeMap<u8, u64>);

impl Words {
    pub(crate) fn add(&mut self, bucket: u8, hits: u64) {
        let word = self.0.entry(bucket).or_default();
        *word = match bucket {
            Bucket::SUM => word.wrapping_add(hits),
            _ => word.saturating_add(hits),
        };
    }

    /// Buckets with their least values: negative ones come first.
    pub(crate) fn buckets(&self) -> Vec<(i128, u64)> {
        let low = |(&bucket, &hits): (&u8, &u64)| Some((Bucket::low(bucket)?, hits));
        let mut all: Vec<_> = self.0.iter().filter_map(low).filter(|(_, hits)| *hits > 0).collect();
        all.sort_unstable();
        all
    }

    /// Calls in all buckets.
    pub(crate) fn calls(&self) -> u64 {
        let buckets = self.0.iter().filter(|(bucket, _)| Bucket::low(**bucket).is_some());
        buckets.fold(0, |sum, (_, hits)| sum.saturating_add(*hits))
    }

    pub(crate) fn missed(&self) -> u64 {
        self.0.get(&Bucket::MISSED).copied().unwrap_or(0)
    }

    /// The sum of all values, where that says something: none of them is negative.
    pub(crate) fn sum(&self, of: HistogramOf) -> Option<u64> {
        let negative = self.0.get(&Bucket::NEGATIVE).is_some_and(|hits| *hits > 0);
        let known = of != HistogramOf::Values && !negative;
        known.then(|| self.0.get(&Bucket::SUM).copied().unwrap_or(0))
    }
}

/// Words of a frame as histograms, one for each function.
pub(super) fn by_function(
    words: &mut dyn Iterator<Item = (Name<'_>, u8, u64)>,
    mut each: impl FnMut(&Name<'_>, &Words) -> io::Result<()>,
) -> io::Result<()> {
    let mut last: Option<(Name<'_>, Words)> = None;
    for (name, bucket, hits) in words {
        match &mut last {
            Some((of, all)) if of.address == name.address => all.add(bucket, hits),
            _ => {
                let mut all = Words::default();
                all.add(bucket, hits);
                if let Some((name, words)) = last.replace((name, all)) {
                    each(&name, &words)?;
                }
            }
        }
    }
    last.map_or(Ok(()), |(name, words)| each(&name, &words))
}

/// All histograms of a stream, of all vCPUs together.
#[derive(Debug, Default)]
pub(super) struct Sorted {
    all: BTreeMap<Key, Words>,
    words: usize,
    /// Calls there was no room for.
    others: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    /// As it was called then: a module may take the place of another.
    name: Box<str>,
    address: u64,
    of: HistogramOf,
    argument: Box<str>,
    tracer: Box<str>,
}

impl Sorted {
    /// Adds words.
    pub(super) fn add(
        &mut self,
        by: &SortedBy<'_>,
        words: &mut dyn Iterator<Item = (Name<'_>, u8, u64)>,
    ) {
        let tracer = by.tracer.map_or_else(|| unnamed(0), str::to_owned);
        for (function, bucket, hits) in words {
            if self.words >= MOST {
                let calls = if Bucket::low(bucket).is_some() { hits } else { 0 };
                self.others = self.others.saturating_add(calls);
                continue;
            }
            let key = Key {
                name: function.label().into(),
                address: function.address,
                of: by.of,
                argument: by.name.into(),
                tracer: tracer.as_str().into(),
            };
            let of = self.all.entry(key).or_default();
            let before = of.0.len();
            of.add(bucket, hits);
            self.words += of.0.len() - before;
        }
    }

    /// Writes all, those of most calls first.
    ///
    /// # Errors
    /// When the output fails.
    pub(super) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let mut all: Vec<_> = self.all.iter().collect();
        all.sort_by(|(a, of_a), (b, of_b)| of_b.calls().cmp(&of_a.calls()).then_with(|| a.cmp(b)));
        let mut tracers: Vec<_> = all.iter().map(|(key, _)| &key.tracer).collect();
        tracers.sort_unstable();
        tracers.dedup();
        for (key, words) in &all {
            let tracer =
                if tracers.len() > 1 { format!(" ({})", key.tracer) } else { String::new() };
            write_one(out, key, words, &tracer)?;
        }
        if self.others > 0 {
            writeln!(out, "# histograms of others: {} calls", self.others)?;
        }
        Ok(())
    }
}

fn write_one(out: &mut impl Write, key: &Key, words: &Words, tracer: &str) -> io::Result<()> {
    let what = key.of.label(&key.argument);
    let table = Table {
        title: &format!("{}{tracer}, {what}", key.name),
        buckets: words.buckets(),
        sum: words.sum(key.of),
        missed: words.missed(),
    };
    table.write(out)
}

/// A histogram for people.
pub(crate) struct Table<'a> {
    /// Function, and what is sorted.
    pub(crate) title: &'a str,
    /// Least values of buckets, with their calls.
    pub(crate) buckets: Vec<(i128, u64)>,
    /// Of all values, where that says something.
    pub(crate) sum: Option<u64>,
    /// Calls without a value.
    pub(crate) missed: u64,
}

impl Table<'_> {
    /// Writes it as lines that begin with `#`.
    ///
    /// # Errors
    /// When the output fails.
    pub(crate) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let calls = self.buckets.iter().fold(0_u64, |sum, (_, hits)| sum.saturating_add(*hits));
        let plural = if calls == 1 { "" } else { "s" };
        write!(out, "# histogram: {}: {calls} call{plural}", self.title)?;
        if let (Some(sum), 1..) = (self.sum, calls) {
            write!(out, ", average {}, total {sum}", sum / calls)?;
        }
        if self.missed > 0 {
            write!(out, ", {} more without a value", self.missed)?;
        }
        writeln!(out)?;
        let buckets = &self.buckets;
        let most = buckets.iter().map(|(_, hits)| *hits).max().unwrap_or(0).max(1);
        for &(low, hits) in buckets {
            let range = match low {
                ..0 => "below 0".to_owned(),
                0 => "0".to_owned(),
                1 => "1".to_owned(),
                _ => format!("{} ... {}", short(low), short(2 * low)),
            };
            let length = u128::from(hits) * u128::from(BAR) / u128::from(most);
            let bar = "@".repeat(usize::try_from(length).unwrap_or(0));
            writeln!(out, "#{range:>16} {hits:>12} |{bar:<40}|")?;
        }
        Ok(())
    }
}

/// A power of two, with a unit of 1024.
fn short(value: i128) -> String {
    const UNITS: [&str; 7] = ["", "K", "M", "G", "T", "P", "E"];
    let mut units = UNITS.iter();
    let mut rest = value;
    let mut unit = units.next();
    while rest >= 1024 && rest % 1024 == 0 && units.len() > 0 {
        rest /= 1024;
        unit = units.next();
    }
    format!("{rest}{}", unit.unwrap_or(&""))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(address: u64) -> Name<'static> {
        let symbol = if address == 1 { ("vfs_read", "") } else { ("vfs_write", "") };
        Name { address, symbol: Some(symbol), number: None }
    }

    // A call in another row, or a mean of something else, is a wrong answer without a sign of it.
    #[test]
    fn tables_have_every_call_once() {
        let mut sorted = Sorted::default();
        let by = |vcpu, of, name| SortedBy { vcpu, tracer: None, of, name };
        let words = [(1, 10, 5), (1, 11, 2), (1, Bucket::SUM, 7000), (1, Bucket::MISSED, 3)];
        for vcpu in 0..2 {
            let mut words = words.into_iter().map(|(at, bucket, hits)| (name(at), bucket, hits));
            sorted.add(&by(vcpu, HistogramOf::Durations, ""), &mut words);
        }
        let words = [(2, 0, 1), (2, 64, 4), (2, Bucket::NEGATIVE, 2), (2, Bucket::SUM, 9)];
        let mut words = words.into_iter().map(|(at, bucket, hits)| (name(at), bucket, hits));
        sorted.add(&by(0, HistogramOf::Arguments, "count"), &mut words);
        let mut text = Vec::new();
        sorted.write(&mut text).unwrap();
        let full = "@".repeat(40);
        let expected = [
            "# histogram: vfs_read, duration_ns: 14 calls, average 1000, total 14000, 6 more without a value"
                .to_owned(),
            format!("#     512 ... 1K{:>14} |{full}|", 10),
            format!("#       1K ... 2K {:>12} |{:<40}|", 4, "@".repeat(16)),
            "# histogram: vfs_write, count: 7 calls".to_owned(),
            format!("#         below 0 {:>12} |{:<40}|", 2, "@".repeat(20)),
            format!("#               0 {:>12} |{:<40}|", 1, "@".repeat(10)),
            format!("#      8E ... 16E {:>12} |{full}|", 4),
        ];
        let text = String::from_utf8(text).unwrap();
        let squeezed = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let found: Vec<_> = text.lines().map(squeezed).collect();
        assert_eq!(found, expected.iter().map(|line| squeezed(line)).collect::<Vec<_>>());
    }

    // A number too large for its output must not end the program.
    #[test]
    fn sums_that_are_too_large_are_cut() {
        let mut words = Words::default();
        for bucket in [3, 3, Bucket::SUM, Bucket::SUM, Bucket::MISSED, Bucket::MISSED] {
            words.add(bucket, u64::MAX);
        }
        assert_eq!((words.calls(), words.missed()), (u64::MAX, u64::MAX));
        assert_eq!(words.buckets(), [(4, u64::MAX)]);
        assert_eq!(words.sum(HistogramOf::Durations), Some(u64::MAX - 1));
        assert_eq!(words.sum(HistogramOf::Values), None);
    }
}
