//! `boot --latency` and `ctl latency`, run as a user would.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::Value;
use vmtrace::emulated::cache_dir;
use vmtrace::initramfs::{LoadedModule, Modules};

use crate::live::{LiveGuest, vmtrace};
use crate::trace::{arch_of, syscall};

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

/// The guest's own tracing is there.
const MOUNTED: &str =
    "{ [ -e /sys/kernel/tracing/tracing_on ] || mount -t tracefs none /sys/kernel/tracing; }";

/// Boots with two vCPUs, files and what is to be run, and keeps the trace; what it said.
fn recorded(kernel: &str, trace: &Path, kind: &str, files: &[PathBuf], run: &str) -> String {
    let image = cache_dir().unwrap().join("kernels").join(kernel).join("vmlinuz");
    let trace = trace.to_str().unwrap();
    let args = ["--cpus", "2", "--timeout", "300", "--cmdline", "loglevel=4"];
    // A machine that is busy with others takes nothing for a while.
    let whole = ["--buffer", "256M", "--overflow", "block"];
    let more = ["--latency", kind, "--run", run, "-o", trace];
    let add = files.iter().flat_map(|file| ["--add", file.to_str().unwrap()]);
    let add: Vec<&str> = add.collect();
    let output = vmtrace("boot", &image, &[&args[..], &whole, &more, &add].concat());
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{err}");
    err
}

/// Latencies of a trace in which nothing is lost.
fn times(trace: &Path, kind: &str, over: &str) -> Vec<Value> {
    let args = ["--latency", kind, "--over", over, "--format", "json"];
    let output = vmtrace("report", trace, &args);
    assert_eq!(lines(&output, "latencies")[0]["gaps"]["lost"], 0);
    lines(&output, "latency")
}

