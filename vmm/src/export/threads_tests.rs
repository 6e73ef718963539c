//! What two threads show of calls, and what is shown without looking at them.

use std::io;

use proptest::collection::vec;
use proptest::prelude::*;

use crate::stream::{
    Context, EntryRecord, EventRecord, Header, LossReason, Mark, MarkKind, ReturnRecord, Shape,
    Stretch, Summary, Symbol, TailRecord, Task, Tracer, ValueField, ValuesFormat, ValuesOf, sample,
};

use super::graph_tests::{
    EXT4_READ, LOCK, OTHER, STACK, Script, TIMER, UNTRACED, VFS_READ, calls, ends,
};
use super::{Called, Event, Export, Graph, Json, Name, Player, SortedBy, Stats, Text};

/// Makes an export.
type Make = for<'a> fn(&'a mut Vec<u8>) -> Box<dyn Export + 'a>;

const OF_CALLS: [Make; 2] = [|out| Box::new(Json::new(out)), |out| Box::new(Graph::new(out))];
const OF_ENTRIES: [Make; 2] = [|out| Box::new(Text::new(out)), |out| Box::new(Stats::new(out))];

/// Ways to ask for less.
const OPTIONS: usize = 8;
/// Those with which nothing may depend on calls, and one of the others.
const IDLE: [usize; 4] = [0, 1, 5, 2];

fn with<E: Export>(player: Player<E>, option: usize) -> Player<E> {
    match option {
        0 => player,
        1 => player.with_filter(|name, _| name.ends_with("read")),
        2 => player.with_roots(|name, module| name == "vfs_read" || module == Some("m")),
        3 => player.with_max_depth(1),
        4 => player.with_min_duration(3000),
        5 => player.with_tracer("second".into()),
        6 => player.with_filter(|name, _| name != "lock").with_roots(|name, _| name == "vfs_read"),
        _ => player.with_max_depth(2).with_min_duration(2000).with_filter(|name, _| name != "lock"),
    }
}

/// All that a player tells.
#[derive(Debug, PartialEq)]
struct Told {
    out: String,
    error: Option<String>,
    evicted: u64,
    has_calls: bool,
    late: u64,
    has_tracer: bool,
}

/// Plays a stream with one thread, or with two.
fn played(mut stream: &[u8], option: usize, make: Make, two: bool) -> Told {
    let mut out = Vec::new();
    let mut player = with(Player::new(make(&mut out)), option);
    let done = if two { player.play_file(&mut stream) } else { player.play(&mut stream) };
    let told = Told {
        out: String::new(),
        error: done.err().map(|error| error.to_string()),
        evicted: player.evicted(),
        has_calls: player.has_calls(),
        late: player.late(),
        has_tracer: player.check_tracer().is_ok(),
    };
    drop(player);
    Told { out: String::from_utf8(out).expect("UTF-8"), ..told }
}

/// Two threads tell what one does, whatever is asked for.
fn check_threads(stream: &[u8]) {
    for option in 0..OPTIONS {
        for make in OF_CALLS {
            let [one, two] = [false, true].map(|two| played(stream, option, make, two));
            assert_eq!(two, one, "option {option}");
        }
    }
}

/// Looks at calls.
struct Looking<'a>(Box<dyn Export + 'a>);

