//! Tables of callers on plain memory that looks like a guest right after `ftrace_init`.

mod fake_guest;

use fake_guest::{ANNEX, Fake, kernels};
use vm_memory::Bytes;
use vmtrace::tracer::annex::{Memory, SIZE};
use vmtrace::tracer::{Attachment, CallerHits, Kind, TraceError, return_address};
use vmtrace_trampolines::callers::Callers;

/// vCPUs of the fake guest.
const VCPUS: u64 = 2;

/// A tracer's table, and what tells some functions.
struct Called<'a> {
    fake: &'a Fake,
    attachment: Attachment,
}

impl<'a> Called<'a> {
    fn new(fake: &'a Fake) -> Self {
        Self { fake, attachment: fake.attach() }
    }

    fn table(&mut self, tracer: u8, sites: &[usize]) -> Result<Callers, TraceError> {
        let tables = self.attachment.tables(&self.fake.kernel, (tracer, Kind::Callers), sites)?;
        let number = tables.get(sites[0], &mut 0).expect("asked for");
        let mut next = 0;
        let mut is_it = |&site: &usize| tables.get(site, &mut next) == Some(number);
        assert!(sites.iter().all(&mut is_it), "one for all");
        Ok(self.attachment.counters().find_callers(number).unwrap())
    }

    /// Offset in the annex, as the guest's page tables lead from a run-time address.
    fn at(&self, address: u64) -> usize {
        let image = self.attachment.image();
        let at = image.tables.translate(self.fake, address).unwrap() - ANNEX;
        assert!(at >= SIZE, "behind the rings");
        usize::try_from(at).unwrap()
    }

    fn put(&self, address: u64, value: u64) {
        self.fake.annex.slice().write_obj(value, self.at(address)).unwrap();
    }

    fn pair(&self, site: usize, caller: u32) -> u64 {
        let told = return_address(&self.fake.kernel, &self.fake.kernel.sites()[site]);
        Callers::pair(self.attachment.image().runtime(told), caller.into())
    }

    /// A call, as a program counts it, in the n-th place of its pair.
    fn call(&self, table: Callers, vcpu: u64, (site, caller): (usize, u32), tried: u64) {
        let pair = self.pair(site, caller);
        let place = Callers::PLACES + (Callers::first(pair) + tried) * Callers::PLACE;
        let place = table.address + vcpu * table.stride + place;
        self.put(place, pair);
        let at = self.at(place + Callers::CALLS);
        let before: u64 = self.fake.annex.slice().read_obj(at).unwrap();
        self.put(place + Callers::CALLS, before.wrapping_add(1));
    }

    fn take(&mut self) -> Vec<CallerHits> {
        self.attachment.counters().take(None).callers
    }

    fn read(&mut self) -> Vec<CallerHits> {
        self.attachment.counters().read().callers
    }
}

fn hits(tracer: u8, vcpu: u32, hits: &[(usize, u32, u64)]) -> CallerHits {
    CallerHits { tracer, vcpu, hits: hits.to_vec() }
}

// A call under another function, caller, vCPU or tracer, or one that is told twice, cannot be seen to be wrong.
#[test]
fn calls_are_told_once_by_function_caller_vcpu_and_tracer() {
    for name in kernels() {
        let fake = Fake::counting(name);
        let (mut called, sites) = (Called::new(&fake), fake.all());
        let (one, two) = (sites[3], sites[sites.len() - 1]);
        let first = called.table(0, &sites).unwrap();
        let second = called.table(1, &[one, two]).unwrap();
        assert_eq!(called.table(0, &[one]).unwrap(), first, "{name}: the same again");
        let ends = [first, second].map(|table| table.address + VCPUS * table.stride);
        assert!(ends[0] <= second.address || ends[1] <= first.address, "{name}");
        assert!(first.stride >= Callers::SIZE && !called.attachment.counters().tell_shared());
        for (table, vcpu, of, tried) in [
            (first, 0, (one, 7), 0),
            (first, 0, (one, 7), 0),
            (first, 0, (one, u32::MAX), Callers::TRIED - 1),
            (first, 1, (one, 7), 0),
            (first, 1, (two, 9), 0),
            (second, 1, (two, 9), 0),
        ] {
            called.call(table, vcpu, of, tried);
        }
        let all = [
            hits(0, 0, &[(one, 7, 2), (one, u32::MAX, 1)]),
            hits(0, 1, &[(one, 7, 1), (two, 9, 1)]),
            hits(1, 1, &[(two, 9, 1)]),
        ];
        assert_eq!(called.read(), all, "{name}");
        assert_eq!(called.attachment.counters().take(Some(1)).callers, all[2..], "{name}");
        assert_eq!(
            (called.take(), called.take(), called.read()),
            (all[..2].to_vec(), vec![], all.to_vec())
        );
        // All begins anew, with two calls that nobody was told of: one of them had no place.
        called.call(first, 0, (one, 7), 0);
        called.put(first.address + first.stride + Callers::CROWDED, 1);
        assert_eq!(called.attachment.counters().clear(), 2, "{name}");
        assert_eq!((called.read(), called.take()), (vec![], vec![]), "{name}");
        called.put(first.address + Callers::CROWDED, 4);
        called.put(second.address + Callers::CROWDED, 16);
        let counters = called.attachment.counters();
        assert_eq!([Some(0), Some(0), Some(1)].map(|of| counters.take_crowded(of)), [4, 0, 16]);
        // Functions of a module that goes: told, and never again.
        called.call(first, 0, (one, 7), 0);
        called.call(first, 0, (two, 9), 0);
        let gone = called.attachment.counters().take_gone(&[one]).callers;
        assert_eq!(gone, [hits(0, 0, &[(one, 7, 1), (two, 9, 1)])], "{name}");
        called.call(first, 0, (one, 7), 0);
        assert_eq!(called.take(), [], "{name}");
        assert_eq!(called.read(), [hits(0, 0, &[(two, 9, 1)])], "{name}");
    }
}

