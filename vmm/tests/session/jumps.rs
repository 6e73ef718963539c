//! Calls that were seen to go on in a function by a jump through a pointer.

use super::fake_guest::Fake;
use super::fake_guest::module::CODE;
use super::machine::{FakeVm, OF_MODULE, Ran, Step, Trouble};
use super::orders::{RETURN, patch};
use super::{BEGIN, END, Subject, boot, call};
use std::time::Duration;
use vmtrace::kernel::{Coverage, Exit, ExitKind, Kernel};
use vmtrace::serve::Control;
use vmtrace_trampolines::x86_64::INDIRECT_CALL;

/// A function that is left by a jump through a pointer, and one in which its calls go on.
const JUMPS: &str = "vfs_getattr_nosec";
const TO: &str = "shmem_getattr";
/// And another one.
const ELSEWHERE: &str = "simple_getattr";
/// Which program has the exits where calls jump: that of entries of the run's own, and of the tracer's, come first.
const PROGRAM: u16 = 2;

fn exit_of(kernel: &Kernel, function: &str, is_it: impl Fn(&Exit) -> bool) -> Exit {
    let mut exits = kernel.exits().unwrap().of(kernel.site_of(function).unwrap()).iter();
    *exits.find(|exit| is_it(exit)).unwrap()
}

/// Whether a function's return is rewritten.
fn is_held(fake: &Fake, function: &str) -> bool {
    let exit = exit_of(&fake.kernel, function, |exit| exit.kind == ExitKind::Return);
    fake.read_vec(fake.at(exit.address), RETURN.len()) != RETURN
}

/// A call of the function goes on there, and is recorded.
fn goes_on(vm: &FakeVm, to: &str) {
    let kernel = &vm.fake.kernel;
    goes_to(vm, vm.fake.runtime(kernel.sites()[kernel.site_of(to).unwrap()].entry));
}

/// The same by run-time address.
fn goes_to(vm: &FakeVm, to: u64) {
    let kernel = &vm.fake.kernel;
    let exit = exit_of(kernel, JUMPS, |exit| matches!(exit.kind, ExitKind::Indirect { .. }));
    let found = vm.fake.read_vec(vm.fake.at(exit.address), 5).try_into().unwrap();
    // It jumps to a stub, whose call of the program names it.
    let [0xe9, distance @ ..]: [u8; 5] = found else { panic!("{exit:?} is as it was") };
    let behind = vm.fake.runtime(exit.address) + 5;
    let stub = behind.wrapping_add_signed(i32::from_le_bytes(distance).into());
    let fields = [0xffff_c900_0000_1000, to];
    vm.writes(stub + INDIRECT_CALL, vm.fake.link("vfs_statx"), PROGRAM, &fields);
}

fn add() -> Step {
    Step::Asks(vec![Control::TracerAdd(format!("calls={JUMPS}:graph").parse().unwrap())])
}

fn run(subject: &Subject, steps: Vec<Step>) -> Ran {
    let mut all = boot();
    all[2] = Step::Does(patch);
    all.extend(steps);
    let ran = subject.run(all, Trouble::default());
    assert_eq!(ran.outcome().anomaly, None);
    for function in [TO, ELSEWHERE] {
        assert!(!is_held(&ran.vm.fake, function), "{function} at the end");
    }
    ran
}

// From then on such calls end there; what a second one goes on in comes to it.
#[test]
fn calls_end_in_what_they_went_on_in() {
    let subject = Subject::new("x86_64-6.12");
    let steps = vec![
        add(),
        Step::Does(|vm| {
            assert!(!is_held(&vm.fake, TO));
            goes_on(vm, TO);
        }),
        Step::Until(|vm| is_held(&vm.fake, TO)),
        Step::Does(|vm| {
            assert!(!is_held(&vm.fake, ELSEWHERE));
            goes_on(vm, ELSEWHERE);
        }),
        Step::Until(|vm| is_held(&vm.fake, ELSEWHERE)),
        Step::Does(|vm| assert!(is_held(&vm.fake, TO))),
    ];
    let ran = run(&subject, steps);
    assert_eq!(ran.outcome().summary.lost(), 0);
    assert!(!ran.notes().contains("through pointers"), "{}", ran.notes());
}

