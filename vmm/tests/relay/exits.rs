//! Exits of vCPUs among the records of the guest.

use super::{Rings, Sink, TIME};
use proptest::prelude::*;
use std::time::{Duration, Instant};
use vmtrace::relay::{Drain, ExitWriter, Grace, Scheduled, exit_log};
use vmtrace::serve::Hub;
use vmtrace::stream::{ExitDir, ExitReason, Frame, HostExit, LossReason, Reader, Record, Summary};
use vmtrace_trampolines::layout::{COMMON_SIZE, Common, Info};

/// What an exit log has room for.
const QUEUE: u64 = 1 << 15;
/// What is kept of a flight recorder.
const KEPT: u64 = 1 << 16;

fn exit(ticks: u64) -> HostExit {
    let (reason, dir) = (ExitReason::Io, ExitDir::Out);
    HostExit { ticks, duration_ns: 7, reason, dir, address: 0x3f8 }
}

fn put(writer: &mut ExitWriter, ticks: u64) {
    writer.begin();
    writer.put(Some(exit(ticks)));
}

/// What is in a stream of one vCPU, in its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Entry(u64),
    Exit(u64),
    Lost(LossReason, u64),
}

struct Run {
    rings: Rings,
    sink: Sink,
    drain: Drain,
    writer: ExitWriter,
}

impl Run {
    /// The guest's clock is far ahead of what is written here: a watermark of all that there is covers all.
    fn new(overwrite: bool) -> Self {
        Self::of(overwrite, |stream| stream)
    }

    /// With another stream than most.
    fn of(overwrite: bool, stream: fn(Hub) -> Hub) -> Self {
        let (rings, sink) = (Rings::new(1), Sink::default());
        let (mut setup, _) = rings.setup(Box::new(sink.clone()));
        setup.stream = stream(setup.stream);
        let (writer, reader) = exit_log();
        assert!(!writer.is_on());
        reader.begin();
        assert!(writer.is_on());
        (setup.exits, setup.ticks) = (vec![reader], 1 << 40);
        setup.readers = rings.readers(overwrite);
        let drain = Drain::start(setup).unwrap();
        Self { rings, sink, drain, writer }
    }

    fn at(&self, timestamp: u64) -> Common {
        Common { timestamp, ..self.rings.record(0) }
    }

    fn entry(&self, timestamp: u64) {
        self.rings.publish(self.rings.reserve(0).unwrap(), self.at(timestamp));
    }

    /// What the stream has, and whether anything came behind a watermark.
    fn end(self) -> (Vec<Seen>, Summary, bool) {
        let end = self.drain.finish(Summary::default(), &Grace::of(TIME)).unwrap();
        assert!(!self.writer.is_on(), "nobody takes them any more");
        let stream = std::mem::take(&mut *self.sink.0.lock().unwrap());
        let (mut seen, mut promised, mut late) = (Vec::new(), 0, false);
        let mut reader = Reader::new(&*stream).unwrap();
        while let Some(frame) = reader.next_frame().unwrap() {
            match frame {
                Frame::Records(batch) => seen.extend(batch.records().map(|record| {
                    let (time, seen) = match record {
                        Record::Entry { entry, .. } => {
                            (entry.timestamp(), Seen::Entry as fn(u64) -> _)
                        }
                        Record::Event { event, .. } => {
                            (event.head.timestamp.get(), Seen::Exit as fn(u64) -> _)
                        }
                        other => panic!("{other:?}"),
                    };
                    late |= time <= promised;
                    seen(time)
                })),
                Frame::Loss(loss) => seen.push(Seen::Lost(loss.reason, loss.count)),
                Frame::Watermark(ticks) => promised = ticks,
                _ => {}
            }
        }
        (seen, end.summary, late)
    }
}

// The vCPU writes nothing while it is out, so that its records and exits have one order, which
// is that of their times.
#[test]
fn exits_stand_among_the_records() {
    let mut run = Run::new(false);
    run.entry(100);
    put(&mut run.writer, 150);
    // Its writer was preempted; the exit of it may have been between any two of its instructions.
    let slow = run.rings.reserve(0).unwrap();
    run.drain.pass().unwrap();
    put(&mut run.writer, 300);
    run.entry(400);
    run.drain.pass().unwrap();
    let slow_record = run.at(200);
    run.rings.publish(slow, slow_record);
    run.drain.pass().unwrap();
    put(&mut run.writer, 500);
    let (seen, summary, _) = run.end();
    use Seen::{Entry, Exit};
    assert_eq!(seen, [Entry(100), Exit(150), Entry(200), Exit(300), Entry(400), Exit(500)]);
    assert_eq!(summary.notes, [] as [&str; 0]);
    let [exits] = &summary.exits[..] else { panic!("{:?}", summary.exits) };
    assert_eq!((&*exits.reason, exits.cpu, exits.count), ("io", 0, 3));
    assert_eq!((exits.total_ns, exits.max_ns), (21, 7));
}

