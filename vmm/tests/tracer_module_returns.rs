//! Exits of modules of riscv64 kernels, on plain memory: rewritten while nothing of the module has
//! run, switched by one word each, and never written again.

mod fake_guest;

use fake_guest::module::{CODE, Module};
use fake_guest::{Fake, RISCV};
use vm_memory::Bytes;
use vmtrace::kernel::FtraceKind;
use vmtrace::kernel::Missing;
use vmtrace::tracer::{Attachment, Duty, ExitPlan, Fresh, ModuleCoverage, annex};
use vmtrace_trampolines::riscv64::encode::register::{RA, T1};
use vmtrace_trampolines::riscv64::encode::{NOP, jal, jr};
use vmtrace_trampolines::{Field, Point};

const TRAP: [u8; 8] = [0xb7, 0xd8, 0x76, 0x09, 0x73, 0, 0, 0];
/// Functions: one with a plain and a short exit, one that has room for a landing (which goes over the
/// end of a page), and the init function.
const PLAIN: u64 = 0x20;
const ROOMY: u64 = 0xfe8;
const INIT: u64 = 0x1ff0;
/// Where what is freed begins.
const FREED: u64 = 0x1800;
/// `ld ra, 8(sp); ld s0, 0(sp); addi sp, sp, 16; ret`
const EPILOGUE: [u8; 8] = [0xa2, 0x60, 0x02, 0x64, 0x41, 0x01, 0x82, 0x80];
/// Returns, in order.
const RETURNS: [u64; 4] = [PLAIN + 16, PLAIN + 20, ROOMY + 26, INIT + 14];

fn front(fake: &Fake) -> u64 {
    if fake.kernel.ftrace_kind() == FtraceKind::CallOps { 8 } else { 0 }
}

/// As a module that was just loaded.
fn module(fake: &Fake) -> Module<'_> {
    let module = Module::new(fake, [PLAIN, ROOMY, INIT].map(|entry| entry - front(fake)));
    write(fake, &module);
    module
}

fn write(fake: &Fake, module: &Module<'_>) {
    module.write();
    // `beqz a0` to the short one: `li a0, 0; ret`.
    module.put(PLAIN + 8, &[0x09, 0xc5]);
    module.put(PLAIN + 10, &EPILOGUE);
    module.put(PLAIN + 18, &[0x01, 0x45, 0x82, 0x80]);
    for place in (PLAIN + 22..PLAIN + 32).chain(ROOMY + 28..ROOMY + 32).step_by(2) {
        module.put(place, &[0, 0]);
    }
    for place in (ROOMY + 8..ROOMY + 20).step_by(2) {
        module.put(place, &[0x01, 0x00]);
    }
    module.put(ROOMY + 20, &EPILOGUE);
    module.put(INIT + 8, &EPILOGUE);
    let stride = u64::from(fake.kernel.btf().unwrap().struct_size("module_memory").unwrap());
    let first = module.offset("module", "mem");
    for (kind, start, end) in [(0, 0, FREED), (4, FREED, 0x2000)] {
        let at = first + kind * stride;
        let base = module.address() + start;
        module.set(at + module.offset("module_memory", "base"), &base.to_le_bytes());
        let len = u32::try_from(end - start).unwrap();
        module.set(at + module.offset("module_memory", "size"), &len.to_le_bytes());
    }
    module.set(setter(module), &[0; 8]);
    for member in ["num_bugs", "num_jump_entries", "num_exentries"] {
        module.member(member, &0_u32.to_le_bytes());
    }
}

/// Who holds the lock of its parameters.
fn setter(module: &Module<'_>) -> u64 {
    module.offset("module", "param_lock") + module.offset("mutex", "owner")
}

fn watched(fake: &Fake) -> Attachment {
    let mut attachment =
        fake.try_attach_with(&ExitPlan::new(&fake.kernel, &[], true).unwrap()).unwrap();
    attachment.share(fake, &fake.kernel, &TRAP).unwrap();
    attachment.watch_modules(fake, &fake.kernel, &TRAP).unwrap();
    attachment
}

