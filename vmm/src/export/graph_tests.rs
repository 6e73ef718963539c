//! Calls in every format.

use proptest::collection::vec;
use proptest::prelude::*;

use crate::stream::{
    EntryRecord, Header, LossReason, Mark, MarkKind, RecordBuffer, ReturnRecord, Summary, Symbol,
    TailRecord, Task, Tracer, Writer, sample,
};

use super::{Event, Export, Graph, Json, Player, Stats, Text};

const NAMES: [&str; 6] = ["zero", "vfs_read", "ext4_read", "lock", "timer_tick", "untraced"];
pub(super) const VFS_READ: u32 = 0x8100_0040;
pub(super) const EXT4_READ: u32 = 0x8100_0080;
pub(super) const LOCK: u32 = 0x8100_00c0;
pub(super) const TIMER: u32 = 0x8100_0100;
pub(super) const UNTRACED: u32 = 0x8100_0140;
pub(super) const STACK: u64 = 0xffff_c900_0000_0000;
pub(super) const OTHER: u64 = 0xffff_c900_0001_0000;

/// Makes a stream; times are in microseconds.
pub(super) struct Script {
    pub(super) writer: Writer<Vec<u8>>,
    pub(super) buffer: RecordBuffer,
    vcpu: u32,
    pub(super) pid: u32,
    tracer: u8,
}

impl Script {
    pub(super) fn new() -> Self {
        let header = Header { clock_hz: 1_000_000_000, clock_start: 0, ..sample::header() };
        let mut writer = Writer::new(Vec::new(), &header).expect("header");
        for (number, name) in (0..).zip(NAMES) {
            let address = header.address(0x8100_0000 + 64 * number);
            let module = if name.starts_with("ext4") { "ext4" } else { "" };
            let symbol = Symbol { address, size: 64, name, module };
            writer.symbols([symbol]).expect("room");
        }
        for (pid, comm) in [(7, "cat"), (8, "very-long-name")] {
            writer.task(Task::new(pid, pid, comm.as_bytes())).expect("memory");
        }
        Self { writer, buffer: RecordBuffer::new(), vcpu: 0, pid: 7, tracer: 0 }
    }

    pub(super) fn enter(&mut self, at: u64, function: u32, sp: u64) -> &mut Self {
        let entry = EntryRecord::new(at * 1000, function, 0x8100_0001, self.pid);
        self.buffer.push_frame(entry.with_sp(sp).of_tracer(self.tracer));
        self.write()
    }

    pub(super) fn leave(&mut self, at: u64, function: u32, sp: u64) -> &mut Self {
        let ret = ReturnRecord::new(at * 1000, function, 0x8100_0001, self.pid, sp);
        self.buffer.push_return(ret.of_tracer(self.tracer));
        self.write()
    }

    pub(super) fn give(&mut self, at: u64, function: u32, sp: u64, value: u64) -> &mut Self {
        let ret = ReturnRecord::new(at * 1000, function, 0x8100_0001, self.pid, sp);
        self.buffer.push_return_value(ret.with_value(value));
        self.write()
    }

    pub(super) fn jump(&mut self, at: u64, function: u32, target: u32, sp: u64) -> &mut Self {
        self.buffer.push_tail(TailRecord::new(at * 1000, function, target, self.pid, sp));
        self.write()
    }

    pub(super) fn write(&mut self) -> &mut Self {
        self.writer.records(self.vcpu, &self.buffer).expect("vCPU");
        self.buffer.clear();
        self
    }

    pub(super) fn on(&mut self, vcpu: u32, pid: u32) -> &mut Self {
        (self.vcpu, self.pid) = (vcpu, pid);
        self
    }

    pub(super) fn end(mut self) -> Vec<u8> {
        self.writer.end(&Summary::default()).expect("memory");
        self.writer.into_inner().expect("memory")
    }
}

/// How many calls are unfinished.
struct Unfinished(usize);

