//! Counters and histograms compared with records of the same calls.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

use crate::args::json;
use crate::cases::{Guests, assert_whole, function, trouble, value};
use crate::trace::{arch_of, cmdline};

/// Calls of the workload on each CPU.
const CALLS: u64 = 20_000;
/// Functions that a whole boot calls, at least, and how often.
const FUNCTIONS: usize = 3_000;
const ALL: u64 = 1_000_000;

/// How often each function was called: by its name.
pub(crate) type Counts = BTreeMap<String, u64>;

fn add(counts: &mut Counts, line: &Value, hits: u64) {
    let name = line["function"].as_str().unwrap_or_default();
    *counts.entry(name.to_owned()).or_default() += hits;
}

/// What a tracer has counted; of one vCPU or of all.
pub(crate) fn counted(lines: &[Value], tracer: &str, cpu: Option<u64>) -> Counts {
    let mut counts = Counts::new();
    let own = lines.iter().filter(|line| line["event"] == "count" && line["tracer"] == tracer);
    for line in own.filter(|line| cpu.is_none_or(|cpu| line["cpu"] == cpu)) {
        add(&mut counts, line, line["hits"].as_u64().unwrap());
    }
    counts
}

/// The records of a tracer, counted.
fn recorded(lines: &[Value], tracer: &str, meant: impl Fn(&Value) -> bool) -> Counts {
    let mut counts = Counts::new();
    let own = lines.iter().filter(|line| line["event"] == "entry" && line["tracer"] == tracer);
    own.filter(|line| meant(line)).for_each(|line| add(&mut counts, line, 1));
    counts
}

/// Calls of functions by caller.
type ByCaller = BTreeMap<(String, String), u64>;

/// The same by caller, of all vCPUs: of a tracer's lines of this kind, each of which is so many calls.
fn by_caller(
    lines: &[Value],
    (event, tracer): (&str, &str),
    hits: impl Fn(&Value) -> u64,
) -> ByCaller {
    let mut counts = ByCaller::new();
    let own = lines.iter().filter(|line| line["event"] == event && line["tracer"] == tracer);
    for line in own {
        let [function, caller] =
            ["function", "caller"].map(|key| line[key].as_str().unwrap_or_default().to_owned());
        *counts.entry((function, caller)).or_default() += hits(line);
    }
    counts
}

/// A histogram: calls by the least values of their buckets, the sum, and calls without a value.
#[derive(Debug, Default, PartialEq)]
struct Histogram {
    buckets: BTreeMap<i64, u64>,
    total: u64,
    missed: u64,
}

impl Histogram {
    fn add(&mut self, value: i64) {
        let low = match value {
            ..0 => i64::MIN,
            0 => 0,
            _ => 1 << value.ilog2(),
        };
        *self.buckets.entry(low).or_default() += 1;
    }

    fn calls(&self) -> u64 {
        self.buckets.values().sum()
    }

    /// The least value of the bucket that has the call with this many smaller ones.
    fn bucket_of(&self, smaller: u64) -> i64 {
        let mut calls = 0;
        let bucket = self.buckets.iter().find(|(_, own)| {
            calls += **own;
            calls > smaller
        });
        *bucket.unwrap().0
    }

    /// The sum that durations in these buckets have at least and at most, in nanoseconds: a bucket ends
    /// where the next one begins, at twice its least value, which is rounded.
    fn bounds(&self) -> std::ops::RangeInclusive<i64> {
        const ROUNDED: i64 = 2;
        /// More than a tick of any clock.
        const TICK: i64 = 1000;
        let sum = |of: &dyn Fn(i64) -> i64| {
            let each = self.buckets.iter().map(|(&low, &calls)| of(low) * calls.cast_signed());
            each.sum::<i64>()
        };
        sum(&|low| low - ROUNDED)..=sum(&|low| 2 * low + TICK)
    }
}

/// How much more or less the same calls take for one of two tracers. Each is without what the other
/// costs in between.
const RATIO: std::ops::Range<f64> = 0.3..3.0;

