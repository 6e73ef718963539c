//! Another kernel of the same guest, which runs at another address.

use crate::rings::Rings;
use crate::{Sink, TIME};
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;
use std::sync::Arc;
use vmtrace::kernel::{After, Kernel};
use vmtrace::relay::{
    EventFields, EventTarget, EventValue, From, Left, Part, Recorded, Relay, Targets, TracerName,
    Values,
};
use vmtrace::stream::{Frame, Header, Reader, Record, Shape, Summary, ValueField};
use vmtrace::tracer::{CallerHits, Duty, ExitWord, Tasks, return_address};
use vmtrace_trampolines::layout::{COMMON_SIZE, Common, Info};
use vmtrace_trampolines::{Field, Point};

const SLIDE: u64 = 0x1a0_0000;
/// What the probe of an event writes: an address of the annex.
const PROBE: u32 = 0x8000_0040;
const MODULE: u64 = 0xffff_ffff_c000_1234;

fn low(address: u64) -> u32 {
    u32::try_from(address & 0xffff_ffff).unwrap()
}

/// Link addresses of the first functions.
fn entries(kernel: &Kernel) -> [u64; 4] {
    [0, 1, 2, 3].map(|site| kernel.sites()[site].entry)
}

/// Programs of a kernel at this slide: entries; those with an argument, which is a pointer of the first function and a
/// number of the second; returns and jumps of the third; an event with a pointer.
fn targets(kernel: &Kernel, slide: u64) -> Targets {
    let [_, _, third, fourth] = entries(kernel);
    let value = |shape| ValueField { name: "it".into(), shape };
    let recorded =
        |shape| Recorded { fields: vec![Field::Argument(1)], values: vec![value(shape)] };
    let of = [(0, recorded(Shape::Pointer)), (1, recorded(Shape::Signed { bytes: 8 }))];
    let results = FxHashMap::from_iter([(2, value(Shape::Pointer))]);
    let values = Values { entries: Arc::new(of.into_iter().collect()), results: Arc::new(results) };
    let exit = |behind: u64| ExitWord {
        word: low(third + behind + slide),
        function: third,
        target: 0,
        after: After::Nothing,
        is_aid: false,
    };
    let part = Part { field: 0, shape: Shape::Pointer };
    let event = EventFields {
        name: "test:event".into(),
        fields: vec![Field::Argument(2)],
        values: vec![EventValue { shown: value(Shape::Pointer), from: From::Same(part) }],
        print: None,
        call: None,
        in_place: false,
    };
    let programs = [
        (Point::Entry, vec![]),
        (Point::Entry, vec![Field::Argument(1)]),
        (Point::Return, vec![Field::Stack, Field::Value]),
        (Point::Tail, vec![Field::Stack, Field::Target]),
        (Point::Entry, vec![Field::Argument(2)]),
    ];
    let duty = |(point, fields): &(Point, Vec<Field>)| Duty::new(*point, vec![0], fields);
    let tracer = TracerName { number: 0, name: "t".into(), text: "*".into(), values };
    Targets {
        sites: (0..kernel.sites().len()).collect(),
        exits: vec![exit(1), exit(2)],
        events: vec![EventTarget { address: fourth + 8, word: PROBE, event: Arc::new(event) }],
        programs: programs.iter().map(duty).collect(),
        tracers: vec![tracer],
    }
}

/// What these programs write, of the same calls for any slide.
fn works(rings: &Rings, slide: u64, time: u64) {
    let kernel = &rings.kernel;
    let [first, second, third, fourth] = entries(kernel).map(|entry| entry + slide);
    let site = |site: usize| low(return_address(kernel, &kernel.sites()[site]) + slide);
    let all: [(u32, u16, &[u64]); 7] = [
        (site(0), 0, &[]),
        (site(0), 1, &[third + 4]),
        (site(0), 1, &[MODULE]),
        // A number that is like an address.
        (site(1), 1, &[third + 4]),
        (low(third + 1), 2, &[0x1000, first]),
        (low(third + 2), 3, &[0x1000, second]),
        (PROBE, 4, &[fourth]),
    ];
    for (at, (site, program, fields)) in (time..).zip(all) {
        let size = COMMON_SIZE + 8 * fields.len();
        let record = Common {
            timestamp: at,
            site,
            caller: low(second + 8),
            task: 0xffff_8880_0000_0000,
            pid: 1,
            info: Info::new(size, program, 1, Info::DRAINED).0,
        };
        rings.hit_with(0, record, fields);
    }
}

