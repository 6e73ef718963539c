//! Exits of riscv64 functions on plain memory that looks like a guest.

mod fake_guest;

use fake_guest::riscv64::code_entry;
use fake_guest::stops::assert_ends_stop;
use fake_guest::{ANNEX, Fake, RISCV};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use vm_memory::Bytes;
use vmtrace::kernel::epilogues::{Plan, PlannedExit};
use vmtrace::tracer::{Attachment, Duty, Guest, SkipReason, annex};
use vmtrace_trampolines::riscv64::encode::register::{RA, T1};
use vmtrace_trampolines::riscv64::encode::{jal, jr};
use vmtrace_trampolines::{Field, Point};

/// Run-time address of the annex' code, which is mapped behind its data.
fn code(fake: &Fake) -> u64 {
    fake.link("_end").next_multiple_of(2 << 20) - (2 << 20) + annex::SIZE
}

/// A word of the annex' code.
fn word(fake: &Fake, offset: u64) -> u32 {
    let offset = usize::try_from(offset).unwrap();
    annex::Memory::slice(&*fake.annex).read_obj(offset).unwrap()
}

fn all_code(fake: &Fake) -> Vec<u8> {
    let mut bytes = vec![0; 2 << 20];
    annex::Memory::slice(&*fake.annex).read_slice(&mut bytes, 0).unwrap();
    bytes
}

fn plan(fake: &Fake, sites: &[usize]) -> Plan {
    fake.kernel.epilogues().unwrap().plan(sites)
}

/// A program that ends functions, for this tracer.
fn program(fake: &Fake, attachment: &mut Attachment, tracer: u8) -> u16 {
    let duty = Duty::new(Point::Return, vec![tracer], &[Field::Stack]);
    attachment.program(fake, &fake.kernel, &duty).unwrap()
}

/// Exits (indices) of these functions.
fn exits(fake: &Fake, sites: &[usize]) -> Vec<usize> {
    let sites: HashSet<u32> = sites.iter().map(|&site| u32::try_from(site).unwrap()).collect();
    let all = fake.kernel.exits().unwrap().all().iter().enumerate();
    all.filter(|(_, exit)| sites.contains(&exit.site)).map(|(index, _)| index).collect()
}

fn with(exits: &[usize], program: u16) -> Vec<(usize, u16)> {
    exits.iter().map(|&exit| (exit, program)).collect()
}

fn functions(fake: &Fake, glob: &str) -> Vec<usize> {
    fake.kernel.select(&[glob.to_owned()], &[]).unwrap()
}

/// Where the far jump at a link address leads.
fn far(fake: &Fake, at: u64) -> Option<u64> {
    let [first, second] = [0, 4].map(|offset| fake.word(fake.at(at + offset)));
    let register = first >> 7 & 31;
    let through = second & 0x7f == 0x67 && second >> 15 & 31 == register;
    if first & 0x7f != 0x17 || !through || second >> 7 & 31 != 0 {
        return None;
    }
    assert!(![1, 5].contains(&register), "a return-stack hint");
    let upper = i64::from((first & !0xfff).cast_signed());
    Some(at.wrapping_add_signed(upper + i64::from(second.cast_signed() >> 20)))
}

/// Offset in the code of a planned exit's slot: by the way that the guest takes.
fn slot(fake: &Fake, exit: &PlannedExit) -> u64 {
    let last = exit.jumps.last().unwrap().at;
    far(fake, last).unwrap() - code(fake) + exit.slot_offset() as u64
}

