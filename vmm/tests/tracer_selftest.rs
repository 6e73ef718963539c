//! The self-test of an attach, on plain memory: the tests write what a program would have written.

mod fake_guest;

use fake_guest::{CONTROL, Fake, MAP, Record, kernels};
use vm_memory::Bytes;
use vmtrace::kernel::Arch;
use vmtrace::tracer::annex::Memory;
use vmtrace::tracer::{
    Attachment, Duty, Guest, Reached, Seen, SelfTest, SkipReason, return_address,
};
use vmtrace_trampolines::layout::CHUNK_SIZE;

const RETURNS_TO: u64 = 0xffff_ffff_8123_4567;
const TICKS: [u64; 2] = [1000, 2000];

fn begin(fake: &Fake, attachment: &mut Attachment, site: usize) -> Result<SelfTest, SkipReason> {
    let program = attachment.program(fake, &fake.kernel, &Duty::entry(vec![0])).unwrap();
    let from = [fake.stack(), RETURNS_TO];
    let place = (site, program);
    attachment.begin_self_test(fake, &fake.kernel, place, fake.trap(), from).unwrap()
}

fn expected(fake: &Fake, site: usize) -> Record {
    Record {
        task: fake.link("init_task"),
        caller: RETURNS_TO & 0xffff_ffff,
        pid: 0,
        time: 1500,
        site: return_address(&fake.kernel, &fake.kernel.sites()[site]) & 0xffff_ffff,
        program: 0,
    }
}

fn seen() -> Option<Seen> {
    Some(Seen { vcpu: 0, returns_to: RETURNS_TO, ticks: TICKS })
}

fn rings(fake: &Fake) -> Vec<u8> {
    let mut bytes = vec![0; (2 << 20) + CHUNK_SIZE];
    fake.annex.slice().read_slice(&mut bytes, CONTROL).unwrap();
    bytes
}

/// Where the processor goes for each vector (Intel SDM volume 3, 6.14.1).
fn gates(fake: &Fake, table: u64) -> Vec<u64> {
    let gate = |vector: u64| {
        let at = usize::try_from(table + 16 * vector - MAP).unwrap();
        let [low, high]: [u64; 2] = fake.annex.slice().read_obj(at).unwrap();
        // Of the kernel's code segment, present, with interrupts off.
        assert_eq!((low >> 16 & 0xffff, low >> 32 & 0xffff), (0x10, 0x8e00), "{vector}");
        low & 0xffff | (low >> 48) << 16 | high << 32
    };
    (0..32).map(gate).collect()
}

// A test that leaves its record in the ring makes a call of it that never was; one that leaves its
// trap stops the guest.
#[test]
fn a_site_is_called_alone_and_all_is_as_before() {
    for name in kernels() {
        let fake = Fake::new(name);
        let mut attachment = fake.attach();
        let site = fake.all()[7];
        // What is prepared once stays.
        fake.enable(&mut attachment, &[site]).unwrap();
        attachment.disable(&fake, &[site]).unwrap();
        let (text, fresh) = (fake.text(), rings(&fake));
        let test = begin(&fake, &mut attachment, site).unwrap();
        assert_eq!(attachment.held(), 1, "{name}");
        let behind = fake.at(return_address(&fake.kernel, &fake.kernel.sites()[site]));
        let trap = fake.trap();
        assert_eq!(fake.read_vec(behind, trap.len()), trap, "{name}");
        let (start, after_call) = test.start();
        if fake.kernel.arch() == Arch::X86_64 {
            assert_eq!(start, fake.kernel.sites()[site].location);
            assert_eq!(after_call, fake.stack() - 8);
            assert_eq!(fake.read_u64(fake.symbol("init_task") + 56).unwrap(), RETURNS_TO);
            fake.write(fake.symbol("init_task") + 56, &[0; 8]).unwrap();
        }
        let reached: Vec<_> = test.traps().map(|trap| test.reached(trap)).collect();
        assert_eq!(reached[0], Some(Reached::End), "{name}");
        assert!(matches!(reached[1], Some(Reached::Fault(_))), "{name}");
        assert_eq!(test.reached(start), None, "{name}");
        if fake.kernel.arch() == Arch::X86_64 {
            let traps: Vec<_> = test.traps().skip(1).collect();
            assert_eq!(gates(&fake, test.faults()), traps, "{name}");
            for at in traps {
                let mut bytes = vec![0; trap.len()];
                let at = usize::try_from(at - MAP).unwrap();
                fake.annex.slice().read_slice(&mut bytes, at).unwrap();
                assert_eq!(bytes, trap, "{name}: it would go on");
            }
        }
        fake.hit(expected(&fake, site), 1);
        attachment.end_self_test(&fake, &fake.kernel, &test, seen()).unwrap();
        assert_eq!(attachment.held(), 0, "{name}");
        assert!(fake.text() == text, "{name}: the image is not as it was");
        assert!(rings(&fake) == fresh, "{name}: the rings are not as they were");
        // Left behind, the guest's own tracers never see this function.
        assert_eq!(fake.flags(site), 0, "{name}");
    }
}

