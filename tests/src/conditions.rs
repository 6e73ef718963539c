//! Conditions that are evaluated in the guest: what must hold on every kernel.

use serde_json::Value;

use crate::args::json;
use crate::cases::{Guests, function, value};
use crate::trace::missing;

/// The functions of each tracer.
const OF: &str = "vfs_read,vfs_write,vfs_open";

/// A tracer, its condition, and which calls that means.
type Under = (&'static str, &'static str, fn(&Value) -> bool);
/// The same by the parameter count.
type ByCount = (&'static str, &'static str, fn(u64) -> bool);

/// Tracers under a condition, each with what it is of the calls that another tracer of the same run
/// has, which records all of them with their arguments.
const CONDITIONS: [Under; 6] = [
    ("first", "pid == 1", |call| call["pid"] == 1),
    ("others", "!(pid == 1) && pid > 1", |call| call["pid"] != 1),
    ("any", "cpu < 2 || pid < 0", |_| true),
    ("none", "cpu >= 2 && pid > 0", |_| false),
    ("writing", "caller == ksys_write", |call| call["caller"] == "ksys_write"),
    ("elsewhere", "caller != ksys_write", |call| call["caller"] != "ksys_write"),
];
/// The same of functions that have a parameter.
const BY_COUNT: [ByCount; 4] = [
    ("big", "count > 4K", |count| count > 4096),
    ("small", "count <= 0x1000", |count| count <= 4096),
    ("odd", "count & 1 && pos", |count| count & 1 == 1),
    ("this", "count == 5000 && pid != 1", |count| count == 5000),
];

fn by<'a>(lines: &'a [Value], tracer: &'a str) -> impl Iterator<Item = &'a Value> + Clone {
    lines.iter().filter(move |line| line["event"] == "entry" && line["tracer"] == tracer)
}

/// Calls by task, in the order in which it made them: two records of one call may have been written
/// on two CPUs.
fn calls<'a>(lines: impl Iterator<Item = &'a Value>) -> Vec<(u64, String, String)> {
    let text = |line: &Value, key: &str| line[key].as_str().unwrap_or_default().to_owned();
    let one = |line: &Value| {
        (line["pid"].as_u64().unwrap(), text(line, "function"), text(line, "caller"))
    };
    let mut calls: Vec<_> = lines.map(one).collect();
    calls.sort_by_key(|call| call.0);
    calls
}

/// Tracers whose conditions only the end of a call decides, and one that records all ends.
fn of_ends(name: &str) -> [String; 6] {
    let [close, sleep] = ["close", "nanosleep"].map(|call| function(name, call));
    [
        format!("ended={OF},{close},{sleep}:retval"),
        format!("failed={OF},{close},{sleep} if retval < 0"),
        format!("every={OF},{close},{sleep} if duration >= 0ns"),
        format!("never={OF},{close},{sleep} if duration > 1000s || duration < 0ns"),
        format!("slow={close},{sleep} if comm == vmtrace-g* && duration > 100ms"),
        "whole=vfs_read,vfs_write if count == 5000 && retval == 5000 && pid > 1".to_owned(),
    ]
}

/// A call that failed and is not there looks as if all had gone well; one that did not hides it.
fn ends_are_those_that_are_meant(lines: &[Value], err: &str, pid: u32, name: &str) {
    let of = |tracer: &'static str| {
        let own = lines.iter().filter(move |line| line["tracer"] == tracer);
        own.filter(|line| line["event"] == "return")
    };
    for tracer in ["failed", "every", "never", "slow", "whole"] {
        let entry = |line: &&Value| line["tracer"] == tracer && line["event"] == "entry";
        assert_eq!(lines.iter().find(entry), None, "{name}: {tracer}");
    }
    let is_failed = |line: &&Value| line["value"].as_i64().is_some_and(|value| value < 0);
    let failed: Vec<_> = of("failed").collect();
    assert!(failed.iter().all(is_failed), "{name}: {failed:?}");
    // Without a place for its beginning nobody knows how long such a call took.
    assert!(failed.iter().all(|line| line["duration_ns"].is_null()), "{name}: {failed:?}");
    let own = |line: &&Value| line["pid"] == pid;
    let closes = |line: &&Value| own(line) && line["value"] == -9;
    assert_eq!(failed.iter().copied().filter(closes).count(), 25, "{name}");
    // What is left by a jump returns what another function does.
    if !err.contains("left by a jump") {
        assert_eq!(calls(failed.into_iter()), calls(of("ended").filter(is_failed)), "{name}");
    }
    let ended: Vec<_> = of("ended").filter(own).collect();
    let every: Vec<_> = of("every").filter(own).collect();
    assert_eq!(calls(every.iter().copied()), calls(ended.iter().copied()), "{name}");
    assert_eq!(of("never").count(), 0, "{name}");
    // Of what took nearly as long the two may not agree.
    let took = |line: &Value| line["duration_ns"].as_u64().unwrap_or(0);
    let slow: Vec<_> = of("slow").collect();
    assert!(slow.iter().all(|line| took(line) >= 100_000_000 && own(line)), "{name}: {slow:?}");
    let sleeps = |line: &&&Value| line["function"].as_str().unwrap().contains("nanosleep");
    let paired = ended.iter().filter(sleeps).filter(|line| took(line) > 101_000_000).count();
    let short = ended.iter().filter(sleeps).filter(|line| took(line) < 99_000_000).count();
    assert!(slow.len() >= 3 && slow.len() >= paired, "{name}: {slow:?}");
    assert!(slow.len() + short <= 7, "{name}: {slow:?}, {short} short ones");
    let whole: Vec<_> = of("whole").filter(own).collect();
    assert_eq!(whole.len(), 40, "{name}");
    assert!(whole.iter().all(|line| line["value"] == 5000 && took(line) > 0), "{name}");
}

