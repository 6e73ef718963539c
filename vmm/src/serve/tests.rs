//! Consumers of a writer, without a guest.

use super::*;
use crate::events::EventLoop;
use crate::sandbox::Thread;
use crate::stream::{
    Count, EntryRecord, Frame, Reader, RecordBuffer, ReturnRecord, Shape, Symbol, TailRecord,
    Tracer, ValueField, ValuesFormat, ValuesOf, Writer, sample,
};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel, sync_channel};
use std::time::{Duration, Instant};

const FUNCTION: u64 = 0xffff_ffff_8100_0000;

fn request(line: &str) -> StreamRequest {
    match Request::parse(line, Origin::Host) {
        Ok(Request::Stream(request)) => request,
        other => panic!("{other:?}"),
    }
}

fn join(line: &str) -> (Join, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (Join { stream: ours, request: request(line), origin: Origin::Host }, theirs)
}

/// Lets a consumer join the stream as the relay does.
fn add(writer: &mut Writer<Hub>, join: Join) {
    let first = writer.join().unwrap();
    writer.get_mut().add(first, join).unwrap();
}

fn writer(capacity: usize) -> Writer<Hub> {
    let resolve: Resolve = Arc::new(|globs: &Globs| {
        let all = [("vfs_read", sample::READ), ("ext4_open", sample::OPEN)];
        let matches = |globs: &[String], name: &str| {
            globs.iter().any(|pattern| crate::kernel::glob::matches(pattern, name))
        };
        all.into_iter()
            .filter(|(name, _)| globs.filter.is_empty() || matches(&globs.filter, name))
            .filter(|(name, _)| !matches(&globs.notrace, name))
            .filter_map(|(_, address)| sample::header().offset(address))
            .collect()
    });
    let hub = Hub::new(Box::new(std::io::sink()), 2, resolve).unwrap().with_capacity(capacity);
    Writer::new(hub, &sample::header()).unwrap()
}

fn everything(mut from: UnixStream) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes).unwrap();
        bytes
    })
}

/// Records and consumer losses by vCPU of a stream that its reader finds whole.
fn counts(stream: &[u8]) -> (Vec<u64>, Vec<u64>) {
    let mut reader = Reader::new(stream).unwrap();
    let vcpus = usize::try_from(reader.header().vcpus).unwrap();
    let (mut records, mut missed) = (vec![0; vcpus], vec![0; vcpus]);
    while let Some(frame) = reader.next_frame().unwrap() {
        match frame {
            Frame::Records(batch) => records[batch.vcpu as usize] += u64::from(batch.count),
            Frame::Loss(loss) if loss.reason == crate::stream::LossReason::Consumer => {
                missed[loss.vcpu as usize] += loss.count;
            }
            _ => {}
        }
    }
    (records, missed)
}

fn some_records(count: u64) -> Vec<EntryRecord> {
    (0..count).map(|at| sample::entry(at, FUNCTION, FUNCTION + 9, 7)).collect()
}

#[test]
fn consumers_from_the_start_and_late_ones_get_whole_streams() {
    let mut writer = writer(1 << 20);
    let (early, early_end) = join("raw");
    add(&mut writer, early);
    let early = everything(early_end);
    sample::fill(&mut writer).unwrap();
    let (late, late_end) = join("raw");
    add(&mut writer, late);
    let late = everything(late_end);
    writer.entries(0, &some_records(10)).unwrap();
    writer.end(&sample::summary()).unwrap();
    drop(writer);
    assert_eq!(counts(&early.join().unwrap()), (vec![14, 3], vec![0, 0]));
    assert_eq!(counts(&late.join().unwrap()), (vec![10, 0], vec![0, 0]));
}

