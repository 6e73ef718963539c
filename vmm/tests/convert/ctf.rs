//! Directories of the Common Trace Format, read by babeltrace2.

use vmtrace::stream::{
    EntryRecord, EventRecord, Header, LossReason, RecordBuffer, Shape, Summary, Symbol, Task,
    ValueField, ValuesFormat, ValuesOf, Writer, sample,
};

use super::{BASE, Folder, KSYS_READ, MODULE, VFS_READ, many, reader, stream};

/// What babeltrace2 prints, and what it says beside that.
fn babeltrace(folder: &Folder, options: &[&str]) -> (String, String) {
    let mut babeltrace = reader("babeltrace2");
    babeltrace.args(["--clock-seconds", "--no-delta", "--color=never"]).args(options);
    let output = babeltrace.arg(folder.path("out.ctf")).output().expect("it runs");
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("UTF-8");
    assert!(output.status.success(), "{}", text(&output.stderr));
    // A question mark is one, with a backslash or without.
    (text(&output.stdout).replace(r"\?", "?"), text(&output.stderr))
}

#[test]
fn reads_calls_by_vcpu_and_task() {
    let folder = Folder::new(&stream());
    let said = folder.convert(&["-o", "out.ctf"]);
    assert!(said.contains("note: ctf: 1 calls without a return: they have no event"), "{said}");
    let (text, said) = babeltrace(&folder, &[]);
    let expected = r#"[0.000001000] vmtrace_attach: { text = "4 sites", duration_ns = 600 }
[0.001000000] func_entry: { cpu_id = 0 }, { tid = 42, pid = 42, procname = "dd" }, { function = "ksys_read", address = 0xFFFFFFFF81000000, depth = 0 }
[0.001002000] func_entry: { cpu_id = 0 }, { tid = 42, pid = 42, procname = "dd" }, { function = "vfs_read", address = 0xFFFFFFFF81000100, caller = "ksys_read", caller_address = 0xFFFFFFFF81000005, depth = 1 }
[0.001003000] func_entry: { cpu_id = 0 }, { tid = 42, pid = 42, procname = "dd" }, { function = "timer_tick", address = 0xFFFFFFFF81000200, caller = "vfs_read", caller_address = 0xFFFFFFFF81000105 }
[0.001004000] func_tail: { cpu_id = 0 }, { tid = 42, pid = 42, procname = "dd" }, { function = "vfs_read", address = 0xFFFFFFFF81000100, target = "ext4_read [ext4]", depth = 1 }
[0.001004000] func_entry: { cpu_id = 0 }, { tid = 42, pid = 42, procname = "dd" }, { function = "ext4_read", address = 0xFFFFFFFFC0100000, module = "ext4", caller = "ksys_read", caller_address = 0xFFFFFFFF81000005, depth = 2 }
[0.001100000] func_entry: { cpu_id = 1 }, { tid = 43, pid = 42, procname = "dd worker" }, { function = "vfs_read", address = 0xFFFFFFFF81000100, caller = "ksys_read", caller_address = 0xFFFFFFFF81000005, depth = 0 }
[0.001101000] func_exit: { cpu_id = 1 }, { tid = 43, pid = 42, procname = "dd worker" }, { function = "vfs_read", address = 0xFFFFFFFF81000100, depth = 0, duration_ns = 1000 }
[0.001101000] records_lost: { cpu_id = 1 }, { tid = 0, pid = 0, procname = "swapper/1" }, { count = 123, reason = "ring-full" }
[0.001504000] func_exit: { cpu_id = 0 }, { tid = 42, pid = 42, procname = "dd" }, { function = "ext4_read", address = 0xFFFFFFFFC0100000, module = "ext4", depth = 2, duration_ns = 500000 }
[0.001504000] func_exit: { cpu_id = 0 }, { tid = 42, pid = 42, procname = "dd" }, { function = "vfs_read", address = 0xFFFFFFFF81000100, depth = 1, duration_ns = 502000 }
[0.002400000] func_exit: { cpu_id = 0 }, { tid = 42, pid = 42, procname = "dd" }, { function = "ksys_read", address = 0xFFFFFFFF81000000, depth = 0, duration_ns = 1400000 }
[0.900000000] func_entry: { cpu_id = 1 }, { tid = 43, pid = 42, procname = "dd worker" }, { function = "vfs_read", address = 0xFFFFFFFF81000100, caller = "ksys_read", caller_address = 0xFFFFFFFF81000005, depth = 0 }
[0.950000000] vmtrace_console: { text = "a line, \"quoted\"" }
"#;
    assert_eq!(text, expected);
    // The format's own way to say it, with the place of the gap.
    assert!(said.contains("Tracer discarded 123 events between [0.001101000] and"), "{said}");
    assert_eq!(said.matches("discarded").count(), 1, "{said}");
}

// A loss before anything else has no packet that it could be told by the difference to.
#[test]
fn tells_losses_at_the_beginning_and_the_end() {
    let mut writer = Writer::new(Vec::new(), &header()).expect("header");
    writer.loss(0, 7, LossReason::Full).expect("vCPU");
    writer.entries(0, &[EntryRecord::new(50, KSYS_READ, 0, 1)]).expect("vCPU");
    writer.loss(0, 8, LossReason::Full).expect("vCPU");
    writer.loss(1, 9, LossReason::Full).expect("vCPU");
    writer.end(&Summary::default()).expect("memory");
    let folder = Folder::new(&writer.into_inner().expect("memory"));
    folder.convert(&["-o", "out.ctf"]);
    let (text, said) = babeltrace(&folder, &[]);
    assert_eq!(text.matches("func_entry").count(), 1, "{text}");
    for count in [7, 8, 9] {
        assert!(text.contains(&format!("{{ count = {count}, reason")), "{text}");
        assert!(said.contains(&format!("discarded {count} events between")), "{said}");
    }
}

