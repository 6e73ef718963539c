//! Sites that the guest's own ftrace uses as well, on plain memory, with a model of that ftrace
//! which makes the same checks as the real one (x86-64).

mod fake_guest;

use fake_guest::{ENABLED, Fake, MAP, X86};
use std::collections::BTreeMap;
use vm_memory::Bytes;
use vmtrace::kernel::SiteSection;
use vmtrace::tracer::annex::Memory;
use vmtrace::tracer::{Attachment, Duty, Guest, Moment, SkipReason, TraceError};

const TRAP: [u8; 2] = [0xe6, 0x42];
const NOP: [u8; 5] = [0x0f, 0x1f, 0x44, 0, 0];
const RETURN: [u8; 5] = [0xc3, 0xcc, 0xcc, 0xcc, 0xcc];

fn branch(opcode: u8, from: u64, to: u64) -> [u8; 5] {
    let distance = i32::try_from(to.wrapping_sub(from + 5).cast_signed()).unwrap();
    let [a, b, c, d] = distance.to_le_bytes();
    [opcode, a, b, c, d]
}

fn leads(from: u64, bytes: &[u8]) -> (u8, u64) {
    let distance = i32::from_le_bytes(bytes[1..5].try_into().unwrap());
    (bytes[0], (from + 5).wrapping_add_signed(distance.into()))
}

/// Code of the annex.
fn annex(fake: &Fake, address: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let at = usize::try_from(address - MAP).unwrap();
    fake.annex.slice().read_slice(&mut bytes, at).unwrap();
    bytes
}

/// The guest's ftrace: what it has in each site, and wants there.
struct Model<'a> {
    fake: &'a Fake,
    /// By site.
    has: BTreeMap<usize, (u8, u64)>,
}

impl Model<'_> {
    fn address(&self, site: usize) -> u64 {
        self.fake.kernel.sites()[site].location
    }

    fn bytes(&self, site: usize, call: Option<(u8, u64)>) -> Vec<u8> {
        let at = self.address(site);
        call.map_or(NOP, |(opcode, target)| branch(opcode, at, target)).to_vec()
    }

    /// The flags that it has before an update to what is wanted.
    fn announce(&self, wanted: &[(usize, Option<(u8, u64)>)]) {
        const REGS: u64 = 1 << 30;
        for &(site, call) in wanted {
            let is = self.has.get(&site);
            let flags = u64::from(call.is_some()) | if is.is_some() { ENABLED } else { 0 };
            let differs = call.is_some() && is.is_some() && is != call.as_ref();
            self.fake.set_flags(site, flags | if differs { REGS } else { 0 });
        }
    }

    /// As `ftrace_replace_code`: all must hold what was left there, then all is written.
    fn update(&mut self, wanted: &[(usize, Option<(u8, u64)>)]) {
        for &(site, _) in wanted {
            let left = self.bytes(site, self.has.get(&site).copied());
            assert_eq!(self.fake.bytes(site), left, "ftrace_bug at site {site}");
        }
        for &(site, call) in wanted {
            let at = self.fake.at(self.address(site));
            self.fake.write(at, &self.bytes(site, call)).unwrap();
            match call {
                Some(call) => self.has.insert(site, call),
                None => self.has.remove(&site),
            };
            self.fake.set_flags(site, if call.is_some() { ENABLED | 1 } else { 0 });
        }
    }
}

/// Where a held site goes after a program, and by which: `None` where it returns.
fn goes_on(fake: &Fake, site: usize, programs: &[u64]) -> (usize, Option<(u8, u64)>) {
    let at = fake.kernel.sites()[site].location;
    let (opcode, start) = leads(at, &fake.bytes(site));
    assert_eq!(opcode, 0xe8, "site {site}");
    if let Some(program) = programs.iter().position(|&program| program == start) {
        return (program, None);
    }
    for (number, &program) in programs.iter().enumerate() {
        let code = annex(fake, program, 1024);
        let end = code.windows(5).position(|bytes| bytes == RETURN).unwrap();
        let copy = annex(fake, start, end + 5);
        if copy[..end] != code[..end] {
            continue;
        }
        let (opcode, mut to) = leads(start + end as u64, &copy[end..]);
        assert_eq!(opcode, 0xe9);
        let mut kind = 0xe8;
        if (MAP..MAP + (16 << 20)).contains(&to) {
            let way = annex(fake, to, 10);
            assert_eq!(way[..5], [0x48, 0x8d, 0x64, 0x24, 0x08]);
            (kind, to) = leads(to + 5, &way[5..]);
        }
        return (number, Some((kind, to)));
    }
    panic!("site {site} calls nothing known at {start:#x}");
}