/// The guest's own tracer `wakeup_rt` and ours at the same time: what it calls the longest wait is
/// one of ours, of the same task, and as long. (It begins to count at `sched_wakeup`, a little behind
/// `sched_waking`, and ends at the same switch, where its probe comes after ours: a busy machine can come
/// between the two at either end.) Its probes come and go while none of ours are called, and no wait of ours reaches over
/// that: so its longest is one of a time in which all of both were there.
pub fn waits_are_those_of_the_guests_own_tracer(kernel: &str) {
    let directory = tempfile::tempdir().unwrap();
    let script = directory.path().join("own-wakeup");
    // Functions would only make both slower.
    let text = "cd /sys/kernel/tracing || exit 1\n\
        echo 0 > tracing_on && echo 0 > options/function-trace\n\
        echo wakeup_rt > current_tracer || exit 1\n\
        echo 1 > tracing_on && usleep 500000 && echo 0 > tracing_max_latency\n\
        for i in 1 2 3 4 5 6 7 8 9 10; do usleep 1000; ls /proc > /dev/null; done\n\
        cat trace > /own-trace\n\
        echo 0 > tracing_on\n\
        echo own $(sed -n 's/.*latency: \\([0-9]*\\) us.*/\\1/p' /own-trace) $(grep '| task:' /own-trace)\n";
    fs::write(&script, text).unwrap();
    let run = format!("{MOUNTED} && sh /own-wakeup");
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

/// The guest's own tracer `osnoise` and ours at the same time: the noises of interrupts that it tells are ours, at
/// that time and as long. (The two probes at either end are called one after the other: a busy machine comes
/// between them now and then.)
pub fn noises_are_those_of_the_guests_own_tracer(kernel: &str) {
    /// Nanoseconds between two probes of one event.
    const BETWEEN: u64 = 10_000;
    let directory = tempfile::tempdir().unwrap();
    let (script, trace) =
        (directory.path().join("own-osnoise"), directory.path().join("osnoise.vmt"));
    let tell = r"s/.*\[\([0-9]*\)\].* irq_noise: *.* start \([0-9.]*\) duration \([0-9]*\) ns/own \1 \2 \3/p";
    let text = format!(
        "cd /sys/kernel/tracing || exit 1\n\
         echo 0 > tracing_on && echo 1 > events/osnoise/irq_noise/enable\n\
         echo osnoise > current_tracer || exit 1\n\
         echo 1 > tracing_on && usleep 2500000\n\
         echo 0 > tracing_on && sed -n '{tell}' trace\n\
         echo nop > current_tracer\n"
    );
    fs::write(&script, text).unwrap();
    let run = format!("{MOUNTED} && sh /own-osnoise");
    let err = recorded(kernel, &trace, "osnoise", std::slice::from_ref(&script), &run);
    // own 000 6.835544943 13419658
    let own = |line: &str| {
        let mut words = line.split_once("own ")?.1.split_whitespace();
        let cpu = words.next()?.parse::<u64>().ok()?;
        let (seconds, rest) = words.next()?.split_once('.')?;
        let since = seconds.parse::<u64>().ok()? * 1_000_000_000 + rest.parse::<u64>().ok()?;
        Some((cpu, since, words.next()?.parse::<u64>().ok()?))
    };
    let own: Vec<_> = err.lines().filter_map(own).collect();
    let number = |value: &Value, key: &str| value[key].as_u64().unwrap();
    let mut ours: Vec<_> = times(&trace, "osnoise", "1ns")
        .iter()
        .filter(|noise| noise["comm"].as_str().unwrap().starts_with("osnoise/"))
        .map(|noise| (number(noise, "cpu"), number(noise, "since_ns"), number(noise, "ns")))
        .collect();
    ours.sort_unstable();
    // Whether it is in one of ours, and whether that is as long. Several of ours are one where they are near to
    // each other.
    let is_ours = |ahead: u64, (cpu, since, duration): (u64, u64, u64)| {
        let (since, until) = (since + ahead, since + ahead + duration);
        let behind = ours.partition_point(|noise| *noise <= (cpu, since + BETWEEN, u64::MAX));
        let before = ours[..behind].last().filter(|noise| noise.0 == cpu);
        let is_in = before.is_some_and(|noise| noise.2 + BETWEEN >= until);
        let ends = before.is_some_and(|noise| noise.2 <= until + BETWEEN);
        (is_in, is_in && ends && before.is_some_and(|noise| noise.1 + BETWEEN >= since))
    };
    // Our clock is ahead of its clock by as much at each: as at one of the longest.
    let mut longest = own.clone();
    longest.sort_by_key(|noise| std::cmp::Reverse(noise.2));
    let ahead = longest.iter().take(10).flat_map(|long| {
        let same = ours.iter().filter(|it| it.0 == long.0 && it.2 - it.1 + BETWEEN >= long.2);
        same.filter_map(|noise| noise.1.checked_sub(long.1))
    });
    let agree = |ahead| {
        let all = own.iter().map(|&noise| is_ours(ahead, noise));
        all.fold((0, 0), |(inside, same), it| {
            (inside + usize::from(it.0), same + usize::from(it.1))
        })
    };
    let (inside, same) = ahead.map(agree).max().unwrap_or_default();
    let all = own.len();
    assert!(all > 100, "{all}: {err}");
    assert!(inside * 10 > all * 8 && same * 2 > all, "{inside} and {same} of {all}: {err}");
}

/// How often something is off, in a guest that says how long it was.
const OFF: usize = 6;

/// Times with preemption off on CPU 0 and with interrupts off on CPU 1, of which the guest knows how long they
/// were at least (`vmtrace-guest off`): each is found, of that length. What may come between the ends of
/// a time and the guest's looks at its clock (an interrupt, another process of this machine) does
/// not come each time.
pub fn times_off_are_as_long_as_they_were(kernel: &str) {
    const SLACK: u64 = 1_000_000;
    let directory = tempfile::tempdir().unwrap();
    let trace = directory.path().join("off.vmt");
    let guest = crate::workload(arch_of(kernel).unwrap()).unwrap();
    let run = format!("/vmtrace-guest off {OFF}");
    let err = recorded(kernel, &trace, "preemptirqsoff", &[guest], &run);
    let number = |value: &Value| value.as_u64().unwrap();
    let told = |what: &str| -> Vec<u64> {
        let rest = |line: &str| Some(line.split_once(&format!("off {what} "))?.1.trim().parse());
        err.lines().filter_map(rest).map(|ns| ns.expect(&err)).collect()
    };
    let (alone, by_interrupts) = (told("preempt"), told("irq"));
    assert_eq!((alone.len(), by_interrupts.len()), (OFF, OFF), "{err}");
    let mut held = times(&trace, "preemptoff", "500us");
    // Preemption is off on CPU 0 while that waits for CPU 1 as well.
    held.retain(|it| it["started"] == "bpf_prog_test_run_raw_tp" && it["comm"] == "holder");
    assert_eq!(held.len(), 2 * OFF, "{held:?}: {err}");
    let excess = |known: &u64, found: &Value| {
        // The guest's clock is another one.
        (number(&found["duration_ns"]) + known / 100).checked_sub(*known)
    };
    let compared = |known: &[u64], found: &[Value], what: &str| {
        let all = known.iter().zip(found).map(|(known, found)| excess(known, found));
        let all: Vec<u64> = all.map(|it| it.expect("one is shorter than it was")).collect();
        assert!(all.iter().min().unwrap() < &SLACK, "{what}: {all:?} of {known:?}");
    };
    compared(&alone, &held[..OFF], "preemption off");
    let off = times(&trace, "irqsoff", "500us");
    let of_windows = by_interrupts.iter().zip(&held[OFF..]).map(|(known, held)| {
        let [since, until] = ["since_ns", "ns"].map(|key| number(&held[key]));
        let meanwhile = off.iter().filter(|it| {
            it["cpu"] == 1 && number(&it["since_ns"]) < until && number(&it["ns"]) > since
        });
        let longest = meanwhile.max_by_key(|it| number(&it["duration_ns"]));
        longest.unwrap_or_else(|| panic!("{known} ns with interrupts off: {held}")).clone()
    });
    compared(&by_interrupts, &of_windows.collect::<Vec<_>>(), "interrupts off");
}

/// How often a module comes, and how many bridges it makes each time.
const MODULES: usize = 3;
const BRIDGES: usize = 5;

/// Times with interrupts off in a module's own code, which switches them by instructions of its own: each
/// time that it is loaded, its tables of addresses are changed with interrupts off. They are short.
pub fn times_off_in_a_module_are_seen(kernel: &str) {
    const LONGEST: u64 = 100_000_000;
    let directory = tempfile::tempdir().unwrap();
    let modules = cache_dir().unwrap().join("kernels").join(kernel).join("modules");
    let modules = Modules::open(&modules).unwrap().resolve(&["bridge"]).unwrap();
    let (mut files, mut load) = (Vec::new(), String::new());
    for LoadedModule { name, content } in modules {
        let file = directory.path().join(format!("{name}.ko"));
        fs::write(&file, content).unwrap();
        files.push(file);
        if name != "bridge" {
            load.push_str(&format!("insmod /{name}.ko; "));
        }
    }
    let [rounds, bridges] = [MODULES, BRIDGES]
        .map(|count| (0..count).map(|number| number.to_string()).collect::<Vec<_>>().join(" "));
    let run = format!(
        "{load}for i in {rounds}; do insmod /bridge.ko && for j in {bridges}; do brctl addbr br0 && \
         brctl delbr br0 || exit 1; done && rmmod bridge || exit 1; done"
    );
    let trace = directory.path().join("module.vmt");
    let err = recorded(kernel, &trace, "irqsoff", &files, &run);
    // Not the shortest: they are more than a report lists.
    let off = times(&trace, "irqsoff", "2us");
    let own = |key: &str| -> Vec<&Value> {
        let own = |it: &&Value| it[key].as_str().is_some_and(|name| name.ends_with(" [bridge]"));
        off.iter().filter(own).collect()
    };
    let (begun, ended) = (own("started"), own("ended"));
    eprintln!("{kernel}: {} times begin in the module, {} end there", begun.len(), ended.len());
    // An interrupt may end one.
    assert!(begun.len() >= MODULES * BRIDGES, "{begun:?}: {err}");
    assert!(ended.len() * 10 >= begun.len() * 8, "{ended:?}: {err}");
    let long = |it: &&&Value| it["duration_ns"].as_u64().unwrap() > LONGEST;
    assert_eq!(begun.iter().chain(&ended).filter(long).count(), 0, "{begun:?} {ended:?}");
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

/// What a task waits for its CPU in each of them at least, in milliseconds.
const WAITS: u64 = 100;
/// Waits that are told.
const OVER: &str = "90ms";

/// Rounds in which a task waits for its CPU, without end.
pub fn workload() -> String {
    format!("/vmtrace-guest rounds {WAITS}")
}

/// What counts the rounds of `vmtrace-guest rounds`, as of `--tracer`.
pub fn rounds(kernel: &str) -> String {
    format!("rounds={}:count", syscall(kernel, "sched_rr_get_interval").unwrap())
}

/// Latencies of a guest in which `vmtrace-guest rounds` runs and is counted, measured while it does: what it knows of
/// its waits is found, each start and stop leaves the kernel's code as it was, and in between it is
/// another. Returns what must be among what the guest has said at the end.
pub fn of_a_running_guest(kernel: &str, guest: &mut LiveGuest) -> Rounds {
    let socket = guest.at("socket");
    let ctl = |args: &[&str]| {
        let out = vmtrace("ctl", &socket, args);
        let said = if out.status.success() { out.stdout } else { out.stderr };
        (out.status.success(), String::from_utf8(said).unwrap())
    };
    let ok = |args: &[&str]| {
        let (done, said) = ctl(args);
        assert!(done, "{args:?}: {said}");
        said
    };
    let refused = |args: &[&str]| {
        let (done, said) = ctl(args);
        assert!(!done, "{args:?}: {said}");
        said
    };
    let status = || serde_json::from_str::<Value>(&ok(&["status", "--json"])).unwrap();
    // The guest's changes of tracepoints are watched from the first event on.
    ok(&["event", "add", "sched:sched_process_exec"]);
    ok(&["event", "remove", "sched:sched_process_exec"]);
    let count = || {
        let counted: Value = serde_json::from_str(&ok(&["table", "--json"])).unwrap();
        let counts = counted["counts"].as_array().unwrap().iter();
        counts
            .filter(|count| count["tracer"] == "rounds")
            .map(|it| it["hits"].as_u64().unwrap())
            .sum()
    };
    // The number of a round that begins and ends with all as it is now.
    let mut whole_round = || -> u64 {
        let before: u64 = count();
        guest.wait_until(|| count() >= before + 2);
        before + 1
    };
    if kernel.starts_with("riscv64") {
        // Landings stay, in code that the kernel does not use.
        ok(&["latency", "start", "irqsoff"]);
        ok(&["latency", "stop"]);
    }
    let mut rounds = Rounds::default();
    rounds.plain.push(whole_round());
    assert!(refused(&["latency", "show"]).contains("latency start KIND"));
    let said = ok(&["latency", "start", "irqsoff"]);
    assert!(said.contains("switches of interrupts and preemption"), "{said}");
    assert!(status()["sites"]["switches"].as_u64() > Some(1000));
    assert!(refused(&["latency", "start", "wakeup"]).contains("irqsoff is measured already"));
    rounds.changed.push(whole_round());
    let page = ok(&["latency", "show"]);
    assert!(page.starts_with("# tracer: irqsoff\n") && page.contains("TIMES ON CPU 0"), "{page}");
    let told = ok(&["latency", "stop", "--json"]);
    let told: Value = serde_json::from_str(told.lines().last().unwrap()).unwrap();
    assert!(told["count"].as_u64() > Some(100), "{told}");
    // Nothing that had begun before.
    let at = |value: &Value| value.as_u64().unwrap();
    let (longest, seen) = (&told["longest"], &told["seen_ns"]);
    assert!(
        at(&seen[0]) <= at(&longest["since_ns"]) && at(&longest["ns"]) <= at(&seen[1]),
        "{told}"
    );
    assert_eq!(status()["sites"]["switches"], 0);
    rounds.plain.push(whole_round());
    ok(&["latency", "start", "wakeup", "--over", OVER]);
    assert!(refused(&["event", "remove", "sched:*"]).contains("latency stop"));
    rounds.changed.push(whole_round());
    let sleepers = |text: &str| -> Vec<u64> {
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).expect(line));
        let own = lines.filter(|line| line["event"] == "latency" && line["comm"] == "sleeper");
        own.map(|wait| wait["duration_ns"].as_u64().unwrap()).collect()
    };
    rounds.waits = sleepers(&ok(&["latency", "show", "--json"]));
    let all = sleepers(&ok(&["latency", "stop", "--json"]));
    assert!(all.starts_with(&rounds.waits), "{all:?} begins with {:?}", rounds.waits);
    assert!(refused(&["latency", "stop"]).contains("no latency is measured"));
    rounds.plain.push(whole_round());
    rounds.waits = all;
    rounds
}

