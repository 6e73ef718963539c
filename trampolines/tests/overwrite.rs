//! A flight recorder whose writers are interrupted while the ring wraps around.
//!
//! The test plays the interrupted writer: it exchanges head itself and writes the record in the
//! order in which programs do. After every step, a reader may get only records of calls that
//! happened, and all calls must be accounted for.
//!
//! Two earlier versions failed here. The first wrote the lap before the other half of a record. A
//! writer that slept in between while the ring wrapped around completed a record whose other half
//! was another writer's: a call that never happened, with the right lap. The second found such
//! writers by a tag in each record, but not a writer that had only reserved: leftover fields of
//! earlier records could look like a finished record with the right tag.
#![allow(unsafe_code, reason = "runs machine code in this process")]

mod common;

use common::arch::{ADDRESSINGS, ARGUMENTS, Addressing, ticks};
use common::{FakeGuest, entry_program};
use vmtrace_trampolines::layout::{CHUNK_SIZE, Info, below, front};
use vmtrace_trampolines::{Field, Overflow, Program};

/// Info, some fields, the others, what publishes.
const STEPS: usize = 4;
const SERIAL: Field = Field::Argument(0);

/// What happened, by its serial number.
struct Hit {
    site: u32,
    ticks: (u64, u64),
    caller: Option<u32>,
    size: usize,
}

/// One that reserved, and did so many steps since then.
struct Writer {
    position: u64,
    steps: usize,
    serial: u64,
    ticks: u64,
}

struct Recorder {
    guest: FakeGuest,
    /// By serial number.
    happened: Vec<Option<Hit>>,
    serial: u64,
    unfinished: u64,
}

fn programs() -> [Program; 2] {
    let arguments = [0, 1, 2, 3, 4].map(Field::Argument);
    [
        Program { fields: vec![SERIAL], ..entry_program() },
        // Its fields leave words in the ring that look like the ends of records.
        Program { number: 8, fields: arguments.to_vec(), ..entry_program() },
    ]
}

impl Recorder {
    fn new(addressing: Addressing, chunks: u64) -> Self {
        let size = chunks * CHUNK_SIZE as u64;
        let guest = FakeGuest::with(1, size, addressing, Overflow::Overwrite, &programs());
        (4..8).for_each(|site| guest.call_from(site, 1));
        guest.set_current(0, 1);
        Self { guest, happened: Vec::new(), serial: 0, unfinished: 0 }
    }

    fn lap(&self) -> u64 {
        self.guest.head(0) >> 32
    }

    fn hit(&mut self) {
        let serial = self.serial;
        self.serial += 1;
        // Not in step with the ring.
        let site = serial.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 61;
        #[allow(clippy::cast_possible_truncation, reason = "the tag")]
        let tag = (self.lap() + 1) as u8;
        let false_end = u64::from(Info::new(40, 7, 1, tag).0) << 32 | 0x7777;
        let mut registers = common::registers(false_end);
        registers.x[ARGUMENTS[0]] = serial;
        let before = ticks();
        self.guest.run(site, &mut registers);
        #[allow(clippy::cast_possible_truncation, reason = "the low half")]
        let hit = Hit {
            site: self.guest.function(site),
            ticks: (before, ticks()),
            caller: Some(registers.back as u32),
            size: programs()[usize::from(site >= 4)].size(),
        };
        self.happened.push(Some(hit));
    }

    /// Goes on for so many laps, or until everything is dropped.
    fn go_round(&mut self, laps: u64) {
        let until = self.lap() + laps;
        let dropped = self.guest.dropped(0);
        while self.lap() < until && self.guest.dropped(0) < dropped + 10 {
            self.hit();
        }
        // Not to stop where a chunk begins.
        (0..self.serial % 97).for_each(|_| self.hit());
    }

    fn reserve(&mut self) -> Writer {
        while self.guest.ring(0).is_spent(self.guest.head(0)) {
            self.hit();
        }
        let position = self.guest.head(0);
        self.guest.exchange(0, position, position - programs()[0].size() as u64);
        self.serial += 1;
        self.happened.push(None);
        self.unfinished += 1;
        Writer { position, steps: 0, serial: self.serial - 1, ticks: ticks() }
    }

