//! Remembers which function a pair of a site and a caller means. Most records are of a few thousand
//! such pairs: one look finds what takes several otherwise.

use crate::tracer::RawRecord;

/// Which function a record is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Low half of its entry address.
    pub(super) function: u32,
    /// The stream has no name for it yet.
    pub(super) fresh: bool,
    /// Low half of the entry address of the function that it is left for; 0 when not known.
    pub(super) target: u32,
    /// What the reader must know of where it is left.
    pub(super) end: End,
}

/// What is special of where a function is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Nothing.
    Usual,
    /// By a jump to who is not traced and calls nothing: nothing else is heard of it.
    Last,
    /// It is not traced itself: this is the end of those that jumped to it, and of nothing else.
    Aid,
}

/// Pairs that are remembered at most: those that share a slot take turns.
const SLOTS: usize = 1 << 14;

/// What is known of a pair.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known {
    site: u32,
    caller: u32,
    /// Low half of the function's entry address.
    pub(super) function: u32,
    program: u16,
    /// The one tracer that has an entry of it, if there is nothing else to tell.
    tracer: u8,
    is_entry: bool,
}

// All of them fit into a core's own cache, beside the records.
const _: () = assert!(size_of::<Known>() == 16);

const EMPTY: Known = Known {
    site: 0,
    caller: 0,
    function: 0,
    program: RawRecord::NO_PROGRAM,
    tracer: 0,
    is_entry: false,
};

impl Known {
    /// The tracer for which such a record without fields is an entry, and nothing else.
    #[inline]
    pub(super) fn entry_of(&self) -> Option<u8> {
        self.is_entry.then_some(self.tracer)
    }

    #[inline]
    pub(super) fn place(&self) -> Place {
        Place { function: self.function, fresh: false, target: 0, end: End::Usual }
    }
}

/// Pairs of sites and callers, with programs, of which the stream has been told all that a reader
/// needs.
#[derive(Debug)]
pub(super) struct Memo(Box<[Known; SLOTS]>);

impl Default for Memo {
    fn default() -> Self {
        Self(Box::new([EMPTY; SLOTS]))
    }
}

impl Memo {
    /// What is known of a record, if it is remembered.
    #[inline]
    pub(super) fn find(&self, record: &RawRecord) -> Option<&Known> {
        let known = &self.0[slot(record)];
        let same = known.site == record.site
            && known.caller == record.caller
            && known.program == record.program;
        same.then_some(known)
    }

    /// Remembers the place of a record, unless there is more to it than its function; `entry_of` is
    /// that of its program's records.
    pub(super) fn keep(&mut self, record: &RawRecord, place: &Place, entry_of: Option<u8>) {
        if place.target == 0 && place.end == End::Usual {
            let &RawRecord { site, caller, program, .. } = record;
            let (function, tracer) = (place.function, entry_of.unwrap_or(0));
            let is_entry = entry_of.is_some();
            self.0[slot(record)] = Known { site, caller, function, program, tracer, is_entry };
        }
    }

    /// Sites may mean other functions, or callers have other names.
    pub(super) fn forget(&mut self) {
        self.0.fill(EMPTY);
    }
}

/// Where a record is remembered.
#[inline]
fn slot(record: &RawRecord) -> usize {
    let pair = u64::from(record.site) << 32 | u64::from(record.caller);
    // Multiplicative hashing: the upper bits of the product depend on every bit.
    let product = pair.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    usize::try_from(product >> 50).unwrap_or(0) % SLOTS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(site: u32, caller: u32, program: u16) -> RawRecord {
        RawRecord { site, caller, program, ..RawRecord::default() }
    }

    fn place(function: u32) -> Place {
        Place { function, fresh: true, target: 0, end: End::Usual }
    }

    // Any of site, caller and program alone is another record: it would get the function or miss the
    // name of its caller.
    #[test]
    fn only_the_same_record_is_remembered() {
        let mut memo = Memo::default();
        memo.keep(&record(5, 7, 0), &place(1), Some(3));
        let found = |memo: &Memo, record| memo.find(&record).map(|known| known.function);
        assert_eq!(memo.find(&record(5, 7, 0)).unwrap().entry_of(), Some(3));
        assert_eq!(found(&memo, record(5, 7, 0)), Some(1));
        for other in [record(5, 8, 0), record(6, 7, 0), record(5, 7, 1), record(0, 0, 0)] {
            assert_eq!(found(&memo, other), None);
        }
        memo.forget();
        assert_eq!(found(&memo, record(5, 7, 0)), None);
    }

    // A jump has a target, which is told in its record.
    #[test]
    fn what_has_more_than_a_function_is_not_remembered() {
        let mut memo = Memo::default();
        memo.keep(&record(5, 7, 0), &Place { target: 9, ..place(1) }, None);
        memo.keep(&record(5, 7, 0), &Place { end: End::Aid, ..place(1) }, None);
        assert!(memo.find(&record(5, 7, 0)).is_none());
        memo.keep(&record(5, 7, 0), &place(1), None);
        let known = memo.find(&record(5, 7, 0)).unwrap();
        assert_eq!((known.entry_of(), known.place()), (None, Place { fresh: false, ..place(1) }));
    }

    // Those that share a slot take turns: neither is ever taken for the other.
    #[test]
    fn more_pairs_than_slots_are_never_mixed_up() {
        let mut memo = Memo::default();
        let all = 0..3 * u32::try_from(SLOTS).unwrap();
        for number in all.clone() {
            memo.keep(&record(number, number / 3, 0), &place(number), None);
        }
        let found = all.filter_map(|number| {
            let known = memo.find(&record(number, number / 3, 0))?;
            assert_eq!(known.function, number);
            Some(number)
        });
        assert!(found.count() > SLOTS / 2);
    }
}
