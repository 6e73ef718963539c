//! Waits made in memory, and the reports on them.

use crate::analyze::Analysis as _;
use crate::export::Player;
use crate::stream::{
    Context, EntryRecord, EventRecord, ExitDir, ExitReason, Header, HostExit, LossReason, Mark,
    MarkKind, RecordBuffer, Shape, Summary, Symbol, Task, ValueField, ValuesFormat, ValuesOf,
    Writer,
};

use super::{Kind, Latency, Report};

mod live;
mod seconds;

const WAKING: u32 = 0x8100_0000;
const SWITCH: u32 = 0x8100_0100;
/// Events whose one field is a number.
const NUMBERED: [(&str, &str); 10] = [
    ("preemptirq:irq_disable", "caller"),
    ("preemptirq:irq_enable", "caller"),
    ("preemptirq:preempt_disable", "caller"),
    ("preemptirq:preempt_enable", "caller"),
    ("power:cpu_idle", "state"),
    ("irq_vectors:local_timer_entry", "vector"),
    ("irq_vectors:local_timer_exit", "vector"),
    ("irq:softirq_entry", "vec"),
    ("irq:softirq_exit", "vec"),
    ("nmi:nmi_handler", "delta_ns"),
];
const FUNCTION: u32 = 0x8100_0200;
const VECTOR: u32 = 0x8100_0300;
/// The same of riscv64, whatever comes.
const TRAP: u32 = 0x8100_0400;
/// How the kernel prints them, shortened.
const SOFTIRQ: &str = "vec={vec} [action={vec:names 0=HI,1=TIMER}]";
const OFF: u8 = Context::IRQS_OFF;

/// Two vCPUs; times are in microseconds.
struct Script(Writer<Vec<u8>>);

impl Script {
    fn new() -> Self {
        let header = Header {
            release: "6.12.0".into(),
            clock_hz: 1_000_000_000,
            vcpus: 2,
            address_base: Header::TOP_4_GIB,
            extra: vec![Context::header()],
            ..Header::default()
        };
        let mut writer = Writer::new(Vec::new(), &header).expect("header");
        let number =
            |name: &str| ValueField { name: name.into(), shape: Shape::Signed { bytes: 4 } };
        let comm = |name: &str| ValueField { name: name.into(), shape: Shape::Text { bytes: 16 } };
        let events = [
            (WAKING, "sched:sched_waking", vec![comm("comm"), number("pid"), number("prio")]),
            (
                SWITCH,
                "sched:sched_switch",
                vec![
                    comm("next_comm"),
                    number("next_pid"),
                    number("next_prio"),
                    number("prev_pid"),
                    number("prev_state"),
                ],
            ),
        ];
        let numbered = (1..).zip(NUMBERED);
        let numbered = numbered
            .map(|(place, (name, field))| (SWITCH + 0x1000 * place, name, vec![number(field)]));
        for (tracepoint, name, values) in events.into_iter().chain(numbered) {
            writer.symbols([Symbol::new(header.address(tracepoint), 64, name)]).expect("room");
            let format = ValuesFormat {
                function: tracepoint,
                tracer: 0,
                of: ValuesOf::Event,
                values,
                print: name.contains("softirq").then(|| SOFTIRQ.into()),
            };
            writer.values(&format).expect("room");
        }
        writer.symbols([Symbol::new(header.address(FUNCTION), 64, "vfs_read")]).expect("room");
        for (at, name) in [(VECTOR, "asm_timer"), (TRAP, "handle_exception")] {
            writer.symbols([Symbol::new(header.address(at), 64, name)]).expect("room");
        }
        for (pid, comm) in [(0, "idle"), (1, "init"), (7, "cat")] {
            writer.task(Task::new(pid, pid, comm.as_bytes())).expect("room");
        }
        Self(writer)
    }

    fn event(&mut self, of: (u32, u64, u32, u32), words: impl Iterator<Item = u64>) {
        self.event_at(of, 0, words);
    }

