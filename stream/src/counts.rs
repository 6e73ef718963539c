//! Counts of calls that were counted instead of recorded, and histograms of calls.

use zerocopy::{FromBytes, IntoBytes};

use super::wire::{BATCH, CountEntry, CountsHead};

/// Most functions in a frame.
pub(super) const MAX_COUNTS: usize = BATCH / size_of::<CountEntry>();
/// What says that counts are by caller.
const CALLERS: u8 = 4;
/// Most bytes of an argument's name.
const MAX_NAME: usize = 256;

/// What of functions was counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CountsOf {
    /// Their entries.
    Entries,
    /// Their entries, by caller.
    Callers,
    /// Calls by size: histograms.
    Sorted(HistogramOf),
}

/// What a histogram is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum HistogramOf {
    /// How long calls took, in nanoseconds.
    Durations,
    /// What they returned.
    Values,
    /// An argument.
    Arguments,
}

impl HistogramOf {
    /// What people call it; `name` is the argument's.
    #[must_use]
    pub fn label(self, name: &str) -> &str {
        match self {
            Self::Durations => "duration_ns",
            Self::Values => "retval",
            Self::Arguments => name,
        }
    }
}

/// A word of a function's histogram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Bucket {
    /// The function, as in records: its entry address less the header's `address_base`.
    pub function: u32,
    /// Its number: 0 has the calls with 0, *n* those from 2^(*n* - 1) on, up to 64; the others are
    /// [`Bucket::SUM`], [`Bucket::MISSED`] and [`Bucket::NEGATIVE`].
    pub bucket: u8,
    /// How many calls, or the sum.
    pub hits: u64,
}

impl Bucket {
    /// The sum of all values, modulo 2^64.
    pub const SUM: u8 = 65;
    /// Calls whose value could not be had.
    pub const MISSED: u8 = 66;
    /// Calls with a value below 0.
    pub const NEGATIVE: u8 = 67;

    /// The least value of a bucket: of [`Bucket::NEGATIVE`] that of 64 bits; none of a word that is no
    /// bucket.
    #[must_use]
    pub fn low(bucket: u8) -> Option<i128> {
        match bucket {
            0 => Some(0),
            1..=64 => Some(1 << (bucket - 1)),
            Self::NEGATIVE => Some(i64::MIN.into()),
            _ => None,
        }
    }
}

/// How often a function was entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Count {
    /// The function, as in records: its entry address less the header's `address_base`.
    pub function: u32,
    /// How often.
    pub hits: u64,
}

/// How often a function was entered from a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CallerCount {
    /// The function, as in records: its entry address less the header's `address_base`.
    pub function: u32,
    /// Where it returns to, in its caller: as in records, too.
    pub caller: u32,
    /// How often.
    pub hits: u64,
}

/// How often functions were entered on a vCPU for one tracer, beside records; what comes
/// again adds to it.
#[derive(Clone, Copy, Debug)]
pub struct Counts<'a> {
    /// The vCPU.
    pub vcpu: u32,
    /// The tracer.
    pub tracer: u8,
    /// What of them; `None` for what only later versions know.
    pub of: Option<CountsOf>,
    /// Of a histogram of arguments: the argument's name.
    pub name: &'a str,
    entries: &'a [CountEntry],
}

