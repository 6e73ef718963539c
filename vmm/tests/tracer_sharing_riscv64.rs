//! Sites that the guest's own ftrace uses as well, on plain memory, with a model of that ftrace
//! (riscv64): kernels whose sites have a literal (CALL_OPS), and others.

mod fake_guest;

use fake_guest::riscv64::{call, disabled, gap, jump};
use fake_guest::{ENABLED, Fake, RISCV};
use std::collections::{BTreeMap, BTreeSet};
use vm_memory::Bytes;
use vmtrace::kernel::FtraceKind;
use vmtrace::tracer::annex::{self, Memory};
use vmtrace::tracer::{Attachment, Duty, Guest, Moment, SkipReason, TraceError};
use vmtrace_trampolines::Condition;
use vmtrace_trampolines::condition::Test;
use vmtrace_trampolines::family::{self, Strangers};
use vmtrace_trampolines::riscv64::encode::register::T0;
use vmtrace_trampolines::riscv64::encode::{NOP, auipc, jalr, jr, split};

const NAME: &str = "riscv64-7";
const TRAP: [u8; 8] = [0xb7, 0xd8, 0x76, 0x09, 0x73, 0, 0, 0];

fn entry(fake: &Fake, site: usize) -> u64 {
    fake.kernel.sites()[site].entry
}

/// Offsets of `func` and `direct_call` in an ops.
fn members(fake: &Fake) -> [u64; 2] {
    let btf = fake.kernel.btf().unwrap();
    ["func", "direct_call"].map(|name| u64::from(btf.member_offset("ftrace_ops", name).unwrap()))
}

/// A site in which the guest has this.
fn called(fake: &Fake, site: usize, ops: u64) -> Vec<u8> {
    let entry = entry(fake, site);
    let target = if has_literals(fake) { fake.link("ftrace_caller") } else { ops };
    let (upper, lower) = split(target.wrapping_sub(entry).cast_signed()).unwrap();
    let call = [auipc(T0, upper), jalr(T0, T0, lower)].map(u32::to_le_bytes).concat();
    let ops = ops.to_le_bytes();
    [if has_literals(fake) { &ops[..] } else { &[] }, &call].concat()
}

fn has_literals(fake: &Fake) -> bool {
    fake.kernel.ftrace_kind() == FtraceKind::CallOps
}

/// Where the code of a BPF trampoline can be: in the 128 MiB below the image, at a multiple of 64.
fn trampoline(fake: &Fake, chunk: u64) -> u64 {
    (fake.link("_start") & !0xfff) - (128 << 20) + 64 * chunk
}

/// What the guest can have in sites: ops of the kernel's own and such as it has allocated, or the
/// functions that it calls.
fn targets(fake: &Fake) -> Vec<u64> {
    if has_literals(fake) {
        let own = ["global_ops", "ftrace_list_ops"].map(|name| fake.link(name));
        [&own[..], &[0xffff_af80_1234_5678]].concat()
    } else {
        // Two of one entry of the tables, and one that is as near as a module's.
        let direct = [7, 7 + 32, 12, 4096 * 3 + 63].map(|chunk| trampoline(fake, chunk));
        [&[fake.link("ftrace_caller")], &direct[..]].concat()
    }
}

/// Both instructions of a site.
fn words(fake: &Fake, site: usize) -> [u32; 2] {
    let at = fake.at(entry(fake, site));
    [fake.word(at), fake.word(at + 4)]
}

/// The guest's ftrace: what it has in each site, and wants there.
struct Model<'a> {
    fake: &'a Fake,
    /// By site.
    has: BTreeMap<usize, u64>,
}

impl Model<'_> {
    fn bytes(&self, site: usize, ops: Option<u64>) -> Vec<u8> {
        ops.map_or_else(|| disabled(self.fake, site), |ops| called(self.fake, site, ops))
    }

    /// The flags that it has before an update to what is wanted.
    fn announce(&self, wanted: &[(usize, Option<u64>)]) {
        const CALL_OPS: u64 = 1 << 22;
        for &(site, ops) in wanted {
            let is = self.has.get(&site);
            let flags = u64::from(ops.is_some()) | if is.is_some() { ENABLED } else { 0 };
            let differs = ops.is_some() && is.is_some() && is != ops.as_ref();
            self.fake.set_flags(site, flags | if differs { CALL_OPS } else { 0 });
        }
    }

    /// What it finds is what it left there; then all is written.
    fn update(&mut self, wanted: &[(usize, Option<u64>)]) {
        for &(site, ops) in wanted {
            let left = self.bytes(site, self.has.get(&site).copied());
            assert_eq!(self.fake.bytes(site), left, "site {site}");
            let at = self.fake.at(self.fake.extent(site).0);
            self.fake.write(at, &self.bytes(site, ops)).unwrap();
            match ops {
                Some(ops) => self.has.insert(site, ops),
                None => self.has.remove(&site),
            };
            self.fake.set_flags(site, if ops.is_some() { ENABLED | 1 } else { 0 });
        }
    }
}

