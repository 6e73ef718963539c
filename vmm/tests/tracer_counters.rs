//! Tables of counters on plain memory that looks like a guest right after `ftrace_init`.

mod fake_guest;

use fake_guest::{ANNEX, Fake, kernels};
use std::collections::{HashMap, HashSet};
use vm_memory::Bytes;
use vmtrace::kernel::Arch;
use vmtrace::tracer::annex::{Memory, SIZE};
use vmtrace::tracer::{
    Attachment, Buckets, Counted, Duty, Hits, Keeper, Kind, Measure, Part, SiteTables, Stopped,
    Tally, TraceError, return_address,
};
use vmtrace_trampolines::callers::Callers;
use vmtrace_trampolines::histogram::{Calls, MISSED, SUM, Sorted, WORDS};
use vmtrace_trampolines::riscv64::encode::mv;
use vmtrace_trampolines::riscv64::encode::register::{A7, T1};
use vmtrace_trampolines::{Counters, Point};

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

fn table_of(tables: &SiteTables, site: usize) -> u16 {
    tables.get(site, &mut 0).unwrap()
}

// A counter that two functions share, or that lies in a ring, makes what is told of both wrong.
#[test]
fn every_function_has_a_counter_of_its_own_for_each_vcpu() {
    for name in kernels() {
        let fake = Fake::counting(name);
        let mut attachment = fake.attach();
        let (sites, slide) = (fake.all(), attachment.image().slide);
        let tables = attachment.tables(&fake.kernel, (0, Kind::Calls), &sites).unwrap();
        let numbers: HashSet<u16> = sites.iter().map(|&site| table_of(&tables, site)).collect();
        let near = fake.kernel.arch() == Arch::Riscv64;
        assert!(numbers.len() > 1 || near, "{name}: start-up code is far from other text");
        let finds = |number| (number, attachment.counters().find(number, slide).unwrap());
        let found: HashMap<u16, Counters> = numbers.into_iter().map(finds).collect();
        let place = |attachment: &Attachment, site: usize, vcpu| {
            place(&fake, attachment, found[&table_of(&tables, site)], site, vcpu)
        };
        let mut places = HashSet::new();
        for &site in &sites {
            for vcpu in 0..VCPUS {
                let place = place(&attachment, site, vcpu);
                assert!(place >= SIZE && places.insert(place), "{name}: site {site}");
            }
        }
        // Some of them count; all of these are told, and nothing else.
        let some = [sites[0], sites[7], sites[sites.len() - 1]];
        for (site, vcpu) in [(some[0], 0), (some[1], 1), (some[1], 1), (some[2], 0), (some[2], 1)] {
            count(&fake, place(&attachment, site, vcpu));
        }
        let all =
            [hits(0, 0, &[(some[0], 1), (some[2], 1)]), hits(0, 1, &[(some[1], 2), (some[2], 1)])];
        let counters = attachment.counters();
        assert_eq!(counters.read().hits, all, "{name}");
        assert_eq!(counters.take(Some(1)), Counted::default(), "{name}");
        assert_eq!(counters.take(None).hits, all, "{name}");
        // What was told is no more to be told, and is still what was counted.
        assert_eq!((counters.take(None).hits, counters.read().hits), (vec![], all.to_vec()));
        count(&fake, place(&attachment, some[1], 1));
        let more = [hits(0, 1, &[(some[1], 1)])];
        assert_eq!(attachment.counters().take(Some(0)).hits, more, "{name}");
        // All begins anew; only one call was not told.
        count(&fake, place(&attachment, some[1], 1));
        let counters = attachment.counters();
        assert_eq!(
            (counters.clear(), counters.read().hits, counters.take(None).hits),
            (1, vec![], vec![])
        );
        count(&fake, place(&attachment, some[1], 1));
        let counters = attachment.counters();
        assert_eq!(
            (counters.read().hits, counters.take(None).hits),
            (more.to_vec(), more.to_vec())
        );
        // Functions of a module that goes: told, and never again.
        count(&fake, place(&attachment, some[0], 1));
        count(&fake, place(&attachment, some[1], 1));
        let gone = [hits(0, 1, &[(some[0], 1)])];
        assert_eq!(attachment.counters().take_gone(&some[..1]).hits, gone, "{name}");
        count(&fake, place(&attachment, some[0], 1));
        assert_eq!(attachment.counters().take(None).hits, more, "{name}");
        let since = [hits(0, 1, &[(some[1], 2)])];
        assert_eq!(attachment.counters().read().hits, since, "{name}");
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
            let tables = attachment.tables(&fake.kernel, (tracer, Kind::Calls), few).unwrap();
            let table = table_of(&tables, few[0]);
            (table, attachment.counters().find(table, slide).unwrap())
        };
        let (first, second) = (of(&mut attachment, 0), of(&mut attachment, 1));
        assert_eq!(of(&mut attachment, 0), first, "{name}: the same again");
        assert_ne!(first.1.distance, second.1.distance, "{name}");
        for (found, times) in [(first.1, 2), (second.1, 1)] {
            for _ in 0..times {
                count(&fake, place(&fake, &attachment, found, few[3], 0));
            }
        }
        let told = attachment.counters().take(None).hits;
        assert_eq!(told, [hits(0, 0, &[(few[3], 2)]), hits(1, 0, &[(few[3], 1)])], "{name}");
        // The number comes again; a task of before may still count in the old table.
        attachment.counters().forget(1);
        let third = of(&mut attachment, 1);
        assert_ne!(third.1.distance, second.1.distance, "{name}");
        count(&fake, place(&fake, &attachment, second.1, few[3], 0));
        count(&fake, place(&fake, &attachment, third.1, few[4], 1));
        let told = attachment.counters().take(None).hits;
        assert_eq!(told, [hits(1, 1, &[(few[4], 1)])], "{name}");
    }
}

