//! Checks programs with an independent decoder, for both architectures on any machine.

mod disassembled;

use disassembled::{FLAGS, Instruction, riscv64, x86_64};
use proptest::prelude::*;
use std::collections::{BTreeSet, HashSet};
use vmtrace_trampolines::callers::Callers;
use vmtrace_trampolines::condition::{Operand, Relation, Test};
use vmtrace_trampolines::histogram::{Calls, Ended, Sorted};
use vmtrace_trampolines::x86_64::Addressing;
use vmtrace_trampolines::{
    Code, Condition, ContextPlaces, Counters, Counts, Field, Last, Overflow, Point, Program, Read,
    Readable,
};

fn overflows() -> impl Strategy<Value = Overflow> {
    // What makes a CPU wait is the architecture's.
    prop_oneof![Just(Overflow::Drop), Just(Overflow::Overwrite), Just(Overflow::Block(&[]))]
}

fn program() -> impl Strategy<Value = (Program, Overflow)> {
    let overflow = overflows();
    let point = prop_oneof![Just(Point::Entry), Just(Point::Return)];
    (0..2048_u16, 1..=256_u16, point, overflow).prop_flat_map(
        |(number, tracers, point, overflow)| {
            let field =
                (0..32_u8, any::<u8>()).prop_map(move |(argument, which)| match (which, point) {
                    (0..64, _) => Field::Stack,
                    (64..96, _) => Field::Context,
                    (_, Point::Return) => Field::Value,
                    (_, Point::Entry | Point::Tail) => Field::Argument(argument),
                });
            prop::collection::vec(field, 0..=28).prop_map(move |fields| {
                (
                    Program {
                        number,
                        tracers,
                        point,
                        fields,
                        condition: None,
                        counts: None,
                        since: None,
                    },
                    overflow,
                )
            })
        },
    )
}

/// Of a guest with 4 GiB.
fn readable() -> Readable {
    let ram = (0xffff_8880_0000_0000, 4 << 30);
    let image = (0xffff_ffff_8220_0000, 0x80_0000);
    Readable { areas: vec![ram, image], stack: Some((32, 16 << 10)) }
}

/// A program that reads.
fn reader() -> impl Strategy<Value = (Program, Overflow)> {
    let overflow = overflows();
    let hops = prop::collection::vec(any::<i32>(), 0..4);
    let read = (0..12_u8, hops, 1..8_u8, any::<i32>(), any::<bool>());
    let read = read.prop_map(|(argument, hops, words, offset, text)| {
        let offset = offset / 2;
        let hops: Vec<_> = hops.into_iter().map(|hop| hop / 2).collect();
        let last = if text { Last::Text { offset, words } } else { Last::Words { offset, words } };
        Field::Read(Read::new(argument, &hops, last).unwrap())
    });
    (prop::collection::vec(read, 1..4), overflow).prop_map(|(reads, overflow)| {
        let fields = [Field::Stack, Field::Failed].into_iter().chain(reads).collect();
        (
            Program {
                number: 1,
                tracers: 1,
                point: Point::Entry,
                fields,
                condition: None,
                counts: None,
                since: None,
            },
            overflow,
        )
    })
}

/// Of a program of entries.
fn condition() -> impl Strategy<Value = Condition> {
    let relation = prop_oneof![
        Just(Relation::Equal),
        Just(Relation::Less),
        Just(Relation::Greater),
        Just(Relation::NoneCommon)
    ];
    let argument = (0..12_u8, 0..2_u8, any::<bool>()).prop_map(|(number, bytes, signed)| {
        Operand::Argument { number, bytes: 4 << bytes, signed }
    });
    let operand = prop_oneof![Just(Operand::Cpu), (0..8192_u32).prop_map(Operand::Task), argument];
    let number = (operand, relation, any::<u64>()).prop_map(|(operand, relation, value)| {
        let (bytes, signed) = operand.width();
        let value = vmtrace_trampolines::condition::extended(value, bytes, signed);
        Test::Number { operand, relation, value }
    });
    let bytes = prop::collection::vec(any::<Option<u8>>(), 0..=16);
    let bytes = (0..8192_u32, bytes, any::<bool>())
        .prop_map(|(offset, bytes, equal)| Test::Bytes { offset, bytes, equal });
    let start = (0..1_u64 << 31).prop_map(|start| start | 0xffff_ffff_8000_0000);
    let caller = (start, 0..1_u32 << 20, any::<bool>())
        .prop_map(|(start, len, inside)| Test::Caller { start, len, inside });
    let followed =
        (0..8192_u32, any::<bool>()).prop_map(|(pid, inside)| Test::Followed { pid, inside });
    let test = prop_oneof![number, bytes, caller, followed].prop_map(Condition::Test);
    test.prop_recursive(3, 20, 4, |inner| {
        let list = prop::collection::vec(inner, 0..4);
        (list, any::<bool>()).prop_map(|(list, all)| match all {
            true => Condition::All(list),
            false => Condition::Any(list),
        })
    })
}

/// Where tasks are noted that are followed.
const SET: u64 = 0xffff_ffff_8740_0000;

