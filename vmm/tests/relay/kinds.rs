//! Records of all kinds in any order: those that the relay writes in runs, and those that it does not.

use crate::rings::Rings;
use crate::{Sink, TIME};
use proptest::prelude::*;
use std::collections::HashSet;
use vmtrace::kernel::After;
use vmtrace::relay::{Drain, Grace, Targets};
use vmtrace::stream::{Frame, Header, Reader, Record, RecordHead, Summary};
use vmtrace::tracer::{Duty, ExitWord, return_address, stack_bias};
use vmtrace_trampolines::layout::{COMMON_SIZE, Common, Info};
use vmtrace_trampolines::{Field, Point};
use zerocopy::little_endian::U32;

/// How many functions there are.
const FUNCTIONS: usize = 40;

/// What programs write and for which tracers, by number.
const PROGRAMS: [(Point, &[Field], &[u8]); 9] = [
    (Point::Entry, &[], &[1]),
    (Point::Entry, &[], &[1, 2]),
    (Point::Entry, &[Field::Stack], &[2]),
    (Point::Return, &[Field::Stack], &[1]),
    (Point::Return, &[Field::Stack], &[1, 3]),
    (Point::Return, &[Field::Stack, Field::Value], &[1]),
    (Point::Return, &[Field::Stack, Field::Duration], &[2]),
    (Point::Return, &[Field::Stack, Field::Value, Field::Duration], &[1]),
    (Point::Tail, &[Field::Stack, Field::Target], &[1]),
];

/// The same record several times, with later times, by program, function, caller, task and number; and whether the
/// guest's clock is behind what it was.
type Run = (usize, usize, usize, u32, usize, bool);

fn runs() -> impl Strategy<Value = Vec<Run>> {
    let run = (0..PROGRAMS.len(), 0..FUNCTIONS, 0..FUNCTIONS, 1_u32..4, 1_usize..60, any::<bool>());
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
    fn every_record_is_written_as_what_it_is(runs in runs(), passes in 1_usize..200) {
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
            programs: PROGRAMS
                .map(|(point, fields, tracers)| Duty::new(point, tracers.to_vec(), fields))
                .into(),
            ..setup.targets
        };
        let mut drain = Drain::start(setup).unwrap();
        let (mut expected, mut time) = (Vec::new(), 1000);
        for (index, &(program, function, caller, pid, count, is_behind)) in runs.iter().enumerate() {
            let (point, fields, tracers) = PROGRAMS[program];
            let site = match point {
                Point::Entry => low(return_address(&rings.kernel, &rings.kernel.sites()[function])),
                _ => low(entry(function) + 3),
            };
            for number in 0..count as u64 {
                // At first it is not known that it has been later.
                let timestamp = if is_behind && index > 0 {
                    500 + number
                } else {
                    time += 1 + number % 3;
                    time
                };
                let (sp, target) = (0x1000 + 8 * number, entry(caller));
                let value = |field: &Field| match field {
                    Field::Stack => sp,
                    Field::Target => target,
                    Field::Value => !number,
                    _ => number + 7,
                };
                let values: Vec<u64> = fields.iter().map(value).collect();
                let size = COMMON_SIZE + 8 * values.len();
                let record = Common {
                    timestamp,
                    site,
                    caller: low(entry(caller) + 1),
                    task: 0xffff_8880_0000_0000 + u64::from(pid),
                    pid,
                    info: Info::new(size, u16::try_from(program).unwrap(), 1, Info::DRAINED).0,
                };
                rings.hit_with(0, record, &values);
                let sp = (!fields.is_empty()).then(|| sp + stack_bias(&rings.kernel, point));
                let [value, duration] = [Field::Value, Field::Duration]
                    .map(|field| fields.contains(&field).then(|| value(&field)));
                let other = if point == Point::Tail { low(target) } else { low(entry(caller) + 1) };
                let function = low(entry(function));
                expected.extend(tracers.iter().map(|tracer| {
                    format!(
                        "{point:?} {tracer} {time} {pid} {function:x} {other:x} {sp:?} {value:?} {duration:?}"
                    )
                }));
            }
            if index % passes == 0 {
                drain.pass().unwrap();
            }
        }
        let end = drain.finish(Summary::default(), &Grace::of(TIME)).unwrap();
        prop_assert_eq!((end.summary.records(), end.summary.lost()), (expected.len() as u64, 0));
        let stream = sink.0.lock().unwrap().clone();
        let (mut reader, mut all) = (Reader::new(&stream[..]).unwrap(), Vec::new());
        let mut names = HashSet::new();
        while let Some(frame) = reader.next_frame().unwrap() {
            let batch = match frame {
                Frame::Symbols(list) => {
                    names.extend(list.map(|symbol| low(symbol.address)));
                    continue;
                }
                Frame::Records(batch) => batch,
                _ => continue,
            };
            for record in batch.records() {
                let head = *record.head();
                prop_assert_eq!(head.flags & (RecordHead::AID | RecordHead::LAST), 0);
                let (point, function, other, sp, value, duration) = match record {
                    Record::Entry { entry, sp, .. } => {
                        (Point::Entry, entry.function, entry.caller, sp, None, None)
                    }
                    Record::Return { ret, value, duration, .. } => {
                        let sp = Some(ret.sp.get());
                        (Point::Return, ret.function, ret.caller, sp, value, duration)
                    }
                    Record::Tail { tail, .. } => {
                        let sp = Some(tail.sp.get());
                        (Point::Tail, tail.function, tail.target, sp, None, None)
                    }
                    other => panic!("{other:?}"),
                };
                let symbols = rings.kernel.symbols();
                let address = |low: U32| Header::TOP_4_GIB | u64::from(low.get());
                let own = symbols.primary_at(address(function)).map(|_| address(function));
                let others = symbols.lookup(address(other)).map(|(_, start)| start);
                let named = [own, others].map(|it| it.is_none_or(|it| names.contains(&low(it))));
                prop_assert_eq!(named, [true; 2], "{:?} {:x} {:x}", point, function, other);
                all.push(format!(
                    "{point:?} {} {} {} {function:x} {other:x} {sp:?} {value:?} {duration:?}",
                    head.tracer, head.timestamp, head.pid
                ));
            }
        }
        let differs = all.iter().zip(&expected).find(|(one, other)| one != other);
        prop_assert!(all == expected, "{:?}", differs);
    }
}
