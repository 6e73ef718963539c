//! Records that are kept, cut and passed on.

use super::properties::{frame_starts, mixed, shown};
use super::wire::{BATCH, FrameHead, HEAD};
use super::*;
use zerocopy::{FromBytes, IntoBytes};

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
