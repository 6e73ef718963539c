//! Property tests: what must hold for every stream, complete or truncated.

use std::collections::HashMap;

use proptest::collection::vec;
use proptest::prelude::*;
use zerocopy::{FromBytes, IntoBytes};

use super::sample;
use super::values_tests::format;
use super::wire::{BATCH, FrameHead, HEAD, Prologue, crc32, kind};
use super::*;

/// One call of a writer.
#[derive(Clone, Debug)]
pub(super) enum Step {
    Symbol(u64, u32, String, String),
    Task(u32, u32, Vec<u8>),
    Records(u32, Vec<(u64, u32, u32, u32)>),
    /// Of any kind: which, tracer, time, function, caller, pid, stack pointer.
    Mixed(u32, Vec<(u8, u8, u64, u32, u64)>),
    Values(ValuesFormat),
    /// Whether there is a stack pointer, time, what failed, words.
    WithValues(u32, Vec<(bool, u64, u64, Vec<u64>)>),
    Tracer(u8, String, String),
    Counts(u32, u8, Vec<(u32, u64)>),
    Loss(u32, u64, u32),
    Mark(u64, u32, u64, String),
    Watermark(u64),
}

pub(super) fn step() -> impl Strategy<Value = Step> {
    let comm = vec(1..=u8::MAX, 0..=16);
    prop_oneof![
        (any::<u64>(), any::<u32>(), ".{0,40}", ".{0,9}")
            .prop_map(|(address, size, name, module)| Step::Symbol(address, size, name, module)),
        (0..MAX_PID, any::<u32>(), comm).prop_map(|(pid, tgid, comm)| Step::Task(pid, tgid, comm)),
        (0..2u32, vec(any::<(u64, u32, u32, u32)>(), 0..50))
            .prop_map(|(vcpu, records)| Step::Records(vcpu, records)),
        (0..2u32, vec((0..5u8, any::<u8>(), any::<u64>(), any::<u32>(), any::<u64>()), 0..50))
            .prop_map(|(vcpu, records)| Step::Mixed(vcpu, records)),
        format().prop_map(Step::Values),
        (
            0..2u32,
            vec((any::<bool>(), any::<u64>(), any::<u64>(), vec(any::<u64>(), 0..300)), 0..9)
        )
            .prop_map(|(vcpu, records)| Step::WithValues(vcpu, records)),
        (any::<u8>(), ".{0,20}", ".{0,40}").prop_map(|(number, name, description)| Step::Tracer(
            number,
            name,
            description
        )),
        (0..2u32, any::<u8>(), vec(any::<(u32, u64)>(), 0..9))
            .prop_map(|(vcpu, tracer, counts)| Step::Counts(vcpu, tracer, counts)),
        (0..2u32, 0..u64::from(u32::MAX), any::<u32>())
            .prop_map(|(vcpu, count, reason)| Step::Loss(vcpu, count, reason)),
        (any::<u64>(), any::<u32>(), any::<u64>(), ".{0,40}")
            .prop_map(|(ticks, kind, duration, text)| Step::Mark(ticks, kind, duration, text)),
        any::<u64>().prop_map(Step::Watermark),
    ]
}

fn entries(records: &[(u64, u32, u32, u32)]) -> Vec<EntryRecord> {
    records.iter().map(|(at, to, from, pid)| EntryRecord::new(*at, *to, *from, *pid)).collect()
}

fn mixed(records: &[(u8, u8, u64, u32, u64)]) -> RecordBuffer {
    let mut buffer = RecordBuffer::new();
    for &(kind, tracer, at, function, sp) in records {
        let (caller, pid) = (function ^ 5, function >> 10);
        let entry = EntryRecord::new(at, function, caller, pid).of_tracer(tracer);
        let ret = ReturnRecord::new(at, function, caller, pid, sp).of_tracer(tracer);
        match kind {
            0 => buffer.push(entry),
            1 => buffer.push_frame(entry.with_sp(sp)),
            2 => buffer.push_return(ret),
            3 => buffer.push_return_value(ret.with_value(!sp)),
            _ => buffer.push_any(&TailRecord::new(at, function, caller, pid, sp)),
        }
    }
    buffer
}

fn plain(entry: &EntryRecord) -> Record<'_> {
    Record::Entry { entry, sp: None, values: None, context: None }
}

/// Records as a reader must see them.
fn shown<'a>(records: impl Iterator<Item = Record<'a>>) -> String {
    let mut text = String::new();
    records.for_each(|record| match record {
        Record::Entry { entry, sp, values: Some(Values { failed, words }), context } => {
            let words: Vec<_> = words.iter().map(|word| word.get()).collect();
            let context = context.map(|context| context.to_string());
            text.push_str(&format!("{} {sp:?} {failed} {words:?} {context:?};", entry.timestamp()));
        }
        record => text.push_str(&format!("{record:?};")),
    });
    text
}