    /// In a function.
    fn event_at(
        &mut self,
        (tracepoint, us, cpu, pid): (u32, u64, u32, u32),
        caller: u32,
        words: impl Iterator<Item = u64>,
    ) {
        let mut buffer = RecordBuffer::new();
        buffer.push_event(EventRecord::new(us * 1000, tracepoint, caller, pid), 0, words);
        buffer.with_context(Context::new(OFF, 2, 0));
        self.0.records(cpu, &buffer).expect("vCPU");
    }

    fn waking(&mut self, us: u64, cpu: u32, (comm, pid, prio): (&str, u64, u64)) {
        self.event((WAKING, us, cpu, 1), text_words(comm).into_iter().chain([pid, prio]));
    }

    fn switch(&mut self, us: u64, cpu: u32, task: (&str, u64, u64)) {
        self.switch_from((1, 1), us, cpu, task);
    }

    /// From a task in a state.
    fn switch_from(
        &mut self,
        (prev, state): (u32, u64),
        us: u64,
        cpu: u32,
        (comm, pid, prio): (&str, u64, u64),
    ) {
        let words = text_words(comm).into_iter().chain([pid, prio, prev.into(), state]);
        self.event((SWITCH, us, cpu, prev), words);
    }

    /// One of those with a number, on vCPU 0, in a task.
    fn tell(&mut self, us: u64, pid: u32, name: &str, value: u64) {
        self.tell_at(us, pid, name, (value, 0));
    }

    fn tell_at(&mut self, us: u64, pid: u32, name: &str, (value, caller): (u64, u32)) {
        let is_it = |(full, _): &(&str, &str)| full.split(':').nth(1) == Some(name);
        let place = NUMBERED.iter().position(is_it).expect("one of them") + 1;
        let tracepoint = SWITCH + 0x1000 * u32::try_from(place).expect("few");
        self.event_at((tracepoint, us, 0, pid), caller, [value].into_iter());
    }

    /// A function that is entered on vCPU 0, and the state that it is in.
    fn entry(&mut self, us: u64, (flags, preemption): (u8, u8)) {
        let mut buffer = RecordBuffer::new();
        buffer.push(EntryRecord::new(us * 1000, FUNCTION, 0, 7));
        buffer.with_context(Context::new(flags, preemption, 0));
        self.0.records(0, &buffer).expect("vCPU");
    }

    fn mark(&mut self, us: u64, kind: MarkKind, took_us: u64, text: &str) {
        let (ticks, duration_ns, text) = (us * 1000, took_us * 1000, text.to_owned());
        self.0.mark(&Mark { ticks, kind, duration_ns, text }).expect("memory");
    }

    /// A pause of all vCPUs that ends then.
    fn paused(&mut self, us: u64, took_us: u64) {
        self.mark(us, MarkKind::Pause, took_us, "2 sites");
    }

    /// Other events are traced from then on.
    fn events(&mut self, us: u64, text: &str) {
        self.mark(us, MarkKind::Events, 0, text);
    }

    /// An exit of a vCPU that ends then.
    fn exit(&mut self, us: u64, cpu: u32, took_us: u64) {
        let (reason, dir, ticks) = (ExitReason::Io, ExitDir::Out, us * 1000);
        let exit = HostExit { ticks, duration_ns: took_us * 1000, reason, dir, address: 0x3f8 };
        let (symbol, format) = HostExit::told(Header::TOP_4_GIB);
        self.0.symbols([symbol]).expect("room");
        self.0.values(&format).expect("room");
        let mut buffer = RecordBuffer::new();
        exit.write(&mut buffer, ticks);
        self.0.records(cpu, &buffer).expect("vCPU");
    }

    fn report(mut self, kind: Kind, over: Option<u64>) -> Report {
        self.0.end(&Summary::default()).expect("memory");
        let stream = self.0.into_inner().expect("memory");
        let mut player = Player::new(Latency::new(kind, over));
        player.push(&stream).expect("whole");
        player.finish().expect("whole");
        let late = player.late();
        player.into_export().finish(late)
    }
}

