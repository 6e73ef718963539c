//! What comes at the same time, and what comes when nobody expects it.

use crate::machine::{FakeVm, Ran, SelfCall, Step, Trouble, run};
use crate::{BEGIN, END, ENDS, Subject, boot, call, exit_of, tracing, trigger};
use std::collections::BTreeSet;
use std::sync::Mutex;
use vmtrace::analyze::latency::Kind;
use vmtrace::kernel::{ExitKind, SiteSection};
use vmtrace::machine::ExitReason;
use vmtrace::serve::{Control, Globs};
use vmtrace::session::Plan;
use vmtrace::stream::{Exit, Frame, MarkKind, Reader};
use vmtrace::tracer::Guest;

const ON: &str = "x86_64-6.12";
const NOP: [u8; 5] = [0x0f, 0x1f, 0x44, 0, 0];
pub(crate) const RETURN: [u8; 5] = [0xc3, 0xcc, 0xcc, 0xcc, 0xcc];

/// As a kernel leaves its returns whose processor needs no thunk, when it patches alternatives.
pub(crate) fn patch(vm: &FakeVm) {
    for exit in vm.fake.kernel.exits().unwrap().all() {
        if exit.kind == ExitKind::Return {
            let found = vm.fake.read_vec(vm.fake.at(exit.address), RETURN.len());
            let thunk = found[0] == 0xe9 && {
                let distance = i32::from_le_bytes(found[1..].try_into().unwrap());
                let to = (exit.address + 5).wrapping_add_signed(distance.into());
                to == vm.fake.link("__x86_return_thunk")
            };
            assert!(thunk, "{exit:?} holds {found:02x?}");
            vm.fake.ram().write(vm.fake.at(exit.address), &RETURN).unwrap();
        }
    }
    vm.patch_alternatives();
}

fn filter(glob: &str) -> Control {
    Control::Filter(Globs { filter: vec![glob.to_owned()], notrace: vec![] })
}

/// The first of the sites that are traced.
fn first(vm: &FakeVm) -> usize {
    Plan::of(&tracing(&vm.fake.kernel), &[]).indices()[0]
}

fn mark() -> Control {
    Control::Mark { ticks: None, text: "here".into() }
}

/// The texts of a stream's marks of a kind.
fn marks(ran: &Ran, kind: MarkKind) -> Vec<String> {
    let mut reader = Reader::new(&*ran.stream).unwrap();
    let mut all = Vec::new();
    while let Some(frame) = reader.next_frame().unwrap() {
        all.extend(match frame {
            Frame::Mark(mark) if mark.kind == kind => Some(mark.text),
            _ => None,
        });
    }
    all
}

// All other tests here compare with this.
#[test]
fn a_boot_is_traced_and_given_back() {
    for name in crate::fake_guest::X86 {
        let subject = Subject::new(name);
        let held = Step::Does(|vm| {
            for site in Plan::of(&tracing(&vm.fake.kernel), &[]).indices() {
                assert_eq!(vm.fake.bytes(site)[0], 0xe8, "site {site}");
            }
        });
        let ran = subject.run([boot(), vec![held]].concat(), Trouble::default());
        let summary = &ran.outcome().summary;
        assert_eq!((summary.sites.patched, summary.sites.guest_updates), (3, 1), "{name}");
        assert_eq!(summary.notes, [""; 0], "{name}");
        assert_eq!(ran.outcome().exit, Some(ExitReason::PowerOff));
        // The register, four functions, both ends of the update, and the self-test.
        assert_eq!(ran.released(), 7, "{name}");
        assert_eq!(exit_of(&ran), Exit::Poweroff);
        subject.assert_restored(&ran, name);
        let traps = ran.vm.traps().len();
        assert_eq!(traps, ENDS.len(), "{name}: {:x?}", ran.vm.traps());
    }
}