// Tracers that come and go would use up all room there is. Who gets a table at once gets the calls of tasks that still
// stand in a program for the one before.
#[test]
fn tables_rest_and_are_used_again() {
    for name in kernels() {
        let fake = Fake::counting(name);
        let mut attachment = fake.attach();
        let sites = fake.all();
        let (few, slide) = (&sites[10..40], attachment.image().slide);
        let memory = fake.annex.slice();
        for kind in [Kind::Calls, Kind::Histograms, Kind::Callers] {
            let mut places: Vec<u64> = Vec::new();
            for round in 0..40 {
                let tables = attachment.tables(&fake.kernel, (1, kind), few).unwrap();
                let (table, calls) = (table_of(&tables, few[3]), round + 1);
                let counters = attachment.counters();
                let found = counters.find(table, slide);
                let pages = attachment.image().tables;
                let annex = |address| pages.translate(&fake, address).unwrap() - ANNEX;
                // Where calls of one function are counted.
                let at = match kind {
                    Kind::Calls => place(&fake, &attachment, found.unwrap(), few[3], 0),
                    Kind::Histograms => {
                        let slot = place(&fake, &attachment, found.unwrap(), few[3], 0);
                        let slot = usize::try_from(slot).unwrap();
                        annex(memory.read_obj(slot).unwrap()) + 8 * 7
                    }
                    Kind::Callers => {
                        let callers = attachment.counters().find_callers(table).unwrap();
                        // Pairs of before would take the places of those to come.
                        let pair = usize::try_from(annex(callers.address) + Callers::PLACES);
                        assert_eq!(memory.read_obj::<u64>(pair.unwrap()).unwrap(), 0, "{name}");
                        memory.write_obj(0x1234_0000_5678_u64, pair.unwrap()).unwrap();
                        annex(callers.address) + Callers::CROWDED
                    }
                };
                (0..calls).for_each(|_| count(&fake, at));
                let counters = attachment.counters();
                let Counted { hits: told, buckets, .. } = counters.take(None);
                let bucket = |buckets: &Buckets| (buckets.tracer, buckets.words.clone());
                match kind {
                    Kind::Calls => assert_eq!(told, [hits(1, 0, &[(few[3], calls)])], "{name}"),
                    Kind::Histograms => {
                        let expected = (1, vec![(few[3], 7, calls)]);
                        assert_eq!(buckets.iter().map(bucket).collect::<Vec<_>>(), [expected]);
                    }
                    Kind::Callers => assert_eq!(counters.take_crowded(Some(1)), calls, "{name}"),
                }
                let last = places.iter().rev().take(3);
                assert!(last.into_iter().all(|&before| before != at), "{name}: {kind:?} {round}");
                places.push(at);
                counters.forget(1);
            }
            places.sort_unstable();
            places.dedup();
            assert_eq!(places.len(), 4, "{name}: {kind:?}");
        }
        // What one has counted is not the next one's, also where the functions went meanwhile.
        for times in 0..6 {
            let tables = attachment.tables(&fake.kernel, (1, Kind::Calls), few).unwrap();
            assert_eq!(attachment.counters().read().hits, [], "{name}: {times}");
            let found = attachment.counters().find(table_of(&tables, few[3]), slide).unwrap();
            count(&fake, place(&fake, &attachment, found, few[3], 1));
            attachment.counters().forget(1);
            let _ = attachment.counters().take_gone(few);
        }
        // Those that take much of the room do so for less long.
        let mut large = HashSet::new();
        for _ in 0..10 {
            let tables = attachment.tables(&fake.kernel, (1, Kind::Calls), &sites).unwrap();
            let table = table_of(&tables, sites[100]);
            large.insert(attachment.counters().find(table, slide).unwrap().distance);
            attachment.counters().forget(1);
        }
        assert_eq!(large.len(), 2, "{name}");
        // Smaller ones are made, as long as there is room.
        let tables = attachment.tables(&fake.kernel, (1, Kind::Calls), &few[..1]).unwrap();
        let small = attachment.counters().find(table_of(&tables, few[0]), slide).unwrap();
        let tables = attachment.tables(&fake.kernel, (2, Kind::Calls), few).unwrap();
        let others = attachment.counters().find(table_of(&tables, few[0]), slide).unwrap();
        assert!(small.distance > others.distance, "{name}");
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
        let of = |attachment: &mut Attachment, tracer| {
            let tables = attachment.tables(&fake.kernel, (tracer, Kind::Calls), &sites)?;
            let table = table_of(&tables, sites[5]);
            Ok::<_, TraceError>(attachment.counters().find(table, slide).unwrap())
        };
        let mut tracers = 0;
        let error = loop {
            match of(&mut attachment, tracers) {
                Ok(_) => tracers += 1,
                Err(error) => break error,
            }
        };
        // The most that still has room in one piece has none in two.
        let mut most = (1..100).rev().map(|part| &sites[..sites.len() * part / 100]);
        let is_made =
            |few: &&[usize]| attachment.tables(&fake.kernel, (100, Kind::Calls), few).is_ok();
        if most.find(is_made).is_some() {
            shared += usize::from(attachment.counters().tell_shared());
        }
        assert_eq!(error, TraceError::Counters(VCPUS), "{name}");
        assert!((3..40).contains(&tracers), "{name}: {tracers}");
        assert!(of(&mut attachment, 0).is_ok(), "{name}");
        let found = of(&mut attachment, 2).unwrap();
        count(&fake, place(&fake, &attachment, found, sites[5], 1));
        attachment.counters().forget(2);
        // What the heir has counted elsewhere is not told yet.
        attachment.counters().forget(100);
        let few = attachment.tables(&fake.kernel, (77, Kind::Calls), &sites[..1]).unwrap();
        let few = table_of(&few, sites[0]);
        let elsewhere = attachment.counters().find(few, slide).unwrap();
        assert_ne!(elsewhere, found, "{name}");
        count(&fake, place(&fake, &attachment, elsewhere, sites[0], 0));
        assert_eq!(of(&mut attachment, 77), Ok(found), "{name}");
        let told = attachment.counters().take(None).hits;
        assert_eq!(told, [hits(77, 0, &[(sites[0], 1)])], "{name}: another's");
        assert!(of(&mut attachment, 78).is_err(), "{name}");
        assert!(
            attachment.tables(&fake.kernel, (79, Kind::Calls), &[]).unwrap().is_empty(),
            "{name}"
        );
    }
    assert!(shared > 0, "no kernel had room for one more");
}

