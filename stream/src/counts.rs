//! How often functions were entered whose entries were counted, not recorded.

use zerocopy::{FromBytes, IntoBytes};

use super::wire::{BATCH, CountEntry, CountsHead};

/// Most functions in a frame.
pub(super) const MAX_COUNTS: usize = BATCH / size_of::<CountEntry>();

/// What of functions was counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CountsOf {
    /// Their entries.
    Entries,
}

/// How often a function was entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Count {
    /// The function, as in records: its entry address less the header's `address_base`.
    pub function: u32,
    /// How often.
    pub hits: u64,
}

/// How often functions were entered on a vCPU on account of one tracer, beside records; what comes
/// again adds to it.
#[derive(Clone, Copy, Debug)]
pub struct Counts<'a> {
    /// The vCPU.
    pub vcpu: u32,
    /// The tracer.
    pub tracer: u8,
    /// What of them; `None` for what only later versions know.
    pub of: Option<CountsOf>,
    entries: &'a [CountEntry],
}

impl<'a> Counts<'a> {
    /// The functions, and how often.
    pub fn counts(&self) -> impl ExactSizeIterator<Item = Count> + 'a {
        let count =
            |entry: &CountEntry| Count { function: entry.function.get(), hits: entry.hits.get() };
        self.entries.iter().map(count)
    }

    /// `None` when it is shorter than it says.
    pub(super) fn decode(payload: &'a [u8]) -> Option<Self> {
        let (head, rest) = CountsHead::ref_from_prefix(payload).ok()?;
        let count = usize::try_from(head.count.get()).ok()?;
        let (entries, _) = <[CountEntry]>::ref_from_prefix_with_elems(rest, count).ok()?;
        let of = match head.of {
            0 => Some(CountsOf::Entries),
            _ => None,
        };
        Some(Self { vcpu: head.vcpu.get(), tracer: head.tracer, of, entries })
    }
}

/// Appends the payload for so many functions, [`MAX_COUNTS`] at most.
pub(super) fn encode(vcpu: u32, tracer: u8, counts: &[Count], out: &mut Vec<u8>) {
    let head = CountsHead {
        vcpu: vcpu.into(),
        tracer,
        of: 0,
        reserved: 0.into(),
        count: u32::try_from(counts.len()).unwrap_or(0).into(),
        more: 0.into(),
    };
    out.extend_from_slice(head.as_bytes());
    for Count { function, hits } in counts {
        let (function, hits) = ((*function).into(), (*hits).into());
        let entry = CountEntry { function, reserved: 0.into(), hits };
        out.extend_from_slice(entry.as_bytes());
    }
}
