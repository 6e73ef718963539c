//! Boots made in memory, and the reports on them.

use crate::export::{Pick, Player};
use crate::serve::{Globs, Refilter};
use crate::stream::{
    EntryRecord, Header, Initcall, LossReason, Mark, MarkKind, RecordBuffer, ReturnRecord, Shape,
    Stretch, Summary, Symbol, TracedOf, Tracer, ValueField, ValuesFormat, ValuesOf, Writer,
};

use super::{Boot, Report};
use std::io::Write as _;

const BASE: u32 = 0x8100_0000;
const STACK: u64 = 0xffff_c900_0000_1000;
const NAMES: [&str; 10] = [
    "do_one_initcall",
    "acpi_init",
    "pci_init",
    "tick_nohz_idle_enter",
    "tick_nohz_idle_exit",
    "load_module",
    "do_init_module",
    "init_module_from_file",
    "msleep",
    "run_init_process",
];

fn function(name: &str) -> u32 {
    let index = NAMES.iter().position(|known| *known == name).expect("a name of these");
    BASE + u32::try_from(index).expect("small") * 64
}

/// A boot of two vCPUs; times are in microseconds.
struct Script {
    writer: Writer<Vec<u8>>,
    tracer: u8,
}

impl Script {
    fn new() -> Self {
        let mut header = Header {
            arch: "x86_64".into(),
            release: "6.12.0-a-name-that-is-as-long-as-distributions-can-make-it-amd64".into(),
            clock_hz: 1_000_000_000,
            vcpus: 2,
            address_base: Header::TOP_4_GIB,
            ..Header::default()
        };
        let levels = [("acpi_init", "subsys"), ("pci_init", "core")];
        let calls = levels.map(|(name, level)| {
            let address = header.address(function(name));
            Initcall { address, name, level }
        });
        header.add_initcalls(calls);
        let mut writer = Writer::new(Vec::new(), &header).expect("header");
        for name in NAMES {
            let address = header.address(function(name));
            writer.symbols([Symbol::new(address, 64, name)]).expect("room");
        }
        let values = [
            ("do_one_initcall", "fn", Shape::Pointer),
            ("init_module_from_file", "name", Shape::Text { bytes: 24 }),
        ];
        for (of, name, shape) in values {
            let values = vec![ValueField { name: name.into(), shape }];
            let function = function(of);
            let format =
                ValuesFormat { function, tracer: 0, of: ValuesOf::Entry, values, print: None };
            writer.values(&format).expect("room");
        }
        Self { writer, tracer: 0 }
    }

    fn put(&mut self, vcpu: u32, fill: impl FnOnce(&mut RecordBuffer)) -> &mut Self {
        let mut buffer = RecordBuffer::new();
        fill(&mut buffer);
        self.writer.records(vcpu, &buffer).expect("a vCPU");
        self
    }

    fn entry(&self, at: u64, name: &str, pid: u32) -> EntryRecord {
        EntryRecord::new(at * 1000, function(name), 0, pid).of_tracer(self.tracer)
    }

    /// Without a stack pointer.
    fn plain(&mut self, at: u64, vcpu: u32, name: &str) -> &mut Self {
        let entry = self.entry(at, name, 1);
        self.put(vcpu, |buffer| buffer.push(entry))
    }

    fn enter(&mut self, at: u64, name: &str, depth: u64) -> &mut Self {
        let entry = self.entry(at, name, 1).with_sp(STACK - depth * 64);
        self.put(0, |buffer| buffer.push_frame(entry))
    }

    fn leave(&mut self, at: u64, name: &str, depth: u64) -> &mut Self {
        let ret = ReturnRecord::new(at * 1000, function(name), 0, 1, STACK - depth * 64);
        let ret = ret.of_tracer(self.tracer);
        self.put(0, |buffer| buffer.push_return(ret))
    }

    fn initcall(&mut self, at: u64, address: u64, depth: u64) -> &mut Self {
        let entry = self.entry(at, "do_one_initcall", 1);
        self.put(0, |buffer| buffer.push_values(entry, Some(STACK - depth * 64), 0, [address]))
    }

    fn mark(&mut self, at: u64, kind: MarkKind, text: &str) -> &mut Self {
        let mark = Mark { ticks: at * 1000, kind, duration_ns: 0, text: text.into() };
        self.writer.mark(&mark).expect("memory");
        self
    }