/// Writes the steps and returns what a reader must find.
pub(super) fn write(steps: &[Step]) -> (Vec<u8>, Vec<String>) {
    let mut writer = Writer::new(Vec::new(), &sample::header()).expect("header");
    let mut expected = Vec::new();
    let mut names = Dictionaries::new();
    let mut formats = HashMap::new();
    let mut positions = [0u64; 2];
    let mut lost = [0u64; 2];
    let mut held = None;
    for step in steps {
        match step {
            Step::Symbol(address, size, name, module) => {
                let symbol = Symbol { address: *address, size: *size, name, module };
                writer.symbols([symbol]).expect("room");
                if names.insert_symbol(symbol).expect("room") {
                    expected.push(format!("{address} {size} {name} {module}"));
                }
            }
            Step::Task(pid, tgid, comm) => {
                let task = Task::new(*pid, *tgid, comm);
                writer.task(task).expect("memory");
                if names.insert_task(task) {
                    expected.push(format!("{task:?}"));
                }
            }
            Step::Records(vcpu, records) => {
                let records = entries(records);
                writer.entries(*vcpu, &records).expect("vCPU");
                let index = usize::try_from(*vcpu).expect("small");
                if !records.is_empty() {
                    let each = records.iter().map(plain);
                    expected.push(format!("{vcpu} {} {}", positions[index], shown(each)));
                    positions[index] += records.len() as u64;
                    held = held.max(records.iter().map(EntryRecord::timestamp).max());
                }
            }
            Step::Mixed(vcpu, records) => {
                let buffer = mixed(records);
                writer.records(*vcpu, &buffer).expect("vCPU");
                assert_eq!(buffer.len(), records.len());
                let index = usize::try_from(*vcpu).expect("small");
                if !records.is_empty() {
                    let count = u32::try_from(records.len()).expect("small");
                    let batch = Batch::new(*vcpu, positions[index], count, buffer.as_bytes());
                    expected.push(format!(
                        "{vcpu} {} {}",
                        positions[index],
                        shown(batch.records())
                    ));
                    positions[index] += records.len() as u64;
                    held = held.max(records.iter().map(|record| record.2).max());
                }
            }
            Step::Values(format) => {
                writer.values(format).expect("room");
                let key = (format.function, format.tracer, format.of);
                if formats.insert(key, format.clone()).as_ref() != Some(format) {
                    expected.push(format!("{format:?}"));
                }
            }
            Step::WithValues(vcpu, records) => {
                let mut buffer = RecordBuffer::new();
                let mut text = String::new();
                for (sp, at, failed, words) in records {
                    let (entry, sp) = (EntryRecord::new(*at, 1, 2, 3), sp.then_some(!at));
                    buffer.push_values(entry, sp, *failed, words.iter().copied());
                    let words = &words[..words.len().min(MAX_VALUE_WORDS)];
                    text.push_str(&format!("{at} {sp:?} {failed} {words:?} None;"));
                }
                writer.records(*vcpu, &buffer).expect("vCPU");
                if !records.is_empty() {
                    let position = &mut positions[usize::try_from(*vcpu).expect("small")];
                    expected.push(format!("{vcpu} {position} {text}"));
                    *position += records.len() as u64;
                    held = held.max(records.iter().map(|record| record.1).max());
                }
            }
            Step::Tracer(number, name, description) => {
                let tracer = Tracer { number: *number, name, description };
                writer.tracer(tracer).expect("memory");
                if names.insert_tracer(tracer) {
                    expected.push(format!("{tracer:?}"));
                }
            }
            Step::Counts(vcpu, tracer, counts) => {
                let count = |&(function, hits): &_| Count { function, hits };
                let counts: Vec<_> = counts.iter().map(count).collect();
                writer.counts(*vcpu, *tracer, &counts).expect("vCPU");
                if !counts.is_empty() {
                    expected.push(format!("{vcpu} {tracer} {counts:?}"));
                }
            }
            Step::Loss(vcpu, count, reason) => {
                let reason = LossReason::from(*reason);
                let written = writer.loss(*vcpu, *count, reason);
                assert_eq!(written.is_err(), reason == LossReason::Consumer);
                let index = usize::try_from(*vcpu).expect("small");
                if written.is_ok() && *count > 0 {
                    lost[index] += count;
                    held = held.max(Some(0));
                    let loss = Loss { vcpu: *vcpu, count: *count, reason, total: lost[index] };
                    expected.push(format!("{loss:?}"));
                }
            }
            Step::Mark(ticks, kind, duration_ns, text) => {
                let (ticks, kind, duration_ns) = (*ticks, MarkKind::from(*kind), *duration_ns);
                let mark = Mark { ticks, kind, duration_ns, text: text.clone() };
                writer.mark(&mark).expect("memory");
                held = held.max(Some(mark.ticks));
                expected.push(format!("{mark:?}"));
            }
            Step::Watermark(ticks) => {
                writer.watermark(*ticks).expect("memory");
                if held.take_if(|held| *held <= *ticks).is_some() || held.is_some() {
                    expected.push(format!("{ticks}"));
                }
            }
        }
    }
    let summary = writer.end(&sample::summary()).expect("memory");
    expected.push(format!("{summary:?}"));
    (writer.into_inner().expect("memory"), expected)
}