/// The first program does this for one tracer, the second for another.
fn programs(fake: &Fake, attachment: &mut Attachment) -> [(u16, u64); 2] {
    [0, 1].map(|tracer| {
        let duty = Duty::entry(vec![tracer]);
        let number = attachment.program(fake, &fake.kernel, &duty).unwrap();
        let site = fake.all()[0];
        attachment.enable(fake, &fake.kernel, &[(site, number)]).unwrap();
        let at = fake.target(site);
        attachment.disable(fake, &[site]).unwrap();
        (number, at)
    })
}

// A jump to the wrong place, or past what it replaces, crashes the guest at its next update.
#[test]
fn updates_go_through_two_stubs_and_back() {
    for name in X86 {
        let fake = Fake::new(name);
        let before = fake.text();
        let mut attachment = fake.attach();
        let traps = attachment.share(&fake, &fake.kernel, &TRAP).unwrap();
        let [begin, end] = traps[..] else { panic!("{traps:x?}") };
        let changed = |function: &str, len: usize| {
            let start = fake.link(function);
            let image = fake.kernel.bytes(start, len).unwrap();
            let now = fake.read_vec(fake.at(start), len);
            let first = image.iter().zip(&now).position(|(old, new)| old != new);
            let first = first.unwrap_or_else(|| panic!("{name}: {function} is as it was"));
            // A displacement may differ in its later bytes alone.
            let opcode = (0..=first).rev().find(|&at| matches!(now[at], 0xe9)).unwrap();
            (
                start + opcode as u64,
                image[opcode..opcode + 10].to_vec(),
                now[opcode..][..10].to_vec(),
            )
        };
        let (at, old, new) = changed("ftrace_arch_code_modify_prepare", 64);
        assert_eq!((old[0], old[1], &old[6..]), (0xc7, 5, &[1, 0, 0, 0][..]), "{name}");
        assert_eq!(leads(at, &new), (0xe9, begin), "{name}");
        let stub = annex(&fake, begin, 17);
        assert_eq!(stub[..2], TRAP);
        let variable = |at: u64, store: &[u8]| leads(at + 1, &store[1..]).1 + 4;
        assert_eq!(variable(begin + 2, &stub[2..]), variable(at, &old), "{name}");
        assert_eq!(stub[8..12], [1, 0, 0, 0]);
        assert_eq!(leads(begin + 12, &stub[12..]), (0xe9, at + 10), "{name}");
        let lock = fake.read_vec(fake.at(at - 5), 5);
        assert_eq!(leads(at - 5, &lock), (0xe8, fake.link("mutex_lock")), "{name}");

        let (at, old, new) = changed("ftrace_arch_code_modify_post_process", 64);
        assert_eq!(leads(at, &old), (0xe9, fake.link("mutex_unlock")), "{name}");
        assert_eq!(leads(at, &new), (0xe9, end), "{name}");
        let stub = annex(&fake, end, 7);
        assert_eq!(stub[..2], TRAP);
        assert_eq!(leads(end + 2, &stub[2..]), (0xe9, fake.link("mutex_unlock")), "{name}");

        assert_eq!(attachment.moment(begin), Some((Moment::Begin, begin + 2)));
        assert_eq!(attachment.moment(end), Some((Moment::End, end + 2)));
        assert_eq!(attachment.moment(begin + 2), None);
        attachment.release_all(&fake, &fake.kernel).unwrap();
        assert!(fake.text() == before, "{name}: the image is not as it was");
        // A task may stand before it.
        let nops = [begin, end].map(|trap| annex(&fake, trap, 2));
        assert_eq!(nops, [[0x66, 0x90]; 2], "{name}");
    }
}

#[test]
fn a_kernel_that_updates_otherwise_is_left_alone() {
    let fake = Fake::new("x86_64-6.12");
    let start = fake.at(fake.link("ftrace_arch_code_modify_post_process"));
    fake.write(start, &[0x90; 64]).unwrap();
    let before = fake.text();
    let mut attachment = fake.attach();
    attachment.share(&fake, &fake.kernel, &TRAP).unwrap_err();
    assert!(fake.text() == before);
    // And its sites are refused to the guest, as before.
    let site = fake.all()[0];
    fake.enable(&mut attachment, &[site]).unwrap();
    assert_ne!(fake.flags(site), 0);
}