// A call without its return would be told as one that never ends.
#[test]
fn filters_keep_records_of_every_kind() {
    let mut writer = writer(1 << 20);
    let mut ends = Vec::new();
    for line in ["raw -f vfs_*", "raw -t second", "raw -f vfs_* -t second", "graph -t second"] {
        let (join, end) = join(line);
        add(&mut writer, join);
        ends.push(everything(end));
    }
    writer.tracer(Tracer { number: 1, name: "second", description: "" }).unwrap();
    let offset = |address| sample::header().offset(address).unwrap();
    let mut buffer = RecordBuffer::new();
    for (tracer, function) in [(0, offset(sample::READ)), (1, offset(sample::OPEN))] {
        buffer.push_frame(EntryRecord::new(2_000, function, 0, 7).with_sp(64).of_tracer(tracer));
        buffer.push_tail(TailRecord::new(4_000, function, 0, 7, 64).of_tracer(tracer));
        buffer.push_return(ReturnRecord::new(6_000, function, 0, 7, 32).of_tracer(tracer));
        let ret = ReturnRecord::new(6_000, function, 0, 7, 16).with_value(1);
        buffer.push_return_value(ret.of_tracer(tracer));
        let entry = EntryRecord::new(8_000, function, 0, 7).of_tracer(tracer);
        buffer.push_values(entry, Some(8), 0, [5]);
        let shape = Shape::Unsigned { bytes: 1 };
        let values = vec![ValueField { name: "a".into(), shape }];
        let of = ValuesOf::Entry;
        writer.values(&ValuesFormat { function, tracer, of, values, print: None }).unwrap();
    }
    writer.records(0, &buffer).unwrap();
    writer.end(&sample::summary()).unwrap();
    drop(writer);
    let streams: Vec<_> = ends.into_iter().map(|end| end.join().unwrap()).collect();
    let kinds = |stream: &[u8]| {
        let (mut reader, mut found) = (Reader::new(stream).unwrap(), Vec::new());
        while let Some(frame) = reader.next_frame().unwrap() {
            if let Frame::Records(batch) = frame {
                let heads = batch.records().map(|record| *record.head());
                found.extend(heads.map(|head| (head.tracer, head.kind, head.flags)));
            }
        }
        found
    };
    let formats = |stream: &[u8]| {
        let (mut reader, mut found) = (Reader::new(stream).unwrap(), Vec::new());
        while let Some(frame) = reader.next_frame().unwrap() {
            if let Frame::Values(list) = frame {
                found.extend(list.map(|values| (values.tracer, values.function)));
            }
        }
        found
    };
    let all =
        |tracer| [(tracer, 1, 1), (tracer, 3, 1), (tracer, 2, 1), (tracer, 2, 3), (tracer, 1, 5)];
    let (read, open) = (offset(sample::READ), offset(sample::OPEN));
    assert_eq!(formats(&streams[0]), [(0, read)]);
    assert_eq!(formats(&streams[1]), [(0, read), (1, open)]);
    assert_eq!(kinds(&streams[0]), all(0));
    assert_eq!(kinds(&streams[1]), all(1));
    assert_eq!(kinds(&streams[2]), []);
    assert!(String::from_utf8_lossy(&streams[3]).contains("(a=5); /* unfinished */"));
}

// Its own records, counted, and nobody else's: the promise to every other consumer.
#[test]
fn a_stuck_consumer_loses_its_own_records_only() {
    let mut writer = writer(1 << 20);
    let (stuck, stuck_end) = join("raw");
    let (quick, mut quick_end) = join("raw");
    add(&mut writer, stuck);
    add(&mut writer, quick);
    let records = some_records(1000);
    let mut of_quick = Vec::new();
    for round in 0..500 {
        writer.entries(round % 2, &records).unwrap();
        writer.flush().unwrap();
        // The quick one keeps up, whatever the machine does meanwhile: it takes as many records.
        let end = of_quick.len() + 1000 * size_of::<EntryRecord>();
        while of_quick.len() < end {
            let mut bytes = [0; 4096];
            let count = quick_end.read(&mut bytes).unwrap();
            of_quick.extend_from_slice(&bytes[..count]);
        }
    }
    let slow = everything(stuck_end);
    let quick = everything(quick_end);
    // Space again: the stream goes on for it.
    std::thread::sleep(Duration::from_millis(200));
    writer.entries(0, &records).unwrap();
    writer.end(&sample::summary()).unwrap();
    drop(writer);
    let (records, missed) = counts(&slow.join().unwrap());
    assert!(missed.iter().all(|&count| count > 0), "{missed:?}");
    assert_eq!([records[0] + missed[0], records[1] + missed[1]], [251_000, 250_000]);
    of_quick.extend(quick.join().unwrap());
    assert_eq!(counts(&of_quick).0, [251_000, 250_000]);
}

