//! Programs that sort calls: each value is counted in its bucket, each end is matched with its start, and
//! the function notices nothing.

mod common;

use common::arch::{ADDRESSINGS, ARGUMENTS, Addressing, VALUE};
use common::{FakeGuest, Random, entry_program, registers, words};
use core::sync::atomic::{AtomicU64, Ordering};
use std::collections::BTreeMap;
use std::sync::Barrier;
use vmtrace_trampolines::histogram::{Calls, Ended, MISSED, SUM, Sorted, WORDS};
use vmtrace_trampolines::{Counters, Counts, Field, Overflow, Point, Program, ProgramError};

const CPUS: u64 = 2;
/// One tick is a nanosecond.
const TICKS: Ended = Ended::Duration { multiplier: 1, shift: 0 };

/// A guest, with histograms of two functions for each CPU, and open calls.
struct Sorting {
    guest: FakeGuest,
    addressing: Addressing,
    histograms: Counters,
    words: &'static [AtomicU64],
    calls: Calls,
    open: &'static [AtomicU64],
}

impl Sorting {
    fn new(addressing: Addressing) -> Self {
        let guest = FakeGuest::new(CPUS, 1 << 15, addressing, Overflow::Drop);
        let (table, pointers) = words(CPUS * 512);
        let (address, all) = words(CPUS * 2 * WORDS);
        for cpu in 0..CPUS {
            for function in 0..2 {
                let place = cpu * 4096 + guest.site(function) - guest.site(0);
                let histogram = address + 8 * WORDS * (2 * cpu + function);
                pointers[usize::try_from(place / 8).unwrap()].store(histogram, Ordering::Relaxed);
            }
        }
        let distance = table.wrapping_sub(guest.function(0).into());
        let histograms = Counters { distance, stride: 4096, rounds: false };
        let (address, open) = words(Calls::SIZE / 8 + 8);
        let calls = Calls { address: address.next_multiple_of(64) };
        Self { guest, addressing, histograms, words: all, calls, open }
    }

    fn add(&mut self, point: Point, counts: Counts) -> usize {
        let program = Program { point, counts: Some(counts), ..entry_program() };
        self.guest.add(&program, self.addressing, None)
    }

    /// Calls of function 0 begin at its entry; they end where function 1 is left.
    fn times(&mut self, point: Point, ended: Ended) {
        let begin = self.add(Point::Entry, Counts::Begin(Some(self.histograms), self.calls));
        self.guest.call_from(0, begin);
        let end = self.add(point, Counts::End(self.calls, ended));
        match point {
            Point::Tail => self.guest.tail_from(1, end),
            _ => self.guest.return_from(1, end),
        };
    }

    /// What is not 0 in the histogram of a function on a CPU.
    fn found(&self, cpu: u64, function: u64) -> BTreeMap<u64, u64> {
        let start = usize::try_from(WORDS * (2 * cpu + function)).unwrap();
        let words = self.words[start..].iter().take(usize::try_from(WORDS).unwrap());
        let all = (0..).zip(words.map(|word| word.load(Ordering::Relaxed)));
        all.filter(|&(_, count)| count != 0).collect()
    }

    /// Places that are taken: their numbers and stack pointers.
    fn places(&self) -> Vec<(u64, u64)> {
        let places = self.open.iter().skip(usize::try_from(Calls::PLACES / 8).unwrap()).step_by(4);
        let all = (0..).zip(places.map(|place| place.load(Ordering::Relaxed)));
        all.filter(|&(_, stack)| stack != 0).collect()
    }

    /// How many.
    fn taken(&self) -> usize {
        self.places().len()
    }
}

fn bucket(value: u64) -> u64 {
    u64::from(64 - value.leading_zeros())
}

