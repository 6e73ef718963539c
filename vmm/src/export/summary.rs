//! The closing summary, for people and for scripts that search it.

use std::io::{self, Write};

use crate::stream::{Counted, ExitsOf, GuestClock, Summary, Waits};

use super::printable;
use super::text::{milliseconds, seconds};

/// Prints the closing summary. The beginning of every line is stable; the lines that are
/// always there are `sites`, `records`, `pauses` and `guest`.
///
/// # Errors
/// When the output fails.
pub fn write_summary(out: &mut impl Write, summary: &Summary) -> io::Result<()> {
    let Summary { sites, vcpus, counted, pauses, waits, exits, patch_ns, .. } = summary;
    let Summary { exit, run_status, notes, .. } = summary;
    let skipped: u64 = sites.skipped.iter().fold(0, |sum, skip| sum.saturating_add(skip.count));
    writeln!(
        out,
        "vmtrace: sites matched {}, patched {}, skipped {skipped}",
        sites.matched, sites.patched
    )?;
    for skip in &sites.skipped {
        let examples = if skip.examples.is_empty() {
            String::new()
        } else {
            format!(" (such as {})", skip.examples.join(", "))
        };
        let line = format!("{} {}{examples}", skip.count, skip.reason);
        writeln!(out, "vmtrace: skipped {}", printable(&line))?;
    }
    if !sites.tracers.is_empty() {
        let list: Vec<_> = sites
            .tracers
            .iter()
            .enumerate()
            .map(|(id, count)| match sites.names.get(id) {
                Some(name) => format!("{} {count}", printable(name)),
                None => format!("tracer{id} {count}"),
            })
            .collect();
        writeln!(
            out,
            "vmtrace: tracers {} ({}), sites direct {}, combined {}",
            list.len(),
            list.join(", "),
            sites.direct,
            sites.combined
        )?;
    }
    if sites.guest_updates > 0 {
        writeln!(
            out,
            "vmtrace: shared {} sites with the guest's own ftrace at the most, {} updates of it",
            sites.shared, sites.guest_updates
        )?;
    }
    let by_vcpu = |count: &dyn Fn(usize) -> u64| {
        let list: Vec<_> = (0..vcpus.len()).map(|id| format!("vcpu{id} {}", count(id))).collect();
        list.join(", ")
    };
    writeln!(
        out,
        "vmtrace: records {} ({}), lost {} ({})",
        summary.records(),
        by_vcpu(&|id| vcpus[id].records),
        summary.lost(),
        by_vcpu(&|id| vcpus[id].lost),
    )?;
    for (id, vcpu) in vcpus.iter().enumerate() {
        for (reason, count) in &vcpu.lost_by_reason {
            writeln!(out, "vmtrace: lost vcpu{id} {count} {}", printable(reason))?;
        }
    }
    if let Some(Counted { functions, calls }) = counted {
        writeln!(out, "vmtrace: counted {calls} calls of {functions} functions")?;
    }
    writeln!(
        out,
        "vmtrace: pauses {}, total {}, longest {}, patching {}",
        pauses.count,
        milliseconds(pauses.total_ns),
        milliseconds(pauses.max_ns),
        milliseconds(*patch_ns)
    )?;
    if let Some(waits) = waits {
        write_waits(out, waits)?;
    }
    write_exits(out, exits)?;
    if let Some(clock) = &summary.guest_clock {
        write_clock(out, clock)?;
    }
    writeln!(out, "vmtrace: guest {}", exit.as_str())?;
    if let Some(status) = run_status {
        writeln!(out, "vmtrace: run status {status}")?;
    }
    for note in notes {
        writeln!(out, "vmtrace: note {}", printable(note))?;
    }
    Ok(())
}

