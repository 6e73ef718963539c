//! `boot --latency` as a user would ask for it.

use std::fs;
use std::process::Output;

use serde_json::Value;
use vmtrace::emulated::cache_dir;

use crate::live::vmtrace;

fn boot(kernel: &str, options: &[&str]) -> Output {
    let image = cache_dir().unwrap().join("kernels").join(kernel).join("vmlinuz");
    let mut args = vec!["--timeout", "300", "--cmdline", "loglevel=4", "--format", "json"];
    args.extend(options);
    vmtrace("boot", &image, &args)
}

/// The JSON lines of one `event`.
fn lines(output: &Output, event: &str) -> Vec<Value> {
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{err}");
    let out = String::from_utf8_lossy(&output.stdout);
    let all = out.lines().map(|line| serde_json::from_str::<Value>(line).expect(line));
    all.filter(|line| line["event"] == event).collect()
}

/// The guest's own tracer `wakeup_rt` and ours at the same time: what it calls the longest wait is
/// one of ours, of the same task, and as long. (It begins to count at `sched_wakeup`, a little behind
/// `sched_waking`, and ends at the same switch, where its probe comes after ours: a busy machine can come
/// between the two at either end.)
pub fn waits_are_those_of_the_guests_own_tracer(kernel: &str) {
    let directory = tempfile::tempdir().unwrap();
    let script = directory.path().join("own-wakeup");
    // Functions would only make both slower.
    let text = "cd /sys/kernel/tracing || exit 1\n\
        echo 0 > tracing_on && echo 0 > options/function-trace\n\
        echo wakeup_rt > current_tracer || exit 1\n\
        echo 0 > tracing_max_latency && echo 1 > tracing_on\n\
        for i in 1 2 3 4 5 6; do usleep 1000; ls /proc > /dev/null; done\n\
        echo 0 > tracing_on\n\
        echo own $(cat tracing_max_latency) $(grep '| task:' trace)\n";
    fs::write(&script, text).unwrap();
    let mount =
        "{ [ -e /sys/kernel/tracing/tracing_on ] || mount -t tracefs none /sys/kernel/tracing; }";
    let run = format!("{mount} && sh /own-wakeup");
    let output = boot(
        kernel,
        &["--cpus", "2", "--latency", "wakeup_rt", "--over", "1ns"]
            .into_iter()
            .chain(["--add", script.to_str().unwrap(), "--run", &run])
            .collect::<Vec<_>>(),
    );
    let waits = lines(&output, "latency");
    let err = String::from_utf8_lossy(&output.stderr);
    // own 20811 # | task: ktimers/0-18 (uid:0 nice:0 policy:1 rt_prio:1)
    let own = err.lines().find_map(|line| line.split_once("own ")).expect(&err).1;
    let mut words = own.split_whitespace();
    let longest: u64 = words.next().and_then(|word| word.parse().ok()).expect(own);
    let task = own.split_once("task: ").expect(own).1.split_whitespace().next().expect(own);
    assert!(longest > 0, "{own}");
    let named = |wait: &Value| format!("{}-{}", wait["comm"].as_str().unwrap(), wait["pid"]);
    let micros = |wait: &Value| wait["duration_ns"].as_u64().unwrap() / 1000;
    let of_task: Vec<u64> = waits.iter().filter(|wait| named(wait) == task).map(micros).collect();
    // The clocks are the same one.
    let between = longest / 4 + 5_000;
    let meant = longest.saturating_sub(between).max(1)..=longest + between;
    assert!(of_task.iter().any(|us| meant.contains(&(us + 1))), "{own}: {of_task:?}");
    let all = &lines(&output, "latencies")[0];
    assert!(micros(&all["longest"]) + between >= longest, "{own}: {all}");
    assert_eq!(all["gaps"]["lost"], 0, "{all}");
}

/// Two tasks that never sleep have half of a CPU each: the one is the other's noise.
pub fn a_task_is_the_noise_of_another(kernel: &str) {
    let run = "sh -c '(while :; do :; done) & (while :; do :; done) & sleep 5'";
    let output = boot(kernel, &["--latency", "osnoise", "--over", "1ms", "--run", run]);
    let all = &lines(&output, "latencies")[0];
    let rows = all["rows"].as_array().expect("rows");
    assert!(rows.len() >= 2, "{all}");
    let number = |row: &Value, key: &str| row[key].as_u64().unwrap();
    // Seconds in a row, as only these two make them: a boot has busy ones as well.
    let share = |row: &&Value| number(row, "noise_ns") * 100 / number(row, "runtime_ns").max(1);
    let shares: Vec<u64> = rows.iter().map(|row| share(&row)).collect();
    let halves =
        shares.windows(3).filter(|seconds| seconds.iter().all(|it| (30..=70).contains(it)));
    assert!(halves.count() > 0, "{shares:?} %: {all}");
    for row in rows {
        assert!(number(row, "runtime_ns") <= 1_000_000_000, "{row}");
        assert!(number(row, "longest_ns") <= number(&all["longest"], "duration_ns"), "{row}");
    }
    let counted: u64 = rows.iter().map(|row| number(row, "irq")).sum();
    assert!(counted > 100, "{all}");
    let noises = lines(&output, "latency");
    assert!(noises.iter().any(|noise| noise["mostly"].as_str().unwrap().starts_with("sh-")));
    assert_eq!(all["gaps"]["lost"], 0, "{all}");
}
