//! What readers refuse, and what they pass on though they do not know it.

use super::properties::{frame_starts, plain, read, seal};
use super::wire::{FrameHead, HEAD, crc32, kind};
use super::*;
use zerocopy::{FromBytes, IntoBytes};

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
    assert!(error.contains("not a vmtrace stream: it begins with \"#!/bin/s\"; give"), "{error}");

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
