//! Records per second through the relay: from full rings, as trampolines leave them, to the output
//! of the stream. Everything shares one core, including the consumers and their readers.
//!
//! `cargo bench -p vmtrace --bench relay`; an item is a record, and bytes are those written. `copy`
//! and `copy_to_file` are the lower bounds: they only copy the bytes of the rings. These records are
//! more regular than those of guests: `vmtrace-bench boots` says how small real ones are.

#[path = "../tests/relay/rings.rs"]
mod rings;
#[path = "../../kernel/tests/builder/mod.rs"]
mod synthetic;

use std::cell::RefCell;
use std::fs::File;
use std::hint::black_box;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use rings::Rings;
use vmtrace::relay::{Drain, Grace, Targets};
use vmtrace::serve::{Format, Globs, Join, Origin, Sink, StreamRequest};
use vmtrace::stream::{Compressor, EntryRecord, Header, Summary, Writer};

/// Bytes of a record in a ring.
const SLOT: u64 = vmtrace_trampolines::layout::COMMON_SIZE as u64;

fn main() {
    one_core();
    divan::main();
}

fn one_core() {
    let this = Pid::from_raw(0);
    let allowed = sched_getaffinity(this).expect("a set of CPUs");
    let core = (0..CpuSet::count()).find(|&core| allowed.is_set(core) == Ok(true));
    let mut set = CpuSet::new();
    set.set(core.expect("a CPU")).expect("a number of a CPU");
    sched_setaffinity(this, &set).expect("one of the CPUs");
}

/// Counts what it is given on the way.
struct Counted<W>(W, Arc<AtomicU64>);

impl<W: Write> Write for Counted<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.0.write(bytes)?;
        self.1.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Rings and their relay.
struct Relayed {
    rings: Rings,
    /// What fills them: from which record on, and how many it were.
    filler: fn(&Rings, u64) -> u64,
    drain: Drain,
    /// Bytes of the stream so far.
    written: Arc<AtomicU64>,
    records: u64,
}

impl Relayed {
    fn new(cpus: u64, primary: impl Write + Send + 'static, join: Option<Join>) -> Relayed {
        Self::to(cpus, |written| Box::new(Counted(primary, written)).into(), join)
    }

    /// To a sink that counts what it is given.
    fn to(cpus: u64, sink: impl FnOnce(Arc<AtomicU64>) -> Sink, join: Option<Join>) -> Relayed {
        Self::start(Rings::new(cpus), Rings::fill, None, sink, join)
    }

    /// The same with entries and returns, each with its stack pointer: `--graph`.
    fn of_calls(cpus: u64, primary: impl Write + Send + 'static) -> Relayed {
        let rings = Rings::new(cpus);
        let targets = Some(rings.calls());
        let sink = |written| Sink::from(Box::new(Counted(primary, written)));
        Self::start(rings, Rings::fill_calls, targets, sink, None)
    }

    fn start(
        rings: Rings,
        filler: fn(&Rings, u64) -> u64,
        targets: Option<Targets>,
        sink: impl FnOnce(Arc<AtomicU64>) -> Sink,
        join: Option<Join>,
    ) -> Relayed {
        let written = Arc::new(AtomicU64::new(0));
        let (mut setup, joining) = rings.setup(sink(Arc::clone(&written)));
        setup.targets = targets.unwrap_or(setup.targets);
        join.into_iter().for_each(|join| joining.send(join).expect("there is a receiver"));
        let drain = Drain::start(setup).expect("a stream");
        Relayed { rings, filler, drain, written, records: 0 }
    }

    fn fill(&mut self) -> u64 {
        let count = (self.filler)(&self.rings, self.records);
        self.records += count;
        count
    }

    /// The bytes that this has given.
    fn pass(&mut self) -> u64 {
        let before = self.written.load(Ordering::Relaxed);
        assert!(self.drain.pass().expect("written"), "the rings were full");
        while self.drain.pass().expect("written") {}
        self.drain.wait_for_output();
        self.written.load(Ordering::Relaxed) - before
    }

    /// Records and bytes of full rings.
    fn size(&mut self) -> (u64, u64) {
        // With the names of functions, the first time.
        for _ in 0..2 {
            self.fill();
            self.pass();
        }
        (self.fill(), self.pass())
    }
}

/// `after` gets the bytes of the stream so far.
fn bench(bencher: Bencher<'_, '_>, mut relayed: Relayed, mut after: impl FnMut(u64)) {
    let (records, bytes) = relayed.size();
    let relayed = RefCell::new(relayed);
    bencher
        .counter(ItemsCount::new(records))
        .counter(BytesCount::new(bytes))
        .with_inputs(|| relayed.borrow_mut().fill())
        .bench_local_values(|filled| {
            // The chunk that is in use stays with the guest.
            let some = 4 * relayed.borrow().rings.records_of_a_chunk();
            assert!(filled.abs_diff(records) <= some, "the rings were not empty");
            let mut relayed = relayed.borrow_mut();
            relayed.pass();
            after(relayed.written.load(Ordering::Relaxed));
        });
    let relayed = relayed.into_inner();
    let end = relayed.drain.finish(Summary::default(), &Grace::default()).expect("written");
    let summary = end.summary;
    assert_eq!((summary.records(), summary.lost()), (relayed.records, 0));
}

