//! Perfetto's traces, read by its trace_processor.

use std::path::Path;

use serde_json::{Value, json};

use super::{Folder, events, python, reader, run, stream};

/// Rows of each query.
fn query<const N: usize>(folder: &Folder, queries: [&str; N]) -> [Value; N] {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/convert/perfetto/query.py");
    let node = reader("nodejs");
    let mut python = python();
    // Its libraries, where they are not the system's.
    python.envs(node.get_envs().filter_map(|(key, value)| Some((key, value?))));
    let text = run(python
        .arg(script)
        .arg(node.get_program())
        .arg(folder.path("out.pftrace"))
        .args(queries));
    let lines = text.lines().map(|line| serde_json::from_str(line).expect("JSON"));
    lines.collect::<Vec<_>>().try_into().expect("a line a query")
}

#[test]
fn trace_processor_reads_calls_marks_and_losses() {
    let folder = Folder::new(&stream());
    folder.convert(&["-o", "out.pftrace"]);
    let [slices, args, lanes, counters, errors, losses] = query(
        &folder,
        [
            "select t.tid, t.name, s.name, s.ts, s.dur, s.depth from slice s join thread_track k on s.track_id = k.id
             join thread t using (utid) order by s.ts, s.depth",
            "select s.name, a.key, a.display_value from slice s join args a using (arg_set_id)
             where s.name = 'timer_tick' and a.key like '%caller'",
            "select k.name, s.name, s.ts, s.dur from slice s join track k on s.track_id = k.id
             where k.name in ('pauses', 'console', 'vCPU 1') order by s.ts, s.name",
            "select k.name, c.ts, c.value from counter c join track k on c.track_id = k.id order by c.ts",
            "select name, idx, value from stats where severity = 'error' and value != 0",
            "select idx, value from stats where name = 'ftrace_cpu_has_data_loss' and value != 0",
        ],
    );
    let expected = json!([
        [42, "dd", "ksys_read", 1_000_000, 1_400_000, 0],
        [42, "dd", "vfs_read", 1_002_000, 502_000, 1],
        [42, "dd", "timer_tick", 1_003_000, 0, 2],
        [42, "dd", "ext4_read [ext4]", 1_004_000, 500_000, 2],
        [43, "dd worker", "vfs_read", 1_100_000, 1000, 0],
        [43, "dd worker", "vfs_read", 900_000_000, 0, 0],
    ]);
    assert_eq!(slices, expected);
    assert_eq!(args, json!([["timer_tick", "debug.caller", "vfs_read"]]));
    let expected = json!([
        ["pauses", "attach: 4 sites", 400, 600],
        ["vCPU 1", "dd worker 43", 1_100_000, 898_900_000],
        ["vCPU 1", "123 records lost", 1_101_000, 0],
        ["console", "a line, \"quoted\"", 950_000_000, 0],
    ]);
    assert_eq!(lanes, expected);
    assert_eq!(counters, json!([["vCPU 1 lost records", 1_101_000, 123.0]]));
    // What is lost is an error of the trace's, and there is no other.
    assert_eq!(errors, json!([["ftrace_cpu_dropped_events_delta", 1, 123]]));
    assert_eq!(losses, json!([[1, 1]]));
}

#[test]
fn trace_processor_reads_events() {
    let folder = Folder::new(&events::everything_stream());
    folder.convert(&["-o", "out.pftrace"]);
    let [switches, rows, states, args, errors] = query(
        &folder,
        [
            "select count(*) from sched_slice",
            "select name, count(*) from ftrace_event group by name order by name",
            "select state, count(*) from thread_state group by state order by state",
            "select a.key, a.display_value from ftrace_event e join args a using (arg_set_id)
             where e.name = 'plain' and e.id = (select min(id) from ftrace_event where name = 'plain') order by a.key",
            "select name, idx, value from stats where severity = 'error' and value != 0",
        ],
    );
    assert_eq!(switches, json!([[14]]));
    let expected = json!([["no_system", 1], ["plain", 10], ["printed", 10], ["sched_switch", 14]]);
    assert_eq!(rows, expected);
    // Seven times on the CPU, and once in each state of those that the events tell.
    let states = states.as_array().expect("rows");
    let of = |name: &str| states.iter().find(|row| row[0] == name).map(|row| row[1].clone());
    assert_eq!([of("Running"), of("S"), of("D")], [7, 1, 1].map(|count| Some(json!(count))));
    for (key, value) in [
        ("s8", "-2"),
        ("u16", "65534"),
        ("comm", "dd"),
        ("mode", "BOTH"),
        ("path", "/a/\"path\\ \u{e4} %s\n"),
        ("args", "0xa, 0xb"),
    ] {
        let row = json!([key, value]);
        assert!(args.as_array().expect("rows").contains(&row), "{row} is not in {args}");
    }
    assert_eq!(errors, json!([["ftrace_cpu_dropped_events_delta", 1, 7]]));
}
