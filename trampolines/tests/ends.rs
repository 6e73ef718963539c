//! Conditions on the duration of a call and on its returned value: exactly the matching ends are recorded, and every
//! end frees its place.

mod common;

use common::arch::{ADDRESSINGS, ARGUMENTS, Addressing, VALUE, stack_bias, stop, ticks};
use common::{FakeGuest, Random, entry_program, words};
use core::sync::atomic::{AtomicU64, Ordering};
use vmtrace_trampolines::condition::{Operand, Relation, Test};
use vmtrace_trampolines::histogram::Calls;
use vmtrace_trampolines::{Condition, Counts, Field, Overflow, Point, Program, ProgramError};

const CPUS: u64 = 2;
/// Longer than any call here takes by itself, and less than the clock of a machine tells that was
/// started minutes ago.
const LONG: u64 = 1 << 38;
/// Of the condition on an argument.
const MEANT: u64 = 0x1234_5678_9abc;

fn number(operand: Operand, relation: Relation, value: u64) -> Condition {
    Condition::Test(Test::Number { operand, relation, value })
}

/// A guest with open calls.
struct Ending {
    guest: FakeGuest,
    calls: Calls,
    open: &'static [AtomicU64],
}

impl Ending {
    fn new(addressing: Addressing) -> Self {
        let guest = FakeGuest::new(CPUS, 1 << 16, addressing, Overflow::Drop);
        let (address, open) = words(Calls::SIZE / 8 + 8);
        let calls = Calls { address: address.next_multiple_of(64) };
        Self { guest, calls, open }
    }

    /// Calls of function 0 begin at its entry; they end where function 1 is left.
    fn end(&mut self, addressing: Addressing, entry: Option<Condition>, end: &Program) {
        let counts = Some(Counts::Begin(None, self.calls));
        let begin = Program { counts, condition: entry, ..entry_program() };
        let begin = self.guest.add(&begin, addressing, None);
        self.guest.call_from(0, begin);
        let program = self.guest.add(end, addressing, None);
        match end.point {
            Point::Tail => drop(self.guest.tail_from(1, program)),
            _ => drop(self.guest.return_from(1, program)),
        }
    }

    /// Places that are taken: their stack pointers and where they are.
    fn taken(&self) -> Vec<(u64, usize)> {
        let places = (usize::try_from(Calls::PLACES / 8).unwrap()..self.open.len()).step_by(4);
        let place = |place: usize| (self.open[place].load(Ordering::Relaxed), place);
        places.map(place).filter(|place| place.0 != 0).collect()
    }

    fn header(&self, offset: u64) -> &AtomicU64 {
        &self.open[usize::try_from(offset / 8).unwrap()]
    }
}