/// A hart in code of ours: where it stands, and its registers.
struct Hart<'a> {
    fake: &'a Fake,
    at: u64,
    registers: [u64; 32],
    /// What an ops of the guest's has, by the address of the word.
    guest: BTreeMap<u64, u64>,
}

impl<'a> Hart<'a> {
    fn at(fake: &'a Fake, at: u64) -> Self {
        Self { fake, at, registers: [0; 32], guest: BTreeMap::new() }
    }

    /// A word of the guest's ops, the annex, or the kernel with what lies in its gap.
    fn load(&self, address: u64) -> u64 {
        let annex = self.fake.link("_end").next_multiple_of(2 << 20) - (2 << 20);
        match (self.guest.get(&address), address.checked_sub(annex)) {
            (Some(&word), _) => word,
            (None, Some(offset)) if offset < annex::SIZE => {
                self.fake.annex.slice().read_obj(usize::try_from(offset).unwrap()).unwrap()
            }
            _ => self.fake.read_u64(self.fake.at(address)).unwrap(),
        }
    }

    fn set(&mut self, register: u32, value: u64) {
        if register != 0 {
            self.registers[register as usize] = value;
        }
    }

    /// Executes until it leaves the gap (RISC-V unprivileged specification, chapter 2).
    fn run(&mut self) {
        let ours = gap(self.fake)..self.fake.link("__init_begin");
        while ours.contains(&self.at) {
            let word = self.fake.word(self.fake.at(self.at));
            let (rd, a, b) = (word >> 7 & 31, word >> 15 & 31, word >> 20 & 31);
            let [x, y] = [a, b].map(|register| self.registers[register as usize]);
            let immediate = i64::from(word.cast_signed() >> 20);
            let upper = i64::from((word & !0xfff).cast_signed());
            let mut next = self.at + 4;
            match word & 0x7f {
                0x17 => self.set(rd, self.at.wrapping_add_signed(upper)),
                0x37 => self.set(rd, upper.cast_unsigned()),
                0x13 if word >> 12 & 7 == 0 => self.set(rd, x.wrapping_add_signed(immediate)),
                // sd without an offset.
                0x23 if word & 0xfe00_7f80 == 0x3000 => {
                    self.guest.insert(x, y);
                }
                0x6f => next = jump(self.fake, self.at),
                0x03 if word >> 12 & 7 == 3 => {
                    let value = self.load(x.wrapping_add_signed(immediate));
                    self.set(rd, value);
                }
                0x63 if word >> 12 & 7 == 1 => {
                    // Forward and short, as ours are.
                    let distance = u64::from(word >> 8 & 15) << 1 | u64::from(word >> 25 & 63) << 5;
                    if x != y {
                        next = self.at + distance;
                    }
                }
                0x67 => {
                    next = x.wrapping_add_signed(immediate) & !1;
                    self.set(rd, self.at + 4);
                }
                _ => panic!("{word:#010x} at {:#x}", self.at),
            }
            self.at = next;
        }
    }
}

