//! Pairs of traces made in memory, and the reports on them.

use crate::export::Player;
use crate::stream::{
    Count, EntryRecord, Header, LossReason, RecordBuffer, ReturnRecord, Stretch, Summary, Symbol,
    Task, TracedOf, Writer,
};

use super::{Difference, Noise, Profile};

const STACK: u64 = 0xffff_c900_0000_1000;
const NAMES: [&str; 5] = ["open", "read", "write", "close", "sync"];
const NOISE: Noise = Noise { percent: 20, nanoseconds: 1_000_000 };

/// A trace of one vCPU whose kernel has its functions at `base`; times are in microseconds.
struct Script {
    writer: Writer<Vec<u8>>,
    base: u32,
    now: u64,
}

impl Script {
    fn new(base: u32) -> Self {
        let header = Header {
            arch: "x86_64".into(),
            release: "6.12.0".into(),
            clock_hz: 1_000_000_000,
            vcpus: 1,
            address_base: Header::TOP_4_GIB,
            ..Header::default()
        };
        let mut writer = Writer::new(Vec::new(), &header).expect("header");
        for (number, name) in (0..).zip(NAMES) {
            let address = header.address(base + 64 * number);
            writer.symbols([Symbol::new(address, 64, name)]).expect("room");
        }
        for (pid, comm) in [(7, "cat"), (8, "cat"), (9, "dd")] {
            writer.task(Task::new(pid, pid, comm.as_bytes())).expect("room");
        }
        Self { writer, base, now: 0 }
    }

    fn function(&self, name: &str) -> u32 {
        let number = NAMES.iter().position(|known| *known == name).expect("a name of these");
        self.base + 64 * u32::try_from(number).expect("small")
    }

    fn call(&mut self, pid: u32, name: &str, took: u64) -> &mut Self {
        let (function, sp) = (self.function(name), STACK + u64::from(pid) * 0x4000);
        let mut buffer = RecordBuffer::new();
        buffer.push_frame(EntryRecord::new(self.now * 1000, function, 0, pid).with_sp(sp));
        self.now += took;
        buffer.push_return(ReturnRecord::new(self.now * 1000, function, 0, pid, sp));
        self.now += 1;
        self.writer.records(0, &buffer).expect("a vCPU");
        self
    }

    fn calls(&mut self, pid: u32, names: &[&str]) -> &mut Self {
        for name in names {
            self.call(pid, name, 10);
        }
        self
    }

    fn lose(&mut self) -> &mut Self {
        self.writer.loss(0, 5, LossReason::Full).expect("a vCPU");
        self
    }

    /// `traced` are all functions that were.
    fn profile(&mut self, traced: &[&str], comms: &[&str]) -> Profile {
        let stretch = Stretch { since: 0, until: u64::MAX, tracer: 0, of: TracedOf::Entries };
        let traced: Vec<_> = traced.iter().map(|name| self.function(name)).collect();
        self.writer.traced(&stretch, &traced).expect("memory");
        self.writer.end(&Summary::default()).expect("memory");
        let comms = comms.iter().map(|&comm| comm.to_owned()).collect();
        let mut player = Player::new(Profile::new(comms));
        player.push(self.writer.get_mut()).expect("whole");
        player.finish().expect("whole");
        let mut profile = player.into_export();
        profile.finish(0);
        profile
    }
}

fn compare(a: &Profile, b: &Profile) -> Difference {
    Difference::new((a, "a.vmt"), (b, "b.vmt"), NOISE)
}

// Kernels are elsewhere each time, and so is everything in them.
#[test]
fn equal_work_of_different_kernels_is_equal() {
    let work = |base| {
        let mut script = Script::new(base);
        script.calls(7, &["open", "read", "close"]).calls(9, &["open", "write"]);
        script.profile(&NAMES, &[])
    };
    let found = compare(&work(0x8100_0000), &work(0x9200_0000));
    assert!(found.is_empty() && found.tasks.is_empty(), "{found:?}");
    assert_eq!(found.untold, [""; 0]);
    let mut text = Vec::new();
    found.write_text(&mut text).expect("memory");
    let text = String::from_utf8(text).expect("UTF-8");
    assert!(text.ends_with("No function differs by more than noise.\n"), "{text}");
}

