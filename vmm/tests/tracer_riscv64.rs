//! Features that only riscv64 guests have: two-instruction sites, literals, code in the gap.

mod fake_guest;

use fake_guest::riscv64::{disabled, gap, jump};
use fake_guest::{ANNEX, FAR, Fake, RISCV};
use std::collections::BTreeMap;
use vmtrace::kernel::FtraceKind;
use vmtrace::tracer::{Duty, Guest, SkipReason, annex};
use vmtrace_trampolines::riscv64::encode::register::{A7, T0, T1, T2, ZERO};
use vmtrace_trampolines::riscv64::encode::{
    FENCE_I, NOP, SFENCE_VMA, addi, auipc, jalr, jr, lr_d, mv, split,
};

const TRAP: [u8; 8] = [0xb7, 0xd8, 0x76, 0x09, 0x73, 0, 0, 0];

fn entry(fake: &Fake, site: usize) -> u64 {
    fake.kernel.sites()[site].entry
}

/// Both instructions of a site.
fn words(fake: &Fake, site: usize) -> [u32; 2] {
    let at = fake.at(entry(fake, site));
    [fake.word(at), fake.word(at + 4)]
}

// Data that can be executed, or code that can be written, is what W^X is about; a
// processor may leave the accessed and dirty bits to the kernel.
#[test]
fn rings_are_mapped_behind_the_image_and_code_is_where_text_is_mapped() {
    for name in RISCV {
        for levels in [3, 4, 5] {
            let fake = Fake::with_levels(name, levels);
            let mut attachment = fake.attach();
            fake.enable(&mut attachment, &[]).unwrap();
            for number in 1..annex::SIZE >> 21 {
                let pte = fake.read_u64(fake.entry(number)).unwrap();
                assert_eq!(pte >> 10 << 12, ANNEX + (number << 21));
                assert_eq!(pte & 0x3ff, 0xe7, "rw-, global, accessed, dirty");
            }
            // The text of the kernel, which is in the slot before, is not covered.
            assert_eq!(fake.read_u64(fake.entry(0)).unwrap() & 8, 8);
            assert_eq!(fake.read_u64(fake.entry(8)).unwrap(), 0);
            let code = fake.at(fake.program());
            assert_eq!(fake.word(code) & 0x707f, 0x2003, "lw of the CPU number");
            let tail = (0..64).map(|at| fake.word(code + 4 * at));
            assert!(tail.clone().any(|word| word == lr_d(T2, T1)));
            assert!(tail.clone().any(|word| word == jr(T0)));
        }
    }
}

// As above; where the kernel's table ends an entry of the table above it goes on.
#[test]
fn large_rings_are_mapped_behind_all_else() {
    const HOLE: u64 = 0xffff_ffff_a000_0000;
    for levels in [3, 4, 5] {
        let fake = Fake::with_buffer("riscv64-7", levels, 600 << 20);
        fake.attach();
        let (_, tables) = fake.tables();
        let page = |address| tables.translate(&fake, address).unwrap();
        let start = FAR + (512 << 20);
        assert_eq!(page(HOLE), start);
        for offset in [0x1234, 511 << 20, 513 << 20, 1100 << 20] {
            assert_eq!(page(HOLE + offset), start + offset, "{levels} {offset:#x}");
        }
        assert!(tables.translate(&fake, HOLE - (2 << 20)).is_ok(), "the fake's heap");
    }
}

#[test]
fn a_gap_in_use_is_left_alone() {
    for name in RISCV {
        let fake = Fake::new(name);
        let at = fake.at(gap(&fake)) + 0x1800;
        fake.write(at, &[1]).unwrap();
        let error = fake.try_attach().err().unwrap().to_string();
        assert!(error.contains("in use"), "{error}");
        assert_eq!(fake.log.borrow().len(), 1, "nothing else is written");
    }
}

// Distinct programs on distinct sites: each site finds its own without a look-up.
#[test]
fn every_site_calls_the_program_that_it_was_given() {
    for name in RISCV {
        let fake = Fake::new(name);
        let sites = fake.all();
        let mut attachment = fake.attach();
        const COUNT: usize = 255;
        let mut programs = Vec::new();
        for tracer in 0..u8::try_from(COUNT).unwrap() {
            programs
                .push(attachment.program(&fake, &fake.kernel, &Duty::entry(vec![tracer])).unwrap());
        }
        let plan: Vec<_> = sites.iter().map(|&site| (site, programs[site % COUNT])).collect();
        let report = attachment.enable(&fake, &fake.kernel, &plan).unwrap();
        assert_eq!(report.patched, sites.len());
        let mut found: BTreeMap<usize, u64> = BTreeMap::new();
        for &site in &sites {
            let target = fake.target(site);
            assert_eq!(*found.entry(site % COUNT).or_insert(target), target, "{name}: {site}");
        }
        let places: std::collections::BTreeSet<_> = found.values().collect();
        assert_eq!(places.len(), COUNT);
    }
}

