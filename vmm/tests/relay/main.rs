//! The relay between rings that are being filled and consumers.

#[path = "../../../kernel/tests/builder/mod.rs"]
mod synthetic;

mod anew;
mod exits;
mod hostile;
mod kinds;
mod rings;
mod waiting;

use std::collections::HashSet;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rings::Rings;
use vmtrace::export::{Player, Text};
use vmtrace::relay::{Drain, End, Grace, Relay, Snapshot, Sorted, resolver};
use vmtrace::serve::{self, Format, Globs, Hub, Join, Origin, StreamRequest, Unwritten};
use vmtrace::stream::{
    Bucket, Compressor, Count, CountsOf, Dictionaries, EntryRecord, Frame, Header, HistogramOf,
    Mark, MarkKind, Reader, Stretch, Summary, TracedOf,
};
use vmtrace::tracer::{CallerHits, Hits, RawBatch};
use vmtrace_trampolines::layout::{COMMON_SIZE, Common, Info};

const CPUS: usize = 2;
const RECORDS: u64 = 500_000;
/// So many come before the relay does, more than a ring holds.
const EARLY: u64 = 250_000;
/// How long an end may take.
const TIME: Duration = Duration::from_secs(60);

/// A file that can be looked at afterwards.
#[derive(Clone, Default)]
struct Sink(Arc<Mutex<Vec<u8>>>);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn consumer() -> (Join, std::thread::JoinHandle<Vec<u8>>) {
    let (stream, mut theirs) = UnixStream::pair().unwrap();
    let request = StreamRequest { format: Format::Raw, globs: Globs::default(), tracer: None };
    let reader = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        theirs.read_to_end(&mut bytes).unwrap();
        bytes
    });
    (Join { stream, request, origin: Origin::Host }, reader)
}

// What a flight recorder has is told once, whenever it is asked for; a record that was not finished then
// is lost, and counted once.
#[test]
fn snapshots_tell_each_record_once() {
    let rings = Rings::new(1);
    let sink = Sink::default();
    let (mut setup, _joining) = rings.setup(Box::new(sink.clone()));
    setup.readers = rings.readers(true);
    let lap = |number| Common { info: Info::new(COMMON_SIZE, 0, 1, 1).0, ..rings.record(number) };
    let hit = |numbers: std::ops::Range<u64>| numbers.for_each(|number| rings.hit(0, lap(number)));
    let mut drain = Drain::start(setup).unwrap();
    hit(0..40);
    assert_eq!(drain.snapshot().unwrap().records, 40);
    assert_eq!(drain.snapshot().unwrap().records, 0);
    let unfinished = rings.reserve(0).unwrap();
    hit(40..60);
    drain.pass().unwrap();
    assert_eq!(drain.snapshot().unwrap().records, 20);
    // Its writer was only preempted.
    rings.publish(unfinished, lap(0));
    rings.reserve(0).unwrap();
    hit(60..70);
    let end = drain.finish(Summary::default(), &Grace::of(TIME)).unwrap();
    assert_eq!((end.summary.records(), end.summary.lost()), (70, 2), "{:?}", end.summary);
    let file = sink.0.lock().unwrap();
    let mut reader = Reader::new(&**file).unwrap();
    let mut times = Vec::new();
    while let Some(frame) = reader.next_frame().unwrap() {
        if let Frame::Records(batch) = frame {
            times.extend(batch.entries().unwrap().iter().map(EntryRecord::timestamp));
        }
    }
    assert_eq!(times, (0..70).map(|number| lap(number).timestamp).collect::<Vec<_>>());
}

// `ctl S clear` begins anew: what was there before is in no snapshot, and is not lost either.
#[test]
fn what_was_cleared_is_in_no_snapshot() {
    let rings = Rings::new(1);
    let (mut setup, joining) = rings.setup(Box::new(Sink::default()));
    setup.readers = rings.readers(true);
    let (join, reader) = consumer();
    joining.send(join).unwrap();
    let lap = |number| Common { info: Info::new(COMMON_SIZE, 0, 1, 1).0, ..rings.record(number) };
    let hit = |numbers: std::ops::Range<u64>| numbers.for_each(|number| rings.hit(0, lap(number)));
    let relay = Relay::start(setup, || ()).unwrap();
    hit(0..40);
    assert_eq!(relay.clear(), Some(40));
    hit(40..50);
    assert_eq!(relay.snapshot(), Some(Snapshot { records: 10, whole: true }));
    assert_eq!((relay.status().unwrap().consumers, relay.consumers()), (1, 1));
    let end = relay.finish(Summary::default(), TIME).wait(TIME).unwrap().unwrap();
    assert_eq!((end.summary.records(), end.summary.lost()), (10, 0), "{:?}", end.summary);
    reader.join().unwrap();
}

