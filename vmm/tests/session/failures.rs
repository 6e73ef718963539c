//! Writes to the guest that fail, pauses that fail, and a guest that spoils what is ours.

use crate::anew::leaves;
use crate::fake_guest::Fake;
use crate::machine::{FakeVm, Step, Trouble, run};
use crate::{BEGIN, Subject, boot, call, exit_of, tracing, trigger};
use vm_memory::Bytes;
use vmtrace::machine::ExitReason;
use vmtrace::serve::{Control, Globs};
use vmtrace::session::Plan;
use vmtrace::stream::Exit;
use vmtrace::tracer::Guest;
use vmtrace::tracer::annex::Memory;

const ON: &str = "x86_64-6.12";

/// Most changes are of one byte or five: what is left behind when one write fails.
fn left_behind(subject: &Subject, broken: &dyn Fn(&Fake), most: usize, what: &str) -> bool {
    let fake = subject.fake.again();
    broken(&fake);
    let trouble = Trouble { broken: true, ..Trouble::default() };
    let ran = run(fake, tracing(subject.kernel()), boot(), trouble);
    let outcome = match &ran.outcome {
        Ok(outcome) => outcome,
        // It says why, and is no panic.
        Err(error) => panic!("{what}: {error}"),
    };
    assert_eq!(outcome.exit, Some(ExitReason::PowerOff), "{what}");
    assert_eq!(exit_of(&ran), Exit::Poweroff, "{what}");
    let differences = subject.differences(&ran);
    let told = !outcome.summary.notes.is_empty() || outcome.anomaly.is_some();
    assert!(told || differences.is_empty(), "{what}: nothing is said of {differences:x?}");
    assert!(differences.len() <= most, "{what}: {differences:x?}\n{}", ran.notes());
    told
}

// A write fails where a guest has given memory back, or a table of it is wrong: what was begun is undone,
// the rest is given back, and it is said.
#[test]
fn any_write_may_fail() {
    let subject = Subject::new(ON);
    let whole = subject.run(boot(), Trouble::default());
    let writes = whole.vm.fake.log.borrow().len();
    assert!(writes > 50, "{writes}");
    let mut told = 0;
    for number in 0..writes {
        let once = |fake: &Fake| *fake.failing.borrow_mut() = number..number + 1;
        told +=
            usize::from(left_behind(&subject, &once, 8, &format!("write {number} of {writes}")));
    }
    assert!(told > writes / 2, "{told} of {writes}");
}

// From one moment on nothing can be written any more, as when the guest's tables are gone: all that was
// written before stays, and that is an anomaly and not a trace without faults.
#[test]
fn writing_may_end_at_any_moment() {
    let subject = Subject::new(ON);
    let whole = subject.run(boot(), Trouble::default());
    let writes = whole.vm.fake.log.borrow().len();
    for number in (0..writes).step_by(11) {
        let from = |fake: &Fake| *fake.failing.borrow_mut() = number..usize::MAX;
        left_behind(&subject, &from, usize::MAX, &format!("from write {number} of {writes} on"));
    }
}

// A vCPU that does not stop: the run goes on without what the pause was for, or ends with an error. Nothing
// is written meanwhile, nobody stays parked while the run goes on, and no vCPU stops at a tripwire for ever.
#[test]
fn any_pause_may_fail() {
    let subject = Subject::new(ON);
    let steps = [boot(), leaves(), boot()].concat();
    let whole = subject.run(steps.clone(), Trouble::default());
    assert!(whole.vm.pauses() > 20, "{}", whole.vm.pauses());
    let first = subject.run(boot(), Trouble::default()).vm.pauses();
    let (mut ended, mut untraced) = (Vec::new(), 0);
    for number in 1..=whole.vm.pauses() {
        let failing_pauses = [number].into();
        let ran = subject.run(steps.clone(), Trouble { failing_pauses, ..Trouble::default() });
        let what = format!("pause {number}");
        match &ran.outcome {
            Err(error) => {
                assert!(error.to_string().contains("no vCPU"), "{what}: {error}");
                ended.push(number);
            }
            Ok(outcome) => {
                assert_eq!(exit_of(&ran), Exit::Poweroff, "{what}");
                let is_restored = subject.differences(&ran).is_empty();
                assert!(
                    is_restored || ran.notes().contains("not given back"),
                    "{what}: {outcome:?}"
                );
                untraced += usize::from(ran.notes().contains("(kexec), which is not traced: "));
            }
        }
    }
    // At its end a guest is paused twice: all is given back, and the time is read. Where the kernel leaves for another
    // one, all and then the tripwires of its end must be given back; the third pause only lets the next one tell where
    // it is.
    let leaving = first - 1..first + 1;
    assert!(leaving.clone().all(|it| ended.contains(&it)), "{leaving:?}: {ended:?}");
    assert!(!ended.contains(&leaving.end) && untraced > 0, "{ended:?}");
    // Those at tripwires of the boot, twice.
    assert!(ended.len() < whole.vm.pauses() / 2, "{ended:?}");
}

