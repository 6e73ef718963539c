//! The cost of an entry with arguments, one under a condition, and one that is only counted, on both architectures. The
//! guest's own events with the same arguments and with a filter are measured for comparison, in a separate boot.

use crate::guest::{Run, work};
use crate::value;
use anyhow::{Context, Result, ensure};
use vmtrace_tests::SharedHost;
use vmtrace_tests::trace::{RISCV_KERNELS, syscall};

const FUNCTION: &str = "__sys_setresuid";
const VALUES: &str = "__sys_setresuid: ruid, euid, suid";

/// The table.
pub(crate) fn run() -> Result<()> {
    println!("\ninstructions a call of setresuid with its three arguments");
    row(&crate::HOST, crate::KERNEL)?;
    RISCV_KERNELS.into_iter().rev().try_for_each(|name| row(&crate::RISCV, name))
}

fn row(host: &SharedHost, name: &str) -> Result<()> {
    let guest = measure(host, name, " guest", &[])?;
    let plain = measure(host, name, "", &[])?;
    let ours = measure(host, name, "", &["--arg", VALUES])?;
    // Of no call, and of all.
    let [none, all] = ["ruid == 12345", "ruid != 12345"].map(|text| ["--if", text]);
    let (none, all) = (measure(host, name, "", &none)?, measure(host, name, "", &all)?);
    ensure!(none.summary.records() == 0, "{:?}", none.summary);
    let counted = measure(host, name, "", &["--count"])?;
    let counted_if = measure(host, name, "", &["--count", "--if", "ruid != 12345"])?;
    for run in [&counted, &counted_if] {
        ensure!(run.summary.records() == 0 && run.calls > 0, "{:?}", run.summary);
    }
    let figure =
        |kind: &str| value(&guest.text, &format!("args {kind} ")).map(|it| (kind.to_owned(), it));
    let (kind, theirs) = figure("fprobe").or_else(|_| figure("kprobe")).context("no event")?;
    println!(
        "  {:<28}  vmtrace {:6.1} (without arguments {:6.1}), guest {kind} event {theirs:8.1}; the call {:.1}, {} records of ours",
        ours.release,
        value(&ours.text, "args vmtrace ")?,
        value(&plain.text, "args vmtrace ")?,
        value(&ours.text, "args untraced ")?,
        ours.summary.records(),
    );
    println!(
        "  {:<28}  under a condition: vmtrace {:6.1} when it fails, {:6.1} when it holds; guest {kind} event with a \
         filter that fails {:8.1}",
        "",
        value(&none.text, "args vmtrace ")?,
        value(&all.text, "args vmtrace ")?,
        value(&guest.text, "args filtered ")?,
    );
    println!(
        "  {:<28}  counted: vmtrace {:6.1}, {:6.1} under a condition that holds; {} calls, no record",
        "",
        value(&counted.text, "args vmtrace ")?,
        value(&counted_if.text, "args vmtrace ")?,
        counted.calls,
    );
    Ok(())
}

fn measure(host: &SharedHost, name: &str, who: &str, args: &[&str]) -> Result<Run> {
    let from = syscall(name, "getpgid")?;
    let all = [&["-f", FUNCTION, "--from", &from], args].concat();
    let run = work(host, name, &format!("bench-args{who}"), &all)?;
    let summary = &run.summary;
    ensure!(summary.lost() == 0 && summary.sites.skipped.is_empty(), "{summary:?}");
    Ok(run)
}
