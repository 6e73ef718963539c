//! Tests of valid streams: written, read, joined late.

use super::sample::{header, mark, summary};
use super::*;

fn records(from: u64, count: u64) -> Vec<EntryRecord> {
    (from..from + count).map(|at| EntryRecord::new(at, 0x8100_0000, 0x8100_0105, 7)).collect()
}

/// One line per frame, for comparing.
fn trace(bytes: &[u8]) -> Result<Vec<String>, StreamError> {
    let mut reader = Reader::new(bytes)?;
    let mut lines = Vec::new();
    while let Some(frame) = reader.next_frame()? {
        lines.push(match frame {
            Frame::Symbols(symbols) => symbols
                .map(|symbol| {
                    symbol.with_text(|text| {
                        format!("{:x}+{} {}[{}]", text.address, text.size, text.name, text.module)
                    })
                })
                .collect::<Vec<_>>()
                .join(","),
            Frame::Tasks(tasks) => tasks
                .map(|task| format!("{}={}", task.pid, String::from_utf8_lossy(task.comm())))
                .collect::<Vec<_>>()
                .join(","),
            Frame::Records(batch) => {
                let times = batch.records().map(|record| record.head().timestamp.get());
                format!("records {} {} {:?}", batch.vcpu, batch.first, times.collect::<Vec<_>>())
            }
            frame => format!("{frame:?}"),
        });
    }
    Ok(lines)
}

#[test]
fn what_is_written_is_read() {
    let mut writer = Writer::new(Vec::new(), &header()).expect("header");
    writer.symbols([Symbol::new(0xffff_ffff_8100_0000, 0, "vfs_read")]).expect("symbols");
    let caller = Symbol { address: 0xffff_ffff_8100_0100, size: 64, name: "f", module: "ext4" };
    writer.symbols([caller, caller]).expect("symbols");
    writer.task(Task::new(7, 7, b"cat")).expect("task");
    writer.task(Task::new(7, 7, b"cat")).expect("task");
    writer.entries(1, &records(2000, 3)).expect("records");
    writer.entries(1, &[]).expect("no records");
    writer.loss(1, 5, LossReason::Full).expect("loss");
    writer.entries(1, &records(3000, 1)).expect("records");
    writer.mark(&mark()).expect("mark");
    writer.watermark(3000).expect("watermark");
    let summary = writer.end(&summary()).expect("end");
    assert_eq!((summary.records(), summary.lost()), (4, 5));
    assert!(writer.mark(&mark()).is_err(), "the stream has ended");
    let bytes = writer.into_inner().expect("bytes");

    let reader = Reader::new(&*bytes).expect("a stream");
    assert_eq!(reader.header(), &header());
    let loss = Loss { vcpu: 1, count: 5, reason: LossReason::Full, total: 5 };
    let expected = [
        "ffffffff81000000+0 vfs_read[]".to_owned(),
        "ffffffff81000100+64 f[ext4]".to_owned(),
        "7=cat".to_owned(),
        "records 1 0 [2000, 2001, 2002]".to_owned(),
        format!("{:?}", Frame::Loss(loss)),
        "records 1 3 [3000]".to_owned(),
        format!("{:?}", Frame::Mark(mark())),
        format!("{:?}", Frame::Watermark(3000)),
        format!("{:?}", Frame::End(Box::new(summary))),
    ];
    assert_eq!(trace(&bytes).expect("whole"), expected);
}

