//! What modules switch, while latencies are measured.

use crate::fake_guest::module::CODE;
use crate::machine::{FakeVm, OF_MODULE, Ran, Step, Trouble, run};
use crate::{Subject, boot, call, tracing};
use vmtrace::analyze::latency::Kind;
use vmtrace::serve::{Control, Globs};

const ON: &str = "x86_64-6.12";
/// Where the module's function `plain` has `cli`, and behind that `sti`.
const CLI: u64 = CODE + OF_MODULE[0] + 5;
const STI: u64 = CLI + 6;
const RETURN: [u8; 5] = [0xc3, 0xcc, 0xcc, 0xcc, 0xcc];

fn comes(vm: &FakeVm) {
    vm.module_comes();
    for (at, opcode) in [(CLI, 0xfa), (STI, 0xfb)] {
        vm.put(at, &[opcode, 0x0f, 0x1f, 0x44, 0, 0]);
    }
    vm.put(STI + 6, &RETURN);
    OF_MODULE[1..].iter().for_each(|site| vm.put(CODE + site + 5, &RETURN));
}

/// Whether `cli` and `sti` lead elsewhere.
fn are_held(vm: &FakeVm) -> [bool; 2] {
    [CLI, STI].map(|at| vm.bytes(at + 1, 1)[0] == 0xe9)
}

fn start() -> Step {
    Step::Asks(vec![Control::LatencyStart { kind: Kind::Irqsoff, over: None }])
}

/// A boot in which tracing waits for a function, and then these steps.
fn waiting(subject: &Subject, steps: Vec<Step>) -> Ran {
    let mut tracing = tracing(subject.kernel());
    tracing.from = subject.kernel().site_of("vfs_fsync");
    assert!(tracing.from.is_some());
    run(subject.fake.again(), tracing, [boot(), steps].concat(), Trouble::default())
}

// The awaited call comes in a pause, in which nobody looks through modules: those that were there already
// would be missing for good.
#[test]
fn what_modules_switch_is_seen_although_tracing_waits() {
    let subject = Subject::new(ON);
    let module = || [Step::Does(comes), call("do_init_module")];
    let awaited = || [call("vfs_fsync"), Step::Does(|vm| assert_eq!(are_held(vm), [true; 2]))];
    let none = || Step::Does(|vm| assert_eq!(are_held(vm), [false; 2]));
    let before = [&module()[..], &[start(), none()], &awaited()].concat();
    let after = [&[start()], &module()[..], &[none()], &awaited()].concat();
    for steps in [before, after] {
        let ran = waiting(&subject, steps);
        let what = format!("{:?}\n{}", ran.answers, ran.notes());
        assert!(ran.answers[0].contains("from when tracing begins"), "{what}");
        subject.assert_restored(&ran, &what);
        assert_eq!(are_held(&ran.vm), [false; 2], "{what}");
    }
}

// A breakpoint that somebody has set hides all behind it. It need not stay.
#[test]
fn what_could_not_be_seen_is_looked_for_when_others_are_traced() {
    let subject = Subject::new(ON);
    let steps = |whole: bool| {
        let mut steps = boot();
        steps.extend([
            Step::Does(|vm| {
                comes(vm);
                vm.put(STI + 6, &[0xcc]);
            }),
            call("do_init_module"),
            start(),
            Step::Does(|vm| assert_eq!(are_held(vm), [false; 2])),
        ]);
        if whole {
            steps.push(Step::Does(|vm| vm.put(STI + 6, &[0xc3])));
        }
        // Triggers pause and resume, and a vCPU stands there.
        steps.push(Step::Asks(vec![Control::Pause, Control::Resume]));
        steps.push(Step::Does(|vm| assert_eq!(are_held(vm), [false; 2])));
        let other = Globs { filter: vec!["vfs_open".to_owned()], notrace: Vec::new() };
        steps.push(Step::Asks(vec![Control::Filter(other)]));
        steps
    };
    let held = |vm: &FakeVm| assert_eq!(are_held(vm), [true; 2]);
    let untold = "what 1 functions of modules switch is not recorded: they had breakpoints, or what is \
                  no instruction (test_module 1)";
    let whole = subject.run([steps(true), vec![Step::Does(held)]].concat(), Trouble::default());
    assert!(!whole.notes().contains("functions of modules switch"), "{}", whole.notes());
    subject.assert_restored(&whole, "a module that is whole again");
    let torn = subject.run(steps(false), Trouble::default());
    assert!(torn.notes().contains(untold), "{}", torn.notes());
    subject.assert_restored(&torn, "a module with a breakpoint");
}