/// Sites of the module, and what was found of the exits of those of them that are asked for.
fn load(
    fake: &Fake,
    module: &Module<'_>,
    attachment: &mut Attachment,
    asked: impl Fn(usize) -> bool,
) -> (Vec<usize>, ModuleCoverage) {
    let loaded = module.load(attachment).unwrap();
    let sites: Vec<_> = loaded.functions.iter().map(|&(site, _)| site).collect();
    let wanted: Vec<_> =
        (0..).zip(&sites).filter(|&(at, _)| asked(at)).map(|(_, &site)| site).collect();
    let fresh = Fresh { address: module.books, sites: &wanted, words: Some(&[]) };
    let mut found = attachment.find_module_exits(fake, &fake.kernel, Some(fresh)).unwrap();
    (sites, found.pop().unwrap())
}

/// Where the jump of two instructions leads that some bytes at an address are.
fn far(at: u64, bytes: [u8; 8]) -> u64 {
    let word = u64::from_le_bytes(bytes);
    let (first, second) =
        (u32::try_from(word & 0xffff_ffff).unwrap(), u32::try_from(word >> 32).unwrap());
    let register = first >> 7 & 31;
    assert_eq!((first & 0x7f, second & 0xfff, second >> 15 & 31), (0x17, 0x67, register));
    assert!(![1, 5].contains(&register), "a return-stack hint");
    let upper = i64::from((first & !0xfff).cast_signed());
    at.wrapping_add_signed(upper + i64::from(second.cast_signed() >> 20))
}

/// Offset in the annex' code of the stub that the jump at a place of the module leads to, by way of
/// the gap.
fn stub(fake: &Fake, module: &Module<'_>, place: u64) -> u64 {
    let (relay, stub) = way(fake, module, place);
    assert!((fake.link("_etext")..fake.link("__init_begin")).contains(&relay), "{relay:#x}");
    stub - area(fake)
}

/// Run-time addresses of the relay and of the stub that the jump at a place of the module leads to.
fn way(fake: &Fake, module: &Module<'_>, place: u64) -> (u64, u64) {
    let relay = far(module.address() + place, module.get(place));
    (relay, far(relay, fake.read_vec(fake.at(relay), 8).try_into().unwrap()))
}

/// Run-time address of the stubs.
fn area(fake: &Fake) -> u64 {
    fake.link("_end").next_multiple_of(2 << 20) - (2 << 20) + annex::SIZE
}

fn in_stub<const N: usize>(fake: &Fake, offset: u64) -> [u8; N] {
    let mut bytes = [0; N];
    let offset = usize::try_from(offset).unwrap();
    annex::Memory::slice(&*fake.annex).read_slice(&mut bytes, offset).unwrap();
    bytes
}

fn word(fake: &Fake, offset: u64) -> u32 {
    u32::from_le_bytes(in_stub(fake, offset))
}

/// All of the module's code.
fn text(module: &Module<'_>) -> Vec<u8> {
    (0..0x2000).step_by(16).flat_map(|at| module.get::<16>(at)).collect()
}

fn program(fake: &Fake, attachment: &mut Attachment) -> u16 {
    let duty = Duty::new(Point::Return, vec![0], &[Field::Stack]);
    attachment.program(fake, &fake.kernel, &duty).unwrap()
}

