//! Records per second of `vmtrace convert`, for each format, compared with `trace-cmd report` on the
//! same trace.
//!
//! `cargo bench -p vmtrace --bench convert [-- MILLIONS [FOLDER]]`: makes a trace of MILLIONS (10)
//! million records in FOLDER (a temporary one): half entries and half returns, nested 8 deep, of 200
//! tasks on 4 vCPUs. Each row is a separate process: seconds of wall clock and of CPU, and peak
//! resident memory. `trace-cmd` comes from `images/readers`.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use vmtrace::stream::{
    EntryRecord, Header, LossReason, Mark, MarkKind, RecordBuffer, ReturnRecord, Summary, Symbol,
    Task, Writer,
};

const VCPUS: u32 = 4;
const DEPTH: u64 = 8;
const TASKS: u32 = 200;
const FUNCTIONS: u64 = 2000;
const FUNCTION: u64 = 0xffff_ffff_8100_0000;
const FORMATS: [&str; 14] = [
    "trace.dat",
    "trace.dat-7",
    "perfetto",
    "uftrace",
    "ctf",
    "parquet",
    "parquet-dir",
    "folded",
    "html",
    "chrome",
    "csv",
    "text",
    "graph",
    "json",
];

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let millions: u64 = arguments.next().map_or(10, |text| text.parse().expect("a number"));
    let temporary = tempfile::tempdir().expect("a directory");
    let folder = arguments.next().map_or_else(|| temporary.path().to_owned(), PathBuf::from);
    let trace = folder.join("trace.vmt");
    let records = write(&trace, millions * 1_000_000);
    let size = trace.metadata().expect("written").len();
    println!("{records} records, {} MB", size / 1_000_000);
    println!(
        "{:22} {:>8} {:>8} {:>12} {:>9} {:>9}",
        "", "wall s", "CPU s", "records/s", "RSS MB", "out MB"
    );
    let vmtrace = env!("CARGO_BIN_EXE_vmtrace");
    row(
        "report --stats",
        records,
        Command::new(vmtrace).arg("report").arg(&trace).arg("--stats"),
        None,
    );
    for format in FORMATS {
        let out = folder.join(format!("out.{format}"));
        let mut command = Command::new(vmtrace);
        command.arg("convert").arg(&trace).arg("-o").arg(&out).args(["--format", format]);
        row(&format!("convert {format}"), records, &mut command, Some(&out));
        if format == "trace.dat" {
            if let Some(mut reader) = trace_cmd() {
                reader.arg("report").arg("-i").arg(&out);
                row("trace-cmd report", records, &mut reader, None);
            } else {
                println!("trace-cmd: not there, see images/readers");
            }
        }
        if out.is_dir() {
            std::fs::remove_dir_all(&out).expect("ours");
        } else {
            std::fs::remove_file(&out).expect("ours");
        }
    }
}

fn trace_cmd() -> Option<Command> {
    let cache = std::env::var_os("VMTRACE_CACHE").map(PathBuf::from).or_else(|| {
        let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        Some(
            base.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))?
                .join("vmtrace"),
        )
    })?;
    let root = cache.join("readers");
    let program = root.join("usr/bin/trace-cmd");
    let mut command = Command::new(if program.exists() { program } else { "trace-cmd".into() });
    command.env("LD_LIBRARY_PATH", root.join("usr/lib/x86_64-linux-gnu"));
    Some(command)
}

