//! Sites of modules, on plain memory with real kernels' images (x86-64): they are found from a
//! `struct module`, held, lent, and given back before their memory is freed.

mod fake_guest;

use fake_guest::module::{CODE, Module};
use fake_guest::{ENABLED, Fake, X86};
use vmtrace::kernel::{Exit, ExitKind, Missing};
use vmtrace::tracer::{Attachment, Duty, Guest, ModuleMoment, SkipReason};
use vmtrace_trampolines::{Field, Point};

const TRAP: [u8; 2] = [0xe6, 0x42];
const NOP: [u8; 5] = [0x0f, 0x1f, 0x44, 0, 0];
/// Functions of the module: where their sites are in its code.
const PLAIN: u64 = 0x14;
/// Two bytes on one page, three on the next.
const ACROSS: u64 = 0xffe;
const INIT: u64 = 0x1ff0;
const SITES: [u64; 3] = [PLAIN, ACROSS, INIT];

fn module(fake: &Fake) -> Module<'_> {
    Module::new(fake, SITES)
}

fn target(module: &Module<'_>, place: u64) -> u64 {
    let [0xe8, a, b, c, d] = module.get(place) else { panic!("no call") };
    (CODE + place + 5).wrapping_add_signed(i32::from_le_bytes([a, b, c, d]).into())
}

fn watched(fake: &Fake) -> (Attachment, Vec<u64>) {
    let mut attachment = fake.attach();
    attachment.share(fake, &fake.kernel, &TRAP).unwrap();
    let traps = attachment.watch_modules(fake, &fake.kernel, &TRAP).unwrap();
    (attachment, traps)
}

// What is written over a page's end, or after a module is gone, is somebody else's memory.
#[test]
fn sites_of_a_module_come_and_go() {
    for fake in X86.into_iter().map(Fake::quiet).chain([Fake::new("x86_64-6.12")]) {
        let module = module(&fake);
        let before = fake.text();
        let (mut attachment, traps) = watched(&fake);
        let own = fake.all()[0];
        fake.enable(&mut attachment, &[own]).unwrap();
        let program = fake.target(own);
        attachment.disable(&fake, &[own]).unwrap();
        let moments = [ModuleMoment::Ready, ModuleMoment::Freed, ModuleMoment::Gone];
        for (&trap, moment) in traps.iter().zip(moments) {
            assert_eq!(attachment.module_moment(trap), Some((moment, trap + 2)));
        }
        let mut numbers = Vec::new();
        for round in 0..3 {
            let loaded = module.load(&mut attachment).unwrap();
            assert_eq!((&*loaded.name, loaded.left_out), ("test_module", 0));
            let names: Vec<_> = loaded.functions.iter().map(|(_, f)| f.names.clone()).collect();
            let expected = [vec!["plain"], vec!["across"], vec!["my_init", "init_module"]];
            assert_eq!(
                names,
                expected.map(|all| all.into_iter().map(Box::from).collect::<Vec<_>>())
            );
            assert_eq!(loaded.functions[0].1.site.entry, CODE + PLAIN - 4);
            let found: Vec<_> = loaded.functions.iter().map(|&(number, _)| number).collect();
            if round > 0 {
                assert_eq!(found, numbers, "the same ones again");
            }
            numbers = found;
            assert!(numbers.iter().all(|&number| attachment.is_of_module(number)));
            let report = fake.enable(&mut attachment, &numbers).unwrap();
            assert_eq!((report.patched, report.skipped), (3, vec![]));
            for place in SITES {
                assert_eq!(target(&module, place), program, "{place:#x}");
            }
            // An update touches one of them, and no other one is to be taken in the middle of it.
            module.set_flags(1, 1);
            assert_eq!(attachment.lend(&fake, &fake.kernel).unwrap().sites, 1);
            let can = numbers.iter().map(|&site| attachment.can_take(&fake.kernel, site));
            assert_eq!(can.collect::<Vec<_>>(), [true, false, true]);
            assert_eq!(module.get(ACROSS), NOP);
            if round < 2 {
                module.set_flags(1, 0);
                let again = attachment.take_again(&fake, &fake.kernel, &TRAP).unwrap();
                assert_eq!(again, (1, vec![]));
                assert_eq!(target(&module, ACROSS), program);
            }
            // Its init functions go, then all of it.
            let range = CODE + INIT..CODE + INIT + 5;
            let (gone, restored) =
                attachment.unload_module(&fake, module.books, Some(range)).unwrap();
            assert_eq!((gone, restored.sites), (numbers[2..].to_vec(), 1));
            assert_eq!(module.get(INIT), NOP);
            let (gone, restored) = attachment.unload_module(&fake, module.books, None).unwrap();
            let held = if round < 2 { 2 } else { 1 };
            assert_eq!((gone, restored.sites), (numbers[..2].to_vec(), held));
            for place in SITES {
                assert_eq!(module.get(place), NOP);
            }
            if round == 2 {
                // The update ends when the module is gone.
                let again = attachment.take_again(&fake, &fake.kernel, &TRAP).unwrap();
                assert_eq!(again, (0, vec![]));
            }
            assert_eq!((attachment.held(), attachment.modules().len()), (0, 0));
            // And never again.
            let report = fake.enable(&mut attachment, &numbers).unwrap();
            assert_eq!((report.patched, module.get(PLAIN)), (0, NOP));
            module.set_flags(1, 0);
        }
        attachment.release_all(&fake, &fake.kernel).unwrap();
        assert!(fake.text() == before, "the image is not as it was");
    }
}