// A window that leads anywhere but to what it displaced crashes the guest; so does one that is
// changed when somebody may stand in it, or when its memory is somebody else's.
#[test]
fn exits_of_a_module_are_rewritten_once() {
    for fake in RISCV.into_iter().flat_map(Fake::both) {
        let module = module(&fake);
        let mut attachment = watched(&fake);
        let ends = program(&fake, &mut attachment);
        let mut before = None;
        for round in 0..3 {
            write(&fake, &module);
            let (sites, found) = load(&fake, &module, &mut attachment, |_| true);
            assert_eq!((&found.missing, found.left_out), (&Ok(vec![]), 0));
            let is: Vec<_> = found
                .exits
                .iter()
                .map(|(_, exit)| (exit.address - CODE, exit.function - CODE, exit.site as usize))
                .collect();
            let expected = RETURNS
                .into_iter()
                .zip([PLAIN, PLAIN, ROOMY, INIT])
                .zip([0, 0, 1, 2].map(|at| sites[at]));
            assert_eq!(is, expected.map(|((a, b), c)| (a, b, c)).collect::<Vec<_>>());
            assert!(sites.iter().all(|&site| attachment.is_prepared(&fake.kernel, site)));

            // The short exit by a landing behind the roomy one's jump.
            let jump = u32::from_le_bytes(module.get(PLAIN + 18));
            let landing = ROOMY + 20;
            assert_eq!(
                jump,
                jal(vmtrace_trampolines::riscv64::encode::register::ZERO, {
                    i32::try_from(landing - (PLAIN + 18)).unwrap()
                })
            );
            let ways = [PLAIN + 10, landing, ROOMY + 12, INIT + 8];
            let stubs = ways.map(|place| stub(&fake, &module, place));
            let nop = [0x01, 0x00];
            let roomy = [&nop[..], &nop, &nop, &nop, &EPILOGUE[..6]].concat();
            let displaced = [&EPILOGUE[..6], &[0x01, 0x45], &roomy, &EPILOGUE[..6]];
            let mut slots = Vec::new();
            for ((&stub, displaced), ret) in stubs.iter().zip(displaced).zip(RETURNS) {
                let held = in_stub::<16>(&fake, stub);
                assert_eq!(held[..displaced.len()], *displaced, "{ret:#x}");
                let slot = stub + displaced.len().next_multiple_of(4) as u64;
                assert_eq!([0, 4].map(|at| word(&fake, slot + at)), [NOP, jr(RA)]);
                let name = u32::try_from((CODE + ret) & 0xffff_ffff).unwrap();
                assert_eq!(word(&fake, slot + 8), name);
                slots.push(slot);
            }
            // What comes again is as it was.
            let known = before.get_or_insert((found.exits.clone(), stubs));
            assert_eq!(*known, (found.exits.clone(), stubs), "{round}");

            let rewritten = text(&module);
            let wanted: Vec<_> = found.exits.iter().map(|&(number, _)| (number, ends)).collect();
            let said = attachment.stubs(&fake, &fake.kernel, &wanted).unwrap();
            let said: Vec<_> = said.into_iter().map(|exit| exit.unwrap().word).collect();
            assert_eq!(said, slots.iter().map(|at| word(&fake, at + 8)).collect::<Vec<_>>());
            assert_eq!(attachment.enable_exits(&fake, &fake.kernel, &wanted).unwrap(), []);
            assert!(slots.iter().all(|&at| word(&fake, at) & 0xfff == jal(T1, 0)));
            assert!(text(&module) == rewritten, "only slots change");

            // Its init functions go, then all of it, and others have the memory.
            let range = CODE + FREED..CODE + 0x2000;
            attachment.unload_module(&fake, module.books, Some(range)).unwrap();
            assert_eq!((attachment.held_exits(), word(&fake, slots[3])), (3, NOP));
            attachment.unload_module(&fake, module.books, None).unwrap();
            assert_eq!(attachment.held_exits(), 0);
            assert!(slots.iter().all(|&at| word(&fake, at) == NOP));
            for place in ways {
                module.put(place, &[0x5a; 8]);
            }
            let gone = text(&module);
            attachment.enable_exits(&fake, &fake.kernel, &wanted).unwrap();
            assert_eq!((attachment.held_exits(), text(&module) == gone), (0, true));
        }
        // Another module at the same place: contexts may still stand in the stubs of the first.
        write(&fake, &module);
        module.put(INIT + 8, &[0x01, 0x00]);
        load(&fake, &module, &mut attachment, |_| true);
        let (_, stubs) = before.unwrap();
        assert_eq!(stub(&fake, &module, PLAIN + 10), stubs[0]);
        let other = stub(&fake, &module, INIT + 8);
        assert!(!stubs.contains(&other), "{other:#x} in {stubs:x?}");
        assert_eq!(in_stub::<8>(&fake, stubs[3])[..6], EPILOGUE[..6]);
        // It is there when tracing ends, and stays as it is.
        let rewritten = text(&module);
        attachment.release_all(&fake, &fake.kernel).unwrap();
        for place in [PLAIN + 10, ROOMY + 12, ROOMY + 20, INIT + 8] {
            let at = usize::try_from(place).unwrap();
            assert_eq!(module.get::<8>(place), rewritten[at..at + 8]);
        }
    }
}