// The second finds the kernel's own code back when it goes on; whatever was done for the first must not
// be done twice, and nobody may stay parked.
#[test]
fn two_vcpus_at_one_trap_are_attended_to_once() {
    let subject = Subject::new(ON);
    let before = subject.run(boot(), Trouble::default());
    let pauses = |ran: &Ran| ran.outcome().summary.pauses.count;
    for function in ["early_trace_init", "rest_init", "ftrace_free_init_mem"] {
        for vcpus in [vec![0, 1], vec![1, 0]] {
            // Where the self-test is, the first vCPU boots.
            if function == "early_trace_init" && vcpus[0] == 1 {
                continue;
            }
            let mut steps = boot();
            let place =
                steps.iter().position(|it| matches!(it, Step::Calls(f, _) if *f == function));
            // The self-test has its own ideas of who is where.
            steps[place.unwrap()] = Step::Calls(function, vcpus.clone());
            let ran = subject.run(steps, Trouble::default());
            let what = format!("{function} {vcpus:?}: {}", ran.notes());
            assert_eq!(ran.released(), before.released() + 1, "{what}");
            assert_eq!(ran.outcome().summary.sites, before.outcome().summary.sites, "{what}");
            assert_eq!(pauses(&ran), pauses(&before), "{what}");
            assert_eq!(ran.notes(), "", "{what}");
            subject.assert_restored(&ran, &what);
        }
    }
    for function in ["panic", "oops_enter", "machine_restart", "machine_kexec"] {
        for vcpus in [vec![0, 1], vec![1, 0]] {
            let steps = |vcpus| [boot(), vec![Step::Calls(function, vcpus)]].concat();
            let [one, two] =
                [vec![0], vcpus.clone()].map(|vcpus| subject.run(steps(vcpus), Trouble::default()));
            let what = format!("{function} {vcpus:?}");
            assert_eq!(two.released(), one.released() + 1, "{what}");
            assert_eq!(pauses(&two), pauses(&one), "{what}");
            assert_eq!(two.notes(), one.notes(), "{what}");
            assert_eq!(two.outcome().exit, one.outcome().exit, "{what}");
            subject.assert_restored(&two, &what);
        }
    }
}

// Who asks during a boot gets an answer, and what was asked for when tracing begins; an update of the
// guest's own ftrace is waited for.
#[test]
fn commands_may_come_at_any_moment() {
    let subject = Subject::new(ON);
    let boot = boot();
    for many in 0..=boot.len() {
        let asks = [
            filter("vfs_raed"),
            filter("vfs_*"),
            mark(),
            Control::Pause,
            Control::Resume,
            trigger("mark", "vfs_read:2"),
        ];
        let [before, after] = [&boot[..many], &boot[many..]].map(<[Step]>::to_vec);
        let held = Step::Does(|vm| {
            for site in vm.fake.kernel.select(&["vfs_*".to_owned()], &[]).unwrap() {
                // Those of the memory that is freed were given back.
                let is_held = vm.fake.kernel.sites()[site].section == SiteSection::Text;
                assert_eq!(vm.fake.bytes(site)[0] == 0xe8, is_held, "site {site}");
            }
        });
        let counts = vec![Step::Counts("vfs_read", 0), Step::Counts("vfs_read", 1)];
        let asks = vec![Step::Asks(asks.to_vec())];
        let steps = [before, asks, after, vec![held], counts].concat();
        let ran = subject.run(steps, Trouble::default());
        let what = format!("after {many} steps: {:?}\n{}", ran.answers, ran.notes());
        let [nothing, filter, mark, pause, resume, trigger] = &ran.answers[..] else {
            panic!("{what}")
        };
        let near = "ERR no function that can be traced matches -f vfs_raed; near: vfs_read";
        assert!(nothing.starts_with(near), "{what}");
        let begun = many >= 2;
        let expected =
            if begun { "OK -f vfs_*: " } else { "OK -f vfs_*, from when tracing begins" };
        assert!(filter.starts_with(expected), "{what}");
        let is_begun = |answer: &str| !answer.contains("tracing has not begun");
        assert_eq!(is_begun(mark), begun, "{what}");
        assert_eq!(marks(&ran, MarkKind::User), vec!["here"; usize::from(begun)], "{what}");
        for answer in [pause, resume, trigger] {
            assert!(answer.starts_with("OK "), "{what}");
        }
        let fired = "trigger 1 (mark at vfs_read:2): vfs_read on vCPU 1";
        assert!(marks(&ran, MarkKind::Note).iter().any(|note| note == fired), "{what}");
        assert_eq!(ran.outcome().summary.sites.guest_updates, 1, "{what}");
        assert!(ran.outcome().anomaly.is_none(), "{what}");
        subject.assert_restored(&ran, &what);
    }
}

/// What a list says of each trigger: its number, how many calls are left, and whether it was done.
fn listed(answer: &str) -> Vec<(u64, u64, bool)> {
    let json: serde_json::Value =
        serde_json::from_str(answer.strip_prefix("OK ").unwrap()).unwrap();
    let one = |it: &serde_json::Value| {
        (it["id"].as_u64().unwrap(), it["left"].as_u64().unwrap(), it["fired"].as_bool().unwrap())
    };
    json["triggers"].as_array().unwrap().iter().map(one).collect()
}

