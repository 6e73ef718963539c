//! Tests what KVM on this machine can really do.
//!
//! A `/dev/kvm` alone says little: some KVMs run a guest's user code well, but emulate its kernel
//! instruction by instruction, until one comes that they do not know. So a tiny virtual machine executes
//! in 64-bit ring 0 what every kernel executes early, and the results are checked.
//!
//! A separate process calls KVM, with a limit of [`TIMEOUT`], so that the test cannot hang.

mod checks;
#[cfg(target_arch = "riscv64")]
mod riscv64;
#[cfg(target_arch = "riscv64")]
use riscv64 as native;
#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
use x86_64 as native;

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crate::emulated::Check;
use serde::{Deserialize, Serialize};

/// All checks take milliseconds, or a moment in an emulated host on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The arguments that make vmtrace do the checks in this very process, a line of JSON each.
pub const WORKER_ARGS: [&str; 2] = ["doctor", "--kvm-probe-worker"];

/// What came out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvmReport {
    /// In the order they were made; the first failure ends them.
    pub checks: Vec<Check>,
    /// All of them were made and none failed.
    pub usable: bool,
}

impl KvmReport {
    /// Why KVM is not usable, in one line.
    pub fn problem(&self) -> Option<String> {
        if self.usable {
            return None;
        }
        let failed = self.checks.iter().find(|check| !check.ok);
        Some(failed.map_or_else(|| "the checks did not end".to_owned(), ToString::to_string))
    }
}

/// What the checking process says, line by line.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    /// A check begins; if nothing follows, this is what did not end.
    Begin(String),
    Check(Check),
    Done,
}

/// Gives results as they come, so that they survive whatever happens next.
struct Reporter<W>(W);

/// A check that failed; it was reported already.
struct Failed;

impl<W: Write> Reporter<W> {
    /// Makes a check.
    fn check<T>(
        &mut self,
        name: &str,
        f: impl FnOnce() -> Result<(T, String), String>,
    ) -> Result<T, Failed> {
        self.line(&Line::Begin(name.to_owned()));
        let (value, ok, detail) = match f() {
            Ok((value, detail)) => (Ok(value), true, detail),
            Err(detail) => (Err(Failed), false, detail),
        };
        self.line(&Line::Check(Check { name: name.to_owned(), ok, detail }));
        value
    }

    fn line(&mut self, line: &Line) {
        // Nobody listens any more: nothing to do about it.
        let _ = serde_json::to_writer(&mut self.0, line).map_err(io::Error::from);
        let _ = self.0.write_all(b"\n").and_then(|()| self.0.flush());
    }
}

/// The checking process: makes all checks and writes a line each. Never hangs for long: an alarm ends it.
pub fn worker(out: impl Write) {
    nix::unistd::alarm::set(u32::try_from(TIMEOUT.as_secs()).unwrap_or(10));
    let mut reporter = Reporter(out);
    if checks::all(&mut reporter).is_ok() {
        reporter.line(&Line::Done);
    }
}

/// Makes the checks in a process of its own: `vmtrace` with [`WORKER_ARGS`].
pub fn probe(vmtrace: &Path) -> KvmReport {
    let child = Command::new(vmtrace)
        .arg0("vmtrace")
        .args(WORKER_ARGS)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let (mut child, stdout) = match child.map(|mut child| (child.stdout.take(), child)) {
        Ok((Some(stdout), child)) => (child, stdout),
        Ok((None, _)) => return failed("the checks", "no output".to_owned()),
        Err(e) => return failed("the checks", format!("cannot run {}: {e}", vmtrace.display())),
    };
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            let _ = sender.send(serde_json::from_str::<Line>(&line));
        }
    });
    let report = collect(&lines, Instant::now() + TIMEOUT);
    let _ = child.kill();
    // Not waited for here: a process that hangs in the kernel may not even be killed.
    thread::spawn(move || child.wait());
    report
}

fn collect(lines: &mpsc::Receiver<Result<Line, serde_json::Error>>, end: Instant) -> KvmReport {
    let mut checks = Vec::new();
    let mut current = None;
    loop {
        match lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(Ok(Line::Begin(name))) => current = Some(name),
            Ok(Ok(Line::Check(check))) => {
                current = None;
                checks.push(check);
            }
            Ok(Ok(Line::Done)) => {
                let usable = checks.iter().all(|check| check.ok);
                return KvmReport { checks, usable };
            }
            Ok(Err(e)) => {
                checks.push(failed_check("the checks", format!("unreadable result: {e}")));
            }
            Err(reason) => {
                let detail = match reason {
                    mpsc::RecvTimeoutError::Timeout => {
                        format!("no end within {} s", TIMEOUT.as_secs())
                    }
                    mpsc::RecvTimeoutError::Disconnected => "the checking process died".to_owned(),
                };
                if let Some(name) = current {
                    checks.push(failed_check(&name, detail));
                } else if checks.iter().all(|check| check.ok) {
                    checks.push(failed_check("the checks", detail));
                }
                return KvmReport { checks, usable: false };
            }
        }
    }
}

fn failed(name: &str, detail: String) -> KvmReport {
    KvmReport { checks: vec![failed_check(name, detail)], usable: false }
}

fn failed_check(name: &str, detail: String) -> Check {
    Check { name: name.to_owned(), ok: false, detail }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(lines: Vec<Line>) -> KvmReport {
        let (sender, receiver) = mpsc::channel();
        lines.into_iter().for_each(|line| sender.send(Ok(line)).unwrap());
        drop(sender);
        collect(&receiver, Instant::now() + Duration::from_secs(5))
    }

    fn check(name: &str, ok: bool) -> Line {
        Line::Check(Check { name: name.to_owned(), ok, detail: "detail".to_owned() })
    }

    #[test]
    fn verdicts() {
        assert!(report(vec![check("a", true), Line::Done]).usable);
        let one = report(vec![check("a", true), Line::Begin("b".into()), check("b", false)]);
        assert_eq!(one.problem().as_deref(), Some("b: detail"));
        let died = report(vec![check("a", true), Line::Begin("b".into())]);
        assert_eq!(died.problem().as_deref(), Some("b: the checking process died"));
        assert_eq!(
            report(vec![]).problem().as_deref(),
            Some("the checks: the checking process died")
        );
    }

    #[test]
    fn hanging_is_noticed() {
        let (sender, receiver) = mpsc::channel();
        sender.send(Ok(Line::Begin("a".into()))).unwrap();
        let report = collect(&receiver, Instant::now() + Duration::from_millis(10));
        assert_eq!(report.problem().as_deref(), Some("a: no end within 10 s"));
    }

    #[test]
    fn a_worker_that_cannot_run() {
        let report = probe(Path::new("/no/such/vmtrace"));
        assert!(report.problem().unwrap().contains("/no/such/vmtrace"));
        let report = probe(Path::new("/bin/true"));
        assert!(report.problem().unwrap().contains("died"));
    }
}