/// Runs a command and prints what it took.
#[allow(clippy::zombie_processes)] // wait4 waits, and tells what it used
fn row(name: &str, records: u64, command: &mut Command, out: Option<&Path>) {
    let started = Instant::now();
    let child = command.stdout(Stdio::null()).spawn().expect("it runs");
    let pid = i32::try_from(child.id()).expect("a pid");
    let (mut status, mut usage) = (0, unsafe_zeroed());
    // SAFETY: both are places of the right types that outlive the call; the child is nobody else's.
    #[allow(unsafe_code)]
    let waited = unsafe { libc::wait4(pid, &raw mut status, 0, &raw mut usage) };
    assert_eq!(waited, pid);
    let status = std::process::ExitStatus::from_raw(status);
    assert!(status.success(), "{name}: {status}");
    let wall = started.elapsed().as_secs_f64();
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    let cpu = seconds(usage.ru_utime) + seconds(usage.ru_stime);
    let written = out.map_or(0, size_of) / 1_000_000;
    println!(
        "{name:22} {wall:8.2} {cpu:8.2} {:12.0} {:9} {written:9}",
        records as f64 / wall,
        usage.ru_maxrss / 1024,
    );
}

fn unsafe_zeroed() -> libc::rusage {
    // SAFETY: it is plain numbers, for which zero is good.
    #[allow(unsafe_code)]
    unsafe {
        std::mem::zeroed()
    }
}

fn size_of(path: &Path) -> u64 {
    let about = path.metadata().expect("written");
    if !about.is_dir() {
        return about.len();
    }
    let entries = std::fs::read_dir(path).expect("a directory");
    entries.map(|entry| size_of(&entry.expect("there").path())).sum()
}

/// Writes the trace; returns how many records it has.
fn write(path: &Path, wanted: u64) -> u64 {
    let header = Header {
        arch: "x86_64".into(),
        clock: "x86-tsc".into(),
        clock_hz: 2_100_000_000,
        release: "6.12.0".into(),
        vcpus: VCPUS,
        address_base: Header::TOP_4_GIB,
        ..Header::default()
    };
    let out = BufWriter::new(File::create(path).expect("room"));
    let mut writer = Writer::new(out, &header).expect("room");
    let names: Vec<_> = (0..FUNCTIONS).map(|number| format!("function_number_{number}")).collect();
    let symbol = |(number, name): (u64, _)| Symbol::new(FUNCTION + number * 256, 256, name);
    writer.symbols((0..).zip(names.iter().map(String::as_str)).map(symbol)).expect("room");
    for pid in 1..=TASKS {
        writer.task(Task::new(pid, pid, format!("task-{pid}").as_bytes())).expect("room");
    }
    let function =
        |number: u64| header.offset(FUNCTION + number % FUNCTIONS * 256).expect("kernel text");
    let mut buffer = RecordBuffer::new();
    let (mut records, mut time) = (0, 0);
    for drain in 0u64.. {
        if records >= wanted {
            break;
        }
        for vcpu in 0..VCPUS {
            buffer.clear();
            let mut at = time + u64::from(vcpu);
            for round in 0..64 {
                let task = (drain * 7 + round / 16 + u64::from(vcpu) * 50) % u64::from(TASKS) + 1;
                let pid = u32::try_from(task).expect("small");
                let sp = |depth: u64| 0xffff_c900_0000_3000 + (task << 16) - depth * 64;
                let of = |depth: u64| function((drain + round * 13) * DEPTH + depth);
                for depth in 0..DEPTH {
                    at += 150;
                    let caller = of(depth + FUNCTIONS - 1) + 5;
                    buffer.push_frame(
                        EntryRecord::new(at, of(depth), caller, pid).with_sp(sp(depth)),
                    );
                }
                for depth in (0..DEPTH).rev() {
                    at += 150;
                    buffer.push_return(ReturnRecord::new(at, of(depth), 0, pid, sp(depth)));
                }
            }
            writer.records(vcpu, &buffer).expect("room");
            records += 64 * DEPTH * 2;
        }
        time += 64 * DEPTH * 2 * 150 + 1000;
        if drain % 256 == 0 {
            writer.loss(0, 17, LossReason::Full).expect("room");
            let (kind, text) = (MarkKind::Note, format!("drain {drain}"));
            writer.mark(&Mark { ticks: time, kind, duration_ns: 0, text }).expect("room");
        }
        writer.watermark(time - 500).expect("room");
    }
    writer.end(&Summary::default()).expect("room");
    writer.into_inner().expect("room").flush().expect("room");
    records
}
