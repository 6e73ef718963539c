//! Events of tracepoints, read by the programs that the formats are for.

use vmtrace::stream::{
    EventRecord, Header, LossReason, RecordBuffer, Shape, Summary, Symbol, Task, ValueField,
    ValuesFormat, ValuesOf, Writer,
};

use super::{Folder, Message, fields, messages, number, reader, run, text};

const BASE: u32 = 0x8200_0000;

/// Events of one vCPU, one behind the other.
struct Events {
    writer: Writer<Vec<u8>>,
    kinds: u32,
    now: u64,
}

fn field(name: &str, shape: Shape) -> ValueField {
    ValueField { name: name.to_owned(), shape }
}

fn name(text: &[u8]) -> [u64; 2] {
    let mut all = [0; 16];
    all[..text.len()].copy_from_slice(text);
    let (low, high) = all.split_at(8);
    [low, high].map(|half| u64::from_le_bytes(half.try_into().expect("8 bytes")))
}

impl Events {
    fn new() -> Self {
        let header = Header {
            clock_hz: 1_000_000_000,
            vcpus: 2,
            address_base: Header::TOP_4_GIB,
            ..Header::default()
        };
        let mut writer = Writer::new(Vec::new(), &header).expect("header");
        writer.task(Task::new(5, 5, b"dd")).expect("memory");
        Self { writer, kinds: 0, now: 1_000_000 }
    }

    /// A kind of events, by its address.
    fn kind(&mut self, name: &str, values: Vec<ValueField>, print: Option<&str>) -> u32 {
        let function = BASE + 8 * self.kinds;
        self.kinds += 1;
        let address = 0xffff_ffff_0000_0000 | u64::from(function);
        self.writer.symbols([Symbol::new(address, 8, name)]).expect("room");
        let (of, print) = (ValuesOf::Event, print.map(str::to_owned));
        let format = ValuesFormat { function, tracer: 0, of, values, print };
        self.writer.values(&format).expect("room");
        function
    }

    fn event(&mut self, vcpu: u32, pid: u32, kind: u32, failed: u64, words: &[u64]) {
        self.now += 1000;
        let mut buffer = RecordBuffer::new();
        let record = EventRecord::new(self.now, kind, 0, pid);
        buffer.push_event(record, failed, words.iter().copied());
        self.writer.records(vcpu, &buffer).expect("vCPU");
    }

    fn stream(mut self) -> Vec<u8> {
        self.writer.end(&Summary::default()).expect("memory");
        self.writer.into_inner().expect("memory")
    }

    fn end(self) -> Folder {
        Folder::new(&self.stream())
    }
}

fn sched_switch(events: &mut Events) -> u32 {
    let (comm, int) = (Shape::Text { bytes: 16 }, Shape::Signed { bytes: 4 });
    let values = vec![
        field("prev_comm", comm.clone()),
        field("prev_pid", int.clone()),
        field("prev_prio", int.clone()),
        field("prev_state", Shape::Signed { bytes: 8 }),
        field("next_comm", comm),
        field("next_pid", int.clone()),
        field("next_prio", int),
    ];
    let print = "prev_comm={prev_comm} prev_pid={prev_pid} prev_prio={prev_prio} \
                 prev_state={prev_state:state} ==> next_comm={next_comm} next_pid={next_pid} \
                 next_prio={next_prio}";
    events.kind("sched:sched_switch", values, Some(print))
}

fn switch(from: (&[u8], u64), state: u64, to: (&[u8], u64)) -> Vec<u64> {
    [&name(from.0)[..], &[from.1, 120, state], &name(to.0), &[to.1, 120]].concat()
}

/// Values of all kinds, in all forms, with some that could not be read.
pub(super) fn everything() -> Folder {
    Folder::new(&everything_stream())
}