// Who asks later, when contexts may stand anywhere, gets entries only, and is told so.
#[test]
fn exits_are_rewritten_for_those_who_ask_in_time() {
    for fake in RISCV.into_iter().map(Fake::quiet) {
        let module = module(&fake);
        let mut attachment = watched(&fake);
        let before = text(&module);
        let loaded = module.load(&mut attachment).unwrap();
        let prepared = text(&module);
        let found = attachment.find_module_exits(&fake, &fake.kernel, None).unwrap();
        assert_eq!((found.len(), attachment.module_exits().count()), (0, 0));
        assert!(text(&module) == prepared, "nothing but sites");
        let is_prepared =
            |attachment: &Attachment, site| attachment.is_prepared(&fake.kernel, site);
        assert!(!loaded.functions.iter().any(|&(site, _)| is_prepared(&attachment, site)));

        write(&fake, &module);
        assert!(text(&module) == before);
        // The roomy one lends room, and is not asked for.
        let (sites, found) = load(&fake, &module, &mut attachment, |at| at == 0);
        assert_eq!(found.exits.len(), 2);
        let prepared = sites.iter().map(|&site| is_prepared(&attachment, site));
        assert_eq!(prepared.collect::<Vec<_>>(), [true, false, false]);
        assert_eq!(module.get(INIT + 8), EPILOGUE);
        stub(&fake, &module, ROOMY + 12);
        attachment.unload_module(&fake, module.books, None).unwrap();
        assert!(!is_prepared(&attachment, sites[0]));
    }
}

// What cannot be followed, or is not what it seems to be, keeps its code: a branch into a window, a
// probe of the guest's that may hide one, code that depends on its place.
#[test]
fn what_is_not_understood_stays_as_it_is() {
    for fake in RISCV.into_iter().map(Fake::quiet) {
        let module = module(&fake);
        let mut attachment = watched(&fake);
        let mut missing = |change: &dyn Fn(), asked: usize| {
            write(&fake, &module);
            change();
            let (sites, found) = load(&fake, &module, &mut attachment, |at| at == asked);
            let missing = found.missing.clone().unwrap();
            missing.into_iter().filter(|it| it.0 == sites[asked]).map(|it| it.1).collect::<Vec<_>>()
        };
        // `beqz a0` to the last but one: two instructions are left, for a landing that is not in reach.
        let put = || module.put(INIT + 8, &[0x11, 0xc1, 0x02, 0x64, 0x41, 0x01, 0x82, 0x80]);
        assert_eq!(missing(&put, 2), [Missing::NoRoom]);
        assert_eq!(module.get::<4>(INIT + 12), EPILOGUE[4..]);
        // A breakpoint that no table names.
        assert_eq!(
            missing(&|| module.put(INIT + 8, &[0x02, 0x90]), 2),
            [Missing::IndirectJump],
            "hidden by a probe"
        );
        assert_eq!(module.get::<6>(INIT + 10), EPILOGUE[2..], "no room for a jump of two bytes");
        // `auipc a0, 0; ret`: what it makes is out of reach of a stub.
        let near = [0x17, 0x05, 0, 0, 0x82, 0x80];
        let put = || {
            module.put(INIT + 8, &near);
            module.put(INIT + 14, &[0, 0]);
        };
        assert_eq!(missing(&put, 2), [Missing::NoRoom]);
        assert_eq!(module.get(INIT + 8), near);
        // It jumps back for ever.
        let put = || module.put(INIT + 8, &[0x6f, 0xf0, 0x9f, 0xff, 0, 0, 0, 0]);
        assert_eq!(missing(&put, 2), [Missing::NoReturn]);
    }
}

// Everything that a module says of itself may be wrong.
#[test]
fn absurd_modules_are_left_alone() {
    for fake in RISCV.into_iter().map(Fake::quiet) {
        let module = module(&fake);
        let mut attachment = watched(&fake);
        let first = module.offset("module", "mem");
        let mut why = |change: &dyn Fn()| {
            write(&fake, &module);
            change();
            let (_, found) = load(&fake, &module, &mut attachment, |_| true);
            assert_eq!((found.exits.len(), module.get(INIT + 8)), (0, EPILOGUE));
            found.missing.unwrap_err().to_string()
        };
        let size = first + module.offset("module_memory", "size");
        let base = first + module.offset("module_memory", "base");
        let more = "it has more code than a module can have";
        assert_eq!(why(&|| module.set(size, &u32::MAX.to_le_bytes())), more);
        assert!(why(&|| module.set(size, &0x3000_u32.to_le_bytes())).contains("not mapped"));
        assert!(why(&|| module.set(base, &u64::MAX.to_le_bytes())).len() > 4);
        assert!(why(&|| module.member("num_bugs", &[0xff; 4])).contains("longer table"));
        assert!(why(&|| module.set(size, &0x1802_u32.to_le_bytes())).contains("not apart"));
        // Whose context may stand in one of its functions.
        let held = why(&|| module.set(setter(&module), &0x1001_u64.to_le_bytes()));
        assert!(held.contains("sets a parameter"), "{held}");
        let odd = why(&|| {
            module.set(base, &(CODE + 1).to_le_bytes());
            module.set(size, &0x1000_u32.to_le_bytes());
        });
        assert!(odd.contains("odd place"), "{odd}");
    }
}

