//! Remembers which function a pair of a site and a caller means. Most records are of a few thousand
//! such pairs: one look finds what takes several otherwise.

use crate::tracer::RawRecord;
use std::hint::select_unpredictable;

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

/// Pairs that share a place: as many as a cache line has room for.
const WAYS: usize = 4;
/// Pairs that are remembered at most.
const SLOTS: usize = 1 << 15;
const SETS: usize = SLOTS / WAYS;
/// By how much a product is shifted to be the number of a set.
const SHIFT: u32 = u64::BITS - SETS.ilog2();

/// What is known of a pair, in one word: the low half of the function's entry address, the program, the one tracer
/// that it is of if its shape is known, and that shape.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known(u64);

/// What a record with nothing unusual is for its one tracer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// An entry without fields.
    Entry = 1,
    /// An entry whose one field is the stack pointer.
    Frame = 2,
    /// A return, the same.
    Return = 3,
}

impl Shape {
    /// How many fields such records have.
    #[inline]
    pub(super) fn fields(self) -> u8 {
        match self {
            Self::Entry => 0,
            Self::Frame | Self::Return => 1,
        }
    }
}

impl Known {
    /// Of no record.
    const NOTHING: Self = Self((RawRecord::NO_PROGRAM as u64) << 32);

    fn new(function: u32, program: u16, shape: Option<(Shape, u8)>) -> Self {
        let (shape, tracer) = shape.map_or((0, 0), |(shape, tracer)| (shape as u64, tracer));
        Self(u64::from(function) | u64::from(program) << 32 | u64::from(tracer) << 48 | shape << 56)
    }

    /// Low half of the function's entry address.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "the low half")]
    pub(super) fn function(self) -> u32 {
        self.0 as u32
    }

    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "a part of the upper half")]
    fn program(self) -> u16 {
        (self.0 >> 32) as u16
    }

    /// What such a record is, and nothing else, and for which tracer.
    #[inline]
    pub(super) fn shape(self) -> Option<(Shape, u8)> {
        let [.., tracer, shape] = self.0.to_le_bytes();
        let shape = match shape {
            1 => Shape::Entry,
            2 => Shape::Frame,
            3 => Shape::Return,
            _ => return None,
        };
        Some((shape, tracer))
    }

    #[inline]
    pub(super) fn place(self) -> Place {
        Place { function: self.function(), fresh: false, target: 0, end: End::Usual }
    }
}

/// Pairs that share a place, the one that was remembered last first. 0 is none: no site writes that.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Set {
    pairs: [u64; WAYS],
    known: [Known; WAYS],
}

// One line of a core's cache.
const _: () = assert!(size_of::<Set>() == 64);

const EMPTY: Set = Set { pairs: [0; WAYS], known: [Known::NOTHING; WAYS] };

/// Pairs of sites and callers, with programs, of which the stream has been told all that a reader
/// needs.
#[derive(Debug)]
pub(super) struct Memo(Box<[Set; SETS]>);

impl Default for Memo {
    fn default() -> Self {
        Self(Box::new([EMPTY; SETS]))
    }
}

impl Memo {
    /// What is known of a record, if it is remembered.
    #[inline]
    pub(super) fn find(&self, record: &RawRecord) -> Option<Known> {
        let pair = pair(record);
        let set = &self.0[set_of(pair)];
        let ways = set.pairs.iter().zip(&set.known);
        let found = ways.fold(Known::NOTHING.0, |found, (&other, known)| {
            // Which of them it is no processor can predict.
            select_unpredictable(other == pair, known.0, found)
        });
        let found = Known(found);
        (found.program() == record.program).then_some(found)
    }

    /// Remembers the place of a record, unless there is more to it than its function; `shape` is
    /// that of its program's records.
    pub(super) fn keep(&mut self, record: &RawRecord, place: &Place, shape: Option<(Shape, u8)>) {
        if place.target != 0 || place.end != End::Usual {
            return;
        }
        let pair = pair(record);
        let Set { pairs, known } = &mut self.0[set_of(pair)];
        // The same pair of another program, or the one that was remembered longest ago.
        let instead = pairs.iter().position(|&other| other == pair).unwrap_or(WAYS - 1);
        pairs[..=instead].rotate_right(1);
        known[..=instead].rotate_right(1);
        (pairs[0], known[0]) = (pair, Known::new(place.function, record.program, shape));
    }

    /// Sites may mean other functions, or callers have other names.
    pub(super) fn forget(&mut self) {
        self.0.fill(EMPTY);
    }
}

#[inline]
fn pair(record: &RawRecord) -> u64 {
    u64::from(record.caller) << 32 | u64::from(record.site)
}

/// Where a pair is remembered.
#[inline]
fn set_of(pair: u64) -> usize {
    // Multiplicative hashing: the upper bits of the product depend on every bit.
    let product = pair.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    usize::try_from(product >> SHIFT).unwrap_or(0) % SETS
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
        memo.keep(&record(5, 7, 0), &place(1), Some((Shape::Entry, 3)));
        let found = |memo: &Memo, record| memo.find(&record).map(Known::function);
        assert_eq!(memo.find(&record(5, 7, 0)).unwrap().shape(), Some((Shape::Entry, 3)));
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
        assert_eq!((known.shape(), known.place()), (None, Place { fresh: false, ..place(1) }));
    }

    // A pair has one program at a time: with two, the one that is found first would be the wrong one for ever.
    #[test]
    fn a_pair_is_remembered_once() {
        let mut memo = Memo::default();
        for program in [0, 1, 0] {
            memo.keep(&record(5, 7, program), &place(u32::from(program)), None);
            let found = [0, 1].map(|it| memo.find(&record(5, 7, it)).is_some());
            assert_eq!(found, [program == 0, program == 1]);
        }
    }

    // Those that share a place take turns: none is ever taken for another.
    #[test]
    fn more_pairs_than_slots_are_never_mixed_up() {
        let mut memo = Memo::default();
        let all = 0..3 * u32::try_from(SLOTS).unwrap();
        for number in all.clone() {
            memo.keep(&record(number, number / 3, 0), &place(number), None);
        }
        let found = all.filter_map(|number| {
            let known = memo.find(&record(number, number / 3, 0))?;
            assert_eq!(known.function(), number);
            Some(number)
        });
        assert!(found.count() > SLOTS / 2);
    }
}