/// What a held site does: which program, and with which ops of the guest's it goes on.
fn does(fake: &Fake, site: usize, programs: &[u64]) -> (usize, Option<u64>) {
    const A2: usize = 12;
    const T1: usize = 6;
    const FUNC: u64 = 0x1234_5670;
    let at = fake.at(entry(fake, site));
    let caller = fake.link("ftrace_caller");
    let [first, second] = words(fake, site);
    let called = call(entry(fake, site), first, second).unwrap();
    if !has_literals(fake) {
        let start = jump(fake, called);
        if let Some(program) = programs.iter().position(|&program| program == start) {
            return (program, None);
        }
        let (number, end) = copied(fake, start, programs);
        let mut hart = Hart::at(fake, jump(fake, end));
        hart.run();
        assert!((10..18).all(|argument| hart.registers[argument] == 0), "an argument is lost");
        return (number, Some(hart.at));
    }
    assert_eq!(called, caller);
    let [func, direct] = members(fake);
    let ops = fake.read_u64(at - 8).unwrap();
    let hart = |at, guest| Hart { fake, at, registers: [0; 32], guest };
    let [start, through] = [direct, func].map(|member| hart(0, BTreeMap::new()).load(ops + member));
    if let Some(program) = programs.iter().position(|&program| program == start) {
        assert_eq!(through, fake.link("ftrace_stub"));
        return (program, None);
    }
    let (number, end) = copied(fake, start, programs);
    let way = jump(fake, end);

    // By the guest's own ops, which it finds in the literal of the second kind.
    let target = fake_target(fake, way);
    let guest = |called: u64| BTreeMap::from([(target + func, FUNC), (target + direct, called)]);
    let mut list = hart(way, guest(0));
    list.run();
    assert_eq!(
        (list.at, list.registers[T1]),
        (caller + 12, 0),
        "as if no ops were called directly"
    );
    let mut directly = hart(way, guest(0x5678_9abc));
    directly.run();
    assert_eq!(directly.at, 0x5678_9abc);
    let mut second = hart(through, guest(0));
    second.run();
    assert_eq!((second.at, second.registers[A2]), (FUNC, target));
    for hart in [&list, &directly, &second] {
        let kept = [1, 2, 5, 8, 10, 11, 13, 14, 15, 16, 17];
        assert!(kept.iter().all(|&register| hart.registers[register] == 0), "an argument is lost");
    }
    (number, Some(target))
}

/// Which program this code is a copy of, up to where that ends (its address).
fn copied(fake: &Fake, start: u64, programs: &[u64]) -> (usize, u64) {
    let words = |at: u64| (0..512).map(move |word| fake.word(fake.at(at + 4 * word)));
    let same = |program: &u64| {
        let len = words(*program).position(|word| word == jr(T0)).unwrap();
        words(*program).take(len).eq(words(start).take(len)).then_some(len as u64)
    };
    let found = (0..).zip(programs).find_map(|(number, it)| Some((number, same(it)?)));
    let (number, len) = found.unwrap();
    (number, start + 4 * len)
}

/// The ops of the guest's that a way goes on with: the first word that it loads.
fn fake_target(fake: &Fake, way: u64) -> u64 {
    let hart = Hart::at(fake, way);
    // Two instructions lead there from the program.
    let far = call_absolute(fake, way);
    hart.load(far + 48)
}

/// Where `lui` and `jalr` lead.
fn call_absolute(fake: &Fake, at: u64) -> u64 {
    let [upper, lower] = [0, 4].map(|offset| fake.word(fake.at(at + offset)).cast_signed());
    i64::from(upper & !0xfff).wrapping_add(i64::from(lower >> 20)).cast_unsigned()
}

