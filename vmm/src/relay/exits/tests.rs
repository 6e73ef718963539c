//! Exits and preemptions on their way, without a guest.

use super::*;
use crate::stream::ExitDir;

fn clock() -> GuestClock {
    GuestClock::new(1_000_000, (Instant::now(), 0), UNCERTAIN)
}

fn take(reader: &mut ExitReader, overwrites: bool) -> bool {
    reader.take(overwrites, &mut clock())
}

fn put(writer: &mut ExitWriter, ticks: u64) {
    let (reason, dir) = (ExitReason::Kick, ExitDir::None);
    writer.begin();
    writer.put(Some(HostExit { ticks, duration_ns: ticks, reason, dir, address: 0 }));
}

// Whoever begins anew does not want what was before; that something is missing is told.
#[test]
fn what_is_cleared_is_forgotten_and_losses_are_not() {
    let (mut writer, mut reader) = exit_log_of(3);
    (1..=5).for_each(|at| put(&mut writer, at));
    assert!(take(&mut reader, false));
    put(&mut writer, 6);
    assert_eq!(reader.clear(&mut clock()), (4, 2));
    assert_eq!(reader.clear(&mut clock()), (0, 0));
    put(&mut writer, 7);
    assert!(take(&mut reader, false));
    assert_eq!(reader.next(6), None);
    assert_eq!(reader.next(7).map(|(dropped, exit)| (dropped, exit.ticks)), Some((0, 7)));
    assert_eq!((reader.next(u64::MAX), reader.dropped()), (None, 0));
}

// Those that were dropped before one that is not kept are lost with it, and are told once.
#[test]
fn what_was_dropped_is_told_once_in_a_flight_recorder() {
    let (mut writer, mut reader) = exit_log_of(1);
    (1..=3).for_each(|at| put(&mut writer, at));
    for at in 0..WAITING as u64 {
        assert!(take(&mut reader, true));
        put(&mut writer, at);
    }
    assert!(take(&mut reader, true));
    assert_eq!((reader.waiting.len(), reader.overwritten), (WAITING, 1));
    put(&mut writer, 9);
    assert!(take(&mut reader, true));
    assert_eq!((reader.overwritten, reader.dropped()), (4, 0));
}

// A count that is not told is a trace that is said to be whole.
#[test]
fn what_is_forgotten_or_given_up_is_counted() {
    let header = crate::stream::sample::header();
    for give_up in [false, true] {
        let (mut writer, reader) = exit_log_of(3);
        (1..=5).for_each(|at| put(&mut writer, at));
        let mut exits = Exits::new(vec![reader], 1_000_000, (Instant::now(), 0));
        let mut stream = Writer::new(Vec::new(), &header).unwrap();
        let count = match give_up {
            true => exits.give_up(0, &mut stream),
            false => exits.clear(0, &mut stream),
        };
        assert_eq!((count.unwrap(), exits.waiting(0)), (3, 0));
        assert_eq!(stream.totals()[0].lost, if give_up { 5 } else { 2 });
    }
}

// Preemptions are not known to be part of an exit while the exits have no room. Not all of them can wait.
#[test]
fn preemptions_without_room_are_counted() {
    let (mut writer, mut reader) = exit_log();
    let (clock, base) = (&mut clock(), Instant::now());
    let mut left = UNDECIDED as u64 + 5;
    let own = move || {
        let from = base + Duration::from_millis(left);
        left = left.checked_sub(1)?;
        Some(Scheduled::Preempted { from, until: from + Duration::from_micros(1) })
    };
    for at in 0..=WAITING as u64 {
        put(&mut writer, at);
        if at % QUEUE as u64 == QUEUE as u64 - 1 {
            reader.take(false, clock);
        }
    }
    writer.scheduler(Ok(Box::new(own)));
    assert!(!reader.take(false, clock));
    assert_eq!((reader.waiting.len(), reader.undecided.len()), (WAITING, UNDECIDED));
    assert_eq!(reader.dropped(), 5);
}