// A trigger that counts from another call than it was added at, or keeps its site, is another than the one that
// was asked for. Each change is one pause.
#[test]
fn a_trigger_comes_and_goes_while_the_guest_runs() {
    let subject = Subject::new(ON);
    let counts = |vcpu| Step::Counts("vfs_fsync", vcpu);
    fn site(vm: &FakeVm) -> Vec<u8> {
        vm.fake.bytes(vm.fake.kernel.site_of("vfs_fsync").unwrap())
    }
    let is_held = Step::Does(|vm| assert_eq!(site(vm)[0], 0xe8));
    let is_back = Step::Does(|vm| assert_eq!(site(vm), NOP));
    let list = || Control::TriggerList;
    let more = vec![
        is_back.clone(),
        Step::Asks(vec![trigger("mark", "vfs_fsync:3"), list()]),
        is_held.clone(),
        counts(0),
        counts(1),
        Step::Asks(vec![list()]),
        counts(1),
        counts(0),
        Step::Asks(vec![list(), Control::TriggerRemove(1), list(), Control::TriggerRemove(1)]),
        is_back,
        // Nobody counts for the first one any more.
        Step::Asks(vec![trigger("end", "vfs_fsync")]),
        is_held,
        counts(1),
        Step::Does(|_| panic!("the run goes on")),
    ];
    let ran = subject.run([boot(), more].concat(), Trouble::default());
    let what = format!("{:?}\n{}", ran.answers, ran.notes());
    let [added, first, second, done, removed, none, again, last] = &ran.answers[..] else {
        panic!("{what}")
    };
    assert!(added.starts_with("OK trigger 1 added (mark at vfs_fsync:3): 4 sites"), "{what}");
    assert!(removed.starts_with("OK trigger 1 removed: 3 sites"), "{what}");
    assert!(again.starts_with("ERR there is no trigger 1"), "{what}");
    assert!(last.starts_with("OK trigger 2 added (end at vfs_fsync): 4 sites"), "{what}");
    let lists = [first, second, done, none].map(|answer| listed(answer));
    assert_eq!(lists, [vec![(1, 3, false)], vec![(1, 1, false)], vec![(1, 0, true)], vec![]]);
    let fired = "trigger 1 (mark at vfs_fsync:3): vfs_fsync on vCPU 1";
    let notes = marks(&ran, MarkKind::Note);
    assert_eq!(notes.iter().filter(|note| *note == fired).count(), 1, "{notes:?}");
    let ended = "trigger 2 (end at vfs_fsync): vfs_fsync on vCPU 1";
    assert_eq!(ran.outcome().ended_by.as_deref(), Some(ended), "{what}");
    assert_eq!(ran.notes(), "", "{what}");
    let changes = marks(&ran, MarkKind::Filter);
    let changes = changes.iter().filter(|text| text.starts_with("trigger ")).count();
    let before = subject.run(boot(), Trouble::default()).outcome().summary.pauses.count;
    assert_eq!((changes, ran.outcome().summary.pauses.count), (3, before + 3), "{what}");
    subject.assert_restored(&ran, &what);
}

// Each pair of tracers has a program of its own. Those of pairs that are gone would take the places of all to come.
#[test]
fn programs_of_tracers_that_are_gone_are_used_again() {
    static CALLS: Mutex<BTreeSet<Vec<u8>>> = Mutex::new(BTreeSet::new());
    const OTHERS: [&str; 6] =
        ["vfs_getattr", "vfs_fallocate", "vfs_statx", "vfs_mkdir", "vfs_rmdir", "vfs_link"];
    let add =
        |name: &str, glob: &str| Control::TracerAdd(format!("{name}={glob}").parse().unwrap());
    let remove = |name: &str| Control::TracerRemove(name.to_owned());
    let subject = Subject::new(ON);
    let look = Step::Does(|vm| {
        let call = vm.fake.bytes(vm.fake.kernel.site_of("vfs_fsync").unwrap());
        assert_eq!(call[0], 0xe8);
        CALLS.lock().unwrap().insert(call.to_vec());
    });
    // Numbers that are free are taken in order.
    let mut steps = vec![Step::Asks(OTHERS.map(|name| add(name, name)).to_vec())];
    let mut pairs = 0;
    for (second, one) in OTHERS.iter().enumerate() {
        for other in &OTHERS[..second] {
            let pair = [remove(other), remove(one), add("a", "vfs_fsync"), add("b", "vfs_fsync")];
            steps.extend([Step::Asks(pair.to_vec()), look.clone()]);
            let back = [remove("a"), remove("b"), add(other, other), add(one, one)];
            steps.push(Step::Asks(back.to_vec()));
            pairs += 1;
        }
    }
    let ran = subject.run([boot(), steps].concat(), Trouble::default());
    let what = format!("{:?}\n{}", ran.answers, ran.notes());
    assert!(ran.answers.iter().all(|answer| answer.starts_with("OK ")), "{what}");
    let calls = CALLS.lock().unwrap().len();
    assert!(pairs == 15 && (4..9).contains(&calls), "{calls} programs for {pairs} pairs");
    subject.assert_restored(&ran, &what);
}

