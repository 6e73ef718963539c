//! The exits of the real riscv64 kernels in the cache, and what rewriting them does. Their
//! versions move, so that nothing here depends on one build's numbers.

// Small numbers are cut to size all over the place here.
#![allow(clippy::cast_possible_truncation, clippy::cast_precision_loss)]

mod builder;
mod hart;
mod image;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use builder::{Layout, Machine, Options};
use hart::{Hart, mix};
use image::{Code, Windows, alternatives, branch_target, functions, pairs, window};
use proptest::prelude::*;
use vmtrace_kernel::epilogues::{
    Coverage, Displaced, Epilogues, LINK, Missing, Plan, PlannedExit, Step,
};
use vmtrace_kernel::{Kernel, KernelError, SiteSection};

/// Where the stubs are in these tests, and the handler that they call.
const STUB: u64 = 0xffff_ffff_8400_0000;
const HANDLER: u64 = STUB - 0x8_0000;
const ID: u32 = 0x1d1d_0001;

fn images() -> Vec<(String, PathBuf)> {
    let cache = std::env::var_os("VMTRACE_CACHE").map(PathBuf::from).unwrap_or_else(|| {
        Path::new(&std::env::var_os("HOME").expect("HOME")).join(".cache/vmtrace")
    });
    let folders = std::fs::read_dir(cache.join("kernels"));
    let folders = folders.expect("no kernels in the cache: run scripts/setup");
    let images = folders.map(|entry| {
        let entry = entry.unwrap();
        (entry.file_name().into_string().unwrap(), entry.path().join("vmlinuz"))
    });
    images.filter(|(_, image)| image.exists()).collect()
}

/// The riscv64 kernels, each read once, with the plan for all functions.
fn each(mut check: impl FnMut(&str, &Kernel, &Plan)) {
    static KERNELS: OnceLock<Vec<(String, Kernel, Plan)>> = OnceLock::new();
    let kernels = KERNELS.get_or_init(|| {
        let riscv = images().into_iter().filter(|(name, _)| name.starts_with("riscv64"));
        let read = riscv.map(|(name, image)| {
            let kernel = Kernel::open(&image).unwrap_or_else(|e| panic!("{name}: {e}"));
            let all: Vec<usize> = (0..kernel.sites().len()).collect();
            let plan = epilogues(&kernel).plan(&all);
            (name, kernel, plan)
        });
        read.collect()
    });
    for (name, kernel, plan) in kernels {
        check(name, kernel, plan);
    }
}

fn epilogues(kernel: &Kernel) -> &Epilogues {
    kernel.epilogues().unwrap_or_else(|e| panic!("{e}"))
}

fn name_of(kernel: &Kernel, site: u32) -> &str {
    kernel.site_name(&kernel.sites()[site as usize]).unwrap_or("?")
}

/// How the window of an exit begins, and how many relays it takes.
fn kind(exit: &PlannedExit) -> String {
    let word = |step| match step {
        Step::Short { .. } => "c.j",
        Step::Near { .. } => "jal",
        Step::Far => "far",
    };
    exit.jumps.iter().map(|jump| word(jump.step)).collect::<Vec<_>>().join(" ")
}

