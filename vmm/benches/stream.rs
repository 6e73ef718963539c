//! Records per second through the stream: writing, reading, merging, printing.
//!
//! `cargo bench -p vmtrace --bench stream`; an item is a record (or a line of text).

use std::hint::black_box;
use std::io;

use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use vmtrace::export::{Graph, Json, Player, Text};
use vmtrace::stream::{
    AddressSet, Decoder, EntryRecord, Frame, Header, Progress, Reader, RecordBuffer, ReturnRecord,
    Summary, Symbol, Task, Writer,
};

const VCPUS: u32 = 2;
const RECORDS: u64 = 1 << 20;
/// Records that one drain of a ring gives.
const DRAIN: usize = 4096;
const FUNCTIONS: u64 = 2000;
const FUNCTION: u64 = 0xffff_ffff_8100_0000;

fn main() {
    divan::main();
}

fn header() -> Header {
    Header {
        arch: "x86_64".into(),
        clock: "x86-tsc".into(),
        clock_hz: 2_000_000_000,
        release: "6.12.0".into(),
        vcpus: VCPUS,
        address_base: Header::TOP_4_GIB,
        ..Header::default()
    }
}

/// What two rings give: several functions, callers and tasks.
fn records(vcpu: u32) -> Vec<EntryRecord> {
    let header = header();
    let text = |number: u64| {
        let number = number.wrapping_mul(7) % FUNCTIONS;
        header.offset(FUNCTION + number * 256).expect("kernel text")
    };
    let record = |at: u64| {
        let pid = u32::try_from(at / 500 % 50).expect("small");
        EntryRecord::new(at * 100 + u64::from(vcpu), text(at), text(at / 3) + 5, pid)
    };
    (0..RECORDS / u64::from(VCPUS)).map(record).collect()
}

fn write<W: io::Write>(sink: W, rings: &[Vec<EntryRecord>]) -> io::Result<W> {
    let mut writer = Writer::new(sink, &header())?;
    let names: Vec<_> = (0..FUNCTIONS).map(|number| format!("function_number_{number}")).collect();
    let symbol = |(number, name): (u64, _)| Symbol::new(FUNCTION + number * 256, 256, name);
    writer.symbols((0..).zip(names.iter().map(String::as_str)).map(symbol))?;
    for pid in 1..50 {
        writer.task(Task::new(pid, pid, format!("task-{pid}").as_bytes()))?;
    }
    let drains = rings[0].chunks(DRAIN).zip(rings[1].chunks(DRAIN));
    for (first, second) in drains {
        writer.entries(0, first)?;
        writer.entries(1, second)?;
        writer.watermark(first[first.len() - 1].timestamp())?;
    }
    writer.end(&Summary::default())?;
    writer.into_inner()
}

fn stream() -> Vec<u8> {
    write(Vec::new(), &[records(0), records(1)]).expect("memory")
}

fn counted<'a, 'b>(bencher: Bencher<'a, 'b>, bytes: usize) -> Bencher<'a, 'b> {
    bencher.counter(ItemsCount::new(RECORDS)).counter(BytesCount::new(bytes))
}

/// Batches to frames with their check values.
#[divan::bench(sample_count = 20)]
fn writer(bencher: Bencher<'_, '_>) {
    let rings = [records(0), records(1)];
    let bytes = stream().len();
    counted(bencher, bytes).bench_local(|| write(io::sink(), black_box(&rings)).is_ok());
}

/// What the relay asks beside: is this caller, is this task new?
#[divan::bench(sample_count = 20)]
fn writer_and_questions(bencher: Bencher<'_, '_>) {
    let rings = [records(0), records(1)];
    let bytes = stream().len();
    counted(bencher, bytes).bench_local(|| {
        let (mut callers, mut tasks) = (AddressSet::default(), AddressSet::default());
        let mut new = 0;
        for record in rings.iter().flatten() {
            new += u32::from(callers.insert(record.caller.get()));
            new += u32::from(tasks.insert(record.pid()));
        }
        black_box(new);
        write(io::sink(), black_box(&rings)).is_ok()
    });
}

