//! What programs cost: their instructions, as an independent decoder sees them.

mod disassembled;

use disassembled::usual::{
    ARGUMENTS, STRANGERS, common, counting, endings, usual_riscv, usual_x86, with,
};
use disassembled::{Instruction, riscv64, x86_64};
use vmtrace_trampolines::callers::Callers;
use vmtrace_trampolines::condition::{Operand, Relation, Test};
use vmtrace_trampolines::family::Strangers;
use vmtrace_trampolines::histogram::{Calls, Ended, Sorted};
use vmtrace_trampolines::marks::{MarkIf, Marks};
use vmtrace_trampolines::nesting::{Call, Nesting};
use vmtrace_trampolines::{
    Condition, Counters, Counts, Field, Last, Overflow, Point, Program, Read,
};

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
    // Up to the first branch, and from there, taken or not, at once to an end.
    let cost = |all: &[Instruction]| {
        let first = all.iter().position(|one| one.target.is_some()).unwrap();
        let taken = all.iter().find(|one| Some(one.offset) == all[first].target).unwrap();
        assert!(taken.ending || all[first + 1].ending, "{all:?}");
        first + 2
    };
    let costs = all.map(|condition| {
        let program = Program { condition: Some(condition), ..with(Point::Entry, &[]) };
        [cost(&compiled_x86(&program)), cost(&compiled_riscv(&program))]
    });
    assert_eq!(costs, [[4, 7], [3, 4], [4, 10], [4, 7], [4, 7]]);
}

/// A program of a usual kernel, where full rings drop records.
fn compiled_x86(program: &Program) -> Vec<Instruction> {
    let code = vmtrace_trampolines::x86_64::compile(program, Overflow::Drop, &usual_x86()).unwrap();
    x86_64(&code.bytes)
}

