//! Parquet read by DuckDB and PyArrow, compared with `vmtrace report` on the same stream.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use vmtrace::stream::{
    EntryRecord, Header, RecordBuffer, ReturnRecord, Summary, Symbol, Writer, sample,
};

use super::{BASE, Folder, KSYS_READ, events, many, python, run, stream};

/// Lines of JSON that a reader has said.
fn ask(options: &[&str]) -> Vec<Value> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/convert/parquet/query.py");
    let text = run(python().arg(script).args(options));
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// Rows of a query; `{}` is the place.
fn duckdb<const N: usize>(folder: &Folder, place: &str, queries: [&str; N]) -> [Value; N] {
    let place = format!("'{}'", folder.path(place).display());
    let queries = queries.map(|query| query.replace("{}", &place));
    let options: Vec<_> =
        ["duckdb"].into_iter().chain(queries.iter().map(String::as_str)).collect();
    ask(&options).try_into().expect("a line a query")
}

fn report(folder: &Folder) -> Vec<Value> {
    let mut report = Command::new(env!("CARGO_BIN_EXE_vmtrace"));
    let output = report.arg("report").arg(folder.path("trace.vmt")).args(["--format", "json"]);
    let output = output.output().expect("it runs");
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// What lines of that kind say of these, sorted.
fn told(lines: &[Value], kind: &str, keys: &[&str]) -> Vec<String> {
    let lines = lines.iter().filter(|line| line["event"] == kind);
    let mut told: Vec<_> = lines
        .map(|line| Value::from(keys.iter().map(|key| line[key].clone()).collect::<Vec<_>>()))
        .map(|row| row.to_string())
        .collect();
    told.sort();
    told
}

/// The same of rows, of which some columns are JSON.
fn found(rows: &Value) -> Vec<String> {
    let mut found: Vec<_> = rows.as_array().expect("rows").iter().map(Value::to_string).collect();
    found.sort();
    found
}

/// Rows with what is JSON in some columns read.
fn read(rows: &Value, columns: &[usize]) -> Value {
    let mut rows = rows.clone();
    for row in rows.as_array_mut().expect("rows") {
        for column in columns {
            if let Some(text) = row[column].as_str() {
                row[column] = serde_json::from_str(text).expect("JSON");
            }
        }
    }
    rows
}

// Nothing of a trace is lost on its way into the table, and both readers see the same.
#[test]
fn both_readers_see_what_the_report_says() {
    let streams = [
        ("stream", stream()),
        ("sample", sample::stream()),
        ("values", sample::values()),
        ("counts", sample::counts()),
        ("events", events::everything_stream()),
    ];
    let mut seen = Vec::new();
    for (name, stream) in streams {
        let folder = Folder::new(&stream);
        let said = folder.convert(&["-o", "out.parquet"]);
        folder.convert(&["-o", "dir.parquet/"]);
        let report = report(&folder);
        let [entries, returns, uncertain, events, losses, marks, counts, all] = duckdb(
            &folder,
            "out.parquet",
            [
                "select start_ns, vcpu, pid, comm, function, module, depth, args from {}
                 where kind in ('call', 'entry')",
                "select end_ns, end_vcpu, pid, function, module, depth, duration_ns, value from {}
                 where end_ns is not null and kind in ('call', 'return')",
                "select count(*), count(duration_ns) from {} where kind in ('call', 'return') and end_ns is null",
                "select start_ns, vcpu, pid, comm, function, args from {} where kind = 'event'",
                "select vcpu, count, text from {} where kind = 'loss'",
                "select coalesce(end_ns, start_ns), mark, coalesce(duration_ns, 0), text from {} where kind = 'mark'",
                "select vcpu, tracer, function, module, count from {} where kind = 'count'",
                "from {} order by all",
            ],
        );
        let keys = ["ns", "cpu", "pid", "comm", "function", "module", "depth", "args"];
        assert_eq!(found(&read(&entries, &[7])), told(&report, "entry", &keys), "{name}");
        let keys = ["ns", "cpu", "pid", "function", "module", "depth", "duration_ns", "value"];
        assert_eq!(found(&read(&returns, &[7])), told(&report, "return", &keys), "{name}");
        let keys = ["ns", "cpu", "pid", "comm", "name", "fields"];
        assert_eq!(found(&read(&events, &[5])), told(&report, "event", &keys), "{name}");
        assert_eq!(found(&losses), told(&report, "loss", &["cpu", "count", "reason"]), "{name}");
        assert_eq!(
            found(&marks),
            told(&report, "mark", &["ns", "kind", "duration_ns", "text"]),
            "{name}"
        );
        let keys = ["cpu", "tracer", "function", "module", "hits"];
        assert_eq!(found(&counts), told(&report, "count", &keys), "{name}");
        let all_of = [&entries, &returns, &events, &losses, &marks, &counts];
        seen.push(all_of.map(|rows| rows.as_array().expect("rows").len()));
        // Without an end there is no duration.
        assert_eq!(uncertain[0][1], 0, "{name}");
        assert!(!said.contains("note: parquet: ") || said.contains("clock's start"), "{said}");

        let [types, about, groups, rows] =
            ask(&["pyarrow", folder.path("out.parquet").to_str().expect("UTF-8")])
                .try_into()
                .expect("four lines");
        let rows: Vec<_> = rows.as_array().expect("rows").clone();
        let names: Vec<_> = types.as_object().expect("a map").keys().cloned().collect();
        assert_eq!(rows.len(), all.as_array().expect("rows").len(), "{name}");
        let [columns] =
            duckdb(&folder, "out.parquet", ["select column_name from (describe from {})"]);
        let order: Vec<_> = columns
            .as_array()
            .expect("rows")
            .iter()
            .map(|row| row[0].as_str().expect("a name"))
            .collect();
        assert_eq!(order.len(), names.len());
        let rows =
            rows.iter().map(|row| order.iter().map(|name| row[*name].clone()).collect::<Value>());
        assert_eq!(found(&rows.collect()), found(&all), "{name}");
        assert_eq!(types["start_ns"], "int64");
        assert_eq!(types["vcpu"], "uint32");
        let end = report.iter().find(|line| line["event"] == "end").expect("an end");
        let summary: Value =
            serde_json::from_str(about["vmtrace.summary"].as_str().expect("a text")).expect("JSON");
        assert_eq!(summary, end["summary"], "{name}");
        let head = report.iter().find(|line| line["event"] == "header").expect("a header");
        assert_eq!(about["vmtrace.kernel"], head["release"]);
        assert_eq!(groups[0][3], "ZSTD");

        // In partitions: the same rows.
        let [parts] = duckdb(
            &folder,
            "dir.parquet/**/*.parquet",
            [
                "select * replace (vcpu::UINTEGER as vcpu) from read_parquet({}, hive_partitioning = true)",
            ],
        );
        let [columns] = duckdb(
            &folder,
            "dir.parquet/**/*.parquet",
            ["select column_name from (describe from read_parquet({}, hive_partitioning = true))"],
        );
        let position = |name: &str| {
            let columns = columns.as_array().expect("rows");
            columns.iter().position(|row| row[0] == name).expect("a column")
        };
        let parts = parts.as_array().expect("rows").iter();
        let parts = parts
            .map(|row| order.iter().map(|name| row[position(name)].clone()).collect::<Value>());
        assert_eq!(found(&parts.collect()), found(&all), "{name}");
        let arrow = ask(&["pyarrow", folder.path("dir.parquet").to_str().expect("UTF-8")]);
        let arrow = arrow[1].as_array().expect("rows").iter();
        let arrow = arrow.map(|row| order.iter().map(|name| row[*name].clone()).collect::<Value>());
        assert_eq!(found(&arrow.collect()), found(&all), "{name}");
        let about: Value =
            serde_json::from_str(&folder.read("dir.parquet/_vmtrace.json")).expect("JSON");
        assert_eq!(about["vmtrace.summary"], end["summary"], "{name}");
    }
    assert!((0..6).all(|kind| seen.iter().any(|of| of[kind] > 0)), "{seen:?}");
}

// The example counts what the report counts.
#[test]
fn the_example_loads_a_trace() {
    let folder = Folder::new(&stream());
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/examples/arrow.py");
    let mut command = python();
    command.arg(example).arg(folder.path("trace.vmt"));
    // Losses of the trace are said on standard error.
    let output = command.env("VMTRACE", env!("CARGO_BIN_EXE_vmtrace")).output().expect("it runs");
    let said = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(output.status.success(), "{said} {}", String::from_utf8_lossy(&output.stderr));
    let mut counted = BTreeMap::new();
    for line in report(&folder).iter().filter(|line| line["event"] == "entry") {
        *counted.entry(line["function"].as_str().expect("a name").to_owned()).or_insert(0_u64) += 1;
    }
    let (rows, calls) = said.split_once(" rows\n").expect("a number of rows");
    assert!(rows.parse::<usize>().expect("a number") >= counted.len(), "{said}");
    let calls = calls.lines().map(|line| {
        let (count, function) = line.trim().split_once("  ").expect("a count and a function");
        (function.to_owned(), count.parse().expect("a number"))
    });
    assert_eq!(calls.collect::<BTreeMap<_, u64>>(), counted);
    assert!(!counted.is_empty());
}

#[test]
fn a_call_is_a_row() {
    let folder = Folder::new(&stream());
    folder.convert(&["-o", "out.parquet"]);
    let [calls, parents] = duckdb(
        &folder,
        "out.parquet",
        [
            "select kind, start_ns, end_ns, duration_ns, self_ns, vcpu, pid, tgid, comm, function, module,
                    caller, depth, ended, target, target_module
             from {} where function is not null order by start_ns, depth",
            "select inside.function, around.function from {} as inside
             join {} as around on inside.parent_id = around.call_id order by all",
        ],
    );
    let expected = json!([
        [
            "call",
            1_000_000,
            2_400_000,
            1_400_000,
            898_000,
            0,
            42,
            42,
            "dd",
            "ksys_read",
            null,
            null,
            0,
            "return",
            null,
            null
        ],
        [
            "call",
            1_002_000,
            1_504_000,
            502_000,
            2_000,
            0,
            42,
            42,
            "dd",
            "vfs_read",
            null,
            "ksys_read",
            1,
            "jump",
            "ext4_read",
            "ext4"
        ],
        [
            "entry",
            1_003_000,
            null,
            null,
            null,
            0,
            42,
            42,
            "dd",
            "timer_tick",
            null,
            "vfs_read",
            null,
            null,
            null,
            null
        ],
        [
            "call",
            1_004_000,
            1_504_000,
            500_000,
            500_000,
            0,
            42,
            42,
            "dd",
            "ext4_read",
            "ext4",
            "ksys_read",
            2,
            "return",
            null,
            null
        ],
        [
            "call",
            1_100_000,
            1_101_000,
            1_000,
            1_000,
            1,
            43,
            42,
            "dd worker",
            "vfs_read",
            null,
            "ksys_read",
            0,
            "return",
            null,
            null
        ],
        [
            "call",
            900_000_000,
            null,
            null,
            null,
            1,
            43,
            42,
            "dd worker",
            "vfs_read",
            null,
            "ksys_read",
            0,
            "unseen",
            null,
            null
        ],
    ]);
    assert_eq!(calls, expected);
    assert_eq!(parents, json!([["ext4_read", "vfs_read"], ["vfs_read", "ksys_read"]]));
}

// Who asks for a second of an hour must not have to read all of it: calls that last long are where they
// spoil the statistics of no others.
#[test]
fn row_groups_are_stretches_of_time() {
    let header = Header {
        clock_hz: 1_000_000_000,
        vcpus: 2,
        address_base: Header::TOP_4_GIB,
        ..Header::default()
    };
    let mut writer = Writer::new(Vec::new(), &header).expect("header");
    writer.symbols([Symbol::new(BASE, 0x100, "ksys_read")]).expect("room");
    let sp = 0xffff_c900_0000_3000_u64;
    let mut buffer = RecordBuffer::new();
    // One around all of them.
    buffer.push_frame(EntryRecord::new(1, KSYS_READ, 0, 9).with_sp(sp));
    writer.records(1, &buffer).expect("vCPU");
    for round in 0..400_u64 {
        buffer.clear();
        for number in 0..1000 {
            let at = 10 + (round * 1000 + number) * 100;
            buffer.push_frame(EntryRecord::new(at, KSYS_READ, 0, 5).with_sp(sp + 0x10_000));
            buffer.push_return(ReturnRecord::new(at + 50, KSYS_READ, 0, 5, sp + 0x10_000));
        }
        writer.records(0, &buffer).expect("vCPU");
    }
    buffer.clear();
    buffer.push_return(ReturnRecord::new(50_000_000, KSYS_READ, 0, 9, sp));
    writer.records(1, &buffer).expect("vCPU");
    writer.end(&Summary::default()).expect("memory");
    let folder = Folder::new(&writer.into_inner().expect("memory"));
    folder.convert(&["-o", "out.parquet"]);
    let lines = ask(&["pyarrow", folder.path("out.parquet").to_str().expect("UTF-8")]);
    let groups: Vec<_> = lines[2]
        .as_array()
        .expect("groups")
        .iter()
        .map(|group| {
            let number = |at: usize| group[at].as_u64().expect("a number");
            (number(0), number(1), number(2))
        })
        .collect();
    assert_eq!(groups.iter().map(|group: &(u64, u64, u64)| group.0).sum::<u64>(), 400_001);
    let (long, others): (Vec<(u64, u64, u64)>, Vec<_>) =
        groups.into_iter().partition(|group| group.0 == 1);
    assert_eq!(long, [(1, 1, 1)]);
    assert_eq!(others.len(), 4);
    assert!(others.windows(2).all(|pair| pair[0].2 < pair[1].1), "{others:?}");
}

#[test]
fn many_rows_and_none() {
    let mut writer = many(1_000_000_000);
    writer.end(&Summary::default()).expect("memory");
    let folder = Folder::new(&writer.into_inner().expect("memory"));
    folder.convert(&["-o", "out.parquet"]);
    folder.convert(&["-o", "parts", "--format", "parquet-dir"]);
    let query = "select count(*), sum(start_ns)::BIGINT, count(distinct pid) from {}";
    let [whole] = duckdb(&folder, "out.parquet", [query]);
    let [parts] = duckdb(&folder, "parts/**/*.parquet", [query]);
    assert_eq!((&whole, whole[0][0].as_u64()), (&parts, Some(40_000)));
    let place = |vcpu: u32| folder.path(&format!("parts/vcpu={vcpu}/part-0.parquet")).exists();
    assert_eq!([0, 1, 2].map(place), [true, false, true]);
    // A table without rows is one.
    folder.convert(&["-o", "none.parquet", "-f", "nothing_*"]);
    let [none] = duckdb(&folder, "none.parquet", ["select count(*) from {}"]);
    assert_eq!(none, json!([[0]]));
}