pub(super) fn read(bytes: &[u8]) -> Result<Vec<String>, StreamError> {
    let mut reader = Reader::new(bytes)?;
    let mut found = Vec::new();
    while let Some(frame) = reader.next_frame()? {
        match frame {
            Frame::Symbols(symbols) => found.extend(symbols.map(|symbol| {
                symbol
                    .with_text(|it| format!("{} {} {} {}", it.address, it.size, it.name, it.module))
            })),
            Frame::Tracers(list) => found
                .extend(list.filter_map(|tracer| tracer.with_text(|tracer| format!("{tracer:?}")))),
            Frame::Values(list) => found.extend(list.map(|values| {
                let format = values.format().expect("verified");
                format.map_or_else(|| format!("{values:?}"), |format| format!("{format:?}"))
            })),
            Frame::Tasks(tasks) => found.extend(tasks.map(|task| format!("{task:?}"))),
            Frame::Records(batch) => {
                found.push(format!("{} {} {}", batch.vcpu, batch.first, shown(batch.records())));
            }
            Frame::Counts(it) => {
                let counts: Vec<_> = it.counts().collect();
                found.push(format!("{} {} {counts:?}", it.vcpu, it.tracer));
            }
            Frame::Loss(loss) => found.push(format!("{loss:?}")),
            Frame::Mark(mark) => found.push(format!("{mark:?}")),
            Frame::Watermark(ticks) => found.push(format!("{ticks}")),
            Frame::End(summary) => found.push(format!("{summary:?}")),
            other => found.push(format!("{other:?}")),
        }
    }
    Ok(found)
}

proptest! {
    #[test]
    fn every_stream_is_read_as_it_was_written(steps in vec(step(), 0..20)) {
        let (bytes, expected) = write(&steps);
        prop_assert_eq!(read(&bytes).expect("whole"), expected);
    }

    #[test]
    fn pieces_make_no_difference(steps in vec(step(), 0..20), size in 1..100usize) {
        let (bytes, _) = write(&steps);
        let mut decoder = Decoder::new();
        let mut frames = 0;
        for piece in bytes.chunks(size) {
            decoder.feed(piece);
            while decoder.advance().expect("whole") == Progress::Frame {
                frames += 1;
                prop_assert!(decoder.frame().is_some());
            }
        }
        prop_assert!(decoder.finish().is_ok());
        prop_assert_eq!(decoder.offset(), bytes.len() as u64);
        let mut reader = Reader::new(&*bytes).expect("header");
        let mut again = 1;
        while reader.next_frame().expect("whole").is_some() {
            again += 1;
        }
        prop_assert_eq!(frames, again);
    }

    #[test]
    fn any_bytes_are_an_error_or_a_stream(bytes in vec(any::<u8>(), 0..300)) {
        prop_assert!(read(&bytes).is_err());
        let begun = [&sample::stream()[..16], &bytes].concat();
        prop_assert!(read(&begun).is_err());
    }

    /// Damage that the check values do not show, because whoever did it made them fit.
    #[test]
    fn hostile_frames_are_an_error_or_a_stream(
        frame in any::<prop::sample::Index>(),
        damage in vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        stream in prop::sample::select(vec![sample::stream, sample::values, sample::counts]),
    ) {
        let mut bytes = stream();
        let starts = frame_starts(&bytes);
        let start = *frame.get(&starts);
        let length = FrameHead::read_from_prefix(&bytes[start..]).expect("a frame").0.length.get();
        let end = start + HEAD + usize::try_from(length).expect("small");
        for (place, value) in damage {
            let place = place.index(end - start - 4);
            // All but the check value.
            let place = if place < 12 { place } else { place + 4 };
            bytes[start + place] = value;
        }
        seal(&mut bytes[start..end]);
        if let Ok(frames) = read(&bytes) {
            prop_assert!(!frames.is_empty());
        }
    }

    // Rates below and above those that need no large numbers, and no rate at all.
    #[test]
    fn ticks_are_nanoseconds_at_any_rate(ticks: u64, hz: u64, shift in 0..64u32) {
        for (ticks, hz) in [(ticks, hz), (ticks >> shift, hz), (ticks, hz >> shift)] {
            let expected = u128::from(ticks) * 1_000_000_000 / u128::from(hz.max(1));
            prop_assert_eq!(nanoseconds(ticks, hz), expected);
            let duration = u64::try_from(expected).unwrap_or(u64::MAX);
            let header = Header { clock_hz: hz, clock_start: 1 << 60, ..Header::default() };
            let since = i128::from(ticks) - (1 << 60);
            let expected = (since * 1_000_000_000).div_euclid(hz.max(1).into());
            prop_assert_eq!(header.nanoseconds(ticks), expected);
            prop_assert_eq!(header.duration_ns(ticks), duration);
        }
    }

    #[test]
    fn merging_keeps_all_and_every_queue_in_order(
        pushes in vec((0..4usize, 0..100u64, prop::option::weighted(0.2, 0..100u64)), 0..200),
        keep in 0..20usize,
    ) {
        let mut merger = Merger::new(4);
        let mut given = Vec::new();
        let mut give = |queue, item: (u64, usize)| {
            given.push((queue, item));
            Ok::<_, ()>(())
        };
        for (number, (queue, time, drain)) in pushes.iter().enumerate() {
            prop_assert_eq!(merger.push(*queue, *time, (*time, number)), Some(()));
            if let Some(until) = drain {
                merger.drain(*until, &mut give).expect("never fails");
            }
        }
        let held = merger.held();
        merger.shrink(keep, &mut give).expect("never fails");
        prop_assert_eq!(merger.held(), held.min(keep));
        merger.drain(u64::MAX, &mut give).expect("never fails");
        prop_assert_eq!(merger.held(), 0);
        prop_assert_eq!(given.len(), pushes.len());
        for queue in 0..4 {
            let numbers = given.iter().filter(|(from, _)| *from == queue).map(|(_, item)| item.1);
            prop_assert!(numbers.is_sorted());
        }
    }

    #[test]
    fn merging_ordered_queues_gives_one_order(
        queues in vec(vec(0..1000u64, 0..50), 1..5),
        until in 0..1000u64,
    ) {
        let mut merger = Merger::new(queues.len());
        let mut expected = Vec::new();
        for (queue, mut times) in queues.into_iter().enumerate() {
            times.sort_unstable();
            for time in times {
                merger.push(queue, time, time);
                expected.push((time, queue));
            }
        }
        expected.sort_unstable();
        let mut given = Vec::new();
        let mut give = |queue, time| {
            given.push((time, queue));
            Ok::<_, ()>(())
        };
        merger.drain(until, &mut give).expect("never fails");
        let late = expected.iter().filter(|(time, _)| *time > until).count();
        prop_assert_eq!(merger.held(), late);
        merger.drain(u64::MAX, &mut give).expect("never fails");
        prop_assert_eq!(given, expected);
    }
}

