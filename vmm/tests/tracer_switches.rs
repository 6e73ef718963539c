//! Instructions of riscv64 kernels that switch interrupts and preemption, on plain memory that looks
//! like a guest.

mod fake_guest;

use fake_guest::{Fake, RISCV};
use std::collections::{BTreeMap, BTreeSet};
use vmtrace::kernel::preemptirq::{Replaced, Switch, SwitchKind, SwitchSite};
use vmtrace::tracer::{Attachment, Duty, Guest, SkipReason};
use vmtrace_trampolines::{Field, Point};

/// `jr t0`
const JR_T0: u32 = 0x0002_8067;

fn all(fake: &Fake) -> &[SwitchSite] {
    fake.kernel.switches().unwrap().all()
}

fn replaced(site: &SwitchSite) -> (Replaced, Option<u64>) {
    match site.kind {
        SwitchKind::Replaced(replaced, landing) => (replaced, landing),
        other => panic!("{other:?}"),
    }
}

/// All that tell these, with a program.
fn wanted(fake: &Fake, programs: &[(Switch, u16)]) -> Vec<(usize, u16)> {
    let sites = all(fake).iter().enumerate().filter_map(|(index, site)| {
        let own = programs.iter().find(|(switch, _)| *switch == site.kind.switch());
        own.map(|&(_, program)| (index, program))
    });
    sites.collect()
}

fn program(fake: &Fake, attachment: &mut Attachment, fields: &[Field]) -> u16 {
    let duty = Duty::new(Point::Entry, vec![0], fields);
    attachment.program(fake, &fake.kernel, &duty).unwrap()
}

/// Where the `jal` at a run-time address leads, and what it links.
fn jump(fake: &Fake, at: u64) -> Option<(u64, u32)> {
    let word = fake.word(fake.at(at - fake.slide()));
    let bits = |from: u32, count: u32| word >> from & ((1 << count) - 1);
    let distance = bits(21, 10) << 1 | bits(20, 1) << 11 | bits(12, 8) << 12 | bits(31, 1) << 20;
    let distance = i64::from((distance << 11).cast_signed() >> 11);
    (word & 0x7f == 0x6f).then(|| (at.wrapping_add_signed(distance), bits(7, 5)))
}

/// Where `auipc; jr` or `auipc; ld` at a run-time address lead, by the same register.
fn far(fake: &Fake, at: u64) -> (u64, u32, u32) {
    let [first, second] = [0, 4].map(|offset| fake.word(fake.at(at + offset - fake.slide())));
    assert_eq!((first & 0x7f, first >> 7 & 31), (0x17, second >> 15 & 31), "{at:#x}");
    let upper = i64::from((first & !0xfff).cast_signed());
    let to = at.wrapping_add_signed(upper + i64::from(second.cast_signed() >> 20));
    (to, second & 0x7f, first >> 7 & 31)
}

/// The stub that a place leads to: what it begins with, and where the word with its program is.
fn follow(fake: &Fake, site: &SwitchSite) -> (u64, u64) {
    let at = fake.runtime(site.address);
    let (replaced, landing) = replaced(site);
    let (to, link) = jump(fake, at).unwrap_or_else(|| panic!("{at:#x} has no jump"));
    assert_eq!(link, u32::from(replaced.link), "{at:#x}");
    let stub = match landing {
        Some(landing) => {
            assert_eq!(to, fake.runtime(landing), "{at:#x}");
            let (stub, opcode, through) = far(fake, to);
            assert_eq!((opcode, through), (0x67, u32::from(replaced.through)), "{at:#x}");
            stub
        }
        None => to,
    };
    let word = |at: u64| fake.word(fake.at(at - fake.slide()));
    // auipc t3; ld t3; jalr t0, t3
    let call = (0..40).map(|number| stub + 4 * number).find(|&at| word(at) == 0x000e_02e7).unwrap();
    let (program, opcode, register) = far(fake, call - 8);
    assert_eq!((opcode, register), (0x03, 28), "{at:#x}");
    (stub, program)
}

