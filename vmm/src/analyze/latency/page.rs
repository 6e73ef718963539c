//! The report as text.

use std::io::{self, Write};

use super::super::{cut, seconds, wrap};
use super::lines::Line;
use super::report::{CLASSES, Episode, Report};
use super::{Kind, Row, task};

/// Things and episodes that a page lists.
const LINES: usize = 20;
/// Periods that a page lists.
const ROWS: usize = 60;
/// Width of the longest bar.
const BAR: u64 = 40;

/// Microseconds with three digits.
fn micros(nanoseconds: u64) -> String {
    format!("{}.{:03}", nanoseconds / 1000, nanoseconds % 1000)
}

impl Report {
    /// One page: the longest as the kernel's latency tracers print it, then the rest.
    ///
    /// # Errors
    /// When the output fails.
    pub fn write_text(&self, out: &mut dyn Write) -> io::Result<()> {
        write(out, self)
    }
}

fn write(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    writeln!(out, "# tracer: {}\n#", report.latency)?;
    if let Some((since, until)) = report.seen_ns {
        writeln!(out, "# seen: from {} s to {} s\n#", seconds(since), seconds(until))?;
    }
    rows(out, report)?;
    match &report.longest {
        Some(longest) => latency(out, report, longest)?,
        None => writeln!(out, "# {}", report.kind.none())?,
    }
    histograms(out, report)?;
    sums(out, report)?;
    listed(out, report)?;
    let mut notes = report.gaps.sentences();
    let many = report.kind.plural();
    let mut note = |count: u64, what: &str| {
        if count > 0 {
            notes.push(format!("{what}: {count}"));
        }
    };
    note(report.doubtful, &format!("{many} left out, since some of their records are missing"));
    let end = if report.seen_ns.is_some() { "by then" } else { "at the end of the trace" };
    note(report.open, &format!("{many} that had not ended {end}"));
    note(report.other_sums, &format!("{many} of something that has no line"));
    note(report.other_rows, "periods that have no line");
    note(
        report.differing,
        "records that give another state of their CPU than the events, so that what they were in \
         is left out",
    );
    if report.behind {
        let note = "the output of the trace is too slow: what happened last was not seen yet";
        notes.push(note.to_owned());
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
         #    -----------------",
        report.latency,
        report.release,
        (longest.duration_ns + 500) / 1000,
        seen.lines.len(),
        seen.lines.len(),
        report.vcpus,
        prio.map_or("?".to_owned(), |prio| prio.to_string()),
    )?;
    if let Some(started) = &longest.started {
        writeln!(out, "#  => started at: {started}")?;
    }
    if let Some(ended) = &longest.ended {
        writeln!(out, "#  => ended at:   {ended}")?;
    }
    if let Some(woken_on) = longest.woken_on {
        writeln!(out, "#  => woken on CPU#{woken_on}")?;
    }
    if let Some(mostly) = &longest.mostly {
        writeln!(out, "#  => mostly: {mostly}")?;
    }
    writeln!(
        out,
        "#  => since: {} s\n#  => paused by vmtrace: {} us",
        seconds(longest.since_ns),
        micros(longest.paused_ns)
    )?;
    if report.exits > 0 {
        let host = micros(longest.host_ns);
        writeln!(
            out,
            "#  => out of the guest: {host} us (exits to vmtrace, pauses among them, and preempted)"
        )?;
    }
    writeln!(out, "#")?;
    if report.context {
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
        let next = lines.peek().map_or(longest.ns, |next| next.at);
        let (since, until_next) =
            (line.at.saturating_sub(longest.since_ns), next.saturating_sub(line.at));
        write_line(out, line, *cpu, since, until_next)?;
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

/// As the kernel's osnoise tracer prints it (`print_osnoise_headers`, kernel/trace/trace_osnoise.c).
fn rows(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    if report.rows.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "#                RUNTIME      NOISE  % OF CPU  MAX SINGLE   Interference counters\n\
         #     TIME CPU#   IN US      IN US AVAILABLE NOISE IN US   HOST  NMI    IRQ   SIRQ THREAD"
    )?;
    let left_out = report.rows.len().saturating_sub(ROWS);
    for row in report.rows.iter().take(ROWS) {
        let Row { cpu, ns, runtime_ns, noise_ns, longest_ns, .. } = *row;
        let Row { host, nmi, irq, softirq, thread, .. } = *row;
        let available = row.available().unwrap_or(0);
        let available = format!("{}.{:03}", available / 1000, available % 1000);
        writeln!(
            out,
            "{:>12} [{cpu:03}] {:>7} {:>10} {available:>9} {:>11} {host:>6} {nmi:>4} {irq:>6} \
             {softirq:>6} {thread:>6}",
            seconds(ns),
            runtime_ns / 1000,
            noise_ns / 1000,
            longest_ns / 1000,
        )?;
    }
    if left_out > 0 {
        writeln!(out, "# and {left_out} more periods")?;
    }
    writeln!(out, "#")
}

fn histograms(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    for histogram in &report.histograms {
        let all: u64 = histogram.below_us.iter().sum();
        if all == 0 {
            continue;
        }
        let title = format!("{} ON CPU {}", report.kind.plural().to_uppercase(), histogram.cpu);
        writeln!(out, "\n{title:<26}{all:>12}")?;
        let most = histogram.below_us.iter().copied().max().unwrap_or(1).max(1);
        let first = histogram.below_us.iter().position(|count| *count > 0).unwrap_or(0);
        let last = histogram.below_us.iter().rposition(|count| *count > 0).unwrap_or(0);
        for class in first..=last {
            let count = histogram.below_us[class];
            let from = if class == 0 { 0 } else { 1_u64 << (class - 1) };
            let to = match class + 1 < CLASSES {
                true => (1_u64 << class).to_string(),
                false => String::new(),
            };
            let bar = usize::try_from(count * BAR / most).unwrap_or(0);
            writeln!(out, "{from:>9} us .. {to:>9} {count:>12}  |{}", "*".repeat(bar))?;
        }
    }
    Ok(())
}

fn sums(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    if report.sums.is_empty() {
        return Ok(());
    }
    let (title, is_task) = match report.kind {
        Kind::Wakeup | Kind::WakeupRt => ("LONGEST WAITS OF TASKS (us)", true),
        Kind::Osnoise => ("WHAT TOOK CPUS (us)", false),
        Kind::Irqsoff | Kind::Preemptoff | Kind::Preemptirqsoff => {
            ("LONGEST, BY BEGINNING (us)", false)
        }
    };
    let prio = |text: &str| if is_task { format!("{text:>6}") } else { " ".repeat(6) };
    writeln!(
        out,
        "\n{title:<27}{}{:>9}{:>12}{:>12}{:>15}",
        prio("prio"),
        "count",
        "mean",
        "longest",
        "at (s)"
    )?;
    for of in report.sums.iter().take(LINES) {
        let number = of.prio.map_or("?".to_owned(), |prio| prio.to_string());
        let name = format!("  {}", cut(&of.name, if is_task { 25 } else { 31 }));
        let name = if is_task { format!("{name:<27}{number:>6}") } else { format!("{name:<33}") };
        let (mean, longest) = (micros(of.total_ns / of.count.max(1)), micros(of.longest_ns));
        writeln!(out, "{name}{:>9}{mean:>12}{longest:>12}{:>15}", of.count, seconds(of.at_ns))?;
    }
    let more = report.sums.len().saturating_sub(LINES) as u64 + report.more_sums;
    if more > 0 {
        writeln!(out, "  and {more} more")?;
    }
    Ok(())
}

fn listed(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    let Some(over) = report.over_ns else { return Ok(()) };
    let all = report.listed.len() as u64 + report.unlisted;
    let title = report.kind.plural().to_uppercase();
    writeln!(out, "\n{title} OF {} US AND MORE: {all}", micros(over))?;
    for one in &report.listed {
        let host = match one.host_ns {
            0 => String::new(),
            ns if report.exits > 0 => format!("  (out of the guest {} us)", micros(ns)),
            ns => format!("  (paused {} us)", micros(ns)),
        };
        let what = match (&one.started, &one.ended, &one.mostly) {
            (Some(started), Some(ended), _) => format!("  {started} .. {ended}"),
            (.., Some(mostly)) => format!("  {mostly}"),
            _ => String::new(),
        };
        writeln!(
            out,
            "  {:>14}  CPU#{:<3} {:>12} us  {}{what}{host}",
            seconds(one.ns),
            one.cpu,
            micros(one.duration_ns),
            task(&one.comm, one.pid)
        )?;
    }
    if report.unlisted > 0 {
        writeln!(out, "  and {} more", report.unlisted)?;
    }
    Ok(())
}