#[test]
fn nearly_all_functions_are_covered_as_a_whole() {
    each(|name, kernel, plan| {
        let epilogues = epilogues(kernel);
        let mut figures: BTreeMap<String, usize> = BTreeMap::new();
        let mut text = 0;
        for (i, site) in kernel.sites().iter().enumerate() {
            let coverage = epilogues.coverage(i);
            if site.section == SiteSection::InitText {
                assert_eq!(coverage, Coverage::None(Missing::StartUp));
                continue;
            }
            text += 1;
            *figures.entry(format!("{coverage:?}")).or_default() += 1;
        }
        let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
        for exit in &plan.exits {
            *kinds.entry(kind(exit)).or_default() += 1;
        }
        let stubs: usize = plan.exits.iter().map(PlannedExit::stub_len).sum();
        println!("{name}: {text} functions {figures:?}");
        println!("{name}: {} exits {kinds:?}, {stubs} bytes of stubs", plan.exits.len());
        let with = |kind: fn(&Displaced) -> bool| {
            plan.exits.iter().filter(|exit| exit.epilogue.displaced.iter().any(kind)).count()
        };
        let branches = with(|displaced| matches!(displaced, Displaced::Branch { .. }));
        let addresses = with(|displaced| matches!(displaced, Displaced::Auipc { .. }));
        println!("{name}: branches in {branches} windows, auipc in {addresses}");
        for out in &plan.left_out {
            println!("{name}: left out {:#x} {}: {}", out.ret, name_of(kernel, out.site), out.why);
        }
        let share = |n: usize, of: usize| n as f64 / of as f64;
        assert!(share(figures["Whole"], text) >= 0.995, "{name}: {figures:?}");
        // Functions that never return are all that is missing, but for a handful.
        assert!(share(figures["None(NoReturn)"], text) < 0.003, "{name}: {figures:?}");
        let others = text - figures["Whole"] - figures["None(NoReturn)"];
        assert!(share(others, text) < 0.001, "{name}: {figures:?}");
        // What is covered elsewhere in these kernels: 1.3 to 1.5 exits a function, nine of ten
        // with room for a jump to anywhere.
        let exits = plan.exits.len();
        assert!((1.2..1.6).contains(&share(exits, text)), "{name}: {exits}");
        assert!(share(kinds["far"], exits) > 0.88, "{name}: {kinds:?}");
        assert!(share(plan.left_out.len(), exits) < 0.001, "{name}: {}", plan.left_out.len());
        assert!(plan.exits.iter().all(|exit| !exit.helper), "{name}: all are asked for");
        for site in plan.left_out.iter().map(|out| out.site as usize) {
            assert_ne!(epilogues.coverage(site), Coverage::Whole);
        }
    });
}

// Who asks a kernel for its exits need not know how they are redirected.
#[test]
fn exits_are_those_of_the_plan_for_all_functions() {
    each(|name, kernel, plan| {
        let exits = kernel.exits().unwrap();
        let planned = plan.exits.iter().map(|exit| (exit.epilogue.ret, exit.epilogue.site));
        let found = exits.all().iter().map(|exit| (exit.address, exit.site));
        assert_eq!(found.collect::<BTreeSet<_>>(), planned.collect(), "{name}");
        assert_eq!(exits.all().len(), plan.exits.len(), "{name}");
        for site in 0..kernel.sites().len() {
            let whole = epilogues(kernel).coverage(site) == Coverage::Whole;
            assert_eq!(exits.coverage(site) == vmtrace_kernel::Coverage::Whole, whole, "{name}");
        }
    });
}

#[test]
fn every_return_of_a_function_is_in_the_plan() {
    each(|name, kernel, plan| {
        let planned: BTreeSet<u64> = plan.exits.iter().map(|exit| exit.epilogue.ret).collect();
        let left_out: BTreeSet<u64> = plan.left_out.iter().map(|out| out.ret).collect();
        assert_eq!(planned.len(), plan.exits.len(), "{name}: an exit stands there twice");
        let replacements = alternatives(kernel).into_iter().map(|(_, new)| new).collect::<Vec<_>>();
        let code = Code::of(kernel);
        for (site, function) in functions(kernel) {
            for (address, word) in code.instructions(function) {
                let ret = matches!(word, 0x8082 | 0x8067);
                let elsewhere = || replacements.iter().any(|new| new.contains(&address));
                if ret && !planned.contains(&address) && !elsewhere() {
                    assert!(
                        left_out.contains(&address),
                        "{name}: {} {address:#x}",
                        name_of(kernel, site)
                    );
                }
            }
        }
    });
}

#[test]
fn writes_stay_in_windows_and_never_meet() {
    each(|name, kernel, plan| {
        check_writes(name, kernel, plan);
        check_tables(name, kernel, plan);
    });
}

