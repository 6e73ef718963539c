//! The tracer on plain memory that looks like a guest right after `ftrace_init`.

mod fake_guest;

use fake_guest::{ANNEX, DISABLED, ENABLED, FAR, Fake, X86, kernels};
use vmtrace::kernel::{Arch, FtraceKind, SiteSection};
use vmtrace::tracer::annex::Addressing;
use vmtrace::tracer::{Guest, Skip, SkipReason, TraceError, Tripwire, far_memory};
use vmtrace_trampolines::layout::CHUNK_SIZE;

// A site that calls anything but the trampoline crashes the guest; one that is not
// given back keeps calling it for ever.
#[test]
fn every_site_calls_the_trampoline_and_is_given_back() {
    let fakes = |name| Fake::both(name).map(|fake| (name, fake));
    for (name, fake) in kernels().flat_map(fakes) {
        let before = fake.text();
        let mut attachment = fake.attach();
        assert!(!matches!(attachment.addressing(), Addressing::Table(_)), "{name}");
        let sites = fake.all();
        let report = fake.enable(&mut attachment, &sites).unwrap();
        assert_eq!((report.matched, report.patched), (sites.len(), sites.len()), "{name}");
        assert_eq!(report.skipped, [], "{name}");
        for &site in &sites {
            assert_eq!(fake.target(site), fake.program(), "{name}: site {site}");
            assert_eq!(fake.flags(site), DISABLED);
        }
        let restored = attachment.release_all(&fake, &fake.kernel).unwrap();
        assert_eq!((restored.sites, restored.foreign), (sites.len(), vec![]), "{name}");
        assert!(fake.text() == before, "{name}: the image is not as it was");
        assert!(sites.iter().all(|&site| fake.flags(site) == 0), "{name}");
    }
}

#[test]
fn sites_can_be_given_back_and_taken_again_one_by_one() {
    for name in kernels() {
        let fake = Fake::new(name);
        let before = fake.text();
        let mut attachment = fake.attach();
        let sites = &fake.all()[..100];
        let disabled: Vec<_> = sites.iter().map(|&site| fake.bytes(site)).collect();
        fake.enable(&mut attachment, sites).unwrap();
        assert_eq!(attachment.disable(&fake, &sites[..60]).unwrap().sites, 60);
        for (&site, disabled) in sites[..60].iter().zip(&disabled) {
            assert_eq!(&fake.bytes(site), disabled, "{name}");
            assert_eq!(fake.flags(site), DISABLED, "{name}: the guest must still keep off");
        }
        assert_eq!(fake.enable(&mut attachment, &sites[..50]).unwrap().patched, 50);
        assert_eq!(attachment.held(), 90);
        attachment.release_all(&fake, &fake.kernel).unwrap();
        assert!(fake.text() == before, "{name}");
        assert!(sites.iter().all(|&site| fake.flags(site) == 0), "{name}");
    }
}

// A writable and executable page is what the kernel's W^X check warns about.
#[test]
fn the_annex_is_mapped_by_what_it_is_for() {
    let fake = Fake::new("x86_64-6.12");
    fake.attach();
    for slot in 0..8 {
        let entry = fake.read_u64(fake.entry(slot)).unwrap();
        assert_eq!(entry & 0x000f_ffff_ffe0_0000, ANNEX + (slot << 21));
        let (writable, executable) = (entry & 2 != 0, entry >> 63 == 0);
        assert_eq!((writable, executable), (slot != 0, slot == 0), "slot {slot}: {entry:#x}");
    }
    assert_eq!(fake.read_u64(fake.entry(40)).unwrap() & 1, 0);
}

// Processes have these entries, and no others: a ring that is elsewhere for one of them is its own memory.
#[test]
fn large_rings_are_in_the_hole_of_the_memory_map() {
    for name in X86 {
        // One entry, and two.
        for (buffer, entries) in [(64 << 20, 1), (600 << 20, 2)] {
            let fake = Fake::with_buffer(name, 4, buffer);
            let slot = |index| fake.symbol("level3_kernel_pgt") + 8 * index;
            let attachment = fake.attach();
            for index in [508, 509] {
                let entry = fake.read_u64(slot(index)).unwrap();
                if index - 508 >= entries {
                    assert_eq!(entry, 0, "{name}");
                    continue;
                }
                assert_eq!(entry & 0x000f_ffff_ffff_f000, FAR + ((index - 508) << 30), "{name}");
                // Large and writable, not executable.
                assert_eq!((entry & 0x83, entry >> 63), (0x83, 1), "{name}: {entry:#x}");
            }
            let readers = attachment.readers();
            assert_eq!(readers.len(), 2);
            let fake = Fake::with_buffer(name, 4, buffer);
            fake.write(slot(508 + entries - 1), &0x1e3_u64.to_le_bytes()).unwrap();
            let before = fake.read_vec(fake.symbol("_text"), 64 << 20);
            let error = fake.try_attach().err().unwrap().to_string();
            assert!(error.contains("leave out --buffer"), "{name}: {error}");
            assert!(fake.read_vec(fake.symbol("_text"), 64 << 20) == before, "{name}");
        }
    }
}

