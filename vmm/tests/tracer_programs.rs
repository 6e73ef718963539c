//! Programs of tracers that come and go, in plain memory that looks like a guest right after `ftrace_init`.

mod fake_guest;

use fake_guest::{Fake, kernels};
use std::collections::BTreeSet;
use vmtrace::tracer::{Duty, Guest};
use vmtrace_trampolines::Point;

// As many may come and go as do: they would use up the numbers, or the room in a guest. One to which another
// place still leads is nobody else's.
#[test]
fn programs_rest_and_are_used_again() {
    for name in kernels() {
        let fake = Fake::new(name);
        let mut attachment = fake.attach();
        let [kept, changing] = [fake.all()[20], fake.all()[21]];
        let stays = attachment.program(&fake, &fake.kernel, &Duty::entry(vec![0])).unwrap();
        attachment.enable(&fake, &fake.kernel, &[(kept, stays)]).unwrap();
        let target = fake.target(kept);
        let mut targets = BTreeSet::new();
        for round in 1..300_u16 {
            let duty = Duty::new(Point::Entry, round.to_le_bytes().to_vec(), &[]);
            let program = attachment.program(&fake, &fake.kernel, &duty).unwrap();
            assert_eq!(attachment.programs()[usize::from(program)], duty, "{name}: {round}");
            assert_eq!(attachment.duties()[usize::from(program)], duty, "{name}: {round}");
            attachment.disable(&fake, &[changing]).unwrap();
            let report = attachment.enable(&fake, &fake.kernel, &[(changing, program)]).unwrap();
            assert_eq!(report.skipped, [], "{name}: {round}");
            attachment.rest_programs(std::iter::empty());
            targets.insert(fake.target(changing));
            // As a relay says that comes behind now and then.
            if round % 3 > 0 {
                attachment.are_taken();
            }
        }
        assert!(!targets.contains(&target), "{name}");
        assert!((5..12).contains(&targets.len()), "{name}: {}", targets.len());
        assert_eq!(attachment.programs()[usize::from(stays)], Duty::entry(vec![0]), "{name}");
        assert_eq!(attachment.release_all(&fake, &fake.kernel).unwrap().sites, 2);
    }
}

// Whoever has changed the place may put our call back there later: its calls would be told as another tracer's.
#[test]
fn a_program_of_a_place_that_was_not_found_as_it_was_left_never_rests() {
    for name in kernels() {
        let fake = Fake::new(name);
        let mut attachment = fake.attach();
        let sites = fake.all()[20..26].to_vec();
        let mut programs = Vec::new();
        for (&site, tracer) in sites.iter().zip(0..) {
            let duty = Duty::entry(vec![tracer]);
            let program = attachment.program(&fake, &fake.kernel, &duty).unwrap();
            attachment.enable(&fake, &fake.kernel, &[(site, program)]).unwrap();
            programs.push(program);
        }
        let place = fake.at(fake.kernel.sites()[sites[0]].location);
        let other: Vec<u8> = fake.bytes(sites[0]).iter().map(|byte| !byte).collect();
        fake.ram().write(place, &other).unwrap();
        assert_eq!(attachment.disable(&fake, &sites).unwrap().foreign, [sites[0]], "{name}");
        attachment.rest_programs(std::iter::empty());
        attachment.are_taken();
        let mut numbers =
            |tracer| attachment.program(&fake, &fake.kernel, &Duty::entry(vec![tracer])).unwrap();
        assert_eq!([numbers(10), numbers(11)], [programs[1], programs[2]], "{name}");
    }
}
