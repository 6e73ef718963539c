//! The cost of tracing in instructions, compared with the guest's own tracers: all figures come
//! from one boot of an emulated host whose clock counts instructions (icount). Also bytes per
//! second between guest and host, from one boot of an emulated host in real time.
//!
//! `scripts/bench` runs it. Names of tables as arguments select these alone. The numbers of instructions are
//! the same in every run.

mod args;
mod boots;
mod bytes;
mod counts;
mod disk;
mod events;
mod graph;
mod guest;
mod hackbench;
mod limits;
mod ops;
mod tracepoints;

use std::process::ExitCode;

use anyhow::{Context, Result};
use vmtrace::emulated::{HostArch, HostOptions};
use vmtrace_tests::trace::{RISCV_KERNELS, options};
use vmtrace_tests::{SharedHost, workload};

const KERNEL: &str = "x86_64-6.12";
/// Under `-icount shift=1` an instruction takes 2 ns of emulated time.
const NANOSECONDS: f64 = 2.0;

static HOST: SharedHost = SharedHost::new(host);
static RISCV: SharedHost = SharedHost::new(riscv_host);

fn host() -> Result<HostOptions> {
    let me = std::env::current_exe()?;
    let workload = me.with_file_name("vmtrace-guest");
    let workload = workload.to_str().context("a path that is not UTF-8")?;
    let options = options(workload, &[KERNEL])?;
    Ok(HostOptions { icount: true, cpus: 1, progress: true, ..options })
}

fn riscv_host() -> Result<HostOptions> {
    let workload = workload(HostArch::Riscv64)?;
    let options = options(&workload.to_string_lossy(), &RISCV_KERNELS)?;
    Ok(HostOptions { icount: true, cpus: 1, progress: true, ..options })
}

/// What prints a table.
type Table = fn() -> Result<()>;

/// All tables by their names, in the order in which they are printed.
const TABLES: [(&str, Table); 15] = [
    ("bytes", bytes::run),
    ("disk", disk::run),
    ("events", events::run),
    ("args", args::run),
    ("counts", counts::run),
    ("limits", limits::run),
    ("counts-boots", counts::boots),
    ("tracepoints", tracepoints::run),
    ("hackbench", hackbench::run),
    ("boots", boots::run),
    ("two", ops::two),
    ("graph", graph::calls),
    ("graph-boots", graph::boots),
    ("patching-riscv64", graph::patching),
    ("ops", ops::run),
];

/// Parts of these.
const PARTS: [(&str, Table); 2] = [("patching", boots::patching), ("children", counts::children)];

fn main() -> ExitCode {
    let names: Vec<_> = std::env::args_os().skip(1).collect();
    let names: Vec<_> = names.iter().map(|name| name.to_string_lossy()).collect();
    if names.iter().any(|name| matches!(&**name, "-h" | "--help")) {
        let tables = TABLES.map(|(name, _)| name).join(" ");
        println!(
            "usage: vmtrace-bench [TABLE]...\n\nPrints these tables, or all of them: {tables}.\n\
             Parts of boots and counts: {}.",
            PARTS.map(|(name, _)| name).join(" ")
        );
        return ExitCode::SUCCESS;
    }
    let chosen = names.iter().map(|name| table(name)).collect::<Result<Vec<_>, _>>();
    let chosen = match chosen {
        Ok(none) if none.is_empty() => TABLES.map(|(_, table)| table).to_vec(),
        Ok(some) => some,
        Err(error) => {
            eprintln!("vmtrace-bench: {error}");
            return ExitCode::from(2);
        }
    };
    match chosen.iter().try_for_each(|table| table()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vmtrace-bench: {error:?}");
            ExitCode::FAILURE
        }
    }
}

/// The table of that name.
fn table(name: &str) -> Result<Table, String> {
    let known = TABLES.iter().chain(&PARTS).find(|(known, _)| *known == name);
    known.map(|(_, table)| *table).ok_or_else(|| {
        format!("unknown table {name:?}: vmtrace-bench --help names those that there are")
    })
}

fn value(text: &str, key: &str) -> Result<f64> {
    let rest = text.lines().find_map(|line| line.trim().strip_prefix(key));
    Ok(rest.with_context(|| format!("no {key:?} in {text}"))?.trim().parse()?)
}