#[test]
fn a_slot_in_use_refuses_the_annex_and_changes_nothing() {
    for name in kernels() {
        let fake = Fake::new(name);
        fake.write(fake.entry(5), &0x1e3_u64.to_le_bytes()).unwrap();
        let before = fake.read_vec(fake.symbol("_text"), 64 << 20);
        let error = fake.try_attach().err().unwrap().to_string();
        assert!(error.contains("no place for the annex"), "{name}: {error}");
        assert!(fake.read_vec(fake.symbol("_text"), 64 << 20) == before, "{name}");
        assert_eq!(fake.read_u64(fake.entry(4)).unwrap(), 0, "{name}");
    }
}

#[test]
fn what_the_guest_uses_is_left_alone_with_a_reason() {
    for name in kernels() {
        let fake = Fake::new(name);
        let sites = fake.all();
        let at = |site: usize| fake.at(fake.record(site));
        let [call, poke, odd, enabled, disabled] = sites[..5] else { panic!() };
        let mut attachment = fake.attach();
        let tracer = fake.foreign(call);
        fake.write(fake.at(fake.extent(call).0), &tracer).unwrap();
        let tracer_is = match fake.kernel.ftrace_kind() {
            FtraceKind::CallOps => "the ops of another tracer",
            _ => "a call",
        };
        // A breakpoint, of x86 and of riscv.
        let breakpoint: &[u8] =
            if fake.kernel.ftrace_kind() == FtraceKind::Fentry { &[0xcc] } else { &[0x02, 0x90] };
        fake.write(fake.at(fake.kernel.sites()[poke].entry), breakpoint).unwrap();
        fake.write(at(poke), breakpoint).unwrap();
        fake.write(at(odd) + 3, &[9, 9]).unwrap();
        fake.set_flags(enabled, ENABLED | 1);
        fake.set_flags(disabled, DISABLED);
        // One that the guest's ftrace has no record of.
        let unknown = sites[7];
        fake.write(fake.records() + 16 * unknown as u64, &[0; 8]).unwrap();
        let report = fake.enable(&mut attachment, &sites[..10]).unwrap();
        let reasons: Vec<_> = report.skipped.iter().map(|skip| (skip.site, skip.reason)).collect();
        assert_eq!(
            reasons,
            [
                (call, SkipReason::GuestOwned(tracer_is)),
                (poke, SkipReason::GuestOwned("a breakpoint")),
                (odd, SkipReason::GuestOwned("other bytes")),
                (enabled, SkipReason::GuestEnabled),
                (disabled, SkipReason::GuestDisabled),
                (unknown, SkipReason::Unknown),
            ],
            "{name}"
        );
        assert_eq!(report.patched, 4);
        assert_eq!(fake.bytes(call), tracer);
    }
}

#[test]
fn a_site_that_the_guest_took_over_is_not_written_at_the_end() {
    for name in kernels() {
        let fake = Fake::new(name);
        let sites = &fake.all()[..3];
        let mut attachment = fake.attach();
        fake.enable(&mut attachment, sites).unwrap();
        let foreign = fake.foreign(sites[1]);
        fake.write(fake.at(fake.extent(sites[1]).0), &foreign).unwrap();
        let restored = attachment.release_all(&fake, &fake.kernel).unwrap();
        assert_eq!((restored.sites, restored.foreign), (2, vec![sites[1]]), "{name}");
        assert_eq!(fake.bytes(sites[1]), foreign);
    }
}