// A call that is left out although it is meant looks as if it had not been made; a place that a call which is not
// meant keeps is one less for all others.
#[test]
fn exactly_the_ends_that_are_meant_are_recorded() {
    let mut random = Random(0x51ed_270b_9f86_3c21);
    let result = Operand::Value { bytes: 4, signed: true };
    let (mut all, mut told) = (0, 0);
    for addressing in ADDRESSINGS {
        for round in 0..24 {
            let point = if round % 3 == 2 { Point::Tail } else { Point::Return };
            if cfg!(target_arch = "riscv64") && point == Point::Tail {
                continue;
            }
            let argument = Operand::Argument { number: 0, bytes: 8, signed: false };
            let entry = (round % 2 == 0).then(|| number(argument, Relation::Equal, MEANT));
            let by_time = round % 4 < 2;
            let by_value = point == Point::Return && round % 4 > 0;
            let duration = number(Operand::Duration, Relation::Greater, LONG / 2);
            let negative = number(result, Relation::Less, 0);
            let tests = [(by_time, duration), (by_value, negative)];
            let tests = tests.into_iter().filter_map(|(there, test)| there.then_some(test));
            let mut ending = Ending::new(addressing);
            let mut fields = vec![Field::Stack, Field::Duration];
            if point == Point::Return {
                fields.insert(1, Field::Value);
            }
            let condition = Some(Condition::All(tests.collect()));
            let since = Some(ending.calls);
            let program = Program { point, fields, condition, since, ..entry_program() };
            ending.end(addressing, entry.clone(), &program);
            let mut tails = [ending.guest.ring(0).start(), ending.guest.ring(1).start()];
            for _ in 0..40 {
                let (first, other) = (random.below(CPUS), random.below(CPUS));
                ending.guest.set_current(first, 1);
                let begun = entry.is_none() || random.below(2) == 0;
                let given = if begun { MEANT } else { 5 };
                ending.guest.call(0, Point::Entry, &mut random, &[(ARGUMENTS[0], given)]);
                let places = ending.taken();
                assert_eq!(places.len(), usize::from(begun));
                let took = if random.below(2) == 0 { LONG } else { 0 };
                for &(_, place) in &places {
                    ending.open[place + 1].fetch_sub(took, Ordering::Relaxed);
                }
                ending.guest.set_current(other, 1);
                let value = random.next();
                ending.guest.call(1, point, &mut random, &[(VALUE, value)]);
                assert!(ending.taken().is_empty(), "{program:?}");
                let negative = value & 0x8000_0000 != 0;
                let meant = begun && (!by_time || took != 0) && (!by_value || negative);
                let mut records = Vec::new();
                let at = usize::try_from(other).unwrap();
                ending.guest.drain(other, &mut tails[at], |record| records.push(record));
                assert_eq!(records.len(), usize::from(meant), "{program:?} {value:#x} {took}");
                for record in records {
                    let stack = record.fields[0].wrapping_add(stack_bias(point));
                    assert_eq!(stack, places[0].0);
                    if point == Point::Return {
                        assert_eq!(record.fields[1], value);
                    }
                    let duration = *record.fields.last().unwrap();
                    assert!((took..took + LONG / 4).contains(&duration), "{duration:#x}");
                    told += 1;
                }
                all += 1;
            }
        }
    }
    assert!(told > all / 8 && told < all * 7 / 8, "{told} of {all}");
}

// A call without a place that is not counted is lost silently, and one that began before all was changed has a
// wrong duration.
#[test]
fn what_cannot_be_told_is_counted() {
    let mut random = Random(11);
    for addressing in ADDRESSINGS {
        let mut ending = Ending::new(addressing);
        let since = Some(ending.calls);
        let fields = vec![Field::Stack, Field::Duration];
        let program = Program { point: Point::Return, fields, since, ..entry_program() };
        ending.end(addressing, None, &program);
        ending.guest.set_current(0, 1);
        let call = |random: &mut Random| ending.guest.call(0, Point::Entry, random, &[(0, 0)]);
        let end = |random: &mut Random| ending.guest.call(1, Point::Return, random, &[(0, 0)]);
        call(&mut random);
        let (stack, first) = ending.taken()[0];
        let tried = usize::try_from(Calls::TRIED).unwrap();
        for place in 0..tried {
            ending.open[first + 4 * place].store(1 + place as u64, Ordering::Relaxed);
        }
        for missed in 1..4 {
            call(&mut random);
            assert_eq!(ending.header(Calls::CROWDED).load(Ordering::Relaxed), missed);
        }
        end(&mut random);
        // The last one that is tried is found, and others are left alone.
        ending.open[first + 4 * (tried - 1)].store(0, Ordering::Relaxed);
        call(&mut random);
        assert_eq!(ending.open[first + 4 * (tried - 1)].load(Ordering::Relaxed), stack);
        end(&mut random);
        assert_eq!(ending.taken().len(), tried - 1);
        call(&mut random);
        ending.header(0).store(ticks(), Ordering::Relaxed);
        end(&mut random);
        assert_eq!(ending.taken().len(), tried - 1);
        let mut records = 0;
        ending.guest.drain(0, &mut ending.guest.ring(0).start(), |_| records += 1);
        assert_eq!(records, 1);
    }
}