#[test]
fn a_consumer_that_leaves_is_forgotten() {
    let mut writer = writer(1 << 20);
    let (leaving, end) = join("text");
    add(&mut writer, leaving);
    drop(end);
    let begin = Instant::now();
    while writer.get_mut().consumers() > 0 {
        assert!(begin.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(5));
    }
    sample::fill(&mut writer).unwrap();
    writer.end(&sample::summary()).unwrap();
}

#[test]
fn a_consumer_that_never_reads_does_not_hold_up_the_end() {
    let mut writer = writer(8 << 20);
    let (stuck, _end) = join("raw");
    add(&mut writer, stuck);
    for _ in 0..200 {
        writer.entries(0, &some_records(1000)).unwrap();
    }
    writer.end(&sample::summary()).unwrap();
    let start = Instant::now();
    drop(writer);
    assert!(start.elapsed() < Duration::from_secs(15));
}

#[test]
fn formats_and_filters() {
    let ask = |line: &str| {
        let mut writer = writer(1 << 20);
        let (asking, end) = join(line);
        add(&mut writer, asking);
        let got = everything(end);
        sample::fill(&mut writer).unwrap();
        writer.end(&sample::summary()).unwrap();
        drop(writer);
        got.join().unwrap()
    };
    let text = String::from_utf8(ask("text -f vfs_*")).unwrap();
    assert!(text.contains("vfs_read <-ksys_read") && !text.contains("ext4_open"), "{text}");
    let json = String::from_utf8(ask("json -n vfs_*")).unwrap();
    let entries: Vec<&str> = json.lines().filter(|l| l.contains("\"entry\"")).collect();
    assert!(!entries.is_empty() && entries.iter().all(|l| !l.contains("vfs_read\"")), "{json}");
    assert!(json.lines().last().unwrap().contains("\"end\""));
    // A stream of some functions is a whole stream: the reader verifies totals and positions.
    assert_eq!(counts(&ask("raw -f ext4_open")), (vec![2, 0], vec![0, 0]));
    assert_eq!(counts(&ask("raw -n ext4_open")), (vec![1, 3], vec![0, 0]));
}

// Who asks for some functions, or for one tracer, gets no counts of others, and all of its own.
#[test]
fn filters_keep_the_counts_of_what_is_asked_for() {
    let refiltered = |line: &str| {
        let mut writer = writer(1 << 20);
        let (asking, end) = join(line);
        add(&mut writer, asking);
        let got = everything(end);
        let symbol = Symbol { address: sample::OPEN, size: 64, name: "ext4_open", module: "ext4" };
        writer.symbols([Symbol::new(sample::READ, 64, "vfs_read"), symbol]).unwrap();
        writer.tracer(Tracer { number: 1, name: "second", description: "" }).unwrap();
        let offset = |address| sample::header().offset(address).unwrap();
        let count = |address, hits| Count { function: offset(address), hits };
        for (vcpu, tracer, hits) in [(0, 0, 1), (1, 0, 10), (1, 1, 100), (1, 1, 1000)] {
            let counts = [count(sample::READ, hits), count(sample::OPEN, 2 * hits)];
            writer.counts(vcpu, tracer, &counts).unwrap();
        }
        writer.end(&sample::summary()).unwrap();
        drop(writer);
        let (stream, mut found) = (got.join().unwrap(), Vec::new());
        let mut reader = Reader::new(&*stream).unwrap();
        while let Some(frame) = reader.next_frame().unwrap() {
            if let Frame::Counts(counts) = frame {
                found.extend(counts.counts().map(|it| (counts.vcpu, counts.tracer, it.hits)));
            }
        }
        found
    };
    assert_eq!(refiltered("raw -f vfs_*"), [(0, 0, 1), (1, 0, 10), (1, 1, 100), (1, 1, 1000)]);
    let of_second = [(1, 1, 100), (1, 1, 200), (1, 1, 1000), (1, 1, 2000)];
    assert_eq!(refiltered("raw -t second"), of_second);
    assert_eq!(refiltered("raw -n vfs_* -t second"), [(1, 1, 200), (1, 1, 2000)]);
    assert_eq!(refiltered("raw -f none"), []);
    assert_eq!(refiltered("raw").len(), 8);
}

