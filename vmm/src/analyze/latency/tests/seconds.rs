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
            (1_000_000, 1_000_000, 600_000, 600_000),
            (2_000_000, 1_000_000, 1_000_000, 1_000_000),
            (3_000_000, 1_000_000, 1_000_000, 1_000_000),
            (3_500_000, 500_000, 100_000, 2_700_000),
        ]
    );
}

// Tracing is changed in a pause, at whose end nothing is known any more: the pause was noise, and no time to run in.
#[test]
fn a_pause_at_the_end_of_what_is_known_is_time_to_run() {
    let mut script = Script::new();
    script.switch_from((0, 0), 100, 0, CAT);
    script.paused(180, 70);
    script.events(180, "2 sites");
    script.switch_from((7, 1), 300, 0, ("idle", 0, 120));
    assert_eq!(rows(script), [(180, 80, 70, 70)]);
}

// A noise that has not ended when the trace does, or when other events are traced, or records are lost, was there
// nonetheless: half a second of it was none, and all of the CPU available.
#[test]
fn a_noise_without_end_is_in_the_last_row() {
    let script = || {
        let mut script = Script::new();
        script.switch_from((0, 0), 0, 0, CAT);
        script.switch_from((7, 0), 400_000, 0, RT);
        script.tell(890_000, 8, "local_timer_entry", 236);
        script.tell(900_000, 8, "local_timer_exit", 236);
        script
    };
    let known = (900_000, 900_000, 500_000);
    let first = |script| rows(script).first().map(|row| (row.0, row.1, row.2));
    assert_eq!(first(script()), Some(known));
    let mut other = script();
    other.events(900_000, "other");
    assert_eq!(first(other), Some(known));
    let mut lost = script();
    lost.0.loss(0, 3, LossReason::Full).expect("vCPU");
    lost.switch_from((8, 1), 950_000, 0, ("idle", 0, 120));
    let row = first(lost).expect("one");
    assert_eq!((row.1, row.2), (900_000, 500_000));
}

// Pauses count from when they were asked for, and the guest's clock may be set back: times that lie in each
// other count once, and nobody is kept from running longer than there was somebody to run.
#[test]
fn no_row_has_more_noise_than_runtime() {
    let mut within = Script::new();
    within.switch_from((0, 0), 100, 0, CAT);
    within.tell(120, 7, "local_timer_entry", 236);
    within.tell(140, 7, "local_timer_exit", 236);
    within.paused(200, 90);
    within.switch_from((7, 1), 210, 0, ("idle", 0, 120));
    // It ran until 140: the pause came behind that.
    assert_eq!(rows(within), [(210, 110, 80, 80)]);
    let mut before = Script::new();
    before.switch_from((0, 0), 150, 0, CAT);
    before.paused(200, 90);
    before.switch_from((7, 1), 210, 0, ("idle", 0, 120));
    assert!(rows(before).iter().all(|row| row.2 <= row.1));
    let mut hostile = Script::new();
    hostile.switch_from((0, 0), 100, 0, CAT);
    for us in [300, 400] {
        hostile.tell(us, 7, "nmi_handler", u64::MAX / 2);
    }
    hostile.tell(900, 7, "local_timer_entry", 236);
    hostile.tell(950, 7, "local_timer_exit", 236);
    hostile.tell(800, 7, "local_timer_entry", 236);
    hostile.tell(850, 7, "local_timer_exit", 236);
    hostile.switch_from((7, 1), 1000, 0, ("idle", 0, 120));
    // A task on an idle CPU.
    hostile.tell(1100, 7, "local_timer_entry", 236);
    hostile.tell(1200, 7, "local_timer_exit", 236);
    let rows = rows(hostile);
    assert!(!rows.is_empty() && rows.iter().all(|row| row.2 <= row.1), "{rows:?}");
}