// Who asks how far the stream is would wait for ever for a guest that does nothing.
#[test]
fn it_is_told_how_far_an_idle_stream_is_where_somebody_asks() {
    for asked in [false, true] {
        let rings = Rings::new(1);
        let sink = Sink::default();
        let (setup, _joining) = rings.setup(Box::new(sink.clone()));
        let relay = Relay::start(setup, || ()).unwrap();
        if asked {
            relay.reach(0);
        }
        relay.finish(Summary::default(), TIME).wait(TIME).unwrap().unwrap();
        let file = sink.0.lock().unwrap();
        let mut reader = Reader::new(&**file).unwrap();
        let mut told = false;
        while let Some(frame) = reader.next_frame().unwrap() {
            told |= matches!(frame, Frame::Watermark(_));
        }
        assert_eq!(told, asked);
    }
}

// Whoever runs the guest must hear that nothing is traced any more, and why.
#[test]
fn a_relay_that_fails_says_why() {
    let rings = Rings::new(1);
    let (mut setup, _joining) = rings.setup(Box::new(std::io::sink()));
    setup.header.clock_hz = 0;
    let (sender, ended) = channel();
    let mut relay = Relay::start(setup, move || sender.send(()).unwrap()).unwrap();
    ended.recv().unwrap();
    let error = relay.error().unwrap().to_string();
    assert!(error.contains("the clock's rate is zero"), "{error}");
    assert!(relay.status().is_none() && relay.snapshot().is_none());
}

// A ring may be larger than what should wait for the output. What that takes too long for is there for the
// next snapshot; at the end it is lost, and told.
#[test]
fn what_the_output_is_too_slow_for_stays_in_the_recorder() {
    const RECORDS: u64 = 100_000;
    let rings = Rings::new(1);
    let sink = Sink::default();
    let (mut setup, _joining) = rings.setup(Box::new(sink.clone()));
    setup.stream = setup.stream.with_room(0);
    setup.readers = rings.readers(true);
    let lap = |number| Common { info: Info::new(COMMON_SIZE, 0, 1, 1).0, ..rings.record(number) };
    rings.open_all();
    let mut drain = Drain::start(setup).unwrap();
    (0..RECORDS).for_each(|number| rings.hit(0, lap(number)));
    // Nothing is written while this is held.
    let stuck = sink.0.lock().unwrap();
    let first = drain.snapshot_within(|_| None).unwrap();
    assert!(!first.whole && (1..RECORDS / 2).contains(&first.records), "{first:?}");
    drop(stuck);
    let second = drain.snapshot().unwrap();
    assert!(second.whole);
    assert_eq!(first.records + second.records, RECORDS);
    (RECORDS..2 * RECORDS).for_each(|number| rings.hit(0, lap(number)));
    drain.wait_for_output();
    let stuck = sink.0.lock().unwrap();
    let end = drain.finish(Summary::default(), &Grace::of(Duration::ZERO)).unwrap().summary;
    drop(stuck);
    assert_eq!(end.records() + end.lost(), 2 * RECORDS, "{end:?}");
    assert!(end.records() > RECORDS && end.lost() > RECORDS / 2, "{end:?}");
    assert!(end.notes.iter().any(|note| note.contains("left in the flight recorder")), "{end:?}");
}

// As `--compress` has it.
#[test]
fn a_compressed_file_has_what_consumers_get_plain() {
    let rings = Rings::new(1);
    let sink = Sink::default();
    let out = Compressor::new(sink.clone(), "zstd".parse().unwrap()).unwrap();
    let (setup, joining) = rings.setup(serve::Sink::gathering(Box::new(out)));
    let (join, reader) = consumer();
    joining.send(join).unwrap();
    let mut drain = Drain::start(setup).unwrap();
    let mut count = 0;
    for _ in 0..3 {
        count += rings.fill(count);
        drain.pass().unwrap();
    }
    let end = drain.finish(Summary::default(), &Grace::of(TIME)).unwrap();
    assert_eq!((end.summary.records(), end.unwritten), (count, Unwritten::default()));
    let (file, plain) = (std::mem::take(&mut *sink.0.lock().unwrap()), reader.join().unwrap());
    assert!(file.len() * 4 < plain.len(), "{} and {}", file.len(), plain.len());
    let text = |stream: &[u8]| {
        let mut player = Player::new(Text::new(Vec::new()));
        player.push(stream).unwrap();
        player.finish().unwrap();
        player.into_export().into_inner()
    };
    assert!(text(&file) == text(&plain));
}