const RETURN: [u8; 5] = [0xc3, 0xcc, 0xcc, 0xcc, 0xcc];
/// Where the functions of a module are left: a jump to a function of the kernel's, a return that goes over
/// the end of a page, and that of the init function.
const JUMP: u64 = PLAIN + 5;
const OVER: u64 = 0xffe;
const INIT_RETURN: u64 = INIT + 5;
const TABLE: u64 = 0x400;

/// With such exits.
fn with_exits(fake: &Fake) -> (Module<'_>, [u8; 5]) {
    with_exits_at(fake, OVER)
}

/// The same, with the return of the second function elsewhere.
fn with_exits_at(fake: &Fake, over: u64) -> (Module<'_>, [u8; 5]) {
    let module = Module::new(fake, [PLAIN, over - 14, INIT]);
    let target = fake.link("vfs_read");
    let distance = i32::try_from(target.wrapping_sub(CODE + JUMP + 5).cast_signed()).unwrap();
    let [a, b, c, d] = distance.to_le_bytes();
    let jump = [0xe9, a, b, c, d];
    module.put(JUMP, &jump);
    module.put(over - 9, &[0x90; 9]);
    module.put(over, &RETURN);
    module.put(over + 5, &[0xcc; 13]);
    module.put(INIT_RETURN, &RETURN);
    module.put(INIT_RETURN + 5, &[0xcc; 6]);
    // One that is none: in the middle of the jump.
    module.returns(TABLE, &[over, INIT_RETURN, JUMP + 2]);
    (module, jump)
}

/// Programs of a return and of a jump.
fn end_programs(fake: &Fake, attachment: &mut Attachment) -> [u16; 2] {
    [Point::Return, Point::Tail].map(|point| {
        let duty = Duty::new(point, vec![0], &[Field::Stack]);
        attachment.program(fake, &fake.kernel, &duty).unwrap()
    })
}

fn settled(fake: &Fake) -> Attachment {
    let (mut attachment, _) = watched(fake);
    fake.write(fake.symbol("alternatives_patched"), &1_u32.to_le_bytes()).unwrap();
    attachment.settle(fake, &fake.kernel).unwrap();
    attachment
}

