//! Plans for some functions.

use crate::kernels::{each, epilogues};
use crate::random::Random;
use crate::writes::check_writes;
use vmtrace_kernel::Kernel;
use vmtrace_kernel::epilogues::{Coverage, Plan};

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
pub(crate) fn check_part(name: &str, kernel: &Kernel, wanted: &[usize], plan: &Plan) {
    check_writes(name, kernel, plan);
    for exit in &plan.exits {
        let asked = wanted.contains(&(exit.epilogue.site as usize));
        assert_eq!(exit.helper, !asked, "{name}: {exit:x?}");
        assert!(asked || exit.lent > 0, "{name}: a helper of nobody, {exit:x?}");
    }
}
