//! The example consumer in Python reads what the Rust writer writes. It was written from
//! `docs/stream.md` alone, and shares no code with the library.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use vmtrace::export::{Player, Text};
use vmtrace::stream::{
    Bucket, CallerCount, EntryRecord, Exit, Header, HistogramOf, LossReason, Mark, MarkKind,
    RecordBuffer, ReturnRecord, Shape, Summary, Symbol, TailRecord, Task, Tracer, ValueField,
    ValuesFormat, ValuesOf, Writer, consumer_loss, sample,
};

const TEXT: u64 = 0xffff_ffff_8100_0000;

fn header() -> Header {
    Header {
        arch: "riscv64".into(),
        clock: "riscv-time".into(),
        clock_hz: 10_000_000,
        clock_start: 123_456_789,
        release: "6.12.0-€".into(),
        vcpus: 3,
        address_base: Header::TOP_4_GIB,
        vmtrace_version: "0.1.0".into(),
        ..Header::default()
    }
}

fn begin() -> Writer<Vec<u8>> {
    let mut writer = Writer::new(Vec::new(), &header()).expect("header");
    let names: Vec<_> = (0..100).map(|number| format!("function_{number}")).collect();
    let symbol = |(number, name): (u64, _)| Symbol::new(TEXT + number * 64, 48, name);
    writer.symbols((0..).zip(names.iter().map(String::as_str)).map(symbol)).expect("room");
    let module = Symbol { address: TEXT + 0x4000_0000, size: 9, name: "f", module: "m\x1b" };
    writer.symbols([module]).expect("room");
    writer.task(Task::new(1, 1, b"init")).expect("memory");
    writer
}

/// A record with a function, a caller and a task that depend on `number`, some without names.
fn record(at: u64, number: u32) -> EntryRecord {
    let spread = number.wrapping_mul(2_654_435_761) >> 8;
    let function =
        if number.is_multiple_of(90) { 0xc100_0000 } else { 0x8100_0000 + spread % 120 * 64 };
    let caller = if number.is_multiple_of(50) { 0 } else { 0x8100_0000 + spread / 7 % 7000 };
    let pid = match spread % 4 {
        3 => 4_000_000_000,
        2 => 42,
        pid => pid,
    };
    EntryRecord::new(at, function, caller, pid)
}

/// Three vCPUs, drained in rounds, with marks, losses and a task that gets other names.
fn fill(writer: &mut Writer<Vec<u8>>) {
    let mut at = 123_456_000u64;
    for round in 0..20u32 {
        let comm: &[u8] = if round % 2 == 0 { b"sh" } else { "näme\u{7}\u{85}".as_bytes() };
        writer.task(Task::new(42, 42, comm)).expect("memory");
        for vcpu in 0..3u32 {
            let time = |number: u32| at + u64::from(number * 31 + vcpu * 7);
            let records = (0..200 - vcpu).map(|number| record(time(number), number));
            writer.entries(vcpu, &records.collect::<Vec<_>>()).expect("vCPU");
            if (round + vcpu) % 5 == 0 {
                writer.loss(vcpu, u64::from(round) + 1, LossReason::Full).expect("vCPU");
            }
        }
        if round % 4 == 0 {
            let kind = if round == 8 { MarkKind::Other(99) } else { MarkKind::Pause };
            let text = format!("round {round}\n");
            let mark = Mark { ticks: at + 3_000, kind, duration_ns: 1_499_500, text };
            writer.mark(&mark).expect("memory");
        }
        at += 7_000;
        if round % 3 == 0 {
            writer.watermark(at).expect("memory");
        }
    }
}

fn stream() -> Vec<u8> {
    let mut writer = begin();
    fill(&mut writer);
    writer.end(&Summary { exit: Exit::Poweroff, ..Summary::default() }).expect("memory");
    writer.into_inner().expect("memory")
}

/// The lines of the events: the example does not print the header's.
fn rust_lines(stream: &[u8]) -> Vec<String> {
    let mut player = Player::new(Text::new(Vec::new()));
    player.push(stream).expect("a stream");
    player.finish().expect("whole");
    let text = String::from_utf8(player.into_export().into_inner()).expect("UTF-8");
    text.lines().skip(6).map(str::to_owned).collect()
}

