//! `vmtrace convert` run as a user would, and its outputs read by the programs that they are for.
//! Those come from `images/readers`, which `scripts/test` calls.

mod chart;
mod context;
mod ctf;
mod ends;
mod events;
mod exits;
mod kernelshark;
mod parquet;
mod part;
mod perfetto;
mod uftrace;
mod vmt;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;
use vmtrace::stream::{
    CallerCount, EntryRecord, Exit, Header, LossReason, Mark, MarkKind, RecordBuffer, ReturnRecord,
    Summary, Symbol, TailRecord, Task, Writer, sample,
};

const BASE: u64 = 0xffff_ffff_8100_0000;
const MODULE: u64 = 0xffff_ffff_c010_0000;
const KSYS_READ: u32 = 0x8100_0000;
const VFS_READ: u32 = 0x8100_0100;
const EXT4_READ: u32 = 0xc010_0000;
const TICK: u32 = 0x8100_0200;

/// Two vCPUs: nested calls of two tasks, one of which ends by a tail jump, an entry without a
/// return, a call without an end, a loss, and marks.
fn stream() -> Vec<u8> {
    let header = Header {
        arch: "x86_64".into(),
        clock: "x86-tsc".into(),
        clock_hz: 1_000_000_000,
        clock_start: 1_000_000,
        release: "6.12.0-test".into(),
        vcpus: 2,
        address_base: Header::TOP_4_GIB,
        vmtrace_version: "0.1.0".into(),
        ..Header::default()
    };
    let mut writer = Writer::new(Vec::new(), &header).expect("header");
    let symbols = [
        Symbol::new(BASE, 0x100, "ksys_read"),
        Symbol::new(BASE + 0x100, 0x100, "vfs_read"),
        Symbol::new(BASE + 0x200, 0x100, "timer_tick"),
        Symbol { address: MODULE, size: 0x100, name: "ext4_read", module: "ext4" },
    ];
    writer.symbols(symbols).expect("room");
    writer.task(Task::new(42, 42, b"dd")).expect("memory");
    writer.task(Task::new(43, 42, b"dd worker")).expect("memory");
    let at = |microseconds: u64| 1_000_000 + microseconds * 1_000;
    let mark = |us, kind, duration_ns, text: &str| Mark {
        ticks: at(us),
        kind,
        duration_ns,
        text: text.into(),
    };
    writer.mark(&mark(1, MarkKind::Attach, 600, "4 sites")).expect("memory");
    let sp = 0xffff_c900_0000_3000_u64;
    let enter =
        |us, function, caller, pid, sp| EntryRecord::new(at(us), function, caller, pid).with_sp(sp);
    let leave = |us, function, pid, sp| ReturnRecord::new(at(us), function, 0, pid, sp);
    let mut buffer = RecordBuffer::new();
    buffer.push_frame(enter(1_000, KSYS_READ, 0, 42, sp));
    buffer.push_frame(enter(1_002, VFS_READ, KSYS_READ + 5, 42, sp - 64));
    buffer.push(EntryRecord::new(at(1_003), TICK, VFS_READ + 5, 42));
    // vfs_read jumps to ext4_read, which returns for both.
    buffer.push_tail(TailRecord::new(at(1_004), VFS_READ, EXT4_READ, 42, sp - 64));
    buffer.push_frame(enter(1_004, EXT4_READ, KSYS_READ + 5, 42, sp - 64));
    buffer.push_return(leave(1_504, EXT4_READ, 42, sp - 64));
    buffer.push_return(leave(2_400, KSYS_READ, 42, sp));
    writer.records(0, &buffer).expect("vCPU");
    buffer.clear();
    let other = sp + 0x10_000;
    buffer.push_frame(enter(1_100, VFS_READ, KSYS_READ + 5, 43, other));
    buffer.push_return(leave(1_101, VFS_READ, 43, other));
    writer.records(1, &buffer).expect("vCPU");
    writer.loss(1, 123, LossReason::Full).expect("vCPU");
    buffer.clear();
    // Longer ago than the bits of a time of ftrace's records.
    buffer.push_frame(enter(900_000, VFS_READ, KSYS_READ + 5, 43, other));
    writer.records(1, &buffer).expect("vCPU");
    writer.mark(&mark(950_000, MarkKind::Console, 0, "a line, \"quoted\"")).expect("memory");
    writer.end(&Summary { exit: Exit::Poweroff, ..Summary::default() }).expect("memory");
    writer.into_inner().expect("memory")
}