#[test]
fn impossible_input_is_refused() {
    assert!(Writer::new(Vec::new(), &Header::default()).is_err());
    assert!(Writer::new(Vec::new(), &Header { vcpus: MAX_VCPUS + 1, ..header() }).is_err());
    let mut writer = Writer::new(Vec::new(), &header()).expect("header");
    assert!(writer.entries(2, &records(0, 1)).is_err());
    assert!(writer.loss(0, 1, LossReason::Consumer).is_err());
    assert!(Writer::new(Vec::new(), &Header { vcpus: MAX_VCPUS, ..header() }).is_ok());
    for (length, taken) in [(65_535, true), (65_536, false)] {
        let extra = vec![("k".into(), "x".repeat(length))];
        assert_eq!(Writer::new(Vec::new(), &Header { extra, ..header() }).is_ok(), taken);
    }
    // As long as a header may be, and longer.
    for (more, taken) in [(0, true), (1, false)] {
        let mut long = Header { extra: vec![("k".into(), "x".repeat(60_000)); 8], ..header() };
        let values = [&*long.arch, &long.clock, &long.release, &long.vmtrace_version];
        let text = [values.concat(), "arch clock release vmtrace k".replace(' ', "")].concat();
        let rest = (512 << 10) - 13 * 16 - text.len() - 8 * 60_001;
        long.extra.push(("k".into(), "x".repeat(rest + more)));
        assert_eq!(Writer::new(Vec::new(), &long).is_ok(), taken);
    }
    writer.task(Task::new(MAX_PID, 0, b"impossible")).expect("ignored");
    writer.end(&Summary::default()).expect("end");
    let bytes = writer.into_inner().expect("bytes");
    assert_eq!(trace(&bytes).expect("whole").len(), 1);
}

#[test]
fn a_late_joiner_gets_names_and_positions_first() {
    let mut writer = Writer::new(Vec::new(), &header()).expect("header");
    writer.symbols([Symbol::new(0xffff_ffff_8100_0000, 0, "vfs_read")]).expect("symbols");
    writer.task(Task::new(7, 7, b"cat")).expect("task");
    writer.entries(0, &records(2000, 30)).expect("records");
    writer.loss(0, 2, LossReason::Overwritten).expect("loss");
    let mut joined = writer.join().expect("join");
    let begin = writer.get_mut().len();
    writer.entries(0, &records(3000, 1)).expect("records");
    writer.end(&Summary::default()).expect("end");
    let bytes = writer.into_inner().expect("bytes");
    joined.extend_from_slice(&bytes[begin..]);
    let lines = trace(&joined).expect("whole");
    assert_eq!(lines[0], "Join([(30, 2), (0, 0)])");
    assert_eq!(lines[1..3], ["ffffffff81000000+0 vfs_read[]", "7=cat"]);
    assert_eq!(lines[3], "records 0 30 [3000]");
    assert_eq!(lines.len(), 5);
}

// Who joins late reads one list after the other: what is between two entries is not the start of the next.
#[test]
fn a_late_joiner_gets_every_entry_of_a_list() {
    let mut writer = Writer::new(Vec::new(), &header()).expect("header");
    for (number, name) in (0..).zip(["a", "bc", "def"]) {
        writer.tracer(Tracer { number, name, description: "more" }).expect("memory");
    }
    for function in 0..3 {
        let name = "n".repeat(function as usize);
        let values = vec![ValueField { name, shape: Shape::Char }];
        let format = ValuesFormat { function, tracer: 0, of: ValuesOf::Entry, values, print: None };
        writer.values(&format).expect("room");
    }
    let joined = writer.join().expect("memory");
    let mut reader = Reader::new(&*joined).expect("a stream");
    let mut names = Dictionaries::new();
    while let Ok(Some(frame)) = reader.next_frame() {
        match frame {
            Frame::Tracers(list) => list.for_each(|tracer| {
                tracer.with_text(|tracer| names.insert_tracer(tracer));
            }),
            Frame::Values(list) => list.for_each(|values| {
                names.insert_values(values).expect("room");
            }),
            _ => {}
        }
    }
    assert_eq!(names.tracers().count(), 3);
    assert!(names.tracers().eq(writer.names().tracers()));
    assert_eq!(names.values().count(), 3);
    assert!(names.values().eq(writer.names().values()));
}