fn python(source: &Path, options: &[&str]) -> Option<Output> {
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/examples/consume.py");
    let mut command = Command::new("python3");
    command.arg(script).arg(source).args(options).env("PYTHONIOENCODING", "utf-8");
    let output = command.output();
    if output.as_ref().is_err_and(|error| error.kind() == ErrorKind::NotFound) {
        eprintln!("skipped: there is no python3");
        return None;
    }
    Some(output.expect("python3 runs"))
}

fn python_file(stream: &[u8], options: &[&str]) -> Option<Output> {
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.write_all(stream).expect("room");
    python(file.path(), options)
}

#[test]
fn prints_the_same_text() {
    let stream = stream();
    let Some(output) = python_file(&stream, &[]) else { return };
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let expected = rust_lines(&stream);
    assert_eq!(expected.len(), 20 * (200 + 199 + 198) + 12 + 5);
    for (number, (found, expected)) in text.lines().zip(&expected).enumerate() {
        assert_eq!(found, *expected, "line {number}");
    }
    assert_eq!(text.lines().count(), expected.len());
    assert_eq!(errors, "11940 records, 130 lost, 0 missed; guest: poweroff\n");
}

// Python has zstd from 3.14 on; before that it takes a package, which the error names.
#[test]
fn a_compressed_stream_is_read_as_the_plain_one_or_refused() {
    let stream = sample::compressed(&stream());
    let Some(output) = python_file(&stream, &[]) else { return };
    let errors = String::from_utf8_lossy(&output.stderr);
    let has = "import importlib.util as it; find = lambda name: it.find_spec(name) is not None\n\
               exit(not (find('zstandard') or find('compression') and find('compression.zstd')))";
    let has = Command::new("python3").args(["-c", has]).status().expect("python3 runs");
    if !has.success() {
        assert!(errors.contains("install the package zstandard"), "{errors}");
        assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0));
        return;
    }
    assert!(output.status.success(), "{errors}");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(text.lines().eq(rust_lines(&stream)));
    assert_eq!(errors, "11940 records, 130 lost, 0 missed; guest: poweroff\n");
    for length in [stream.len() / 2, stream.len() - 1] {
        let output = python_file(&stream[..length], &[]).expect("python3");
        assert!(String::from_utf8_lossy(&output.stderr).contains("torn stream"));
    }
}

// Version 1.1 of the page: what a reader need not know is skipped, what it knows is read.
#[test]
fn understands_every_kind_of_record() {
    let mut writer = begin();
    let tracer = Tracer { number: 3, name: "näme\x07", description: "" };
    writer.tracer(tracer).expect("memory");
    let mut buffer = RecordBuffer::new();
    let (sp, first, second) = (0xffff_c900_0000_1000, 0x8100_0000, 0x8100_0040);
    let at = 123_456_789;
    buffer.push(EntryRecord::new(at, first, 0, 1));
    buffer.push_frame(EntryRecord::new(at + 10, first, second, 1).with_sp(sp).of_tracer(3));
    buffer.push_tail(TailRecord::new(at + 20, first, second, 1, sp).of_tracer(3));
    buffer.push_frame(EntryRecord::new(at + 20, second, second, 1).with_sp(sp).of_tracer(3));
    buffer.push_return(ReturnRecord::new(at + 25, first, second, 1, sp - 64));
    let ret = ReturnRecord::new(at + 30, second, second, 1, sp);
    buffer.push_return_value(ret.with_value(u64::MAX).of_tracer(3));
    writer.records(0, &buffer).expect("vCPU");
    writer.end(&Summary::default()).expect("memory");
    let stream = writer.into_inner().expect("memory");
    let Some(output) = python_file(&stream, &[]) else { return };
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(errors, "6 records, 0 lost, 0 missed; guest: unknown\n");
    let expected = rust_lines(&stream);
    assert_eq!(text.lines().collect::<Vec<_>>(), expected);
    assert_eq!(expected.len(), 4);
    let Some(output) = python_file(&stream, &["--returns"]) else { return };
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let returns: Vec<_> = text.lines().filter(|line| line.contains(" return")).collect();
    let expected = [
        "            init-1       [000]      0.000003: return of function_0",
        "            init-1       [000]      0.000003: return of function_1, 0xffffffffffffffff [näme?]",
    ];
    assert_eq!(returns, expected);
    let jump =
        "            init-1       [000]      0.000002: function_0 jumps to function_1 [näme?]";
    assert!(text.contains(jump), "{text}");
}