fn server() -> (tempfile::TempDir, (Server, EventLoop), Receiver<ControlRequest>) {
    let directory = tempfile::tempdir().unwrap();
    let (joins, joined) = sync_channel(1);
    let (control, requests) = sync_channel(1);
    drop(joined);
    let mut services = Services::new(joins, control, Arc::new(|| ()));
    services.agent = Some(Arc::new(|mut client| {
        std::thread::spawn(move || {
            client.set_nonblocking(false).unwrap();
            let mut said = String::new();
            client.write_all(b"OK\n").unwrap();
            client.read_to_string(&mut said).unwrap();
            client.write_all(said.to_uppercase().as_bytes()).unwrap();
        });
    }));
    let events = EventLoop::start(Thread::Events).unwrap();
    let socket = directory.path().join("socket");
    let server = services.serve(&events.handle(), Some(&socket)).unwrap();
    (directory, (server, events), requests)
}

fn say(directory: &tempfile::TempDir, line: &str) -> String {
    let stream = UnixStream::connect(directory.path().join("socket")).unwrap();
    vmtrace_system::send_request(&stream, line.as_bytes()).unwrap();
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).unwrap();
    answer
}

#[test]
fn requests_over_the_socket() {
    let (directory, server, requests) = server();
    let controller = std::thread::spawn(move || {
        for request in requests.iter().take(2) {
            let answer = match request.command {
                Control::Status => Ok("fine".to_owned()),
                other => Err(format!("no {other:?}")),
            };
            request.reply.send(answer);
        }
    });
    assert_eq!(say(&directory, "ctl status\n"), "OK fine\n");
    assert_eq!(say(&directory, "ctl pause\n"), "ERR no Pause\n");
    controller.join().unwrap();
    assert_eq!(say(&directory, "ctl status\n"), "ERR the trace has ended\n");
    assert_eq!(say(&directory, "raw\n"), "ERR the trace has ended\n");
    assert!(say(&directory, "hello\n").starts_with("ERR unknown request \"hello\""));
    let long = "x".repeat(20_000) + "\n";
    assert_eq!(say(&directory, &long), "ERR the first line is too long\n");
    drop(server);
    assert!(!directory.path().join("socket").exists());
}

// A table of many functions is larger than what a socket takes at once: it was cut off there.
#[test]
fn long_answers_come_whole() {
    let (directory, server, requests) = server();
    let long = "0123456789".repeat(200_000);
    let answer = long.clone();
    let (answered, answers) = channel();
    let controller = std::thread::spawn(move || {
        for request in requests.iter().take(3) {
            request.reply.send(Ok(answer.clone()));
            answered.send(()).unwrap();
        }
    });
    // Who does not read holds up nobody.
    let mut idle = UnixStream::connect(directory.path().join("socket")).unwrap();
    idle.write_all(b"ctl table\n").unwrap();
    // There is room for one command at a time.
    answers.recv().unwrap();
    assert!(say(&directory, "ctl table\n") == format!("OK {long}\n"));
    let stream = UnixStream::connect(directory.path().join("socket")).unwrap();
    assert!(command(&stream, &Control::Table).unwrap() == long);
    controller.join().unwrap();
    let mut late = String::new();
    BufReader::new(idle).read_line(&mut late).unwrap();
    assert!(late == format!("OK {long}\n"), "{}", late.len());
    drop(server);
}