/// What the ops in a site's literal calls directly.
fn direct(fake: &Fake, site: usize) -> u64 {
    let ops = fake.read_u64(fake.at(fake.extent(site).0)).unwrap();
    Hart::at(fake, 0).load(ops + members(fake)[1])
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

// A stub that does not go on crashes the guest at its next update, and what is left behind at one after
// the end of tracing.
#[test]
fn updates_go_through_two_stubs_and_back() {
    for name in RISCV {
        updates_go_through_stubs(name);
    }
}

// Whoever changes while nobody looks would stay a stranger for ever: new tasks and new names are seen by the programs of
// two sites, so that nobody is noted while one of them is not held.
#[test]
fn strangers_are_noted_only_while_all_that_tasks_change_by_is_seen() {
    const EXECUTES: (&[&str], &str) = (&["begin_new_exec"], "__set_task_comm");
    const EXCHANGES: (&[&str], &str) = (&["de_thread", "begin_new_exec"], "exchange_tids");
    for name in RISCV {
        let fake = Fake::counting(name);
        let mut attachment = fake.attach();
        attachment.share(&fake, &fake.kernel, &TRAP).unwrap();
        attachment.follow().unwrap();
        let site = |name| fake.kernel.site_of(name).unwrap();
        let sites = [site("wake_up_new_task"), site("__set_task_comm")];
        let followed = Test::Followed { pid: 0x4f0, inside: true };
        let members = Condition::Any(vec![Condition::Test(followed)]);
        attachment.note_strangers(&fake.kernel, &members, sites.to_vec(), &[EXECUTES, EXCHANGES]);
        // Behind the set of tasks that are followed.
        let strangers = usize::try_from(annex::SIZE + family::SIZE).unwrap();
        let open = strangers + usize::try_from(Strangers::OPEN).unwrap();
        let noted = || fake.annex.slice().read_obj::<u64>(open).unwrap();
        // What a program has noted, in the first place and in the last.
        let places = [strangers, open - 8];
        let note = || {
            for place in places {
                fake.annex.slice().write_obj(0xff60_0000_1234_5678_u64, place).unwrap();
            }
        };
        let is_clear =
            || places.iter().all(|&place| fake.annex.slice().read_obj::<u64>(place).unwrap() == 0);
        assert_eq!(noted(), 0);
        fake.enable(&mut attachment, &sites[..1]).unwrap();
        attachment.release_init(&fake).unwrap();
        assert_eq!(noted(), 0, "{name}: names can change unseen");
        let other = fake.all()[7];
        fake.enable(&mut attachment, &[sites[1], other]).unwrap();
        assert_eq!(noted(), 1);
        note();
        // Another site does not matter, whoever has it.
        attachment.disable(&fake, &[other]).unwrap();
        assert!(noted() == 1 && !is_clear());
        attachment.disable(&fake, &sites[1..]).unwrap();
        assert!(noted() == 0 && is_clear(), "{name}");
        fake.enable(&mut attachment, &sites[1..]).unwrap();
        assert_eq!(noted(), 1);
        note();
        // The guest's ftrace updates one of them.
        let ops = targets(&fake)[0];
        let mut model = Model { fake: &fake, has: BTreeMap::new() };
        let wanted = [(sites[0], Some(ops))];
        model.announce(&wanted);
        attachment.lend(&fake, &fake.kernel).unwrap();
        assert!(noted() == 0 && is_clear(), "{name}");
        model.update(&wanted);
        attachment.take_again(&fake, &fake.kernel, &TRAP).unwrap();
        // Ours, which goes on to the guest's.
        assert_eq!(noted(), 1, "{name}");
        note();
        attachment.release_all(&fake, &fake.kernel).unwrap();
        assert!(noted() == 0 && is_clear(), "{name}");

        // All tasks are looked at where one of the functions may be in its caller, and as long as it is not known that idle
        // tasks are there.
        let other: (&[&str], &str) = (&["begin_new_exec"], "wake_up_new_task");
        for (freed, calls) in [
            (Some(true), [other, EXECUTES]),
            (Some(true), [EXECUTES, other]),
            (None, [EXECUTES, EXCHANGES]),
            (Some(false), [EXECUTES, EXCHANGES]),
        ] {
            let fake = Fake::counting(name);
            let mut attachment = fake.attach();
            attachment.follow().unwrap();
            attachment.note_strangers(&fake.kernel, &members, sites.to_vec(), &calls);
            match freed {
                Some(true) => drop(attachment.release_init(&fake).unwrap()),
                // There is no tripwire where it is freed.
                Some(false) => drop(attachment.leave_init(&fake).unwrap()),
                None => {}
            }
            fake.enable(&mut attachment, &sites).unwrap();
            let noted = fake.annex.slice().read_obj::<u64>(open).unwrap();
            assert_eq!(noted, 0, "{name} {freed:?} {calls:?}");
        }
    }
}

fn updates_go_through_stubs(name: &str) {
    let fake = Fake::new(name);
    let initial = fake.text();
    let mut attachment = fake.attach();
    let before = fake.text();
    let traps = attachment.share(&fake, &fake.kernel, &TRAP).unwrap();
    let changed = before.iter().zip(&fake.text()).filter(|(old, new)| old != new).count();
    assert!((1..=8).contains(&changed), "{name}: two instructions at most: {changed} bytes");
    let moments: Vec<_> = traps.iter().map(|&trap| attachment.moment(trap)).collect();
    let places = [Moment::Begin, Moment::End].into_iter().zip(&traps);
    let expected: Vec<_> = places.map(|(moment, trap)| Some((moment, trap + 8))).collect();
    assert_eq!(moments, expected);
    let start = |at| Hart::at(&fake, at);
    assert!(traps.iter().all(|&trap| fake.read_vec(fake.at(trap), 8) == TRAP));
    if has_literals(&fake) {
        for (trap, function) in traps.iter().zip(["mutex_lock", "mutex_unlock"]) {
            let mut hart = start(trap + 8);
            hart.run();
            assert_eq!(hart.at, fake.link(function));
        }
    } else {
        // One call, and an exit before and behind it; with where that returns to on the stack.
        const RA: usize = 1;
        const SP: usize = 2;
        let [begin, end] = traps[..] else { panic!("{traps:x?}") };
        let mut hart = start(begin + 8);
        (hart.registers[RA], hart.registers[SP]) = (0x1234_5678, 0x8000);
        hart.run();
        assert_eq!((hart.at, hart.registers[RA]), (fake.link("ftrace_modify_all_code"), end));
        assert_eq!((hart.registers[SP], hart.guest.get(&0x7ff0)), (0x7ff0, Some(&0x1234_5678)));
        hart.at = end + 8;
        hart.run();
        assert_eq!((hart.at, hart.registers[SP]), (0x1234_5678, 0x8000));
    }
    assert_eq!(attachment.moment(traps[0] + 8), None);
    attachment.release_all(&fake, &fake.kernel).unwrap();
    assert!(fake.text() == initial, "the image is not as it was");
    // A task may stand before it.
    for trap in traps {
        assert_eq!([0, 4].map(|offset| fake.word(fake.at(trap + offset))), [NOP; 2]);
    }
}

#[test]
fn a_kernel_that_calls_tracers_otherwise_is_left_alone() {
    let functions = [
        (NAME, "ftrace_caller"),
        (NAME, "ftrace_arch_code_modify_post_process"),
        ("riscv64-6.12", "__ftrace_modify_code"),
    ];
    for (name, function) in functions {
        let fake = Fake::new(name);
        let start = fake.at(fake.link(function));
        fake.write(start, &[0x13, 0, 0, 0].repeat(48)).unwrap();
        let mut attachment = fake.attach();
        let before = fake.text();
        attachment.share(&fake, &fake.kernel, &TRAP).unwrap_err();
        assert!(fake.text() == before);
        // And its sites are refused to the guest, as before.
        let site = fake.all()[0];
        fake.enable(&mut attachment, &[site]).unwrap();
        assert_ne!(fake.flags(site), 0);
    }
}

// What is not given back is a tracer of the guest's that is not called any more, what is not taken again
// a function that is not traced, and a chain to a wrong place the end of the guest.
#[test]
fn random_updates_of_both_sides_agree() {
    for name in RISCV {
        random_updates(name);
    }
}

/// Harts that stand between the two instructions of sites.
struct Between<'a> {
    fake: &'a Fake,
    /// First instructions that they can have executed, by site.
    first: BTreeMap<usize, BTreeSet<u32>>,
}

