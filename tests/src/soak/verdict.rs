//! The figures of a long run, and what is to be thought of them.

use std::fmt;
use std::time::Duration;

use super::lasting::Seen;
use super::visitors::Tally;
use super::{Done, Look};
use crate::cases::trouble;
use crate::trace::lost_sign;

/// What memory may grow by, from the median of the second quarter to that of the last one: a tenth, and 4 MiB.
const MORE_PERCENT: u64 = 10;
const MORE_KIB: u64 = 4 << 10;

pub(super) const HEADER: &str = "  elapsed      records         lost changes refused visits \
     VmRSS/MiB  own/KiB threads fds";

/// The figures of a moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    pub elapsed: Duration,
    pub records: u64,
    pub lost: u64,
    pub changes: u64,
    pub refused: u64,
    pub visits: u64,
    pub look: Look,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { elapsed, records, lost, changes, refused, visits, look } = self;
        let Look { resident, own, left_out: _, threads, descriptors } = look;
        let elapsed = format!("{}:{:02}", elapsed.as_secs() / 60, elapsed.as_secs() % 60);
        write!(
            f,
            "{elapsed:>9} {records:>12} {lost:>12} {changes:>7} {refused:>7} {visits:>6} {:>9} {own:>8} {threads:>7} \
             {descriptors:>3}",
            resident >> 10
        )
    }
}

fn median(values: impl Iterator<Item = u64>) -> u64 {
    let mut values: Vec<u64> = values.collect();
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0)
}

/// What grows from the second quarter to the last one.
pub(super) fn growth(looks: &[Look]) -> Vec<String> {
    let quarter = looks.len() / 4;
    if quarter < 2 {
        return vec![format!("{} looks at vmtrace are too few", looks.len())];
    }
    let (second, last) = (&looks[quarter..2 * quarter], &looks[looks.len() - quarter..]);
    // A heap that has become part of what is left out counts as if all of it were resident.
    let merged = |look: &Look| look.left_out.saturating_sub(looks[0].left_out);
    let memory = |looks: &[Look]| median(looks.iter().map(|look| look.own + merged(look)));
    let (before, after) = (memory(second), memory(last));
    let mut grows = Vec::new();
    if after > before + before * MORE_PERCENT / 100 + MORE_KIB {
        grows
            .push(format!("memory grows: {before} KiB in the second quarter, {after} in the last"));
    }
    // What leaks never goes down; a connection that is just being closed is none.
    let mut count = |what: &str, of: fn(&Look) -> u64| {
        let least = |looks: &[Look]| looks.iter().map(of).min().unwrap_or(0);
        let (before, after) = (least(second), least(last));
        if after > before {
            grows.push(format!("{what} grow: {before} in the second quarter, {after} in the last"));
        }
    };
    count("threads", |look| look.threads);
    count("descriptors", |look| look.descriptors);
    grows
}

/// Prints the table, and adds to what is wrong.
pub(super) fn print(done: &Done, seen: &Seen, tally: &Tally, said: &str, wrong: &mut Vec<String>) {
    let looks: Vec<Look> = done.rows.iter().map(|row| row.look).collect();
    let of = |of: fn(&Look) -> u64| {
        let first = looks.first().map_or(0, of);
        let last = looks.last().map_or(0, of);
        let most = looks.iter().map(of).max().unwrap_or(0);
        format!("{first:>10} {:>10} {last:>10} {most:>10}", median(looks.iter().map(of)))
    };
    println!("\n                       first     median       last       most");
    println!("VmRSS (KiB)       {}", of(|look| look.resident));
    println!("  without guest   {}", of(|look| look.own));
    println!("threads           {}", of(|look| look.threads));
    println!("descriptors       {}", of(|look| look.descriptors));
    println!("records {}, lost {} {:?}", seen.records(), seen.lost(), seen.lost);
    match &seen.end {
        Some(Ok(summary)) => {
            println!("summary: records {}, lost {}", summary.records(), summary.lost());
            if let Err(error) = seen.compare(summary) {
                wrong.push(format!("{error:#}"));
            }
            println!("pauses {:?}, exit {}", summary.pauses, summary.exit.as_str());
            summary.notes.iter().for_each(|note| println!("note {note}"));
            let not_once = |mark: &&String| seen.marks.get(*mark) != Some(&1);
            let marks: Vec<&String> = done.marks.iter().filter(not_once).take(5).collect();
            if !marks.is_empty() || seen.marks.len() != done.marks.len() {
                wrong.push(format!(
                    "{} marks of {}: {marks:?}",
                    seen.marks.len(),
                    done.marks.len()
                ));
            }
        }
        other => wrong.push(format!("the trace: {other:?}")),
    }
    println!(
        "{} rounds; {} calls were counted by the guest and by vmtrace, {} of them recorded",
        done.rounds, done.calls, done.recorded
    );
    println!(
        "commands: {} answered ({} of them changes, {} marks), {} refused {:?}",
        done.answered,
        done.changes,
        done.marks.len(),
        done.refused,
        done.reasons
    );
    println!(
        "visits: {} read on, {} stopped, {} killed; {} records, {} missed and told",
        tally.read, tally.stopped, tally.killed, tally.records, tally.missed
    );
    wrong.extend(tally.wrong.iter().cloned());
    wrong.extend(growth(&looks));
    wrong.extend(trouble(said).map(|line| format!("the guest's console: {line}")));
    wrong.extend(lost_sign(said).map(|sign| format!("the emulation has lost the guest: {sign}")));
    if done.calls == 0 || tally.visits() == 0 || done.changes == 0 {
        wrong.push("nothing was done".to_owned());
    }
    if !wrong.is_empty() {
        println!("the last that was said:");
        let lines: Vec<&str> = said.lines().collect();
        lines[lines.len().saturating_sub(20)..].iter().for_each(|line| println!("  {line}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // A leak that is not found out is what hours are spent for in vain.
    #[test]
    fn what_grows_is_found_out() {
        let flat =
            Look { resident: 600_000, own: 50_000, left_out: 700_000, threads: 9, descriptors: 40 };
        let looks = |change: &dyn Fn(u64, &mut Look)| -> Vec<Look> {
            (0..20)
                .map(|number| {
                    let mut look = flat;
                    change(number, &mut look);
                    look
                })
                .collect()
        };
        let grows = |change: &dyn Fn(u64, &mut Look)| growth(&looks(change)).join(";");
        assert_eq!(grows(&|_, _| {}), "");
        // Warming up, a peak, and the guest's memory are none.
        assert_eq!(grows(&|number, look| look.own -= if number < 5 { 20_000 } else { 0 }), "");
        assert_eq!(grows(&|number, look| look.own += if number == 17 { 90_000 } else { 0 }), "");
        assert_eq!(grows(&|number, look| look.resident += number << 20), "");
        assert!(grows(&|number, look| look.own += number * 1000).starts_with("memory"));
        assert!(grows(&|number, look| look.left_out += number * 1000).starts_with("memory"));
        assert!(grows(&|number, look| look.descriptors += number / 6).starts_with("descriptors"));
        assert!(grows(&|number, look| look.threads += number / 15).starts_with("threads"));
        assert!(!growth(&looks(&|_, _| {})[..7]).is_empty());
    }
}
