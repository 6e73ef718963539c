//! Kernels that the guest starts (kexec).

use crate::fake_guest::module::CODE;
use crate::machine::{self, FakeVm, OF_MODULE, Ran, Step, Trouble};
use crate::{Subject, boot, call, exit_of, tracing, trigger};
use std::collections::BTreeMap;
use vm_memory::Bytes;
use vmtrace::kernel::{ExitKind, Kernel};
use vmtrace::machine::ExitReason;
use vmtrace::serve::{Control, Globs};
use vmtrace::session::{Tracer, Tracing};
use vmtrace::stream::{CountsOf, Exit, Frame, Header, MarkKind, Reader, Record};
use vmtrace::tracer::annex::{self, Memory};
use vmtrace::tracer::{Guest, return_address};
use vmtrace_trampolines::callers::Callers;

const ON: &str = "x86_64-6.12";
const UNTRACED: &str = "the guest goes on with another kernel (kexec), which is not traced: ";

pub(crate) fn leaves() -> Vec<Step> {
    vec![call("machine_kexec"), Step::Does(FakeVm::reload)]
}

/// What the kernel says of itself: 0 while it boots.
fn set_state(vm: &FakeVm, state: u32) {
    vm.fake.ram().write(vm.fake.symbol("system_state"), &state.to_le_bytes()).unwrap();
}

/// What a stream has of records and of marks that say which kernel they are of, by time.
fn told(ran: &Ran) -> Vec<String> {
    let mut reader = Reader::new(&*ran.stream).unwrap();
    let (mut all, mut names) = (Vec::new(), BTreeMap::new());
    while let Some(frame) = reader.next_frame().unwrap() {
        match frame {
            Frame::Symbols(list) => {
                for symbol in list {
                    symbol.with_text(|it| names.insert(it.address, it.name.to_owned()));
                }
            }
            Frame::Records(batch) => {
                for record in batch.records() {
                    let address = Header::TOP_4_GIB | u64::from(record.function().unwrap());
                    all.push((record.head().timestamp.get(), names[&address].clone()));
                }
            }
            Frame::Mark(mark) if mark.text.contains("kexec") => all.push((mark.ticks, mark.text)),
            Frame::Mark(mark) if [MarkKind::Attach, MarkKind::Detach].contains(&mark.kind) => {
                all.push((mark.ticks, mark.kind.to_string()));
            }
            _ => {}
        }
    }
    all.sort_by_key(|(ticks, _)| *ticks);
    all.into_iter().map(|(_, text)| text).collect()
}

// A kernel that the guest starts again must be traced as the first one was: its records in the same stream, none of
// the first one's lost or told twice, and nothing left in it at the end.
#[test]
fn the_same_image_is_traced_anew() {
    for name in crate::fake_guest::X86 {
        let subject = Subject::new(name);
        let first = Step::Does(|vm| {
            vm.records("vfs_read");
            vm.records("vfs_read");
        });
        let second = Step::Does(|vm| vm.records("vfs_write"));
        let again = [boot(), vec![second.clone()]].concat();
        let once = [boot(), vec![first], leaves(), again.clone()].concat();
        let expected = [
            "attach",
            "vfs_read",
            "vfs_read",
            "detach",
            "kernel leaves for another one (kexec)",
            "the guest's kernel starts anew (kexec)",
            "attach",
            "vfs_write",
        ];
        let ran = subject.run(once.clone(), Trouble::default());
        assert_eq!(told(&ran), [&expected[..], &["detach"]].concat(), "{name}: {}", ran.notes());
        let note = "the guest's kernel started anew (kexec), and was traced again; the clock of the guest's log is \
                    that of the first one";
        assert_eq!(ran.outcome().summary.notes, [note], "{name}");
        assert_eq!((ran.outcome().summary.sites.patched, ran.vm.watches()), (3, 1), "{name}");
        assert_eq!(ran.outcome().anomaly, None, "{name}");
        assert_eq!(exit_of(&ran), Exit::Poweroff);
        subject.assert_restored(&ran, name);
        // And so on; that is said once.
        let ran = subject.run([once, leaves(), again].concat(), Trouble::default());
        let more = [&["detach"], &expected[4..], &["detach"]].concat();
        assert_eq!(told(&ran), [&expected[..], &more].concat(), "{name}: {}", ran.notes());
        assert_eq!(ran.outcome().summary.notes, [note], "{name}");
        subject.assert_restored(&ran, name);
    }
}

