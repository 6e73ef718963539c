//! Tracepoints on plain memory, with a model of the guest that changes them as the kernel does and
//! makes the same checks.

mod fake_guest;

use fake_guest::{Fake, MAP, kernels, riscv64};
use std::collections::BTreeSet;
use vm_memory::Bytes;
use vmtrace::kernel::Arch;
use vmtrace::kernel::tracepoints::{Call, Hooks, Origin, Preparation, SyscallMarks};
use vmtrace::tracer::annex::Memory;
use vmtrace::tracer::{Attachment, Duty, Guest, Moment, PointReason, PointSkip};
use vmtrace_trampolines::riscv64::encode::{NOP, j};
use vmtrace_trampolines::{Field, Point};

/// Of each architecture's length.
fn trap(fake: &Fake) -> &'static [u8] {
    match fake.kernel.arch() {
        Arch::X86_64 => &[0xe6, 0x42],
        Arch::Riscv64 => &[0xb7, 0xd8, 0x76, 0x09, 0x73, 0, 0, 0],
    }
}

/// The static calls.
fn calls(hooks: &Hooks) -> &[Call] {
    hooks.static_calls.as_ref().map_or(&[], |calls| &calls.sites)
}

/// Whether code at a link address is never freed.
fn stays(fake: &Fake, code: u64) -> bool {
    !(fake.link("_sinittext")..fake.link("_einittext")).contains(&code)
}

/// A probe of the guest's own, and its data.
const PROBE: [u64; 3] = [MAP + 0x100_0040, 0x1234_5678, 10];

/// All tracepoints of a kernel that can be held.
fn hooks(fake: &Fake) -> Vec<(String, Hooks)> {
    let events = fake.kernel.events().unwrap();
    let mut all: Vec<(String, Hooks)> = Vec::new();
    for event in events {
        let Origin::Tracepoint(_, at) = event.origin else { continue };
        let hooks = fake.kernel.tracepoint_hooks(at).unwrap();
        let stays = hooks.branches.iter().any(|branch| stays(fake, branch.code));
        if stays && hooks.are_used() && !all.iter().any(|(_, had)| had.tracepoint == at) {
            all.push((event.full_name(), hooks));
        }
    }
    all
}

fn leads(from: u64, bytes: &[u8]) -> u64 {
    let distance = i32::from_le_bytes(bytes[1..5].try_into().unwrap());
    (from + 5).wrapping_add_signed(distance.into())
}

/// What is where code of ours is.
fn ours(fake: &Fake, address: u64, len: usize) -> Vec<u8> {
    if fake.kernel.arch() == Arch::Riscv64 {
        return fake.read_vec(fake.at(address), len);
    }
    let mut bytes = vec![0; len];
    fake.annex.slice().read_slice(&mut bytes, usize::try_from(address - MAP).unwrap()).unwrap();
    bytes
}

fn words(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect()
}

/// Where each call leads, and whether each branch jumps.
fn code(fake: &Fake, hooks: &Hooks) -> (Vec<u64>, Vec<bool>) {
    let calls = calls(hooks).iter();
    let calls = calls.map(|call| leads(call.code, &fake.read_vec(fake.at(call.code), 5)));
    let branches = hooks.branches.iter().map(|branch| {
        if fake.kernel.arch() == Arch::Riscv64 {
            let is_nop = fake.word(fake.at(branch.code)) == NOP;
            return !is_nop && riscv64::jump(fake, branch.code) == branch.target;
        }
        let bytes = fake.read_vec(fake.at(branch.code), 5);
        match bytes[0] {
            0xe9 => leads(branch.code, &bytes) == branch.target,
            0xeb => {
                branch.code.wrapping_add_signed(2 + i64::from(bytes[1].cast_signed()))
                    == branch.target
            }
            _ => false,
        }
    });
    (calls.collect(), branches.collect())
}

