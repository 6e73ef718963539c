//! Triggers: actions at calls that the guest itself counts down to.

use std::fs;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use vmtrace::stream::{Exit, MarkKind};

use crate::args::json;
use crate::cases::{Guests, function, trouble, value};
use crate::live::{LiveGuest, vmtrace};
use crate::trace::{Trace, WORKLOAD, arch_of, boot, missing, syscall};
use crate::{within, workload};

/// Calls of the workload, all of them on one vCPU.
const CALLS: usize = 1000;

impl Guests {
    /// A switch that comes a call early or late is not at the call that somebody looks for: exactly
    /// those between must be there, with the very first and last.
    pub fn tracing_begins_and_ends_at_the_very_call(&self, name: &str) {
        let call = function(name, "getppid");
        let triggers = [
            format!("--start-at={call}:101"),
            format!("--mark-at={call}:150"),
            format!("--stop-at={call}:200 if cpu == 1"),
            format!("--start-at={call}:901"),
            format!("--mark-at={call}:1000 if cpu == 0"),
        ];
        let mut args: Vec<&str> = triggers.iter().map(String::as_str).collect();
        args.extend(["-f", &call, "-f", "vfs_*", "--cpus", "2"]);
        let (finished, trace) = self.run(name, &format!("getppid {CALLS} 1"), &args);
        let (err, pid) = (finished.err(), value(&finished, "pid "));
        assert_eq!(trouble(&err), None, "{name}");
        // Its first name may be another one.
        let is_it = |name: &str| name.ends_with("sys_getppid");
        let own = trace.entries.iter().filter(|e| e.pid == pid && is_it(&e.function));
        assert_eq!(own.count(), 100 + 100, "{name}: {err}");
        trace.check_order().unwrap();
        assert_eq!(missing(&trace.summary), 0, "{name}");
        // One trigger has not come, and says so.
        let [note] = &trace.summary.notes[..] else { panic!("{name}: {:?}", trace.summary.notes) };
        assert!(note.contains(&*triggers[4].replacen('=', " ", 1)), "{name}: {note}");
        let notes = trace.marks(MarkKind::Note).unwrap();
        let fired = |trigger: &str| {
            let told = |note: &&String| {
                let rest = note.strip_prefix(&*trigger.replacen('=', " ", 1));
                let function = rest.and_then(|rest| rest.strip_prefix(": "));
                function.and_then(|rest| rest.strip_suffix(" on vCPU 1")).is_some_and(is_it)
            };
            notes.iter().filter(told).count()
        };
        let fired: Vec<usize> = triggers.iter().map(|one| fired(one)).collect();
        assert_eq!(fired, [1, 1, 1, 1, 0], "{name}: {notes:?}");
        self.a_run_ends_at_a_call(name, &call);
    }

    /// Who looks for the call that fails, or takes too long, finds another one otherwise; and a stop there that loses
    /// what the function returns is seen by the guest's own program.
    pub fn triggers_see_how_calls_end(&self, name: &str) {
        let [close, sleep] = ["close", "nanosleep"].map(|call| function(name, call));
        let triggers = [
            format!("--mark-at={close}:13 if retval == -9 && comm == vmtrace-g*"),
            format!("--mark-at={sleep}:2 if duration > 100ms && comm == vmtrace-g*"),
            format!("--mark-at={close} if retval < -1000"),
            format!("--stop-at={sleep}:3 if retval == 0 && duration > 100ms && comm == vmtrace-g*"),
        ];
        let tracer = format!("{close},{sleep}:retval");
        let mut args: Vec<&str> = triggers.iter().map(String::as_str).collect();
        args.extend(["--tracer", &tracer, "--cpus", "2"]);
        let (finished, trace) = self.run(name, "files ends", &args);
        let (err, pid) = (finished.err(), value(&finished, "pid "));
        assert_eq!((trouble(&err), missing(&trace.summary)), (None, 0), "{name}");
        let never = &*triggers[2].replacen('=', " ", 1);
        let notes = &trace.summary.notes;
        let is_told = |note: &String| note.starts_with(never) && note.contains("no such call");
        assert!(notes.iter().any(is_told), "{name}: {notes:?}");
        let lines = json(&trace);
        // How many of a function's calls had ended at the mark of a trigger, and in all.
        let ended = |trigger: &str, function: &str, value: i64| {
            let trigger = trigger.replacen('=', " ", 1);
            let is_it = |line: &Value| {
                let text = line["text"].as_str().unwrap_or_default();
                line["event"] == "mark" && text.starts_with(&format!("{trigger}: {function} on "))
            };
            let at: Vec<usize> = (0..lines.len()).filter(|&at| is_it(&lines[at])).collect();
            let [at] = at[..] else { panic!("{name}: {trigger}: {at:?}") };
            let own = |line: &&Value| {
                let of = line["function"] == function && line["pid"] == pid;
                of && line["event"] == "return" && line["value"] == value
            };
            [&lines[..at], &lines[..]].map(|lines| lines.iter().filter(own).count())
        };
        assert_eq!(ended(&triggers[0], &close, -9), [12, 25], "{name}");
        assert_eq!(ended(&triggers[1], &sleep, 0), [4, 6], "{name}");
        assert_eq!(ended(&triggers[3], &sleep, 0), [5, 6], "{name}: the very call is the last");
    }

