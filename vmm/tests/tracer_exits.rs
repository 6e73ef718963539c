//! Exits of x86-64 functions on plain memory that looks like a guest whose alternatives are patched.

mod fake_guest;

use fake_guest::stops::assert_ends_stop;
use fake_guest::{Fake, MAP, X86};
use vm_memory::Bytes;
use vmtrace::kernel::{Exit, ExitKind};
use vmtrace::tracer::{Attachment, Duty, Guest, SkipReason, annex};
use vmtrace_trampolines::{Field, Last, Point, Read};

const RETURN: [u8; 5] = [0xc3, 0xcc, 0xcc, 0xcc, 0xcc];

/// A jump or a call at `from`, as this opcode has it: where it leads.
fn leads(opcode: u8, from: u64, bytes: &[u8]) -> u64 {
    assert_eq!(bytes[0], opcode, "at {from:#x}: {bytes:02x?}");
    let distance = i32::from_le_bytes(bytes[1..5].try_into().unwrap());
    from.wrapping_add(5).wrapping_add_signed(distance.into())
}

fn jump(from: u64, to: u64) -> [u8; 5] {
    let distance = i32::try_from(to.wrapping_sub(from + 5).cast_signed()).unwrap();
    let [a, b, c, d] = distance.to_le_bytes();
    [0xe9, a, b, c, d]
}

/// As `alternative_instructions` leaves a kernel: returns as they are without a thunk, or by one.
fn patch_alternatives(fake: &Fake, thunk: Option<&str>) {
    if let Some(thunk) = thunk {
        let address = fake.link(thunk);
        fake.write_u64(fake.symbol("x86_return_thunk"), address).unwrap();
    }
    for exit in fake.kernel.exits().unwrap().all() {
        if exit.kind == ExitKind::Return {
            let bytes = thunk.map_or(RETURN, |thunk| jump(exit.address, fake.link(thunk)));
            fake.write(fake.at(exit.address), &bytes).unwrap();
        }
    }
    fake.write(fake.symbol("alternatives_patched"), &1_u32.to_le_bytes()).unwrap();
}

fn programs(fake: &Fake, attachment: &mut Attachment) -> [u16; 3] {
    [Point::Return, Point::Tail, Point::Beyond].map(|point| {
        // Tail calls through pointers have their target, and here the others as well.
        let fields = match point {
            Point::Tail => vec![Field::Stack, Field::Target],
            _ => vec![Field::Stack],
        };
        let duty = Duty::new(point, vec![0], &fields);
        attachment.program(fake, &fake.kernel, &duty).unwrap()
    })
}

/// The return of a function without a site, to whose stub all registers are its caller's.
fn is_beyond(exit: &Exit) -> bool {
    exit.kind == ExitKind::Return && exit.site == Exit::NO_SITE
}

fn plan(exits: &[Exit], [ends, tails, beyond]: [u16; 3]) -> Vec<(usize, u16)> {
    let program = |exit: &Exit| match exit.kind {
        ExitKind::Return if is_beyond(exit) => beyond,
        ExitKind::Return => ends,
        _ => tails,
    };
    exits.iter().enumerate().map(|(index, exit)| (index, program(exit))).collect()
}

/// Code of ours.
fn annex(fake: &Fake, address: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let at = usize::try_from(address - MAP).unwrap();
    annex::Memory::slice(&*fake.annex).read_slice(&mut bytes, at).unwrap();
    bytes
}