fn shape(number: u16) -> Shape {
    let small = u8::try_from(number % 60).expect("small");
    let bytes = 1 << (number % 4);
    match number % 12 {
        0 => Shape::Signed { bytes },
        1 => Shape::Unsigned { bytes },
        2 => Shape::Bool { bytes },
        3 => Shape::Char,
        4 => {
            let names = (-200..200).step_by(3).map(|at| (at, format!("N{at}\x07").into()));
            Shape::Enum { bytes, signed: number.is_multiple_of(2), names: names.collect() }
        }
        5 => Shape::Pointer,
        6 | 7 => Shape::Text { bytes: number % 50 + 1 },
        8 => Shape::Bits { shift: small, width: 64 - small, signed: number.is_multiple_of(2) },
        9 => Shape::Raw { bytes: small + 1 },
        10 => Shape::Words { bytes: 8 * (number % 5 + 1) },
        _ => Shape::Unknown { kind: "later".into(), bytes: Some(number.into()) },
    }
}

// Whatever is in the guest's memory: both print the same, of every type.
#[test]
fn decodes_values() {
    let mut writer = begin();
    let mut random = 1u64;
    let mut next = || {
        // Knuth's, with a look at its better half.
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        random >> 32
    };
    let mut buffer = RecordBuffer::new();
    let bytes = b"az09 \"'\\\0\n\t\x1b\x7f\x80\xc3\xa4\xe2\x82\xac\xc2\x85\xed\xa0\x80\xff";
    for round in 0..300u16 {
        let function = 0x8100_0000 + u32::from(round % 40) * 64;
        let fields = (0..next() % 8).map(|at| {
            let name = if at == 3 { "ä\x1b\"".to_owned() } else { format!("a{}", at % 5) };
            ValueField { name, shape: shape(u16::try_from(next() % 1000).expect("small")) }
        });
        let (tracer, of, values) = (0, ValuesOf::Entry, fields.collect());
        let format = ValuesFormat { function, tracer, of, values, print: None };
        writer.values(&format).expect("room");
        let words: Vec<_> = (0..format.words().min(250))
            .map(|_| match next() % 4 {
                0 => next() % 300,
                1 => next() << 32 | next(),
                2 => u64::MAX - next() % 300,
                _ => u64::from_le_bytes(
                    [0; 8]
                        .map(|_: u8| bytes[usize::try_from(next()).expect("small") % bytes.len()]),
                ),
            })
            .collect();
        let at = 123_456_789 + u64::from(round) * 100;
        let entry = EntryRecord::new(at, function, 0x8100_0001, 1);
        let sp = round.is_multiple_of(2).then_some(u64::from(round));
        let failed = if round.is_multiple_of(3) { next() & next() } else { 0 };
        buffer.clear();
        let missing = usize::from(round.is_multiple_of(17));
        let present = words.len().saturating_sub(missing);
        buffer.push_values(entry, sp, failed, words.iter().copied().take(present));
        buffer.push(entry);
        writer.records(0, &buffer).expect("vCPU");
    }
    writer.end(&Summary::default()).expect("memory");
    let stream = writer.into_inner().expect("memory");
    let Some(output) = python_file(&stream, &[]) else { return };
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(errors, "600 records, 0 lost, 0 missed; guest: unknown\n");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    for (found, expected) in text.lines().zip(rust_lines(&stream)) {
        assert_eq!(found, expected);
    }
    assert_eq!(text.lines().count(), 600);
    for part in ["=true", "=-", "=?", "#2=", "='", "=\"", "=N", "\\x1b", "\\xff", "=0x", "=[0x"] {
        assert!(text.contains(part), "{part}");
    }
}