impl Export for Unfinished {
    fn begin(&mut self, _: &Header) -> std::io::Result<()> {
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> std::io::Result<()> {
        self.0 += usize::from(matches!(event, Event::Unfinished(_)));
        Ok(())
    }

    fn end(&mut self, _: Option<&Summary>) -> std::io::Result<()> {
        Ok(())
    }
}

// A kernel that the guest starts anew (kexec) has its stacks at the same places: its returns would end calls of the one
// that is gone.
#[test]
fn calls_of_a_kernel_that_is_gone_are_unfinished() {
    let ended = |kind: MarkKind| {
        let mut script = Script::new();
        script.enter(1, VFS_READ, STACK);
        let mark = Mark { ticks: 5000, kind, duration_ns: 0, text: String::new() };
        script.writer.mark(&mark).expect("memory");
        script.leave(9, VFS_READ, STACK);
        player(&script.end(), 1 << 20, Player::new(Unfinished(0))).0
    };
    assert_eq!(ended(MarkKind::Attach), 1);
    // Others only change what is traced.
    assert_eq!(ended(MarkKind::Filter), 0);
}

// Calls are seen to their ends however long the guest stops, and a module that comes or goes has no open calls.
#[test]
fn only_marks_of_other_functions_make_calls_doubtful() {
    let timed = |kind: MarkKind, text: &str| {
        let mut script = Script::new();
        script.enter(1, VFS_READ, STACK);
        let mark = Mark { ticks: 5000, kind, duration_ns: 0, text: text.into() };
        script.writer.mark(&mark).expect("memory");
        script.leave(9, VFS_READ, STACK);
        graph(&script.end(), |player| player).contains("8.000 us")
    };
    assert!(timed(MarkKind::Pause, "modules") && timed(MarkKind::Note, "a note"));
    assert!(timed(MarkKind::Pause, "the output of the trace took nothing"));
    assert!(timed(MarkKind::Filter, "module ext4 loaded: 7 of 9 functions"));
    assert!(timed(MarkKind::Filter, "module ext4 unloaded: 7 sites given back"));
    assert!(!timed(MarkKind::Filter, "the guest's ftrace is done: 3 sites, 1 shared"));
    // Nobody sees what comes in between.
    assert!(!timed(MarkKind::Pause, "tracing paused: 3 sites given back"));
    assert!(!timed(MarkKind::Resume, "tracing resumed"));
}

/// Calls of which there are only the ends, with durations, and one that has none.
pub(super) fn ends() -> Vec<u8> {
    let mut script = Script::new();
    script.enter(1, EXT4_READ, STACK + 0x2000);
    let ret = ReturnRecord::new(50_000, VFS_READ, 0x8100_0001, 7, STACK + 0x2000);
    script.buffer.push_return_value(ret.with_value((-2_i64).cast_unsigned()));
    script.buffer.with_duration(30_000);
    script.buffer.push_tail(TailRecord::new(60_000, LOCK, VFS_READ, 7, STACK));
    script.buffer.with_duration(5000);
    script.write().give(70, TIMER, STACK, 3).leave(80, EXT4_READ, STACK + 0x2000);
    script.end()
}

#[test]
fn a_call_that_only_its_end_tells_is_a_call() {
    assert_eq!(
        graph(&ends(), |player| player),
        concat!(
            " 0)               |  ext4_read [ext4]() {\n",
            " 0) + 30.000 us   |  vfs_read(); /* = -2 */\n",
            " 0)   5.000 us    |  lock();\n",
            " 0)               |    } /* timer_tick = 0x3 */\n",
            " 0) + 79.000 us   |  }\n",
        )
    );
    let mut json = Vec::new();
    player(&ends(), 1 << 20, Player::new(Json::new(&mut json)));
    let json = String::from_utf8(json).unwrap();
    let lines: Vec<serde_json::Value> =
        json.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let shown: Vec<_> = lines
        .iter()
        .filter(|line| line["function"].is_string())
        .map(|line| {
            let [event, function] = ["event", "function"].map(|key| line[key].as_str().unwrap());
            (event, function, line["ns"].as_u64().unwrap(), line["duration_ns"].as_u64())
        })
        .collect();
    assert_eq!(
        shown,
        [
            ("entry", "ext4_read", 1000, None),
            ("return", "vfs_read", 50_000, Some(30_000)),
            ("tail", "lock", 60_000, None),
            ("return", "lock", 60_000, Some(5000)),
            ("return", "timer_tick", 70_000, None),
            ("return", "ext4_read", 80_000, Some(79_000)),
        ]
    );
    let mut stats = Vec::new();
    player(&ends(), 1 << 20, Player::new(Stats::new(&mut stats)));
    let stats = String::from_utf8(stats).unwrap();
    assert!(stats.starts_with("# 3 entries of 3 functions, 0 lost\n"), "{stats}");
    // As other calls are.
    let long = graph(&ends(), |player| player.with_min_duration(10_000));
    assert_eq!(long.matches("us").count(), 2, "{long}");
}

/// All that may happen to calls.
pub(super) fn calls() -> Vec<u8> {
    let mut script = Script::new();
    script.leave(1, LOCK, STACK + 0x3000);
    script.enter(10, VFS_READ, STACK + 0x2000).enter(11, LOCK, STACK + 0x1f00);
    script.leave(12, LOCK, STACK + 0x1f00);
    script.on(1, 8).enter(13, TIMER, OTHER + 0x100).leave(15, TIMER, OTHER + 0x100);
    script.on(0, 7).enter(14, EXT4_READ, STACK + 0x1f00);
    // An interrupt, on its own stack.
    script.enter(16, TIMER, 0xffff_fe00_0000_0100).leave(17, TIMER, 0xffff_fe00_0000_0100);
    script.jump(30, EXT4_READ, LOCK, STACK + 0x1f00).enter(31, LOCK, STACK + 0x1f00);
    script.give(200, LOCK, STACK + 0x1f00, 5);
    // Another task, and back.
    script.on(0, 8).enter(201, LOCK, OTHER + 0x200).leave(202, LOCK, OTHER + 0x200);
    script.on(0, 7).enter(203, EXT4_READ, STACK + 0x1f00);
    script.jump(204, EXT4_READ, UNTRACED, STACK + 0x1f00);
    // The task goes on elsewhere.
    script.on(1, 7).leave(1500, VFS_READ, STACK + 0x2000);
    script.writer.loss(1, 3, LossReason::Full).expect("vCPU");
    script.enter(1600, VFS_READ, STACK + 0x2000).enter(1601, LOCK, STACK + 0x1f00);
    script.end()
}

fn player<E: Export>(stream: &[u8], step: usize, mut player: Player<E>) -> E {
    stream.chunks(step).for_each(|piece| player.push(piece).expect("a stream"));
    player.finish().expect("whole");
    player.into_export()
}

/// The lines of the call graph, without the first ones.
fn graph(stream: &[u8], with: impl Fn(Player<Graph<Vec<u8>>>) -> Player<Graph<Vec<u8>>>) -> String {
    let play = |step| {
        let played = player(stream, step, with(Player::new(Graph::new(Vec::new()))));
        String::from_utf8(played.into_inner()).expect("UTF-8")
    };
    let text = play(1 << 20);
    assert_eq!(text, play(7), "in pieces");
    let (head, rest) = text.split_at(text.match_indices('\n').nth(5).expect("six lines").0 + 1);
    assert!(head.starts_with("# tracer: function_graph\n#\n# vmtrace 0.1.0: Linux"), "{head}");
    assert!(head.ends_with("# |     |   |                     |   |   |   |\n"), "{head}");
    rest.to_owned()
}

#[test]
fn calls_look_as_those_of_ftrace() {
    // An interrupt has opened a call in between, but at another depth.
    let expected = "\
\x200)               |  } /* lock */
 0)               |  vfs_read() {
 0)   1.000 us    |    lock();
 1)   2.000 us    |  timer_tick();
 0)               |    ext4_read [ext4]() {
 0)   1.000 us    |  timer_tick();
 0) ! 169.000 us  |      lock(); /* = 0x5 */
 0) ! 186.000 us  |    } /* = 0x5 */
 ------------------------------------------
 0)     cat-7      =>   very-lo-8   
 ------------------------------------------

 0)   1.000 us    |  lock();
 ------------------------------------------
 0)   very-lo-8    =>     cat-7     
 ------------------------------------------

 0)               |    ext4_read [ext4](); /* unfinished */
 ------------------------------------------
 1)   very-lo-8    =>     cat-7     
 ------------------------------------------

 1) # 1490.000 us |  } /* vfs_read */