/// Where the jump at this address of ours leads.
fn leads_on(fake: &Fake, at: u64) -> u64 {
    let bytes = ours(fake, at, 8);
    match fake.kernel.arch() {
        Arch::X86_64 => leads(at, &bytes),
        Arch::Riscv64 => {
            let word = |from: usize| u32::from_le_bytes(bytes[from..from + 4].try_into().unwrap());
            let (upper, lower) = (word(0) & !0xfff, word(4).cast_signed() >> 20);
            // auipc t2, and jalr zero, lower(t2)
            assert_eq!((word(0) & 0xfff, word(4) & 0xf_ffff), (0x397, 0x38067));
            at.wrapping_add_signed(i64::from(upper.cast_signed()) + i64::from(lower))
        }
    }
}

/// Bytes from a probe to where it is called directly.
const DIRECT: u64 = 4;

/// The program that a probe has or calls, and what its records tell. Programs that probes have are in front of what tells
/// that.
fn called(fake: &Fake, probe: u64) -> (Vec<u8>, u64) {
    match fake.kernel.arch() {
        Arch::X86_64 => {
            let told = probe + DIRECT;
            let name = u32::try_from(told & 0xffff_ffff).unwrap().to_le_bytes();
            let code = ours(fake, probe, 256);
            assert_eq!(code[..4], [0xf3, 0x0f, 0x1e, 0xfa]);
            let named = code.windows(9).position(|it| it[..4] == name && it[4] == 0xc3).unwrap();
            (code[..named].to_vec(), told)
        }
        Arch::Riscv64 => {
            let code = ours(fake, probe, 8);
            // jal t0, and ret
            assert_eq!(
                (u32::from(code[0]) | u32::from(code[1] & 0xf) << 8, &code[4..]),
                (0x2ef, &[0x67, 0x80, 0, 0][..])
            );
            let word = u32::from_le_bytes(code[..4].try_into().unwrap());
            fake.write(fake.at(probe), &(word & !0xf80).to_le_bytes()).unwrap();
            let to = riscv64::jump(fake, probe);
            fake.write(fake.at(probe), &word.to_le_bytes()).unwrap();
            (to.to_le_bytes().into(), probe + 4)
        }
    }
}

/// The guest registers a probe, as the first: array, static calls, branches, count.
fn register(fake: &Fake, hooks: &Hooks) -> u64 {
    let array = fake.page() + 0x10_0000;
    let at = fake.heap() + 0x10_0000;
    for (number, word) in PROBE.into_iter().chain([0; 3]).enumerate() {
        fake.write(at + 8 * number as u64, &word.to_le_bytes()).unwrap();
    }
    fake.write(fake.at(hooks.funcs), &array.to_le_bytes()).unwrap();
    fake.write(fake.at(hooks.enabled), &1_u32.to_le_bytes()).unwrap();
    for call in calls(hooks) {
        let distance = i32::try_from(PROBE[0].wrapping_sub(call.code + 5).cast_signed()).unwrap();
        fake.write(fake.at(call.code + 1), &distance.to_le_bytes()).unwrap();
    }
    for branch in &hooks.branches {
        let distance = branch.target.wrapping_sub(branch.code).cast_signed();
        if fake.kernel.arch() == Arch::Riscv64 {
            assert_eq!(fake.word(fake.at(branch.code)), NOP);
            let jump = j(i32::try_from(distance).unwrap());
            fake.write(fake.at(branch.code), &jump.to_le_bytes()).unwrap();
            continue;
        }
        // `__jump_label_patch` dies of anything else.
        let bytes = fake.read_vec(fake.at(branch.code), 5);
        if bytes[..2] == [0x66, 0x90] {
            let short = i8::try_from(distance - 2).unwrap().to_le_bytes()[0];
            fake.write(fake.at(branch.code), &[0xeb, short]).unwrap();
        } else {
            assert_eq!(bytes, [0x0f, 0x1f, 0x44, 0, 0]);
            let [a, b, c, d] = i32::try_from(distance - 5).unwrap().to_le_bytes();
            fake.write(fake.at(branch.code), &[0xe9, a, b, c, d]).unwrap();
        }
    }
    array
}