impl Guests {
    /// A call that is left out although it is meant looks as if it had not been made, and one that
    /// is not meant hides those that are.
    pub fn conditions_hold_of_exactly_the_calls_that_are_meant(&self, name: &str) {
        let mut tracers = vec![format!("all={OF}:args")];
        tracers.extend(CONDITIONS.iter().map(|(name, text, _)| format!("{name}={OF} if {text}")));
        let counted = |(name, text, _): &ByCount| format!("{name}={OF}:args if {text}");
        tracers.extend(BY_COUNT.iter().map(counted));
        tracers.push(format!("mine={OF}:args if comm == vmtrace-g*"));
        tracers.push(format!("theirs={OF}:args if comm != \"vmtrace-g????\""));
        tracers.push(format!("group={OF} if tgid == 1"));
        tracers.push(format!("graph={OF}:graph if pid == 1"));
        let mut args: Vec<&str> = tracers.iter().flat_map(|one| ["--tracer", one]).collect();
        args.extend(["--cpus", "2", "--event", "sched:sched_process_exec"]);
        let of_ends = of_ends(name);
        args.extend(of_ends.iter().flat_map(|one| ["--tracer", one]));
        let (finished, trace) = self.run(name, "files ends", &args);
        let err = finished.err();
        let pid = value(&finished, "pid ");
        let lines = json(&trace);
        ends_are_those_that_are_meant(&lines, &err, pid, name);
        assert_eq!(missing(&trace.summary), 0, "{name}");

        let all: Vec<&Value> = by(&lines, "all").collect();
        for (tracer, text, meant) in CONDITIONS {
            let expected = calls(all.iter().copied().filter(|call| meant(call)));
            assert_eq!(calls(by(&lines, tracer)), expected, "{name}: {text}");
            assert!(expected.is_empty() == (tracer == "none"), "{name}: {text}");
        }
        let count = |call: &Value| call["args"]["count"].as_u64();
        for (tracer, text, meant) in BY_COUNT {
            let meant = |call: &&Value| count(call).is_some_and(meant);
            let found: Vec<&Value> = by(&lines, tracer).collect();
            assert!(!found.is_empty() && found.iter().all(meant), "{name}: {text}");
            // Those without a position come from elsewhere.
            let also = |call: &&Value| tracer != "odd" || call["args"]["pos"] != "0x0";
            let expected = all.iter().copied().filter(meant).filter(also);
            assert_eq!(calls(found.into_iter()), calls(expected), "{name}: {text}");
        }
        // vfs_open has no count: that is said, and what else is asked for is traced.
        assert!(err.contains("vfs_open"), "{name}: {err}");

        // Names of tasks are read later, when one may have another: only those of the workload.
        let workload = |call: &&Value| call["pid"] == pid && count(call) == Some(5000);
        assert_eq!(by(&lines, "mine").filter(workload).count(), 40, "{name}");
        assert_eq!(by(&lines, "theirs").filter(workload).count(), 0, "{name}");
        let both = by(&lines, "mine").chain(by(&lines, "theirs"));
        assert_eq!(calls(both).len(), all.len(), "{name}");

        // With its threads; the workload is another process.
        let group = by(&lines, "group");
        assert!(group.clone().all(|call| call["pid"] != pid), "{name}");
        let first = group.filter(|call| call["pid"] == 1).count();
        assert_eq!(first, all.iter().filter(|call| call["pid"] == 1).count(), "{name}");

        let first = |event| {
            let own = lines.iter().filter(move |line| line["tracer"] == "graph");
            own.filter(move |line| line["event"] == event)
        };
        assert!(first("entry").chain(first("return")).all(|line| line["pid"] == 1), "{name}");
        let (entries, returns) = (first("entry").count(), first("return").count());
        assert_eq!(entries, all.iter().filter(|call| call["pid"] == 1).count(), "{name}");
        // The last one may not have returned when the guest went off.
        assert!((entries - 1..=entries).contains(&returns), "{name}: {returns} of {entries}");
    }

    /// Who asks for one task alone gets it alone, of events and functions.
    pub fn one_task_alone_is_traced(&self, name: &str) {
        let options = ["-f", "vfs_*", "--event", "sched:sched_switch", "--comm", "vmtrace-g*"];
        let (finished, trace) = self.run(name, "files", &options);
        let pid = value(&finished, "pid ");
        let lines = json(&trace);
        let switches = lines.iter().filter(|line| line["name"] == "sched:sched_switch");
        assert!(switches.clone().count() > 0, "{name}");
        for line in switches {
            let comm = line["fields"]["prev_comm"].as_str().unwrap_or_default();
            assert!(comm.starts_with("vmtrace-g"), "{name}: {line}");
        }
        let entries = lines.iter().filter(|line| line["event"] == "entry");
        assert!(entries.clone().filter(|line| line["pid"] == pid).count() > 40, "{name}");
        assert!(entries.clone().all(|line| line["pid"] != 1), "{name}");
    }
}
