//! Tests of the results of rules.

use std::io::Write;

use crate::export::Player;
use crate::stream::{
    Count, EntryRecord, Header, LossReason, Mark, MarkKind, RecordBuffer, ReturnRecord, Stretch,
    Summary, Symbol, Task, TracedOf, Tracer, Writer, sample,
};

use super::{Check, Format, Outcome, Rule, Verdict, write};

const NAMES: [&str; 6] = ["start", "vfs_open", "vfs_read", "panic", "never", "run_init_process"];
const START: u32 = 0x8100_0000;
const OPEN: u32 = 0x8100_0040;
const READ: u32 = 0x8100_0080;
const PANIC: u32 = 0x8100_00c0;
const NEVER: u32 = 0x8100_0100;
const INIT: u32 = 0x8100_0140;
const STACK: u64 = 0xffff_c900_0000_1000;

/// Makes a stream of two vCPUs; times are in microseconds.
struct Script(Writer<Vec<u8>>);

impl Script {
    fn new() -> Self {
        let header = Header { clock_hz: 1_000_000_000, clock_start: 0, ..sample::header() };
        let mut writer = Writer::new(Vec::new(), &header).unwrap();
        for (number, name) in (0..).zip(NAMES) {
            let address = header.address(START + 0x40 * number);
            writer.symbols([Symbol::new(address, 64, name)]).unwrap();
        }
        writer.task(Task::new(7, 7, b"cat")).unwrap();
        Self(writer)
    }

    fn call(&mut self, vcpu: u32, at: u64, function: u32) -> &mut Self {
        self.0.entries(vcpu, &[EntryRecord::new(at * 1000, function, 0, 7)]).unwrap();
        self
    }

    /// A call that is seen to end, or not.
    fn graph(&mut self, at: u64, end: Option<u64>, function: u32) -> &mut Self {
        let mut buffer = RecordBuffer::new();
        buffer.push_frame(EntryRecord::new(at * 1000, function, 0, 7).with_sp(STACK));
        if let Some(end) = end {
            buffer.push_return(ReturnRecord::new(end * 1000, function, 0, 7, STACK));
        }
        self.0.records(0, &buffer).unwrap();
        self
    }

    fn lose(&mut self, vcpu: u32, count: u64) -> &mut Self {
        self.0.loss(vcpu, count, LossReason::Full).unwrap();
        self
    }

    fn console(&mut self, at: u64, text: &str) -> &mut Self {
        let (kind, text) = (MarkKind::Console, text.to_owned());
        self.0.mark(&Mark { ticks: at * 1000, kind, duration_ns: 0, text }).unwrap();
        self
    }

    fn traced(&mut self, since: u64, until: u64, of: TracedOf, functions: &[u32]) -> &mut Self {
        self.0.traced(&Stretch { since, until, tracer: 0, of }, functions).unwrap();
        self
    }

    /// All of them, all the time.
    fn all(&mut self) -> &mut Self {
        let all = [START, OPEN, READ, PANIC, NEVER, INIT];
        self.traced(0, u64::MAX, TracedOf::Entries, &all);
        self.traced(0, u64::MAX, TracedOf::Returns, &all)
    }

    fn stream(&mut self) -> Vec<u8> {
        self.0.end(&Summary::default()).unwrap();
        self.0.get_mut().clone()
    }

    /// How it is with rules.
    fn check(&mut self, rules: &[&str]) -> Vec<Outcome> {
        let stream = self.stream();
        check(&stream, rules)
    }

    /// The verdicts: one letter for each rule, `p`assed, `f`ailed or `u`ndecided.
    fn verdicts(&mut self, rules: &[&str]) -> String {
        letters(&self.check(rules))
    }
}

fn check(stream: &[u8], rules: &[&str]) -> Vec<Outcome> {
    let rules = rules.iter().map(|rule| rule.parse().unwrap()).collect();
    let mut player = Player::new(Check::new(rules));
    player.write_all(stream).unwrap();
    let _ = player.finish();
    let late = player.late();
    player.into_export().finish(late)
}

