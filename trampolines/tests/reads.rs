//! Reads of memory along pointers: readable memory is read correctly, and no other memory is
//! accessed.
#![allow(unsafe_code, reason = "runs machine code in this process")]

mod common;

use common::arch::{ADDRESSINGS, ARGUMENTS, Addressing};
use common::{FakeGuest, HEAP, STACK_SIZE};
use std::sync::atomic::Ordering;
use vmtrace_trampolines::{Field, Last, Overflow, Point, Program, Read};

/// Where programs read, in guests whose CPUs find their rings in each way.
fn ways() -> impl Iterator<Item = (Addressing, Point)> {
    let both = [Point::Entry, Point::Probe];
    ADDRESSINGS.into_iter().flat_map(move |addressing| both.map(|point| (addressing, point)))
}

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 33) % limit
    }

    /// An address, most often one that can be read, or almost.
    fn address(&mut self, heap: u64) -> u64 {
        let edges = [0, HEAP / 2, HEAP, 2 * HEAP, 2 * HEAP + STACK_SIZE];
        match self.below(16) {
            0 => 0,
            1 => self.0 | 1 << 63,
            2 => 0x8000_0000_0000 + self.below(1 << 20),
            3..6 => heap + edges[usize::try_from(self.below(5)).unwrap()] - 12 + self.below(20),
            _ => heap + self.below(2 * HEAP + STACK_SIZE),
        }
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "limited")]
    fn read(&mut self, argument: u8) -> Read {
        let hops: Vec<_> = (0..self.below(4)).map(|_| self.below(64) as i32 - 32).collect();
        let (offset, words) = (self.below(5000) as i32 - 2500, 1 + self.below(6) as u8);
        let last = match self.below(2) {
            0 => Last::Words { offset, words },
            _ => Last::Text { offset, words },
        };
        Read::new(argument, &hops, last).unwrap()
    }
}

/// What the program has to find.
struct Model {
    heap: u64,
    bytes: Vec<u8>,
}

impl Model {
    fn word(&self, address: u64) -> Option<u64> {
        let offset = address.checked_sub(self.heap)?;
        let areas = [HEAP / 2..HEAP, HEAP..2 * HEAP, 2 * HEAP..2 * HEAP + STACK_SIZE];
        areas.iter().find(|area| area.contains(&offset) && offset + 8 <= area.end)?;
        let at = usize::try_from(offset).unwrap();
        Some(u64::from_le_bytes(self.bytes[at..at + 8].try_into().unwrap()))
    }

    /// The words, and whether it failed.
    fn read(&self, read: Read, argument: u64) -> (Vec<u64>, bool) {
        let mut words = vec![0; read.words()];
        let mut address = argument;
        let failed = |words: &mut Vec<u64>, address| {
            words[0] = address;
            (words.clone(), true)
        };
        for &hop in read.hops() {
            address = address.wrapping_add_signed(hop.into());
            let Some(next) = self.word(address) else { return failed(&mut words, address) };
            address = next;
        }
        let (Last::Words { offset, .. } | Last::Text { offset, .. }) = read.last();
        let text = matches!(read.last(), Last::Text { .. });
        address = address.wrapping_add_signed(offset.into());
        for index in 0..words.len() {
            let address = address + 8 * index as u64;
            let Some(word) = self.word(address) else {
                if text && index > 0 {
                    break;
                }
                return failed(&mut words, address);
            };
            words[index] = word;
            if text && word.to_le_bytes().contains(&0) {
                break;
            }
        }
        (words, false)
    }
}