// A value in another bucket, a call that is not told, or a register that is not kept.
#[test]
fn arguments_are_sorted_by_size() {
    let mut random = Random(0x1234_5678_9abc_def1);
    for addressing in ADDRESSINGS {
        for number in 0..10_u8 {
            for (bytes, signed) in
                [(1, false), (2, false), (4, false), (8, false), (1, true), (2, true), (4, true)]
            {
                let mut sorting = Sorting::new(addressing);
                let sorted = Sorted { number, bytes, signed };
                let program = sorting.add(Point::Entry, Counts::Sort(sorting.histograms, sorted));
                sorting.guest.call_from(0, program);
                let mut expected: [BTreeMap<u64, u64>; 2] = Default::default();
                for _ in 0..50 {
                    let cpu = random.below(CPUS);
                    sorting.guest.set_current(cpu, 1);
                    let value = random.next() >> random.below(64);
                    let mut before = registers(0);
                    before.x.fill_with(|| random.next());
                    before.stack.fill_with(|| random.next());
                    match ARGUMENTS.get(usize::from(number)) {
                        Some(&register) => before.x[register] = value,
                        None => before.stack[usize::from(number) - ARGUMENTS.len()] = value,
                    }
                    sorting.guest.run_kept(0, Point::Entry, &before);
                    let whole = vmtrace_trampolines::condition::extended(value, bytes, signed);
                    let expected = &mut expected[usize::try_from(cpu).unwrap()];
                    *expected.entry(bucket(whole)).or_default() += 1;
                    let sum = expected.entry(SUM.into()).or_default();
                    *sum = sum.wrapping_add(whole);
                }
                for (cpu, mut expected) in (0..).zip(expected) {
                    expected.retain(|_, count| *count != 0);
                    assert_eq!(sorting.found(cpu, 0), expected, "{sorted:?} {addressing:?}");
                }
            }
        }
    }
}

// A duration of another call, one that is lost, or a place that stays taken for ever.
#[test]
fn what_begins_ends_once_in_its_own_histogram() {
    let mut random = Random(99);
    for addressing in ADDRESSINGS {
        for point in [Point::Return, Point::Tail] {
            if cfg!(target_arch = "riscv64") && point == Point::Tail {
                continue;
            }
            let mut sorting = Sorting::new(addressing);
            sorting.times(point, TICKS);
            let mut sum = 0;
            for call in 0..200 {
                // It ends on another CPU, and is told of that on which it began.
                sorting.guest.set_current(call % 2, 1);
                let before = common::arch::ticks();
                sorting.guest.call(0, Point::Entry, &mut random, &[]);
                assert_eq!(sorting.taken(), 1);
                sorting.guest.set_current(random.below(CPUS), 1);
                sorting.guest.call(1, point, &mut random, &[]);
                sum += common::arch::ticks() - before;
                assert_eq!(sorting.taken(), 0, "{point:?}");
                // Nothing has begun.
                sorting.guest.call(1, point, &mut random, &[]);
            }
            let mut told = 0;
            for cpu in 0..CPUS {
                let mut found = sorting.found(cpu, 0);
                told += found.remove(&SUM.into()).unwrap_or(0);
                assert!(found.keys().all(|&word| word < u64::from(SUM)), "{found:?}");
                assert_eq!(found.values().sum::<u64>(), 100);
                assert!(sorting.found(cpu, 1).is_empty());
            }
            assert!((1..=sum).contains(&told), "{told} of {sum} ticks, {point:?}");
        }
    }
}

// Values of calls that were not meant, or those of other functions, in a histogram.
#[test]
fn what_a_call_returns_is_sorted_and_nothing_of_a_tail_call() {
    let mut random = Random(5);
    for addressing in ADDRESSINGS {
        for (bytes, signed) in [(1, true), (2, false), (4, true), (4, false), (8, true)] {
            let mut sorting = Sorting::new(addressing);
            sorting.times(Point::Return, Ended::Value { bytes, signed });
            sorting.guest.set_current(1, 1);
            let mut expected: BTreeMap<u64, u64> = BTreeMap::new();
            for _ in 0..100 {
                let value = random.next() >> random.below(64);
                sorting.guest.call(0, Point::Entry, &mut random, &[]);
                sorting.guest.call(1, Point::Return, &mut random, &[(VALUE, value)]);
                let whole = vmtrace_trampolines::condition::extended(value, bytes, signed);
                *expected.entry(bucket(whole)).or_default() += 1;
                let sum = expected.entry(SUM.into()).or_default();
                *sum = sum.wrapping_add(whole);
            }
            expected.retain(|_, count| *count != 0);
            assert_eq!(sorting.found(1, 0), expected, "{bytes} {signed}");
        }
        if cfg!(target_arch = "x86_64") {
            let mut sorting = Sorting::new(addressing);
            sorting.times(Point::Tail, Ended::Value { bytes: 8, signed: false });
            sorting.guest.set_current(0, 1);
            sorting.guest.call(0, Point::Entry, &mut random, &[]);
            sorting.guest.call(1, Point::Tail, &mut random, &[]);
            assert_eq!(sorting.found(0, 0), BTreeMap::from([(MISSED.into(), 1)]));
            assert_eq!(sorting.taken(), 0);
        }
    }
}