fn letters(outcomes: &[Outcome]) -> String {
    let letter = |outcome: &Outcome| match outcome.verdict {
        Verdict::Passed => 'p',
        Verdict::Failed => 'f',
        Verdict::Undecided => 'u',
    };
    outcomes.iter().map(letter).collect()
}

#[test]
fn calls_are_counted() {
    let rules = [
        "expect vfs_open",
        "expect vfs_open == 2",
        "expect vfs_* = 3",
        "expect vfs_open > 2",
        "expect never < 1",
        "expect never|start >= 1",
        "forbid panic|never",
        "forbid vfs_read",
    ];
    let mut script = Script::new();
    script.call(0, 1, START).call(0, 2, OPEN).call(1, 3, OPEN).call(0, 4, READ).all();
    let outcomes = script.check(&rules);
    assert_eq!(letters(&outcomes), "pppfpppf");
    assert_eq!(outcomes[0].detail, "2 calls, first of vfs_open at 0.000002 s on CPU 0 by cat-7");
}

// Who counts calls does not record them: a rule that takes records alone would say that they were
// never called. And two tracers that tell of the same calls must not make twice as many of them.
#[test]
fn calls_that_were_counted_are_calls() {
    let rules = [
        "expect vfs_open",
        "expect vfs_open == 5",
        "expect vfs_open < 5",
        "expect vfs_read == 0",
        "forbid vfs_open",
        "forbid vfs_read",
    ];
    let hits = |function, hits| Count { function, hits };
    let mut script = Script::new();
    script.0.counts(0, 0, &[hits(OPEN, 3), hits(READ, 0)]).unwrap();
    script.0.counts(1, 0, &[hits(OPEN, 2)]).unwrap();
    let outcomes = script.all().check(&rules);
    assert_eq!(letters(&outcomes), "ppfpfp");
    assert_eq!(outcomes[1].detail, "5 calls");
    // Three to five, as one of the three may be of the two.
    let rules = [
        "expect vfs_open >= 3",
        "expect vfs_open == 5",
        "expect vfs_open > 5",
        "expect vfs_open < 3",
        "forbid vfs_open",
    ];
    let mut script = Script::new();
    script.0.tracer(Tracer { number: 1, name: "counter", description: "" }).unwrap();
    script.0.counts(1, 1, &[hits(OPEN, 3)]).unwrap();
    let outcomes = script.call(0, 1, OPEN).call(0, 2, OPEN).all().check(&rules);
    assert_eq!(letters(&outcomes), "pufff");
    assert!(outcomes[1].detail.contains("several tracers recorded it"), "{:?}", outcomes[1]);
}

// That it was called is known, and not when: it may have been in order and in time.
#[test]
fn when_calls_were_that_were_counted_is_not_known() {
    let rules = [
        "order start < vfs_open",
        "order vfs_open < start",
        "within start -> vfs_open 1us",
        "max vfs_open 1us",
        "budget vfs_open 1us",
        "budget start 10us",
        "order start < vfs_read",
    ];
    let mut script = Script::new();
    script.0.counts(0, 0, &[Count { function: OPEN, hits: 3 }]).unwrap();
    script.call(0, 1, START).call(0, 100, READ);
    let outcomes = script.all().check(&rules);
    assert_eq!(letters(&outcomes), "uuuuupp");
    assert!(outcomes[0].detail.contains("calls of vfs_open were counted"), "{:?}", outcomes[0]);
}

// What does not exist is never called: a rule with a typing error would pass for ever.
#[test]
fn what_was_not_traced_is_undecided() {
    let rules = ["forbid panik", "forbid panic|panik", "expect typo == 0", "order start < typo"];
    let mut script = Script::new();
    assert_eq!(script.call(0, 1, START).all().verdicts(&rules), "uuuu");
    // But a call that was seen was seen.
    let mut script = Script::new();
    assert_eq!(script.call(0, 1, PANIC).all().verdicts(&rules), "ufuu");
    // An old stream does not say what was traced: only what was called is known to be.
    let rules = ["expect start", "expect start >= 2", "forbid never", "expect never == 0"];
    assert_eq!(Script::new().call(0, 1, START).verdicts(&rules), "pfuu");
    let outcome = &Script::new().check(&["forbid never"])[0];
    assert!(outcome.detail.contains("does not say which functions were traced"), "{outcome:?}");
}

