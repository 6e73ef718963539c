//! Programs of every kind: what they record, and what they must not change.
#![allow(unsafe_code, reason = "runs machine code in this process")]

mod common;

use common::arch::{
    ADDRESSINGS, ARGUMENTS, RETURN_ADDRESS, Registers, STACK, VALUE, free, stack_bias, ticks,
};
use common::{FakeGuest, Random, Record};
use vmtrace_trampolines::condition::{Operand, Relation, Test};
use vmtrace_trampolines::histogram::Calls;
use vmtrace_trampolines::layout::{COMMON_SIZE, MAX_RECORD};
use vmtrace_trampolines::marks::Marks;
use vmtrace_trampolines::{
    Condition, Counts, Field, Last, Overflow, Point, Program, ProgramError, Read,
};

/// How a program is entered.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Entry,
    Tail,
    Return,
    Beyond,
    Probe,
}

impl Random {
    fn registers(&mut self) -> Registers {
        let mut registers = common::registers(0);
        registers.x.fill_with(|| self.next());
        registers.stack.fill_with(|| self.next());
        registers
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "limited")]
    fn read(&mut self, argument: u8) -> Read {
        let mut offset = || self.below(1 << 14) as i32 - (1 << 13);
        let (hops, offset) = ([offset(), offset()], offset());
        let words = 1 + self.below(5) as u8;
        let last = match self.below(2) {
            0 => Last::Words { offset, words },
            _ => Last::Text { offset, words },
        };
        Read::new(argument, &hops[..self.below(3) as usize], last).unwrap()
    }

    #[allow(clippy::cast_possible_truncation, reason = "all are limited")]
    fn program(&mut self, point: Point) -> Program {
        // Now and then of the greatest length.
        let count = if self.below(8) == 0 { 28 } else { self.below(12) };
        let field = |random: &mut Self| {
            let argument = random.below(ARGUMENTS.len() as u64 + 8) as u8;
            let argument = if point == Point::Probe { argument.max(1) } else { argument };
            match (random.below(6), point) {
                (0, _) | (_, Point::Beyond) => Field::Stack,
                (_, Point::Return) => Field::Value,
                (1, Point::Entry | Point::Tail | Point::Probe) => {
                    Field::Read(random.read(argument))
                }
                (_, Point::Entry | Point::Tail | Point::Probe) => Field::Argument(argument),
            }
        };
        let mut fields: Vec<_> = (0..count).map(|_| field(self)).collect();
        if fields.iter().any(|field| matches!(field, Field::Read(_))) {
            fields.insert(0, Field::Failed);
        }
        while fields.iter().map(|field| field.words()).sum::<usize>() > 28 {
            fields.pop();
        }
        let number = self.below(2048) as u16;
        Program {
            number,
            tracers: 1 + self.below(256) as u16,
            point,
            fields,
            condition: None,
            counts: None,
            since: None,
            nesting: None,
            marked: None,
        }
    }
}

#[allow(clippy::cast_possible_truncation, reason = "the low half")]
fn low(value: u64) -> u32 {
    value as u32
}

