//! Consumers and control of a running trace, through the emulated host.

use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use vmtrace::stream::Exit;
use vmtrace_tests::cases::{assert_whole, trouble};
use vmtrace_tests::disks::noise;
use vmtrace_tests::live::{Ended, LiveGuest, unless_lost, vmtrace};
use vmtrace_tests::trace::{Entry, Trace, arch_of, missing, some, syscall};
use vmtrace_tests::{command, exits, latency, terminal, triggers, within, workload};

/// One of each architecture.
const KERNELS: [&str; 2] = ["x86_64-6.12", "riscv64-7"];

fn status(socket: &Path) -> Option<Value> {
    let out = vmtrace("ctl", socket, &["status", "--json"]);
    out.status.success().then(|| serde_json::from_slice(&out.stdout).unwrap())
}

/// Waits until the trace is in this state.
fn wait_for(guest: &mut LiveGuest, wanted: impl Fn(&Value) -> bool) {
    let socket = guest.at("socket");
    guest.wait_until(|| status(&socket).is_some_and(|status| wanted(&status)));
}

fn boot(kernel: &str, run: &str, more: &[&str]) -> LiveGuest {
    let workload = workload(arch_of(kernel).unwrap()).unwrap();
    let workload = workload.to_str().unwrap();
    let args =
        ["--cpus", "2", "-f", "vfs_*", "--returns", "vfs_*", "--add", workload, "--run", run];
    LiveGuest::boot(kernel, &[&args[..], &["--serve-guest"], more].concat())
}

fn stream(socket: &Path, to: &Path, args: &[&str]) -> Child {
    let mut command = command().unwrap();
    command
        .stdin(Stdio::null())
        .arg("stream")
        .arg(socket)
        .args(["--wait", "60", "-o"])
        .arg(to)
        .args(args);
    command.stderr(Stdio::piped()).spawn().unwrap()
}

/// A consumer that asks and never reads.
fn stuck(socket: &Path) -> UnixStream {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.write_all(b"raw\n").unwrap();
    stream
}

// The promises of the stream: a consumer that keeps up has what the file has, byte for byte,
// whatever the others do; late ones and those in the guest get their share.
#[test]
fn every_consumer_gets_what_it_should() {
    for kernel in some(&KERNELS, 0) {
        unless_lost(|| consumers(kernel));
    }
}

fn consumers(kernel: &str) {
    // All bytes that there are, more than waits anywhere.
    let (bytes, directory) = (noise(3 << 20, 7), tempfile::tempdir().unwrap());
    let file = directory.path().join("bytes");
    fs::write(&file, &bytes).unwrap();
    let run = "/vmtrace-guest stranger && /vmtrace-guest consume 20000 && sleep 3; \
               cat /no/such; cat /bytes";
    let mut guest = boot(kernel, run, &["--add", file.to_str().unwrap()]);
    let socket = guest.at("socket");
    let raw = stream(&socket, &guest.at("live.vmt"), &["--format", "raw"]);
    let mut killed = stream(&socket, &guest.at("killed"), &["--format", "raw"]);
    wait_for(&mut guest, |status| status["state"] == "tracing");
    let stuck = stuck(&socket);
    let late =
        stream(&socket, &guest.at("late.txt"), &["-f", &syscall(kernel, "getppid").unwrap()]);
    wait_for(&mut guest, |status| status["records"][0].as_u64() > Some(0));
    killed.kill().unwrap();
    killed.wait().unwrap();
    let ended = guest.end();
    let said = ended.said();
    assert_eq!(ended.status.code(), Some(0), "{said}");
    assert!(said.contains("consumed 20000"), "{said}");
    output_is_apart(&ended, &bytes);
    assert!(said.contains("stranger: only privileged processes of the guest"), "{said}");
    assert!(!socket.exists());
    for child in [raw, late] {
        let out = child.wait_with_output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    }
    let file = fs::read(guest.at("trace")).unwrap();
    assert!(file == fs::read(guest.at("live.vmt")).unwrap(), "the live stream is not the file");
    let trace = Trace::read(file).unwrap();
    let calls = trace.entries.iter().filter(|e| e.function.ends_with("sys_getppid")).count();
    assert!(calls >= 20_000 && missing(&trace.summary) == 0, "{:?}", trace.summary);
    let late = fs::read_to_string(guest.at("late.txt")).unwrap();
    let lines = late.lines().filter(|line| !line.starts_with('#')).count();
    assert!(lines >= 20_000 && !late.contains(": vfs_"), "{lines} lines");
    drop(stuck);
}

