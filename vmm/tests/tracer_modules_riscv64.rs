//! Sites of modules of riscv64 kernels, on plain memory: two instructions, and a literal in kernels
//! with CALL_OPS.

mod fake_guest;

use fake_guest::module::{CODE, Module};
use fake_guest::riscv64::{call, target_of};
use fake_guest::{ENABLED, Fake, RISCV};
use std::collections::BTreeMap;
use vmtrace::kernel::FtraceKind;
use vmtrace::tracer::{Attachment, ModuleMoment, SkipReason};
use vmtrace_trampolines::riscv64::encode::register::T0;
use vmtrace_trampolines::riscv64::encode::{NOP, auipc, jalr, split};

const TRAP: [u8; 8] = [0xb7, 0xd8, 0x76, 0x09, 0x73, 0, 0, 0];

/// Where sites are, as tables of sites have them: the second goes over the end of a page, in all ways
/// in which it can.
fn places(fake: &Fake) -> &'static [[u64; 3]] {
    match fake.kernel.ftrace_kind() {
        // The first instruction, the second, and none of both.
        FtraceKind::Patchable => {
            &[[0x12, 0xffe, 0x1ff0], [0x14, 0xffa, 0x1ff0], [0x16, 0xffc, 0x1fe2]]
        }
        // Code on the next page, and all of it on one.
        FtraceKind::CallOps => &[[0x18, 0xff8, 0x1fe0], [0x20, 0xff0, 0x1ff0]],
        FtraceKind::Fentry => panic!("not riscv64"),
    }
}

/// Bytes from what the table has of a site to its function.
fn front(fake: &Fake) -> u64 {
    if fake.kernel.ftrace_kind() == FtraceKind::CallOps { 8 } else { 0 }
}

/// Both instructions of a site.
fn words(fake: &Fake, module: &Module<'_>, place: u64) -> [u32; 2] {
    let entry = place + front(fake);
    [entry, entry + 4].map(|at| u32::from_le_bytes(module.get(at)))
}

fn target(fake: &Fake, module: &Module<'_>, place: u64) -> u64 {
    let literal = || u64::from_le_bytes(module.get(place));
    target_of(fake, CODE + place + front(fake), words(fake, module, place), literal)
}

/// All bytes of a site.
fn bytes(module: &Module<'_>, place: u64) -> Vec<u8> {
    let len = module.disabled(place).len();
    module.get::<16>(place)[..len].to_vec()
}

/// As a site is from then on that the guest's ftrace has left, while ours can take it.
fn prepared(fake: &Fake, module: &Module<'_>, place: u64) -> bool {
    let [first, second] = words(fake, module, place);
    first & 0xfff == auipc(T0, 0) && second == NOP
}

fn watched(fake: &Fake) -> (Attachment, Vec<u64>) {
    let mut attachment = fake.attach();
    attachment.share(fake, &fake.kernel, &TRAP).unwrap();
    let traps = attachment.watch_modules(fake, &fake.kernel, &TRAP).unwrap();
    (attachment, traps)
}

// What is written over a page's end, or after a module is gone, is somebody else's memory; a second
// instruction without the first jumps anywhere.
#[test]
fn sites_of_a_module_come_and_go() {
    for name in RISCV {
        for &sites in places(&Fake::quiet(name)) {
            for fake in Fake::both(name) {
                come_and_go(&fake, sites);
            }
        }
    }
}

