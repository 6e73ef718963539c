//! Parts of traces, by time, vCPU and task.

use std::process::Command;

use serde_json::Value;
use vmtrace::stream::{GuestClock, Summary, Writer, sample};

use super::{Folder, stream};

/// What `report` prints of a file as JSON, and the summary.
fn report(folder: &Folder, file: &str, options: &[&str]) -> (Vec<Value>, Value) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vmtrace"));
    command.current_dir(&folder.0).args(["report", file, "--format", "json"]).args(options);
    let output = command.output().expect("vmtrace runs");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let mut lines: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let end = lines.pop().expect("an end");
    (lines.split_off(1), end["summary"].clone())
}

/// Microsecond, what, function or number, duration.
fn short(line: &Value) -> String {
    let at = line["ns"].as_u64().map_or_else(|| "-".to_owned(), |ns| (ns / 1000).to_string());
    let what = [&line["function"], &line["kind"], &line["count"]];
    let what = what.into_iter().find(|it| !it.is_null()).expect("something");
    let took = line["duration_ns"].as_u64().map_or_else(String::new, |ns| format!(" took {ns}"));
    format!("{at} {} {what}{took}", line["event"].as_str().expect("a kind"))
}

// A duration from the beginning of the part would be one that nobody measured, and a part without
// its losses would look whole.
#[test]
fn a_part_by_time_has_what_was_then() {
    let folder = Folder::new(&stream());
    let part = |options: &[&str]| {
        folder.convert(&[&["-o", "part.vmt"], options].concat());
        let (lines, summary) = report(&folder, "part.vmt", &[]);
        let lines: Vec<_> = lines.iter().map(|line| short(line).replace('"', "")).collect();
        (lines, summary["notes"].clone())
    };
    // What was open before has no beginning, and what ends later no end.
    let (lines, notes) = part(&["--since", "1003us", "--until", "0.0016"]);
    let expected = [
        // Tells what was traced.
        "1 mark attach took 600",
        "1003 entry timer_tick",
        "1004 tail vfs_read",
        "1004 entry ext4_read",
        "1100 entry vfs_read",
        "1101 return vfs_read took 1000",
        "- loss 123",
        "1504 return ext4_read took 500000",
    ];
    assert_eq!(lines, expected);
    let told = "a part of the trace: since 0.001003000 s, until 0.001600000 s";
    assert_eq!(notes, serde_json::json!([told]));
    // The loss was then or later; nobody knows.
    let (lines, _) = part(&["--since", "1600us", "--until", "3ms"]);
    assert_eq!(lines, ["- loss 123", "1 mark attach took 600", "2400 return ksys_read"]);
    let (lines, _) = part(&["--until", "1050us"]);
    assert_eq!((lines.len(), &*lines[5]), (6, "1004 entry ext4_read"));
    let (lines, _) = part(&["--since", "910ms"]);
    assert_eq!(lines, ["1 mark attach took 600", "950000 mark console took 0"]);
    let (lines, _) = part(&["--since", "20000000"]);
    assert_eq!(lines, ["1 mark attach took 600"]);
}

#[test]
fn a_part_by_task_or_vcpu_has_what_report_shows() {
    let folder = Folder::new(&stream());
    for options in [
        &["--pid", "43"][..],
        &["--pid", "42", "--pid", "43"],
        &["--cpu", "0"],
        &["--cpu", "1", "--until", "0.9"],
        &["--comm", "dd w*"],
        &["--comm", "dd", "-f", "vfs_*"],
        &["--comm", "<idle>"],
    ] {
        // A loss has the time of the record before it, among those that stay.
        let apart = |lines: Vec<Value>| {
            lines.into_iter().partition::<Vec<_>, _>(|line| line["event"] == "loss")
        };
        let shown = report(&folder, "trace.vmt", options).0;
        folder.convert(&[&["-o", "part.vmt"], options].concat());
        let (part, summary) = report(&folder, "part.vmt", &[]);
        assert_eq!(apart(part), apart(shown), "{options:?}");
        assert!(summary["notes"][0].as_str().expect("a note").starts_with("a part of the trace: "));
    }
    // Its totals are its own: of the other vCPU nothing is lost.
    folder.convert(&["-o", "part.vmt", "--cpu", "0"]);
    let summary = report(&folder, "part.vmt", &[]).1;
    assert_eq!(summary["vcpus"][1]["lost"], 0);
    assert_eq!(summary["vcpus"][0]["records"], 7);
}

#[test]
fn other_formats_have_the_same_part() {
    let folder = Folder::new(&stream());
    let options = ["--since", "1003us", "--until", "1600us"];
    folder.convert(&[&["-o", "part.vmt"], &options[..]].concat());
    folder.convert(&[&["-o", "part.csv"], &options[..]].concat());
    let csv = folder.read("part.csv");
    let events: Vec<_> = csv.lines().skip(1).filter_map(|line| line.split(',').nth(1)).collect();
    let expected = ["entry", "tail", "entry", "entry", "return", "loss", "return"];
    assert_eq!(events, expected, "{csv}");
    // As of the part itself, without the mark before it.
    std::fs::rename(folder.path("part.vmt"), folder.path("trace.vmt")).expect("a file");
    folder.convert(&["-o", "whole.csv"]);
    let whole = folder.read("whole.csv");
    let whole: Vec<_> = whole.lines().filter(|line| !line.contains("attach")).collect();
    assert_eq!(csv.lines().collect::<Vec<_>>(), whole);
}