// What is in memory then is none of ours: nothing may be written there, and the user must be told why there are no
// records.
#[test]
fn another_kernel_is_not_traced() {
    let subject = Subject::new(ON);
    let run = |steps: Vec<Step>| subject.run([boot(), steps].concat(), Trouble::default());
    let found = |vcpu| [leaves(), vec![Step::Elsewhere(vcpu)], boot()[1..].to_vec()].concat();
    // As it is when the guest comes back to it.
    let back = Step::Does(|vm| {
        vm.reload();
        set_state(vm, 3);
    });
    let own = Step::Does(|vm| set_state(vm, 0));
    for (steps, why) in [
        (found(0), "banner"),
        ([vec![call("machine_kexec"), back], boot(), vec![own]].concat(), "it has booted before"),
        (leaves(), "the guest ended before it said where it is (entry_SYSCALL_64)"),
        ([leaves(), boot()[..1].to_vec()].concat(), "the guest ended before early_trace_init"),
    ] {
        let ran = run(steps);
        let [note] = &ran.outcome().summary.notes[..] else { panic!("{why}: {}", ran.notes()) };
        assert!(note.starts_with(UNTRACED) && note.contains(why), "{why}: {note}");
        assert_eq!(ran.outcome().anomaly, None, "{why}");
        subject.assert_restored(&ran, why);
        assert_eq!(ran.vm.traps().len(), 0, "{why}: {:x?}", ran.vm.traps());
    }
    // A crash kernel may boot on any CPU, in a part of the memory.
    let ran = run([vec![call("panic")], leaves(), boot()].concat());
    assert!(
        ran.notes().contains(&format!("{UNTRACED}the one before has panicked")),
        "{}",
        ran.notes()
    );
    assert_eq!((ran.vm.watches(), ran.vm.traps().len()), (0, 0));
    assert!(
        matches!(ran.outcome().exit, Some(ExitReason::Panic { .. })),
        "{:?}",
        ran.outcome().exit
    );
    subject.assert_restored(&ran, "panic");
}

// The second boot has the same moments as the first one at which a guest may end.
#[test]
fn a_kernel_that_starts_anew_may_end_at_any_moment() {
    let subject = Subject::new(ON);
    for many in 0..=boot().len() {
        for together in [false, true] {
            let mut steps = boot()[..many].to_vec();
            let exits = Step::Exits(ExitReason::Reset);
            match steps.pop() {
                Some(last) if together => steps.push(Step::Together(vec![last, exits])),
                last => steps.extend(last.into_iter().chain([exits])),
            }
            let ran = subject.run([boot(), leaves(), steps].concat(), Trouble::default());
            let what = format!("after {many} steps ({together}): {}", ran.notes());
            assert_eq!((exit_of(&ran), &ran.outcome().anomaly), (Exit::Reset, &None), "{what}");
            subject.assert_restored(&ran, &what);
        }
    }
}

// A trigger is for one call of a run: what was counted of its calls in the first kernel counts, and one that has
// fired does not again.
#[test]
fn triggers_go_on_counting() {
    let subject = Subject::new(ON);
    let asks = [trigger("mark", "vfs_read:3"), trigger("mark", "vfs_write")];
    let read = || Step::Counts("vfs_read", 0);
    let write = || Step::Counts("vfs_write", 0);
    let first = vec![Step::Asks(asks.to_vec()), read(), read(), write()];
    let steps = [boot(), first, leaves(), boot(), vec![read(), write()]].concat();
    let ran = subject.run(steps, Trouble::default());
    let mut reader = Reader::new(&*ran.stream).unwrap();
    let mut fired = Vec::new();
    while let Some(frame) = reader.next_frame().unwrap() {
        if let Frame::Mark(mark) = frame
            && mark.text.starts_with("trigger")
            && mark.kind == MarkKind::Note
        {
            fired.push(mark.text);
        }
    }
    assert_eq!(fired.len(), 2, "{fired:?}\n{}", ran.notes());
    assert!(fired[0].contains("vfs_write") && fired[1].contains("vfs_read:3"), "{fired:?}");
    subject.assert_restored(&ran, "triggers");
}

