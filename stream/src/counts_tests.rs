//! Counts that are written and read back, and invalid ones that are refused.

use std::collections::BTreeMap;

use super::sample::{self, header};
use super::wire::{CountsHead, kind};
use super::*;

/// Sums by vCPU, tracer and function, and how many frames they came in.
fn sums(bytes: &[u8]) -> (BTreeMap<(u32, u8, u32), u64>, usize) {
    let mut reader = Reader::new(bytes).expect("header");
    let (mut sums, mut frames) = (BTreeMap::new(), 0);
    while let Some(frame) = reader.next_frame().expect("whole") {
        if let Frame::Counts(counts) = frame {
            assert_eq!(counts.of, Some(CountsOf::Entries));
            for Count { function, hits } in counts.counts() {
                *sums.entry((counts.vcpu, counts.tracer, function)).or_default() += hits;
            }
            frames += 1;
        }
    }
    (sums, frames)
}

// A reader that takes only the last of two frames for one function, or mixes up vCPUs or tracers,
// shows fewer calls than there were.
#[test]
fn counts_add_up_by_vcpu_tracer_and_function() {
    let offset = |address| header().offset(address).expect("an address of the window");
    let (read, open) = (offset(sample::READ), offset(sample::OPEN));
    let expected = BTreeMap::from([
        ((0, 0, read), 700),
        ((0, 0, open), 9),
        ((1, 0, read), 300),
        ((1, 1, open), 7),
        ((1, 1, open - 1), 1),
    ]);
    assert_eq!(sums(&sample::counts()), (expected, 4));
}

// Who joins late and is told nothing of before would show fewer calls than there were; who is told it
// twice, more.
#[test]
fn a_late_joiner_is_told_what_was_counted() {
    let offset = |address| header().offset(address).expect("an address of the window");
    let (read, open) = (offset(sample::READ), offset(sample::OPEN));
    let mut writer = Writer::new(Vec::new(), &header()).expect("header");
    let tell = |writer: &mut Writer<_>, vcpu, tracer, function, hits| {
        writer.counts(vcpu, tracer, &[Count { function, hits }]).expect("vCPU");
    };
    for hits in [1, 10] {
        tell(&mut writer, 0, 0, read, hits);
        tell(&mut writer, 1, 0, read, 100 * hits);
        tell(&mut writer, 1, 1, open, u64::MAX / 2 + hits);
    }
    let mut joined = writer.join().expect("memory");
    let begin = writer.get_mut().len();
    tell(&mut writer, 0, 0, read, 1000);
    let summary = writer.end(&Summary::default()).expect("memory");
    let bytes = writer.into_inner().expect("memory");
    joined.extend_from_slice(&bytes[begin..]);
    let expected =
        BTreeMap::from([((0, 0, read), 1011), ((1, 0, read), 1100), ((1, 1, open), u64::MAX)]);
    assert_eq!(sums(&joined), (expected, 4));
    assert_eq!(summary.counted, Some(Counted { functions: 2, calls: u64::MAX }));
}