// The guest counts users by the flag: clearing it under an active tracer makes it
// give up ftrace.
#[test]
fn the_flag_stays_while_the_guests_own_tracer_is_active() {
    for name in kernels() {
        let fake = Fake::new(name);
        let sites = &fake.all()[..3];
        let before: Vec<_> = sites.iter().map(|&site| fake.bytes(site)).collect();
        let mut attachment = fake.attach();
        fake.enable(&mut attachment, sites).unwrap();
        fake.write(fake.symbol("ftrace_ops_list"), &0x1234_u64.to_le_bytes()).unwrap();
        attachment.release_all(&fake, &fake.kernel).unwrap();
        for (&site, before) in sites.iter().zip(&before) {
            assert_eq!((&fake.bytes(site), fake.flags(site)), (before, DISABLED), "{name}");
        }
    }
}

#[test]
fn freed_init_text_is_never_written_again() {
    for name in ["x86_64-7", "riscv64-6.12", "riscv64-7"] {
        let fake = Fake::new(name);
        let sites = fake.all();
        let mut attachment = fake.attach();
        let is_init = |&&site: &&usize| fake.kernel.sites()[site].section == SiteSection::InitText;
        let init: Vec<_> = sites.iter().filter(is_init).copied().collect();
        assert!(init.len() > 1000);
        let disabled: Vec<_> = init.iter().map(|&site| fake.bytes(site)).collect();
        fake.enable(&mut attachment, &sites).unwrap();
        assert_eq!(attachment.release_init(&fake).unwrap().sites, init.len());
        for (&site, disabled) in init.iter().zip(&disabled) {
            assert_eq!(&fake.bytes(site), disabled, "{name}");
            // The memory has another use now, which looks like ours.
            let (link, len) = fake.extent(site);
            fake.write(fake.at(link), &disabled[..len / 2]).unwrap();
        }
        fake.log.borrow_mut().clear();
        let report = fake.enable(&mut attachment, &init).unwrap();
        assert_eq!(report.patched, 0);
        assert!(report.skipped.iter().all(|skip| skip.reason == SkipReason::Freed));
        attachment.release_all(&fake, &fake.kernel).unwrap();
        let freed = fake.symbol("_sinittext")..fake.symbol("_einittext");
        assert!(fake.log.borrow().iter().all(|(at, _)| !freed.contains(at)), "{name}");
        for &site in &init {
            assert_eq!(fake.flags(site), DISABLED, "the guest's records of these are gone");
        }
    }
}

// Memory that fails for good cannot be put back, but nothing may count as held.
#[test]
fn a_failure_half_way_is_an_error_and_holds_nothing() {
    for name in kernels() {
        let fake = Fake::new(name);
        let sites = &fake.all()[..50];
        let mut attachment = fake.attach();
        *fake.failing.borrow_mut() = 61..usize::MAX;
        assert!(fake.enable(&mut attachment, sites).is_err());
        *fake.failing.borrow_mut() = 0..0;
        assert_eq!(attachment.held(), 0, "{name}");
    }
}

// One bad page must not leave calls behind in all the others.
#[test]
fn one_failure_changes_nothing_else() {
    for name in kernels() {
        let fake = Fake::new(name);
        let all = fake.all();
        let (sites, others) = all.split_at(50);
        let mut attachment = fake.attach();
        fake.enable(&mut attachment, &others[..50]).unwrap();
        let before = (fake.text(), fake.read_vec(fake.records(), 16 * 100));
        *fake.failing.borrow_mut() = 61..62;
        assert!(fake.enable(&mut attachment, sites).is_err());
        let after = (fake.text(), fake.read_vec(fake.records(), 16 * 100));
        assert!(after == before, "{name}: sites were not put back");
        assert_eq!(attachment.held(), 50, "{name}");

        let disabled: Vec<_> = sites.iter().map(|&site| fake.bytes(site)).collect();
        fake.enable(&mut attachment, sites).unwrap();
        *fake.failing.borrow_mut() = 20..21;
        assert!(attachment.disable(&fake, sites).is_err());
        let left =
            sites.iter().zip(&disabled).filter(|(site, bytes)| fake.bytes(**site) != **bytes);
        assert_eq!(left.count(), 1, "{name}: one write failed, for one site");
        assert!(attachment.sites().map(|(site, _)| site).eq(others[..50].iter().copied()));
        let restored = attachment.release_all(&fake, &fake.kernel).unwrap();
        assert_eq!((restored.sites, restored.foreign), (50, vec![]), "{name}");
    }
}