// What was counted for others in the memory that the first kernel has left is none of its calls.
#[test]
fn a_trigger_that_is_added_between_two_kernels_counts_from_there() {
    let subject = Subject::new(ON);
    let asks = Step::Asks(vec![trigger("mark", "vfs_read:2"), Control::TriggerList]);
    for (many, unfired) in [(1, 1), (2, 0)] {
        let reads = (0..many).map(|_| Step::Counts("vfs_read", 0)).collect();
        let steps = [boot(), leaves(), vec![asks.clone()], boot(), reads].concat();
        let ran = subject.run(steps, Trouble::default());
        let told = ran.notes().matches("there were not 2 such calls").count();
        assert_eq!(told, unfired, "{many}: {}", ran.notes());
        assert!(ran.answers[1].contains("\"left\":2"), "{:?}", ran.answers);
    }
}

// Modules of the first kernel are gone without a word. If they were thought to be there, another module in their place
// would be written to; if their functions were forgotten, those of the second kernel's would not be traced.
#[test]
fn modules_come_anew() {
    let subject = Subject::new(ON);
    let comes = || vec![Step::Does(FakeVm::module_comes), call("do_init_module")];
    let filter = Control::Filter(Globs {
        filter: vec!["plain:mod:test_module".into(), "vfs_read".into()],
        notrace: vec![],
    });
    let asks = vec![filter, trigger("mark", "plain:mod:test_module:3")];
    let held = Step::Does(|vm| assert_eq!(vm.plain()[0], 0xe8));
    let counts = || Step::Counts("plain", 0);
    let status = || Step::Asks(vec![Control::Status, Control::TriggerList]);
    let first = [vec![Step::Asks(asks)], comes(), vec![held.clone(), counts(), status()]];
    let left = Step::Does(|vm| {
        FakeVm::reload(vm);
        // Nobody looks at a module that is in this memory by chance.
        FakeVm::module_comes(vm);
    });
    let untouched = Step::Does(|vm| assert_eq!(vm.plain()[0], 0x0f));
    let second = [vec![untouched, status()], comes(), vec![held, counts(), counts(), status()]];
    let steps =
        [boot(), first.concat(), vec![call("machine_kexec"), left], boot(), second.concat()];
    let ran = subject.run(steps.concat(), Trouble::default());
    let what = format!("{:#?}\n{}", ran.answers, ran.notes());
    let json = |at: usize| -> serde_json::Value {
        serde_json::from_str(ran.answers[at].strip_prefix("OK ").unwrap()).unwrap()
    };
    // Status, and what is left of the trigger's calls: before, between, and at the end.
    let seen = [2, 4, 6].map(|at| {
        let (status, triggers) = (json(at), json(at + 1));
        let one = &triggers["triggers"][0];
        let modules = status["modules"].as_array().unwrap().len();
        (status["sites"]["matched"].as_u64().unwrap(), modules, one["left"].as_u64().unwrap())
    });
    assert_eq!(seen, [(2, 1, 2), (1, 0, 2), (2, 1, 0)], "{what}");
    assert_eq!(ran.outcome().anomaly, None, "{what}");
    subject.assert_restored(&ran, &what);
}

/// Where kernels run beside where they are linked.
const HIGH: u64 = 0x400_0000;
const LOW: u64 = 0x60_0000;

/// An address by the names that a stream has, with how far it is in there.
fn named(names: &BTreeMap<u64, String>, low: u32) -> String {
    let address = Header::TOP_4_GIB | u64::from(low);
    match names.range(..=address).next_back() {
        Some((start, name)) => format!("{name}+{:#x}", address - start),
        None => format!("{address:#x}"),
    }
}

