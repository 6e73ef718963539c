//! How deep calls are nested: what is recorded, and what the table says then, is what a model of it says.

mod common;

use common::arch::{ADDRESSINGS, Addressing, stack_bias};
use common::{FakeGuest, NAME, Random, entry_program, words};
use core::sync::atomic::{AtomicU64, Ordering};
use vmtrace_trampolines::condition::{Operand, Relation, Test};
use vmtrace_trampolines::histogram::Calls;
use vmtrace_trampolines::nesting::{Call, Nesting};
use vmtrace_trampolines::{Condition, Counts, Field, Overflow, Point, Program, ProgramError};

const STACK_BITS: u8 = 14;
const STACK: u64 = 1 << STACK_BITS;

/// The calls of a stack that are open, outermost first, or 0.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Row {
    levels: Vec<u64>,
    crowded: u64,
}

impl Row {
    fn is_open(&self, number: u8, sp: u64) -> bool {
        let call = self.levels[usize::from(number) - 1];
        call >= sp && call - sp < STACK
    }

    /// A level's call, with none in those that are deeper.
    fn put(&mut self, number: u8, call: u64) {
        self.levels[usize::from(number) - 1..].fill(0);
        self.levels[usize::from(number) - 1] = call;
    }

    fn begin(&mut self, sp: u64, own: u64) -> bool {
        let call = self.levels[0];
        let is_free = call == 0 || (call < sp && sp - call < STACK);
        if is_free {
            self.put(1, own);
        } else {
            self.crowded += 1;
        }
        is_free
    }

    /// Whether a call is meant.
    fn enter(&mut self, Nesting { depth, call, .. }: Nesting, sp: u64) -> bool {
        let is_root = matches!(call, Call::Root { .. } | Call::Endless { root: true });
        // Of one whose end is not seen the next one is not nested in it.
        let own = sp - u64::from(matches!(call, Call::Endless { .. }));
        let Some(depth) = depth else {
            return self.is_open(1, sp) || (is_root && self.begin(sp, own));
        };
        if call == (Call::Root { again: true }) && self.levels[0] == sp {
            self.put(1, sp);
            return true;
        }
        // Nobody looks whether what is above it is still there.
        if self.is_open(depth, sp) {
            return false;
        }
        match (1..=depth).find(|&number| !self.is_open(number, sp)) {
            Some(1) => is_root && self.begin(sp, own),
            Some(free) => {
                self.put(free, own);
                true
            }
            None => false,
        }
    }

    /// Whether the call that ends was meant.
    fn leave(&mut self, Nesting { depth, call, .. }: Nesting, point: Point, sp: u64) -> bool {
        match self.levels.iter().position(|&call| call == sp) {
            Some(0) if call != Call::Ends => true,
            Some(_) if call == Call::GoesOn => true,
            Some(own) => {
                self.levels[own..].fill(0);
                true
            }
            None => {
                let call = self.levels[0];
                if point.returns() && call < sp && sp - call < STACK {
                    self.levels.fill(0);
                }
                depth.is_none() && self.is_open(1, sp)
            }
        }
    }
}

struct Nested {
    guest: FakeGuest,
    address: u64,
    table: &'static [AtomicU64],
    first: usize,
}

impl Nested {
    fn new(addressing: Addressing, depth: Option<u8>) -> Self {
        let guest = FakeGuest::new(1, 1 << 16, addressing, Overflow::Drop);
        let (start, table) = words(Nesting::size(depth) / 8 + 512);
        let address = start.next_multiple_of(4096);
        let first = usize::try_from((address - start) / 8).unwrap();
        Self { guest, address, table, first }
    }

    /// The row of the stack with this pointer.
    fn row(&self, sp: u64, depth: Option<u8>) -> &'static [AtomicU64] {
        let levels = usize::from(depth.unwrap_or(1));
        let rows = (usize::try_from(Nesting::size(depth)).unwrap() - 64) / 8;
        let width = levels.next_power_of_two();
        let row = usize::try_from(sp >> STACK_BITS).unwrap() % (rows / width);
        &self.table[self.first + 8 + row * width..][..levels]
    }
}

