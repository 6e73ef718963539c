//! The kernels in the cache.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use vmtrace_kernel::Kernel;
use vmtrace_kernel::epilogues::{Epilogues, Plan};

pub(crate) fn images() -> Vec<(String, PathBuf)> {
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
pub(crate) fn each(mut check: impl FnMut(&str, &Kernel, &Plan)) {
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

pub(crate) fn epilogues(kernel: &Kernel) -> &Epilogues {
    kernel.epilogues().unwrap_or_else(|e| panic!("{e}"))
}

pub(crate) fn name_of(kernel: &Kernel, site: u32) -> &str {
    kernel.site_name(&kernel.sites()[site as usize]).unwrap_or("?")
}