// A trigger at a function of a module waits until that is there, counts on when the module comes again, and also
// while nothing is recorded. One that counts from the beginning each time, or that stays in the memory of a module that
// is gone, is found by nobody but the guest.
#[test]
fn triggers_wait_for_modules() {
    let subject = Subject::new(ON);
    let text = "plain:mod:test_module:3";
    let counts = |vcpu| Step::Counts("plain", vcpu);
    let list = || Step::Asks(vec![Control::TriggerList]);
    let comes = [Step::Does(FakeVm::module_comes), call("do_init_module")];
    let goes = [call("ftrace_release_mod")];
    // Each has its own line where it fails.
    macro_rules! is_held {
        () => {
            Step::Does(|vm| assert_eq!(vm.plain()[0], 0xe8))
        };
    }
    macro_rules! is_back {
        () => {
            Step::Does(|vm| assert_eq!(vm.plain(), NOP))
        };
    }
    let more = vec![
        vec![Step::Asks(vec![trigger("mark", text), trigger("mark", "plain")])],
        vec![list()],
        comes.to_vec(),
        vec![is_held!(), counts(0), list()],
        goes.to_vec(),
        vec![is_back!(), list(), Step::Asks(vec![Control::Pause])],
        comes.to_vec(),
        vec![is_held!(), counts(1), counts(0), list()],
        // By its name alone, since it is there.
        vec![Step::Asks(vec![Control::TriggerRemove(1)]), is_back!()],
        vec![Step::Asks(vec![trigger("start", "plain:2")]), is_held!(), counts(1)],
        goes.to_vec(),
        comes.to_vec(),
        vec![counts(0), Step::Asks(vec![Control::Status])],
    ];
    let ran = subject.run([boot(), more.concat()].concat(), Trouble::default());
    let what = format!("{:#?}\n{}", ran.answers, ran.notes());
    let [added, near, first, once, gone, _, done, _, again, status] = &ran.answers[..] else {
        panic!("{what}")
    };
    let waits = |answer: &str| {
        let json: serde_json::Value =
            serde_json::from_str(answer.strip_prefix("OK ").unwrap()).unwrap();
        let one = &json["triggers"][0];
        (one["functions"].as_u64().unwrap(), one["waits_for"].as_array().unwrap().len())
    };
    assert!(
        added.starts_with(&format!("OK trigger 1 added (mark at {text}): 3 sites"))
            && added.ends_with("; waits for module test_module"),
        "{what}"
    );
    assert!(near.starts_with("ERR no function of "), "{what}");
    let lists = [first, once, gone, done].map(|answer| (listed(answer), waits(answer)));
    let left = |left| vec![(1, left, left == 0)];
    let expected = [(left(3), (0, 1)), (left(2), (1, 0)), (left(2), (0, 1)), (left(0), (1, 0))];
    assert_eq!(lists, expected, "{what}");
    let notes = marks(&ran, MarkKind::Note);
    let fired = format!("trigger 1 (mark at {text}): plain [test_module] on vCPU 0");
    assert_eq!(notes.iter().filter(|note| **note == fired).count(), 1, "{notes:?}");
    assert!(again.starts_with("OK trigger 2 added (start at plain:2): 1 sites"), "{what}");
    assert!(status.contains("\"state\":\"tracing\""), "{what}");
    assert_eq!(ran.notes(), "", "{what}");
    subject.assert_restored(&ran, &what);
}

