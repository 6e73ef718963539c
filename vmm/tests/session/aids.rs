//! Calls that go on in functions that are not traced, on real images.

use super::fake_guest::{kernel, kernels};
use super::machine::{FakeVm, Step, Trouble};
use super::orders::{RETURN, patch};
use super::{Subject, boot};
use std::collections::{BTreeMap, BTreeSet};
use vmtrace::kernel::{After, Coverage, Exit, ExitKind, Kernel};
use vmtrace::serve::Control;
use vmtrace::session::{Plan, Tracer, Tracing};
use vmtrace::tracer::Guest as _;
use vmtrace_trampolines::Overflow;

// Who traces a function that goes on in another one, and not that one, sees its calls end there; where they may not be
// seen to end, that is told.
#[test]
fn functions_that_end_in_others_are_known() {
    for name in kernels() {
        let kernel = kernel(name);
        let exits = kernel.exits().unwrap();
        let tracing = |sites: Vec<usize>| {
            let tracer = Tracer { sites, graph: true, ..Tracer::default() };
            Tracing { tracers: vec![Some(tracer)], ..Tracing::of(Vec::new(), Overflow::Drop) }
        };
        let jumping = |sites: Vec<usize>| tracing(sites).jumping(&kernel);
        let [from, to] = ["vfs_fchmod", "chmod_common"].map(|it| kernel.site_of(it).unwrap());
        for sites in
            [vec![from], vec![from.min(to), from.max(to)], (0..kernel.sites().len()).collect()]
        {
            assert_eq!(jumping(sites), BTreeMap::new(), "{name}");
        }
        let ends = |sites| {
            let is_whole = |site: u32| exits.coverage(site as usize) == Coverage::Whole;
            let plan = Plan::with_modules(&tracing(sites), &[], exits.all(), &is_whole);
            let ends = |duty: u32| plan.duties[duty as usize].parts.iter().any(|part| part.aid);
            let exits = plan.exits.iter().filter(|(_, duty)| ends(*duty));
            exits.map(|&(exit, _)| exits_site(&kernel, exit)).collect::<BTreeSet<_>>()
        };
        let jumps = |site: usize, unseen: bool| {
            let whole = exits.coverage(site) == Coverage::Whole;
            let mut targets = exits.of(site).iter().filter_map(|exit| match exit.kind {
                ExitKind::Jump { target } if exit.after == After::Nothing => Some(target),
                _ => None,
            });
            let site_at = |target| kernel.sites().iter().position(|site| site.entry == target);
            let is_it = |target: &u64| {
                site_at(*target).is_some_and(|it| (exits.coverage(it) != Coverage::Whole) == unseen)
            };
            targets.find(is_it).filter(|_| whole)
        };
        if name.starts_with("riscv64") {
            // No kernel of riscv64 has such jumps.
            assert!((0..kernel.sites().len()).all(|site| jumps(site, false).is_none()), "{name}");
            continue;
        }
        assert!(ends(vec![from]).contains(&to), "{name}");
        assert_eq!(ends(vec![from.min(to), from.max(to)]), BTreeSet::new(), "{name}");
        let unseen = (0..kernel.sites().len()).find_map(|site| Some((site, jumps(site, true)?)));
        let (site, _) = unseen.unwrap();
        assert!(jumping(vec![site]).contains_key(&site), "{name}");
        let is_seen = |site: &usize| {
            *site == Exit::NO_SITE as usize || exits.coverage(*site) == Coverage::Whole
        };
        assert!(ends(vec![site]).iter().all(is_seen), "{name}: a mark may be left over");
    }
}

fn exits_site(kernel: &Kernel, exit: usize) -> usize {
    kernel.exits().unwrap().all()[exit].site as usize
}

// Where a security module has the last place, a function may be left for it: who jumps to that function would leave a mark,
// which would be taken for that of another call.
#[test]
fn ends_are_looked_for_where_no_security_module_is_called() {
    const JUMPS: &str = "inode_permission";
    const TO: &str = "security_inode_permission";
    fn held(vm: &FakeVm) -> bool {
        let kernel = &vm.fake.kernel;
        let all = kernel.exits().unwrap().of(kernel.site_of(TO).unwrap());
        let mut returns = all.iter().filter(|exit| exit.kind == ExitKind::Return);
        returns.any(|exit| vm.fake.read_vec(vm.fake.at(exit.address), 5) != RETURN)
    }
    fn none(vm: &FakeVm) {
        patch(vm);
        for &(_, address) in vm.fake.kernel.exits().unwrap().fixed_calls() {
            vm.fake.ram().write(vm.fake.at(address), &RETURN).unwrap();
        }
    }
    let subject = Subject::new("x86_64-6.12");
    let kernel = &subject.fake.kernel;
    let to = kernel.sites()[kernel.site_of(TO).unwrap()].entry;
    let mut own = kernel.exits().unwrap().of(kernel.site_of(JUMPS).unwrap()).iter();
    assert!(own.any(|exit| exit.kind == ExitKind::Jump { target: to }));
    let add = Control::TracerAdd(format!("jumps={JUMPS}:graph").parse().unwrap());
    let run = |patched: Step, held: Step| {
        let mut steps = boot();
        steps[2] = patched;
        steps.extend([Step::Asks(vec![add.clone()]), held]);
        let ran = subject.run(steps, Trouble::default());
        assert!(ran.answers[0].starts_with("OK"), "{:?}", ran.answers);
    };
    run(Step::Does(none), Step::Does(|vm| assert!(held(vm), "no end is looked for")));
    run(Step::Does(patch), Step::Does(|vm| assert!(!held(vm), "an end is not seen")));
}