/// A held exit leads to a stub that names it or goes on as it did, by a program below, and whose records have `word`.
fn assert_leads_to_its_stub(
    fake: &Fake,
    exit: &Exit,
    word: u32,
    (name, thunk): (&str, Option<&str>),
) {
    let site = fake.read_vec(fake.at(exit.address), 5);
    let stub = leads(0xe9, exit.address, &site);
    let code = annex(fake, stub, 18);
    match exit.kind {
        ExitKind::Return if is_beyond(exit) => {
            // push r10; push r11; call; pop r11; pop r10
            assert_eq!((&code[..4], &code[9..13]), (&b"ARAS"[..], &b"A[AZ"[..]), "{name}");
            assert!(leads(0xe8, stub + 4, &code[4..]) < stub);
            assert_eq!(u64::from(word), (stub + 9) & 0xffff_ffff, "{name}: behind the call");
            let own = thunk.map_or(RETURN, |thunk| jump(stub + 13, fake.link(thunk)));
            assert_eq!(code[13..], own, "{name}");
        }
        ExitKind::Return => {
            let names = u32::from_le_bytes(code[1..5].try_into().unwrap());
            assert_eq!((code[0], u64::from(names)), (0xb9, exit.address & 0xffff_ffff));
            assert_eq!(word, names, "{name}");
            assert!(leads(0xe9, stub + 5, &code[5..]) < stub);
        }
        ExitKind::Jump { target } => {
            assert!(leads(0xe8, stub, &code) < stub);
            assert_eq!(u64::from(word), (stub + 5) & 0xffff_ffff, "{name}: behind the call");
            assert_eq!(leads(0xe9, stub + 5, &code[5..]), target, "{name}");
        }
        ExitKind::Indirect { register, .. } => {
            let copy = [0x49 | register >> 3 << 2, 0x89, 0xc3 | (register & 7) << 3];
            assert_eq!(code[..3], copy, "{name}: mov r11, register {register}");
            assert!(leads(0xe8, stub + 3, &code[3..]) < stub);
            assert_eq!(u64::from(word), (stub + 8) & 0xffff_ffff, "{name}: behind the call");
        }
    }
}

// An exit that goes anywhere but on, or that is not given back, crashes the guest.
#[test]
fn every_exit_goes_through_its_stub_and_is_given_back() {
    let fakes = |name| Fake::both(name).map(|fake| (name, fake));
    for (name, fake) in X86.into_iter().flat_map(fakes) {
        patch_alternatives(&fake, None);
        let before = fake.text();
        let mut attachment = fake.attach();
        attachment.settle(&fake, &fake.kernel).unwrap();
        let exits = fake.kernel.exits().unwrap().all();
        let plan = plan(exits, programs(&fake, &mut attachment));
        let mut words = std::collections::HashSet::new();
        let mut without = 0;
        let stubs = attachment.stubs(&fake, &fake.kernel, &plan).unwrap();
        for word in &stubs {
            match word {
                Some(word) => assert!(words.insert(word.word), "{name}: two exits of one name"),
                None => without += 1,
            }
        }
        let skipped = attachment.enable_exits(&fake, &fake.kernel, &plan).unwrap();
        assert_eq!((skipped, without), (vec![], 0), "{name}");
        assert!(attachment.held_exits() > 50_000, "{name}");
        let held: Vec<usize> = attachment.exits().map(|(index, _)| index).collect();
        for &index in held.iter().step_by(7) {
            assert_leads_to_its_stub(
                &fake,
                &exits[index],
                stubs[index].unwrap().word,
                (name, None),
            );
        }
        // Some, and then the others.
        let some: Vec<usize> = held.iter().copied().step_by(3).collect();
        assert_eq!(attachment.disable_exits(&fake, &some).unwrap().sites, some.len());
        attachment.release_all(&fake, &fake.kernel).unwrap();
        assert!(fake.text() == before, "{name}: the image is not as it was");
    }
}

// A stub is for ever: one that is made at every change would fill the annex.
#[test]
fn stubs_are_made_once() {
    let fake = Fake::new("x86_64-6.12");
    patch_alternatives(&fake, None);
    let mut attachment = fake.attach();
    attachment.settle(&fake, &fake.kernel).unwrap();
    let exits = &fake.kernel.exits().unwrap().all()[..100];
    let plan = plan(exits, programs(&fake, &mut attachment));
    let mut words = Vec::new();
    for round in 0..3 {
        let mut made = Vec::new();
        for &(index, program) in &plan {
            made.push(attachment.stubs(&fake, &fake.kernel, &[(index, program)]).unwrap()[0]);
        }
        assert_eq!(attachment.enable_exits(&fake, &fake.kernel, &plan).unwrap(), [], "{round}");
        let all: Vec<usize> = (0..exits.len()).collect();
        attachment.disable_exits(&fake, &all).unwrap();
        words.push(made);
    }
    assert!(words.windows(2).all(|two| two[0] == two[1]));
}

