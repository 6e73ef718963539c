//! How guests end, and when.

use crate::machine::{Step, Trouble};
use crate::{Subject, boot, call, exit_of};
use vmtrace::machine::ExitReason;
use vmtrace::stream::Exit;

const ON: &str = "x86_64-6.12";

// A guest may end wherever it is: at a trap, while the trap is being dealt with, in the self-test, in an
// update of its ftrace.
#[test]
fn the_guest_may_end_at_any_moment() {
    let subject = Subject::new(ON);
    let reasons = [ExitReason::PowerOff, ExitReason::Reset, ExitReason::TripleFault];
    let ends = [Exit::Poweroff, Exit::Reset, Exit::TripleFault];
    let boot = boot();
    for many in 0..=boot.len() {
        for (number, (reason, end)) in reasons.iter().zip(ends).enumerate() {
            let mut steps = boot[..many].to_vec();
            let exits = Step::Exits(reason.clone());
            // Also as another vCPU's doing, before anybody has attended to the last step.
            let at_once = number == 1;
            match steps.pop() {
                Some(last) if at_once => steps.push(Step::Together(vec![last, exits])),
                last => steps.extend(last.into_iter().chain([exits])),
            }
            let ran = subject.run(steps, Trouble::default());
            let what = format!("{reason:?} after {many} steps");
            assert_eq!(ran.outcome().exit.as_ref(), Some(reason), "{what}");
            assert_eq!(exit_of(&ran), end, "{what}");
            assert!(ran.outcome().anomaly.is_none(), "{what}: {:?}", ran.outcome().anomaly);
            subject.assert_restored(&ran, &what);
            let why = match (many, at_once) {
                (0, _) => "before it said where it is",
                (1, _) => "before early_trace_init",
                (2, true) => "the guest ended in the self-test",
                _ => "",
            };
            assert!(ran.notes().contains(why), "{what}: {}", ran.notes());
            assert_eq!(ran.notes().is_empty(), why.is_empty(), "{what}: {}", ran.notes());
        }
    }
}

// Where no tripwire is on `panic` (too early, untraced, a second kernel), a guest whose kernel has a driver of pvpanic
// has panicked nonetheless; why, its console says, or nobody. Whatever a tripwire has told is better.
#[test]
fn a_panic_that_the_device_is_told_is_one() {
    let subject = Subject::new(ON);
    let told = |why, crash_kernel| Step::Panics(why, crash_kernel);
    let untold = "the guest's pvpanic device was told so; its console does not say why";
    let wired = subject.run([boot(), vec![call("panic")]].concat(), Trouble::default());
    let Some(ExitReason::Panic { message: by_tripwire }) = wired.outcome().exit.clone() else {
        panic!("{:?}", wired.outcome().exit)
    };
    for (steps, message) in [
        (vec![told(Some("early"), false)], "early"),
        (vec![told(None, false)], untold),
        (vec![told(None, true)], untold),
        (vec![told(Some("first"), false), told(Some("second"), false)], "first"),
        ([boot(), vec![call("panic"), told(Some("late"), false)]].concat(), &by_tripwire),
        ([boot(), vec![told(None, false), call("panic")]].concat(), &by_tripwire),
    ] {
        let what = format!("{steps:?}");
        for end in [ExitReason::PowerOff, ExitReason::Reset, ExitReason::TripleFault] {
            let steps = [steps.clone(), vec![Step::Exits(end)]].concat();
            let ran = subject.run(steps, Trouble::default());
            let panic = ExitReason::Panic { message: message.to_owned() };
            assert_eq!(ran.outcome().exit, Some(panic), "{what}");
            assert_eq!(exit_of(&ran), Exit::Panic, "{what}");
            subject.assert_restored(&ran, &what);
        }
    }
}