#[test]
fn decodes_returned_values() {
    let mut writer = begin();
    let function = 0x8100_0000;
    let mut buffer = RecordBuffer::new();
    let mut returns = |writer: &mut Writer<Vec<u8>>, shape| {
        if let Some(shape) = shape {
            let values = vec![ValueField { name: "ret".into(), shape }];
            let (tracer, of) = (0, ValuesOf::Return);
            writer
                .values(&ValuesFormat { function, tracer, of, values, print: None })
                .expect("room");
        }
        buffer.clear();
        let ret = ReturnRecord::new(123_456_789, function, 0, 1, 2);
        buffer.push_return_value(ret.with_value(0xffff_ffea));
        writer.records(0, &buffer).expect("vCPU");
    };
    returns(&mut writer, None);
    returns(&mut writer, Some(Shape::Signed { bytes: 4 }));
    returns(&mut writer, Some(Shape::Bool { bytes: 1 }));
    let names = vec![(234, "LOW".into())];
    returns(&mut writer, Some(Shape::Enum { bytes: 1, signed: false, names }));
    writer.end(&Summary::default()).expect("memory");
    let stream = writer.into_inner().expect("memory");
    let Some(output) = python_file(&stream, &["--returns"]) else { return };
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let found: Vec<_> = text.lines().map(|line| line.rsplit(' ').next().unwrap_or("")).collect();
    assert_eq!(found, ["0xffffffea", "-22", "true", "LOW"]);
}

// What is counted in the guest has no line of its own: a consumer that skips it shows nothing.
#[test]
fn shows_counts() {
    let stream = sample::counts();
    let Some(output) = python_file(&stream, &[]) else { return };
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(errors, "0 records, 0 lost, 0 missed; guest: unknown\n");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    assert_eq!(text.lines().collect::<Vec<_>>(), rust_lines(&stream));
    assert_eq!(text.lines().count(), 6);
    let Some(output) = python_file(&stream, &["--counts"]) else { return };
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let expected =
        "      1000 vfs_read\n        16 ext4_open [ext4]\n         1 0xffffffffc00fffff\n";
    assert_eq!(text, expected);
}

// Sums, means and bars are a reader's work: one that makes them otherwise shows another histogram.
#[test]
fn shows_histograms() {
    let header = header();
    let mut writer = begin();
    let (one, other) = (TEXT + 0x1000, TEXT + 0x2000);
    let named = [(0, "slow"), (1, "large")];
    for (number, name) in named {
        writer.tracer(Tracer { number, name, description: "" }).expect("memory");
    }
    let words = |address, words: &[(u8, u64)]| -> Vec<Bucket> {
        let function = header.offset(address).expect("an address of the window");
        words.iter().map(|&(bucket, hits)| Bucket { function, bucket, hits }).collect()
    };
    let durations = (HistogramOf::Durations, "");
    let (few, many) = ([(0, 2), (1, 1), (11, 40), (Bucket::SUM, 50_000)], [(12, 900), (64, 1)]);
    writer.buckets((0, 0), durations, &words(one, &few)).expect("vCPU");
    writer.buckets((1, 0), durations, &words(one, &few)).expect("vCPU");
    writer.buckets((1, 0), durations, &words(other, &many)).expect("vCPU");
    // No total where a value is negative, or of returned values.
    let negative = [(Bucket::NEGATIVE, 7), (41, 3), (Bucket::SUM, 5), (Bucket::MISSED, 4)];
    writer.buckets((0, 1), (HistogramOf::Values, ""), &words(one, &negative)).expect("vCPU");
    writer
        .buckets((0, 1), (HistogramOf::Arguments, "count"), &words(one, &negative))
        .expect("vCPU");
    let missed = [(Bucket::MISSED, 1), (Bucket::SUM, u64::MAX)];
    writer.buckets((0, 1), (HistogramOf::Arguments, "pos"), &words(one, &missed)).expect("vCPU");
    writer.end(&Summary::default()).expect("memory");
    let stream = writer.into_inner().expect("memory");
    let Some(output) = python_file(&stream, &[]) else { return };
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let expected = rust_lines(&stream);
    assert_eq!(text.lines().collect::<Vec<_>>(), expected);
    assert_eq!(expected.iter().filter(|line| line.starts_with("# histogram: ")).count(), 5);
    assert!(
        expected.iter().any(|line| line.contains("average 1162, total 100000")),
        "{expected:?}"
    );
}