// Contexts stand anywhere in rewritten text: it may change once, and then one word of each stub.
#[test]
fn every_exit_is_rewritten_once_and_switched_by_its_slot() {
    let fakes = |name| Fake::both(name).map(|fake| (name, fake));
    for (name, fake) in RISCV.into_iter().flat_map(fakes) {
        let all: Vec<usize> = (0..fake.kernel.sites().len()).collect();
        let plan = plan(&fake, &all);
        let before = fake.text();
        let mut attachment = fake.try_attach_for(&all).unwrap();
        assert!(attachment.is_settled(), "exits can be held from the beginning");
        let pte = fake.read_u64(code_entry(&fake)).unwrap();
        assert_eq!((pte >> 10 << 12, pte & 0x3ff), (ANNEX, 0x6b), "r-x, global, accessed");

        // What is rewritten, and nothing else.
        let mut written = BTreeMap::new();
        for exit in &plan.exits {
            let stub = slot(&fake, exit) - exit.slot_offset() as u64 + code(&fake);
            assert_eq!(stub % 4, 0);
            written.extend(exit.writes(stub).unwrap());
        }
        let rewritten = fake.text();
        let start = fake.link("_text");
        let mut expected = before;
        for (at, bytes) in &written {
            let at = usize::try_from(at - start).unwrap();
            expected[at..at + bytes.len()].copy_from_slice(bytes);
        }
        let sites = fake.kernel.sites();
        for site in sites {
            // First instructions of calls.
            let at = usize::try_from(site.entry - start).unwrap();
            expected[at..at + 8].copy_from_slice(&rewritten[at..at + 8]);
        }
        assert!(rewritten == expected, "{name}: something else has changed");

        let held = exits(&fake, &all);
        let exits = fake.kernel.exits().unwrap().all();
        let wanted = with(&held, program(&fake, &mut attachment, 0));
        let mut words = HashSet::new();
        for exit in attachment.stubs(&fake, &fake.kernel, &wanted).unwrap() {
            assert!(words.insert(exit.unwrap().word), "{name}: two exits of one name");
        }
        let off = all_code(&fake);
        assert_eq!(attachment.enable_exits(&fake, &fake.kernel, &wanted).unwrap(), []);
        assert_eq!(attachment.held_exits(), exits.len());
        let target = plan.exits.iter().map(|exit| {
            let at = slot(&fake, exit);
            let call = word(&fake, at);
            assert_eq!(call & 0xfff, jal(T1, 0), "{name}: a call by t1");
            assert_eq!(word(&fake, at + 4), jr(RA));
            assert!(words.contains(&word(&fake, at + 8)));
            let bits = |from: u32, count: u32| call >> from & ((1 << count) - 1);
            let distance =
                bits(21, 10) << 1 | bits(20, 1) << 11 | bits(12, 8) << 12 | bits(31, 1) << 20;
            at.wrapping_add_signed(i64::from((distance << 11).cast_signed() >> 11))
        });
        let targets: BTreeSet<u64> = target.collect();
        assert_eq!(targets.len(), 1, "{name}: one program");
        let program = word(&fake, *targets.first().unwrap());
        assert_eq!(program & 0x707f, 0x2003, "{name}: lw of the CPU number");

        // Some, and then the others: the text never changes again.
        let some: Vec<usize> = held.iter().copied().step_by(3).collect();
        assert_eq!(attachment.disable_exits(&fake, &some).unwrap().sites, some.len());
        assert_eq!(attachment.held_exits(), exits.len() - some.len());
        assert!(attachment.release_all(&fake, &fake.kernel).unwrap().foreign.is_empty());
        assert!(all_code(&fake) == off, "{name}: a slot is not as it was");
        for (&at, bytes) in &written {
            assert_eq!(&fake.read_vec(fake.at(at), bytes.len()), bytes, "{name}: {at:#x}");
        }
    }
}