/// The same of riscv64.
fn compiled_riscv(program: &Program) -> Vec<Instruction> {
    let values = usual_riscv();
    let code = vmtrace_trampolines::riscv64::compile(program, Overflow::Drop, &values).unwrap();
    riscv64(&code.bytes)
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

// What `sched_switch` costs, with its seven fields: those of two tasks but for the process id of the one that runs, whether
// it was preempted, and its state.
#[test]
fn a_switch_of_tasks_is_recorded_in_38_instructions() {
    let known = |argument, offset, words| {
        Field::Known(Read::new(argument, &[], Last::Words { offset, words }).unwrap())
    };
    let (prev, next) = (2, 3);
    let fields = [
        known(prev, 2976, 2),
        known(prev, 108, 1),
        Field::Argument(1),
        Field::Argument(4),
        known(prev, 2416, 1),
        known(next, 2976, 2),
        known(next, 2432, 1),
        known(next, 108, 1),
    ];
    let program = with(Point::Probe, &fields);
    let values = vmtrace_trampolines::x86_64::Values { current: 0x35000, pid: 2432, ..usual_x86() };
    let code = vmtrace_trampolines::x86_64::compile(&program, Overflow::Drop, &values).unwrap();
    let way = x86_64(&code.bytes);
    // A static call enters it behind its first instruction.
    assert_eq!(way[1].offset as u64, vmtrace_trampolines::x86_64::PROBE_CALLED);
    assert_eq!(common(&way).len() - 1, 38, "{way:#?}");
}

// What a function costs that is jumped to by one that is traced: each call of it, from anywhere.
#[test]
fn marks_cost_as_little_as_promised() {
    let marks = Marks { address: 0xffff_ffff_9000_0000 };
    let mark = |going| {
        let counts = Some(Counts::Mark(marks, going));
        compiled_x86(&Program { counts, ..with(Point::Tail, &[]) })
    };
    // To where it goes on if it does not, with what comes there.
    let missed = |all: &[Instruction]| {
        let first = all.iter().position(|one| one.target.is_some()).unwrap();
        let on = all.iter().position(|one| Some(one.offset) == all[first].target).unwrap();
        (first + 1, on)
    };
    let way = |all: &[Instruction]| all.iter().position(|one| one.ending).unwrap() + 1;
    let end =
        compiled_x86(&Program { marked: Some(marks), ..with(Point::Return, &[Field::Stack]) });
    let (looked, on) = missed(&end);
    assert!(end[on].ending, "{end:?}");
    let (anywhere, known, nowhere) =
        (mark(MarkIf::Always), mark(MarkIf::Known), mark(MarkIf::Never));
    assert_eq!((way(&anywhere), looked + 1, way(&known)), (4, 6, 8));
    // Where a call goes on in what ends are not seen of, with nothing to take back.
    let (cleared, on) = missed(&nowhere);
    assert!(nowhere[on].ending, "{nowhere:?}");
    let (looked, on) = missed(&known);
    let (taken, _) = missed(&known[on..]);
    assert_eq!((cleared + 1, looked + taken + 1), (5, 9));
}

// What a call that is timed costs: its entry and its return, where nothing else is open at its place.
#[test]
fn timing_a_call_is_as_short_as_promised() {
    let calls = Calls { address: 0xffff_ffff_9000_0000 };
    let near = Counters { distance: 0x1000, stride: 4096, rounds: true };
    let ended = Ended::duration(2_500_000_000).unwrap();
    let cost = |point, counts| {
        let all = compiled_x86(&Program { counts: Some(counts), ..with(point, &[]) });
        all.iter().position(|one| one.ending).unwrap() + 1
    };
    let begin = cost(Point::Entry, Counts::Begin(Some(near), calls));
    let end = cost(Point::Return, Counts::End(calls, ended));
    let sorted = Sorted { number: 2, bytes: 8, signed: false };
    assert_eq!((begin, end, cost(Point::Entry, Counts::Sort(near, sorted))), (21, 29, 18));
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
    let (x86, riscv) = (compiled_x86(&by_value), compiled_riscv(&by_value));
    assert_eq!((till(&x86, "jge") + 1, till(&riscv, "ret")), (3, 4));
    let (x86, riscv) = (compiled_x86(&by_time), compiled_riscv(&by_time));
    // Behind the comparison: the jump to what frees the place and puts two registers back.
    let compared = till(&x86, "cmp eax, 0x2625a0");
    assert_eq!(x86[compared].text.trim().split(' ').next(), Some("jbe"));
    let short = x86.iter().position(|one| Some(one.offset) == x86[compared].target).unwrap();
    assert!(x86[short].text.trim().starts_with("mov qword ptr [r11"), "{:?}", x86[short]);
    let short = common(&x86[short..]).len();
    // Of riscv64 without what is skipped: the places that are not tried when the first one is it.
    let places = till(&riscv, "ld t0") - till(&riscv, "beq t3, sp") - 1;
    assert_eq!((compared + 1 + short, till(&riscv, "ret") - places), (17, 17));
    let (x86, riscv) = (compiled_x86(&begin), compiled_riscv(&begin));
    let skipped = till(&riscv, "rdtime") - till(&riscv, "beqz t3") - 1;
    assert_eq!((common(&x86).len(), till(&riscv, "jr t0") - skipped), (15, 14));
}

// What a call costs that is not nested as it should be: where it is entered, and where it is left, each with the
// instruction that goes on.
#[test]
fn a_call_elsewhere_in_the_tree_is_as_short_as_promised() {
    let address = 0xffff_ffff_9000_0000;
    let nesting = |depth, call| Some(Nesting { address, stack_bits: 14, depth, call });
    let cost = |point, nesting: Option<Nesting>, up_to: [(&str, isize); 2]| {
        let program = Program { nesting, ..with(point, &[Field::Stack]) };
        let till = |all: &[Instruction], (text, more): (&str, isize)| {
            let at = all.iter().position(|one| one.text.trim().starts_with(text)).expect(text);
            at.checked_add_signed(1 + more).unwrap()
        };
        let [x86, riscv] = up_to;
        [till(&compiled_x86(&program), x86), till(&compiled_riscv(&program), riscv)]
    };
    // Outside of a root: of x86-64 a jump, of riscv64 a branch that is not taken, and a jump.
    let outside = cost(Point::Entry, nesting(None, Call::Inner), [("jae", 1), ("j ", 1)]);
    // Deeper than it is asked for.
    let deeper = cost(Point::Entry, nesting(Some(3), Call::Inner), [("jb", 1), ("j ", 1)]);
    assert_eq!((outside, deeper), ([9, 11], [9, 11]));
    // Left outside of a root: with the look at what is left over, and what is jumped over.
    let left = cost(Point::Return, nesting(None, Call::Ends), [("jae", 3 - 1), ("j ", 1 - 1)]);
    let left_deeper =
        cost(Point::Return, nesting(Some(3), Call::Ends), [("jmp", 5), ("j ", 1 - 3)]);
    assert_eq!((left, left_deeper), ([11, 15], [16, 19]));
}

// What a call costs that is counted: what is in here beside it is paid by every call.
#[test]
fn a_count_is_six_instructions_of_x86_64_and_nine_of_riscv64() {
    let x86 = |counters| compiled_x86(&counting(counters, None));
    let riscv = |counters| compiled_riscv(&counting(counters, None));
    let text = |all: &[Instruction]| {
        common(all).iter().map(|one| one.text.trim().to_owned()).collect::<Vec<_>>()
    };
    let counters = Counters { distance: 0x1200_0000, stride: 0x80_0000, rounds: true };
    assert_eq!(
        text(&x86(counters)),
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
        text(&riscv(counters)),
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
        [common(&x86(counters)).len(), common(&riscv(counters)).len()]
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
    let program_at = |point, counter, trap: &'static [u8]| {
        let counts = Some(Counts::Down { number: 0, counter, trap });
        Program { counts, ..with(point, &[]) }
    };
    let program = |counter, trap| program_at(Point::Entry, counter, trap);
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
    // Where functions are left, a name is loaded behind the jump, and nothing else has changed.
    let at_return = program_at(Point::Return, counter, &[0xe6, 0x42]);
    let code = vmtrace_trampolines::x86_64::compile(&at_return, Overflow::Drop, &usual_x86());
    let all = text(&x86_64(&code.unwrap().bytes));
    assert_eq!(all[1..4], ["jne 0x10", "mov r10d, ecx", "out 0x42, al"]);
    let code = vmtrace_trampolines::riscv64::compile(&at_return, Overflow::Drop, &usual_riscv());
    let all = text(&riscv64(&code.unwrap().bytes));
    assert_eq!(all[5..7], ["bnez t3, 0xa", "lwu t0, 4(t1)"]);
}

// What a call of a task costs that is not followed, where that is asked for alone; and each new task.
#[test]
fn tasks_are_followed_by_a_few_instructions() {
    let skips = Condition::Test(Test::Followed { pid: 0x990, inside: true });
    let condition = Program { condition: Some(skips), ..with(Point::Entry, &[]) };
    let counts = Some(Counts::Follow { argument: Some(0), pid: 0x990, inside: true });
    let follow = Program { counts, ..with(Point::Entry, &[]) };
    let text =
        |all: &[Instruction]| all.iter().map(|one| one.text.trim().to_owned()).collect::<Vec<_>>();
    let (x86, riscv) =
        (|program| text(&compiled_x86(program)), |program| text(&compiled_riscv(program)));
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
    // With the end: 10.
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
    assert_eq!(riscv(&condition)[9], "jr t0");
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

// What a call of a task costs that is neither named nor followed (`--comm NAME --children`), with what goes on. Beside
// it a site pays for its call: one instruction, on riscv64 with CALL_OPS four.
#[test]
fn a_stranger_is_known_by_nine_instructions_of_x86_64_and_seven_of_riscv64() {
    let name = b"nobody\0".iter().copied().map(Some).collect();
    let members = Condition::Any(vec![
        Condition::Test(Test::Bytes { offset: 0xbc0, bytes: name, equal: true }),
        Condition::Test(Test::Followed { pid: 0x990, inside: true }),
    ]);
    let number = Test::Number {
        operand: Operand::Argument { number: 0, bytes: 8, signed: false },
        relation: Relation::Equal,
        value: 1,
    };
    let program = |condition| Program { condition: Some(condition), ..with(Point::Entry, &[]) };
    let strangers = Some(Strangers { address: STRANGERS, members: members.clone() });
    let values = vmtrace_trampolines::riscv64::Values { strangers, ..usual_riscv() };
    let riscv = |program: &Program| {
        let code = vmtrace_trampolines::riscv64::compile(program, Overflow::Drop, &values).unwrap();
        let all = riscv64(&code.bytes);
        assert_eq!(endings(&all), code.endings);
        all
    };
    let text =
        |all: &[Instruction]| all.iter().map(|one| one.text.trim().to_owned()).collect::<Vec<_>>();
    let known = [
        "slli t6, tp, 0x26",
        "srli t6, t6, 0x29",
        "lui t3, 0x87800",
        "add t6, t6, t3",
        "ld t3, 0(t6)",
    ];
    // Recorded, counted, and with another condition.
    let counters = Counters { distance: 0x1200_0000, stride: 0, rounds: false };
    let both = Condition::All(vec![members.clone(), Condition::Test(number)]);
    for program in [
        program(members.clone()),
        counting(counters, Some(members.clone())),
        program(both),
        Program { point: Point::Return, ..program(members.clone()) },
    ] {
        let all = riscv(&program);
        assert_eq!(text(&all)[..5], known, "{program:?}");
        assert!(all[5].text.starts_with("beq t3, tp, "), "{:?}", all[5]);
        let end = all.iter().find(|one| Some(one.offset) == all[5].target).unwrap();
        assert!(end.ending, "{end:?}");
        // Two more for those who are followed.
        assert_eq!(all[6].text.trim(), "addi t3, t3, -1");
        assert!(all[7].text.starts_with("beq t3, tp, "), "{:?}", all[7]);
    }
    let x86 = compiled_x86(&program(members.clone()));
    assert_eq!(text(&x86)[2].split(' ').next(), Some("jne"));
    let other = x86.iter().position(|one| Some(one.offset) == x86[2].target).unwrap();
    let decided = x86[other..].iter().position(|one| one.target.is_some()).unwrap();
    assert!(x86[other + decided].text.trim().starts_with("je "), "{x86:?}");
    // Up to the first branch, from there up to the last one, and the return.
    assert_eq!(3 + decided + 1 + 1, 9);
    // Who decides about others looks itself, and whoever is decided about is looked at again.
    let counts =
        |counts, condition| Program { counts: Some(counts), condition, ..with(Point::Entry, &[]) };
    let follow = Counts::Follow { argument: Some(0), pid: 0x990, inside: true };
    let all = text(&riscv(&counts(follow, Some(members))));
    assert!(!all.iter().any(|text| text.starts_with("lr.")), "{all:?}");
    let forgets = [
        "slli t6, a0, 0x26",
        "srli t6, t6, 0x29",
        "lui t3, 0x87800",
        "add t6, t6, t3",
        "addi t4, zero, 2",
        "amoadd.d.rl zero, t4, (t6)",
        "jr t0",
    ];
    assert_eq!(text(&riscv(&counts(Counts::Forget, None))), forgets);
    assert_eq!(text(&compiled_x86(&counts(Counts::Forget, None)))[0], "ret");
}