// The same of callers.
#[test]
fn shows_callers() {
    let header = header();
    let mut writer = begin();
    let offset = |address| header.offset(address).expect("an address of the window");
    let (one, other) = (offset(TEXT + 0x1000), offset(TEXT + 0x800));
    for (number, name) in [(0, "who"), (1, "whose")] {
        writer.tracer(Tracer { number, name, description: "" }).expect("memory");
    }
    let hits = |list: &[(u32, u32, u64)]| -> Vec<CallerCount> {
        let count = |&(function, caller, hits)| CallerCount { function, caller, hits };
        list.iter().map(count).collect()
    };
    // Two places of one caller, one that is not known, and more than there can be.
    let most = [(one, other + 4, 7), (one, other + 8, 5), (one, one + 4, 9), (other, 0, 3)];
    writer.callers(0, 0, &hits(&most)).expect("vCPU");
    writer.callers(1, 0, &hits(&[(one, one + 4, 1), (other, 5, 0)])).expect("vCPU");
    writer.callers(1, 1, &hits(&[(one, other, u64::MAX), (one, other, 1)])).expect("vCPU");
    writer.end(&Summary::default()).expect("memory");
    let stream = writer.into_inner().expect("memory");
    let Some(output) = python_file(&stream, &[]) else { return };
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let expected = rust_lines(&stream);
    assert_eq!(text.lines().collect::<Vec<_>>(), expected);
    assert_eq!(expected.iter().filter(|line| line.starts_with("# callers of ")).count(), 3);
    assert!(expected.iter().any(|line| line.contains("22 calls by 2 callers")), "{expected:?}");
    let counts = python_file(&stream, &["--counts"]).expect("Python is there");
    let counts = String::from_utf8(counts.stdout).expect("UTF-8");
    assert!(counts.lines().any(|line| line.trim_start().starts_with("3 ")), "{counts}");
}

#[test]
fn counts_functions() {
    let Some(output) = python_file(&stream(), &["--counts"]) else { return };
    let text = String::from_utf8_lossy(&output.stdout);
    let counts =
        text.lines().filter_map(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    assert_eq!(counts.sum::<u64>(), 11_940);
    assert!(text.contains(" f [m?]\n"), "{text}");
}

#[test]
fn reads_a_socket_and_joins_late() {
    let mut writer = begin();
    fill(&mut writer);
    let mut joined = writer.join().expect("memory");
    let from = writer.get_mut().len();
    let record = EntryRecord::new(200_000_000, 0x8100_0000, 0, 1);
    writer.entries(1, &[record]).expect("vCPU");
    writer.flush().expect("memory");
    // The consumer is too slow for the next batch, and is told so.
    let to = writer.get_mut().len();
    writer.entries(2, &[record]).expect("vCPU");
    writer.flush().expect("memory");
    let end = writer.get_mut().len();
    writer.end(&Summary::default()).expect("memory");
    let all = writer.into_inner().expect("memory");
    let next = u32::from_le_bytes(all[end + 8..end + 12].try_into().expect("four bytes"));
    joined.extend_from_slice(&all[from..to]);
    joined.extend_from_slice(&consumer_loss(2, 1, 1, next));
    joined.extend_from_slice(&all[end..]);

    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("socket");
    let listener = UnixListener::bind(&path).expect("a socket");
    let served = std::thread::spawn(move || {
        let (mut connection, _) = listener.accept().expect("a consumer");
        let mut line = String::new();
        BufReader::new(&connection).read_line(&mut line).expect("a line");
        connection.write_all(&joined).expect("the consumer reads");
        line
    });
    let Some(output) = python(&path, &[]) else { return };
    assert_eq!(served.join().expect("no panic"), "raw\n");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(errors, "11942 records, 130 lost, 1 missed; guest: unknown\n");
    let text = String::from_utf8_lossy(&output.stdout);
    let mut lines: Vec<_> = text.lines().collect();
    lines.sort_unstable();
    let expected =
        ["            init-1       [001]      7.654321: function_0", "CPU:2 [LOST 1 EVENTS]"];
    assert_eq!(lines, expected);
}

#[test]
fn refuses_what_is_not_whole() {
    let stream = stream();
    let flipped = [&stream[..4000], &[stream[4000] ^ 1], &stream[4001..]].concat();
    let cases: [(&[u8], &str); 4] = [
        (&stream[..stream.len() - 1], "torn stream: it stops at byte"),
        (&stream[..9000], "torn stream: it stops at byte 9000, inside a frame"),
        (&flipped, "wrong check value"),
        (b"#!/bin/sh\necho something else\n", "not a vmtrace stream"),
    ];
    for (bytes, message) in cases {
        let Some(output) = python_file(bytes, &[]) else { return };
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{errors}");
        assert!(errors.contains(message), "{errors}");
    }
}
