//! Runs a command line: by `/bin/sh` where there is one, step by step otherwise.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus};

use crate::words::{self, Step};

/// Where commands are looked for, in this order: `/` first, since that is where added files are.
pub(crate) const PATH: &str = "/:/bin:/sbin:/usr/bin:/usr/sbin:/usr/local/bin";

/// The status of a command line that could not be run at all.
pub(crate) const CANNOT_RUN: u8 = 125;

const SHELL: &str = "/bin/sh";

/// How a command line ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    Exited(i32),
    Signaled(i32),
}

/// Whether command lines may use a shell's whole language here.
pub(crate) fn has_shell() -> bool {
    Path::new(SHELL).exists()
}

/// Runs `line` to its end and reaps whatever else ends meanwhile.
pub(crate) fn run(line: &OsStr) -> Result<Status, String> {
    if has_shell() {
        return spawn(Path::new(SHELL), &["-c".as_ref(), line]);
    }
    let line = line.to_str().ok_or("the command line is not UTF-8, and there is no /bin/sh")?;
    let mut last = Status::Exited(0);
    for step in words::split(line).map_err(|e| e.to_string())? {
        if !step.after_success || last == Status::Exited(0) {
            last = run_step(&step)?;
        }
    }
    Ok(last)
}

/// `vmtrace-agent run LINE`: the same, in a system that has a process 1 already.
pub(crate) fn run_as_process(line: &OsStr) -> ExitCode {
    match run(line) {
        Ok(Status::Exited(code)) => ExitCode::from(u8::try_from(code).unwrap_or(255)),
        Ok(Status::Signaled(signal)) => ExitCode::from(u8::try_from(128 + signal).unwrap_or(255)),
        Err(e) => {
            eprintln!("vmtrace-agent: {e}");
            ExitCode::from(CANNOT_RUN)
        }
    }
}

/// Starts a shell on the console.
pub(crate) fn shell() -> Result<Status, String> {
    spawn(Path::new(SHELL), &[])
}

fn run_step(step: &Step) -> Result<Status, String> {
    let Some((name, args)) = step.words.split_first() else { return Ok(Status::Exited(0)) };
    match find(name) {
        Ok(path) => {
            let args: Vec<&OsStr> = args.iter().map(OsStr::new).collect();
            // Like a shell: a program that cannot be started is the command's failure, not ours.
            spawn(&path, &args).or_else(|e| {
                eprintln!("vmtrace-agent: {e}");
                Ok(Status::Exited(126))
            })
        }
        Err(code) => {
            let why = if code == 127 { "command not found" } else { "not an executable file" };
            eprintln!("vmtrace-agent: {name}: {why}");
            Ok(Status::Exited(code))
        }
    }
}

fn find(name: &str) -> Result<PathBuf, i32> {
    let executable = |path: &Path| {
        path.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
    };
    let candidates: Vec<PathBuf> = if name.contains('/') {
        vec![PathBuf::from(name)]
    } else {
        PATH.split(':').map(|dir| Path::new(dir).join(name)).collect()
    };
    if let Some(found) = candidates.iter().find(|p| executable(p)) {
        return Ok(found.clone());
    }
    Err(if candidates.iter().any(|p| p.exists()) { 126 } else { 127 })
}

fn spawn(program: &Path, args: &[&OsStr]) -> Result<Status, String> {
    let child = Command::new(program)
        .args(args)
        .env("PATH", PATH)
        .spawn()
        .map_err(|e| format!("{}: {e}", program.display()))?;
    loop {
        // Process 1 also gets the children of those that ended.
        let (pid, status) =
            wait_any().map_err(|e| format!("waiting for {}: {e}", program.display()))?;
        if u32::try_from(pid) == Ok(child.id()) {
            return Ok(match (status.code(), status.signal()) {
                (Some(code), _) => Status::Exited(code),
                (None, signal) => Status::Signaled(signal.unwrap_or_default()),
            });
        }
    }
}

/// Waits for any child. (nix's `waitpid` fails on real-time signals.)
#[allow(unsafe_code)]
fn wait_any() -> io::Result<(libc::pid_t, ExitStatus)> {
    loop {
        let mut status = 0;
        // SAFETY: waitpid writes one int through the pointer, which is valid for it.
        let pid = unsafe { libc::waitpid(-1, &raw mut status, 0) };
        if pid > 0 {
            return Ok((pid, ExitStatus::from_raw(status)));
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// A file's content as a command line: without the line end that editors add.
pub(crate) fn line_of(content: &[u8]) -> OsString {
    let end = content.iter().rposition(|b| !b.is_ascii_whitespace()).map_or(0, |n| n + 1);
    OsStr::from_bytes(content.get(..end).unwrap_or_default()).to_owned()
}
