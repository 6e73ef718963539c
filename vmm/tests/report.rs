//! `vmtrace report`, run as a user would.

use std::io::{Read, Write};
use std::process::{Command, Output, Stdio};

use tempfile::NamedTempFile;
use vmtrace::stream::{
    EntryRecord, Exit, Header, RecordBuffer, ReturnRecord, Summary, Symbol, Task, Tracer, Writer,
    sample,
};

const RECORDS: usize = 50_000;

fn stream() -> Vec<u8> {
    let header = Header {
        arch: "x86_64".into(),
        clock: "x86-tsc".into(),
        clock_hz: 1_000_000_000,
        release: "6.12.0".into(),
        vcpus: 1,
        address_base: Header::TOP_4_GIB,
        vmtrace_version: "0.1.0".into(),
        ..Header::default()
    };
    let mut writer = Writer::new(Vec::new(), &header).expect("header");
    writer.symbols([Symbol::new(0xffff_ffff_8100_0000, 16, "vfs_read")]).expect("room");
    writer.task(Task::new(1, 1, b"init")).expect("memory");
    let record = |at| EntryRecord::new(at, 0x8100_0000, 0, 1);
    let records: Vec<_> = (0u64..).map(record).take(RECORDS).collect();
    writer.entries(0, &records).expect("vCPU");
    writer.end(&Summary { exit: Exit::Poweroff, ..Summary::default() }).expect("memory");
    writer.into_inner().expect("memory")
}

/// Calls of vfs_read in calls of ksys_read, by two tracers.
fn calls() -> Vec<u8> {
    let header = Header {
        arch: "x86_64".into(),
        clock_hz: 1_000_000_000,
        vcpus: 1,
        address_base: Header::TOP_4_GIB,
        ..Header::default()
    };
    let mut writer = Writer::new(Vec::new(), &header).expect("header");
    let symbol = |at: u64, name| Symbol::new(0xffff_ffff_8100_0000 + at, 16, name);
    writer.symbols([symbol(0, "ksys_read"), symbol(16, "vfs_read")]).expect("room");
    for (number, name) in [(0, "files"), (1, "other")] {
        writer.tracer(Tracer { number, name, description: "" }).expect("memory");
    }
    let mut buffer = RecordBuffer::new();
    for round in 0..10 {
        let (at, tracer) = (round * 10_000, u8::from(round == 9));
        let enter = |at, function: u32, sp| {
            EntryRecord::new(at, 0x8100_0000 + function, 0x8100_0001, 1)
                .with_sp(sp)
                .of_tracer(tracer)
        };
        let leave = |at, function: u32, sp| {
            ReturnRecord::new(at, 0x8100_0000 + function, 0x8100_0001, 1, sp).of_tracer(tracer)
        };
        buffer.push_frame(enter(at, 0, 0x800));
        buffer.push_frame(enter(at + 10, 16, 0x700));
        buffer.push_return(leave(at + 10 + 100 * round, 16, 0x700));
        buffer.push_return(leave(at + 9_000, 0, 0x800));
    }
    writer.records(0, &buffer).expect("vCPU");
    writer.end(&Summary { exit: Exit::Poweroff, ..Summary::default() }).expect("memory");
    writer.into_inner().expect("memory")
}

fn file(bytes: &[u8]) -> NamedTempFile {
    let mut file = NamedTempFile::new().expect("a temporary file");
    file.write_all(bytes).expect("room");
    file
}

fn vmtrace(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vmtrace"));
    command.args(arguments);
    command
}

fn report(bytes: &[u8], options: &[&str]) -> Output {
    let file = file(bytes);
    let path = file.path().to_str().expect("UTF-8");
    vmtrace(&["report", path]).args(options).output().expect("vmtrace runs")
}

fn lines(output: &Output) -> usize {
    output.stdout.iter().filter(|byte| **byte == b'\n').count()
}

#[test]
fn prints_a_whole_file() {
    let stream = stream();
    let text = report(&stream, &[]);
    assert_eq!(text.status.code(), Some(0));
    assert_eq!(lines(&text), RECORDS + 6);
    assert_eq!(lines(&report(&stream, &["--format", "json"])), RECORDS + 2);
    let stats = report(&stream, &["--stats", "-f", "vfs_*"]);
    assert!(String::from_utf8_lossy(&stats.stdout).contains("50000  100.0%  vfs_read"));
    let summary = report(&stream, &["--summary"]);
    let text = String::from_utf8_lossy(&summary.stdout);
    assert!(text.contains("vmtrace: records 50000 (vcpu0 50000), lost 0 (vcpu0 0)\n"), "{text}");
}