// More combinations than there is place for: one error, and nothing has changed.
#[test]
fn a_full_code_space_is_an_error_before_anything_is_touched() {
    for name in RISCV {
        let fake = Fake::new(name);
        let mut attachment = fake.attach();
        // With every stub that there is in a run.
        attachment.share(&fake, &fake.kernel, &TRAP).unwrap();
        attachment.watch_modules(&fake, &fake.kernel, &TRAP).unwrap();
        let site = fake.all()[100];
        fake.enable(&mut attachment, &[site]).unwrap();
        let before = (fake.bytes(site), fake.target(site));
        let duty = |number: u16| Duty::entry(number.to_le_bytes().to_vec());
        let error = (0..=u16::MAX)
            .find_map(|number| attachment.program(&fake, &fake.kernel, &duty(number)).err());
        let error = error.unwrap().to_string();
        assert!(error.contains("no place for another program"), "{name}: {error}");
        let count = attachment.programs().len();
        println!("{name}: {count} programs");
        assert!(count > 255, "{name}: {count}");
        assert_eq!((fake.bytes(site), fake.target(site)), before);
        assert_eq!(attachment.release_all(&fake, &fake.kernel).unwrap().sites, 1);
    }
}

// The kernel's own layout: without the first instruction the second jumps anywhere.
#[test]
fn first_instructions_are_prepared_once_and_taken_back() {
    let fake = Fake::new("riscv64-6.12");
    let sites = fake.all();
    let owned = sites[3];
    let foreign = fake.foreign(owned);
    fake.write(fake.at(entry(&fake, owned)), &foreign).unwrap();
    let mut attachment = fake.attach();
    for &site in &sites {
        let [first, second] = words(&fake, site);
        if site == owned {
            assert_eq!(fake.bytes(site), foreign, "what the guest uses is not prepared");
        } else {
            assert_eq!((first & 0xfff, second), (auipc(T0, 0), NOP));
        }
    }
    // The guest's ftrace has used these, and left nops. The second is freed text.
    let [used, init] = [sites[5], *sites.last().unwrap()];
    for site in [used, init] {
        fake.write(fake.at(entry(&fake, site)), &disabled(&fake, site)).unwrap();
    }
    let report = fake.enable(&mut attachment, &[used, sites[6]]).unwrap();
    assert_eq!(report.patched, 1);
    assert_eq!(report.skipped[0].reason, SkipReason::Unprepared);
    attachment.release_all(&fake, &fake.kernel).unwrap();
    for &site in &sites {
        if site != owned {
            assert_eq!(fake.bytes(site), disabled(&fake, site));
        }
    }
    // For good: contexts may now stand behind a nop.
    let report = fake.enable(&mut attachment, &[sites[6]]).unwrap();
    assert_eq!(report.skipped[0].reason, SkipReason::Unprepared);
}

// One site that cannot be written is no reason to leave ours in all that come after it.
#[test]
fn sites_that_cannot_be_given_back_are_told_and_the_others_are_given_back() {
    let fake = Fake::new("riscv64-6.12");
    let sites = fake.all();
    let mut attachment = fake.attach();
    let lost = fake.at(entry(&fake, sites[9]));
    *fake.stuck.borrow_mut() = lost..lost + 4;
    // The first write of all.
    *fake.failing.borrow_mut() = 0..1;
    let error = attachment.release_all(&fake, &fake.kernel).unwrap_err().to_string();
    let own = |site: &usize| fake.bytes(*site) != disabled(&fake, *site);
    let kept: Vec<usize> = sites.iter().copied().filter(own).collect();
    assert_eq!(kept, [sites[0], sites[9]], "{error}");
    for site in kept {
        assert!(error.contains(&format!("{:#x} (", entry(&fake, site))), "{error}");
    }
    let (why, other) = ("is not guest RAM", "did not take its own instruction");
    assert!(error.contains(why) && error.contains(other), "{error}");
}

#[test]
fn kernels_with_call_ops_keep_their_first_instructions() {
    let fake = Fake::new("riscv64-7");
    let mut attachment = fake.attach();
    let sites = fake.all();
    let first: Vec<_> = sites.iter().map(|&site| words(&fake, site)[0]).collect();
    fake.enable(&mut attachment, &sites).unwrap();
    assert!(sites.iter().zip(&first).all(|(&site, &first)| words(&fake, site)[0] == first));
}