// Whoever shows the order says how many are not where they belong.
#[test]
fn items_that_come_too_late_are_counted() {
    let mut merger = Merger::new(2);
    merger.push(0, 5, ());
    merger.drain(7, |_, ()| Ok::<_, ()>(())).expect("never fails");
    for time in [3, 4, 5, 5] {
        merger.push(1, time, ());
    }
    assert_eq!(merger.push_now(1, ()), Some(()));
    assert_eq!(merger.push_now(2, ()), None);
    assert_eq!((merger.late().collect::<Vec<_>>(), merger.held()), (vec![0, 2], 5));
}

pub(super) fn frame_starts(bytes: &[u8]) -> Vec<usize> {
    let mut starts = Vec::new();
    let mut at = size_of::<Prologue>();
    while let Ok((head, _)) = FrameHead::read_from_prefix(&bytes[at..]) {
        starts.push(at);
        at += HEAD + usize::try_from(head.length.get()).expect("small");
    }
    starts
}

/// Makes the check value of a frame fit.
pub(super) fn seal(frame: &mut [u8]) {
    let (mut head, payload) = FrameHead::read_from_prefix(&*frame).expect("a frame");
    head.check = head.expected_check(payload).into();
    frame[..HEAD].copy_from_slice(head.as_bytes());
}

#[test]
fn every_torn_stream_is_recognised() {
    check_cuts(&sample::stream());
}

pub(super) fn check_cuts(stream: &[u8]) {
    for end in 0..stream.len() {
        let torn = read(&stream[..end]).expect_err("torn");
        let StreamError::Torn { offset, .. } = torn else { panic!("{end}: {torn}") };
        assert_eq!(offset, end as u64);
    }
    assert!(read(stream).is_ok());
}

#[test]
fn every_flipped_bit_is_recognised() {
    check_bits(sample::stream());
}

pub(super) fn check_bits(mut stream: Vec<u8>) {
    assert!(is_whole(&stream));
    for place in 0..stream.len() {
        for bit in 0..8 {
            stream[place] ^= 1 << bit;
            assert!(!is_whole(&stream), "bit {bit} of byte {place}");
            stream[place] ^= 1 << bit;
        }
    }
}

