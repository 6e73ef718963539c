//! Programs that count: each call once, in its site's counter, without a change that the function
//! notices.

mod common;

use common::arch::{
    ADDRESSINGS, ARGUMENTS, Addressing, NOP, OWN, Registers, SITE_RETURN, STACK, free, site, stop,
};
use common::{FakeGuest, Random, entry_program, registers, words};
use core::sync::atomic::{AtomicU64, Ordering};
use std::collections::BTreeMap;
use std::slice;
use std::sync::Barrier;
use vmtrace_trampolines::condition::{Operand, Relation, Test};
use vmtrace_trampolines::{
    Condition, Counters, Counts, Field, Overflow, Point, Program, ProgramError,
};

const CPUS: u64 = 3;
/// Bytes of all tables of a test.
const TABLES: u64 = 64 << 10;

fn counting(counts: Counters) -> Program {
    Program { counts: Some(Counts::Up(counts)), ..entry_program() }
}

/// A guest without a program that counts, and memory for counters, above it or below, with its
/// address.
fn guest(above: bool, addressing: Addressing) -> (FakeGuest, u64, &'static [AtomicU64]) {
    let early = (!above).then(|| words(TABLES / 8));
    let guest = FakeGuest::new(CPUS, 1 << 15, addressing, Overflow::Drop);
    let (address, counters) = early.unwrap_or_else(|| words(TABLES / 8));
    assert_eq!(address > guest.site(0), above);
    (guest, address, counters)
}

// Counters of functions of modules are further away than one instruction can tell.
#[cfg(target_arch = "riscv64")]
#[test]
fn calls_are_counted_beyond_two_gigabytes() {
    let mut random = Random(3);
    for (far, rounds) in [(0x8000_0000, false), (0x9123_4000, true), (0xe000_0000, false)] {
        let mut guest = FakeGuest::new(CPUS, 1 << 15, ADDRESSINGS[0], Overflow::Drop);
        let first = u64::from(guest.function(0));
        let address = (first + far).next_multiple_of(4096);
        let counters = common::words_at(address, TABLES / 8);
        let distance = address.wrapping_sub(if rounds { first & !7 } else { first });
        assert!(distance > i32::MAX.unsigned_abs().into());
        let counts = Counters { distance, stride: 4096, rounds };
        let number = guest.add(&counting(counts), ADDRESSINGS[0], None);
        guest.call_from(2, number);
        guest.set_current(1, 1);
        call(&guest, &mut random, 2);
        let place = 4096 + guest.site(2) - guest.site(0);
        assert_eq!(found(counters), BTreeMap::from([(place, 1)]), "{distance:#x}");
    }
}

/// The counters that are not 0, by their offset in bytes.
fn found(counters: &[AtomicU64]) -> BTreeMap<u64, u64> {
    let counts = counters.iter().map(|counter| counter.load(Ordering::Relaxed));
    (0..).step_by(8).zip(counts).filter(|&(_, count)| count != 0).collect()
}

/// Calls a function, and looks at what must be as it was. What registers were then.
fn call(guest: &FakeGuest, random: &mut Random, called: u64) -> Registers {
    let mut before = registers(0);
    before.x.fill_with(|| random.next());
    before.stack.fill_with(|| random.next());
    let mut after = before.clone();
    guest.run(called, &mut after);
    for register in (0..before.x.len()).filter(|&register| register != STACK) {
        if !free(Point::Entry).contains(&register) && !OWN.contains(&register) {
            assert_eq!(before.x[register], after.x[register], "register {register}");
        }
    }
    assert_eq!(before.stack, after.stack);
    before.back = after.back;
    before
}

