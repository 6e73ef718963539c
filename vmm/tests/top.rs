//! `vmtrace top`, run as a user would, on a trace that a test serves.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::pty::openpty;
use nix::sys::signal::{Signal, kill};
use nix::sys::termios::{LocalFlags, tcgetattr};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use tempfile::TempDir;
use vmtrace::stream::{
    Count, EntryRecord, Header, LossReason, RecordBuffer, ReturnRecord, Summary, Symbol, Writer,
};

fn header() -> Header {
    Header {
        arch: "x86_64".into(),
        clock_hz: 1_000_000_000,
        vcpus: 2,
        address_base: Header::TOP_4_GIB,
        ..Header::default()
    }
}

fn begun() -> Writer<Vec<u8>> {
    let mut writer = Writer::new(Vec::new(), &header()).expect("header");
    let symbol = |at: u64, name| Symbol::new(0xffff_ffff_8100_0000 + at, 16, name);
    writer.symbols([symbol(0, "ksys_read"), symbol(16, "vfs_read")]).expect("room");
    writer.flush().expect("memory");
    writer
}

/// Ten calls of vfs_read in ten of ksys_read, from a time in nanoseconds on.
fn calls(writer: &mut Writer<Vec<u8>>, from: u64) {
    let mut buffer = RecordBuffer::new();
    for at in (0..10).map(|round| from + round * 10_000) {
        let enter = |at, function, sp| EntryRecord::new(at, function, 0, 1).with_sp(sp);
        buffer.push_frame(enter(at, 0x8100_0000, 0x800));
        buffer.push_frame(enter(at + 1000, 0x8100_0010, 0x700));
        buffer.push_return(ReturnRecord::new(at + 3000, 0x8100_0010, 0, 1, 0x700));
        buffer.push_return(ReturnRecord::new(at + 9000, 0x8100_0000, 0, 1, 0x800));
    }
    writer.records(0, &buffer).expect("vCPU");
    writer.watermark(from + 100_000).expect("memory");
    writer.flush().expect("memory");
}

/// Serves one consumer: its request is what the thread returns.
fn serve(
    act: impl FnOnce(&mut UnixStream) + Send + 'static,
) -> (TempDir, PathBuf, JoinHandle<String>) {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("socket");
    let listener = UnixListener::bind(&socket).expect("a socket");
    let server = std::thread::spawn(move || {
        let mut stream = listener.accept().expect("a consumer").0;
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line).expect("a request");
        act(&mut stream);
        line
    });
    (directory, socket, server)
}

fn top(socket: &PathBuf, options: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vmtrace"));
    command.arg("top").arg(socket).args(options);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("vmtrace runs")
}

fn tables(output: &Output) -> Vec<Vec<String>> {
    let text = String::from_utf8(output.stdout.clone()).expect("UTF-8");
    assert!(!text.contains('\x1b'), "{text}");
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    text.split("\n\n").map(|table| table.lines().map(words).collect()).collect()
}

fn whole() -> Vec<u8> {
    let mut writer = begun();
    calls(&mut writer, 0);
    writer.loss(1, 5, LossReason::Full).expect("vCPU");
    writer.counts(0, 3, &[Count { function: 0x8100_0010, hits: 77 }]).expect("vCPU");
    writer.end(&Summary::default()).expect("memory");
    writer.into_inner().expect("memory")
}

// The last interval would be lost, and a script would take the end of a guest for a failure.
#[test]
fn the_end_of_the_trace_is_the_last_table() {
    let (_directory, socket, server) = serve(|stream| stream.write_all(&whole()).expect("read"));
    let options = ["--every", "3600", "--by", "total", "-n", "x*", "--rows", "1"];
    let output = top(&socket, &options).wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert_eq!(server.join().expect("served"), "raw -n x*\n");
    let tables = tables(&output);
    let [table] = &tables[..] else { panic!("{tables:?}") };
    assert!(table[0].ends_with(" records/s, lost so far 5 (vcpu1 5)"), "{table:?}");
    assert!(table[2].ends_with(" 50.0% 70.000 90.000 ksys_read"), "{table:?}");
    assert!(table[3].ends_with(" 50.0% (1 more functions)"), "{table:?}");
    assert_eq!(table[4..], ["# counted: 1 function, 77 calls", "# hits function", "# 77 vfs_read"]);
    assert!(said.contains("vmtrace: records 40 (vcpu0 40, vcpu1 0), lost 5"), "{said}");
}