/// Frames, verified, and a look at every record.
#[divan::bench(sample_count = 20)]
fn reader(bencher: Bencher<'_, '_>) {
    let stream = stream();
    counted(bencher, stream.len()).bench_local(|| {
        let mut reader = Reader::new(black_box(&*stream)).expect("a stream");
        let mut sum = 0u64;
        while let Some(frame) = reader.next_frame().expect("whole") {
            if let Frame::Records(batch) = frame {
                for record in batch.records() {
                    sum = sum.wrapping_add(record.head().timestamp.get());
                }
            }
        }
        sum
    });
}

/// Frames out of pieces that are fed.
#[divan::bench(sample_count = 20)]
fn decoder(bencher: Bencher<'_, '_>) {
    let stream = stream();
    counted(bencher, stream.len()).bench_local(|| {
        let mut decoder = Decoder::new();
        let mut frames = 0;
        for piece in black_box(&*stream).chunks(64 << 10) {
            decoder.feed(piece);
            while decoder.advance().expect("whole") == Progress::Frame {
                frames += 1;
            }
        }
        frames
    });
}

/// All the way from bytes to lines as ftrace prints them.
#[divan::bench(sample_count = 20)]
fn text(bencher: Bencher<'_, '_>) {
    let stream = stream();
    counted(bencher, stream.len()).bench_local(|| {
        let mut player = Player::new(Text::new(io::sink()));
        black_box(&*stream).chunks(256 << 10).try_for_each(|piece| player.push(piece))?;
        player.finish().map(|summary| summary.cloned())
    });
}

/// The same to JSON lines.
#[divan::bench(sample_count = 20)]
fn json(bencher: Bencher<'_, '_>) {
    let stream = stream();
    counted(bencher, stream.len()).bench_local(|| {
        let mut player = Player::new(Json::new(io::sink()));
        black_box(&*stream).chunks(256 << 10).try_for_each(|piece| player.push(piece))?;
        player.finish().map(|summary| summary.cloned())
    });
}

/// Calls, nested as deep as 16: as many entries as returns.
fn calls() -> Vec<u8> {
    let mut writer = Writer::new(Vec::new(), &header()).expect("a header");
    let function = |depth: u64| header().offset(FUNCTION + depth * 256).expect("kernel text");
    let mut buffer = RecordBuffer::new();
    for round in 0..RECORDS / 32 {
        let vcpu = u32::try_from(round % 2).expect("small");
        let stack = 0xffff_c900_0000_0000 + (u64::from(vcpu) << 16);
        let (at, sp) = (round * 3200, |depth: u64| stack + 0x3000 - depth * 64);
        buffer.clear();
        for depth in 0..16 {
            let entry = EntryRecord::new(at + depth * 100, function(depth), 0, 1);
            buffer.push_frame(entry.with_sp(sp(depth)));
        }
        for depth in (0..16).rev() {
            let time = at + (31 - depth) * 100;
            buffer.push_return(ReturnRecord::new(time, function(depth), 0, 1, sp(depth)));
        }
        writer.records(vcpu, &buffer).expect("memory");
        if round % 256 == 0 {
            writer.watermark(at).expect("memory");
        }
    }
    writer.end(&Summary::default()).expect("memory");
    writer.into_inner().expect("memory")
}

/// Records of calls to lines as function_graph prints them.
#[divan::bench(sample_count = 20)]
fn graph(bencher: Bencher<'_, '_>) {
    let stream = calls();
    counted(bencher, stream.len()).bench_local(|| {
        let mut player = Player::new(Graph::new(io::sink()));
        black_box(&*stream).chunks(256 << 10).try_for_each(|piece| player.push(piece))?;
        player.finish().map(|summary| summary.cloned())
    });
}