// What is not given back is an `ftrace_bug`, what is not taken again a function that is not traced,
// and a chain to a wrong place the end of the guest.
#[test]
fn random_updates_of_both_sides_agree() {
    const ROUNDS: usize = 120;
    for name in X86 {
        let fake = Fake::quiet(name);
        let before = fake.text();
        let mut attachment = fake.attach();
        attachment.share(&fake, &fake.kernel, &TRAP).unwrap();
        let numbers = programs(&fake, &mut attachment);
        let all: Vec<usize> = fake.all().into_iter().step_by(997).take(24).collect();
        let targets: Vec<(u8, u64)> = ["ftrace_caller", "ftrace_regs_caller"]
            .map(|name| (0xe8, fake.link(name)))
            .into_iter()
            .chain([(0xe8, 0xffff_ffff_c012_3000), (0xe9, 0xffff_ffff_c045_6040)])
            .collect();
        let mut model = Model { fake: &fake, has: BTreeMap::new() };
        let mut held: BTreeMap<usize, usize> = BTreeMap::new();
        let mut seed = 0x1234_5678_9abc_def1_u64;
        let mut random = |bound: usize| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            usize::try_from(seed >> 16).unwrap() % bound
        };
        let mut most = 0;
        for round in 0..ROUNDS {
            if random(2) == 0 {
                // Ours: other sites, or other programs.
                let mut wanted = BTreeMap::new();
                for &site in &all {
                    if random(3) > 0 {
                        wanted.insert(site, random(2));
                    }
                }
                let leave: Vec<usize> = held
                    .iter()
                    .filter(|pair| wanted.get(pair.0) != Some(pair.1))
                    .map(|p| *p.0)
                    .collect();
                let restored = attachment.disable(&fake, &leave).unwrap();
                assert_eq!((restored.sites, restored.foreign), (leave.len(), vec![]), "{name}");
                let take: Vec<_> = wanted
                    .iter()
                    .filter(|pair| held.get(pair.0) != Some(pair.1))
                    .map(|(&site, &which)| (site, numbers[which].0))
                    .collect();
                let report = attachment.enable(&fake, &fake.kernel, &take).unwrap();
                assert_eq!((report.patched, report.skipped), (take.len(), vec![]), "{name}");
                held = wanted;
            } else {
                // The guest's.
                let mut wanted = Vec::new();
                for &site in &all {
                    let call = match random(6) {
                        0..3 => continue,
                        3 => None,
                        _ => Some(targets[random(targets.len())]),
                    };
                    if call != model.has.get(&site).copied() {
                        wanted.push((site, call));
                    }
                }
                model.announce(&wanted);
                let lent = attachment.lend(&fake, &fake.kernel).unwrap();
                let touched = wanted.iter().filter(|(site, _)| held.contains_key(site)).count();
                assert_eq!((lent.sites, lent.foreign), (touched, vec![]), "{name}, round {round}");
                assert!(attachment.is_lent());
                model.update(&wanted);
                let (count, skipped) = attachment.take_again(&fake, &fake.kernel, &TRAP).unwrap();
                assert_eq!((count, skipped), (touched, vec![]), "{name}, round {round}");
            }
            assert_eq!(attachment.held(), held.len());
            for &site in &all {
                let guest = model.has.get(&site).copied();
                match held.get(&site) {
                    Some(&which) => {
                        let does = goes_on(&fake, site, &numbers.map(|number| number.1));
                        assert_eq!(does, (which, guest), "{name}, round {round}, site {site}");
                    }
                    None => assert_eq!(fake.bytes(site), model.bytes(site, guest), "{name}"),
                }
            }
            let shared = held.keys().filter(|site| model.has.contains_key(site)).count();
            assert_eq!(attachment.shared().values().sum::<usize>(), shared, "{name}");
            most = most.max(shared);
        }
        assert!(most > all.len() / 3, "{name}: {most}");
        attachment.release_all(&fake, &fake.kernel).unwrap();
        let wanted: Vec<_> = model.has.keys().map(|&site| (site, None)).collect();
        model.announce(&wanted);
        model.update(&wanted);
        assert!(fake.text() == before, "{name}: the image is not as it was");
    }
}

