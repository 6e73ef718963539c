//! The seconds of `osnoise`: what each has is its own.

use super::super::Kind;
use super::*;

/// When each row ends, and its times, in microseconds.
fn rows(script: Script) -> Vec<(u64, u64, u64, u64)> {
    let report = script.report(Kind::Osnoise, Some(0));
    let us = |ns: u64| ns / 1000;
    let all = report.rows.iter();
    all.map(|row| (us(row.ns), us(row.runtime_ns), us(row.noise_ns), us(row.longest_ns))).collect()
}

// All of a real-time task's three seconds were noise of the last one, and in the others the task that waited had
// the whole CPU.
#[test]
fn noise_is_of_the_seconds_in_which_it_was() {
    let mut script = Script::new();
    script.switch_from((0, 0), 0, 0, CAT);
    script.switch_from((7, 0), 400_000, 0, RT);
    script.tell(700_000, 8, "local_timer_entry", 236);
    script.tell(710_000, 8, "local_timer_exit", 236);
    script.tell(2_990_000, 8, "local_timer_entry", 236);
    script.tell(3_010_000, 8, "local_timer_exit", 236);
    script.switch_from((8, 1), 3_100_000, 0, CAT);
    script.switch_from((7, 1), 3_500_000, 0, ("idle", 0, 120));
    assert_eq!(
        rows(script),
        [
            (1_000_000, 1_000_000, 600_000, 310_000),
            (2_000_000, 1_000_000, 1_000_000, 0),
            (3_000_000, 1_000_000, 1_000_000, 0),
            (3_500_000, 500_000, 100_000, 2_700_000),
        ]
    );
}

// Tracing is changed in a pause, at whose end nothing is known any more: the pause was noise, and no time to run in.
#[test]
fn a_pause_at_the_end_of_what_is_known_is_time_to_run() {
    let mut script = Script::new();
    script.switch_from((0, 0), 100, 0, CAT);
    for kind in [MarkKind::Pause, MarkKind::Events] {
        let duration_ns = if kind == MarkKind::Pause { 70_000 } else { 0 };
        let mark = Mark { ticks: 180_000, kind, duration_ns, text: "2 sites".into() };
        script.0.mark(&mark).expect("memory");
    }
    script.switch_from((7, 1), 300, 0, ("idle", 0, 120));
    assert_eq!(rows(script), [(180, 80, 70, 70)]);
}