// A guest that faults because it is traced is dead, and a wrong word is a lie.
#[test]
fn what_can_be_read_is_read_and_nothing_else() {
    let mut random = Random(4711);
    let (mut good, mut bad, mut cut) = (0, 0, 0);
    for (addressing, point) in ways() {
        for overflow in [Overflow::Drop, Overflow::Overwrite] {
            for _ in 0..60 {
                let first = u8::from(point == Point::Probe);
                let reads = [first, 2, 5].map(|argument| random.read(argument));
                let fields = [Field::Stack, Field::Failed].into_iter();
                let fields = fields.chain(reads.map(Field::Read)).chain([Field::Argument(1)]);
                let fields = fields.collect();
                let program = Program { point, fields, ..common::entry_program() };
                let guest = FakeGuest::with(1, 1 << 16, addressing, overflow, &[program]);
                guest.come_from(1, point, 0);
                guest.set_current(0, 1);
                let (heap, words) = guest.heap();
                for word in words {
                    let value = match random.below(4) {
                        0 => u64::from_le_bytes(*b"a name.."),
                        1 => random.below(1 << 40),
                        _ => random.address(heap),
                    };
                    word.store(value, Ordering::Relaxed);
                }
                let bytes =
                    words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes());
                let model = Model { heap, bytes: bytes.collect() };
                for _ in 0..50 {
                    let mut registers = common::registers(0x5a5a);
                    for register in ARGUMENTS {
                        registers.x[register] = random.address(heap);
                    }
                    let before = registers.clone();
                    guest.run(1, &mut registers);
                    let record = match overflow {
                        Overflow::Overwrite => guest.recorded(0).pop().unwrap(),
                        Overflow::Drop | Overflow::Block(_) => {
                            let mut last = None;
                            guest
                                .drain(0, &mut guest.ring(0).start(), |record| last = Some(record));
                            last.unwrap()
                        }
                    };
                    let (mut expected, mut bits) = (Vec::new(), 0);
                    for (index, read) in reads.into_iter().enumerate() {
                        let argument = before.x[ARGUMENTS[usize::from(read.argument())]];
                        let (words, failed) = model.read(read, argument);
                        cut += u32::from(!failed && words.len() > 1 && words.last() == Some(&0));
                        expected.extend(words);
                        bits |= u64::from(failed) << (index + 2);
                        *if failed { &mut bad } else { &mut good } += 1;
                    }
                    assert_eq!(record.fields[1], bits, "{reads:?}");
                    assert_eq!(record.fields[2..2 + expected.len()], expected, "{reads:?}");
                    assert_eq!(record.fields.last(), Some(&before.x[ARGUMENTS[1]]));
                }
            }
        }
    }
    assert!(good > 500 && bad > 500 && cut > 100, "{good} {bad} {cut}");
}

// Such a program would report nothing, or fail where nobody looks.
#[test]
fn reads_are_refused_where_they_cannot_say_that_they_failed() {
    let read = Field::Read(Read::new(0, &[], Last::Words { offset: 0, words: 1 }).unwrap());
    let check = |fields: &[Field]| {
        Program { fields: fields.to_vec(), ..common::entry_program() }.check().is_ok()
    };
    assert!(check(&[Field::Failed, read]));
    assert!(!check(&[read]) && !check(&[read, Field::Failed]));
    assert!(Read::new(0, &[0; 9], Last::Words { offset: 0, words: 1 }).is_none());
    assert!(Read::new(0, &[], Last::Text { offset: 0, words: 0 }).is_none());
    assert!(Read::new(0, &[], Last::Text { offset: 0, words: 28 }).is_none());
}

// What one argument leads to must not be taken for another's: rdx holds the third, or one on the stack, for as long
// as nothing else does (x86-64).
#[test]
fn what_is_known_to_be_there_is_read_without_a_look() {
    let mut random = Random(815);
    for (addressing, point) in ways() {
        for _ in 0..200 {
            let count = 1 + random.below(6);
            let mut reads = Vec::new();
            for _ in 0..count {
                let [argument, words] =
                    [9, 3].map(|most| u8::try_from(random.below(most)).unwrap());
                let argument = argument.max(u8::from(point == Point::Probe));
                // Some are beyond the offset of an instruction.
                let far = 2000 * i32::from(random.below(2) == 0);
                let [hop, offset] = [32, 64].map(|most| i32::try_from(random.below(most)).unwrap());
                let hops = [far + 8 * hop];
                let hops = &hops[..usize::from(random.below(2) == 0)];
                let last = Last::Words { offset: far + 2 * offset, words: words + 1 };
                reads.push(Read::new(argument, hops, last).unwrap());
            }
            let mut fields = vec![Field::Stack];
            for &read in &reads {
                fields.push(Field::Known(read));
                if random.below(3) == 0 {
                    fields.push(Field::Argument(2));
                }
            }
            let program = Program { point, fields, ..common::entry_program() };
            let guest = FakeGuest::with(
                1,
                1 << 16,
                addressing,
                Overflow::Drop,
                std::slice::from_ref(&program),
            );
            guest.come_from(1, point, 0);
            guest.set_current(0, 1);
            let (heap, words) = guest.heap();
            let address = |random: &mut Random| heap + 8 * random.below(words.len() as u64 - 300);
            for word in words {
                word.store(address(&mut random), Ordering::Relaxed);
            }
            let aligned =
                |at: u64| words[usize::try_from((at - heap) / 8).unwrap()].load(Ordering::Relaxed);
            let word = |at: u64| match u32::try_from(at % 8).unwrap() {
                0 => aligned(at),
                below => aligned(at) >> (8 * below) | aligned(at + 8) << (64 - 8 * below),
            };
            let mut registers = common::registers(0x5a5a);
            for register in ARGUMENTS {
                registers.x[register] = address(&mut random);
            }
            registers.stack.fill_with(|| address(&mut random));
            let before = registers.clone();
            guest.run_kept(1, point, &before);
            let mut last = None;
            guest.drain(0, &mut guest.ring(0).start(), |record| last = Some(record));
            let mut expected = Vec::new();
            for field in &program.fields[1..] {
                let Field::Known(read) = field else {
                    expected.push(before.x[ARGUMENTS[2]]);
                    continue;
                };
                let number = usize::from(read.argument());
                let first = match ARGUMENTS.get(number) {
                    Some(&register) => before.x[register],
                    None => before.stack[number - ARGUMENTS.len()],
                };
                let at = read
                    .hops()
                    .iter()
                    .fold(first, |at, &hop| word(at.wrapping_add_signed(hop.into())));
                let Last::Words { offset, words } = read.last() else { panic!() };
                expected.extend(
                    (0..u64::from(words))
                        .map(|n| word(at.wrapping_add_signed(offset.into()) + 8 * n)),
                );
            }
            assert_eq!(last.unwrap().fields[1..], expected, "{program:?}");
        }
    }
}

