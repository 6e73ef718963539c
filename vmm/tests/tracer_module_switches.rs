//! What of modules of x86-64 kernels switches interrupts and preemption, on plain memory: it is found
//! in the module's code, leads to stubs, and is given back before that memory is freed.

mod fake_guest;

use fake_guest::module::{CODE, Module};
use fake_guest::{Fake, X86};
use std::collections::BTreeMap;
use vmtrace::kernel::preemptirq::SwitchKind;
use vmtrace::tracer::{Attachment, Duty, FoundSwitches, Guest, SkipReason};
use vmtrace_trampolines::Point;

const TRAP: [u8; 2] = [0xe6, 0x42];
const NOP: [u8; 5] = [0x0f, 0x1f, 0x44, 0, 0];
/// Functions of the module: where their sites are in its code.
const PLAIN: u64 = 0x14;
const ACROSS: u64 = 0xfee;
const INIT: u64 = 0x1ff0;
/// In the first: `inc` and `dec` of the count of preemptions.
const MORE: u64 = PLAIN + 5;
/// In the init function, which is freed: `sti` and a nop.
const FREED: u64 = INIT + 5;
/// The longest instruction.
const SIZE: usize = 8;

/// Run-time offset of the count of preemptions from the gs base, and whether it is a wide one.
fn count(fake: &Fake) -> (u64, bool) {
    let symbols = fake.kernel.symbols();
    let runtime = |at: u64| if at >> 63 == 0 { at } else { fake.runtime(at) };
    let count = match symbols.address("pcpu_hot") {
        Some(hot) => {
            let btf = fake.kernel.btf().unwrap();
            let member = btf.member_offset("pcpu_hot", "preempt_count").unwrap();
            runtime(hot) + u64::from(member)
        }
        None => runtime(symbols.address("__preempt_count").unwrap()),
    };
    let all = fake.kernel.switches().unwrap().all();
    (count, all.iter().any(|it| matches!(it.kind, SwitchKind::Count { wide: true, .. })))
}

/// A module whose second function has `cli`, `sti` at this place, with what it has in all: where,
/// the kind, and the bytes.
fn module(fake: &Fake, flags: u64) -> (Module<'_>, Vec<(u64, SwitchKind, Vec<u8>)>) {
    let module = Module::new(fake, [PLAIN, ACROSS, INIT]);
    let (count, wide) = count(fake);
    let counted = |at: u64, add: i32| {
        let begins: &[u8] = if wide { &[0x65, 0x48, 0xff] } else { &[0x65, 0xff] };
        let begins = [begins, if add > 0 { &[0x05] } else { &[0x0d] }].concat();
        let next = CODE + at + u64::try_from(begins.len()).unwrap() + 4;
        let distance = count.wrapping_sub(next).to_le_bytes();
        (at, SwitchKind::Count { add, wide }, [&begins[..], &distance[..4]].concat())
    };
    let flag = |at: u64, kind: SwitchKind| {
        let opcode: &[u8] = if kind == SwitchKind::Cli { &[0xfa] } else { &[0xfb] };
        (at, kind, [opcode, &NOP].concat())
    };
    let more = counted(MORE, 1);
    let less = counted(MORE + u64::try_from(more.2.len()).unwrap(), -1);
    let flags = [flag(flags, SwitchKind::Cli), flag(flags + 6, SwitchKind::Sti)];
    let [cli, sti] = flags;
    let all = vec![more, less, cli, sti, flag(FREED, SwitchKind::Sti)];
    for (start, end) in [(PLAIN + 5, PLAIN + 28), (ACROSS + 5, ACROSS + 32), (FREED, 0x2000)] {
        (start..end).for_each(|at| module.put(at, &[0x90]));
    }
    all.iter().for_each(|(at, _, bytes)| module.put(*at, bytes));
    (module, all)
}

fn settled(fake: &Fake) -> Attachment {
    let mut attachment = fake.attach();
    attachment.share(fake, &fake.kernel, &TRAP).unwrap();
    attachment.watch_modules(fake, &fake.kernel, &TRAP).unwrap();
    fake.write(fake.symbol("alternatives_patched"), &1_u32.to_le_bytes()).unwrap();
    attachment.settle(fake, &fake.kernel).unwrap();
    attachment
}

/// Those of modules, with a program.
fn wanted(attachment: &Attachment, program: u16) -> Vec<(usize, u16)> {
    attachment.module_switches().map(|(index, _)| (index, program)).collect()
}

fn program(fake: &Fake, attachment: &mut Attachment) -> u16 {
    attachment.program(fake, &fake.kernel, &Duty::new(Point::Entry, vec![0], &[])).unwrap()
}

