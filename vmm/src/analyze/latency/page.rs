//! The page.

use std::io::{self, Write};

use crate::stream::Context;

use super::super::{cut, nanoseconds, seconds, wrap};
use super::lines::Line;
use super::report::{CLASSES, Episode, Report};

/// Tasks and waits that a page lists.
const LINES: usize = 20;
/// Width of the longest bar.
const BAR: u64 = 40;

/// Microseconds with three digits.
fn micros(nanoseconds: u64) -> String {
    format!("{}.{:03}", nanoseconds / 1000, nanoseconds % 1000)
}

pub(super) fn write(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "# tracer: {}\n#", report.latency)?;
    match &report.longest {
        Some(longest) => latency(out, report, longest)?,
        None => writeln!(out, "# no task was woken and ran")?,
    }
    histograms(out, report)?;
    tasks(out, report)?;
    listed(out, report)?;
    let mut notes = report.gaps.sentences();
    if report.doubtful > 0 {
        notes.push(format!("{} waits are left out: records were lost in them", report.doubtful));
    }
    if report.waiting > 0 {
        notes.push(format!("{} tasks still waited at the end of the trace", report.waiting));
    }
    if report.other_tasks > 0 {
        notes.push(format!("{} waits are of tasks that have no line", report.other_tasks));
    }
    if !notes.is_empty() {
        writeln!(out)?;
        notes.iter().try_for_each(|note| wrap(out, "note: ", note))?;
    }
    Ok(())
}

/// As the kernel's tracers of latencies print theirs (`print_trace_header`, kernel/trace/trace.c),
/// with what vmtrace knows.
fn latency(out: &mut dyn Write, report: &Report, longest: &Episode) -> io::Result<()> {
    let Episode { pid, comm, prio, cpu, .. } = longest;
    let seen = &report.lines;
    writeln!(
        out,
        "# {} latency trace v1.1.5 on {}\n\
         # --------------------------------------------------------------------\n\
         # latency: {} us, #{}/{}, CPU#{cpu} | (VP:0, KP:0, SP:0 HP:0 #P:{})\n\
         #    -----------------\n\
         #    | task: {comm}-{pid} (prio:{})\n\
         #    -----------------\n\
         #  => woken at: {} on CPU#{}\n\
         #  => paused by vmtrace: {} us\n\
         #",
        report.latency,
        report.release,
        (longest.ns + 500) / 1000,
        seen.lines.len(),
        report.count,
        report.vcpus,
        prio.map_or("?".to_owned(), |prio| prio.to_string()),
        seconds(longest.since_ns),
        longest.woken_on,
        micros(longest.paused_ns),
    )?;
    let told = Context::is_in(&report.header);
    if told {
        writeln!(
            out,
            "#                    _------=> CPU#\n\
             #                   / _-----=> irqs-off/BH-disabled\n\
             #                  | / _----=> need-resched\n\
             #                  || / _---=> hardirq/softirq\n\
             #                  ||| / _--=> preempt-depth\n\
             #                  |||| / _-=> migrate-disable\n\
             #                  ||||| /     delay\n\
             #  cmd     pid     |||||| time  |   caller\n\
             #     \\   /        ||||||  \\    |    /"
        )?;
    } else {
        writeln!(out, "#  cmd     pid CPU time  |   caller\n#     \\   /     |   \\    |    /")?;
    }
    if seen.cut {
        writeln!(out, "#  (what came before is not kept)")?;
    }
    let mut lines = seen.lines.iter().peekable();
    while let Some(line) = lines.next() {
        let at = nanoseconds(&report.header, line.at);
        let next =
            lines.peek().map_or(longest.until_ns, |next| nanoseconds(&report.header, next.at));
        write_line(out, line, *cpu, at.saturating_sub(longest.since_ns), next.saturating_sub(at))?;
    }
    Ok(())
}

fn write_line(
    out: &mut dyn Write,
    line: &Line,
    cpu: u32,
    since: u64,
    until_next: u64,
) -> io::Result<()> {
    // `trace_print_lat_context` marks what takes long.
    let marks = [(1_000_000_000, '$'), (1_000_000, '#'), (100_000, '!'), (10_000, '+')];
    let mark = marks.into_iter().find(|(limit, _)| until_next > *limit).map_or(' ', |(_, it)| it);
    let context = line.context.map(|context| context.to_string()).unwrap_or_default();
    writeln!(
        out,
        "{:>8}-{:<7} {cpu:3}{context} {:4}us{mark}: {}",
        cut(&line.comm, 8),
        line.pid,
        since / 1000,
        line.text
    )
}

fn histograms(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    for histogram in &report.histograms {
        let all: u64 = histogram.below_us.iter().sum();
        if all == 0 {
            continue;
        }
        writeln!(out, "\nWAITS ON CPU {:<8} {all:>20}", histogram.cpu)?;
        let most = histogram.below_us.iter().copied().max().unwrap_or(1).max(1);
        let first = histogram.below_us.iter().position(|count| *count > 0).unwrap_or(0);
        let last = histogram.below_us.iter().rposition(|count| *count > 0).unwrap_or(0);
        for class in first..=last {
            let count = histogram.below_us[class];
            let from = if class == 0 { 0 } else { 1_u64 << (class - 1) };
            let to =
                if class + 1 < CLASSES { format!("{}", 1_u64 << class) } else { "".to_owned() };
            let bar = usize::try_from(count * BAR / most).unwrap_or(0);
            writeln!(out, "  {from:>9} us .. {to:>9} {count:>9} |{}", "*".repeat(bar))?;
        }
    }
    Ok(())
}

fn tasks(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    if report.tasks.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "\n{:<26}{:>6}{:>9}{:>12}{:>12}{:>15}",
        "LONGEST WAITS OF TASKS (us)", "prio", "waits", "mean", "longest", "at (s)"
    )?;
    for task in report.tasks.iter().take(LINES) {
        let name = format!("{}-{}", cut(&task.comm, 16), task.pid);
        let prio = task.prio.map_or("?".to_owned(), |prio| prio.to_string());
        let mean = micros(task.total_ns / task.count.max(1));
        let (longest, at) = (micros(task.longest_ns), seconds(task.at_ns));
        writeln!(out, "  {name:<25}{prio:>6}{:>9}{mean:>12}{longest:>12}{at:>15}", task.count)?;
    }
    let more = report.tasks.len().saturating_sub(LINES);
    if more > 0 {
        writeln!(out, "  and {more} more tasks")?;
    }
    Ok(())
}

fn listed(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    let Some(over) = report.over_ns else { return Ok(()) };
    let all = report.listed.len() as u64 + report.unlisted;
    writeln!(out, "\nWAITS OF {} US AND MORE: {all}", micros(over))?;
    for one in &report.listed {
        let paused = match one.paused_ns {
            0 => String::new(),
            ns => format!("  (paused {} us)", micros(ns)),
        };
        writeln!(
            out,
            "  {:>14}  CPU#{:<3} {:>12} us  {}-{}{paused}",
            seconds(one.until_ns),
            one.cpu,
            micros(one.ns),
            one.comm,
            one.pid
        )?;
    }
    if report.unlisted > 0 {
        writeln!(out, "  and {} more", report.unlisted)?;
    }
    Ok(())
}