fn watched(fake: &Fake) -> (Attachment, u16) {
    let mut attachment = fake.attach();
    let traps = attachment.watch_tracepoints(fake, &fake.kernel, trap(fake)).unwrap();
    let moment = |trap| attachment.tracepoint_moment(trap).unwrap().0;
    let begins = traps.iter().filter(|&&trap| moment(trap) == Moment::Begin).count();
    assert!(begins >= 1 && traps.len() > begins, "{traps:x?}");
    for &trap in &traps {
        assert_eq!(ours(fake, trap, self::trap(fake).len()), self::trap(fake));
        // The next instruction is behind it, and goes on to the lock.
        let (_, next) = attachment.tracepoint_moment(trap).unwrap();
        assert_eq!(next, trap + self::trap(fake).len() as u64);
        let locks = ["mutex_lock", "mutex_lock_nested", "mutex_unlock"];
        let mut locks = locks.iter().filter_map(|name| fake.kernel.symbols().address(name));
        let to = leads_on(fake, next);
        assert!(locks.any(|lock| lock == to), "{to:#x}");
    }
    let duty = Duty::new(Point::Probe, vec![0], &[Field::Argument(2)]);
    let program = attachment.program(fake, &fake.kernel, &duty).unwrap();
    (attachment, program)
}

/// The image with marks of tasks that are ours alone.
fn with_marks(fake: &Fake, mut text: Vec<u8>, marks: SyscallMarks) -> Vec<u8> {
    for (link, mark) in [(marks.users, 1), (marks.init_task + marks.work, 2)] {
        text[usize::try_from(link - fake.link("_text")).unwrap()] |= mark;
    }
    text
}

/// Tracepoints by the names of their events, each with a probe for this program.
fn with_probes<const N: usize>(
    fake: &Fake,
    attachment: &mut Attachment,
    program: u16,
    names: [&str; N],
) -> [(Hooks, u16); N] {
    let all = hooks(fake);
    names.map(|wanted| {
        let (_, hooks) = all.iter().find(|(event, _)| event == wanted).unwrap();
        attachment.tracepoint_word(fake, (hooks.tracepoint, ""), program).unwrap().unwrap();
        (hooks.clone(), program)
    })
}

// With no probe of the guest's the call leads straight to ours; given back, nothing is left.
#[test]
fn every_tracepoint_is_held_and_given_back() {
    for name in kernels() {
        let fake = Fake::quiet(name);
        let before = fake.text();
        let (mut attachment, program) = watched(&fake);
        let brackets = fake.text();
        let all = hooks(&fake);
        assert!(all.len() > 500, "{name}: {}", all.len());
        let mut words_of = Vec::new();
        for (_, hooks) in &all {
            let word = attachment.tracepoint_word(&fake, (hooks.tracepoint, ""), program).unwrap();
            words_of.push(word.unwrap());
        }
        let wanted: Vec<_> = all.iter().map(|(_, hooks)| (hooks.clone(), program)).collect();
        let skipped = attachment.hold_tracepoints(&fake, wanted).unwrap();
        assert_eq!(skipped, [], "{name}");
        assert_eq!(attachment.held_tracepoints(), all.len(), "{name}");
        let (mut programs, mut names) = (BTreeSet::new(), BTreeSet::new());
        for ((event, hooks), word) in all.iter().zip(words_of) {
            let array = fake.read_u64(fake.at(hooks.funcs)).unwrap();
            let list = words(&ours(&fake, array, 48));
            let (probe, rest) = (list[0], &list[1..]);
            assert_eq!(rest, [0; 5], "{name} {event}");
            let (lead, branches) = code(&fake, hooks);
            for (call, to) in calls(hooks).iter().zip(lead) {
                let is_ours = to == probe + DIRECT;
                assert_eq!(is_ours, stays(&fake, call.code), "{name} {event}");
            }
            for (branch, jumps) in hooks.branches.iter().zip(branches) {
                assert_eq!(jumps, stays(&fake, branch.code), "{name} {event}");
            }
            assert_eq!(fake.word(fake.at(hooks.enabled)), 0, "{name} {event}");
            let (program, told) = called(&fake, probe);
            programs.insert(program);
            assert!(names.insert(word), "{name} {event}: two of one name");
            assert_eq!(u64::from(word), told & 0xffff_ffff, "{name} {event}");
        }
        assert_eq!(programs.len(), 1, "{name}: {programs:x?}");
        assert_eq!(attachment.lend_tracepoints(&fake).unwrap(), (all.len(), true), "{name}");
        let stay = all.iter().find_map(|(_, hooks)| match hooks.preparation {
            Preparation::Syscalls(marks) => Some(marks),
            _ => None,
        });
        let expected = with_marks(&fake, brackets, stay.unwrap());
        assert!(fake.text() == expected, "{name}: something is left");
        let (taken, skipped) = attachment.take_tracepoints_again(&fake).unwrap();
        assert_eq!((taken, skipped), (all.len(), vec![]), "{name}");
        attachment.release_all(&fake, &fake.kernel).unwrap();
        assert!(fake.text() == before, "{name}: something is left at the end");
    }
}

