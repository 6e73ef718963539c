//! Directories of uftrace, read by uftrace.

use std::io::Write as _;
use std::path::Path;
use std::process::Stdio;

use vmtrace::stream::{
    EntryRecord, Header, LossReason, RecordBuffer, ReturnRecord, Summary, Symbol, Task, Writer,
};

use super::{BASE, Folder, KSYS_READ, MODULE, VFS_READ, many, reader, run, stream};

fn uftrace(folder: &Path, command: &str, options: &[&str]) -> String {
    let mut uftrace = reader("uftrace");
    uftrace.args([command, "--no-pager", "--color=no", "-d"]).arg(folder).args(options);
    run(&mut uftrace)
}

/// The words of each line.
fn lines(text: &str) -> Vec<String> {
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    text.lines().map(words).filter(|line| !line.is_empty()).collect()
}

#[test]
fn replays_calls_by_task() {
    let folder = Folder::new(&stream());
    let said = folder.convert(&["-o", "out.uftrace"]);
    for note in [
        "note: uftrace: 1 jumps at the ends of functions: what was jumped to is shown inside",
        "note: uftrace: 1 entries without a recorded return: shown as if they had taken no time",
        "note: uftrace: 1 calls without a return: shown as open, or as left at the next record",
        "note: uftrace: 2 marks: where calls are open",
        "note: uftrace: 1 losses: shown as calls",
    ] {
        assert!(said.contains(note), "{note}: {said}");
    }
    let place = folder.path("out.uftrace");
    let text = uftrace(&place, "replay", &["-f", "time,duration,tid,task,module"]);
    let expected = "\
# DURATION TID TIMESTAMP TASK NAME MODULE NAME FUNCTION
[ 42] 0.001000000 dd vmlinux | ksys_read() {
[ 42] 0.001000000 dd | /* watch:cpu (cpu=0) */
[ 42] 0.001002000 dd vmlinux | vfs_read() {
[ 42] 0.001003000 dd vmlinux | timer_tick();
[ 42] 0.001004000 dd ext4 | ext4_read() {
[ 43] 0.001100000 dd worker vmlinux | vfs_read() {
[ 43] 0.001100000 dd worker | /* watch:cpu (cpu=1) */
1.000 us [ 43] 0.001101000 dd worker vmlinux | } /* vfs_read */
[4194304] 0.001101000 vCPU 1 losses vmlinux | records lost (ring-full) {
[4194304] 0.001101000 vCPU 1 losses | /* external-data: 123 records lost on vCPU 1: ring-full */
0.001 us [4194304] 0.001101001 vCPU 1 losses vmlinux | } /* records lost (ring-full) */
500.000 us [ 42] 0.001504000 dd ext4 | } /* ext4_read */
502.000 us [ 42] 0.001504000 dd vmlinux | } /* vfs_read */
1.400 ms [ 42] 0.002400000 dd vmlinux | } /* ksys_read */
[ 43] 0.900000000 dd worker vmlinux | vfs_read() {
[ 43] 0.950000000 dd worker | /* external-data: console: a line, \"quoted\" */
uftrace stopped tracing with remaining functions
================================================
task: 43
[0] vfs_read";
    assert_eq!(lines(&text).join("\n"), expected);
    let full = uftrace(&place, "replay", &["--event-full"]);
    assert!(full.contains("/* external-data: attach 0.600 us: 4 sites */"), "{full}");
}

#[test]
fn reports_graphs_and_dumps() {
    let folder = Folder::new(&stream());
    folder.convert(&["-o", "out.uftrace"]);
    let place = folder.path("out.uftrace");
    let report = lines(&uftrace(&place, "report", &[]));
    for line in ["1.400 ms 898.000 us 1 ksys_read", "500.000 us 500.000 us 1 ext4_read"] {
        assert!(report.iter().any(|it| it == line), "{line} is not in {report:?}");
    }
    let tasks = lines(&uftrace(&place, "report", &["--task"]));
    assert!(tasks.contains(&"1.400 ms 1.400 ms 42 4 dd".to_owned()), "{tasks:?}");
    let graph = uftrace(&place, "graph", &["ksys_read"]);
    let expected = "\
# TOTAL TIME   FUNCTION
    1.400 ms : (1) ksys_read
  502.000 us : (1) vfs_read
             :  +-(1) timer_tick
             :  | 
  500.000 us :  +-(1) ext4_read
";
    assert!(graph.contains(expected), "{graph}");
    let flames = uftrace(&place, "dump", &["--flame-graph"]);
    assert!(lines(&flames).contains(&"ksys_read;vfs_read;ext4_read 1".to_owned()), "{flames}");
    let raw = uftrace(&place, "dump", &[]);
    assert!(raw.contains("(TASK_SESSION | SYM_REL_ADDR | MAX_STACK | EVENT)"), "{raw}");
    let about = uftrace(&place, "info", &[]);
    for line in ["# kernel version      : Linux 6.12.0-test", "42(dd), 43(dd worker)"] {
        assert!(about.contains(line), "{line} is not in {about}");
    }
}

// It opens, draws the list of graphs, and closes by its key.
#[test]
fn browses() {
    let folder = Folder::new(&stream());
    folder.convert(&["-o", "out.uftrace"]);
    let mut tui = reader("uftrace");
    tui.args(["tui", "-d"]).arg(folder.path("out.uftrace")).env("TERM", "xterm");
    tui.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut tui = tui.spawn().expect("it runs");
    tui.stdin.take().expect("a pipe").write_all(b"q").expect("it reads");
    let output = tui.wait_with_output().expect("it ends");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    assert!(text.contains("call Graph for session #1: dd"), "{text:?}");
}

// More than is held of a task, and more vCPUs and calls than records have bits for.
#[test]
fn reads_many_records_and_deep_calls() {
    let mut writer = many(1_000_000);
    let sp = |depth: u64| 0xffff_c900_0000_3ff0 - depth * 8;
    let mut buffer = RecordBuffer::new();
    for depth in 0..1030 {
        let entry = EntryRecord::new(1_000_000_000 + depth, KSYS_READ, 0, 7);
        buffer.push_frame(entry.with_sp(sp(depth)));
    }
    for depth in (0..1030).rev() {
        let at = 1_000_010_000 - depth;
        buffer.push_return(ReturnRecord::new(at, KSYS_READ, 0, 7, sp(depth)));
    }
    writer.records(1, &buffer).expect("vCPU");
    writer.end(&Summary::default()).expect("memory");
    let folder = Folder::new(&writer.into_inner().expect("memory"));
    let said = folder.convert(&["-o", "out.uftrace"]);
    assert!(said.contains("uftrace: 6 calls with 1024 or more around them: left out"), "{said}");
    let report = lines(&uftrace(&folder.path("out.uftrace"), "report", &["--task"]));
    for (pid, calls) in [(1, 20_000), (3, 20_000), (7, 1024)] {
        let end = format!("{pid} {calls} <...>");
        assert!(report.iter().any(|line| line.ends_with(&end)), "{end} is not in {report:?}");
    }
}

// A guest names its functions, modules and tasks as it likes.
#[test]
fn names_leave_neither_their_lines_nor_the_directory() {
    let header = Header {
        clock_hz: 1_000_000_000,
        vcpus: 1,
        address_base: Header::TOP_4_GIB,
        release: "6.12\nexename:x".into(),
        ..Header::default()
    };
    let mut writer = Writer::new(Vec::new(), &header).expect("header");
    let odd = [
        Symbol { address: BASE, size: 0x100, name: "__sym_end", module: "../../out" },
        Symbol { address: BASE + 0x100, size: 0x100, name: "a b\t\"c\" {}", module: "info" },
        Symbol { address: MODULE, size: 0x100, name: "in_a", module: "a/b" },
        Symbol { address: MODULE + 0x100, size: 0x100, name: "in_b", module: "a_b" },
    ];
    writer.symbols(odd).expect("room");
    writer.task(Task::new(5, 5, b"a\" pid=1\n/x")).expect("memory");
    let functions = [KSYS_READ, VFS_READ, super::EXT4_READ, super::EXT4_READ + 0x100];
    let records: Vec<_> =
        (1..).zip(functions).map(|(at, of)| EntryRecord::new(at, of, 0, 5)).collect();
    writer.entries(0, &records).expect("vCPU");
    writer.loss(0, 1, LossReason::Full).expect("vCPU");
    writer.end(&Summary::default()).expect("memory");
    let folder = Folder::new(&writer.into_inner().expect("memory"));
    folder.convert(&["-o", "out.uftrace"]);
    let place = folder.path("out.uftrace");
    let report = lines(&uftrace(&place, "report", &[]));
    for line in ["1 __sym_end_", "1 a b?\"c\" {}", "1 in_a", "1 in_b"] {
        assert!(report.iter().any(|it| it == line), "{line} is not in {report:?}");
    }
    let about = uftrace(&place, "info", &[]);
    assert!(about.contains("5(a- pid=1?-x)"), "{about}");
    let mut files: Vec<_> = std::fs::read_dir(&place)
        .expect("a directory")
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"))
        .filter(|name| name.ends_with(".sym"))
        .collect();
    files.sort();
    let expected =
        ["a_b.sym", "info.sym", "module-0-.._.._out.sym", "module-3-a_b.sym", "vmlinux.sym"];
    assert_eq!(files, expected);
}