#[test]
fn a_compressed_file_is_read_as_a_plain_one() {
    let plain = calls();
    let stream = sample::compressed(&plain);
    assert!(stream.len() * 2 < plain.len(), "{} and {}", stream.len(), plain.len());
    let (plain, stream) = (file(&plain), file(&stream));
    let said = |file: &NamedTempFile, command: &[&str]| {
        let path = file.path().to_str().expect("UTF-8");
        let (name, options) = command.split_first().expect("a command");
        let output = vmtrace(&[name, path]).args(options).output().expect("vmtrace runs");
        let other = plain.path().to_str().expect("UTF-8");
        let text = |bytes| {
            let text = String::from_utf8(bytes).expect("UTF-8");
            text.replace(path, "FILE").replace(other, "FILE")
        };
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    for command in [
        &["report"][..],
        &["report", "--format", "json"],
        &["report", "--top"],
        &["report", "--summary"],
        &["convert", "-o", "-", "--format", "folded"],
        &["check", "--expect", "vfs_read >= 5"],
        &["diff", plain.path().to_str().expect("UTF-8")],
    ] {
        let (of_plain, of_stream) = (said(&plain, command), said(&stream, command));
        assert_eq!(of_plain, of_stream, "{command:?}");
        assert!(!of_plain.1.is_empty(), "{command:?}: {}", of_plain.2);
    }
}

#[test]
fn prints_calls() {
    let stream = calls();
    let text = |options: &[&str]| {
        let output = report(&stream, options);
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect::<Vec<_>>()
    };
    let graph = text(&["--graph"]);
    let first = [
        " 0)               |  ksys_read() {",
        " 0)   0.000 us    |    vfs_read();",
        " 0)   9.000 us    |  }",
    ];
    assert_eq!((&graph[..3], graph.len()), (&first.map(str::to_owned)[..], 30));
    assert_eq!(text(&["--format", "graph"]), graph);
    assert_eq!(text(&["--tracer", "files"]).len(), 18);
    assert_eq!(text(&["--graph", "--tracer", "files"]), graph[..27]);
    assert_eq!(text(&["--graph-root", "vfs_*"])[0], " 0)   0.000 us    |  vfs_read();");
    assert_eq!(text(&["--max-depth", "1"])[0], " 0)   9.000 us    |  ksys_read();");
    let long = text(&["--min-duration", "800ns", "-n", "ksys_read"]);
    let long: Vec<_> = long.iter().filter(|line| line.contains('}')).collect();
    let expected =
        [" 0)   0.800 us    |  } /* vfs_read */", " 0)   0.900 us    |  } /* vfs_read */"];
    assert_eq!(long, expected);
    let json = text(&["--format", "json", "--max-depth", "1", "--tracer", "other"]);
    let expected = r#"{"event":"return","ns":99000,"cpu":0,"pid":1,"comm":null,"function":"ksys_read","tracer":"other","depth":0,"duration_ns":9000}"#;
    assert_eq!((json.len(), &*json[2]), (4, expected));
    for options in [["--graph", "--format=json"], ["--min-duration", "10"], ["--max-depth", "0"]] {
        assert_eq!(report(&stream, &options).status.code(), Some(2), "{options:?}");
    }
}

#[test]
fn prints_arguments() {
    let stream = sample::values();
    let text = |options: &[&str]| {
        let output = report(&stream, options);
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    let found = text(&[]);
    assert!(found.contains(": vfs_read(file=0xffff888100001000, count=832, "), "{found}");
    let found = text(&["--graph"]);
    assert!(found.contains(", end?=255); /* = -22 */\n"), "{found}");
    let found = text(&["--graph", "--min-duration", "1us"]);
    assert!(found.contains(" 0)   10.000 us   |  } /* vfs_read = -22 */\n"), "{found}");
    let found = text(&["--format", "json"]);
    assert!(found.contains(r#""mode":"NOTHING","how":4,"#), "{found}");
    assert!(found.contains(r#""value":-22}"#), "{found}");
    let found = text(&["--stats"]);
    assert!(found.contains("         4   80.0%  vfs_read\n"), "{found}");
    let found = text(&["--summary"]);
    assert!(found.contains("vmtrace: records 7 (vcpu0 7, vcpu1 0), lost 0"), "{found}");
}

// Who only counts has no records, and that is no empty trace.
#[test]
fn prints_counts() {
    let stream = sample::counts();
    let text = |options: &[&str]| {
        let output = report(&stream, options);
        let errors = String::from_utf8_lossy(&output.stderr);
        // Whose calls they were nobody knows.
        let noted = options.contains(&"--pid") || options.contains(&"--comm");
        let errors = if noted { "" } else { &errors };
        assert_eq!((output.status.code(), errors), (Some(0), ""), "{options:?}");
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        let counted = text.lines().skip_while(|line| !line.starts_with("# counted: "));
        counted.map(str::to_owned).collect::<Vec<_>>()
    };
    let all = text(&[]);
    assert_eq!(all[0], "# counted: 3 functions, 1017 calls");
    assert_eq!(all[2], "#        1000         700         300  calls   vfs_read");
    assert_eq!(text(&["--graph"]), all);
    let one = ["# counted: 1 function, 7 calls", "#        hits  function"];
    assert_eq!(text(&["--cpu", "1", "--module", "ext4"])[..2], one);
    assert_eq!(text(&["-n", "vfs_*", "--tracer", "calls"])[2], "#           9  ext4_open [ext4]");
    for options in [["--pid", "7"], ["--comm", "*"], ["--since", "0"], ["--graph-root", "vfs_*"]] {
        assert_eq!(text(&options), [""; 0], "{options:?}");
    }
    let json = report(&stream, &["--format", "json", "--cpu", "0", "-f", "ext4_*"]);
    let expected = r#"{"event":"count","function":"ext4_open","module":"ext4","tracer":"calls","cpu":0,"hits":9}"#;
    assert!(String::from_utf8_lossy(&json.stdout).contains(&format!("\n{expected}\n")));
    let stats = |options: &[&str]| {
        String::from_utf8(report(&stream, &[&["--stats"], options].concat()).stdout).expect("UTF-8")
    };
    assert!(stats(&[]).contains("\n      1000   98.3%  vfs_read\n"));
    // Who was traced by two tracers was called once.
    let note = "\n# of several tracers: ";
    assert!(stats(&[]).contains(note) && !stats(&["--tracer", "calls"]).contains(note));
    for table in ["--stats", "--summary"] {
        assert_eq!(report(&stream, &[table, "--format", "json"]).status.code(), Some(2), "{table}");
    }
}

#[test]
fn says_what_is_wrong_with_a_file() {
    let stream = stream();
    let torn = report(&stream[..stream.len() - 1], &[]);
    assert_eq!(torn.status.code(), Some(1));
    assert_eq!(lines(&torn), RECORDS + 6);
    let errors = String::from_utf8_lossy(&torn.stderr);
    assert!(errors.contains("torn stream: it stops at byte"), "{errors}");

    // The second of two files in one is not passed over in silence.
    for (first, rest, what) in [
        (stream.clone(), stream.repeat(3), "another one begins there"),
        (sample::compressed(&stream), stream.clone(), "another one begins there"),
        (stream.clone(), b"vmtrace".to_vec(), "something else follows there"),
    ] {
        let joined = [&*first, &*rest].concat();
        let output = report(&joined, &[]);
        let whole = report(&first, &[]);
        assert_eq!((output.status.code(), output.stdout), (Some(1), whole.stdout));
        let errors = String::from_utf8_lossy(&output.stderr);
        let expected = format!("the stream ends at byte {}, but {what}", first.len());
        assert!(errors.contains(&expected), "{errors}");
    }

    let stream = sample::compressed(&stream);
    let torn = report(&stream[..stream.len() / 2], &[]);
    assert_eq!(torn.status.code(), Some(1));
    assert!((6..RECORDS).contains(&lines(&torn)), "{} lines", lines(&torn));
    let errors = String::from_utf8_lossy(&torn.stderr);
    let place = format!("torn stream: it stops at byte {}, inside a frame", stream.len() / 2);
    assert!(errors.contains(&place), "{errors}");

    let missing = vmtrace(&["report", "no such file"]).output().expect("vmtrace runs");
    assert_eq!(missing.status.code(), Some(1));
    let errors = String::from_utf8_lossy(&missing.stderr);
    assert!(errors.contains("no such file") && errors.contains("No such file"), "{errors}");

    let usage = vmtrace(&["report", "file", "--format", "gif"]).output().expect("vmtrace runs");
    assert_eq!(usage.status.code(), Some(2));
}

#[test]
fn where_the_time_of_a_boot_went_is_told_of_any_trace() {
    let stream = stream();
    let page = report(&stream, &["--boot"]);
    assert_eq!(page.status.code(), Some(0));
    let text = String::from_utf8_lossy(&page.stdout);
    assert!(text.starts_with("Boot of Linux 6.12.0 (x86_64), 1 vCPU\n"), "{text}");
    assert!(text.contains("\nNOT SHOWN HERE\n"), "{text}");
    let json = report(&stream, &["--boot", "--format", "json"]);
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).expect("JSON");
    assert_eq!((&json["init_ns"], &json["until_ns"]), (&serde_json::Value::Null, &49_999.into()));

    // What is whole of a torn one is told, and that it is torn.
    let torn = report(&stream[..stream.len() - 1], &["--boot"]);
    assert_eq!(torn.status.code(), Some(1));
    let text = String::from_utf8_lossy(&torn.stdout);
    assert!(text.contains("\nATTENTION: the trace is torn: its end is missing\n"), "{text}");
    let nothing = report(b"something else", &["--boot"]);
    assert_eq!((nothing.status.code(), nothing.stdout.len()), (Some(1), 0));

    for options in [&["--boot", "--format", "graph"][..], &["--boot", "--pid", "1"]] {
        assert_eq!(report(&stream, options).status.code(), Some(2), "{options:?}");
    }
}

#[test]
fn a_reader_that_has_seen_enough_is_no_failure() {
    let file = file(&stream());
    let path = file.path().to_str().expect("UTF-8");
    let mut command = vmtrace(&["report", path]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("vmtrace runs");
    let mut stdout = child.stdout.take().expect("a pipe");
    stdout.read_exact(&mut [0; 100]).expect("some text");
    drop(stdout);
    let output = child.wait_with_output().expect("vmtrace ends");
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

// Nothing is printed of what a trace does not have, as of a guest that did nothing.
#[test]
fn what_a_trace_does_not_have_is_said() {
    let said = |options: &[&str]| {
        let output = report(&calls(), options);
        (output.status.code(), String::from_utf8(output.stderr).expect("UTF-8"))
    };
    for (options, reason) in [
        (["--cpu", "0,7"], "--cpu 7: the guest has no such vCPU; there is only 0\n"),
        (["--tracer", "file"], "--tracer file: the trace has no such tracer; near: files\n"),
    ] {
        for table in [&[][..], &["--top"], &["--stats"], &["--format", "json"]] {
            let (code, text) = said(&[&options[..], table].concat());
            assert_eq!(code, Some(2), "{text}");
            assert!(text.ends_with(reason) && text.lines().count() == 1, "{text}");
        }
    }
    let none = "the trace has no record of such";
    for (options, note) in [
        (["-f", "vfs_raed"], &*format!("-f vfs_raed: {none} a function; near: vfs_read")),
        (["--graph-root", "x*"], &*format!("--graph-root x*: {none} a function")),
        (["--callers", "nosuch"], "--callers nosuch: "),
        (["--module", "ext4"], &*format!("--module ext4: {none} a module")),
        (["--pid", "9"], "--pid 9: no record is of that process id"),
        (["--comm", "x*"], "--comm x*: no record is of a task of such a name"),
        (["--follow", "x*"], "--follow x*: no record is of such a task"),
    ] {
        let (code, text) = said(&options);
        assert_eq!(code, Some(0), "{text}");
        let line = format!("vmtrace: note: {note}");
        assert!(text.lines().count() == 1 && text.starts_with(&line), "{text}");
    }
    for options in [&["--since", "99"][..], &["--until", "0.0", "--pid", "1", "--since", "0"]] {
        let (_, text) = said(options);
        let times = "the first is at 0.000000 s, the last at 0.000099 s\n";
        assert_eq!(text.contains(times), options[0] == "--since", "{text}");
    }
    // Each for itself, and nothing of what there is.
    for options in [&["-f", "vfs_read"][..], &["-f", "*", "--pid", "1", "--cpu", "0"], &["-n", "x"]]
    {
        assert_eq!(said(options), (Some(0), String::new()), "{options:?}");
    }
    assert_eq!(said(&["-f", "vfs_*", "-f", "x", "--tracer", "other"]).1.lines().count(), 1);
}

// A trace of entries has no calls that would be long enough.
#[test]
fn calls_need_returns() {
    for options in [["--graph-root", "vfs_read"], ["--min-duration", "1us"], ["--max-depth", "2"]] {
        let said = |bytes: &[u8]| String::from_utf8(report(bytes, &options).stderr).expect("UTF-8");
        assert!(said(&stream()).ends_with("trace with `vmtrace boot --graph`\n"), "{options:?}");
        assert_eq!(said(&calls()), "", "{options:?}");
    }
}

// What nobody recorded is no guest that never turned interrupts off.
#[test]
fn latencies_need_their_events() {
    for (kind, missing) in [
        (
            "irqsoff",
            "preemptirq:irq_disable, preemptirq:irq_enable, sched:sched_switch, power:cpu_idle;",
        ),
        ("preemptirqsoff", "preemptirq:*, sched:sched_switch, power:cpu_idle;"),
        ("wakeup", "sched:sched_waking, sched:sched_wakeup_new, sched:sched_switch;"),
    ] {
        for format in ["text", "json"] {
            let output = report(&calls(), &["--latency", kind, "--format", format]);
            let text = String::from_utf8(output.stderr).expect("UTF-8");
            assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{text}");
            assert!(text.contains(missing), "{text}");
            assert!(text.contains(&format!("`vmtrace boot --latency {kind} -o FILE`")), "{text}");
        }
    }
}

// Two traces that both lack what is compared are alike, and a rule about nothing cannot be decided.
#[test]
fn what_is_compared_and_checked_is_there() {
    let (one, two) = (file(&calls()), file(&calls()));
    let [a, b] = [&one, &two].map(|file| file.path().to_str().expect("UTF-8"));
    let said = |arguments: &[&str]| {
        let output = vmtrace(arguments).output().expect("it runs");
        (output.status.code(), String::from_utf8(output.stderr).expect("UTF-8"))
    };
    for command in [&["diff", a, b][..], &["check", a, "expect vfs_read"]] {
        let (code, text) = said(&[command, &["--tracer", "othe"]].concat());
        let reason = "--tracer othe: the trace has no such tracer; near: other\n";
        assert!(code == Some(2) && text.ends_with(reason), "{text}");
        assert_eq!(said(&[command, &["--tracer", "other"]].concat()), (Some(0), String::new()));
    }
    let (code, text) = said(&["diff", a, b, "-f", "vfs_raed", "--comm", "nosuch"]);
    let notes = "vmtrace: note: -f vfs_raed: neither trace has a record of such a function; near: vfs_read\n\
                 vmtrace: note: --comm nosuch: of what is otherwise asked for, neither trace has a record of a \
                 task of such a name\n";
    assert_eq!((code, &*text), (Some(0), notes));
    let (_, text) = said(&["diff", a, b, "--comm", "nosuch"]);
    assert_eq!(text, "vmtrace: note: --comm nosuch: neither trace has a task of such a name\n");
    let (_, text) = said(&["diff", a, b, "-f", "x*", "--tracer", "files"]);
    let note = "-f x*: in neither trace has tracer files a record of such a function\n";
    assert_eq!(text, format!("vmtrace: note: {note}"));
}

/// Of two tracers: one has recorded vfs_read in cat, on vCPU 0, the other one later tcp_sendmsg in curl.
fn tracers() -> Vec<u8> {
    let header = Header {
        arch: "x86_64".into(),
        clock_hz: 1_000_000_000,
        vcpus: 2,
        address_base: Header::TOP_4_GIB,
        ..Header::default()
    };
    let mut writer = Writer::new(Vec::new(), &header).expect("header");
    let all = [("files", "vfs_read", &b"cat"[..]), ("net", "tcp_sendmsg", b"curl")];
    for (number, (tracer, function, comm)) in (0_u8..).zip(all) {
        let (vcpu, pid) = (u32::from(number), u32::from(number) + 1);
        let at = 0xffff_ffff_8100_0000 + 16 * u64::from(number);
        writer.symbols([Symbol::new(at, 16, function)]).expect("room");
        writer.task(Task::new(pid, pid, comm)).expect("memory");
        writer.tracer(Tracer { number, name: tracer, description: "" }).expect("memory");
        let (time, function) = (1_000_000 * u64::from(number), 0x8100_0000 + 16 * vcpu);
        let record = EntryRecord::new(time, function, 0x8100_0001, pid).of_tracer(number);
        writer.entries(vcpu, &[record]).expect("vCPU");
    }
    writer.end(&Summary { exit: Exit::Poweroff, ..Summary::default() }).expect("memory");
    writer.into_inner().expect("memory")
}

// What one option has left says nothing about all of a trace.
#[test]
fn notes_are_about_what_was_looked_at() {
    let (file, calls, folder) =
        (file(&tracers()), file(&calls()), tempfile::tempdir().expect("a directory"));
    let [path, calls] = [&file, &calls].map(|file| file.path().to_str().expect("UTF-8"));
    let said = |arguments: &[&str]| {
        let mut command = vmtrace(arguments);
        let output = command.current_dir(folder.path()).output().expect("it runs");
        let text = String::from_utf8(output.stderr).expect("UTF-8");
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {text}");
        text
    };
    let rest = "no record of what is otherwise asked for is of";
    for (options, note) in [
        (
            ["-f", "vfs_read", "--comm", "curl"],
            format!("--comm curl: {rest} a task of such a name"),
        ),
        (["-n", "tcp_*", "--pid", "2"], format!("--pid 2: {rest} that process id")),
        (["--tracer", "files", "--follow", "curl"], format!("--follow curl: {rest} such a task")),
        (["--tracer", "files", "--cpu", "1"], format!("--cpu 1: {rest} that vCPU")),
        (["-f", "vfs_read", "--since", "1ms"], format!("--since: {rest} that time")),
        (["-f", "tcp_*", "--until", "500us"], format!("--until: {rest} that time")),
        (["--callers", "vfs_read", "--pid", "2"], format!("--pid 2: {rest} that process id")),
    ] {
        let text = said(&[&["report", path], &options[..]].concat());
        assert_eq!(text, format!("vmtrace: note: {note}\n"), "{options:?}");
    }
    for option in [["--min-duration", "1s"], ["--graph-root", "nosuch"]] {
        let text = said(&[&["report", calls, "--pid", "1"], &option[..]].concat());
        assert!(text.contains(&format!("--pid 1: {rest} that process id\n")), "{text}");
    }
    let text = said(&["report", calls, "--max-depth", "1", "--pid", "9"]);
    assert!(text.contains(&format!("--pid 9: {rest} that process id\n")), "{text}");
    // Of all records the times are known.
    for (command, option) in [("report", "--since"), ("report", "--until"), ("convert", "--since")]
    {
        let at = if option == "--since" { "99" } else { "0.0" };
        let (late, out) = (["--pid", "2", option, at], ["-o", "out.csv"]);
        let out = if command == "convert" { &out[..] } else { &[] };
        let text = said(&[&[command, path], &late[..], out].concat());
        let times =
            "no record is of that time: the first is at 0.000000 s, the last at 0.001000 s\n";
        let is_met = option == "--until";
        assert_eq!(text.contains(&format!("note: {option}: {times}")), !is_met, "{text}");
    }
    let note = "vmtrace: note: -f tcp_sendmsg: tracer files has no record of such a function; there is only vfs_read\n";
    let options = ["--tracer", "files", "-f", "tcp_sendmsg"];
    assert_eq!(said(&[&["report", path], &options[..]].concat()), note);
    for out in ["out.vmt", "out.csv"] {
        for part in [&[][..], &["--until", "99"]] {
            let text = said(&[&["convert", path, "-o", out], &options[..], part].concat());
            assert!(text.ends_with(note), "{out} {part:?}: {text}");
        }
    }
}

// A trace of before its only tracer had a name, in which nothing happened.
#[test]
fn the_only_tracer_has_a_name_for_all_commands() {
    let header = Header { vcpus: 1, clock_hz: 1, ..Header::default() };
    let mut writer = Writer::new(Vec::new(), &header).expect("header");
    writer.end(&Summary::default()).expect("memory");
    let file = file(&writer.into_inner().expect("memory"));
    let path = file.path().to_str().expect("UTF-8");
    let folder = tempfile::tempdir().expect("a directory");
    for command in [&["report", path][..], &["convert", path, "-o", "out.vmt"]] {
        for (tracer, code) in [("tracer0", 0), ("tracer1", 2)] {
            let mut command = vmtrace(&[command, &["--tracer", tracer]].concat());
            let output = command.current_dir(folder.path()).output().expect("it runs");
            let text = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(code), "{text}");
            assert_eq!(text.contains("near: tracer0"), code == 2, "{text}");
        }
    }
}

#[test]
fn reads_standard_input() {
    let mut command = vmtrace(&["report", "-", "--summary"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("vmtrace runs");
    child.stdin.take().expect("a pipe").write_all(&stream()).expect("vmtrace reads");
    let output = child.wait_with_output().expect("vmtrace ends");
    assert_eq!(output.status.code(), Some(0));
    assert!(output.stdout.starts_with(b"vmtrace: sites matched 0"));
}