// Modules come again at other places, and each time their probes do. Without this the first one that has no room would
// keep all others from being given back.
#[test]
fn who_has_no_room_for_a_probe_is_left_out_alone() {
    for name in ["x86_64-6.12", "riscv64-7"] {
        let fake = Fake::quiet(name);
        let (mut attachment, program) = watched(&fake);
        let held = with_probes(&fake, &mut attachment, program, ["sched:sched_switch"]);
        assert_eq!(attachment.hold_tracepoints(&fake, held.clone().into()).unwrap(), []);
        let mut word = |tracepoint| attachment.tracepoint_word(&fake, (tracepoint, "it"), program);
        let without = (1..1 << 20).find(|&tracepoint| word(tracepoint).unwrap().is_none());
        assert!(without > Some(1000), "{name}: {without:?}");
        let mut all = hooks(&fake).into_iter();
        let (_, other) = all.find(|(event, _)| event == "irq:irq_handler_entry").unwrap();
        let tracepoint = other.tracepoint;
        assert_eq!(word(tracepoint).unwrap(), None);
        let wanted = held.into_iter().chain([(other, program)]).collect();
        let skipped = attachment.hold_tracepoints(&fake, wanted).unwrap();
        let reason = PointReason::OutOfReach;
        assert_eq!(skipped, [PointSkip { tracepoint, reason }], "{name}");
        assert_eq!(attachment.held_tracepoints(), 1, "{name}");
        assert_eq!(attachment.hold_tracepoints(&fake, vec![]).unwrap(), [], "{name}");
        assert_eq!(attachment.held_tracepoints(), 0, "{name}");
    }
}