// What is written over a page's end, or after a module is gone, is somebody else's memory; and an exit that is
// not what it seems to be is the guest's.
#[test]
fn exits_of_a_module_come_and_go() {
    for fake in X86.into_iter().map(Fake::quiet) {
        let (module, jump) = with_exits(&fake);
        let mut attachment = settled(&fake);
        let [ends, jumps] = end_programs(&fake, &mut attachment);
        let own = fake.kernel.exits().unwrap().all().len();
        let (mut indices, mut words) = (Vec::new(), Vec::new());
        for round in 0..3 {
            let loaded = module.load(&mut attachment).unwrap();
            let sites: Vec<_> = loaded.functions.iter().map(|&(number, _)| number).collect();
            let found = attachment.find_module_exits(&fake, &fake.kernel, None).unwrap();
            let [found] = &found[..] else { panic!("{found:?}") };
            assert_eq!((&*found.module, &found.missing), ("test_module", &Ok(vec![])));
            assert_eq!((found.exits.len(), found.left_out), (3, 0));
            assert!(
                attachment.find_module_exits(&fake, &fake.kernel, None).unwrap().is_empty(),
                "once"
            );
            let exits: Vec<_> = attachment.module_exits().map(|(at, exit)| (at, *exit)).collect();
            let target = fake.link("vfs_read");
            let kinds = [ExitKind::Jump { target }, ExitKind::Return, ExitKind::Return];
            let is = |exit: &Exit| (exit.address, exit.kind, exit.site as usize);
            let expected: Vec<_> = [JUMP, OVER, INIT_RETURN]
                .map(|place| CODE + place)
                .into_iter()
                .zip(kinds)
                .zip(&sites)
                .map(|((at, kind), &site)| (at, kind, site))
                .collect();
            assert_eq!(exits.iter().map(|(_, exit)| is(exit)).collect::<Vec<_>>(), expected);
            let numbers: Vec<_> = exits.iter().map(|&(index, _)| index).collect();
            assert!(numbers.iter().all(|&index| index >= own));
            let wanted: Vec<_> = numbers.iter().copied().zip([jumps, ends, ends]).collect();
            let said = attachment.stubs(&fake, &fake.kernel, &wanted).unwrap();
            assert!(said.iter().all(Option::is_some));
            if round > 0 {
                assert_eq!((&numbers, &said), (&indices, &words), "the same ones again");
            }
            (indices, words) = (numbers, said);
            assert_eq!(words[1].unwrap().word, u32::try_from((CODE + OVER) & 0xffff_ffff).unwrap());
            let skipped = attachment.enable_exits(&fake, &fake.kernel, &wanted).unwrap();
            assert_eq!((skipped, attachment.held_exits()), (vec![], 3));
            for place in [JUMP, OVER, INIT_RETURN] {
                let bytes = module.get::<5>(place);
                assert!(bytes[0] == 0xe9 && bytes != jump, "{place:#x}: {bytes:x?}");
            }
            assert_eq!(module.get::<3>(OVER + 5), [0xcc; 3], "not more than that");
            let range = CODE + INIT..CODE + INIT + 16;
            attachment.unload_module(&fake, module.books, Some(range)).unwrap();
            assert_eq!((module.get(INIT_RETURN), attachment.held_exits()), (RETURN, 2));
            assert_eq!(attachment.module_exits().count(), 2);
            if round == 1 {
                // Somebody else has it by now.
                module.put(OVER, &[0xcc]);
            }
            attachment.unload_module(&fake, module.books, None).unwrap();
            let left = module.get::<5>(OVER);
            assert_eq!(left[0], if round == 1 { 0xcc } else { 0xc3 });
            assert_eq!(left == RETURN, round != 1, "{left:x?}");
            module.put(OVER, &RETURN);
            assert_eq!((module.get(JUMP), attachment.held_exits()), (jump, 0));
            assert_eq!(attachment.module_exits().count(), 0);
            let skipped = attachment.enable_exits(&fake, &fake.kernel, &wanted).unwrap();
            assert_eq!((skipped, attachment.held_exits()), (vec![], 0), "never again");
            assert_eq!(module.get(OVER), RETURN);
        }
        // Not a return of the kernel's, and a jump to somewhere else than when it was looked for.
        module.load(&mut attachment).unwrap();
        attachment.find_module_exits(&fake, &fake.kernel, None).unwrap();
        module.put(OVER, &[0xc3, 0xcc, 0xcc, 0xcc, 0x90]);
        module.put(JUMP, &[0xe9, 0, 0, 0, 0]);
        let wanted: Vec<_> = indices.iter().copied().zip([jumps, ends, ends]).collect();
        let skipped = attachment.enable_exits(&fake, &fake.kernel, &wanted).unwrap();
        let skipped: Vec<_> = skipped.iter().map(|skip| (skip.exit, skip.reason)).collect();
        let owned = SkipReason::GuestOwned;
        let expected = [(indices[0], owned("a jump")), (indices[1], owned("other bytes"))];
        assert_eq!(skipped, expected);
        attachment.release_all(&fake, &fake.kernel).unwrap();
        assert_eq!((module.get(INIT_RETURN), attachment.held_exits()), (RETURN, 0));
    }
}

// The list has no alignment: an entry can go over the end of a page, and those behind it count as well.
#[test]
fn lists_of_returns_go_over_pages() {
    const MIDDLE: u64 = 0x800;
    for fake in X86.into_iter().map(Fake::quiet) {
        let (module, _) = with_exits_at(&fake, MIDDLE);
        let mut attachment = settled(&fake);
        for over in 1..4 {
            for before in 0..3 {
                let places = [JUMP + 2, JUMP + 2, JUMP + 2, MIDDLE, INIT_RETURN];
                module.returns(0x1000 - 4 * before - over, &places);
                module.load(&mut attachment).unwrap();
                let found = attachment.find_module_exits(&fake, &fake.kernel, None).unwrap();
                let [found] = &found[..] else { panic!("{found:?}") };
                let missing = found.missing.as_deref();
                assert_eq!((found.exits.len(), missing), (3, Ok(&[][..])), "{before}, {over}");
            }
        }
    }
}

