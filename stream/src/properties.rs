//! Property tests: what must hold for every stream, complete or truncated.

use std::collections::HashMap;

use proptest::collection::vec;
use proptest::prelude::*;
use zerocopy::{FromBytes, IntoBytes};

use super::sample;
use super::values_tests::format;
use super::wire::{FrameHead, HEAD, MAGIC, Prologue};
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

pub(super) fn entries(records: &[(u64, u32, u32, u32)]) -> Vec<EntryRecord> {
    records.iter().map(|(at, to, from, pid)| EntryRecord::new(*at, *to, *from, *pid)).collect()
}

pub(super) fn mixed(records: &[(u8, u8, u64, u32, u64)]) -> RecordBuffer {
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

pub(super) fn plain(entry: &EntryRecord) -> Record<'_> {
    Record::Entry { entry, sp: None, values: None, context: None }
}

/// Records as a reader must see them.
pub(super) fn shown<'a>(records: impl Iterator<Item = Record<'a>>) -> String {
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
        queues in vec(vec(0..1000u64, 0..50), 1..30),
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
    let joined = read(&[stream, stream].concat());
    assert!(matches!(joined, Err(StreamError::Followed { another: true, .. })), "{joined:?}");
    for more in 1..=stream.len() {
        let mut decoder = Decoder::new();
        decoder.feed(stream);
        decoder.feed(&stream[..more]);
        let followed = loop {
            match decoder.advance() {
                Ok(progress) => assert_eq!(progress, Progress::Frame),
                Err(error) => break error,
            }
        };
        let StreamError::Followed { offset, another } = followed else { panic!("{followed}") };
        assert_eq!((offset, another), (stream.len() as u64, more >= MAGIC.len()));
    }
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
pub(super) fn is_whole(stream: &[u8]) -> bool {
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