/// Calls a function many times, past slow and full paths, and compares all that can be seen.
fn check(kind: Kind, program: &Program, guest: &FakeGuest, random: &mut Random, hits: u32) {
    let site = random.below(FakeGuest::SITES);
    let named = match kind {
        Kind::Entry => guest.function(site),
        Kind::Tail => guest.tail_from(site, 0),
        Kind::Return => guest.return_from(site, 0),
        Kind::Beyond => guest.beyond_from(site, 0),
        Kind::Probe => guest.probe_from(site, 0),
    };
    let task = guest.set_current(0, 4711);
    let mut tail = guest.ring(0).start();
    for hit in 0..hits {
        let before = random.registers();
        let mut after = before.clone();
        let start = ticks();
        guest.run(site, &mut after);
        let end = ticks();
        for register in (0..before.x.len()).filter(|&register| register != STACK) {
            if !free(program.point).contains(&register) && !common::arch::OWN.contains(&register) {
                let (before, after) = (before.x[register], after.x[register]);
                assert_eq!(before, after, "register {register}, {kind:?} {program:?}, hit {hit}");
            }
        }
        assert_eq!(before.stack, after.stack, "{kind:?} {program:?}");
        // Not all the time: drained rings are to be full at times.
        if hit % 1100 >= 20 && guest.overflow().drains() {
            continue;
        }
        let mut last: Option<Record> = None;
        match guest.overflow() {
            Overflow::Overwrite if hit % 100 == 1 => last = guest.recorded(0).pop(),
            Overflow::Overwrite => {}
            Overflow::Drop | Overflow::Block(_) => {
                guest.drain(0, &mut tail, |record| last = Some(record));
            }
        }
        if hit % 1100 == 0 && hit > 0 && guest.overflow().drains() {
            continue;
        }
        let Some(record) = last else {
            assert!(guest.overflow() == Overflow::Overwrite, "{kind:?} {program:?} hit {hit}");
            continue;
        };
        let common = record.common;
        assert_eq!((common.site, common.caller), (named, low(after.back)), "{kind:?}");
        assert_eq!((common.task, common.pid), (task, 4711));
        assert!((start..=end).contains(&common.timestamp));
        assert_eq!(record.info().size(), program.size());
        assert_eq!(record.info().program(), program.number);
        let argument = |number: u8| {
            let number = usize::from(number);
            let on_stack = |number: usize| before.stack[number - ARGUMENTS.len()];
            ARGUMENTS.get(number).map_or_else(|| on_stack(number), |&at| before.x[at])
        };
        for (field, below) in program.places() {
            let value = record.fields[(below - COMMON_SIZE) / 8 - 1];
            let expected = match field {
                Field::Target
                | Field::Known(_)
                | Field::Linked(_)
                | Field::Variable(_)
                | Field::Task { .. }
                | Field::Context
                | Field::Duration => {
                    unreachable!("see the tests of x86-64, of ends, and of reads")
                }
                Field::Stack => {
                    after.x[STACK].wrapping_sub(RETURN_ADDRESS + stack_bias(program.point))
                }
                Field::Value => before.x[VALUE],
                Field::Argument(number) => argument(number),
                // No pointer leads anywhere here; see the tests of reads.
                Field::Failed => {
                    let read = |field: &Field| u64::from(matches!(field, Field::Read(_)));
                    program.fields.iter().rev().fold(0, |bits, field| bits << 1 | read(field))
                }
                Field::Read(read) => {
                    let (Last::Words { offset, .. } | Last::Text { offset, .. }) = read.last();
                    let first = *read.hops().first().unwrap_or(&offset);
                    argument(read.argument()).wrapping_add_signed(first.into())
                }
            };
            assert_eq!(value, expected, "{field:?} of {kind:?} {program:?}");
        }
    }
}

// A register that a traced function or its caller relies on, a value that is someone else's, a
// return to elsewhere: each would be the end of the guest or of the trust in what it shows.
#[test]
fn every_kind_of_program_records_what_it_says_and_keeps_the_rest() {
    let mut random = Random(0x1234_5678_9abc_def1);
    for overflow in [Overflow::Drop, Overflow::Overwrite] {
        for addressing in ADDRESSINGS {
            for kind in [Kind::Entry, Kind::Tail, Kind::Return, Kind::Beyond, Kind::Probe] {
                for round in 0..10 {
                    let point = match kind {
                        Kind::Return => Point::Return,
                        Kind::Beyond => Point::Beyond,
                        Kind::Probe => Point::Probe,
                        Kind::Entry | Kind::Tail => Point::Entry,
                    };
                    let program = random.program(point);
                    let guest = FakeGuest::with(1, 1 << 15, addressing, overflow, &[program]);
                    let program = guest.compiled()[0].clone();
                    // The first so often that every path is taken, whatever the length is.
                    let hits = if round < 1 { 2250 } else { 60 };
                    check(kind, &program, &guest, &mut random, hits);
                    let lost = [guest.dropped(0), guest.overwritten(0)];
                    let which = usize::from(overflow == Overflow::Overwrite);
                    assert!(round >= 1 || lost[which] > 0, "not all paths were taken");
                    assert!(lost[which].is_multiple_of(program.tracers.into()));
                    assert_eq!(lost[1 - which], 0);
                }
            }
        }
    }
}

// Stack pointers pair entries with returns: they must be of the very same place.
#[test]
fn an_entry_and_its_return_have_the_same_stack() {
    for addressing in ADDRESSINGS {
        let fields = vec![Field::Stack];
        let entry = Program { fields: fields.clone(), ..common::entry_program() };
        let end = Program { fields, point: Point::Return, ..common::entry_program() };
        let guest = FakeGuest::with(1, 1 << 16, addressing, Overflow::Drop, &[entry, end]);
        guest.set_current(0, 1);
        // A function that calls what it has instead of a return, as if that were its own end.
        guest.return_from(1, 1);
        for site in [0, 1] {
            guest.run(site, &mut common::registers(5));
        }
        let mut stacks = Vec::new();
        let points = [Point::Entry, Point::Return];
        guest.drain(0, &mut guest.ring(0).start(), |record| {
            stacks.push(record.fields[0] + stack_bias(points[stacks.len()]));
        });
        assert_eq!(stacks.len(), 2);
        assert_eq!(stacks[0], stacks[1], "both were called by the same caller");
    }
}

