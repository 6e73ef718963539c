//! Tables of counters on plain memory that looks like a guest right after `ftrace_init`.

mod fake_guest;

use fake_guest::{ANNEX, Fake, kernels};
use std::collections::HashSet;
use vm_memory::Bytes;
use vmtrace::kernel::Arch;
use vmtrace::tracer::annex::{Memory, SIZE};
use vmtrace::tracer::{Attachment, Hits, TraceError, return_address};
use vmtrace_trampolines::Counters;

/// vCPUs of the fake guest.
const VCPUS: u64 = 2;

/// Offset in the annex of the counter of a site's function: as a program finds it, and where the guest's
/// page tables lead from there.
fn place(fake: &Fake, attachment: &Attachment, counters: Counters, site: usize, vcpu: u64) -> u64 {
    let image = attachment.image();
    let told = image.runtime(return_address(&fake.kernel, &fake.kernel.sites()[site]));
    let inside = if counters.rounds { told & !7 } else { told };
    let address = inside.wrapping_add(counters.distance).wrapping_add(vcpu * counters.stride);
    assert!(address.is_multiple_of(8), "{address:#x} would be slow, or fault");
    assert!(i32::try_from(counters.distance.cast_signed()).is_ok(), "out of a program's reach");
    image.tables.translate(fake, address).unwrap() - ANNEX
}

fn count(fake: &Fake, at: u64) {
    let memory = fake.annex.slice();
    let at = usize::try_from(at).unwrap();
    let before: u64 = memory.read_obj(at).unwrap();
    memory.write_obj(before + 1, at).unwrap();
}

fn hits(tracer: u8, vcpu: u32, hits: &[(usize, u64)]) -> Hits {
    Hits { tracer, vcpu, hits: hits.to_vec() }
}

// A counter that two functions share, or that lies in a ring, makes what is told of both wrong.
#[test]
fn every_function_has_a_counter_of_its_own_for_each_vcpu() {
    for name in kernels() {
        let fake = Fake::counting(name);
        let mut attachment = fake.attach();
        let (sites, slide) = (fake.all(), attachment.image().slide);
        let table = attachment.counters().table(&fake.kernel, 0, &sites).unwrap();
        let found = attachment.counters().find(table, slide).unwrap();
        assert!(
            found.rounds || fake.kernel.arch() == Arch::Riscv64,
            "{name}: entries with and without endbr64"
        );
        let mut places = HashSet::new();
        for &site in &sites {
            for vcpu in 0..VCPUS {
                let place = place(&fake, &attachment, found, site, vcpu);
                assert!(place >= SIZE && places.insert(place), "{name}: site {site}");
            }
        }
        // Some of them count; all of these are told, and nothing else.
        let some = [sites[0], sites[7], sites[sites.len() - 1]];
        for (site, vcpu) in [(some[0], 0), (some[1], 1), (some[1], 1), (some[2], 0), (some[2], 1)] {
            count(&fake, place(&fake, &attachment, found, site, vcpu));
        }
        let all =
            [hits(0, 0, &[(some[0], 1), (some[2], 1)]), hits(0, 1, &[(some[1], 2), (some[2], 1)])];
        let counters = attachment.counters();
        assert_eq!(counters.read(&fake.kernel), all, "{name}");
        assert_eq!(counters.take(&fake.kernel, Some(1)), [], "{name}");
        assert_eq!(counters.take(&fake.kernel, None), all, "{name}");
        assert_eq!(
            (counters.take(&fake.kernel, None), counters.read(&fake.kernel)),
            (vec![], vec![])
        );
        count(&fake, place(&fake, &attachment, found, some[1], 1));
        let more = [hits(0, 1, &[(some[1], 1)])];
        assert_eq!(attachment.counters().take(&fake.kernel, Some(0)), more, "{name}");
    }
}