impl<'a> Counts<'a> {
    /// The functions, and how often.
    pub fn counts(&self) -> impl ExactSizeIterator<Item = Count> + 'a {
        let count =
            |entry: &CountEntry| Count { function: entry.function.get(), hits: entry.hits.get() };
        self.entries.iter().map(count)
    }

    /// The functions with their callers, and how often.
    pub fn callers(&self) -> impl ExactSizeIterator<Item = CallerCount> + 'a {
        let count = |entry: &CountEntry| CallerCount {
            function: entry.function.get(),
            caller: entry.bucket.get(),
            hits: entry.hits.get(),
        };
        self.entries.iter().map(count)
    }

    /// The words of histograms.
    pub fn buckets(&self) -> impl ExactSizeIterator<Item = Bucket> + 'a {
        let bucket = |entry: &CountEntry| {
            let [bucket, ..] = entry.bucket.get().to_le_bytes();
            Bucket { function: entry.function.get(), bucket, hits: entry.hits.get() }
        };
        self.entries.iter().map(bucket)
    }

    /// `None` when it is shorter than it says.
    pub(super) fn decode(payload: &'a [u8]) -> Option<Self> {
        let (head, rest) = CountsHead::ref_from_prefix(payload).ok()?;
        let count = usize::try_from(head.count.get()).ok()?;
        let (entries, rest) = <[CountEntry]>::ref_from_prefix_with_elems(rest, count).ok()?;
        let of = match head.of {
            0 => Some(CountsOf::Entries),
            1 => Some(CountsOf::Sorted(HistogramOf::Durations)),
            2 => Some(CountsOf::Sorted(HistogramOf::Values)),
            3 => Some(CountsOf::Sorted(HistogramOf::Arguments)),
            CALLERS => Some(CountsOf::Callers),
            _ => None,
        };
        let name = rest.get(..usize::from(head.name.get()))?;
        let name = std::str::from_utf8(name).unwrap_or("?");
        Some(Self { vcpu: head.vcpu.get(), tracer: head.tracer, of, name, entries })
    }
}

/// Appends the payload for so many functions, [`MAX_COUNTS`] at most.
pub(super) fn encode(vcpu: u32, tracer: u8, counts: &[Count], out: &mut Vec<u8>) {
    let words = counts.iter().map(|&Count { function, hits }| (function, 0, hits));
    encode_words((vcpu, tracer), (0, ""), words, out);
}

/// Appends the payload for so many pairs of functions and callers, [`MAX_COUNTS`] at most.
pub(super) fn encode_callers(vcpu: u32, tracer: u8, counts: &[CallerCount], out: &mut Vec<u8>) {
    let words = counts.iter().map(|it| (it.function, it.caller, it.hits));
    encode_words((vcpu, tracer), (CALLERS, ""), words, out);
}

/// Appends the payload for so many words of histograms, [`MAX_COUNTS`] at most. Of the argument's name stand
/// [`MAX_NAME`] bytes at most.
pub(super) fn encode_buckets(
    of: (u32, u8),
    (what, name): (HistogramOf, &str),
    buckets: &[Bucket],
    out: &mut Vec<u8>,
) {
    let what = match what {
        HistogramOf::Durations => 1,
        HistogramOf::Values => 2,
        HistogramOf::Arguments => 3,
    };
    let words = buckets.iter().map(|it| (it.function, it.bucket.into(), it.hits));
    encode_words(of, (what, cut(name)), words, out);
}

/// What fits of an argument's name.
pub(super) fn cut(name: &str) -> &str {
    &name[..name.floor_char_boundary(MAX_NAME)]
}

fn encode_words(
    (vcpu, tracer): (u32, u8),
    (of, name): (u8, &str),
    words: impl ExactSizeIterator<Item = (u32, u32, u64)>,
    out: &mut Vec<u8>,
) {
    let head = CountsHead {
        vcpu: vcpu.into(),
        tracer,
        of,
        name: u16::try_from(name.len()).unwrap_or(0).into(),
        count: u32::try_from(words.len()).unwrap_or(0).into(),
        more: 0.into(),
    };
    out.extend_from_slice(head.as_bytes());
    for (function, bucket, hits) in words {
        let (function, bucket, hits) = (function.into(), bucket.into(), hits.into());
        out.extend_from_slice(CountEntry { function, bucket, hits }.as_bytes());
    }
    out.extend_from_slice(name.as_bytes());
    out.resize(out.len() + name.len().next_multiple_of(8) - name.len(), 0);
}
