//! x86-64: instructions per event. Each kind has a separate boot, in which the guest's own tracers
//! are measured first.

use crate::guest::{Run, work};
use crate::{HOST, KERNEL, value};
use anyhow::{Context, Result, ensure};
use vmtrace::kernel::SiteSection;
use vmtrace_tests::trace::kernel;

const FUNCTION: &str = "__x64_sys_getppid";
/// Tracers that have nothing to do.
const OTHERS: [usize; 2] = [50, 200];

/// The table.
pub(crate) fn run() -> Result<()> {
    let entry = measure(0, &[])?;
    let untraced = value(&entry.text, "bench untraced ")?;
    let again = value(&entry.text, "bench untraced-again ")?;
    println!("instructions an event: getppid on {}, each line one boot", entry.release);
    println!("  no tracing                    {untraced:8.1}  (the whole system call)");
    println!("  no tracing, after the others  {again:8.1}");
    println!("                                 vmtrace     guest");
    print("entry", &entry, "function", "function tracer")?;
    print("the same", &entry, "kprobe", "kprobe")?;
    let graph = measure(0, &["--graph"])?;
    let (entries, left) = (graph.records.entries, graph.records.returns + graph.records.tails);
    ensure!(entries == left, "{entries} entries, but {left} exits: {:?}", graph.summary);
    print("entry and return", &graph, "graph", "function_graph")?;
    print(
        "two tracers of the function",
        &measure(0, &["--tracer", FUNCTION])?,
        "two",
        "two instances",
    )?;
    let kernel = kernel(KERNEL)?;
    let sites = kernel.select(&["tcp_*".to_owned()], &[])?;
    let sites = sites.into_iter().map(|site| &kernel.sites()[site]);
    let idle = sites.filter(|site| site.section == SiteSection::Text);
    let idle: Vec<&str> = idle.filter_map(|site| kernel.site_name(site)).collect();
    for count in OTHERS {
        let idle = idle.get(..count).context("too few functions")?;
        let tracers: Vec<&str> = idle.iter().flat_map(|name| ["--tracer", *name]).collect();
        let run = measure(count, &tracers)?;
        let all = &run.summary.sites.tracers;
        ensure!(all.len() == count + 1 && !all.contains(&0), "{:?}", run.summary);
        let (name, beside) = (
            format!("entry, {count} tracers elsewhere"),
            format!("function tracer, {count} instances elsewhere"),
        );
        print(&name, &run, "function", &beside)?;
    }
    Ok(())
}

fn print(name: &str, run: &Run, key: &str, beside: &str) -> Result<()> {
    let ours = value(&run.text, "bench vmtrace ")?;
    let guest = value(&run.text, &format!("bench {key} "))?;
    let records = run.summary.records();
    println!("  {name:<28}  {ours:8.1}  {guest:8.1}  {beside}; {records} records of ours");
    Ok(())
}

/// Boots a guest in which so many tracers of the guest's own have nothing to do.
fn measure(others: usize, args: &[&str]) -> Result<Run> {
    let all = [&["-f", FUNCTION, "--from", "__x64_sys_getpgid"], args].concat();
    let run = work(&HOST, KERNEL, &format!("bench {others}"), &all)?;
    let summary = &run.summary;
    ensure!(summary.lost() == 0, "records were lost: {summary:?}");
    ensure!(summary.sites.skipped.is_empty() && summary.notes.is_empty(), "{summary:?}");
    Ok(run)
}