// Calls of another tracer, or of one that is gone, are not those of who has its number now.
#[test]
fn tracers_have_tables_of_their_own() {
    for name in kernels() {
        let fake = Fake::counting(name);
        let mut attachment = fake.attach();
        let sites = fake.all();
        let (few, slide) = (&sites[10..40], attachment.image().slide);
        let of = |attachment: &mut Attachment, tracer| {
            let counters = attachment.counters();
            let table = counters.table(&fake.kernel, tracer, few).unwrap();
            (table, counters.find(table, slide).unwrap())
        };
        let (first, second) = (of(&mut attachment, 0), of(&mut attachment, 1));
        assert_eq!(of(&mut attachment, 0), first, "{name}: the same again");
        assert_ne!(first.1.distance, second.1.distance, "{name}");
        for (found, times) in [(first.1, 2), (second.1, 1)] {
            for _ in 0..times {
                count(&fake, place(&fake, &attachment, found, few[3], 0));
            }
        }
        let told = attachment.counters().take(&fake.kernel, None);
        assert_eq!(told, [hits(0, 0, &[(few[3], 2)]), hits(1, 0, &[(few[3], 1)])], "{name}");
        // The number comes again; a task of before may still count in the old table.
        attachment.counters().forget(1);
        let third = of(&mut attachment, 1);
        assert_ne!(third.1.distance, second.1.distance, "{name}");
        count(&fake, place(&fake, &attachment, second.1, few[3], 0));
        count(&fake, place(&fake, &attachment, third.1, few[4], 1));
        let told = attachment.counters().take(&fake.kernel, None);
        assert_eq!(told, [hits(1, 1, &[(few[4], 1)])], "{name}");
    }
}

// Tables that have run out end in an error, not in one that lies over another.
#[test]
fn room_runs_out_and_is_inherited() {
    let mut shared = 0;
    for name in kernels() {
        let fake = Fake::counting(name);
        let mut attachment = fake.attach();
        let (sites, slide) = (fake.all(), attachment.image().slide);
        let counters = attachment.counters();
        let (mut tracers, mut own) = (0, 0);
        let error = loop {
            let table = match counters.table(&fake.kernel, tracers, &sites) {
                Ok(table) => table,
                Err(error) => break error,
            };
            tracers += 1;
            // Where there is not enough for two, there may be for one.
            let found = counters.find(table, slide).unwrap();
            assert_eq!(found.stride == 0, counters.tell_shared(), "{name}");
            own += u8::from(found.stride > 0);
        };
        assert_eq!(error, TraceError::Counters(VCPUS), "{name}");
        assert!((3..20).contains(&own), "{name}: {own} of {tracers}");
        shared += tracers - own;
        assert!(counters.table(&fake.kernel, 0, &sites).is_ok(), "{name}");
        let found = counters.table(&fake.kernel, 2, &sites).unwrap();
        let found = counters.find(found, slide).unwrap();
        count(&fake, place(&fake, &attachment, found, sites[5], 1));
        let counters = attachment.counters();
        counters.forget(2);
        let again = counters.table(&fake.kernel, 77, &sites).unwrap();
        assert_eq!(counters.find(again, slide), Some(found), "{name}");
        assert_eq!(counters.take(&fake.kernel, None), [], "{name}: another's");
        assert!(counters.table(&fake.kernel, 78, &sites).is_err(), "{name}");
        assert_eq!(counters.table(&fake.kernel, 78, &[]), Err(TraceError::NotCounted));
    }
    assert!(shared > 0, "no kernel had room for one more");
}

// Memory of the host that nobody asked for.
#[test]
fn a_guest_without_room_counts_nothing() {
    for name in kernels() {
        let fake = Fake::new(name);
        let mut attachment = fake.attach();
        let sites = fake.all();
        let table = attachment.counters().table(&fake.kernel, 0, &sites);
        assert_eq!(table, Err(TraceError::Counters(VCPUS)), "{name}");
    }
}