// Rings that overflow now and then, and several consumers: each record is in the stream, once,
// where it belongs, or is in a loss at the place where it is missing; and a consumer that keeps up
// has the very bytes of the file.
#[test]
fn what_was_drained_reaches_everyone_and_what_was_not_is_counted() {
    let rings = Rings::new(CPUS as u64);
    let sink = Sink::default();
    let (setup, joining) = rings.setup(Box::new(sink.clone()));
    let (first, first_reader) = consumer();
    joining.send(first).unwrap();
    let hit = |cpu: usize, n: u64| rings.hit(cpu, rings.record(n));
    (0..CPUS).for_each(|cpu| (0..EARLY).for_each(|n| hit(cpu, n)));
    let relay = Relay::start(setup, || ()).unwrap();
    std::thread::scope(|scope| {
        for cpu in 0..CPUS {
            scope.spawn(move || (EARLY..RECORDS).for_each(|n| hit(cpu, n)));
        }
    });
    // It has only the end of the stream; but that it has, whole.
    let (late, late_reader) = consumer();
    joining.send(late).unwrap();
    let stretch = Stretch { since: 7, until: u64::MAX, tracer: 0, of: TracedOf::Entries };
    relay.traced(vec![(stretch, vec![0, 1, 2])]);
    let summary = relay.finish(Summary::default(), TIME).wait(TIME).unwrap().unwrap().summary;
    assert_eq!(summary.notes, [] as [&str; 0]);

    let file = std::mem::take(&mut *sink.0.lock().unwrap());
    assert!(first_reader.join().unwrap() == file, "a consumer has other bytes than the file");
    let late = late_reader.join().unwrap();
    let mut late = Reader::new(&*late).unwrap();
    // Most functions are never called: that they were traced is told to all, with their names.
    let (mut names, mut traced) = (HashSet::new(), Vec::new());
    while let Some(frame) = late.next_frame().unwrap() {
        match frame {
            Frame::Symbols(list) => names.extend(list.map(|symbol| symbol.address)),
            Frame::Traced(list) => {
                assert_eq!((list.since, list.until, list.tracer), (7, u64::MAX, 0));
                traced.extend(list.functions().map(|low| Header::TOP_4_GIB | u64::from(low)));
            }
            _ => {}
        }
    }
    let expected = rings.kernel.sites().iter().take(3).map(|site| site.entry);
    assert_eq!(traced, expected.collect::<Vec<_>>());
    assert!(traced.iter().all(|address| names.contains(address)));

    let mut next = [0; CPUS];
    let mut lost = [0; CPUS];
    let mut reader = Reader::new(&*file).unwrap();
    let mut names = Dictionaries::new();
    while let Some(frame) = reader.next_frame().unwrap() {
        match frame {
            Frame::Symbols(list) => list.for_each(|symbol| {
                symbol.with_text(|symbol| names.insert_symbol(symbol)).unwrap();
            }),
            Frame::Records(batch) => {
                let cpu = batch.vcpu as usize;
                for entry in batch.entries().unwrap() {
                    let number = entry.timestamp() / 100;
                    let expected = rings.record(number);
                    assert!(number >= next[cpu], "vCPU {cpu}: {number} after {}", next[cpu]);
                    assert_eq!(entry.function.get(), rings.entries[&expected.site]);
                    assert_eq!((entry.caller.get(), entry.pid()), (expected.caller, expected.pid));
                    // Callers have their names before the first record that has them.
                    let caller = Header::TOP_4_GIB | u64::from(expected.caller);
                    let named = names.symbol(caller).map(|symbol| symbol.address);
                    let function = rings.kernel.symbols().lookup(caller);
                    assert_eq!(named, function.map(|(_, start)| start));
                    assert!(named.is_some());
                    lost[cpu] += number - next[cpu];
                    next[cpu] = number + 1;
                }
            }
            Frame::End(end) => {
                assert!(end.lost() > 0, "no ring was ever full");
                for (cpu, totals) in end.vcpus.iter().enumerate() {
                    assert_eq!(totals.records + totals.lost, RECORDS, "vCPU {cpu}");
                    // Those after the last record that was written are in no gap.
                    assert_eq!(totals.lost, lost[cpu] + RECORDS - next[cpu], "vCPU {cpu}");
                }
            }
            _ => {}
        }
    }
}