// A call that is recorded too deep, or outside of its root, is not what was asked for; one that is left out is missing.
// A row that is not as it should be does so to those that follow.
#[test]
fn calls_are_meant_as_deep_as_they_are() {
    let mut random = Random(0x9d2c_5680_1f3a_77e1);
    let (mut all, mut told) = (0, 0);
    const ENTERED: [Call; 5] = [
        Call::Root { again: false },
        Call::Root { again: true },
        Call::Inner,
        Call::Endless { root: false },
        Call::Endless { root: true },
    ];
    let entered = ENTERED.map(|call| (Point::Entry, call));
    let jumps = [Call::Ends, Call::GoesOn, Call::MayGoOn].map(|call| (Point::Tail, call));
    let returns = [Point::Return, Point::Beyond].map(|point| (point, Call::Ends));
    let mut calls = [&entered[..], &returns].concat();
    if cfg!(target_arch = "x86_64") {
        calls.extend(jumps);
    }
    let depths = [None, Some(1), Some(2), Some(3), Some(5), Some(16)];
    let all_calls = calls.iter().flat_map(|&call| depths.map(|depth| (call, depth)));
    for addressing in ADDRESSINGS {
        for ((point, call), depth) in all_calls.clone() {
            let mut nested = Nested::new(addressing, depth);
            let nesting = Nesting { address: nested.address, stack_bits: STACK_BITS, depth, call };
            // What it is at the entry, and at the end.
            let plain = Program { point, fields: vec![Field::Stack], ..entry_program() };
            let program = Program { nesting: Some(nesting), ..plain.clone() };
            let programs = [plain, program].map(|it| nested.guest.add(&it, addressing, None));
            let install = |guest: &FakeGuest, program| guest.come_from(1, point, program);
            let mut tail = nested.guest.ring(0).start();
            nested.guest.set_current(0, 1);
            let mut stack = |nested: &mut Nested, random: &mut Random| {
                nested.guest.call(1, point, random, &[]);
                let mut records = Vec::new();
                nested.guest.drain(0, &mut tail, |record| records.push(record));
                assert!(records.len() < 2);
                records.first().map(|record| record.fields[0].wrapping_add(stack_bias(point)))
            };
            install(&nested.guest, programs[0]);
            let sp = stack(&mut nested, &mut random).unwrap();
            install(&nested.guest, programs[1]);
            for _ in 0..60 {
                let row = nested.row(sp, depth);
                let mut above = sp + STACK - 64;
                for level in row {
                    // What is nested is below; what is not is left over, or another stack's.
                    above -= 8 * (1 + random.below((above - sp) / 32 + 1));
                    let call = match random.below(8) {
                        0 => 0,
                        1 => sp - random.below(2),
                        2 => sp - 8 * (1 + random.below(500)),
                        3 => sp + (STACK << 15),
                        4 => sp - (STACK << 15),
                        _ => above.max(sp),
                    };
                    level.store(call, Ordering::Relaxed);
                }
                let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
                let crowded = &nested.table[nested.first];
                let mut model =
                    Row { levels: row.iter().map(load).collect(), crowded: load(crowded) };
                let before = model.clone();
                let meant = match point {
                    Point::Entry => model.enter(nesting, sp),
                    _ => model.leave(nesting, point, sp),
                };
                let seen = stack(&mut nested, &mut random);
                assert_eq!(seen, meant.then_some(sp), "{nesting:x?} {point:?} {sp:#x} {before:x?}");
                let crowded = load(&nested.table[nested.first]);
                let after = Row { levels: row.iter().map(load).collect(), crowded };
                assert_eq!(after, model, "{nesting:x?} {point:?} {sp:#x} {before:x?}");
                (all, told) = (all + 1, told + u64::from(meant));
            }
        }
    }
    assert!(told > all / 8 && told < all * 7 / 8, "{told} of {all}");
}