fn text_words(comm: &str) -> [u64; 2] {
    let mut text = [0; 16];
    text[..comm.len()].copy_from_slice(comm.as_bytes());
    let (words, _) = text.as_chunks::<8>();
    [u64::from_le_bytes(words[0]), u64::from_le_bytes(words[1])]
}

fn text(report: &Report) -> String {
    let mut page = Vec::new();
    report.write_text(&mut page).expect("memory");
    String::from_utf8(page).expect("UTF-8")
}

const CAT: (&str, u64, u64) = ("cat", 7, 120);
const INIT: (&str, u64, u64) = ("init", 1, 120);
const RT: (&str, u64, u64) = ("irq/9", 8, 49);

/// Two waits of cat, of which the second is the longest, and one of a real-time task.
fn waits() -> Script {
    let mut script = Script::new();
    script.waking(100, 0, CAT);
    script.switch(103, 0, CAT);
    script.switch_from((7, 1), 150, 0, INIT);
    script.waking(200, 0, CAT);
    // Woken again while it waits; another task runs first.
    script.waking(210, 1, CAT);
    script.waking(220, 1, RT);
    script.switch(250, 1, RT);
    script.switch(1_700, 1, CAT);
    // Nobody has woken it: it was preempted.
    script.switch(1_800, 1, CAT);
    script
}

// A wait that begins at the second wake-up, or ends with another task's switch, is not what the
// task has waited.
#[test]
fn a_wait_is_from_the_first_wake_up_to_the_switch_to_that_task() {
    let report = waits().report(Kind::Wakeup, Some(25_000));
    assert_eq!((report.count, report.doubtful, report.open), (3, 0, 0));
    let longest = report.longest.as_ref().expect("one");
    assert_eq!(
        (longest.pid, longest.duration_ns, longest.cpu, longest.woken_on),
        (7, 1_500_000, 1, Some(0))
    );
    assert_eq!((longest.since_ns, longest.ns), (200_000, 1_700_000));
    let listed: Vec<_> = report.listed.iter().map(|one| (one.pid, one.duration_ns)).collect();
    assert_eq!(listed, [(8, 30_000), (7, 1_500_000)]);
    let sums: Vec<_> = report.sums.iter().map(|of| (&*of.name, of.count, of.total_ns)).collect();
    assert_eq!(sums, [("cat-7", 2, 1_503_000), ("irq/9-8", 1, 30_000)]);
    let below: Vec<_> = report.histograms.iter().map(|of| of.below_us.to_vec()).collect();
    assert_eq!((below[0][2], below[0].iter().sum::<u64>()), (1, 1));
    assert_eq!((below[1][5], below[1][11], below[1].iter().sum::<u64>()), (1, 1, 2));
}

#[test]
fn the_page_shows_what_the_cpu_did_meanwhile() {
    let page = text(&waits().report(Kind::Wakeup, Some(25_000)));
    let expected = "    init-1         1d..2.   10us : sched_waking: comm=cat pid=7 prio=120\n\
        \x20   init-1         1d..2.   20us+: sched_waking: comm=irq/9 pid=8 prio=49\n\
        \x20   init-1         1d..2.   50us#: sched_switch: next_comm=irq/9 next_pid=8 next_prio=49 prev_pid=1 prev_state=1\n\
        \x20   init-1         1d..2. 1500us : sched_switch: next_comm=cat next_pid=7 next_prio=120 prev_pid=1 prev_state=1\n";
    assert!(page.contains(expected), "{page}");
    assert!(page.contains("# latency: 1500 us, #4/4, CPU#1 |"), "{page}");
    assert!(page.contains("\nWAITS OF 25.000 US AND MORE: 2\n"), "{page}");
    assert!(
        page.contains(
            "  cat-7                       120        2     751.500    1500.000       0.001700"
        ),
        "{page}"
    );
    assert!(page.lines().all(|line| line.chars().count() <= 120), "{page}");
    let report = Script::new().report(Kind::Wakeup, None);
    assert!(text(&report).contains("# no task was woken and ran\n"));
}

