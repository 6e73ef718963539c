//! A small stream with everything in it, for tests.

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

pub fn stream() -> Vec<u8> {
    let mut writer = Writer::new(Vec::new(), &header()).expect("header");
    fill(&mut writer).expect("memory");
    writer.end(&summary()).expect("memory");
    writer.into_inner().expect("memory")
}