/// The low half of an address of the kernel, as records have it.
fn low(address: u64) -> u32 {
    u32::try_from(address - Header::TOP_4_GIB).unwrap()
}

// A consumer sees them while the guest runs, with names for them, behind the records that were there
// before; there is nothing of what was not called, nor of what is no site.
#[test]
fn counts_are_told_when_they_come() {
    let rings = Rings::new(CPUS as u64);
    let sink = Sink::default();
    let (setup, _joining) = rings.setup(Box::new(sink.clone()));
    rings.hit(0, rings.record(0));
    let relay = Relay::start(setup, || ()).unwrap();
    let sites = rings.kernel.sites().len();
    let hits = vec![(3, 5), (sites - 1, 0), (sites, 1), (4, u64::MAX)];
    let none = Hits { tracer: 0, vcpu: 0, hits: vec![(3, 0)] };
    relay.counted(vec![Hits { tracer: 1, vcpu: 1, hits }, none], vec![], vec![]);
    // By a caller that has a name, one that has none, and for no site.
    let [_, _, _, third, ..] = rings.kernel.sites() else { panic!("few sites") };
    let caller = low(third.entry + 4);
    let hits = vec![(3, caller, 11), (4, 1, 12), (sites, caller, 13), (4, caller, 0)];
    relay.counted(vec![], vec![CallerHits { tracer: 1, vcpu: 1, hits }], vec![]);
    let words = vec![(3, 7, 9), (sites, 7, 1), (4, Bucket::MISSED, 1)];
    let (of, name) = (HistogramOf::Arguments, "count".to_owned());
    let sorted = Sorted { tracer: 1, vcpu: 1, of, name, words };
    relay.counted(vec![Hits { tracer: 1, vcpu: 1, hits: vec![(3, 2)] }], vec![], vec![sorted]);
    let now = relay.now();
    relay.mark(Mark { ticks: now, kind: MarkKind::Note, duration_ns: 0, text: "behind".into() });
    relay.finish(Summary::default(), TIME).wait(TIME).unwrap().unwrap();
    let file = std::mem::take(&mut *sink.0.lock().unwrap());
    let mut reader = Reader::new(&*file).unwrap();
    let (mut names, mut records, mut counted, mut marked) = (HashSet::new(), 0, Vec::new(), false);
    let (mut words, mut called) = (Vec::new(), Vec::new());
    while let Some(frame) = reader.next_frame().unwrap() {
        match frame {
            Frame::Symbols(list) => names.extend(list.map(|symbol| symbol.address)),
            Frame::Records(batch) => records += batch.count,
            Frame::Mark(_) => marked = true,
            Frame::Counts(counts) => {
                assert_eq!((counts.vcpu, counts.tracer), (1, 1));
                assert!(records == 1 && !marked, "{records} records before, {marked}");
                if counts.of == Some(CountsOf::Sorted(HistogramOf::Arguments)) {
                    assert_eq!(counts.name, "count");
                    words.extend(counts.buckets().map(|it| {
                        let address = Header::TOP_4_GIB | u64::from(it.function);
                        (address, it.bucket, it.hits)
                    }));
                    continue;
                }
                if counts.of == Some(CountsOf::Callers) {
                    called.extend(counts.callers().map(|it| (it.function, it.caller, it.hits)));
                    assert!(names.contains(&third.entry), "its caller's");
                    continue;
                }
                for Count { function, hits } in counts.counts() {
                    let address = Header::TOP_4_GIB | u64::from(function);
                    assert!(names.contains(&address));
                    counted.push((address, hits));
                }
            }
            _ => {}
        }
    }
    let entry = |site: usize| rings.kernel.sites()[site].entry;
    assert_eq!(counted, [(entry(3), 5), (entry(4), u64::MAX), (entry(3), 2)]);
    assert_eq!(words, [(entry(3), 7, 9), (entry(4), Bucket::MISSED, 1)]);
    assert_eq!(called, [(low(entry(3)), caller, 11), (low(entry(4)), 1, 12)]);
    assert!(words.iter().all(|(address, ..)| names.contains(address)));
}

