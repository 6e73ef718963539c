//! Conditions: a program records exactly the calls that match, and the function does not notice it.
#![allow(unsafe_code, reason = "maps memory")]
#![allow(clippy::cast_possible_truncation, reason = "all are limited")]

mod common;

use common::arch::{ADDRESSINGS, ARGUMENTS, Registers, STACK, VALUE, call, free};
use common::{FakeGuest, NAME, PID, Random, entry_program, followed};
use core::sync::atomic::Ordering;
use vmtrace_trampolines::condition::{Operand, Relation, Test, extended};
use vmtrace_trampolines::family::SIZE;
use vmtrace_trampolines::{
    Condition, Counters, Counts, Field, Overflow, Point, Program, ProgramError,
};

impl Random {
    /// Values that are equal now and then, at the edges of all widths.
    fn value(&mut self) -> u64 {
        let edges = [0, 1, 0x7f, 0x80, 0xff, 0x7fff, 0x8000, 0x7fff_ffff, 0x8000_0000, u64::MAX];
        match self.below(4) {
            0 => self.next(),
            1 => self.below(4).wrapping_sub(2),
            _ => edges[self.below(10) as usize].wrapping_add(self.below(3)),
        }
    }

    fn letter(&mut self) -> u8 {
        [0, b'a', b'b', 0xff][self.below(4) as usize]
    }

    fn test(&mut self, point: Point, caller: u64) -> Test {
        let kind = self.below(7);
        if kind == 6 {
            return Test::Followed { pid: PID as u32, inside: self.below(2) == 0 };
        }
        if kind == 0 {
            let start = caller.wrapping_sub(self.below(3)).wrapping_add(1);
            let (len, inside) = (self.below(3) as u32, self.below(2) == 0);
            return Test::Caller { start, len, inside };
        }
        if kind == 1 {
            let from = self.below(4) as u32;
            let count = self.below(NAME.1 as u64 + 1 - u64::from(from));
            let byte = |random: &mut Self| (random.below(4) > 0).then(|| random.letter());
            let bytes = (0..count).map(|_| byte(self)).collect();
            return Test::Bytes { offset: NAME.0 + from, bytes, equal: self.below(2) == 0 };
        }
        let operand = match kind {
            2 => Operand::Cpu,
            3 => Operand::Task(NAME.0 + 4 * self.below(3) as u32),
            _ if matches!(point, Point::Tail | Point::Beyond) => Operand::Task(NAME.0),
            _ if point == Point::Return => {
                Operand::Value { bytes: 1 << self.below(4), signed: self.below(2) == 0 }
            }
            _ => Operand::Argument {
                number: (self.below(ARGUMENTS.len() as u64 + 8) as u8)
                    .max(u8::from(point == Point::Probe)),
                bytes: 1 << self.below(4),
                signed: self.below(2) == 0,
            },
        };
        let relation = [
            Relation::Equal,
            Relation::NotEqual,
            Relation::Less,
            Relation::LessEqual,
            Relation::Greater,
            Relation::GreaterEqual,
            Relation::Common,
            Relation::NoneCommon,
        ][self.below(8) as usize];
        let (bytes, signed) = operand.width();
        Test::Number { operand, relation, value: extended(self.value(), bytes, signed) }
    }

    fn condition(&mut self, point: Point, caller: u64, depth: u64) -> Condition {
        if depth == 0 || self.below(3) == 0 {
            return Condition::Test(self.test(point, caller));
        }
        let count = self.below(4);
        let list = (0..count).map(|_| self.condition(point, caller, depth - 1)).collect();
        if self.below(2) == 0 { Condition::All(list) } else { Condition::Any(list) }
    }
}

/// What there is to look at.
struct Call<'a> {
    registers: &'a Registers,
    name: [u8; NAME.1],
    caller: u64,
    cpu: u64,
    pid: u32,
}

