//! A small stream with every kind of frame, for tests.

use super::*;

pub const READ: u64 = 0xffff_ffff_8110_0000;
pub const OPEN: u64 = 0xffff_ffff_c010_0000;
const CALLER: u64 = 0xffff_ffff_8120_0000;

pub fn header() -> Header {
    Header {
        arch: "x86_64".into(),
        clock: "x86-tsc".into(),
        clock_hz: 2_000_000_000,
        clock_start: 1_000,
        release: "6.12.0-test".into(),
        vcpus: 2,
        slide: 0x100_0000,
        address_base: Header::TOP_4_GIB,
        vmtrace_version: "0.1.0".into(),
        extra: vec![("flavour".into(), "cloud".into())],
    }
}

pub fn mark() -> Mark {
    Mark { ticks: 3_000, kind: MarkKind::Pause, duration_ns: 70_000, text: "2 sites".into() }
}

pub fn summary() -> Summary {
    let skipped = Skipped { reason: "busy".into(), count: 1, examples: vec!["schedule".into()] };
    Summary {
        sites: Sites {
            matched: 3,
            patched: 2,
            tracers: vec![1, 2],
            names: vec!["tracer0".into(), "fs".into()],
            direct: 1,
            combined: 1,
            shared: 1,
            guest_updates: 3,
            skipped: vec![skipped],
        },
        pauses: Pauses { count: 1, total_ns: 70_000, max_ns: 70_000 },
        patch_ns: 12_345,
        exit: Exit::TripleFault,
        run_status: Some(-1),
        notes: vec!["nothing else".into()],
        ..Summary::default()
    }
}

pub fn entry(microseconds: u64, function: u64, caller: u64, pid: u32) -> EntryRecord {
    let header = header();
    let offset = |address| header.offset(address).expect("an address of the window");
    let ticks = header.clock_start + microseconds * 2_000;
    EntryRecord::new(ticks, offset(function), offset(caller), pid)
}

/// Writes the sample into `writer`, but for its end.
pub fn fill<W: std::io::Write>(writer: &mut Writer<W>) -> std::io::Result<()> {
    writer.symbols([Symbol::new(READ, 0, "vfs_read")])?;
    writer.symbols([
        Symbol { address: OPEN, size: 64, name: "ext4_open", module: "ext4" },
        Symbol::new(CALLER, 0x100, "ksys_read"),
    ])?;
    writer.mark(&mark())?;
    writer.task(Task::new(7, 7, b"cat"))?;
    writer.task(Task::new(123_456, 7, b"worker with spac"))?;
    let read = |at, pid| entry(at, READ, CALLER + 5, pid);
    writer.entries(1, &[read(10, 7), read(30, 7)])?;
    writer.loss(1, 5, LossReason::Full)?;
    writer.entries(1, &[read(50, 0)])?;
    writer.entries(0, &[entry(20, OPEN, READ + 1, 123_456), read(30, 99)])?;
    writer.task(Task::new(7, 7, b"re\x1bnamed"))?;
    writer.watermark(1_000 + 2_000 * 45)?;
    writer.entries(0, &[entry(1_500_000, OPEN, Header::TOP_4_GIB, 7)])?;
    writer.entries(0, &[entry(1_500_001, OPEN - 1, 0xffff_ffff_dead_beef, 7)])
}

/// A plain stream, compressed.
#[cfg(feature = "zstd")]
pub fn compressed(plain: &[u8]) -> Vec<u8> {
    use std::io::Write;
    let way = "zstd".parse().expect("a way to compress");
    let mut compressor = Compressor::new(Vec::new(), way).expect("memory");
    compressor.write_all(plain).expect("a plain stream");
    compressor.into_inner().expect("memory")
}

pub fn stream() -> Vec<u8> {
    let mut writer = Writer::new(Vec::new(), &header()).expect("header");
    fill(&mut writer).expect("memory");
    writer.end(&summary()).expect("memory");
    writer.into_inner().expect("memory")
}

fn field(name: &str, shape: Shape) -> ValueField {
    ValueField { name: name.into(), shape }
}

pub fn reading() -> Shape {
    let names = vec![(-1, "NOTHING".into()), (3, "BOTH".into())];
    Shape::Enum { bytes: 4, signed: true, names }
}