    /// The next step of a writer.
    fn step(&mut self, writer: &mut Writer) {
        let [program, _] = programs();
        let write = |below, value| self.guest.write(0, writer.position, below, value);
        let halves = |value: u64| {
            [value & 0xffff_ffff, value >> 32].map(|half| u32::try_from(half).unwrap())
        };
        match writer.steps {
            0 => {
                #[allow(clippy::cast_possible_truncation, reason = "the tag")]
                let tag = (writer.position >> 32) as u8;
                write(below::INFO, Info::new(program.size(), program.number, 1, tag).0);
            }
            1 => {
                write(below::CALLER, 0xca11);
                let below = program.below(SERIAL).unwrap();
                let [low, high] = halves(writer.serial);
                write(below, low);
                write(below - 4, high);
            }
            2 => {
                write(below::TASK, 1);
                write(below::PID, 1);
                let [low, high] = halves(writer.ticks);
                write(below::TIMESTAMP, low);
                write(below::TIMESTAMP - 4, high);
            }
            _ => {
                write(below::SITE, 0x517e);
                let ticks = (writer.ticks, writer.ticks);
                let hit = Hit { site: 0x517e, ticks, caller: Some(0xca11), size: program.size() };
                self.happened[usize::try_from(writer.serial).unwrap()] = Some(hit);
                self.unfinished -= 1;
            }
        }
        writer.steps += 1;
    }

    /// What holds at any time. The serial numbers that are kept.
    fn check(&self, when: &str) -> Vec<u64> {
        let records = self.guest.recorded(0);
        let mut kept = Vec::new();
        for record in &records {
            let serial = record.fields[0];
            let hit = usize::try_from(serial).ok().and_then(|serial| self.happened.get(serial));
            let Some(Some(hit)) = hit else { panic!("{when}: {record:x?} never happened") };
            let common = record.common;
            assert_eq!((common.site, record.info().size()), (hit.site, hit.size), "{when}");
            assert!((hit.ticks.0..=hit.ticks.1).contains(&common.timestamp), "{when}");
            assert_eq!(Some(common.caller), hit.caller, "{when}");
            kept.push(serial);
        }
        let count = kept.len() as u64;
        kept.sort_unstable();
        kept.dedup();
        assert_eq!(count, kept.len() as u64, "{when}: a record came twice");
        let lost = self.guest.overwritten(0) + self.guest.dropped(0);
        assert_eq!(count + lost + self.unfinished, self.serial, "{when}: not all accounted for");
        kept
    }

    fn opened(&self, position: u64) -> u64 {
        let chunk = self.guest.ring(0).chunk(position);
        self.guest.front(0, chunk, front::STATE).load(std::sync::atomic::Ordering::Acquire) >> 32
    }
}

// Were a chunk handed out while its writer sleeps, the writer would complete a record of which other
// parts are someone else's.
#[test]
fn a_writer_that_sleeps_while_the_ring_goes_round_never_mixes_records() {
    for addressing in ADDRESSINGS {
        for steps in 0..STEPS {
            for laps in [1, 3] {
                let mut recorder = Recorder::new(addressing, 4);
                let when = format!("{addressing:?}, {steps} steps, {laps} laps");
                recorder.go_round(2);
                recorder.check(&when);
                let mut writer = recorder.reserve();
                (0..steps).for_each(|_| recorder.step(&mut writer));
                recorder.check(&when);
                for _ in steps..STEPS {
                    recorder.go_round(laps);
                    recorder.check(&when);
                    let opened = recorder.opened(writer.position);
                    assert_eq!(opened, writer.position >> 32, "{when}: handed out again");
                    recorder.step(&mut writer);
                    recorder.check(&when);
                }
                assert!(recorder.check(&when).contains(&writer.serial), "{when}: it is whole now");
                recorder.go_round(2);
                assert!(recorder.opened(writer.position) > writer.position >> 32, "{when}");
                assert!(!recorder.check(&when).contains(&writer.serial), "{when}: used again");
                assert_eq!(recorder.guest.dropped(0), 0, "{when}: other chunks were free");
            }
        }
    }
}

