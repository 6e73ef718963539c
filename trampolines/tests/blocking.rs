//! Programs that wait for room where their ring is full.

mod common;

use common::arch::{ADDRESSINGS, OWN, STACK, WAIT, free};
use common::{FakeGuest, Random, entry_program};
use std::sync::atomic::{AtomicU64, Ordering};
use vmtrace_trampolines::{Field, Overflow, Point, Program};

const SIZE: u64 = 1 << 16;
const BLOCK: Overflow = Overflow::Block(WAIT);

/// Ends all waiting when a test fails, whose threads are waited for.
struct End<'a>(&'a FakeGuest);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.set_wait(0, false);
    }
}

fn guests() -> impl Iterator<Item = FakeGuest> {
    let fields = [vec![], vec![Field::Stack, Field::Argument(1)]];
    ADDRESSINGS.into_iter().flat_map(move |addressing| {
        fields.clone().map(|fields| {
            let program = Program { tracers: 3, fields, ..entry_program() };
            FakeGuest::with(1, SIZE, addressing, BLOCK, &[program])
        })
    })
}

// `--overflow block` promises every record, however slowly they are taken, and a function's own
// registers have to outlive the wait.
#[test]
fn nothing_is_lost_however_slowly_records_are_taken() {
    const HITS: u64 = 40_000;
    for guest in guests() {
        guest.set_wait(0, true);
        let mut taken = Vec::new();
        let done = AtomicU64::new(0);
        std::thread::scope(|scope| {
            let _end = End(&guest);
            scope.spawn(|| {
                guest.set_current(0, 1);
                let mut random = Random(77);
                let kept: Vec<usize> = (0..common::registers(0).x.len())
                    .filter(|at| *at != STACK && !OWN.contains(at))
                    .filter(|at| !free(Point::Entry).contains(at))
                    .collect();
                for hit in 0..HITS {
                    let mut registers = common::registers(random.next());
                    let before = registers.clone();
                    guest.run(hit, &mut registers);
                    for &at in &kept {
                        assert_eq!(registers.x[at], before.x[at], "register {at}, hit {hit}");
                    }
                    assert_eq!(registers.stack, before.stack);
                    done.store(hit + 1, Ordering::Release);
                }
            });
            let mut tail = guest.ring(0).start();
            let mut last = 0;
            while (taken.len() as u64) < HITS {
                assert_eq!(guest.dropped(0), 0, "after {}", taken.len());
                // It has come as far as it can.
                let now = done.load(Ordering::Acquire);
                if now == last {
                    guest.drain(0, &mut tail, |record| taken.push(record.common.site));
                }
                last = now;
                std::thread::yield_now();
            }
        });
        let called = (0..HITS).map(|hit| guest.function(hit));
        assert!(taken.into_iter().eq(called), "every hit once, in order");
    }
}

// What a probe was called with has to outlive the wait as well: it is recorded behind that.
#[test]
fn a_probe_that_waits_records_what_it_was_called_with() {
    const HITS: u64 = 5_000;
    for addressing in ADDRESSINGS {
        let fields: Vec<_> = (1..6).map(Field::Argument).collect();
        let program = Program { point: Point::Probe, fields, ..entry_program() };
        let guest = FakeGuest::with(1, SIZE, addressing, BLOCK, &[program]);
        guest.come_from(1, Point::Probe, 0);
        guest.set_wait(0, true);
        let done = AtomicU64::new(0);
        let mut taken = Vec::new();
        std::thread::scope(|scope| {
            let _end = End(&guest);
            scope.spawn(|| {
                guest.set_current(0, 1);
                for hit in 0..HITS {
                    guest.run(1, &mut common::arguments(hit));
                    done.store(hit + 1, Ordering::Release);
                }
            });
            let mut tail = guest.ring(0).start();
            let mut last = 0;
            while (taken.len() as u64) < HITS && guest.dropped(0) == 0 {
                // It has come as far as it can.
                let now = done.load(Ordering::Acquire);
                if now == last {
                    guest.drain(0, &mut tail, |record| taken.push(record.fields));
                }
                last = now;
                std::thread::yield_now();
            }
        });
        assert_eq!(taken.len() as u64, HITS);
        for (hit, fields) in (0..).zip(taken) {
            assert_eq!(fields, common::five_arguments(hit));
        }
    }
}

// At the end nobody makes room any more: a guest must not wait for ever, and what it does not
// record then is counted.
#[test]
fn who_waits_goes_on_when_nobody_makes_room() {
    const HITS: u64 = 10_000;
    for guest in guests() {
        guest.set_wait(0, true);
        let done = AtomicU64::new(0);
        std::thread::scope(|scope| {
            let _end = End(&guest);
            scope.spawn(|| {
                guest.set_current(0, 1);
                for hit in 0..HITS {
                    guest.hit(hit);
                    done.store(hit + 1, Ordering::Release);
                }
            });
            // The ring is full, and the thread in the midst of a hit.
            let full = |now| now > 0 && guest.ring(0).is_spent(guest.head(0)) && now < HITS;
            let mut last = 0;
            loop {
                std::thread::sleep(std::time::Duration::from_millis(20));
                let now = done.load(Ordering::Acquire);
                assert_eq!(guest.dropped(0), 0);
                if now == last && full(now) {
                    break;
                }
                last = now;
            }
            guest.set_wait(0, false);
        });
        let mut kept = 0;
        guest.drain(0, &mut guest.ring(0).start(), |_| kept += 1);
        assert_eq!(kept + guest.dropped(0) / 3, HITS);
    }
}
