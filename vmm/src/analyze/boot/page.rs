//! The report as text of 80 columns.

use std::io::{self, Write};

use crate::analyze::{cut, milliseconds, seconds, wrap};

use super::report::{Initcall, Module, Report};

/// Most lines of each list.
const LINES: usize = 12;

/// A part of a whole, in percent.
fn share(part: u64, whole: u64) -> String {
    let permille = u128::from(part) * 1000 / u128::from(whole.max(1));
    format!("{}.{} %", permille / 10, permille % 10)
}

/// What is not known is not 0.
fn known(time: Option<u64>) -> String {
    time.map_or_else(|| "?".to_owned(), milliseconds)
}

impl Report {
    /// As a page for people.
    ///
    /// # Errors
    /// When the output fails.
    pub fn write_text(&self, out: &mut dyn Write) -> io::Result<()> {
        write(out, self)
    }
}

fn write(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    let cpus = if report.vcpus == 1 { "1 vCPU".into() } else { format!("{} vCPUs", report.vcpus) };
    let what = format!("Boot of Linux {} ({}), {cpus}", cut(&report.release, 70), report.arch);
    wrap(out, "", &what)?;
    match report.init_ns {
        Some(init) => writeln!(out, "Init is started {} s after the machine.", seconds(init))?,
        None => {
            writeln!(out, "Init was not seen; the trace ends at {} s.", seconds(report.until_ns))?;
        }
    }
    writeln!(out, "Times are by the guest's clock; they include waiting and what tracing costs.")?;
    for sentence in report.missing.sentences() {
        wrap(out, "", &format!("ATTENTION: {sentence}"))?;
    }
    steps(out, report)?;
    levels(out, report)?;
    initcalls(out, report)?;
    functions(out, report)?;
    idle(out, report)?;
    modules(out, report)?;
    if !report.untold.is_empty() {
        writeln!(out, "\nNOT SHOWN HERE")?;
        for sentence in &report.untold {
            wrap(out, "  - ", sentence)?;
        }
    }
    out.flush()
}

fn steps(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    writeln!(out, "\n{:<53}{:>12} {:>14}", "THE WAY TO INIT", "at (s)", "then (ms)")?;
    for step in &report.steps {
        let (at, took) = (seconds(step.ns), milliseconds(step.took_ns));
        writeln!(out, "  {:<51}{at:>12} {took:>14}", cut(step.what, 50))?;
    }
    Ok(())
}

fn levels(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    if report.levels.is_empty() {
        return Ok(());
    }
    let (name, calls) = ("INITCALLS BY LEVEL", "calls");
    writeln!(
        out,
        "\n{name:<28}{calls:>10} {:>14} {:>10} {:>14}",
        "time (ms)", "of all", "idle (ms)"
    )?;
    for level in &report.levels {
        let time = (level.timed > 0).then_some(level.duration_ns);
        let part =
            if level.timed > 0 { share(level.duration_ns, report.until_ns) } else { "?".into() };
        let idle = report.idle_ns.map(|_| level.idle_ns).filter(|_| level.timed > 0);
        writeln!(
            out,
            "  {:<26}{:>10} {:>14} {part:>10} {:>14}",
            cut(&level.level, 25),
            level.calls,
            known(time),
            known(idle)
        )?;
    }
    Ok(())
}

fn initcalls(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    let mut longest: Vec<&Initcall> =
        report.initcalls.iter().filter(|call| call.duration_ns.is_some()).collect();
    if longest.is_empty() {
        return Ok(());
    }
    longest.sort_by_key(|call| (std::cmp::Reverse(call.duration_ns), call.ns));
    writeln!(
        out,
        "\n{:<39}{:<10} {:>14} {:>14}",
        "LONGEST INITCALLS", "level", "time (ms)", "idle (ms)"
    )?;
    for call in longest.iter().take(LINES) {
        writeln!(
            out,
            "  {:<37}{:<10} {:>14} {:>14}",
            cut(call.function.as_deref().unwrap_or("?"), 36),
            cut(call.level.as_deref().unwrap_or("?"), 10),
            known(call.duration_ns),
            known(report.idle_ns.map(|_| call.idle_ns))
        )?;
    }
    Ok(())
}

fn functions(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    if report.functions.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "\n{:<36}{:>7} {:>11} {:>11} {:>11}",
        "LONGEST FUNCTIONS (ms)", "calls", "self", "total", "longest"
    )?;
    for function in report.functions.iter().take(LINES) {
        writeln!(
            out,
            "  {:<34}{:>7} {:>11} {:>11} {:>11}",
            cut(&function.function, 33),
            function.calls,
            milliseconds(function.self_ns),
            milliseconds(function.total_ns),
            milliseconds(function.longest_ns)
        )?;
    }
    Ok(())
}

fn idle(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    let Some(all) = report.idle_ns else { return Ok(()) };
    writeln!(out, "\n{:<53}{:>12} {:>14}", "IDLE BEFORE INIT", "of all", "time (ms)")?;
    let mut line = |what: &str, time: u64| {
        let part = share(time, report.until_ns);
        writeln!(out, "  {what:<51}{part:>12} {:>14}", milliseconds(time))
    };
    line("no vCPU had anything to do: the boot waited", all)?;
    if report.idle.len() > 1 {
        for of in report.idle.iter().take(LINES) {
            line(&format!("vCPU {}", of.cpu), of.idle_ns)?;
        }
    }
    let more = report.idle.len().saturating_sub(LINES);
    if more > 0 { writeln!(out, "  and {more} more vCPUs") } else { Ok(()) }
}

fn modules(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    if report.modules.is_empty() {
        return Ok(());
    }
    let mut longest: Vec<&Module> = report.modules.iter().collect();
    longest.sort_by_key(|module| (std::cmp::Reverse(module.duration_ns), module.ns));
    let known_times = report.modules.iter().filter_map(|module| module.duration_ns);
    let all = known_times.reduce(u64::saturating_add);
    let head = format!("MODULES: {} in {} ms", longest.len(), known(all));
    writeln!(out, "\n{head:<39}{:>12} {:>13} {:>13}", "at (s)", "load (ms)", "init (ms)")?;
    for module in longest.iter().take(LINES) {
        writeln!(
            out,
            "  {:<37}{:>12} {:>13} {:>13}",
            cut(module.module.as_deref().unwrap_or("?"), 36),
            seconds(module.ns),
            known(module.duration_ns),
            known(module.init_ns)
        )?;
    }
    Ok(())
}