/// What an instruction can have as a displacement.
fn word() -> impl Strategy<Value = u64> {
    let near = 0..2048_u64;
    // Not the last 2 KiB, which no two instructions of riscv64 can add up to.
    let any = (i32::MIN + 4096..i32::MAX - 4096).prop_map(|word| i64::from(word).cast_unsigned());
    prop_oneof![near, any]
}

fn places() -> impl Strategy<Value = ContextPlaces> {
    let softirq = prop::option::of(0..1_u64 << 30);
    let lazy = prop::option::of(0..1_u64 << 30);
    (word(), word(), word(), softirq, lazy).prop_map(
        |(flags, preempt_count, migration, softirq, lazy)| ContextPlaces {
            flags,
            preempt_count,
            migration,
            softirq,
            lazy,
        },
    )
}

fn x86_values() -> impl Strategy<Value = vmtrace_trampolines::x86_64::Values> {
    let per_cpu = any::<u64>().prop_map(|distance| Addressing::PerCpu { distance });
    let shared = (word(), 1..8192_u64, word())
        .prop_map(|(number, cpus, table)| Addressing::Shared { number, cpus, table });
    (prop_oneof![per_cpu, shared], word(), word(), places()).prop_map(
        |(addressing, current, pid, places)| vmtrace_trampolines::x86_64::Values {
            // Where large ones are.
            rings: -0x7fe0_0000,
            addressing,
            current,
            pid,
            cpu: 0x20,
            slide: 0,
            readable: readable(),
            followed: Some(SET),
            context: Some(places),
        },
    )
}

fn riscv_values() -> impl Strategy<Value = vmtrace_trampolines::riscv64::Values> {
    (word(), word(), word(), places()).prop_map(|(cpu, pid, controls, places)| {
        vmtrace_trampolines::riscv64::Values {
            cpu,
            pid,
            controls,
            slide: 0,
            readable: readable(),
            followed: Some(SET),
            context: Some(places),
        }
    })
}

/// Every path, with what is on the stack at each instruction: all ends with the stack as it was,
/// and whoever is saved is put back. Returns what is written without being saved.
fn paths(all: &[Instruction]) -> Result<BTreeSet<String>, TestCaseError> {
    let index = |offset: usize| all.iter().position(|one| one.offset == offset);
    let mut written = BTreeSet::new();
    let mut seen = HashSet::new();
    let mut open = vec![(0, Vec::<String>::new())];
    while let Some((at, mut stack)) = open.pop() {
        if !seen.insert((at, stack.clone())) {
            continue;
        }
        let one = &all[at];
        if let Some(register) = &one.pushed {
            stack.push(register.clone());
        } else if let Some(register) = &one.popped {
            let pushed = stack.pop();
            if pushed.as_deref() == Some(FLAGS) {
                written.extend((!stack.contains(register)).then(|| register.clone()));
            } else {
                prop_assert_eq!(pushed.as_ref(), Some(register), "{:?}", one);
            }
        } else {
            written
                .extend(one.writes.iter().filter(|&register| !stack.contains(register)).cloned());
        }
        if one.ending {
            prop_assert!(stack.is_empty(), "returns to what was pushed: {:?}", stack);
            continue;
        }
        if let Some(target) = one.target {
            let target = index(target);
            prop_assert!(target.is_some(), "to the middle of something: {:?}", one);
            open.push((target.unwrap_or(0), stack.clone()));
        }
        if !one.jump {
            prop_assert!(at + 1 < all.len(), "runs off the end");
            open.push((at + 1, stack));
        }
    }
    Ok(written)
}

/// Of a hit for which there is room.
fn common(all: &[Instruction]) -> &[Instruction] {
    let end = all.iter().position(|one| one.ending).unwrap();
    assert!(all[..end].iter().all(|one| !one.jump), "is one straight run");
    &all[..=end]
}

