//! Results of rules, for people and for test runners.

use std::io::{self, Write};

use quick_junit::{NonSuccessKind, Report, TestCase, TestCaseStatus, TestSuite};

use super::{Outcome, Verdict};

/// How results are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// A line for each rule
    Text,
    /// JUnit XML
    Junit,
    /// Test Anything Protocol, version 14
    Tap,
    /// Workflow commands of GitHub Actions, for what has not passed
    Github,
}

/// Writes results.
///
/// # Errors
/// When the output fails.
pub fn write(out: &mut dyn Write, outcomes: &[Outcome], format: Format) -> io::Result<()> {
    match format {
        Format::Text => text(out, outcomes),
        Format::Junit => junit(out, outcomes),
        Format::Tap => tap(out, outcomes),
        Format::Github => github(out, outcomes),
    }
}

fn count(outcomes: &[Outcome], verdict: Verdict) -> usize {
    outcomes.iter().filter(|outcome| outcome.verdict == verdict).count()
}

fn totals(outcomes: &[Outcome]) -> String {
    let count = |verdict| count(outcomes, verdict);
    let (passed, failed) = (count(Verdict::Passed), count(Verdict::Failed));
    let undecided = count(Verdict::Undecided);
    let rules = outcomes.len();
    format!("rules {rules}, passed {passed}, failed {failed}, undecided {undecided}")
}

fn text(out: &mut dyn Write, outcomes: &[Outcome]) -> io::Result<()> {
    for Outcome { rule, verdict, detail } in outcomes {
        let word = match verdict {
            Verdict::Passed => "ok   ",
            Verdict::Failed => "FAIL ",
            Verdict::Undecided => "ERROR",
        };
        writeln!(out, "{word} {}: {}", plain(&rule.text), plain(detail))?;
    }
    writeln!(out, "{}", totals(outcomes))
}

fn junit(out: &mut dyn Write, outcomes: &[Outcome]) -> io::Result<()> {
    let mut suite = TestSuite::new("rules");
    for Outcome { rule, verdict, detail } in outcomes {
        let status = match verdict {
            Verdict::Passed => None,
            Verdict::Failed => Some((NonSuccessKind::Failure, "failed")),
            Verdict::Undecided => Some((NonSuccessKind::Error, "undecided")),
        };
        let status = match status {
            None => TestCaseStatus::success(),
            Some((kind, name)) => {
                let mut status = TestCaseStatus::non_success(kind);
                status.set_type(name).set_message(plain(detail));
                status
            }
        };
        let passed = *verdict == Verdict::Passed;
        let mut case = TestCase::new(plain(&rule.text), status);
        case.set_classname("vmtrace");
        if passed {
            case.set_system_out(plain(detail));
        }
        suite.add_test_case(case);
    }
    let mut report = Report::new("vmtrace check");
    report.add_test_suite(suite);
    report.serialize(out).map_err(io::Error::other)
}

fn tap(out: &mut dyn Write, outcomes: &[Outcome]) -> io::Result<()> {
    writeln!(out, "TAP version 14\n1..{}", outcomes.len())?;
    for (number, Outcome { rule, verdict, detail }) in (1..).zip(outcomes) {
        // A # would begin a directive.
        let name = plain(&rule.text).replace('\\', "\\\\").replace('#', "\\#");
        let ok = if *verdict == Verdict::Passed { "ok" } else { "not ok" };
        writeln!(out, "{ok} {number} - {name}")?;
        let severity = match verdict {
            Verdict::Passed => "comment",
            Verdict::Failed => "fail",
            Verdict::Undecided => "error",
        };
        // Single quotes of YAML know one escape.
        let message = plain(detail).replace('\'', "''");
        writeln!(out, "  ---\n  message: '{message}'\n  severity: {severity}\n  ...")?;
    }
    Ok(())
}

fn github(out: &mut dyn Write, outcomes: &[Outcome]) -> io::Result<()> {
    // As @actions/core has it: these are all that ends a message, and a property.
    let data = |text: &str| text.replace('%', "%25").replace('\r', "%0D").replace('\n', "%0A");
    let property = |text: &str| data(text).replace(':', "%3A").replace(',', "%2C");
    for Outcome { rule, verdict, detail } in outcomes {
        let title = match verdict {
            Verdict::Passed => continue,
            Verdict::Failed => "rule failed",
            Verdict::Undecided => "rule cannot be decided",
        };
        let place = rule
            .place
            .as_ref()
            .map(|(file, line)| format!("file={},line={line},", property(&plain(file))));
        let place = place.unwrap_or_default();
        let message = format!("{}: {}", plain(&rule.text), plain(detail));
        writeln!(out, "::error {place}title=vmtrace%3A {title}::{}", data(&message))?;
    }
    writeln!(out, "{}", totals(outcomes))
}

/// Names come from the guest.
fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}