#[test]
fn every_missing_or_repeated_frame_is_recognised() {
    let stream = sample::stream();
    let starts = frame_starts(&stream);
    for pair in starts.windows(2) {
        let [start, end] = [pair[0], pair[1]];
        let missing = [&stream[..start], &stream[end..]].concat();
        assert!(read(&missing).is_err(), "without the frame at {start}");
        let repeated = [&stream[..end], &stream[start..]].concat();
        assert!(read(&repeated).is_err(), "with the frame at {start} twice");
    }
}

// Only what one consumer missed says that frames are missing. A loss of all of them would hide names that never came.
#[test]
fn a_loss_of_the_trace_hides_no_missing_frame() {
    let mut writer = Writer::new(Vec::new(), &sample::header()).expect("header");
    writer.task(Task::new(7, 7, b"cat")).expect("memory");
    writer.loss(0, 1, LossReason::Full).expect("vCPU");
    writer.end(&Summary::default()).expect("memory");
    let bytes = writer.into_inner().expect("memory");
    let starts = frame_starts(&bytes);
    let missing = [&bytes[..starts[1]], &bytes[starts[2]..]].concat();
    let error = read(&missing).expect_err("a name is missing").to_string();
    assert!(error.contains("frame 2 where frame 1 should be"), "{error}");
}

/// Without a reader's large buffer, for tests that ask thousands of times.
fn is_whole(stream: &[u8]) -> bool {
    let mut decoder = Decoder::new();
    decoder.feed(stream);
    loop {
        match decoder.advance() {
            Ok(Progress::Frame) => {}
            Ok(Progress::NeedMore) => return false,
            Ok(Progress::Ended) => return true,
            Err(_) => return false,
        }
    }
}

/// Replaces the frame at `index` and returns the error.
fn refused(index: usize, change: impl FnOnce(&mut FrameHead, &mut [u8])) -> String {
    let mut stream = sample::stream();
    let starts = frame_starts(&stream);
    let (start, end) = (starts[index], starts.get(index + 1).copied().unwrap_or(stream.len()));
    let (head, payload) = stream[start..end].split_at_mut(HEAD);
    let mut changed = FrameHead::read_from_bytes(head).expect("a frame");
    change(&mut changed, payload);
    head.copy_from_slice(changed.as_bytes());
    seal(&mut stream[start..end]);
    read(&stream).expect_err("refused").to_string()
}

#[test]
fn errors_name_place_cause_and_remedy() {
    let mut newer = sample::stream();
    newer[8] = 3;
    let check = crc32(&[&newer[..12]]);
    newer[12..16].copy_from_slice(&check.to_le_bytes());
    let error = read(&newer).expect_err("newer").to_string();
    assert!(error.contains(&format!("stream format 3.{VERSION_MINOR}")), "{error}");
    assert!(error.contains("use a vmtrace at least as new"), "{error}");

    let error = read(b"#!/bin/sh\n").expect_err("a script").to_string();
    assert!(error.contains("not a vmtrace stream: it begins with [23, 21"), "{error}");

    let first = 16;
    let error = refused(0, |head, _| head.length = (MAX_PAYLOAD + 8).into());
    assert!(error.starts_with(&format!("damaged stream at byte {first}: a frame of 1048584 ")));
    let error = refused(3, |head, _| head.kind = 77.into());
    assert!(error.contains("frame type 77 is not known to this vmtrace; use a"), "{error}");
    let error = refused(0, |head, _| head.kind = 2.into());
    assert!(error.contains("type 2 where the header must"), "{error}");
    let error = refused(0, |_, payload| payload[..8].fill(0));
    assert!(error.contains("the clock's rate is zero"), "{error}");
    let error = refused(6, |_, payload| payload[4] += 1);
    assert!(error.contains("its entries are not as its head says"), "{error}");
    let last = frame_starts(&sample::stream()).len() - 1;
    let error = refused(last, |_, payload| payload[8] ^= 1);
    assert!(error.contains("vCPU 0: 4 records and 0 lost were seen, the totals say 5"), "{error}");

    let mut optional = sample::stream();
    let starts = frame_starts(&optional);
    optional[starts[3]] = 77;
    optional[starts[3] + 2] = 2;
    seal(&mut optional[starts[3]..starts[4]]);
    let frames = read(&optional).expect("optional frames may be unknown");
    assert!(frames.contains(&"Skipped(77)".to_owned()), "{frames:?}");
}

