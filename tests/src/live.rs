//! Guests of `vmtrace boot`, run as a user would, and controlled while they run.

use std::io::{Read, Write};
use std::panic::{RefUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use vmtrace::emulated::cache_dir;

use crate::trace::{lost, lost_sign, syscall};
use crate::{command, within};

/// A run of `vmtrace boot` in an emulated host; killed when it is dropped.
#[derive(Debug)]
pub struct LiveGuest {
    directory: tempfile::TempDir,
    child: Option<Child>,
    /// Standard output, unless it went elsewhere, and standard error.
    outputs: Vec<JoinHandle<Vec<u8>>>,
}

/// How a run has ended.
#[derive(Debug)]
pub struct Ended {
    /// Its status.
    pub status: ExitStatus,
    /// Its standard output, byte for byte.
    pub out: Vec<u8>,
    /// Its standard error: the console's lines, and what vmtrace says.
    pub err: String,
}

impl Ended {
    /// All that it said, as text.
    pub fn said(&self) -> String {
        format!("{}{}", String::from_utf8_lossy(&self.out), self.err)
    }
}

/// What the runs of this test said that have ended.
static SAID: Mutex<String> = Mutex::new(String::new());

impl LiveGuest {
    /// Boots a kernel of the cache with its modules; `getppid` and what `args` say is traced into
    /// the file `trace`, if they say no other. The run serves on `socket` and, where that is asked for, on `vsock`.
    pub fn boot(kernel: &str, args: &[&str]) -> Self {
        Self::boot_in(tempfile::tempdir().unwrap(), kernel, args)
    }

    /// The same in a directory that may have something at the place of the trace.
    pub fn boot_in(directory: tempfile::TempDir, kernel: &str, args: &[&str]) -> Self {
        Self::boot_to(Stdio::piped(), directory, kernel, args)
    }

    /// The same with another standard output, which has what `--run` writes.
    pub fn boot_to(
        stdout: Stdio,
        directory: tempfile::TempDir,
        kernel: &str,
        args: &[&str],
    ) -> Self {
        Self::spawn((Stdio::null(), stdout), directory, kernel, args)
    }

    /// As [`LiveGuest::boot`], with a console on which one can type.
    pub fn boot_with_input(kernel: &str, args: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self::spawn((Stdio::piped(), Stdio::piped()), directory, kernel, args)
    }

    fn spawn(
        (stdin, stdout): (Stdio, Stdio),
        directory: tempfile::TempDir,
        kernel: &str,
        args: &[&str],
    ) -> Self {
        let cached = cache_dir().unwrap().join("kernels").join(kernel);
        let mut command = command().unwrap();
        command.args(["boot", "--host", "emulated", "--timeout", "400"]);
        command.args(["-f", &syscall(kernel, "getppid").unwrap()]);
        command.arg(cached.join("vmlinuz")).arg("--modules").arg(cached.join("modules"));
        for option in ["socket", "vsock"] {
            command.arg(format!("--{option}")).arg(directory.path().join(option));
        }
        if !args.contains(&"-o") {
            command.arg("-o").arg(directory.path().join("trace"));
        }
        // As in `trace::cmdline`.
        command.args(["--cmdline", "loglevel=5"]);
        command.args(args);
        command.stdin(stdin).stdout(stdout).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let stdout: Option<Box<dyn Read + Send>> = child.stdout.take().map(|it| Box::new(it) as _);
        let stderr: Option<Box<dyn Read + Send>> = child.stderr.take().map(|it| Box::new(it) as _);
        let outputs = [stdout, stderr].map(|output| {
            let mut output = output.unwrap_or_else(|| Box::new(std::io::empty()));
            thread::spawn(move || {
                let mut said = Vec::new();
                let _ = output.read_to_end(&mut said);
                said
            })
        });
        Self { directory, child: Some(child), outputs: outputs.into() }
    }

    /// A file beside the trace.
    pub fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Waits until `ready` for at most 300 s; the run must go on meanwhile.
    pub fn wait_until(&mut self, ready: impl Fn() -> bool) {
        let mut is_ready = false;
        let time = Duration::from_secs(300);
        let known = within(time, || {
            is_ready = ready();
            is_ready || !self.runs()
        });
        assert!(known, "{HANGS}");
        assert!(is_ready, "the run has ended: {}", self.end().said());
    }

    /// Types a line on the console, if there is still a run.
    pub fn type_line(&mut self, line: &str) {
        if let Some(input) = self.child.as_mut().and_then(|child| child.stdin.as_mut()) {
            let _ = input.write_all(format!("{line}\n").as_bytes());
        }
    }

    /// Whether the run goes on.
    pub fn runs(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| child.try_wait().unwrap().is_none())
    }

    /// Whether the run ends in this time.
    pub fn ends_within(&mut self, seconds: u64) -> bool {
        within(Duration::from_secs(seconds), || !self.runs())
    }

    /// What Ctrl-C does.
    pub fn interrupt(&self) {
        self.signal("INT");
    }

    /// Sends the run a signal.
    pub fn signal(&self, name: &str) {
        let id = self.child.as_ref().unwrap().id().to_string();
        Command::new("kill").args(["-s", name, &id]).status().unwrap();
    }

    /// Waits for the end of the run.
    pub fn end(&mut self) -> Ended {
        let status = self.child.take().unwrap().wait().unwrap();
        let mut outputs = self.outputs.drain(..).map(|output| output.join().unwrap());
        let (out, err) = (outputs.next().unwrap(), outputs.next().unwrap());
        let ended = Ended { status, out, err: String::from_utf8_lossy(&err).into_owned() };
        SAID.lock().unwrap_or_else(PoisonError::into_inner).push_str(&ended.said());
        ended
    }
}

impl Drop for LiveGuest {
    fn drop(&mut self) {
        // What has made a test fail may be the end of its guest, and the run is about to say how.
        if thread::panicking() && !self.ends_within(20) {
            self.interrupt();
            self.ends_within(60);
        }
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            self.end();
        }
    }
}

/// Runs a subcommand of `vmtrace` with a socket or a file, and more.
pub fn vmtrace(subcommand: &str, path: &Path, args: &[&str]) -> Output {
    let mut command = command().unwrap();
    command.stdin(Stdio::null()).arg(subcommand).arg(path).args(args).output().unwrap()
}

const HANGS: &str = "the guest hangs";
/// What else is said of those that the emulation has lost; see [`lost`] and
/// [`host_lost`](crate::trace::host_lost).
const LOST: [&str; 4] =
    [HANGS, "guest timeout", "the emulated host died", "does not end, not even after SIGKILL"];

/// Runs a test, and once more each time that the emulation loses its guest.
pub fn unless_lost(test: impl Fn() + RefUnwindSafe) {
    loop {
        SAID.lock().unwrap_or_else(PoisonError::into_inner).clear();
        let Err(panic) = catch_unwind(&test) else { return };
        let mut why = SAID.lock().unwrap_or_else(PoisonError::into_inner).clone();
        why.extend(panic.downcast_ref::<String>().map(String::as_str));
        let ended = || LOST.into_iter().find(|how| why.contains(how));
        match lost_sign(&why).or_else(ended) {
            Some(how) if lost(how).is_ok() => {}
            _ => resume_unwind(panic),
        }
    }
}
