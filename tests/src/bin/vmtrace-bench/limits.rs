//! The cost of each call and its return where only a part of the call tree is recorded, on both architectures, compared
//! with the guest's function_graph under the same limits, in a separate boot.

use crate::counts::{as_float, measure, started};
use crate::guest::Run;
use crate::{RISCV, value};
use anyhow::{Result, ensure};
use vmtrace_tests::SharedHost;
use vmtrace_tests::trace::{RISCV_KERNELS, syscall};

/// The table.
pub(crate) fn run() -> Result<()> {
    println!(
        "\ninstructions a call and its return, of every function, while forks and files are made"
    );
    table(&crate::HOST, crate::KERNEL)?;
    RISCV_KERNELS.into_iter().rev().try_for_each(|name| table(&RISCV, name))
}

fn table(host: &SharedHost, name: &str) -> Result<()> {
    let [last, none] = [syscall(name, "getsid")?, syscall(name, "sched_get_priority_min")?];
    let none = none.as_str();
    let guest = measure(host, name, " graph", &["-f", none])?;
    let counted = measure(host, name, " load", &["--count", "--stop-at", &last])?;
    let round = |run: &Run, key: &str| value(&run.text, &format!("counts {key} "));
    let calls = as_float(counted.calls) / round(&counted, "rounds")?;
    println!("  {}: vmtrace, guest; {calls:.0} calls in a round of work", counted.release);
    let rows: [(&str, &[&str], Option<&str>); 5] = [
        ("all are recorded", &[], Some("all")),
        ("in a root that nobody calls", &["--graph-root", none], Some("rooted")),
        ("the same, 3 levels", &["--graph-root", none, "--max-depth", "3"], None),
        ("1 level", &["--max-depth", "1"], Some("shallow")),
        ("longer than a second", &["--min-duration", "1s"], None),
    ];
    for (what, limits, theirs) in rows {
        // Nobody takes records out meanwhile.
        let args = ["--graph", "-f", "*", "--overflow", "overwrite", "--stop-at", &last];
        let ours = started(host, name, " load", &[&args[..], limits].concat())?;
        let each = |run, key: &str| Ok::<_, anyhow::Error>(round(run, key)? / calls);
        let theirs = match theirs {
            Some(key) => format!("{:.1}", each(&guest, &format!("more-{key}"))?),
            None => "has none".to_owned(),
        };
        println!("    {what:<28}  {:6.1}  {theirs:>8}", each(&ours, "more")?);
        let nothing = limits.contains(&none) || limits.contains(&"1s");
        ensure!(nothing == (ours.summary.records() == 0), "{what}: {:?}", ours.summary);
    }
    Ok(())
}