impl Call<'_> {
    fn number(&self, operand: Operand) -> u64 {
        let raw = match operand {
            Operand::Cpu => self.cpu,
            Operand::Task(offset) => {
                let from = (offset - NAME.0) as usize;
                u32::from_le_bytes(self.name[from..from + 4].try_into().unwrap()).into()
            }
            Operand::Value { .. } => self.registers.x[VALUE],
            Operand::Duration => panic!("not of these programs"),
            Operand::Argument { number, .. } => {
                let number = usize::from(number);
                match ARGUMENTS.get(number) {
                    Some(&register) => self.registers.x[register],
                    None => self.registers.stack[number - ARGUMENTS.len()],
                }
            }
        };
        let (bytes, signed) = operand.width();
        extended(raw, bytes, signed)
    }

    fn holds(&self, condition: &Condition) -> bool {
        let test = match condition {
            Condition::All(list) => return list.iter().all(|one| self.holds(one)),
            Condition::Any(list) => return list.iter().any(|one| self.holds(one)),
            Condition::Test(test) => test,
        };
        match test {
            Test::Number { operand, relation, value } => {
                let (a, b) = (self.number(*operand), *value);
                let less = match operand.width().1 {
                    true => a.cast_signed() < b.cast_signed(),
                    false => a < b,
                };
                match relation {
                    Relation::Equal => a == b,
                    Relation::NotEqual => a != b,
                    Relation::Less => less,
                    Relation::LessEqual => less || a == b,
                    Relation::Greater => !less && a != b,
                    Relation::GreaterEqual => !less,
                    Relation::Common => a & b != 0,
                    Relation::NoneCommon => a & b == 0,
                }
            }
            Test::Caller { start, len, inside } => {
                (self.caller.wrapping_sub(*start) < u64::from(*len)) == *inside
            }
            Test::Bytes { offset, bytes, equal } => {
                let from = (offset - NAME.0) as usize;
                let same = bytes.iter().zip(&self.name[from..]);
                let same = { same }.all(|(wanted, &byte)| match wanted {
                    Some(wanted) => *wanted == byte,
                    None => byte != 0,
                });
                same == *equal
            }
            Test::Followed { inside, .. } => is_followed(self.pid) == *inside,
            Test::Text { .. } => panic!("not of these programs"),
        }
    }
}

/// Whether the set has it.
fn is_followed(pid: u32) -> bool {
    followed().1[pid as usize % SIZE as usize].load(Ordering::Relaxed) != 0
}

/// The site that is called.
const SITE: u64 = 3;

/// How many calls were recorded and how many were not. `from` has the function with this return
/// address, which calls the site. The site calls the guest's last program, which may count first.
fn check(
    random: &mut Random,
    guest: &FakeGuest,
    program: &Program,
    (from, caller): (&FakeGuest, u64),
) -> (u32, u32) {
    let number = if program.point == Point::Entry { guest.compiled().len() - 1 } else { 0 };
    guest.come_from(SITE, program.point, number);
    let condition = program.condition.as_ref().unwrap();
    let mut tail = guest.ring(0).start();
    let (mut yes, mut no) = (0, 0);
    let counter = &guest.heap().1[0];
    for _ in 0..40 {
        let pid = [1, 5, 31, 32, 63, 64, 0x3f_ffff, 0x40_0005][random.below(8) as usize];
        let task = guest.set_current(0, pid);
        let name = core::array::from_fn(|_| random.letter());
        guest.set_name(task, name);
        let mut before = common::registers(0);
        before.x.fill_with(|| random.value());
        before.stack.fill_with(|| random.value());
        let mut after = before.clone();
        // Arguments on the stack are those of who calls it.
        let through = program.point.enters() && random.below(2) == 0;
        let caller = if through {
            guest.run(SITE, &mut after);
            after.back
        } else {
            let (function, back) = from.caller_of(guest.site(SITE));
            assert_eq!(back, caller);
            call(function, &mut after);
            back
        };
        let on_stack = |test: &Test| {
            let Test::Number { operand: Operand::Argument { number, .. }, .. } = test else {
                return false;
            };
            usize::from(*number) >= ARGUMENTS.len()
        };
        let counted = counter.swap(0, Ordering::Relaxed);
        if !through && condition.tests().any(on_stack) {
            guest.drain(0, &mut tail, drop);
            continue;
        }
        for register in (0..before.x.len()).filter(|&register| register != STACK) {
            if !free(program.point).contains(&register) && !common::arch::OWN.contains(&register) {
                assert_eq!(before.x[register], after.x[register], "{register} {program:?}");
            }
        }
        let meant = Call { registers: &before, name, caller, cpu: 0, pid }.holds(condition);
        let mut found = 0;
        guest.drain(0, &mut tail, |record| {
            found += 1;
            assert_eq!(u64::from(record.common.caller), caller & 0xffff_ffff);
        });
        assert_eq!(found, u32::from(meant), "{program:?} {before:?} {name:?} {caller:#x}");
        if guest.compiled().len() > 1 {
            assert_eq!(counted, u64::from(meant), "{program:?} {before:?} {name:?} {caller:#x}");
        }
        yes += u32::from(meant);
        no += u32::from(!meant);
    }
    (yes, no)
}