/// To a sink that counts.
#[divan::bench(sample_count = 40, sample_size = 1, args = [1, 2])]
fn sink(bencher: Bencher<'_, '_>, rings: u64) {
    bench(bencher, Relayed::new(rings, io::sink(), None), |_| ());
}

/// Calls and their returns to a sink that counts.
#[divan::bench(sample_count = 40, sample_size = 1, args = [1, 2])]
fn sink_of_calls(bencher: Bencher<'_, '_>, rings: u64) {
    bench(bencher, Relayed::of_calls(rings, io::sink()), |_| ());
}

/// To a file.
#[divan::bench(sample_count = 40, sample_size = 1, args = [1, 2])]
fn file(bencher: Bencher<'_, '_>, rings: u64) {
    let file: File = tempfile::tempfile().expect("a temporary file");
    bench(bencher, Relayed::new(rings, file, None), |_| ());
}

/// To a file, as `--compress zstd` writes it.
#[divan::bench(sample_count = 40, sample_size = 1, args = [1, 2])]
fn file_zstd(bencher: Bencher<'_, '_>, rings: u64) {
    let file: File = tempfile::tempfile().expect("a temporary file");
    let sink = |written| {
        let way = "zstd".parse().expect("a way");
        let out = Compressor::new(Counted(file, written), way).expect("memory");
        Sink::gathering(Box::new(out))
    };
    bench(bencher, Relayed::to(rings, sink, None), |_| ());
}

/// To a consumer at a Unix socket, who reads all of it.
#[divan::bench(sample_count = 40, sample_size = 1, args = [1, 2])]
fn consumer(bencher: Bencher<'_, '_>, rings: u64) {
    let (stream, mut theirs) = UnixStream::pair().expect("sockets");
    let request = StreamRequest { format: Format::Raw, globs: Globs::default(), tracer: None };
    let join = Join { stream, request, origin: Origin::Host };
    let mut buffer = vec![0; 256 << 10];
    let mut read = 0;
    bench(bencher, Relayed::new(rings, io::sink(), Some(join)), |written| {
        while read < written {
            let count = theirs.read(&mut buffer).expect("a stream");
            assert_ne!(count, 0, "the consumer was cut off");
            read += count as u64;
        }
    });
}

/// The stream's writer alone, with as many records: the second half of the way.
#[divan::bench(sample_count = 40, sample_size = 1, args = [1, 2])]
fn writer_alone(bencher: Bencher<'_, '_>, rings: u64) {
    let mut relayed = Relayed::new(rings, io::sink(), None);
    let (records, bytes) = relayed.size();
    let record = |number: u64| {
        let record = relayed.rings.record(number);
        EntryRecord::new(record.timestamp, record.site, record.caller, record.pid)
    };
    let batch: Vec<_> = (0..records).map(record).collect();
    let header = Header { clock_hz: 1, vcpus: 1, ..Header::default() };
    let mut writer = Writer::new(io::sink(), &header).expect("a header");
    bencher
        .counter(ItemsCount::new(records))
        .counter(BytesCount::new(bytes))
        .bench_local(|| writer.entries(0, black_box(&batch)).and_then(|()| writer.flush()));
}

/// The rings' memory, copied to somewhere else.
#[divan::bench(sample_count = 40, sample_size = 1, args = [1, 2])]
fn copy(bencher: Bencher<'_, '_>, rings: u64) {
    copied(bencher, rings, |_| ());
}

/// The same, and from there to a file.
#[divan::bench(sample_count = 40, sample_size = 1, args = [1, 2])]
fn copy_to_file(bencher: Bencher<'_, '_>, rings: u64) {
    let mut file: File = tempfile::tempfile().expect("a temporary file");
    copied(bencher, rings, |bytes| file.write_all(bytes).expect("room"));
}

fn copied(bencher: Bencher<'_, '_>, rings: u64, mut then: impl FnMut(&[u8])) {
    let mut relayed = Relayed::new(rings, io::sink(), None);
    let records = relayed.fill();
    let mut to = vec![0_u8; 12 << 20];
    bencher.counter(ItemsCount::new(records)).counter(BytesCount::new(records * SLOT)).bench_local(
        || {
            relayed.rings.slots(|slots| {
                let to = &mut to[..slots.len()];
                slots.copy_to(black_box(to));
                then(to);
            });
        },
    );
}