#[test]
fn what_only_one_has_called_counts_and_times_are_told() {
    let mut a = Script::new(0x8100_0000);
    let mut b = Script::new(0x8100_0000);
    for script in [&mut a, &mut b] {
        // 10 and 11, and 2 and 2.9 ms, are noise.
        script.calls(7, &["read"; 10]);
    }
    a.call(7, "open", 2000).calls(7, &["write", "write"]).call(7, "close", 5000);
    b.call(7, "open", 2900).calls(7, &["write"; 4]).call(7, "read", 10).call(7, "close", 9000);
    b.call(7, "sync", 10);
    let found = compare(&a.profile(&NAMES, &[]), &b.profile(&NAMES, &[]));
    let only: Vec<_> = found.only_b.iter().map(|it| (&*it.function, it.calls)).collect();
    assert_eq!((only, found.only_a.len()), (vec![("sync", 1)], 0));
    let counts: Vec<_> = found.counts.iter().map(|it| (&*it.function, it.a, it.b)).collect();
    assert_eq!(counts, [("write", 2, 4)]);
    let times = found.times.iter().map(|it| (&*it.function, it.a.total_ns, it.b.total_ns));
    assert_eq!(times.collect::<Vec<_>>(), [("close", 5_000_000, 9_000_000)]);
    assert!(!found.is_empty());
    let mut json = Vec::new();
    found.write_json(&mut json).expect("memory");
    let json: serde_json::Value = serde_json::from_slice(&json).expect("JSON");
    assert_eq!((&json["event"], &json["times"][0]["b"]["calls"]), (&"diff".into(), &1.into()));
    crate::analyze::documented::check(&json);
    let mut text = Vec::new();
    found.write_text(&mut text).expect("memory");
    let text = String::from_utf8(text).expect("UTF-8");
    assert!(text.contains("CALLED IN B ONLY") && !text.contains("CALLED IN A ONLY"), "{text}");
    assert!(text.contains("+4.000") && text.contains("            +2"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
}

// Of two tasks of one name the first is compared with the first.
#[test]
fn tasks_part_where_their_calls_do() {
    let mut a = Script::new(0x8100_0000);
    let mut b = Script::new(0x8100_0000);
    a.calls(7, &["open", "read", "close"]).calls(8, &["open"]).calls(9, &["open"]);
    b.calls(7, &["open", "read", "write"]).calls(8, &["open", "sync"]).calls(9, &["open"]);
    let found = compare(&a.profile(&NAMES, &[]), &b.profile(&NAMES, &[]));
    let [first, second] = &found.tasks[..] else { panic!("{:?}", found.tasks) };
    assert_eq!((first.pid_a, first.same, first.after.as_deref()), (7, 2, Some("read")));
    let names = |it: &super::Parting| {
        let name = |point: &Option<super::Point>| point.as_ref().map(|it| it.function.clone());
        (name(&it.a), name(&it.b))
    };
    assert_eq!(names(first), (Some("close".into()), Some("write".into())));
    assert_eq!((second.pid_b, second.same), (8, 1));
    assert_eq!(names(second), (None, Some("sync".into())));

    let mut a = Script::new(0x8100_0000);
    let mut b = Script::new(0x8100_0000);
    a.calls(7, &["open"]).calls(9, &["open"]);
    b.calls(7, &["read"]).calls(9, &["open"]);
    let found = compare(&a.profile(&NAMES, &["d*"]), &b.profile(&NAMES, &["d*"]));
    assert!(found.tasks.is_empty() && found.is_empty(), "{found:?}");
}

// A record that is missing is no call that was not made.
#[test]
fn nothing_is_said_of_what_gaps_may_hide() {
    let mut a = Script::new(0x8100_0000);
    let mut b = Script::new(0x8100_0000);
    a.calls(7, &["open", "read", "sync"]).calls(7, &["write"; 9]);
    b.calls(7, &["open"]).lose().calls(7, &["write", "close"]);
    let found = compare(&a.profile(&NAMES, &[]), &b.profile(&NAMES, &[]));
    assert!(found.only_a.is_empty() && found.counts.is_empty() && found.times.is_empty());
    // The other one is whole.
    assert_eq!(found.only_b.len(), 1);
    assert!(found.tasks.is_empty(), "{:?}", found.tasks);
    let untold = found.untold.join("; ");
    for what in ["2 functions were called in one trace only", "counts and times", "1 tasks"] {
        assert!(untold.contains(what), "{untold}");
    }

    let mut a = Script::new(0x8100_0000);
    let mut b = Script::new(0x8100_0000);
    a.calls(7, &["open", "sync"]);
    b.calls(7, &["open"]);
    let found = compare(&a.profile(&NAMES, &[]), &b.profile(&NAMES[..4], &[]));
    assert!(found.is_empty(), "{found:?}");
    assert!(found.untold[0].contains("not traced in the other"), "{:?}", found.untold);
}

// One that only counts a function has not called it never.
#[test]
fn calls_that_were_counted_are_calls() {
    let counted = |hits| {
        let mut script = Script::new(0x8100_0000);
        let function = script.function("open");
        script.writer.counts(0, 0, &[Count { function, hits }]).expect("a vCPU");
        script
    };
    let recorded = || {
        let mut script = Script::new(0x8100_0000);
        script.calls(7, &["open", "open"]);
        script
    };
    let found = compare(&counted(2).profile(&NAMES, &[]), &recorded().profile(&NAMES, &[]));
    assert!(found.only_b.is_empty() && found.counts.is_empty(), "{found:?}");
    let found = compare(&counted(9).profile(&NAMES, &[]), &recorded().profile(&NAMES, &[]));
    assert_eq!((found.counts[0].a, found.counts[0].b), (9, 2), "{found:?}");
    // Of which tasks they were is not known: no more than of what was not traced.
    let found = compare(&counted(2).profile(&NAMES, &["*"]), &recorded().profile(&NAMES, &["*"]));
    assert!(found.is_empty(), "{found:?}");
    assert!(found.untold[0].contains("not traced in the other"), "{:?}", found.untold);
    // Sums of what a stream says do not wrap.
    let mut script = counted(u64::MAX);
    script.calls(7, &["open"]);
    assert_eq!(script.profile(&NAMES, &[]).times.entries, u64::MAX);
}