// Its changes come at any moment, and overlap; what it has registered is called behind ours, and is
// what it left when it looks.
#[test]
fn the_guests_own_probes_go_on_beside_ours() {
    for name in kernels() {
        let fake = Fake::quiet(name);
        let (mut attachment, program) = watched(&fake);
        let names = ["sched:sched_switch", "sched:sched_waking"];
        let wanted = with_probes(&fake, &mut attachment, program, names);
        let switch = wanted[0].0.clone();
        assert_eq!(attachment.hold_tracepoints(&fake, wanted.into()).unwrap(), []);
        let alone = (code(&fake, &switch), fake.read_u64(fake.at(switch.funcs)).unwrap());
        let probe = words(&ours(&fake, alone.1, 8))[0];

        // Two wait for the lock; nothing is taken before both are done.
        assert_eq!(attachment.lend_tracepoints(&fake).unwrap(), (2, true));
        assert_eq!(attachment.lend_tracepoints(&fake).unwrap(), (0, true));
        let array = register(&fake, &switch);
        let guests = code(&fake, &switch);
        assert_eq!(attachment.take_tracepoints_again(&fake).unwrap(), (0, vec![]));
        assert_eq!(code(&fake, &switch), guests);
        assert_eq!(attachment.take_tracepoints_again(&fake).unwrap(), (2, vec![]));
        let all_probes = fake.read_u64(fake.at(switch.funcs)).unwrap();
        let first = [probe, PROBE[1], 0];
        let expected = [first, PROBE, [0; 3]].concat();
        assert_eq!(words(&ours(&fake, all_probes, 72)), expected, "{name}");
        let (calls, branches) = code(&fake, &switch);
        assert!(calls.iter().all(|&to| to == switch.iterator), "{name}: {calls:x?}");
        assert!(branches.iter().all(|&jumps| jumps), "{name}");
        assert_eq!(fake.word(fake.at(switch.enabled)), 1, "{name}");

        // It finds what it left.
        assert_eq!(attachment.lend_tracepoints(&fake).unwrap(), (2, true));
        assert_eq!(code(&fake, &switch), guests, "{name}");
        assert_eq!(fake.read_u64(fake.at(switch.funcs)).unwrap(), array, "{name}");
        // Its count and its array contradict each other: left alone.
        fake.write(fake.at(switch.enabled), &0_u32.to_le_bytes()).unwrap();
        let (taken, skipped) = attachment.take_tracepoints_again(&fake).unwrap();
        assert_eq!((taken, skipped.len()), (1, 1), "{name}");
        assert_eq!(skipped[0].reason, PointReason::Unknown);
        assert_eq!(code(&fake, &switch), guests, "{name}");
    }
}

/// A guest's tasks, as the kernel has them: two processes, of which the first has two threads.
struct Tasks<'a> {
    fake: &'a Fake,
    marks: SyscallMarks,
}

impl Tasks<'_> {
    /// Offsets in the heap: three tasks and what each process has.
    const ALL: [u64; 3] = [0x11_0000, 0x11_4000, 0x11_8000];
    const SIGNALS: [u64; 2] = [0x12_0000, 0x12_4000];

    fn set(&self, at: u64, word: u64) {
        self.fake.write(self.fake.heap() + at, &word.to_le_bytes()).unwrap();
    }

    fn first(&self) -> u64 {
        self.fake.at(self.marks.init_task)
    }

    fn build(fake: &Fake, marks: SyscallMarks) -> Tasks<'_> {
        let tasks = Tasks { fake, marks };
        let SyscallMarks { tasks: node, signal, threads, thread, .. } = marks;
        let virt = |at: u64| fake.page() + at;
        let [a, twin, b] = Self::ALL;
        let [of_a, of_b] = Self::SIGNALS;
        fake.write(tasks.first() + node, &virt(a + node).to_le_bytes()).unwrap();
        tasks.set(a + node, virt(b + node));
        tasks.set(b + node, marks.init_task + node);
        for (process, of) in [(a, of_a), (twin, of_a), (b, of_b)] {
            tasks.set(process + signal, virt(of));
        }
        tasks.set(of_a + threads, virt(a + thread));
        tasks.set(a + thread, virt(twin + thread));
        tasks.set(twin + thread, virt(of_a + threads));
        tasks.set(of_b + threads, virt(b + thread));
        tasks.set(b + thread, virt(of_b + threads));
        // Seccomp's mark is not ours.
        tasks.set(twin + marks.work, 1);
        tasks
    }

    /// Who needs the marks, and what the first task and the others have.
    fn state(&self) -> (u32, [u64; 4]) {
        let users = self.fake.word(self.fake.at(self.marks.users));
        let work = |at| self.fake.read_u64(at + self.marks.work).unwrap();
        let [a, twin, b] = Self::ALL.map(|at| work(self.fake.heap() + at));
        (users, [work(self.first()), a, twin, b])
    }
}