    fn end(mut self) -> Vec<u8> {
        let functions =
            |names: &[&str]| names.iter().map(|name| function(name)).collect::<Vec<_>>();
        let stretch = |of| Stretch { since: 0, until: u64::MAX, tracer: 0, of };
        self.writer.traced(&stretch(TracedOf::Entries), &functions(&NAMES)).expect("memory");
        self.writer.traced(&stretch(TracedOf::Returns), &functions(&NAMES[..1])).expect("memory");
        self.writer.end(&Summary::default()).expect("memory");
        self.writer.into_inner().expect("memory")
    }
}

fn report(stream: &[u8]) -> Report {
    let mut player = Player::new(Boot::new());
    player.push(stream).expect("a stream");
    let _ = player.finish();
    let late = player.late();
    player.into_export().finish(late)
}

fn page(report: &Report) -> String {
    let mut out = Vec::new();
    report.write_text(&mut out).expect("memory");
    let page = String::from_utf8(out).expect("UTF-8");
    for line in page.lines() {
        assert!(line.len() <= 80 && line.is_ascii(), "{line:?}");
    }
    page
}

fn address(name: &str) -> u64 {
    Header::TOP_4_GIB + u64::from(function(name))
}

/// Two initcalls, one of which waits; a module before init and one after.
fn boot() -> Script {
    let mut script = Script::new();
    script.mark(1_000, MarkKind::Attach, "10 sites");
    script.initcall(2_000, address("pci_init"), 0).leave(2_500, "do_one_initcall", 0);
    script.initcall(3_000, address("acpi_init"), 0).enter(3_100, "msleep", 1);
    script.plain(3_200, 0, "tick_nohz_idle_enter").plain(3_300, 1, "tick_nohz_idle_enter");
    script.plain(7_300, 1, "tick_nohz_idle_exit").plain(7_400, 0, "tick_nohz_idle_exit");
    script.leave(8_000, "msleep", 1).leave(9_000, "do_one_initcall", 0);
    let load = |script: &mut Script, at, file: &[u8; 24], mark: (MarkKind, &str)| {
        let words: Vec<_> =
            file.chunks(8).map(|word| u64::from_le_bytes(word.try_into().expect("8"))).collect();
        let entry = script.entry(at, "init_module_from_file", 1);
        script.put(0, |buffer| buffer.push_values(entry, None, 0, words));
        script.enter(at + 10, "load_module", 0).enter(at + 20, "do_init_module", 1);
        // The guest stops there.
        script.mark(at + 25, mark.0, mark.1);
        script.initcall(at + 30, 0xffff_ffff_c000_0000, 2).leave(at + 80, "do_one_initcall", 2);
        script.leave(at + 90, "do_init_module", 1).leave(at + 110, "load_module", 0);
    };
    let file = b"virtio-net.ko.xz\0\0\0\0\0\0\0\0";
    load(&mut script, 9_100, file, (MarkKind::Pause, "modules"));
    script.mark(10_000, MarkKind::Console, "[    1.0] Run /init as init process");
    script.plain(10_001, 0, "run_init_process");
    let file = b"003-ext4.ko\0\0\0\0\0\0\0\0\0\0\0\0\0";
    let traced = "module ext4 loaded: 7 of 9 functions";
    load(&mut script, 11_000, file, (MarkKind::Filter, traced));
    script.plain(12_000, 0, "tick_nohz_idle_enter").plain(12_500, 0, "tick_nohz_idle_exit");
    script
}