// Times of two clocks would give the part of another moment.
#[test]
fn a_part_by_the_guests_clock_is_what_its_log_says() {
    let header = sample::header();
    let (begin, apart) = (header.clock_start, header.clock_hz / 1000);
    let zero_ticks = begin + 5 * apart;
    let clock = GuestClock { zero_ticks, zero_ns: 5_000_000, early_ns: 0, drift_ns: 0 };
    let mut writer = Writer::new(Vec::new(), &header).expect("header");
    for number in 0..20 {
        let record = vmtrace::stream::EntryRecord::new(begin + number * apart, 1, 2, 3);
        writer.entries(0, &[record]).expect("vCPU");
    }
    writer.end(&Summary { guest_clock: Some(clock), ..Summary::default() }).expect("memory");
    let folder = Folder::new(&writer.into_inner().expect("memory"));
    let times = |options: &[&str]| {
        let options = [&["-o", "out.csv", "--since", "3ms", "--until", "6ms"], options].concat();
        folder.convert(&options);
        let csv = folder.read("out.csv");
        let times = csv.lines().skip(1).filter_map(|line| line.split(',').next());
        times.map(str::to_owned).collect::<Vec<_>>()
    };
    let expected = ["3000000", "4000000", "5000000", "6000000"];
    assert_eq!(times(&["--clock", "guest"]), expected);
    assert_eq!(times(&[]), expected);
    let header = |options: &[&str]| {
        folder.convert(&[&["-o", "out.jsonl", "--since", "3ms"], options].concat());
        serde_json::from_str::<Value>(folder.read("out.jsonl").lines().next().expect("a header"))
    };
    // They are other records.
    assert_eq!(header(&["--clock", "guest"]).expect("JSON")["clock_start"], zero_ticks);
    assert_eq!(header(&[]).expect("JSON")["clock_start"], begin);
}

#[test]
fn a_torn_trace_gives_a_torn_part() {
    let whole = stream();
    let folder = Folder::new(&whole[..whole.len() - 100]);
    for name in ["part.vmt", "part.csv"] {
        let output = folder.vmtrace(&["-o", name, "--since", "1004us"]);
        let said = String::from_utf8(output.stderr).expect("UTF-8");
        assert!(output.status.code() == Some(1) && said.contains("torn"), "{said}");
        assert!(folder.path(name).exists(), "{said}");
    }
    let csv = folder.read("part.csv");
    assert!(csv.contains("ext4_read") && csv.contains(",loss,"), "{csv}");
    std::fs::write(folder.path("trace.vmt"), b"no trace of anything").expect("room");
    let output = folder.vmtrace(&["-o", "other.csv", "--since", "1ms"]);
    let said = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(output.status.code() == Some(1) && said.contains("not a vmtrace stream"), "{said}");
    assert!(!folder.path("other.csv").exists());
}

// An empty part would pass for a guest that did nothing then.
#[test]
fn what_the_whole_does_not_have_is_said() {
    let folder = Folder::new(&stream());
    let said = |options: &[&str]| {
        let output = folder.vmtrace(options);
        (output.status.code(), String::from_utf8(output.stderr).expect("UTF-8"))
    };
    for out in ["part.vmt", "part.json", "part.csv"] {
        for (options, reason) in [
            (["--cpu", "64"], "--cpu 64: the guest has no such vCPU"),
            (["--tracer", "nosuch"], "--tracer nosuch: the trace has no such tracer"),
        ] {
            let (code, text) = said(&[&["-o", out][..], &options].concat());
            assert!(code == Some(2) && text.contains(reason), "{out}: {code:?} {text}");
            assert!(!folder.path(out).exists(), "{out}");
        }
        // Functions that are not of the part are of the trace.
        for options in [&["-f", "vfs_reed"][..], &["-f", "vfs_reed", "-f", "*", "--cpu", "0"]] {
            let (code, text) = said(&[&["-o", out][..], options].concat());
            assert_eq!(code, Some(0), "{text}");
            let notes = text.lines().filter(|line| line.contains(" has no record of ")).count();
            assert!(notes == 1 && text.contains("-f vfs_reed: "), "{text}");
        }
        let (_, text) = said(&["-o", out, "--since", "9999"]);
        assert!(text.contains("no record is of that time: the first is at "), "{text}");
        let (code, text) = said(&["-o", out, "--pid", "4000000", "--comm", "nosuch"]);
        assert_eq!(code, Some(0), "{text}");
        for option in ["--pid 4000000: no record", "--comm nosuch: no record"] {
            assert!(text.contains(option), "{text}");
        }
    }
}