/// An output that takes nothing until its other end is gone.
struct Stuck<W>(Receiver<()>, W);

impl<W: Write> Write for Stuck<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let _ = self.0.recv();
        self.1.write(bytes)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn long_mark(ticks: u64, kind: MarkKind) -> Mark {
    Mark { ticks, kind, duration_ns: 0, text: "x".repeat(200) }
}

// What a program wrote is read by what its number means. That must not mean another's while anything of it is in a ring.
#[test]
fn whether_all_was_taken_that_was_written_before_is_told() {
    let rings = Rings::new(2);
    let (setup, _joining) = rings.setup(Box::new(std::io::sink()));
    let targets = setup.targets.clone();
    let relay = Relay::start(setup, || ()).unwrap();
    assert!(relay.targets(targets.clone()), "there is nothing");
    (0..100).for_each(|n| rings.hit(1, rings.record(n)));
    assert!(relay.targets(targets.clone()));
    let unfinished = rings.reserve(1).unwrap();
    for _ in 0..3 {
        assert!(!relay.targets(targets.clone()), "its writer may be of any program");
    }
    rings.hit(0, rings.record(200));
    rings.hit(1, rings.record(202));
    assert!(!relay.targets(targets.clone()), "those behind it wait as well");
    rings.publish(unfinished, rings.record(201));
    assert!(relay.targets(targets));
    relay.finish(Summary::default(), TIME).wait(TIME).unwrap().unwrap();
    // A flight recorder keeps what is of those that were there before.
    let rings = Rings::new(1);
    let (mut setup, _joining) = rings.setup(Box::new(std::io::sink()));
    setup.readers = rings.readers(true);
    let targets = setup.targets.clone();
    let relay = Relay::start(setup, || ()).unwrap();
    let lap = |number| Common { info: Info::new(COMMON_SIZE, 0, 1, 1).0, ..rings.record(number) };
    rings.hit(0, lap(0));
    assert!(!relay.targets(targets.clone()));
    assert_eq!(relay.clear(), Some(1));
    assert!(relay.targets(targets));
    relay.finish(Summary::default(), TIME).wait(TIME).unwrap().unwrap();
}

// `ctl S mark` answers that the mark is there: a disk that is slow for a while must not make that a lie.
#[test]
fn a_users_mark_is_in_a_trace_whose_output_was_stuck() {
    const OURS: usize = 500;
    let rings = Rings::new(1);
    let (open, opened) = channel();
    let (mut setup, _joining) = rings.setup(Box::new(std::io::sink()));
    let sink = Sink::default();
    let stuck = Stuck(opened, sink.clone());
    let hub = Hub::new(Box::new(stuck), 1, resolver(&setup.kernel, 0)).unwrap();
    setup.stream = hub.with_room(1 << 20);
    let targets = setup.targets.clone();
    let relay = Relay::start(setup, || ()).unwrap();
    (0..20_000).for_each(|ticks| relay.mark(long_mark(ticks, MarkKind::Note)));
    for ticks in 0..OURS as u64 {
        // As many wait as may.
        while !relay.try_mark(long_mark(20_000 + ticks, MarkKind::User)) {
            relay.targets(targets.clone());
        }
    }
    relay.targets(targets);
    drop(open);
    let End { unwritten, .. } = relay.finish(Summary::default(), TIME).wait(TIME).unwrap().unwrap();
    assert_eq!(unwritten, Unwritten::default());
    let bytes = std::mem::take(&mut *sink.0.lock().unwrap());
    let mut reader = Reader::new(&bytes[..]).unwrap();
    let (mut users, mut notes) = (Vec::new(), 0);
    while let Some(frame) = reader.next_frame().unwrap() {
        match frame {
            Frame::Mark(Mark { kind: MarkKind::User, ticks, .. }) => users.push(ticks),
            Frame::Mark(_) => notes += 1,
            _ => {}
        }
    }
    assert_eq!(users, Vec::from_iter(20_000..20_000 + OURS as u64));
    assert!(notes < 20_000, "the output was not stuck");
}