/// As often as that other modules come in which there is no more room for what was there before.
const MANY: u32 = 60;
/// Returns of its first function.
const FIRST: usize = 240;
/// Of the functions that differ: where their windows are, and their returns.
const DIFFERENT: [(u64, u64); 2] = [(ROOMY + 20, ROOMY + 26), (INIT + 8, INIT + 14)];

/// Another module is loaded, at one of 256 addresses, with all of its returns: what its windows displace
/// says which it is. Offsets of the stubs of the last two; `None` for one that is left alone.
fn load_another(
    fake: &Fake,
    module: &Module<'_>,
    attachment: &mut Attachment,
    (number, address): (u32, u64),
    words: Option<&[u64]>,
) -> [Option<u64>; 2] {
    module.comes_at(address);
    write(fake, module);
    write_init(module, number);
    let end = [&lui(number)[..], &[0x01, 0x00, 0x82, 0x80]].concat();
    module.put(ROOMY + 20, &end);
    let ends = end.repeat(FIRST);
    module.put(PLAIN + 8, &ends);
    module.is_plain(8 + ends.len() as u64);
    let loaded = module.load(attachment).unwrap();
    let sites: Vec<_> = loaded.functions.iter().map(|&(site, _)| site).collect();
    let fresh = Fresh { address: module.books, sites: &sites, words };
    let found = attachment.find_module_exits(fake, &fake.kernel, Some(fresh)).unwrap();
    let wanted: Vec<_> = found[0].exits.iter().map(|&(exit, _)| (exit, 0)).collect();
    assert_eq!(wanted.len(), FIRST + DIFFERENT.len());
    let said = attachment.stubs(fake, &fake.kernel, &wanted).unwrap();
    let skipped = attachment.enable_exits(fake, &fake.kernel, &wanted).unwrap();
    let untold = said.iter().filter(|said| said.is_none()).count();
    assert_eq!((skipped.len(), attachment.held_exits()), (untold, wanted.len() - untold));
    let mut stubs = said.iter().skip(FIRST).zip(DIFFERENT).map(|(said, (window, ret))| {
        let Some(said) = said else {
            assert_eq!(module.get(window), lui(number), "left as it was");
            return None;
        };
        let name = u32::try_from((module.address() + ret) & 0xffff_ffff).unwrap();
        let at = stub(fake, module, window);
        assert_eq!((said.word, in_stub(fake, at)), (name, lui(number)), "another one's stub");
        Some(at)
    });
    [stubs.next().unwrap(), stubs.next().unwrap()]
}

/// All of what [`load_another`] has loaded goes.
fn unload(fake: &Fake, module: &Module<'_>, attachment: &mut Attachment) {
    attachment.unload_module(fake, module.books, None).unwrap();
    assert_eq!(attachment.held_exits(), 0);
}

/// Other modules come, with these numbers, each at another address than the one before it, and go.
fn come_and_go(
    fake: &Fake,
    module: &Module<'_>,
    attachment: &mut Attachment,
    numbers: std::ops::Range<u32>,
    words: &[u64],
) {
    for number in numbers {
        let address = u64::from(number % 200);
        let stubs = load_another(fake, module, attachment, (number, address), Some(words));
        assert!(stubs.iter().all(Option::is_some), "{number}: no room");
        unload(fake, module, attachment);
        module.is_freed(number % 2 == 0);
    }
}

// 200 modules of 4.8 KB of stubs each. Stubs that are never free run out: modules that come and go would lose their returns. One that is
// given to two modules would run the code of one in the other.
#[test]
fn stubs_of_what_is_gone_are_used_again() {
    for fake in RISCV.into_iter().map(Fake::quiet) {
        let module = module(&fake);
        let mut attachment = watched(&fake);
        assert_eq!(program(&fake, &mut attachment), 0);
        come_and_go(&fake, &module, &mut attachment, 0..200, &[]);
    }
}