// A call without a place that is not told is lost silently; one that takes another's place is two wrong
// durations.
#[test]
fn calls_without_a_place_are_missed_and_hurt_nobody() {
    let mut random = Random(17);
    for addressing in ADDRESSINGS {
        let mut sorting = Sorting::new(addressing);
        sorting.times(Point::Return, TICKS);
        sorting.guest.set_current(0, 1);
        sorting.guest.call(0, Point::Entry, &mut random, &[]);
        let places = usize::try_from(Calls::PLACES / 8).unwrap();
        let is_taken = |place: &usize| sorting.open[*place].load(Ordering::Relaxed) != 0;
        let first = (places..sorting.open.len()).step_by(4).find(is_taken).unwrap();
        let stack = sorting.open[first].swap(0, Ordering::Relaxed);
        // Others have all places but the n-th that is tried.
        let tried = usize::try_from(Calls::TRIED).unwrap();
        for free in 0..=tried {
            for place in 0..tried {
                let key = if place == free { 0 } else { 1 + place as u64 };
                sorting.open[first + 4 * place].store(key, Ordering::Relaxed);
            }
            sorting.guest.call(0, Point::Entry, &mut random, &[]);
            if free < tried {
                assert_eq!(sorting.open[first + 4 * free].load(Ordering::Relaxed), stack);
                // Left over of one that has ended unseen, it is taken again.
                sorting.guest.call(0, Point::Entry, &mut random, &[]);
                assert_eq!(sorting.taken(), tried);
            }
            sorting.guest.call(1, Point::Return, &mut random, &[]);
            for place in 0..tried {
                let key = if place == free { 0 } else { 1 + place as u64 };
                assert_eq!(sorting.open[first + 4 * place].load(Ordering::Relaxed), key);
            }
        }
        let mut found = sorting.found(0, 0);
        assert_eq!(found.remove(&MISSED.into()), Some(1));
        found.remove(&SUM.into());
        assert_eq!(found.values().sum::<u64>(), Calls::TRIED);
        // What began before all was changed has no duration.
        sorting.open.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        sorting.guest.call(0, Point::Entry, &mut random, &[]);
        let since = usize::try_from(sorting.calls.address - sorting.open.as_ptr() as u64).unwrap();
        sorting.open[since / 8].store(common::arch::ticks(), Ordering::Relaxed);
        let before = sorting.found(0, 0);
        sorting.guest.call(1, Point::Return, &mut random, &[]);
        assert_eq!((sorting.found(0, 0), sorting.taken()), (before, 0));
    }
}

// Places are taken at once: a call whose place another one has as well has a wrong duration.
#[test]
fn threads_that_sort_at_once_lose_nothing() {
    const CALLS: u64 = if cfg!(target_arch = "riscv64") { 20_000 } else { 300_000 };
    for addressing in ADDRESSINGS {
        let mut sorting = Sorting::new(addressing);
        sorting.times(Point::Return, TICKS);
        let (sorting, start) = (&sorting, &Barrier::new(2));
        std::thread::scope(|scope| {
            for cpu in 0..2 {
                scope.spawn(move || {
                    sorting.guest.set_current(cpu, 1);
                    start.wait();
                    for _ in 0..CALLS {
                        sorting.guest.run(0, &mut registers(1));
                        sorting.guest.run(1, &mut registers(1));
                    }
                });
            }
        });
        for cpu in 0..2 {
            let mut found = sorting.found(cpu, 0);
            found.remove(&SUM.into());
            assert!(found.keys().all(|&word| word < u64::from(SUM)), "{found:?}");
            assert_eq!(found.values().sum::<u64>(), CALLS, "{addressing:?}");
        }
        assert_eq!(sorting.taken(), 0);
    }
}