// They stay open, and nobody would know why.
#[test]
fn calls_that_go_on_where_no_end_is_seen_are_told() {
    fn partial(kernel: &Kernel) -> usize {
        let exits = kernel.exits().unwrap();
        let is_partial = |site: &usize| {
            matches!(exits.coverage(*site), Coverage::Partial(_))
                && kernel.site_name(&kernel.sites()[*site]).is_some()
        };
        (0..kernel.sites().len()).find(is_partial).unwrap()
    }
    let subject = Subject::new("x86_64-6.12");
    let told = |goes: fn(&FakeVm), name: &str| {
        // What is followed after it was seen after it.
        let seen = [Step::Does(|vm| goes_on(vm, TO)), Step::Until(|vm| is_held(&vm.fake, TO))];
        let steps = [add(), Step::Does(goes)].into_iter().chain(seen).collect();
        let notes = run(&subject, steps).notes();
        let expected = format!("(such as {JUMPS} in {name})");
        assert!(
            notes.contains("calls of 1 functions have no end") && notes.contains(&expected),
            "{notes}"
        );
    };
    let kernel = subject.kernel();
    let name = kernel.site_name(&kernel.sites()[partial(kernel)]).unwrap();
    told(
        |vm| goes_to(vm, vm.fake.runtime(vm.fake.kernel.sites()[partial(&vm.fake.kernel)].entry)),
        name,
    );
    told(|vm| goes_to(vm, CODE + OF_MODULE[0]), "code outside of the image");
}

// The guest's own ftrace may be about to change the very same function.
#[test]
fn nothing_is_held_while_the_guest_changes_its_own() {
    let subject = Subject::new("x86_64-6.12");
    let steps = vec![
        add(),
        call(BEGIN),
        Step::Does(|vm| goes_on(vm, TO)),
        Step::Runs(Duration::from_millis(300)),
        Step::Does(|vm| assert!(!is_held(&vm.fake, TO))),
        call(END),
        Step::Until(|vm| is_held(&vm.fake, TO)),
    ];
    run(&subject, steps);
}

// Who pauses, and goes on again later, has no less.
#[test]
fn who_pauses_has_the_ends_when_tracing_goes_on() {
    let subject = Subject::new("x86_64-6.12");
    let steps = vec![
        add(),
        Step::Does(|vm| goes_on(vm, TO)),
        Step::Asks(vec![Control::Pause]),
        Step::Runs(Duration::from_millis(300)),
        // It may have come to it before the pause, and has given it back.
        Step::Does(|vm| assert!(!is_held(&vm.fake, TO))),
        Step::Asks(vec![Control::Resume]),
        Step::Until(|vm| is_held(&vm.fake, TO)),
    ];
    let ran = run(&subject, steps);
    assert!(ran.answers.iter().all(|answer| answer.starts_with("OK")), "{:?}", ran.answers);
}

// All goes on as it was, and is changed as the user likes.
#[test]
fn ends_that_cannot_be_followed_change_nothing() {
    let subject = Subject::new("x86_64-6.12");
    let steps = vec![
        add(),
        Step::Does(|vm| {
            vm.fail_pause();
            goes_on(vm, TO);
        }),
        Step::Until(FakeVm::has_failed),
        Step::Runs(Duration::from_millis(300)),
        Step::Does(|vm| {
            assert!(!is_held(&vm.fake, TO));
            vm.records("vfs_read");
        }),
        Step::Asks(vec![Control::TracerAdd("more=vfs_fsync".parse().unwrap())]),
        Step::Does(|vm| vm.records("vfs_fsync")),
    ];
    let ran = run(&subject, steps);
    assert!(ran.answers.iter().all(|answer| answer.starts_with("OK")), "{:?}", ran.answers);
}