/// A context that stands between the two instructions of a site: what it has in t0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Between {
    site: usize,
    /// None: whatever it had before.
    t0: Option<u64>,
}

/// Makes contexts stand between the instructions of every site after every single
/// write, and lets those of all earlier writes go on. A context that resumes must
/// find a nop or jump to where sites may jump.
struct Contexts<'a> {
    fake: &'a Fake,
    sites: Vec<usize>,
    between: std::collections::BTreeSet<Between>,
    allowed: std::ops::Range<u64>,
    jumped: usize,
}

impl Contexts<'_> {
    /// Replays what was written since the last call on `memory`, the sites' bytes.
    fn replay(&mut self, memory: &mut BTreeMap<u64, u8>) {
        let log = std::mem::take(&mut *self.fake.log.borrow_mut());
        for (at, bytes) in log {
            if memory.contains_key(&at) {
                memory.extend((at..).zip(bytes));
                self.step(memory);
            }
        }
    }

    fn step(&mut self, memory: &BTreeMap<u64, u8>) {
        let word = |at: u64| {
            u32::from_le_bytes([
                memory[&at],
                memory[&(at + 1)],
                memory[&(at + 2)],
                memory[&(at + 3)],
            ])
        };
        for &site in &self.sites {
            let entry = entry(self.fake, site);
            let at = self.fake.at(entry);
            let [first, second] = [word(at), word(at + 4)];
            let upper = i64::from((first & !0xfff).cast_signed());
            let t0 = (first & 0xfff == auipc(T0, 0)).then(|| entry.wrapping_add_signed(upper));
            self.between.insert(Between { site, t0 });
            let first = Between { site, t0: None };
            for context in self.between.range(first..).take_while(|c| c.site == site) {
                if second == NOP {
                    continue;
                }
                assert_eq!(second & 0xf_ffff, jalr(T0, T0, 0), "site {site}");
                let t0 = context.t0.expect("a torn pair: jalr with whatever t0 was");
                let target = t0.wrapping_add_signed(i64::from(second.cast_signed() >> 20));
                assert!(
                    self.allowed.contains(&target) && target % 4 == 0,
                    "site {site} jumps to {target:#x}"
                );
                self.jumped += 1;
            }
        }
    }
}

// The argument of docs/architecture.md, played through: 1,000 rounds of random plans.
#[test]
fn no_context_ever_executes_a_torn_pair() {
    for name in RISCV {
        let fake = Fake::new(name);
        let all = fake.all();
        let mut attachment = fake.attach();
        // Fewer books to read at every change.
        fake.write(fake.heap() + 16, &4000_u32.to_le_bytes()).unwrap();
        // After the preparation, which no context can see half done.
        fake.log.borrow_mut().clear();
        let sites: Vec<_> = (0..40).map(|n| all[n * 97]).collect();
        let mut memory = BTreeMap::new();
        for &site in &sites {
            let (link, len) = fake.extent(site);
            let bytes = fake.read_vec(fake.at(link), len);
            memory.extend((fake.at(link)..).zip(bytes));
        }
        let before = memory.clone();
        let allowed = if fake.kernel.ftrace_kind() == FtraceKind::Patchable {
            gap(&fake) + 0x1000..gap(&fake) + 0x2000
        } else {
            fake.link("ftrace_caller")..fake.link("ftrace_caller") + 1
        };
        let between = std::collections::BTreeSet::new();
        let mut contexts =
            Contexts { fake: &fake, sites: sites.clone(), between, allowed, jumped: 0 };
        contexts.step(&memory);
        let mut state = 88_172_645_463_325_252_u64;
        let mut random = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            usize::try_from(state >> 8).unwrap()
        };
        for _ in 0..1000 {
            let from = random() % 40;
            let some = &sites[from..(from + 1 + random() % 4).min(40)];
            if random() % 2 == 0 {
                let duty = Duty::entry(vec![u8::try_from(random() % 255).unwrap()]);
                let program = attachment.program(&fake, &fake.kernel, &duty).unwrap();
                let some: Vec<_> = some.iter().map(|&site| (site, program)).collect();
                attachment.enable(&fake, &fake.kernel, &some).unwrap();
            } else {
                attachment.disable(&fake, some).unwrap();
            }
            contexts.replay(&mut memory);
        }
        assert!(contexts.jumped > 10_000, "the test did not test");
        attachment.disable(&fake, &sites).unwrap();
        contexts.replay(&mut memory);
        assert!(memory == before, "{name}: a site is not as it was");
        attachment.release_all(&fake, &fake.kernel).unwrap();
        contexts.replay(&mut memory);
        for &site in &sites {
            assert_eq!(fake.bytes(site), disabled(&fake, site), "{name}");
        }
    }
}