// System calls of a task without its mark would be missing; one that keeps it is slow for ever; and
// the guest counts on its count.
#[test]
fn tasks_are_marked_for_as_long_as_somebody_needs_it() {
    for name in kernels() {
        let fake = Fake::quiet(name);
        let (mut attachment, program) = watched(&fake);
        let names = ["raw_syscalls:sys_enter", "raw_syscalls:sys_exit", "sched:sched_switch"];
        let [enter, exit, switch] = with_probes(&fake, &mut attachment, program, names);
        let Preparation::Syscalls(marks) = enter.0.preparation else { panic!("{name}") };
        let tasks = Tasks::build(&fake, marks);
        let marked = |users| (users, [2, 2, 3, 2]);
        assert_eq!(tasks.state(), (0, [0, 0, 1, 0]), "{name}");
        let mut hold = |wanted: &[&(Hooks, u16)]| {
            let wanted = wanted.iter().map(|&one| one.clone()).collect();
            attachment.hold_tracepoints(&fake, wanted)
        };
        assert_eq!(hold(&[&switch]).unwrap(), [], "{name}");
        assert_eq!(tasks.state().0, 0, "{name}: nobody asked for it");
        assert_eq!(hold(&[&switch, &enter]).unwrap(), [], "{name}");
        assert_eq!(tasks.state(), marked(1), "{name}");
        assert_eq!(hold(&[&exit, &enter]).unwrap(), [], "{name}");
        assert_eq!(tasks.state(), marked(1), "{name}: once for all");
        // The guest's own tracing is one more, and needs them when ours does not.
        let users = fake.at(marks.users);
        fake.write(users, &2_u32.to_le_bytes()).unwrap();
        assert_eq!(hold(&[&switch]).unwrap(), [], "{name}");
        assert_eq!(tasks.state(), marked(1), "{name}");
        assert_eq!(hold(&[&exit]).unwrap(), [], "{name}");
        fake.write(users, &1_u32.to_le_bytes()).unwrap();
        assert_eq!(hold(&[]).unwrap(), [], "{name}");
        assert_eq!(tasks.state(), (0, [0, 0, 1, 0]), "{name}");

        // Not while the guest may be at it itself.
        attachment.lend_tracepoints(&fake).unwrap();
        assert_eq!(attachment.hold_tracepoints(&fake, vec![enter.clone()]).unwrap(), []);
        assert_eq!(tasks.state().0, 0, "{name}");
        assert_eq!(attachment.take_tracepoints_again(&fake).unwrap(), (1, vec![]), "{name}");
        assert_eq!(tasks.state(), marked(1), "{name}");
        attachment.release_all(&fake, &fake.kernel).unwrap();
        assert_eq!(tasks.state(), (0, [0, 0, 1, 0]), "{name}: something is left");
    }
}

// Lists without an end, and such that lead out of memory: tasks stay as they are, and other events
// are traced.
#[test]
fn a_guest_without_a_list_of_tasks_has_no_system_calls() {
    for (name, bad) in kernels().flat_map(|name| [(name, None), (name, Some(0xdead_beef_0000))]) {
        let fake = Fake::quiet(name);
        let (mut attachment, program) = watched(&fake);
        let names = ["raw_syscalls:sys_exit", "sched:sched_switch"];
        let [exit, switch] = with_probes(&fake, &mut attachment, program, names);
        let Preparation::Syscalls(marks) = exit.0.preparation else { panic!("{name}") };
        let tasks = Tasks::build(&fake, marks);
        let before = tasks.state();
        let node = Tasks::ALL[0] + marks.tasks;
        tasks.set(node, bad.unwrap_or(fake.page() + node));
        let tracepoint = exit.0.tracepoint;
        let skipped = attachment.hold_tracepoints(&fake, vec![exit, switch]).unwrap();
        let reason = PointReason::Tasks;
        assert_eq!(skipped, [PointSkip { tracepoint, reason }], "{name}");
        assert_eq!((attachment.held_tracepoints(), tasks.state()), (1, before), "{name}");
    }
}

