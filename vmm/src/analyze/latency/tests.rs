//! Waits made in memory, and what is told of them.

use crate::export::Player;
use crate::stream::{
    Context, EventRecord, Header, LossReason, Mark, MarkKind, RecordBuffer, Shape, Summary, Symbol,
    Task, ValueField, ValuesFormat, ValuesOf, Writer,
};

use super::{Kind, Latency, Report};

const WAKING: u32 = 0x8100_0000;
const SWITCH: u32 = 0x8100_0100;

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
                vec![comm("next_comm"), number("next_pid"), number("next_prio")],
            ),
        ];
        for (tracepoint, name, values) in events {
            writer.symbols([Symbol::new(header.address(tracepoint), 64, name)]).expect("room");
            let format = ValuesFormat {
                function: tracepoint,
                tracer: 0,
                of: ValuesOf::Event,
                values,
                print: None,
            };
            writer.values(&format).expect("room");
        }
        writer.task(Task::new(1, 1, b"init")).expect("room");
        Self(writer)
    }

    fn event(&mut self, tracepoint: u32, us: u64, cpu: u32, (comm, pid, prio): (&str, u64, u64)) {
        let mut text = [0; 16];
        text[..comm.len()].copy_from_slice(comm.as_bytes());
        let (words, _) = text.as_chunks::<8>();
        let words = words.iter().map(|word| u64::from_le_bytes(*word)).chain([pid, prio]);
        let mut buffer = RecordBuffer::new();
        buffer.push_event(EventRecord::new(us * 1000, tracepoint, 0, 1), 0, words);
        buffer.with_context(Context::new(Context::IRQS_OFF, 2, 0));
        self.0.records(cpu, &buffer).expect("vCPU");
    }

    fn waking(&mut self, us: u64, cpu: u32, task: (&str, u64, u64)) {
        self.event(WAKING, us, cpu, task);
    }

    fn switch(&mut self, us: u64, cpu: u32, task: (&str, u64, u64)) {
        self.event(SWITCH, us, cpu, task);
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

fn text(report: &Report) -> String {
    let mut page = Vec::new();
    report.write_text(&mut page).expect("memory");
    String::from_utf8(page).expect("UTF-8")
}

const CAT: (&str, u64, u64) = ("cat", 7, 120);
const RT: (&str, u64, u64) = ("irq/9", 8, 49);

/// Two waits of cat, of which the second is the longest, and one of a real-time task.
fn waits() -> Script {
    let mut script = Script::new();
    script.waking(100, 0, CAT);
    script.switch(103, 0, CAT);
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
    assert_eq!((report.count, report.doubtful, report.waiting), (3, 0, 0));
    let longest = report.longest.as_ref().expect("one");
    assert_eq!((longest.pid, longest.ns, longest.cpu, longest.woken_on), (7, 1_500_000, 1, 0));
    assert_eq!((longest.since_ns, longest.until_ns), (200_000, 1_700_000));
    let listed: Vec<_> = report.listed.iter().map(|one| (one.pid, one.ns)).collect();
    assert_eq!(listed, [(8, 30_000), (7, 1_500_000)]);
    let sums: Vec<_> =
        report.tasks.iter().map(|task| (&*task.comm, task.count, task.total_ns)).collect();
    assert_eq!(sums, [("cat", 2, 1_503_000), ("irq/9", 1, 30_000)]);
    let below: Vec<_> = report.histograms.iter().map(|of| of.below_us.to_vec()).collect();
    assert_eq!((below[0][2], below[0].iter().sum::<u64>()), (1, 1));
    assert_eq!((below[1][5], below[1][11], below[1].iter().sum::<u64>()), (1, 1, 2));
}

#[test]
fn the_page_shows_what_the_cpu_did_meanwhile() {
    let page = text(&waits().report(Kind::Wakeup, Some(25_000)));
    let expected = "    init-1         1d..2.   10us : sched_waking: comm=cat pid=7 prio=120\n\
        \x20   init-1         1d..2.   20us+: sched_waking: comm=irq/9 pid=8 prio=49\n\
        \x20   init-1         1d..2.   50us#: sched_switch: next_comm=irq/9 next_pid=8 next_prio=49\n\
        \x20   init-1         1d..2. 1500us : sched_switch: next_comm=cat next_pid=7 next_prio=120\n";
    assert!(page.contains(expected), "{page}");
    assert!(page.contains("# latency: 1500 us, #4/3, CPU#1 |"), "{page}");
    assert!(page.contains("\nWAITS OF 25.000 US AND MORE: 2\n"), "{page}");
    assert!(
        page.contains("  cat-7                       120        2     751.500    1500.000"),
        "{page}"
    );
    assert!(page.lines().all(|line| line.chars().count() <= 90), "{page}");
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
    script.waking(1_000, 0, CAT);
    let text = "2 sites".into();
    let mark = Mark { ticks: 1_010_000, kind: MarkKind::Pause, duration_ns: 70_000, text };
    script.0.mark(&mark).expect("memory");
    script.switch(1_100, 0, CAT);
    script.waking(1_200, 0, CAT);
    let report = script.report(Kind::Wakeup, None);
    assert_eq!((report.count, report.doubtful, report.waiting), (1, 1, 1));
    let longest = report.longest.as_ref().expect("one");
    assert_eq!((longest.ns, longest.paused_ns), (100_000, 70_000));
    let page = super::tests::text(&report);
    assert!(page.contains("note: 1 waits are left out"), "{page}");
    let mut json = Vec::new();
    report.write_json(&mut json).expect("memory");
    let json: serde_json::Value = serde_json::from_slice(&json).expect("JSON");
    assert_eq!(
        (&json["latency"], &json["longest"]["paused_ns"]),
        (&"wakeup".into(), &70_000.into())
    );
}
