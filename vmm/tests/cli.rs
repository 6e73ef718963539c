//! Tests of what all commands have in common, run as a user would.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use vmtrace::stream::{EntryRecord, Header, Summary, Symbol, Task, Writer};

fn vmtrace(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vmtrace"));
    command.args(arguments).stdin(Stdio::null());
    command
}

/// A pipe that nobody reads.
fn closed() -> Stdio {
    io::pipe().unwrap().1.into()
}

// Scripts look at the exit code; what they do with the words is their business.
#[test]
fn who_cannot_be_told_gets_the_exit_code() {
    let full = || Stdio::from(File::options().write(true).open("/dev/full").unwrap());
    for (arguments, code) in [
        (&["functions", "/nonexistent"][..], 1),
        (&["boot", "/nonexistent"], 1),
        (&["ctl", "/nonexistent", "status"], 1),
        (&["run", "/nonexistent", "true"], 125),
        (&["boot", "--no-such-option"], 2),
    ] {
        for stderr in [closed(), full()] {
            let status = vmtrace(arguments).stderr(stderr).status().unwrap();
            assert_eq!(status.code(), Some(code), "{arguments:?}");
        }
    }
}

// It was looked for as a file, which is missing then.
#[test]
fn a_trace_is_not_controlled_by_an_address() {
    for address in ["vsock:2:1024", "vsock:", "vsock:x"] {
        let output = vmtrace(&["ctl", address, "status"]).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains("controlled only from the machine that runs its guest"), "{text}");
    }
    let output = vmtrace(&["ctl", "./vsock:x", "status"]).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && text.contains("./vsock:x: no running"), "{text}");
}

// The socket is first, whatever else there has to be.
#[test]
fn usage_has_arguments_in_their_order() {
    for arguments in [&["run", "--help"][..], &["run"]] {
        let output = vmtrace(arguments).output().unwrap();
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        let (_, usage) = text.split_once("Usage: ").unwrap();
        assert!(usage.starts_with("vmtrace run [OPTIONS] <SOCKET> <CMD>"), "{text}");
    }
}

// A boot takes a while: what cannot be run is said before.
#[test]
fn command_lines_that_cannot_be_run_are_refused_before_anything_boots() {
    for (line, reason) in [
        ("ls 'a", "lacks a closing '"),
        ("true &&", "'&&' without a command"),
        (" ", "there is no command in it"),
    ] {
        let output = vmtrace(&["boot", "/nonexistent", "--run", line]).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(reason), "{text}");
    }
}

fn give(mut stream: UnixStream, answer: &[u8]) {
    BufReader::new(&stream).read_line(&mut String::new()).unwrap();
    // The client may have left.
    let _ = stream.write_all(answer);
}

fn stream() -> Vec<u8> {
    let header = Header {
        arch: "x86_64".into(),
        clock: "x86-tsc".into(),
        clock_hz: 1_000_000_000,
        release: "6.12.0".into(),
        vcpus: 1,
        address_base: Header::TOP_4_GIB,
        vmtrace_version: "0.1.0".into(),
        ..Header::default()
    };
    let mut writer = Writer::new(Vec::new(), &header).unwrap();
    writer.symbols([Symbol::new(0xffff_ffff_8100_0000, 16, "vfs_read")]).unwrap();
    writer.task(Task::new(1, 1, b"init")).unwrap();
    writer.entries(0, &[EntryRecord::new(1, 0x8100_0000, 0, 1)]).unwrap();
    writer.end(&Summary::default()).unwrap();
    writer.into_inner().unwrap()
}

/// A running trace that gives everybody the same answer, and its socket.
fn answering(answer: &'static [u8]) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            give(stream.unwrap(), answer);
        }
    });
    (directory, socket)
}

// `vmtrace ctl S status | head -1`
#[test]
fn a_reader_of_an_answer_that_has_seen_enough_is_no_failure() {
    let (_directory, socket) = answering(b"OK {\"state\":\"tracing\"}\n");
    let socket = socket.to_str().unwrap();
    for arguments in [&["ctl", socket, "status"][..], &["ctl", socket, "status", "--json"]] {
        let whole = vmtrace(arguments).output().unwrap();
        assert!(whole.status.success() && whole.stdout.ends_with(b"\n"), "{whole:?}");
        let cut = vmtrace(arguments).stdout(closed()).stderr(Stdio::piped()).output().unwrap();
        assert_eq!((cut.status.code(), cut.stderr.len()), (Some(0), 0), "{cut:?}");
    }
}

