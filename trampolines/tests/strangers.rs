//! Tasks that are known not to be meant: whatever makes a task one that is meant, its next call is recorded.
#![cfg(target_arch = "riscv64")]
#![allow(unsafe_code, reason = "runs machine code in this process")]
#![allow(clippy::cast_possible_truncation, reason = "all are limited")]

mod common;

use common::arch::{
    ADDRESSINGS, ARGUMENTS, Registers, STACK, another_task, call, free, go_on_as, instructions,
    know_strangers,
};
use common::fault::Fault;
use common::{FakeGuest, NAME, PID, Random, entry_program, followed, words};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::cell::RefCell;
use std::sync::Barrier;
use vmtrace_trampolines::condition::{Operand, Relation, Test};
use vmtrace_trampolines::family::{Strangers, renamed};
use vmtrace_trampolines::{Condition, Counters, Counts, Overflow, Point, Program};

const SITE: u64 = 3;
/// That of the program that forgets, of the one that notes who is followed, and of the one that looks at new names.
const FORGETS: u64 = 4;
const JOINS: u64 = 5;
const RENAMES: u64 = 6;
/// Those of all programs where a task begins, and where one gets another's process id.
const BEGINS: u64 = 7;
const EXCHANGES: u64 = 8;

/// Names of tasks that are followed.
const NAMED: [&[u8]; 2] = [b"sh", b"a-name-of-15-by"];

/// Where strangers are, of each test by itself.
fn places() -> (u64, &'static [AtomicU64]) {
    thread_local! {
        static PLACES: (u64, &'static [AtomicU64]) = words(Strangers::SIZE / 8);
    }
    PLACES.with(|places| *places)
}

fn open() -> &'static AtomicU64 {
    places().1.last().unwrap()
}

/// Where a task is, as the layout says.
fn place(task: u64) -> &'static AtomicU64 {
    &places().1[(task % (64 << 20) / 64) as usize]
}

fn padded(name: &[u8]) -> [u8; NAME.1] {
    core::array::from_fn(|at| if at < 15 { name.get(at).copied().unwrap_or(0) } else { 0 })
}

fn wanted(name: &[u8]) -> Vec<Option<u8>> {
    name.iter().copied().chain([0]).map(Some).collect()
}

/// Named, or with this process id, or followed.
fn members(pid: u32) -> Condition {
    let bytes = |name: &&[u8]| {
        Condition::Test(Test::Bytes { offset: NAME.0, bytes: wanted(name), equal: true })
    };
    let operand = Operand::Task(PID as u32);
    let pid = Test::Number { operand, relation: Relation::Equal, value: pid.into() };
    let mut named: Vec<_> = NAMED.iter().map(bytes).collect();
    named.push(Condition::Test(pid));
    let followed = Test::Followed { pid: PID as u32, inside: true };
    Condition::Any(vec![Condition::Any(named), Condition::Test(followed)])
}

fn is_member(name: &[u8], pid: u32, own: u32) -> bool {
    NAMED.contains(&name.split(|byte| *byte == 0).next().unwrap())
        || pid == own
        || followed().1[pid as usize].load(Ordering::Relaxed) != 0
}

/// A guest whose programs know strangers: site [`SITE`] records under this condition, others change tasks.
fn guest(members: &Condition, condition: Condition, point: Point) -> FakeGuest {
    know_strangers(Strangers { address: places().0, members: members.clone() });
    let counts = |counts| Program { counts: Some(counts), ..entry_program() };
    let follow = Counts::Follow { argument: Some(0), pid: PID as u32, inside: true };
    let Condition::Any(list) = members else { panic!() };
    let renamed = renamed(&list[0], 1).unwrap();
    let recorded = Program { point, condition: Some(condition), ..entry_program() };
    let addressing = ADDRESSINGS[0];
    let mut guest = FakeGuest::with(
        1,
        1 << 16,
        addressing,
        Overflow::Drop,
        &[recorded, counts(Counts::Forget)],
    );
    // As the VMM lets sites call them: what forgets comes last.
    let joins = guest.add(&counts(follow), addressing, Some(1));
    let named = Program { condition: Some(renamed), ..counts(follow) };
    let renames = guest.add(&named, addressing, Some(1));
    guest.call_from(FORGETS, 1);
    guest.call_from(JOINS, joins);
    guest.call_from(RENAMES, renames);
    match point {
        Point::Return => drop(guest.return_from(SITE, 0)),
        _ => guest.call_from(SITE, 0),
    }
    guest
}