#[test]
fn what_was_traced_for_a_part_of_the_time_may_have_been_called_in_the_rest() {
    let rules = ["forbid panic", "forbid never", "expect start", "expect start == 1"];
    let entries = TracedOf::Entries;
    let mut script = Script::new();
    script.call(0, 10, START).traced(0, u64::MAX, entries, &[PANIC]);
    script.traced(0, 20_000, entries, &[NEVER, START]);
    assert_eq!(script.verdicts(&rules), "pupu");
    // Again after a while, and at once.
    let mut script = Script::new();
    script.call(0, 10, START).traced(0, 20_000, entries, &[PANIC, NEVER, START]);
    script.traced(20_000, u64::MAX, entries, &[PANIC]);
    script.traced(21_000, u64::MAX, entries, &[NEVER, START]);
    assert_eq!(script.verdicts(&rules), "pupu");
}

// A loss may have been of anything, but what follows from the rest is certain.
#[test]
fn losses_leave_open_what_they_could_change() {
    let rules = [
        "expect start",
        "expect start == 1",
        "expect start <= 3",
        "expect start <= 4",
        "expect start >= 5",
        "expect start == 2",
        "forbid panic",
        "forbid start",
        "max never 5ms",
        "budget start 1us",
        "budget start 1ns",
    ];
    let mut script = Script::new();
    assert_eq!(script.call(0, 1, START).lose(0, 3).all().verdicts(&rules), "puupfuufupf");
    let mut script = Script::new();
    script.lose(1, 3).call(0, 1, START);
    assert_eq!(script.all().verdicts(&["budget start 1ns"]), "u");
}

#[test]
fn a_torn_stream_decides_only_what_was_seen() {
    let rules = ["expect start", "expect start == 1", "forbid panic", "forbid start"];
    let mut script = Script::new();
    let stream = script.call(0, 1, START).all().stream();
    assert_eq!(letters(&check(&stream, &rules)), "pppf");
    assert_eq!(letters(&check(&stream[..stream.len() - 1], &rules)), "puuf");
}

// Its first frames are the join's: what was before has been seen by others only.
#[test]
fn a_stream_that_was_joined_late_decides_only_what_was_seen() {
    let mut script = Script::new();
    script.call(0, 1, PANIC).call(0, 2, START);
    let mut stream = script.0.join().unwrap();
    let before = script.0.get_mut().len();
    let whole = script.call(0, 3, OPEN).all().stream();
    stream.extend_from_slice(&whole[before..]);
    let rules = ["expect vfs_open", "forbid panic", "order vfs_open < start"];
    assert_eq!(letters(&check(&stream, &rules)), "puu");
}

#[test]
fn first_calls_have_an_order() {
    let rules =
        ["order start < vfs_open < vfs_read", "order vfs_read < start", "order start < never"];
    let script = |parts: &[u32]| {
        let mut script = Script::new();
        for (at, part) in (1..).zip(parts) {
            match part {
                0 => script.lose(0, 1),
                function => script.call(0, at, *function),
            };
        }
        script.all();
        script
    };
    assert_eq!(script(&[START, OPEN, START, READ, OPEN]).verdicts(&rules), "pff");
    assert_eq!(script(&[START, READ, OPEN]).verdicts(&rules), "fff");
    // The missing record may have been an earlier call, or the one that is missing.
    assert_eq!(script(&[0, START, OPEN, READ]).verdicts(&rules), "uuu");
    assert_eq!(script(&[START, OPEN, READ, 0]).verdicts(&rules), "pfu");
}