// What does not hold is not ours, and the guest may use it; all others are.
#[test]
fn a_site_that_does_not_take_the_patch_is_left_alone() {
    for name in kernels() {
        let fake = Fake::new(name);
        let sites = &fake.all()[..10];
        let before = (fake.text(), fake.read_vec(fake.records(), 16 * 10));
        let mut attachment = fake.attach();
        let stuck = sites[4];
        let (link, len) = fake.extent(stuck);
        *fake.stuck.borrow_mut() = fake.at(link)..fake.at(link) + len as u64;
        let report = fake.enable(&mut attachment, sites).unwrap();
        let skip = Skip { site: stuck, reason: SkipReason::ReadBack };
        assert_eq!((report.patched, report.skipped), (9, vec![skip]), "{name}");
        for &site in sites.iter().filter(|&&site| site != stuck) {
            assert_eq!(fake.target(site), fake.program(), "{name}: site {site}");
        }
        assert_eq!(fake.flags(stuck), 0, "{name}");
        *fake.stuck.borrow_mut() = 0..0;
        let restored = attachment.release_all(&fake, &fake.kernel).unwrap();
        assert_eq!((restored.sites, restored.foreign), (9, vec![]), "{name}");
        let after = (fake.text(), fake.read_vec(fake.records(), 16 * 10));
        assert!(before == after, "{name}: something was left behind");
    }
}

// The guest counts a site that it was refused once more: it must stay so until tracing ends.
#[test]
fn a_failure_leaves_sites_refused_that_were() {
    for name in kernels() {
        let fake = Fake::new(name);
        let sites = &fake.all()[..10];
        let mut attachment = fake.attach();
        fake.enable(&mut attachment, &sites[..5]).unwrap();
        attachment.disable(&fake, sites).unwrap();
        *fake.failing.borrow_mut() = 15..16;
        assert!(fake.enable(&mut attachment, sites).is_err());
        let flags: Vec<_> = sites.iter().map(|&site| fake.flags(site)).collect();
        assert_eq!(flags, [[DISABLED; 5], [0; 5]].concat(), "{name}");
        attachment.release_all(&fake, &fake.kernel).unwrap();
        assert!(sites.iter().all(|&site| fake.flags(site) == 0), "{name}");
    }
}

// The memory of a task that has ended is soon another's: its records would get that one's name.
#[test]
fn a_task_is_named_only_while_it_has_its_pid() {
    for name in kernels() {
        let fake = Fake::new(name);
        let mut tasks = fake.attach().tasks();
        let structs = fake.kernel.structs().unwrap();
        let place = |member| structs.member_offset("task_struct", member).unwrap();
        let task = fake.page() + 0x10_0000;
        let write = |member, bytes: &[u8]| {
            fake.write(fake.heap() + 0x10_0000 + place(member), bytes).unwrap();
        };
        write("pid", &7_u32.to_le_bytes());
        write("tgid", &5_u32.to_le_bytes());
        write("comm", b"worker\0\0\0\0\0\0\0\0\0\0");
        assert_eq!(tasks.refresh(&fake, task, 6), None, "{name}: of another task");
        let found = tasks.refresh(&fake, task, 7).unwrap();
        assert_eq!((found.tgid, &found.comm[..7]), (5, &b"worker\0"[..]), "{name}");
        assert_eq!(tasks.refresh(&fake, task, 7), None, "{name}: nothing new");
        assert_eq!(tasks.refresh(&fake, 0x1234, 7), None, "{name}: made up");
    }
}

#[test]
fn traps_replace_instructions_and_leave() {
    // What each architecture's machine takes for a trap.
    for (name, trap) in [
        ("x86_64-6.12", &[0xe6, 0xe7][..]),
        ("riscv64-6.12", &[0xb7, 0xd8, 0x76, 0x09, 0x73, 0, 0, 0]),
        ("riscv64-7", &[0xb7, 0xd8, 0x76, 0x09, 0x73, 0, 0, 0]),
    ] {
        let fake = Fake::new(name);
        let image = fake.image();
        let before = fake.text();
        let arm = || Tripwire::on_function(&fake, &image, &fake.kernel, "early_trace_init", trap);
        let wire = arm().unwrap();
        assert_eq!(fake.read_vec(fake.at(wire.address()), trap.len()), trap, "{name}");
        // This kernel has IBT: the endbr64 must stay, or the kernel warns.
        let behind = if name == "x86_64-6.12" { 4 } else { 0 };
        assert_eq!(wire.address(), fake.link("early_trace_init") + behind);
        assert!(arm().is_err(), "what a tripwire replaces is verified");
        wire.disarm(&fake).unwrap();
        assert!(fake.text() == before);

        let mut attachment = fake.attach();
        let site = fake.kernel.select(&["vfs_read".into()], &[]).unwrap()[0];
        let disabled = fake.bytes(site);
        let address = attachment.arm(&fake, &fake.kernel, site, trap).unwrap().unwrap();
        assert_eq!(fake.read_vec(fake.at(address), trap.len()), trap, "{name}");
        attachment.disarm(&fake, site).unwrap();
        assert_eq!((fake.bytes(site), fake.flags(site)), (disabled, DISABLED));
        assert_ne!(fake.read_vec(fake.at(address), trap.len()), trap, "{name}");
        assert_eq!(fake.enable(&mut attachment, &[site]).unwrap().patched, 1);
    }
}

