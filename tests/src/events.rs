//! Events of tracepoints compared with the guest's own trace of them.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};

use flate2::Compression;
use flate2::read::DeflateDecoder;
use flate2::write::DeflateEncoder;
use vmtrace::export::{Player, Text};
use vmtrace::kernel::Kernel;
use vmtrace::stream::MarkKind;

use crate::asking::hash;
use crate::cases::{Guests, assert_whole, trouble, value};
use crate::trace::{Trace, arch_of, cmdline, kernel, missing};

/// Events that the workload brings about, which both sides print in the same words.
const EVENTS: [&str; 25] = [
    "sched:sched_switch",
    "sched:sched_waking",
    "sched:sched_wakeup",
    "sched:sched_wakeup_new",
    "sched:sched_migrate_task",
    "sched:sched_process_fork",
    "sched:sched_process_exec",
    "sched:sched_process_exit",
    "irq:softirq_entry",
    "irq:irq_handler_entry",
    "irq:irq_handler_exit",
    "signal:signal_generate",
    "signal:signal_deliver",
    "task:task_rename",
    "task:task_newtask",
    "timer:hrtimer_cancel",
    "timer:hrtimer_expire_entry",
    "timer:hrtimer_start",
    "timer:timer_cancel",
    "timer:timer_expire_entry",
    "timer:timer_start",
    "workqueue:workqueue_queue_work",
    "workqueue:workqueue_execute_start",
    "raw_syscalls:sys_enter",
    "raw_syscalls:sys_exit",
];
/// Of these there are some in any case.
const SURE: [&str; 15] = [
    "sched_switch",
    "sched_waking",
    "sched_wakeup",
    "sched_wakeup_new",
    "sched_migrate_task",
    "sched_process_fork",
    "sched_process_exec",
    "sched_process_exit",
    "softirq_entry",
    "signal_generate",
    "signal_deliver",
    "task_rename",
    "hrtimer_expire_entry",
    "sys_enter",
    "sys_exit",
];

/// These are told with interrupts off, so that all sides see them in one order. Elsewhere a task may be
/// preempted between one side's look and the other's (7.x: at system calls): there its own order counts.
const ORDERED: [&str; 6] = [
    "sched_switch",
    "sched_waking",
    "sched_wakeup",
    "sched_migrate_task",
    "irq_handler_entry",
    "irq_handler_exit",
];

/// Where the work is done: of one CPU the order is known.
const CPU: u32 = 1;

/// What a line says: who, in which state, which event, and its fields.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    cpu: u32,
    pub(crate) pid: u32,
    /// The columns of the context.
    state: String,
    pub(crate) name: String,
    pub(crate) text: String,
}

/// The ends of what is told in jiffies, which another CPU may count on between two sides' looks: by
/// event, what stands before each.
const JIFFIES: [(&str, &str); 2] = [("timer_start", "[timeout="), ("timer_expire_entry", " now=")];

impl Seen {
    /// Its text without what is told in jiffies, and that.
    fn split(&self) -> (String, Option<i64>) {
        let told = JIFFIES.iter().filter(|(name, _)| *name == self.name);
        let found = told.filter_map(|(_, before)| self.text.split_once(before)).next();
        let Some((front, rest)) = found else { return (self.text.clone(), None) };
        let end = rest.find([' ', ']']).unwrap_or(rest.len());
        (format!("{front}{}", &rest[end..]), Some(rest[..end].parse().expect("a number")))
    }

    fn says_the_same(&self, other: &Self) -> bool {
        let ((text, jiffies), (others, other)) = (self.split(), other.split());
        let near = match (jiffies, other) {
            (Some(ours), Some(theirs)) => ours.abs_diff(theirs) <= 1,
            (ours, theirs) => ours == theirs,
        };
        text == others && near
    }

    /// The columns but need-resched: another CPU may set that between two sides' looks.
    fn own_state(&self) -> impl Iterator<Item = char> {
        self.state.chars().enumerate().filter(|&(column, _)| column != 1).map(|(_, it)| it)
    }
}

impl PartialEq for Seen {
    fn eq(&self, other: &Self) -> bool {
        (self.cpu, self.pid, &self.name) == (other.cpu, other.pid, &other.name)
            && self.says_the_same(other)
            && self.own_state().eq(other.own_state())
    }
}