// Calls whose beginnings are kept are looked for where they end, by others that are nested as well.
#[test]
fn only_calls_that_are_nested_keep_their_beginnings() {
    let mut random = Random(5);
    for addressing in ADDRESSINGS {
        let mut nested = Nested::new(addressing, None);
        let (start, open) = words(Calls::SIZE / 8 + 8);
        let calls = Calls { address: start.next_multiple_of(64) };
        let nesting = |call| {
            let (address, stack_bits, depth) = (nested.address, STACK_BITS, None);
            Some(Nesting { address, stack_bits, depth, call })
        };
        let counts = Some(Counts::Begin(None, calls));
        let point = Point::Return;
        let programs = [
            Program { counts, nesting: nesting(Call::Root { again: true }), ..entry_program() },
            Program { counts, nesting: nesting(Call::Inner), ..entry_program() },
            Program {
                point,
                fields: vec![Field::Stack, Field::Duration],
                since: Some(calls),
                nesting: nesting(Call::Ends),
                ..entry_program()
            },
        ];
        let [root, other, end] = programs.map(|it| nested.guest.add(&it, addressing, None));
        nested.guest.call_from(0, root);
        nested.guest.call_from(1, other);
        nested.guest.return_from(2, end);
        nested.guest.set_current(0, 1);
        let mut tail = nested.guest.ring(0).start();
        let taken = || {
            let places = open.iter().skip(usize::try_from(Calls::PLACES / 8).unwrap()).step_by(4);
            places.filter(|place| place.load(Ordering::Relaxed) != 0).count()
        };
        for (function, kept) in [(1, 0), (0, 1)] {
            nested.guest.call(function, Point::Entry, &mut random, &[]);
            assert_eq!(taken(), kept);
            nested.guest.call(2, point, &mut random, &[]);
            let mut records = 0;
            nested.guest.drain(0, &mut tail, |_| records += 1);
            assert_eq!((records, taken()), (kept, 0));
        }
    }
}

// A root of which nothing is to be recorded itself would hide all that it calls; one of another task must not be open for
// what that task does later, under another name.
#[test]
fn a_root_begins_although_its_condition_does_not_hold_unless_that_is_on_the_task() {
    let mut random = Random(3);
    let of =
        |operand| Condition::Test(Test::Number { operand, relation: Relation::Less, value: 0 });
    let argument = of(Operand::Argument { number: 0, bytes: 4, signed: false });
    let task = Operand::Task(NAME.0);
    let task =
        Condition::Test(Test::Number { operand: task, relation: Relation::Equal, value: 77 });
    for addressing in ADDRESSINGS {
        let both = Condition::All(vec![task.clone(), argument.clone()]);
        let cases = [(&argument, true), (&task, false), (&both, true)];
        let (start, _) = words(Calls::SIZE / 8 + 8);
        let kept = Counts::Begin(None, Calls { address: start.next_multiple_of(64) });
        for ((condition, begins), counts) in
            cases.into_iter().flat_map(|case| [(case, None), (case, Some(kept))])
        {
            for rooted in [true, false] {
                let mut nested = Nested::new(addressing, None);
                // Where all are roots, levels are of what is recorded.
                let (call, begins) = (Call::Root { again: rooted }, begins && rooted);
                let (address, depth) = (nested.address, None);
                let nesting = Some(Nesting { address, stack_bits: STACK_BITS, depth, call });
                let condition = Some(condition.clone());
                let program = Program { condition, counts, nesting, ..entry_program() };
                let program = nested.guest.add(&program, addressing, None);
                nested.guest.call_from(0, program);
                nested.guest.set_current(0, 1);
                nested.guest.call(0, Point::Entry, &mut random, &[]);
                let mut tail = nested.guest.ring(0).start();
                nested.guest.drain(0, &mut tail, |_| panic!("it does not hold"));
                let open = nested.table[nested.first + 8..].iter();
                let open = open.filter(|word| word.load(Ordering::Relaxed) != 0).count();
                assert_eq!(open, usize::from(begins), "{counts:?}");
            }
        }
    }
}

