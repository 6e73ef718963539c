//! Rings that a guest has overwritten: impossible content is reported and never taken for a record,
//! and the rings of other vCPUs are not affected.

use crate::TIME;
use crate::rings::Rings;
use vm_memory::Bytes;
use vmtrace::relay::{Drain, Grace, Relay};
use vmtrace::stream::{Frame, LossReason, Reader, Summary};
use vmtrace::tracer::RawBatch;
use vmtrace::tracer::ring::RingReader;
use vmtrace_trampolines::layout::{CHUNK_SIZE, COMMON_SIZE, FRONT_SIZE, Info, LAP, Ring, front};

const RECORDS: u64 = 10;

fn ring(rings: &Rings, cpu: usize) -> Ring {
    rings.layout().rings[cpu]
}

fn set(rings: &Rings, offset: u64, word: u64) {
    rings.memory().slice().write_obj(word, usize::try_from(offset).unwrap()).unwrap();
}

fn set_head(rings: &Rings, cpu: usize, head: u64) {
    set(rings, rings.layout().controls[cpu], head);
}

/// Sets the word that ends at a position.
fn set_word(rings: &Rings, cpu: usize, position: u64, word: u64) {
    let ring = ring(rings, cpu);
    set(rings, rings.layout().offset(&ring) + ring.offset(position) - 8, word);
}

fn set_front(rings: &Rings, cpu: usize, chunk: u64, field: usize, word: u64) {
    let ring = ring(rings, cpu);
    set(rings, rings.layout().offset(&ring) + ring.front_offset(chunk) + field as u64, word);
}

fn filled() -> Rings {
    let rings = Rings::new(2);
    (0..2).for_each(|cpu| (0..RECORDS).for_each(|number| rings.hit(cpu, rings.record(number))));
    rings
}

fn drain(reader: &mut RingReader) -> Vec<u64> {
    let mut batch = RawBatch::with_capacity(4096);
    reader.drain(&mut batch);
    batch.records.iter().map(|record| record.timestamp / 100).collect()
}

fn all() -> Vec<u64> {
    (0..RECORDS).collect()
}

// A head that is believed makes the relay read what was never written, or go round for ever.
#[test]
fn heads_that_no_program_leaves_are_noticed() {
    let good = ring(&filled(), 0);
    let start = good.start();
    let heads = [
        ("none", 0),
        ("of no lap", start & (LAP - 1)),
        ("not of 8 bytes", start - 4),
        ("in an account", good.opening(3, 1) + 8),
        ("before the tail", start + 8),
        ("of another ring", ring(&filled(), 1).start()),
        ("behind the ring", start + good.size()),
        ("more than a ring ahead", good.opening(0, 2) - 8),
        ("laps ahead", good.opening(1, 1 << 20)),
        ("all ones", u64::MAX),
    ];
    for (what, head) in heads {
        let rings = filled();
        let mut readers = rings.readers(false);
        set_head(&rings, 0, head);
        let [first, second] = &mut readers[..] else { panic!() };
        assert_eq!(drain(first), [0; 0], "{what}");
        let corrupt = first.corrupt().unwrap_or_else(|| panic!("a head {what} goes unnoticed"));
        assert_eq!((corrupt.cpu, corrupt.position), (0, head), "{what}");
        // A ring that was once made up is not believed again.
        set_head(&rings, 0, start - RECORDS * COMMON_SIZE as u64);
        let mut batch = RawBatch::with_capacity(100);
        assert_eq!(first.drain(&mut batch), 0);
        first.newest(&mut batch);
        first.finish(&mut batch);
        assert_eq!((batch.records.len(), first.totals().records), (0, 0), "{what}");
        assert_eq!(drain(second), all(), "{what}: another vCPU's ring");
        assert_eq!(second.corrupt(), None);
    }
}