// A stop too early, too late or twice is at another call than the one that was meant, and one that keeps its call's
// place takes it from others; one that does not tell where it is, or that loses what the function returns, is at no
// call of that kind at all.
#[test]
fn a_cpu_stops_at_the_very_end_that_makes_the_counter_0() {
    let mut random = Random(17);
    let negative = number(Operand::Value { bytes: 4, signed: true }, Relation::Less, 0);
    let long = number(Operand::Duration, Relation::Greater, LONG / 2);
    for addressing in ADDRESSINGS {
        for (point, condition, timed) in [
            (Point::Return, negative.clone(), false),
            (Point::Return, long.clone(), true),
            (Point::Tail, long.clone(), true),
            (Point::Tail, Condition::All(vec![]), false),
        ] {
            if cfg!(target_arch = "riscv64") && point == Point::Tail {
                continue;
            }
            let mut ending = Ending::new(addressing);
            let (address, words) = words(2);
            words[0].store(3, Ordering::Relaxed);
            let counts = Counts::Down { number: 0, counter: address, trap: stop(address + 8) };
            let (counts, since) = (Some(counts), timed.then_some(ending.calls));
            let all = condition == Condition::All(vec![]);
            let condition = Some(condition);
            let program = Program { point, counts, since, condition, ..entry_program() };
            // All calls are recorded behind it.
            let next = Program { point, ..entry_program() };
            let next = ending.guest.add(&next, addressing, None);
            ending.end(addressing, None, &program);
            let both = ending.guest.add(&program, addressing, Some(next));
            let named = match point {
                Point::Tail => ending.guest.tail_from(1, both),
                _ => ending.guest.return_from(1, both),
            };
            ending.guest.set_current(0, 1);
            let mut meant = 0;
            for _ in 0..20 {
                let is_long = random.below(2) == 0;
                if timed {
                    ending.guest.call(0, Point::Entry, &mut random, &[(0, 0)]);
                    let began = &ending.open[ending.taken()[0].1 + 1];
                    began.fetch_sub(if is_long { LONG } else { 0 }, Ordering::Relaxed);
                }
                let value = random.next();
                ending.guest.call(1, point, &mut random, &[(VALUE, value)]);
                assert!(ending.taken().is_empty(), "{program:?}");
                let is_meant = if timed { is_long } else { all || value & 0x8000_0000 != 0 };
                meant += u64::from(is_meant);
                let stops = is_meant && meant == 3;
                let told = words[1].swap(0, Ordering::Relaxed) & 0xffff_ffff;
                assert_eq!(told, if stops { named.into() } else { 0 }, "{meant} {program:?}");
            }
            assert!(meant > 3 && words[0].load(Ordering::Relaxed) == 3_u64.wrapping_sub(meant));
            let mut records = 0;
            ending.guest.drain(0, &mut ending.guest.ring(0).start(), |record| {
                assert_eq!(record.common.site, named);
                records += 1;
            });
            assert_eq!(records, 20);
        }
    }
}

// What a function returns that jumps to another is that one's: whether such a call was meant is not known.
#[cfg(target_arch = "x86_64")]
#[test]
fn calls_that_go_on_elsewhere_are_counted() {
    let mut random = Random(12);
    for addressing in ADDRESSINGS {
        for known in [false, true] {
            let mut ending = Ending::new(addressing);
            let counts = Some(Counts::Untold(ending.calls));
            let since = known.then_some(ending.calls);
            let by_time = number(Operand::Duration, Relation::Greater, LONG / 2);
            let condition = known.then_some(by_time);
            let point = Point::Tail;
            let program = Program { point, counts, since, condition, ..entry_program() };
            ending.end(addressing, None, &program);
            ending.guest.set_current(0, 1);
            for took in [LONG, 0, LONG, 0] {
                if known {
                    ending.guest.call(0, Point::Entry, &mut random, &[(0, 0)]);
                    ending.open[ending.taken()[0].1 + 1].fetch_sub(took, Ordering::Relaxed);
                }
                ending.guest.call(1, point, &mut random, &[(0, 0)]);
                assert!(ending.taken().is_empty());
            }
            let counted = ending.header(Calls::UNTOLD).load(Ordering::Relaxed);
            assert_eq!(counted, if known { 2 } else { 4 });
        }
    }
}

