//! Tripwires that are hit when their purpose is over, and what is left of them when tracing ends.

use crate::anew::leaves;
use crate::machine::{FakeVm, Ran, Step, Trouble, run};
use crate::{BEGIN, END, ENDS, Subject, boot, call, tracing, trigger};
use vmtrace::serve::Control;

const ON: &str = "x86_64-6.12";

/// Both vCPUs come to it before anybody attends to the first.
fn both(function: &'static str) -> Step {
    Step::Calls(function, vec![0, 1])
}

fn stop() -> Step {
    Step::Asks(vec![Control::Stop])
}

/// A guest that is traced in every way in which it can stop: with a module, a trigger and an event.
fn busy() -> Vec<Step> {
    let asks = vec![trigger("mark", "vfs_fsync"), Control::EventAdd("sched:sched_switch".into())];
    let comes = [Step::Does(FakeVm::module_comes), call("do_init_module")];
    [boot(), comes.to_vec(), vec![Step::Asks(asks)]].concat()
}

/// Traces a guest that waits for `--from vfs_read`.
fn run_from(subject: &Subject, steps: Vec<Step>) -> Ran {
    let mut tracing = tracing(subject.kernel());
    tracing.from = subject.kernel().site_of("vfs_read");
    assert!(tracing.from.is_some());
    run(subject.fake.again(), tracing, steps, Trouble::default())
}

/// The second run is the first one but for a vCPU that came late to a tripwire: it goes on, and the guest has not been
/// paused for it.
fn assert_goes_on([first, second]: [&Ran; 2], what: &str) {
    let what = format!("{what}: {:?}\n{}", second.answers, second.notes());
    assert_eq!(second.released(), first.released() + 1, "{what}");
    assert_eq!(second.vm.pauses(), first.vm.pauses(), "{what}");
    assert_eq!(second.outcome().anomaly, first.outcome().anomaly, "{what}");
    assert_eq!(second.outcome().exit, first.outcome().exit, "{what}");
    assert_eq!(second.outcome().summary.sites, first.outcome().summary.sites, "{what}");
    assert_eq!(second.vm.traps(), first.vm.traps(), "{what}");
}

// Each pause is time that the guest loses, and none is needed to see that the first vCPU's event has done it all.
#[test]
fn the_second_vcpu_at_a_tripwire_costs_no_pause() {
    let subject = Subject::new(ON);
    for function in ["early_trace_init", "rest_init", "ftrace_free_init_mem"] {
        let mut steps = boot();
        let is_it = |it: &Step| matches!(it, Step::Calls(called, _) if *called == function);
        let place = steps.iter().position(is_it).unwrap();
        let one = subject.run(steps.clone(), Trouble::default());
        steps[place] = both(function);
        let two = subject.run(steps, Trouble::default());
        assert_goes_on([&one, &two], function);
        subject.assert_restored(&two, function);
    }
    let told = ["panic", "oops_enter", "ftrace_bug", "machine_restart", "emergency_restart"];
    for function in told.into_iter().chain(["machine_kexec"]) {
        let [one, two] = [call(function), both(function)]
            .map(|last| subject.run([boot(), vec![last]].concat(), Trouble::default()));
        assert_goes_on([&one, &two], function);
        subject.assert_restored(&two, function);
    }
}

// The site of `--from` is a tripwire first and then called: a vCPU that stood there must begin again with the call, and
// sites must not be taken twice.
#[test]
fn two_vcpus_may_call_the_function_that_is_waited_for() {
    let subject = Subject::new(ON);
    // Before and after alternatives are patched, and together with that.
    for many in [2, 4, 5] {
        let [before, after] = [&boot()[..many], &boot()[many..]].map(<[Step]>::to_vec);
        let is_held = Step::Does(|vm| {
            let site = vm.fake.kernel.site_of("vfs_read").unwrap();
            assert_eq!(vm.fake.bytes(site)[0], 0xe8);
        });
        let [one, two] = [call("vfs_read"), both("vfs_read")].map(|first| {
            let steps = [before.clone(), vec![first, is_held.clone()], after.clone()];
            run_from(&subject, steps.concat())
        });
        let what = format!("after {many} steps");
        assert_goes_on([&one, &two], &what);
        assert_eq!((two.outcome().summary.sites.patched, two.notes().as_str()), (3, ""), "{what}");
        subject.assert_restored(&two, &what);
    }
    // One that comes when nobody waits any more.
    let [never, late] = [vec![], vec![Step::Calls("vfs_read", vec![1])]]
        .map(|late| run_from(&subject, [boot(), vec![ends_with(stop(), late)]].concat()));
    assert_goes_on([&never, &late], "late");
    assert!(late.notes().contains("vfs_read was never called"), "{}", late.notes());
    subject.assert_restored(&late, "late");
}

/// The end of tracing, and what comes before anybody has attended to that.
fn ends_with(end: Step, late: Vec<Step>) -> Step {
    Step::Together([vec![end], late].concat())
}