// What was counted under a name that is another's by now would be taken for that one's.
#[test]
fn a_late_joiner_is_told_nothing_by_a_wrong_name() {
    let offset = |address| header().offset(address).expect("an address of the window");
    let (read, open) = (offset(sample::READ), offset(sample::OPEN));
    let mut writer = Writer::new(Vec::new(), &header()).expect("header");
    let name = |writer: &mut Writer<_>, number, name| {
        writer.tracer(Tracer { number, name, description: "" }).expect("memory");
    };
    let of_module = |name, module| Symbol { address: sample::OPEN, size: 64, name, module };
    name(&mut writer, 0, "a");
    name(&mut writer, 1, "b");
    writer
        .symbols([Symbol::new(sample::READ, 64, "vfs_read"), of_module("f", "ext4")])
        .expect("room");
    for tracer in [0, 1] {
        let counts = [read, open].map(|function| Count { function, hits: 5 });
        writer.counts(0, tracer, &counts).expect("vCPU");
    }
    // The same, and another name of the same function.
    name(&mut writer, 0, "a");
    writer.symbols([Symbol::new(sample::READ, 64, "ksys_read")]).expect("room");
    let told = |writer: &mut Writer<_>| -> Vec<_> {
        let joined = writer.join().expect("memory");
        let mut decoder = Decoder::new();
        decoder.feed(&joined);
        let mut found = Vec::new();
        while decoder.advance().expect("whole") == Progress::Frame {
            if let Some(Frame::Counts(counts)) = decoder.frame() {
                found.extend(counts.counts().map(|count| (counts.tracer, count.function)));
            }
        }
        found
    };
    assert_eq!(told(&mut writer), [(0, read), (0, open), (1, read), (1, open)]);
    writer.symbols([of_module("g", "xfs")]).expect("room");
    assert_eq!(told(&mut writer), [(0, read), (1, read)]);
    name(&mut writer, 0, "c");
    assert_eq!(told(&mut writer), [(1, read)]);
    // All of it was told to those who were there.
    let summary = writer.end(&Summary::default()).expect("memory");
    assert_eq!(summary.counted, Some(Counted { functions: 2, calls: 20 }));
}

// A frame holds no more than the format allows, however many functions a kernel has.
#[test]
fn more_functions_than_a_frame_holds_are_in_several() {
    let counts: Vec<_> =
        (0..12_289).map(|n| Count { function: n * 5, hits: u64::MAX - u64::from(n) }).collect();
    let mut writer = Writer::new(Vec::new(), &header()).expect("header");
    writer.counts(1, 2, &counts).expect("vCPU");
    writer.counts(1, 2, &[]).expect("vCPU");
    writer.end(&Summary::default()).expect("memory");
    let (sums, frames) = sums(&writer.into_inner().expect("memory"));
    let expected = counts.iter().map(|count| ((1, 2, count.function), count.hits)).collect();
    assert_eq!((sums, frames), (expected, 2));
}

// Nobody can index a table of vCPUs by what a frame says.
#[test]
fn counts_are_of_a_vcpu_that_exists() {
    let mut writer = Writer::new(Vec::new(), &header()).expect("header");
    assert!(writer.counts(2, 0, &[Count { function: 1, hits: 1 }]).is_err());
    let larger = Header { vcpus: 3, ..header() };
    let mut other = Writer::new(Vec::new(), &larger).expect("header");
    other.flush().expect("memory");
    let skip = other.get_mut().len();
    other.counts(2, 0, &[]).expect("vCPU");
    other.counts(2, 0, &[Count { function: 1, hits: 1 }]).expect("vCPU");
    let frame = other.into_inner().expect("memory").split_off(skip);
    let bytes = [writer.into_inner().expect("memory"), frame].concat();
    let mut reader = Reader::new(&*bytes).expect("header");
    let error = reader.next_frame().expect_err("no such vCPU").to_string();
    assert!(error.contains("vCPU 2, but only 2 exist; "), "{error}");
}

// What a hostile frame says of its length is not believed, and what is of a later version is no
// error: a reader would die of the one, and refuse good traces for the other.
#[test]
fn what_a_frame_of_counts_says_of_itself_is_not_trusted() {
    let mut payload = Vec::new();
    counts::encode(
        1,
        3,
        &[Count { function: 1, hits: 2 }, Count { function: 3, hits: 4 }],
        &mut payload,
    );
    assert_eq!(payload.len(), size_of::<CountsHead>() + 2 * 16);
    let parse = |payload: &[u8]| match Frame::parse(kind::COUNTS, 0, payload) {
        Ok(Frame::Counts(counts)) => Some((counts.of, counts.counts().len())),
        _ => None,
    };
    assert_eq!(parse(&payload), Some((Some(CountsOf::Entries), 2)));
    for count in [3, 4, u32::MAX] {
        payload[8..12].copy_from_slice(&count.to_le_bytes());
        assert_eq!(parse(&payload), None, "{count}");
    }
    // Fewer than there are: what is behind is of a later version.
    payload[8..12].copy_from_slice(&1u32.to_le_bytes());
    payload[5] = 9;
    assert_eq!(parse(&payload), Some((None, 1)));
    for length in 0..size_of::<CountsHead>() {
        assert_eq!(parse(&payload[..length]), None, "{length}");
    }
}