pub(super) fn everything_stream() -> Vec<u8> {
    let mut events = Events::new();
    let modes = || Shape::Enum {
        bytes: 4,
        signed: true,
        names: vec![(-1, "NOTHING".into()), (3, "BOTH".into()), (1 << 31, "NEVER".into())],
    };
    let values = || {
        vec![
            field("s8", Shape::Signed { bytes: 1 }),
            field("s16", Shape::Signed { bytes: 2 }),
            field("s32", Shape::Signed { bytes: 4 }),
            field("s64", Shape::Signed { bytes: 8 }),
            field("u8", Shape::Unsigned { bytes: 1 }),
            field("u16", Shape::Unsigned { bytes: 2 }),
            field("u32", Shape::Unsigned { bytes: 4 }),
            field("u64", Shape::Unsigned { bytes: 8 }),
            field("yes", Shape::Bool { bytes: 4 }),
            field("sep", Shape::Char),
            field("mode", modes()),
            field("ptr", Shape::Pointer),
            field("comm", Shape::Text { bytes: 16 }),
            field("path", Shape::Text { bytes: 40 }),
            field("bits", Shape::Bits { shift: 4, width: 3, signed: true }),
            field("id", Shape::Raw { bytes: 3 }),
            field("uuid", Shape::Raw { bytes: 10 }),
            field("args", Shape::Words { bytes: 16 }),
            field("later", Shape::Unknown { kind: "float".into(), bytes: Some(16) }),
            field("common_pid", Shape::Unsigned { bytes: 1 }),
            field("a-b", Shape::Unsigned { bytes: 1 }),
        ]
    };
    let words = |mode: u64, text: &[u8; 16], sep: u64| -> Vec<u64> {
        let low = u64::MAX << 32;
        let numbers = [0xfe, 0xfffe, low | 0xffff_fffe, u64::MAX - 1, 0xfe, 0xfffe, low, u64::MAX];
        let path = *b"/a/\"path\\ \xc3\xa4 %s\n\0.........................";
        let path = path[..40].chunks(8).map(|part| u64::from_le_bytes(part.try_into().unwrap()));
        let mut words = numbers.to_vec();
        words.extend([0xff, sep, mode, 0xffff_8881_0000_1000]);
        words.extend(name(text));
        words.extend(path);
        words.extend([0xef, 0x0403_0201, 0x0706_0504_0302_0100, 0x908, 10, 11, 1, 2, 200, 201]);
        words
    };
    let print = "100% \"{s8}\\{s32:x}\" {s16} {u64:x} {u32:p} {u16:05} {u8:names 254=two,1=one} \
                 {u8:names 1=one} {yes} {yes:names 0=no,1=yes} {ptr} {ptr:p} {s64:major}:{u64:minor} \
                 {args[0]:x} {args[1]} {args[2]} {args} {comm} {path:x} {sep} {mode} {mode:names 4=four} \
                 {nothing} {u16:unheard} {bits:state} {id} {uuid} {u16:bits 4 8} {s8:bits 0 4} {u64:bits 64 1} \
                 {u8:flags 2=a,4=b,1=c} {u8:flags 1=c} {u32:letters 16=A,512=B} {u16:minus u8} {u8:minus u16} \
                 {u16:minus comm} {u16:minus nothing} {ptr:minus yes} {s32:names 1=one} {u8:names 1=one,*=other} \
                 {u8:allflags 2=a,6=b,8=c,0=none} {u32:allflags 1=a,0=none} {u8:allletters 2=a} {u32:allflags 1=a} \
                 {u64:bits 4 8 x} {u32:bits 0 32 signed} {u64:bits 0 64 signed} {u8:bits 1 3 signed} {s32:bits 0 32} \
                 {s32:03} {u8:bits 1 2 names 3=three} {u8:bits 1 2 names 1=one} {u64:bits 2 9 allflags 1=a} \
                 {yes:names 0=no,*=yes} {s8:bits 0 8 03} \u{e4} {later";
    let kinds = [
        events.kind("all:plain", values(), None),
        events.kind("all:printed", values(), Some(&print.replace('\u{e4}', "-"))),
        events.kind("no_system", Vec::new(), None),
    ];
    for kind in &kinds[..2] {
        events.event(0, 5, *kind, 0, &words(3, b"dd\0garbagegarbag", 0x2c));
        events.event(0, 0, *kind, 0, &words(u64::MAX, b"sixteen bytes 16", 0x0a));
        // A number without a name.
        events.event(1, 6, *kind, 0, &words(4, b"a\x1b[2J\0bcdefghijk", 0x27));
        events.event(0, 5, *kind, 0, &words(0x8000_0000, b"\0aaaaaaaaaaaaaaa", 0));
        for failed in [1, 1 << 12, 1 << 13, 1 << 17, u64::MAX] {
            events.event(1, 5, *kind, failed, &words(3, b"dd\0garbagegarbag", 0x2c));
        }
        // Not all of them are there.
        events.event(1, 5, *kind, 0, &[1, 2, 3]);
    }
    events.event(1, 5, kinds[2], 0, &[]);
    events.writer.loss(1, 7, LossReason::Full).expect("vCPU");
    let kind = sched_switch(&mut events);
    for state in [0, 1, 2, 0x21, 0x80, 0x100, 0x102] {
        events.event(0, 5, kind, 0, &switch((b"dd", 5), state, (b"swapper/0", 0)));
        events.event(0, 0, kind, 0, &switch((b"swapper/0", 0), 0, (b"dd", 5)));
    }
    events.stream()
}