// A trap at another place, or one that is left there, is a guest that stops for nobody.
#[test]
fn programs_stop_where_they_say_and_never_once_tracing_has_ended() {
    const TRAPS: [&[u8]; 2] = [&[0xe6, 0x42], &[0xb7, 0x18, 0, 0, 0x73, 0, 0, 0]];
    for name in kernels() {
        let fake = Fake::counting(name);
        let mut attachment = fake.attach();
        let trap = TRAPS[usize::from(fake.kernel.arch() == Arch::Riscv64)];
        let duty = |number| {
            let counts = Some(Tally::Stop { number, since: None });
            let part = |tracer, counts| Part { tracer, counts, ..Part::default() };
            Duty { point: Point::Entry, parts: vec![part(255, counts), part(0, None)] }
        };
        let made = attachment.program(&fake, &fake.kernel, &duty(3));
        assert_eq!(made, Err(TraceError::Stops), "{name}: by what?");
        attachment.stop_by(trap);
        let stops = [3, 511].map(|number| {
            attachment.counters().count_down(number, u64::from(number)).unwrap();
            attachment.program(&fake, &fake.kernel, &duty(number)).unwrap()
        });
        assert_eq!(
            attachment.program(&fake, &fake.kernel, &duty(512)),
            Err(TraceError::Stops),
            "{name}"
        );
        let tables = attachment.image().tables;
        let bytes = |place: u64, len| {
            let mut held = vec![0; len];
            match place.checked_sub(ANNEX).filter(|&at| at < fake.annex.slice().len() as u64) {
                Some(at) => {
                    let at = usize::try_from(at).unwrap();
                    fake.annex.slice().read_slice(&mut held, at).unwrap();
                    held
                }
                None => fake.read_vec(place, len),
            }
        };
        for number in [3, 511] {
            let counter = attachment.counters().find_stop(number).unwrap();
            let place = tables.translate(&fake, counter).unwrap();
            assert_eq!(bytes(place, 8), u64::from(number).to_le_bytes(), "{name}");
            assert_eq!(attachment.counters().left(number), Some(u64::from(number)), "{name}");
            // Calls behind the one that was meant.
            attachment.counters().count_down(number, u64::MAX).unwrap();
            assert_eq!(attachment.counters().left(number), Some(0), "{name}");
        }
        let sites = fake.all();
        let held = [(sites[4], stops[0]), (sites[9], stops[1])];
        attachment.enable(&fake, &fake.kernel, &held).unwrap();
        let traps: Vec<u64> = attachment.program_traps().collect();
        assert_eq!(traps.len(), 2, "{name}");
        let places: Vec<u64> =
            traps.iter().map(|&trap| tables.translate(&fake, trap).unwrap()).collect();
        for ((&at, &place), number) in traps.iter().zip(&places).zip([3, 511]) {
            assert_eq!(bytes(place, trap.len()), trap, "{name}");
            let next = at + trap.len() as u64;
            assert_eq!(
                attachment.stopped(at),
                Some(Stopped { number, next, at_end: false }),
                "{name}"
            );
            assert_eq!(attachment.stopped(next), None, "{name}");
        }
        // Who stopped tells its site, and may begin anew where that is held.
        let told = |site: usize| {
            let link = return_address(&fake.kernel, &fake.kernel.sites()[site]);
            attachment.image().runtime(link)
        };
        let few = &sites[..20];
        assert_eq!(attachment.site_told(&fake.kernel, few, told(sites[9])), Some(sites[9]));
        assert_eq!(attachment.site_told(&fake.kernel, few, told(sites[21])), None);
        let again = attachment.again(traps[1], sites[9]).unwrap();
        if fake.kernel.arch() == Arch::X86_64 {
            assert_eq!(again, fake.target(sites[9]), "{name}: its program");
        } else {
            // The site is executed once more, as behind a trap in it: `mv a7, t1` comes first.
            let place = tables.translate(&fake, again).unwrap();
            assert_eq!(bytes(place, 4), mv(A7, T1).to_le_bytes(), "{name}");
        }
        assert_eq!(attachment.again(traps[1], sites[5]), None, "{name}: not held");
        attachment.release_all(&fake, &fake.kernel).unwrap();
        for place in places {
            assert_ne!(bytes(place, trap.len()), trap, "{name}: it would stop");
        }
    }
}