fn come_and_go(fake: &Fake, sites: [u64; 3]) {
    let [plain, across, init] = sites;
    let module = Module::new(fake, sites);
    let before = fake.text();
    let (mut attachment, traps) = watched(fake);
    let own = fake.all()[0];
    fake.enable(&mut attachment, &[own]).unwrap();
    let program = fake.target(own);
    attachment.disable(fake, &[own]).unwrap();
    let moments = [ModuleMoment::Ready, ModuleMoment::Freed, ModuleMoment::Gone];
    for (&trap, moment) in traps.iter().zip(moments) {
        assert_eq!(attachment.module_moment(trap), Some((moment, trap + 8)));
    }
    for _ in 0..3 {
        // The guest has loaded it anew.
        module.write();
        let loaded = module.load(&mut attachment).unwrap();
        assert_eq!((&*loaded.name, loaded.left_out), ("test_module", 0));
        let entries: Vec<_> = loaded.functions.iter().map(|(_, it)| it.site.entry).collect();
        assert_eq!(entries, sites.map(|place| CODE + place + front(fake)));
        assert!(sites.iter().all(|&place| prepared(fake, &module, place)), "{sites:x?}");
        let numbers: Vec<_> = loaded.functions.iter().map(|&(number, _)| number).collect();
        let report = fake.enable(&mut attachment, &numbers).unwrap();
        assert_eq!((report.patched, report.skipped), (3, vec![]));
        for place in sites {
            assert_eq!(target(fake, &module, place), program, "{place:#x}");
        }
        // Given back, and taken again.
        attachment.disable(fake, &numbers[1..2]).unwrap();
        assert!(prepared(fake, &module, across), "{sites:x?}");
        assert_eq!(fake.enable(&mut attachment, &numbers[1..2]).unwrap().patched, 1);
        assert_eq!(target(fake, &module, across), program);
        // Its init functions go; then others have their memory.
        let range = CODE + init..CODE + init + 16;
        let (gone, restored) = attachment.unload_module(fake, module.books, Some(range)).unwrap();
        assert_eq!((gone, restored.sites), (numbers[2..].to_vec(), 1));
        assert!(prepared(fake, &module, init));
        let other = [0x5a; 16];
        module.put(init, &other);
        let (gone, restored) = attachment.unload_module(fake, module.books, None).unwrap();
        assert_eq!((gone, restored.sites), (numbers[..2].to_vec(), 2));
        module.put(plain, &other);
        module.put(across, &other);
        let report = fake.enable(&mut attachment, &numbers).unwrap();
        assert_eq!((report.patched, attachment.held()), (0, 0));
        for place in sites {
            assert_eq!(module.get::<16>(place), other, "{place:#x}");
        }
    }
    // One that is there when tracing ends is left as it was.
    module.write();
    let loaded = module.load(&mut attachment).unwrap();
    let numbers: Vec<_> = loaded.functions.iter().map(|&(number, _)| number).collect();
    assert_eq!(fake.enable(&mut attachment, &numbers).unwrap().patched, 3);
    attachment.release_all(fake, &fake.kernel).unwrap();
    for place in sites {
        assert_eq!(bytes(&module, place), module.disabled(place), "{place:#x}");
    }
    assert!(fake.text() == before, "the image is not as it was");
}

// The guest's own tracer on a function of a module goes on, and what somebody has written without an
// update of its ftrace is left alone.
#[test]
fn sites_of_a_module_are_shared() {
    for name in RISCV {
        let fake = Fake::new(name);
        let has_literals = fake.kernel.ftrace_kind() == FtraceKind::CallOps;
        let sites = places(&fake)[0];
        let [plain, across, init] = sites;
        let module = Module::new(&fake, sites);
        let (mut attachment, _) = watched(&fake);
        let entry = CODE + across + front(&fake);
        let distance = fake.link("ftrace_caller").wrapping_sub(entry).cast_signed();
        let (upper, lower) = split(distance).unwrap();
        let used = [auipc(T0, upper), jalr(T0, T0, lower)].map(u32::to_le_bytes).concat();
        module.put(across + front(&fake), &used);
        let theirs = if has_literals { "global_ops" } else { "ftrace_caller" };
        if has_literals {
            module.put(across, &fake.link(theirs).to_le_bytes());
        }
        module.set_flags(1, ENABLED | 1);
        let before = bytes(&module, across);
        let loaded = module.load(&mut attachment).unwrap();
        let numbers: Vec<_> = loaded.functions.iter().map(|&(number, _)| number).collect();
        module.put(init, &module.disabled(init));
        let report = fake.enable(&mut attachment, &numbers).unwrap();
        let reasons: Vec<_> = report.skipped.iter().map(|skip| skip.reason).collect();
        assert_eq!(reasons, [SkipReason::Unprepared][..usize::from(!has_literals)], "{name}");
        assert_eq!(attachment.shared(), BTreeMap::from([(fake.link(theirs), 1)]), "{name}");
        assert_ne!(bytes(&module, across), before);
        let [first, second] = words(&fake, &module, across);
        assert!(call(entry, first, second).is_some());
        attachment.release_all(&fake, &fake.kernel).unwrap();
        assert_eq!(bytes(&module, plain), module.disabled(plain));
        assert_eq!(bytes(&module, init), module.disabled(init));
        assert_eq!(bytes(&module, across), before);
    }
}