/// `COMM-PID [CPU] FLAGS TIME: NAME: FIELDS`.
fn seen(line: &str) -> Option<Seen> {
    let (front, rest) = line.split_once(" [")?;
    let (_, pid) = front.trim().rsplit_once('-')?;
    let (cpu, rest) = rest.split_once(']')?;
    let (state, rest) = rest.split_once(": ")?;
    // Alone before the time, where there is one.
    let state = state.trim().split_once(' ').map_or("", |(state, _)| state);
    let (name, text) = rest.split_once(": ")?;
    let (pid, cpu) = (pid.trim().parse().ok()?, cpu.parse().ok()?);
    let [state, name, text] = [state, name, text.trim_end()].map(str::to_owned);
    Some(Seen { cpu, pid, state, name, text })
}

/// How often a guest tells each piece: a message of its kernel may stand in the midst of one.
const TIMES: usize = 2;
/// Bytes of a piece.
const PIECE: usize = 100;

/// The lines in which a guest tells these of its own trace: packed, since a console is slow.
pub fn lines_to_tell(trace: &[&str]) -> Vec<String> {
    let told: String = trace
        .iter()
        .filter_map(|line| seen(line))
        .map(|Seen { pid, state, name, text, .. }| format!("{pid} {state} {name}: {text}\n"))
        .collect();
    let mut packed = DeflateEncoder::new(Vec::new(), Compression::best());
    packed.write_all(told.as_bytes()).expect("memory takes all");
    let packed = packed.finish().expect("memory takes all");
    let hex = |piece: &[u8]| piece.iter().map(|byte| format!("{byte:02x}")).collect();
    let pieces: Vec<String> = packed.chunks(PIECE).map(hex).collect();
    let line = |(number, text): (usize, &String)| {
        format!("{TOLD}{number} {} {:x} {text}", pieces.len(), short_hash(text))
    };
    let once: Vec<String> = pieces.iter().enumerate().map(line).collect();
    once.iter().cycle().take(once.len() * TIMES).cloned().collect()
}

/// What such a line begins with.
const TOLD: &str = "ge ";

fn short_hash(text: &str) -> u64 {
    hash([text]) >> 32
}

/// What the guest tells in such lines, of a CPU.
pub(crate) fn told(console: &str) -> Vec<Seen> {
    let mut found = BTreeMap::new();
    let mut total = 0;
    for line in console.lines().filter_map(|line| line.trim().strip_prefix(TOLD)) {
        let mut parts = line.splitn(4, ' ');
        let mut next = || parts.next().unwrap_or_default();
        let (number, all) = (next().parse::<usize>(), next().parse::<usize>());
        let (sum, text) = (next(), next());
        if let (Ok(number), Ok(all)) = (number, all)
            && sum == format!("{:x}", short_hash(text))
        {
            found.insert(number, text);
            total = all;
        }
    }
    let missing: Vec<usize> = (0..total).filter(|number| !found.contains_key(number)).collect();
    let of = |line: &&str| missing.iter().any(|number| line.contains(&format!("{TOLD}{number} ")));
    let torn: Vec<&str> = console.lines().filter(of).take(20).collect();
    assert!(total > 0 && missing.is_empty(), "torn each time: {missing:?} of {total}: {torn:#?}");
    let digits = found.into_values().flat_map(str::bytes).collect::<Vec<u8>>();
    let byte = |pair: &[u8; 2]| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap();
    let packed: Vec<u8> = digits.as_chunks().0.iter().map(byte).collect();
    let mut text = String::new();
    DeflateDecoder::new(&*packed).read_to_string(&mut text).expect("as it was packed");
    let line = |line: &str| {
        let (pid, line) = line.split_once(' ')?;
        let (state, line) = line.split_once(' ')?;
        let (name, text) = line.split_once(": ")?;
        let [state, name, text] = [state, name, text].map(str::to_owned);
        Some(Seen { cpu: CPU, pid: pid.parse().ok()?, state, name, text })
    };
    text.lines().map(|text| line(text).expect(text)).collect()
}

/// Marks in the trace: an event, and how its fields read.
pub(crate) type Mark = (&'static str, &'static str);

/// Both sides trace between these (`vmtrace-guest events`). The kernel tells of signals with
/// interrupts off; of a task's new name with interrupts on, so that an event of an interrupt may
/// come after one side's look at the mark and before the other's.
pub(crate) const BEGIN: Mark = ("signal_generate", "sig=23 ");
pub(crate) const END: Mark = ("signal_generate", "sig=28 ");
/// Here only vmtrace traces.
const ALONE_BEGIN: Mark = ("task_rename", "newcomm=alone-begin ");
const ALONE_END: Mark = ("task_rename", "newcomm=alone-end ");

/// An event, and the task, where the order is that of each task.
type Kind = (String, Option<u32>);