// A guest that has lost its tasks keeps their marks, and nothing else of ours: one that stopped at
// its changes of tracepoints would have nobody to answer.
#[test]
fn what_cannot_be_unmarked_does_not_keep_the_rest() {
    for name in kernels() {
        let fake = Fake::quiet(name);
        let (_, hooks) =
            hooks(&fake).into_iter().find(|(event, _)| event.ends_with(":sys_exit")).unwrap();
        let Preparation::Syscalls(marks) = hooks.preparation else { panic!("{name}") };
        let tasks = Tasks::build(&fake, marks);
        let before = fake.text();
        let (mut attachment, program) = watched(&fake);
        let wanted = with_probes(&fake, &mut attachment, program, ["raw_syscalls:sys_exit"]);
        assert_eq!(attachment.hold_tracepoints(&fake, wanted.into()).unwrap(), [], "{name}");
        let node = Tasks::ALL[0] + marks.tasks;
        tasks.set(node, fake.page() + node);
        attachment.release_all(&fake, &fake.kernel).unwrap_err();
        assert!(fake.text() == with_marks(&fake, before, marks), "{name}: something is left");
    }
}

// What somebody else has written is not overwritten, and is said.
#[test]
fn what_is_not_ours_any_more_is_left_alone() {
    let fake = Fake::quiet("x86_64-6.12");
    let (mut attachment, program) = watched(&fake);
    let [switch] = with_probes(&fake, &mut attachment, program, ["sched:sched_switch"]);
    let call = fake.at(calls(&switch.0)[0].code);
    assert_eq!(attachment.hold_tracepoints(&fake, vec![switch]).unwrap(), []);
    fake.write(call, &[0xcc]).unwrap();
    assert_eq!(attachment.lend_tracepoints(&fake).unwrap(), (1, false));
    assert_eq!(fake.read_vec(call, 1), [0xcc]);
    let (taken, skipped) = attachment.take_tracepoints_again(&fake).unwrap();
    assert_eq!((taken, skipped.len()), (0, 1));

    // Nor is a kernel watched whose lock is taken.
    let fake = Fake::quiet("x86_64-6.12");
    let mut attachment = fake.attach();
    fake.write(fake.symbol("tracepoints_mutex"), &1_u64.to_le_bytes()).unwrap();
    let before = fake.text();
    let refused = attachment.watch_tracepoints(&fake, &fake.kernel, trap(&fake)).unwrap_err();
    assert!(refused.to_string().contains("try again"), "{refused}");
    assert!(fake.text() == before);
}

// A tracepoint of which a part is ours is one that the guest cannot change any more: all of it is, or nothing.
#[test]
fn a_tracepoint_that_does_not_take_the_patch_is_left_alone() {
    for name in kernels() {
        let fake = Fake::new(name);
        let (mut attachment, program) = watched(&fake);
        let names = ["sched:sched_switch", "sched:sched_wakeup"];
        let both = with_probes(&fake, &mut attachment, program, names);
        let (stuck, at) = (both[0].0.tracepoint, both[0].0.branches[0].code);
        let before = fake.text();
        *fake.stuck.borrow_mut() = fake.at(at)..fake.at(at) + 4;
        let skipped = attachment.hold_tracepoints(&fake, both.into()).unwrap();
        let expected = PointSkip { tracepoint: stuck, reason: PointReason::ReadBack };
        assert_eq!(skipped, [expected], "{name}");
        assert_eq!(attachment.held_tracepoints(), 1, "{name}");
        *fake.stuck.borrow_mut() = 0..0;
        assert_eq!(attachment.lend_tracepoints(&fake).unwrap(), (1, true), "{name}");
        assert!(fake.text() == before, "{name}: something was left behind");
        // By then it does.
        assert_eq!(attachment.take_tracepoints_again(&fake).unwrap(), (2, vec![]), "{name}");
    }
}