// Without what it takes, entries are all there is, and one knows why.
#[test]
fn modules_without_known_exits_tell_why() {
    let fake = Fake::quiet("x86_64-6.12");
    let (module, _) = with_exits(&fake);
    let mut attachment = settled(&fake);
    let why = |attachment: &mut Attachment| {
        module.load(attachment).unwrap();
        let found = attachment.find_module_exits(&fake, &fake.kernel, None).unwrap();
        assert_eq!(attachment.module_exits().count(), 0);
        found[0].missing.clone().unwrap_err().to_string()
    };
    module.member("sect_attrs", &0_u64.to_le_bytes());
    assert_eq!(why(&mut attachment), "the guest does not say where its sections are");
    module.returns(TABLE, &[OVER]);
    module.set(0x8040, b".return_sitez\0");
    assert_eq!(why(&mut attachment), "it has no list of its returns");
    module.set(0x7000 + module.offset("module_sect_attrs", "nsections"), &[0xff; 4]);
    assert!(why(&mut attachment).contains("more sections"));
    module.member("sect_attrs", &(CODE + 0x10_0000).to_le_bytes());
    assert!(why(&mut attachment).contains("not mapped"));
    module.returns(TABLE, &[OVER]);
    for member in ["num_jump_entries", "num_static_call_sites", "num_exentries"] {
        module.member(member, &[0xff; 4]);
        assert!(why(&mut attachment).contains("longer table"));
        module.member(member, &[0; 4]);
    }
    // Not all returns are in the list.
    module.load(&mut attachment).unwrap();
    let found = attachment.find_module_exits(&fake, &fake.kernel, None).unwrap();
    let missing: Vec<_> = found[0].missing.clone().unwrap();
    assert_eq!(missing.iter().map(|it| it.1).collect::<Vec<_>>(), [Missing::UnlistedReturn]);
    // Looked for when its init functions are gone.
    module.load(&mut attachment).unwrap();
    let range = CODE + INIT..CODE + INIT + 16;
    attachment.unload_module(&fake, module.books, Some(range)).unwrap();
    module.put(INIT, &[0x06; 16]);
    let found = attachment.find_module_exits(&fake, &fake.kernel, None).unwrap();
    assert_eq!((found[0].exits.len(), &found[0].missing), (2, &Ok(vec![])));
}

// The guest's own tracer on a module's function goes on, and what is no site of ours is left alone.
#[test]
fn sites_of_a_module_are_shared() {
    let fake = Fake::new("x86_64-6.12");
    let module = module(&fake);
    let (mut attachment, _) = watched(&fake);
    let caller = fake.link("ftrace_caller");
    let distance = i32::try_from(caller.wrapping_sub(CODE + ACROSS + 5).cast_signed()).unwrap();
    let call = [[0xe8].as_slice(), &distance.to_le_bytes()].concat();
    module.put(ACROSS, &call);
    module.set_flags(1, ENABLED | 1);
    module.put(PLAIN, &[0xcc]);
    let loaded = module.load(&mut attachment).unwrap();
    let numbers: Vec<_> = loaded.functions.iter().map(|&(number, _)| number).collect();
    let report = fake.enable(&mut attachment, &numbers).unwrap();
    let [skip] = report.skipped[..] else { panic!("{:?}", report.skipped) };
    assert_eq!(skip.reason, SkipReason::GuestOwned("a breakpoint"));
    assert_eq!((report.patched, attachment.shared().get(&caller)), (2, Some(&1)));
    assert_ne!(target(&module, ACROSS), caller);
    attachment.unload_module(&fake, module.books, None).unwrap();
    assert_eq!(module.get::<5>(ACROSS), call[..]);
}

