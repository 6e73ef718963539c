//! What is handed over, and when.

use std::io::{Error, Result};

use crate::export::Player;
use crate::stream::{Count, EntryRecord, Symbol, Writer, sample};

use super::*;

/// Counts bytes that are read.
struct Counting<'a> {
    left: &'a [u8],
    read: usize,
}

impl Read for Counting<'_> {
    fn read(&mut self, to: &mut [u8]) -> Result<usize> {
        let read = self.left.read(to)?;
        self.read += read;
        Ok(read)
    }
}

/// Takes no event.
struct Enough;

impl Export for Enough {
    fn begin(&mut self, _: &Header) -> Result<()> {
        Ok(())
    }

    fn event(&mut self, _: &Event<'_>) -> Result<()> {
        Err(Error::other("enough"))
    }

    fn end(&mut self, _: Option<&Summary>) -> Result<()> {
        Ok(())
    }
}

/// One call of `vfs_read`, and very many of another function.
fn rare() -> Vec<u8> {
    let mut writer = Writer::new(Vec::new(), &sample::header()).expect("header");
    writer.symbols([Symbol::new(sample::READ, 64, "vfs_read")]).expect("room");
    writer.entries(0, &[sample::entry(1, sample::READ, sample::READ + 5, 7)]).expect("vCPU");
    for round in 0..400u64 {
        let times = round * 1000 + 2..(round + 1) * 1000;
        let records: Vec<EntryRecord> =
            times.map(|time| sample::entry(time, sample::OPEN, sample::READ + 5, 7)).collect();
        writer.entries(0, &records).expect("vCPU");
        let newest = records.last().map_or(0, EntryRecord::timestamp);
        writer.tell_watermark(newest).expect("memory");
    }
    writer.end(&Summary::default()).expect("memory");
    writer.into_inner().expect("memory")
}

// Who wants one line of a large file would wait until all of it was read, since nothing that is not wanted is handed
// over.
#[test]
fn few_matches_are_told_long_before_the_end() {
    let stream = rare();
    let mut source = Counting { left: &stream, read: 0 };
    let mut player = Player::new(Enough).with_filter(|name, _| name == "vfs_read");
    let error = player.play_file(&mut source).expect_err("it takes none");
    assert!(matches!(&error, PlayError::Output(error) if error.to_string() == "enough"), "{error}");
    assert!(source.read < stream.len() / 2, "{} of {} bytes", source.read, stream.len());
}

/// All that is handed over of a stream.
fn batches(mut stream: &[u8]) -> Vec<Batch> {
    // Nobody takes any before the end.
    let (to, batches) = sync_channel(1 << 12);
    let (_done, back) = channel();
    let mut forward = Forward::new(Ahead::default(), Pairing::new(0), to, back);
    read(&mut stream, &mut Front::default(), &mut forward).expect("whole");
    drop(forward);
    batches.into_iter().collect()
}

// A small file that is compressed would need gigabytes: there are as many bytes in a frame as it likes.
#[test]
fn batches_are_bounded_by_the_bytes_of_frames_and_marks() {
    let mut writer = Writer::new(Vec::new(), &sample::header()).expect("header");
    let counts: Vec<_> = (0..200).map(|function| Count { function, hits: 1 }).collect();
    for _ in 0..100 {
        writer.counts(0, 0, &counts).expect("vCPU");
    }
    for _ in 0..100 {
        let text = "x".repeat(1000);
        writer.mark(&Mark { text, ..sample::mark() }).expect("memory");
    }
    writer.end(&Summary::default()).expect("memory");
    let stream = sample::compressed(&writer.into_inner().expect("memory"));
    let (mut frames, mut marks) = (0, 0);
    for Batch { steps, .. } in batches(&stream) {
        let of = |is: fn(&Step) -> bool| steps.iter().filter(|step| is(step)).count();
        let (frames_here, marks_here) =
            (of(|step| matches!(step, Step::Frame(_))), of(|step| matches!(step, Step::Mark(_))));
        let bytes = frames_here * 200 * size_of::<u64>() + marks_here * 1000;
        assert!(bytes < BYTES + 4096, "{frames_here} frames, {marks_here} marks");
        (frames, marks) = (frames + frames_here, marks + marks_here);
    }
    assert_eq!((frames, marks), (100, 100));
}

// When a stream ends, hundreds of thousands of calls may be open: at once they are tens of megabytes, and as much again
// for each batch that was once as large.
#[test]
fn open_calls_are_not_handed_over_at_once() {
    let mut writer = Writer::new(Vec::new(), &sample::header()).expect("header");
    let mut buffer = crate::stream::RecordBuffer::new();
    for number in 0..1000u32 {
        let entry = EntryRecord::new(number.into(), number, 0, 7);
        buffer.push_frame(entry.with_sp(u64::from(number) << 14));
    }
    writer.records(0, &buffer).expect("vCPU");
    writer.end(&Summary::default()).expect("memory");
    let batches = batches(&writer.into_inner().expect("memory"));
    let items = batches.iter().map(|batch| batch.items.len());
    assert_eq!((items.clone().sum::<usize>(), items.max()), (2000, Some(STEPS)));
}

// Batches go round and round: each would stay as large as the largest that there was.
#[test]
fn a_batch_that_was_large_is_small_again() {
    let room = |steps, items, beside| {
        let (steps, items) = (Vec::with_capacity(steps), Vec::with_capacity(items));
        let batch = Batch { steps, items, beside: vec![0; beside], bytes: 1 }.again();
        assert_eq!((batch.beside.len(), batch.bytes), (0, 0));
        [batch.steps.capacity(), batch.items.capacity(), batch.beside.capacity()]
    };
    let (most, more) = (4 * STEPS, 4 * STEPS + 1);
    assert_eq!(room(most, most, most), [most; 3]);
    assert_eq!(room(more, more, more), [0; 3]);
}
