//! Which returns are found, and which functions are covered.

use crate::image::{Code, alternatives, functions};
use crate::kernels::{each, epilogues, images, name_of};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use vmtrace_kernel::epilogues::{Coverage, Displaced, Missing, PlannedExit, Step};
use vmtrace_kernel::{Kernel, KernelError, SiteSection};

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