fn endings(all: &[Instruction]) -> Vec<usize> {
    all.iter().filter(|one| one.ending).map(|one| one.offset).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    // A kernel that runs what is none of these is lost, or finds a register changed.
    #[test]
    fn x86_64_programs_stay_inside_and_write_what_is_free(
        (program, overflow) in program(), values in x86_values()
    ) {
        let Code { bytes, endings: said, .. } =
            vmtrace_trampolines::x86_64::compile(&program, overflow, &values).unwrap();
        let all = x86_64(&bytes);
        prop_assert_eq!(all.iter().map(|one| one.len).sum::<usize>(), bytes.len(), "all decodes");
        let written = paths(&all)?;
        let free: &[&str] = match program.point {
            Point::Entry | Point::Tail => &["r10", "r11"],
            // rax and rdx are kept in rsi and rdi: see the tests that run it.
            Point::Return => &["rsi", "rdi", "r10", "r11", "rax", "rdx"],
        };
        prop_assert!(written.iter().all(|one| free.contains(&&**one)), "writes {:?}", written);
        prop_assert_eq!(endings(&all), said.clone());
        for ending in said {
            prop_assert_eq!(&bytes[ending..ending + 5], &[0xc3, 0xcc, 0xcc, 0xcc, 0xcc]);
        }
        let locked = common(&all).iter().filter(|one| one.locked).count();
        let shared = matches!(values.addressing, Addressing::Shared { .. });
        prop_assert_eq!(locked, usize::from(shared), "a locked instruction costs 18 cycles");
    }

    #[test]
    fn riscv64_programs_stay_inside_and_write_what_is_free(
        (program, overflow) in program(), values in riscv_values()
    ) {
        let Code { bytes, endings: said, .. } =
            vmtrace_trampolines::riscv64::compile(&program, overflow, &values).unwrap();
        let all = riscv64(&bytes);
        prop_assert_eq!(all.len() * 4, bytes.len(), "all decodes");
        let written = paths(&all)?;
        let mut free = vec!["t2", "t3", "t4", "t5", "t6"];
        match program.point {
            Point::Entry | Point::Tail => free.push("t1"),
            Point::Return => free.extend(["t0", "a2", "a3", "a4", "a5", "a6", "a7"]),
        }
        // Saved below the stack pointer, and put back from where they were.
        free.extend(["a0", "a1", "a2", "a3", "sp"]);
        if matches!(overflow, Overflow::Block(_)) {
            let back = |one: &&Instruction| one.writes.iter().any(|register| register == "a7");
            let back: Vec<_> = all.iter().filter(back).map(|one| &*one.text).collect();
            prop_assert!(back.iter().all(|text| text.ends_with("a7, t6")), "{:?}", back);
            free.push("a7");
        }
        prop_assert!(written.iter().all(|one| free.contains(&&**one)), "writes {:?}", written);
        prop_assert_eq!(endings(&all), said);
        saved(&all)?;
        for (at, _) in all.iter().enumerate().filter(|(_, one)| one.name.starts_with("lr.")) {
            reservation(&all[at..])?;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(100) })]

    // What a subroutine returns by is a return like the others: the guest's mitigations hold for it.
    #[test]
    fn reads_are_code_that_ends_as_said_and_writes_what_is_free(
        (program, overflow) in reader(), values in x86_values(), riscv in riscv_values()
    ) {
        let Code { bytes, endings: said, .. } =
            vmtrace_trampolines::x86_64::compile(&program, overflow, &values).unwrap();
        let all = x86_64(&bytes);
        prop_assert_eq!(all.iter().map(|one| one.len).sum::<usize>(), bytes.len(), "all decodes");
        prop_assert_eq!(endings(&all), said.clone());
        prop_assert_eq!(said.len(), 2);
        // rax and rdx are pushed first and popped last.
        let free = ["rax", "rdx", "r10", "r11"];
        let clean = |one: &Instruction| {
            one.popped.is_some() || one.writes.iter().all(|one| free.contains(&&**one))
        };
        prop_assert!(common_reads(&all).iter().all(clean));
        let Code { bytes, endings: said, .. } =
            vmtrace_trampolines::riscv64::compile(&program, overflow, &riscv).unwrap();
        let all = riscv64(&bytes);
        prop_assert_eq!(all.len() * 4, bytes.len(), "all decodes");
        prop_assert_eq!(said.len(), 1);
        let free = ["t1", "t2", "t3", "t4", "t5", "t6"];
        let clean = |one: &Instruction| one.writes.iter().all(|one| free.contains(&&**one));
        prop_assert!(common_reads(&all).iter().all(clean));
    }
}

/// Up to the program's end.
fn common_reads(all: &[Instruction]) -> &[Instruction] {
    &all[..=all.iter().position(|one| one.ending).unwrap()]
}

/// On riscv64: registers are saved and put back as one block, and nobody else moves `sp`.
fn saved(all: &[Instruction]) -> Result<(), TestCaseError> {
    let mut inside = false;
    let mut kept: Vec<String> = Vec::new();
    for (at, one) in all.iter().enumerate() {
        if one.text == "addi sp, sp, -0x20" {
            prop_assert!(!inside);
            inside = true;
            kept = all[at + 1..at + 5].iter().map(|one| one.text.clone()).collect();
            prop_assert!(kept.iter().all(|text| text.starts_with("sd a")), "{:?}", kept);
        } else if one.text == "addi sp, sp, 0x20" {
            let back: Vec<_> =
                all[at - 4..at].iter().map(|one| one.text.replace("ld", "sd")).collect();
            prop_assert!(inside && back == kept, "{:?} {:?}", kept, back);
        } else {
            prop_assert!(!one.writes.iter().any(|register| register == "sp"), "{:?}", one);
        }
        // Nothing leaves in between, and it does not write to what it saved.
        let left = all[..at].iter().rev().take_while(|one| !one.jump && !one.ending);
        if one.ending && inside {
            let restored = left.clone().any(|one| one.text == "addi sp, sp, 0x20");
            prop_assert!(restored || at < all.len() / 2, "{:?}", one);
        }
    }
    Ok(())
}