/// How vCPUs waited instead of losing records.
fn write_waits(out: &mut impl Write, waits: &Waits) -> io::Result<()> {
    let list = waits.vcpus_ns.iter().enumerate();
    let list: Vec<_> = list.map(|(id, &time)| format!("vcpu{id} {}", milliseconds(time))).collect();
    let all = waits.vcpus_ns.iter().fold(0, |sum: u64, &time| sum.saturating_add(time));
    write!(out, "vmtrace: waited for room {} ({})", milliseconds(all), list.join(", "))?;
    if waits.stalls > 0 {
        let time = milliseconds(waits.stalls_ns);
        write!(out, ", all at once {} times for {time} (the output took nothing)", waits.stalls)?;
    }
    writeln!(out)
}

/// How times of the guest's log are to be compared with those of the trace.
fn write_clock(out: &mut impl Write, clock: &GuestClock) -> io::Result<()> {
    let GuestClock { zero_ns, early_ns, drift_ns, .. } = *clock;
    write!(out, "vmtrace: clock 0 of the guest's log is {} s of the trace", seconds(zero_ns))?;
    if early_ns != 0 {
        let way = if early_ns > 0 { "ahead" } else { "behind" };
        write!(out, ", early times {} s {way}", seconds(early_ns.unsigned_abs()))?;
    }
    // Less is of the arithmetic.
    if drift_ns.unsigned_abs() >= 1000 {
        write!(out, ", drift {drift_ns} ns")?;
    }
    writeln!(out)
}

/// All exits in a line, then those of each vCPU by their reasons, the one with the most time first.
fn write_exits(out: &mut impl Write, exits: &[ExitsOf]) -> io::Result<()> {
    if exits.is_empty() {
        return Ok(());
    }
    let sum = |number: &dyn Fn(&ExitsOf) -> u64| {
        exits.iter().fold(0, |sum: u64, of| sum.saturating_add(number(of)))
    };
    writeln!(
        out,
        "vmtrace: exits {}, total {}, longest {}",
        sum(&|of| of.count),
        milliseconds(sum(&|of| of.total_ns)),
        milliseconds(exits.iter().map(|of| of.max_ns).max().unwrap_or(0)),
    )?;
    let mut exits: Vec<_> = exits.iter().collect();
    exits.sort_by_key(|of| (of.cpu, std::cmp::Reverse(of.total_ns)));
    for ExitsOf { cpu, reason, count, total_ns, max_ns } in exits {
        writeln!(
            out,
            "vmtrace: exits vcpu{cpu} {} {count}, total {}, longest {}",
            printable(reason),
            milliseconds(*total_ns),
            milliseconds(*max_ns)
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    // Scripts look for the first line, people for what took most.
    #[test]
    fn exits_are_told_by_vcpu_and_reason() {
        let of = |cpu, reason: &str, count, total_ns, max_ns| {
            let reason = reason.to_owned();
            ExitsOf { cpu, reason, count, total_ns, max_ns }
        };
        let exits = vec![of(1, "io", 2, 3_000, 2_000), of(0, "io", 3, 20_000, 9_000)];
        let exits = [exits, vec![of(0, "kick\n", 1, 70_000, 70_000)]].concat();
        let summary = Summary { exits, ..Summary::default() };
        let mut text = Vec::new();
        write_summary(&mut text, &summary).expect("memory");
        let text = String::from_utf8(text).expect("UTF-8");
        let lines: Vec<_> = text.lines().filter(|line| line.contains("exits")).collect();
        let wanted = [
            "vmtrace: exits 6, total 0.093 ms, longest 0.070 ms",
            "vmtrace: exits vcpu0 kick? 1, total 0.070 ms, longest 0.070 ms",
            "vmtrace: exits vcpu0 io 3, total 0.020 ms, longest 0.009 ms",
            "vmtrace: exits vcpu1 io 2, total 0.003 ms, longest 0.002 ms",
        ];
        assert_eq!(lines, wanted);
        let json = serde_json::to_string(&summary).expect("memory");
        assert_eq!(serde_json::from_str::<Summary>(&json).expect("JSON"), summary);
        // Traces without exits look as they always have.
        let json = serde_json::to_string(&Summary::default()).expect("memory");
        assert!(!json.contains("exits"), "{json}");
    }
}
