//! `vmtrace functions`: what can be traced in a kernel.

use std::io::{BufWriter, Write as _, stdout};
use std::path::PathBuf;

use crate::kernel::{Kernel, Selection};
use vmtrace_system::say;

/// Arguments of `vmtrace functions`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Kernel image: bzImage (vmlinuz), vmlinux, or a riscv64 Image
    kernel: PathBuf,
    /// Only functions that the pattern matches; repeatable
    #[arg(short, long, value_name = "GLOB")]
    filter: Vec<String>,
    /// No functions that the pattern matches; repeatable
    #[arg(short, long, value_name = "GLOB")]
    notrace: Vec<String>,
    /// Print how many there are, and nothing else
    #[arg(long)]
    count: bool,
    /// Take the symbols from this file of the same build
    #[arg(long, value_name = "FILE")]
    system_map: Option<PathBuf>,
}

/// Prints a line for each function: primary name, tab, link address of its symbol.
///
/// # Errors
/// When the kernel cannot be read, or no function matches.
pub fn run(args: Args) -> anyhow::Result<u8> {
    let Args { kernel, filter, notrace, count, system_map } = args;
    let (filter, notrace) = (super::from_files(filter)?, super::from_files(notrace)?);
    let kernel = super::inspect::open(&kernel, system_map.as_deref())?;
    let selection = kernel.select_with_report(&filter, &notrace);
    let Selection { sites, unmatched, unmatched_notrace } = selection;
    if sites.is_empty() {
        return Err(kernel.no_match(unmatched).into());
    }
    for pattern in unmatched.iter().chain(&unmatched_notrace) {
        let near = kernel.near_functions(pattern);
        say!("vmtrace: warning: no traceable function matches '{pattern}'{near}");
    }
    let printed =
        if count { writeln!(stdout(), "{}", sites.len()) } else { print(&kernel, &sites) };
    super::inspect::ignore_closed_pipe(printed)?;
    Ok(0)
}

fn print(kernel: &Kernel, sites: &[usize]) -> std::io::Result<()> {
    let mut lines: Vec<(&str, u64)> = sites
        .iter()
        .filter_map(|&i| {
            let site = &kernel.sites()[i];
            Some((kernel.site_name(site)?, site.entry))
        })
        .collect();
    lines.sort_unstable();
    let mut out = BufWriter::with_capacity(1 << 16, stdout().lock());
    for (name, address) in lines {
        writeln!(out, "{name}\t{address:#018x}")?;
    }
    out.flush()
}