/// From `lr` on: what the architecture guarantees to succeed in the end, up to `sc`.
fn reservation(from: &[Instruction]) -> Result<(), TestCaseError> {
    const PERMITTED: [&str; 9] =
        ["addi", "lui", "slliw", "slli", "srli", "add", "bne", "bnez", "bgeu"];
    for (count, one) in from.iter().enumerate().skip(1) {
        if one.name.starts_with("sc.") {
            prop_assert!(count < 16);
            return Ok(());
        }
        prop_assert!(PERMITTED.contains(&&*one.name), "{:?} in a reservation", one);
    }
    prop_assert!(false, "a reservation without an end");
    Ok(())
}

fn with(point: Point, fields: &[Field]) -> Program {
    Program {
        number: 2000,
        tracers: 1,
        point,
        fields: fields.to_vec(),
        condition: None,
        counts: None,
        since: None,
    }
}

/// Of a usual kernel.
fn usual_x86() -> vmtrace_trampolines::x86_64::Values {
    vmtrace_trampolines::x86_64::Values {
        rings: 0,
        addressing: Addressing::PerCpu { distance: 0xffff_8000_1234_5678 },
        current: 0x1_fb80,
        pid: 0x990,
        cpu: 0x20,
        slide: 0,
        readable: readable(),
        followed: Some(SET),
        context: Some(ContextPlaces {
            flags: 0,
            preempt_count: 0x1_fb40,
            migration: 0x7f0,
            softirq: None,
            lazy: None,
        }),
    }
}

/// The same of riscv64.
fn usual_riscv() -> vmtrace_trampolines::riscv64::Values {
    vmtrace_trampolines::riscv64::Values {
        cpu: 32,
        pid: 0x4f0,
        controls: 0xffff_ffff_8160_0000,
        slide: 0,
        readable: readable(),
        followed: Some(SET),
        context: Some(ContextPlaces {
            flags: 0,
            preempt_count: 8,
            migration: 0x448,
            softirq: None,
            lazy: None,
        }),
    }
}

const ARGUMENTS: [Field; 4] =
    [Field::Argument(0), Field::Argument(1), Field::Argument(2), Field::Argument(3)];

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    // A call that is not meant must leave no trace: not in registers either.
    #[test]
    fn conditions_are_code_that_ends_as_said_and_writes_what_is_free(
        condition in condition(), values in x86_values(), riscv in riscv_values()
    ) {
        let program = Program { condition: Some(condition), ..with(Point::Entry, &ARGUMENTS) };
        let Code { bytes, endings: said, .. } =
            vmtrace_trampolines::x86_64::compile(&program, Overflow::Drop, &values).unwrap();
        let all = x86_64(&bytes);
        prop_assert_eq!(all.iter().map(|one| one.len).sum::<usize>(), bytes.len(), "all decodes");
        prop_assert_eq!(endings(&all), said);
        let written = paths(&all)?;
        prop_assert!(written.iter().all(|one| ["r10", "r11"].contains(&&**one)), "{:?}", written);
        let Code { bytes, endings: said, .. } =
            vmtrace_trampolines::riscv64::compile(&program, Overflow::Drop, &riscv).unwrap();
        let all = riscv64(&bytes);
        prop_assert_eq!(all.len() * 4, bytes.len(), "all decodes");
        prop_assert_eq!(endings(&all), said);
        let free = ["t1", "t2", "t3", "t4", "t5", "t6"];
        let written = paths(&all)?;
        prop_assert!(written.iter().all(|one| free.contains(&&**one)), "{:?}", written);
    }
}

// What a call costs that is not meant, from the site's call on: docs/architecture.md, Conditions.
#[test]
fn a_call_that_is_not_meant_costs_at_most_twelve_instructions() {
    let number = |operand, value| {
        Condition::Test(Test::Number { operand, relation: Relation::Equal, value })
    };
    let name = |name: &[u8]| {
        let bytes = name.iter().copied().map(Some).collect();
        Condition::Test(Test::Bytes { offset: 0xbc0, bytes, equal: true })
    };
    let argument = Operand::Argument { number: 2, bytes: 8, signed: false };
    let all = [
        number(Operand::Task(0x990), 4711),
        number(argument, 4096),
        number(argument, 0x1234_5678_9abc),
        name(b"sshd\0"),
        Condition::All(vec![number(Operand::Task(0x990), 4711), number(argument, 4096)]),
    ];
    let (x86, riscv) = (usual_x86(), usual_riscv());
    // Up to the first branch, and from there to the end.
    let cost = |all: &[Instruction]| {
        let first = all.iter().position(|one| one.target.is_some()).unwrap();
        let from = all.iter().position(|one| one.jump).unwrap();
        let jumps = usize::from(from < all.iter().position(|one| one.ending).unwrap());
        first + 1 + jumps + 1
    };
    let costs = all.map(|condition| {
        let program = Program { condition: Some(condition), ..with(Point::Entry, &[]) };
        let drop = Overflow::Drop;
        let x86 = vmtrace_trampolines::x86_64::compile(&program, drop, &x86).unwrap();
        let riscv = vmtrace_trampolines::riscv64::compile(&program, drop, &riscv).unwrap();
        [cost(&x86_64(&x86.bytes)), cost(&riscv64(&riscv.bytes))]
    });
    assert_eq!(costs, [[4, 8], [3, 5], [4, 11], [4, 9], [4, 8]]);
}