#[test]
fn real_time_tasks_alone_are_told_for_wakeup_rt() {
    let report = waits().report(Kind::WakeupRt, None);
    assert_eq!((report.count, report.longest.map(|longest| longest.pid)), (1, Some(8)));
}

// A wait over a gap is as long as the gap; one that vmtrace's own pause made is not the guest's.
#[test]
fn losses_and_pauses_are_not_the_guests() {
    let mut script = Script::new();
    script.waking(100, 0, CAT);
    script.0.loss(0, 5, LossReason::Full).expect("vCPU");
    script.switch(900, 0, CAT);
    script.switch_from((7, 1), 950, 0, INIT);
    script.waking(1_000, 0, CAT);
    script.paused(1_080, 70);
    script.switch(1_100, 0, CAT);
    script.switch_from((7, 1), 1_150, 0, INIT);
    script.waking(1_200, 0, CAT);
    let report = script.report(Kind::Wakeup, None);
    assert_eq!((report.count, report.doubtful, report.open), (1, 1, 1));
    let longest = report.longest.as_ref().expect("one");
    assert_eq!((longest.duration_ns, longest.host_ns), (100_000, 70_000));
    let page = text(&report);
    assert!(
        page.contains("note: waits left out, since some of their records are missing: 1\n"),
        "{page}"
    );
    let mut json = Vec::new();
    report.write_json(&mut json).expect("memory");
    let json: serde_json::Value = serde_json::from_slice(&json).expect("JSON");
    assert_eq!(json["event"], "latencies");
    assert_eq!((&json["latency"], &json["longest"]["host_ns"]), (&"wakeup".into(), &70_000.into()));
}

// What the vCPU's host did with it meanwhile is not the guest's, and what pauses were among it is told
// beside; other vCPUs' exits are no part of it.
#[test]
fn exits_are_the_hosts_time() {
    let mut script = Script::new();
    script.waking(1_000, 0, CAT);
    // Begun before the wait, in it, with a pause in it, and on the other vCPU.
    script.exit(1_010, 0, 30);
    script.exit(1_030, 0, 5);
    script.exit(1_200, 1, 150);
    script.paused(1_150, 50);
    script.exit(1_155, 0, 60);
    script.switch(1_300, 0, CAT);
    let report = script.report(Kind::Wakeup, Some(0));
    let longest = report.longest.as_ref().expect("one");
    assert_eq!((longest.duration_ns, longest.host_ns), (300_000, 75_000));
    assert_eq!((longest.paused_ns, report.exits), (50_000, 4));
    let page = text(&report);
    assert!(page.contains("#  => paused by vmtrace: 50.000 us\n"), "{page}");
    assert!(page.contains("#  => out of the guest: 75.000 us (exits to vmtrace, "), "{page}");
    assert!(page.contains("  (out of the guest 75.000 us)\n"), "{page}");
    assert!(page.contains("exit: reason=io dir=out address=0x3f8 duration_ns=60000"), "{page}");
}

// A task does not run while its vCPU does not. A pause is an exit, too, and counts once.
#[test]
fn exits_are_noise_of_the_host() {
    let mut script = Script::new();
    script.switch_from((0, 0), 100, 0, CAT);
    script.exit(200, 0, 20);
    script.paused(370, 70);
    script.exit(375, 0, 80);
    script.switch_from((7, 1), 900, 0, ("idle", 0, 120));
    let report = script.report(Kind::Osnoise, Some(0));
    let sums: Vec<_> = report.sums.iter().map(|of| (&*of.name, of.count, of.total_ns)).collect();
    assert_eq!(sums, [("exit io 0x3f8 out", 2, 100_000)]);
    assert_eq!(report.listed.iter().map(|of| of.host_ns).collect::<Vec<_>>(), [20_000, 80_000]);
    let rows: Vec<_> = report.rows.iter().map(|row| (row.host, row.noise_ns)).collect();
    assert_eq!(rows, [(2, 100_000)]);
}