/// What needs its place in the text, or is changed by the kernel, is in no window.
fn check_tables(name: &str, kernel: &Kernel, plan: &Plan) {
    let windows = Windows::of(plan);
    for (from, to) in pairs::<12>(kernel, "__start___ex_table", "__stop___ex_table") {
        assert!(!windows.touches(from..from + 2), "{name}: {from:#x} may fault");
        assert!(!windows.inside(to), "{name}: a fixup leads to {to:#x}");
    }
    for (from, to) in pairs::<16>(kernel, "__start___jump_table", "__stop___jump_table") {
        assert!(!windows.touches(from..from + 4), "{name}: {from:#x} is a jump label");
        assert!(!windows.inside(to), "{name}: a jump label leads to {to:#x}");
    }
    for (old, new) in alternatives(kernel) {
        assert!(!windows.touches(old.clone()), "{name}: {old:x?} is replaced");
        assert!(!windows.touches(new.clone()), "{name}: {new:x?} replaces");
    }
    for site in kernel.sites() {
        assert!(!windows.touches(site.location..site.entry + 8), "{name}: {site:x?}");
    }
    for symbol in kernel.symbols().iter() {
        assert!(!windows.inside(symbol.address), "{name}: {} is in a window", symbol.name);
    }
    // Functions, labels of computed gotos.
    for word in kernel.vmlinux().as_chunks().0 {
        let target = u64::from_le_bytes(*word);
        assert!(!windows.inside(target), "{name}: a pointer leads to {target:#x}");
    }
}

/// Every byte is written by one exit at most, within windows, and is known.
fn check_writes(name: &str, kernel: &Kernel, plan: &Plan) {
    let windows = Windows::of(plan);
    let mut written: Vec<Range<u64>> = Vec::new();
    for exit in &plan.exits {
        let site = kernel.sites()[exit.epilogue.site as usize];
        let window = window(exit);
        assert!(window.start >= site.entry + 8, "{name}: {exit:x?}");
        assert!(window.contains(&exit.epilogue.ret) && (6..=31).contains(&exit.epilogue.scratch));
        let writes = exit.writes(STUB).expect("in reach");
        let original = exit.original(kernel).expect("in the image");
        assert_eq!(writes.len(), original.len());
        assert_eq!(writes[0].0, window.start);
        for ((at, new), (old_at, old)) in writes.iter().zip(&original) {
            let range = *at..at + new.len() as u64;
            assert_eq!((at, new.len()), (old_at, old.len()));
            assert!(windows.around(&range), "{name}: {range:x?} is in no window");
            written.push(range);
        }
        let stub = exit.stub(STUB, Some(HANDLER), ID).expect("in reach");
        assert_eq!(stub.len(), exit.stub_len());
        assert_eq!(exit.slot_offset() % 4, 0);
        assert_eq!(stub[exit.slot_offset()..][..4], exit.slot(STUB, Some(HANDLER)).unwrap());
        assert!(exit.writes(STUB - (1 << 32)).is_none(), "a stub 4 GiB away");
        assert!(exit.stub(STUB, Some(HANDLER - (1 << 21)), ID).is_none(), "a handler 2 MiB away");
        assert!(exit.stub(STUB + 2, Some(HANDLER), ID).is_none(), "a slot that is no whole word");
    }
    written.sort_by_key(|range| range.start);
    for pair in written.windows(2) {
        assert!(pair[0].end <= pair[1].start, "{name}: {pair:x?} are written twice");
    }
    // And nothing of a window is left as it was.
    let bytes = |ranges: &[Range<u64>]| ranges.iter().map(|r| r.end - r.start).sum::<u64>();
    assert_eq!(bytes(&written), bytes(&windows.0), "{name}");
}