    /// A flight recorder that is written at a call has what was before it, and goes on.
    fn a_run_ends_at_a_call(&self, name: &str, call: &str) {
        let (snapshot, end) = (format!("--snapshot-at={call}:500"), format!("--end-at={call}:900"));
        let run = format!("{WORKLOAD} getppid {CALLS} 0");
        // In rings that are not where others are, each larger than what a guest is given by itself.
        let mut args = vec!["-f", call, "--overflow", "overwrite", "--buffer", "16M"];
        args.extend([&*snapshot, &*end]);
        args.extend(["--end-code", "77", "--cpus", "2", "--add", WORKLOAD, "--run", &run]);
        let (finished, trace) = boot(&self.host, name, &args).unwrap();
        let err = finished.err();
        assert_eq!(
            (finished.end.code, trace.summary.exit),
            (Some(77), Exit::Stopped),
            "{name}: {err}"
        );
        assert!(err.contains(&format!("ended by --end-at {call}:900: ")), "{err}");
        assert_eq!(trace.summary.notes, [] as [&str; 0], "{name}");
        // That of the end has not gone on.
        let pid = value(&finished, "pid ");
        let of = |trace: &Trace| trace.entries.iter().filter(|e| e.pid == pid).count();
        assert_eq!((of(&trace), missing(&trace.summary)), (899, 0), "{name}");
        let notes = trace.marks(MarkKind::Note).unwrap();
        let taken = notes.iter().find_map(|note| {
            note.strip_prefix("snapshot: ")?.strip_suffix(" records")?.parse::<usize>().ok()
        });
        let others = trace.entries.len() - 899;
        assert!(taken.is_some_and(|taken| (499..=499 + others).contains(&taken)), "{notes:?}");
    }
}

/// `vmtrace ctl SOCKET trigger`, which must end like that; what it says.
fn ctl(socket: &Path, code: i32, args: &[&str]) -> String {
    let out = vmtrace("ctl", socket, &[&["trigger"], args].concat());
    let said = [out.stdout, out.stderr].concat();
    let said = String::from_utf8(said).unwrap();
    assert_eq!(out.status.code(), Some(code), "{args:?}: {said}");
    said
}

/// Numbers, calls left, and whether they have fired.
fn listed(socket: &Path) -> Vec<(u64, u64, bool)> {
    let list: Value = serde_json::from_str(&ctl(socket, 0, &["list", "--json"])).unwrap();
    let one = |it: &Value| {
        (it["id"].as_u64().unwrap(), it["left"].as_u64().unwrap(), it["fired"].as_bool().unwrap())
    };
    list["triggers"].as_array().unwrap().iter().map(one).collect()
}

fn patched(socket: &Path) -> u64 {
    let out = vmtrace("ctl", socket, &["status", "--json"]);
    let status: Value = serde_json::from_slice(&out.stdout).unwrap();
    status["sites"]["patched"].as_u64().unwrap()
}