// What is not ours any more is not written over: it is left alone, and said.
#[test]
fn what_the_guest_has_spoiled_is_left_alone() {
    const THEIRS: [u8; 5] = [0xe8, 1, 2, 3, 4];
    let subject = Subject::new(ON);
    type Spoil = fn(&FakeVm);
    let spoils: [(Spoil, &str); 3] = [
        (
            |vm| {
                let site = Plan::of(&tracing(&vm.fake.kernel), &[]).indices()[1];
                vm.fake.ram().write(vm.fake.at(vm.fake.extent(site).0), &THEIRS).unwrap();
            },
            "1 sites did not hold our call any more",
        ),
        (
            |vm| {
                let trap = vm.trap_in("panic").unwrap();
                vm.fake.ram().write(vm.fake.at(trap), &THEIRS).unwrap();
            },
            "",
        ),
        (
            |vm| {
                let entry = vm.fake.link(BEGIN);
                vm.fake.ram().write(vm.fake.at(entry), &[0xcc; 64]).unwrap();
            },
            "its code is not as it was kept",
        ),
    ];
    for (spoil, why) in spoils {
        for at_end in [false, true] {
            let steps = [boot(), vec![Step::Does(spoil)]].concat();
            let asks = Step::Asks(vec![Control::Stop]);
            let steps = if at_end { steps } else { [steps, vec![asks]].concat() };
            let ran = subject.run(steps, Trouble { broken: true, ..Trouble::default() });
            let anomaly = ran.outcome().anomaly.clone().unwrap_or_default();
            assert!(anomaly.contains(why) && anomaly.is_empty() == why.is_empty(), "{anomaly}");
            assert!(ran.notes().contains(why), "{}", ran.notes());
            let theirs = subject
                .differences(&ran)
                .iter()
                .all(|(_, [_, is])| [THEIRS[0], 1, 2, 3, 4, 0xcc].contains(is));
            assert!(theirs, "{:x?}", subject.differences(&ran));
        }
    }
}