// The trace of yesterday, given up for a typing error.
#[test]
fn a_stream_that_is_not_had_leaves_the_file() {
    let (directory, refusing) = answering(b"ERR the trace has ended\n");
    let missing = directory.path().join("missing");
    let file = directory.path().join("trace");
    fs::write(&file, "yesterday").unwrap();
    for source in [&missing, &refusing] {
        for format in ["raw", "text"] {
            let mut command = vmtrace(&["stream", "--format", format, "-o"]);
            let out = command.arg(&file).arg(source).output().unwrap();
            assert_eq!(out.status.code(), Some(1), "{out:?}");
            assert_eq!(fs::read_to_string(&file).unwrap(), "yesterday");
        }
    }
}

// For ever is a time to wait for, not an overflow.
#[test]
fn any_time_can_be_waited_for() {
    let directory = tempfile::tempdir().unwrap();
    let late = directory.path().join("late");
    let longest = u64::MAX.to_string();
    let mut command = vmtrace(&["stream", "--wait", &longest]);
    let child = command.arg(&late).stderr(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let listener = UnixListener::bind(&late).unwrap();
    give(listener.accept().unwrap().0, b"ERR too late\n");
    let out = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(said.contains("too late"), "{said}");
}

// Whatever the host is that the run would have had.
#[test]
fn boot_does_not_overwrite_what_it_reads() {
    let directory = tempfile::tempdir().unwrap();
    let kernel = directory.path().join("kernel");
    fs::write(&kernel, "precious").unwrap();
    for host in ["auto", "kvm", "emulated"] {
        for option in ["-o", "--console"] {
            let mut command = vmtrace(&["boot", "--host", host, option]);
            let out = command.arg(&kernel).arg(&kernel).output().unwrap();
            let said = String::from_utf8_lossy(&out.stderr);
            assert_eq!(out.status.code(), Some(1), "{said}");
            assert!(
                said.contains("would overwrite the kernel") && said.lines().count() == 1,
                "{said}"
            );
            assert_eq!(fs::read_to_string(&kernel).unwrap(), "precious");
        }
    }
}

// Which of the two is to be looked at: the trace, or the disk?
#[test]
fn a_stream_that_cannot_be_written_is_not_the_traces_fault() {
    static STREAM: OnceLock<Vec<u8>> = OnceLock::new();
    let (_directory, socket) = answering(STREAM.get_or_init(stream));
    for format in ["raw", "text", "json", "stats"] {
        let mut command = vmtrace(&["stream", "--format", format, "-o", "/dev/full"]);
        let out = command.arg(&socket).output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{said}");
        let expected =
            "vmtrace: error: cannot write /dev/full: No space left on device (os error 28)\n";
        assert_eq!(said, expected, "{format}");
    }
}

// Who follows a vCPU that is not there would wait for as long as the guest runs.
#[test]
fn a_running_guest_has_no_other_vcpus() {
    static STREAM: OnceLock<Vec<u8>> = OnceLock::new();
    let (_directory, socket) = answering(STREAM.get_or_init(stream));
    let socket = socket.to_str().unwrap();
    for command in
        [&["stream", socket][..], &["stream", socket, "--format", "json"], &["top", socket]]
    {
        let out = vmtrace(&[command, &["--cpu", "7"]].concat()).output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{command:?}: {said}");
        assert!(said.contains("--cpu 7: the guest has no such vCPU; there is only 0"), "{said}");
        // What has no record yet may have one later.
        let out = vmtrace(&[command, &["--cpu", "0", "--pid", "99"]].concat()).output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success() && !said.contains("note"), "{command:?}: {said}");
    }
}