/// As they are while they are ours: only five bytes of each have changed, into a jump to our code.
fn are_held(module: &Module<'_>, all: &[(u64, SwitchKind, Vec<u8>)]) {
    for (at, kind, bytes) in all {
        let now = module.get::<SIZE>(*at);
        let start = usize::from(matches!(kind, SwitchKind::Cli | SwitchKind::Sti));
        assert_eq!(now[..start], bytes[..start], "{at:#x}");
        let [0xe9, a, b, c, d, ..] = now[start..] else { panic!("{at:#x}: {now:x?}") };
        let next = CODE + at + u64::try_from(start).unwrap() + 5;
        let stub = next.wrapping_add_signed(i32::from_le_bytes([a, b, c, d]).into());
        assert!((0xffff_ffff_8000_0000..0xffff_ffff_8020_0000).contains(&stub), "{stub:#x}");
        assert_eq!(now[start + 5..bytes.len()], bytes[start + 5..], "{at:#x}");
    }
}

fn are_own(module: &Module<'_>, all: &[(u64, SwitchKind, Vec<u8>)]) -> bool {
    all.iter().all(|(at, _, bytes)| module.get::<SIZE>(*at)[..bytes.len()] == bytes[..])
}

// What is written over a page's end, or after a module is gone, is somebody else's memory; and what is
// not as it was is the guest's.
#[test]
fn what_a_module_switches_is_held_and_given_back() {
    let moved = |name| {
        let fake = Fake::quiet(name);
        fake.move_by(0x0140_0000);
        fake
    };
    let fakes = X86.into_iter().map(Fake::quiet).chain(X86.into_iter().map(moved));
    for (number, fake) in fakes.enumerate() {
        // The nop goes over a page's end, begins on the next page, or is on one.
        let flags = [0xffd, 0xfff, 0xff4][number % 3];
        let (module, all) = module(&fake, flags);
        let mut attachment = settled(&fake);
        let own = program(&fake, &mut attachment);
        let first = fake.kernel.switches().unwrap().all().len();
        let mut before = None;
        for round in 0..3 {
            module.load(&mut attachment).unwrap();
            let found = attachment.find_module_switches(&fake, &fake.kernel, false).unwrap();
            let [found] = &found[..] else { panic!("{found:?}") };
            assert_eq!((&*found.module, &found.unusable), ("test_module", &Ok(BTreeMap::new())));
            assert_eq!(found.places, all.len(), "{flags:#x}");
            let again = attachment.find_module_switches(&fake, &fake.kernel, false).unwrap();
            assert!(again.is_empty(), "once");
            let is: Vec<_> = attachment.module_switches().map(|(_, it)| *it).collect();
            let is: Vec<_> =
                is.iter().map(|it| (fake.runtime(it.address) - CODE, it.kind)).collect();
            assert_eq!(is, all.iter().map(|(at, kind, _)| (*at, *kind)).collect::<Vec<_>>());
            let wanted = wanted(&attachment, own);
            assert!(wanted.iter().all(|&(index, _)| index >= first));
            let words = attachment.switch_stubs(&fake, &fake.kernel, &wanted).unwrap();
            assert!(words.iter().all(Option::is_some));
            let both = Some((wanted.clone(), words));
            assert!(round == 0 || before == both, "the same ones again");
            before = both;
            let skipped = attachment.enable_switches(&fake, &fake.kernel, &wanted).unwrap();
            assert_eq!((skipped, attachment.held_switches()), (vec![], all.len()));
            are_held(&module, &all);
            let name = attachment.modules_of_switches();
            assert_eq!(name.len(), all.len());
            assert!(wanted.iter().all(|(index, _)| **name[index] == *"test_module"));
            let range = CODE + INIT..CODE + INIT + 16;
            attachment.unload_module(&fake, module.books, Some(range)).unwrap();
            assert!(are_own(&module, &all[4..]));
            assert_eq!(attachment.held_switches(), all.len() - 1);
            if round == 1 {
                // Somebody else has it by now.
                module.put(MORE, &[0xcc]);
            }
            attachment.unload_module(&fake, module.books, None).unwrap();
            assert_eq!(module.get::<1>(MORE)[0], if round == 1 { 0xcc } else { 0x65 });
            module.put(MORE, &all[0].2);
            assert!(are_own(&module, &all), "{round}");
            assert_eq!((attachment.held_switches(), attachment.module_switches().count()), (0, 0));
            let skipped = attachment.enable_switches(&fake, &fake.kernel, &wanted).unwrap();
            assert_eq!((skipped, attachment.held_switches()), (vec![], 0), "never again");
        }
        // Another instruction than when it was looked for.
        module.load(&mut attachment).unwrap();
        attachment.find_module_switches(&fake, &fake.kernel, false).unwrap();
        module.put(MORE, &[0xcc]);
        module.put(flags + 3, &[0x45]);
        let wanted = wanted(&attachment, own);
        let skipped = attachment.enable_switches(&fake, &fake.kernel, &wanted).unwrap();
        let expected = [(wanted[0].0, "a breakpoint"), (wanted[2].0, "other bytes")]
            .map(|(index, what)| (index, SkipReason::GuestOwned(what)));
        assert_eq!(skipped, expected);
        attachment.release_all(&fake, &fake.kernel).unwrap();
        assert!(are_own(&module, &all[3..]));
        assert_eq!(attachment.held_switches(), 0);
    }
}

