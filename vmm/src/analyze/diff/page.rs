//! The report as text of 80 columns.

use std::io::{self, Write};

use crate::analyze::{cut, milliseconds, seconds, wrap};

use super::report::{Calls, Difference, Parting, Point, Side};

/// Most lines of each list.
const LINES: usize = 20;

impl Difference {
    /// Writes it for people: 80 columns.
    ///
    /// # Errors
    /// When the output fails.
    pub fn write_text(&self, out: &mut dyn Write) -> io::Result<()> {
        write(out, self)
    }
}

fn write(out: &mut dyn Write, found: &Difference) -> io::Result<()> {
    for (name, side) in [("A", &found.a), ("B", &found.b)] {
        head(out, name, side)?;
    }
    let noise = milliseconds(found.noise_ns);
    writeln!(
        out,
        "Less than {} % of the larger, and times of less than {noise} ms, are noise.",
        found.noise_percent
    )?;
    only(out, "CALLED IN A ONLY", &found.only_a)?;
    only(out, "CALLED IN B ONLY", &found.only_b)?;
    counts(out, found)?;
    times(out, found)?;
    tasks(out, &found.tasks)?;
    if !found.untold.is_empty() {
        writeln!(out, "\nNOT SHOWN HERE")?;
        for sentence in &found.untold {
            wrap(out, "  - ", sentence)?;
        }
    }
    if found.is_empty() {
        writeln!(out, "\nNo function differs by more than noise.")?;
    }
    out.flush()
}

fn head(out: &mut dyn Write, name: &str, side: &Side) -> io::Result<()> {
    let cpus = if side.vcpus == 1 { "1 vCPU".into() } else { format!("{} vCPUs", side.vcpus) };
    let what = format!(
        "{name} {}: Linux {} ({}), {cpus}, {} calls of {} functions",
        side.file,
        cut(&side.release, 60),
        side.arch,
        side.calls,
        side.functions
    );
    wrap(out, "", &what)?;
    for sentence in side.missing.sentences() {
        wrap(out, "", &format!("ATTENTION: {name}: {sentence}"))?;
    }
    Ok(())
}

/// How many more there are than are shown.
fn more(out: &mut dyn Write, all: usize) -> io::Result<()> {
    match all.saturating_sub(LINES) {
        0 => Ok(()),
        more => writeln!(out, "  and {more} more"),
    }
}

fn only(out: &mut dyn Write, title: &str, only: &[Calls]) -> io::Result<()> {
    if only.is_empty() {
        return Ok(());
    }
    writeln!(out, "\n{title:<66}{:>14}", "calls")?;
    for Calls { function, calls } in only.iter().take(LINES) {
        writeln!(out, "  {:<64}{calls:>14}", cut(function, 63))?;
    }
    more(out, only.len())
}

fn counts(out: &mut dyn Write, found: &Difference) -> io::Result<()> {
    if found.counts.is_empty() {
        return Ok(());
    }
    writeln!(out, "\n{:<38}{:>14}{:>14}{:>14}", "CALLS", "A", "B", "B - A")?;
    for it in found.counts.iter().take(LINES) {
        let change = i128::from(it.b) - i128::from(it.a);
        writeln!(out, "  {:<36}{:>14}{:>14}{change:>+14}", cut(&it.function, 35), it.a, it.b)?;
    }
    more(out, found.counts.len())
}

fn times(out: &mut dyn Write, found: &Difference) -> io::Result<()> {
    if found.times.is_empty() {
        return Ok(());
    }
    writeln!(out, "\n{:<38}{:>14}{:>14}{:>14}", "TIME (ms)", "A", "B", "B - A")?;
    for it in found.times.iter().take(LINES) {
        let (a, b) = (it.a.total_ns, it.b.total_ns);
        let sign = if b < a { '-' } else { '+' };
        writeln!(
            out,
            "  {:<36}{:>14}{:>14}{:>14}",
            cut(&it.function, 35),
            milliseconds(a),
            milliseconds(b),
            format!("{sign}{}", milliseconds(a.abs_diff(b)))
        )?;
    }
    more(out, found.times.len())
}

fn tasks(out: &mut dyn Write, tasks: &[Parting]) -> io::Result<()> {
    if tasks.is_empty() {
        return Ok(());
    }
    writeln!(out, "\nWHERE CALLS OF TASKS DIFFER")?;
    for parting in tasks.iter().take(LINES) {
        let Parting { comm, pid_a, pid_b, same, after, .. } = parting;
        let after = after.as_ref().map_or(String::new(), |after| format!(", the last of {after}"));
        wrap(out, "  ", &format!("{comm} ({pid_a}, {pid_b}): after {same} equal calls{after}"))?;
        for (name, point) in [("A", &parting.a), ("B", &parting.b)] {
            match point {
                Some(Point { function, ns }) => {
                    writeln!(out, "    {name} {:>14}  {}", seconds(*ns), cut(function, 58))?;
                }
                None => writeln!(out, "    {name} {:>14}  no more calls", "")?,
            }
        }
    }
    more(out, tasks.len())
}