// A call in another function's counter, or in one of another CPU that counts at the same time, is
// two wrong numbers; a register that is not kept is a function with another argument.
#[test]
fn calls_are_counted_by_site_and_by_cpu_and_nothing_else_is_written() {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for addressing in ADDRESSINGS {
        for (above, rounds, stride) in [
            (true, false, 4096),
            (false, false, 4096 * 3),
            (true, true, 4096 * 5),
            (false, true, 16384),
            (true, false, 0),
            (false, true, 0),
        ] {
            let (mut guest, address, counters) = guest(above, addressing);
            let first = u64::from(guest.function(0));
            let distance = address.wrapping_sub(if rounds { first & !7 } else { first });
            let counts = Counters { distance, stride, rounds };
            let number = guest.add(&counting(counts), addressing, None);
            (0..FakeGuest::SITES).for_each(|called| guest.call_from(called, number));
            let mut expected = BTreeMap::new();
            for _ in 0..500 {
                let (called, cpu) = (random.below(FakeGuest::SITES), random.below(CPUS));
                guest.set_current(cpu, 1);
                call(&guest, &mut random, called);
                let from = guest.site(called) - guest.site(0);
                *expected.entry(cpu * stride + from).or_insert(0) += 1;
            }
            assert_eq!(found(counters), expected, "{addressing:?} {counts:x?}");
            assert!((0..CPUS).all(|cpu| guest.head(cpu) == guest.ring(cpu).start()), "no records");
        }
    }
}

// Functions begin at multiples of 16, and are called behind an endbr64 or not: two with one counter
// would have wrong numbers, and a counter across two cache lines stops all CPUs for each call.
#[test]
fn rounding_finds_a_counter_for_each_place_of_a_call() {
    for addressing in ADDRESSINGS {
        let (mut guest, address, counters) = guest(true, addressing);
        let distance = address - guest.site(0);
        let counts = Counters { distance, stride: 4096, rounds: true };
        let number = guest.add(&counting(counts), addressing, None);
        // 5 and 9 bytes (riscv64: 8 and 12) behind where sites are.
        guest.call_from(0, number);
        let late = guest.site(1) + NOP.len() as u64;
        guest.set_site(1, &[&NOP[..], &site(late, guest.program(number))].concat());
        guest.set_current(1, 1);
        guest.hit(0);
        guest.hit(1);
        guest.hit(1);
        let places = if SITE_RETURN == 5 { [0, 8] } else { [8, 8] };
        let later = guest.site(1) - guest.site(0);
        let expected = [(4096 + places[0], 1), (4096 + later + places[1], 2)];
        assert_eq!(found(counters), BTreeMap::from(expected), "{addressing:?}");
    }
}

// A call that is not meant and is counted is a wrong number, like one that is meant and is not. (For
// all kinds of conditions: see their own tests.)
#[test]
fn calls_that_are_not_meant_are_not_counted() {
    let number = |operand, value| {
        Condition::Test(Test::Number { operand, relation: Relation::Equal, value })
    };
    let third = Operand::Argument { number: 2, bytes: 8, signed: false };
    let mut random = Random(7);
    for addressing in ADDRESSINGS {
        for (condition, calls) in [
            (number(Operand::Cpu, 1), [0, 2]),
            (number(third, 5), [1, 1]),
            (Condition::All(vec![number(Operand::Cpu, 0), number(third, 5)]), [1, 0]),
            (Condition::Any(vec![number(Operand::Cpu, 0), number(third, 5)]), [2, 1]),
            (Condition::Any(vec![]), [0, 0]),
            (Condition::All(vec![]), [2, 2]),
        ] {
            let (mut guest, address, counters) = guest(true, addressing);
            let distance = address - u64::from(guest.function(0));
            let counts = Counters { distance, stride: 4096, rounds: false };
            let program = Program { condition: Some(condition), ..counting(counts) };
            let number = guest.add(&program, addressing, None);
            guest.call_from(0, number);
            for (cpu, argument) in [(0, 5), (1, 5), (0, 6), (1, 6)] {
                guest.set_current(cpu, 1);
                let mut all = registers(random.next());
                all.x[ARGUMENTS[2]] = argument;
                guest.run(0, &mut all);
            }
            let expected = [(0, calls[0]), (4096, calls[1])].into_iter();
            let expected = expected.filter(|&(_, count)| count != 0).collect();
            assert_eq!(found(counters), expected, "{addressing:?} {program:?}");
        }
    }
}