CPU:1 [LOST 3 EVENTS]
 1)               |  vfs_read() {
 1)               |    lock(); /* unfinished */
 1)               |  } /* vfs_read, unfinished */
";
    assert_eq!(graph(&calls(), |player| player), expected);
}

#[test]
fn only_what_is_asked_for_is_shown() {
    let rooted = graph(&calls(), |player| player.with_roots(|name, _| name == "ext4_read"));
    let first: Vec<_> = rooted.lines().take(3).collect();
    let expected = [
        " 0)               |  ext4_read [ext4]() {",
        " 0) ! 169.000 us  |    lock(); /* = 0x5 */",
        " 0) ! 186.000 us  |  } /* = 0x5 */",
    ];
    assert_eq!(first, expected);
    let flat = graph(&calls(), |player| player.with_max_depth(1));
    assert!(!flat.contains("ext4_read") && !flat.contains("|    "), "{flat}");
    assert!(flat.contains("timer_tick();\n") && flat.contains("vfs_read() {\n"), "{flat}");
    // As with ftrace's tracing_thresh.
    let long = graph(&calls(), |player| player.with_min_duration(100_000));
    let lines: Vec<_> = long.lines().filter(|line| line.contains(" us")).collect();
    let expected = [
        " 0) ! 169.000 us  |      } /* lock = 0x5 */",
        " 0) ! 186.000 us  |    } /* ext4_read [ext4] = 0x5 */",
        " 1) # 1490.000 us |  } /* vfs_read */",
    ];
    assert_eq!(lines, expected);
    assert!(!long.contains("();") && !long.contains('{'), "{long}");
    // What is not shown is still known: durations stay.
    let one = graph(&calls(), |player| player.with_filter(|name, _| name.starts_with("ext4")));
    assert!(one.starts_with(" 0) ! 186.000 us  |  ext4_read [ext4](); /* = 0x5 */\n"), "{one}");
}

