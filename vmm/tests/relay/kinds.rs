//! Records of all kinds in any order: those that the relay writes in runs, and those that it does not.

use crate::rings::Rings;
use crate::{Sink, TIME};
use proptest::prelude::*;
use vmtrace::kernel::After;
use vmtrace::relay::{Drain, Grace, Targets};
use vmtrace::stream::{Reader, Record, Summary};
use vmtrace::tracer::{Duty, ExitWord, return_address, stack_bias};
use vmtrace_trampolines::layout::{COMMON_SIZE, Common, Info};
use vmtrace_trampolines::{Field, Point};

/// How many functions there are.
const FUNCTIONS: usize = 40;

/// What programs write, by number.
const PROGRAMS: [(Point, &[Field]); 6] = [
    (Point::Entry, &[]),
    (Point::Entry, &[Field::Stack]),
    (Point::Return, &[Field::Stack]),
    (Point::Return, &[Field::Stack, Field::Value]),
    (Point::Return, &[Field::Stack, Field::Duration]),
    (Point::Tail, &[Field::Stack, Field::Target]),
];

/// The same record several times, with later times: by program, function, caller, task and number.
type Run = (usize, usize, usize, u32, usize);

fn runs() -> impl Strategy<Value = Vec<Run>> {
    let run = (0..PROGRAMS.len(), 0..FUNCTIONS, 0..FUNCTIONS, 1_u32..4, 1_usize..60);
    prop::collection::vec(run, 1..200)
}

fn low(address: u64) -> u32 {
    u32::try_from(address & 0xffff_ffff).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    // What is written in runs must be what is written one by one: else most of a trace would have other functions,
    // times or stack pointers than the guest has recorded.
    #[test]
    fn every_record_is_written_as_what_it_is(runs in runs(), passes in 1_usize..20) {
        let rings = Rings::new(1);
        let sink = Sink::default();
        let (mut setup, _joining) = rings.setup(Box::new(sink.clone()));
        let entry = |function: usize| rings.kernel.sites()[function].entry;
        let exits = (0..FUNCTIONS).map(|function| ExitWord {
            word: low(entry(function) + 3),
            function: entry(function),
            target: 0,
            after: After::Nothing,
            is_aid: false,
        });
        setup.targets = Targets {
            exits: exits.collect(),
            programs: PROGRAMS.map(|(point, fields)| Duty::new(point, vec![1], fields)).into(),
            ..setup.targets
        };
        let mut drain = Drain::start(setup).unwrap();
        let (mut expected, mut time) = (Vec::new(), 1000);
        for (index, &(program, function, caller, pid, count)) in runs.iter().enumerate() {
            let (point, fields) = PROGRAMS[program];
            let site = match point {
                Point::Entry => low(return_address(&rings.kernel, &rings.kernel.sites()[function])),
                _ => low(entry(function) + 3),
            };
            for number in 0..count as u64 {
                time += 1 + number % 3;
                let (sp, word, target) = (0x1000 + 8 * number, !number, entry(caller));
                let value = |field: &Field| match field {
                    Field::Stack => sp,
                    Field::Target => target,
                    _ => word,
                };
                let values: Vec<u64> = fields.iter().map(value).collect();
                let size = COMMON_SIZE + 8 * values.len();
                let record = Common {
                    timestamp: time,
                    site,
                    caller: low(entry(caller) + 8),
                    task: 0xffff_8880_0000_0000 + u64::from(pid),
                    pid,
                    info: Info::new(size, u16::try_from(program).unwrap(), 1, Info::DRAINED).0,
                };
                rings.hit_with(0, record, &values);
                let sp = (!fields.is_empty()).then(|| sp + stack_bias(&rings.kernel, point));
                let extra = fields.iter().find(|field| matches!(field, Field::Value | Field::Duration));
                let other = if point == Point::Tail { low(target) } else { low(entry(caller) + 8) };
                expected.push(format!(
                    "{point:?} {time} {pid} {:x} {other:x} {sp:?} {:?}", low(entry(function)), extra.map(|_| word),
                ));
            }
            if index % passes == 0 {
                drain.pass().unwrap();
            }
        }
        let end = drain.finish(Summary::default(), &Grace::of(TIME)).unwrap();
        prop_assert_eq!((end.summary.records(), end.summary.lost()), (expected.len() as u64, 0));
        let stream = sink.0.lock().unwrap().clone();
        let (mut reader, mut all) = (Reader::new(&stream[..]).unwrap(), Vec::new());
        while let Some(frame) = reader.next_frame().unwrap() {
            let vmtrace::stream::Frame::Records(batch) = frame else { continue };
            for record in batch.records() {
                let head = *record.head();
                prop_assert_eq!(head.tracer, 1);
                let (point, function, other, sp, extra) = match record {
                    Record::Entry { entry, sp, .. } => {
                        (Point::Entry, entry.function, entry.caller, sp, None)
                    }
                    Record::Return { ret, value, duration, .. } => {
                        (Point::Return, ret.function, ret.caller, Some(ret.sp.get()), value.or(duration))
                    }
                    Record::Tail { tail, .. } => {
                        (Point::Tail, tail.function, tail.target, Some(tail.sp.get()), None)
                    }
                    other => panic!("{other:?}"),
                };
                all.push(format!(
                    "{point:?} {} {} {:x} {:x} {sp:?} {extra:?}", head.timestamp, head.pid, function.get(), other.get(),
                ));
            }
        }
        prop_assert!(all == expected, "{:?}", all.iter().zip(&expected).find(|(one, other)| one != other));
    }
}