// Readers of version 1.0 know nothing of it.
#[test]
fn readers_that_do_not_know_counts_can_skip_them() {
    let mut writer = Writer::new(Vec::new(), &header()).expect("header");
    writer.flush().expect("memory");
    let skip = writer.get_mut().len();
    writer.counts(0, 0, &[Count { function: 1, hits: 1 }]).expect("vCPU");
    let frame = writer.into_inner().expect("memory").split_off(skip);
    assert_eq!(frame[..4], [13, 0, 2, 0]);
}

/// Calls by vCPU, tracer, function and caller.
fn by_caller(stream: &[u8]) -> BTreeMap<(u32, u8, u32, u32), u64> {
    let mut all = BTreeMap::new();
    let mut reader = Reader::new(stream).expect("a stream");
    while let Some(frame) = reader.next_frame().expect("whole") {
        let Frame::Counts(counts) = frame else { continue };
        assert_eq!(counts.of, Some(CountsOf::Callers));
        for CallerCount { function, caller, hits } in counts.callers() {
            *all.entry((counts.vcpu, counts.tracer, function, caller)).or_default() += hits;
        }
    }
    all
}

// A call of another caller, vCPU or tracer is two wrong numbers; who joins late must see what the others see,
// but nothing under the name of a module that came to the place of another one.
#[test]
fn counts_by_caller_add_up_and_late_joiners_have_them() {
    let header = header();
    let offset = |address| header.offset(address).expect("in the window");
    let (read, open) = (offset(sample::READ), offset(sample::OPEN));
    let count = |function, caller, hits| CallerCount { function, caller, hits };
    let module = |name| Symbol { address: sample::OPEN, size: 64, name, module: "ext4" };
    let mut writer = Writer::new(Vec::new(), &header).expect("header");
    writer.symbols([module("ext4_open"), Symbol::new(sample::READ, 64, "vfs_read")]).expect("room");
    let mut expected = BTreeMap::new();
    for (vcpu, tracer, of) in [
        (0, 0, count(read, 7, 3)),
        (0, 0, count(read, 9, 4)),
        (0, 0, count(read, 7, 5)),
        (1, 0, count(read, 7, 6)),
        (1, 1, count(read, 7, 8)),
        (1, 1, count(read, open + 63, 9)),
        (1, 1, count(open, 7, 10)),
        (1, 1, count(read, open + 64, 11)),
    ] {
        writer.callers(vcpu, tracer, &[of]).expect("vCPU");
        *expected.entry((vcpu, tracer, of.function, of.caller)).or_insert(0) += of.hits;
    }
    assert!(writer.callers(2, 0, &[count(read, 7, 1)]).is_err(), "no such vCPU");
    writer.symbols([module("another")]).expect("room");
    let mut joined = writer.join().expect("memory");
    let begin = writer.get_mut().len();
    writer.end(&Summary::default()).expect("memory");
    let bytes = writer.into_inner().expect("memory");
    joined.extend_from_slice(&bytes[begin..]);
    assert_eq!(by_caller(&bytes), expected);
    expected.remove(&(1, 1, read, open + 63));
    expected.remove(&(1, 1, open, 7));
    assert_eq!(by_caller(&joined), expected);
    // They are calls as others are.
    let mut reader = Reader::new(&bytes[..]).expect("a stream");
    let mut counted = None;
    while let Some(frame) = reader.next_frame().expect("whole") {
        if let Frame::End(summary) = frame {
            counted = summary.counted.map(|it| (it.functions, it.calls));
        }
    }
    assert_eq!(counted, Some((2, 56)));
}