/// What the parts of a stream tell, each of one kernel: records with their callers, and counts by caller. And where
/// its kernels are.
fn parts(ran: &Ran) -> (Vec<Vec<String>>, Vec<String>) {
    let mut reader = Reader::new(&*ran.stream).unwrap();
    let (mut names, mut parts, mut places) = (BTreeMap::new(), vec![Vec::new()], Vec::new());
    while let Some(frame) = reader.next_frame().unwrap() {
        let part = parts.last_mut().unwrap();
        match frame {
            Frame::Symbols(list) => {
                for symbol in list {
                    symbol.with_text(|it| names.insert(it.address, it.name.to_owned()));
                }
            }
            Frame::Records(batch) => part.extend(batch.records().map(|record| match record {
                Record::Entry { entry, .. } => {
                    let of =
                        [entry.function.get(), entry.caller.get()].map(|low| named(&names, low));
                    format!("{} called from {}", of[0], of[1])
                }
                Record::Return { ret, .. } => {
                    let of = [ret.function.get(), ret.caller.get()].map(|low| named(&names, low));
                    format!("{} returned to {}", of[0], of[1])
                }
                other => panic!("{other:?}"),
            })),
            Frame::Counts(counts) if counts.of == Some(CountsOf::Callers) => {
                part.extend(counts.callers().map(|it| {
                    let of = [it.function, it.caller].map(|low| named(&names, low));
                    format!("{} counted {} times from {}", of[0], it.hits, of[1])
                }));
            }
            Frame::Mark(mark) if mark.text.starts_with("the guest's kernel starts anew") => {
                places.push(mark.text);
                parts.push(Vec::new());
            }
            Frame::Loss(loss) => part.push(format!("{loss:?}")),
            _ => {}
        }
    }
    (parts, places)
}

/// A tracer of entries and returns, and one that counts by caller.
fn graph_and_callers(kernel: &Kernel) -> Tracing {
    let mut tracing = tracing(kernel);
    let sites = |name: &str| vec![kernel.site_of(name).unwrap()];
    let name = |name: &str| name.to_owned();
    let graph = Tracer { sites: sites("vfs_read"), graph: true, ..Tracer::default() };
    let (text, sites) = (name("vfs_write"), sites("vfs_write"));
    let callers = Tracer { name: name("c"), text, sites, by_caller: true, ..Tracer::default() };
    tracing.tracers = vec![Some(graph), Some(callers)];
    tracing
}

/// vCPU 0 calls a function from the link address `caller`, and a program counts that in the first table of callers,
/// which is the first thing behind the rings if no tracer before has a table.
fn counts_caller(vm: &FakeVm, function: &str, caller: u64) {
    let kernel = &vm.fake.kernel;
    let site = &kernel.sites()[kernel.site_of(function).unwrap()];
    let told = vm.fake.runtime(return_address(kernel, site));
    let pair = Callers::pair(told, vm.fake.runtime(caller) & 0xffff_ffff);
    let place = annex::SIZE + Callers::PLACES + Callers::first(pair) * Callers::PLACE;
    let [place, calls] = [place, place + Callers::CALLS].map(|at| usize::try_from(at).unwrap());
    let memory = vm.fake.annex.slice();
    memory.write_obj(pair, place).unwrap();
    let before: u64 = memory.read_obj(calls).unwrap();
    memory.write_obj(before + 1, calls).unwrap();
}

/// A call of `vfs_read` that returns, and two counted ones of another function, all from one place; and what is
/// answered of those by then.
fn works() -> Vec<Step> {
    let calls = Step::Does(|vm| {
        let (kernel, caller) = (&vm.fake.kernel, vm.fake.link("ksys_read") + 0x20);
        let site = kernel.site_of("vfs_read").unwrap();
        let exits = kernel.exits().unwrap().all().iter();
        let mut own = exits.filter(|exit| exit.site as usize == site);
        let exit = own.find(|exit| exit.kind == ExitKind::Return).unwrap();
        let at = return_address(kernel, &kernel.sites()[site]);
        vm.writes(vm.fake.runtime(at), caller, 0, &[0xffff_c900_0000_1000]);
        vm.writes(vm.fake.runtime(exit.address), caller, 2, &[0xffff_c900_0000_1000]);
        (0..2).for_each(|_| counts_caller(vm, "vfs_write", caller));
    });
    vec![calls, Step::Asks(vec![Control::Table])]
}