struct Folder(TempDir);

impl Folder {
    fn new(stream: &[u8]) -> Self {
        let folder = tempfile::tempdir().expect("a directory");
        std::fs::write(folder.path().join("trace.vmt"), stream).expect("room");
        Self(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn vmtrace(&self, options: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vmtrace"));
        command.current_dir(&self.0).args(["convert", "trace.vmt"]).args(options);
        command.output().expect("vmtrace runs")
    }

    /// Converts, and returns what was said.
    fn convert(&self, options: &[&str]) -> String {
        let output = self.vmtrace(options);
        let said = String::from_utf8(output.stderr).expect("UTF-8");
        assert_eq!(output.status.code(), Some(0), "{said}");
        said
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).expect("a text")
    }
}

/// 40,000 entries in rounds that are so many nanoseconds apart, of two of three vCPUs.
fn many(apart: u64) -> Writer<Vec<u8>> {
    let header = Header {
        clock_hz: 1_000_000_000,
        vcpus: 3,
        address_base: Header::TOP_4_GIB,
        ..Header::default()
    };
    let mut writer = Writer::new(Vec::new(), &header).expect("header");
    writer.symbols([Symbol::new(BASE, 0x100, "ksys_read")]).expect("room");
    for round in 0..200_u64 {
        for vcpu in [0, 2] {
            let at = |number: u64| round * apart + number * 1000 + u64::from(vcpu);
            let records: Vec<_> = (0..100)
                .map(|number| EntryRecord::new(at(number), KSYS_READ, 0, vcpu + 1))
                .collect();
            writer.entries(vcpu, &records).expect("vCPU");
        }
    }
    writer
}

/// A program of `images/readers`.
fn reader(name: &str) -> Command {
    let cache = vmtrace_emulated::cache_dir().expect("a cache: set VMTRACE_CACHE");
    let root = cache.join("readers");
    let own = [format!("lib/chromium/{name}"), format!("bin/{name}")];
    let own = own.iter().map(|path| root.join("usr").join(path)).find(|path| path.exists());
    let Some(own) = own else {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let there = std::env::split_paths(&path).any(|folder| folder.join(name).exists());
        assert!(there, "{name} is not there: run images/readers (scripts/test does)");
        return Command::new(name);
    };
    let folders = |path: &Path| {
        let entries = std::fs::read_dir(path).expect("libraries");
        let entries = entries.map(|entry| entry.expect("an entry").path());
        entries.filter(|path| path.is_dir()).collect::<Vec<_>>()
    };
    let mut libraries = folders(&root.join("usr/lib"));
    // Some libraries have a folder of their own there.
    libraries.extend(libraries.clone().iter().flat_map(|path| folders(path)));
    libraries.sort();
    let mut command = Command::new(own);
    if let Some(plugins) =
        libraries.iter().map(|path| path.join("traceevent/plugins")).find(|it| it.exists())
    {
        command.env("TRACEEVENT_PLUGIN_DIR", plugins);
    }
    if let Some(plugins) =
        libraries.iter().map(|path| path.join("babeltrace2/plugins")).find(|it| it.exists())
    {
        command.env("BABELTRACE_PLUGIN_PATH", plugins);
    }
    command.env("LD_LIBRARY_PATH", std::env::join_paths(libraries).expect("paths"));
    command
}

/// Python with the packages of `images/python-readers.txt`.
fn python() -> Command {
    let cache = vmtrace_emulated::cache_dir().expect("a cache: set VMTRACE_CACHE");
    let python = cache.join("readers-python/bin/python");
    assert!(python.exists(), "it is not there: run images/readers (scripts/test does)");
    Command::new(python)
}

fn run(command: &mut Command) -> String {
    let output = command.output().expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {text} {said}");
    assert_eq!(said, "", "{command:?}");
    text
}

#[test]
fn trace_cmd_reads_trace_dat() {
    let folder = Folder::new(&stream());
    let said = folder.convert(&["-o", "out.dat"]);
    assert!(said.contains("note: trace.dat: 1 jumps at the ends of functions: "), "{said}");
    assert!(said.contains("note: trace.dat: 1 calls without a return: shown as open"), "{said}");
    folder.convert(&["-o", "out7", "--format", "trace.dat-7"]);
    let report =
        |name: &str| run(reader("trace-cmd").arg("report").arg("-i").arg(folder.path(name)));
    let text = report("out.dat");
    let expected = "\
cpus=2
          <idle>-0     [000]     0.000001: print:                attach 0.600 us: 4 sites
              dd-42    [000]     0.001000: funcgraph_entry:                   |  ksys_read() {
              dd-42    [000]     0.001002: funcgraph_entry:                   |    vfs_read() {
              dd-42    [000]     0.001003: function:             timer_tick
              dd-42    [000]     0.001004: funcgraph_entry:                   |      ext4_read() {
       dd worker-43    [001]     0.001100: funcgraph_entry:        1.000 us   |  vfs_read();
CPU:1 [123 EVENTS DROPPED]
          <idle>-0     [001]     0.001101: print:                123 records lost: ring-full
              dd-42    [000]     0.001504: funcgraph_exit:       ! 500.000 us |      }
              dd-42    [000]     0.001504: funcgraph_exit:       ! 502.000 us |    }
              dd-42    [000]     0.002400: funcgraph_exit:       # 1400.000 us |  }
       dd worker-43    [001]     0.900000: funcgraph_entry:                   |  vfs_read() {
          <idle>-0     [000]     0.950000: print:                console: a line, \"quoted\"
";
    assert_eq!(text, expected);
    assert_eq!(report("out7"), text);
    let parents =
        run(reader("trace-cmd").args(["report", "-O", "parent", "-i"]).arg(folder.path("out.dat")));
    assert!(parents.contains("function:             timer_tick <-- vfs_read\n"), "{parents}");
    let about = |option: &str| {
        let path = folder.path("out7");
        run(reader("trace-cmd").args(["report", option, "-i"]).arg(path))
    };
    let stat = about("--stat");
    assert!(stat.contains("CPU: 1\noverrun: 123\n"), "{stat}");
    let version = about("--version");
    assert!(version.contains("vmtrace 0.1.0\n"), "{version}");
}

// More than a page, in more than one block of the scratch file, and vCPUs that take turns.
#[test]
fn trace_cmd_reads_many_pages() {
    let mut writer = many(1_000_000_000);
    writer.end(&Summary::default()).expect("memory");
    let folder = Folder::new(&writer.into_inner().expect("memory"));
    for format in ["trace.dat", "trace.dat-7"] {
        folder.convert(&["-o", format, "--format", format]);
        let text = run(reader("trace-cmd").arg("report").arg("-i").arg(folder.path(format)));
        let lines: Vec<_> = text.lines().filter(|line| line.contains("function:")).collect();
        assert_eq!(lines.len(), 40_000);
        let time = |line: &str| {
            line.split_whitespace().nth(2).and_then(|time| time.trim_end_matches(':').parse().ok())
        };
        let times: Vec<f64> = lines.iter().filter_map(|line| time(line)).collect();
        assert_eq!(times.len(), lines.len());
        assert!(times.is_sorted() && times[39_999] > 199.0);
    }
}

/// A protobuf message: values by the numbers of their fields.
type Message = BTreeMap<u64, Vec<Wire>>;

/// A value. An integer is as it is, all else bytes.
#[derive(Clone, Debug, PartialEq)]
enum Wire {
    Number(u64),
    Bytes(Vec<u8>),
}

/// Decodes a message by the encoding's own rules (protobuf.dev, "Encoding"), without knowing what
/// vmtrace takes the fields for.
fn fields(mut bytes: &[u8]) -> Message {
    fn varint(bytes: &mut &[u8]) -> u64 {
        let mut number = 0;
        for shift in (0..).step_by(7) {
            let (first, rest) = bytes.split_first().expect("whole");
            *bytes = rest;
            number |= u64::from(first & 0x7f) << shift;
            if first & 0x80 == 0 {
                break;
            }
        }
        number
    }
    let mut found = Message::new();
    while !bytes.is_empty() {
        let tag = varint(&mut bytes);
        let value = match tag & 7 {
            0 => Wire::Number(varint(&mut bytes)),
            2 => {
                let length = usize::try_from(varint(&mut bytes)).expect("small");
                let (value, rest) = bytes.split_at(length);
                bytes = rest;
                Wire::Bytes(value.to_vec())
            }
            other => panic!("wire type {other} is not written"),
        };
        found.entry(tag >> 3).or_default().push(value);
    }
    found
}

fn number(message: &Message, field: u64) -> Option<u64> {
    match message.get(&field)?.first()? {
        Wire::Number(number) => Some(*number),
        Wire::Bytes(_) => panic!("field {field} is not a number"),
    }
}

fn messages(message: &Message, field: u64) -> Vec<Message> {
    let bytes = message.get(&field).map(Vec::as_slice).unwrap_or_default();
    let bytes = bytes.iter().map(|value| match value {
        Wire::Bytes(bytes) => fields(bytes),
        Wire::Number(_) => panic!("field {field} is no message"),
    });
    bytes.collect()
}

fn text(message: &Message, field: u64) -> Option<String> {
    match message.get(&field)?.first()? {
        Wire::Bytes(bytes) => Some(String::from_utf8(bytes.clone()).expect("UTF-8")),
        Wire::Number(_) => panic!("field {field} is no text"),
    }
}

// The numbers of fields are those of protos/perfetto/trace/*.proto. What trace_processor makes of them is
// in perfetto.rs.
#[test]
fn perfetto_has_slices_by_thread() {
    let folder = Folder::new(&stream());
    folder.convert(&["-o", "out.pftrace"]);
    let trace = fields(&std::fs::read(folder.path("out.pftrace")).expect("a trace"));
    let (mut names, mut tracks, mut slices) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
    let (mut open, mut instants) = (BTreeMap::<_, Vec<_>>::new(), Vec::new());
    let (mut lost, mut counters) = (Vec::new(), Vec::new());
    for packet in messages(&trace, 1) {
        for interned in messages(&packet, 12) {
            for name in messages(&interned, 2) {
                names.insert(number(&name, 1), text(&name, 2).expect("a name"));
            }
        }
        for track in messages(&packet, 60) {
            let thread = messages(&track, 4).first().map(|thread| {
                (number(thread, 1), number(thread, 2), text(thread, 5).expect("a name"))
            });
            tracks.insert(number(&track, 1), (text(&track, 2), thread));
        }
        for bundle in messages(&packet, 1) {
            assert_eq!(number(&bundle, 3), Some(1));
            lost.push(number(&bundle, 1));
        }
        for event in messages(&packet, 11) {
            let (track, at) = (number(&event, 11), number(&packet, 8).expect("a time"));
            let name = text(&event, 23).or_else(|| names.get(&Some(number(&event, 10)?)).cloned());
            match number(&event, 9) {
                Some(1) => open.entry(track).or_default().push((name.expect("a name"), at)),
                Some(2) => {
                    let (name, from) = open.get_mut(&track).and_then(Vec::pop).expect("open");
                    let depth = open[&track].len();
                    slices.push((track, name, from, at - from, depth));
                }
                Some(3) => instants.push((track, name.expect("a name"), at)),
                Some(4) => counters.push((track, at, number(&event, 30))),
                other => panic!("type {other:?}"),
            }
        }
    }
    let thread = |tid| {
        let found = tracks.iter().find(|(_, (_, thread))| {
            thread.as_ref().is_some_and(|(_, this, _)| *this == Some(tid))
        });
        *found.expect("a thread").0
    };
    let named = |name: &str| {
        let found = tracks.iter().find(|(_, (this, _))| this.as_deref() == Some(name));
        *found.expect("a track").0
    };
    let (main, worker) = (thread(42), thread(43));
    assert_eq!(tracks[&worker].1, Some((Some(42), Some(43), "dd worker".to_owned())));
    let has = |track, name: &str, from, duration, depth| {
        let slice = (track, name.to_owned(), from, duration, depth);
        assert!(slices.contains(&slice), "{slice:?} is not in {slices:?}");
    };
    has(main, "ksys_read", 1_000_000, 1_400_000, 0);
    has(main, "vfs_read", 1_002_000, 502_000, 1);
    has(main, "ext4_read [ext4]", 1_004_000, 500_000, 2);
    has(worker, "vfs_read", 1_100_000, 1_000, 0);
    has(named("pauses"), "attach: 4 sites", 400, 600, 0);
    has(named("vCPU 0"), "dd 42", 1_000_000, 1_400_000, 0);
    assert!(instants.contains(&(main, "timer_tick".to_owned(), 1_003_000)), "{instants:?}");
    let line = (named("console"), "a line, \"quoted\"".to_owned(), 950_000_000);
    assert!(instants.contains(&line), "{instants:?}");
    let loss = (named("vCPU 1"), "123 records lost".to_owned(), 1_101_000);
    assert!(instants.contains(&loss), "{instants:?}");
    assert_eq!(counters, [(named("vCPU 1 lost records"), 1_101_000, Some(123))]);
    assert_eq!(lost, [Some(1)]);
    let open: usize = open.values().map(Vec::len).sum();
    assert_eq!(open, 0, "what is unfinished ends where the trace does");
}

#[test]
fn folded_stacks_have_own_times() {
    let folder = Folder::new(&stream());
    let said = folder.convert(&["-o", "out.folded"]);
    assert!(said.contains("note: folded: 1 losses: left out"), "{said}");
    let mut lines: Vec<_> = folder.read("out.folded").lines().map(str::to_owned).collect();
    lines.sort();
    let expected = [
        "dd worker;vfs_read 1000",
        "dd;ksys_read 898000",
        "dd;ksys_read;vfs_read 2000",
        "dd;ksys_read;vfs_read;ext4_read [ext4] 500000",
    ];
    assert_eq!(lines, expected);
    // Without returns: how often.
    folder.convert(&["-o", "few.folded", "-f", "timer_*"]);
    assert_eq!(folder.read("few.folded"), "dd;vfs_read;timer_tick 1\n");
}

#[test]
fn chrome_json_nests() {
    let folder = Folder::new(&stream());
    folder.convert(&["-o", "out.json"]);
    let trace: serde_json::Value = serde_json::from_str(&folder.read("out.json")).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("a list");
    let (mut open, mut slices) = (BTreeMap::<_, Vec<_>>::new(), Vec::new());
    for event in events {
        let thread = (event["pid"].as_u64(), event["tid"].as_u64());
        let at = event["ts"].as_f64().expect("a time");
        match event["ph"].as_str().expect("a kind") {
            "B" => open.entry(thread).or_default().push((event["name"].as_str(), at)),
            "E" => {
                let (name, from) = open.get_mut(&thread).and_then(Vec::pop).expect("open");
                slices.push((thread.1, name, from, (at - from).round(), open[&thread].len()));
            }
            _ => {}
        }
    }
    let expected = [
        (Some(43), Some("vfs_read"), 1100.0, 1.0, 0),
        (Some(42), Some("ext4_read [ext4]"), 1004.0, 500.0, 2),
        (Some(42), Some("vfs_read"), 1002.0, 502.0, 1),
        (Some(42), Some("ksys_read"), 1000.0, 1400.0, 0),
    ];
    assert_eq!(slices[..4], expected);
    let named = |name: &str| events.iter().any(|event| event["name"] == name);
    assert!(named("123 records lost") && named("timer_tick") && named("attach"));
}

#[test]
fn csv_has_a_row_an_event() {
    let folder = Folder::new(&stream());
    folder.convert(&["-o", "out.csv"]);
    let text = folder.read("out.csv");
    let lines: Vec<_> = text.lines().collect();
    assert!(lines[0].starts_with("time_ns,event,vcpu,pid,tgid,comm,function,module,caller,"));
    for line in [
        "1000,attach,,,,,,,,,,600,,4 sites,",
        "1002000,entry,0,42,42,dd,vfs_read,,ksys_read,,1,,,,",
        "1003000,entry,0,42,42,dd,timer_tick,,vfs_read,,,,,,",
        "1504000,return,0,42,42,dd,ext4_read,ext4,,,2,500000,,,",
        "1101000,loss,1,,,,,,,,,,123,ring-full,",
        "950000000,console,,,,,,,,,,,,\"a line, \"\"quoted\"\"\",",
    ] {
        assert!(lines.contains(&line), "{line} is not in {text}");
    }
    assert_eq!(lines.len(), 1 + 14);
}

// A format that has no words for counts must not silently leave them out.
#[test]
fn counts_are_converted_or_told_of() {
    let folder = Folder::new(&sample::counts());
    for (place, says) in [
        ("out.csv", false),
        ("out.parquet", false),
        ("out.jsonl", false),
        ("out.txt", false),
        ("out.graph", false),
        ("out.pftrace", true),
        ("out.dat", true),
        ("out.uftrace", true),
        ("out.ctf", true),
        ("out.folded", true),
        ("out.html", true),
        ("out.json", true),
    ] {
        let output = folder.vmtrace(&["-o", place]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(0), "{place}: {said}");
        assert_eq!(said.contains(": 6 counts of calls: left out\n"), says, "{place}: {said}");
    }
    assert!(folder.read("out.csv").contains("\n0,count,1,,,,vfs_read,,,calls,,,300,,\n"));
    assert!(folder.read("out.jsonl").contains(r#""tracer":"calls","cpu":1,"hits":300}"#));
    for place in ["out.txt", "out.graph"] {
        assert!(folder.read(place).contains("\n# counted: 3 functions, 1017 calls\n"), "{place}");
    }
}

// So are those by caller, with the caller where a format has a place for one.
#[test]
fn counts_by_caller_are_converted_or_told_of() {
    let header = sample::header();
    let offset = |address| header.offset(address).expect("an address of the window");
    let mut writer = Writer::new(Vec::new(), &header).expect("header");
    let caller = Symbol { address: sample::OPEN, size: 64, name: "ext4_open", module: "ext4" };
    writer.symbols([Symbol::new(sample::READ, 64, "vfs_read"), caller]).expect("room");
    let caller = offset(sample::OPEN) + 7;
    let count = CallerCount { function: offset(sample::READ), caller, hits: 300 };
    writer.callers(1, 0, &[count]).expect("vCPU");
    writer.end(&Summary::default()).expect("memory");
    let folder = Folder::new(&writer.into_inner().expect("memory"));
    for (place, says) in [
        ("out.csv", false),
        ("out.jsonl", false),
        ("out.txt", false),
        ("out.parquet", false),
        ("out.dat", true),
        ("out.folded", true),
    ] {
        let output = folder.vmtrace(&["-o", place]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(0), "{place}: {said}");
        assert_eq!(said.contains(": 1 counts of calls: left out\n"), says, "{place}: {said}");
    }
    let csv = folder.read("out.csv");
    assert!(csv.contains("\n0,count,1,,,,vfs_read,,ext4_open [ext4],,,,300,,\n"), "{csv}");
    let json =
        r#""function":"vfs_read","caller":"ext4_open","caller_module":"ext4","cpu":1,"hits":300}"#;
    assert!(folder.read("out.jsonl").contains(json));
    assert!(folder.read("out.txt").contains("\n#         300  100.0%  ext4_open [ext4]\n"));
    // A part of it that is a trace has them as well.
    assert_eq!(folder.vmtrace(&["-o", "part.vmt", "-f", "vfs_read"]).status.code(), Some(0));
    let part = std::fs::read(folder.path("part.vmt")).expect("a trace");
    let part = Folder::new(&part);
    part.convert(&["-o", "part.jsonl"]);
    assert!(part.read("part.jsonl").contains(json));
}

#[test]
fn says_what_a_directory_cannot() {
    for format in ["uftrace", "ctf", "parquet-dir"] {
        let folder = Folder::new(&stream());
        let place = format!("out.{format}");
        std::fs::create_dir_all(folder.path(&place).join("old")).expect("a directory");
        for (place, why) in [(&*place, "something is there"), ("-", "standard output is not")] {
            let output = folder.vmtrace(&["-o", place, "--format", format]);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(1), "{said}");
            assert!(said.contains(why), "{said}");
        }
    }
}

#[test]
fn says_what_is_wrong() {
    let stream = stream();
    let folder = Folder::new(&stream);
    let fails = |options: &[&str], code: i32, why: &str| {
        let output = folder.vmtrace(options);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(said.contains(why), "{said}");
    };
    fails(&["-o", "out"], 2, "no format goes with this name; use --format perfetto|trace.dat|");
    fails(&["-o", "none/out.dat"], 1, "cannot write none/out.dat");
    fails(&["-o", "out.dat", "--format", "pdf"], 2, "invalid value 'pdf'");
    // To standard output.
    let output = folder.vmtrace(&["-o", "-", "--format", "csv"]);
    assert!(output.stdout.starts_with(b"time_ns,"));
    // Torn: what is whole is converted, and that it is not all is said.
    std::fs::write(folder.path("trace.vmt"), &stream[..stream.len() - 1]).expect("room");
    fails(&["-o", "out.csv"], 1, "torn stream");
    assert!(Path::new(&folder.path("out.csv")).exists());
    std::fs::write(folder.path("trace.vmt"), b"\x7fELF and so on").expect("room");
    fails(&["-o", "other.csv"], 1, "not a vmtrace stream");
    assert!(!folder.path("other.csv").exists());
    let left = std::fs::read_dir(folder.0.path()).expect("a directory");
    let left: Vec<_> = left.map(|entry| entry.expect("an entry").file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().starts_with(".vmtrace")), "{left:?}");
}