/// What is between two marks, with them, where they were made last.
pub(crate) fn section(all: &[Seen], begin: Mark, end: Mark) -> &[Seen] {
    let named = |seen: &Seen, (name, text): Mark| seen.name == name && seen.text.contains(text);
    let start = all.iter().rposition(|seen| named(seen, begin)).expect("it has begun");
    let stop = all.iter().rposition(|seen| named(seen, end)).expect("it has ended");
    &all[start..=stop]
}

/// The lines between two marks, where they were made last, by event: an interrupt may come between
/// one side's look at an event and the other's.
fn between(all: &[Seen], begin: Mark, end: Mark) -> BTreeMap<Kind, Vec<Seen>> {
    let mut found: BTreeMap<Kind, Vec<Seen>> = BTreeMap::new();
    for seen in section(all, begin, end).iter().filter(|seen| seen.cpu == CPU) {
        let task = (!ORDERED.contains(&&*seen.name)).then_some(seen.pid);
        found.entry((seen.name.clone(), task)).or_default().push(seen.clone());
    }
    found
}

/// Where two lists of one event part, with what stands around there.
fn difference(ours: &[Seen], theirs: &[Seen]) -> Option<String> {
    let same = ours.iter().zip(theirs).take_while(|(ours, theirs)| ours == theirs).count();
    if same == ours.len() && same == theirs.len() {
        return None;
    }
    let around = |all: &[Seen]| {
        let shown = all.iter().skip(same.saturating_sub(2)).take(6);
        let lines = shown.map(|Seen { pid, state, text, .. }| format!("    {pid}: {state} {text}"));
        lines.collect::<Vec<_>>().join("\n")
    };
    let name = ours.iter().chain(theirs).next().map_or("", |seen| &seen.name);
    let (ours_long, theirs_long) = (ours.len(), theirs.len());
    Some(format!(
        "{name}, from number {same}:\n  vmtrace, of {ours_long}:\n{}\n  the guest, of {theirs_long}:\n{}",
        around(ours),
        around(theirs)
    ))
}

/// All events of a trace as text.
pub(crate) fn lines(trace: &Trace) -> Vec<Seen> {
    let mut text = Vec::new();
    let mut player = Player::new(Text::new(&mut text));
    player.push(&trace.stream).unwrap();
    player.finish().unwrap();
    drop(player);
    let text = String::from_utf8(text).unwrap();
    text.lines().filter(|line| !line.starts_with('#')).filter_map(seen).collect()
}

/// The same; functions by their names, as `%ps` has them.
fn ours(kernel: &Kernel, trace: &Trace) -> Vec<Seen> {
    let named = |mut seen: Seen| {
        for before in ["function=", "function "] {
            let Some((front, rest)) = seen.text.split_once(&format!("{before}0x")) else {
                continue;
            };
            let end = rest.find(' ').unwrap_or(rest.len());
            let Ok(address) = u64::from_str_radix(&rest[..end], 16) else { continue };
            let link = address.wrapping_sub(trace.header.slide);
            if let Some(name) = kernel.symbols().primary_at(link) {
                seen.text = format!("{front}{before}{name}{}", &rest[end..]);
            }
        }
        seen
    };
    lines(trace).into_iter().map(named).collect()
}