/// What a command wrote at last is there before the run ends, byte for byte, and nothing else is.
fn output_is_apart(ended: &Ended, bytes: &[u8]) {
    let (out, err) = (&ended.out, &ended.err);
    assert!(out.ends_with(bytes), "{} bytes: {err}", out.len());
    let lines = String::from_utf8_lossy(&out[..out.len() - bytes.len()]).into_owned();
    assert!(lines.contains("consumed 20000\n"), "{lines}\n{err}");
    assert!(!lines.contains("vmtrace: ") && !lines.contains("/no/such"), "{lines}");
    assert!(err.contains("/no/such: No such file") && !err.contains("consumed"), "{err}");
    assert!(!err.contains("guest's console"), "{err}");
}

// `| head -1` is an end for the command as it is anywhere, and for nothing else.
#[test]
fn a_reader_that_has_seen_enough_ends_the_command() {
    unless_lost(|| {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let run = "cat /proc/kallsyms /proc/kallsyms; echo status $? >&2; exit 3";
        let mut guest = LiveGuest::boot_to(writer.into(), directory, KERNELS[0], &["--run", run]);
        reader.read_exact(&mut [0; 100]).unwrap();
        drop(reader);
        let ended = guest.end();
        assert_eq!(ended.status.code(), Some(4), "{}", ended.err);
        // SIGPIPE.
        for said in ["\nstatus 141\n", "vmtrace: run status 3\n"] {
            assert!(ended.err.contains(said), "no {said:?} in {}", ended.err);
        }
        assert!(!ended.err.contains("panicked"), "{}", ended.err);
    });
}

// What is traced changes while the guest runs, and the stream tells of each change.
#[test]
fn a_running_trace_is_controlled() {
    for kernel in some(&KERNELS, 1) {
        unless_lost(|| control(kernel));
    }
}