// Between two kernels of a guest there are no rings, for ever if the second one cannot be traced. Its exits would be
// neither written nor counted, and consumers would wait for a watermark.
#[test]
fn exits_need_no_rings() {
    for overwrite in [false, true] {
        let mut run = Run::new(overwrite);
        run.entry(100);
        put(&mut run.writer, 150);
        let left = run.drain.leave_rings().unwrap();
        assert_eq!((left.given_up, left.corrupt), (0, Vec::new()));
        put(&mut run.writer, 200);
        run.drain.pass().unwrap();
        put(&mut run.writer, 300);
        let (seen, summary, _) = run.end();
        let exits: Vec<_> = seen.into_iter().filter(|it| matches!(it, Seen::Exit(_))).collect();
        assert_eq!(exits, [150, 200, 300].map(Seen::Exit), "{overwrite}");
        assert_eq!(summary.exits[0].count, 3, "{overwrite}");
    }
}

// A thread that has read the guest's clock may not run for a while before the exit is told.
#[test]
fn a_watermark_waits_for_an_exit_that_is_being_told() {
    let mut run = Run::new(false);
    run.entry(100);
    run.writer.begin();
    run.drain.pass().unwrap();
    run.entry(300);
    run.drain.pass().unwrap();
    run.writer.put(Some(exit(400)));
    run.drain.pass().unwrap();
    let (seen, _, late) = run.end();
    assert!(!late);
    assert_eq!(seen, [Seen::Entry(100), Seen::Entry(300), Seen::Exit(400)]);
}

// The times of preemptions are the host's, and some microseconds off. A record of after one that has an earlier time
// would be given that of the preemption, and its guest would be said to have set its clock back.
#[test]
fn a_preemption_waits_for_records_of_before_it() {
    let mut run = Run::new(false);
    // Beyond what the relay thinks that the guest's clock shows.
    let far = 1 << 41;
    run.entry(100);
    run.writer.begin();
    run.writer.put(Some(HostExit { reason: ExitReason::Preempted, ..exit(far + 50) }));
    run.drain.pass().unwrap();
    put(&mut run.writer, far + 60);
    run.drain.pass().unwrap();
    run.entry(far + 45);
    run.entry(far + 70);
    run.drain.pass().unwrap();
    let (seen, summary, _) = run.end();
    use Seen::{Entry, Exit};
    let wanted = [Entry(100), Entry(far + 45), Exit(far + 50), Exit(far + 60), Entry(far + 70)];
    assert_eq!(seen, wanted);
    assert_eq!(summary.notes, [] as [&str; 0]);
}

// What happened while the ring was looked at is known only to who asks again.
#[test]
fn a_preemption_is_before_the_records_that_follow_it() {
    let (rings, sink) = (Rings::new(1), Sink::default());
    let (mut setup, _) = rings.setup(Box::new(sink.clone()));
    let (writer, reader) = exit_log();
    let until = Instant::now() + Duration::from_secs(2);
    let mut looks = 0;
    let own = move || {
        // At the beginning of the trace, before the ring, after it.
        looks += 1;
        let from = until - Duration::from_millis(1);
        (looks == 3).then_some(Scheduled::Preempted { from, until })
    };
    writer.scheduler(Ok(Box::new(own)));
    reader.begin();
    let (start, second) = (1 << 40, setup.header.clock_hz);
    (setup.exits, setup.ticks) = (vec![reader], start);
    let entry = |timestamp| {
        let record = Common { timestamp, ..rings.record(0) };
        rings.publish(rings.reserve(0).unwrap(), record);
    };
    entry(start + second);
    entry(start + 3 * second);
    let mut drain = Drain::start(setup).unwrap();
    drain.pass().unwrap();
    drain.finish(Summary::default(), &Grace::of(TIME)).unwrap();
    let stream = std::mem::take(&mut *sink.0.lock().unwrap());
    let mut reader = Reader::new(&*stream).unwrap();
    let mut times = Vec::new();
    while let Some(frame) = reader.next_frame().unwrap() {
        if let Frame::Records(batch) = frame {
            times.extend(batch.records().map(|record| match record {
                Record::Entry { entry, .. } => entry.timestamp(),
                Record::Event { event, .. } => event.head.timestamp.get(),
                other => panic!("{other:?}"),
            }));
        }
    }
    let [first, preempted, last] = times[..] else { panic!("{times:?}") };
    assert_eq!((first, last), (start + second, start + 3 * second));
    let about = start + 2 * second - second / 2..start + 2 * second + second / 2;
    assert!(about.contains(&preempted), "{times:?}");
}