#[test]
fn the_time_of_a_boot_is_put_down_to_what_took_it() {
    let report = report(&boot().end());
    assert_eq!((report.init_ns, report.until_ns), (Some(10_000_000), 10_000_000));
    let calls: Vec<_> = report
        .initcalls
        .iter()
        .map(|call| (call.function.as_deref(), call.duration_ns, call.idle_ns))
        .collect();
    let expected =
        [(Some("pci_init"), Some(500_000), 0), (Some("acpi_init"), Some(6_000_000), 4_000_000)];
    assert_eq!(calls, expected);
    let levels: Vec<_> =
        report.levels.iter().map(|level| (&*level.level, level.calls, level.duration_ns)).collect();
    assert_eq!(levels, [("core", 1, 500_000), ("subsys", 1, 6_000_000)]);
    // Only when both have nothing to do the boot waits; what comes after init is not of it.
    assert_eq!(report.idle_ns, Some(4_000_000));
    let each: Vec<_> = report.idle.iter().map(|of| (of.cpu, of.idle_ns)).collect();
    assert_eq!(each, [(0, 4_200_000), (1, 4_000_000)]);
    let modules: Vec<_> = report
        .modules
        .iter()
        .map(|it| (it.module.as_deref(), it.duration_ns, it.init_ns, it.before_init))
        .collect();
    let took = (Some(100_000), Some(50_000));
    let expected =
        [(Some("virtio_net"), took.0, took.1, true), (Some("ext4"), took.0, took.1, false)];
    assert_eq!(modules, expected);
    let functions: Vec<_> =
        report.functions.iter().map(|it| (&*it.function, it.calls, it.self_ns)).collect();
    assert_eq!(functions, [("msleep", 1, 4_900_000)]);
    let steps: Vec<_> = report.steps.iter().map(|step| (step.ns, step.took_ns)).collect();
    assert_eq!(steps, [(0, 1_000_000), (1_000_000, 9_000_000), (10_000_000, 0)]);
    assert!(report.missing.is_empty());
    assert_eq!(report.untold, ["what the kernel does before tracing begins"]);
    let page = page(&report);
    assert!(page.contains("Init is started 0.010000 s after the machine."), "{page}");
    let line = "  acpi_init                            subsys              6.000          4.000";
    assert!(page.contains(line), "{page}");
    assert!(page.contains("MODULES: 2 in 0.200 ms "), "{page}");
    assert!(page.lines().count() < 60);
}

#[test]
fn fields_of_json_have_the_names_that_are_documented() {
    let mut out = Vec::new();
    report(&boot().end()).write_json(&mut out).expect("memory");
    let json: serde_json::Value = serde_json::from_slice(&out).expect("JSON");
    assert_eq!((&json["event"], &json["version"]), (&"boot-report".into(), &1.into()));
    assert_eq!(json["initcalls"][1]["function"], "acpi_init");
    assert_eq!(json["modules"][0]["init_ns"], 50_000);
    crate::analyze::documented::check(&json);
}

// A number that looks like the whole is worse than none.
#[test]
fn what_is_missing_is_said() {
    let mut script = Script::new();
    script.initcall(2_000, address("pci_init"), 0);
    script.plain(2_100, 0, "tick_nohz_idle_enter");
    script.writer.loss(0, 7, LossReason::Full).expect("vCPU");
    script.plain(5_000, 0, "tick_nohz_idle_exit").leave(6_000, "do_one_initcall", 0);
    let stream = script.end();
    let whole = report(&stream);
    assert_eq!(whole.missing.lost, 7);
    // It may be the return of another call.
    assert_eq!(whole.initcalls[0].duration_ns, None);
    assert_eq!(whole.idle_ns, Some(0));
    let page = page(&whole);
    assert!(
        page.contains("ATTENTION: vCPU 0 lost 7 records between 0.002100 and 0.005000"),
        "{page}"
    );
    assert!(page.contains("how long 1 of 1 initcalls took: their returns were not seen"), "{page}");
    assert!(page.contains("Init was not seen; the trace ends at 0.006000 s."), "{page}");
    let torn = report(&stream[..stream.len() - 8]);
    assert!(torn.missing.torn && torn.untold.len() > 2, "{torn:?}");
}

// 0 would be a time.
#[test]
fn modules_that_took_nobody_knows_how_long_took_no_known_time() {
    let mut script = Script::new();
    script.enter(2_000, "load_module", 0).mark(2_010, MarkKind::Filter, "tracer b added");
    script.leave(2_020, "load_module", 0);
    let page = page(&report(&script.end()));
    assert!(page.contains("MODULES: 1 in ? ms "), "{page}");
}

#[test]
fn a_trace_of_something_else_says_what_to_trace() {
    let report = report(&crate::stream::sample::stream());
    assert!(report.initcalls.is_empty() && report.modules.is_empty());
    assert_eq!(report.idle_ns, None);
    let page = page(&report);
    for what in ["initcalls: do_one_initcall has no record", "idle time: ", "modules: load_module"]
    {
        assert!(page.contains(what), "{page}");
    }
}