// All of it is the guest's word.
#[test]
fn hostile_modules_are_refused() {
    let fake = Fake::quiet("x86_64-6.12");
    let module = module(&fake);
    let (mut attachment, _) = watched(&fake);
    let refused = |attachment: &mut Attachment, why: &str| {
        let error = module.load(attachment).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
        assert_eq!(attachment.modules().len(), 0);
        module.write();
    };
    module.member("name", &[0; 56]);
    refused(&mut attachment, "no name");
    module.member("num_ftrace_callsites", &u32::MAX.to_le_bytes());
    refused(&mut attachment, "more sites");
    for member in ["ftrace_callsites", "kallsyms"] {
        module.member(member, &(CODE + 0x10_0000).to_le_bytes());
        refused(&mut attachment, "not mapped");
    }
    module.set(0x1000 + module.offset("mod_kallsyms", "num_symtab"), &u32::MAX.to_le_bytes());
    refused(&mut attachment, "more symbols");
    // Sites where nothing is mapped, or without a name.
    module.set(0x4000, &(CODE + 0x10_0000).to_le_bytes());
    module.set(0x4008, &(CODE + 0x40).to_le_bytes());
    let loaded = module.load(&mut attachment).unwrap();
    assert_eq!((loaded.functions.len(), loaded.left_out), (1, 2));
    // It comes again without having gone.
    module.write();
    assert_eq!(module.load(&mut attachment).unwrap().functions.len(), 3);
    assert_eq!(attachment.modules().len(), 1);
    // Any bytes, the same in each run.
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    let mut good = 0;
    for round in 0..2000 {
        module.write();
        for _ in 0..1 + next(3) {
            let place = 0x1000 * next(7);
            let at = place + next(if place == 0 { 1400 } else { 144 });
            module.set(at, &next(256).to_le_bytes()[..1]);
        }
        module.returns(TABLE, &[PLAIN + 5]);
        for _ in 0..next(3) {
            module.set(0x7000 + next(0x400), &next(256).to_le_bytes()[..1]);
        }
        if let Ok(loaded) = module.load(&mut attachment) {
            good += 1;
            let _ = attachment.find_module_exits(&fake, &fake.kernel, None);
            let _ = attachment.find_module_switches(&fake, &fake.kernel, false).unwrap();
            let numbers: Vec<_> = loaded.functions.iter().map(|&(number, _)| number).collect();
            // An endless list of records is an error of its own. They are many: not each time.
            if round % 40 == 0 {
                let _ = fake.enable(&mut attachment, &numbers);
            }
        }
        let start = next(u64::MAX);
        let _ = attachment.unload_module(&fake, module.books, Some(start..start.wrapping_add(9)));
        attachment.unload_module(&fake, module.books, None).unwrap();
        assert_eq!(attachment.held(), 0);
    }
    assert!(good > 500, "{good}");
}

// A jump to where the guest stops for its modules is one that a function is left by: it is not the
// guest's, and what lies over it has to go first.
#[test]
fn jumps_that_lead_through_stops_can_be_traced() {
    let mut met = 0;
    for name in X86.into_iter().chain(["x86_64-6.12-rt"]) {
        let fake = Fake::new(name);
        let before = fake.text();
        let (mut attachment, _) = watched(&fake);
        let stops: Vec<u64> = ["do_init_module", "ftrace_free_mem", "ftrace_release_mod"]
            .map(|it| fake.link(it))
            .into();
        let to_stops =
            |exit: &Exit| matches!(exit.kind, ExitKind::Jump { target } if stops.contains(&target));
        let exits = fake.kernel.exits().unwrap().all();
        let exits: Vec<usize> = (0..exits.len()).filter(|&at| to_stops(&exits[at])).collect();
        met += exits.len();
        fake.write(fake.symbol("alternatives_patched"), &1_u32.to_le_bytes()).unwrap();
        attachment.settle(&fake, &fake.kernel).unwrap();
        let duty = Duty::new(Point::Tail, vec![0], &[]);
        let program = attachment.program(&fake, &fake.kernel, &duty).unwrap();
        let wanted: Vec<_> = exits.iter().map(|&exit| (exit, program)).collect();
        let words = attachment.stubs(&fake, &fake.kernel, &wanted).unwrap();
        assert!(words.iter().all(Option::is_some), "{name}");
        let skipped = attachment.enable_exits(&fake, &fake.kernel, &wanted).unwrap();
        assert_eq!(skipped, [], "{name}");
        assert_eq!(attachment.held_exits(), exits.len(), "{name}");
        attachment.release_all(&fake, &fake.kernel).unwrap();
        fake.write(fake.symbol("alternatives_patched"), &0_u32.to_le_bytes()).unwrap();
        assert!(fake.text() == before, "{name}: the image is not as it was");
    }
    assert!(met > 0, "no kernel has such a jump: nothing was tested");
}