// Between the two writes a context follows the literal through the kernel's code.
#[test]
fn literals_are_there_before_the_call_and_stay_until_after_it() {
    let fake = Fake::new("riscv64-7");
    let mut attachment = fake.attach();
    let site = fake.all()[1000];
    let at = fake.at(entry(&fake, site));
    let order = |fake: &Fake| {
        let log = std::mem::take(&mut *fake.log.borrow_mut());
        let mine = log.into_iter().filter(|(place, _)| (at - 8..at + 8).contains(place));
        mine.map(|(place, bytes)| (place.wrapping_sub(at).cast_signed(), bytes.len())).collect()
    };
    fake.log.borrow_mut().clear();
    fake.enable(&mut attachment, &[site]).unwrap();
    let enabled: Vec<_> = order(&fake);
    assert_eq!(enabled, [(-8, 8), (4, 4)]);
    attachment.disable(&fake, &[site]).unwrap();
    let disabled: Vec<_> = order(&fake);
    assert_eq!(disabled, [(4, 4), (-8, 8)]);
}

// It must come back to the site with every argument as it was.
#[test]
fn the_stub_of_a_trap_keeps_what_the_trap_needs() {
    for name in RISCV {
        let fake = Fake::new(name);
        let mut attachment = fake.attach();
        let site = fake.kernel.select(&["vfs_rename".into()], &[]).unwrap()[0];
        let address = attachment.arm(&fake, &fake.kernel, site, &TRAP).unwrap().unwrap();
        assert_eq!(fake.target(site), address - 4);
        let at = fake.at(address);
        assert_eq!(fake.word(at - 4), mv(T1, A7));
        assert_eq!(fake.read_vec(at, 8), TRAP);
        let after = [8, 12, 16].map(|offset| fake.word(at + offset));
        if fake.kernel.ftrace_kind() == FtraceKind::Patchable {
            assert_eq!(after, [mv(A7, T1), addi(T0, T0, -8), jr(T0)]);
        } else {
            // As the site itself, whose first instruction may be under a kprobe.
            let distance = fake.link("ftrace_caller").wrapping_sub(address + 12).cast_signed();
            let (upper, lower) = split(distance).unwrap();
            assert_eq!(after, [mv(A7, T1), auipc(T1, upper), jalr(ZERO, T1, lower)]);
        }
        attachment.disarm(&fake, site).unwrap();
        assert_eq!([fake.word(at), fake.word(at + 4)], [NOP, NOP]);
    }
}

#[test]
fn the_first_hart_goes_on_where_it_stood_and_sees_the_annex() {
    for name in RISCV {
        let fake = Fake::new(name);
        let attachment = fake.attach();
        let stood = fake.link("early_trace_init");
        let stub = attachment.resume(&fake, stood).unwrap();
        let word = |n: u64| fake.word(fake.at(stub + 4 * n));
        assert_eq!([word(0), word(1)], [SFENCE_VMA, FENCE_I]);
        let upper = i64::from((word(2) & !0xfff).cast_signed());
        assert_eq!(word(2) & 0xfff, auipc(T1, 0));
        assert_eq!(word(3) & 0xf_ffff, jalr(ZERO, T1, 0));
        let lower = i64::from(word(3).cast_signed() >> 20);
        assert_eq!((stub + 8).wrapping_add_signed(upper + lower), stood);
    }
}

#[test]
fn jumps_of_the_table_lead_to_programs_and_the_last_to_the_trap() {
    let fake = Fake::new("riscv64-6.12");
    let mut attachment = fake.attach();
    let table = gap(&fake) + 0x1000;
    let mut programs = Vec::new();
    // Every 16th is left for what the guest calls directly.
    for (tracer, entry) in (0..20).zip((0..).filter(|entry| entry % 16 != 0)) {
        attachment.program(&fake, &fake.kernel, &Duty::entry(vec![tracer])).unwrap();
        programs.push((entry, jump(&fake, table + 4 * entry)));
    }
    assert_eq!(programs[0], (1, fake.program()));
    assert_eq!([0, 16].map(|entry| fake.word(fake.at(table + 4 * entry))), [0; 2]);
    for (entry, target) in programs {
        let copy = jump(&fake, table + 2048 + 4 * entry);
        assert_eq!((copy, fake.word(fake.at(target)) & 0x707f), (target, 0x2003), "lw");
    }
    for copy in [0, 2048] {
        assert_eq!(jump(&fake, table + copy + 4 * 511), gap(&fake));
    }
}