// Who records the end of a call as well needs to know which function it is.
#[test]
fn a_program_that_sorts_goes_on_to_others() {
    let fields = vec![Field::Stack, Field::Value];
    let recording = Program { fields, point: Point::Return, ..entry_program() };
    for addressing in ADDRESSINGS {
        let mut sorting = Sorting::new(addressing);
        sorting.times(Point::Return, TICKS);
        let record = sorting.guest.add(&recording, addressing, None);
        let counts = Some(Counts::End(sorting.calls, TICKS));
        let end = Program { point: Point::Return, counts, ..entry_program() };
        let both = sorting.guest.add(&end, addressing, Some(record));
        let named = sorting.guest.return_from(1, both);
        sorting.guest.set_current(0, 1);
        let mut random = Random(3);
        for call in 0..10 {
            sorting.guest.call(0, Point::Entry, &mut random, &[]);
            sorting.guest.call(1, Point::Return, &mut random, &[(VALUE, call)]);
        }
        let mut records = Vec::new();
        sorting.guest.drain(0, &mut sorting.guest.ring(0).start(), |record| records.push(record));
        assert_eq!(records.len(), 10);
        for (call, record) in (0..).zip(&records) {
            assert_eq!((record.common.site, record.fields[1]), (named, call));
        }
        let mut found = sorting.found(0, 0);
        found.remove(&SUM.into());
        assert_eq!(found.values().sum::<u64>(), 10);
    }
}

// A nanosecond too many in a thousand is a wrong figure for who compares.
#[test]
fn durations_are_nanoseconds_of_any_clock() {
    let ns = |ticks_per_second: u64, ticks: u64| {
        let Some(Ended::Duration { multiplier, shift }) = Ended::duration(ticks_per_second) else {
            panic!("{ticks_per_second}")
        };
        u64::try_from((u128::from(ticks) * u128::from(multiplier)) >> shift).unwrap()
    };
    for rate in [10_000_000, 1_000_000_000, 24_000_000, 2_899_999_000, 5_000_000_001, 32_768, 1000]
    {
        for ticks in [0, 1, 999, 1_000_000, 123_456_789_012] {
            let exact = u128::from(ticks) * 1_000_000_000 / u128::from(rate);
            let exact = u64::try_from(exact).unwrap();
            let told = ns(rate, ticks);
            assert!(
                told.abs_diff(exact) <= 1 + exact / 100_000_000,
                "{rate} {ticks}: {told} {exact}"
            );
        }
    }
    assert_eq!((Ended::duration(0), ns(10_000_000, 7)), (None, 700));
    // Each tick of a long call adds what is missing.
    for rate in [24_000_000_u64, 2_899_999_000, 5_000_000_001, 32_768] {
        let Some(Ended::Duration { multiplier, shift }) = Ended::duration(rate) else { panic!() };
        let (told, exact) = (u128::from(multiplier) * u128::from(rate), 1_000_000_000 << shift);
        assert!(told.abs_diff(exact) <= u128::from(rate / 2), "{rate}");
    }
    assert_eq!(Ended::duration(u64::MAX), None, "not even half a nanosecond in 2^32 ticks");
}

// Clocks of most machines have no whole nanoseconds, and the product with a long call's ticks is of more than 64 bits.
#[test]
fn long_calls_are_told_in_nanoseconds_of_any_clock() {
    // As in ends.rs: less than the clock of a machine tells that was started minutes ago.
    const LONG: u64 = 1 << 38;
    let mut random = Random(29);
    for addressing in ADDRESSINGS {
        let mut sorting = Sorting::new(addressing);
        sorting.times(Point::Return, Ended::Duration { multiplier: 3 << 30, shift: 31 });
        sorting.guest.set_current(0, 1);
        sorting.guest.call(0, Point::Entry, &mut random, &[]);
        let began = 1 + 4 * usize::try_from(sorting.places()[0].0).unwrap();
        let began = &sorting.open[usize::try_from(Calls::PLACES / 8).unwrap() + began];
        began.fetch_sub(LONG, Ordering::Relaxed);
        sorting.guest.call(1, Point::Return, &mut random, &[]);
        let told = sorting.found(0, 0)[&SUM.into()];
        let exact = LONG / 2 * 3;
        assert!((exact..exact + LONG / 4).contains(&told), "{told:#x}");
    }
}