// What a dead task has left open is recorded of all that the next one with its stack does.
#[test]
fn a_new_task_begins_with_nothing_open() {
    let mut random = Random(11);
    for addressing in ADDRESSINGS {
        for depth in [None, Some(1), Some(5)] {
            let mut nested = Nested::new(addressing, depth);
            let nesting = |call| {
                Some(Nesting { address: nested.address, stack_bits: STACK_BITS, depth, call })
            };
            let counts = Some(Counts::Nothing);
            let root = Program { fields: vec![Field::Stack], ..entry_program() };
            let programs = [
                Program { nesting: nesting(Call::Root { again: true }), ..root },
                Program { counts, nesting: nesting(Call::Fresh), ..entry_program() },
            ];
            let [root, fresh] = programs.map(|it| nested.guest.add(&it, addressing, None));
            nested.guest.call_from(0, root);
            nested.guest.call_from(1, fresh);
            nested.guest.set_current(0, 1);
            let mut tail = nested.guest.ring(0).start();
            nested.guest.call(0, Point::Entry, &mut random, &[]);
            let mut sp = None;
            let of = |sp: u64| sp.wrapping_add(stack_bias(Point::Entry));
            nested.guest.drain(0, &mut tail, |record| sp = Some(of(record.fields[0])));
            let row = nested.row(sp.unwrap(), depth);
            let levels = row.len();
            for (off, stays) in [
                (0, false),
                (8, false),
                (STACK - 8, false),
                (8_u64.wrapping_neg(), false),
                ((STACK - 8).wrapping_neg(), false),
                (STACK, true),
                (STACK << 15, true),
            ] {
                let first = sp.unwrap().wrapping_add(off);
                let mut open = vec![first; levels];
                row.iter().zip(&open).for_each(|(word, &call)| word.store(call, Ordering::Relaxed));
                nested.guest.call(1, Point::Entry, &mut random, &[]);
                if !stays {
                    open.fill(0);
                }
                let after: Vec<_> = row.iter().map(|word| word.load(Ordering::Relaxed)).collect();
                assert_eq!(after, open, "{off:#x}");
            }
            nested.guest.drain(0, &mut tail, |_| panic!("it is no record"));
        }
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let check = |point, nesting| Program { point, nesting, ..entry_program() }.check();
    let call = Call::Root { again: true };
    let good = Nesting { address: 0x4000, stack_bits: 14, depth: Some(16), call };
    assert_eq!(check(Point::Entry, Some(good)), Ok(()));
    let refused = [
        (Point::Return, good),
        (Point::Return, Nesting { call: Call::GoesOn, ..good }),
        (Point::Entry, Nesting { call: Call::Ends, ..good }),
        (Point::Entry, Nesting { call: Call::Fresh, ..good }),
        (Point::Entry, Nesting { depth: Some(17), ..good }),
        (Point::Entry, Nesting { depth: Some(0), ..good }),
        (Point::Entry, Nesting { stack_bits: 11, ..good }),
        (Point::Entry, Nesting { stack_bits: 21, ..good }),
    ];
    let end = Nesting { call: Call::Ends, ..good };
    assert_eq!(check(Point::Return, Some(end)), Ok(()));
    assert_eq!(check(Point::Tail, Some(end)), Ok(()));
    for (point, nesting) in refused {
        let error = check(point, Some(nesting)).unwrap_err();
        assert!(matches!(error, ProgramError::Nesting(..)), "{nesting:?} {error}");
    }
    let error = check(Point::Entry, Some(Nesting { address: 0x4040, ..good })).unwrap_err();
    assert!(matches!(error, ProgramError::Table(_, 4096)), "{error}");
    for address in [0x7fff_f000, 1 << 40, 0u64.wrapping_sub(4096)] {
        let nesting = Some(Nesting { address, ..good });
        let error = check(Point::Entry, nesting).unwrap_err();
        assert!(matches!(error, ProgramError::Range(..)), "{address:#x} {error}");
    }
}