// A tracer that comes to functions whose exits are held: stubs for both are made while exits still
// lead to those of the first.
#[test]
fn held_exits_change_their_programs() {
    let fake = Fake::new("x86_64-6.12");
    patch_alternatives(&fake, None);
    let mut attachment = fake.attach();
    attachment.settle(&fake, &fake.kernel).unwrap();
    let exits = fake.kernel.exits().unwrap().all();
    let first = programs(&fake, &mut attachment);
    let points =
        [(Point::Return, vec![]), (Point::Tail, vec![Field::Target]), (Point::Beyond, vec![])];
    let both = points.map(|(point, more)| {
        let fields = [vec![Field::Stack], more].concat();
        attachment.program(&fake, &fake.kernel, &Duty::new(point, vec![0, 1], &fields)).unwrap()
    });
    let some = |plan: Vec<(usize, u16)>| -> Vec<_> { plan.into_iter().step_by(11).collect() };
    for plan in [some(plan(exits, first)), some(plan(exits, both)), some(plan(exits, first))] {
        for &(index, program) in &plan {
            let word = attachment.stubs(&fake, &fake.kernel, &[(index, program)]).unwrap()[0];
            assert!(word.is_some(), "{:?}", exits[index]);
        }
        let all: Vec<usize> = plan.iter().map(|&(index, _)| index).collect();
        attachment.disable_exits(&fake, &all).unwrap();
        assert_eq!(attachment.enable_exits(&fake, &fake.kernel, &plan).unwrap(), []);
        for &(index, _) in &plan {
            let exit = &exits[index];
            let stub = leads(0xe9, exit.address, &fake.read_vec(fake.at(exit.address), 5));
            let code = annex(&fake, stub, 16);
            // It goes on as the exit did, not by a stub of ours.
            let on = match exit.kind {
                ExitKind::Return => continue,
                ExitKind::Jump { .. } => leads(0xe9, stub + 5, &code[5..]),
                ExitKind::Indirect { register: 10, .. } => leads(0xe9, stub + 11, &code[11..]),
                ExitKind::Indirect { .. } => leads(0xe9, stub + 8, &code[8..]),
            };
            assert!(on >= fake.link("_text"), "{exit:?} goes on at {on:#x}");
        }
    }
}

// The kernel verifies its returns when it patches its alternatives, and finds them changed.
#[test]
fn exits_wait_for_alternatives() {
    let fake = Fake::new("x86_64-6.12");
    let mut attachment = fake.attach();
    let error = attachment.settle(&fake, &fake.kernel).unwrap_err().to_string();
    assert!(error.contains("not patched yet"), "{error}");
    assert!(!attachment.is_settled());
}

// Made while the guest still patches its alternatives: one that is not what is needed afterwards leaves
// its exit alone, or goes on elsewhere.
#[test]
fn stubs_that_are_made_ahead_are_those_that_are_needed() {
    for (name, thunk) in
        [("x86_64-6.1", None), ("x86_64-6.12", Some("its_return_thunk")), ("x86_64-7", None)]
    {
        let fake = Fake::quiet(name);
        let exits = fake.kernel.exits().unwrap().all();
        let mut attachment = fake.attach();
        let plan = plan(exits, programs(&fake, &mut attachment));
        let ahead = attachment.stubs(&fake, &fake.kernel, &plan).unwrap();
        // What they are to go on by is not known yet.
        let waits = |&&(index, _): &&(usize, u16)| {
            let exit = &exits[index];
            matches!(exit.kind, ExitKind::Indirect { .. }) || is_beyond(exit)
        };
        for (place, word) in plan.iter().zip(&ahead) {
            assert_ne!(word.is_some(), waits(&place), "{name}: {:?}", exits[place.0]);
        }
        patch_alternatives(&fake, thunk);
        attachment.settle(&fake, &fake.kernel).unwrap();
        let rest: Vec<_> = plan.iter().filter(waits).copied().collect();
        assert!(!rest.is_empty() && rest.len() < plan.len() / 10, "{name}: {}", rest.len());
        let made = attachment.stubs(&fake, &fake.kernel, &rest).unwrap();
        assert!(made.iter().all(Option::is_some), "{name}");
        // The same again, and nothing more.
        let all = attachment.stubs(&fake, &fake.kernel, &plan).unwrap();
        assert!(ahead.iter().zip(&all).all(|(a, b)| a.is_none() || a == b), "{name}");
        assert_eq!(attachment.enable_exits(&fake, &fake.kernel, &plan).unwrap(), [], "{name}");
        for (exit, word) in exits.iter().zip(all).step_by(7) {
            assert_leads_to_its_stub(&fake, exit, word.unwrap().word, (name, thunk));
        }
    }
}