impl Between<'_> {
    /// All harts stand still, and none in there; from then on some do.
    fn begin(&mut self) {
        for (&site, first) in &mut self.first {
            *first = BTreeSet::from([words(self.fake, site)[0]]);
        }
    }

    /// Whatever the first was, the second has led to a program, or to where the guest's does.
    fn go_on(&mut self, programs: &[u64], model: &Model<'_>) {
        let fake = self.fake;
        let starts: BTreeSet<u32> = programs.iter().map(|&it| fake.word(fake.at(it))).collect();
        for (&site, firsts) in &mut self.first {
            let theirs = model.has.get(&site).copied();
            let [first, second] = words(fake, site);
            firsts.insert(first);
            for &first in firsts.iter().filter(|_| second != NOP) {
                let target = call(entry(fake, site), first, second);
                let at = target.unwrap_or_else(|| panic!("site {site}: a jalr alone"));
                if Some(at) == theirs {
                    continue;
                }
                let mut hart = Hart::at(fake, at);
                assert!((gap(fake)..gap(fake) + 0x2800).contains(&at), "site {site}: {at:#x}");
                hart.at = jump(fake, at);
                if !starts.contains(&fake.word(fake.at(hart.at))) {
                    hart.run();
                    assert_eq!(Some(hart.at), theirs, "site {site}");
                }
            }
        }
    }
}