/// Calls a site as a function with these arguments.
fn run(guest: &FakeGuest, site: u64, arguments: [u64; 2]) {
    let mut registers = common::registers(0x1234_5678);
    registers.x[ARGUMENTS[0]] = arguments[0];
    registers.x[ARGUMENTS[1]] = arguments[1];
    guest.run(site, &mut registers);
}

fn recorded(guest: &FakeGuest, tail: &mut u64) -> u64 {
    let mut found = 0;
    guest.drain(0, tail, |_| found += 1);
    found
}

// A task that stays a stranger although it is meant by now is missing in the trace from then on.
#[test]
fn whoever_is_meant_is_recorded_whatever_has_been_noted() {
    let mut random = Random(0x1357_9bdf_0246_8ace);
    let pids = [1001, 1002, 1003_u32];
    let (mut met, mut known) = (0, 0);
    for round in 0..60 {
        let members = members(1002);
        let number = |value| {
            let operand = Operand::Argument { number: 0, bytes: 8, signed: false };
            Condition::Test(Test::Number { operand, relation: Relation::Less, value })
        };
        let point = if round % 4 == 3 { Point::Return } else { Point::Entry };
        // Alone, with others, and where it must not hold.
        let condition = match round % 4 {
            1 => Condition::All(vec![number(100), members.clone()]),
            2 => Condition::Any(vec![Condition::All(vec![members.clone(), number(100)])]),
            _ => members.clone(),
        };
        let limited = matches!(round % 4, 1 | 2);
        let guest = guest(&members, condition, point);
        let mut tail = guest.ring(0).start();
        let mut pid = pids[0];
        let task = guest.set_current(0, pid);
        let mut name = padded(b"nobody");
        guest.set_name(task, name);
        followed().1[pid as usize].store(0, Ordering::Relaxed);
        run(&guest, FORGETS, [task, 0]);
        open().store(1, Ordering::Relaxed);
        let buffer: &mut [u8; 32] = Box::leak(Box::new([0; 32]));
        for _ in 0..200 {
            match random.below(12) {
                // It is renamed: programs run before it has the name.
                0 | 1 => {
                    let new: [&[u8]; 7] = [
                        b"nobody",
                        b"sh",
                        b"shx",
                        b"s",
                        b"",
                        b"a-name-of-15-by",
                        b"a-name-of-15-bytes-and-more",
                    ];
                    let new = new[random.below(7) as usize];
                    buffer.fill(0);
                    // Anywhere, with nothing but what is not 0 behind it.
                    let at = random.below(4) as usize;
                    buffer.fill(0x55);
                    buffer[at..at + new.len()].copy_from_slice(new);
                    buffer[at + new.len()] = 0;
                    run(
                        &guest,
                        RENAMES,
                        [task, buffer.as_ptr().expose_provenance() as u64 + at as u64],
                    );
                    if random.below(2) == 0 {
                        // What is called before the name is there is of a task that has it already, if it is one.
                        let before = recorded(&guest, &mut tail);
                        assert_eq!(before, 0);
                        run(&guest, SITE, [0, 0]);
                        let old = is_member(&name, pid, 1002);
                        let found = recorded(&guest, &mut tail);
                        let new = is_member(&padded(new), pid, 1002);
                        assert_eq!(found, u64::from(old || new), "{round}");
                    }
                    name = padded(new);
                    guest.set_name(task, name);
                }
                // Another task comes to its memory.
                2 => {
                    pid = pids[random.below(3) as usize];
                    guest.set_current(0, pid);
                    name = padded(b"nobody");
                    guest.set_name(task, name);
                    let inside = u8::from(random.below(3) == 0);
                    followed().1[pid as usize].store(inside, Ordering::Relaxed);
                    run(&guest, FORGETS, [task, 0]);
                }
                3 if random.below(3) == 0 => run(&guest, JOINS, [task, 0]),
                // Nobody can be noted; those who are noted are forgotten (as the VMM does it).
                4 => {
                    open().store(0, Ordering::Relaxed);
                    place(task).store(0, Ordering::Relaxed);
                }
                5 => open().store(1, Ordering::Relaxed),
                // Somebody else has the place.
                6 => {
                    let other = task + (64 << 20) + random.below(4);
                    place(task).store(other, Ordering::Relaxed);
                }
                _ => {}
            }
            let mut before = common::registers(0);
            before.x.fill_with(|| random.next());
            before.x[ARGUMENTS[0]] = random.below(200);
            let mut after = before.clone();
            guest.run(SITE, &mut after);
            compare(&before, &after, point);
            let is_member = is_member(&name, pid, 1002);
            let other = point == Point::Return || !limited || before.x[ARGUMENTS[0]] < 100;
            let found = recorded(&guest, &mut tail);
            assert_eq!(found, u64::from(is_member && other), "{round} {name:?} {pid}");
            let noted = place(task).load(Ordering::Relaxed) == task + u64::from(is_member);
            assert!(place(task).load(Ordering::Relaxed) != task + u64::from(!is_member));
            met += u64::from(is_member);
            known += u64::from(noted);
            if !limited {
                assert_eq!(noted, open().load(Ordering::Relaxed) != 0, "{round}");
            }
        }
    }
    assert!(met > 1000 && known > 1000, "{met} {known}");
}

