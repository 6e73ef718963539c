//! Programs that are interrupted at each of their instructions in turn.
//!
//! One instruction of a program is replaced by one that faults. The handler restores it and hits
//! other sites, which call another copy of the program, until the ring has wrapped around. So every
//! order of two writers occurs, reproducibly, in the slow paths too.
#![allow(unsafe_code, reason = "runs machine code in this process")]

mod common;

use common::arch::{ADDRESSINGS, ARGUMENTS, Addressing, REPETITIONS, Registers, instructions};
use common::fault::Fault;
use common::{FakeGuest, entry_program};
use std::cell::RefCell;
use std::collections::HashSet;
use vmtrace_trampolines::layout::{CHUNK_SIZE, FRONT_SIZE, front};
use vmtrace_trampolines::{Field, Overflow, Point, Program};

/// What the handler has to know.
struct Scene {
    guest: FakeGuest,
    /// Bytes of a record.
    size: usize,
    fault: Fault,
    nested: u64,
    hits: u64,
    /// Records with a later time than one behind them.
    late: u64,
}

thread_local! {
    static SCENE: RefCell<Option<Scene>> = const { RefCell::new(None) };
}

/// The program that is interrupted is called from site 0, that of the handler from site 1.
fn hit(guest: &FakeGuest, site: u64, serial: u64) {
    guest.run(site, &mut registers(serial));
}

fn registers(serial: u64) -> Registers {
    let mut registers = common::registers(!serial);
    registers.x[ARGUMENTS[2]] = serial;
    registers
}

extern "C" fn interrupt(_: i32) {
    // A fault that is not one of ours would come again for ever.
    SCENE.with_borrow_mut(|scene| {
        let Some(scene) = scene else { std::process::abort() };
        scene.fault.meet(&scene.guest);
        for _ in 0..scene.nested {
            hit(&scene.guest, 1, scene.hits);
            scene.hits += 1;
        }
    });
}

/// Compares what there is with what happened.
fn check(scene: &mut Scene, tail: &mut u64, drained: &mut u64, when: &str) {
    let guest = &scene.guest;
    let mut serials = HashSet::new();
    let mut times = Vec::new();
    let mut take = |record: common::Record| {
        let serial = record.fields[0];
        assert_eq!(record.fields[1], !serial, "{when}: {record:x?} is torn");
        assert!(serial < scene.hits, "{when}: {record:x?} never happened");
        assert!(serials.insert(serial), "{when}: {serial} came twice");
        times.push(record.common.timestamp);
    };
    if guest.overflow() == Overflow::Drop {
        guest.drain(0, tail, &mut take);
        assert_eq!(*tail, guest.head(0), "{when}: all were published");
        *drained += serials.len() as u64;
        // What the relay relies on to put records in order: only the one that was interrupted can
        // be later than some behind it, and all of these were there when it was published.
        let behind = times[1.min(times.len())..].iter().rev();
        let mut least: Vec<_> = behind
            .scan(u64::MAX, |least, &time| {
                *least = time.min(*least);
                Some(*least)
            })
            .collect();
        least.reverse();
        let late = times.iter().zip(least).filter(|&(&time, least)| time > least).count() as u64;
        assert!(late <= 1, "{when}: {late} records are later than those behind them");
        scene.late += late;
    } else {
        guest.recorded(0).into_iter().for_each(&mut take);
        *drained = serials.len() as u64;
        // A chunk that was opened in this lap must not be taken for the oldest one: the newest
        // records, as many as surely fit into one chunk, are all there. (One that was interrupted
        // has its serial from before.)
        let newest = scene.hits.min(((CHUNK_SIZE - FRONT_SIZE) / scene.size - 16) as u64);
        let missing = (scene.hits - newest..scene.hits).find(|serial| !serials.contains(serial));
        assert_eq!(missing, None, "{when}: of {} hits a new one was overwritten", scene.hits);
    }
    let lost = guest.dropped(0) + guest.overwritten(0);
    assert_eq!(*drained + lost, scene.hits, "{when}: not all accounted for");
}

