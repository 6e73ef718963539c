//! Times in which vCPUs did not run, in traces of guests.

use serde_json::Value;
use std::collections::BTreeMap;

/// What JSON lines of a trace say of a console that was written to on vCPUs with `--exits`: each
/// character of it is an exit with this address, all are on the clock of the trace, and the sums are
/// those of the summary.
pub fn tell_of_the_console(lines: &[Value], address: &str) {
    let number = |line: &Value, key: &str| line[key].as_u64().unwrap_or_else(|| panic!("{line}"));
    let mut last = BTreeMap::new();
    let mut sums: BTreeMap<(u64, String), (u64, u64)> = BTreeMap::new();
    let mut characters = 0;
    let records = lines.iter().filter(|line| line["cpu"].is_u64() && line["ns"].is_u64());
    for line in records {
        let (cpu, ns) = (number(line, "cpu"), number(line, "ns"));
        let before = last.insert(cpu, ns).unwrap_or(0);
        assert!(before <= ns, "behind {before}: {line}");
        if line["name"] != "host:exit" {
            continue;
        }
        let fields = &line["fields"];
        let took = number(fields, "duration_ns");
        // From when the clock has started to when tracing began there were other times enough.
        assert!(took <= ns, "begun before the guest: {line}");
        let reason = fields["reason"].as_str().expect("a reason").to_owned();
        let sum = sums.entry((cpu, reason)).or_default();
        (sum.0, sum.1) = (sum.0 + 1, sum.1 + took);
        characters += u64::from(fields["address"] == address && fields["dir"] == "out");
    }
    assert!(characters >= 10, "{characters} of {sums:?}");
    for (cpu, until) in last {
        let out: u64 = sums.iter().filter(|(of, _)| of.0 == cpu).map(|(_, sum)| sum.1).sum();
        // The host has a clock of its own.
        assert!(
            out > 0 && out <= 2 * until,
            "vCPU {cpu} was out for {out} of {until} ns: {sums:?}"
        );
    }
    let end = lines.iter().find(|line| line["event"] == "end").expect("a whole trace");
    let told = end["summary"]["exits"].as_array().expect("a list").iter();
    let told: BTreeMap<_, _> = told
        .map(|of| {
            let reason = of["reason"].as_str().expect("a reason").to_owned();
            ((number(of, "cpu"), reason), (number(of, "count"), number(of, "total_ns")))
        })
        .collect();
    assert_eq!(told, sums);
}

/// A vCPU that the host had preempted has written nothing meanwhile. That was often, and is told of each: times of
/// preemptions are microseconds off, and a machine that stands still while a clock is read makes one in thousands worse.
pub fn preempted_vcpus_write_nothing(lines: &[Value]) {
    const OFF: u64 = 100_000;
    let mut records: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    let mut preempted = Vec::new();
    for line in lines {
        let (Some(cpu), Some(ns)) = (line["cpu"].as_u64(), line["ns"].as_u64()) else { continue };
        let fields = &line["fields"];
        if line["name"] != "host:exit" {
            records.entry(cpu).or_default().push(ns);
        } else if fields["reason"] == "preempted" {
            let took = fields["duration_ns"].as_u64().expect("a duration");
            preempted.push((cpu, (ns - took).saturating_add(OFF), ns.saturating_sub(OFF)));
        }
    }
    let wrote = |&&(cpu, from, until): &&(u64, u64, u64)| {
        let of = records.get(&cpu).map_or(&[][..], Vec::as_slice);
        let at = of.partition_point(|&ns| ns < from);
        of.get(at).is_some_and(|&ns| ns < until)
    };
    let wrong: Vec<_> = preempted.iter().filter(wrote).collect();
    eprintln!("{} preemptions, {wrong:?} with records", preempted.len());
    assert!(preempted.len() > 10, "{preempted:?}");
    assert!(wrong.len() <= 1 + preempted.len() / 100, "{wrong:?} of {}", preempted.len());
}