// `vmtrace boot K | less` that is left alone, a dead NFS server: the run must end when it is to, marks
// and changes of what is traced must not wait, and each record is somewhere.
#[test]
fn a_stuck_output_holds_up_nobody_and_all_is_counted() {
    let rings = Rings::new(1);
    let (_open, opened) = channel();
    let (mut setup, _joining) = rings.setup(Box::new(std::io::sink()));
    let hub =
        Hub::new(Box::new(Stuck(opened, std::io::sink())), 1, resolver(&setup.kernel, 0)).unwrap();
    setup.stream = hub.with_room(1 << 20);
    let targets = setup.targets.clone();
    (0..RECORDS).for_each(|n| rings.hit(0, rings.record(n)));
    let relay = Relay::start(setup, || ()).unwrap();
    for number in 0..20_000 {
        relay.mark(long_mark(number, MarkKind::Note));
        if number % 1000 == 0 {
            // Whatever is in the rings then is written, or is lost.
            (0..RECORDS / 20).for_each(|n| rings.hit(0, rings.record(RECORDS + n)));
            relay.targets(targets.clone());
        }
    }
    (0..RECORDS).for_each(|n| rings.hit(0, rings.record(2 * RECORDS + n)));
    let ending = relay.finish(Summary::default(), Duration::from_millis(100));
    let End { summary, unwritten } = ending.wait(TIME).unwrap().unwrap();
    assert_eq!(summary.records() + summary.lost(), 3 * RECORDS);
    assert_eq!(unwritten.records, summary.records());
    assert!(unwritten.bytes > 1 << 20 && unwritten.bytes < 64 << 20, "{unwritten}");
    for what in ["the output of the trace was stuck at the end", "marks are not in the trace"] {
        assert!(summary.notes.iter().any(|note| note.contains(what)), "{:?}", summary.notes);
    }
}

// Nothing calls the programs any more, but the memory is the guest's: one that goes on to write records
// must not keep the end from coming.
#[test]
fn what_is_written_after_the_seal_is_not_waited_for() {
    // At the end of a chunk, within one, and in an empty ring.
    for (chunks, more) in [(2, 0), (1, 7), (0, 0)] {
        let rings = Rings::new(1);
        let chunk = rings.records_of_a_chunk();
        let before = chunks * chunk + more;
        let mut reader = rings.readers(false).remove(0);
        (0..before).for_each(|n| rings.hit(0, rings.record(n)));
        reader.seal();
        (0..2 * chunk).for_each(|n| rings.hit(0, rings.record(before + n)));
        let mut batch = RawBatch::with_capacity(1 << 20);
        for _ in 0..3 {
            assert_eq!(reader.drain(&mut batch), 0);
            assert_eq!(batch.records.len() as u64, before);
            assert!(reader.is_empty());
            reader.seal();
        }
        assert_eq!(reader.finish(&mut batch), (0, vec![]));
        assert_eq!(batch.records.len() as u64, before);
    }
}

/// What a stream has of vCPU 0, in pieces that end at watermarks: times, and the watermark.
fn pieces(stream: &[u8]) -> Vec<(Vec<u64>, u64)> {
    let mut reader = Reader::new(stream).unwrap();
    let (mut pieces, mut times) = (Vec::new(), Vec::new());
    while let Some(frame) = reader.next_frame().unwrap() {
        match frame {
            Frame::Records(batch) => {
                times.extend(batch.entries().unwrap().iter().map(EntryRecord::timestamp));
            }
            Frame::Watermark(ticks) => pieces.push((std::mem::take(&mut times), ticks)),
            _ => {}
        }
    }
    assert!(times.is_empty(), "records behind the last watermark");
    pieces
}

// A program that is interrupted before it reads the clock has a later time than the records of the
// interrupt, which lie behind its own. The drain may see its record before theirs: it must not have
// gone then, or the trace goes back in time.
#[test]
fn an_interrupted_writer_never_makes_a_trace_go_back_in_time() {
    let rings = Rings::new(1);
    let sink = Sink::default();
    let (setup, _joining) = rings.setup(Box::new(sink.clone()));
    let mut drain = Drain::start(setup).unwrap();
    let at = |timestamp| Common { timestamp, ..rings.record(0) };
    let first = rings.reserve(0).unwrap();
    let nested = rings.reserve(0).unwrap();
    let inner = rings.reserve(0).unwrap();
    rings.publish(first, at(90));
    drain.pass().unwrap();
    rings.publish(inner, at(30));
    drain.pass().unwrap();
    rings.publish(nested, at(40));
    drain.pass().unwrap();
    rings.publish(rings.reserve(0).unwrap(), at(95));
    let summary = drain.finish(Summary::default(), &Grace::default()).unwrap().summary;
    assert_eq!(summary.notes, [] as [&str; 0]);
    let times: Vec<_> = pieces(&sink.0.lock().unwrap()).into_iter().flat_map(|it| it.0).collect();
    assert_eq!(times, [30, 30, 30, 95]);
}

