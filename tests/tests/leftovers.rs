//! However a vmtrace with an emulated host ends, no process and no file of it stays.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

struct Run {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
    temp: tempfile::TempDir,
    qemu: u32,
}

/// A program that waits in an emulated host.
fn start() -> Run {
    let temp = tempfile::tempdir().unwrap();
    let vmtrace = vmtrace_tests::vmtrace().unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_in-host"))
        .args(["--", env!("CARGO_BIN_EXE_host-helper"), "say-and-sleep", "ready"])
        .env("TMPDIR", temp.path())
        .env("VMTRACE_EXE", vmtrace)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    let qemu = qemu_of(child.id()).expect("a running QEMU");
    Run { child, output, temp, qemu }
}

/// The QEMU that is a child of `parent`.
fn qemu_of(parent: u32) -> Option<u32> {
    let pids = fs::read_dir("/proc").unwrap().flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find(|pid| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let Some((name, rest)) = stat.split_once('(').and_then(|(_, s)| s.rsplit_once(") ")) else {
            return false;
        };
        name.starts_with("qemu-system") && rest.split(' ').nth(1) == Some(&parent.to_string())
    })
}

fn is_alive(pid: u32) -> bool {
    // A zombie that nobody reaps yet is dead all the same.
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

fn signal(pid: u32, signal: i32) {
    let status =
        Command::new("kill").args([format!("-{signal}"), pid.to_string()]).status().unwrap();
    assert!(status.success());
}

fn wait(run: &mut Run) -> ExitStatus {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(status) = run.child.try_wait().unwrap() {
            return status;
        }
        assert!(Instant::now() < end, "it does not end");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn nothing_stays(run: &Run) {
    let end = Instant::now() + Duration::from_secs(10);
    while is_alive(run.qemu) {
        assert!(Instant::now() < end, "QEMU still runs");
        std::thread::sleep(Duration::from_millis(20));
    }
    let files: Vec<_> = fs::read_dir(run.temp.path()).unwrap().flatten().collect();
    assert!(files.is_empty(), "{files:?}");
}

#[test]
fn after_ctrl_c() {
    let mut run = start();
    // What a terminal does: the signal goes to the whole process group; QEMU is not in it.
    signal(run.child.id(), libc::SIGINT);
    // The job was asked to stop, and its end is passed on.
    assert_eq!(wait(&mut run).code(), Some(128 + libc::SIGINT));
    nothing_stays(&run);
}

#[test]
fn after_termination_of_a_stubborn_job() {
    let mut run = start();
    signal(run.child.id(), libc::SIGTERM);
    signal(run.child.id(), libc::SIGHUP);
    let status = wait(&mut run);
    assert!(!status.success());
    nothing_stays(&run);
}

#[test]
fn after_sigkill() {
    let mut run = start();
    signal(run.child.id(), libc::SIGKILL);
    assert_eq!(wait(&mut run).signal(), Some(libc::SIGKILL));
    nothing_stays(&run);
}

#[test]
fn after_the_end_of_the_reader() {
    let mut run = start();
    drop(std::mem::replace(&mut run.output, BufReader::new(pipe_end())));
    signal(run.child.id(), libc::SIGINT);
    wait(&mut run);
    nothing_stays(&run);
}

/// Any other output, so that the one it stands for is closed.
fn pipe_end() -> std::process::ChildStdout {
    Command::new("true").stdout(Stdio::piped()).spawn().unwrap().stdout.unwrap()
}