// A kernel that chooses another place than the first one (KASLR) would have the names of what is there in the first
// one, or none: its records would be other functions' calls, and counts would be told twice, under two addresses.
#[test]
fn a_kernel_that_runs_elsewhere_is_told_as_the_first_one() {
    for name in crate::fake_guest::X86 {
        let subject = Subject::new(name);
        let elsewhere = |does: fn(&FakeVm)| vec![call("machine_kexec"), Step::Does(does)];
        let [high, low, there] = [
            |vm: &FakeVm| vm.reload_at(HIGH),
            |vm: &FakeVm| vm.reload_at(LOW),
            |vm: &FakeVm| vm.reload_at(0),
        ]
        .map(elsewhere);
        let text = "the guest's kernel starts anew (kexec)";
        let beside = |way: &str| format!("{text}, {way} where the first one was");
        for (slide, ways, told) in [
            (0, [&high, &there], [beside("0x4000000 above"), text.to_owned()]),
            (LOW, [&there, &high], [beside("0x600000 below"), beside("0x3a00000 above")]),
            (HIGH, [&low, &high], [beside("0x3a00000 below"), text.to_owned()]),
        ] {
            let part = || [boot(), works()].concat();
            let steps = [part(), ways[0].clone(), part(), ways[1].clone(), part()].concat();
            let fake = subject.fake.again();
            let traced = graph_and_callers(&fake.kernel);
            let ran = machine::run(fake, traced, steps, Trouble { slide, ..Trouble::default() });
            let what = format!("{name} from {slide:#x}: {}", ran.notes());
            let (parts, places) = parts(&ran);
            assert_eq!(places, told, "{what}");
            let expected = [
                "vfs_read+0x0 called from ksys_read+0x20",
                "vfs_read+0x0 returned to ksys_read+0x20",
                "vfs_write+0x0 counted 2 times from ksys_read+0x20",
            ];
            assert_eq!(parts, vec![expected.map(str::to_owned).to_vec(); 3], "{what}");
            // What is asked for while a kernel runs goes by where that is.
            assert_eq!(ran.answers.len(), 3, "{what}");
            for answer in &ran.answers {
                assert!(answer.contains(r#""caller":"ksys_read""#), "{what}: {answer}");
            }
            assert_eq!(
                (ran.outcome().summary.lost(), exit_of(&ran)),
                (0, Exit::Poweroff),
                "{what}"
            );
            assert_eq!(ran.outcome().anomaly, None, "{what}");
            subject.assert_restored(&ran, &what);
        }
    }
}

// The space of modules does not move with the image: a module of the second kernel that was told as if it had would be
// at an address where none is.
#[test]
fn modules_of_a_kernel_elsewhere_stay_where_they_are() {
    let subject = Subject::new(ON);
    let filter = Control::Filter(Globs {
        filter: vec!["plain:mod:test_module".into(), "vfs_read".into()],
        notrace: vec![],
    });
    let calls = Step::Does(|vm| {
        vm.writes(CODE + OF_MODULE[0] + 5, vm.fake.link("ksys_read") + 0x20, 0, &[]);
        vm.records("vfs_read");
    });
    let comes = || vec![Step::Does(FakeVm::module_comes), call("do_init_module"), calls.clone()];
    let moves = |does: fn(&FakeVm)| vec![call("machine_kexec"), Step::Does(does)];
    let first = [vec![Step::Asks(vec![filter])], comes()].concat();
    for (slide, leaves) in
        [(0, moves(|vm| vm.reload_at(HIGH))), (HIGH, moves(|vm| vm.reload_at(0)))]
    {
        let steps = [boot(), first.clone(), leaves, boot(), comes()].concat();
        let ran = subject.run(steps, Trouble { slide, ..Trouble::default() });
        let (parts, _) = parts(&ran);
        let what = format!("{slide:#x}: {parts:?}\n{}", ran.notes());
        let [one, other] = &parts[..] else { panic!("{what}") };
        assert_eq!((one, one.len()), (other, 2), "{what}");
        assert!(one[0].starts_with("plain+0x0 called from ksys_read+0x20"), "{what}");
        assert!(one[1].starts_with("vfs_read+0x0 called"), "{what}");
        assert_eq!(ran.outcome().summary.lost(), 0, "{what}");
        subject.assert_restored(&ran, &what);
    }
}