// The guest's ftrace changes nothing any more then, and what vmtrace knows of its sites is in doubt: all is given back
// at that call, whichever update it comes in, and the guest lives.
#[test]
fn when_the_guests_ftrace_gives_up_tracing_ends() {
    let subject = Subject::new(ON);
    let update = boot().iter().position(|it| matches!(it, Step::Calls(BEGIN, _))).unwrap();
    for in_an_update in [false, true] {
        let mut steps = boot();
        if in_an_update {
            steps.truncate(update + 1);
        }
        steps.push(call("ftrace_bug"));
        steps.push(Step::Does(|vm| {
            for site in Plan::of(&tracing(&vm.fake.kernel), &[]).indices() {
                assert_eq!(vm.fake.bytes(site), [0x0f, 0x1f, 0x44, 0, 0], "still held");
            }
        }));
        let filter =
            Control::Filter(Globs { filter: vec!["vfs_open".into()], notrace: Vec::new() });
        let adds = [filter, trigger("mark", "vfs_read:2"), Control::Pause, Control::Resume];
        let removes = Control::TracerRemove("tracer0".into());
        steps.push(Step::Asks([&[Control::Status], &adds[..], &[removes]].concat()));
        let ran = subject.run(steps, Trouble::default());
        let what = format!("{in_an_update}: {:?}\n{}", ran.answers, ran.notes());
        let anomaly = ran.outcome().anomaly.clone().unwrap_or_default();
        assert!(anomaly.contains("ftrace_bug: see its console"), "{what}");
        assert!(ran.notes().contains("tracing ends: the guest's own ftrace has found"), "{what}");
        assert!(ran.answers[0].contains("\"state\":\"off\""), "{what}");
        // Who asks for more must not wait for it.
        let (removed, added) = ran.answers[1..].split_last().unwrap();
        for answer in added {
            assert_eq!(answer, "ERR the guest is not traced (any more): see ctl status", "{what}");
        }
        assert_eq!(removed, "OK tracer tracer0 removed", "{what}");
        assert_eq!((exit_of(&ran), ran.outcome().summary.sites.patched), (Exit::Poweroff, 3));
        subject.assert_restored(&ran, &what);
    }
}

/// Where nothing of ours is.
const NOWHERE: &str = "vfs_statx";

fn nowhere(vm: &FakeVm) -> u64 {
    vm.fake.runtime(vm.fake.link(NOWHERE)) + 5
}

/// Puts a trap instruction there.
fn spoil(vm: &FakeVm) {
    vm.fake.ram().write(vm.fake.at(vm.fake.link(NOWHERE) + 5), vm.fake.trap()).unwrap();
}

// A copy of a tripwire, such as a kprobe of the guest's makes of what it replaces, does not do what the copied
// instruction did: whoever comes to it, all is given back. What only looks like it is the guest's own business.
#[test]
fn a_tripwire_that_nobody_set_ends_tracing() {
    let subject = Subject::new(ON);
    // An instruction of another length, to the same port; and one in a program, that a task came to late.
    let own = Step::Strays(nowhere);
    let late = Step::Strays(|vm| {
        let place = 0x10_0000;
        vm.fake.annex.slice().write_slice(vm.fake.trap(), place).unwrap();
        let address = 0xffff_ffff_8000_0000 + place as u64;
        assert_eq!(vm.bytes(address, 2), vm.fake.trap());
        address
    });
    let ran = subject.run([boot(), vec![own.clone(), late]].concat(), Trouble::default());
    assert_eq!(ran.outcome().anomaly, None, "{}", ran.notes());

    let steps = [boot(), vec![Step::Does(spoil), own]].concat();
    let ran = subject.run(steps, Trouble { broken: true, ..Trouble::default() });
    let anomaly = ran.outcome().anomaly.clone().unwrap_or_default();
    let what = format!("a tripwire that nobody set was hit at {NOWHERE}+0x5");
    assert_eq!(anomaly, what);
    assert!(ran.notes().contains(&format!("tracing ends: {what}")), "{}", ran.notes());
    assert_eq!((exit_of(&ran), ran.outcome().summary.sites.patched), (Exit::Poweroff, 3));
    assert_eq!(subject.differences(&ran).len(), ran.vm.fake.trap().len(), "not given back");
}

// Before it was noticed, the vCPU came to it again for ever.
#[test]
fn an_armed_trap_that_nobody_knows_ends_tracing() {
    let subject = Subject::new(ON);
    let arms = Step::Does(|vm| {
        spoil(vm);
        vm.arm(nowhere(vm));
    });
    let comes = Step::Comes(nowhere);
    let steps = [boot(), vec![arms, comes.clone(), comes]].concat();
    let ran = subject.run(steps, Trouble { broken: true, ..Trouble::default() });
    let anomaly = ran.outcome().anomaly.clone().unwrap_or_default();
    assert_eq!(anomaly, format!("a tripwire that nobody knows was hit at {NOWHERE}+0x5"));
    assert_eq!(exit_of(&ran), Exit::Poweroff);
    assert_eq!(subject.differences(&ran).len(), ran.vm.fake.trap().len(), "not given back");
}
