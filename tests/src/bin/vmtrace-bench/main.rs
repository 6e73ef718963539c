//! The cost of tracing in instructions, compared with the guest's own tracers: all figures come
//! from one boot of an emulated host whose clock counts instructions (icount). Also bytes per
//! second between guest and host, from one boot of an emulated host in real time.
//!
//! `scripts/bench` runs it. Names of tables as arguments select these alone (`patching` is a part
//! of `boots`). The numbers of instructions are the same in every run.

mod args;
mod boots;
mod bytes;
mod counts;
mod disk;
mod events;
mod graph;
mod guest;
mod ops;
mod tracepoints;

use anyhow::{Context, Result, bail};
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

fn main() -> Result<()> {
    let names: Vec<String> = std::env::args().skip(1).collect();
    let all = [
        "bytes",
        "disk",
        "events",
        "args",
        "counts",
        "counts-boots",
        "tracepoints",
        "boots",
        "two",
        "graph",
        "graph-boots",
        "patching-riscv64",
        "ops",
    ]
    .map(str::to_owned);
    let names = if names.is_empty() { &all[..] } else { &names };
    names.iter().try_for_each(|name| match name.as_str() {
        "bytes" => bytes::run(),
        "disk" => disk::run(),
        "events" => events::run(),
        "args" => args::run(),
        "counts" => counts::run(),
        "counts-boots" => counts::boots(),
        "tracepoints" => tracepoints::run(),
        "boots" => boots::run(),
        "patching" => boots::patching(),
        "patching-riscv64" => graph::patching(),
        "two" => ops::two(),
        "graph" => graph::calls(),
        "graph-boots" => graph::boots(),
        "ops" => ops::run(),
        other => {
            bail!("unknown table {other:?}: use no argument for all of them, or some of {all:?}")
        }
    })
}

fn value(text: &str, key: &str) -> Result<f64> {
    let rest = text.lines().find_map(|line| line.trim().strip_prefix(key));
    Ok(rest.with_context(|| format!("no {key:?} in {text}"))?.trim().parse()?)
}