// A guest that loads modules at ever other places, or whose modules are nothing but such
// instructions, must not take all room.
#[test]
fn stubs_of_modules_have_a_room_of_their_own() {
    let fake = Fake::quiet("x86_64-6.12");
    let (module, _) = module(&fake, 0xff4);
    let mut attachment = settled(&fake);
    module.load(&mut attachment).unwrap();
    attachment.find_module_switches(&fake, &fake.kernel, false).unwrap();
    // Each program needs stubs of its own.
    let mut programs = (0..64).flat_map(|a| (a + 1..64).map(move |b| vec![a, b]));
    let full = programs.find_map(|tracers| {
        let duty = Duty::new(Point::Entry, tracers, &[]);
        let own = attachment.program(&fake, &fake.kernel, &duty).unwrap();
        let wanted = wanted(&attachment, own);
        let words = attachment.switch_stubs(&fake, &fake.kernel, &wanted).unwrap();
        words.iter().any(Option::is_none).then_some((own, wanted))
    });
    let (own, wanted) = full.expect("there is room for any number");
    let skipped = attachment.enable_switches(&fake, &fake.kernel, &wanted).unwrap();
    assert!(skipped.iter().all(|&(_, why)| why == SkipReason::NoStub), "{skipped:?}");
    assert!(!skipped.is_empty() && attachment.held_switches() == wanted.len() - skipped.len());
    // Others have room.
    let all = fake.kernel.switches().unwrap().all().len();
    let wanted: Vec<_> = (0..all).map(|index| (index, own)).collect();
    let words = attachment.switch_stubs(&fake, &fake.kernel, &wanted).unwrap();
    assert!(words.iter().all(Option::is_some));
}

// Else nothing at all can be traced any more, the kernel's own switches included.
#[test]
fn modules_have_what_room_the_kernel_leaves() {
    const LAST: usize = 3;
    let subject = || {
        let fake = Fake::quiet("x86_64-6.12");
        let mut attachment = settled(&fake);
        let programs = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9].map(|tracer| {
            let duty = Duty::new(Point::Entry, vec![tracer], &[]);
            attachment.program(&fake, &fake.kernel, &duty).unwrap()
        });
        (fake, attachment, programs)
    };
    // For so many of the kernel's there is room.
    let (fake, mut attachment, programs) = subject();
    let all = fake.kernel.switches().unwrap().all().len();
    let places: Vec<_> = programs.iter().flat_map(|&it| (0..all).map(move |at| (at, it))).collect();
    let mut put = |places: &[_]| attachment.switch_stubs(&fake, &fake.kernel, places).is_ok();
    let whole = places.chunks(all).take_while(|&places| put(places)).count() * all;
    let room = whole + places[whole..].iter().take_while(|&&place| put(&[place])).count();
    assert!((LAST..places.len()).contains(&room), "{room}");

    let (fake, mut attachment, programs) = subject();
    let (module, _) = module(&fake, 0xff4);
    module.load(&mut attachment).unwrap();
    attachment.find_module_switches(&fake, &fake.kernel, false).unwrap();
    let (first, last) = places[..room].split_at(room - LAST);
    attachment.switch_stubs(&fake, &fake.kernel, first).unwrap();
    let mut wanted = wanted(&attachment, programs[0]);
    let of_modules = wanted.len();
    wanted.extend(last);
    let words = attachment.switch_stubs(&fake, &fake.kernel, &wanted).unwrap();
    let (modules, kernels) = words.split_at(of_modules);
    assert!(kernels.iter().all(Option::is_some), "{words:x?}");
    assert!(modules.iter().any(Option::is_none), "{words:x?}");
    wanted.truncate(of_modules);
    let skipped = attachment.enable_switches(&fake, &fake.kernel, &wanted).unwrap();
    let without = modules.iter().filter(|word| word.is_none()).count();
    assert_eq!(skipped.len(), without);
    assert!(skipped.iter().all(|&(_, why)| why == SkipReason::NoStub), "{skipped:?}");
}