/// The durations of a histogram beside those of the records of the same calls, which are sorted.
///
/// What lies between the looks of both tracers at the time is as long as the call itself where that is
/// a getppid. A host that takes the CPU away there makes one sum another, and not one call in a hundred.
fn durations_are_those(time: &Histogram, of_records: &[u64], what: &str) {
    assert!(time.bounds().contains(&time.total.cast_signed()), "{what}: {time:?}");
    for percent in [10, 50, 90] {
        let smaller = of_records.len() * percent / 100;
        let (recorded, low) = (of_records[smaller] as f64, time.bucket_of(smaller as u64) as f64);
        let may_be = RATIO.start * recorded < 2.0 * low && low < RATIO.end * recorded;
        assert!(may_be, "{what}: {percent} %: {recorded} ns, from {low} ns: {time:?}");
    }
}

/// Those of a tracer by function, of all vCPUs.
fn sorted(lines: &[Value], tracer: &str, of: &str) -> BTreeMap<String, Histogram> {
    let mut all: BTreeMap<String, Histogram> = BTreeMap::new();
    let own = lines.iter().filter(|line| line["event"] == "hist" && line["tracer"] == tracer);
    for line in own {
        assert_eq!(line["of"], of, "{line}");
        let name = line["function"].as_str().unwrap_or_default();
        let one = all.entry(name.to_owned()).or_default();
        for bucket in line["buckets"].as_array().unwrap() {
            *one.buckets.entry(bucket[0].as_i64().unwrap()).or_default() +=
                bucket[1].as_u64().unwrap();
        }
        one.total += line["total"].as_u64().unwrap_or(0);
        one.missed += line["missed"].as_u64().unwrap();
    }
    all
}

/// A bucket with one call too many or too few is an answer that nobody can see to be wrong.
fn histograms_are_those_of_the_records(lines: &[Value], name: &str) {
    let mut values: BTreeMap<String, Histogram> = BTreeMap::new();
    let mut durations: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    let mut counts: BTreeMap<String, Histogram> = BTreeMap::new();
    for line in lines.iter().filter(|line| line["tracer"] == "values") {
        let function = line["function"].as_str().unwrap_or_default().to_owned();
        match line["event"].as_str().unwrap() {
            // A number may be shown as an error's.
            "return" if line["duration_ns"].is_u64() => {
                values.entry(function.clone()).or_default().add(line["value"].as_i64().unwrap());
                durations.entry(function).or_default().push(line["duration_ns"].as_u64().unwrap());
            }
            "entry" if line["args"]["count"].is_u64() => {
                let count = line["args"]["count"].as_i64().unwrap();
                let one = counts.entry(function).or_default();
                one.add(count);
                one.total += count.cast_unsigned();
            }
            _ => {}
        }
    }
    assert!(values.len() > 2 && counts.len() == 2, "{name}: {values:?} {counts:?}");
    assert_eq!(sorted(lines, "argument", "count"), counts, "{name}");
    let returned = sorted(lines, "returned", "retval");
    let timed = sorted(lines, "timed", "duration_ns");
    for (function, of_records) in &values {
        let found = &returned[function];
        if found.missed == 0 {
            assert_eq!(found.buckets, of_records.buckets, "{name}: {function}");
        }
        let calls = of_records.calls();
        assert_eq!(found.calls() + found.missed, calls, "{name}: {function}, values");
        let time = &timed[function];
        assert_eq!((time.calls(), time.missed), (calls, 0), "{name}: {function}, durations");
        let durations = durations.get_mut(function).unwrap();
        durations.sort_unstable();
        durations_are_those(time, durations, &format!("{name}: {function}"));
        // Long beside what lies between two looks at the time.
        if counts.contains_key(function) {
            let ratio = time.total as f64 / durations.iter().sum::<u64>() as f64;
            assert!(RATIO.contains(&ratio), "{name}: {function}: {ratio}");
        }
    }
}