// A call is lost where two count at once: tasks that were migrated, or CPUs with one table.
#[test]
fn threads_that_count_at_once_lose_nothing() {
    const CALLS: u64 = if cfg!(target_arch = "riscv64") { 50_000 } else { 500_000 };
    for addressing in ADDRESSINGS {
        for (stride, cpus) in [(4096, [1, 1]), (0, [0, 2])] {
            let (mut guest, address, counters) = guest(true, addressing);
            let distance = address - u64::from(guest.function(0));
            let counts = Counters { distance, stride, rounds: false };
            let number = guest.add(&counting(counts), addressing, None);
            guest.call_from(0, number);
            let (guest, start) = (&guest, &Barrier::new(cpus.len()));
            std::thread::scope(|scope| {
                for cpu in cpus {
                    scope.spawn(move || {
                        guest.set_current(cpu, 1);
                        start.wait();
                        (0..CALLS).for_each(|_| guest.hit(0));
                    });
                }
            });
            let expected = BTreeMap::from([(cpus[0] * stride, 2 * CALLS)]);
            assert_eq!(found(counters), expected, "{addressing:?} {stride}");
        }
    }
}

// Who goes on needs what the program was entered with: the records of a function that is counted
// as well would be of another site, of another caller or with other arguments.
#[test]
fn a_program_that_counts_goes_on_to_others() {
    let mut random = Random(11);
    let fields = vec![Field::Argument(0), Field::Argument(2), Field::Argument(3)];
    let recording = Program { fields, ..entry_program() };
    for addressing in ADDRESSINGS {
        let size = 1 << 16;
        let (address, counters) = words(TABLES / 8);
        let mut guest =
            FakeGuest::with(CPUS, size, addressing, Overflow::Drop, slice::from_ref(&recording));
        let distance = address.wrapping_sub(guest.function(0).into());
        let counts = Counters { distance, stride: 4096, rounds: false };
        let own = guest.add(&counting(counts), addressing, Some(0));
        // To another place, of all CPUs.
        let distance = distance.wrapping_add(CPUS * 4096);
        let all = counting(Counters { distance, stride: 0, rounds: false });
        let both = guest.add(&all, addressing, Some(own));
        guest.call_from(0, own);
        guest.call_from(1, both);
        let mut expected = BTreeMap::new();
        let mut tails = [0, 1, 2].map(|cpu| guest.ring(cpu).start());
        for _ in 0..200 {
            let (called, cpu) = (random.below(2), random.below(CPUS));
            guest.set_current(cpu, 1);
            let before = call(&guest, &mut random, called);
            let from = guest.site(called) - guest.site(0);
            *expected.entry(cpu * 4096 + from).or_insert(0) += 1;
            if called == 1 {
                *expected.entry(CPUS * 4096 + from).or_insert(0) += 1;
            }
            let mut records = Vec::new();
            let tail = &mut tails[usize::try_from(cpu).unwrap()];
            guest.drain(cpu, tail, |record| records.push(record));
            let [record] = &records[..] else { panic!("{records:?}") };
            assert_eq!(record.common.site, guest.function(called));
            assert_eq!(u64::from(record.common.caller), before.back & 0xffff_ffff);
            assert_eq!(record.fields, [0, 2, 3].map(|number| before.x[ARGUMENTS[number]]));
        }
        assert_eq!(found(counters), expected, "{addressing:?}");
    }
}