// The length of a record leads to the next: a wrong one makes records of the middle of others.
#[test]
fn records_that_reach_past_their_chunk_or_the_head_are_noticed() {
    const SITE: u64 = 0x1234;
    let word = |size: usize, tag: u8| u64::from(Info::new(size, 0, 1, tag).0) << 32 | SITE;
    let start = ring(&filled(), 0).start();
    let head = start - RECORDS * COMMON_SIZE as u64;
    let third = start - 2 * COMMON_SIZE as u64;
    let last = head + COMMON_SIZE as u64;
    // Of 8 bytes: there is no such record.
    let short = u64::from(u32::from(Info::DRAINED) << 24) << 32 | SITE;
    for (what, position, word, taken) in [
        ("shorter than any", third, short, 2),
        ("past the head", last, word(COMMON_SIZE + 8, Info::DRAINED), RECORDS - 1),
    ] {
        let rings = filled();
        let mut readers = rings.readers(false);
        set_word(&rings, 0, position, word);
        assert_eq!(drain(&mut readers[0]), (0..taken).collect::<Vec<_>>(), "{what}");
        let corrupt = readers[0].corrupt().unwrap_or_else(|| panic!("{what} goes unnoticed"));
        assert_eq!((corrupt.cpu, corrupt.position), (0, position), "{what}");
        assert_eq!(readers[0].totals().records, taken, "{what}: those before it are good");
        assert_eq!(drain(&mut readers[1]), all(), "{what}");
    }
    // What is not finished, or has the tag of something else, is waited for, and told at the end.
    for (what, word, program) in [
        ("unfinished", u64::from(Info::new(COMMON_SIZE, 5, 1, Info::DRAINED).0) << 32, 5),
        ("never begun", word(COMMON_SIZE, 77), u16::MAX),
    ] {
        let rings = filled();
        let mut reader = rings.readers(false).swap_remove(0);
        set_word(&rings, 0, third, word);
        assert_eq!(drain(&mut reader), [0, 1], "{what}");
        assert_eq!(reader.corrupt(), None, "{what}");
        let mut batch = RawBatch::with_capacity(100);
        let (lost, unfinished) = reader.finish(&mut batch);
        assert_eq!((lost, batch.records.len() as u64 + 2), (0, RECORDS - 1), "{what}");
        assert_eq!(unfinished, [program], "{what}");
    }
}

// What was lost is shown to people: it may be a guest's invention, but never goes back or round.
#[test]
fn counts_of_losses_only_grow() {
    let rings = filled();
    let mut reader = rings.readers(false).swap_remove(0);
    let mut batch = RawBatch::with_capacity(100);
    let mut lost = |reader: &mut RingReader, count| {
        set_front(&rings, 0, 0, front::DROPPED, count);
        batch.clear();
        reader.drain(&mut batch)
    };
    assert_eq!(lost(&mut reader, 7), 7);
    assert_eq!(lost(&mut reader, 3), 0, "less than before");
    assert_eq!(lost(&mut reader, 9), 2);
    assert_eq!(lost(&mut reader, u64::MAX), u64::MAX - 9);
    // Another chunk's says the same: the sum does not begin anew.
    set_front(&rings, 0, 1, front::DROPPED, u64::MAX);
    let (more, _) = reader.finish(&mut batch);
    assert_eq!(more, u64::MAX);
    assert_eq!(reader.totals().lost, u64::MAX);
}

// Tracing is to end at once, and not to go on for the rest of a long run without one of the rings.
#[test]
fn a_damaged_ring_is_told_while_the_guest_runs() {
    let rings = filled();
    let (setup, _joining) = rings.setup(Box::new(std::io::sink()));
    let (woken, wakes) = std::sync::mpsc::channel();
    let relay = Relay::start(setup, move || woken.send(()).unwrap_or(())).unwrap();
    relay.status().unwrap();
    assert_eq!(relay.corrupt(), None);
    set_head(&rings, 1, 8);
    wakes.recv_timeout(TIME).unwrap();
    let what = relay.corrupt().unwrap();
    assert!(what.contains("the ring of vCPU 1 was overwritten by the guest"), "{what}");
    let end = relay.finish(Summary::default(), TIME).wait(TIME).unwrap().unwrap();
    assert_eq!(end.summary.notes.iter().filter(|note| note.contains(&what)).count(), 1);
}