// Tags are 8 bits of the lap: whatever decides by them alone takes an old record for a new one.
#[test]
fn nothing_comes_back_after_256_laps() {
    for addressing in ADDRESSINGS {
        for steps in [0, 3] {
            let mut recorder = Recorder::new(addressing, 3);
            recorder.go_round(1);
            // A chunk that is left out for some 255 laps still has what it had before.
            let mut first = recorder.reserve();
            recorder.go_round(254);
            (0..STEPS).for_each(|_| recorder.step(&mut first));
            for distance in 0..4 {
                recorder.go_round(1);
                let chunk = recorder.guest.ring(0).chunk(first.position);
                while recorder.guest.ring(0).chunk(recorder.guest.head(0)) != chunk {
                    recorder.hit();
                }
                let mut writer = recorder.reserve();
                (0..steps).for_each(|_| recorder.step(&mut writer));
                let when = format!("{addressing:?}, {steps} steps, {distance}");
                recorder.go_round(2);
                recorder.check(&when);
                assert_eq!(recorder.opened(writer.position), writer.position >> 32, "{when}");
                (steps..STEPS).for_each(|_| recorder.step(&mut writer));
                assert!(recorder.check(&when).contains(&writer.serial), "{when}");
            }
        }
    }
}

// A program that looked for a chunk for ever would hang the guest; one that took none would, too.
#[test]
fn where_every_chunk_has_a_sleeper_hits_are_dropped_until_one_wakes() {
    for addressing in ADDRESSINGS {
        for chunks in [2, 5] {
            let mut recorder = Recorder::new(addressing, chunks);
            recorder.go_round(1);
            let mut writers = Vec::new();
            let (mut last, mut steps) = (u64::MAX, 0);
            while recorder.guest.dropped(0) == 0 {
                let chunk = recorder.guest.head(0) / CHUNK_SIZE as u64;
                if chunk != last && !recorder.guest.ring(0).is_spent(recorder.guest.head(0)) {
                    let mut writer = recorder.reserve();
                    (0..steps % STEPS).for_each(|_| recorder.step(&mut writer));
                    writers.push(writer);
                    steps += 1;
                    last = chunk;
                }
                recorder.hit();
            }
            assert_eq!(writers.len() as u64, chunks, "one in each");
            recorder.check("all asleep");
            let dropped = recorder.guest.dropped(0);
            (0..500).for_each(|_| recorder.hit());
            assert_eq!(recorder.guest.dropped(0), dropped + 500);
            recorder.check("full");
            for writer in &mut writers {
                while writer.steps < STEPS {
                    recorder.step(writer);
                }
                recorder.check("one wakes");
                (0..1000).for_each(|_| recorder.hit());
                recorder.check("and its chunk is used");
            }
            let dropped = recorder.guest.dropped(0);
            recorder.go_round(3);
            recorder.check("all awake");
            assert_eq!(recorder.guest.dropped(0), dropped);
            for writer in &writers {
                assert!(recorder.opened(writer.position) > writer.position >> 32, "used again");
            }
        }
    }
}

// Interrupts nest: the inner ones finish first, in any chunk, and the ring may go round in each.
#[test]
fn sleepers_may_be_nested_and_wake_in_any_order() {
    for addressing in ADDRESSINGS {
        for order in 0..6_usize {
            let mut recorder = Recorder::new(addressing, 5);
            recorder.go_round(1);
            let mut writers = Vec::new();
            for depth in 0..3 {
                let mut writer = recorder.reserve();
                (0..(order + depth) % STEPS).for_each(|_| recorder.step(&mut writer));
                writers.push(writer);
                // The first two in one chunk, below each other; the ring goes round in the third.
                if depth == 1 {
                    recorder.go_round(1);
                }
                recorder.check("asleep");
            }
            recorder.go_round(2);
            let mut left: Vec<_> = (0..3).collect();
            for choice in [order % 3, order / 3, 0] {
                let writer = &mut writers[left.remove(choice)];
                while writer.steps < STEPS {
                    recorder.step(writer);
                    recorder.hit();
                    recorder.check("waking");
                }
                assert!(recorder.check("awake").contains(&writer.serial));
                // Were it the only sleeper of its chunk, that would now be taken.
                if order % 2 == 0 {
                    recorder.go_round(1);
                    recorder.check("and round");
                }
            }
            recorder.go_round(2);
            recorder.check("all awake");
            for writer in &writers {
                assert!(recorder.opened(writer.position) > writer.position >> 32, "used again");
            }
            assert_eq!(recorder.guest.dropped(0), 0);
        }
    }
}