impl Export for Looking<'_> {
    fn begin(&mut self, header: &Header) -> io::Result<()> {
        self.0.begin(header)
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        self.0.event(event)
    }

    fn traced(
        &mut self,
        stretch: &Stretch,
        functions: &mut dyn Iterator<Item = Name<'_>>,
    ) -> io::Result<()> {
        self.0.traced(stretch, functions)
    }

    fn counts(
        &mut self,
        vcpu: u32,
        tracer: Option<&str>,
        hits: &mut dyn Iterator<Item = (Name<'_>, u64)>,
    ) -> io::Result<()> {
        self.0.counts(vcpu, tracer, hits)
    }

    fn callers(
        &mut self,
        vcpu: u32,
        tracer: Option<&str>,
        hits: &mut dyn Iterator<Item = Called<'_>>,
    ) -> io::Result<()> {
        self.0.callers(vcpu, tracer, hits)
    }

    fn sorted(
        &mut self,
        by: &SortedBy<'_>,
        words: &mut dyn Iterator<Item = (Name<'_>, u8, u64)>,
    ) -> io::Result<()> {
        self.0.sorted(by, words)
    }

    fn joined(&mut self, totals: &[(u64, u64)]) -> io::Result<()> {
        self.0.joined(totals)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }

    fn end(&mut self, summary: Option<&Summary>) -> io::Result<()> {
        self.0.end(summary)
    }

    fn notes(&self) -> Vec<String> {
        self.0.notes()
    }
}

/// Who does not look at calls shows what it would show if it did, but for a line that comes with a return: one that is
/// shown may be found to be none.
fn check_idle(stream: &[u8]) {
    let looking: [Make; 2] =
        [|out| Box::new(Looking(OF_ENTRIES[0](out))), |out| Box::new(Looking(OF_ENTRIES[1](out)))];
    for option in IDLE {
        for (make, looking) in OF_ENTRIES.into_iter().zip(looking) {
            let of = |make, two| {
                let mut told = played(stream, option, make, two);
                // Nothing is given up where nothing is paired.
                told.evicted = 0;
                let lines = told.out.lines().filter(|line| !line.contains("returns are not"));
                told.out = lines.collect::<Vec<_>>().join("\n");
                told
            };
            let expected = of(looking, false);
            for two in [false, true] {
                assert_eq!(of(make, two), expected, "option {option}, two threads: {two}");
            }
        }
    }
}

/// Makes a stream of what comes out of a machine, whose records come late now and then.
struct Machine {
    script: Script,
    /// In microseconds.
    now: u64,
    /// Open calls of each task: functions and stack pointers.
    stacks: [Vec<(u32, u64)>; 3],
    /// What runs on each vCPU.
    tasks: [usize; 2],
    names: u32,
}

/// The last has no name at first.
const FUNCTIONS: [u32; 4] = [VFS_READ, EXT4_READ, LOCK, UNTRACED + 64];

impl Machine {
    fn new() -> Self {
        let mut script = Script::new();
        let format = |function, of, tracer| {
            let value = |name: &str| ValueField { name: name.into(), shape: Shape::Pointer };
            let values = vec![value("one"), value("two")];
            ValuesFormat { function, tracer, of, values, print: None }
        };
        for of in [ValuesOf::Entry, ValuesOf::Return, ValuesOf::Event] {
            let mut format = format(EXT4_READ, of, 0);
            if of == ValuesOf::Return {
                format.values.truncate(1);
            }
            script.writer.values(&format).expect("room");
        }
        Self { script, now: 1, stacks: Default::default(), tasks: [0, 1], names: 0 }
    }

    fn name(&mut self, choice: u32) {
        self.names += 1;
        let name = format!("name{}", self.names);
        let writer = &mut self.script.writer;
        match choice % 6 {
            0..=2 => {
                writer.task(Task::new(7 + choice / 6 % 3, 7, name.as_bytes())).expect("memory");
            }
            3 => {
                let address = writer.header().address(UNTRACED + choice / 6 % 2 * 64);
                let symbol = Symbol { address, size: 64, name: &name, module: "m" };
                writer.symbols([symbol]).expect("room");
            }
            4 => {
                // One that is known is told again, with another name.
                let address = writer.header().address(LOCK);
                let names = ["lock", "vfs_read", "locked"];
                let name = names[(choice / 6 % 3) as usize];
                writer.symbols([Symbol { address, size: 64, name, module: "" }]).expect("room");
            }
            _ => {
                let name = ["second", "first", &name][(choice / 18 % 3) as usize];
                let number = u8::try_from(choice / 6 % 3).expect("small");
                writer.tracer(Tracer { number, name, description: "" }).expect("memory");
            }
        }
    }

    fn mark(&mut self, choice: u32) {
        let (kind, text) = match choice % 8 {
            0 => (MarkKind::Attach, ""),
            1 => (MarkKind::Filter, "others"),
            2 => (MarkKind::Filter, "module m loaded"),
            3 => (MarkKind::Pause, "tracing paused: 1 site"),
            _ => (MarkKind::Note, "note"),
        };
        let (ticks, text) = (self.now * 1000, text.into());
        self.script.writer.mark(&Mark { ticks, kind, duration_ns: 0, text }).expect("memory");
    }

    /// Something happens that depends on the stack of a task.
    fn call(&mut self, choice: u32, tracer: u8, task: usize) {
        let (pid, base) = (self.script.pid, [STACK, OTHER, OTHER + 0x8000][task] + 0x3f00);
        let (stack, buffer) = (&mut self.stacks[task], &mut self.script.buffer);
        let (at, function) = (self.now * 1000, FUNCTIONS[(choice / 32 % 4) as usize]);
        let top = stack.last().map_or(base, |(_, sp)| *sp);
        let below = (top - 16 - u64::from(choice / 128 % 3) * 16).max(base - 0x3000);
        let open = stack.last().copied().unwrap_or((function, top));
        let entry = EntryRecord::new(at, function, VFS_READ + 5, pid);
        let ret = |(function, sp)| {
            ReturnRecord::new(at, function, VFS_READ + 5, pid, sp).of_tracer(tracer)
        };
        let tail = |target| TailRecord::new(at, open.0, target, pid, open.1).of_tracer(tracer);
        match choice % 32 {
            0..=8 => {
                buffer.push_frame(entry.with_sp(below).of_tracer(tracer));
                stack.push((function, below));
            }
            9 => {
                let words = [u64::from(choice), 2];
                buffer.push_values(entry, Some(below), u64::from(choice / 512 % 4), words);
                stack.push((function, below));
            }
            10..=15 => {
                buffer.push_return(ret(open));
                stack.pop();
            }
            16 | 17 => {
                buffer.push_return_value(ret(open).with_value(choice.into()));
                stack.pop();
            }
            18 => {
                buffer.push_return(ret((UNTRACED, open.1)).of_aid());
                stack.pop();
            }
            19 | 20 => {
                buffer.push_tail(tail(function));
                // What it jumps to may be seen.
                if (choice / 512).is_multiple_of(2) && stack.pop().is_some() {
                    stack.push((function, open.1));
                    self.now += 1;
                    let entry = EntryRecord::new(self.now * 1000, function, VFS_READ + 5, pid);
                    buffer.push_frame(entry.with_sp(open.1).of_tracer(tracer));
                }
            }
            21 => {
                buffer.push_tail(tail(if (choice / 512).is_multiple_of(2) { 0 } else { UNTRACED }));
            }
            22 => {
                buffer.push_tail(tail(function).and_last());
                stack.pop();
            }
            23 => {
                buffer.push_return(ret((function, below)));
                buffer.with_duration(u64::from(choice / 512 % 8) * 1000);
            }
            24 => {
                buffer.push_return_value(ret((function, below)).with_value(choice.into()));
                buffer.with_duration(u64::from(choice / 512 % 8) * 1000);
            }
            25 => {
                buffer.push_tail(TailRecord::new(at, function, LOCK, pid, below));
                buffer.with_duration(u64::from(choice / 512 % 8) * 1000);
            }
            26 => buffer.push(entry),
            27 => buffer.push_values(entry, None, 0, [1, choice.into()]),
            28 => buffer.push_event(EventRecord::new(at, EXT4_READ, LOCK, pid), 1, [3, 4]),
            29 => buffer.push_any(&EventRecord::new(at, TIMER, 0, pid)),
            30 => {
                buffer.push_frame(entry.with_sp(below).of_tracer(tracer));
                buffer.with_context(Context {
                    flags: 1,
                    depths: u8::try_from(choice >> 24).unwrap_or(0),
                });
                stack.push((function, below));
            }
            // It ends unseen.
            _ => drop(stack.pop()),
        }
    }

    fn step(&mut self, choice: u32) {
        self.now += 1 + u64::from(choice >> 28) / 4;
        let (vcpu, rest) = ((choice % 2) as usize, choice / 2);
        let (what, rest) = (rest % 32, rest / 32);
        let number = u32::from(vcpu == 1);
        match what {
            0 => self.name(rest),
            1 if rest.is_multiple_of(2) => self.mark(rest / 2),
            2 if rest.is_multiple_of(2) => {
                self.script.writer.loss(number, 1, LossReason::Full).expect("vCPU");
            }
            3 => {
                let next = (rest % 3) as usize;
                if !self.tasks.contains(&next) {
                    self.tasks[vcpu] = next;
                }
            }
            4 if rest.is_multiple_of(3) => {
                // Some come behind it.
                let until = self.now.saturating_sub(20) * 1000;
                self.script.writer.tell_watermark(until).expect("memory");
            }
            _ => {
                let (task, tracer) = (self.tasks[vcpu], u8::from(what == 5));
                self.script.on(number, 7 + u32::try_from(task).expect("small"));
                self.call(rest, tracer, task);
                self.script.write();
            }
        }
    }
}

/// A stream of a machine, which has ended unless it is cut off.
fn machine(choices: Vec<u32>, cut: Option<usize>) -> Vec<u8> {
    let mut machine = Machine::new();
    choices.into_iter().for_each(|choice| machine.step(choice));
    let mut stream = machine.script.end();
    if let Some(cut) = cut {
        stream.truncate(stream.len() - cut % stream.len());
    }
    stream
}

/// A record without a stack pointer ends a gap: a later call on another vCPU has a duration.
fn gap() -> Vec<u8> {
    let mut script = Script::new();
    let plain = |at: u64| EntryRecord::new(at * 1000, LOCK, VFS_READ, 7);
    script.buffer.push(plain(1));
    script.write().writer.loss(0, 3, LossReason::Full).expect("vCPU");
    script.buffer.push(plain(3));
    script.write().on(1, 8).enter(5, VFS_READ, STACK).enter(6, TIMER, OTHER);
    script.leave(7, TIMER, OTHER).leave(9, VFS_READ, STACK);
    script.end()
}

/// Functions get their names when calls of them wait.
fn late_names() -> Vec<u8> {
    let mut script = Script::new();
    let function = UNTRACED + 64;
    for (at, name) in [(10, "late"), (20, "later")] {
        script.enter(at, function, STACK).jump(at + 1, LOCK, function, STACK);
        script.leave(at + 2, function, STACK);
        let address = script.writer.header().address(function);
        script.writer.symbols([Symbol { address, size: 64, name, module: "m" }]).expect("room");
    }
    script.enter(30, function, STACK);
    script.end()
}

fn samples() -> [Vec<u8>; 7] {
    let [stream, values, counts] = [sample::stream(), sample::values(), sample::counts()];
    [stream, values, counts, calls(), ends(), gap(), late_names()]
}

// What a record turns out to be is found by one thread and told by the other: what the second one does not know is a
// wrong depth, a missing value or a call that is not there.
#[test]
fn two_threads_tell_what_one_tells_of_calls() {
    assert!(played(&gap(), 0, OF_CALLS[0], true).out.contains("\"duration_ns\":4000"));
    assert!(played(&late_names(), 0, OF_CALLS[0], true).out.contains("\"function\":\"late\""));
    for stream in samples() {
        check_threads(&stream);
        // Cut off, with another end for each.
        for end in (0..stream.len()).step_by(97) {
            check_threads(&stream[..end]);
        }
    }
}

// It is what makes text and statistics fast: entries that are shown must not depend on it.
#[test]
fn entries_are_the_same_if_nobody_looks_at_calls() {
    samples().iter().for_each(|stream| check_idle(stream));
}

// So many stacks are open that some are given up: in the middle of what is handed over, and more than that.
#[test]
fn two_threads_give_up_the_same_calls() {
    let mut script = Script::new();
    for number in 0..70_000u32 {
        let entry = EntryRecord::new(u64::from(number) * 10, LOCK, VFS_READ, 7);
        script.buffer.push_frame(entry.with_sp(u64::from(number) << 14));
        if number.is_multiple_of(1000) {
            script.write();
        }
    }
    script.write();
    let stream = script.end();
    let [one, two] = [false, true].map(|two| played(&stream, 0, OF_CALLS[0], two));
    assert!(one.evicted > 1000, "{}", one.evicted);
    assert!(two == one, "{} of {} given up", two.evicted, one.evicted);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    // The same, whatever happens.
    #[test]
    fn two_threads_tell_the_same_of_any_calls(
        choices in vec(any::<u32>(), 0..250),
        cut in proptest::option::weighted(0.2, 0..1000usize),
    ) {
        check_threads(&machine(choices, cut));
    }

    // The same, whatever happens.
    #[test]
    fn entries_are_the_same_if_nobody_looks_at_any_calls(choices in vec(any::<u32>(), 0..250)) {
        check_idle(&machine(choices, None));
    }
}