fn compare(before: &Registers, after: &Registers, point: Point) {
    for register in (0..before.x.len()).filter(|&register| register != STACK) {
        if !free(point).contains(&register) && !common::arch::OWN.contains(&register) {
            assert_eq!(before.x[register], after.x[register], "{register}");
        }
    }
}

// A name that another thread changes, or that is read while it is written, would make a task one that is recorded from
// then on, whatever it is called.
#[test]
fn who_is_meant_by_a_name_alone_is_so_as_long_as_it_has_the_name() {
    let members = members(1);
    let guest = guest(&members, members.clone(), Point::Entry);
    let mut tail = guest.ring(0).start();
    let task = guest.set_current(0, 2101);
    open().store(1, Ordering::Relaxed);
    let mut call = |name: &[u8]| {
        guest.set_name(task, padded(name));
        run(&guest, SITE, [0, 0]);
        recorded(&guest, &mut tail)
    };
    assert_eq!((call(b"sh"), call(b"sh")), (1, 1));
    // The program there has run before the last calls, and the name comes after them.
    assert_eq!((call(b"nobody"), place(task).load(Ordering::Relaxed)), (0, task));
    // Nothing is left of the look that was not noted.
    run(&guest, FORGETS, [task, 0]);
    assert_eq!((call(b"sh"), place(task).load(Ordering::Relaxed)), (1, task + 2));
}

// As many names as there can be were out of reach for the branches to what comes behind them.
#[test]
fn strangers_are_known_however_many_other_names_are_asked_for() {
    let members = members(1);
    let name = |at: usize| {
        let bytes = wanted(format!("other-name-{at:04}").as_bytes());
        Condition::Test(Test::Bytes { offset: NAME.0, bytes, equal: true })
    };
    let mut names: Vec<_> = (0..58).map(name).collect();
    names.push(Condition::Test(Test::Bytes { offset: NAME.0, bytes: wanted(b"sh"), equal: true }));
    let names = Condition::Any(names);
    for (point, all) in [
        (Point::Entry, vec![members.clone(), names.clone()]),
        (Point::Entry, vec![names.clone(), members.clone()]),
        (Point::Return, vec![members.clone(), names]),
    ] {
        let condition = Condition::All(all);
        assert!(condition.tests().count() <= Condition::MAX_TESTS);
        let mut guest = guest(&members, condition.clone(), point);
        let distance = guest.heap().0.wrapping_sub(guest.function(SITE).into());
        let counts = Some(Counts::Up(Counters { distance, stride: 4096, rounds: false }));
        let counting = Program { counts, condition: Some(condition), ..entry_program() };
        let counting = guest.add(&counting, ADDRESSINGS[0], Some(0));
        if point == Point::Entry {
            guest.call_from(SITE, counting);
        }
        let mut tail = guest.ring(0).start();
        let task = guest.set_current(0, 2201);
        open().store(1, Ordering::Relaxed);
        for (name, followed_by_now, expected) in [
            (&b"nobody"[..], 0, 0),
            (b"sh", 0, 1),
            (b"other-name-0003", 0, 0),
            (b"other-name-0003", 1, 1),
            (b"nobody", 1, 0),
        ] {
            guest.set_name(task, padded(name));
            followed().1[2201].store(followed_by_now, Ordering::Relaxed);
            run(&guest, FORGETS, [task, 0]);
            for _ in 0..2 {
                guest.heap().1[0].store(0, Ordering::Relaxed);
                run(&guest, SITE, [0, 0]);
                assert_eq!(recorded(&guest, &mut tail), expected, "{name:?}");
                let counted = guest.heap().1[0].load(Ordering::Relaxed);
                assert!(point == Point::Return || counted == expected, "{name:?}");
            }
        }
        followed().1[2201].store(0, Ordering::Relaxed);
    }
}

