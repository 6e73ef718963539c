//! Rings, their accounts and heads, written by programs and then damaged by a guest. The input is
//! read by the ring's reader alone, or by the relay, which writes a stream.

#[path = "../../../vmm/tests/relay/rings.rs"]
mod rings;

use crate::input::Input;
use rings::Rings;
use std::collections::BTreeSet;
use std::io::{self, Write};
use std::sync::{Arc, Mutex};
use vm_memory::{Bytes, VolatileSlice};
use vmtrace::relay::{Drain, Grace};
use vmtrace::stream::{Frame, Reader, Summary};
use vmtrace::tracer::RawBatch;
use vmtrace::tracer::ring::RingReader;
use vmtrace_trampolines::layout::{CHUNK_SIZE, COMMON_SIZE, FRONT_SIZE, Info, Ring};

/// As many as can be: small rings.
const CPUS: usize = 64;
/// Of these are written to and read.
const READ: usize = 2;
/// More would only take longer.
const STEPS: usize = 200;
/// Most records that a ring can be made to hold: all of the shortest.
const MOST: usize = (12 << 20) / CPUS / COMMON_SIZE;

thread_local! {
    static RINGS: Rings = Rings::new(CPUS as u64);
}

#[derive(Clone, Default)]
struct Sink(Arc<Mutex<Vec<u8>>>);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("no panic").write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Who reads.
enum Host {
    Readers(Vec<RingReader>),
    Relay(Box<Drain>, Sink),
}

/// A word as a guest may leave it: any, small, a position of the ring, or the last of a record.
fn word(input: &mut Input<'_>, ring: &Ring) -> u64 {
    let (kind, value) = (input.byte(), input.word());
    let chunk = value >> 8 & 0xff;
    match kind % 8 {
        0 => value,
        1 => value >> 56,
        2 => u64::MAX - (value >> 56),
        3 => ring.opening(chunk % ring.chunks(), value & 3).wrapping_sub(value >> 48 & 0x3ff8),
        4 => ring.opening(chunk % ring.chunks(), value & 0xffff_ffff),
        5 => 0,
        _ => {
            let [few, low, high, ..] = value.to_le_bytes();
            let size = COMMON_SIZE + 8 * usize::from(few % 29);
            let program = if kind & 8 == 0 { 0 } else { u16::from_le_bytes([low, high]) >> 5 };
            let tag = if kind & 16 == 0 { Info::DRAINED } else { kind >> 6 };
            let info = Info::new(size, program, 1 + (u16::from(kind) >> 4), tag);
            u64::from(info.0) << 32 | value >> 32
        }
    }
}

fn set(memory: &VolatileSlice<'_>, at: usize, word: u64) {
    memory.write_obj(word, at).expect("in the annex");
}

pub(crate) fn run(bytes: &[u8]) {
    RINGS.with(|rings| {
        let touched = drive(rings, &mut Input::new(bytes));
        // As new, for the next input.
        let memory = rings.memory().slice();
        for (cpu, ring) in rings.layout().rings.iter().enumerate() {
            let start = usize::try_from(rings.layout().offset(ring)).expect("small");
            let count = usize::try_from(ring.chunks()).expect("small");
            for chunk in (0..count).filter(|&chunk| touched.contains(&(cpu, chunk))) {
                memory
                    .write_slice(&[0; CHUNK_SIZE], start + chunk * CHUNK_SIZE)
                    .expect("in the annex");
            }
        }
        rings.layout().install(&memory).expect("as before");
    });
}