impl Guests {
    /// A field that is not what the kernel itself says it is, is worse than none; and a guest that
    /// traces the same must not notice. Its events come and go beside ours, which go on alone.
    pub fn events_are_those_of_the_guests_own_trace(&self, name: &str) {
        let mut args: Vec<&str> = EVENTS.iter().flat_map(|event| ["--event", event]).collect();
        let cmdline = format!("{} no_hash_pointers", cmdline(arch_of(name).unwrap()));
        args.extend(["--cmdline", &cmdline, "--cpus", "2", "--context", "--overflow", "block"]);
        let own: Vec<String> = EVENTS.iter().map(|event| event.replace(':', "/")).collect();
        let (finished, trace) = self.run(name, &format!("events 1 {}", own.join(" ")), &args);
        let err = finished.err();
        assert_eq!(trouble(&err), None, "{name}");
        let summary = &trace.summary;
        assert_whole(name, summary, &err);

        let theirs = told(&err);
        let ours = ours(&kernel(name).unwrap(), &trace);
        let theirs = between(&theirs, BEGIN, END);
        let both = between(&ours, BEGIN, END);
        let has = |events: &BTreeMap<Kind, _>, name| events.keys().any(|(event, _)| event == name);
        for event in SURE {
            assert!(has(&theirs, event), "{name}: no {event} in {err}");
        }
        assert_eq!(both.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>(), "{name}");
        let differ = theirs.iter().filter_map(|(event, theirs)| difference(&both[event], theirs));
        let differ: Vec<String> = differ.collect();
        assert!(differ.is_empty(), "{name}:\n{}", differ.join("\n"));
        let pairs = theirs.iter().flat_map(|(event, theirs)| both[event].iter().zip(theirs));
        let (same, others): (Vec<_>, Vec<_>) =
            pairs.partition(|(ours, theirs)| ours.state == theirs.state);
        assert!(others.len() * 10 < same.len(), "{name}: need-resched differs: {others:?}");
        let states: BTreeSet<&str> = same.iter().map(|(ours, _)| &*ours.state).collect();
        eprintln!("{name}: {} in the same state, {} not: {states:?}", same.len(), others.len());
        // Interrupts on and off, inside of one, a switch that is due: not all the same.
        let shows = |column: usize, what: &str| {
            states.iter().any(|state| state.chars().nth(column).is_some_and(|it| what.contains(it)))
        };
        assert!(shows(0, "dD") && shows(0, ".b") && shows(2, "hH") && shows(2, "."), "{states:?}");
        assert!(shows(1, "nNlLbBp") && shows(1, "."), "{name}: {states:?}");
        let alone = between(&ours, ALONE_BEGIN, ALONE_END);
        for event in SURE {
            assert!(has(&alone, event), "{name}: no {event} without the guest's own");
        }
        // It was asked to let go, and has taken them again.
        let again = format!("the guest has changed tracepoints: {} traced again", EVENTS.len());
        let notes = trace.marks(MarkKind::Note).unwrap();
        let times = notes.iter().filter(|note| **note == again).count();
        assert!(times >= 2 * EVENTS.len(), "{name}: {times} of {notes:?}");
    }

