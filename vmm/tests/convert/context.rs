//! The state of the CPU in every format that can express it.

use vmtrace::stream::{
    Context, EntryRecord, Header, RecordBuffer, ReturnRecord, Summary, Symbol, Task, Writer,
};

use super::{BASE, Folder, KSYS_READ, TICK, VFS_READ, reader, run};

/// A call, with interrupts on, and an entry in an interrupt inside of it.
fn stream() -> Vec<u8> {
    let header = Header {
        clock_hz: 1_000_000_000,
        vcpus: 1,
        address_base: Header::TOP_4_GIB,
        extra: vec![Context::header()],
        ..Header::default()
    };
    let mut writer = Writer::new(Vec::new(), &header).expect("header");
    let symbols = [
        Symbol::new(BASE + 0x100, 0x100, "vfs_read"),
        Symbol::new(BASE + 0x200, 0x100, "timer_tick"),
    ];
    writer.symbols(symbols).expect("room");
    writer.task(Task::new(42, 42, b"dd")).expect("memory");
    let mut buffer = RecordBuffer::new();
    let add = |buffer: &mut RecordBuffer, flags, preemption, migration| {
        buffer.with_context(Context::new(flags, preemption, migration));
    };
    buffer.push_frame(EntryRecord::new(1_000_000, VFS_READ, KSYS_READ + 5, 42).with_sp(64));
    add(&mut buffer, Context::BH_OFF, 1, 2);
    buffer.push(EntryRecord::new(1_001_000, TICK, VFS_READ + 5, 42));
    add(&mut buffer, Context::IRQS_OFF | Context::HARDIRQ, 3, 0);
    buffer.push_return(ReturnRecord::new(1_002_000, VFS_READ, 0, 42, 64));
    add(&mut buffer, Context::NEED_RESCHED | Context::PREEMPT_RESCHED, 0, 0);
    writer.records(0, &buffer).expect("vCPU");
    writer.end(&Summary::default()).expect("memory");
    writer.into_inner().expect("memory")
}

// Who looks for the code that keeps interrupts off must find it with any reader, and is not told in
// vain where there is none.
#[test]
fn the_state_of_the_cpu_is_converted_or_told_of() {
    let folder = Folder::new(&stream());
    for (place, says) in [
        ("out.txt", false),
        ("out.graph", false),
        ("out.jsonl", false),
        ("out.csv", false),
        ("out.dat", false),
        ("out.pftrace", false),
        ("out.ctf", false),
        ("out.json", false),
        ("out.uftrace", true),
        ("out.folded", true),
        ("out.html", true),
    ] {
        let said = folder.convert(&["-o", place]);
        let told = said.contains(": 3 events with the state of their CPU: left out\n");
        assert_eq!(told, says, "{place}: {said}");
    }
    let text = folder.read("out.txt");
    assert!(text.contains("|||||  TIMESTAMP  FUNCTION\n"), "{text}");
    assert!(
        text.contains("\n              dd-42      [000] b..12     0.001000: vfs_read <-"),
        "{text}"
    );
    assert!(text.contains(" [000] d.h3.     0.001001: timer_tick <-vfs_read\n"), "{text}");
    let graph = folder.read("out.graph");
    assert!(graph.contains(" 0)  b..12 |               |  vfs_read() {\n"), "{graph}");
    assert!(graph.contains(" 0)  .N... |   2.000 us    |  }\n"), "{graph}");
    let lines = folder.read("out.jsonl");
    assert!(lines.contains(r#""depth":0,"context":"b..12"}"#), "{lines}");
    assert!(lines.contains(r#""duration_ns":2000,"context":".N..."}"#), "{lines}");
    let rows = folder.read("out.csv");
    assert!(rows.contains(",timer_tick,,vfs_read,,,,,,d.h3.\n"), "{rows}");
    let chrome = folder.read("out.json");
    assert!(chrome.contains(r#""context":"b..12""#), "{chrome}");
    assert!(chrome.contains(r#""context at return":".N...""#), "{chrome}");
    let report = run(reader("trace-cmd").args(["report", "-l", "-i"]).arg(folder.path("out.dat")));
    assert!(report.contains("0d.h3"), "{report}");
    assert!(report.contains("0.N.."), "{report}");
    let mut babeltrace = reader("babeltrace2");
    let text = run(babeltrace.arg(folder.path("out.ctf")));
    assert!(text.contains(r#"common_context = "d.h3.""#), "{text}");
    let perfetto = std::fs::read(folder.path("out.pftrace")).expect("a trace");
    for part in ["context at return", "b..12", "d.h3.", ".N..."] {
        assert!(memchr::memmem::find(&perfetto, part.as_bytes()).is_some(), "{part}");
    }
}