// Nothing is traced of a module that does not come, or that is built into the kernel: who asked for it learns that.
#[test]
fn modules_that_never_come_are_told() {
    let subject = Subject::new(ON);
    let add = |text: &str| Control::TracerAdd(text.parse().unwrap());
    let asks = || vec![Step::Asks(vec![add("a=plain:mod:test_module"), add("b=fuse_*:mod:fuse")])];
    let comes = vec![Step::Does(FakeVm::module_comes), call("do_init_module")];
    let goes = vec![call("ftrace_release_mod")];
    let never = |more: Vec<Vec<Step>>| {
        let ran = subject.run([boot(), more.concat()].concat(), Trouble::default());
        ran.outcome().summary.notes.clone()
    };
    let note = |patterns: &str| {
        format!(
            "no module that {patterns} could mean was loaded (functions that are built into the kernel are of no \
             module)"
        )
    };
    assert_eq!(never(vec![asks()]), [note("fuse_*:mod:fuse, plain:mod:test_module")]);
    assert_eq!(never(vec![asks(), comes.clone(), goes.clone()]), [note("fuse_*:mod:fuse")]);
    // Also what is asked for when it is there.
    assert_eq!(never(vec![comes, asks(), goes]), [note("fuse_*:mod:fuse")]);
}

// The same where calls end, also while tracing is paused: exits that stay held, or that are not, are calls that nobody
// decides about.
#[test]
fn a_trigger_at_ends_comes_and_goes_while_the_guest_runs() {
    fn exits(vm: &FakeVm) -> usize {
        let kernel = &vm.fake.kernel;
        let all = kernel.exits().unwrap().of(kernel.site_of("vfs_fsync").unwrap());
        let returns = all.iter().filter(|exit| exit.kind == ExitKind::Return);
        let found = returns.map(|exit| vm.fake.read_vec(vm.fake.at(exit.address), RETURN.len()));
        found.filter(|bytes| *bytes != RETURN).count()
    }
    let subject = Subject::new(ON);
    let ends = |vcpu| Step::Ends("vfs_fsync", vcpu);
    let list = || Control::TriggerList;
    let held = Step::Does(|vm| assert!(exits(vm) > 0, "not held"));
    let back = Step::Does(|vm| assert_eq!(exits(vm), 0, "held"));
    let text = "vfs_fsync:2 if retval < 0";
    let timed = "vfs_fsync if duration > 1ms && pid == 1";
    let more = vec![
        back.clone(),
        Step::Asks(vec![trigger("mark", text), list()]),
        held.clone(),
        ends(0),
        Step::Asks(vec![list(), Control::Pause]),
        held.clone(),
        ends(1),
        Step::Asks(vec![list(), Control::Resume]),
        back.clone(),
        Step::Asks(vec![Control::TriggerRemove(1), trigger("start", timed), Control::Pause]),
        held,
        ends(0),
        Step::Asks(vec![list(), Control::Status, Control::TriggerRemove(2)]),
        back,
    ];
    let mut boot = boot();
    boot[2] = Step::Does(patch);
    let ran = subject.run([boot, more].concat(), Trouble::default());
    let what = format!("{:#?}\n{}", ran.answers, ran.notes());
    let [added, first, second, paused, done, resumed, removed, next, _, last, status, _] =
        &ran.answers[..]
    else {
        panic!("{what}")
    };
    assert!(added.starts_with(&format!("OK trigger 1 added (mark at {text}): 3 sites")), "{what}");
    assert!(added.ends_with("their sites stay unchanged"), "{what}");
    assert!(next.starts_with(&format!("OK trigger 2 added (start at {timed}): 4 sites")), "{what}");
    assert!([paused, resumed, removed].iter().all(|answer| answer.starts_with("OK ")), "{what}");
    let lists = [first, second, done, last].map(|answer| listed(answer));
    let expected =
        [vec![(1, 2, false)], vec![(1, 1, false)], vec![(1, 0, true)], vec![(2, 0, true)]];
    assert_eq!(lists, expected, "{what}");
    assert!(status.contains("\"state\":\"tracing\""), "{what}");
    let notes = marks(&ran, MarkKind::Note);
    let fired = format!("trigger 1 (mark at {text}): vfs_fsync on vCPU 1");
    assert_eq!(notes.iter().filter(|note| **note == fired).count(), 1, "{notes:?}");
    assert_eq!(ran.notes(), "", "{what}");
}

