//! The trampolines of this architecture run in this process.
#![allow(unsafe_code, reason = "runs machine code in this process")]

mod common;

use common::arch::{ADDRESSINGS, Addressing, ticks};
use common::{FakeGuest, entry_program};
use vmtrace_trampolines::layout::{CHUNK_SIZE, COMMON_SIZE, FRONT_SIZE};
use vmtrace_trampolines::{Field, Overflow, Program};

fn variants() -> impl Iterator<Item = (Addressing, Overflow)> {
    let both = [Overflow::Drop, Overflow::Overwrite];
    ADDRESSINGS.into_iter().flat_map(move |addressing| both.map(|overflow| (addressing, overflow)))
}

fn all(guest: &FakeGuest, cpu: u64) -> Vec<common::Record> {
    if guest.overflow() == Overflow::Overwrite {
        return guest.recorded(cpu);
    }
    let mut records = Vec::new();
    guest.drain(cpu, &mut guest.ring(cpu).start(), |record| records.push(record));
    records
}

#[test]
fn a_hit_leaves_one_record_that_says_where_when_and_who() {
    for (addressing, overflow) in variants() {
        let guest = FakeGuest::new(2, 1 << 16, addressing, overflow);
        let task = guest.set_current(1, 4711);
        let before = ticks();
        guest.hit(3);
        let after = ticks();
        let records = all(&guest, 1);
        let [record] = &records[..] else { panic!("{addressing:?} {overflow:?}: {records:?}") };
        let common = record.common;
        assert_eq!(common.site, guest.function(3));
        assert!((before..=after).contains(&common.timestamp));
        assert_eq!((common.task, common.pid), (task, 4711));
        assert_ne!(common.caller, 0);
        assert_eq!((record.info().program(), record.info().size()), (7, COMMON_SIZE));
        assert_eq!(guest.head(0), guest.ring(0).start(), "the other CPU's ring is untouched");
    }
}

#[test]
fn a_full_ring_drops_the_new_and_counts_exactly() {
    for addressing in ADDRESSINGS {
        for tracers in [1, 3] {
            let program = Program { tracers, ..entry_program() };
            let guest = FakeGuest::with(1, 1 << 16, addressing, Overflow::Drop, &[program]);
            let ring = guest.ring(0);
            let usable = (CHUNK_SIZE - FRONT_SIZE) as u64 - ring.spent();
            let room = ring.chunks() * (usable / COMMON_SIZE as u64 + 1);
            guest.set_current(0, 1);
            let mut tail = guest.ring(0).start();
            let mut last = 0;
            for (hits, drop) in [(room, 0), (room + 1000, 1000), (3, 0), (5 * room, 4 * room)] {
                let dropped = guest.dropped(0);
                (0..hits).for_each(|hit| guest.hit(hit));
                let mut kept = 0;
                guest.drain(0, &mut tail, |record| {
                    assert!(record.common.timestamp >= last, "in the order of the hits");
                    last = record.common.timestamp;
                    kept += 1;
                });
                let dropped = guest.dropped(0) - dropped;
                assert!(dropped.is_multiple_of(tracers.into()));
                let dropped = dropped / u64::from(tracers);
                assert_eq!(kept + dropped, hits, "nothing is lost silently");
                // A chunk is only reused once it is drained whole.
                let chunk = (CHUNK_SIZE / COMMON_SIZE) as u64;
                assert!((drop..drop + chunk).contains(&(hits - kept)), "{hits} {kept}");
            }
        }
    }
}

#[test]
fn overwrite_keeps_the_newest_and_counts_the_others() {
    for addressing in ADDRESSINGS {
        for (tracers, fields) in [(1, vec![]), (2, vec![Field::Stack, Field::Argument(1)])] {
            let program = Program { tracers, fields, ..entry_program() };
            let guest = FakeGuest::with(1, 1 << 16, addressing, Overflow::Overwrite, &[program]);
            guest.set_current(0, 1);
            // Past 256 laps, where tags come again.
            for hits in [0, 1, 700, 20_000, 600_000] {
                let before = guest.recorded(0).len() as u64;
                let lost = guest.overwritten(0);
                (0..hits).for_each(|hit| guest.hit(hit));
                let kept = guest.recorded(0);
                let lost = (guest.overwritten(0) - lost) / u64::from(tracers);
                assert_eq!(before + hits, kept.len() as u64 + lost, "{hits}");
                assert_eq!(guest.dropped(0), 0);
                let newest = kept.iter().rev().zip((0..hits).rev());
                for (record, hit) in newest {
                    assert_eq!(record.common.site, guest.function(hit), "of {hits}");
                    assert_eq!(record.info().tracers(), u64::from(tracers));
                }
                assert!(
                    kept.windows(2)
                        .all(|two| { two[0].common.timestamp <= two[1].common.timestamp })
                );
            }
            assert!(guest.recorded(0).len() * 48 > 40_000, "the ring is used");
        }
    }
}