// Whatever is wrong in a record would be wrong in all that follow.
#[test]
fn anything_but_exactly_its_record_ends_the_test() {
    for name in ["x86_64-6.12", "riscv64-7"] {
        let fake = Fake::new(name);
        let site = fake.all()[7];
        let right = expected(&fake, site);
        let wrong: [(&str, Record, usize); 8] = [
            ("has 0 records", right, 0),
            ("has 2 records", right, 2),
            ("the site", Record { site: right.site + 16, ..right }, 1),
            ("the program", Record { program: 1, ..right }, 1),
            ("the caller", Record { caller: right.caller + 1, ..right }, 1),
            ("the pid", Record { pid: 1, ..right }, 1),
            ("the task", Record { task: right.task + 8, ..right }, 1),
            ("which is not between 1000 and 2000", Record { time: 2001, ..right }, 1),
        ];
        for (what, wrong, times) in wrong {
            let fake = Fake::new(name);
            let mut attachment = fake.attach();
            let test = begin(&fake, &mut attachment, site).unwrap();
            fake.hit(wrong, times);
            let error = attachment.end_self_test(&fake, &fake.kernel, &test, seen()).unwrap_err();
            assert!(error.to_string().contains(what), "{name}, {what}: {error}");
            assert_eq!(attachment.held(), 0, "{name}, {what}");
            let behind = fake.at(return_address(&fake.kernel, &fake.kernel.sites()[site]));
            let trap = fake.trap();
            assert_ne!(fake.read_vec(behind, trap.len()), trap, "{name}, {what}");
        }
    }
}

// A vCPU's record in the ring of another one is taken out on behalf of nobody.
#[test]
fn the_ring_has_to_be_that_of_the_vcpu() {
    let fake = Fake::new("x86_64-6.12");
    let mut attachment = fake.attach();
    let site = fake.all()[7];
    let test = begin(&fake, &mut attachment, site).unwrap();
    fake.hit(expected(&fake, site), 1);
    let seen = seen().map(|seen| Seen { vcpu: 1, ..seen });
    let error = attachment.end_self_test(&fake, &fake.kernel, &test, seen).unwrap_err();
    assert!(error.to_string().contains("vCPU 0 has 1 records"), "{error}");
}

// The guest's bytes at the site are the guest's.
#[test]
fn a_site_that_changed_meanwhile_is_an_anomaly() {
    for name in kernels() {
        let fake = Fake::new(name);
        let mut attachment = fake.attach();
        let site = fake.all()[7];
        let test = begin(&fake, &mut attachment, site).unwrap();
        let foreign = fake.foreign(site);
        fake.write(fake.at(fake.extent(site).0), &foreign).unwrap();
        let error = attachment.end_self_test(&fake, &fake.kernel, &test, None).unwrap_err();
        assert!(error.to_string().contains("did not hold our call"), "{name}: {error}");
        assert_eq!(fake.bytes(site)[..foreign.len()], foreign, "{name}");
    }
}

#[test]
fn a_site_of_the_guests_is_not_taken_for_a_test() {
    for name in kernels() {
        let fake = Fake::new(name);
        let mut attachment = fake.attach();
        let sites = fake.all();
        fake.set_flags(sites[7], fake_guest::DISABLED);
        let skipped = begin(&fake, &mut attachment, sites[7]).err();
        assert_eq!(skipped, Some(SkipReason::GuestDisabled), "{name}");
        assert_eq!(attachment.held(), 0, "{name}");
        assert!(begin(&fake, &mut attachment, sites[8]).is_ok(), "{name}");
    }
}