/// What all of these cost with the values of usual kernels.
fn costs(compile: impl Fn(&Program, Overflow) -> Vec<Instruction>) -> [usize; 10] {
    let cost =
        |point, fields: &[Field], overflow| common(&compile(&with(point, fields), overflow)).len();
    let (drop, overwrite) = (Overflow::Drop, Overflow::Overwrite);
    [
        cost(Point::Entry, &[], drop),
        cost(Point::Entry, &ARGUMENTS[..1], drop),
        cost(Point::Entry, &ARGUMENTS[..2], drop),
        cost(Point::Entry, &ARGUMENTS[..3], drop),
        cost(Point::Entry, &ARGUMENTS, drop),
        cost(Point::Entry, &[], overwrite),
        cost(Point::Return, &[Field::Stack], drop),
        cost(Point::Return, &[Field::Stack, Field::Value], drop),
        cost(Point::Entry, &[Field::Context], drop),
        cost(Point::Return, &[Field::Stack, Field::Context], drop),
    ]
}

// What a hit costs is these, and was promised (`scripts/bench` counts the site's own as well).
#[test]
fn common_paths_are_as_short_as_promised() {
    let values = usual_x86();
    let x86 = costs(|program, overflow| {
        x86_64(&vmtrace_trampolines::x86_64::compile(program, overflow, &values).unwrap().bytes)
    });
    // rdx is pushed where rdtsc needs it, so that argument costs two.
    assert_eq!(x86, [25, 26, 27, 29, 30, 27, 25, 26, 35, 35]);
    let values = usual_riscv();
    let riscv = costs(|program, overflow| {
        riscv64(&vmtrace_trampolines::riscv64::compile(program, overflow, &values).unwrap().bytes)
    });
    assert_eq!(riscv, [23, 24, 25, 26, 27, 26, 25, 26, 31, 33]);
}

// What `sched_switch` costs, with its seven fields: those of two tasks, whether it was preempted, and
// its state.
#[test]
fn a_switch_of_tasks_is_recorded_in_fifty_instructions() {
    let known = |argument, offset, words| {
        Field::Known(Read::new(argument, &[], Last::Words { offset, words }).unwrap())
    };
    let (prev, next) = (2, 3);
    let fields = vec![
        known(prev, 2976, 2),
        known(prev, 2432, 1),
        known(prev, 108, 1),
        Field::Argument(1),
        Field::Argument(4),
        known(prev, 2416, 1),
        known(next, 2976, 2),
        known(next, 2432, 1),
        known(next, 108, 1),
    ];
    let program = Program {
        number: 1,
        tracers: 1,
        point: Point::Entry,
        fields,
        condition: None,
        counts: None,
        since: None,
    };
    let values = vmtrace_trampolines::x86_64::Values { current: 0x35000, pid: 2432, ..usual_x86() };
    let code = vmtrace_trampolines::x86_64::compile(&program, Overflow::Drop, &values).unwrap();
    let way = x86_64(&code.bytes);
    let own = way.iter().position(|one| one.ending).unwrap() + 1;
    let base = 0xffff_ffff_8000_0000;
    let probe = vmtrace_trampolines::x86_64::probe(base + 4096, base).unwrap();
    let around = x86_64(&probe).iter().position(|one| one.ending).unwrap() + 1;
    assert!(own + around <= 50, "{own} and {around} instructions");
}

// A variable that is read where it was linked, and not where it is, is somebody else's memory.
#[test]
fn variables_move_with_the_kernel() {
    use vmtrace_trampolines::{riscv64, x86_64};
    const SLIDE: u64 = 0x1a60_0000;
    let program = |link| with(Point::Entry, &[Field::Variable(link)]);
    for link in [0xffff_ffff_8200_0000, 0xffff_ffff_8340_1a40, 0xffff_ffff_8200_0ff8] {
        let (there, here) = (program(link), program(link + SLIDE));
        let code = |program, slide| {
            let x86 = x86_64::Values { slide, ..usual_x86() };
            let riscv = riscv64::Values { slide, ..usual_riscv() };
            let x86 = x86_64::compile(program, Overflow::Drop, &x86).unwrap();
            let riscv = riscv64::compile(program, Overflow::Drop, &riscv).unwrap();
            [x86.bytes, riscv.bytes]
        };
        assert_eq!(code(&there, SLIDE), code(&here, 0));
        for (moved, linked) in code(&there, SLIDE).iter().zip(code(&there, 0)) {
            assert_ne!(*moved, linked);
        }
    }
}

/// A program that counts.
fn counting(counters: Counters, condition: Option<Condition>) -> Program {
    Program { counts: Some(Counts::Up(counters)), condition, ..with(Point::Entry, &[]) }
}

fn counters() -> impl Strategy<Value = Counters> {
    let power = (12..31_u32).prop_map(|log| 1 << log);
    let stride = prop_oneof![Just(0), power, (0..1_u64 << 19).prop_map(|pages| pages << 12)];
    (word(), stride, any::<bool>()).prop_map(|(distance, stride, rounds)| {
        let distance = if rounds { distance & !7 } else { distance };
        Counters { distance, stride, rounds }
    })
}