/// Formats of the values of [`READ`], one of each type, and of what it returns.
pub fn formats() -> [ValuesFormat; 2] {
    let function = header().offset(READ).expect("an address of the window");
    let values = vec![
        field("file", Shape::Pointer),
        field("count", Shape::Unsigned { bytes: 4 }),
        field("count", Shape::Signed { bytes: 2 }),
        field("now", Shape::Bool { bytes: 1 }),
        field("sep", Shape::Char),
        field("mode", reading()),
        field("how", reading()),
        field("name", Shape::Text { bytes: 12 }),
        field("flags", Shape::Bits { shift: 4, width: 3, signed: true }),
        field("id", Shape::Raw { bytes: 3 }),
        field("uuid", Shape::Raw { bytes: 10 }),
        field("far", Shape::Unsigned { bytes: 8 }),
        field("later", Shape::Unknown { kind: "float".into(), bytes: Some(16) }),
        field("end\x1b", Shape::Unsigned { bytes: 1 }),
    ];
    let entry = ValuesFormat { function, tracer: 0, of: ValuesOf::Entry, values, print: None };
    let values = vec![field("ret", Shape::Signed { bytes: 4 })];
    [entry, ValuesFormat { function, tracer: 0, of: ValuesOf::Return, values, print: None }]
}

/// Words of [`READ`]'s values: what is above a value's own bytes is not zero.
pub const WORDS: [u64; 18] = [
    0xffff_8881_0000_1000,
    0xdead_beef_0000_0340,
    0xdead_beef_0000_fffe,
    0xdead_beef_dead_be01,
    0xdead_beef_dead_be2c,
    0xdead_beef_ffff_ffff,
    0xdead_beef_0000_0004,
    u64::from_le_bytes(*b"a\"\\\n\xc3\xa4\xff\x85"),
    u64::from_le_bytes(*b"\x1bb\0cdefg"),
    0xffff_ffff_ffff_ffef,
    0xdead_beef_de03_0201,
    0x0706_0504_0302_0100,
    0xdead_beef_dead_0908,
    0x7fff_0000_1000,
    1,
    2,
    0xdead_beef_dead_beff,
    // One that nobody has told of.
    9,
];
/// Of [`WORDS`]: the one called `far` could not be read.
pub const FAILED: u64 = 1 << 11;

/// A stream of calls whose arguments and returned values are recorded.
pub fn values() -> Vec<u8> {
    let header = header();
    let mut writer = Writer::new(Vec::new(), &header).expect("header");
    let symbols = [Symbol::new(READ, 64, "vfs_read"), Symbol::new(CALLER, 64, "ksys_read")];
    writer.symbols(symbols).expect("room");
    for format in formats() {
        writer.values(&format).expect("room");
    }
    let ret = |at, value| {
        let EntryRecord { function, caller, .. } = entry(at, READ, CALLER + 5, 7);
        let ticks = header.clock_start + at * 2_000;
        ReturnRecord::new(ticks, function.get(), caller.get(), 7, 0xffff_c900_0000_1000)
            .with_value(value)
    };
    let mut buffer = RecordBuffer::new();
    let sp = Some(0xffff_c900_0000_1000);
    buffer.push_values(entry(10, READ, CALLER + 5, 7), None, 0, []);
    buffer.push_values(entry(20, READ, CALLER + 5, 7), sp, FAILED, WORDS);
    buffer.push_return_value(ret(30, 0xdead_beef_ffff_ffea));
    // Of a function without a format.
    buffer.push_values(entry(40, OPEN, CALLER + 5, 7), None, 0, [1, 2]);
    buffer.push(entry(50, READ, CALLER + 5, 7));
    // Not all of the words are there.
    buffer.push_values(entry(60, READ, CALLER + 5, 7), sp, 1, WORDS.into_iter().take(8));
    writer.records(0, &buffer).expect("vCPU");
    // From here on it returns something else.
    let [_, mut format] = formats();
    format.values[0].shape = Shape::Bool { bytes: 1 };
    writer.values(&format).expect("room");
    buffer.clear();
    buffer.push_return_value(ret(70, 0x100));
    writer.records(0, &buffer).expect("vCPU");
    writer.end(&Summary::default()).expect("memory");
    writer.into_inner().expect("memory")
}

/// A stream that counts calls and records none: on two vCPUs, for two tracers, and of one function
/// twice.
pub fn counts() -> Vec<u8> {
    let header = header();
    let mut writer = Writer::new(Vec::new(), &header).expect("header");
    let open = Symbol { address: OPEN, size: 64, name: "ext4_open", module: "ext4" };
    writer.symbols([Symbol::new(READ, 64, "vfs_read"), open]).expect("room");
    for (number, name) in [(0, "calls"), (1, "f\x1bs")] {
        writer.tracer(Tracer { number, name, description: "" }).expect("memory");
    }
    let count = |address, hits| Count {
        function: header.offset(address).expect("an address of the window"),
        hits,
    };
    writer.counts(0, 0, &[count(READ, 600), count(OPEN, 9)]).expect("vCPU");
    writer.counts(1, 0, &[count(READ, 300)]).expect("vCPU");
    // It has no name.
    writer.counts(1, 1, &[count(OPEN, 7), count(OPEN - 1, 1)]).expect("vCPU");
    writer.counts(0, 0, &[count(READ, 100)]).expect("vCPU");
    writer.end(&Summary::default()).expect("memory");
    writer.into_inner().expect("memory")
}