/// Which chunks of which ring hold something now.
fn drive(rings: &Rings, input: &mut Input<'_>) -> BTreeSet<(usize, usize)> {
    let choice = input.byte();
    let mut readers = rings.readers(choice & 2 != 0);
    readers.truncate(READ);
    let mut host = if choice & 1 == 0 {
        Host::Readers(readers)
    } else {
        let sink = Sink::default();
        let (mut setup, _joining) = rings.setup(Box::new(sink.clone()));
        setup.readers = readers;
        Host::Relay(Box::new(Drain::start(setup).expect("to memory")), sink)
    };
    let mut touched = BTreeSet::new();
    let memory = rings.memory().slice();
    let mut number = 0;
    let mut steps = 0;
    while !input.is_empty() && steps < STEPS {
        steps += 1;
        let (step, cpu) = (input.byte(), usize::from(input.byte()) % READ);
        let ring = &rings.layout().rings[cpu];
        let start = usize::try_from(rings.layout().offset(ring)).expect("small");
        let chunks = usize::try_from(ring.chunks()).expect("small");
        match step % 8 {
            0 | 1 => {
                // A head that the guest has spoilt leads programs anywhere.
                let head: u64 = memory.read_obj(control(rings, cpu)).expect("in the annex");
                if !ring.is_position(head) {
                    continue;
                }
                let count = u64::from(input.byte()) * if step & 8 == 0 { 1 } else { 20 };
                for _ in 0..count {
                    rings.hit(cpu, rings.record(number));
                    number += 1;
                }
                touched.extend((0..chunks).map(|chunk| (cpu, chunk)));
            }
            2 => {
                let word = word(input, ring);
                set(&memory, control(rings, cpu), word);
            }
            3 | 4 => {
                let (chunk, offset) =
                    (input.below(chunks), input.below((CHUNK_SIZE - FRONT_SIZE) / 8));
                let word = word(input, ring);
                // Mostly where the first records are.
                let chunk = if step & 0x70 == 0 { chunk } else { chunk % 2 };
                let offset = (CHUNK_SIZE - FRONT_SIZE) / 8
                    - 1
                    - if step & 8 == 0 { offset } else { offset % 24 };
                set(&memory, start + chunk * CHUNK_SIZE + offset * 8, word);
                touched.insert((cpu, chunk));
            }
            5 => {
                let (chunk, field) = (input.below(chunks), input.below(FRONT_SIZE / 8));
                let word = word(input, ring);
                let chunk = if step & 0x70 == 0 { chunk } else { chunk % 2 };
                set(&memory, start + (chunk + 1) * CHUNK_SIZE - FRONT_SIZE + field * 8, word);
                touched.insert((cpu, chunk));
            }
            _ => read(&mut host, step),
        }
    }
    end(host, usize::try_from(number).expect("small"));
    touched
}

/// Where the head of a CPU's ring is in the annex.
fn control(rings: &Rings, cpu: usize) -> usize {
    usize::try_from(rings.layout().controls[cpu]).expect("small")
}

fn read(host: &mut Host, step: u8) {
    match host {
        Host::Relay(drain, _) => {
            drain.pass().expect("to memory");
        }
        Host::Readers(readers) => {
            for reader in readers {
                let mut batch = RawBatch::with_capacity(if step & 8 == 0 { 7 } else { 4096 });
                match step >> 4 & 3 {
                    0 | 1 => drop(reader.drain(&mut batch)),
                    2 => reader.newest(&mut batch),
                    _ => drop(reader.clear()),
                }
                whole(&batch);
            }
        }
    }
}

/// Records have the fields that they say they have.
fn whole(batch: &RawBatch) {
    assert!(batch.records.len() <= MOST, "{} records", batch.records.len());
    for record in &batch.records {
        assert_eq!(batch.fields(record).len(), usize::from(record.fields));
    }
}

fn end(host: Host, written: usize) {
    match host {
        Host::Readers(readers) => {
            for mut reader in readers {
                let mut batch = RawBatch::with_capacity(64);
                let (_, unfinished) = reader.finish(&mut batch);
                whole(&batch);
                assert!(unfinished.len() <= MOST);
                let taken = reader.totals().records;
                // Twice: there is nothing left.
                batch.clear();
                reader.finish(&mut batch);
                if !reader.overwrites() {
                    assert_eq!((batch.records.len(), reader.totals().records), (0, taken));
                }
            }
        }
        Host::Relay(drain, sink) => {
            let summary =
                drain.finish(Summary::default(), &Grace::default()).expect("to memory").summary;
            let stream = std::mem::take(&mut *sink.0.lock().expect("no panic"));
            let mut reader = Reader::new(&*stream).expect("our own stream");
            let mut records = 0;
            while let Some(frame) = reader.next_frame().expect("our own stream") {
                if let Frame::Records(batch) = frame {
                    records += batch.records().count();
                }
            }
            assert!(records <= written + CPUS * MOST * STEPS);
            let told: u64 = summary.vcpus.iter().map(|totals| totals.records).sum();
            assert_eq!(told, records as u64);
        }
    }
}