/// What stands behind the time: name and text.
pub(super) fn told(report: &str) -> Vec<String> {
    let lines = report.lines().filter(|line| line.contains(": ") && line.contains('['));
    let lines = lines.filter(|line| !line.contains("print: ") && !line.starts_with('#'));
    let behind = lines.filter_map(|line| line.split_once(": ").map(|(_, text)| text));
    let words = |text: &str| {
        let (name, text) = text.split_once(':').expect("a name");
        format!("{name}: {}", text.trim())
    };
    behind.filter(|text| !text.starts_with('[')).map(words).collect()
}

// Who compares a trace of vmtrace's with one of ftrace's must find the same lines.
#[test]
fn trace_cmd_prints_events_as_the_report_does() {
    let folder = everything();
    folder.convert(&["-o", "out.txt"]);
    let expected = told(&folder.read("out.txt"));
    assert_eq!(expected.len(), 2 * 10 + 1 + 14);
    for (place, format) in [("out.dat", "trace.dat"), ("out7.dat", "trace.dat-7")] {
        let said = folder.convert(&["-o", place, "--format", format]);
        assert!(!said.contains("note: "), "{place}: {said}");
        let mut report = reader("trace-cmd");
        // Without plugins, which have forms of their own.
        let text = run(report.args(["report", "-N", "-i"]).arg(folder.path(place)));
        assert!(text.contains("[7 EVENTS DROPPED]"), "{text}");
        for (line, expected) in told(&text).iter().zip(&expected) {
            assert_eq!(line, expected);
        }
        assert_eq!(told(&text).len(), expected.len(), "{text}");
    }
}

// A field that is no field of the format cannot be looked for.
#[test]
fn trace_cmd_filters_events_by_their_fields() {
    let folder = everything();
    folder.convert(&["-o", "out.dat"]);
    let report = |options: &[&str]| {
        let mut report = reader("trace-cmd");
        run(report.arg("report").args(options).arg("-i").arg(folder.path("out.dat")))
    };
    let count = |filter: &str, what: &str| report(&["-N", "-F", filter]).matches(what).count();
    assert_eq!(count("sched_switch: next_pid == 5", "==> next_comm=dd"), 7);
    assert_eq!(count("sched_switch: next_pid == 0 && prev_state == 1", "sched_switch:"), 1);
    assert_eq!(count("sched_switch: prev_comm == \"dd\"", "sched_switch:"), 7);
    assert_eq!(count("plain: s32 == -2 && u16 == 65534", "plain:"), 10 - 2);
    assert_eq!(count("plain: path =~ \"^/a/.*\"", "plain:"), 10 - 3);
    // Plugins know the events by system, name and fields.
    let text = report(&[]);
    assert!(text.contains("dd:5 [120] S ==> swapper/0:0 [120]"), "{text}");
    let formats = report(&["--events"]);
    assert!(formats.contains("name: sched_switch\n"), "{formats}");
    assert!(formats.contains("\tfield:char prev_comm[16];\toffset:8;\tsize:16;"), "{formats}");
}

/// What trace_processor has of a trace (`ftrace_event` and its fields) is made of these.
fn ftrace_events(folder: &Folder, place: &str) -> Vec<(Option<u64>, Vec<Message>)> {
    let trace = fields(&std::fs::read(folder.path(place)).expect("a trace"));
    let packets = messages(&trace, 1).into_iter();
    let bundles = packets.flat_map(|packet| messages(&packet, 1));
    bundles.map(|bundle| (number(&bundle, 1), messages(&bundle, 2))).collect()
}