// A watcher of a trace that says nothing must not wait for it; what is old must not come again.
#[test]
fn tables_come_in_time_also_when_the_trace_is_quiet() {
    let (_directory, socket, server) = serve(|stream| {
        let mut writer = begun();
        calls(&mut writer, 0);
        stream.write_all(writer.get_mut()).expect("read");
        // Until it is gone.
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let options = ["--every", "0.3", "--count", "3", "--by", "self"];
    let output = top(&socket, &options).wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    server.join().expect("served");
    let tables = tables(&output);
    assert_eq!(tables.len(), 3, "{tables:?}");
    assert!(tables[0][2].ends_with(" 50.0% 70.000 90.000 ksys_read"), "{tables:?}");
    assert!(tables[0][3].ends_with(" 50.0% 20.000 20.000 vfs_read"), "{tables:?}");
    assert!(tables[2].len() == 2 && tables[2][0].contains(": 0.0 records/s"), "{tables:?}");
}

/// Waits until something is printed, and sends a signal.
fn interrupted(mut child: Child) -> ExitStatus {
    let mut out = child.stdout.take().expect("a pipe");
    out.read_exact(&mut [0]).expect("a table");
    let pid = Pid::from_raw(child.id().try_into().expect("a process"));
    kill(pid, Signal::SIGINT).expect("it runs");
    child.wait().expect("it ends")
}

// Who has seen enough ends it in order: a terminal would stay without a cursor.
#[test]
fn a_signal_ends_it_in_order() {
    let (_directory, socket, server) = serve(|stream| {
        stream.write_all(begun().get_mut()).expect("read");
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let status = interrupted(top(&socket, &["--every", "0.05"]));
    assert_eq!(status.code(), Some(0), "{status:?}");
    server.join().expect("served");
}

// Keys were shown in the table, and left for the shell, which ran them. And after Ctrl-Z it had no cursor.
#[test]
fn a_terminal_is_given_back_as_it_was_found() {
    let (_directory, socket, server) = serve(|stream| {
        stream.write_all(begun().get_mut()).expect("read");
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let pty = openpty(None, None).expect("a terminal");
    let end = || Stdio::from(pty.slave.try_clone().expect("a descriptor"));
    let shows_keys = || {
        let flags = tcgetattr(&pty.slave).expect("a terminal").local_flags;
        flags.contains(LocalFlags::ECHO | LocalFlags::ICANON)
    };
    let mut command = Command::new(env!("CARGO_BIN_EXE_vmtrace"));
    command.args(["top", "--every", "0.05"]).arg(&socket);
    let mut child = command.stdin(end()).stdout(end()).stderr(end()).spawn().expect("it runs");
    let (pid, mut keys) = (Pid::from_raw(child.id().cast_signed()), File::from(pty.master));
    let mut screen = keys.try_clone().expect("a descriptor");
    let mut shown = Vec::new();
    let mut until = |what: &str| {
        let mut chunk = [0; 4096];
        while !String::from_utf8_lossy(&shown).contains(what) {
            let length = screen.read(&mut chunk).expect("a terminal");
            shown.extend_from_slice(&chunk[..length]);
        }
        shown.clear();
    };
    until("records/s");
    assert!(!shows_keys());
    kill(pid, Signal::SIGTSTP).expect("it runs");
    let stopped = waitpid(pid, Some(WaitPidFlag::WUNTRACED)).expect("a child");
    assert_eq!(stopped, WaitStatus::Stopped(pid, Signal::SIGSTOP));
    until("\x1b[?25h");
    assert!(shows_keys());
    kill(pid, Signal::SIGCONT).expect("it is stopped");
    until("\x1b[?25l");
    until("records/s");
    assert!(!shows_keys());
    keys.write_all(b"xq").expect("a terminal");
    until("\x1b[?25h");
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
    assert!(shows_keys());
    server.join().expect("served");
}

// The remedy is to be found where the error is.
#[test]
fn what_is_wrong_is_said_in_one_line() {
    let said = |child: Child| {
        let output = child.wait_with_output().expect("it ends");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), said.lines().count(), said)
    };
    let missing = said(top(&"/nonexistent".into(), &[]));
    assert_eq!((missing.0, missing.1), (Some(1), 1), "{missing:?}");
    assert!(missing.2.contains("see vmtrace boot --socket"), "{missing:?}");
    let (_refusing, socket, _) = serve(|stream| stream.write_all(b"ERR no more\n").expect("read"));
    let refused = said(top(&socket, &[]));
    assert_eq!((refused.0, refused.1), (Some(1), 1), "{refused:?}");
    assert!(refused.2.contains("no more"), "{refused:?}");
    let (_torn, socket, _) = serve(|stream| {
        let whole = whole();
        stream.write_all(&whole[..whole.len() - 8]).expect("read");
        std::thread::sleep(Duration::from_millis(10));
    });
    let torn = said(top(&socket, &["--every", "60"]));
    assert_eq!((torn.0, torn.1), (Some(1), 1), "{torn:?}");
    assert!(torn.2.contains("torn stream"), "{torn:?}");
    for bad in [&["--every", "0"][..], &["--by", "name"], &["--rows", "0"], &["--count", "0"]] {
        assert_eq!(said(top(&socket, bad)).0, Some(2), "{bad:?}");
    }
}