// A histogram that two functions or vCPUs share makes what is told of both wrong; one that lies over something
// else destroys that.
#[test]
fn every_function_has_a_histogram_of_its_own_for_each_vcpu() {
    for name in kernels() {
        let fake = Fake::counting(name);
        let mut attachment = fake.try_attach_for(&fake.all()[5..9]).unwrap();
        let (sites, slide) = (fake.all(), attachment.image().slide);
        let few = &sites[5..60];
        let kind = (3, Kind::Histograms);
        let tables = attachment.tables(&fake.kernel, kind, few).unwrap();
        // More come later: the others keep theirs.
        let few = &sites[5..90];
        let more = attachment.tables(&fake.kernel, kind, &sites[50..90]).unwrap();
        let table =
            |site: &usize| more.get(*site, &mut 0).unwrap_or_else(|| table_of(&tables, *site));
        let calls = attachment.counters().calls(Keeper::Tracer(3)).unwrap();
        let tables_of_pages = attachment.image().tables;
        let annex = |address| tables_of_pages.translate(&fake, address).unwrap() - ANNEX;
        assert!(
            annex(calls.address) >= SIZE
                && attachment.counters().calls(Keeper::Tracer(0)).is_none()
        );
        let memory = fake.annex.slice();
        let mut taken = HashSet::new();
        let mut expected: HashMap<u32, Vec<(usize, u8, u64)>> = HashMap::new();
        for site in few {
            let found = attachment.counters().find(table(site), slide).unwrap();
            for vcpu in 0..VCPUS {
                let slot = place(&fake, &attachment, found, *site, vcpu);
                let histogram: u64 = memory.read_obj(usize::try_from(slot).unwrap()).unwrap();
                assert!(histogram.is_multiple_of(64), "{name}: {histogram:#x}");
                for word in 0..WORDS {
                    let at = annex(histogram + 8 * word);
                    assert!(at >= SIZE && taken.insert(at), "{name}: {site}, word {word}");
                }
                let words = [(0, 7), (64, 1), (SUM, 1 << 40), (MISSED, 2)];
                for (word, value) in words {
                    let at = annex(histogram + 8 * u64::from(word));
                    let at = usize::try_from(at).unwrap();
                    memory.write_obj(value + *site as u64, at).unwrap();
                    let of = expected.entry(u32::try_from(vcpu).unwrap()).or_default();
                    of.push((*site, word, value + *site as u64));
                }
            }
        }
        let end = annex(calls.address) + Calls::SIZE;
        assert!(!taken.iter().any(|at| (annex(calls.address)..end).contains(at)), "{name}");
        let buckets = |vcpu| Buckets { tracer: 3, vcpu, words: expected[&vcpu].clone() };
        let all = Counted { hits: vec![], buckets: (0..2).map(buckets).collect(), callers: vec![] };
        let counters = attachment.counters();
        assert_eq!(counters.take(Some(1)), Counted::default(), "{name}");
        assert_eq!((counters.read(), counters.take(None)), (all.clone(), all), "{name}");
        assert_eq!(counters.take(None), Counted::default(), "{name}");
        counters.clear();
        assert_eq!(counters.read(), Counted::default(), "{name}");
        let since =
            || -> u64 { memory.read_obj(usize::try_from(annex(calls.address)).unwrap()).unwrap() };
        counters.begin_calls([Keeper::Tracer(3)], 4711);
        assert_eq!(since(), 4711, "{name}");
        // What another tracer's calls are since is nothing to this one.
        counters.begin_calls([Keeper::Tracer(1), Keeper::Trigger(3)], 4712);
        assert_eq!(since(), 4711, "{name}");
        let of_trigger = Keeper::Trigger(9);
        counters.open_calls(of_trigger).unwrap();
        counters.begin_calls([of_trigger], 4713);
        let its: usize = annex(counters.calls(of_trigger).unwrap().address).try_into().unwrap();
        assert_eq!((since(), memory.read_obj::<u64>(its).unwrap()), (4711, 4713), "{name}");
        // Programs for all of that can be made.
        let sorted = Sorted { number: 2, bytes: 4, signed: true };
        let (first, tail) = (table(&few[0]), fake.kernel.arch() == Arch::X86_64);
        let tallies = [
            (Point::Entry, Tally::Sort(first, sorted)),
            (Point::Entry, Tally::Begin(first)),
            (Point::Return, Tally::End(Measure::Duration)),
            (if tail { Point::Tail } else { Point::Return }, Tally::End(Measure::Value(8, true))),
        ];
        for (point, tally) in tallies {
            let counts = Some(tally);
            let part = |tracer| Part { tracer, counts, ..Part::default() };
            let duty = |tracer| Duty { point, parts: vec![part(tracer)] };
            assert!(attachment.program(&fake, &fake.kernel, &duty(3)).is_ok(), "{name}: {tally:?}");
            // Whose calls are nowhere.
            let other = attachment.program(&fake, &fake.kernel, &duty(9));
            assert_eq!(other.is_ok(), matches!(tally, Tally::Sort(..)), "{name}: {tally:?}");
        }
        // A call of a tracer that is gone may still be open: nobody gets its histogram.
        attachment.counters().forget(3);
        let next = attachment.tables(&fake.kernel, kind, few).unwrap();
        let found = attachment.counters().find(table_of(&next, few[0]), slide).unwrap();
        let slot = place(&fake, &attachment, found, few[0], 0);
        let histogram: u64 = memory.read_obj(usize::try_from(slot).unwrap()).unwrap();
        assert!(!taken.contains(&annex(histogram)), "{name}");
        let again = attachment.counters().calls(Keeper::Tracer(3));
        assert_eq!(again, Some(calls), "{name}: as programs at returns");
    }
}