// Calls that crowd in a few places find none, and are not told.
#[test]
fn calls_are_spread_over_all_places() {
    let mut random = Random(23);
    // By 2^32 divided by the golden ratio.
    let place = |stack: u64| ((stack & 0xffff_ffff) * 0x9e37_79b9 % (1 << 32)) >> (32 - 15);
    for addressing in ADDRESSINGS {
        let mut sorting = Sorting::new(addressing);
        sorting.times(Point::Return, TICKS);
        sorting.guest.set_current(0, 1);
        for depth in 0..20 {
            call_below(depth, &mut || sorting.guest.call(0, Point::Entry, &mut random, &[]));
            let places = sorting.places();
            let [(number, stack)] = places[..] else { panic!("{places:?}") };
            assert_eq!(number, place(stack));
            sorting.open.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        }
    }
}

// Tasks that sleep in one function have one place each in stacks that are as far from each other as stacks are: if
// these crowded, calls of many tasks had no durations.
#[test]
fn calls_of_tasks_that_sleep_in_one_function_do_not_crowd() {
    let place = |stack: u64| ((stack & 0xffff_ffff) * 0x9e37_79b9 % (1 << 32)) >> (32 - 15);
    // Of 16 KiB with a page in between, without, larger ones, and from the linear map.
    for (base, apart) in [
        (0xffff_c900_0001_0000, 32 << 10),
        (0xffff_c900_0000_8000, 20 << 10),
        (0xff20_0000_0001_0000, 64 << 10),
        (0xff60_0000_8123_0000_u64, 16 << 10),
    ] {
        let (mut used, mut missed) = (vec![false; (1 << 15) + 4], 0);
        for task in 0..3000 {
            // Five calls on top of each other.
            for depth in [0x1f0, 0x2c0, 0x3d0, 0x440, 0x600] {
                let first = usize::try_from(place(base + task * apart - depth)).unwrap();
                match (first..first + 4).find(|&place| !used[place]) {
                    Some(place) => used[place] = true,
                    None => missed += 1,
                }
            }
        }
        // By 2^64 divided by the golden ratio it would be as many.
        assert!(missed <= 150, "{missed} of 15000 with stacks every {apart}");
    }
}

/// Calls with a stack pointer that is further down.
#[inline(never)]
fn call_below(depth: usize, call: &mut dyn FnMut()) {
    match depth.checked_sub(1) {
        Some(less) => call_below(less, call),
        None => call(),
    }
    std::hint::black_box(());
}

// What cannot be must not become code that sorts somewhere else.
#[test]
fn what_cannot_be_sorted_is_refused() {
    let histograms = Counters { distance: 0x1000, stride: 4096, rounds: false };
    let calls = Calls { address: 0x10000 };
    let check = |point, counts| Program { point, counts: Some(counts), ..entry_program() }.check();
    let sorted = Sorted { number: 0, bytes: 4, signed: true };
    assert_eq!(check(Point::Entry, Counts::Sort(histograms, sorted)), Ok(()));
    assert_eq!(check(Point::Entry, Counts::Begin(Some(histograms), calls)), Ok(()));
    assert_eq!(check(Point::Return, Counts::End(calls, TICKS)), Ok(()));
    let value = |bytes| Ended::Value { bytes, signed: false };
    for (point, counts) in [
        (Point::Return, Counts::Sort(histograms, sorted)),
        (Point::Tail, Counts::Begin(Some(histograms), calls)),
        (Point::Entry, Counts::End(calls, TICKS)),
        (Point::Entry, Counts::Sort(histograms, Sorted { bytes: 3, ..sorted })),
        (Point::Return, Counts::End(calls, value(16))),
        (Point::Return, Counts::End(calls, Ended::Duration { multiplier: 0, shift: 0 })),
        (Point::Return, Counts::End(calls, Ended::Duration { multiplier: 1, shift: 33 })),
        (Point::Entry, Counts::Begin(Some(Counters { stride: 8, ..histograms }), calls)),
        (Point::Entry, Counts::Begin(Some(histograms), Calls { address: 0x10008 })),
    ] {
        let refused = check(point, counts);
        assert!(
            matches!(refused, Err(ProgramError::Counts(_) | ProgramError::Table(..))),
            "{refused:?} {counts:?}"
        );
    }
    for address in [0x8000_0000, 0x7fff_ffc0, 1 << 40] {
        let refused = check(Point::Return, Counts::End(Calls { address }, TICKS));
        assert!(matches!(refused, Err(ProgramError::Range(_, value)) if value == address));
    }
}