#[test]
fn nothing_jumps_into_a_window() {
    each(|name, kernel, plan| {
        let windows = Windows::of(plan);
        let code = Code::of(kernel);
        let mut branches = 0;
        for function in code.all() {
            for (address, word) in code.instructions(function) {
                if let Some(target) = branch_target(address, word) {
                    branches += 1;
                    assert!(!windows.inside(target), "{name}: {address:#x} jumps to {target:#x}");
                }
            }
        }
        assert!(branches > 300_000, "{name}: {branches}");
        // `case` labels, by tables of distances from their own start.
        let mut cases = 0;
        for (site, function) in functions(kernel) {
            let tables = code.tables(function.clone());
            if tables.is_empty() {
                continue;
            }
            for table in tables {
                for entry in (table..).step_by(4) {
                    let Some(bytes) = kernel.bytes(entry, 4) else { break };
                    let distance = i32::from_le_bytes(bytes.try_into().unwrap());
                    let target = table.wrapping_add_signed(distance.into());
                    if !function.contains(&target) || target % 2 != 0 {
                        break;
                    }
                    cases += 1;
                    let what = name_of(kernel, site);
                    assert!(!windows.inside(target), "{name}: a case of {what}, {target:#x}");
                }
            }
        }
        println!("{name}: {branches} branches, {cases} cases");
        assert!(cases > 3000, "{name}: {cases}");
    });
}

#[test]
fn rewritten_exits_do_what_they_did() {
    each(|name, kernel, plan| {
        let special = |exit: &PlannedExit| {
            exit.epilogue.displaced.iter().any(|d| !matches!(d, Displaced::Copy { .. }))
        };
        let mut random = Random(1);
        let mut runs = [0_usize; 3];
        let mut exits = 0;
        for exit in &plan.exits {
            let special = special(exit);
            if !special && !exit.jumps.is_empty() && random.below(10) > 0 {
                continue;
            }
            exits += 1;
            for _ in 0..if special { 8 } else { 3 } {
                runs[compare(name, kernel, exit, &mut random)] += 1;
            }
        }
        println!("{name}: {exits} exits ran; branched away, returned off and on: {runs:?}");
        assert!(exits > 5000 && runs.iter().all(|&n| n > 500), "{name}: {exits} {runs:?}");
    });
}

/// Runs a window as it was and as it will be. Returns 0 if it was left by a branch, otherwise
/// 1 without and 2 with a call of the handler.
fn compare(name: &str, kernel: &Kernel, exit: &PlannedExit, random: &mut Random) -> usize {
    let on = random.below(2) == 1;
    let stub_at = STUB + 4 * random.below(1 << 16);
    let handler = stub_at - 0x8_0000;
    let halfword = |address: u64| {
        let bytes = kernel.bytes(address, 2).expect("only the window runs");
        u16::from_le_bytes(bytes.try_into().unwrap())
    };
    let window = window(exit);
    let registers = random.registers();
    let context = || format!("{name}: {} {exit:x?}", name_of(kernel, exit.epilogue.site));

    let mut before = Hart::new(registers, window.start, halfword);
    for steps in 0.. {
        assert!(steps < 100, "{}", context());
        before.step();
        if !window.contains(&before.pc) || before.pc == window.start {
            break;
        }
    }

    let mut new: HashMap<u64, u16> = HashMap::new();
    let mut put = |at: u64, bytes: &[u8]| {
        for (i, half) in (0..).step_by(2).zip(bytes.as_chunks().0) {
            new.insert(at + i, u16::from_le_bytes(*half));
        }
    };
    let mut stub = exit.stub(stub_at, Some(handler), ID).unwrap();
    if !on {
        let slot = exit.slot_offset();
        stub[slot..slot + 4].copy_from_slice(&exit.slot(stub_at, None).unwrap());
    }
    for (at, bytes) in exit.writes(stub_at).unwrap() {
        put(at, &bytes);
    }
    put(stub_at, &stub);
    put(handler, &(0x67 | u32::from(LINK) << 15).to_le_bytes());
    let mut after = Hart::new(registers, window.start, |address| {
        *new.get(&address).unwrap_or_else(|| panic!("runs {address:#x}: {}", context()))
    });
    let mut calls = 0;
    for steps in 0.. {
        assert!(steps < 200, "{}", context());
        after.step();
        if after.pc == handler {
            calls += 1;
            let id = after.word(after.x[usize::from(LINK)] + 4);
            assert_eq!(id, ID, "{}", context());
        }
        if !new.contains_key(&after.pc) || after.pc == window.start {
            break;
        }
    }

    // The jump's register is free, and with a call the one that it links, too.
    let returned = before.pc == before.x[1] & !1;
    for x in [&mut before.x, &mut after.x] {
        x[usize::from(exit.epilogue.scratch)] = 0;
        if calls > 0 {
            x[usize::from(LINK)] = 0;
        }
    }
    assert_eq!(before.pc, after.pc, "{}", context());
    assert_eq!(before.x, after.x, "{}", context());
    assert_eq!(before.stores, after.stores, "{}", context());
    assert_eq!(before.effects, after.effects, "{}", context());
    assert_eq!(calls, usize::from(returned && on), "{}", context());
    usize::from(returned) + calls
}