// A stream that was made of such rings is whole, and says what was found.
#[test]
fn the_stream_tells_of_damage_and_of_records_that_nothing_wrote() {
    let rings = filled();
    let file = crate::Sink::default();
    let (setup, _joining) = rings.setup(Box::new(file.clone()));
    // Of a program that there is not, and of a function that is not traced.
    let start = ring(&rings, 0).start();
    let info = |program| u64::from(Info::new(COMMON_SIZE, program, 1, Info::DRAINED).0) << 32;
    set_word(&rings, 0, start, info(1000) | u64::from(rings.record(0).site));
    set_word(&rings, 0, start - COMMON_SIZE as u64, info(0) | 1);
    set_head(&rings, 1, 8);
    // More losses than any number can be the sum of.
    (0..3).for_each(|chunk| set_front(&rings, 0, chunk, front::DROPPED, u64::MAX));
    let drain = Drain::start(setup).unwrap();
    let summary = drain.finish(Summary::default(), &Grace::default()).unwrap().summary;
    let [damaged, invented] = &summary.notes[..] else { panic!("{:?}", summary.notes) };
    let notes =
        [damaged, invented].map(|note| note.contains("vCPU 0") && note.contains("2 records"));
    assert_eq!(notes.iter().filter(|&&found| found).count(), 1, "{:?}", summary.notes);
    assert!(summary.notes.iter().any(|note| note.contains("vCPU 1 was overwritten by the guest")));
    let file = std::mem::take(&mut *file.0.lock().unwrap());
    let mut reader = Reader::new(&*file).unwrap();
    let (mut records, mut invalid) = ([0; 2], 0);
    while let Some(frame) = reader.next_frame().unwrap() {
        match frame {
            Frame::Records(batch) => records[batch.vcpu as usize] += batch.records().count(),
            Frame::Loss(loss) if loss.reason == LossReason::Invalid => invalid += loss.count,
            _ => {}
        }
    }
    assert_eq!((records, invalid), ([usize::try_from(RECORDS).unwrap() - 2, 0], 2));
}

// A guest is not at rest while its rings are drained: whatever it writes there at the same time, each
// look ends, and takes no more than a ring holds.
#[test]
fn rings_that_change_under_the_reader_are_read_to_an_end() {
    const ROUNDS: usize = 300;
    let seed: u64 = match std::env::var("VMTRACE_FUZZ_SEED") {
        Ok(seed) => seed.parse().unwrap(),
        Err(_) => 1,
    };
    println!("VMTRACE_FUZZ_SEED={seed}");
    for overwrite in [false, true] {
        let rings = filled();
        let most = usize::try_from(ring(&rings, 0).size()).unwrap() / COMMON_SIZE;
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut state = seed | 1;
                let mut random = || {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    state
                };
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    let (kind, value) = (random(), random());
                    let own = ring(&rings, 0);
                    let chunk = kind >> 8 & 3;
                    let position = own.opening(chunk, 1 + (kind >> 16 & 1)) - (value & 0x1ff8);
                    match kind % 4 {
                        0 => set_head(&rings, 0, position),
                        1 => set_word(&rings, 0, position, value),
                        2 => {
                            let size = COMMON_SIZE + 8 * usize::try_from(value >> 60).unwrap();
                            let tag = if overwrite { 1 } else { Info::DRAINED };
                            let info = u64::from(Info::new(size, 0, 1, tag).0) << 32;
                            set_word(&rings, 0, position, info | value & 0xffff);
                        }
                        _ => {
                            let field = usize::try_from(kind >> 32 & 7).unwrap() * 8;
                            set_front(&rings, 0, chunk, field.min(FRONT_SIZE - 8), value >> 32);
                        }
                    }
                }
            });
            // Also when a check fails: the guest's thread must not outlive that.
            let _end = Ended(&done);
            for _ in 0..ROUNDS {
                // One that has not given up yet.
                let mut reader = rings.readers(overwrite).swap_remove(0);
                let mut batch = RawBatch::with_capacity(CHUNK_SIZE);
                for _ in 0..4 {
                    reader.drain(&mut batch);
                    reader.newest(&mut batch);
                }
                reader.finish(&mut batch);
                assert!(batch.records.len() <= 10 * most);
                for record in &batch.records {
                    assert_eq!(batch.fields(record).len(), usize::from(record.fields));
                }
            }
        });
    }
}

/// Says so when it is dropped.
struct Ended<'a>(&'a std::sync::atomic::AtomicBool);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.store(true, std::sync::atomic::Ordering::Relaxed);
    }
}