/// Everything that a stream tells of functions, in its order, without times; and the addresses that have names.
fn told(stream: &[u8]) -> (Vec<String>, BTreeSet<u64>) {
    let (mut reader, mut all, mut names) =
        (Reader::new(stream).unwrap(), Vec::new(), BTreeSet::new());
    while let Some(frame) = reader.next_frame().unwrap() {
        match frame {
            Frame::Symbols(list) => names.extend(list.map(|symbol| symbol.address)),
            Frame::Records(batch) => all.extend(batch.records().map(|record| match record {
                Record::Entry { entry, values, .. } => {
                    let value = values.map(|values| values.words[0].get());
                    format!("entry {:x} {:x} {value:x?}", entry.function, entry.caller)
                }
                Record::Return { ret, value, .. } => {
                    format!("return {:x} {:x} {value:x?}", ret.function, ret.caller)
                }
                Record::Tail { tail, .. } => format!("tail {:x} {:x}", tail.function, tail.target),
                Record::Event { event, values, .. } => {
                    let value = values.unwrap().words[0];
                    format!("event {:x} {:x} {value:x}", event.tracepoint, event.caller)
                }
                Record::Other(..) => panic!("another kind"),
            })),
            Frame::Counts(counts) => all.extend(
                counts.callers().map(|it| format!("{:x} {:x} {}", it.function, it.caller, it.hits)),
            ),
            _ => {}
        }
    }
    (all, names)
}

// Sites, callers, targets, pointers and tables of callers of a second kernel are where the first one has them: else its
// records are of no traced function, or have the names of others. Numbers and modules are what they are.
#[test]
fn what_a_kernel_elsewhere_says_is_told_as_the_first_one_would() {
    for (first, second) in [(0, SLIDE), (SLIDE, 0), (2 * SLIDE, SLIDE)] {
        let (rings, others) = (Rings::new(1), Rings::new(1));
        let sink = Sink::default();
        let (mut setup, _joining) = rings.setup(Box::new(sink.clone()));
        setup.header.slide = first;
        setup.targets = targets(&rings.kernel, first);
        let relay = Relay::start(setup, || ()).unwrap();
        let [_, caller, ..] = entries(&rings.kernel);
        let counted = |slide| {
            let hits = vec![(3, low(caller + 8 + slide), 5)];
            relay.counted(vec![], vec![CallerHits { tracer: 0, vcpu: 0, hits }], vec![]);
        };
        works(&rings, first, 1000);
        counted(first);
        assert_eq!(relay.leave(second), Some(Left::default()));
        relay.enter(others.readers(false), Tasks::none());
        relay.targets(targets(&rings.kernel, second));
        works(&others, second, 2000);
        counted(second);
        // A guest may write anything there.
        for (site, fields) in [(u32::MAX, u64::MAX), (1, 0), (low(caller + first) - 1, 1 << 63)] {
            let info = Info::new(COMMON_SIZE + 8, 1, 1, Info::DRAINED).0;
            let (timestamp, task) = (3000, u64::MAX);
            let record = Common { timestamp, site, caller: u32::MAX, task, pid: u32::MAX, info };
            others.hit_with(0, record, &[fields]);
        }
        let end = relay.finish(Summary::default(), TIME).wait(TIME).unwrap().unwrap();
        assert_eq!((end.summary.records(), end.summary.lost()), (14, 3), "{:?}", end.summary);
        let (mut all, names) = told(&sink.0.lock().unwrap());
        let what = format!("{first:#x}, {second:#x}: {all:#?}");
        assert_eq!(all.len(), 16, "{what}");
        let later = all.split_off(8);
        let [_, _, third, _] = entries(&rings.kernel);
        for (number, (one, other)) in all.iter().zip(&later).enumerate() {
            if number == 3 {
                assert!(one.ends_with(&format!("Some({:x})", third + 4 + first)), "{what}");
                assert!(other.ends_with(&format!("Some({:x})", third + 4 + second)), "{what}");
                assert_eq!(one.split("Some").next(), other.split("Some").next(), "{what}");
            } else {
                assert_eq!(one, other, "{what}");
            }
        }
        assert!(all[1].ends_with(&format!("Some({:x})", third + 4 + first)), "{what}");
        assert!(all[2].ends_with(&format!("Some({MODULE:x})")), "{what}");
        let symbols = rings.kernel.symbols();
        for &name in names.iter().filter(|&&name| name != entries(&rings.kernel)[3] + 8 + first) {
            assert!(symbols.primary_at(name - first).is_some(), "{name:#x}: {what}");
        }
        assert!(names.contains(&(Header::TOP_4_GIB | u64::from(low(caller + first)))), "{what}");
    }
}