// A task that is woken before it has gone to sleep runs on: it waits for nothing, however long it
// runs. Taken for a wait, 1.3 s of work of a serial port's thread was the longest.
#[test]
fn a_task_that_runs_is_woken_without_waiting() {
    let mut script = Script::new();
    script.switch(100, 0, CAT);
    script.waking(150, 1, CAT);
    script.switch_from((7, 0), 900, 0, RT);
    script.switch(1_000, 0, CAT);
    // Woken just before it was seen to run: what has run was not waiting.
    script.waking(1_100, 1, RT);
    script.switch_from((8, 1), 1_200, 1, INIT);
    script.switch(1_900, 1, RT);
    let report = script.report(Kind::Wakeup, None);
    assert_eq!((report.count, report.open), (0, 0), "{report:?}");
}

fn episodes(report: &Report) -> Vec<(u64, u64, Option<&str>, Option<&str>)> {
    let one = |of: &super::Episode| (of.since_ns / 1000, of.duration_ns / 1000);
    let places = |of: &'_ super::Episode| (of.started.clone(), of.ended.clone());
    assert!(report.listed.iter().all(|of| places(of).0.is_some()));
    let all = report.listed.iter();
    all.map(|of| (one(of).0, one(of).1, of.started.as_deref(), of.ended.as_deref())).collect()
}

// An idle CPU has its interrupts off for as long as it likes, and a second disable begins nothing.
#[test]
fn interrupts_are_off_from_the_first_disable_to_the_enable() {
    let mut script = Script::new();
    // Of this the beginning was not seen.
    script.tell(50, 7, "irq_enable", 1);
    script.tell(100, 7, "irq_disable", 10);
    script.tell(110, 7, "irq_disable", 11);
    script.tell(120, 7, "preempt_disable", 12);
    script.tell(150, 7, "irq_enable", 13);
    script.tell(190, 7, "preempt_enable", 14);
    // Into idleness and out of it.
    script.tell(200, 0, "irq_disable", 15);
    script.tell(203, 0, "cpu_idle", 1);
    script.tell(9_000, 0, "cpu_idle", 0xffff_ffff);
    script.tell(9_007, 0, "irq_enable", 16);
    let stream = |kind| {
        let mut script = Script::new();
        script.entry(90, (0, 0));
        for (us, name, value) in [(100, "irq_disable", 10), (120, "preempt_disable", 12)] {
            script.tell(us, 7, name, value);
        }
        script.tell(150, 7, "irq_enable", 13);
        script.tell(190, 7, "preempt_enable", 14);
        script.report(kind, Some(0))
    };
    let report = script.report(Kind::Irqsoff, Some(0));
    assert_eq!(
        episodes(&report),
        [
            (100, 50, Some("10"), Some("13")),
            (200, 3, Some("15"), Some("power:cpu_idle")),
            (9_000, 7, Some("power:cpu_idle"), Some("16")),
        ]
    );
    assert_eq!((report.open, report.doubtful, report.differing), (0, 0, 0));
    assert_eq!(episodes(&stream(Kind::Preemptoff)), [(120, 70, Some("12"), Some("14"))]);
    assert_eq!(episodes(&stream(Kind::Preemptirqsoff)), [(100, 90, Some("10"), Some("14"))]);
    let page = text(&stream(Kind::Preemptirqsoff));
    assert!(page.contains("#  => started at: 10\n#  => ended at:   14\n"), "{page}");
}

// Between an end that was not seen and a beginning that was not seen everything would be too long.
#[test]
fn records_that_tell_another_state_are_believed() {
    let mut script = Script::new();
    script.tell(100, 7, "irq_disable", 10);
    script.entry(150, (OFF, 0));
    script.entry(200, (0, 0));
    script.tell(300, 7, "irq_enable", 11);
    script.tell(400, 7, "irq_disable", 12);
    script.0.loss(0, 3, LossReason::Full).expect("vCPU");
    script.tell(500, 7, "irq_enable", 13);
    script.tell(600, 7, "irq_disable", 14);
    script.tell(610, 7, "irq_enable", 15);
    let report = script.report(Kind::Irqsoff, Some(0));
    assert_eq!(episodes(&report), [(600, 10, Some("14"), Some("15"))]);
    assert_eq!((report.differing, report.doubtful), (1, 1));
}