#[test]
fn some_functions_can_be_planned_alone() {
    each(|name, kernel, _| {
        let epilogues = epilogues(kernel);
        for glob in ["vfs_*", "_raw_spin_*", "sched_*", "vfs_read"] {
            let wanted = kernel.select(&[glob.to_owned()], &[]).unwrap();
            let plan = epilogues.plan(&wanted);
            let helpers = plan.exits.iter().filter(|exit| exit.helper).count();
            println!(
                "{name}: {glob}: {} functions, {} exits, {helpers} helpers, {} left out",
                wanted.len(),
                plan.exits.len(),
                plan.left_out.len()
            );
            check_part(name, kernel, &wanted, &plan);
            assert!(plan.left_out.is_empty(), "{name}: {glob}: {:x?}", plan.left_out);
        }
    });
}

#[test]
fn each_function_alone_is_as_well_covered_as_with_all() {
    each(|name, kernel, all| {
        let epilogues = epilogues(kernel);
        let mut random = Random(2);
        let mut worse = 0;
        for _ in 0..80 {
            // Half of them with an exit that needs another window.
            let site = if random.below(2) == 0 {
                random.below(kernel.sites().len() as u64) as usize
            } else {
                let needy: Vec<_> = all.exits.iter().filter(|exit| exit.jumps.len() > 1).collect();
                needy[random.below(needy.len() as u64) as usize].epilogue.site as usize
            };
            let plan = epilogues.plan(&[site]);
            check_part(name, kernel, &[site], &plan);
            let whole = epilogues.coverage(site) == Coverage::Whole;
            worse += usize::from(whole && !plan.left_out.is_empty());
        }
        assert!(worse <= 1, "{name}: {worse}");
        assert!(epilogues.plan(&[]).exits.is_empty());
        assert!(epilogues.plan(&[usize::MAX]).exits.is_empty());
    });
}

/// A plan has the exits of its functions, and no more of others than it needs.
fn check_part(name: &str, kernel: &Kernel, wanted: &[usize], plan: &Plan) {
    check_writes(name, kernel, plan);
    for exit in &plan.exits {
        let asked = wanted.contains(&(exit.epilogue.site as usize));
        assert_eq!(exit.helper, !asked, "{name}: {exit:x?}");
        assert!(asked || exit.lent > 0, "{name}: a helper of nobody, {exit:x?}");
    }
}

#[test]
fn planning_takes_no_time() {
    for (name, image) in images().into_iter().filter(|(name, _)| name.starts_with("riscv64")) {
        let kernel = Kernel::open(&image).unwrap();
        let all: Vec<usize> = (0..kernel.sites().len()).collect();
        let start = Instant::now();
        let epilogues = epilogues(&kernel);
        let analysed = start.elapsed();
        let plan = epilogues.plan(&all);
        let planned = start.elapsed();
        println!("{name}: analysis {analysed:?}, and the plan for all {:?}", planned - analysed);
        let limit = if cfg!(debug_assertions) { 15.0 } else { 1.5 };
        assert!(planned < Duration::from_secs_f64(limit), "{name}: {planned:?}");
        assert!(!plan.exits.is_empty());
    }
}