#[test]
fn calls_take_no_longer_than_they_may() {
    let rule = &["max vfs_read 5us"];
    let check = |script: &mut Script| script.all().verdicts(rule);
    assert_eq!(check(&mut Script::new()), "p");
    let mut script = Script::new();
    assert_eq!(check(script.graph(1, Some(6), READ).graph(10, Some(12), READ)), "p");
    let mut script = Script::new();
    let outcomes = script.graph(1, Some(6), READ).graph(10, Some(17), READ).all().check(rule);
    assert_eq!(letters(&outcomes), "f");
    let detail = "1 call too long, 7.000 us: vfs_read, returned at 0.000017 s on CPU 0 by cat-7";
    assert_eq!(outcomes[0].detail, detail);
    // The guest stood still for vmtrace: too long by that alone may be long enough, and is no verdict.
    let stopped = |us: u64| {
        let mut script = Script::new();
        script.graph(10, Some(17), READ);
        let (ticks, kind, duration_ns) = (16_000, MarkKind::Pause, us * 1000);
        script.0.mark(&Mark { ticks, kind, duration_ns, text: "modules".into() }).unwrap();
        check(&mut script)
    };
    assert_eq!((stopped(1), stopped(2)), ("f".to_owned(), "u".to_owned()));
    // Its end was not seen: it took no longer than to the end of the trace.
    assert_eq!(check(Script::new().graph(1, None, READ).call(1, 6, START)), "p");
    assert_eq!(check(Script::new().graph(1, None, READ).call(1, 7, START)), "u");
    // What shows that it has ended may come late: another of this stack, and not what was before that.
    let mut script = Script::new();
    script.graph(1, None, READ).call(1, 3, START).graph(100, Some(101), READ);
    assert_eq!(check(&mut script), "u");
    let mut script = Script::new();
    let outcomes = script.graph(1, None, READ).graph(4, None, START).all().check(rule);
    assert_eq!((&*letters(&outcomes), &*outcomes[0].detail), ("p", "1 call, none too long"));
    // A loss makes a duration uncertain.
    let lossy = |end: u64| {
        let mut script = Script::new();
        script.graph(1, None, READ).lose(0, 1);
        let mut buffer = RecordBuffer::new();
        buffer.push_return(ReturnRecord::new(end * 1000, READ, 0, 7, STACK));
        script.0.records(0, &buffer).unwrap();
        check(&mut script)
    };
    assert_eq!(lossy(90), "u");
    assert_eq!(lossy(3), "u");
    // Without returns nobody knows.
    assert_eq!(check(Script::new().call(0, 1, READ)), "u");
    let mut script = Script::new();
    let verdicts = script.traced(0, u64::MAX, TracedOf::Entries, &[READ]).verdicts(rule);
    assert_eq!(verdicts, "u");
}

#[test]
fn one_call_follows_another_in_time() {
    let rule = &["within vfs_open -> vfs_read 5us"];
    let script = |parts: &[(u64, u32)]| {
        let mut script = Script::new();
        for &(at, function) in parts {
            match function {
                0 => script.lose(0, 1),
                _ => script.call(0, at, function),
            };
        }
        script.all().verdicts(rule)
    };
    assert_eq!(script(&[(1, OPEN), (2, START), (6, READ), (10, OPEN), (12, READ)]), "p");
    assert_eq!(script(&[(1, OPEN), (7, READ)]), "f");
    assert_eq!(script(&[(1, OPEN), (4, OPEN), (7, READ)]), "f");
    assert_eq!(script(&[(1, OPEN), (3, READ), (4, OPEN)]), "f");
    // What never happened was never in time.
    assert_eq!(script(&[(3, READ)]), "f");
    // The one that followed in time may have been lost; a loss after it changes nothing.
    assert_eq!(script(&[(1, OPEN), (2, 0), (7, READ)]), "u");
    assert_eq!(script(&[(1, OPEN), (7, READ), (8, 0)]), "f");
    assert_eq!(script(&[(1, OPEN), (3, READ), (8, 0)]), "u");
    // Of a function by itself: the next call.
    let mut script = Script::new();
    script.call(0, 1, OPEN).call(0, 4, OPEN).call(0, 20, OPEN).all();
    let outcomes = script.check(&["within vfs_open -> vfs_open 5us"]);
    assert!(outcomes[0].detail.contains("after 16.000 us"), "{outcomes:?}");
}

