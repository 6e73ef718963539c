//! Programs that count by caller: each call once, for its site, its caller and its CPU, without a change that the
//! function notices.

mod common;

use common::arch::{self, ADDRESSINGS, Addressing, OWN, STACK, free};
use common::{FakeGuest, Random, entry_program, registers, words};
use core::sync::atomic::{AtomicU64, Ordering};
use std::collections::BTreeMap;
use std::sync::Barrier;
use vmtrace_trampolines::callers::Callers;
use vmtrace_trampolines::condition::{Operand, Relation, Test};
use vmtrace_trampolines::{Condition, Counts, Field, Overflow, Point, Program, ProgramError};

const CPUS: u64 = 3;
/// Places of callers in a guest.
const PLACES: std::ops::Range<usize> = 2..16;

/// Calls by CPU, site (what tells it) and caller.
type Calls = BTreeMap<(u64, u64, u64), u64>;

/// A guest, all of whose sites count by caller, in one table for each CPU or in one for all.
struct Counting {
    guest: FakeGuest,
    callers: Callers,
    words: &'static [AtomicU64],
    addressing: Addressing,
    program: usize,
}

impl Counting {
    fn new(addressing: Addressing, stride: u64) -> Self {
        let mut guest = FakeGuest::new(CPUS, 1 << 15, addressing, Overflow::Drop);
        let (address, words) = words((CPUS * stride).max(Callers::SIZE) / 8 + 8);
        let callers = Callers { address, stride };
        let counts = Some(Counts::ByCaller(callers));
        let program = guest.add(&Program { counts, ..entry_program() }, addressing, None);
        (0..FakeGuest::SITES).for_each(|called| guest.call_from(called, program));
        Self { guest, callers, words, addressing, program }
    }

    fn word(&self, offset: u64) -> &AtomicU64 {
        &self.words[usize::try_from(offset / 8).unwrap()]
    }

    /// What the tables have, and nothing else is anywhere.
    fn found(&self) -> Calls {
        let stride = self.callers.stride;
        let mut found = Calls::new();
        let mut all = 0;
        for cpu in 0..if stride == 0 { 1 } else { CPUS } {
            for place in 0..Callers::COUNT {
                let at = cpu * stride + Callers::PLACES + place * Callers::PLACE;
                let [pair, calls] =
                    [at, at + Callers::CALLS].map(|at| self.word(at).load(Ordering::Relaxed));
                if pair == 0 {
                    continue;
                }
                assert!(calls > 0, "a place that nobody uses");
                all += 2;
                let key = (cpu, pair >> 32, pair & u64::from(u32::MAX));
                assert_eq!(found.insert(key, calls), None, "two places of one pair");
                assert!((Callers::first(pair)..).take(8).any(|tried| tried == place));
            }
        }
        let used = self.words.iter().filter(|word| word.load(Ordering::Relaxed) != 0).count();
        assert_eq!(used, all);
        found
    }

    /// Lets a function of the guest be called from a place, with registers at random, of which none may change
    /// that is not free. Where it returned to.
    fn call(&self, random: &mut Random, called: u64, place: usize) -> u64 {
        let (function, back) = self.guest.caller_at(place, self.guest.site(called));
        let mut before = registers(0);
        before.x.fill_with(|| random.next());
        before.stack.fill_with(|| random.next());
        let mut after = before.clone();
        arch::call(function, &mut after);
        for register in (0..before.x.len()).filter(|&register| register != STACK) {
            if !free(Point::Entry).contains(&register) && !OWN.contains(&register) {
                assert_eq!(before.x[register], after.x[register], "register {register}");
            }
        }
        assert_eq!(before.stack, after.stack);
        back
    }

    fn told(&self, called: u64) -> u64 {
        u64::from(self.guest.function(called))
    }
}

// A call under another caller, function or CPU is two wrong numbers; a register that is not kept is a function
// with another argument.
#[test]
fn calls_are_counted_by_site_caller_and_cpu() {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for addressing in ADDRESSINGS {
        for stride in [Callers::SIZE, Callers::SIZE.next_power_of_two(), 0] {
            let counting = Counting::new(addressing, stride);
            let mut expected = Calls::new();
            for _ in 0..600 {
                let (called, cpu) = (random.below(FakeGuest::SITES), random.below(CPUS));
                let place = PLACES.start + usize::try_from(random.below(14)).unwrap();
                counting.guest.set_current(cpu, 1);
                let back = counting.call(&mut random, called, place);
                let cpu = if stride == 0 { 0 } else { cpu };
                *expected.entry((cpu, counting.told(called), back)).or_default() += 1;
            }
            assert_eq!(counting.found(), expected, "{addressing:?} {stride:#x}");
            let guest = &counting.guest;
            assert!((0..CPUS).all(|cpu| guest.head(cpu) == guest.ring(cpu).start()), "no records");
        }
    }
}