#[test]
fn x86_kernels_are_refused() {
    for (name, image) in images().into_iter().filter(|(name, _)| name.starts_with("x86_64")).take(1)
    {
        let kernel = Kernel::open(&image).unwrap();
        let error = kernel.epilogues().map(|_| ()).expect_err(&name);
        assert!(matches!(error, KernelError::NoEpilogues(_)), "{error}");
    }
}

/// An instruction of some kind, in the bits that are left open any.
fn instruction() -> impl Strategy<Value = Vec<u8>> {
    let short = |code: u16, open: u16| {
        any::<u16>().prop_map(move |bits| (code | bits & open).to_le_bytes().to_vec())
    };
    let full = |code: u32, open: u32| {
        any::<u32>().prop_map(move |bits| (code | bits & open).to_le_bytes().to_vec())
    };
    let epilogue = prop_oneof![
        Just(0x60a2_u16), // ld ra, 8(sp)
        Just(0x6402),     // ld s0, 0(sp)
        Just(0x6105),     // addi sp, sp, 32
        Just(0x8526),     // mv a0, s1
    ];
    let fixed = prop_oneof![
        Just(0x1005_b52f_u32), // lr.d a0, (a1)
        Just(0x18d7_262f),     // sc.w a2, a3, (a4)
        Just(0x0010_0073),     // ebreak
        Just(0x0000_80e7),     // jalr ra
        Just(0x0000_100b),     // not known
    ];
    prop_oneof![
        8 => epilogue.prop_map(|code| code.to_le_bytes().to_vec()),
        2 => Just(vec![0x82, 0x80]),           // ret
        1 => Just(vec![0x67, 0x80, 0, 0]),     // ret
        2 => full(0x0000_0513, 0xfffd_8000),   // addi a0, any, any
        1 => full(0x0000_0313, 0xf005_8f80),   // addi any, some, any
        1 => full(0x0065_0533, 0x001f_8000),   // add a0, some, t1 and others
        1 => full(0x00a5_3023, 0xfe00_0f80),   // sd a0, any(a0)
        1 => full(0x0000_0597, 0x0000_f000),   // auipc a1, a little
        2 => short(0xc001, 0x2f98),            // beqz or bnez, ahead
        1 => short(0xd065, 0x2f98),            // the same, back
        1 => full(0x0000_0063, 0x01f0_9f00),   // beq or bne, ahead
        1 => short(0xa001, 0x0018),            // j, ahead
        1 => short(0xa001, 0x1ffc),            // j anywhere
        1 => full(0x1000_2573, 0x000f_8000),   // csrrs a0, sstatus, any
        1 => fixed.prop_map(|code| code.to_le_bytes().to_vec()),
    ]
}

fn bodies() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let body = prop::collection::vec(instruction(), 0..24).prop_map(|instructions| {
        let mut body = instructions.concat();
        body.extend([0x82, 0x80]);
        body
    });
    prop::collection::vec(body, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    // Whatever functions are made of: no write meets another, nothing jumps into a window, and
    // what runs does the same as before.
    #[test]
    fn any_functions_are_rewritten_soundly(
        bodies in bodies(),
        call_ops in any::<bool>(),
        one in any::<prop::sample::Index>(),
        seed in any::<u64>(),
    ) {
        let machine = if call_ops { Machine::RiscvCallOps } else { Machine::Riscv };
        let options = Options::new(machine, Layout::AfterBase);
        let built = builder::build(&Options { bodies, btf: false, ..options });
        let kernel = Kernel::parse(built.image).unwrap();
        let epilogues = epilogues(&kernel);
        let all: Vec<usize> = (0..kernel.sites().len()).collect();
        let one = one.index(all.len());
        for wanted in [&all, &all[one..=one], &all[one / 2..=one]] {
            let plan = epilogues.plan(wanted);
            check_part("synthetic", &kernel, wanted, &plan);
            check_tables("synthetic", &kernel, &plan);
            let windows = Windows::of(&plan);
            let code = Code::of(&kernel);
            for (address, word) in code.all().flat_map(|range| code.instructions(range)) {
                let target = branch_target(address, word);
                prop_assert!(!target.is_some_and(|target| windows.inside(target)), "{:x}", address);
            }
            let mut random = Random(seed);
            for exit in &plan.exits {
                compare("synthetic", &kernel, exit, &mut random);
            }
        }
    }
}