// Readers show what a watermark covers and never look back: so none may cover a record that is still
// being written, however long that takes, on any vCPU.
#[test]
fn watermarks_wait_for_writers() {
    let rings = Rings::new(2);
    let sink = Sink::default();
    let (mut setup, _joining) = rings.setup(Box::new(sink.clone()));
    // The guest's clock is far ahead of what is written here.
    setup.ticks = 1 << 40;
    let mut drain = Drain::start(setup).unwrap();
    let at = |timestamp| Common { timestamp, ..rings.record(0) };
    rings.publish(rings.reserve(0).unwrap(), at(1000));
    let slow = rings.reserve(0).unwrap();
    for timestamp in [2000, 3000] {
        rings.publish(rings.reserve(1).unwrap(), at(timestamp));
        drain.pass().unwrap();
    }
    rings.publish(slow, at(1500));
    drain.pass().unwrap();
    drain.finish(Summary::default(), &Grace::default()).unwrap();
    let pieces = pieces(&sink.0.lock().unwrap());
    let mut promised = 0;
    for (times, watermark) in &pieces {
        assert!(times.iter().all(|&time| time > promised), "{pieces:?}");
        promised = *watermark;
    }
    assert!(pieces.iter().any(|piece| piece.1 > 1 << 39 && piece.1 < u64::MAX), "{pieces:?}");
}

// What the guest says and what it does are read side by side: each line once, with its own time, also
// one that has no end.
#[test]
fn lines_of_the_console_are_marks() {
    let rings = Rings::new(1);
    let sink = Sink::default();
    let (mut setup, _joining) = rings.setup(Box::new(sink.clone()));
    setup.ticks = 1 << 40;
    let console = setup.console.clone();
    console.feed(b"before the relay\r\nin ");
    let mut drain = Drain::start(setup).unwrap();
    drain.pass().unwrap();
    console.feed(b"two pieces\n\nlast words");
    drain.pass().unwrap();
    let summary = drain.finish(Summary::default(), &Grace::default()).unwrap().summary;
    assert_eq!(summary.notes, [] as [&str; 0]);
    let stream = std::mem::take(&mut *sink.0.lock().unwrap());
    let mut reader = Reader::new(&*stream).unwrap();
    let (mut lines, mut times) = (Vec::new(), Vec::new());
    while let Some(frame) = reader.next_frame().unwrap() {
        if let Frame::Mark(mark) = frame {
            assert_eq!((mark.kind, mark.duration_ns), (MarkKind::Console, 0));
            lines.push(mark.text);
            times.push(mark.ticks);
        }
    }
    assert_eq!(lines, ["before the relay", "in two pieces", "last words"]);
    assert!(times.is_sorted() && times[0] < 1 << 40 && times[1] > 1 << 40, "{times:?}");
}

// A flight recorder learns from these whose records it holds; with old ones it would look at the
// memory of tasks that are gone, and with none, know nobody.
#[test]
fn a_look_shows_the_newest_records_once() {
    let rings = Rings::new(1);
    let (mut setup, _joining) = rings.setup(Box::new(std::io::sink()));
    let reader = setup.readers.first_mut().unwrap();
    let chunk = rings.records_of_a_chunk();
    let mut look = || {
        let mut batch = RawBatch::with_capacity(4000);
        reader.newest(&mut batch);
        batch.records.iter().map(|record| record.timestamp / 100).collect::<Vec<u64>>()
    };
    assert!(look().is_empty());
    (0..1200).for_each(|n| rings.hit(0, rings.record(n)));
    assert_eq!(look(), (2 * chunk..1200).collect::<Vec<_>>(), "those of the last chunk");
    assert!(look().is_empty());
    (1200..1203).for_each(|n| rings.hit(0, rings.record(n)));
    assert_eq!(look(), [1200, 1201, 1202]);
    (1203..3 * chunk).for_each(|n| rings.hit(0, rings.record(n)));
    assert_eq!(look().last(), Some(&(3 * chunk - 1)), "up to the end of a chunk");
    let mut all = RawBatch::with_capacity(4000);
    reader.drain(&mut all);
    assert_eq!(all.records.len() as u64, 3 * chunk, "all of them are still there");
}