// A bare return of ours would reopen what the guest has closed.
#[test]
fn programs_return_by_the_thunk_that_the_guest_has_chosen() {
    for thunk in ["srso_return_thunk", "its_return_thunk"] {
        let fake = Fake::new("x86_64-6.12");
        patch_alternatives(&fake, Some(thunk));
        let mut attachment = fake.attach();
        let early = attachment.program(&fake, &fake.kernel, &Duty::entry(vec![0])).unwrap();
        assert_eq!(early, 0);
        let ending = |fake: &Fake, start: u64| {
            let code = annex(fake, start, 256);
            let at = code.windows(2).position(|pair| pair == [0x5a, 0x58]).unwrap() + 2;
            (start + at as u64, code[at..at + 5].to_vec())
        };
        let (at, bytes) = ending(&fake, MAP);
        assert_eq!(bytes, RETURN, "nothing is decided yet");
        attachment.settle(&fake, &fake.kernel).unwrap();
        assert_eq!(leads(0xe9, at, &ending(&fake, MAP).1), fake.link(thunk), "made before");
        attachment.program(&fake, &fake.kernel, &Duty::entry(vec![1])).unwrap();
        let later = (64..2048).step_by(64).map(|at| MAP + at);
        let later = { later }.find(|&at| annex(&fake, at, 2) == [0x50, 0x52]).unwrap();
        let (at, bytes) = ending(&fake, later);
        assert_eq!(leads(0xe9, at, &bytes), fake.link(thunk), "made after");
        // Returns by that thunk are the kernel's own; others are not.
        let exits = fake.kernel.exits().unwrap().all();
        let [ends, ..] = programs(&fake, &mut attachment);
        let index = exits.iter().position(|exit| exit.kind == ExitKind::Return).unwrap();
        assert!(attachment.stubs(&fake, &fake.kernel, &[(index, ends)]).unwrap()[0].is_some());
        assert_eq!(attachment.enable_exits(&fake, &fake.kernel, &[(index, ends)]).unwrap(), []);
        let other = exits.iter().skip(index + 1).position(|exit| exit.kind == ExitKind::Return);
        let other = index + 1 + other.unwrap();
        let address = exits[other].address;
        fake.write(fake.at(address), &jump(address, fake.link("__x86_return_thunk"))).unwrap();
        assert_eq!(attachment.stubs(&fake, &fake.kernel, &[(other, ends)]).unwrap()[0], None);
        let skipped = attachment.enable_exits(&fake, &fake.kernel, &[(other, ends)]).unwrap();
        assert!(matches!(skipped[0].reason, SkipReason::GuestOwned(_)), "{skipped:?}");
    }
}

// Probes are programs, and copies of them, with a return of their own and one of their reads.
#[test]
fn probes_return_by_the_thunk_that_the_guest_has_chosen() {
    let fake = Fake::new("x86_64-6.12");
    let thunk = "its_return_thunk";
    patch_alternatives(&fake, Some(thunk));
    let mut attachment = fake.attach();
    let read = Read::new(1, &[], Last::Words { offset: 8, words: 1 }).unwrap();
    let duty = Duty::new(Point::Probe, vec![0], &[Field::Failed, Field::Read(read)]);
    let program = attachment.program(&fake, &fake.kernel, &duty).unwrap();
    let probe = |attachment: &mut Attachment, tracepoint| {
        let word = attachment.tracepoint_word(&fake, (tracepoint, ""), program).unwrap();
        (MAP & !0xffff_ffff | u64::from(word.unwrap())) - 4
    };
    let early = [1, 2].map(|tracepoint| probe(&mut attachment, tracepoint));
    let length = usize::try_from(early[1] - early[0]).unwrap();
    let is_return = |_, bytes: &[u8]| bytes == RETURN;
    let leads_there =
        |at, bytes: &[u8]| bytes[0] == 0xe9 && leads(0xe9, at, bytes) == fake.link(thunk);
    let endings = |probe: u64, is_one: &dyn Fn(u64, &[u8]) -> bool| {
        let code = annex(&fake, probe, length);
        (probe..).zip(code.windows(5)).filter(|&(at, bytes)| is_one(at, bytes)).count()
    };
    for probe in early {
        assert_eq!(endings(probe, &is_return), 2, "nothing is decided yet");
    }
    attachment.settle(&fake, &fake.kernel).unwrap();
    let late = probe(&mut attachment, 3);
    for probe in [early[0], early[1], late] {
        assert_eq!((endings(probe, &leads_there), endings(probe, &is_return)), (2, 0));
    }
}

