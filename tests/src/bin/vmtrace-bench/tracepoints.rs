//! The cost of events of tracepoints, on both architectures, compared with the guest's own, which are
//! measured in a separate boot.

use crate::guest::{Run, work};
use crate::value;
use anyhow::{Result, ensure};
use vmtrace_tests::SharedHost;
use vmtrace_tests::trace::{RISCV_KERNELS, syscall};

/// Instructions by which two measures of an untraced switch may differ: two ticks of the slower of
/// the guests' clocks, by ten switches.
const SAME: f64 = 11.0;

/// The table.
pub(crate) fn run() -> Result<()> {
    println!("\ninstructions of events, with all of their fields");
    row(&crate::HOST, crate::KERNEL)?;
    RISCV_KERNELS.into_iter().rev().try_for_each(|name| row(&crate::RISCV, name))
}

fn row(host: &SharedHost, name: &str) -> Result<()> {
    let guest = measure(host, name, "guest", &["-f", "__sys_setresuid"])?;
    for (which, what, event) in [
        ("switch", "sched_switch", "sched:sched_switch"),
        ("call", "sys_enter and sys_exit", "raw_syscalls:*"),
    ] {
        let ours = measure(host, name, which, &["--event", event])?;
        println!(
            "  {:<28}  {what}: vmtrace {:6.1}, guest {:8.1}; without {:.1}, {} records of ours",
            ours.release,
            value(&ours.text, &format!("events {which} "))?,
            value(&guest.text, &format!("events {which} "))?,
            value(&ours.text, &format!("events untraced-{which} "))?,
            ours.summary.records(),
        );
        if which == "switch" {
            let bpf = value(&guest.text, "events bpf-switch ")?;
            println!("  {:<28}  {what}: BPF, raw tracepoint to a ring buffer {bpf:.1}", "");
        }
        for run in [&ours, &guest] {
            let switches = value(&run.text, "events per-round ")?;
            ensure!((switches - 2.0).abs() < 0.1, "a round has {switches} switches");
            // What changes by itself cannot be subtracted.
            let once = value(&run.text, "events untraced-switch ")?;
            let again = value(&run.text, "events untraced-switch-again ")?;
            if which == "switch" && (once - again).abs() >= SAME {
                println!("    no figure: an untraced switch takes {once}, and then {again}");
            }
        }
    }
    let ours = measure(host, name, "call", &["--event", "preemptirq:irq_*"])?;
    println!(
        "  {:<28}  interrupts switched, all events of a system call: vmtrace {:6.1}",
        ours.release,
        value(&ours.text, "events call ")?,
    );
    Ok(())
}

fn measure(host: &SharedHost, name: &str, which: &str, args: &[&str]) -> Result<Run> {
    let from = syscall(name, "getpgid")?;
    let all = [&["--from", &from], args].concat();
    let run = work(host, name, &format!("bench-events {which}"), &all)?;
    ensure!(run.summary.lost() == 0, "{:?}", run.summary);
    Ok(run)
}