    /// Who asks for one system call gets that one, and what the kernel calls it; of some by the
    /// program, of many by the relay.
    pub fn system_calls_are_told_apart(&self, name: &str) {
        const CALLS: usize = 5000;
        let args = ["--event", "syscalls:sys_enter_getppid", "--event", "syscalls:sys_exit_*"];
        let (finished, trace) = self.run(name, &format!("getppid {CALLS} 0"), &args);
        let err = finished.err();
        assert_eq!(trouble(&err), None, "{name}");
        let summary = &trace.summary;
        let notes = summary.notes.iter().filter(|note| !note.contains("no program can make"));
        assert_eq!((missing(summary), notes.count()), (0, 0), "{name}: {err}");
        let pid = value(&finished, "pid ");
        let all = ours(&kernel(name).unwrap(), &trace);
        let names: BTreeSet<&str> = all.iter().map(|seen| &*seen.name).collect();
        let begun: Vec<&&str> = names.iter().filter(|name| name.starts_with("sys_enter")).collect();
        assert_eq!(begun, [&"sys_enter_getppid"], "{name}");
        for call in ["execve", "openat", "close", "write", "exit_group", "getppid"] {
            // What ends a task has no end.
            let ends = names.contains(&*format!("sys_exit_{call}"));
            assert_eq!(ends, call != "exit_group", "{name}: {call} of {names:?}");
        }
        let own: Vec<&Seen> = all.iter().filter(|seen| seen.pid == pid).collect();
        let first = own.iter().position(|seen| seen.name == "sys_enter_getppid").unwrap();
        let (pairs, rest) = own[first..first + 2 * CALLS].as_chunks::<2>();
        let parent = &own[first + 1].text;
        assert!(rest.is_empty() && parent.starts_with("0x"), "{name}: {parent}");
        for [enter, exit] in pairs {
            assert_eq!((&*enter.name, &*enter.text), ("sys_enter_getppid", ""), "{name}");
            assert_eq!((&*exit.name, &exit.text), ("sys_exit_getppid", parent), "{name}");
        }
        let more = own[first + 2 * CALLS..].iter().any(|seen| seen.name.ends_with("_getppid"));
        assert!(!more, "{name}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // A kernel preempts a task between two looks at its system call; what a test says of a difference
    // is all that is left of a run in CI.
    #[test]
    fn the_order_of_tasks_counts_where_interrupts_are_off_alone() {
        let seen = |name: &str, pid| Seen {
            cpu: CPU,
            pid,
            state: "d..1.".to_owned(),
            name: name.to_owned(),
            text: "sig=1 ".to_owned(),
        };
        const MARK: Mark = ("mark", "sig=1 ");
        let all = |name, pids: [u32; 3]| {
            let inner = pids.map(|pid| seen(name, pid));
            between(&[&[seen("mark", 1)][..], &inner].concat(), MARK, (name, "sig=1 "))
        };
        assert_eq!(all("sys_enter", [1, 2, 1]), all("sys_enter", [2, 1, 1]));
        assert_ne!(all("sys_enter", [1, 2, 1]), all("sys_enter", [2, 2, 1]));
        assert_ne!(all("sched_switch", [1, 2, 1]), all("sched_switch", [2, 1, 1]));
        let [a, b] = [[1, 2], [1, 3]].map(|pids| pids.map(|pid| seen("a", pid)));
        assert_eq!(difference(&a, &a), None);
        let told = difference(&a, &b).unwrap();
        assert!(
            told.starts_with("a, from number 1:") && told.ends_with("    3: d..1. sig=1 "),
            "{told}"
        );
        assert!(difference(&a, &a[..1]).is_some() && difference(&a[..1], &a).is_some());
    }

    // Another CPU asks for a switch at any time; all else is of the call alone.
    #[test]
    fn a_state_is_compared_but_for_what_another_cpu_does() {
        let line = |state: &str| seen(&format!("x-1 [001] {state} 1.5: a: 1")).unwrap();
        assert_eq!((line("d..2.").state, line("").state), ("d..2.".to_owned(), String::new()));
        assert_eq!(line("d..2."), line("dN.2."));
        assert_ne!(line("d..2."), line("d..1."));
        assert_ne!(line("d..2."), line("...2."));
        assert_ne!(line("d..2."), line("d.h2."));
        assert_ne!(line("d..2."), line("d..21"));
    }

    // A tick between two looks is no other timer, and no other time of one.
    #[test]
    fn jiffies_may_be_one_more() {
        let line = |text: &str| seen(&format!("x-1 [001] ..... 1.5: {text}")).unwrap();
        let start = |timer, timeout, cpu| {
            line(&format!("timer_start: timer={timer} expires=9 [timeout={timeout}] cpu={cpu}"))
        };
        assert_eq!(start(1, 7, 0), start(1, 6, 0));
        assert_ne!(start(1, 7, 0), start(1, 5, 0));
        assert_ne!(start(1, 7, 0), start(2, 7, 0));
        assert_ne!(start(1, 7, 0), start(1, 7, 1));
        let [end, next, other] =
            [4, 5, 5].map(|now| line(&format!("timer_expire_entry: timer=1 now={now} baseclk=4")));
        assert_eq!((&end, &next), (&next, &other));
        assert_ne!(line("timer_expire_entry: timer=1 baseclk=4"), end);
        // The clock of others is that of the call.
        let high = |now| line(&format!("hrtimer_expire_entry: hrtimer=1 now={now}"));
        assert_ne!(high(4), high(5));
    }

    // A test must not fail because a kernel had something to say, nor pass with a line less.
    #[test]
    fn torn_lines_are_not_believed() {
        // What cannot be packed well makes several pieces.
        let long: String = (0..40).map(|n| format!("{:x}", hash([&*n.to_string()]))).collect();
        let trace = [
            format!("x-1 [001] ..... 1.5: a: {long}"),
            "x y-2 [001] d..2. 2.0: b: c: 2".to_owned(),
            "x-1 [001] ..... 3.0: c: d".to_owned(),
        ];
        let lines = lines_to_tell(&trace.each_ref().map(String::as_str));
        let (first, second) = lines.split_at(lines.len() / TIMES);
        assert!(first == second && first.len() > 2, "{lines:?}");
        let torn: Vec<String> = first
            .iter()
            .map(|line| {
                let (front, rest) = line.split_at(line.len() / 2);
                format!("{front}[   69.488142] watchdog\r\n {rest}")
            })
            .collect();
        let console = |lines: &[&String]| {
            lines.iter().map(|line| line.as_str()).collect::<Vec<_>>().join("\r\n")
        };
        let seen = |pid, state: &str, name: &str, text: &str| {
            let [state, name, text] = [state, name, text].map(str::to_owned);
            Seen { cpu: CPU, pid, state, name, text }
        };
        let all = [
            seen(1, ".....", "a", &long),
            seen(2, "d..2.", "b", "c: 2"),
            seen(1, ".....", "c", "d"),
        ];
        let others: Vec<&String> = first[2..].iter().collect();
        let more = "more".to_owned();
        let told_by = |lines: &[&String]| told(&console(&[lines, &others].concat()));
        assert_eq!(told_by(&[&first[0], &torn[1], &more, &first[0], &first[1]]), all);
        let lost = std::panic::catch_unwind(|| told_by(&[&first[0], &torn[1], &first[0]]).len());
        assert!(lost.is_err());
    }
}