#[test]
fn boot_has_a_budget() {
    let rules = ["budget boot 2ms", "budget boot 1ms", "budget start 1ms"];
    let mut script = Script::new();
    script.call(0, 900, START).call(0, 1500, INIT).call(0, 2500, INIT);
    assert_eq!(script.all().verdicts(&rules), "pfp");
    let mut script = Script::new();
    script.call(0, 1900, START).console(1500, "[    1.2] Run /init as init process").all();
    assert_eq!(script.verdicts(&rules), "pff");
    // Neither is there: nobody knows.
    assert_eq!(Script::new().call(0, 900, START).all().verdicts(&rules), "uup");
}

// A function of two tracers is recorded for both.
#[test]
fn a_call_of_several_tracers_counts_once() {
    let mut script = Script::new();
    script.0.tracer(Tracer { number: 1, name: "other", description: "" }).unwrap();
    let entry = |at, tracer| EntryRecord::new(at, OPEN, 0, 7).of_tracer(tracer);
    script
        .0
        .entries(0, &[entry(5, 0), entry(5, 1), entry(6, 0), entry(6, 1), entry(9, 1)])
        .unwrap();
    assert_eq!(script.all().check(&["expect vfs_open == 3"])[0].detail.get(..7), Some("3 calls"));
}

fn outcomes() -> Vec<Outcome> {
    let outcome = |rule: &str, verdict, detail: &str| {
        let rule = Rule { place: Some(("a,b".into(), 3)), ..rule.parse().unwrap() };
        Outcome { rule, verdict, detail: detail.into() }
    };
    vec![
        outcome("expect a > 0", Verdict::Passed, "2 calls"),
        outcome("forbid b", Verdict::Failed, "50% of \"<&'\x1b>\n"),
        outcome("max a 5ms", Verdict::Undecided, "lost"),
    ]
}

fn written(format: Format) -> String {
    let mut out = Vec::new();
    write(&mut out, &outcomes(), format).unwrap();
    String::from_utf8(out).unwrap()
}

#[test]
fn results_have_formats() {
    let text = "\
ok    expect a > 0: 2 calls
FAIL  forbid b: 50% of \"<&'?>?
ERROR max a 5ms: lost
rules 3, passed 1, failed 1, undecided 1
";
    assert_eq!(written(Format::Text), text);
    let tap = "\
TAP version 14
1..3
ok 1 - expect a > 0
  ---
  message: '2 calls'
  severity: comment
  ...
not ok 2 - forbid b
  ---
  message: '50% of \"<&''?>?'
  severity: fail
  ...
not ok 3 - max a 5ms
  ---
  message: 'lost'
  severity: error
  ...
";
    assert_eq!(written(Format::Tap), tap);
    let github = "\
::error file=a%2Cb,line=3,title=vmtrace%3A rule failed::forbid b: 50%25 of \"<&'?>?
::error file=a%2Cb,line=3,title=vmtrace%3A rule cannot be decided::max a 5ms: lost
rules 3, passed 1, failed 1, undecided 1
";
    assert_eq!(written(Format::Github), github);
}

// As CI systems read it.
#[test]
fn junit_is_what_its_readers_expect() {
    let xml = written(Format::Junit);
    let report = quick_junit::Report::deserialize_from_str(&xml).unwrap();
    assert_eq!((report.tests, report.failures, report.errors), (3, 1, 1));
    let cases = &report.test_suites[0].test_cases;
    assert_eq!(cases[1].name.as_str(), "forbid b");
    assert!(xml.contains("50% of &quot;&lt;&amp;&apos;?&gt;?"), "{xml}");
}

// Of a file that is no trace, what was traced is not the question.
#[test]
fn of_what_cannot_be_read_no_reason_is_guessed() {
    let rules = ["forbid panic", "expect start", "max start 1us"].map(|rule| rule.parse().unwrap());
    for bytes in [&b""[..], b"hello"] {
        let mut player = Player::new(Check::new(rules.to_vec()));
        assert!(player.push(bytes).and_then(|()| player.finish().map(|_| ())).is_err());
        for outcome in player.into_export().finish(0) {
            assert_eq!(outcome.verdict, Verdict::Undecided, "{outcome:?}");
            assert_eq!(outcome.detail, "nothing of the trace could be read");
        }
    }
}
