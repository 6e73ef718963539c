//! The relay between rings that are being filled and consumers.

#[path = "../../../kernel/tests/builder/mod.rs"]
mod synthetic;

mod hostile;
mod rings;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use rings::Rings;
use vmtrace::relay::Relay;
use vmtrace::serve::{Format, Globs, Join, Origin, StreamRequest};
use vmtrace::stream::{Frame, Reader, Summary};
use vmtrace::tracer::RawBatch;

const CPUS: usize = 2;
const RECORDS: u64 = 500_000;
/// So many come before the relay does, more than a ring holds.
const EARLY: u64 = 250_000;

/// A file that can be looked at afterwards.
#[derive(Clone, Default)]
struct Sink(Arc<Mutex<Vec<u8>>>);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn consumer() -> (Join, std::thread::JoinHandle<Vec<u8>>) {
    let (stream, mut theirs) = UnixStream::pair().unwrap();
    let request = StreamRequest { format: Format::Raw, globs: Globs::default(), tracer: None };
    let reader = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        theirs.read_to_end(&mut bytes).unwrap();
        bytes
    });
    (Join { stream, request, origin: Origin::Host }, reader)
}

// Rings that overflow now and then, and several consumers: each record is in the stream, once,
// where it belongs, or is in a loss at the place where it is missing; and a consumer that keeps up
// has the very bytes of the file.
#[test]
fn what_was_drained_reaches_everyone_and_what_was_not_is_counted() {
    let rings = Rings::new(CPUS as u64);
    let sink = Sink::default();
    let (setup, joining) = rings.setup(Box::new(sink.clone()));
    let (first, first_reader) = consumer();
    joining.send(first).unwrap();
    let hit = |cpu: usize, n: u64| rings.hit(cpu, rings.record(n));
    (0..CPUS).for_each(|cpu| (0..EARLY).for_each(|n| hit(cpu, n)));
    let relay = Relay::start(setup).unwrap();
    std::thread::scope(|scope| {
        for cpu in 0..CPUS {
            scope.spawn(move || (EARLY..RECORDS).for_each(|n| hit(cpu, n)));
        }
    });
    // It has only the end of the stream; but that it has, whole.
    let (late, late_reader) = consumer();
    joining.send(late).unwrap();
    let summary = relay.finish(Summary::default()).unwrap();
    assert_eq!(summary.notes, [] as [&str; 0]);

    let file = std::mem::take(&mut *sink.0.lock().unwrap());
    assert!(first_reader.join().unwrap() == file, "a consumer has other bytes than the file");
    let late = late_reader.join().unwrap();
    let mut late = Reader::new(&*late).unwrap();
    while late.next_frame().unwrap().is_some() {}

    let mut next = [0; CPUS];
    let mut lost = [0; CPUS];
    let mut reader = Reader::new(&*file).unwrap();
    while let Some(frame) = reader.next_frame().unwrap() {
        match frame {
            Frame::Records(batch) => {
                let cpu = batch.vcpu as usize;
                for entry in batch.entries().unwrap() {
                    let number = entry.timestamp() / 100;
                    let expected = rings.record(number);
                    assert!(number >= next[cpu], "vCPU {cpu}: {number} after {}", next[cpu]);
                    assert_eq!(entry.function.get(), rings.entries[&expected.site]);
                    assert_eq!((entry.caller.get(), entry.pid()), (expected.caller, expected.pid));
                    lost[cpu] += number - next[cpu];
                    next[cpu] = number + 1;
                }
            }
            Frame::End(end) => {
                assert!(end.lost() > 0, "no ring was ever full");
                for (cpu, totals) in end.vcpus.iter().enumerate() {
                    assert_eq!(totals.records + totals.lost, RECORDS, "vCPU {cpu}");
                    // Those after the last record that was written are in no gap.
                    assert_eq!(totals.lost, lost[cpu] + RECORDS - next[cpu], "vCPU {cpu}");
                }
            }
            _ => {}
        }
    }
}

// A flight recorder learns from these whose records it holds; with old ones it would look at the
// memory of tasks that are gone, and with none, know nobody.
#[test]
fn a_look_shows_the_newest_records_once() {
    let rings = Rings::new(1);
    let (mut setup, _joining) = rings.setup(Box::new(std::io::sink()));
    let reader = setup.readers.first_mut().unwrap();
    let chunk = rings.records_of_a_chunk();
    let mut look = || {
        let mut batch = RawBatch::with_capacity(4000);
        reader.newest(&mut batch);
        batch.records.iter().map(|record| record.timestamp / 100).collect::<Vec<u64>>()
    };
    assert!(look().is_empty());
    (0..1200).for_each(|n| rings.hit(0, rings.record(n)));
    assert_eq!(look(), (2 * chunk..1200).collect::<Vec<_>>(), "those of the last chunk");
    assert!(look().is_empty());
    (1200..1203).for_each(|n| rings.hit(0, rings.record(n)));
    assert_eq!(look(), [1200, 1201, 1202]);
    (1203..3 * chunk).for_each(|n| rings.hit(0, rings.record(n)));
    assert_eq!(look().last(), Some(&(3 * chunk - 1)), "up to the end of a chunk");
    let mut all = RawBatch::with_capacity(4000);
    reader.drain(&mut all);
    assert_eq!(all.records.len() as u64, 3 * chunk, "all of them are still there");
}