// Names of a kernel at once: a frame holds no more than the format allows, and what waits before it takes no room of it.
#[test]
fn many_names_are_in_few_frames() {
    let mut writer = Writer::new(Vec::new(), &header()).expect("header");
    // Not handed on yet.
    writer.entries(0, &records(0, 8000)).expect("records");
    let addresses = 0xffff_ffff_8100_0000..0xffff_ffff_8100_5000_u64;
    writer.symbols(addresses.clone().map(|at| Symbol::new(at, 1, "vfs_read"))).expect("room");
    writer.end(&Summary::default()).expect("end");
    let bytes = writer.into_inner().expect("bytes");
    let lines = trace(&bytes).expect("whole");
    let names: Vec<_> = lines.iter().filter(|line| line.contains("vfs_read")).collect();
    let count: usize = names.iter().map(|line| line.split(',').count()).sum();
    assert_eq!((count, names.len()), (addresses.count(), 3));
}

/// Its reads are interrupted now and then, as by a signal.
struct Interrupted<'a>(&'a [u8], bool);

impl std::io::Read for Interrupted<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.1 = !self.1;
        if self.1 {
            return Err(std::io::ErrorKind::Interrupted.into());
        }
        let length = buffer.len().min(100);
        self.0.read(&mut buffer[..length])
    }
}

// A signal is no reason to give up a trace.
#[test]
fn reading_goes_on_after_an_interruption() {
    let stream = sample::stream();
    let mut reader = Reader::new(Interrupted(&stream, false)).expect("a stream");
    let mut last = None;
    while let Some(frame) = reader.next_frame().expect("whole") {
        last = Some(matches!(frame, Frame::End(_)));
    }
    assert_eq!((last, reader.offset()), (Some(true), stream.len() as u64));
}

/// Fails once, as where nothing comes for long.
struct Fails(bool);

impl std::io::Read for Fails {
    fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
        match std::mem::replace(&mut self.0, true) {
            false => Err(std::io::ErrorKind::TimedOut.into()),
            true => Ok(0),
        }
    }
}

// Who reads must hear of it, and may go on.
#[test]
fn an_error_of_the_source_is_told_and_loses_nothing() {
    use std::io::Read;
    let stream = sample::stream();
    let (begin, end) = stream.split_at(stream.len() / 2);
    let mut reader = Reader::new(begin.chain(Fails(false)).chain(end)).expect("a stream");
    let mut errors = 0;
    loop {
        match reader.next_frame() {
            Ok(Some(_)) => {}
            Ok(None) => break,
            Err(_) => errors += 1,
        }
    }
    assert_eq!((errors, reader.offset()), (1, stream.len() as u64));
}

// Readers refuse longer ones.
#[test]
fn names_are_written_as_far_as_readers_take_them() {
    let long = "x".repeat(MAX_DESCRIPTION + 1);
    let mut writer = Writer::new(Vec::new(), &header()).expect("header");
    let symbol = Symbol { address: 1, size: 1, name: &long, module: &long };
    writer.symbols([symbol]).expect("room");
    writer.tracer(Tracer { number: 1, name: &long, description: &long }).expect("memory");
    writer.end(&Summary::default()).expect("end");
    let lines = trace(&writer.into_inner().expect("bytes")).expect("whole");
    let name = &long[..MAX_NAME];
    assert_eq!(lines[0], format!("1+1 {name}[{name}]"));
}

#[test]
fn a_slow_consumer_is_told_what_it_missed() {
    let mut writer = Writer::new(Vec::new(), &header()).expect("header");
    writer.flush().expect("flush");
    let mut consumer = writer.get_mut().clone();
    writer.entries(0, &records(2000, 30)).expect("records");
    writer.flush().expect("flush");
    let begin = writer.get_mut().len();
    writer.end(&Summary::default()).expect("end");
    let end = writer.into_inner().expect("bytes")[begin..].to_vec();

    let silent = [&*consumer, &*end].concat();
    let error = trace(&silent).expect_err("records are missing").to_string();
    assert!(error.contains("frame 2 where frame 1 should be"), "{error}");
    consumer.extend_from_slice(&consumer_loss(0, 30, 30, 2));
    consumer.extend_from_slice(&end);
    assert_eq!(trace(&consumer).expect("announced").len(), 2);
    // So is whoever gets a stream that is made of that one.
    let mut writer = Writer::new(Vec::new(), &header()).expect("header");
    writer.missed(0, 30, 30).expect("vCPU");
    writer.entries(0, &records(3000, 1)).expect("records");
    assert_eq!(writer.totals()[0].records, 31);
    writer.end(&Summary::default()).expect("end");
    let lines = trace(&writer.into_inner().expect("bytes")).expect("announced");
    let loss = Loss { vcpu: 0, count: 30, reason: LossReason::Consumer, total: 30 };
    assert_eq!(lines[..2], [format!("{:?}", Frame::Loss(loss)), "records 0 30 [3000]".into()]);
}

