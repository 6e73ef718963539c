//! Runs a command line: by the system's `/bin/sh` if there is one, otherwise without a shell, one command after the
//! other. In vmtrace's own userland the shell runs only lines that need one.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;

use crate::reaper::Reaper;
use crate::words::{self, Error, Line, Step};

/// Where commands are looked for, in this order: `/` first, since that is where added files are.
pub const PATH: &str = "/:/bin:/sbin:/usr/bin:/usr/sbin:/usr/local/bin:/run/vmtrace";

/// Where the agent's own commands are in a root of the host's.
pub(crate) const TOOLS: &str = "/run/vmtrace";

/// The status of a command line that could not be run at all.
pub(crate) const CANNOT_RUN: u8 = 125;

/// The status of a program that does not exist.
pub(crate) const NOT_FOUND: i32 = 127;

/// The status of a program that cannot be started.
pub(crate) const NOT_EXECUTABLE: i32 = 126;

pub(crate) const SHELL: &str = "/bin/sh";

/// Says that `/bin/sh` is the userland that vmtrace has put there, and not the system's own.
const USERLAND: &str = "/vmtrace/userland";

/// Where that userland has the programs that applets have the names of.
const REAL: &str = "/usr/bin";

/// How a command line ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    Exited(i32),
    Signaled(i32),
}

/// Whether the system has a shell of its own, which is then for all command lines.
pub(crate) fn has_own_shell() -> bool {
    Path::new(SHELL).exists() && !has_userland()
}

/// Whether vmtrace's userland is here.
pub(crate) fn has_userland() -> bool {
    Path::new(USERLAND).exists() && Path::new(SHELL).exists()
}

/// Whether a shell runs the line; otherwise it is run step by step.
fn is_for_shell(line: &OsStr) -> Result<bool, Error> {
    if !has_userland() {
        return Ok(has_own_shell());
    }
    let is_program = |name: &str| find(name.as_ref(), PATH.as_ref()).is_ok();
    // Text of another encoding is the shell's to understand.
    let Some(line) = line.to_str() else { return Ok(true) };
    Ok(matches!(words::understand(line, is_program)?, Line::Shell(_)))
}

/// Runs `line` to its end.
pub(crate) fn run(reaper: &Arc<Reaper>, line: &OsStr) -> Result<Status, String> {
    if is_for_shell(line).map_err(|e| e.to_string())? {
        return spawn(reaper, Command::new(SHELL).arg("-c").arg(line));
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

/// A process that does the same: a shell, or this program again, which also says what is wrong with a line.
pub(crate) fn of_line(line: &OsStr) -> Command {
    let shell = is_for_shell(line).unwrap_or(false);
    let (program, option) = if shell { (SHELL, "-c") } else { ("/proc/self/exe", "run") };
    let mut command = Command::new(program);
    command.arg(option).arg(line);
    command
}

/// Becomes the userland's program of an applet's name, if there is one.
pub(crate) fn become_real(name: &OsStr, args: &[OsString]) {
    let program = Path::new(REAL).join(name);
    if has_userland() && program.exists() {
        // If that fails, the applet goes on, and says what it cannot.
        let _ = Command::new(program).args(args).exec();
    }
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
    spawn(reaper, &mut Command::new(SHELL))
}

fn run_step(reaper: &Arc<Reaper>, step: &Step) -> Result<Status, String> {
    let Some((name, args)) = step.words.split_first() else { return Ok(Status::Exited(0)) };
    match find(name.as_ref(), PATH.as_ref()) {
        Ok(path) => {
            // Like a shell: a program that cannot be started is the command's failure, not ours.
            spawn(reaper, Command::new(path).args(args)).or_else(|e| {
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

/// Runs a program to its end.
pub(crate) fn spawn(reaper: &Arc<Reaper>, command: &mut Command) -> Result<Status, String> {
    let program = command.get_program().to_owned();
    let text = |e: std::io::Error| format!("{}: {e}", program.display());
    let mut child = reaper.spawn(command.env("PATH", PATH)).map_err(text)?;
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
