//! The closing summary for people, and for scripts that search it.

use std::io::{self, Write};

use crate::stream::{Counted, Summary, Waits};

use super::printable;
use super::text::milliseconds;

/// Prints the closing summary. The beginning of every line is stable; the lines that are
/// always there are `sites`, `records`, `pauses` and `guest`.
///
/// # Errors
/// When the output fails.
pub fn write_summary(out: &mut impl Write, summary: &Summary) -> io::Result<()> {
    let Summary { sites, vcpus, counted, pauses, waits, patch_ns, exit, run_status, notes } =
        summary;
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