fn json(stream: &[u8]) -> Vec<serde_json::Value> {
    let mut out = Vec::new();
    player(stream, 1 << 20, Player::new(Json::new(&mut out)));
    let text = String::from_utf8(out).expect("UTF-8");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn json_has_returns_and_jumps() {
    let lines = json(&calls());
    let of = |event| lines.iter().filter(|line| line["event"] == event).collect::<Vec<_>>();
    let entries = of("entry");
    let depths: Vec<_> = entries.iter().map(|line| line["depth"].as_u64().unwrap()).collect();
    assert_eq!(depths, [0, 1, 0, 1, 0, 2, 0, 1, 0, 1]);
    assert!(entries.iter().all(|line| line.get("tracer").is_none()));
    let returns = of("return");
    let text = returns[0].to_string();
    let expected = r#"{"comm":"cat","cpu":0,"depth":0,"duration_ns":null,"event":"return","function":"lock","ns":1000,"pid":7}"#;
    assert_eq!(text, serde_json::from_str::<serde_json::Value>(expected).unwrap().to_string());
    let told: Vec<_> = returns
        .iter()
        .map(|line| (line["function"].as_str().unwrap(), line["duration_ns"].as_u64()))
        .collect();
    let expected = [
        ("lock", None),
        ("lock", Some(1000)),
        ("timer_tick", Some(2000)),
        ("timer_tick", Some(1000)),
        ("lock", Some(169_000)),
        ("ext4_read", Some(186_000)),
        ("lock", Some(1000)),
        ("vfs_read", Some(1_490_000)),
    ];
    assert_eq!(told, expected);
    assert_eq!((&returns[4]["value"], &returns[5]["value"]), (&5.into(), &5.into()));
    let tails = of("tail");
    assert_eq!((&tails[0]["function"], &tails[0]["target"]), (&"ext4_read".into(), &"lock".into()));
    assert_eq!(tails[0]["module"], "ext4");
    assert_eq!(tails[1]["target"], "untraced");
}

#[test]
fn tracers_have_names_when_there_are_several() {
    let mut script = Script::new();
    let name = |script: &mut Script, number, name| {
        let tracer = Tracer { number, name, description: "" };
        script.writer.tracer(tracer).expect("memory");
    };
    name(&mut script, 0, "first");
    script.enter(1, LOCK, STACK).leave(2, LOCK, STACK);
    script.tracer = 2;
    script.enter(3, LOCK, STACK).leave(4, LOCK, STACK);
    name(&mut script, 2, "loc\x1bs");
    script.enter(5, LOCK, STACK).leave(6, LOCK, STACK);
    let stream = script.end();
    let lines = json(&stream);
    let names: Vec<_> = lines
        .iter()
        .filter(|line| line["event"] == "return")
        .map(|line| line["tracer"].as_str().unwrap_or("-"))
        .collect();
    assert_eq!(names, ["first", "tracer2", "loc?s"]);
    let only = graph(&stream, |player| player.with_tracer("first".into()));
    assert_eq!(only, " 0)   1.000 us    |  lock();\n");
    let only = graph(&stream, |player| player.with_tracer("tracer2".into()));
    assert_eq!(only, " 0)   1.000 us    |  lock();\n");
}

#[test]
fn text_says_once_that_there_are_returns() {
    let text = player(&calls(), 1 << 20, Player::new(Text::new(Vec::new()))).into_inner();
    let text = String::from_utf8(text).expect("UTF-8");
    assert_eq!(text.matches("# returns are not printed in this form").count(), 1);
    assert_eq!(text.matches("<-").count(), 10);
    let mut out = Vec::new();
    player(&calls(), 1 << 20, Player::new(Stats::new(&mut out)));
    assert!(out.starts_with(b"# 10 entries of 4 functions, 3 lost\n"));
}

// Whoever looks on shall not wait for a call that does not return.
#[test]
fn an_open_call_does_not_hold_others_up_for_ever() {
    let mut script = Script::new();
    script.enter(0, VFS_READ, STACK);
    for at in 1..20_000 {
        script.on(1, 8).enter(2 * at, LOCK, OTHER).leave(2 * at + 1, LOCK, OTHER);
    }
    script.on(0, 7).leave(50_000, VFS_READ, STACK);
    let text = graph(&script.end(), |player| player);
    assert!(
        text.starts_with(" 0)               |  vfs_read() {\n 1)   1.000 us"),
        "{}",
        &text[..200]
    );
    assert!(text.ends_with(" 0) * 50000.00 us |  }\n"));
    assert_eq!(text.lines().count(), 20_001);
}

#[test]
fn plain_entries_are_calls_of_which_no_more_is_known() {
    let text = graph(&sample::stream(), |player| player);
    assert!(text.contains(" 1)               |  vfs_read();\n"), "{text}");
    assert!(
        text.contains("#                                    0.000001: pause 0.070 ms"),
        "{text}"
    );
    let rooted = graph(&sample::stream(), |player| player.with_roots(|_, _| true));
    assert!(!rooted.contains("vfs_read"), "{rooted}");
}

/// A record of any kind, with numbers that meet now and then.
fn record() -> impl Strategy<Value = (u8, u32, u64, u32, u64, u8)> {
    let time = prop_oneof![0..1000u64, any::<u64>()];
    let sp = prop_oneof![(0..40u64).prop_map(|at| STACK + at * 8), any::<u64>()];
    let function = prop_oneof![0..4u32, any::<u32>()];
    (0..8u8, 0..3u32, time, function, sp, 0..2u8)
}

proptest! {
    // The guest can write what it likes into its rings.
    #[test]
    fn any_records_can_be_played(records in vec(record(), 0..300)) {
        let mut script = Script::new();
        for (kind, vcpu, at, function, sp, tracer) in records {
            script.on(vcpu % 2, vcpu);
            let (other, pid) = (function ^ 1, vcpu);
            match kind {
                0 => script.buffer.push(EntryRecord::new(at, function, other, pid)),
                1..=3 => {
                    let entry = EntryRecord::new(at, function, other, pid).with_sp(sp);
                    script.buffer.push_frame(entry.of_tracer(tracer));
                }
                4 | 5 => {
                    let ret = ReturnRecord::new(at, function, other, pid, sp);
                    script.buffer.push_return(ret.of_tracer(tracer));
                }
                6 => script.buffer.push_tail(TailRecord::new(at, function, other, pid, sp)),
                _ => script.writer.loss(vcpu % 2, 1, LossReason::Full).expect("vCPU"),
            }
            script.write();
        }
        let stream = script.end();
        let entries = json(&stream).iter().filter(|line| line["event"] == "entry").count();
        let text = graph(&stream, |player| player);
        // Each entry is a line of its own, and only they are.
        let opened = text.lines().filter(|line| line.contains("();") || line.ends_with('{'));
        prop_assert_eq!(opened.count(), entries);
        // The same in pieces: that is asserted in there.
        graph(&stream, |player| player.with_roots(|name, _| name.ends_with('1')).with_max_depth(3));
    }
}