// What a condition cannot look at must not be taken for what it asks for, and must not go unsaid.
#[test]
fn calls_of_functions_without_types_are_not_meant() {
    let subject = Subject::new(ON);
    let asks = vec![trigger("end", "plain:mod:test_module if count > 1"), Control::TriggerList];
    let steps = vec![
        Step::Asks(asks),
        Step::Does(FakeVm::module_comes),
        call("do_init_module"),
        Step::Asks(vec![Control::TriggerList]),
        Step::Asks(vec![trigger("end", "plain if args.count == 1")]),
    ];
    let ran = subject.run([boot(), steps].concat(), Trouble::default());
    let what = format!("{:?}\n{}", ran.answers, ran.notes());
    let [added, waits, there, refused] = &ran.answers[..] else { panic!("{what}") };
    assert!(
        added.starts_with("OK ") && added.ends_with("; waits for module test_module"),
        "{what}"
    );
    for list in [waits, there] {
        assert_eq!(listed(list), [(1, 1, false)], "{what}");
        assert!(list.contains("\"functions\":0"), "{what}");
    }
    assert!(refused.starts_with("ERR ") && refused.contains("plain [test_module]"), "{what}");
    let notes = ran.notes();
    let told = "trigger 1 (end at plain:mod:test_module if count > 1): 1 functions are not traced (such as plain [test_module]): ";
    assert!(notes.contains(told), "{what}");
    assert!(notes.contains("there was no such call"), "{what}");
    subject.assert_restored(&ran, &what);
}

// A call that has come when its trigger is removed is nobody's: not that of the next one at the same function.
#[test]
fn a_trigger_that_is_gone_does_nothing() {
    let subject = Subject::new(ON);
    let counts = Step::Counts("vfs_fsync", 1);
    let stop = || trigger("stop", "vfs_fsync");
    for kept in [false, true] {
        let remove = if kept { Control::TriggerList } else { Control::TriggerRemove(1) };
        let asks = Step::Asks(vec![remove, trigger("end", "vfs_fsync:2"), Control::TriggerList]);
        // The call first, of which is heard when the commands were obeyed.
        let steps = vec![Step::Asks(vec![stop()]), Step::Together(vec![asks, counts.clone()])];
        let ran = subject.run([boot(), steps].concat(), Trouble::default());
        let what = format!("{:?}\n{}", ran.answers, ran.notes());
        let paused = marks(&ran, MarkKind::Pause).iter().any(|it| it.starts_with("tracing paused"));
        assert_eq!(paused, kept, "{what}");
        assert_eq!(ran.outcome().ended_by, None, "{what}");
        assert!(listed(&ran.answers[3]).contains(&(2, 2, false)), "{what}");
        subject.assert_restored(&ran, &what);
    }
}

// What is refused must leave all as it was, and say what can be done.
#[test]
fn triggers_that_cannot_be_are_refused() {
    let subject = Subject::new(ON);
    let asks = vec![
        trigger("mark", "vfs_raed"),
        trigger("mark", "vfs_read if cuont == 1"),
        trigger("mark", "vfs_read if file > -1"),
        trigger("mark", "vfs_read if followed"),
        trigger("snapshot", "vfs_read"),
        Control::TriggerRemove(7),
        Control::TriggerList,
    ];
    let steps = [boot(), vec![Step::Asks(asks)]].concat();
    let ran = subject.run(steps, Trouble::default());
    let expected = [
        ["\"vfs_raed\"", "near: vfs_read"],
        ["cuont", "count"],
        ["file", "-1"],
        ["followed", ""],
        ["flight recorder", "--overflow overwrite"],
        ["no trigger 7", "trigger list"],
    ];
    for (answer, words) in ran.answers.iter().zip(expected) {
        let says = words.iter().all(|word| answer.contains(word));
        assert!(answer.starts_with("ERR ") && says, "{answer}");
    }
    assert_eq!(listed(&ran.answers[6]), [], "{:?}", ran.answers);
    let before = subject.run(boot(), Trouble::default()).outcome().summary.pauses.count;
    assert_eq!(ran.outcome().summary.pauses.count, before, "a pause for nothing");
    subject.assert_restored(&ran, "refused");
}