// The trace of yesterday, given up for a vCPU that there is not.
#[test]
fn a_refused_stream_leaves_its_file_as_it_is() {
    static STREAM: OnceLock<Vec<u8>> = OnceLock::new();
    let (directory, socket) = answering(STREAM.get_or_init(stream));
    let (socket, file) = (socket.to_str().unwrap(), directory.path().join("file"));
    let old = "of yesterday\n".repeat(10_000);
    for format in ["text", "json", "top", "raw"] {
        fs::write(&file, &old).unwrap();
        let run = |cpu: &str| {
            let command = ["stream", socket, "--format", format, "--cpu", cpu, "-o"];
            vmtrace(&command).arg(&file).output().unwrap().status.code()
        };
        // The bytes themselves are of all vCPUs.
        if format != "raw" {
            assert_eq!(run("7"), Some(2), "{format}");
            assert!(fs::read_to_string(&file).unwrap() == old, "{format}");
            fs::remove_file(&file).unwrap();
            assert_eq!(run("7"), Some(2), "{format}");
            assert!(!file.exists(), "{format}");
            fs::write(&file, &old).unwrap();
        }
        assert_eq!(run("0"), Some(0), "{format}");
        let new = fs::read(&file).unwrap();
        assert!(!new.is_empty() && !new.ends_with(b"yesterday\n"), "{format}");
    }
}

// A variable of a script that is not set: all of the trace is meant, or a slip, but never nothing.
#[test]
fn empty_globs_are_refused_before_anything_is_read() {
    let options = ["--comm", "--follow", "--module", "--graph-root", "--filter", "--notrace"];
    let tasks = ["--comm", "--filter", "--notrace"];
    for (command, options) in [
        (&["report", "/nonexistent"][..], &options[..]),
        (&["report", "/nonexistent"], &["--callers"]),
        (&["stream", "/nonexistent"], &options),
        (&["top", "/nonexistent"], &tasks),
        (&["convert", "/nonexistent", "-o", "t.json"], &tasks),
        (&["diff", "/nonexistent", "/nonexistent"], &tasks),
    ] {
        for option in options {
            let out = vmtrace(&[command, &[option, ""]].concat()).output().unwrap();
            let said = String::from_utf8_lossy(&out.stderr);
            assert_eq!(out.status.code(), Some(2), "{command:?} {option}: {said}");
            assert!(said.contains("nothing matches an empty glob"), "{said}");
        }
    }
}

// The second one was of what was left, which is nothing: a torn trace, it was said.
#[test]
fn standard_input_is_one_trace() {
    let mut command = vmtrace(&["diff", "-", "-"]);
    let trace = tempfile::tempfile().unwrap();
    (&trace).write_all(&stream()).unwrap();
    let out = command.stdin(trace).output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{said}");
    assert!(said.contains("standard input is one trace"), "{said}");
}

// The socket and the file of one run lie next to each other.
#[test]
fn a_socket_is_no_file_and_a_file_no_socket() {
    let (directory, socket) = answering(b"");
    let (socket, file) = (socket.to_str().unwrap(), directory.path().join("t.vmt"));
    fs::write(&file, stream()).unwrap();
    let file = file.to_str().unwrap();
    for (command, remedy) in [
        (&["report", socket][..], "it is a socket, which vmtrace stream follows"),
        (&["check", socket, "forbid panic"], "it is a socket, which vmtrace stream follows"),
        (&["ctl", file, "status"], "it is a file, which vmtrace report prints"),
        (&["top", file], "it is a file, which vmtrace report prints"),
        (&["ctl", "/nonexistent", "status"], "see vmtrace boot --socket"),
    ] {
        let out = vmtrace(command).output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{command:?}: {said}");
        assert!(said.contains(remedy) && said.lines().count() == 1, "{command:?}: {said}");
    }
}

// What a request would look like is nothing that a user writes.
#[test]
fn what_cannot_be_sent_is_refused_in_the_users_terms() {
    let long = "x".repeat(201);
    for (command, reason) in [
        (&["mark", ""][..], "a mark is one line of 1 to 200 bytes"),
        (&["mark", &long], "a mark is one line of 1 to 200 bytes"),
        (&["mark", "a\x1b[31m"], "without control characters"),
        (&["filter", ""], "\"\" is not a glob"),
        (&["event", "add", "a b"], "\"a b\" is not a glob"),
        (&["trigger", "add", "mark", "a:9223372036854775808"], "9223372036854775807 at most"),
    ] {
        let out = vmtrace(&[&["ctl", "/nonexistent"], command].concat()).output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{command:?}: {said}");
        assert!(said.contains(reason), "{command:?}: {said}");
    }
}

// In one line, and once.
#[test]
fn causes_are_said_once() {
    let out = vmtrace(&["run", "/nonexistent", "--", "ls"]).output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(said.matches("No such file").count(), 1, "{said}");
}