// A call that is not told is lost silently; one that is told of another pair is two wrong numbers.
#[test]
fn pairs_without_a_place_are_counted_together_and_hurt_nobody() {
    let mut random = Random(17);
    for addressing in ADDRESSINGS {
        for cpu in [0, 2] {
            let counting = Counting::new(addressing, Callers::SIZE);
            counting.guest.set_current(cpu, 1);
            let back = counting.call(&mut random, 5, 3);
            let pair = Callers::pair(counting.told(5), back);
            let table = cpu * Callers::SIZE;
            let first = table + Callers::PLACES + Callers::first(pair) * Callers::PLACE;
            let place = |tried: u64| first + tried * Callers::PLACE;
            assert_eq!(counting.word(first).swap(0, Ordering::Relaxed), pair);
            assert_eq!(counting.word(first + Callers::CALLS).swap(0, Ordering::Relaxed), 1);
            // Others have all places but one.
            for free in 0..=Callers::TRIED {
                for tried in 0..Callers::TRIED {
                    let other = if tried == free { 0 } else { 1 + tried };
                    counting.word(place(tried)).store(other, Ordering::Relaxed);
                    counting.word(place(tried) + Callers::CALLS).store(0, Ordering::Relaxed);
                }
                for _ in 0..3 {
                    assert_eq!(counting.call(&mut random, 5, 3), back);
                }
                for tried in 0..Callers::TRIED {
                    let (other, calls) = if tried == free { (pair, 3) } else { (1 + tried, 0) };
                    let at = place(tried);
                    assert_eq!(counting.word(at).load(Ordering::Relaxed), other, "{free} {tried}");
                    let at = at + Callers::CALLS;
                    assert_eq!(counting.word(at).load(Ordering::Relaxed), calls, "{free} {tried}");
                }
                // Only behind the last one there is no place.
                let crowded = if free == Callers::TRIED { 3 } else { 0 };
                let told = counting.word(table + Callers::CROWDED).load(Ordering::Relaxed);
                assert_eq!(told, crowded, "{free}");
            }
            // What is behind the places that are tried is nobody's.
            assert_eq!(counting.word(place(Callers::TRIED)).load(Ordering::Relaxed), 0);
        }
    }
}

// The last places of a table are behind those that pairs are spread to: one that is written behind the end would be
// in another CPU's table.
#[test]
fn a_table_ends_behind_its_last_place() {
    const { assert!(Callers::PLACES + Callers::COUNT * Callers::PLACE <= Callers::SIZE) };
    let last = (0..1_u64 << 20).map(|of| Callers::first(of << 32 | of)).max().unwrap();
    assert_eq!(last + Callers::TRIED, Callers::COUNT);
}

// Two CPUs that take a place at once must not have it both; a pair that is taken at this moment by another CPU must
// not be taken twice.
#[test]
fn threads_that_count_at_once_lose_nothing() {
    const CALLS: u64 = if cfg!(target_arch = "riscv64") { 3_000 } else { 30_000 };
    for addressing in ADDRESSINGS {
        for stride in [Callers::SIZE, 0] {
            let counting = Counting::new(addressing, stride);
            let backs: Vec<(u64, u64)> = PLACES
                .map(|place| counting.guest.caller_at(place, counting.guest.site(place as u64 % 8)))
                .collect();
            let (counting, backs, start) = (&counting, &backs, &Barrier::new(2));
            for round in 0..4 {
                // All begin anew, and meet at each place.
                if round > 0 {
                    counting.words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
                }
                std::thread::scope(|scope| {
                    for cpu in 0..2 {
                        scope.spawn(move || {
                            counting.guest.set_current(cpu, 1);
                            start.wait();
                            for call in 0..CALLS {
                                let at = usize::try_from(call).unwrap() % backs.len();
                                arch::call(backs[at].0, &mut registers(1));
                            }
                        });
                    }
                });
                let mut expected = Calls::new();
                for cpu in 0..2 {
                    for call in 0..usize::try_from(CALLS).unwrap() {
                        let place = call % backs.len();
                        let told = counting.told((place + PLACES.start) as u64 % 8);
                        let cpu = if stride == 0 { 0 } else { cpu };
                        *expected.entry((cpu, told, backs[place].1)).or_default() += 1;
                    }
                }
                assert_eq!(counting.found(), expected, "{addressing:?} {stride}");
            }
        }
    }
}