// More than a packet, and vCPUs that take turns.
#[test]
fn reads_many_packets() {
    let mut writer = many(1_000_000_000);
    writer.end(&Summary::default()).expect("memory");
    let folder = Folder::new(&writer.into_inner().expect("memory"));
    folder.convert(&["-o", "out.ctf"]);
    let (text, said) = babeltrace(&folder, &[]);
    assert_eq!(said, "");
    let time = |line: &str| line.strip_prefix('[')?.split_once(']')?.0.parse().ok();
    let times: Vec<f64> = text.lines().filter_map(time).collect();
    assert_eq!(times.len(), 40_000);
    assert!(times.is_sorted() && times[39_999] > 199.0);
    let size = |name: &str| folder.path("out.ctf").join(name).metadata().expect("there").len();
    assert!(size("vcpu_0") > 600_000 && size("vcpu_2") > 600_000);
}

#[test]
fn arguments_and_values_have_types() {
    let folder = Folder::new(&sample::values());
    folder.convert(&["-o", "out.ctf"]);
    let (text, said) = babeltrace(&folder, &[]);
    assert_eq!(said, "");
    for part in [
        "arg_file = 0xFFFF888100001000, arg_count = 832, ",
        "arg_mode = \"NOTHING\", arg_how = 4, ",
        "arg_id = \"01 02 03\", ",
        "arg_far = \"?\", ",
        "ret = -22 }",
        "ret = 0 }",
    ] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
}

// Readers of kernel traces know threads by LTTng's names.
#[test]
fn events_have_fields_under_both_names() {
    let mut writer = Writer::new(Vec::new(), &header()).expect("header");
    let at = 0x8200_0000;
    let symbol = Symbol::new(0xffff_ffff_8200_0000, 8, "sched:sched_switch");
    writer.symbols([symbol]).expect("room");
    writer.task(Task::new(5, 5, b"dd")).expect("memory");
    let field = |name: &str, shape| ValueField { name: name.to_owned(), shape };
    let values = vec![
        field("prev_comm", Shape::Text { bytes: 16 }),
        field("prev_pid", Shape::Signed { bytes: 4 }),
        field("prev_state", Shape::Unsigned { bytes: 8 }),
        field("next_pid", Shape::Signed { bytes: 4 }),
    ];
    let (function, tracer, of) = (at, 0, ValuesOf::Event);
    let print = Some("prev_pid={prev_pid}".to_owned());
    writer.values(&ValuesFormat { function, tracer, of, values, print }).expect("room");
    let words = [u64::from_le_bytes(*b"dd\0\0\0\0\0\0"), 0, 5, 1, 17];
    let mut buffer = RecordBuffer::new();
    buffer.push_event(EventRecord::new(100, at, 0, 5), 0, words);
    writer.records(0, &buffer).expect("vCPU");
    writer.end(&Summary::default()).expect("memory");
    let folder = Folder::new(&writer.into_inner().expect("memory"));
    folder.convert(&["-o", "out.ctf"]);
    let (text, _) = babeltrace(&folder, &[]);
    let expected = r#"sched_switch: { cpu_id = 0 }, { tid = 5, pid = 5, procname = "dd" }, { prev_comm = "dd", prev_pid = 5, prev_state = 1, next_pid = 17, prev_tid = 5, next_tid = 17 }"#;
    assert!(text.contains(expected), "{text}");
}

// A guest names its functions, modules, tasks and itself as it likes.
#[test]
fn names_do_not_leave_their_quotes() {
    let release = "6.12\"; }; env {\n".into();
    let mut writer = Writer::new(Vec::new(), &Header { release, ..header() }).expect("header");
    let odd = [
        Symbol { address: BASE, size: 0x100, name: "a\"b\\", module: "../../out" },
        Symbol { address: BASE + 0x100, size: 0x100, name: "sched:\"; id = 7;", module: "" },
        Symbol { address: MODULE, size: 0x100, name: "in_a", module: "a/b" },
    ];
    writer.symbols(odd).expect("room");
    writer.task(Task::new(5, 5, b"a\" pid=1\n/x")).expect("memory");
    let field = |name: &str| ValueField { name: name.into(), shape: Shape::Signed { bytes: 4 } };
    let values = ["struct", "a-b", "a.b", "\"; }", ""].map(field).to_vec();
    let (function, of) = (VFS_READ, ValuesOf::Event);
    let format = ValuesFormat { function, tracer: 0, of, values, print: None };
    writer.values(&format).expect("room");
    let mut buffer = RecordBuffer::new();
    buffer.push(EntryRecord::new(1, KSYS_READ, 0, 5));
    buffer.push_event(EventRecord::new(2, VFS_READ, 0, 5), 0, [1, 2, 3, 4, 5]);
    buffer.push(EntryRecord::new(3, super::EXT4_READ, 0, 5));
    writer.records(0, &buffer).expect("vCPU");
    writer.end(&Summary::default()).expect("memory");
    let folder = Folder::new(&writer.into_inner().expect("memory"));
    folder.convert(&["-o", "out.ctf"]);
    let (text, said) = babeltrace(&folder, &[]);
    assert_eq!(said, "");
    assert_eq!(text.lines().count(), 3, "{text}");
    assert!(text.contains(r#"function = "a\"b\\", "#), "{text}");
    assert!(text.contains("struct = 1, a_b = 2, a_b_2 = 3, "), "{text}");
}

fn header() -> Header {
    Header {
        clock_hz: 1_000_000_000,
        vcpus: 2,
        address_base: Header::TOP_4_GIB,
        ..Header::default()
    }
}