/// A task, and whether it is followed whatever its name.
#[derive(Clone, Copy)]
struct Task {
    memory: u64,
    pid: u32,
    name: &'static [u8],
    followed: bool,
}

impl Task {
    /// Runs from now on, with what its memory has to have.
    fn goes_on(&self, guest: &FakeGuest) {
        go_on_as(self.memory);
        assert_eq!(guest.set_current(0, self.pid), self.memory);
        guest.set_name(self.memory, padded(self.name));
    }

    fn is_meant(&self, own: u32) -> bool {
        NAMED.contains(&self.name) || self.pid == own || self.followed
    }
}

/// Programs of the three functions by which tasks change, as the VMM lets their sites call them.
fn change(guest: &mut FakeGuest, members: &Condition) {
    let follow = |condition, argument, inside| Program {
        counts: Some(Counts::Follow { argument, pid: PID as u32, inside }),
        condition: Some(condition),
        ..entry_program()
    };
    let others = members.tests().cloned().map(|test| {
        Condition::Test(match test {
            Test::Number { operand, relation, value } => {
                Test::Number { operand, relation: relation.inverse(), value }
            }
            Test::Bytes { offset, bytes, .. } => Test::Bytes { offset, bytes, equal: false },
            Test::Followed { pid, .. } => Test::Followed { pid, inside: false },
            other => panic!("{other:?}"),
        })
    });
    let leaves = follow(Condition::All(others.collect()), Some(0), false);
    let begins = [follow(members.clone(), Some(0), true), leaves];
    let Condition::Any(list) = members else { panic!() };
    let by_name = follow(renamed(&list[0], 1).unwrap(), Some(0), true);
    let renames = [follow(members.clone(), None, true), by_name];
    let exchanges = [follow(members.clone(), Some(1), true)];
    for (site, list) in [(BEGINS, &begins[..]), (RENAMES, &renames), (EXCHANGES, &exchanges)] {
        // The first of these programs after the one that records forgets.
        let next = list
            .iter()
            .rev()
            .fold(1, |next, program| guest.add(program, ADDRESSINGS[0], Some(next)));
        guest.call_from(site, next);
    }
}