#[test]
fn what_cannot_be_seen_of_a_function_is_told() {
    const EPILOGUE: [u16; 4] = [0x60a2, 0x6402, 0x6105, 0x8082];
    let body = |code: &[u16], tail: &[u16]| -> Vec<u8> {
        code.iter().chain(tail).flat_map(|half| half.to_le_bytes()).collect()
    };
    let cases: [(Vec<u8>, Coverage); 10] = [
        // Long enough for the landings of others.
        (body(&[0x8526; 24], &EPILOGUE), Coverage::Whole),
        // beqz a0, to the last two instructions; then j there.
        (body(&[0xc119, 0xa011], &EPILOGUE), Coverage::Whole),
        (body(&[0x9002], &[]), Coverage::None(Missing::NoReturn)),
        // auipc t1, 0x80; jr t1
        (body(&[0x0317, 0x0008, 0x8302], &[]), Coverage::None(Missing::Leaves)),
        (body(&[0x0317, 0x0008, 0x8302], &EPILOGUE), Coverage::Partial(Missing::Leaves)),
        // j .+0x80000
        (body(&[0x006f, 0x0008], &EPILOGUE), Coverage::Partial(Missing::Leaves)),
        // ld a5, 0(a0); jr a5: to no place in this function.
        (body(&[0x611c, 0x8782], &EPILOGUE), Coverage::Partial(Missing::Unclear)),
        // add a5, a5, a4; jr a5: by no table.
        (body(&[0x97ba, 0x8782], &EPILOGUE), Coverage::Partial(Missing::Unclear)),
        // The loaded register is another one on the way by the branch, which leads to the jump.
        (body(&[0xc111, 0x611c, 0x8782], &EPILOGUE), Coverage::Partial(Missing::Unclear)),
        // add a0, a0, t1; beqz a0, back to it: t1 cannot be the jump's.
        (body(&[0x0533, 0x0065, 0xdd75], &EPILOGUE[1..]), Coverage::Whole),
    ];
    for machine in [Machine::Riscv, Machine::RiscvCallOps] {
        let bodies = cases.iter().map(|(body, _)| body.clone()).collect();
        let options = Options::new(machine, Layout::Relative);
        let built = builder::build(&Options { bodies, ..options });
        let kernel = Kernel::parse(built.image).unwrap();
        let epilogues = epilogues(&kernel);
        // Behind those that the tables name, and one whole turn.
        for (site, (body, coverage)) in (20..).zip(&cases) {
            assert_eq!(epilogues.coverage(site), *coverage, "{body:x?}");
            let plan = epilogues.plan(&[site]);
            let own = plan.exits.iter().filter(|exit| !exit.helper);
            let t1 = body.starts_with(&[0x33, 0x05]);
            let clear = !matches!(coverage, Coverage::Partial(Missing::Unclear));
            for exit in own {
                // Anything may jump into a function that is not understood.
                assert_eq!(exit.epilogue.len == 2, !clear, "{body:x?}: {exit:x?}");
                assert_eq!(exit.epilogue.scratch != 6, t1, "{body:x?}: {exit:x?}");
            }
        }
        assert_eq!(epilogues.coverage(950), Coverage::None(Missing::StartUp));
    }
}

/// Numbers that are the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 += 1;
        mix(&[self.0])
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// Registers whose values branches tell apart, and often enough do not.
    fn registers(&mut self) -> [u64; 32] {
        let mut registers = [0; 32];
        for register in &mut registers[1..] {
            *register = match self.below(4) {
                0 => 0,
                1 => self.below(3).wrapping_sub(1),
                _ => self.next(),
            };
        }
        // A place to return to, and a stack.
        registers[1] = 0xffff_ffff_9000_0000 + 2 * self.below(1 << 20);
        registers[2] = self.next() & !15;
        registers
    }
}