fn random_updates(name: &str) {
    const ROUNDS: usize = 200;
    let fake = Fake::new(name);
    let before = fake.text();
    let mut attachment = fake.attach();
    attachment.share(&fake, &fake.kernel, &TRAP).unwrap();
    let numbers = programs(&fake, &mut attachment);
    let all: Vec<usize> = fake.all().into_iter().step_by(997).take(24).collect();
    let targets = targets(&fake);
    let mut between =
        Between { fake: &fake, first: all.iter().map(|&site| (site, BTreeSet::new())).collect() };
    between.begin();
    let starts = numbers.map(|number| number.1);
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
            let differs = |pair: &(&usize, &usize), other: &BTreeMap<usize, usize>| {
                other.get(pair.0) != Some(pair.1)
            };
            let leave: Vec<usize> =
                held.iter().filter(|pair| differs(pair, &wanted)).map(|pair| *pair.0).collect();
            let restored = attachment.disable(&fake, &leave).unwrap();
            if !has_literals(&fake) {
                between.go_on(&starts, &model);
            }
            assert_eq!((restored.sites, restored.foreign), (leave.len(), vec![]));
            let take = wanted.iter().filter(|pair| differs(pair, &held));
            let take: Vec<_> = take.map(|(&site, &which)| (site, numbers[which].0)).collect();
            let report = attachment.enable(&fake, &fake.kernel, &take).unwrap();
            assert_eq!((report.patched, report.skipped), (take.len(), vec![]));
            held = wanted;
        } else {
            // The guest's.
            let mut wanted = Vec::new();
            for &site in &all {
                let ops = match random(6) {
                    0..3 => continue,
                    3 => None,
                    _ => Some(targets[random(targets.len())]),
                };
                if ops != model.has.get(&site).copied() {
                    wanted.push((site, ops));
                }
            }
            model.announce(&wanted);
            let lent = attachment.lend(&fake, &fake.kernel).unwrap();
            let touched = wanted.iter().filter(|(site, _)| held.contains_key(site)).count();
            assert_eq!((lent.sites, lent.foreign), (touched, vec![]), "round {round}");
            assert!(attachment.is_lent());
            model.update(&wanted);
            let (count, skipped) = attachment.take_again(&fake, &fake.kernel, &TRAP).unwrap();
            assert_eq!((count, skipped), (touched, vec![]), "round {round}");
            between.begin();
        }
        if !has_literals(&fake) {
            between.go_on(&starts, &model);
        }
        assert_eq!(attachment.held(), held.len());
        for &site in &all {
            let guest = model.has.get(&site).copied();
            match held.get(&site) {
                Some(&which) => {
                    let does = does(&fake, site, &starts);
                    assert_eq!(does, (which, guest), "round {round}, site {site}");
                }
                None if has_literals(&fake) => {
                    assert_eq!(fake.bytes(site), model.bytes(site, guest));
                }
                // The first is prepared.
                None => assert_eq!(fake.bytes(site)[4..], model.bytes(site, guest)[4..]),
            }
        }
        let shared = held.keys().filter(|site| model.has.contains_key(site)).count();
        assert_eq!(attachment.shared().values().sum::<usize>(), shared);
        most = most.max(shared);
    }
    assert!(most > all.len() / 3, "{most}");
    attachment.release_all(&fake, &fake.kernel).unwrap();
    if !has_literals(&fake) {
        between.go_on(&starts, &model);
    }
    let wanted: Vec<_> = model.has.keys().map(|&site| (site, None)).collect();
    model.announce(&wanted);
    model.update(&wanted);
    assert!(fake.text() == before, "the image is not as it was");
}

// Programs may be there before sites are shared: one whose place in the tables became a landing would not be
// called any more.
#[test]
fn landings_are_in_no_programs_place() {
    let fake = Fake::new("riscv64-6.12");
    let mut attachment = fake.attach();
    let one = (0..=u8::MAX).map(|tracer| vec![tracer]);
    let two = (1..=u8::MAX).map(|tracer| vec![0, tracer]);
    let made = one
        .chain(two)
        .map_while(|tracers| attachment.program(&fake, &fake.kernel, &Duty::entry(tracers)).ok());
    assert!(made.count() > 400, "nearly all places are programs'");
    let tables = fake.at(gap(&fake) + 0x1000);
    let before = fake.read_vec(tables, 4096);
    attachment.share(&fake, &fake.kernel, &TRAP).unwrap();
    let after = fake.read_vec(tables, 4096);
    let both = before.as_chunks::<4>().0.iter().zip(after.as_chunks::<4>().0);
    let changed: Vec<_> = both.filter(|(before, after)| before != after).collect();
    assert_eq!(changed.len(), 1, "the landing of ftrace_caller");
    assert_eq!(changed[0].0, &[0; 4]);
}