// A place that leads elsewhere crashes the guest; one that does not lead back to what was there is
// never the guest's again.
#[test]
fn each_is_replaced_by_a_jump_to_its_stub_and_given_back() {
    let fakes = |name| Fake::both(name).map(|fake| (name, fake));
    for (name, fake) in RISCV.into_iter().flat_map(fakes) {
        let mut attachment = fake.attach();
        let before = fake.text();
        let first = program(&fake, &mut attachment, &[]);
        let second = program(&fake, &mut attachment, &[Field::Stack]);
        let programs = Switch::ALL.map(|switch| (switch, first));
        let wanted_first = wanted(&fake, &programs);
        let words = attachment.switch_stubs(&fake, &fake.kernel, &wanted_first).unwrap();
        let landed = fake.text();
        let skipped = attachment.enable_switches(&fake, &fake.kernel, &wanted_first).unwrap();
        assert_eq!(
            (&skipped[..], attachment.held_switches()),
            (&[][..], all(&fake).len()),
            "{name}"
        );

        let mut told = BTreeMap::new();
        let (mut stubs, mut direct) = (BTreeMap::new(), 0);
        for (site, word) in all(&fake).iter().zip(&words) {
            let (stub, program) = follow(&fake, site);
            let (replaced, landing) = replaced(site);
            direct += usize::from(landing.is_none());
            assert_eq!(
                *stubs.entry(stub).or_insert(replaced),
                replaced,
                "{name}: one stub for two"
            );
            let switch = site.kind.switch();
            let at = fake.at(program - fake.slide());
            assert_eq!(*told.entry(switch).or_insert((program, at)), (program, at), "{name}");
            // What records say is where the program returns to.
            let word = u64::from(word.unwrap());
            assert!(word.wrapping_sub(stub & 0xffff_ffff) < 160, "{name}: {word:#x} of {stub:#x}");
        }
        println!("{name}: {} stubs, {direct} without a landing", stubs.len());
        assert!(direct > 100, "{name}");
        let target = |switch: Switch| fake.read_u64(told[&switch].1).unwrap();
        let own: BTreeSet<u64> = told.keys().map(|&switch| target(switch)).collect();
        assert_eq!(own.len(), 1, "{name}: one program");

        // Another program for some of the events: the others keep theirs.
        let programs = [(Switch::IrqDisable, second), (Switch::IrqEnable, second)];
        let wanted_second = wanted(&fake, &programs);
        let leave: Vec<usize> = wanted_second.iter().map(|&(site, _)| site).collect();
        let again = attachment.switch_stubs(&fake, &fake.kernel, &wanted_second).unwrap();
        let same = wanted_second.iter().zip(&again).all(|(&(site, _), word)| words[site] == *word);
        assert!(same, "{name}: what records say has changed");
        assert_eq!(attachment.disable_switches(&fake, &leave).unwrap().sites, leave.len());
        let skipped = attachment.enable_switches(&fake, &fake.kernel, &wanted_second).unwrap();
        assert_eq!(skipped, [], "{name}");
        assert_ne!(target(Switch::IrqDisable), *own.first().unwrap(), "{name}");
        assert_eq!(target(Switch::IrqEnable), target(Switch::IrqDisable), "{name}");
        if let Some((_, at)) = told.get(&Switch::PreemptDisable) {
            assert_eq!(fake.read_u64(*at).unwrap(), *own.first().unwrap(), "{name}");
        }

        let every: Vec<usize> = (0..all(&fake).len()).collect();
        let restored = attachment.disable_switches(&fake, &every).unwrap();
        assert_eq!((restored.sites, &restored.foreign[..]), (every.len(), &[][..]), "{name}");
        assert!(fake.text() == landed, "{name}: something is not as it was");
        // Landings are all that stays, and no place had one.
        let start = fake.link("_text");
        let landings: BTreeSet<u64> = all(&fake).iter().filter_map(|it| replaced(it).1).collect();
        let changed = before.iter().zip(&landed).zip(start..).filter(|((a, b), _)| a != b);
        for (_, at) in changed {
            let landing = landings.range(..=at).next_back();
            assert!(landing.is_some_and(|landing| at < landing + 8), "{name}: {at:#x} has changed");
        }
    }
}

// Code that somebody else has changed is somebody else's.
#[test]
fn what_is_not_as_in_the_image_is_left_alone() {
    for name in RISCV {
        let fake = Fake::new(name);
        let mut attachment = fake.attach();
        let sites = all(&fake);
        let other = |at: u64| fake.write(fake.at(at), &0x9002_9002_u32.to_le_bytes()).unwrap();
        // One place, and one landing, of which the others stay.
        let (place, shared) = (sites[10].address, replaced(&sites[20]).1.unwrap());
        other(place);
        other(shared + 4);
        let before = fake.text();
        let own = program(&fake, &mut attachment, &[]);
        let wanted = wanted(&fake, &Switch::ALL.map(|switch| (switch, own)));
        attachment.switch_stubs(&fake, &fake.kernel, &wanted).unwrap();
        let skipped = attachment.enable_switches(&fake, &fake.kernel, &wanted).unwrap();
        let expected: Vec<usize> = (0..sites.len())
            .filter(|&at| at == 10 || replaced(&sites[at]).1 == Some(shared))
            .collect();
        assert_eq!(skipped.iter().map(|&(site, _)| site).collect::<Vec<_>>(), expected, "{name}");
        assert!(skipped.iter().all(|(_, why)| matches!(why, SkipReason::GuestOwned(_))), "{name}");
        assert_eq!(attachment.held_switches() + skipped.len(), sites.len(), "{name}");
        let start = fake.link("_text");
        let after = fake.text();
        for at in expected.iter().map(|&at| sites[at].address).chain([shared]) {
            let at = usize::try_from(at - start).unwrap();
            assert_eq!(after[at..at + 4], before[at..at + 4], "{name}");
        }
        // One that the guest takes later is not written over.
        let taken = sites.len() - 1;
        let (_, word) = follow(&fake, &sites[taken]);
        let leads = || fake.read_u64(fake.at(word - fake.slide())).unwrap();
        assert_ne!(fake.word(fake.at(leads() - fake.slide())), JR_T0, "{name}");
        other(sites[taken].address);
        let every: Vec<usize> = (0..sites.len()).collect();
        let restored = attachment.disable_switches(&fake, &every).unwrap();
        assert_eq!(restored.foreign, [taken], "{name}");
        assert_eq!(fake.word(fake.at(sites[taken].address)), 0x9002_9002, "{name}");
        // Whoever still comes to a stub from there finds nothing: programs may be others' by then.
        let nothing = leads();
        assert_eq!(fake.word(fake.at(nothing - fake.slide())), JR_T0, "{name}");
        let again = program(&fake, &mut attachment, &[Field::Stack]);
        let wanted: Vec<(usize, u16)> = wanted.iter().map(|&(site, _)| (site, again)).collect();
        attachment.switch_stubs(&fake, &fake.kernel, &wanted).unwrap();
        let skipped = attachment.enable_switches(&fake, &fake.kernel, &wanted).unwrap();
        assert_eq!(skipped.len(), expected.len() + 1, "{name}");
        assert_ne!(leads(), nothing, "{name}");
        attachment.release_all(&fake, &fake.kernel).unwrap();
        assert_eq!((leads(), attachment.held_switches()), (nothing, 0), "{name}");
    }
}
