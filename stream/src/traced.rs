//! The functions that were traced, whether or not they were called.

use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, IntoBytes};

use super::wire::{BATCH, TracedHead};

/// Most functions in a frame.
pub(super) const MAX_FUNCTIONS: usize = BATCH / size_of::<u32>();

/// What of a function was traced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TracedOf {
    /// Its entries.
    Entries,
    /// Its returns and tail jumps.
    Returns,
}

/// Functions that one tracer traced from one time to another, whether they were called or not.
#[derive(Clone, Copy, Debug)]
pub struct Traced<'a> {
    /// From when, in ticks.
    pub since: u64,
    /// Until when, in ticks; [`u64::MAX`] for the end of the trace.
    pub until: u64,
    /// The tracer.
    pub tracer: u8,
    /// What of them; `None` for what only later versions know.
    pub of: Option<TracedOf>,
    functions: &'a [U32],
}

impl<'a> Traced<'a> {
    /// The functions, as in records: entry addresses less the header's `address_base`.
    pub fn functions(&self) -> impl ExactSizeIterator<Item = u32> + 'a {
        self.functions.iter().map(|function| function.get())
    }

    /// `None` when it is shorter than it says.
    pub(super) fn decode(payload: &'a [u8]) -> Option<Self> {
        let (head, rest) = TracedHead::ref_from_prefix(payload).ok()?;
        let count = usize::try_from(head.count.get()).ok()?;
        let (functions, _) = <[U32]>::ref_from_prefix_with_elems(rest, count).ok()?;
        let of = match head.of {
            0 => Some(TracedOf::Entries),
            1 => Some(TracedOf::Returns),
            _ => None,
        };
        let (since, until) = (head.since.get(), head.until.get());
        Some(Self { since, until, tracer: head.tracer, of, functions })
    }
}

/// A stretch of time in which a tracer traced some functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Stretch {
    /// From when, in ticks.
    pub since: u64,
    /// Until when, in ticks; [`u64::MAX`] for the end of the trace.
    pub until: u64,
    /// The tracer.
    pub tracer: u8,
    /// What of the functions.
    pub of: TracedOf,
}

impl Stretch {
    /// Appends the payload for so many functions, [`MAX_FUNCTIONS`] at most.
    pub(super) fn encode(&self, functions: &[u32], out: &mut Vec<u8>) {
        let head = TracedHead {
            since: self.since.into(),
            until: self.until.into(),
            count: u32::try_from(functions.len()).unwrap_or(0).into(),
            tracer: self.tracer,
            of: match self.of {
                TracedOf::Entries => 0,
                TracedOf::Returns => 1,
            },
            reserved: 0.into(),
        };
        out.extend_from_slice(head.as_bytes());
        out.extend(functions.iter().flat_map(|function| function.to_le_bytes()));
    }
}