// Who stands between the instructions of a site comes to one place for both targets: the other function's
// BPF program would be called instead.
#[test]
fn direct_callers_that_lie_alike_do_not_share_a_site() {
    const NAME: &str = "riscv64-6.12";
    let fake = Fake::new(NAME);
    let before = fake.text();
    let mut attachment = fake.attach();
    attachment.share(&fake, &fake.kernel, &TRAP).unwrap();
    let sites = &fake.all()[..2];
    fake.enable(&mut attachment, sites).unwrap();
    let [one, other] = [5, 5 + 64].map(|chunk| trampoline(&fake, chunk));
    let mut model = Model { fake: &fake, has: BTreeMap::new() };
    let mut update = |attachment: &mut Attachment, wanted: &[(usize, Option<u64>)]| {
        model.announce(wanted);
        attachment.lend(&fake, &fake.kernel).unwrap();
        model.update(wanted);
        attachment.take_again(&fake, &fake.kernel, &TRAP).unwrap()
    };
    assert_eq!(update(&mut attachment, &[(sites[0], Some(one))]), (1, vec![]));
    let (_, skipped) = update(&mut attachment, &[(sites[1], Some(other))]);
    let reasons: Vec<_> = skipped.iter().map(|skip| (skip.site, skip.reason)).collect();
    assert_eq!(reasons, [(sites[1], SkipReason::GuestOwned("a call"))]);
    assert_eq!(fake.bytes(sites[1]), called(&fake, sites[1], other), "the guest's as a whole");
    assert_eq!(attachment.shared(), BTreeMap::from([(one, 1)]));
    // When the first has gone its place is free.
    assert_eq!(update(&mut attachment, &[(sites[0], None)]), (1, vec![]));
    assert_eq!(update(&mut attachment, &[(sites[1], None)]), (0, vec![]));
    fake.enable(&mut attachment, &sites[1..]).unwrap();
    assert_eq!(update(&mut attachment, &[(sites[1], Some(other))]), (1, vec![]));
    assert_eq!(attachment.shared(), BTreeMap::from([(other, 1)]));
    assert_eq!(update(&mut attachment, &[(sites[1], None)]), (1, vec![]));
    attachment.release_all(&fake, &fake.kernel).unwrap();
    assert!(fake.text() == before, "the image is not as it was");
}

// Whoever wrote there, it was neither side: the end of tracing, and said so.
#[test]
fn what_nobody_wrote_is_told() {
    let fake = Fake::new(NAME);
    let mut attachment = fake.attach();
    attachment.share(&fake, &fake.kernel, &TRAP).unwrap();
    let sites = &fake.all()[..4];
    fake.enable(&mut attachment, sites).unwrap();
    assert!(sites.iter().all(|&site| fake.flags(site) == 0), "nothing is refused to the guest");
    let alone = attachment.take_again(&fake, &fake.kernel, &TRAP);
    assert!(matches!(alone, Err(TraceError::Ftrace(_))));
    let [touched, foreign, odd, _] = sites[..] else { panic!() };
    for site in [touched, foreign, odd] {
        fake.set_flags(site, 1);
    }
    let literal = |site: usize| fake.at(fake.extent(site).0);
    let ours = fake.read_vec(literal(foreign), 8);
    fake.write(literal(foreign), &[7; 8]).unwrap();
    let lent = attachment.lend(&fake, &fake.kernel).unwrap();
    assert_eq!((lent.sites, lent.foreign), (3, vec![foreign]));
    assert_eq!(fake.bytes(touched), disabled(&fake, touched));
    // Called, as its record says; an ops of ours, which is none of the guest's; and a record that
    // says otherwise.
    let ops = fake.link("global_ops");
    fake.write(literal(touched), &called(&fake, touched, ops)).unwrap();
    fake.set_flags(touched, ENABLED | 1);
    fake.write(literal(foreign), &ours).unwrap();
    fake.set_flags(foreign, ENABLED | 1);
    fake.set_flags(odd, ENABLED | 1);
    let (count, mut skipped) = attachment.take_again(&fake, &fake.kernel, &TRAP).unwrap();
    skipped.sort_by_key(|skip| skip.site);
    let reasons: Vec<_> = skipped.iter().map(|skip| (skip.site, skip.reason)).collect();
    let other = SkipReason::GuestOwned("the ops of another tracer");
    assert_eq!(
        (count, &reasons[..]),
        (3, &[(foreign, other), (odd, SkipReason::GuestEnabled)][..])
    );
    assert_eq!(attachment.shared(), BTreeMap::from([(ops, 1)]));
}