// A stop too early, too late or twice is a switch at another call than the one that was meant; one that does
// not tell its site is at no call at all.
#[test]
fn a_cpu_stops_at_the_very_call_that_makes_the_counter_0() {
    let on_cpu_1 = Test::Number { operand: Operand::Cpu, relation: Relation::Equal, value: 1 };
    let mut random = Random(13);
    for addressing in ADDRESSINGS {
        for (condition, at) in [(None, 5), (Some(Condition::Test(on_cpu_1.clone())), 9)] {
            let (mut guest, address, counters) = guest(true, addressing);
            counters[2].store(5, Ordering::Relaxed);
            let trap = stop(address + 24);
            let counts = Some(Counts::Down { number: 0, counter: address + 16, trap });
            let number =
                guest.add(&Program { counts, condition, ..entry_program() }, addressing, None);
            (0..2).for_each(|called| guest.call_from(called, number));
            for call in 1..20 {
                // Only some are meant where there is a condition.
                guest.set_current(call % 2, 1);
                let called = random.below(2);
                let mut after = registers(0);
                after.x.fill_with(|| random.next());
                let before = after.clone();
                guest.run(called, &mut after);
                let told = counters[3].swap(0, Ordering::Relaxed);
                let function = if call == at { guest.function(called) } else { 0 };
                assert_eq!(told & 0xffff_ffff, function.into(), "call {call} {addressing:?}");
                for register in (0..before.x.len()).filter(|&register| register != STACK) {
                    if !free(Point::Entry).contains(&register) && !OWN.contains(&register) {
                        assert_eq!(before.x[register], after.x[register], "register {register}");
                    }
                }
            }
            assert_eq!(found(counters).keys().collect::<Vec<_>>(), [&16]);
        }
    }
}

// What cannot be must not become code that counts somewhere else.
#[test]
fn counters_that_cannot_be_are_refused() {
    let near = Counters { distance: 0x1000, stride: 4096, rounds: false };
    let check = |counts| counting(counts).check();
    let down = |counter| {
        let counts = Some(Counts::Down { number: 0, counter, trap: &[] });
        Program { counts, ..entry_program() }.check()
    };
    assert!(down(0x7fff_fff8).is_ok() && down(0xffff_ffff_8000_0000).is_ok());
    assert!(down(0x8000_0000).is_err() && down(0x1004).is_err());
    let signed = |distance: i64| distance.cast_unsigned();
    let good = [
        near,
        Counters { stride: 0, ..near },
        Counters { stride: 0x7fff_f000, ..near },
        Counters { distance: 0x1003, ..near },
        Counters { distance: 0x1008, rounds: true, ..near },
        Counters { distance: signed(i32::MIN.into()), ..near },
        Counters { distance: i32::MAX.unsigned_abs().into(), ..near },
        Counters { distance: 0xffff_d000, ..near },
        Counters { distance: signed(-1 << 32), ..near },
    ];
    assert!(good.into_iter().all(|counts| check(counts) == Ok(())));
    for distance in [signed((-1 << 32) - 1), 0xffff_e000, 1 << 32, 1 << 63] {
        let refused = check(Counters { distance, ..near });
        assert!(matches!(refused, Err(ProgramError::Range(_, value)) if value == distance));
    }
    for stride in [1 << 31, u64::MAX - 4095] {
        let refused = check(Counters { stride, ..near });
        assert!(matches!(refused, Err(ProgramError::Range(_, value)) if value == stride));
    }
    let program = counting(near);
    let bad = [
        Program { point: Point::Return, ..program.clone() },
        Program { point: Point::Tail, ..program.clone() },
        Program { fields: vec![Field::Stack], ..program },
        counting(Counters { stride: 8, ..near }),
        counting(Counters { stride: 4096 * 2 + 8, ..near }),
        counting(Counters { distance: 0x1004, rounds: true, ..near }),
    ];
    for program in bad {
        let refused = program.check();
        assert!(matches!(refused, Err(ProgramError::Counts(_))), "{refused:?} {program:?}");
    }
}