// Who is called next needs to know which function it is.
#[test]
fn a_program_that_looks_for_a_beginning_goes_on_to_others() {
    for addressing in ADDRESSINGS {
        let mut ending = Ending::new(addressing);
        let never = Some(Condition::Any(vec![]));
        let (since, point) = (Some(ending.calls), Point::Return);
        let next = Program { point, fields: vec![Field::Value], ..entry_program() };
        let next = ending.guest.add(&next, addressing, None);
        let program = Program { point, since, condition: never, ..entry_program() };
        ending.end(addressing, None, &program);
        let both = ending.guest.add(&program, addressing, Some(next));
        let named = ending.guest.return_from(1, both);
        ending.guest.set_current(0, 1);
        let mut random = Random(3);
        for call in 0..10 {
            ending.guest.call(0, Point::Entry, &mut random, &[(0, 0)]);
            ending.guest.call(1, point, &mut random, &[(VALUE, call)]);
            assert!(ending.taken().is_empty());
        }
        let mut records = Vec::new();
        ending.guest.drain(0, &mut ending.guest.ring(0).start(), |record| records.push(record));
        assert_eq!(records.len(), 10);
        for (call, record) in (0..).zip(&records) {
            assert_eq!((record.common.site, record.fields[0]), (named, call));
        }
    }
}

// A number of ticks too many leaves out the very calls that were asked for.
#[test]
fn durations_are_compared_as_exactly_as_a_clock_can() {
    for hz in [1000_u128, 32_768, 10_000_000, 999_999_937, 1_000_000_000, 2_899_999_000] {
        for ns in [0, 1, 999, 1_000_000, 1_000_000_000, 123_456_789_012] {
            let exact = ns * hz / 1_000_000_000;
            for ticks in [exact.saturating_sub(1), exact, exact + 1] {
                for (relation, expected) in [
                    (Relation::Less, ticks * 1_000_000_000 < ns * hz),
                    (Relation::LessEqual, ticks * 1_000_000_000 <= ns * hz),
                    (Relation::Greater, ticks * 1_000_000_000 > ns * hz),
                    (Relation::GreaterEqual, ticks * 1_000_000_000 >= ns * hz),
                ] {
                    let written = number(Operand::Duration, relation, u64::try_from(ns).unwrap());
                    let all = Condition::Any(vec![Condition::All(vec![written])]);
                    let compiled = all.in_ticks(u64::try_from(hz).unwrap());
                    let Some(&Test::Number { value, .. }) = compiled.tests().next() else {
                        panic!("{compiled:?}")
                    };
                    let value: u128 = value.into();
                    let holds = match relation {
                        Relation::Less => ticks < value,
                        Relation::LessEqual => ticks <= value,
                        Relation::Greater => ticks > value,
                        _ => ticks >= value,
                    };
                    assert_eq!(holds, expected, "{ticks} {relation:?} {ns} at {hz}");
                }
            }
        }
    }
    let ever = number(Operand::Duration, Relation::Greater, u64::MAX).in_ticks(u64::MAX);
    assert_eq!(ever, number(Operand::Duration, Relation::Greater, u64::MAX));
}

#[test]
fn ends_that_cannot_be_are_refused() {
    let since = Some(Calls { address: 0x10000 });
    let check = |point, fields: &[Field], counts, since| {
        let fields = fields.to_vec();
        Program { point, fields, counts, since, ..entry_program() }.check()
    };
    assert_eq!(check(Point::Return, &[Field::Duration], None, since), Ok(()));
    assert_eq!(check(Point::Tail, &[Field::Duration], None, since), Ok(()));
    assert!(matches!(
        check(Point::Return, &[Field::Duration], None, None),
        Err(ProgramError::Field(Field::Duration, Point::Return))
    ));
    let untold = since.map(Counts::Untold);
    for (point, counts, since) in [
        (Point::Entry, None, since),
        (Point::Return, untold, since),
        (Point::Tail, since.map(|calls| Counts::Begin(None, calls)), None),
    ] {
        assert!(matches!(check(point, &[], counts, since), Err(ProgramError::Counts(_))));
    }
    let odd = Some(Calls { address: 0x10008 });
    assert!(matches!(check(Point::Return, &[], None, odd), Err(ProgramError::Table(_, 64))));
    let down = Counts::Down { number: 0, counter: 0x1000, trap: &[] };
    assert_eq!(check(Point::Tail, &[], Some(down), since), Ok(()));
    assert!(matches!(check(Point::Entry, &[], Some(down), since), Err(ProgramError::Counts(_))));
    // Beyond what instructions reach, and around the end of all memory.
    for address in [1 << 40, 0x7fff_ffc0, u64::MAX - 63] {
        let far = Some(Calls { address });
        assert!(matches!(check(Point::Return, &[], None, far), Err(ProgramError::Range(..))));
    }
}