fn control(kernel: &str) {
    let run = format!("/vmtrace-guest getppid 1000 0 && {}", latency::workload());
    let mut guest = boot(kernel, &run, &["--tracer", &latency::rounds(kernel)]);
    let socket = guest.at("socket");
    wait_for(&mut guest, |status| {
        let records = status["records"].as_array().unwrap();
        records.iter().filter_map(Value::as_u64).sum::<u64>() >= 1000
    });
    let ok = |args: &[&str]| {
        let out = vmtrace("ctl", &socket, args);
        assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap()
    };
    let refused = |args: &[&str]| {
        let out = vmtrace("ctl", &socket, args);
        assert_eq!(out.status.code(), Some(1), "{args:?}");
        String::from_utf8(out.stderr).unwrap()
    };
    assert!(ok(&["filter", "ksys_*", "-n", "*write"]).contains(" sites"));
    assert!(refused(&["filter", "no_such_function"]).contains("no function"));
    // Returns of what was named at boot; of others where that is not needed.
    let added = ok(&["tracer", "add", "named=vfs_write:graph"]);
    assert!(added.contains(", 1 functions: ") && added.contains(" sites"), "{added}");
    let (other, both) = ("other=ksys_write:graph", "both=vfs_read,ksys_read:graph");
    if kernel.starts_with("riscv64") {
        let refused = refused(&["tracer", "add", other]);
        assert!(refused.contains("ksys_write") && refused.contains("--returns"), "{refused}");
        let done = ok(&["tracer", "add", both]);
        assert!(done.contains("left out: 1 functions (such as ksys_read)"), "{done}");
    } else {
        assert!(!ok(&["tracer", "add", both]).contains("left out"));
    }
    // Before the pause, in which no rounds are counted.
    let rounds = latency::of_a_running_guest(kernel, &mut guest);
    ok(&["mark", "half", "way"]);
    assert!(ok(&["pause"]).contains("0 sites"));
    assert_eq!(status(&socket).unwrap()["state"], "paused");
    assert!(refused(&["pause"]).contains("already"));
    ok(&["resume"]);
    assert_eq!(status(&socket).unwrap()["state"], "tracing");
    ok(&["clear"]);
    // Whoever says something else is told so.
    let mut stream = UnixStream::connect(&socket).unwrap();
    stream.write_all(b"nonsense\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("ERR unknown request"), "{answer}");
    ok(&["stop"]);
    assert_eq!(status(&socket).unwrap()["state"], "ended");
    // The trace is whole though the guest lives.
    // Its last bytes may still be on their way out of the emulated host.
    let read = || Trace::read(fs::read(guest.at("trace")).unwrap());
    within(Duration::from_secs(20), || read().is_ok());
    let trace = read().unwrap();
    assert!(trace.summary.pauses.count >= 6, "{:?}", trace.summary);
    assert!(guest.runs(), "the guest has ended as well");
    let report = vmtrace("report", &guest.at("trace"), &[]);
    let text = String::from_utf8(report.stdout).unwrap();
    for mark in ["filter ", "user: half way", "tracing paused", "tracing resumed", "detach "] {
        assert!(text.contains(mark), "no {mark:?} in\n{text}");
    }
    guest.interrupt();
    let said = guest.end().said();
    assert!(said.contains("vmtrace: records "), "{said}");
    rounds.agree(&said, &guest.at("trace"));
}

// In suspend-to-idle the kernel stops all devices, its consoles and its CPUs, and runs functions meanwhile: no call may be
// missing, and whoever waits for the guest waits on.
#[test]
fn a_guest_sleeps_and_wakes() {
    for kernel in some(&KERNELS, 2) {
        unless_lost(|| sleeps(kernel));
    }
}

fn sleeps(kernel: &str) {
    const TIMES: usize = 2;
    let workload = workload(arch_of(kernel).unwrap()).unwrap();
    let (workload, run) = (workload.to_str().unwrap(), format!("/vmtrace-guest sleep {TIMES}"));
    let getppid = syscall(kernel, "getppid").unwrap();
    let (returns, counts) = (format!("r={getppid}:graph"), format!("c={getppid}:count"));
    let mut args = vec!["--cpus", "2", "--add", workload, "--run", &run];
    args.extend(["-f", "*suspend*", "--tracer", &returns, "--tracer", &counts]);
    // The last one that is called before it sleeps (kernel/power/suspend.c).
    args.extend(["--tracer", "asleep=wake_up_all_idle_cpus:count"]);
    let mut guest = LiveGuest::boot_with_input(kernel, &args);
    let socket = guest.at("socket");
    let asleep = || {
        let out = vmtrace("ctl", &socket, &["table", "--json"]);
        let table: Value = serde_json::from_slice(&out.stdout).ok()?;
        let counts = table["counts"].as_array()?.iter();
        let of = counts.filter(|count| count["tracer"] == "asleep");
        of.map(|count| count["hits"].as_u64()).sum::<Option<u64>>()
    };
    let (mut seen, mut typed) = (0, Instant::now());
    let ends = within(Duration::from_secs(300), || {
        let times = asleep().unwrap_or(seen);
        // It may have been woken too early.
        if times != seen || typed.elapsed() > Duration::from_secs(15) {
            (seen, typed) = (times, Instant::now());
            guest.type_line("");
        }
        !guest.runs()
    });
    assert!(ends, "the guest hangs");
    let ended = guest.end();
    let said = ended.said();
    assert_eq!(ended.status.code(), Some(0), "{kernel}: {said}");
    assert_eq!(trouble(&said), None, "{kernel}: {said}");
    // By the console: the guest's connections do not outlive its sleep.
    assert!(said.contains("the guest has cut its connections"), "{kernel}: {said}");
    let calls = said.lines().find_map(|line| line.split_once("slept: ")?.1.trim().parse().ok());
    let calls: usize = calls.expect(&said);
    let trace = Trace::read(fs::read(guest.at("trace")).unwrap()).unwrap();
    assert_whole(kernel, &trace.summary, &said);
    assert_eq!(trace.summary.exit, Exit::Poweroff, "{kernel}: {said}");
    let of =
        |list: &[Entry], name: &str| list.iter().filter(|one| one.function.ends_with(name)).count();
    // Both of its names end so; each of the two tracers has an entry of its own (`LiveGuest` has one).
    let name = "sys_getppid";
    assert_eq!((of(&trace.entries, name), of(&trace.returns, name)), (2 * calls, calls), "{said}");
    let counted = trace.counted().unwrap();
    let counted: i64 = counted.iter().filter(|(it, _)| it.ends_with(name)).map(|(_, n)| n).sum();
    assert_eq!(counted, i64::try_from(calls).unwrap(), "{kernel}: {said}");
    let suspended = of(&trace.entries, "suspend_devices_and_enter");
    assert!(suspended >= TIMES, "{kernel}: {suspended}: {said}");
}

// See there.
#[test]
fn triggers_come_and_go_while_a_guest_runs() {
    unless_lost(|| triggers::of_a_running_guest("x86_64-6.12"));
}

// What a tracer has sorted or counted is told when it is gone as well, and under its own name: another one may have its number
// then. Beside: what the guest writes to its console makes its vCPU leave it.
#[test]
fn histograms_are_told_of_tracers_that_are_gone() {
    unless_lost(|| {
        let run = "while true; do ls / >/dev/null; echo again >/dev/console; done";
        let args = ["-f", "vfs_open", "--exits", "--run", run];
        let mut guest = LiveGuest::boot(KERNELS[0], &args);
        let socket = guest.at("socket");
        let ctl = |args: &[&str]| {
            let out = vmtrace("ctl", &socket, args);
            out.status.success().then(|| String::from_utf8(out.stdout).unwrap())
        };
        let calls = |it: &Value| -> u64 {
            let buckets = it["buckets"].as_array().unwrap();
            buckets.iter().map(|bucket| bucket[1].as_u64().unwrap()).sum()
        };
        let sorted = || {
            let answer: Value = serde_json::from_str(&ctl(&["table", "--json"])?).unwrap();
            let one = answer["histograms"][0].clone();
            one["tracer"].is_string().then_some(one)
        };
        guest.wait_until(|| ctl(&["tracer", "add", "h=vfs_statx:hist"]).is_some());
        guest.wait_until(|| sorted().is_some_and(|it| calls(&it) >= 10));
        assert!(ctl(&["tracer", "remove", "h"]).is_some());
        let left = sorted().unwrap();
        assert_eq!((&left["function"], &left["of"]), (&"vfs_statx".into(), &"duration_ns".into()));
        assert_eq!(left["tracer"], "h", "{left}");
        let times = calls(&left);
        // It gets the number, and sorts by something else.
        assert!(ctl(&["tracer", "add", "c=vfs_statx:hist(flags)"]).is_some());
        guest.wait_until(|| sorted().is_some_and(|it| it["tracer"] == "c" && calls(&it) > 0));
        // What it has counted has its name, too.
        let counted = || {
            let answer: Value = serde_json::from_str(&ctl(&["table", "--json"])?).unwrap();
            let one = answer["counts"][0].clone();
            one["tracer"].is_string().then_some(one)
        };
        assert!(ctl(&["tracer", "add", "n=vfs_statx:count"]).is_some());
        guest.wait_until(|| counted().is_some());
        assert!(ctl(&["tracer", "remove", "n"]).is_some());
        let left = counted().unwrap();
        assert_eq!((&left["function"], &left["tracer"]), (&"vfs_statx".into(), &"n".into()));
        guest.interrupt();
        guest.end();
        let file = vmtrace("report", &guest.at("trace"), &["--format", "json"]);
        let (mut timed, mut flags) = (0, 0);
        let text = String::from_utf8(file.stdout).unwrap();
        let lines: Vec<Value> = text.lines().map(|it| serde_json::from_str(it).unwrap()).collect();
        // COM1.
        exits::tell_of_the_console(&lines, "0x3f8");
        exits::preempted_vcpus_write_nothing(&lines);
        for line in lines {
            match (line["event"].as_str(), line["tracer"].as_str(), line["of"].as_str()) {
                (Some("hist"), Some("h"), Some("duration_ns")) => timed += calls(&line),
                (Some("hist"), Some("c"), Some("flags")) => flags += calls(&line),
                (Some("hist"), ..) => panic!("{line}"),
                _ => {}
            }
        }
        assert_eq!(timed, times, "all, once");
        assert!(flags > 0);
    });
}

// Counts that are told at the end alone are of no use for a guest that runs for days; and what was told
// before must not count twice.
#[test]
fn counts_are_seen_while_they_grow() {
    unless_lost(|| {
        const CALLS: u64 = 20_000;
        let workload = workload(arch_of(KERNELS[0]).unwrap()).unwrap();
        let run = format!("/vmtrace-guest getppid {CALLS} 0 1 && sleep 600");
        let args = ["--count", "--cpus", "2", "--add", workload.to_str().unwrap(), "--run", &run];
        let mut guest = LiveGuest::boot(KERNELS[0], &args);
        let socket = guest.at("socket");
        let sum = |text: &str| -> u64 {
            let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
            let counts = lines.filter(|line| line["event"] == "count");
            counts.map(|line| line["hits"].as_u64().unwrap()).sum()
        };
        let table = |args: &[&str]| {
            let out = vmtrace("ctl", &socket, &[&["table"], args].concat());
            out.status.success().then(|| String::from_utf8(out.stdout).unwrap())
        };
        let counted = || {
            let answer: Value = serde_json::from_str(&table(&["--json"])?).unwrap();
            Some((answer["counts"][0]["hits"].as_u64()?, answer["counts"][0]["vcpus"].clone()))
        };
        guest.wait_until(|| counted().is_some_and(|(hits, _)| hits >= 2 * CALLS));
        // It sleeps now: nobody else calls this.
        let (hits, vcpus) = counted().unwrap();
        for vcpu in ["0", "1"] {
            assert!((CALLS..CALLS + 100).contains(&vcpus[vcpu].as_u64().unwrap()), "{vcpus}");
        }
        let text = table(&["--by-cpu", "--every", "0.1", "--count", "2"]).unwrap();
        let lines: Vec<Vec<&str>> =
            text.lines().map(|line| line.split_whitespace().collect()).collect();
        let [whole, first, second] =
            [hits.to_string(), vcpus["0"].to_string(), vcpus["1"].to_string()];
        for row in [1, 4] {
            assert_eq!((lines.len(), &lines[row][..3]), (5, &[&whole[..], &first, &second][..]));
            // Its first name may be another one.
            assert!(lines[row][3].ends_with("sys_getppid"), "{text}");
        }

        // The first to come gets what the next telling has, the second what was told before, too.
        let late: Vec<_> = ["first", "second"].map(|name| guest.at(name)).into();
        let mut consumers = Vec::new();
        for place in &late {
            // A file of -o is there when the stream has ended.
            let mut command = command().unwrap();
            command.arg("stream").arg(&socket).args(["--format", "json"]).stdin(Stdio::null());
            command.stdout(fs::File::create(place).unwrap()).stderr(Stdio::piped());
            consumers.push(command.spawn().unwrap());
            guest.wait_until(|| sum(&fs::read_to_string(place).unwrap()) >= hits);
        }
        let shown = format!("# counted: 1 function, {hits} calls");
        guest.wait_until(|| {
            let out = vmtrace("top", &socket, &["--every", "1", "--count", "1"]);
            String::from_utf8_lossy(&out.stdout).lines().any(|line| line == shown)
        });
        // A table begins anew; what was told stays told.
        let cleared = vmtrace("ctl", &socket, &["clear"]);
        assert!(cleared.status.success(), "{}", String::from_utf8_lossy(&cleared.stderr));
        assert_eq!(table(&[]).as_deref(), Some("nothing was counted\n"));
        guest.interrupt();
        let said = guest.end().said();
        assert!(
            said.contains(&format!("vmtrace: counted {hits} calls of 1 functions\n")),
            "{said}"
        );
        for consumer in consumers {
            let out = consumer.wait_with_output().unwrap();
            assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        }
        let file = vmtrace("report", &guest.at("trace"), &["--format", "json"]);
        assert_eq!(sum(&String::from_utf8(file.stdout).unwrap()), hits);
        for place in late {
            assert_eq!(sum(&fs::read_to_string(place).unwrap()), hits);
        }
    });
}

// `timeout N vmtrace boot ... -o trace.csv`: what was traced until then is there, as if the run had ended by
// itself, and nothing else.
#[test]
fn a_run_that_is_interrupted_is_converted() {
    unless_lost(|| {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("trace.csv");
        let workload = workload(arch_of(KERNELS[0]).unwrap()).unwrap();
        let run = "/vmtrace-guest getppid 1000 0 && sleep 600";
        let args = ["--add", workload.to_str().unwrap(), "--run", run];
        let args = [&args[..], &["-o", place.to_str().unwrap()]].concat();
        let mut guest = LiveGuest::boot_in(directory, KERNELS[0], &args);
        wait_for(&mut guest, |status| status["records"][0].as_u64() >= Some(1000));
        assert!(!place.exists(), "not whole");
        guest.signal("TERM");
        guest.signal("TERM");
        let ended = guest.end();
        let said = ended.said();
        assert_eq!(ended.status.code(), Some(1), "{said}");
        assert!(said.contains("stopped before --run had finished"), "{said}");
        let text = fs::read_to_string(&place).unwrap();
        let records = said.split_once("vmtrace: records ").and_then(|(_, it)| it.split_once(' '));
        let calls = text.lines().filter(|line| line.contains(",entry,")).count();
        assert_eq!(calls.to_string(), records.unwrap().0, "{said}");
        assert!(calls >= 1000, "{said}");
        let files: Vec<_> =
            fs::read_dir(guest.at("")).unwrap().map(|it| it.unwrap().path()).collect();
        assert_eq!(files, [place], "{said}");
    });
}

// `vmtrace boot K | less` that is left alone: control goes on, and the end comes and says what is missing. So it is with
// what a command writes.
#[test]
fn an_output_that_nobody_reads_keeps_nothing_from_ending() {
    unless_lost(|| {
        let directory = tempfile::tempdir().unwrap();
        let fifo = directory.path().join("trace");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let unread = fs::OpenOptions::new().read(true).write(true).open(&fifo).unwrap();
        // More than a pipe holds.
        let run = "/vmtrace-guest getppid 20000 0 && cat /dev/zero";
        let args = ["-f", "vfs_*", "--run", run];
        let workload = workload(arch_of(KERNELS[0]).unwrap()).unwrap();
        let args = [&args[..], &["--add", workload.to_str().unwrap()]].concat();
        let (unread_output, output) = std::io::pipe().unwrap();
        let mut guest = LiveGuest::boot_to(output.into(), directory, KERNELS[0], &args);
        wait_for(&mut guest, |status| status["records"][0].as_u64() >= Some(20_000));
        for command in [&["filter", "ksys_*"][..], &["mark", "x"], &["stop"]] {
            let done = vmtrace("ctl", &guest.at("socket"), command);
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        }
        guest.signal("TERM");
        assert!(guest.ends_within(60), "it waits for an output that nobody reads");
        let ended = guest.end();
        let said = ended.said();
        assert_eq!(ended.status.code(), Some(1), "{said}");
        assert!(said.contains("bytes of the stream were not taken in time"), "{said}");
        drop((unread, unread_output));
    });
}

// `timeout N vmtrace boot ... -o F`: coreutils signals the child and then its group, so that two signals come within
// milliseconds. The file must be whole, and the run must say how it went.
#[test]
fn two_signals_at_once_are_one_request_to_stop() {
    unless_lost(|| {
        let mut guest = boot(KERNELS[0], "/vmtrace-guest getppid 1000 0 && sleep 600", &[]);
        wait_for(&mut guest, |status| status["records"][0].as_u64() >= Some(1000));
        guest.signal("TERM");
        guest.signal("TERM");
        let ended = guest.end();
        let said = ended.said();
        // By itself, not by the signal.
        assert_eq!(ended.status.code(), Some(1), "{said}");
        assert!(said.contains("vmtrace: guest stopped"), "{said}");
        assert!(said.contains("stopped before --run had finished"), "{said}");
        let trace = Trace::read(fs::read(guest.at("trace")).unwrap()).unwrap();
        assert_eq!(trace.summary.exit, Exit::Stopped);
        assert!(trace.entries.len() >= 1000 && missing(&trace.summary) == 0, "{:?}", trace.summary);
    });
}

// `--interactive`: a shell in the guest is as one here, its keys are not the user's shell's, and the terminal is as it
// was when that is over.
#[test]
fn a_terminal_is_a_guests_console() {
    unless_lost(|| terminal::a_user_sits_at_the_console(KERNELS[0]));
}

#[test]
fn a_console_that_is_stopped_is_the_users_terminal_again() {
    unless_lost(|| terminal::a_run_that_is_stopped_gives_the_terminal_back(KERNELS[0]));
}

#[test]
fn the_end_of_a_shell_at_the_console_is_the_end_of_the_run() {
    unless_lost(|| terminal::a_shell_ends_its_guest(KERNELS[1]));
}