#[test]
fn records_of_unknown_kinds_are_given_as_they_are() {
    let entry = EntryRecord::new(5, 6, 7, 8);
    let mut later = EntryRecord::new(9, 10, 11, 12).as_bytes().to_vec();
    later[8] = 200;
    later[9] = 4;
    // Whatever that may be of this kind.
    later[11] = RecordHead::CONTEXT;
    later.extend_from_slice(&[0xaa; 8]);
    let mut grown = entry.as_bytes().to_vec();
    grown[9] = 4;
    grown.extend_from_slice(&[0xbb; 8]);
    // The shortest there may be.
    let mut bare = later[..16].to_vec();
    bare[9] = 2;
    assert!(Batch::new(0, 0, 2, &[&*bare, &bare].concat()).is_well_formed());
    let bytes = [entry.as_bytes(), &later, &grown].concat();
    let batch = Batch::new(0, 0, 3, &bytes);
    assert!(batch.is_well_formed());
    assert!(batch.entries().is_none());
    let records: Vec<_> = batch.records().collect();
    assert_eq!(records[0], plain(&entry));
    let functions: Vec<_> = records.iter().map(|record| record.function()).collect();
    assert_eq!((functions, entry.pid()), (vec![Some(6), None, Some(6)], 8));
    assert_eq!(batch.times().collect::<Vec<_>>(), [5, 9, 5]);
    let Record::Other(head, whole) = records[1] else { panic!("an unknown kind") };
    assert_eq!((head.timestamp.get(), whole), (9, &*later));
    assert!(
        matches!(records[2], Record::Entry { entry: grown, .. } if grown.caller == entry.caller)
    );
    assert!(!Batch::new(0, 0, 2, &bytes).is_well_formed());
    assert!(!Batch::new(0, 0, 4, &bytes).is_well_formed());
    assert!(!Batch::new(0, 0, 3, &bytes[..bytes.len() - 8]).is_well_formed());
}