// A call that is left out although it is meant looks as if it had not been made.
#[test]
fn exactly_the_calls_that_are_meant_are_recorded_and_counted() {
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    let (mut yes, mut no) = (0, 0);
    let (mut inside, mut outside) = (0, 0);
    let from = FakeGuest::new(1, 1 << 16, ADDRESSINGS[0], Overflow::Drop);
    let caller = from.caller_of(from.site(SITE)).1;
    for pid in [5, 31, 64, 0x3f_ffff_usize] {
        followed().1[pid].store(1, Ordering::Relaxed);
    }
    for round in 0..if cfg!(target_arch = "riscv64") { 150 } else { 1500 } {
        let points =
            [Point::Entry, Point::Entry, Point::Tail, Point::Return, Point::Beyond, Point::Probe];
        let point = points[round % points.len()];
        let addressing = ADDRESSINGS[random.below(ADDRESSINGS.len() as u64) as usize];
        let depth = random.below(4);
        let condition = random.condition(point, caller, depth);
        if condition.tests().count() > Condition::MAX_TESTS {
            continue;
        }
        let only_caller = matches!(condition, Condition::Test(Test::Caller { .. }));
        let program = Program { point, condition: Some(condition), ..entry_program() };
        let mut guest =
            FakeGuest::with(1, 1 << 16, addressing, Overflow::Drop, std::slice::from_ref(&program));
        if round % points.len() == 1 {
            // The same calls are counted, by a program that goes on to the one that records them.
            let distance = guest.heap().0.wrapping_sub(guest.function(SITE).into());
            let counts = Some(Counts::Up(Counters { distance, stride: 4096, rounds: false }));
            guest.add(&Program { counts, ..program.clone() }, addressing, Some(0));
        }
        let (more_yes, more_no) = check(&mut random, &guest, &program, (&from, caller));
        yes += more_yes;
        no += more_no;
        inside += if only_caller { more_yes } else { 0 };
        outside += if only_caller { more_no } else { 0 };
    }
    assert!(inside > 20 && outside > 20, "{inside} and {outside} by their callers");
    assert!(yes > 500 && no > 500, "{yes} and {no}");
}

// A task that is not noted is not followed, with all that it begins; one that is noted in another's place
// fills the trace.
#[test]
fn a_task_that_begins_is_noted_or_not_and_no_other_is() {
    let mut random = Random(7);
    // None of the other test, which has the same set.
    let pids = [2, 3, 30, 33, 62, 65, 77, 4095, 32768, SIZE as u32 - 2];
    for addressing in ADDRESSINGS {
        for (inside, argument) in [
            (true, Some(0)),
            (false, Some(0)),
            (true, Some(1)),
            (false, Some(5)),
            (true, None),
            (false, None),
        ] {
            let own = argument.is_none();
            let counts = Some(Counts::Follow { argument, pid: PID as u32, inside });
            let program = Program { counts, ..entry_program() };
            let guest = FakeGuest::with(1, 1 << 16, addressing, Overflow::Drop, &[program]);
            guest.call_from(SITE, 0);
            let (child, memory) = guest.heap();
            for pid in [2, 30, 33, 4095, SIZE as u32 - 2] {
                // The other one is not to be noted.
                guest.set_current(0, if own { pid } else { 77 });
                let born = if own { 77 } else { pid };
                memory[PID as usize / 8]
                    .store(0xffff_ffff_0000_0000 | u64::from(born), Ordering::Relaxed);
                let kept = pids.map(is_followed);
                let mut after = common::registers(0);
                after.x.fill_with(|| random.next());
                after.x[ARGUMENTS[argument.unwrap_or(0) as usize]] = child;
                let registers = after.clone();
                guest.run(SITE, &mut after);
                for register in (0..registers.x.len()).filter(|&register| register != STACK) {
                    if !free(Point::Entry).contains(&register)
                        && !common::arch::OWN.contains(&register)
                    {
                        assert_eq!(registers.x[register], after.x[register], "{register}");
                    }
                }
                for (other, before) in pids.into_iter().zip(kept) {
                    let expected = if other == pid { inside } else { before };
                    assert_eq!(is_followed(other), expected, "{other} by {pid} {inside}");
                }
            }
            memory[PID as usize / 8].store(0, Ordering::Relaxed);
        }
    }
}

