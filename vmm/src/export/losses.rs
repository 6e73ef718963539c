//! A warning about lost records, with remedies.

use std::io::{self, Write};

use crate::stream::{LossReason, Summary};

/// The warning is given if one of this many records is lost. Fewer losses are only in the closing
/// summary.
const NOTABLE: u64 = 100;

/// Says so, and what can be done about it, if more than 1 % of all records are lost; beside what
/// `summary` counts so are `missed`, which this consumer alone was too slow for. Records that newer ones have overwritten
/// in a flight recorder are as it was asked for: an ordinary line tells them.
///
/// # Errors
/// When the output fails.
pub fn write_losses(out: &mut impl Write, summary: &Summary, missed: u64) -> io::Result<()> {
    let by_reason = |reason: LossReason| {
        let name = reason.to_string();
        let counts = summary.vcpus.iter().filter_map(|vcpu| vcpu.lost_by_reason.get(&name));
        counts.fold(0_u64, |sum, count| sum.saturating_add(*count))
    };
    let overwritten = by_reason(LossReason::Overwritten);
    if overwritten > 0 {
        writeln!(
            out,
            "vmtrace: the flight recorder has the newest {} records; {overwritten} older ones were \
             overwritten: trace fewer functions (-f, -n) or give it more room (--buffer) to keep a \
             longer time, or keep all (--overflow block)",
            summary.records()
        )?;
    }
    let lost = summary.lost().saturating_sub(overwritten);
    let all = summary.records().saturating_add(lost);
    // What this one has missed was recorded.
    let here = lost.saturating_add(missed);
    if here <= all / NOTABLE {
        return Ok(());
    }
    #[allow(clippy::cast_precision_loss)]
    let percent = here as f64 * 100.0 / all.max(here) as f64;
    writeln!(out, "vmtrace: ATTENTION: {percent:.1} % OF ALL RECORDS ARE LOST ({here} of {all})")?;
    for (reason, remedy) in REMEDIES {
        let count = match reason {
            LossReason::Consumer => missed,
            reason => by_reason(reason),
        };
        if count > 0 {
            writeln!(out, "vmtrace: ATTENTION: {count} {reason}: {remedy}")?;
        }
    }
    Ok(())
}

const REMEDIES: [(LossReason, &str); 5] = [
    (
        LossReason::Full,
        "the guest made records faster than they could be taken: trace fewer functions (-f, -n), \
         begin later (--from), write to a file (-o FILE) rather than to a terminal, keep the \
         newest instead of the oldest (--overflow overwrite), or let the guest wait (--overflow \
         block)",
    ),
    (
        LossReason::Consumer,
        "this consumer was too slow, others may have them: ask for fewer functions (-f, -n), or \
         have the run write a file (vmtrace boot -o FILE)",
    ),
    (
        LossReason::Invalid,
        "the guest has written over its rings: its kernel may be broken, do not trust this trace",
    ),
    (
        LossReason::Unfinished,
        "the guest ended while it wrote them: nothing can be done about that, unless this is a bug \
         of vmtrace",
    ),
    (
        LossReason::Exits,
        "vCPUs left the guest faster than that could be written: write to a file (-o FILE) rather \
         than to a terminal, or do without --exits",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::VcpuTotals;

    fn said(records: u64, lost: &[(LossReason, u64)], missed: u64) -> String {
        let vcpu = VcpuTotals {
            records,
            lost: lost.iter().map(|(_, count)| count).sum(),
            lost_by_reason: lost.iter().map(|(why, count)| (why.to_string(), *count)).collect(),
        };
        let summary = Summary { vcpus: vec![VcpuTotals::default(), vcpu], ..Summary::default() };
        let mut out = Vec::new();
        write_losses(&mut out, &summary, missed).unwrap();
        String::from_utf8(out).unwrap()
    }

    // A trace with holes that nobody noticed misleads.
    #[test]
    fn more_than_one_percent_is_told_with_a_remedy() {
        assert_eq!(said(0, &[], 0), "");
        assert_eq!(said(990, &[(LossReason::Full, 10)], 0), "");
        let text = said(989, &[(LossReason::Full, 11)], 0);
        let first = "vmtrace: ATTENTION: 1.1 % OF ALL RECORDS ARE LOST (11 of 1000)\n";
        assert!(text.starts_with(first), "{text}");
        assert!(text.contains("ATTENTION: 11 ring-full: ") && text.contains("-f, -n"), "{text}");
        assert!(!text.contains("overwritten: "), "{text}");
        let text = said(1, &[(LossReason::Full, 1), (LossReason::Overwritten, 2)], 0);
        assert!(text.contains("ATTENTION: 1 ring-full: "), "{text}");
        assert!(text.contains("; 2 older ones were overwritten: "), "{text}");
        assert_eq!(text.lines().count(), 3);
    }

    // That is what it is for.
    #[test]
    fn a_flight_recorder_that_overwrites_is_no_alarm() {
        let text = said(5, &[(LossReason::Overwritten, 995)], 0);
        let expected = "vmtrace: the flight recorder has the newest 5 records; 995 older ones were \
                        overwritten: ";
        assert!(text.starts_with(expected) && !text.contains("ATTENTION"), "{text}");
        assert!(text.contains("--buffer") && text.contains("--overflow block"), "{text}");
        assert!(!text.contains("drop") && text.lines().count() == 1, "{text}");
    }

    // They are in no summary: it is of all consumers.
    #[test]
    fn what_one_consumer_missed_is_its_own_loss() {
        assert_eq!(said(1000, &[], 10), "");
        let text = said(1000, &[], 500);
        assert!(text.contains(" 50.0 % OF ALL RECORDS ARE LOST (500 of 1000)"), "{text}");
        assert!(text.contains(" 500 consumer-slow: this consumer was too slow"), "{text}");
        // A hostile stream says anything.
        assert!(said(u64::MAX, &[(LossReason::Full, u64::MAX)], u64::MAX).contains("ATTENTION"));
    }
}
