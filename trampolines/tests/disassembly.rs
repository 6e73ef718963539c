//! Checks programs with an independent decoder, for both architectures on any machine.

mod disassembled;

use disassembled::usual::{
    ARGUMENTS, SET, STRANGERS, common, counting, endings, readable, usual_riscv, usual_x86, with,
};
use disassembled::{FLAGS, Instruction, riscv64, x86_64};
use proptest::prelude::*;
use std::collections::{BTreeSet, HashSet};
use vmtrace_trampolines::condition::{Operand, Relation, Test};
use vmtrace_trampolines::family::Strangers;
use vmtrace_trampolines::histogram::Calls;
use vmtrace_trampolines::x86_64::Addressing;
use vmtrace_trampolines::{
    Code, Condition, ContextPlaces, Counters, Field, Last, Overflow, Point, Program, Read,
};

fn overflows() -> impl Strategy<Value = Overflow> {
    // What makes a CPU wait is the architecture's.
    prop_oneof![Just(Overflow::Drop), Just(Overflow::Overwrite), Just(Overflow::Block(&[]))]
}

fn program() -> impl Strategy<Value = (Program, Overflow)> {
    let overflow = overflows();
    let [entry, end, beyond, probe] =
        [Point::Entry, Point::Return, Point::Beyond, Point::Probe].map(Just);
    let point = prop_oneof![entry, end, beyond, probe];
    (0..2048_u16, 1..=256_u16, point, overflow).prop_flat_map(
        |(number, tracers, point, overflow)| {
            let field =
                (0..32_u8, any::<u8>()).prop_map(move |(argument, which)| match (which, point) {
                    (0..64, _) => Field::Stack,
                    (64..96, _) => Field::Context,
                    (_, Point::Return) => Field::Value,
                    (_, Point::Beyond) => Field::Stack,
                    (_, Point::Entry | Point::Tail) => Field::Argument(argument),
                    (_, Point::Probe) => Field::Argument(argument.max(1)),
                });
            prop::collection::vec(field, 0..=28).prop_map(move |fields| {
                (Program { number, tracers, ..with(point, &fields) }, overflow)
            })
        },
    )
}

/// A program that reads.
fn reader() -> impl Strategy<Value = (Program, Overflow)> {
    let overflow = overflows();
    let hops = prop::collection::vec(any::<i32>(), 0..4);
    let read = (1..12_u8, hops, 1..8_u8, any::<i32>(), any::<bool>());
    let read = read.prop_map(|(argument, hops, words, offset, text)| {
        let offset = offset / 2;
        let hops: Vec<_> = hops.into_iter().map(|hop| hop / 2).collect();
        let last = if text { Last::Text { offset, words } } else { Last::Words { offset, words } };
        Field::Read(Read::new(argument, &hops, last).unwrap())
    });
    let point = prop_oneof![Just(Point::Entry), Just(Point::Probe)];
    (prop::collection::vec(read, 1..4), overflow, point).prop_map(|(reads, overflow, point)| {
        let fields = [&[Field::Stack, Field::Failed], &reads[..]].concat();
        (with(point, &fields), overflow)
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
    let test = prop_oneof![4 => test, 1 => Just(members())];
    test.prop_recursive(3, 20, 4, |inner| {
        let list = prop::collection::vec(inner, 0..4);
        (list, any::<bool>()).prop_map(|(list, all)| match all {
            true => Condition::All(list),
            false => Condition::Any(list),
        })
    })
}

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
    let resched = prop::option::of(0..1_u64 << 30);
    (word(), word(), prop::option::of(word()), softirq, lazy, resched).prop_map(
        |(flags, preempt_count, migration, softirq, lazy, resched)| ContextPlaces {
            flags,
            preempt_count,
            resched,
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

/// Where strangers are those of whom this does not hold, which is also what programs ask for now and then.
fn members() -> Condition {
    let bytes = b"nobody\0".iter().copied().map(Some).collect();
    Condition::Any(vec![
        Condition::Test(Test::Bytes { offset: 0xbc0, bytes, equal: true }),
        Condition::Test(Test::Followed { pid: 0x990, inside: true }),
    ])
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
            strangers: Some(Strangers { address: STRANGERS, members: members() }),
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
            // r10 and r11 are saved by the stub.
            Point::Entry | Point::Tail | Point::Beyond => &["r10", "r11"],
            // rax and rdx are kept in rsi and rdi: see the tests that run it.
            Point::Return => &["rsi", "rdi", "r10", "r11", "rax", "rdx"],
            Point::Probe => &["rdi", "r10", "r11", "rax", "rdx"],
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
            Point::Entry | Point::Tail | Point::Probe => free.push("t1"),
            Point::Return | Point::Beyond => free.extend(["t0", "a2", "a3", "a4", "a5", "a6", "a7"]),
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
        for (at, one) in all.iter().enumerate().filter(|(_, one)| one.name.starts_with("lr.")) {
            match &*one.name {
                "lr.d.aq" => ends_reservation(&all, at)?,
                _ => reservation(&all[at..])?,
            }
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
        // rax and rdx of an entry are pushed first and popped last.
        let pointer = if program.point == Point::Probe { "rdi" } else { "rdx" };
        let free = ["rax", "rdx", "r10", "r11", pointer];
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

/// From an `lr` on by which something is noted, or not: whichever way is taken, the reservation ends before the program.
fn ends_reservation(all: &[Instruction], from: usize) -> Result<(), TestCaseError> {
    let (mut open, mut seen) = (vec![from + 1], HashSet::new());
    while let Some(at) = open.pop() {
        let one = &all[at];
        if !seen.insert(at) || one.name.starts_with("sc.") {
            continue;
        }
        prop_assert!(!one.ending && !one.name.starts_with("lr."), "{:?} in a reservation", one);
        let target = one.target.and_then(|to| all.iter().position(|other| other.offset == to));
        open.extend(target.into_iter().chain((!one.jump).then_some(at + 1)));
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

fn counters() -> impl Strategy<Value = Counters> {
    let power = (12..31_u32).prop_map(|log| 1 << log);
    let stride = prop_oneof![Just(0), power, (0..1_u64 << 19).prop_map(|pages| pages << 12)];
    (word(), stride, any::<bool>()).prop_map(|(distance, stride, rounds)| {
        let distance = if rounds { distance & !7 } else { distance };
        Counters { distance, stride, rounds }
    })
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
        let of = |kinds: &[&str]| {
            all.iter().filter(|one| kinds.iter().any(|kind| one.name.starts_with(kind))).count()
        };
        prop_assert_eq!(of(&["amo", "sd", "sw", "sb"]), 1);
        // A stranger is noted, or not; or there is but a name.
        let notes = of(&["lr.d.aq"]);
        let is_name = |test: &Test| matches!(test, Test::Bytes { .. });
        let members = riscv.strangers.map(|it| it.members);
        let named = members.is_some_and(|members| members.tests().any(is_name));
        let ways = 2 + usize::from(named);
        prop_assert_eq!((of(&["lr."]), of(&["sc."])), (notes, ways * notes));
        let written = paths(&all)?;
        let free = ["t3", "t4", "t5", "t6"];
        prop_assert!(written.iter().all(|one| free.contains(&&**one)), "{:?}", written);
    }
}
