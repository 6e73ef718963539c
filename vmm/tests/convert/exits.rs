//! Exits of vCPUs, which are events with a length.

use vmtrace::stream::{
    EntryRecord, ExitDir, ExitReason, Header, HostExit, RecordBuffer, Summary, Symbol, Task, Writer,
};

use super::{BASE, Folder, KSYS_READ, fields, messages, number, reader, run, text};

/// Two exits of vCPU 1, with a call of a task before, between and behind.
fn exits() -> Folder {
    let header = Header {
        clock_hz: 2_000_000_000,
        vcpus: 2,
        address_base: Header::TOP_4_GIB,
        ..Header::default()
    };
    let mut writer = Writer::new(Vec::new(), &header).expect("header");
    let (exit, format) = HostExit::told(header.address_base);
    writer.symbols([Symbol::new(BASE, 0x100, "ksys_read"), exit]).expect("room");
    writer.values(&format).expect("room");
    writer.task(Task::new(42, 42, b"dd")).expect("memory");
    let mut buffer = RecordBuffer::new();
    let entry = |us: u64| EntryRecord::new(us * 2000, KSYS_READ, 0, 42);
    let exit = |us: u64, reason, dir, address| {
        let (ticks, duration_ns) = (us * 2000, 1500);
        HostExit { ticks, duration_ns, reason, dir, address }
    };
    buffer.push(entry(10));
    exit(20, ExitReason::Io, ExitDir::Out, 0x3f8).write(&mut buffer, 20 * 2000);
    buffer.push(entry(30));
    exit(40, ExitReason::Kick, ExitDir::None, 0).write(&mut buffer, 40 * 2000);
    buffer.push(entry(50));
    writer.records(1, &buffer).expect("vCPU");
    writer.end(&Summary::default()).expect("memory");
    Folder::new(&writer.into_inner().expect("memory"))
}

// What took the vCPU away has a length, and is seen beside what the task did.
#[test]
fn chrome_has_exits_as_slices_of_their_vcpu() {
    let folder = exits();
    folder.convert(&["-o", "out.json"]);
    let trace: serde_json::Value = serde_json::from_str(&folder.read("out.json")).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("a list");
    let slices: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
    let names: Vec<_> = slices.iter().map(|event| event["name"].as_str().expect("one")).collect();
    assert_eq!(names, ["exit io 0x3f8 out", "exit kick"]);
    let times: Vec<_> = slices.iter().map(|slice| [&slice["ts"], &slice["dur"]]).collect();
    assert_eq!(times, [[18.5, 1.5], [38.5, 1.5]]);
    assert_eq!(slices[0]["args"]["fields"]["address"], "0x3f8");
    let track = |event: &serde_json::Value| [event["pid"].as_u64(), event["tid"].as_u64()];
    let named = |event: &&serde_json::Value| event["args"]["name"] == "vCPU 1";
    assert_eq!(track(slices[0]), track(events.iter().find(named).expect("a track")));
    assert!(!events.iter().any(|event| event["args"]["name"] == "<host>"));
}

#[test]
fn perfetto_has_a_track_of_exits() {
    let folder = exits();
    folder.convert(&["-o", "out.pftrace"]);
    let trace = fields(&std::fs::read(folder.path("out.pftrace")).expect("a trace"));
    let packets = messages(&trace, 1);
    let tracks = packets.iter().flat_map(|packet| messages(packet, 60));
    let tracks: Vec<_> =
        tracks.filter_map(|track| Some((text(&track, 2)?, number(&track, 1)?))).collect();
    let exits: Vec<_> = tracks.iter().filter(|(name, _)| name.ends_with("exits")).collect();
    let [(name, uuid)] = exits[..] else { panic!("{tracks:?}") };
    assert_eq!(name, "vCPU 1 exits");
    let events = packets.iter().filter_map(|packet| {
        let event = messages(packet, 11).into_iter().next()?;
        (number(&event, 11)? == *uuid)
            .then(|| (number(packet, 8), number(&event, 9), text(&event, 23)))
    });
    let (begin, end) = (Some(1), Some(2));
    let wanted = [
        (Some(18_500), begin, Some("exit io 0x3f8 out".to_owned())),
        (Some(20_000), end, None),
        (Some(38_500), begin, Some("exit kick".to_owned())),
        (Some(40_000), end, None),
    ];
    assert_eq!(events.collect::<Vec<_>>(), wanted);
    // No task of that name ever ran.
    let all = std::fs::read(folder.path("out.pftrace")).expect("a trace");
    assert!(!all.windows(6).any(|bytes| bytes == b"<host>"));
}

#[test]
fn trace_cmd_filters_exits_by_their_fields() {
    let folder = exits();
    folder.convert(&["-o", "out.dat"]);
    let report = |filter: &str| {
        let mut report = reader("trace-cmd");
        run(report.args(["report", "-N", "-F", filter, "-i"]).arg(folder.path("out.dat")))
    };
    let lines = |text: String| text.lines().filter(|line| line.contains("exit:")).count();
    assert_eq!(lines(report("exit: duration_ns == 1500")), 2);
    assert_eq!(lines(report("exit: address == 0x3f8")), 1);
}

// An exit in the middle of a call is no switch to another task.
#[test]
fn text_has_exits_as_events() {
    let folder = exits();
    folder.convert(&["-o", "out.txt"]);
    let all = folder.read("out.txt");
    let line = "          <host>-4194304 [001]      0.000020: \
                exit: reason=io dir=out address=0x3f8 duration_ns=1500\n";
    assert!(all.contains(line), "{all}");
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_vmtrace"));
    let graph = run(command.args(["report", "--format", "graph"]).arg(folder.path("trace.vmt")));
    assert!(
        graph.contains("/* exit: reason=kick dir=none address=0x0 duration_ns=1500 */"),
        "{graph}"
    );
    assert!(!graph.contains("=>"), "{graph}");
}