// Where processors mistake one jump through a register for another (ITS), the kernel leaves as they
// are only those of its own that end in the upper half of a cache line: a copy must, too.
#[test]
fn jumps_through_registers_lie_where_the_kernel_has_them() {
    for name in X86 {
        let fake = Fake::new(name);
        patch_alternatives(&fake, None);
        let exits = fake.kernel.exits().unwrap().all();
        let mut jumps = Vec::new();
        for (index, exit) in exits.iter().enumerate() {
            let ExitKind::Indirect { register, len } = exit.kind else { continue };
            let jump = match len {
                5 => vec![0xff, 0xe0 | register, 0xcc],
                _ => vec![0x41, 0xff, 0xe0 | register & 7, 0xcc],
            };
            fake.write(fake.at(exit.address), &jump).unwrap();
            jumps.push((index, jump));
        }
        let mut attachment = fake.attach();
        attachment.settle(&fake, &fake.kernel).unwrap();
        let [_, tails, _] = programs(&fake, &mut attachment);
        let plan: Vec<_> = jumps.iter().map(|(index, _)| (*index, tails)).collect();
        let stubs = attachment.stubs(&fake, &fake.kernel, &plan).unwrap();
        assert!(stubs.iter().all(Option::is_some), "{name}");
        assert_eq!(attachment.enable_exits(&fake, &fake.kernel, &plan).unwrap(), []);
        for (index, jump) in &jumps {
            let exit = &exits[*index];
            let stub = leads(0xe9, exit.address, &fake.read_vec(fake.at(exit.address), 5));
            let code = annex(&fake, stub, 16);
            let at = code.windows(jump.len()).position(|bytes| bytes == jump).unwrap();
            let last = stub + (at + jump.len() - 2) as u64;
            assert_ne!(last & 32, 0, "{name}: {exit:?} goes on at {last:#x}");
        }
        println!("{name}: {} jumps through registers", jumps.len());
        assert!(jumps.len() > 50, "{name}");
    }
}

// What the guest has put there since is its own.
#[test]
fn an_exit_that_the_guest_took_over_is_left_alone() {
    let fake = Fake::new("x86_64-6.12");
    patch_alternatives(&fake, None);
    let mut attachment = fake.attach();
    attachment.settle(&fake, &fake.kernel).unwrap();
    let exits = fake.kernel.exits().unwrap().all();
    let plan = &plan(exits, programs(&fake, &mut attachment))[..10];
    for &(index, program) in plan {
        attachment.stubs(&fake, &fake.kernel, &[(index, program)]).unwrap();
    }
    attachment.enable_exits(&fake, &fake.kernel, plan).unwrap();
    // A kprobe.
    let address = fake.at(exits[3].address);
    fake.write(address, &[0xcc]).unwrap();
    let all: Vec<usize> = (0..10).collect();
    let restored = attachment.disable_exits(&fake, &all).unwrap();
    assert_eq!((restored.sites, restored.foreign), (9, vec![3]));
    assert_eq!(fake.read_vec(address, 1), [0xcc]);
}

// A vCPU that stops for nobody stands there for ever, or takes the exit for something that the guest asks for.
#[test]
fn programs_at_exits_stop_where_they_say() {
    for name in X86 {
        let fake = Fake::counting(name);
        patch_alternatives(&fake, None);
        let mut attachment = fake.attach();
        attachment.settle(&fake, &fake.kernel).unwrap();
        assert_ends_stop(&fake, attachment, name);
    }
}