// Whoever wrote there, it was neither side: the end of tracing, and said so.
#[test]
fn what_nobody_wrote_is_told() {
    let fake = Fake::new("x86_64-6.12");
    let mut attachment = fake.attach();
    attachment.share(&fake, &fake.kernel, &TRAP).unwrap();
    let sites = &fake.all()[..8];
    fake.enable(&mut attachment, sites).unwrap();
    assert!(sites.iter().all(|&site| fake.flags(site) == 0), "nothing is refused to the guest");
    let at = |site: usize| fake.at(fake.record(site));
    // An end without a beginning.
    let alone = attachment.take_again(&fake, &fake.kernel, &TRAP);
    assert!(matches!(alone, Err(TraceError::Ftrace(_))));
    let [touched, foreign, odd, idle, ..] = sites[..] else { panic!() };
    for site in [touched, foreign, odd] {
        fake.set_flags(site, 1);
    }
    fake.write(at(foreign), &[0xcc]).unwrap();
    let lent = attachment.lend(&fake, &fake.kernel).unwrap();
    assert_eq!((lent.sites, lent.foreign), (3, vec![foreign]));
    assert_eq!((fake.bytes(touched), fake.bytes(foreign)[0]), (NOP.to_vec(), 0xcc));
    // A second one within.
    let within = attachment.lend(&fake, &fake.kernel);
    assert!(matches!(within, Err(TraceError::Ftrace(_))));
    // Called, as its record says; a breakpoint; and a record that says otherwise.
    fake.write(at(touched), &branch(0xe8, fake.record(touched), fake.link("ftrace_caller")))
        .unwrap();
    fake.set_flags(touched, ENABLED | 1);
    fake.set_flags(odd, ENABLED | 1);
    let (count, mut skipped) = attachment.take_again(&fake, &fake.kernel, &TRAP).unwrap();
    skipped.sort_by_key(|skip| skip.site);
    let reasons: Vec<_> = skipped.iter().map(|skip| (skip.site, skip.reason)).collect();
    let expected =
        [(foreign, SkipReason::GuestOwned("a breakpoint")), (odd, SkipReason::GuestEnabled)];
    assert_eq!((count, &reasons[..]), (3, &expected[..]));
    // A call of ours is none of the guest's: no chain leads to a chain.
    let ours = fake.bytes(touched);
    attachment.disable(&fake, &[touched]).unwrap();
    fake.write(at(touched), &ours).unwrap();
    let report = fake.enable(&mut attachment, &[touched]).unwrap();
    assert_eq!(report.skipped[0].reason, SkipReason::GuestOwned("a call"));
    assert_eq!(fake.target(idle), fake.target(sites[4]));
}

// Memory of .init.text that is freed during an update is not written at its end.
#[test]
fn what_is_freed_during_an_update_is_not_taken_again() {
    let fake = Fake::new("x86_64-7");
    let all = fake.all();
    let is_init = |site: &usize| fake.kernel.sites()[*site].section == SiteSection::InitText;
    let init = all.iter().copied().find(is_init).unwrap();
    let kept = all.iter().copied().find(|site| !is_init(site)).unwrap();
    let mut attachment = fake.attach();
    attachment.share(&fake, &fake.kernel, &TRAP).unwrap();
    fake.enable(&mut attachment, &[kept, init]).unwrap();
    fake.set_flags(kept, 1);
    fake.set_flags(init, 1);
    assert_eq!(attachment.lend(&fake, &fake.kernel).unwrap().sites, 2);
    attachment.release_init(&fake).unwrap();
    let before = fake.bytes(init);
    let (_, skipped) = attachment.take_again(&fake, &fake.kernel, &TRAP).unwrap();
    assert_eq!((skipped, attachment.held()), (vec![], 1));
    assert_eq!(fake.bytes(init), before);
}

// A trap that comes back when it is over would stop the guest for ever.
#[test]
fn a_trap_is_lent_and_laid_again_unless_it_is_over() {
    let fake = Fake::new("x86_64-6.12");
    let mut attachment = fake.attach();
    attachment.share(&fake, &fake.kernel, &TRAP).unwrap();
    let site = fake.all()[3];
    attachment.arm(&fake, &fake.kernel, site, &TRAP).unwrap().unwrap();
    fake.set_flags(site, 1);
    assert_eq!(attachment.lend(&fake, &fake.kernel).unwrap().sites, 1);
    assert_eq!(fake.bytes(site), NOP);
    let call = branch(0xe8, fake.record(site), fake.link("ftrace_caller"));
    fake.write(fake.at(fake.record(site)), &call).unwrap();
    fake.set_flags(site, ENABLED | 1);
    attachment.take_again(&fake, &fake.kernel, &TRAP).unwrap();
    assert_eq!(fake.bytes(site)[..2], TRAP);
    fake.set_flags(site, ENABLED);
    attachment.lend(&fake, &fake.kernel).unwrap();
    assert_eq!(fake.bytes(site), call);
    attachment.disarm(&fake, site).unwrap();
    assert_eq!(attachment.take_again(&fake, &fake.kernel, &TRAP).unwrap(), (0, vec![]));
    assert_eq!(fake.bytes(site), call);
}
