//! x86-64: instructions from power-on to the first program.

use crate::guest::{Run, boot};
use crate::{HOST, KERNEL, NANOSECONDS, value};
use anyhow::{Context, Result};
use vmtrace_tests::SharedHost;
use vmtrace_tests::trace::WORKLOAD;

/// As a distribution boots: with the self-tests, which emulated hosts leave out by default.
const CMDLINE: &str = "cryptomgr.notests=0";
/// A function that no boot calls: the tracer is attached, nothing is hit.
const NONE: [&str; 2] = ["-f", "__x64_sys_getpgid"];

/// The table.
pub(crate) fn run() -> Result<()> {
    let cost = |args: &[&str], cmdline: &str| cost(&HOST, KERNEL, args, cmdline);
    let (untraced, _) = cost(&NONE, "")?;
    println!("\nboot to init, 10^9 instructions (everything on one CPU, the relay too)");
    println!("  untraced                               {untraced:6.2}");
    let print = |name: &str, cost: f64, run: &Run| {
        println!(
            "  {name:<37}  {cost:6.2}  {:5.2} times, {} records, {} lost or overwritten",
            cost / untraced,
            run.summary.records(),
            run.summary.lost()
        );
    };
    let recorder = ["--overflow", "overwrite"];
    let (figure, run) = cost(&recorder, "")?;
    print("vmtrace, all, flight recorder", figure, &run);
    let (figure, relayed) = cost(&[], "")?;
    print("vmtrace, all, relayed", figure, &relayed);
    let (figure, run) = cost(&["--overflow", "block"], "")?;
    print("vmtrace, all, relayed, block", figure, &run);
    let (figure, packed) = cost(&["--overflow", "block", "--compress", "zstd"], "")?;
    print("the same, --compress zstd", figure, &packed);
    println!("    bytes a record: {:.2}, and {:.2} plain", each(&packed), each(&run));
    let waits = run.summary.waits.as_ref();
    let waited = waits.and_then(|waits| waits.vcpus_ns.first()).map_or(0, |time| *time);
    println!("    of which it waited for room  {:6.2}", millions(waited) / 1e3);
    let (figure, graph) = cost(&[&recorder[..], &["--graph"]].concat(), "")?;
    print("vmtrace, all, graph, flight recorder", figure, &graph);
    for tracer in ["function", "function_graph"] {
        let (figure, run) = cost(&NONE, &format!("ftrace={tracer}"))?;
        print(&format!("guest ftrace={tracer}"), figure, &run);
    }
    println!();
    pauses(&relayed, &graph)
}

/// What patching alone takes, of the same.
pub(crate) fn patching() -> Result<()> {
    let cost =
        |args: &[&str]| cost(&HOST, KERNEL, &[&["--overflow", "overwrite"], args].concat(), "");
    let ((_, entries), (_, graph)) = (cost(&[])?, cost(&["--graph"])?);
    pauses(&entries, &graph)
}

/// Of a run with entries, and of one with returns as well.
fn pauses(entries: &Run, graph: &Run) -> Result<()> {
    let sites = entries.summary.sites.patched;
    per("patching", sites, "sites", entries.summary.patch_ns);
    println!("  longest pause {:.1} million", millions(entries.summary.pauses.max_ns));
    // Their stubs have been made before.
    let mark = graph.marks.iter().find(|mark| mark.text.ends_with(" exits"));
    let mark = mark.with_context(|| format!("no exits: {:?}", graph.summary))?;
    let exits = mark.text.split(' ').next().context("no number")?.parse()?;
    per("patching", exits, "exits", mark.duration_ns);
    graph.summary.notes.iter().for_each(|note| println!("  {note}"));
    Ok(())
}

/// By the guest's clock.
pub(crate) fn cost(
    host: &SharedHost,
    kernel: &str,
    args: &[&str],
    cmdline: &str,
) -> Result<(f64, Run)> {
    let command = format!("{WORKLOAD} uptime");
    let cmdline = format!("{CMDLINE} {cmdline}");
    let all = ["--add", WORKLOAD, "--run", &command, "--cmdline", &cmdline];
    let run = boot(host, kernel, &[&all[..], args].concat())?;
    Ok((value(&run.text, "uptime ")? / NANOSECONDS / 1e9, run))
}

fn each(run: &Run) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    let [bytes, records] = [run.bytes as f64, run.summary.records() as f64];
    bytes / records
}

pub(crate) fn per(what: &str, count: u64, of: &str, nanoseconds: u64) {
    let millions = millions(nanoseconds);
    let each = millions * 1e6 / f64::from(u32::try_from(count).unwrap_or(u32::MAX));
    println!("{what} {count} {of}: {millions:.1} million instructions, {each:.0} each");
}

pub(crate) fn millions(nanoseconds: u64) -> f64 {
    f64::from(u32::try_from(nanoseconds / 1000).unwrap_or(u32::MAX)) / 1000.0 / NANOSECONDS
}