// Slots are all that differs, whichever program: a torn word would crash the guest.
#[test]
fn held_exits_change_their_programs_by_one_word() {
    let fake = Fake::new("riscv64-7");
    let sites = functions(&fake, "vfs_*");
    let plan = plan(&fake, &sites);
    let mut attachment = fake.try_attach_for(&sites).unwrap();
    let exits = exits(&fake, &sites);
    let programs = [0, 1].map(|tracer| program(&fake, &mut attachment, tracer));
    let slots: BTreeSet<usize> = plan
        .exits
        .iter()
        .flat_map(|exit| (0..4).map(|byte| usize::try_from(slot(&fake, exit)).unwrap() + byte))
        .collect();
    let mut held = Vec::new();
    for program in [0, 1, 0].map(|n| programs[n]) {
        attachment.disable_exits(&fake, &exits).unwrap();
        let (text, before) = (fake.text(), all_code(&fake));
        let wanted = with(&exits, program);
        assert_eq!(attachment.enable_exits(&fake, &fake.kernel, &wanted).unwrap(), []);
        let after = all_code(&fake);
        for at in (0..before.len()).filter(|&at| before[at] != after[at]) {
            assert!(slots.contains(&at), "{at:#x} is no slot");
        }
        assert!(fake.text() == text, "the text has changed");
        held.push(after);
    }
    assert!(held[0] == held[2] && held[0] != held[1]);
}

// Only what the run may ask for costs anything, and is known before it is asked for.
#[test]
fn functions_that_were_not_named_are_not_prepared() {
    let name = "riscv64-7";
    let fake = Fake::new(name);
    let mut attachment = fake.attach();
    assert_eq!(fake.read_u64(code_entry(&fake)).unwrap(), 0, "nothing asked for, no code");
    let [read, write] = ["vfs_read", "vfs_write"].map(|name| functions(&fake, name)[0]);
    assert!(!attachment.is_prepared(&fake.kernel, read));
    let duty = Duty::new(Point::Return, vec![0], &[Field::Stack]);
    let error = attachment.program(&fake, &fake.kernel, &duty).unwrap_err().to_string();
    assert!(error.contains("no place for another program"), "{error}");

    let fake = Fake::new(name);
    let mut attachment = fake.try_attach_for(&[read]).unwrap();
    assert!(attachment.is_prepared(&fake.kernel, read));
    assert!(!attachment.is_prepared(&fake.kernel, write));
    let program = program(&fake, &mut attachment, 0);
    let other = exits(&fake, &[write]);
    let made = attachment.stubs(&fake, &fake.kernel, &[(other[0], program)]).unwrap();
    assert_eq!(made, [None]);
    let wanted = with(&other, program);
    let skipped = attachment.enable_exits(&fake, &fake.kernel, &wanted).unwrap();
    assert_eq!(skipped.len(), other.len());
    assert!(skipped.iter().all(|skip| skip.reason == SkipReason::NoStub));
}

// A window that the guest has changed is its own, and with it all that is woven into it.
#[test]
fn exits_that_are_not_the_images_are_left_alone_with_those_that_share_their_bytes() {
    for name in RISCV {
        let fake = Fake::new(name);
        let all: Vec<usize> = (0..fake.kernel.sites().len()).collect();
        let plan = plan(&fake, &all);
        // One that jumps into another's window, that other, and one for itself.
        let guest = plan.exits.iter().find(|exit| exit.jumps.len() > 1).unwrap();
        let landing = guest.jumps[1].at;
        let host = plan.exits.partition_point(|exit| exit.epilogue.start <= landing) - 1;
        let host = &plan.exits[host];
        let alone = plan.exits.iter().find(|exit| exit.jumps.len() == 1 && exit.lent == 0);
        let alone = alone.unwrap();
        let foreign = [host.epilogue.start, alone.epilogue.start].map(|link| fake.at(link));
        for at in foreign {
            fake.write(at, &[0x02, 0x90]).unwrap();
        }
        let bytes = |exit: &PlannedExit| {
            fake.read_vec(fake.at(exit.epilogue.start), exit.epilogue.len.into())
        };
        let before = [guest, host, alone].map(bytes);
        let mut attachment = fake.try_attach_for(&all).unwrap();
        assert_eq!([guest, host, alone].map(bytes), before, "{name}: written all the same");
        let held = exits(&fake, &all);
        let wanted = with(&held, program(&fake, &mut attachment, 0));
        let skipped = attachment.enable_exits(&fake, &fake.kernel, &wanted).unwrap();
        let exits = fake.kernel.exits().unwrap().all();
        let reasons: BTreeMap<u64, SkipReason> =
            skipped.iter().map(|skip| (exits[skip.exit].address, skip.reason)).collect();
        let own = SkipReason::GuestOwned("other code where it returns");
        assert_eq!(reasons[&host.epilogue.ret], own);
        assert_eq!(reasons[&alone.epilogue.ret], own);
        assert_eq!(reasons[&guest.epilogue.ret], SkipReason::Shared);
        assert_eq!(attachment.held_exits() + skipped.len(), exits.len());
        assert!(skipped.len() < 100, "{name}: {} are woven together", skipped.len());
        let first = exits.iter().position(|exit| exit.address == guest.epilogue.ret).unwrap();
        let made = attachment.stubs(&fake, &fake.kernel, &[(first, 0)]).unwrap();
        assert_eq!(made, [None], "no records of it");
        assert!(attachment.release_all(&fake, &fake.kernel).unwrap().foreign.is_empty());
    }
}