// A guest can write all of it: what it says must be no call of a function that nobody asked for, and end nothing.
#[test]
fn what_a_guest_writes_is_a_count_or_nothing() {
    for name in kernels() {
        let fake = Fake::counting(name);
        let (mut called, sites) = (Called::new(&fake), fake.all());
        let (some, other) = (&sites[..8], sites[20]);
        let table = called.table(5, some).unwrap();
        for word in 0..VCPUS * table.stride / 8 {
            called.put(table.address + 8 * word, u64::MAX - word);
        }
        assert_eq!((called.read(), called.take()), (vec![], vec![]), "{name}: of no site");
        let all = VCPUS * table.stride / 8;
        let crowded = called.attachment.counters().take_crowded(Some(5));
        assert_eq!(crowded, u64::MAX, "{name}: a sum that is cut");
        // Two places of one pair, and one of a function that was not asked for.
        (0..all).for_each(|word| called.put(table.address + 8 * word, 0));
        called.call(table, 0, (some[1], 1), 0);
        called.call(table, 0, (some[1], 1), 3);
        called.call(table, 0, (other, 1), 0);
        assert_eq!(called.take(), [hits(5, 0, &[(some[1], 1, 2)])], "{name}");
        // One that goes backwards is what others say in this case: the rest of all numbers.
        let pair = called.pair(some[1], 1);
        let place = Callers::PLACES + Callers::first(pair) * Callers::PLACE;
        called.put(table.address + place + Callers::CALLS, u64::MAX);
        called.put(table.address + place + 3 * Callers::PLACE + Callers::CALLS, u64::MAX);
        assert_eq!(called.take(), [hits(5, 0, &[(some[1], 1, u64::MAX)])], "{name}");
        called.put(table.address + Callers::CROWDED, 0);
        assert_eq!(called.attachment.counters().take_crowded(None), 0, "{name}");
    }
}

// Calls of a tracer that is gone are not those of who has its number, or its table, now; and where there is no room
// for a table of each vCPU, all have one.
#[test]
fn tables_are_shared_and_inherited_where_room_runs_out() {
    let mut shared = 0;
    for name in kernels() {
        let fake = Fake::counting(name);
        let (mut called, sites) = (Called::new(&fake), fake.all());
        let some = &sites[..8];
        let first = called.table(0, some).unwrap();
        called.call(first, 1, (some[2], 1), 0);
        called.put(first.address + Callers::CROWDED, 3);
        called.attachment.counters().forget(0);
        let again = called.table(0, some).unwrap();
        assert_ne!(again, first, "{name}: a task may still count in the old one");
        assert_eq!(called.take(), [], "{name}");
        // Others take the room.
        let full = |tracer: &u8| {
            called.attachment.tables(&fake.kernel, (*tracer, Kind::Calls), &sites).is_err()
        };
        assert!((1..100).find(full).is_some(), "{name}: no end of room");
        let mut tracers = 100..200;
        let heir = loop {
            let tracer = tracers.next().expect(name);
            let table = called.table(tracer, some).expect(name);
            if table == first {
                break tracer;
            }
            assert!(table.stride == 0 || table.stride >= Callers::SIZE, "{name}");
            if table.stride == 0 {
                shared += 1;
                assert!(called.attachment.counters().tell_shared(), "{name}: nobody knows");
                called.call(table, 0, (some[3], 8), 0);
                assert_eq!(called.take(), [hits(tracer, 0, &[(some[3], 8, 1)])], "{name}");
                called.attachment.counters().clear();
            }
        };
        // What was in it before is nobody's.
        let counters = called.attachment.counters();
        assert_eq!(counters.take_crowded(None), 0, "{name}");
        assert_eq!((called.take(), called.read()), (vec![], vec![]), "{name}");
        called.call(first, 1, (some[2], 1), 0);
        let new = [hits(heir, 1, &[(some[2], 1, 1)])];
        assert_eq!((called.read(), called.take()), (new.to_vec(), new.to_vec()), "{name}");
        let none = called.table(tracers.next().expect(name), some);
        assert_eq!(none.err(), Some(TraceError::Counters(VCPUS)), "{name}");
    }
    assert!(shared > 0, "no kernel had room for one more");
}