// trace_processor makes `sched_slice` and `thread_state` of these messages and of no others.
#[test]
fn perfetto_has_typed_and_generic_events() {
    let mut events = Events::new();
    let kind = sched_switch(&mut events);
    let other = events.kind(
        "vmscan:mm_odd",
        vec![
            field("nr", Shape::Signed { bytes: 4 }),
            field("page", Shape::Pointer),
            field("name", Shape::Text { bytes: 8 }),
        ],
        None,
    );
    let exit = vec![field("pid", Shape::Signed { bytes: 4 }), field("group_dead", Shape::Char)];
    let exit = events.kind("sched:sched_process_exit", exit, None);
    events.event(0, 5, kind, 0, &switch((b"dd", 5), 2, (b"swapper/0", 0)));
    events.event(1, 7, other, 1 << 1, &[u64::MAX, 0, u64::from_le_bytes(*b"odd\0\0\0\0\0")]);
    events.event(0, 5, exit, 0, &[5, 1]);
    events.writer.loss(0, 3, LossReason::Full).expect("vCPU");
    // Whom it went to could not be read: it must not be taken for the idle task.
    events.event(0, 0, kind, 1 << 5, &switch((b"swapper/0", 0), 0, (b"dd", 5)));
    let folder = events.end();
    let said = folder.convert(&["-o", "out.pftrace"]);
    let line = "perfetto: fields that its messages have no place for: group_dead of \
                sched:sched_process_exit: left out";
    assert!(said.contains(line), "{said}");
    let bundles = ftrace_events(&folder, "out.pftrace");
    let cpus: Vec<_> = bundles.iter().map(|(cpu, events)| (cpu.unwrap(), events.len())).collect();
    // What was before the loss, the loss, and what was behind it.
    assert_eq!(cpus, [(0, 2), (0, 0), (0, 1), (1, 1)]);
    let first = &bundles[0].1[0];
    assert_eq!((number(first, 1), number(first, 2)), (Some(1_001_000), Some(5)));
    let switch = &messages(first, 4)[0];
    assert_eq!(text(switch, 1).as_deref(), Some("dd"));
    assert_eq!(text(switch, 5).as_deref(), Some("swapper/0"));
    assert_eq!([2, 3, 4, 6, 7].map(|field| number(switch, field)), [5, 120, 2, 0, 120].map(Some));
    assert_eq!(number(&messages(&bundles[0].1[1], 238)[0], 2), Some(5));
    let generic = &messages(&bundles[2].1[0], 327)[0];
    assert_eq!(text(generic, 1).as_deref(), Some("sched_switch"));
    let generic = &messages(&bundles[3].1[0], 327)[0];
    assert_eq!(text(generic, 1).as_deref(), Some("mm_odd"));
    let all = messages(generic, 2);
    let names: Vec<_> = all.iter().map(|field| text(field, 1).expect("a name")).collect();
    assert_eq!(names, ["nr", "page", "name"]);
    assert_eq!(number(&all[0], 4), Some(u64::MAX));
    assert_eq!(text(&all[1], 3).as_deref(), Some("?"));
    assert_eq!(text(&all[2], 3).as_deref(), Some("odd"));
}

#[test]
fn chrome_has_events_as_instants_of_their_threads() {
    let folder = everything();
    folder.convert(&["-o", "out.json"]);
    let trace: serde_json::Value = serde_json::from_str(&folder.read("out.json")).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("a list");
    let switches: Vec<_> = events.iter().filter(|event| event["name"] == "sched_switch").collect();
    assert_eq!(switches.len(), 14);
    let first = switches[0];
    assert_eq!([&first["ph"], &first["cat"], &first["s"]], ["i", "sched", "t"]);
    assert_eq!((first["pid"].as_u64(), first["tid"].as_u64()), (Some(5), Some(5)));
    assert_eq!(first["args"]["fields"]["next_comm"], "swapper/0");
    let unread = events.iter().filter(|event| event["args"]["fields"]["comm"].is_null());
    assert!(unread.filter(|event| event["name"] == "plain").count() >= 2);
}
