//! The cost of all events together under the load of hackbench, compared with the guest's own, which are measured in a
//! separate boot.

use crate::guest::{Run, work};
use crate::value;
use anyhow::Result;
use vmtrace_tests::SharedHost;
use vmtrace_tests::trace::{RISCV_KERNELS, syscall};

/// The table.
pub(crate) fn run() -> Result<()> {
    println!("\ninstructions of a message of hackbench, with all events");
    row(&crate::HOST, crate::KERNEL)?;
    RISCV_KERNELS.into_iter().rev().try_for_each(|name| row(&crate::RISCV, name))
}

fn row(host: &SharedHost, name: &str) -> Result<()> {
    // What each of them adds is what matters: a flight recorder has no relay beside it.
    let (from, to) = (syscall(name, "getpgid")?, syscall(name, "getsid")?);
    let all = ["--event", "*:*", "--overflow", "overwrite", "--buffer", "1M"];
    let ours = measure(host, name, "", &[&all[..], &["--from", &from, "--stop-at", &to]].concat())?;
    let guest = measure(host, name, " guest", &["-f", "__sys_setresuid"])?;
    for (who, run) in [("vmtrace", &ours), ("guest", &guest)] {
        println!(
            "  {:<28}  {who:<8} {:8.0} on {:8.0} without; {:6.0} when they are off again",
            run.release,
            value(&run.text, "hackbench on ")?,
            value(&run.text, "hackbench untraced ")?,
            value(&run.text, "hackbench off ")?,
        );
    }
    println!(
        "  {:<28}  events a message: guest {:.1}",
        "",
        value(&guest.text, "hackbench events ")?
    );
    Ok(())
}

fn measure(host: &SharedHost, name: &str, which: &str, args: &[&str]) -> Result<Run> {
    work(host, name, &format!("bench-hackbench{which}"), args)
}