// ftrace's depth leaves interrupts and softirqs out, in which nothing is preempted, either: a
// thousand records of one boot differed, and what they were in was left out. What was off when the
// trace began has begun before.
#[test]
fn interrupts_and_softirqs_are_not_preempted() {
    let mut script = Script::new();
    script.entry(50, (0, 1));
    script.tell(60, 7, "preempt_enable", 9);
    script.tell(100, 7, "preempt_disable", 10);
    script.entry(110, (OFF | Context::HARDIRQ, 0));
    script.entry(120, (Context::SOFTIRQ, 0));
    script.entry(130, (Context::BH_OFF, 0));
    script.tell(140, 7, "preempt_enable", 11);
    script.entry(150, (0, 0));
    let report = script.report(Kind::Preemptoff, Some(0));
    assert_eq!(episodes(&report), [(100, 40, Some("10"), Some("11"))]);
    assert_eq!((report.differing, report.doubtful), (0, 0));
}

/// cat runs from 100 us on.
fn noises() -> Script {
    let mut script = Script::new();
    script.switch_from((0, 0), 100, 0, CAT);
    script.tell(200, 7, "local_timer_entry", 236);
    script.tell(210, 7, "local_timer_exit", 236);
    script.tell(212, 7, "softirq_entry", 1);
    script.tell(220, 7, "local_timer_entry", 236);
    script.tell(224, 7, "local_timer_exit", 236);
    script.tell(240, 7, "softirq_exit", 1);
    // A task that takes the CPU of one that could run on.
    script.switch_from((7, 0x100), 400, 0, RT);
    script.switch_from((8, 1), 450, 0, CAT);
    script.tell(470, 7, "nmi_handler", 5_000);
    // cat sleeps: nobody is kept from running.
    script.switch_from((7, 1), 500, 0, RT);
    script.switch_from((8, 1), 700, 0, ("idle", 0, 120));
    script.tell(800, 0, "local_timer_entry", 236);
    script.tell(850, 0, "local_timer_exit", 236);
    script
}

// What is inside something else counts once, and an idle CPU is taken from nobody.
#[test]
fn noise_is_what_keeps_a_task_from_running() {
    let report = noises().report(Kind::Osnoise, Some(20_000));
    let listed: Vec<_> = report
        .listed
        .iter()
        .map(|of| (of.since_ns / 1000, of.duration_ns / 1000, of.mostly.as_deref(), of.pid))
        .collect();
    assert_eq!(
        listed,
        [(200, 40, Some("softirq TIMER"), 7), (400, 50, Some("irq/9-8"), 7)],
        "{report:?}"
    );
    let sums: Vec<_> =
        report.sums.iter().map(|of| (&*of.name, of.count, of.total_ns / 1000)).collect();
    assert_eq!(
        sums,
        [("irq/9-8", 1, 50), ("local_timer", 3, 64), ("softirq TIMER", 1, 24), ("NMI", 1, 5)]
    );
    let [row] = &*report.rows else { panic!("{:?}", report.rows) };
    assert_eq!((row.runtime_ns, row.noise_ns, row.longest_ns), (600_000, 93_000, 50_000));
    assert_eq!((row.host, row.nmi, row.irq, row.softirq, row.thread), (0, 1, 2, 1, 1));
    assert_eq!(row.available(), Some(84_500));
    assert_eq!(report.histograms[0].below_us.iter().sum::<u64>(), 3);
    let page = text(&report);
    let row = "    0.000850 [000]     600         93    84.500          50      0    1      2      1      1\n";
    assert!(page.contains(row), "{page}");
    assert!(page.contains("#  => mostly: irq/9-8\n"), "{page}");
}