#[test]
fn an_idle_trace_does_not_grow() {
    let mut writer = Writer::new(Vec::new(), &header()).expect("header");
    writer.watermark(1).expect("watermark");
    let mut size = writer.get_mut().len();
    let mut grows = |writer: &mut Writer<Vec<u8>>, ticks| {
        writer.watermark(ticks).expect("watermark");
        std::mem::replace(&mut size, writer.get_mut().len()) != writer.get_mut().len()
    };
    assert!(!grows(&mut writer, 2));
    writer.entries(0, &records(10, 3)).expect("records");
    assert!(grows(&mut writer, 11), "one record is still held");
    assert!(grows(&mut writer, 12));
    assert!(!grows(&mut writer, 13));
    writer.loss(0, 1, LossReason::Full).expect("loss");
    assert!(grows(&mut writer, 14));
    assert!(!grows(&mut writer, 15));
    writer.mark(&mark()).expect("mark");
    assert!(grows(&mut writer, 16));
    assert!(grows(&mut writer, mark().ticks));
    assert!(!grows(&mut writer, u64::MAX));
    // But where somebody asks how far it is.
    writer.tell_watermark(u64::MAX).expect("watermark");
    assert_ne!(size, writer.get_mut().len());
}

// More functions than a frame holds; and readers that do not know the frame go on.
#[test]
fn functions_that_were_traced_are_told() {
    let mut writer = Writer::new(Vec::new(), &header()).expect("header");
    let functions: Vec<u32> = (0..49_153).map(|n| n * 5).collect();
    let stretch = Stretch { since: 3, until: u64::MAX, tracer: 2, of: TracedOf::Returns };
    writer.traced(&stretch, &functions).expect("room");
    writer.traced(&stretch, &[]).expect("room");
    writer.end(&Summary::default()).expect("end");
    let bytes = writer.into_inner().expect("bytes");
    let mut reader = Reader::new(&*bytes).expect("header");
    let (mut found, mut frames) = (Vec::new(), 0);
    while let Some(frame) = reader.next_frame().expect("whole") {
        if let Frame::Traced(traced) = frame {
            let Traced { since, until, tracer, of, .. } = traced;
            assert_eq!(Some(stretch), of.map(|of| Stretch { since, until, tracer, of }));
            found.extend(traced.functions());
            frames += 1;
        }
    }
    assert_eq!((found, frames), (functions, 2));
    // One more than there are.
    let mut payload = Vec::new();
    stretch.encode(&[1, 2], &mut payload);
    payload[16] = 3;
    assert!(Frame::parse(wire::kind::TRACED, 0, &payload).is_err());
    payload[16] = 2;
    payload[21] = 9;
    let frame = Frame::parse(wire::kind::TRACED, 0, &payload).expect("of a later version");
    assert!(matches!(frame, Frame::Traced(Traced { of: None, .. })));
    payload.clear();
    Stretch { of: TracedOf::Entries, ..stretch }.encode(&[1, 2], &mut payload);
    let frame = Frame::parse(wire::kind::TRACED, 0, &payload).expect("whole");
    assert!(matches!(frame, Frame::Traced(Traced { of: Some(TracedOf::Entries), .. })));
}