// What a stuck controller does not answer must not fill memory, nor keep others out.
#[test]
fn commands_that_nobody_takes_are_refused() {
    let (directory, _server, requests) = server();
    let mut first = UnixStream::connect(directory.path().join("socket")).unwrap();
    first.write_all(b"ctl status\n").unwrap();
    // The channel has room for one.
    let mut second = say(&directory, "ctl status\n");
    assert_eq!(second, "ERR too many commands at once; try again later\n");
    drop(requests);
    second.clear();
    first.read_to_string(&mut second).unwrap();
    assert_eq!(second, "ERR the trace has ended\n");
}

#[test]
fn more_may_ask_than_descriptors_are_kept_for() {
    let (directory, server, _requests) = server();
    let silent: Vec<_> =
        (0..64).map(|_| UnixStream::connect(directory.path().join("socket")).unwrap()).collect();
    assert_eq!(say(&directory, "hello\n"), "ERR too many connections at once; try again later\n");
    drop(silent);
    // Others of the guest have places of their own.
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    server.0.door().take_guest(theirs, 1);
    ours.write_all(b"ctl pause\n").unwrap();
    let mut answer = String::new();
    ours.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("ERR "), "{answer}");
}

#[test]
fn the_agent_gets_every_byte_behind_the_first_line() {
    let (directory, _server, _requests) = server();
    let mut stream = UnixStream::connect(directory.path().join("socket")).unwrap();
    stream.write_all(b"agent\nhello agent").unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert_eq!(answer, "OK\nHELLO AGENT");
}

/// What a connection of the guest from `port` with this first line gets, and whether that got any
/// further.
fn guest_says(readers: GuestReaders, port: u32, line: &str) -> (String, bool) {
    let ((joining, joins), (commands, control)) = (sync_channel(1), sync_channel(1));
    let mut services = Services::new(joining, commands, Arc::new(|| {}));
    services.readers = readers;
    let events = EventLoop::start(Thread::Events).unwrap();
    let server = services.serve(&events.handle(), None).unwrap();
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    server.door().take_guest(ours, port);
    theirs.write_all(line.as_bytes()).unwrap();
    let answer = std::thread::spawn(move || {
        let mut answer = String::new();
        theirs.read_to_string(&mut answer).unwrap();
        answer
    });
    let mut joined = false;
    while !answer.is_finished() {
        if let Ok(request) = control.recv_timeout(Duration::from_millis(1)) {
            request.reply.send(Ok(String::new()));
        }
        joined |= joins.try_recv().is_ok();
    }
    (answer.join().unwrap(), joined)
}

// The trace shows what all others in the guest do, and where KASLR has put the kernel.
#[test]
fn the_guest_reads_only_if_it_may_and_marks_in_any_case() {
    for (readers, port, may) in [
        (GuestReaders::None, 1, false),
        (GuestReaders::Privileged, 1023, true),
        (GuestReaders::Privileged, 1024, false),
        (GuestReaders::All, 5000, true),
    ] {
        for line in ["raw\n", "json -f vfs_*\n"] {
            let (answer, joined) = guest_says(readers, port, line);
            assert_eq!(joined, may, "{readers:?} {port} {line}: {answer}");
            assert_eq!(answer.starts_with("ERR ") && answer.contains("--serve-guest"), !may);
        }
        assert_eq!(guest_says(readers, port, "mark 1 x\n"), ("OK\n".to_owned(), false));
    }
}
