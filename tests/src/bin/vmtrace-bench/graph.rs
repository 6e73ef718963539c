//! riscv64: the cost of entries and returns, for a call of getppid and for a whole boot.
//!
//! The guest's own tracer is measured in a separate boot: without CALL_OPS, vmtrace does not take a
//! site that the guest has used.

use crate::boots::{cost, millions, per};
use crate::guest::{Run, work};
use crate::{NANOSECONDS, RISCV, value};
use anyhow::{Result, ensure};
use vmtrace_tests::trace::{RISCV_KERNELS, kernel};

const FUNCTION: &str = "__riscv_sys_getppid";
/// A function that no boot calls.
const NONE: &str = "__riscv_sys_getpgid";

/// An entry and its return, for both kinds of kernels. What rewritten exits cost that nobody holds
/// is part of it: against a boot without.
pub(crate) fn calls() -> Result<()> {
    println!("\ninstructions a call of getppid with its return, riscv64");
    for name in RISCV_KERNELS.into_iter().rev() {
        let guest = call(name, " guest", &[])?;
        let ours = call(name, "", &["--graph"])?;
        let (entries, returns) = (ours.records.entries, ours.records.returns);
        ensure!(entries == returns, "{entries} entries, but {returns} returns: {:?}", ours.summary);
        let untraced = value(&guest.text, "graph untraced ")?;
        let rewritten = value(&ours.text, "graph untraced ")? - untraced;
        println!(
            "  {:<28}  vmtrace {:6.1}, {rewritten:.1} of them while nobody traces it, guest function_graph {:8.1}; the call {untraced:.1}, {} records of ours",
            ours.release,
            value(&ours.text, "graph vmtrace ")? + rewritten,
            value(&guest.text, "graph guest ")?,
            ours.summary.records(),
        );
    }
    Ok(())
}

fn call(name: &str, who: &str, args: &[&str]) -> Result<Run> {
    let all = [&["-f", FUNCTION, "--from", NONE], args].concat();
    let run = work(&RISCV, name, &format!("bench-graph{who}"), &all)?;
    let summary = &run.summary;
    ensure!(summary.lost() == 0 && summary.sites.skipped.is_empty(), "{summary:?}");
    Ok(run)
}

/// Boots to the first program, for both kinds of kernels.
pub(crate) fn boots() -> Result<()> {
    println!("\nboot to init, riscv64, 10^9 instructions (everything on one CPU)");
    for name in RISCV_KERNELS.into_iter().rev() {
        let (untraced, run) = cost(&RISCV, name, &["-f", NONE], "")?;
        println!("  {:<36}  {untraced:6.2}", run.release);
        let recorder = ["--overflow", "overwrite"];
        let graph = [&recorder[..], &["--graph"]].concat();
        let rewritten = ["-f", NONE, "--returns", "*"];
        let guest = ["-f", NONE];
        let rows: [(&str, &[&str], &str); 4] = [
            ("vmtrace, all, flight recorder", &recorder, ""),
            ("vmtrace, all, graph, flight recorder", &graph, ""),
            ("vmtrace, returns rewritten, not held", &rewritten, ""),
            ("guest ftrace=function_graph", &guest, "ftrace=function_graph"),
        ];
        for (what, args, cmdline) in rows {
            let (cost, run) = cost(&RISCV, name, args, cmdline)?;
            let pause = u32::try_from(run.summary.pauses.max_ns / 1000).unwrap_or(u32::MAX);
            println!(
                "  {what:<36}  {cost:6.2}  {:5.2} times, {} records, {} lost or overwritten, longest pause {:.1} million",
                cost / untraced,
                run.summary.records(),
                run.summary.lost(),
                f64::from(pause) / 1000.0 / NANOSECONDS
            );
            run.summary.notes.iter().for_each(|note| println!("    {note}"));
        }
    }
    Ok(())
}

/// What patching takes, for both kinds of kernels: of sites, and of exits that are rewritten and not held, by the
/// difference of all pauses to those of a run without them.
pub(crate) fn patching() -> Result<()> {
    println!("\npatching, riscv64");
    for name in RISCV_KERNELS.into_iter().rev() {
        let pause = |args: &[&str]| -> Result<Run> {
            Ok(cost(&RISCV, name, &[&["--overflow", "overwrite"], args].concat(), "")?.1)
        };
        let (none, all) = (pause(&["-f", NONE])?, pause(&[])?);
        let rewritten = pause(&["-f", NONE, "--returns", "*"])?;
        println!("  {}", none.release);
        per("  patching", all.summary.sites.patched, "sites", all.summary.patch_ns);
        let exits = kernel(name)?.exits()?.all().len().try_into()?;
        let paused = |run: &Run| run.summary.pauses.total_ns;
        per("  rewriting", exits, "exits", paused(&rewritten).saturating_sub(paused(&none)));
        println!(
            "    all pauses: {:.1} million, {:.1} with all sites, {:.1} with exits rewritten",
            millions(paused(&none)),
            millions(paused(&all)),
            millions(paused(&rewritten))
        );
    }
    Ok(())
}
