//! `vmtrace functions`: what can be traced in a kernel, and in its modules.

use std::io::Write;
use std::path::{Path, PathBuf};

use super::boot::modules_in;
use super::module_files;
use super::report::tell_notes;
use super::terminal::Paging;
use crate::kernel::{Functions, Kernel, ModuleFile, Selection, selects};
use vmtrace_system::say;

/// Arguments of `vmtrace functions`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Kernel image: bzImage (vmlinuz), vmlinux, or a riscv64 Image
    kernel: PathBuf,
    /// List only functions that match: GLOB, GLOB:mod:NAME or :mod:NAME; may be repeated
    #[arg(short, long, value_name = "GLOB")]
    filter: Vec<String>,
    /// List no functions that match; may be repeated
    #[arg(short, long, value_name = "GLOB")]
    notrace: Vec<String>,
    /// Also list the functions of the modules in this directory, which has the layout of
    /// /lib/modules/RELEASE. auto finds it as `vmtrace boot` does
    #[arg(long, value_name = "DIR|auto")]
    modules: Option<PathBuf>,
    /// Print only their number
    #[arg(long)]
    count: bool,
    /// Take the symbols from this file of the same build
    #[arg(long, value_name = "FILE")]
    system_map: Option<PathBuf>,
    #[command(flatten)]
    paging: Paging,
}

/// Prints a line for each function: primary name, tab, link address of its symbol. For one of a
/// module: primary name, module in brackets, tab, section and offset in the module's file.
///
/// # Errors
/// When the kernel or a module cannot be read, or no function matches.
pub fn run(args: Args) -> anyhow::Result<u8> {
    let Args { kernel, filter, notrace, modules, count, system_map, paging } = args;
    let (filter, notrace) = (super::from_files(filter)?, super::from_files(notrace)?);
    let image = kernel;
    let kernel = super::inspect::open(&image, system_map.as_deref())?;
    let selection = kernel.select_with_report(&filter, &notrace);
    let Selection { sites, mut unmatched, mut unmatched_notrace } = selection;
    let mut lines = of_kernel(&kernel, &sites);
    let mut left_out = Vec::new();
    if let Some(dir) = modules {
        let dir = modules_in(dir, &image, kernel.release())?;
        let mut found =
            Found { filter: &filter, notrace: &notrace, matched: vec![], lines: vec![] };
        left_out = found.read(&kernel, &dir)?;
        let is_missing = |pattern: &String| !found.matched.contains(pattern);
        unmatched.retain(is_missing);
        unmatched_notrace.retain(is_missing);
        let named = filter.iter().filter(|pattern| Functions::of(pattern).module().is_some());
        unmatched.extend(named.filter(|&pattern| is_missing(pattern)).cloned());
        lines.extend(found.lines);
    } else if let Some(pattern) =
        filter.iter().find(|pattern| Functions::of(pattern).module().is_some())
    {
        anyhow::bail!("{pattern}: which modules? Use --modules DIR, or auto");
    }
    if lines.is_empty() {
        tell_notes(&left_out);
        return Err(kernel.no_match(unmatched).into());
    }
    let seen = paging.show(|out| match count {
        true => writeln!(out, "{}", lines.len()),
        false => print(out, lines),
    });
    // Behind what a pager shows.
    for pattern in unmatched.iter().chain(&unmatched_notrace) {
        let near = kernel.near_functions(pattern);
        say!("vmtrace: warning: no traceable function matches '{pattern}'{near}");
    }
    tell_notes(&left_out);
    seen.map(|()| 0)
}

/// A function's name, and where it is.
type Line = (String, String);

fn of_kernel(kernel: &Kernel, sites: &[usize]) -> Vec<Line> {
    let site = |&index: &usize| {
        let site = kernel.sites().get(index)?;
        Some((kernel.site_name(site)?.to_owned(), format!("{:#018x}", site.entry)))
    };
    sites.iter().filter_map(site).collect()
}

/// What is found in modules.
struct Found<'a> {
    filter: &'a [String],
    notrace: &'a [String],
    /// Patterns that match something.
    matched: Vec<String>,
    lines: Vec<Line>,
}

impl Found<'_> {
    /// Returns which modules are left out.
    fn read(&mut self, kernel: &Kernel, dir: &Path) -> anyhow::Result<Vec<String>> {
        let filter = self.filter;
        let wanted = |name: &str| {
            let can_be = |pattern: &String| Functions::of(pattern).reaches(name);
            filter.is_empty() || filter.iter().any(can_be)
        };
        module_files::each(dir, kernel, wanted, |name, data| {
            let file = ModuleFile::parse(data)?;
            module_files::check(file.arch, kernel)?;
            self.take(name, &file);
            Ok(())
        })
    }

    fn take(&mut self, module: &str, file: &ModuleFile) {
        for function in &file.functions {
            let names = || function.names.iter().map(String::as_str);
            for pattern in self.filter.iter().chain(self.notrace) {
                let functions = Functions::of(pattern);
                let matches = names().any(|name| functions.matches(name, Some(module)));
                if matches && !self.matched.contains(pattern) {
                    self.matched.push(pattern.clone());
                }
            }
            if let Some(name) = function.names.first()
                && selects(self.filter, self.notrace, Some(module), &names())
            {
                let place = format!("{}+{:#x}", function.section, function.offset);
                self.lines.push((format!("{name} [{module}]"), place));
            }
        }
    }
}

fn print(out: &mut dyn Write, mut lines: Vec<Line>) -> std::io::Result<()> {
    lines.sort_unstable();
    for (name, place) in lines {
        writeln!(out, "{name}\t{place}")?;
    }
    Ok(())
}