// A tracer that counts must not take calls from one that records, nor count what its condition leaves out.
#[test]
fn a_condition_comes_first_and_another_program_goes_on() {
    let mut random = Random(3);
    for addressing in ADDRESSINGS {
        let mut counting = Counting::new(addressing, Callers::SIZE);
        let recording = Program { fields: vec![Field::Argument(1)], ..entry_program() };
        let record = counting.guest.add(&recording, addressing, None);
        let operand = Operand::Argument { number: 1, bytes: 1, signed: false };
        let condition =
            Some(Condition::Test(Test::Number { operand, relation: Relation::Less, value: 100 }));
        let counts = Some(Counts::ByCaller(counting.callers));
        let program = Program { condition, counts, ..entry_program() };
        let both = counting.guest.add(&program, counting.addressing, Some(record));
        assert_ne!(both, counting.program);
        counting.guest.call_from(4, both);
        counting.guest.set_current(1, 1);
        let back = (0..200).map(|_| counting.call(&mut random, 4, 7)).last().unwrap();
        let mut records = Vec::new();
        let mut tail = counting.guest.ring(1).start();
        counting.guest.drain(1, &mut tail, |record| records.push(record));
        assert_eq!(records.len(), 200);
        assert!(records.iter().all(|record| u64::from(record.common.caller) == back));
        let meant = records.iter().filter(|record| record.fields[0] & 0xff < 100).count() as u64;
        assert!((1..200).contains(&meant));
        assert_eq!(counting.found(), Calls::from([((1, counting.told(4), back), meant)]));
    }
}

// What cannot be must not become code that counts somewhere else.
#[test]
fn what_cannot_be_counted_by_caller_is_refused() {
    let check = |point, address, stride| {
        let counts = Some(Counts::ByCaller(Callers { address, stride }));
        Program { point, counts, ..entry_program() }.check()
    };
    assert_eq!(check(Point::Entry, 0x10000, Callers::SIZE), Ok(()));
    assert_eq!(check(Point::Entry, 0xffff_ffff_9000_0040, 0), Ok(()));
    for (point, address, stride) in [
        (Point::Return, 0x10000, 0),
        (Point::Tail, 0x10000, 0),
        (Point::Entry, 0x10008, 0),
        (Point::Entry, 0x10000, 4096),
        (Point::Entry, 0x10000, Callers::SIZE + 64),
    ] {
        let refused = check(point, address, stride);
        assert!(
            matches!(refused, Err(ProgramError::Counts(_) | ProgramError::Table(..))),
            "{refused:?}"
        );
    }
    for (address, stride) in
        [(0x8000_0000, 0), (0x7fff_0000, 0), (1 << 40, 0), (u64::MAX - 63, 0), (0x10000, 1 << 31)]
    {
        let refused = check(Point::Entry, address, stride);
        assert!(matches!(refused, Err(ProgramError::Range(..))), "{refused:?} {address:#x}");
    }
}

// What the documentation promises of tables that fill up: a spread that is not even makes calls of no caller long before
// that.
#[test]
fn pairs_find_places_until_a_table_is_rather_full() {
    for seed in 1..4 {
        let mut random = Random(seed);
        let mut taken = vec![false; usize::try_from(Callers::COUNT).unwrap()];
        let (mut pairs, mut without) = (0_u32, 0_u32);
        for (until, at_most) in [(12_000, 0), (30_000, 30_000 / 300), (60_000, 60_000 / 10)] {
            while pairs < until {
                // Of 14 MiB of text: functions at multiples of 16, and calls anywhere.
                let told = 0x8100_0005 + 16 * random.below(900_000);
                let pair = Callers::pair(told, 0x8100_0000 + random.below(14 << 20));
                let first = usize::try_from(Callers::first(pair)).unwrap();
                let tried = taken[first..].iter_mut().take(8).find(|taken| !**taken);
                match tried {
                    Some(free) => *free = true,
                    None => without += 1,
                }
                pairs += 1;
            }
            assert!(without <= at_most, "{without} of {pairs}");
        }
    }
    // Few functions with very many callers, and callers of very many functions.
    for spread in
        [|n: u64| (0x8123_4565, 0x8100_0000 + 37 * n), |n| (0x8100_0005 + 16 * n, 0x8155_5555)]
    {
        let mut firsts = vec![0_u8; 1 << 16];
        for n in 0..12_000 {
            let (told, caller) = spread(n);
            firsts[usize::try_from(Callers::first(Callers::pair(told, caller))).unwrap()] += 1;
        }
        assert!(firsts.iter().all(|&pairs| u64::from(pairs) <= Callers::TRIED));
    }
}