// Nobody makes a vCPU wait: what there is no room for is missing at its place, and counted.
#[test]
fn exits_without_room_are_counted_where_they_are_missing() {
    let mut run = Run::new(false);
    (0..QUEUE + 10).for_each(|at| put(&mut run.writer, 1000 + at));
    // Whose clock could not be read.
    run.writer.begin();
    run.writer.put(None);
    run.drain.pass().unwrap();
    put(&mut run.writer, 1 << 20);
    run.drain.pass().unwrap();
    run.writer.begin();
    run.writer.put(None);
    let (seen, summary, _) = run.end();
    let mut wanted: Vec<_> = (0..QUEUE).map(|at| Seen::Exit(1000 + at)).collect();
    wanted.push(Seen::Lost(LossReason::Exits, 11));
    wanted.push(Seen::Exit(1 << 20));
    wanted.push(Seen::Lost(LossReason::Exits, 1));
    assert!(seen == wanted, "{} {:?}", seen.len(), &seen[seen.len().min(wanted.len()) - 4..]);
    assert_eq!((summary.records(), summary.lost()), (QUEUE + 1, 12));
}

// A record that is never finished holds exits back: at the end there are more than may wait for one.
#[test]
fn all_exits_behind_an_unfinished_record_are_written_at_the_end() {
    let mut run = Run::new(false);
    run.rings.reserve(0).unwrap();
    for at in 0..3 * QUEUE {
        put(&mut run.writer, 1000 + at);
        if at % QUEUE == QUEUE - 1 {
            run.drain.pass().unwrap();
        }
    }
    let (seen, summary, _) = run.end();
    let exits = seen.iter().filter(|seen| matches!(seen, Seen::Exit(_))).count();
    assert_eq!((exits as u64, summary.records(), summary.lost()), (3 * QUEUE, 3 * QUEUE, 1));
}

// What nobody takes at the end is lost, and is told as what is in the rings is.
#[test]
fn exits_that_the_output_does_not_take_are_counted() {
    let mut run = Run::of(false, |stream| stream.with_room(0));
    run.drain.wait_for_output();
    // Nothing is written while this is held.
    let stuck = run.sink.0.lock().unwrap();
    run.entry(100);
    run.drain.pass().unwrap();
    (200..203).for_each(|at| put(&mut run.writer, at));
    run.entry(300);
    let end = run.drain.finish(Summary::default(), &Grace::of(Duration::ZERO)).unwrap().summary;
    drop(stuck);
    assert_eq!((end.records(), end.lost()), (1, 4), "{end:?}");
    assert_eq!(end.vcpus[0].lost_by_reason[&LossReason::Exits.to_string()], 3);
    assert!(end.notes.iter().any(|note| note.contains("4 records were left")), "{end:?}");
}

// The newest are of use, as with records.
#[test]
fn a_flight_recorder_keeps_the_newest_exits() {
    let mut run = Run::new(true);
    let lap = |run: &Run, at| Common { info: Info::new(COMMON_SIZE, 0, 1, 1).0, ..run.at(at) };
    let all = KEPT + QUEUE;
    for at in 0..all {
        put(&mut run.writer, 1000 + at);
        if at % 10_000 == 0 {
            run.drain.pass().unwrap();
        }
    }
    run.rings.hit(0, lap(&run, 1000 + all));
    assert_eq!(run.drain.snapshot().unwrap().records, KEPT + 1);
    assert_eq!(run.drain.snapshot().unwrap().records, 0);
    put(&mut run.writer, 2000 + all);
    let (seen, summary, _) = run.end();
    let mut wanted = vec![Seen::Lost(LossReason::Overwritten, QUEUE)];
    wanted.extend((QUEUE..all).map(|at| Seen::Exit(1000 + at)));
    wanted.extend([Seen::Entry(1000 + all), Seen::Exit(2000 + all)]);
    assert!(seen == wanted, "{} {:?}", seen.len(), &seen[..4]);
    assert_eq!((summary.records(), summary.lost()), (KEPT + 2, QUEUE));
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Entry,
    Exit,
    Pass,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    // Whenever the relay comes by.
    #[test]
    fn records_and_exits_keep_their_order(
        steps in prop::collection::vec(
            prop_oneof![3 => Just(Step::Entry), 3 => Just(Step::Exit), 1 => Just(Step::Pass)], 0..200
        )
    ) {
        let mut run = Run::new(false);
        let mut wanted = Vec::new();
        for (at, step) in (100..).step_by(10).zip(steps) {
            match step {
                Step::Entry => {
                    run.entry(at);
                    wanted.push(Seen::Entry(at));
                }
                Step::Exit => {
                    put(&mut run.writer, at);
                    wanted.push(Seen::Exit(at));
                }
                Step::Pass => drop(run.drain.pass().unwrap()),
            }
        }
        let (seen, summary, _) = run.end();
        prop_assert_eq!(seen, wanted);
        prop_assert_eq!(summary.lost(), 0);
    }
}