// Whoever comes to a tripwire while tracing ends goes on as in a guest that is not traced. If it was taken for one of
// the next thing that is armed, or for one that nobody knows, the guest would stand still or tracing would be said to
// have failed.
#[test]
fn a_tripwire_may_be_hit_when_its_purpose_is_over() {
    let subject = Subject::new(ON);
    let boot = boot();
    let updates = [boot.clone(), vec![call(BEGIN)]].concat();
    let stops = || vec![stop()];
    let all = || vec![stop(), call("ftrace_bug"), call("machine_kexec")];
    let lates: [(&str, Vec<Step>, Vec<Step>); 9] = [
        ("early_trace_init", boot[..1].to_vec(), stops()),
        ("rest_init", boot[..3].to_vec(), vec![stop(), call("ftrace_bug")]),
        ("ftrace_free_init_mem", boot[..4].to_vec(), all()),
        ("machine_kexec", boot.clone(), vec![stop(), call("ftrace_bug")]),
        ("panic", boot.clone(), vec![call("machine_kexec")]),
        (BEGIN, busy(), all()),
        (END, updates, all()),
        ("do_init_module", busy(), all()),
        ("tracepoint_probe_unregister", busy(), all()),
    ];
    for (function, before, ends) in lates {
        for end in ends {
            let what = format!("{function}, {end:?}");
            let late = Step::Calls(function, vec![1]);
            let [never, late] = [vec![], vec![late]].map(|late| {
                let last = vec![ends_with(end.clone(), late)];
                subject.run([before.clone(), last].concat(), Trouble::default())
            });
            assert_goes_on([&never, &late], &what);
            assert_eq!(late.notes(), never.notes(), "{what}");
            subject.assert_restored(&late, &what);
        }
    }
    for end in all() {
        let what = format!("a program, {end:?}");
        let [never, late] = [vec![], vec![Step::Counts("vfs_fsync", 1)]].map(|late| {
            subject.run([busy(), vec![ends_with(end.clone(), late)]].concat(), Trouble::default())
        });
        assert_goes_on([&never, &late], &what);
        subject.assert_restored(&late, &what);
    }
}

// A trap that is left stops the guest for nothing, or is a tripwire of the next kernel's at the same address that
// nobody laid. Only those that tell of the guest's end outlive tracing, and they go with their kernel.
#[test]
fn whatever_ends_tracing_takes_the_tripwires_away() {
    let subject = Subject::new(ON);
    let is_busy = Step::Does(|vm| {
        // Of updates two, of modules, of tracepoints, of the trigger, and where the kernel would leave.
        assert!(vm.traps().len() > ENDS.len() + 6, "{:x?}", vm.traps());
    });
    let busy = [busy(), vec![is_busy]].concat();
    let boot = boot();
    let told = ENDS.len();
    // Nobody is attached to what has not come so far, nor is it known then how that ends.
    for many in 0..=boot.len() {
        let left = if many < 2 { 0 } else { told };
        for end in [Some(stop()), None] {
            let steps = [boot[..many].to_vec(), end.clone().into_iter().collect()].concat();
            let ran = subject.run(steps, Trouble::default());
            let what = format!("{many} steps, {end:?}: {:x?}", ran.vm.traps());
            assert_eq!(ran.vm.traps().len(), left, "{what}");
            subject.assert_restored(&ran, &what);
        }
    }
    let ends = [
        (vec![], told),
        (vec![stop()], told),
        (vec![Step::Asks(vec![trigger("end", "vfs_write")]), Step::Counts("vfs_write", 0)], told),
        // Each has told once.
        (vec![call("ftrace_bug")], told - 1),
        (vec![call("panic"), call("oops_enter")], told - 2),
        (vec![call("machine_kexec")], 0),
        // Also of a kernel that is not traced any more.
        (vec![call("ftrace_bug"), call("panic"), stop()], told - 2),
    ];
    for (end, left) in ends {
        let what = format!("{end:?}");
        let ran = subject.run([busy.clone(), end].concat(), Trouble::default());
        let what = format!("{what}: {:x?}, {:?}\n{}", ran.vm.traps(), ran.answers, ran.notes());
        assert!(ran.answers.iter().all(|answer| answer.starts_with("OK ")), "{what}");
        assert_eq!(ran.vm.traps().len(), left, "{what}");
        subject.assert_restored(&ran, &what);
    }
}

// The second kernel has its tripwires where the first one had them. What was over in the first must not be in the
// second.
#[test]
fn what_is_over_in_one_kernel_begins_anew_in_the_next() {
    let subject = Subject::new(ON);
    let steps = |kernels: [Vec<Step>; 3]| {
        let [first, leaves, second] = kernels;
        subject.run([first, leaves, second].concat(), Trouble::default())
    };
    let twice = |step: Step| match step {
        Step::Calls(function, _) if ![BEGIN, END].contains(&function) => both(function),
        other => other,
    };
    let doubled = |steps: Vec<Step>| steps.into_iter().map(twice).collect();
    let one = steps([boot(), leaves(), boot()]);
    let two = steps([boot(), leaves(), boot()].map(doubled));
    // Three functions of each boot, and where the first kernel leaves.
    assert_eq!(two.released(), one.released() + 7, "{}", two.notes());
    assert_eq!(two.vm.pauses(), one.vm.pauses(), "{}", two.notes());
    assert_eq!(two.notes(), one.notes());
    assert_eq!(two.outcome().anomaly, None);
    assert_eq!(two.outcome().summary.sites, one.outcome().summary.sites);
    assert_eq!(two.vm.traps().len(), ENDS.len(), "{:x?}", two.vm.traps());
    subject.assert_restored(&two, "both");
}