// Readers count on these limits, and on as many entries as were announced.
#[test]
fn lists_that_are_not_as_they_say_are_refused() {
    let verified = |kind, count: u64, entry: &dyn Fn(&mut Vec<u8>)| {
        let mut payload = count.to_le_bytes().to_vec();
        entry(&mut payload);
        Frame::parse(kind, 0, &payload).is_ok_and(|frame| frame.verify().is_ok())
    };
    let long = "x".repeat(MAX_DESCRIPTION + 1);
    let [name, longer] = [&long[..MAX_NAME], &long[..=MAX_NAME]];
    for (name, module, taken) in [(name, name, true), (longer, "", false), ("", longer, false)] {
        let symbol = Symbol { address: 1, size: 1, name, module };
        assert_eq!(verified(kind::SYMBOLS, 1, &|out| symbol.encode(out)), taken);
        assert!(!verified(kind::SYMBOLS, 2, &|out| symbol.encode(out)));
    }
    let most = &long[..MAX_DESCRIPTION];
    for (name, description, taken) in [(name, most, true), (longer, "", false), ("", &long, false)]
    {
        let tracer = Tracer { number: 1, name, description };
        assert_eq!(verified(kind::TRACERS, 1, &|out| tracer.encode(out)), taken);
        assert!(!verified(kind::TRACERS, 2, &|out| tracer.encode(out)));
    }
    for (pid, taken) in [(MAX_PID - 1, true), (MAX_PID, false)] {
        let task = Task::new(pid, 1, b"cat");
        assert_eq!(verified(kind::TASKS, 1, &|out| task.encode(out)), taken);
        assert!(!verified(kind::TASKS, 2, &|out| task.encode(out)));
    }
    let values = RawValues { function: 1, tracer: 0, of: 0, text: br#"{"values":[]}"# };
    assert!(verified(kind::VALUES, 1, &|out| values.encode(out)));
    assert!(!verified(kind::VALUES, 2, &|out| values.encode(out)));
}

// A frame holds no more than the format allows, whatever the relay gathers.
#[test]
fn a_full_buffer_is_written_in_pieces() {
    let mut writer = Writer::new(Vec::new(), &sample::header()).expect("header");
    let mut buffer = RecordBuffer::with_capacity(1 << 20);
    let count = 100_000u64;
    for at in 0..count {
        let entry = EntryRecord::new(at, 1, 2, 3);
        if at % 3 == 0 { buffer.push(entry) } else { buffer.push_frame(entry.with_sp(at)) }
    }
    writer.records(1, &buffer).expect("vCPU");
    let plain: Vec<_> = (0..count).map(|at| EntryRecord::new(at, 1, 2, 3)).collect();
    writer.entries(0, &plain).expect("vCPU");
    assert_eq!((buffer.newest(), buffer.is_empty()), (count - 1, false));
    buffer.clear();
    assert!(buffer.is_empty() && buffer.frames().next().is_none());
    writer.records(1, &buffer).expect("vCPU");
    writer.end(&Summary::default()).expect("memory");
    let bytes = writer.into_inner().expect("memory");
    let mut reader = Reader::new(&*bytes).expect("a stream");
    let (mut at, mut frames, mut plain) = (0, 0, 0);
    while let Some(frame) = reader.next_frame().expect("whole") {
        let Frame::Records(batch) = frame else { continue };
        // Those who look at nothing but entries take them as one slice.
        if let Some(entries) = batch.entries() {
            assert_eq!((batch.vcpu, entries.len()), (0, batch.count as usize));
            plain += 1;
            continue;
        }
        frames += 1;
        for record in batch.records() {
            let Record::Entry { entry, sp, values: None, .. } = record else { panic!("an entry") };
            assert_eq!((entry.timestamp(), sp), (at, (at % 3 != 0).then_some(at)));
            at += 1;
        }
    }
    assert_eq!((at, frames, plain), (count, 15, 13));
}

#[test]
fn records_are_passed_on_as_they_are() {
    let ret = ReturnRecord::new(1, 2, 3, 4, 5).with_value(6).of_tracer(9);
    let mut buffer = RecordBuffer::new();
    assert!(buffer.push_whole(ret.as_bytes()));
    let mut unknown = ret.as_bytes().to_vec();
    unknown[8] = 200;
    assert!(buffer.push_whole(&unknown));
    let mut cut = ret.as_bytes()[..32].to_vec();
    assert!(!buffer.push_whole(&cut));
    // It says that a value follows.
    cut[9] = 4;
    assert!(!buffer.push_whole(&cut));
    assert!(!buffer.push_whole(&[ret.as_bytes(), ret.as_bytes()].concat()));
    assert!(
        !buffer.push_whole(&[ret.as_bytes(), &[0; 8]].concat()),
        "there is more, but no record"
    );
    assert_eq!((buffer.len(), buffer.newest()), (2, 1));
    let batch = Batch::new(0, 0, 2, buffer.as_bytes());
    let Some(Record::Return { ret: found, value: Some(6), .. }) = batch.records().next() else {
        panic!("a return");
    };
    assert_eq!((found.head.tracer, found.sp.get()), (9, 5));
}

/// One record of every kind, with values and without, and what they are without a state.
fn kinds(context: Option<Context>) -> RecordBuffer {
    let mut buffer = RecordBuffer::new();
    let done = |buffer: &mut RecordBuffer| context.map(|it| buffer.with_context(it));
    for (kind, index) in (0..5).zip(1..) {
        for record in mixed(&[(kind, 3, index, 0x1000, 7)]).frames() {
            assert!(buffer.push_whole(record.1));
        }
        done(&mut buffer);
    }
    buffer.push_values(EntryRecord::new(6, 1, 2, 3), Some(4), 0, [5, 6]);
    done(&mut buffer);
    buffer.push_event(EventRecord::new(7, 1, 2, 3), 1, [8]);
    done(&mut buffer);
    buffer.push_any(&EventRecord::new(8, 1, 2, 3));
    done(&mut buffer);
    buffer
}

// A state that is taken for a value, or a value that is lost for a state, is a wrong trace.
#[test]
fn a_state_is_told_beside_all_else() {
    let context = Context::new(Context::IRQS_OFF | Context::SOFTIRQ, 2, 1);
    let (with, without) = (kinds(Some(context)), kinds(None));
    assert_eq!(with.len(), without.len());
    let count = u32::try_from(with.len()).expect("small");
    let [with, without] = [&with, &without].map(|it| Batch::new(0, 0, count, it.as_bytes()));
    assert!(with.is_well_formed() && without.is_well_formed());
    assert!(with.entries().is_none());
    let events = with.records().filter(|it| matches!(it, Record::Event { values: Some(_), .. }));
    assert_eq!(events.count(), 1);
    for (with, without) in with.records().zip(without.records()) {
        assert_eq!((with.context(), without.context()), (Some(context), None));
        let but_for_it = shown(std::iter::once(with))
            .replace(&format!("{:?}", Some(context)), "None")
            .replace(&format!("{:?}", Some("d.s21")), "None");
        let (grown, plain) = (with.head(), without.head());
        assert_eq!((grown.words, grown.flags), (plain.words + 1, plain.flags | 32));
        let head = [grown, plain].map(|head| format!("{head:?}"));
        assert_eq!(but_for_it.replace(&head[0], &head[1]), shown(std::iter::once(without)));
    }
    // Readers of before ignore the flag: records have grown at their end.
    let mut bytes = with.as_bytes().to_vec();
    let mut at = 0;
    while at < bytes.len() {
        bytes[at + 11] &= !RecordHead::CONTEXT;
        at += usize::from(bytes[at + 9]) * 8;
    }
    let before = Batch::new(0, 0, count, &bytes);
    assert!(before.is_well_formed());
    for (before, without) in before.records().zip(without.records()) {
        assert_eq!(before.context(), None);
        assert_eq!(before.function(), without.function());
        if let (Record::Entry { values: Some(more), .. }, Record::Entry { values: Some(all), .. }) =
            (before, without)
        {
            assert_eq!((more.words.len(), &more.words[..2]), (3, all.words));
        }
    }
}

// A duration that is taken for a value, or for a state, is a wrong trace.
#[test]
fn a_duration_is_told_behind_a_value_and_before_a_state() {
    let context = Context::new(0, 1, 0);
    let ret = ReturnRecord::new(1, 2, 3, 4, 5);
    let tail = TailRecord::new(1, 2, 3, 4, 5);
    assert_eq!(ret.of_aid().head.flags, RecordHead::SP | RecordHead::AID);
    let mut buffer = RecordBuffer::new();
    for value in [None, Some(6)] {
        for duration in [None, Some(7)] {
            for context in [None, Some(context)] {
                match value {
                    Some(value) => buffer.push_return_value(ret.with_value(value)),
                    None => buffer.push_return(ret),
                }
                duration.into_iter().for_each(|ticks| buffer.with_duration(ticks));
                context.into_iter().for_each(|context| buffer.with_context(context));
                let records = Batch::new(0, 0, 1, buffer.as_bytes());
                let Some(Record::Return { value: v, duration: d, context: c, .. }) =
                    records.records().next()
                else {
                    panic!("a return")
                };
                assert_eq!((v, d, c), (value, duration, context));
                buffer.clear();
            }
        }
    }
    buffer.push_tail(tail.and_last());
    buffer.with_duration(8);
    let batch = Batch::new(0, 0, 1, buffer.as_bytes());
    let found = batch.records().next();
    let Some(Record::Tail { tail, duration: Some(8), .. }) = found else { panic!("{found:?}") };
    assert_eq!(tail.head.flags, RecordHead::SP | RecordHead::LAST | RecordHead::DURATION);
    // One that says it has one is as long as that.
    let mut cut = buffer.as_bytes()[..32].to_vec();
    cut[9] = 4;
    assert!(!RecordBuffer::new().push_whole(&cut));
}

// A frame that is longer than the longest is refused by every reader.
#[test]
fn records_with_a_state_are_cut_into_frames_as_others_are() {
    let context = Context::new(0, 1, 0);
    let with_context = |at| at > 1 && at % 3 != 0;
    let mut buffer = RecordBuffer::new();
    for at in 0..400_000 {
        let entry = EntryRecord::new(at, 1, 2, 3);
        // There is room for one more record then where there is none for its state.
        match at {
            0 => buffer.push(entry),
            _ => buffer.push_frame(entry.with_sp(4)),
        }
        if with_context(at) {
            buffer.with_context(context);
        }
    }
    let mut writer = Writer::new(Vec::new(), &sample::header()).expect("header");
    writer.records(0, &buffer).expect("vCPU");
    writer.end(&Summary::default()).expect("memory");
    let bytes = writer.into_inner().expect("memory");
    let mut reader = Reader::new(&*bytes).expect("a stream");
    let (mut at, mut frames) = (0, 0);
    while let Some(frame) = reader.next_frame().expect("whole") {
        let Frame::Records(batch) = frame else { continue };
        frames += 1;
        assert!(batch.as_bytes().len() <= BATCH);
        for record in batch.records() {
            assert_eq!(record.head().timestamp.get(), at);
            assert_eq!(record.context(), with_context(at).then_some(context));
            at += 1;
        }
    }
    assert_eq!((at, frames), (400_000, 76));
    // One of the greatest length stays what it is, and so does nothing at all.
    buffer.clear();
    buffer.with_context(context);
    buffer.push_values(EntryRecord::new(1, 2, 3, 4), Some(5), 0, std::iter::repeat_n(6, 999));
    buffer.with_context(context);
    let batch = Batch::new(0, 0, 1, buffer.as_bytes());
    assert!(batch.is_well_formed());
    assert_eq!(batch.records().next().and_then(|record| record.context()), None);
}

// Readers of version 1.0 know nothing of tracers, stack pointers and returns.
#[test]
fn what_is_new_in_1_1_can_be_skipped() {
    let mut writer = Writer::new(Vec::new(), &sample::header()).expect("header");
    writer.tracer(Tracer { number: 1, name: "vfs", description: "" }).expect("memory");
    writer.records(0, &mixed(&[(1, 0, 1, 2, 3), (2, 0, 1, 2, 3)])).expect("vCPU");
    writer.end(&Summary::default()).expect("memory");
    let bytes = writer.into_inner().expect("memory");
    let starts = frame_starts(&bytes);
    let (head, _) = FrameHead::read_from_prefix(&bytes[starts[1]..]).expect("a frame");
    assert_eq!((head.kind.get(), head.flags.get()), (10, 2));
    let (head, _) =
        RecordHead::read_from_prefix(&bytes[starts[2] + HEAD + 16..]).expect("a record");
    assert_eq!((head.kind, head.words), (EntryRecord::KIND, 4));
    let bytes = sample::values();
    let starts = frame_starts(&bytes);
    let (head, _) = FrameHead::read_from_prefix(&bytes[starts[2]..]).expect("a frame");
    assert_eq!((head.kind.get(), head.flags.get()), (11, 2));
}