// A task whose new name is taken for another one is not in the trace, or fills it; what is behind the end of a string
// may be no memory.
#[test]
fn a_new_name_is_what_a_task_gets_of_it() {
    const LEN: usize = 4096;
    // SAFETY: a new mapping of two pages, of which the second one cannot be read.
    let page = unsafe {
        let (access, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let page = libc::mmap(core::ptr::null_mut(), 2 * LEN, access, flags, -1, 0);
        assert_ne!(page, libc::MAP_FAILED);
        assert_eq!(libc::mprotect(page.byte_add(LEN), LEN, libc::PROT_NONE), 0);
        page.cast::<u8>()
    };
    let exactly = |name: &str| name.bytes().chain([0]).map(Some).collect::<Vec<_>>();
    let from = |name: &str| name.bytes().map(Some).collect::<Vec<_>>();
    let fifteen = "a-name-of-15-by";
    let cases = [
        (exactly("sh"), "sh", true),
        (exactly("sh"), "s", false),
        (exactly("sh"), "shx", false),
        (exactly("sh"), "", false),
        (from("sh"), "sshd", false),
        (from("ss"), "sshd", true),
        (vec![None, Some(b'h')], "sh", true),
        (vec![None, Some(b'h')], "", false),
        (exactly(fifteen), fifteen, true),
        (exactly(fifteen), "a-name-of-15-bytes-or-more", true),
        (exactly(fifteen), "a-name-of-15-b", false),
        (vec![], "", true),
    ];
    for addressing in ADDRESSINGS {
        for (bytes, name, meant) in &cases {
            for argument in [0, 1, 5] {
                for negated in [false, true] {
                    let test = Condition::Test(Test::Text { argument, bytes: bytes.clone() });
                    // The other way round: none of what is not.
                    let condition = match negated {
                        true => {
                            Condition::All(vec![Condition::Any(vec![test, Condition::Any(vec![])])])
                        }
                        false => test,
                    };
                    let program = Program { condition: Some(condition), ..entry_program() };
                    let guest = FakeGuest::with(1, 1 << 16, addressing, Overflow::Drop, &[program]);
                    guest.set_current(0, 77);
                    let mut tail = guest.ring(0).start();
                    let at = LEN - name.len() - 1;
                    // SAFETY: up to the end of the first page.
                    unsafe {
                        core::ptr::copy_nonoverlapping(name.as_ptr(), page.add(at), name.len());
                        page.add(at + name.len()).write(0);
                    }
                    let mut registers = common::registers(0);
                    registers.x[ARGUMENTS[usize::from(argument)]] =
                        (page.expose_provenance() + at) as u64;
                    guest.run(SITE, &mut registers);
                    let mut found = 0;
                    guest.drain(0, &mut tail, |_| found += 1);
                    assert_eq!(found, u32::from(*meant), "{name:?} {bytes:?}");
                }
            }
        }
    }
}

// What a condition cannot be must not become code that does something else.
#[test]
fn conditions_that_cannot_be_are_refused() {
    let number = |operand, value| {
        Condition::Test(Test::Number { operand, relation: Relation::Equal, value })
    };
    let argument = Operand::Argument { number: 0, bytes: 4, signed: true };
    let value = Operand::Value { bytes: 4, signed: true };
    let program = |point, condition| Program {
        point,
        fields: vec![Field::Stack],
        condition: Some(condition),
        ..entry_program()
    };
    assert_eq!(program(Point::Entry, number(argument, u64::MAX)).check(), Ok(()));
    let most = Condition::Any(vec![number(Operand::Cpu, 1); 64]);
    assert_eq!(program(Point::Entry, most).check(), Ok(()));
    let bad = [
        (Point::Return, number(argument, 1)),
        (Point::Tail, number(argument, 1)),
        (Point::Entry, number(argument, 0xffff_ffff)),
        (Point::Entry, number(Operand::Cpu, u64::MAX)),
        (Point::Entry, number(Operand::Argument { number: 0, bytes: 3, signed: true }, 1)),
        (
            Point::Entry,
            Condition::Test(Test::Bytes { offset: 0, bytes: vec![None; 17], equal: true }),
        ),
        (Point::Entry, Condition::Any(vec![number(Operand::Cpu, 1); 65])),
        (Point::Entry, number(value, 1)),
        (Point::Tail, number(value, 1)),
        (Point::Return, number(Operand::Duration, 1)),
        (Point::Return, Condition::Test(Test::Text { argument: 1, bytes: vec![] })),
        (Point::Entry, Condition::Test(Test::Text { argument: 6, bytes: vec![] })),
        (Point::Entry, Condition::Test(Test::Text { argument: 1, bytes: vec![None; 17] })),
    ];
    for (point, condition) in bad {
        let refused = program(point, condition).check();
        assert!(matches!(refused, Err(ProgramError::Condition(..))), "{refused:?}");
    }
}

// A list of names is longer than a branch of riscv64 reaches: with another condition beside it, nothing was traced.
#[test]
fn as_many_names_as_there_can_be_stand_beside_other_conditions() {
    let mut random = Random(0x0bad_cafe);
    let from = FakeGuest::new(1, 1 << 16, ADDRESSINGS[0], Overflow::Drop);
    let caller = from.caller_of(from.site(SITE)).1;
    let number = |operand, relation, value| Test::Number { operand, relation, value };
    let alone = [
        number(Operand::Cpu, Relation::Less, 1),
        number(
            Operand::Task(NAME.0),
            Relation::GreaterEqual,
            u64::from(u32::from_le_bytes(*b"bbbb")),
        ),
        number(Operand::Task(NAME.0), Relation::Common, 1),
        Test::Followed { pid: PID as u32, inside: true },
        Test::Caller { start: caller, len: 8, inside: false },
        Test::Bytes { offset: NAME.0 + 1, bytes: vec![Some(random.letter())], equal: false },
    ];
    let (mut yes, mut no) = (0, 0);
    for (round, one) in alone.iter().cycle().take(4 * alone.len()).enumerate() {
        let equal = (round / alone.len()).is_multiple_of(2);
        let mut name = |at| {
            // One of them is what many are called.
            let len = if at == 40 { 1 } else { NAME.1 };
            let bytes = (0..len).map(|_| Some(random.letter())).collect();
            Condition::Test(Test::Bytes { offset: NAME.0, bytes, equal })
        };
        let names: Vec<_> = (1..Condition::MAX_TESTS).map(&mut name).collect();
        let names = if equal { Condition::Any(names) } else { Condition::All(names) };
        let mut both = vec![Condition::Test(one.clone()), names];
        if round / alone.len() / 2 == 0 {
            both.reverse();
        }
        for condition in [Condition::All(both.clone()), Condition::Any(both)] {
            for point in [Point::Entry, Point::Return] {
                let condition = Some(condition.clone());
                let program = Program { point, condition, ..entry_program() };
                let (list, addressing) = (std::slice::from_ref(&program), ADDRESSINGS[0]);
                let mut guest = FakeGuest::with(1, 1 << 16, addressing, Overflow::Drop, list);
                if point == Point::Entry {
                    let distance = guest.heap().0.wrapping_sub(guest.function(SITE).into());
                    let counters = Counters { distance, stride: 4096, rounds: false };
                    let counts = Some(Counts::Up(counters));
                    guest.add(&Program { counts, ..program.clone() }, addressing, Some(0));
                }
                let found = check(&mut random, &guest, &program, (&from, caller));
                yes += found.0;
                no += found.1;
            }
        }
    }
    assert!(yes > 500 && no > 500, "{yes} and {no}");
}