#[test]
fn another_kernel_than_the_image_is_recognised() {
    for name in ["x86_64-6.12", "riscv64-7"] {
        let fake = Fake::new(name);
        for slide in [2_u64 << 20, 0x1000, 1 << 40, 0_u64.wrapping_sub(2 << 20)] {
            assert!(fake.locate(slide).is_err(), "{slide:#x}");
        }
    }
}

// A kernel may put its records anywhere: one that is read from another place is another site's.
#[test]
fn records_are_read_from_where_they_begin() {
    for name in ["x86_64-6.12", "riscv64-6.12"] {
        let fake = Fake::new(name);
        let sites = fake.all();
        let records = fake.read_vec(fake.records(), 16 * fake.kernel.sites().len());
        let mut attachment = fake.attach();
        let moved = 4096 + 16 * 100;
        fake.write(fake.heap() + moved, &records).unwrap();
        fake.write(fake.heap() + 8, &(fake.page() + moved).to_le_bytes()).unwrap();
        let report = fake.enable(&mut attachment, &sites).unwrap();
        assert_eq!((report.patched, report.skipped), (sites.len(), vec![]), "{name}");
        attachment.release_all(&fake, &fake.kernel).unwrap();
        // Half a record further, each would be made of two.
        fake.write(fake.heap() + 8, &(fake.page() + moved + 8).to_le_bytes()).unwrap();
        let error = fake.enable(&mut attachment, &sites).unwrap_err().to_string();
        assert!(error.contains("unknown shape"), "{name}: {error}");
    }
}

// A user who asks for more than can be mapped is to be told before a guest is started, and how much can be.
#[test]
fn rings_that_have_no_room_in_the_address_space_are_refused() {
    for arch in [Arch::X86_64, Arch::Riscv64] {
        let far = |cpus, buffer| far_memory(arch, cpus, Some(buffer));
        assert!(far(1, 1 << 30).unwrap().is_some(), "{arch:?}");
        let refused = far(2, 1 << 30);
        let Err(TraceError::Buffer { most, .. }) = refused else { panic!("{arch:?}: {refused:?}") };
        assert!(far(2, most).is_ok() && far(2, most + CHUNK_SIZE as u64).is_err(), "{arch:?}");
    }
}

// Everything below is guest memory: whatever is in it, no panic and no hang.
#[test]
fn hostile_books_are_an_error_not_a_hang() {
    for name in ["x86_64-6.12", "riscv64-6.12"] {
        let fake = Fake::new(name);
        let mut attachment = fake.attach();
        let sites = &fake.all()[..3];
        let before = fake.bytes(sites[0]);
        let page = fake.heap();
        // A list that leads to itself.
        fake.write(page, &fake.page().to_le_bytes()).unwrap();
        assert!(fake.enable(&mut attachment, sites).is_err());
        fake.write(page, &0_u64.to_le_bytes()).unwrap();
        // Absurd counts, and records that are nowhere.
        fake.write(page + 16, &u32::MAX.to_le_bytes()).unwrap();
        assert!(fake.enable(&mut attachment, sites).is_err());
        fake.write(page + 16, &10_u32.to_le_bytes()).unwrap();
        let image = fake.link("_text");
        for records in [0, 1, 8, u64::MAX, u64::MAX - 15, image, 0x7fff_ffff_f000] {
            fake.write(page + 8, &records.to_le_bytes()).unwrap();
            let told = match fake.enable(&mut attachment, sites) {
                // Nothing there says that the guest's ftrace knows these sites.
                Ok(report) => report.skipped.iter().all(|skip| skip.reason == SkipReason::Unknown),
                Err(error) => !error.to_string().is_empty(),
            };
            assert!(told, "{name}: records at {records:#x}");
            assert_eq!(attachment.held(), 0, "{name}: records at {records:#x}");
        }
        assert_eq!(fake.bytes(sites[0]), before);
    }
}
