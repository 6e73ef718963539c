//! Calls of which the trace has only the ends, with their durations.

use vmtrace::stream::{Header, RecordBuffer, ReturnRecord, Summary, Symbol, Task, Writer};

use super::{BASE, Folder, KSYS_READ, fields, messages, number, reader, run, text};

/// Two of one task, the second one around the first.
fn ends() -> Folder {
    let header = Header {
        clock_hz: 2_000_000_000,
        vcpus: 1,
        address_base: Header::TOP_4_GIB,
        ..Header::default()
    };
    let mut writer = Writer::new(Vec::new(), &header).expect("header");
    writer.symbols([Symbol::new(BASE, 0x100, "ksys_read")]).expect("room");
    writer.task(Task::new(42, 42, b"dd")).expect("memory");
    let mut buffer = RecordBuffer::new();
    for (at, took, value) in [(50, 20, 7), (90, 80, 9)] {
        let ret = ReturnRecord::new(at * 2000, KSYS_READ, 0, 42, 0xffff_c900_0000_1000);
        buffer.push_return_value(ret.with_value(value));
        buffer.with_duration(took * 2000);
    }
    writer.records(0, &buffer).expect("vCPU");
    writer.end(&Summary::default()).expect("memory");
    Folder::new(&writer.into_inner().expect("memory"))
}

// A call that is left out, or that has no length, is not the one that was asked for.
#[test]
fn a_call_that_only_its_end_tells_has_its_length() {
    let folder = ends();
    let said = folder.convert(&["-o", "out.json"]);
    assert!(!said.contains("without an entry"), "{said}");
    let trace: serde_json::Value = serde_json::from_str(&folder.read("out.json")).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("a list");
    let slices: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
    let times: Vec<_> = slices.iter().map(|slice| [&slice["ts"], &slice["dur"]]).collect();
    assert_eq!(times, [[30.0, 20.0], [10.0, 80.0]]);
    assert_eq!((&slices[0]["name"], slices[0]["tid"].as_u64()), (&"ksys_read".into(), Some(42)));

    folder.convert(&["-o", "out.folded"]);
    assert_eq!(folder.read("out.folded"), "dd;ksys_read 100000\n");

    folder.convert(&["-o", "out.csv"]);
    let csv = folder.read("out.csv");
    assert_eq!(csv.lines().filter(|line| line.contains("return")).count(), 2, "{csv}");
    assert!(csv.contains("80000"), "{csv}");

    folder.convert(&["-o", "out.pftrace"]);
    let trace = fields(&std::fs::read(folder.path("out.pftrace")).expect("a trace"));
    let packets = messages(&trace, 1);
    let tracks = packets.iter().flat_map(|packet| messages(packet, 60));
    let thread = tracks.filter(|track| !messages(track, 4).is_empty());
    let thread: Vec<_> = thread.filter_map(|track| number(&track, 1)).collect();
    let slices = packets.iter().filter_map(|packet| {
        let event = messages(packet, 11).into_iter().next()?;
        (number(&event, 11) == thread.first().copied())
            .then(|| (number(packet, 8), number(&event, 9), text(&event, 23)))
    });
    let (begin, end) = (Some(1), Some(2));
    let wanted = [(30_000, begin), (50_000, end), (10_000, begin), (90_000, end)];
    let wanted: Vec<_> = wanted.into_iter().map(|(at, kind)| (Some(at), kind, None)).collect();
    assert_eq!(slices.collect::<Vec<_>>(), wanted);

    let said = folder.convert(&["-o", "out.uftrace"]);
    assert!(said.contains("2 calls of which the trace has only the ends"), "{said}");
    let said = folder.convert(&["-o", "out.html"]);
    assert!(!said.contains("without an entry"), "{said}");
}

#[test]
fn trace_cmd_shows_how_long_such_calls_took() {
    let folder = ends();
    folder.convert(&["-o", "out.dat"]);
    let mut report = reader("trace-cmd");
    let report = run(report.args(["report", "-i"]).arg(folder.path("out.dat")));
    assert!(report.contains("20.000 us") && report.contains("80.000 us"), "{report}");
}