/// What was measured of rounds, and in which of them what was traced.
#[derive(Debug, Default)]
pub struct Rounds {
    /// Numbers of rounds without events.
    plain: Vec<u64>,
    /// Those with events.
    changed: Vec<u64>,
    /// Waits of the sleeper that were found, in nanoseconds.
    waits: Vec<u64>,
}

impl Rounds {
    /// Compares with what the guest has said, and with what a reader of the trace finds.
    pub fn agree(&self, said: &str, trace: &Path) {
        let mut told = BTreeMap::new();
        for line in said.lines() {
            let words: Vec<_> = line.split_whitespace().collect();
            if let ["round", number, "waited", waited, "code", code] = words[..] {
                told.insert(number.parse::<u64>().unwrap(), (waited.parse::<u64>().unwrap(), code));
            }
        }
        let code = |number: &u64| told.get(number).map(|(_, code)| *code).expect(said);
        let plain = code(&self.plain[0]);
        assert!(self.plain.iter().all(|number| code(number) == plain), "{self:?}: {said}");
        assert!(self.changed.iter().all(|number| code(number) != plain), "{self:?}: {said}");
        // The guest looks at its clock before it wakes the task, and when that runs again.
        let known: Vec<u64> = told.values().map(|(waited, _)| *waited).collect();
        let most = known.iter().max().expect(said);
        // Its clock is another one.
        let clocks = |ns: u64| ns / 100;
        let least = WAITS * 1_000_000;
        let meant = least - clocks(least)..=most + clocks(*most);
        let all_meant = self.waits.iter().all(|wait| meant.contains(wait));
        assert!(!self.waits.is_empty() && all_meant, "{self:?}: {meant:?}, {known:?}");
        let out =
            vmtrace("report", trace, &["--latency", "wakeup", "--over", OVER, "--format", "json"]);
        let text = String::from_utf8(out.stdout).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).expect(line));
        let own = lines.filter(|line| line["event"] == "latency" && line["comm"] == "sleeper");
        let read: Vec<_> = own.map(|wait| wait["duration_ns"].as_u64().unwrap()).collect();
        assert_eq!(read, self.waits, "{text}");
    }
}
