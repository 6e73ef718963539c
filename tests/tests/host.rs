//! Jobs in the emulated host: streams, files, exit codes, signals, and failures.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use vmtrace::emulated::{EmulatedHost, FileSource, HostOptions, Job, Output, Stdin, Stopped};
use vmtrace_tests::{Finished, SharedHost, within};

const HELPER: &str = "/bin/helper";

fn options() -> anyhow::Result<HostOptions> {
    let helper = FileSource::Path(env!("CARGO_BIN_EXE_host-helper").into());
    let text = FileSource::Bytes(b"from the start".to_vec());
    Ok(HostOptions {
        memory: 1024,
        vmtrace: vmtrace_tests::vmtrace()?,
        source: vmtrace::SOURCE,
        files: vec![(HELPER.to_owned(), helper), ("/some/dir/text".to_owned(), text)],
        ..HostOptions::default()
    })
}

static HOST: SharedHost = SharedHost::new(options);

fn helper(args: &[&str], change: impl FnOnce(&mut Job<'_>)) -> Finished {
    HOST.run(Some(HELPER), args, &[], change).unwrap()
}

#[test]
fn output_and_status_come_through() {
    let done = helper(&["say", "to standard output", "to standard error"], |_| {});
    assert_eq!((done.end.code, done.end.stopped), (Some(0), None));
    assert_eq!(done.out(), "to standard output\n");
    assert_eq!(done.err(), "to standard error\n");
    for code in [1, 3, 255] {
        assert_eq!(helper(&["exit", &code.to_string()], |_| {}).end.code, Some(code));
    }
    let aborted = helper(&["abort"], |_| {}).end;
    assert_eq!(
        (aborted.code, aborted.signal, aborted.exit_code()),
        (None, Some(libc::SIGABRT), 134)
    );
    let out =
        helper(&["env", "NAME"], |job| drop(job.env.insert("NAME".into(), "value".into()))).out();
    assert_eq!(out, "value\n");
}

#[test]
fn files_go_in_and_out() {
    assert_eq!(helper(&["read", "/some/dir/text"], |_| {}).out(), "from the start");
    let big: Vec<u8> = (0..=255).cycle().take(5 << 20).collect();
    HOST.with(|host| {
        host.put_file("/new/dir/big", &FileSource::Bytes(big.clone()))?;
        host.put_file("/new/dir/empty", &FileSource::Bytes(Vec::new()))?;
        host.put_file("/new/dir/again", &FileSource::Bytes(b"first and longer".to_vec()))?;
        host.put_file("/new/dir/again", &FileSource::Bytes(b"second".to_vec()))?;
        host.put_file("/new/program", &FileSource::Path(env!("CARGO_BIN_EXE_host-helper").into()))
    })
    .unwrap();
    assert_eq!(helper(&["read", "/new/dir/empty"], |_| {}).out(), "");
    assert_eq!(helper(&["read", "/new/dir/again"], |_| {}).out(), "second");
    assert_eq!(helper(&["run", "/new/program"], |_| {}).out(), "Ok(Some(9))\n");
    let done = HOST
        .run(
            Some(HELPER),
            &["write", "/out/trace", "records"],
            &["/out/trace", "/out/unused"],
            |_| {},
        )
        .unwrap();
    assert_eq!(done.outputs, [b"records".to_vec(), Vec::new()]);

    let error = HOST
        .with(|host| host.put_file("/proc/nothing/x", &FileSource::Bytes(vec![0; 3 << 20])))
        .unwrap_err();
    assert!(error.to_string().contains("cannot make the file /proc/nothing/x"), "{error}");
    let error = HOST
        .with(|host| host.put_file("/x", &FileSource::Path("/no/such/file".into())))
        .unwrap_err();
    assert!(error.to_string().contains("/no/such/file"), "{error}");
    let error = HOST.run(Some("/no/such/program"), &[], &["/out/x"], |_| {}).unwrap_err();
    assert!(error.to_string().contains("cannot run /no/such/program"), "{error}");
}

// A guest on the first CPU could lose its nested paging at any time (docs/architecture.md).
#[test]
fn nothing_runs_on_the_first_cpu() {
    let status = helper(&["read", "/proc/self/status"], |_| {}).out();
    let cpus = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    let wanted = HostOptions::default().cpus;
    let all = if wanted == 1 { "1".to_owned() } else { format!("1-{wanted}") };
    assert_eq!(cpus.trim(), all);
}

#[test]
fn standard_input_goes_in() {
    assert_eq!(helper(&["cat"], |_| {}).out(), "", "empty by default");
    let text: Vec<u8> = (0..=255).cycle().take(4 << 20).collect();
    let input = text.clone();
    let done = helper(&["cat"], |job| job.stdin = Stdin::Reader(Box::new(io::Cursor::new(input))));
    assert!(done.stdout == text);
    // Input that is never asked for is no obstacle.
    let done = helper(&["exit", "5"], |job| job.stdin = Stdin::Reader(Box::new(io::repeat(7))));
    assert_eq!(done.end.code, Some(5));
}

#[test]
fn much_output_arrives_whole() {
    const SIZE: usize = 48 << 20;
    let begin = Instant::now();
    let done = helper(&["flood", &SIZE.to_string()], |_| {});
    let time = begin.elapsed().as_secs_f64();
    eprintln!("{:.1} MiB/s", 48.0 / time);
    assert_eq!((done.end.code, done.stdout.len()), (Some(0), SIZE));
    assert!(done.stdout.chunks(256).all(|c| c.iter().zip(0..=255).all(|(a, b)| *a == b)));
}

/// Takes nothing until told to.
struct Blocked(mpsc::Receiver<()>, usize);

impl Write for Blocked {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Once the sender is gone, everything passes.
        let _ = self.0.recv();
        self.1 += bytes.len();
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Frees the other stream when a text has come.
struct Until(String, Option<mpsc::Sender<()>>, Vec<u8>);

impl Write for Until {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.2.extend(bytes);
        if String::from_utf8_lossy(&self.2).contains(&self.0) {
            self.1 = None;
        }
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_slow_reader_stops_its_own_stream_alone() {
    let (release, blocked) = mpsc::channel();
    let mut stdout = Blocked(blocked, 0);
    let mut stderr = Until("here I am".to_owned(), Some(release), Vec::new());
    let end = HOST
        .with(|host| {
            let (out, err): (Output<'_>, Output<'_>) = (&mut stdout, &mut stderr);
            let mut job = Job::new(["flood-and-say", "here I am"], out, err);
            job.program = Some(HELPER.to_owned());
            job.timeout = Some(Duration::from_secs(120));
            host.run(job)
        })
        .unwrap();
    assert_eq!((end.code, stdout.1), (Some(0), 8 << 20));
}

/// Like the pipe to a `head` that has seen enough.
struct Full(usize, io::ErrorKind);

impl Write for Full {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 = self.0.checked_sub(bytes.len()).ok_or(self.1)?;
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_closed_output_is_closed_for_the_job_too() {
    let run = |kind| {
        let (mut out, mut err) = (Full(1 << 20, kind), Vec::new());
        let end = HOST.with(|host| {
            let mut job = Job::new(["flood", "1000000000"], &mut out, &mut err);
            job.program = Some(HELPER.to_owned());
            host.run(job)
        });
        (end, String::from_utf8(err).unwrap())
    };
    let (end, stderr) = run(io::ErrorKind::BrokenPipe);
    assert_eq!((end.unwrap().code, stderr.as_str()), (Some(3), "BrokenPipe\n"));
    let (end, _) = run(io::ErrorKind::StorageFull);
    assert!(end.unwrap_err().to_string().contains("cannot write standard output"));
}

#[test]
fn a_job_that_takes_too_long_is_stopped() {
    let limit = |ms| move |job: &mut Job<'_>| job.timeout = Some(Duration::from_millis(ms));
    let done = helper(&["sleep", "600000"], limit(300));
    assert_eq!((done.end.signal, done.end.stopped), (Some(libc::SIGINT), Some(Stopped::Timeout)));
    // This one wants to be killed, once it has said that it is ready. What it did instead is told.
    let overdue = Arc::new(AtomicBool::new(false));
    let late = Arc::clone(&overdue);
    let done = helper(&["ignore-sigint"], |job| {
        job.overdue = Some(overdue);
        job.taken = Some(Box::new(move || late.store(true, Ordering::Relaxed)));
    });
    assert_eq!((done.end.signal, done.end.stopped), (Some(libc::SIGKILL), Some(Stopped::Timeout)));
    let log = || HOST.with(|host| Ok(host.log_tail().to_string())).unwrap();
    let sleeps = |line: &str| line.contains("thread helper S") && line.contains("nanosleep");
    let is_told = || log().lines().any(sleeps);
    assert!(within(Duration::from_secs(30), is_told), "{}", log());
}

#[test]
fn what_a_job_leaves_behind_is_killed() {
    let done = helper(&["leave"], |_| {});
    assert_eq!((done.end.code, done.out().as_str()), (Some(0), "left\n"));
    // A killed process may take a moment to be gone.
    let gone = (0..50).any(|_| {
        let processes = helper(&["processes"], |_| {}).out();
        processes.lines().filter(|name| *name == "helper").count() == 1
    });
    assert!(gone);
}

#[test]
fn a_host_that_dies_is_an_error_with_its_log() {
    let mut host = EmulatedHost::start(&options().unwrap()).unwrap();
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let mut job = Job::new(["write", "/proc/sysrq-trigger", "c"], &mut out, &mut err);
    job.program = Some(HELPER.to_owned());
    let error = host.run(job).unwrap_err().to_string();
    assert!(
        error.contains("the emulated host died") && error.contains("sysrq triggered crash"),
        "{error}"
    );
}

/// Runs a program in a host for which another QEMU is started, by a script: `$real` is the right one,
/// and `$starts` how many there were with this one.
fn by_qemu(script: &str, options: &[&str]) -> std::process::Output {
    let dir = tempfile::tempdir().unwrap();
    let qemu = dir.path().join("qemu");
    let script = format!(
        "#!/bin/bash\n\
         real=qemu-system-$(uname -m)\n\
         [[ $1 != --version ]] || exec $real --version\n\
         echo >>\"$0.starts\"\n\
         starts=$(wc -l <\"$0.starts\")\n\
         {script}\n"
    );
    fs::write(&qemu, script).unwrap();
    fs::set_permissions(&qemu, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_in-host"));
    command.args(["--memory", "1024"]).args(options);
    command.args(["--", env!("CARGO_BIN_EXE_host-helper"), "say", "out", "err"]);
    command.env("VMTRACE_EXE", vmtrace_tests::vmtrace().unwrap()).env("VMTRACE_QEMU", &qemu);
    command.output().unwrap()
}

// QEMU has races while its CPUs come up; nothing is lost by another try, but it must not try for ever.
#[test]
fn a_host_that_crashes_as_it_starts_is_started_again() {
    for (crashes, code, warnings) in [(1, 0, 1), (9, 1, 2)] {
        let script = format!("((starts > {crashes})) || kill -ABRT $$\nexec $real \"$@\"");
        let output = by_qemu(&script, &[]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert_eq!(said.matches("the emulator crashed as it started").count(), warnings, "{said}");
        assert_eq!(said.contains("err\n"), code == 0, "{said}");
        assert_eq!(said.contains("the emulated host died (QEMU: signal: 6"), code == 1, "{said}");
    }
}

// One that hangs says nothing. A machine that is too slow looks the same, and must not wait for ever.
#[test]
fn a_host_that_hangs_as_it_starts_is_started_once_more() {
    let output = by_qemu("echo \"start $starts\" >&2; exec sleep 600", &["--start-timeout", "2"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    let warning = "vmtrace: warning: the emulated host was not up after 2 s; trying again";
    assert_eq!(said.matches(warning).count(), 1, "{said}");
    assert_eq!(said.matches("was not up after 2 s").count(), 2, "{said}");
    assert!(said.contains("start 1\n") && said.contains("start 2\n"), "{said}");
    assert!(!said.contains("start 3"), "{said}");
}

#[test]
fn kvm_is_usable_in_the_emulated_host() {
    let done = HOST.vmtrace(&["doctor", "--json"], &[]).unwrap();
    let inside: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!((done.end.code, &inside["kvm"]["usable"]), (Some(0), &true.into()), "{inside:#}");

    // The outer machine may be any; it has an emulated host at least.
    let outside = Command::new(vmtrace_tests::vmtrace().unwrap())
        .args(["doctor", "--json"])
        .output()
        .unwrap();
    assert!(outside.status.success());
    let outside: serde_json::Value = serde_json::from_slice(&outside.stdout).unwrap();
    let arch = outside["arch"].as_str().unwrap();
    assert_eq!(outside["emulated_hosts"][arch]["usable"], true);
    let checks = outside["kvm"]["checks"].as_array().unwrap();
    assert_eq!(outside["kvm"]["usable"], checks.iter().all(|check| check["ok"] == true));
}
