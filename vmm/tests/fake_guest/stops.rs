//! Stops of vCPUs in programs where functions are left.

use super::{ANNEX, Fake};
use std::collections::HashSet;
use vm_memory::Bytes;
use vmtrace::kernel::ExitKind;
use vmtrace::tracer::annex::Memory;
use vmtrace::tracer::{Attachment, Duty, Part, Tally};
use vmtrace_trampolines::{Field, Point};

/// A vCPU that stops where a function is left tells which, goes on behind the stop, and stops there never more once
/// tracing has ended. Exits can be held already, of many functions.
pub(crate) fn assert_ends_stop(fake: &Fake, mut attachment: Attachment, name: &str) {
    let exits = fake.kernel.exits().unwrap().all();
    let part = |tracer, fields: &[Field], counts| Part {
        tracer,
        fields: fields.to_vec(),
        counts,
        ..Part::default()
    };
    attachment.stop_by(fake.trap());
    let prepared = exits.iter().enumerate().filter(|(_, exit)| {
        let site = exit.site as usize;
        site < fake.kernel.sites().len() && attachment.is_prepared(&fake.kernel, site)
    });
    let prepared: Vec<_> = prepared.map(|(index, exit)| (index, *exit)).collect();
    let points: HashSet<Point> = [Point::Return, Point::Tail].into();
    let point = |kind: ExitKind| if kind == ExitKind::Return { Point::Return } else { Point::Tail };
    let is_there = |wanted: &&Point| prepared.iter().any(|(_, exit)| point(exit.kind) == **wanted);
    let mut traps = 0;
    for &wanted in points.iter().filter(is_there) {
        let number = 3 + u16::try_from(traps).unwrap();
        attachment.counters().count_down(number, 2).unwrap();
        let stop = Some(Tally::Stop { number, since: None });
        let parts = vec![part(255, &[], stop), part(0, &[Field::Stack], None)];
        let duty = Duty { point: wanted, parts };
        let program = attachment.program(fake, &fake.kernel, &duty).unwrap();
        let held: Vec<(usize, u16)> = prepared
            .iter()
            .filter(|(_, exit)| point(exit.kind) == wanted)
            .map(|&(index, _)| (index, program))
            .take(200)
            .collect();
        let words = attachment.stubs(fake, &fake.kernel, &held).unwrap();
        assert_eq!(attachment.enable_exits(fake, &fake.kernel, &held).unwrap(), [], "{name}");
        traps += 1;
        let own = |at: &u64| attachment.stopped(*at).is_some_and(|it| it.number == number);
        let at = attachment.program_traps().find(own).expect(name);
        let stopped = attachment.stopped(at).unwrap();
        let next = at + fake.trap().len() as u64;
        assert_eq!((stopped.at_end, stopped.next), (true, next), "{name}: {wanted:?}");
        assert_eq!(code(fake, &attachment, at), fake.trap(), "{name}: {wanted:?}");
        // Only the low half of what the register has is known.
        let sites: Vec<usize> = held.iter().map(|&(exit, _)| exits[exit].site as usize).collect();
        for (site, word) in sites.iter().zip(words) {
            let told = 0x7777_0000_0000_0000 | u64::from(word.unwrap().word);
            let mut found =
                |sites: &[usize]| attachment.exit_told(fake, &fake.kernel, sites, told).unwrap();
            assert_eq!(found(&sites), Some(*site), "{name}: {wanted:?}");
            let others: Vec<usize> = sites.iter().copied().filter(|it| it != site).collect();
            assert_eq!(found(&others), None, "{name}: {wanted:?}");
        }
        // The call is over: it cannot be made again.
        assert_eq!(attachment.again(at, sites[0]), None, "{name}: {wanted:?}");
    }
    assert!(traps > 0, "{name}");
    let all: Vec<u64> = attachment.program_traps().collect();
    assert_eq!(all.len(), traps, "{name}");
    attachment.release_all(fake, &fake.kernel).unwrap();
    for at in all {
        assert_ne!(code(fake, &attachment, at), fake.trap(), "{name}: it would stop");
    }
}

/// As many bytes of our code at a run-time address as a trap has.
fn code(fake: &Fake, attachment: &Attachment, address: u64) -> Vec<u8> {
    let place = attachment.image().tables.translate(fake, address).unwrap() - ANNEX;
    let mut bytes = vec![0; fake.trap().len()];
    fake.annex.slice().read_slice(&mut bytes, usize::try_from(place).unwrap()).unwrap();
    bytes
}