// What a call that is timed costs: its entry and its return, where nothing else is open at its place.
#[test]
fn timing_a_call_is_as_short_as_promised() {
    let calls = Calls { address: 0xffff_ffff_9000_0000 };
    let near = Counters { distance: 0x1000, stride: 4096, rounds: true };
    let ended = Ended::duration(2_500_000_000).unwrap();
    let cost = |point, counts| {
        let program = Program { counts: Some(counts), ..with(point, &[]) };
        let values = usual_x86();
        let code = vmtrace_trampolines::x86_64::compile(&program, Overflow::Drop, &values);
        let all = x86_64(&code.unwrap().bytes);
        all.iter().position(|one| one.ending).unwrap() + 1
    };
    let begin = cost(Point::Entry, Counts::Begin(Some(near), calls));
    let end = cost(Point::Return, Counts::End(calls, ended));
    let sorted = Sorted { number: 2, bytes: 8, signed: false };
    assert_eq!((begin, end, cost(Point::Entry, Counts::Sort(near, sorted))), (24, 32, 18));
}

// What counting a call by caller costs, where the pair is in its first place.
#[test]
fn counting_by_caller_is_as_short_as_promised() {
    let address = 0xffff_ffff_9000_0000;
    let cost = |stride| {
        let counts = Some(Counts::ByCaller(Callers { address, stride }));
        let program = Program { counts, ..with(Point::Entry, &[]) };
        let (x86, riscv, drop) = (usual_x86(), usual_riscv(), Overflow::Drop);
        let x86 = vmtrace_trampolines::x86_64::compile(&program, drop, &x86).unwrap();
        let riscv = vmtrace_trampolines::riscv64::compile(&program, drop, &riscv).unwrap();
        let (x86_said, riscv_said) = (x86.endings, riscv.endings);
        let (x86, riscv) = (x86_64(&x86.bytes), riscv64(&riscv.bytes));
        assert_eq!((endings(&x86), endings(&riscv)), (x86_said, riscv_said));
        // Of riscv64 without what is skipped: the search.
        let found = riscv.iter().position(|one| one.name == "beq").unwrap();
        let on = riscv.iter().position(|one| Some(one.offset) == riscv[found].target).unwrap();
        (common(&x86).len(), found + 1 + riscv.len() - on)
    };
    assert_eq!((cost(Callers::SIZE), cost(0)), ((17, 28), (14, 24)));
}

// What a call costs of which only the end says that it is not meant: its entry, if that has to be kept, and its
// return, each with the instruction that goes on. A return's stub has two more.
#[test]
fn an_end_that_is_not_meant_is_as_short_as_promised() {
    let calls = Calls { address: 0xffff_ffff_9000_0000 };
    let compiled = |program: &Program| {
        let (x86, riscv, drop) = (usual_x86(), usual_riscv(), Overflow::Drop);
        let x86 = vmtrace_trampolines::x86_64::compile(program, drop, &x86).unwrap().bytes;
        let riscv = vmtrace_trampolines::riscv64::compile(program, drop, &riscv).unwrap().bytes;
        [x86_64(&x86), riscv64(&riscv)]
    };
    let number =
        |operand, relation, value| Some(Condition::Test(Test::Number { operand, relation, value }));
    let value = Operand::Value { bytes: 4, signed: true };
    let condition = number(value, Relation::Less, 0);
    let by_value = Program { condition, ..with(Point::Return, &[Field::Stack, Field::Value]) };
    let condition = number(Operand::Duration, Relation::Greater, 2_500_000);
    let since = Some(calls);
    let by_time =
        Program { condition, since, ..with(Point::Return, &[Field::Stack, Field::Duration]) };
    let counts = Some(Counts::Begin(None, calls));
    let begin = Program { counts, ..with(Point::Entry, &[]) };
    let till = |all: &[Instruction], text: &str| {
        all.iter().position(|one| one.text.trim().starts_with(text)).expect(text) + 1
    };
    let [x86, riscv] = compiled(&by_value);
    assert_eq!((till(&x86, "jge") + 1, till(&riscv, "j ") + 1), (3, 5));
    // Behind the comparison: the jump, and what puts two registers back.
    let [x86, riscv] = compiled(&by_time);
    let compared = till(&x86, "cmp r9, 0x2625a0");
    assert_eq!(x86[compared].text.trim().split(' ').next(), Some("jbe"));
    // Of riscv64 without what is skipped: the places that are not tried when the first one is it, the
    // jump away of what is too old, and what is done when the clock has gone back.
    let places = till(&riscv, "ld t0") - till(&riscv, "beq t3, sp") - 1;
    let read = till(&riscv, "rdtime");
    let missed = read + till(&riscv[read..], "j ");
    assert_eq!((compared + 1 + 3, missed - places - 2 + 1), (26, 30));
    let [x86, riscv] = compiled(&begin);
    let skipped = till(&riscv, "rdtime") - till(&riscv, "j ") - 1;
    assert_eq!((common(&x86).len(), till(&riscv, "jr t0") - skipped), (18, 22));
}