// A tracer that sorts would be refused for want of room that one that is gone has.
#[test]
fn histograms_are_inherited_where_there_is_no_room() {
    for name in kernels() {
        let fake = Fake::counting(name);
        let mut attachment = fake.attach();
        let (sites, slide) = (fake.all(), attachment.image().slide);
        let few = &sites[5..60];
        let of = |attachment: &mut Attachment, tracer, few| {
            let tables = attachment.tables(&fake.kernel, (tracer, Kind::Histograms), few)?;
            let table = table_of(&tables, few[0]);
            Ok::<_, TraceError>(attachment.counters().find(table, slide).unwrap())
        };
        let first = of(&mut attachment, 0, few).unwrap();
        attachment.counters().open_calls(Keeper::Tracer(250)).unwrap();
        let fills = |attachment: &mut Attachment, sites: &[usize], tracer| {
            attachment.tables(&fake.kernel, (tracer, Kind::Calls), sites).is_ok()
        };
        // Large pieces, then small ones, until nothing fits.
        let mut tracer = 1;
        for part in [&sites[..], &sites[..sites.len() / 8], few, &few[..1]] {
            while tracer < 240 && fills(&mut attachment, part, tracer) {
                tracer += 1;
            }
        }
        assert!(tracer < 240, "{name}");
        assert!(of(&mut attachment, 250, few).is_err(), "{name}");
        attachment.counters().forget(0);
        assert_eq!(of(&mut attachment, 250, few), Ok(first), "{name}");
        // There is no room for one more histogram.
        attachment.counters().forget(250);
        let more: Vec<usize> = sites[5..61].to_vec();
        assert!(of(&mut attachment, 250, &more).is_err(), "{name}");
    }
}

// Memory of the host that nobody asked for.
#[test]
fn a_guest_without_room_counts_nothing() {
    for name in kernels() {
        let fake = Fake::new(name);
        let mut attachment = fake.attach();
        let sites = fake.all();
        let table = attachment.tables(&fake.kernel, (0, Kind::Calls), &sites);
        assert_eq!(table.unwrap_err(), TraceError::Counters(VCPUS), "{name}");
        assert_eq!(attachment.counters().count_down(0, 1), Err(TraceError::Stops), "{name}");
        assert_eq!(attachment.counters().left(0), None, "{name}");
    }
}
