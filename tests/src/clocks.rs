//! Times of the trace compared with those of the guest's own log.

use std::collections::{BTreeSet, HashMap};
use std::io::Write as _;

use vmtrace::stream::Header;

use crate::cases::{Guests, assert_whole};
use crate::live::vmtrace;
use crate::trace::{Trace, arch_of, boot, missing};

/// Takes a line's time, soon after it was entered (kernel/printk/printk.c).
const STORES: &str = "vprintk_store";
/// From this line on all CPUs of an x86-64 guest have one clock that goes evenly.
const EVEN: &str = "sched_clock: Marking stable";
/// Lines that the guest's userland adds to the log.
const OWN: usize = 100;

/// The time of a line of the log in microseconds, as the kernel shows it: rounded down.
fn time_of(line: &str) -> Option<i128> {
    let (time, _) = line.strip_prefix('[')?.split_once(']')?;
    let (seconds, micros) = time.trim().split_once('.')?;
    let six = micros.len() == 6;
    six.then_some(1_000_000 * seconds.parse::<i128>().ok()? + micros.parse::<i128>().ok()?)
}

/// When each call began and ended, in ticks.
fn calls(trace: &Trace) -> Vec<(u64, u64)> {
    let mut all: Vec<_> = trace.entries.iter().map(|entry| (entry, false)).collect();
    all.extend(trace.returns.iter().map(|ret| (ret, true)));
    all.sort_by_key(|(record, _)| (record.timestamp, record.number));
    let (mut open, mut calls) = (HashMap::new(), Vec::new());
    for (record, ends) in all.iter().filter(|(record, _)| &*record.function == STORES) {
        let stack = (record.pid, record.sp);
        if *ends {
            calls.extend(open.remove(&stack).map(|began| (began, record.timestamp)));
        } else {
            open.insert(stack, record.timestamp);
        }
    }
    calls
}

impl Guests {
    /// Every line of the log has a time between the entry of the function that takes it and the return
    /// of that: with another zero than the log's the one or the other would not hold of all.
    pub fn times_are_those_of_the_guests_log(&self, name: &str) {
        let arch = arch_of(name).unwrap();
        let cmdline = format!("{} printk.devkmsg=on", arch.guest_cmdline());
        let run = format!("for i in $(seq {OWN}); do echo own line $i > /dev/kmsg; done");
        let args = ["--cpus", "2", "-f", STORES, "--graph", "--cmdline", &cmdline, "--run", &run];
        let (finished, trace) = boot(&self.host, name, &args).unwrap();
        let err = finished.err();
        assert_eq!(finished.end.code, Some(0), "{name}: {err}");
        assert_whole(name, &trace.summary, &err);
        assert_eq!(missing(&trace.summary), 0, "{name}");
        let clock = trace.summary.guest_clock.unwrap_or_else(|| panic!("{name}: no clock\n{err}"));
        assert!(clock.drift_ns.abs() < 1000, "{name}: {clock:?}");
        assert!(err.contains("vmtrace: clock 0 of the guest's log is "), "{name}: {err}");

        // What is shown on that clock is what the numbers say.
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&trace.stream).unwrap();
        let shown = vmtrace("report", file.path(), &["--clock", "guest", "--format", "json"]);
        assert!(shown.status.success(), "{name}: {}", String::from_utf8_lossy(&shown.stderr));
        let shown = String::from_utf8(shown.stdout).unwrap();
        let shown = shown.lines().map(|line| serde_json::from_str(line).unwrap());
        let shown: Vec<serde_json::Value> = shown.collect();
        let header = Header { clock_start: clock.zero_ticks, ..trace.header.clone() };
        let entered = shown.iter().filter(|it| it["event"] == "entry");
        let entered: BTreeSet<i128> = entered.map(|it| it["ns"].as_i64().unwrap().into()).collect();
        let calls: Vec<_> = calls(&trace)
            .into_iter()
            .map(|(began, ended)| (header.nanoseconds(began), header.nanoseconds(ended)))
            .collect();
        assert!(calls.iter().all(|(began, _)| entered.contains(began)), "{name}");

        let console = shown.iter().filter(|it| it["event"] == "mark" && it["kind"] == "console");
        let console = console.map(|it| it["text"].as_str().unwrap());
        let lines = console.filter_map(|line| Some((time_of(line)?, line)));
        // On riscv64 there is no clock before it is an even one: times are 0 until then.
        let lines: Vec<_> = match arch.name() {
            "x86_64" => lines.skip_while(|(_, line)| !line.contains(EVEN)).skip(1).collect(),
            _ => lines.skip_while(|(time, _)| *time == 0).collect(),
        };
        let own = lines.iter().filter(|(_, line)| line.contains("own line ")).count();
        assert_eq!(own, OWN, "{name}: {err}");
        let mut taken = BTreeSet::new();
        for (time, line) in &lines {
            // A nanosecond's rounding may be one of a microsecond.
            let of = |(began, ended): &(i128, i128)| {
                (began.div_euclid(1000) - 1..=ended.div_euclid(1000) + 1).contains(time)
            };
            let call = calls.iter().position(of);
            let call = call.unwrap_or_else(|| panic!("{name}: {clock:?}: not at its time: {line}"));
            taken.insert(call);
        }
        // A message of several lines has one time.
        assert!(taken.len() >= OWN, "{name}: {} calls for {} lines", taken.len(), lines.len());
        let close = |(time, _): &(i128, &str)| {
            let after = calls.iter().map(|(began, _)| time - began.div_euclid(1000));
            after.filter(|after| *after >= -1).min().unwrap_or(i128::MAX)
        };
        let longest = lines.iter().map(close).max().unwrap_or(0);
        eprintln!("{name}: {} lines, the latest {longest} us after the entry", lines.len());
    }
}
