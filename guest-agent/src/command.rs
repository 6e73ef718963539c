//! Runs a command line: by `/bin/sh` where there is one, step by step otherwise.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;

use crate::reaper::Reaper;
use crate::words::{self, Step};

/// Where commands are looked for, in this order: `/` first, since that is where added files are.
pub(crate) const PATH: &str = "/:/bin:/sbin:/usr/bin:/usr/sbin:/usr/local/bin";

/// The status of a command line that could not be run at all.
pub(crate) const CANNOT_RUN: u8 = 125;

/// The status of a program that does not exist.
pub(crate) const NOT_FOUND: i32 = 127;

/// The status of a program that cannot be started.
pub(crate) const NOT_EXECUTABLE: i32 = 126;

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

/// Runs `line` to its end.
pub(crate) fn run(reaper: &Arc<Reaper>, line: &OsStr) -> Result<Status, String> {
    if has_shell() {
        return spawn(reaper, Path::new(SHELL), &["-c".as_ref(), line]);
    }
    let line = line.to_str().ok_or("the command line is not UTF-8, and there is no /bin/sh")?;
    let mut last = Status::Exited(0);
    for step in words::split(line).map_err(|e| e.to_string())? {
        if !step.after_success || last == Status::Exited(0) {
            last = run_step(reaper, &step)?;
        }
    }
    Ok(last)
}

/// A process that does the same: a shell, or this program again.
pub(crate) fn of_line(line: &OsStr) -> Command {
    let (program, option) = if has_shell() { (SHELL, "-c") } else { ("/proc/self/exe", "run") };
    let mut command = Command::new(program);
    command.arg(option).arg(line);
    command
}

/// `vmtrace-agent run LINE`: the same, in a system that has a process 1 already.
pub(crate) fn run_as_process(line: &OsStr) -> ExitCode {
    match run(&Reaper::new(), line) {
        Ok(Status::Exited(code)) => ExitCode::from(u8::try_from(code).unwrap_or(255)),
        Ok(Status::Signaled(signal)) => ExitCode::from(u8::try_from(128 + signal).unwrap_or(255)),
        Err(e) => {
            eprintln!("vmtrace-agent: {e}");
            ExitCode::from(CANNOT_RUN)
        }
    }
}

/// Starts a shell on the console.
pub(crate) fn shell(reaper: &Arc<Reaper>) -> Result<Status, String> {
    spawn(reaper, Path::new(SHELL), &[])
}

fn run_step(reaper: &Arc<Reaper>, step: &Step) -> Result<Status, String> {
    let Some((name, args)) = step.words.split_first() else { return Ok(Status::Exited(0)) };
    match find(name.as_ref(), PATH.as_ref()) {
        Ok(path) => {
            let args: Vec<&OsStr> = args.iter().map(OsStr::new).collect();
            // Like a shell: a program that cannot be started is the command's failure, not ours.
            spawn(reaper, &path, &args).or_else(|e| {
                eprintln!("vmtrace-agent: {e}");
                Ok(Status::Exited(NOT_EXECUTABLE))
            })
        }
        Err(code) => {
            eprintln!("vmtrace-agent: {name}: {}", why(code));
            Ok(Status::Exited(code))
        }
    }
}

/// Why [`find`] gave this status.
pub(crate) fn why(status: i32) -> &'static str {
    if status == NOT_FOUND { "command not found" } else { "not an executable file" }
}

/// The program of that name, looked for in the directories of `path`; or the status that a shell would give.
pub(crate) fn find(name: &OsStr, path: &OsStr) -> Result<PathBuf, i32> {
    let executable = |path: &Path| {
        path.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
    };
    let candidates: Vec<PathBuf> = if name.as_bytes().contains(&b'/') {
        vec![PathBuf::from(name)]
    } else {
        std::env::split_paths(path).map(|dir| dir.join(name)).collect()
    };
    if let Some(found) = candidates.iter().find(|p| executable(p)) {
        return Ok(found.clone());
    }
    Err(if candidates.iter().any(|p| p.exists()) { NOT_EXECUTABLE } else { NOT_FOUND })
}

fn spawn(reaper: &Arc<Reaper>, program: &Path, args: &[&OsStr]) -> Result<Status, String> {
    let text = |e: std::io::Error| format!("{}: {e}", program.display());
    let mut child =
        reaper.spawn(Command::new(program).args(args).env("PATH", PATH)).map_err(text)?;
    let status = child.wait().map_err(text)?;
    Ok(match (status.code(), status.signal()) {
        (Some(code), _) => Status::Exited(code),
        (None, signal) => Status::Signaled(signal.unwrap_or_default()),
    })
}

/// A file's content as a command line: without the line end that editors add.
pub(crate) fn line_of(content: &[u8]) -> OsString {
    let end = content.iter().rposition(|b| !b.is_ascii_whitespace()).map_or(0, |n| n + 1);
    OsStr::from_bytes(content.get(..end).unwrap_or_default()).to_owned()
}