// Memory and process ids come again: what is known of those who had them before would be taken for true. A thread that
// executes a program takes the process id of the first one of its process.
#[test]
fn whoever_gets_memory_or_a_process_id_of_others_is_told_from_them() {
    const OWN: u32 = 4101;
    const PIDS: [u32; 5] = [OWN, 4102, 4103, 4104, 4105];
    let members = members(OWN);
    let mut guest = guest(&members, members.clone(), Point::Entry);
    change(&mut guest, &members);
    let (mut random, mut tail) = (Random(0x0f0f_1234_5678_9abc), guest.ring(0).start());
    let mut of = |count: usize| random.below(count as u64) as usize;
    let memory: [u64; 4] = core::array::from_fn(|_| another_task());
    let names: [&'static [u8]; 4] = [b"nobody", b"sh", b"shx", b"other"];
    let first = Task { memory: memory[0], pid: 4102, name: b"nobody", followed: false };
    let mut tasks = vec![first];
    open().store(1, Ordering::Relaxed);
    let buffer: &mut [u8; 16] = Box::leak(Box::new([0; 16]));
    let (mut meant, mut others, mut exchanged) = (0, 0, [0; 4]);
    for round in 0..40_000 {
        // The first one never changes: of its children nobody is followed.
        let at = if of(2) == 0 { 0 } else { of(tasks.len()) };
        let task = tasks[at];
        task.goes_on(&guest);
        let is_free = |all: &[Task], one: &Task| {
            all.iter().all(|task| task.memory != one.memory && task.pid != one.pid)
        };
        match of(9) {
            0 | 1 => {
                let child = Task {
                    memory: memory[of(memory.len())],
                    pid: PIDS[of(PIDS.len())],
                    followed: task.is_meant(OWN),
                    ..task
                };
                if is_free(&tasks, &child) {
                    child.goes_on(&guest);
                    task.goes_on(&guest);
                    run(&guest, BEGINS, [child.memory, 0]);
                    tasks.push(child);
                }
            }
            2 if at != 0 => drop(tasks.swap_remove(at)),
            // By itself, or by another one.
            3 if tasks.len() > 1 => {
                let name = names[of(names.len())];
                buffer[..name.len()].copy_from_slice(name);
                buffer[name.len()] = 0;
                let other = 1 + of(tasks.len() - 1);
                tasks[at].followed |= task.is_meant(OWN);
                let to = buffer.as_ptr().expose_provenance() as u64;
                run(&guest, RENAMES, [tasks[other].memory, to]);
                tasks[other].followed |= NAMED.contains(&name);
                tasks[other].name = name;
            }
            4 if at != 0 => {
                let leader = of(tasks.len());
                if leader == at || leader == 0 {
                    continue;
                }
                let pid = tasks[leader].pid;
                run(&guest, EXCHANGES, [task.memory, tasks[leader].memory]);
                let both = (task.is_meant(OWN), tasks[leader].followed);
                exchanged[usize::from(both.0) + 2 * usize::from(both.1)] += 1;
                let followed = both.0 || both.1;
                tasks[at] = Task { pid, followed, ..task };
                // Where others look for it.
                tasks[at].goes_on(&guest);
                tasks.swap_remove(leader);
            }
            _ => {
                run(&guest, SITE, [0, 0]);
                let expected = u64::from(task.is_meant(OWN));
                assert_eq!(recorded(&guest, &mut tail), expected, "in round {round}");
                meant += expected;
                others += 1 - expected;
            }
        }
    }
    assert!(meant > 500 && others > 500, "{meant} and {others}");
    assert!(exchanged.iter().all(|&count| count > 50), "{exchanged:?}");
}

/// What is to happen in between.
struct Scene {
    guest: FakeGuest,
    task: u64,
    fault: Fault,
    joins: bool,
}

thread_local! {
    static SCENE: RefCell<Option<Scene>> = const { RefCell::new(None) };
}

extern "C" fn interrupt(_: i32) {
    // A fault that is not one of ours would come again for ever.
    SCENE.with_borrow_mut(|scene| {
        let Some(scene) = scene else { std::process::abort() };
        scene.fault.meet(&scene.guest);
        // The task is made one that is meant, in an interrupt as by any other CPU; or only called.
        if scene.joins {
            run(&scene.guest, JOINS, [scene.task, 0]);
        } else {
            run(&scene.guest, SITE, [0, 0]);
        }
    });
}

// What is interrupted between its look and its note would note what is not true any more.
#[test]
fn whatever_comes_between_two_instructions_no_task_is_noted_wrongly() {
    Fault::handle(interrupt);
    let pid = 2001;
    let members = members(1);
    let guest = guest(&members, members.clone(), Point::Entry);
    let task = guest.set_current(0, pid);
    guest.set_name(task, padded(b"nobody"));
    open().store(1, Ordering::Relaxed);
    let (start, code) = Fault::code_of(&guest, 0);
    let mut tail = guest.ring(0).start();
    let mut scene = Scene { guest, task, fault: Fault::default(), joins: true };
    let mut noted = 0;
    for (offset, len) in instructions(&code) {
        for (joins, fresh) in [(true, true), (true, false), (false, true), (false, false)] {
            let was = followed().1[pid as usize].swap(0, Ordering::Relaxed);
            assert!(was <= 1);
            run(&scene.guest, FORGETS, [task, 0]);
            if !fresh {
                run(&scene.guest, SITE, [0, 0]);
                assert_eq!(place(task).load(Ordering::Relaxed), task);
            }
            assert_eq!(recorded(&scene.guest, &mut tail), 0);
            let address = start + offset as u64;
            scene.joins = joins;
            scene.fault.put(&scene.guest, address, &code[offset..offset + len]);
            SCENE.set(Some(scene));
            let function = SCENE.with_borrow(|scene| scene.as_ref().unwrap().guest.site(SITE));
            call(function, &mut common::registers(0));
            scene = SCENE.take().unwrap();
            let met = !scene.fault.take_back(&scene.guest);
            recorded(&scene.guest, &mut tail);
            run(&scene.guest, SITE, [0, 0]);
            let found = recorded(&scene.guest, &mut tail);
            assert_eq!(found, u64::from(met && joins), "at {offset:#x}, {joins} {fresh}");
            let note = place(task).load(Ordering::Relaxed);
            assert_eq!(note, task + u64::from(met && joins), "at {offset:#x}, {joins} {fresh}");
            noted += 1;
        }
    }
    assert!(scene.fault.met > 60 && noted > 60, "{} {noted}", scene.fault.met);
}

// The same by another CPU at any time: who has been made one that is meant, and knows it, is recorded.
#[test]
fn no_task_is_noted_while_another_cpu_makes_it_one_that_is_meant() {
    const PID_OF: u32 = 3001;
    let rounds = 1_500_u64;
    let members = members(1);
    let counters = |guest: &FakeGuest| {
        let distance = guest.heap().0.wrapping_sub(guest.function(SITE).into());
        Counts::Up(Counters { distance, stride: 4096, rounds: false })
    };
    let mut guest = guest(&members, members.clone(), Point::Entry);
    let counting =
        Program { counts: Some(counters(&guest)), condition: Some(members), ..entry_program() };
    let number = guest.add(&counting, ADDRESSINGS[0], None);
    guest.call_from(SITE, number);
    let (task, stop, turn) = (AtomicU64::new(0), AtomicBool::new(false), AtomicU64::new(0));
    let (joined, answered) = (AtomicU64::new(0), AtomicU64::new(0));
    let barrier = Barrier::new(2);
    open().store(1, Ordering::Relaxed);
    std::thread::scope(|scope| {
        let called = scope.spawn(|| {
            let own = guest.set_current(0, PID_OF);
            guest.set_name(own, padded(b"nobody"));
            task.store(own, Ordering::Release);
            barrier.wait();
            let counter = &guest.heap().1[0];
            while !stop.load(Ordering::Relaxed) {
                let round = joined.load(Ordering::Acquire);
                counter.store(0, Ordering::Relaxed);
                run(&guest, SITE, [0, 0]);
                let counted = counter.load(Ordering::Relaxed);
                if round > answered.load(Ordering::Relaxed) {
                    assert_eq!(counted, 1, "in round {round} of {}", turn.load(Ordering::Relaxed));
                    // As a task whose memory another one gets.
                    followed().1[PID_OF as usize].store(0, Ordering::Relaxed);
                    run(&guest, FORGETS, [own, 0]);
                    answered.store(round, Ordering::Release);
                }
            }
        });
        guest.set_current(0, 3002);
        barrier.wait();
        let task = task.load(Ordering::Acquire);
        let mut noted = 0;
        for round in 1..=rounds {
            turn.store(round, Ordering::Relaxed);
            // At all distances from the last time.
            (0..round % 97).for_each(|_| std::hint::spin_loop());
            noted += u64::from(place(task).load(Ordering::Relaxed) == task);
            run(&guest, JOINS, [task, 0]);
            joined.store(round, Ordering::Release);
            while answered.load(Ordering::Acquire) < round {
                if called.is_finished() {
                    // It says why.
                    return;
                }
                std::thread::yield_now();
            }
        }
        stop.store(true, Ordering::Relaxed);
        assert!(noted > rounds / 100, "noted {noted} times");
    });
}
