//! Tests of the table of functions, of callers, and of selections.

use std::io::Write;

use crate::stream::{
    EntryRecord, Header, LossReason, Mark, MarkKind, RecordBuffer, ReturnRecord, Summary, Symbol,
    Task, Writer, sample,
};

use super::{Callers, Export, Json, Pick, Picked, Player, Top};

const NAMES: [&str; 3] = ["outer", "inner", "leaf"];
const OUTER: u32 = 0x8100_0000;
const INNER: u32 = 0x8100_0040;
const LEAF: u32 = 0x8100_0080;
const STACK: u64 = 0xffff_c900_0000_1000;

/// Makes a stream of two vCPUs; times are in microseconds, `depth` is that of the stack.
struct Script {
    writer: Writer<Vec<u8>>,
    pid: u32,
}

impl Script {
    fn new() -> Self {
        let header = Header { clock_hz: 1_000_000_000, clock_start: 0, ..sample::header() };
        let mut writer = Writer::new(Vec::new(), &header).unwrap();
        for (number, name) in (0..).zip(NAMES) {
            let module = if name == "leaf" { "ext4" } else { "" };
            let address = header.address(OUTER + 0x40 * number);
            writer.symbols([Symbol { address, size: 64, name, module }]).unwrap();
        }
        Self { writer, pid: 7 }
    }

    fn name(&mut self, pid: u32, name: &str) -> &mut Self {
        self.writer.task(Task::new(pid, pid, name.as_bytes())).unwrap();
        self.pid = pid;
        self
    }

    fn enter(&mut self, at: u64, function: u32, depth: u64) -> &mut Self {
        let caller = if depth == 0 { 0 } else { OUTER + 4 };
        let entry = EntryRecord::new(at * 1000, function, caller, self.pid);
        let mut buffer = RecordBuffer::new();
        buffer.push_frame(entry.with_sp(STACK + u64::from(self.pid) * 0x4000 - depth * 64));
        self.writer.records(self.pid % 2, &buffer).unwrap();
        self
    }

    fn leave(&mut self, at: u64, function: u32, depth: u64) -> &mut Self {
        let caller = if depth == 0 { 0 } else { OUTER + 4 };
        let sp = STACK + u64::from(self.pid) * 0x4000 - depth * 64;
        let mut buffer = RecordBuffer::new();
        buffer.push_return(ReturnRecord::new(at * 1000, function, caller, self.pid, sp));
        self.writer.records(self.pid % 2, &buffer).unwrap();
        self
    }

    fn print<E: Export>(&mut self, export: E) -> E {
        self.writer.end(&Summary::default()).unwrap();
        let mut player = Player::new(export);
        player.write_all(self.writer.get_mut()).unwrap();
        player.finish().unwrap();
        player.into_export()
    }

    fn top(&mut self) -> Vec<String> {
        let mut out = Vec::new();
        self.print(Top::new(&mut out));
        let text = String::from_utf8(out).unwrap();
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        text.lines().skip(2).map(words).collect()
    }

    /// Functions and times in microseconds of the entries that are wanted.
    fn picked(&mut self, pick: Pick) -> Vec<String> {
        let mut out = Vec::new();
        self.print(Picked::new(Json::new(&mut out), pick));
        let lines = String::from_utf8(out).unwrap();
        let lines = lines.lines().map(|line| serde_json::from_str(line).unwrap());
        let entries = lines.filter(|line: &serde_json::Value| line["event"] == "entry");
        let text = |line: serde_json::Value| {
            format!(
                "{} {}",
                line["function"].as_str().unwrap(),
                line["ns"].as_u64().unwrap() / 1000
            )
        };
        entries.map(text).collect()
    }
}

// A call of which there is only the end has its time, and nobody knows what of it was its own.
#[test]
fn calls_that_only_their_ends_tell_have_their_time() {
    let mut script = Script::new();
    for (at, took) in [(10, 4), (20, 6)] {
        let mut buffer = RecordBuffer::new();
        buffer.push_return(ReturnRecord::new(at * 1000, INNER, 0, 7, STACK));
        buffer.with_duration(took * 1000);
        script.writer.records(1, &buffer).unwrap();
    }
    let [line] = &script.top()[..] else { panic!("one function") };
    assert!(line.starts_with("- 10.000 2 2 4.") && line.ends_with(" 6.000 inner"), "{line}");
}

// What a function calls is not its own time.
#[test]
fn time_is_that_of_the_function_itself() {
    let mut script = Script::new();
    script.enter(1, OUTER, 0).enter(2, INNER, 1).enter(3, LEAF, 2).leave(5, LEAF, 2);
    script.leave(9, INNER, 1).enter(10, LEAF, 1).leave(13, LEAF, 1).leave(21, OUTER, 0);
    // self, total, calls, timed, and percentiles
    let expected = [
        "10.000 20.000 1 1 20.000 20.000 20.000 20.000 outer",
        "5.000 7.000 1 1 7.000 7.000 7.000 7.000 inner",
        "5.000 5.000 2 2 2.000 3.000 3.000 3.000 leaf [ext4]",
    ];
    // A bucket of a histogram holds what differs by less than a hundredth.
    let lines = script.top();
    for (line, expected) in lines.iter().zip(expected) {
        for (found, wanted) in line.split(' ').zip(expected.split(' ')) {
            let number = |text: &str| text.parse::<f64>();
            match (number(found), number(wanted)) {
                (Ok(found), Ok(wanted)) => {
                    assert!((found - wanted).abs() <= wanted / 64.0, "{line}");
                }
                _ => assert_eq!(found, wanted),
            }
        }
        // These are exact.
        let exact = |line: &str| line.split(' ').take(4).collect::<Vec<_>>().join(" ");
        assert_eq!(exact(line), exact(expected));
    }
    assert_eq!(lines.len(), 3);
}

