//! However a vmtrace with an emulated host ends, no process and no file of it remains.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use vmtrace_tests::{qemu_of, within};

struct Run {
    child: Child,
    output: Box<dyn BufRead>,
    temp: tempfile::TempDir,
    qemu: u32,
}

/// A program that waits in an emulated host.
fn start() -> Run {
    let mut command = Command::new(env!("CARGO_BIN_EXE_in-host"));
    command.args(["--", env!("CARGO_BIN_EXE_host-helper"), "say-and-sleep", "ready"]);
    command.env("VMTRACE_EXE", vmtrace_tests::vmtrace().unwrap());
    start_command(command.stdout(Stdio::piped()))
}

/// Starts a command with an emulated host, and waits for the line `ready` on its piped output.
fn start_command(command: &mut Command) -> Run {
    let temp = tempfile::tempdir().unwrap();
    let mut child = command.env("TMPDIR", temp.path()).stdin(Stdio::null()).spawn().unwrap();
    let mut output: Box<dyn BufRead> = match (child.stdout.take(), child.stderr.take()) {
        (Some(stdout), _) => Box::new(BufReader::new(stdout)),
        (None, stderr) => Box::new(BufReader::new(stderr.unwrap())),
    };
    let mut seen = String::new();
    while !seen.ends_with("ready\n") && !seen.ends_with("ready\r\n") {
        assert!(output.read_line(&mut seen).unwrap() > 0, "it ended: {seen}");
    }
    let qemu = qemu_of(child.id()).expect("a running QEMU");
    Run { child, output, temp, qemu }
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
    let mut status = None;
    within(Duration::from_secs(60), || {
        status = run.child.try_wait().unwrap();
        status.is_some()
    });
    status.expect("it does not end")
}

fn nothing_stays(run: &Run) {
    assert!(within(Duration::from_secs(10), || !is_alive(run.qemu)), "QEMU still runs");
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
    run.output = Box::new(std::io::empty());
    signal(run.child.id(), libc::SIGINT);
    wait(&mut run);
    nothing_stays(&run);
}

/// The first Ctrl-C ends the guest, and the trace is whole; that its `--run` is not says the exit code.
#[test]
fn after_ctrl_c_of_a_traced_guest() {
    let kernel = vmtrace::emulated::cache_dir().unwrap().join("kernels/x86_64-6.12/vmlinuz");
    let files = tempfile::tempdir().unwrap();
    let trace = files.path().join("trace.vmt");
    let mut command = Command::new(vmtrace_tests::vmtrace().unwrap());
    command.arg("boot").arg(kernel).arg("-o").arg(&trace);
    command.args(["--host", "emulated", "--filter", "vfs_*"]);
    command.args(["--run", "echo ready >/dev/console; sleep 600"]);
    let mut run = start_command(command.stdout(Stdio::null()).stderr(Stdio::piped()));
    signal(run.child.id(), libc::SIGINT);
    assert_eq!(wait(&mut run).code(), Some(1));
    nothing_stays(&run);
    let mut rest = String::new();
    run.output.read_to_string(&mut rest).unwrap();
    assert!(rest.ends_with("vmtrace: error: stopped before --run had finished\n"), "{rest}");
    assert!(rest.contains("vmtrace: guest stopped"), "{rest}");
    let report =
        Command::new(vmtrace_tests::vmtrace().unwrap()).arg("report").arg(&trace).output().unwrap();
    assert!(report.status.success());
    assert!(String::from_utf8_lossy(&report.stdout).contains("exit: stopped"));
}