// A function that has a kprobe as well is traced by both.
#[test]
fn a_kprobe_at_the_entry_is_left_where_it_is() {
    const EBREAK: [u8; 4] = [0x73, 0, 0x10, 0];
    let fake = Fake::new(NAME);
    let mut attachment = fake.attach();
    attachment.share(&fake, &fake.kernel, &TRAP).unwrap();
    for (site, is_shared) in [(fake.all()[3], false), (fake.all()[4], true)] {
        let at = fake.at(entry(&fake, site));
        if is_shared {
            let bytes = called(&fake, site, fake.link("global_ops"));
            fake.write(fake.at(fake.extent(site).0), &bytes).unwrap();
            fake.set_flags(site, ENABLED | 1);
        }
        fake.write(at, &EBREAK).unwrap();
        let before = fake.bytes(site);
        let report = fake.enable(&mut attachment, &[site]).unwrap();
        assert_eq!((report.patched, report.skipped), (1, vec![]));
        assert_eq!(
            (fake.read_vec(at, 4), fake.word(at + 4) & 0xf_ffff),
            (EBREAK.to_vec(), 0x282e7)
        );
        assert_ne!(fake.bytes(site)[..8], before[..8]);
        attachment.disable(&fake, &[site]).unwrap();
        assert_eq!(fake.bytes(site), before);
    }
}

// A hart that has read the guest's ops a moment before, and reads what the literal has then, calls the
// guest's tracer all the same.
#[test]
fn a_trap_on_a_shared_site_loses_no_call_of_the_guests() {
    const A2: usize = 12;
    const FUNC: u64 = 0x1234_5670;
    let fake = Fake::new(NAME);
    let mut attachment = fake.attach();
    attachment.share(&fake, &fake.kernel, &TRAP).unwrap();
    let (site, ops) = (fake.all()[3], fake.link("global_ops"));
    let literal = fake.at(fake.extent(site).0);
    fake.write(literal, &called(&fake, site, ops)).unwrap();
    fake.set_flags(site, ENABLED | 1);
    let stub = attachment.arm(&fake, &fake.kernel, site, &TRAP).unwrap().unwrap() - 4;
    assert_eq!(direct(&fake, site), stub);
    let ours = fake.read_u64(literal).unwrap();
    assert_ne!(ours, ops);
    let [func, _] = members(&fake);
    let mut hart = Hart::at(&fake, 0);
    hart.at = hart.load(ours + func);
    hart.guest = BTreeMap::from([(ops + func, FUNC)]);
    hart.run();
    assert_eq!((hart.at, hart.registers[A2]), (FUNC, ops));
    attachment.disarm(&fake, site).unwrap();
    assert_eq!(fake.bytes(site), called(&fake, site, ops));
}

// A trap that comes back when it is over would stop the guest for ever.
#[test]
fn a_trap_is_lent_and_laid_again_unless_it_is_over() {
    let fake = Fake::new(NAME);
    let mut attachment = fake.attach();
    attachment.share(&fake, &fake.kernel, &TRAP).unwrap();
    let site = fake.all()[3];
    let trap = attachment.arm(&fake, &fake.kernel, site, &TRAP).unwrap().unwrap();
    let stub = trap - 4;
    assert_eq!(direct(&fake, site), stub);
    fake.set_flags(site, 1);
    assert_eq!(attachment.lend(&fake, &fake.kernel).unwrap().sites, 1);
    assert_eq!(fake.bytes(site), disabled(&fake, site));
    let bytes = called(&fake, site, fake.link("global_ops"));
    fake.write(fake.at(fake.extent(site).0), &bytes).unwrap();
    fake.set_flags(site, ENABLED | 1);
    attachment.take_again(&fake, &fake.kernel, &TRAP).unwrap();
    assert_eq!(direct(&fake, site), stub);
    fake.set_flags(site, ENABLED);
    attachment.lend(&fake, &fake.kernel).unwrap();
    assert_eq!(fake.bytes(site), bytes);
    attachment.disarm(&fake, site).unwrap();
    assert_eq!(attachment.take_again(&fake, &fake.kernel, &TRAP).unwrap(), (0, vec![]));
    assert_eq!(fake.bytes(site), bytes);
}