// vmtrace's own pauses are not the guest's doing, and no thread keeps waiting for a CPU that a
// task has left for another one.
#[test]
fn pauses_are_the_hosts_noise_and_tasks_that_move_wait_no_more() {
    let mut script = Script::new();
    script.switch_from((0, 0), 100, 0, CAT);
    script.paused(180, 70);
    script.switch_from((7, 0), 300, 0, RT);
    script.switch_from((0, 0), 330, 1, CAT);
    script.switch_from((8, 1), 900, 0, ("idle", 0, 120));
    let report = script.report(Kind::Osnoise, Some(0));
    let sums: Vec<_> = report.sums.iter().map(|of| (&*of.name, of.total_ns / 1000)).collect();
    assert_eq!(sums, [("paused by vmtrace", 70), ("irq/9-8", 30)]);
    assert_eq!(report.listed.iter().map(|of| of.host_ns / 1000).collect::<Vec<_>>(), [70, 0]);
    let rows: Vec<_> = report.rows.iter().map(|row| (row.cpu, row.host, row.thread)).collect();
    assert_eq!(rows, [(0, 1, 1)]);
}

// Interrupts that nobody recorded are no guest without any: their columns are full of zeros.
#[test]
fn what_a_report_cannot_have_is_told() {
    let lacks = |events: &str| {
        let mut script = Script::new();
        script.events(0, events);
        script.switch_from((0, 0), 100, 0, CAT);
        for us in [300, 600] {
            script.switch_from((7, 0), us, 0, RT);
            script.switch_from((8, 1), us + 30, 0, CAT);
        }
        script.0.end(&Summary::default()).expect("memory");
        let mut player = Player::new(Latency::new(Kind::Osnoise, None));
        player.push(&script.0.into_inner().expect("memory")).expect("whole");
        player.finish().expect("whole");
        assert_eq!(player.export().cannot(), None);
        player.export().lacks()
    };
    let text = lacks("sched:sched_switch, irq:irq_handler_entry, irq:irq_handler_exit").unwrap();
    assert!(text.contains("does not have irq:softirq_entry, irq:softirq_exit, and"), "{text}");
    let irq = "irq:irq_handler_entry, irq:irq_handler_exit, irq:softirq_entry, irq:softirq_exit";
    assert_eq!(lacks(&format!("sched:sched_switch, {irq}")), None);
    // Of many events some are not named, but those would be.
    let many = |names: &str| lacks(&format!("{names}, sched:sched_process_exit and 10 more"));
    assert_eq!(many(&format!("sched:sched_switch, {irq}")), None);
    assert!(many("sched:sched_switch").is_some_and(|text| text.contains("irq:softirq_entry")));
}

// An interrupt that came to the task for which another one has moved is as long as it was, and not one that was lost.
#[test]
fn an_interrupt_goes_on_when_a_task_moves_meanwhile() {
    let mut script = Script::new();
    script.switch_from((0, 0), 100, 0, CAT);
    script.switch_from((7, 0), 300, 0, RT);
    script.tell(310, 8, "local_timer_entry", 236);
    script.switch_from((0, 0), 330, 1, CAT);
    script.tell(360, 8, "local_timer_exit", 236);
    script.switch_from((8, 1), 900, 0, ("idle", 0, 120));
    let report = script.report(Kind::Osnoise, Some(0));
    let sums: Vec<_> = report.sums.iter().map(|of| (&*of.name, of.total_ns / 1000)).collect();
    assert_eq!(sums, [("local_timer", 50), ("irq/9-8", 10)]);
    assert_eq!(report.doubtful, 0);
    let rows: Vec<_> = report.rows.iter().map(|row| (row.cpu, row.noise_ns / 1000)).collect();
    assert_eq!(rows, [(0, 60)], "{:?}", report.rows);
}

// A trace made up must not keep its reader busy, or fill its memory.
#[test]
fn a_time_without_end_is_no_work() {
    let mut script = noises();
    script.switch_from((0, 0), 900, 0, CAT);
    script.tell(u64::MAX / 2_000, 7, "local_timer_entry", 236);
    let report = script.report(Kind::Osnoise, None);
    assert!(report.rows.len() < 100, "{}", report.rows.len());
    assert_eq!(report.open, 1);
}

