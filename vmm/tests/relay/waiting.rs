//! Writers that wait for room, and the relay, which decides when they continue without it.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vmtrace::relay::{Drain, Grace, Waiting};
use vmtrace::stream::{Mark, MarkKind, Reader, Summary, Waits};

use vmtrace_trampolines::layout::COMMON_SIZE;

use crate::rings::Rings;
use crate::{Sink, TIME};

/// Writers as the relay knows them.
#[derive(Clone, Default)]
struct Writers(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    wanted_for: Option<Duration>,
    made: u32,
    stalls: Vec<(Instant, Duration)>,
    waited: Vec<Duration>,
}

impl Waiting for Writers {
    fn made_room(&self) {
        self.0.lock().unwrap().made += 1;
    }
    fn close(&self, _: bool) {}
    fn wanted_for(&self) -> Option<Duration> {
        self.0.lock().unwrap().wanted_for
    }
    fn stalls(&self) -> Vec<(Instant, Duration)> {
        std::mem::take(&mut self.0.lock().unwrap().stalls)
    }
    fn waited(&self) -> Vec<Duration> {
        self.0.lock().unwrap().waited.clone()
    }
}

// A guest whose record is never finished must not wait for ever, nor lose what it need not: it is let
// go when nothing can be taken for long, and waits again once something is.
#[test]
fn writers_are_let_go_where_waiting_does_not_help() {
    let rings = Rings::new(2);
    let sink = Sink::default();
    let (mut setup, _joining) = rings.setup(Box::new(sink.clone()));
    let writers = Writers::default();
    setup.waiting = Some(Box::new(writers.clone()));
    setup.readers.iter().for_each(|reader| reader.let_wait(true));
    let mut drain = Drain::start(setup).unwrap();
    let waits = || [0, 1].map(|cpu| rings.waits(cpu));
    let want = |seconds| writers.0.lock().unwrap().wanted_for = Some(Duration::from_secs(seconds));
    let made = || std::mem::take(&mut writers.0.lock().unwrap().made);

    rings.hit(0, rings.record(0));
    want(1);
    drain.pass().unwrap();
    assert_eq!((made(), waits()), (1, [true; 2]), "something was taken");
    drain.pass().unwrap();
    assert_eq!((made(), waits()), (0, [true; 2]), "it may come yet");
    want(3);
    drain.pass().unwrap();
    assert_eq!((made(), waits()), (1, [false; 2]), "nothing comes");
    drain.pass().unwrap();
    assert_eq!((made(), waits()), (0, [false; 2]), "once is enough");
    rings.hit(1, rings.record(1));
    drain.pass().unwrap();
    assert_eq!((made(), waits()), (1, [true; 2]), "it has come");

    let (begun, time) = (Instant::now(), Duration::from_millis(250));
    {
        let mut state = writers.0.lock().unwrap();
        state.stalls = vec![(begun, time)];
        state.waited = vec![Duration::from_micros(3), Duration::ZERO];
    }
    let end = drain.finish(Summary::default(), &Grace::of(TIME)).unwrap();
    assert_eq!((waits(), made()), ([false; 2], 1), "nobody makes room any more");
    let told = Waits { vcpus_ns: vec![3000, 0], stalls: 1, stalls_ns: 250_000_000 };
    assert_eq!(end.summary.waits, Some(told));
    let [note] = &end.summary.notes[..] else { panic!("{:?}", end.summary.notes) };
    assert!(note.contains("went on without room 1 times"), "{note}");
    let file = sink.0.lock().unwrap();
    let mut reader = Reader::new(&**file).unwrap();
    let mut pauses = Vec::new();
    while let Some(frame) = reader.next_frame().unwrap() {
        if let vmtrace::stream::Frame::Mark(Mark {
            ticks,
            kind: MarkKind::Pause,
            duration_ns,
            text,
        }) = frame
        {
            // When it was over, at 2 GHz.
            assert!(ticks >= 500_000_000, "{ticks}");
            pauses.push((duration_ns, text));
        }
    }
    let [(250_000_000, text)] = &pauses[..] else { panic!("{pauses:?}") };
    assert!(text.contains("took nothing"), "{text}");
}

// A relay that passes again at once although little came takes the CPU from a guest that shares it; one that rests
// for long although much came loses records.
#[test]
fn rests_are_short_only_where_a_ring_gets_full() {
    let rings = Rings::new(2);
    let (setup, _joining) = rings.setup(Box::new(Sink::default()));
    let all = setup.readers[1].capacity() / COMMON_SIZE as u64;
    let mut drain = Drain::start(setup).unwrap();
    let much = [0, 1, all / 20, all / 15, all / 2, 1, 0].map(|count| {
        (0..count).for_each(|number| rings.hit(1, rings.record(number)));
        drain.pass().unwrap();
        drain.has_much()
    });
    assert_eq!(much, [false, false, false, true, true, false, false]);
}
