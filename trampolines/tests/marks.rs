//! Marks of calls that go on in another function: its ends are recorded where they are theirs, and nowhere else.

mod common;

use common::entry_program;
#[cfg(target_arch = "x86_64")]
use common::{
    FakeGuest, Random,
    arch::{ADDRESSINGS, stack_bias},
    words,
};
#[cfg(target_arch = "x86_64")]
use core::sync::atomic::Ordering;
use vmtrace_trampolines::marks::{MarkIf, Marks};
#[cfg(target_arch = "x86_64")]
use vmtrace_trampolines::{Condition, Overflow};
use vmtrace_trampolines::{Counts, Field, Point, Program, ProgramError};

fn ending(point: Point, marks: Marks) -> Program {
    Program { point, fields: vec![Field::Stack], marked: Some(marks), ..entry_program() }
}

fn marking(marks: Marks) -> Program {
    Program {
        point: Point::Tail,
        counts: Some(Counts::Mark(marks, MarkIf::Always)),
        ..entry_program()
    }
}

// A return without a mark is a record that nobody wants, of every call of a function that is not traced; a mark that
// stays is one at the next call.
#[test]
#[cfg(target_arch = "x86_64")]
fn ends_are_recorded_where_there_is_a_mark() {
    let mut random = Random(0x2d35_8dcc_aa6c_78a5);
    for addressing in ADDRESSINGS {
        for point in [Point::Return, Point::Tail, Point::Beyond] {
            let mut guest = FakeGuest::new(1, 1 << 16, addressing, Overflow::Drop);
            let (address, all) = words(Marks::SIZE / 8 + 512);
            let marks = Marks { address: address.next_multiple_of(4096) };
            let taken = || {
                let taken = all.iter().map(|word| word.load(Ordering::Relaxed));
                taken.enumerate().filter(|&(_, word)| word != 0).collect::<Vec<_>>()
            };
            let mark = guest.add(&marking(marks), addressing, None);
            let end = guest.add(&ending(point, marks), addressing, None);
            let never = Program { condition: Some(Condition::Any(vec![])), ..marking(marks) };
            let never = guest.add(&never, addressing, None);
            guest.set_current(0, 1);
            let mut tail = guest.ring(0).start();
            for round in 0..60 {
                let left = usize::try_from(random.below(3)).unwrap();
                for program in [mark, never].get(left..=left).unwrap_or_default() {
                    guest.tail_from(0, *program);
                    guest.call(0, Point::Tail, &mut random, &[]);
                }
                let marked = taken();
                assert_eq!(marked.len(), usize::from(left == 0));
                // Another one takes the place: its mark is not this one's.
                let lost = round % 5 == 0;
                let other = marked.iter().filter(|_| lost).map(|&(place, word)| (place, word + 64));
                let other: Vec<_> = other.collect();
                other.iter().for_each(|&(at, word)| all[at].store(word, Ordering::Relaxed));
                guest.come_from(1, point, end);
                guest.call(1, point, &mut random, &[]);
                let mut records = Vec::new();
                guest.drain(0, &mut tail, |record| records.push(record));
                let stacks: Vec<_> =
                    records.iter().map(|it| it.fields[0].wrapping_add(stack_bias(point))).collect();
                let own = marked.iter().filter(|_| !lost);
                let expected: Vec<_> = own.map(|(_, word)| word + u64::from(Marks::LESS)).collect();
                assert_eq!(
                    (stacks, taken()),
                    (expected, other.clone()),
                    "{point:?} {addressing:?}"
                );
                other.iter().for_each(|&(at, _)| all[at].store(0, Ordering::Relaxed));
            }
        }
    }
}

#[test]
fn marks_that_cannot_be_are_refused() {
    let marks = Marks { address: 0x10000 };
    for point in [Point::Return, Point::Tail, Point::Beyond] {
        assert_eq!(ending(point, marks).check(), Ok(()));
    }
    assert_eq!(marking(marks).check(), Ok(()));
    for program in [
        Program { point: Point::Entry, ..marking(marks) },
        Program { point: Point::Return, ..marking(marks) },
        Program { marked: Some(marks), ..marking(marks) },
        ending(Point::Entry, marks),
    ] {
        assert!(matches!(program.check(), Err(ProgramError::Counts(_))), "{program:?}");
    }
    let odd = Marks { address: 0x10010 };
    assert!(matches!(ending(Point::Return, odd).check(), Err(ProgramError::Table(_, 4096))));
    for address in [1 << 40, 0x7fff_f000, u64::MAX - 4095] {
        let far = Marks { address };
        assert!(matches!(ending(Point::Return, far).check(), Err(ProgramError::Range(..))));
        assert!(matches!(marking(far).check(), Err(ProgramError::Range(..))));
    }
}