// The times of two boots in one are of none: the report is of the first, and says where the next one is.
#[test]
fn a_kernel_that_the_guest_starts_anew_is_left_out() {
    let first = report(&boot().end());
    let mut script = boot();
    script.mark(20_000, MarkKind::Detach, "10 sites given back");
    script.mark(21_000, MarkKind::Note, "the guest's kernel starts anew (kexec)");
    script.mark(21_000, MarkKind::Attach, "10 sites");
    script.initcall(22_000, address("acpi_init"), 0).leave(32_500, "do_one_initcall", 0);
    script.plain(33_000, 0, "tick_nohz_idle_enter").plain(33_300, 1, "tick_nohz_idle_enter");
    let stream = script.end();
    let both = report(&stream);
    let page = page(&both);
    assert!(page.contains("--since 0.021000"), "{page}");
    let json = |report: Report| {
        let untold = |it: &String| !it.contains("(kexec)");
        let untold = report.untold.iter().filter(|it| untold(it)).cloned().collect();
        serde_json::to_value(Report { untold, ..report }).expect("JSON")
    };
    assert_eq!(json(both), json(first));
    // As `convert --since` makes it.
    let mut part = Vec::new();
    let pick = Pick { since: Some(21_000_000), ..Pick::default() };
    let refilter = Refilter::by_names(&mut part, Globs::default(), None);
    let mut refilter = refilter.with_part(pick, None);
    refilter.write_all(&stream).expect("a stream");
    refilter.finish().expect("whole");
    refilter.flush().expect("memory");
    drop(refilter);
    let second = report(&part);
    assert_eq!((second.initcalls.len(), second.initcalls[0].ns), (1, 22_000_000));
    assert_eq!(second.steps[1].ns, 21_000_000);
    // With --from, tracing begins twice in one kernel.
    let mut script = Script::new();
    script.mark(900, MarkKind::Attach, "0 sites").mark(1_000, MarkKind::Attach, "10 sites");
    script.initcall(2_000, address("pci_init"), 0).leave(2_500, "do_one_initcall", 0);
    let late = report(&script.end());
    assert_eq!((late.initcalls.len(), late.steps[1].ns), (1, 1_000_000));
}

// Whoever traces more has records of each tracer for one call.
#[test]
fn a_call_of_several_tracers_is_one() {
    let mut script = Script::new();
    for (number, name) in [(0, "boot-report"), (1, "all")] {
        script.writer.tracer(Tracer { number, name, description: "" }).expect("memory");
    }
    script.initcall(2_000, address("pci_init"), 0);
    script.tracer = 1;
    script.enter(2_000, "do_one_initcall", 0).enter(2_100, "msleep", 1);
    script.tracer = 0;
    script.enter(2_100, "msleep", 1);
    for (at, name, depth) in [(2_300, "msleep", 1), (2_500, "do_one_initcall", 0)] {
        for tracer in [0, 1] {
            script.tracer = tracer;
            script.leave(at, name, depth);
        }
    }
    let report = report(&script.end());
    let calls: Vec<_> =
        report.initcalls.iter().map(|call| (call.function.as_deref(), call.duration_ns)).collect();
    assert_eq!(calls, [(Some("pci_init"), Some(500_000))]);
    let sleep = &report.functions[0];
    assert_eq!((sleep.calls, sleep.timed, sleep.total_ns), (1, 1, 200_000));
}

// Traced with --graph -f '*' alone: what an initcall calls first is not always the function.
#[test]
fn an_initcall_is_named_by_its_call() {
    let mut script = Script::new();
    script.enter(2_000, "do_one_initcall", 0);
    let mut entry = EntryRecord::new(2_010_000, function("acpi_init"), 0, 1).with_sp(STACK - 64);
    entry.entry.caller = (function("do_one_initcall") + 5).into();
    script.put(0, |buffer| buffer.push_frame(entry));
    script.leave(3_000, "acpi_init", 1).leave(3_500, "do_one_initcall", 0);
    let report = report(&script.end());
    let call = &report.initcalls[0];
    assert_eq!(call.function.as_deref(), Some("acpi_init"));
    assert_eq!((call.level.as_deref(), call.duration_ns), (Some("subsys"), Some(1_500_000)));
}
