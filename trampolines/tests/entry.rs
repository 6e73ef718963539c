//! The trampolines of this architecture run in this process.
#![allow(unsafe_code, reason = "runs machine code in this process")]

mod common;

use common::FakeGuest;
use common::arch::{ADDRESSINGS, Addressing, ticks};
use vmtrace_trampolines::Overflow;
use vmtrace_trampolines::layout::{RECORD_SIZE, Record};

fn variants() -> impl Iterator<Item = (Addressing, Overflow)> {
    let both = [Overflow::Drop, Overflow::Overwrite];
    ADDRESSINGS.into_iter().flat_map(move |addressing| both.map(|overflow| (addressing, overflow)))
}

#[test]
fn a_hit_leaves_one_record_that_says_where_when_and_who() {
    for (addressing, overflow) in variants() {
        let guest = FakeGuest::new(2, 1 << 16, addressing, overflow);
        let task = guest.set_current(1, 4711);
        let before = ticks();
        guest.hit(3);
        let after = ticks();
        let mut records = Vec::new();
        guest.drain(1, &mut guest.rings[1].start(), |record| records.push(record));
        let [record] = records[..] else { panic!("{addressing:?} {overflow:?}: {records:?}") };
        assert_eq!(record.function, guest.function(3));
        assert!((before..=after).contains(&record.timestamp));
        assert_eq!((record.task, record.pid), (task, 4711));
        assert_ne!(record.caller, 0);
        assert_eq!(guest.head(0), guest.rings[0].start(), "the other CPU's ring is untouched");
    }
}

#[test]
fn a_full_ring_drops_the_new_and_counts_exactly() {
    for addressing in ADDRESSINGS {
        let guest = FakeGuest::new(1, 1 << 16, addressing, Overflow::Drop);
        let slots = guest.rings[0].slots();
        guest.set_current(0, 1);
        let mut tail = guest.rings[0].start();
        let (mut seen, mut last) = (0, 0);
        for (hits, drop) in [(slots, 0), (slots + 1000, 1000), (3, 0), (5 * slots, 4 * slots)] {
            let dropped = guest.dropped(0);
            (0..hits).for_each(|hit| guest.hit(hit));
            let mut kept = 0;
            guest.drain(0, &mut tail, |record| {
                assert!(record.timestamp >= last, "records are in the order of the hits");
                last = record.timestamp;
                kept += 1;
            });
            assert_eq!(kept + guest.dropped(0) - dropped, hits, "nothing is lost silently");
            // A chunk is only reused once it is drained whole.
            let chunk = vmtrace_trampolines::layout::CHUNK_SLOTS;
            assert!((drop..drop + chunk).contains(&(hits - kept)), "{hits} {kept}");
            seen += kept;
        }
        assert_eq!(seen, guest.rings[0].count(tail));
    }
}

#[test]
fn overwrite_keeps_the_newest_and_the_head_counts_all() {
    for addressing in ADDRESSINGS {
        let guest = FakeGuest::new(1, 1 << 16, addressing, Overflow::Overwrite);
        let ring = guest.rings[0];
        guest.set_current(0, 1);
        let hits = 7 * ring.slots() + 123;
        (0..hits).for_each(|hit| guest.hit(hit));
        assert_eq!(ring.count(guest.head(0)), hits);
        assert_eq!(guest.dropped(0), 0);
        let mut position = ring.start();
        for slot in 0..ring.slots() {
            position = ring.slot(position);
            let address = ring.address() + ring.offset(position);
            // SAFETY: a slot of the fake guest's ring.
            let record: Record = unsafe {
                core::ptr::with_exposed_provenance::<Record>(usize::try_from(address).unwrap())
                    .read()
            };
            let expected = if slot < 123 { 7 } else { 6 };
            assert_eq!(record.lap, expected, "slot {slot}");
            let hit = u64::from(record.lap) * ring.slots() + slot;
            assert_eq!(record.function, guest.function(hit), "slot {slot}");
            position += RECORD_SIZE as u64;
        }
    }
}
