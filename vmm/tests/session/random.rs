//! What nobody has thought of: steps at random, and what must be so whatever they are.

use crate::machine::{Step, Trouble};
use crate::{BEGIN, END, Subject, call, exit_of, trigger};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use vmtrace::analyze::latency::Kind;
use vmtrace::machine::ExitReason;
use vmtrace::serve::{Control, Globs};
use vmtrace::stream::Exit;

fn command() -> impl Strategy<Value = Control> {
    let filter = |glob: &str| {
        Control::Filter(Globs { filter: vec![glob.to_owned()], notrace: vec!["vfs_f*".to_owned()] })
    };
    let tracer = |text: &str| Control::TracerAdd(text.parse().unwrap());
    let all = vec![
        filter("vfs_*"),
        filter("nosuchfunction"),
        filter("ksys_*"),
        filter("*:mod:nosuchmodule"),
        tracer("other=vfs_r*,ksys_*"),
        tracer("counts=do_sys_*:count"),
        Control::TracerRemove("other".into()),
        Control::TracerRemove("counts".into()),
        Control::TracerList,
        Control::EventAdd("sched:sched_switch".into()),
        Control::EventAdd("sched:*".into()),
        Control::EventRemove("sched:*".into()),
        Control::EventList,
        trigger("start", "vfs_read:2"),
        trigger("start", "vfs_*,ksys_read"),
        trigger("stop", "vfs_read"),
        trigger("stop", "ksys_read:3 if pid == 1"),
        trigger("mark", "vfs_read,vfs_fsync:2 if count > 9"),
        trigger("mark", "ksys_read"),
        trigger("mark", "vfs_read,ksys_read:2 if retval < 0 || duration > 1ms"),
        trigger("start", "vfs_read if retval != 0 && pid == 1"),
        trigger("stop", "vfs_*:3 if duration > 1ms && pid == 1"),
        tracer("ends=vfs_r* if duration > 1ms"),
        Control::TracerRemove("ends".into()),
        trigger("snapshot", "vfs_read"),
        trigger("end", "ksys_read:4"),
        trigger("end", "nosuchfunction"),
        Control::TriggerRemove(1),
        Control::TriggerRemove(2),
        Control::TriggerRemove(3),
        Control::TriggerList,
        Control::LatencyStart { kind: Kind::Wakeup, over: None },
        Control::LatencyStop { json: false },
        Control::LatencyShow { json: true },
        Control::Pause,
        Control::Resume,
        Control::Clear,
        Control::Snapshot,
        Control::Status,
        Control::Table,
        Control::Mark { ticks: Some(u64::MAX), text: "when?".into() },
        Control::Mark { ticks: None, text: String::new() },
        Control::Stop,
    ];
    prop::sample::select(all)
}

/// Some of what may happen at any moment; the guest may be gone then.
fn anything() -> impl Strategy<Value = Vec<Step>> {
    let ends = [ExitReason::PowerOff, ExitReason::Reset, ExitReason::TripleFault];
    let functions = [
        "panic",
        "oops_enter",
        "machine_restart",
        "machine_kexec",
        "rest_init",
        "ftrace_free_init_mem",
    ];
    let vcpus = prop::sample::select(vec![vec![0], vec![1], vec![0, 1], vec![1, 0]]);
    let calls = (prop::sample::select(functions.to_vec()), vcpus);
    let calls = calls.prop_map(|(function, vcpus)| Step::Calls(function, vcpus)).boxed();
    let counted = prop::sample::select(vec!["vfs_read", "ksys_read", "vfs_fsync"]);
    let counts =
        (counted, 0..2_usize, any::<bool>()).prop_map(|(function, vcpu, ends)| match ends {
            true => Step::Ends(function, vcpu),
            false => Step::Counts(function, vcpu),
        });
    let asks = prop::collection::vec(command(), 1..4).prop_map(Step::Asks).boxed();
    let step = prop_oneof![
        12 => asks.clone(),
        6 => counts.clone(),
        3 => calls.clone(),
        2 => (asks.clone(), calls).prop_map(|(asks, calls)| Step::Together(vec![calls, asks])),
        // Also the removal of a trigger whose call has come already, and is attended to after that.
        2 => (asks, counts).prop_map(|(asks, counts)| Step::Together(vec![counts, asks])),
        1 => prop::sample::select(ends.to_vec()).prop_map(Step::Exits),
    ];
    prop::collection::vec(step, 0..3)
}

fn update() -> impl Strategy<Value = Vec<Step>> {
    anything().prop_map(|inside| [vec![call(BEGIN)], inside, vec![call(END)]].concat())
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let boot: Vec<_> = crate::boot().into_iter().map(|step| Just(vec![step])).collect();
    let [a, b, c, d, e] = [0, 1, 2, 3, 4].map(|number| boot[number].clone());
    let more = prop::collection::vec(prop_oneof![anything(), update()], 0..4);
    let boot = (a, anything(), b, anything(), c, d, anything(), e);
    (boot, more).prop_map(|((a, after_a, b, after_b, c, d, after_d, e), more)| {
        [a, after_a, b, after_b, c, d, after_d, e, more.concat()].concat()
    })
}

// Whatever comes when: the guest gets its code back, whoever asks gets an answer, nobody stays parked while
// the run goes on, the stream has one end.
#[test]
fn anything_may_happen() {
    let subject = Subject::new("x86_64-6.12");
    // More of them: PROPTEST_CASES=2000.
    let cases = std::env::var_os("PROPTEST_CASES").map_or(60, |_| Config::default().cases);
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let run = |steps: Vec<Step>| {
        let ran = subject.run(steps, Trouble::default());
        let what = format!("{:?}\n{}", ran.answers, ran.notes());
        prop_assert!(ran.outcome.is_ok());
        prop_assert_eq!(&ran.outcome().anomaly, &None, "{}", what);
        prop_assert!(ran.answers.iter().all(|answer| !answer.is_empty()), "{}", what);
        // Its end may come before that of the guest.
        let is_stopped =
            ran.answers.iter().any(|answer| answer.starts_with("OK the trace has ended"));
        let exit = if is_stopped { Exit::Stopped } else { ran.outcome().summary.exit };
        prop_assert_eq!(exit_of(&ran), exit, "{}", what);
        subject.assert_restored(&ran, &what);
        Ok(())
    };
    TestRunner::new(config).run(&steps(), run).unwrap();
}