const RETURN: [u8; 5] = [0xc3, 0xcc, 0xcc, 0xcc, 0xcc];

// What is found in our own jumps, or behind half an instruction that we have left, is not what is there.
#[test]
fn what_is_ours_does_not_hide_what_a_module_has() {
    for name in X86 {
        let subject = || {
            let fake = Fake::quiet(name);
            let mut attachment = settled(&fake);
            let (module, _) = module(&fake, 0xff4);
            let returns = [PLAIN + 23, 0x1006, INIT + 11];
            returns.iter().for_each(|&at| module.put(at, &RETURN));
            module.returns(0x800, &returns);
            module.load(&mut attachment).unwrap();
            (fake, attachment)
        };
        let exits = |(fake, attachment): &mut (Fake, Attachment)| {
            let found = attachment.find_module_exits(fake, &fake.kernel, None).unwrap();
            let [found] = &found[..] else { panic!("{found:?}") };
            (found.exits.clone(), found.missing.clone())
        };
        let switches = |(fake, attachment): &mut (Fake, Attachment)| {
            attachment.find_module_switches(fake, &fake.kernel, false).unwrap();
            attachment.module_switches().map(|(at, site)| (at, *site)).collect::<Vec<_>>()
        };
        let (mut first, mut second) = (subject(), subject());
        let both = (exits(&mut first), switches(&mut second));
        assert_eq!((both.0.0.len(), &both.0.1, both.1.len()), (3, &Ok(vec![]), 5));
        // Switches are ours when exits are looked for.
        let (fake, attachment) = &mut second;
        let own = program(fake, attachment);
        let all = wanted(attachment, own);
        attachment.switch_stubs(fake, &fake.kernel, &all).unwrap();
        assert_eq!(attachment.enable_switches(fake, &fake.kernel, &all).unwrap(), []);
        assert_eq!(exits(&mut second), both.0, "{name}");
        // The other way round.
        let (fake, attachment) = &mut first;
        let end = Duty::new(Point::Return, vec![0], &[]);
        let end = attachment.program(fake, &fake.kernel, &end).unwrap();
        let all: Vec<_> = both.0.0.iter().map(|&(index, _)| (index, end)).collect();
        attachment.stubs(fake, &fake.kernel, &all).unwrap();
        assert_eq!(attachment.enable_exits(fake, &fake.kernel, &all).unwrap(), []);
        assert_eq!(switches(&mut first), both.1, "{name}");
    }
}

// A kprobe, or a jump label that the kernel is about to write, is gone a while later.
#[test]
fn what_could_not_be_seen_is_looked_for_again() {
    let fake = Fake::quiet("x86_64-6.12");
    let (module, all) = module(&fake, 0xff4);
    let mut attachment = settled(&fake);
    let look = |attachment: &mut Attachment, again| {
        attachment.find_module_switches(&fake, &fake.kernel, again).unwrap()
    };
    let told = |found: &[FoundSwitches]| {
        let [found] = found else { panic!("{found:?}") };
        (found.places, found.unusable.is_ok(), found.torn)
    };
    module.put(ACROSS + 5, &[0xcc]);
    module.load(&mut attachment).unwrap();
    assert_eq!(told(&look(&mut attachment, false)), (3, true, 1));
    assert_eq!(look(&mut attachment, false), [], "the guest waits");
    // What is there already is ours by now, and stays so.
    let own = program(&fake, &mut attachment);
    let before = wanted(&attachment, own);
    attachment.switch_stubs(&fake, &fake.kernel, &before).unwrap();
    assert_eq!(attachment.enable_switches(&fake, &fake.kernel, &before).unwrap(), []);
    assert_eq!(told(&look(&mut attachment, true)), (3, true, 1));
    module.put(ACROSS + 5, &[0x90]);
    module.member("num_jump_entries", &[0xff; 4]);
    assert_eq!(told(&look(&mut attachment, true)), (3, false, 0));
    module.member("num_jump_entries", &[0; 4]);
    assert_eq!(told(&look(&mut attachment, true)), (all.len(), true, 0));
    assert_eq!(look(&mut attachment, true), [], "it is all there");
    let after = wanted(&attachment, own);
    assert!(before.iter().all(|place| after.contains(place)), "{before:?} {after:?}");
    attachment.unload_module(&fake, module.books, None).unwrap();
    assert!(are_own(&module, &all));
}