/// The words of a record of these fields, with each way to address, of a call whose third argument is the heap and whose
/// fourth is NULL; the heap has words at these places, which `at` makes of its address. No argument may change.
fn recorded(fields: &[Field], at: impl Fn(u64) -> Vec<(usize, u64)>) -> Vec<(Vec<u64>, u64)> {
    let one = |(addressing, point)| {
        let program = Program { point, fields: fields.to_vec(), ..common::entry_program() };
        let guest = FakeGuest::with(1, 1 << 16, addressing, Overflow::Drop, &[program]);
        guest.come_from(1, point, 0);
        // The task that was there before.
        guest.set_current(0, 3);
        guest.set_current(0, 4711);
        let (heap, words) = guest.heap();
        for (place, word) in at(heap) {
            words[place].store(word, Ordering::Relaxed);
        }
        let mut registers = common::registers(0x5a5a);
        registers.x[ARGUMENTS[2]] = heap;
        registers.x[ARGUMENTS[3]] = 0;
        guest.run_kept(1, point, &registers);
        let mut last = None;
        guest.drain(0, &mut guest.ring(0).start(), |record| last = Some(record));
        (last.unwrap().fields.to_vec(), guest.stack())
    };
    ways().map(one).collect()
}

// `jiffies` stands among what arguments lead to: a value must be that of its own address, and what rdx
// holds of an argument must stay (x86-64).
#[test]
fn variables_of_the_kernel_are_read_among_other_fields() {
    let (address, variables) = common::words(3);
    for (variable, value) in variables.iter().zip([11, u64::MAX, 0x1234_5678_9abc_def0]) {
        variable.store(value, Ordering::Relaxed);
    }
    let of = |number: u64| Field::Variable(address + 8 * number);
    let read = Read::new(2, &[], Last::Words { offset: 16, words: 1 }).unwrap();
    let fields = [of(2), Field::Known(read), of(0), Field::Known(read), of(1)];
    for (words, _) in recorded(&fields, |_| vec![(2, 815)]) {
        assert_eq!(words, [0x1234_5678_9abc_def0, 815, 11, 815, u64::MAX]);
    }
}

// A request may have no disk, and none of its parts left: the kernel looks before it follows such a pointer.
#[test]
fn pointers_that_the_kernel_looks_at_may_be_null() {
    let read = |hops: &[i32]| Read::new(2, hops, Last::Words { offset: 8, words: 2 }).unwrap();
    let fields = [
        Field::Linked(read(&[])),
        Field::Linked(read(&[0])),
        Field::Linked(read(&[24, 0])),
        Field::Linked(read(&[32, 0])),
        Field::Linked(Read::new(3, &[0], Last::Words { offset: 8, words: 1 }).unwrap()),
        Field::Known(read(&[])),
    ];
    // Its first and fourth word lead to the seventh, whose first is NULL, and its fifth is NULL.
    let at = |heap| {
        vec![(0, heap + 48), (1, 81), (2, 82), (3, heap + 48), (4, 0), (6, 0), (7, 87), (8, 88)]
    };
    for (words, _) in recorded(&fields, at) {
        assert_eq!(words, [81, 82, 87, 88, 0, 0, 0, 0, 0, 81, 82]);
    }
}

// `comm` of a block request is that of the task that makes it: the words of another task, or of one field
// more or less, would be somebody else's name.
#[test]
fn words_of_the_task_that_runs_are_read_among_other_fields() {
    let task = |offset: u64, words| Field::Task { offset: offset.try_into().unwrap(), words };
    let read = Read::new(2, &[], Last::Words { offset: 16, words: 1 }).unwrap();
    let known = Field::Known(read);
    let fields = [known, task(common::PID, 2), known, task(common::PID, 1)];
    for (words, stack) in recorded(&fields, |_| vec![(2, 815)]) {
        assert_eq!(words, [815, 4711, stack, 815, 4711]);
    }
    // What is not of the task that enters a function is not there at its end.
    for point in [Point::Return, Point::Tail] {
        let program = Program { point, fields: vec![task(0, 1)], ..common::entry_program() };
        assert!(program.check().is_err());
    }
}