// What leads elsewhere than a program's end is not gone on from.
#[test]
fn ends_are_code_that_ends_as_said() {
    let number =
        |operand, relation, value| Condition::Test(Test::Number { operand, relation, value });
    let since = Some(Calls { address: 0xffff_ffff_9000_0040 });
    let value = Operand::Value { bytes: 2, signed: true };
    let both =
        [number(value, Relation::Less, 0), number(Operand::Duration, Relation::Greater, 1 << 40)];
    let condition = Some(Condition::Any(both.to_vec()));
    let fields = [Field::Stack, Field::Value, Field::Duration, Field::Context];
    let program = Program { condition, since, ..with(Point::Return, &fields) };
    for overflow in [Overflow::Drop, Overflow::Overwrite] {
        let code = vmtrace_trampolines::x86_64::compile(&program, overflow, &usual_x86()).unwrap();
        let all = x86_64(&code.bytes);
        assert_eq!(all.iter().map(|one| one.len).sum::<usize>(), code.bytes.len());
        assert_eq!(endings(&all), code.endings);
        let code = vmtrace_trampolines::riscv64::compile(&program, overflow, &usual_riscv());
        let code = code.unwrap();
        let all = riscv64(&code.bytes);
        assert_eq!(all.len() * 4, code.bytes.len());
        assert_eq!(endings(&all), code.endings);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    // A count that is a load and a store loses calls of whoever interrupts it; an argument in a
    // register that is written is another one to the function.
    #[test]
    fn counting_is_one_instruction_and_writes_what_is_free(
        counters in counters(), condition in prop::option::of(condition()),
        values in x86_values(), riscv in riscv_values()
    ) {
        let program = counting(counters, condition);
        let Code { bytes, endings: said, .. } =
            vmtrace_trampolines::x86_64::compile(&program, Overflow::Drop, &values).unwrap();
        let all = x86_64(&bytes);
        prop_assert_eq!(all.iter().map(|one| one.len).sum::<usize>(), bytes.len(), "all decodes");
        prop_assert_eq!(endings(&all), said.clone());
        prop_assert_eq!(said, vec![bytes.len() - 5]);
        prop_assert_eq!(all.iter().filter(|one| one.locked).count(), 1);
        let written = paths(&all)?;
        prop_assert!(written.iter().all(|one| ["r10", "r11"].contains(&&**one)), "{:?}", written);
        let Code { bytes, endings: said, .. } =
            vmtrace_trampolines::riscv64::compile(&program, Overflow::Drop, &riscv).unwrap();
        let all = riscv64(&bytes);
        prop_assert_eq!(all.len() * 4, bytes.len(), "all decodes");
        prop_assert_eq!(endings(&all), said.clone());
        prop_assert_eq!(said, vec![bytes.len() - 4]);
        let kinds = ["amo", "sd", "sw", "sb", "lr.", "sc."];
        let stores = all.iter().filter(|one| kinds.iter().any(|kind| one.name.starts_with(kind)));
        prop_assert_eq!(stores.count(), 1);
        let written = paths(&all)?;
        let free = ["t3", "t4", "t5"];
        prop_assert!(written.iter().all(|one| free.contains(&&**one)), "{:?}", written);
    }
}

// What a call costs that is counted: what is in here beside it is paid by every call.
#[test]
fn a_count_is_six_instructions_of_x86_64_and_nine_of_riscv64() {
    let x86 = |counters| {
        let program = counting(counters, None);
        vmtrace_trampolines::x86_64::compile(&program, Overflow::Drop, &usual_x86()).unwrap()
    };
    let riscv = |counters| {
        let program = counting(counters, None);
        vmtrace_trampolines::riscv64::compile(&program, Overflow::Drop, &usual_riscv()).unwrap()
    };
    let text = |all: &[Instruction]| {
        common(all).iter().map(|one| one.text.trim().to_owned()).collect::<Vec<_>>()
    };
    let counters = Counters { distance: 0x1200_0000, stride: 0x80_0000, rounds: true };
    assert_eq!(
        text(&x86_64(&x86(counters).bytes)),
        [
            "mov r10, qword ptr [rsp]",
            "and r10, 0xfffffffffffffff8",
            "mov r11d, dword ptr gs:[0x20]",
            "imul r11, r11, 0x800000",
            "lock inc qword ptr [r10 + r11 + 0x12000000]",
            "ret",
        ]
    );
    assert_eq!(
        text(&riscv64(&riscv(counters).bytes)),
        [
            "lw t3, 0x20(tp)",
            "slli t3, t3, 0x17",
            "add t3, t3, t0",
            "lui t4, 0x12000",
            "add t3, t3, t4",
            "andi t3, t3, -8",
            "addi t4, zero, 1",
            "amoadd.d zero, t4, (t3)",
            "jr t0",
        ]
    );
    // Where there is less to do.
    let cost = |distance, stride, rounds| {
        let counters = Counters { distance, stride, rounds };
        let x86 = common(&x86_64(&x86(counters).bytes)).len();
        [x86, common(&riscv64(&riscv(counters).bytes)).len()]
    };
    assert_eq!(cost(0x1200_0000, 0x80_0000, false), [5, 8]);
    assert_eq!(cost(0x1200_0003, 0x80_0000, false), [5, 9]);
    assert_eq!(cost(0x1200_0000, 0, true), [4, 6]);
    assert_eq!(cost(0x1200_0000, 0, false), [3, 5]);
    // By a number that is no power of two, and with a lower part.
    assert_eq!(cost(0x1200_0000, 0x80_1000, false), [5, 9]);
    assert_eq!(cost(0x1200_0008, 0x80_1000, true), [6, 11]);
}

// What a call costs at which a CPU may stop: all of them but one pay for the counter alone.
#[test]
fn a_stop_is_two_instructions_of_x86_64_and_six_of_riscv64_at_all_calls_but_one() {
    let program = |counter, trap: &'static [u8]| {
        let counts = Some(Counts::Down { number: 0, counter, trap });
        Program { counts, ..with(Point::Entry, &[]) }
    };
    let text =
        |all: &[Instruction]| all.iter().map(|one| one.text.trim().to_owned()).collect::<Vec<_>>();
    let counter = 0xffff_ffff_8123_4568;
    let code = vmtrace_trampolines::x86_64::compile(
        &program(counter, &[0xe6, 0x42]),
        Overflow::Drop,
        &usual_x86(),
    )
    .unwrap();
    let all = text(&x86_64(&code.bytes));
    assert_eq!(
        all[..5],
        [
            "lock dec qword ptr [0xffffffff81234568]",
            "jne 0x11",
            "mov r10, qword ptr [rsp]",
            "out 0x42, al",
            "ret",
        ]
    );
    assert_eq!((code.stop, code.endings), (Some(15), vec![17]));
    // lui a7, 1; ecall
    let code = vmtrace_trampolines::riscv64::compile(
        &program(counter, &[0xb7, 0x18, 0, 0, 0x73, 0, 0, 0]),
        Overflow::Drop,
        &usual_riscv(),
    )
    .unwrap();
    let all = text(&riscv64(&code.bytes));
    assert_eq!(
        all,
        [
            "lui t3, 0x81234",
            "addi t3, t3, 0x568",
            "addi t4, zero, -1",
            "amoadd.d t3, t4, (t3)",
            "add t3, t3, t4",
            "bnez t3, 0x14",
            "mv t1, a7",
            "lui a7, 1",
            "ecall",
            "mv a7, t1",
            "jr t0",
        ]
    );
    assert_eq!((code.stop, code.endings), (Some(28), vec![40]));
}

