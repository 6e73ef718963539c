//! `--boot-report`: the functions that it traces.

use anyhow::Result;

use crate::analyze::boot::{FROM_FILE, FUNCTIONS, IDLE, INIT_MODULE, INITCALL, LOAD_MODULE};
use crate::kernel::Kernel;
use crate::kernel::arguments::ArgumentSpec;
use crate::session::{self, Wants};

/// The values that name the functions and modules that are initialised.
const VALUES: [(&str, &str); 3] = [
    (INITCALL, "do_one_initcall: fn"),
    (FROM_FILE[0], "init_module_from_file: f->f_path.dentry->d_name.name"),
    (FROM_FILE[1], "kernel_read_file: file->f_path.dentry->d_name.name, id"),
];

/// A tracer that a boot report takes.
pub(super) struct Asked {
    pub(super) name: &'static str,
    pub(super) globs: Vec<String>,
    pub(super) graph: bool,
    pub(super) wants: Wants,
}

/// The tracers that a report of this kernel's boot takes, and what the user should know of them.
///
/// # Errors
/// When the kernel has none of the functions.
pub(super) fn tracers(kernel: &Kernel) -> Result<(Vec<Asked>, Vec<String>)> {
    let of = |names: &[&str]| -> Vec<String> {
        names
            .iter()
            .filter(|name| kernel.site_of(name).is_some())
            .map(|name| (*name).to_owned())
            .collect()
    };
    let calls = of(&[&[INITCALL, LOAD_MODULE, INIT_MODULE], &FUNCTIONS[..]].concat());
    let idle = of(&IDLE);
    let (mut calling, mut loading) = (Wants::default(), Wants::default());
    let mut notes = Vec::new();
    let mut files = Vec::new();
    for (function, text) in VALUES {
        // One of them is enough for modules.
        if of(&[function]).is_empty() || (function != INITCALL && !files.is_empty()) {
            continue;
        }
        let spec = ArgumentSpec::parse(text)?;
        let sites = kernel.select_with_report(&[function.to_owned()], &[]).sites;
        let asked = Wants { paths: vec![spec.clone()], ..Wants::default() };
        // A kernel without types: the report says what it does not know.
        match session::values(kernel, &sites, &asked) {
            Ok(_) if function == INITCALL => calling.paths.push(spec),
            Ok(_) => {
                loading.paths.push(spec);
                files.push(function.to_owned());
            }
            Err(error) => notes.push(format!("--boot-report: not recorded: {error}")),
        }
    }
    let all = [
        Asked { name: "boot-report", globs: calls, graph: true, wants: calling },
        Asked { name: "boot-modules", globs: files, graph: false, wants: loading },
        Asked { name: "boot-idle", globs: idle, graph: false, wants: Wants::default() },
    ];
    let all: Vec<_> = all.into_iter().filter(|asked| !asked.globs.is_empty()).collect();
    anyhow::ensure!(
        !all.is_empty(),
        "--boot-report: {} has no function that shows its boot: see `vmtrace functions`",
        kernel.release()
    );
    Ok((all, notes))
}