// A write that fails half-way must leave no function that ends nowhere.
#[test]
fn a_failing_write_leaves_the_guest_as_it_was() {
    let name = "riscv64-6.12";
    let fake = Fake::new(name);
    let sites = functions(&fake, "vfs_read");
    let before = fake.text();
    let ends = plan(&fake, &sites).exits;
    let windows: HashSet<u64> = ends.iter().map(|exit| fake.at(exit.epilogue.start)).collect();
    fake.try_attach_for(&sites).unwrap();
    let log = std::mem::take(&mut *fake.log.borrow_mut());
    let numbered = log.iter().enumerate().filter(|(_, (at, _))| windows.contains(at));
    let writes: Vec<usize> = numbered.map(|(number, _)| number).collect();
    assert_eq!(writes.len(), ends.len(), "{name}");
    // The last window, and the first entry of the page tables.
    let last = writes[writes.len() - 1];
    let text = fake.symbol("_text")..fake.symbol("_end");
    let tables = (last..log.len()).find(|&write| !text.contains(&log[write].0)).unwrap();
    for failing in [last, tables] {
        let fake = Fake::new(name);
        *fake.failing.borrow_mut() = failing..failing + 1;
        assert!(fake.try_attach_for(&sites).is_err(), "{name}: write {failing}");
        assert!(fake.text() == before, "{name}: write {failing}");
    }
}

// Every tracer of a run can have a program of its own, and others beside.
#[test]
fn a_full_place_is_one_error_and_takes_all_tracers_before() {
    for name in RISCV {
        let fake = Fake::new(name);
        let all: Vec<usize> = (0..fake.kernel.sites().len()).collect();
        let mut attachment = fake.try_attach_for(&all).unwrap();
        for tracer in 0..255 {
            program(&fake, &mut attachment, tracer);
            let fields = vec![Field::Stack];
            let duty = Duty::new(Point::Entry, vec![tracer], &fields);
            attachment.program(&fake, &fake.kernel, &duty).unwrap();
        }
        let (text, code) = (fake.text(), all_code(&fake));
        let error = (0..u16::MAX).find_map(|number| {
            let tracers = number.to_le_bytes().to_vec();
            let duty = Duty::new(Point::Return, tracers, &[Field::Stack]);
            attachment.program(&fake, &fake.kernel, &duty).err()
        });
        let error = error.unwrap().to_string();
        assert!(error.contains("no place for another program"), "{name}: {error}");
        let programs = attachment.programs().len();
        println!("{name}: {programs} programs");
        assert!(fake.text() == text, "{name}");
        let same = all_code(&fake).iter().zip(&code).filter(|(a, b)| a != b && **b != 0).count();
        assert_eq!(same, 0, "{name}: nothing that was there has changed");
    }
}

// The same call of the SBI that nobody had armed told functions that they had returned an error.
#[test]
fn programs_at_exits_stop_where_they_say() {
    for name in RISCV {
        let fake = Fake::counting(name);
        let sites = functions(&fake, "vfs_*");
        let attachment = fake.try_attach_for(&sites).unwrap();
        assert_ends_stop(&fake, attachment, name);
    }
}