// What a call of a task costs that is not followed, in a trace of those that are; and each new task.
#[test]
fn tasks_are_followed_by_a_few_instructions() {
    let skips = Condition::Test(Test::Followed { pid: 0x990, inside: true });
    let condition = Program { condition: Some(skips), ..with(Point::Entry, &[]) };
    let counts = Some(Counts::Follow { own: false, pid: 0x990, inside: true });
    let follow = Program { counts, ..with(Point::Entry, &[]) };
    let text =
        |all: &[Instruction]| all.iter().map(|one| one.text.trim().to_owned()).collect::<Vec<_>>();
    let x86 = |program| {
        let code =
            vmtrace_trampolines::x86_64::compile(program, Overflow::Drop, &usual_x86()).unwrap();
        text(&x86_64(&code.bytes))
    };
    let riscv = |program| {
        let code =
            vmtrace_trampolines::riscv64::compile(program, Overflow::Drop, &usual_riscv()).unwrap();
        text(&riscv64(&code.bytes))
    };
    let skipped = [
        "mov r10, qword ptr gs:[0x1fb80]",
        "mov r10d, dword ptr [r10 + riz + 0x990]",
        "and r10d, 0x3fffff",
        "cmp byte ptr [r10 - 0x78c00000], 0",
    ];
    let x86_condition = x86(&condition);
    assert_eq!(x86_condition[..4], skipped);
    assert!(x86_condition[4].starts_with("je "), "{x86_condition:?}");
    let noted = [
        "mov r10d, dword ptr [rdi + riz + 0x990]",
        "and r10d, 0x3fffff",
        "mov byte ptr [r10 - 0x78c00000], 1",
        "ret",
    ];
    assert_eq!(x86(&follow)[..4], noted);
    // With the jump to its end, and that: 12.
    let skipped = [
        "lui t3, 1",
        "add t3, t3, tp",
        "lw t3, -0x670(t3)",
        "slli t4, t3, 0x2a",
        "srli t4, t4, 0x2a",
        "lui t5, 0x87400",
        "add t4, t4, t5",
        "lbu t4, 0(t4)",
        "bnez t4, 8",
    ];
    assert_eq!(riscv(&condition)[..9], skipped);
    let noted = [
        "lui t3, 1",
        "add t3, t3, a0",
        "lw t3, -0x670(t3)",
        "slli t4, t3, 0x2a",
        "srli t4, t4, 0x2a",
        "lui t5, 0x87400",
        "add t4, t4, t5",
        "addi t5, zero, 1",
        "sb t5, 0(t4)",
        "jr t0",
    ];
    assert_eq!(riscv(&follow), noted);
}