// Calls of a function in itself are in its time once; one whose end was not seen has none, and no
// other's self time is made of it.
#[test]
fn recursion_counts_once_and_doubt_not_at_all() {
    let mut script = Script::new();
    script.enter(1, OUTER, 0).enter(2, OUTER, 1).leave(8, OUTER, 1).leave(11, OUTER, 0);
    assert!(script.top()[0].starts_with("10.000 10.000 2 2 "));
    let mut script = Script::new();
    script.enter(1, OUTER, 0).enter(2, INNER, 1).leave(11, OUTER, 0).enter(20, LEAF, 0);
    let lines = script.top();
    assert!(lines[0].starts_with("- 10.000 1 1 ") && lines[0].ends_with(" outer"), "{lines:?}");
    assert_eq!(lines[1..], ["- - 1 0 - - - - inner", "- - 1 0 - - - - leaf [ext4]"]);
}

#[test]
fn callers_are_counted_by_function() {
    let mut script = Script::new();
    for at in 1..=3 {
        script.enter(at * 10, LEAF, 1).leave(at * 10 + 1, LEAF, 1);
    }
    script.enter(50, LEAF, 0).leave(51, LEAF, 0).enter(60, INNER, 1).leave(61, INNER, 1);
    let mut out = Vec::new();
    script.print(Callers::new(&mut out));
    let expected = "\
# 2 functions, 0 lost
leaf [ext4]: 4 calls
         3   75.0%  outer
         1   25.0%  ?
inner: 1 calls
         1  100.0%  outer
";
    assert_eq!(String::from_utf8(out).unwrap(), expected);
}

fn tasks() -> Script {
    let mut script = Script::new();
    script.name(7, "sh").enter(1, OUTER, 0).leave(2, OUTER, 0);
    script.name(8, "sh").enter(3, INNER, 0).leave(4, INNER, 0);
    script.name(8, "ls").enter(5, OUTER, 0).leave(6, OUTER, 0);
    script.name(7, "bash").enter(7, LEAF, 0).leave(8, LEAF, 0);
    script
}

#[test]
fn only_what_is_wanted_is_shown() {
    let pick = Pick::default();
    assert!(pick.is_all());
    let all = ["outer 1", "inner 3", "outer 5", "leaf 7"];
    assert_eq!(tasks().picked(pick), all);
    let wanted = |pick: Pick| {
        assert!(!pick.is_all());
        tasks().picked(pick).join(", ")
    };
    let none = Pick::default;
    assert_eq!(wanted(Pick { pids: vec![7], ..none() }), "outer 1, leaf 7");
    assert_eq!(
        wanted(Pick { comms: vec!["ls".into(), "ba*".into()], ..none() }),
        "outer 5, leaf 7"
    );
    assert_eq!(wanted(Pick { cpus: vec![0], ..none() }), "inner 3, outer 5");
    assert_eq!(wanted(Pick { modules: vec!["ext4".into()], ..none() }), "leaf 7");
    let (since, until) = (Some(3_000), Some(5_000));
    assert_eq!(wanted(Pick { since, until, ..none() }), "inner 3, outer 5");
    // A task that is followed keeps being so under other names.
    assert_eq!(wanted(Pick { follow: vec!["sh".into()], ..none() }), all.join(", "));
    assert_eq!(wanted(Pick { follow: vec!["l?".into()], ..none() }), "outer 5");
    assert_eq!(wanted(Pick { follow: vec!["7".into()], ..none() }), "outer 1, leaf 7");
    let pick = Pick { follow: vec!["sh".into()], since, ..none() };
    assert_eq!(wanted(pick), "inner 3, outer 5, leaf 7");
    assert_eq!(wanted(Pick { pids: vec![7], cpus: vec![0], ..none() }), "");
}

// The rest of a long trace is not even read.
#[test]
fn enough_is_enough() {
    let mut script = tasks();
    let (kind, text) = (MarkKind::Console, "of nobody".to_owned());
    script.writer.mark(&Mark { ticks: 2_500, kind, duration_ns: 0, text }).unwrap();
    script.writer.loss(0, 3, LossReason::Full).unwrap();
    script.writer.end(&Summary::default()).unwrap();
    let mut out = Vec::new();
    let pick = Pick { limit: Some(3), ..Pick::default() };
    let mut player = Player::new(Picked::new(Json::new(&mut out), pick));
    let error = player.write_all(script.writer.get_mut()).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::BrokenPipe);
    drop(player);
    let text = String::from_utf8(out).unwrap();
    let events: Vec<_> = text.lines().map(|line| line.split('"').nth(3).unwrap()).collect();
    assert_eq!(events, ["header", "entry", "return", "mark", "entry"]);
    // What the console says is of no task.
    let pick = Pick { pids: vec![7], ..Pick::default() };
    let mut out = Vec::new();
    let mut player = Player::new(Picked::new(Json::new(&mut out), pick));
    player.write_all(script.writer.get_mut()).unwrap();
    drop(player);
    assert!(!String::from_utf8(out).unwrap().contains("of nobody"));
}
