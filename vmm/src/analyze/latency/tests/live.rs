//! Latencies found while the guest runs, and in traces whose events were traced only part of the
//! time.

use super::super::{Kind, Latency, Report};
use super::*;

impl Script {
    /// What is told of a guest that goes on.
    fn so_far(self, kind: Kind, over: Option<u64>) -> Report {
        let stream = self.0.into_inner().expect("memory");
        let mut player = Player::new(Latency::live(kind, over));
        player.push(&stream).expect("whole");
        let _ = player.finish();
        player.export().so_far(player.late())
    }
}

// When the events begin to be traced a vCPU may be anywhere: a `cli` in the midst of a time that is
// long would make a short one of it. Only what comes where it was on says that something begins.
#[test]
fn what_was_off_before_its_events_were_traced_is_left_out() {
    let mut script = Script::new();
    script.tell(100, 7, "irq_disable", 10);
    script.tell(900, 7, "irq_enable", 11);
    script.tell(1_000, 7, "irq_disable", 12);
    script.tell(1_003, 7, "irq_enable", 13);
    let report = script.report(Kind::Irqsoff, Some(0));
    assert_eq!(episodes(&report), [(1_000, 3, Some("12"), Some("13"))]);
    assert_eq!((report.doubtful, report.open), (0, 0));
    // An interrupt comes only while they are on, and the count is told only where it leaves 0.
    for entry in [VECTOR, TRAP] {
        let mut script = Script::new();
        script.tell_at(100, 7, "irq_disable", (10, entry + 4));
        script.tell_at(130, 7, "irq_enable", (11, entry + 9));
        assert_eq!(script.report(Kind::Irqsoff, Some(0)).count, 1, "{entry:#x}");
    }
    let mut script = Script::new();
    script.tell(100, 7, "preempt_disable", 10);
    script.tell(130, 7, "preempt_enable", 11);
    assert_eq!(script.report(Kind::Preemptoff, Some(0)).count, 1);
    // A CPU of whose idleness nothing is known yet is not one that keeps others waiting.
    let mut script = Script::new();
    script.tell_at(100, 0, "irq_disable", (10, VECTOR + 4));
    script.tell_at(130, 0, "irq_enable", (11, VECTOR + 9));
    script.tell(200, 0, "cpu_idle", 0xffff_ffff);
    script.tell(210, 0, "irq_disable", 12);
    script.tell(214, 0, "irq_enable", 13);
    let report = script.report(Kind::Irqsoff, Some(0));
    assert_eq!(episodes(&report), [(210, 4, Some("12"), Some("13"))]);
}

// Two stretches of one trace with a gap between: nothing may reach from the one into the other, whatever
// was open at its end. The longest would be as long as the gap.
#[test]
fn nothing_lasts_over_a_time_in_which_its_events_were_not_traced() {
    let mut script = Script::new();
    script.events(10, "preemptirq:irq_disable");
    script.tell(20, 7, "irq_enable", 1);
    script.tell(100, 7, "irq_disable", 10);
    script.tell(105, 7, "irq_enable", 11);
    script.tell(110, 7, "irq_disable", 12);
    script.events(200, "none");
    script.events(900_000, "preemptirq:irq_disable");
    script.tell(900_050, 7, "irq_enable", 13);
    script.tell(900_100, 7, "irq_disable", 14);
    script.tell(900_107, 7, "irq_enable", 15);
    script.tell(900_110, 7, "irq_disable", 16);
    let report = script.report(Kind::Irqsoff, Some(0));
    let expected = [(100, 5, Some("10"), Some("11")), (900_100, 7, Some("14"), Some("15"))];
    assert_eq!(episodes(&report), expected);
    assert_eq!((report.doubtful, report.open), (1, 1));
    let page = text(&report);
    assert!(
        page.contains("note: times left out, since some of their records are missing: 1\n"),
        "{page}"
    );

    let mut script = Script::new();
    script.switch_from((0, 0), 50, 0, INIT);
    script.waking(100, 0, CAT);
    script.events(200, "none");
    script.events(900_000, "sched:sched_switch");
    script.switch(900_010, 0, CAT);
    script.waking(900_020, 0, RT);
    script.switch_from((7, 1), 900_050, 0, RT);
    let report = script.report(Kind::Wakeup, None);
    let longest = report.longest.expect("one");
    assert_eq!((report.count, report.doubtful, longest.duration_ns), (1, 1, 30_000));

    let mut script = Script::new();
    script.switch_from((0, 0), 100, 0, CAT);
    script.tell(200, 7, "local_timer_entry", 236);
    script.tell(210, 7, "local_timer_exit", 236);
    script.tell(300, 7, "local_timer_entry", 236);
    script.events(310, "none");
    script.events(5_000_000, "irq_vectors:local_timer_entry");
    script.tell(5_000_010, 7, "local_timer_exit", 236);
    script.tell(5_000_100, 7, "local_timer_entry", 236);
    script.tell(5_000_104, 7, "local_timer_exit", 236);
    script.tell(5_000_200, 7, "local_timer_entry", 236);
    let report = script.report(Kind::Osnoise, Some(0));
    let listed: Vec<_> = report.listed.iter().map(|of| (of.since_ns, of.duration_ns)).collect();
    assert_eq!(listed, [(200_000, 10_000), (5_000_100_000, 4_000)]);
    assert_eq!((report.doubtful, report.open), (1, 1));
    // The gap is nobody's run time.
    let runtime: u64 = report.rows.iter().map(|row| row.runtime_ns).sum();
    assert_eq!(runtime, 200_000 + 190_000, "{:?}", report.rows);
}

// A guest that runs for days must not fill the memory, nor an answer; and what has not ended is not told
// as if it had.
#[test]
fn what_is_told_so_far_is_bounded_and_has_ended() {
    let mut script = Script::new();
    script.events(1, "sched:sched_waking");
    script.switch_from((0, 0), 5, 0, INIT);
    for round in 0..600 {
        let us = 10 + 10 * round;
        script.waking(us, 0, CAT);
        script.switch(us + 3, 0, CAT);
        script.switch_from((7, 1), us + 5, 0, INIT);
    }
    script.waking(7_000, 0, CAT);
    let report = script.so_far(Kind::Wakeup, Some(0));
    assert_eq!((report.count, report.open, report.unlisted), (600, 1, 100));
    assert_eq!(report.listed.front().map(|first| first.since_ns), Some(1_010_000));
    assert_eq!(report.seen_ns, Some((1_000, 7_000_000)));
    assert!(report.gaps.is_empty(), "{:?}", report.gaps);
    let page = text(&report);
    assert!(page.contains("\n# seen: from 0.000001 s to 0.007000 s\n"), "{page}");
    assert!(page.contains("note: waits that had not ended by then: 1\n"), "{page}");
}