impl Guests {
    /// A count that is not that of the calls is worse than none, and cannot be seen to be wrong. Both
    /// are of the same boot, on two vCPUs, from ftrace_init to power-off.
    pub fn counts_are_those_of_the_records(&self, name: &str) {
        let getppid = function(name, "getppid");
        let of = format!("vfs_*,do_one_initcall,{getppid}");
        let tracers = [
            format!("records={of}"),
            format!("counts={of}:count"),
            format!("first={of}:count if pid == 1"),
            format!("callers={of}:callers"),
            format!("none={of}:count if pid == 1 && pid == 2"),
            "everything=*:count".to_owned(),
            // Side by side, so that little lies between.
            format!("timed=vfs_read,vfs_write,{getppid}:hist"),
            format!("values=vfs_read,vfs_write,{getppid}:args+retval"),
            "argument=vfs_read,vfs_write:hist(count)".to_owned(),
            format!("returned=vfs_read,vfs_write,{getppid}:hist(retval)"),
        ];
        let mut args: Vec<&str> = tracers.iter().flat_map(|one| ["--tracer", one]).collect();
        let cmdline = cmdline(arch_of(name).unwrap());
        args.extend(["--cpus", "2", "--cmdline", &cmdline, "--overflow", "block"]);
        // Room for all of it: a vCPU that waits between two looks at the time makes durations others.
        args.extend(["--buffer", "64M"]);
        let files = "dd if=/dev/zero of=/tmp/counts bs=16k count=500 2>/dev/null";
        let (finished, trace) = self.run(name, &format!("getppid {CALLS} 0 1 && {files}"), &args);
        let err = finished.err();
        assert_eq!(trouble(&err), None, "{name}");
        let summary = &trace.summary;
        assert_whole(name, summary, &err);
        assert!(summary.waits.is_none(), "{name}: {:?}", summary.waits);
        let lines = json(&trace);

        let records = recorded(&lines, "records", |_| true);
        assert!(
            records.len() > 10 && records.contains_key("do_one_initcall"),
            "{name}: {records:?}"
        );
        assert_eq!(counted(&lines, "counts", None), records, "{name}");
        let first = recorded(&lines, "records", |line| line["pid"] == 1);
        assert_eq!(counted(&lines, "first", None), first, "{name}");
        assert_eq!(counted(&lines, "none", None), Counts::new(), "{name}");
        let recorded = by_caller(&lines, ("entry", "records"), |_| 1);
        let functions: BTreeSet<&String> = recorded.keys().map(|(function, _)| function).collect();
        let pairs = recorded.len();
        assert!(pairs > functions.len() + 3, "{name}: only {pairs} pairs: {recorded:?}");
        let called = by_caller(&lines, ("count", "callers"), |line| line["hits"].as_u64().unwrap());
        assert_eq!(called, recorded, "{name}");
        for cpu in [0, 1] {
            let calls = counted(&lines, "counts", Some(cpu));
            // Its first name may be another one.
            let own = calls.iter().filter(|(name, _)| name.ends_with("sys_getppid"));
            let calls: u64 = own.map(|(_, calls)| calls).sum();
            assert!((CALLS..CALLS + 100).contains(&calls), "{name}: {calls} on vCPU {cpu}");
        }
        assert!(value(&finished, "pid ") > 1, "{name}");

        let everything = counted(&lines, "everything", None);
        let (functions, sum) = (everything.len(), everything.values().sum::<u64>());
        assert!(functions > FUNCTIONS && sum > ALL, "{name}: {sum} calls of {functions}");
        for (function, calls) in &records {
            assert_eq!(everything.get(function), Some(calls), "{name}: {function}");
        }
        let init =
            everything.contains_key("do_basic_setup") || everything.contains_key("kernel_init");
        assert!(init, "{name}: nothing of the kernel's own beginning");
        histograms_are_those_of_the_records(&lines, name);
    }
}