// A stub that is written while its code may run, or while a vCPU stands in it or in a program that it
// has called, sends that vCPU anywhere. What has no room is left alone.
#[test]
fn stubs_that_may_run_are_not_written() {
    let fake = Fake::quiet("riscv64-7");
    let module = module(&fake);
    let mut attachment = watched(&fake);
    assert_eq!(program(&fake, &mut attachment), 0);
    // It is not known where vCPUs stand: that ends.
    let mut first = Vec::new();
    let mut number = 0;
    loop {
        let at = (number, u64::from(number % 200));
        let stubs = load_another(&fake, &module, &mut attachment, at, None);
        let [Some(roomy), Some(init)] = stubs else { break };
        if number < 3 {
            first.push((way(&fake, &module, INIT + 8).0, [roomy, init]));
        }
        unload(&fake, &module, &mut attachment);
        module.is_freed(false);
        number += 1;
        assert!(number < MANY, "it has no end");
    }
    assert!(number > 10, "{number}");
    unload(&fake, &module, &mut attachment);
    let holds = |stub: u64, number: u32| in_stub(&fake, stub) == lui(number);
    assert!((0..).zip(&first).all(|(it, (_, stubs))| stubs.iter().all(|&at| holds(at, it))));

    // One vCPU stands in a program that a stub has called, one in a relay, one in a stub's last
    // instruction.
    let [(_, [called, _]), (relay, [_, behind]), (_, [_, last])] = first[..] else { panic!() };
    let words = [area(&fake) + called + 12, relay + 4, area(&fake) + last + 12];
    let mut next = number + 1;
    let mut others = |attachment: &mut Attachment, words: &[u64]| {
        come_and_go(&fake, &module, attachment, next..next + MANY, words);
        next += MANY;
    };
    others(&mut attachment, &words);
    let are_held = || [holds(called, 0), holds(behind, 1), holds(last, 2)];
    assert_eq!(are_held(), [true; 3]);
    assert!(!holds(first[0].1[1], 0) && !holds(first[1].1[0], 1), "the others");
    others(&mut attachment, &[]);
    assert_eq!(are_held(), [false; 3]);

    // A module goes, and the kernel has not freed it yet.
    let going = (900_000, 250);
    let stubs = load_another(&fake, &module, &mut attachment, going, Some(&[]));
    unload(&fake, &module, &mut attachment);
    let are_held = || stubs.map(|stub| holds(stub.unwrap(), going.0));
    others(&mut attachment, &[]);
    assert_eq!(are_held(), [true; 2]);
    module.comes_at(going.1);
    module.is_freed(true);
    others(&mut attachment, &[]);
    assert_eq!(are_held(), [false; 2]);
}

// What somebody else has written over a stub may be in use: its place is nobody's from then on.
#[test]
fn stubs_that_others_changed_are_not_used_again() {
    let fake = Fake::quiet("riscv64-6.12");
    let module = module(&fake);
    let mut attachment = watched(&fake);
    assert_eq!(program(&fake, &mut attachment), 0);
    let load = |attachment: &mut Attachment, number| {
        let stubs = load_another(&fake, &module, attachment, (number, 7), Some(&[]));
        unload(&fake, &module, attachment);
        stubs.map(Option::unwrap)
    };
    let stubs = load(&mut attachment, 0);
    assert_eq!(load(&mut attachment, 0), stubs, "the same again");
    let change = |stub: u64| {
        let at = usize::try_from(stub).unwrap();
        annex::Memory::slice(&*fake.annex).write_slice(&[0x5a; 4], at).unwrap();
    };
    change(stubs[1]);
    let again = load(&mut attachment, 0);
    assert_eq!(again[0], stubs[0]);
    assert_ne!(again[1], stubs[1]);
    // Now one that would be another's.
    change(again[1]);
    module.is_freed(false);
    come_and_go(&fake, &module, &mut attachment, 1..MANY, &[]);
    assert_eq!([stubs[1], again[1]].map(|stub| in_stub(&fake, stub)), [[0x5a; 4]; 2]);
}

fn lui(number: u32) -> [u8; 4] {
    (0x537 | (number + 1) << 12).to_le_bytes()
}

fn write_init(module: &Module<'_>, number: u32) {
    module.put(INIT + 8, &lui(number));
    module.put(INIT + 12, &[0x01, 0x00, 0x82, 0x80]);
}