// An interrupt that is taken right behind the instruction that turns interrupts on is told before it
// is: the time off has ended there. With preemption off, too, nothing has ended.
#[test]
fn an_interrupt_ends_the_time_in_which_it_could_not_come() {
    let script = || {
        let mut script = Script::new();
        script.entry(50, (0, 0));
        script.tell(100, 7, "irq_disable", 10);
        script.tell_at(130, 7, "irq_disable", (11, VECTOR + 4));
        script.tell_at(160, 7, "irq_enable", (12, VECTOR + 9));
        script.tell(161, 7, "irq_enable", 13);
        script.tell(200, 7, "preempt_disable", 14);
        script.tell(210, 7, "irq_disable", 15);
        script.tell_at(230, 7, "irq_disable", (16, VECTOR + 4));
        script.tell_at(240, 7, "irq_enable", (17, VECTOR + 9));
        script.tell(260, 7, "preempt_enable", 18);
        script
    };
    let vector = Some("asm_timer");
    let report = script().report(Kind::Irqsoff, Some(0));
    assert_eq!(
        episodes(&report),
        [
            (100, 30, Some("10"), vector),
            (130, 30, vector, vector),
            (210, 20, Some("15"), vector),
            (230, 10, vector, vector),
        ]
    );
    let report = script().report(Kind::Preemptirqsoff, Some(0));
    assert_eq!(
        episodes(&report),
        [
            (100, 30, Some("10"), vector),
            (130, 30, vector, vector),
            (200, 60, Some("14"), Some("18"))
        ]
    );
    assert_eq!(episodes(&script().report(Kind::Preemptoff, Some(0))).len(), 1);
    let page = text(&script().report(Kind::Irqsoff, None));
    assert!(page.contains("    0us+: irq_disable: caller=10\n"), "{page}");
    assert!(page.contains("   30us : irq_disable <-asm_timer\n"), "{page}");
}

// An idle CPU keeps nobody waiting, but an interrupt that comes then keeps others: 5 ms of a program that
// another CPU had it run were not found.
#[test]
fn what_an_idle_cpus_interrupts_hold_off_counts() {
    let script = || {
        let mut script = Script::new();
        script.entry(50, (OFF, 1));
        script.tell(200, 0, "cpu_idle", 1);
        script.tell_at(1000, 0, "irq_disable", (20, VECTOR + 4));
        script.tell_at(6000, 0, "irq_enable", (21, VECTOR + 9));
        script.tell(8000, 0, "irq_disable", 22);
        script.tell(8005, 0, "cpu_idle", 0xffff_ffff);
        script.tell(8007, 0, "irq_enable", 23);
        script.tell(8100, 0, "preempt_enable", 24);
        script
    };
    let report = |kind| script().report(kind, Some(0));
    let vector = Some("asm_timer");
    let of_interrupt = (1000, 5000, vector, vector);
    assert_eq!(episodes(&report(Kind::Irqsoff)), [of_interrupt, (8000, 7, Some("22"), Some("23"))]);
    assert_eq!(
        episodes(&report(Kind::Preemptirqsoff)),
        [of_interrupt, (8000, 100, Some("22"), Some("24"))]
    );
    let exit = (8005, 95, Some("power:cpu_idle"), Some("24"));
    assert_eq!(episodes(&report(Kind::Preemptoff)), [exit]);
}

// The end of an interrupt of an idle CPU that was not seen must not hide the next one.
#[test]
fn an_idle_cpu_whose_interrupts_are_on_after_all_is_believed() {
    let mut script = Script::new();
    script.tell(50, 0, "cpu_idle", 1);
    script.tell_at(1000, 0, "irq_disable", (10, VECTOR + 4));
    script.entry(1500, (0, 1));
    script.tell_at(2000, 0, "irq_disable", (11, VECTOR + 4));
    script.tell_at(7000, 0, "irq_enable", (12, VECTOR + 9));
    let report = script.report(Kind::Irqsoff, Some(0));
    let vector = Some("asm_timer");
    assert_eq!(episodes(&report), [(2000, 5000, vector, vector)]);
    assert_eq!(report.differing, 1);
}