fn run(overflow: Overflow, addressing: Addressing, point: Point) {
    let fields = vec![Field::Argument(2), Field::Argument(1)];
    let program = Program { point, fields, ..entry_program() };
    let chunks = 3;
    let programs = [program.clone(), program.clone()];
    let guest = FakeGuest::with(1, chunks * CHUNK_SIZE as u64, addressing, overflow, &programs);
    for number in [0, 1] {
        guest.come_from(number, point, usize::try_from(number).unwrap());
    }
    guest.set_current(0, 1);
    let (start, code) = Fault::code_of(&guest, 0);
    let mut tail = guest.ring(0).start();
    let mut drained = 0;
    let size = program.size();
    let in_chunk = (CHUNK_SIZE / size) as u64;
    let fault = Fault::default();
    let mut scene = Scene { guest, size, fault, nested: 0, hits: 0, late: 0 };
    for (offset, len) in instructions(&code) {
        // The ring goes round more than twice; more than a chunk is used up; one.
        'nested: for nested in [chunks * in_chunk * 2 + 70, in_chunk + 3, 1] {
            let when = format!("{overflow:?} {addressing:?} {point:?} at {offset:#x}, {nested}");
            scene.nested = nested;
            let address = start + offset as u64;
            // Where a chunk begins all paths are taken sooner or later.
            for repetition in 0..REPETITIONS {
                let before = scene.fault.met;
                scene.fault.put(&scene.guest, address, &code[offset..offset + len]);
                SCENE.set(Some(scene));
                let mut count = 0;
                // Until it is interrupted, or for long enough to know that it never will be.
                loop {
                    let (function, serial) = SCENE.with_borrow_mut(|scene| {
                        let scene = scene.as_mut().unwrap();
                        scene.hits += 1;
                        (scene.guest.site(0), scene.hits - 1)
                    });
                    common::arch::call(function, &mut registers(serial));
                    count += 1;
                    let done = SCENE.with_borrow(|scene| !scene.as_ref().unwrap().fault.waits());
                    if done || count > (chunks + 1) * in_chunk {
                        break;
                    }
                }
                scene = SCENE.take().unwrap();
                scene.fault.take_back(&scene.guest);
                check(&mut scene, &mut tail, &mut drained, &when);
                if scene.fault.met == before && repetition == 0 {
                    break 'nested;
                }
            }
        }
    }
    println!("{} interruptions, {} hits", scene.fault.met, scene.hits);
    assert!(scene.fault.met > 100, "the test did not test");
    assert_eq!(scene.late > 0, overflow == Overflow::Drop, "no clock was read late");
    // Nothing has leaked: all chunks are used in every round.
    if overflow == Overflow::Overwrite {
        let before = scene.guest.head(0) >> 32;
        for _ in 0..2 * chunks * in_chunk {
            hit(&scene.guest, 1, scene.hits);
            scene.hits += 1;
        }
        for chunk in 0..chunks {
            let state = scene.guest.front(0, chunk, front::STATE);
            let lap = state.load(std::sync::atomic::Ordering::Acquire) >> 32;
            assert!((before + 1..before + 4).contains(&lap), "chunk {chunk} is not used any more");
        }
        check(&mut scene, &mut tail, &mut drained, "at the end");
    }
}

// What is not safe at just one instruction happens once a month on a busy machine, and cannot be
// told from a bug of the guest.
#[test]
fn whatever_comes_between_two_instructions_nothing_is_lost_or_mixed() {
    Fault::handle(interrupt);
    for overflow in [Overflow::Drop, Overflow::Overwrite] {
        for addressing in ADDRESSINGS {
            for point in [Point::Entry, Point::Probe] {
                run(overflow, addressing, point);
            }
        }
    }
}
