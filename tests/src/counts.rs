//! Counted calls beside records of the same calls.

use serde_json::Value;
use std::collections::BTreeMap;

use crate::args::json;
use crate::cases::{Guests, function, trouble, value};
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
            format!("none={of}:count if pid == 1 && pid == 2"),
            "everything=*:count".to_owned(),
        ];
        let mut args: Vec<&str> = tracers.iter().flat_map(|one| ["--tracer", one]).collect();
        let cmdline = cmdline(arch_of(name).unwrap());
        args.extend(["--cpus", "2", "--cmdline", &cmdline]);
        let (finished, trace) = self.run(name, &format!("getppid {CALLS} 0 1"), &args);
        let err = finished.err();
        assert_eq!(trouble(&err), None, "{name}");
        let summary = &trace.summary;
        assert_eq!((summary.lost(), &summary.notes[..]), (0, &[] as &[String]), "{name}: {err}");
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
    }
}