// What is being told, or has to wait in its queue, keeps watermarks back.
#[test]
fn all_is_taken_only_if_nothing_was_begun() {
    let (mut writer, mut reader) = exit_log();
    writer.begin();
    assert!(!take(&mut reader, false));
    writer.put(None);
    assert!(take(&mut reader, false));
    for at in 0..2 * WAITING as u64 {
        put(&mut writer, at);
        if at % 1000 == 0 {
            take(&mut reader, false);
        }
    }
    assert_eq!(reader.waiting.len(), WAITING);
    assert!(!take(&mut reader, false));
    while reader.next(u64::MAX).is_some() {}
    assert!(take(&mut reader, false));
    let sums: Vec<_> = reader.sums(3).collect();
    let [kicks] = &sums[..] else { panic!("{sums:?}") };
    assert_eq!((kicks.cpu, &*kicks.reason, kicks.count), (3, "kick", WAITING as u64));
    assert_eq!(kicks.max_ns, WAITING as u64 - 1);
}

// A vCPU does not run once for two reasons at a time: the sums of reasons would be more than the time.
#[test]
fn preemptions_in_an_exit_are_part_of_it() {
    use ExitReason::{Kick, Preempted};
    let start = Instant::now();
    let at = |ms: u64| start + Duration::from_millis(ms);
    // A tick is a microsecond.
    let mut clock = GuestClock::new(1_000_000, (start, 0), Duration::ZERO);
    let (mut writer, mut reader) = exit_log();
    let (known, scheduled) = std::sync::mpsc::channel();
    writer.scheduler(Ok(Box::new(move || scheduled.try_recv().ok())));
    let preempted =
        |from, until| known.send(Scheduled::Preempted { from: at(from), until: at(until) });
    let exit = |ms: u64| HostExit {
        ticks: ms * 1000,
        duration_ns: 10_000_000,
        reason: Kick,
        dir: ExitDir::None,
        address: 0,
    };
    let times =
        |from, until| HostTimes { out: (at(from), at(until)), read: (at(until), at(until)) };
    // Before the trace.
    preempted(1, 2).unwrap();
    reader.begin();
    preempted(12, 15).unwrap();
    writer.left(at(20));
    preempted(21, 23).unwrap();
    assert!(reader.take(false, &mut clock));
    // It is out of the guest, who knows how long.
    assert_eq!((reader.waiting.len(), reader.undecided.len()), (1, 1));
    writer.begin();
    // While the clock is read: the exit is over.
    preempted(31, 32).unwrap();
    assert!(!reader.take(false, &mut clock));
    writer.put_with(Some(exit(30)), Some(times(20, 30)));
    preempted(40, 44).unwrap();
    known.send(Scheduled::Unknown).unwrap();
    // Another one has come and gone before anybody looked.
    writer.left(at(50));
    preempted(51, 58).unwrap();
    writer.begin();
    writer.put_with(Some(exit(60)), Some(times(50, 60)));
    assert!(reader.take(false, &mut clock) && reader.undecided.is_empty());
    let mut seen = Vec::new();
    while let Some((_, exit)) = reader.next(u64::MAX) {
        seen.push((exit.ticks / 1000, exit.duration_ns / 1_000_000, exit.reason));
    }
    let wanted = [(15, 3, Preempted), (30, 10, Kick), (32, 1, Preempted), (44, 4, Preempted)];
    assert_eq!(seen, [&wanted[..], &[(60, 10, Kick)]].concat());
    assert_eq!(reader.dropped(), 1);
}

// A preemption ends before the exit that follows it, though the host's clock says otherwise; and what waits for a
// later record than any there will be keeps watermarks back for ever.
#[test]
fn what_is_certain_is_so_for_all_before_it() {
    let (mut writer, mut reader) = exit_log();
    let mut put = |ticks, reason| {
        writer.begin();
        let (dir, address) = (ExitDir::None, 0);
        writer.put(Some(HostExit { ticks, duration_ns: 1, reason, dir, address }));
    };
    put(1002, ExitReason::Preempted);
    put(1000, ExitReason::Kick);
    assert!(take(&mut reader, false));
    reader.settle(1001);
    assert_eq!(reader.certain, 1000);
    assert!(reader.next(1000).is_some() && reader.next(1000).is_some());
    // A guest has set its clock back.
    put(5000, ExitReason::Kick);
    put(10, ExitReason::Kick);
    put(6000, ExitReason::Preempted);
    assert!(take(&mut reader, false));
    reader.settle(100);
    assert_eq!(reader.certain, 5000);
}