// There are so many counters and no more; who gives one back can have another.
#[test]
fn triggers_are_bounded() {
    let subject = Subject::new(ON);
    let most = u32::from(vmtrace::session::Tracing::MAX_TRIGGERS);
    let mut asks = vec![trigger("mark", "vfs_fsync:1000"); most as usize];
    let one_more = || trigger("mark", "vfs_fsync:9");
    asks.extend([one_more(), Control::TriggerRemove(5), one_more(), one_more()]);
    let ran = subject.run([boot(), vec![Step::Asks(asks)]].concat(), Trouble::default());
    let refused = |answer: &String| answer.starts_with("ERR there are 256 triggers");
    let all: Vec<_> =
        (0..).zip(&ran.answers).filter(|(_, it)| refused(it)).map(|it| it.0).collect();
    assert_eq!(all, [most, most + 3], "{:?}", ran.answers.last());
    assert!(ran.answers[most as usize + 2].starts_with("OK trigger 257 added"));
    subject.assert_restored(&ran, "many triggers");
}

// `stop` at any moment ends the trace and not the guest, whose end is told all the same.
#[test]
fn the_trace_may_be_stopped_at_any_moment() {
    let subject = Subject::new(ON);
    let boot = boot();
    for many in 0..=boot.len() {
        let mut steps = boot.clone();
        steps.insert(many, Step::Asks(vec![Control::Stop, filter("vfs_*"), Control::Status]));
        steps.push(call("panic"));
        let ran = subject.run(steps, Trouble::default());
        let what = format!("after {many} steps: {:?}\n{}", ran.answers, ran.notes());
        assert!(ran.answers[0].starts_with("OK the trace has ended"), "{what}");
        assert!(ran.answers[2].contains("\"state\":\"ended\""), "{what}");
        // Nobody has laid traps in a guest that was not attached to.
        let told = matches!(ran.outcome().exit, Some(ExitReason::Panic { .. }));
        assert_eq!(told, many >= 2, "{what}");
        assert_eq!(exit_of(&ran), Exit::Stopped, "{what}");
        subject.assert_restored(&ran, &what);
    }
}

// Whoever measures latencies is owed the page, however the run ends: the guest powers off or dies, a trigger or a
// command ends it; and once it was shown it is not shown again.
#[test]
fn latencies_that_are_measured_to_the_end_have_their_page() {
    let subject = Subject::new(ON);
    let start = || Control::LatencyStart { kind: Kind::Wakeup, over: None };
    let stop = Control::LatencyStop { json: false };
    let begin = Step::Asks(vec![start()]);
    let ends: [(Vec<Step>, bool); 6] = [
        (vec![], true),
        (vec![Step::Exits(ExitReason::TripleFault)], true),
        (vec![call("panic")], true),
        (vec![Step::Asks(vec![Control::Stop])], true),
        (vec![Step::Asks(vec![trigger("end", "vfs_fsync")]), Step::Counts("vfs_fsync", 0)], true),
        (vec![Step::Asks(vec![stop])], false),
    ];
    for (end, is_owed) in ends {
        let what = format!("{end:?}");
        let ran = subject.run([boot(), vec![begin.clone()], end].concat(), Trouble::default());
        let what = format!("{what}: {:?}\n{}", ran.answers, ran.notes());
        assert!(ran.answers[0].starts_with("OK latency wakeup begins"), "{what}");
        let page =
            ran.outcome().latencies.as_ref().map(|all| (all.kind, all.page.clone().unwrap()));
        let is_there = page.as_ref().is_some_and(|(kind, page)| {
            *kind == "wakeup" && page.starts_with("# tracer: wakeup\n")
        });
        assert_eq!((is_there, page.is_some()), (is_owed, is_owed), "{what}: {page:?}");
        // Who reads the trace sees how far it was measured.
        let marks = marks(&ran, MarkKind::Filter);
        let ended = marks.iter().filter(|text| *text == "latency wakeup ends with the trace");
        assert_eq!(ended.count(), usize::from(is_owed), "{what}: {marks:?}");
        subject.assert_restored(&ran, &what);
    }
}

// The annex, the program and the ring are in doubt when one call has not done what it must: nothing is
// traced, and the guest goes on as if nothing had been.
#[test]
fn a_failed_self_test_leaves_the_guest_alone() {
    let subject = Subject::new(ON);
    let whys = [(SelfCall::Forgets, "has 0 records"), (SelfCall::Spoils, "rbx was not as before")];
    for (self_call, why) in whys {
        let trouble = Trouble { self_call, ..Trouble::default() };
        let steps = [boot(), vec![Step::Asks(vec![filter("vfs_*"), Control::Status])]].concat();
        let ran = subject.run(steps, trouble);
        let anomaly = ran.outcome().anomaly.clone().unwrap_or_default();
        assert!(anomaly.contains("the self-test has failed") && anomaly.contains(why), "{anomaly}");
        assert_eq!(ran.outcome().summary.sites.patched, 0);
        assert!(ran.answers[1].contains("\"state\":\"off\""), "{:?}", ran.answers);
        assert_eq!(ran.outcome().exit, Some(ExitReason::PowerOff));
        subject.assert_restored(&ran, why);
        assert_eq!(ran.vm.traps().len(), 0, "{:x?}", ran.vm.traps());
    }
}