// Opening a chunk takes the registers that arguments are in: the record that finds its chunk used up is one in hundreds.
#[test]
fn a_probe_that_opens_a_chunk_records_what_it_was_called_with() {
    for (addressing, overflow) in ADDRESSINGS
        .into_iter()
        .flat_map(|it| [Overflow::Drop, Overflow::Overwrite].map(|overflow| (it, overflow)))
    {
        let fields: Vec<_> = (1..6).map(Field::Argument).collect();
        let program = Program { point: Point::Probe, fields, ..common::entry_program() };
        let guest = FakeGuest::with(1, 1 << 16, addressing, overflow, &[program]);
        guest.come_from(1, Point::Probe, 0);
        guest.set_current(0, 1);
        let mut tail = guest.ring(0).start();
        for hit in 0..3000 {
            guest.run(1, &mut common::arguments(hit));
            let mut last = None;
            match overflow {
                Overflow::Overwrite => last = guest.recorded(0).pop(),
                Overflow::Drop | Overflow::Block(_) => {
                    guest.drain(0, &mut tail, |record| last = Some(record));
                }
            }
            let expected = common::five_arguments(hit);
            assert_eq!(last.unwrap().fields, expected, "{addressing:?} {overflow:?}");
        }
    }
}

// What a tracepoint passes as its own is gone when a probe records, and what a program keeps for others is not kept there.
#[test]
fn what_probes_do_not_have_is_refused() {
    let check = |program: Program| Program { point: Point::Probe, ..program }.check();
    let program = |fields| Program { fields, ..common::entry_program() };
    let read = |argument| {
        let read = Read::new(argument, &[], Last::Words { offset: 0, words: 1 }).unwrap();
        [Field::Argument(argument), Field::Known(read), Field::Linked(read), Field::Read(read)]
    };
    for field in read(1) {
        assert_eq!(check(program(vec![Field::Failed, field])), Ok(()));
    }
    let others = [Field::Value, Field::Target, Field::Duration];
    for field in read(0).into_iter().chain(others) {
        let refused = Err(ProgramError::Field(field, Point::Probe));
        assert_eq!(check(program(vec![Field::Failed, field])), refused);
    }
    let plain = || program(vec![]);
    let counts = Some(Counts::Nothing);
    let calls = Calls { address: 0x10000 };
    for bad in [
        Program { counts, ..plain() },
        Program { since: Some(calls), ..plain() },
        Program { marked: Some(Marks { address: 0x10000 }), ..plain() },
    ] {
        assert!(matches!(check(bad), Err(ProgramError::Counts(_))));
    }
    let operand = |number| Operand::Argument { number, bytes: 4, signed: false };
    for (number, is_known) in [(0, false), (1, true)] {
        let relation = Relation::Equal;
        let tests = [
            Test::Number { operand: operand(number), relation, value: 1 },
            Test::Text { argument: number, bytes: vec![None] },
        ];
        for test in tests {
            let condition = Some(Condition::Test(test));
            assert_eq!(check(Program { condition, ..plain() }).is_ok(), is_known);
        }
    }
}

// A record longer than what fits above `spent` would be written into the chunk before.
#[test]
fn the_longest_record_is_the_longest() {
    let program = |count| Program { fields: vec![Field::Stack; count], ..common::entry_program() };
    assert!(program(28).check().is_ok_and(|()| program(28).size() == MAX_RECORD));
    assert!(program(29).check().is_err() && program(100).check().is_err());
}

// A number that its bits in a record do not hold would be another program's, whose fields are others; tracers
// that are not counted are told less than they lost.
#[test]
fn numbers_that_records_cannot_hold_are_refused() {
    let check = |number, tracers| Program { number, tracers, ..common::entry_program() }.check();
    assert_eq!((check(2047, 1), check(0, 256)), (Ok(()), Ok(())));
    for (number, tracers) in [(2048, 1), (u16::MAX, 1), (0, 0), (0, 257)] {
        assert_eq!(check(number, tracers), Err(ProgramError::Number(number, tracers)));
    }
    let task = |words| Field::Task { offset: 0, words };
    let fields = |words| Program { fields: vec![task(words)], ..common::entry_program() };
    assert_eq!(fields(1).check(), Ok(()));
    assert_eq!(fields(0).check(), Err(ProgramError::Field(task(0), Point::Entry)));
}