/// Has the guest run this.
fn run(socket: &Path, args: &[&str]) -> String {
    let out = vmtrace("run", socket, args);
    assert!(out.status.success(), "{args:?}: {out:?}");
    String::from_utf8(out.stdout).unwrap()
}

/// Calls of the workload on a CPU; its process.
fn getppid(socket: &Path, calls: &str, cpu: &str) -> u32 {
    let said = run(socket, &[WORKLOAD, "getppid", calls, cpu]);
    said.lines().find_map(|line| line.strip_prefix("pid ")?.parse().ok()).unwrap()
}

/// A trigger that is added while the guest runs counts from then on, and comes at exactly the call that was asked for:
/// a user who has found out live where to look sees another call otherwise. One that is removed leaves nothing.
pub fn of_a_running_guest(kernel: &str) {
    let workload = workload(arch_of(kernel).unwrap()).unwrap();
    let mut guest = LiveGuest::boot(kernel, &["--cpus", "2", "--add", workload.to_str().unwrap()]);
    let socket = &guest.at("socket");
    guest.wait_until(|| vmtrace("run", socket, &["true"]).status.success());
    let call = &*syscall(kernel, "getppid").unwrap();
    // Before anybody waits for a call.
    let first = getppid(socket, "7", "1");

    let before = patched(socket);
    let added = ctl(socket, 0, &["add", "stop", &format!("{call}:101")]);
    assert!(added.starts_with(&format!("trigger 1 added (stop at {call}:101): ")), "{added}");
    ctl(socket, 0, &["add", "mark", &format!("{call}:150 if cpu == 1")]);
    // The call that starts to trace is made again, and this one must count it once.
    ctl(socket, 0, &["add", "start", &format!("{call}:700")]);
    ctl(socket, 0, &["add", "start", &format!("{call}:181")]);
    assert_eq!(patched(socket), before, "a site of its own");
    let begun = getppid(socket, "200", "0");
    let all = [(1, 0, true), (2, 150, false), (3, 500, false), (4, 0, true)];
    assert_eq!(listed(socket), all);
    let marked = [getppid(socket, "149", "1"), getppid(socket, "33", "0")];
    assert_eq!(listed(socket)[1], (2, 1, false));
    let last = getppid(socket, "1", "1");
    assert_eq!(listed(socket)[1], (2, 0, true));
    let list = ctl(socket, 0, &["list"]);
    let line = format!("2: mark at {call}:150 if cpu == 1 (1 function): fired");
    assert!(list.lines().any(|it| it == line), "{list}");
    for id in ["1", "2", "3", "4"] {
        assert!(ctl(socket, 0, &["remove", id]).starts_with(&format!("trigger {id} removed: ")));
    }
    assert_eq!((listed(socket), patched(socket)), (Vec::new(), before));

    // By an argument, of functions that nobody traces.
    let spec = "vfs_write,vfs_fsync:2 if count == 4711";
    let added = ctl(socket, 0, &["add", "mark", spec]);
    assert!(added.contains("vfs_fsync"), "a function without a count: {added}");
    assert_eq!(patched(socket), before + 1);
    let written = ["dd", "if=/dev/zero", "of=/tmp/x", "bs=4711", "count=1"];
    run(socket, &written);
    assert_eq!(listed(socket), [(5, 1, false)]);
    run(socket, &written);
    assert_eq!(listed(socket), [(5, 0, true)]);
    ctl(socket, 0, &["remove", "5"]);
    assert_eq!(patched(socket), before);

    // Where functions are left.
    ctl(socket, 0, &["add", "mark", &format!("{call}:3 if retval > 0 && duration < 1000s")]);
    ctl(socket, 0, &["add", "mark", &format!("{call} if retval < 0")]);
    let mut left = vec![getppid(socket, "2", "0")];
    assert_eq!(listed(socket), [(6, 1, false), (7, 1, false)]);
    left.push(getppid(socket, "1", "1"));
    assert_eq!(listed(socket), [(6, 0, true), (7, 1, false)]);
    left.push(getppid(socket, "4", "1"));
    for id in ["6", "7"] {
        ctl(socket, 0, &["remove", id]);
    }
    assert_eq!((listed(socket), patched(socket)), (Vec::new(), before));

    let refused = |code, args: &[&str], words: [&str; 2]| {
        let said = ctl(socket, code, args);
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
    };
    refused(1, &["add", "mark", "vfs_raed"], ["\"vfs_raed\"", "near: vfs_read"]);
    refused(1, &["add", "mark", "vfs_read if cuont == 1"], ["cuont", "count"]);
    refused(1, &["add", "snapshot", call], ["flight recorder", "--overflow overwrite"]);
    refused(1, &["remove", "5"], ["no trigger 5", "trigger list"]);
    refused(2, &["add", "exec", "vfs_read -- true"], ["boot --exec-at", "cannot start programs"]);
    refused(2, &["add", "mark", "vfs_read if pid = 1"], ["at character 5", "= 1"]);
    assert_eq!((listed(socket), patched(socket)), (Vec::new(), before));

    // What is measured when the run ends is told at its end.
    let measured = vmtrace("ctl", socket, &["latency", "start", "wakeup"]);
    assert!(measured.status.success(), "{measured:?}");
    run(socket, &["sh", "-c", "for i in 1 2 3 4 5; do usleep 1000; done"]);
    ctl(socket, 0, &["add", "end", &format!("{call}:5")]);
    let out = vmtrace("run", socket, &[WORKLOAD, "getppid", "10", "0"]);
    assert_eq!(out.status.code(), Some(125), "the guest went on: {out:?}");
    let ended = guest.end();
    let said = ended.said();
    assert_eq!(ended.status.code(), Some(0), "{said}");
    assert!(said.contains(&format!("ended by trigger 8 (end at {call}:5): ")), "{said}");
    assert_eq!(trouble(&said), None, "{said}");
    let page = said.split_once("latency wakeup, which was measured to the end of the trace:\n");
    let page = page.map(|(_, page)| page).expect(&said);
    assert!(page.starts_with("# tracer: wakeup\n") && page.contains("\n# latency: "), "{page}");
    // The same as who reads the trace finds.
    let report = vmtrace("report", &guest.at("trace"), &["--latency", "wakeup"]);
    let report = String::from_utf8(report.stdout).unwrap();
    let longest = |text: &str| {
        let line = text.lines().find(|line| line.starts_with("# latency: ")).expect(text);
        line.split_once(',').expect(line).0.to_owned()
    };
    assert_eq!(longest(page), longest(&report), "{page}\n{report}");

    let read = || Trace::read(fs::read(guest.at("trace")).unwrap());
    within(Duration::from_secs(20), || read().is_ok());
    let trace = read().unwrap();
    let of = |pid| trace.entries.iter().filter(|entry| entry.pid == pid).count();
    let [one, other] = marked;
    let calls = [first, begun, one, other, last].map(of);
    assert_eq!((calls, missing(&trace.summary)), ([7, 101 + 20, 149, 33, 1], 0), "{said}");
    assert_eq!(left.into_iter().map(of).collect::<Vec<_>>(), [2, 1, 4], "{said}");
    assert_eq!(trace.summary.notes, [] as [&str; 0]);
    let notes = trace.marks(MarkKind::Note).unwrap();
    let fired: Vec<_> = notes.iter().filter_map(|note| note.strip_prefix("trigger ")).collect();
    let at = |text: &str, cpu: &str| {
        let is_it = |note: &&&str| note.starts_with(text) && note.ends_with(cpu);
        fired.iter().filter(is_it).count()
    };
    let all = [
        at("1 (stop at ", " on vCPU 0"),
        at("4 (start at ", " on vCPU 0"),
        at("2 (mark at ", " on vCPU 1"),
        at("5 (mark at vfs_write,vfs_fsync:2 if count == 4711): vfs_write", ""),
        at("6 (mark at ", " on vCPU 1"),
        at("8 (end at ", " on vCPU 0"),
    ];
    assert_eq!((all, fired.len()), ([1; 6], 6), "{notes:?}");
    trace.check_order().unwrap();
}