// A trap of the self-test that is left in the guest would be one that nobody attends to.
#[test]
fn a_self_test_that_cannot_begin_leaves_nothing_behind() {
    let subject = Subject::new(ON);
    let trouble = Trouble { self_call: SelfCall::Refused, ..Trouble::default() };
    let ran = subject.run(boot(), trouble);
    assert!(ran.notes().contains("not traced: "), "{}", ran.notes());
    assert_eq!(ran.outcome().anomaly, None);
    assert_eq!(ran.outcome().summary.sites.patched, 0);
    assert_eq!(ran.outcome().exit, Some(ExitReason::PowerOff));
    subject.assert_restored(&ran, "a self-test that cannot begin");
    assert_eq!(ran.vm.traps().len(), 0, "{:x?}", ran.vm.traps());
}

// Between the two ends of an update the guest's bytes are the guest's; it may die there, panic there, or
// leave for another kernel.
#[test]
fn nothing_is_written_in_an_update_of_the_guests() {
    let subject = Subject::new(ON);
    // It wants a site that is ours, and has none yet.
    let wants = Step::Does(|vm| vm.fake.set_flags(first(vm), 1));
    let own = Step::Does(|vm| {
        let bytes = vm.fake.bytes(first(vm));
        assert_eq!(bytes, NOP, "held in an update");
    });
    let asks = || Step::Asks(vec![filter("vfs_*"), Control::Pause]);
    for way in ["panic", "oops_enter", "machine_kexec", "machine_restart", END] {
        let until = boot().iter().position(|it| matches!(it, Step::Calls(f, _) if *f == BEGIN));
        let mut steps = boot()[..until.unwrap()].to_vec();
        steps.extend([wants.clone(), call(BEGIN)]);
        steps.extend([own.clone(), asks(), own.clone(), call(way)]);
        let ran = subject.run(steps, Trouble::default());
        let what = format!("{way}: {:?}\n{}", ran.answers, ran.notes());
        assert_eq!(ran.outcome().anomaly, None, "{what}");
        for answer in &ran.answers {
            let expected = match way {
                END => "OK ",
                "machine_kexec" => "ERR the guest's kernel leaves for another one",
                _ => "ERR the trace has ended",
            };
            assert!(answer.starts_with(expected), "{what}");
        }
        subject.assert_restored(&ran, &what);
    }
}

// Stubs are made while the guest runs to where its exits can be held: if that went wrong, returns would
// be left alone, or a guest that has not patched them yet be changed.
#[test]
fn exits_are_held_when_alternatives_are_patched_and_not_before() {
    let subject = Subject::new("x86_64-6.12");
    let exits = subject.kernel().exits().unwrap();
    let mut tracing = tracing(subject.kernel());
    tracing.tracers.iter_mut().flatten().for_each(|tracer| tracer.graph = true);
    let planned = Plan::of(&tracing, exits.all()).exits;
    let mut own: Vec<_> = planned.iter().map(|&(exit, _)| exits.all()[exit]).collect();
    own.retain(|exit| exit.kind == ExitKind::Return);
    assert!(own.len() > 2, "{own:?}");
    // Nothing of ours is there yet.
    let steps = vec![
        Step::Located,
        call("early_trace_init"),
        Step::Does(patch),
        call("rest_init"),
        call("ftrace_free_init_mem"),
    ];
    let ran = run(subject.fake.again(), tracing, steps, Trouble::default());
    let marks = marks(&ran, MarkKind::Filter);
    let held: Vec<_> = marks.iter().filter(|text| text.ends_with(" exits")).collect();
    assert_eq!(held, [&format!("{} exits", planned.len())], "{marks:?}\n{}", ran.notes());
    assert!(!ran.notes().contains("not traced"), "{}", ran.notes());
    for exit in own {
        let at = ran.vm.fake.at(exit.address);
        assert_eq!(ran.vm.fake.read_vec(at, RETURN.len()), RETURN, "{exit:?}");
    }
}
