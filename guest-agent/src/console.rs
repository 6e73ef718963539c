//! A shell on the guest's console, as after a login: with job control, a window size, and a terminal
//! type.

use std::fs::{self, OpenOptions};
use std::io::{self, BufRead, BufReader};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::Arc;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::SigSet;
use nix::sys::termios::{InputFlags, SetArg, tcgetattr, tcsetattr};

use crate::channel::{DEVICE, drain};
use crate::command::{self, CANNOT_RUN, SHELL, Status};
use crate::reaper::{Reaper, start_thread};

/// The file that says that a user is at the console: rows and columns of the terminal, and its type.
pub(crate) const ASKED: &str = "/vmtrace/console";

/// The console itself: a process cannot have `/dev/console` as its controlling terminal.
const TERMINAL: &str = "/dev/ttyS0";

/// What lines of the VMM begin with.
const PREFIX: &str = "vmtrace 1 ";

nix::ioctl_write_ptr_bad!(set_window_size, libc::TIOCSWINSZ, libc::winsize);

/// The user's terminal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Console {
    size: Option<(u16, u16)>,
    kind: String,
}

impl Console {
    /// From `ROWS COLUMNS TYPE`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (size, kind) = text.trim_end().rsplit_once(' ')?;
        Some(Self { size: size_of(size), kind: kind.to_owned() })
    }

    /// Runs a shell there to its end.
    pub(crate) fn shell(&self, reaper: &Arc<Reaper>) -> Result<Status, String> {
        if let Some(size) = self.size {
            resize(size);
        }
        follow_sizes();
        let root = root();
        let mut login = Command::new("/proc/self/exe");
        login.arg("login").arg(&root.shell).env("TERM", &self.kind).env("SHELL", &root.shell);
        login.env("HOME", &root.home).env("USER", "root").env("LOGNAME", "root");
        command::spawn(reaper, &mut login)
    }
}

/// `ROWS COLUMNS`, if both are something.
fn size_of(text: &str) -> Option<(u16, u16)> {
    let (rows, columns) = text.split_once(' ')?;
    let size = (rows.parse().ok()?, columns.parse().ok()?);
    (size.0 > 0 && size.1 > 0).then_some(size)
}

/// Gives the console a size; programs in the foreground are told by the kernel. One that refuses has
/// none.
#[allow(unsafe_code)] // an ioctl that nix and std do not wrap
fn resize((rows, columns): (u16, u16)) {
    let size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    let flags = (OFlag::O_NOCTTY | OFlag::O_NONBLOCK).bits();
    let terminal = OpenOptions::new().read(true).write(true).custom_flags(flags).open(TERMINAL);
    if let Ok(terminal) = terminal {
        // SAFETY: TIOCSWINSZ reads one winsize through the pointer, which is valid for it.
        let _ = unsafe { set_window_size(terminal.as_raw_fd(), &raw const size) };
    }
}

/// The VMM says when the user's terminal has another size.
fn follow_sizes() {
    let flags = OFlag::O_NOCTTY.bits();
    let mut open = OpenOptions::new();
    // The agent has set it up already, so that this waits for nothing.
    let Ok(port) = open.read(true).custom_flags(flags).open(DEVICE) else { return };
    let _ = start_thread("sizes", move || {
        for line in BufReader::new(port).split(b'\n').map_while(Result::ok) {
            if let Some(size) = asked_size(&line) {
                resize(size);
            }
        }
    });
}

/// From `vmtrace 1 size ROWS COLUMNS`.
fn asked_size(line: &[u8]) -> Option<(u16, u16)> {
    size_of(std::str::from_utf8(line).ok()?.strip_prefix(PREFIX)?.strip_prefix("size ")?)
}

/// What a login of root's has.
#[derive(Debug, PartialEq, Eq)]
struct Root {
    home: String,
    shell: String,
}

fn root() -> Root {
    of_passwd(&fs::read_to_string("/etc/passwd").unwrap_or_default())
}

/// As far as that is there.
fn of_passwd(passwd: &str) -> Root {
    let line = passwd.lines().find(|line| line.starts_with("root:")).unwrap_or_default();
    let field = |index, usual: &str, good: fn(&Path) -> bool| {
        let named = line.split(':').nth(index).filter(|path| good(path.as_ref()));
        named.unwrap_or(usual).to_owned()
    };
    Root { home: field(5, "/", Path::is_dir), shell: field(6, SHELL, Path::is_file) }
}

/// `vmtrace-agent login SHELL`: runs it in a session of its own, on the console.
///
/// This process stays, since with the end of a session's leader the terminal is hung up, and loses
/// what it has not sent yet.
pub(crate) fn login(shell: &Path) -> ExitCode {
    match session(shell) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("vmtrace-agent: {}: {error}", shell.display());
            ExitCode::from(CANNOT_RUN)
        }
    }
}

fn session(shell: &Path) -> io::Result<ExitCode> {
    nix::unistd::setsid()?;
    // What a leader of a session opens becomes its controlling terminal.
    let terminal = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(OFlag::O_NONBLOCK.bits())
        .open(TERMINAL)?;
    let flags = OFlag::from_bits_retain(fcntl(&terminal, FcntlArg::F_GETFL)?);
    fcntl(&terminal, FcntlArg::F_SETFL(flags - OFlag::O_NONBLOCK))?;
    erase_whole_characters(&terminal)?;
    nix::unistd::dup2_stdin(&terminal)?;
    nix::unistd::dup2_stdout(&terminal)?;
    nix::unistd::dup2_stderr(&terminal)?;
    // Keys are for the shell, which begins in the same process group.
    SigSet::all().thread_block()?;
    let status = Command::new("/proc/self/exe").arg("shell").arg(shell).status()?;
    drain(&terminal);
    let code = status.code().or(status.signal().map(|signal| 128 + signal));
    Ok(ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)))
}

/// `vmtrace-agent shell SHELL`: becomes it, without the signals blocked that this program has blocked.
pub(crate) fn become_shell(shell: &Path) -> ExitCode {
    let name = shell.file_name().unwrap_or_default().to_string_lossy();
    let unblocked = SigSet::empty().thread_set_mask().map_err(io::Error::from);
    // As logins have it.
    let become_it = || Command::new(shell).arg0(format!("-{name}")).exec();
    let error = unblocked.map_or_else(|error| error, |()| become_it());
    eprintln!("vmtrace-agent: {}: {error}", shell.display());
    ExitCode::from(CANNOT_RUN)
}

/// Where a line is edited by the kernel.
fn erase_whole_characters(terminal: impl AsFd) -> io::Result<()> {
    let mut settings = tcgetattr(&terminal)?;
    settings.input_flags |= InputFlags::IUTF8;
    Ok(tcsetattr(&terminal, SetArg::TCSANOW, &settings)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminals_have_a_type_and_a_size_if_that_is_known() {
        let console = |size, kind: &str| Some(Console { size, kind: kind.to_owned() });
        assert_eq!(Console::parse("24 80 xterm\n"), console(Some((24, 80)), "xterm"));
        assert_eq!(Console::parse("0 0 vt100"), console(None, "vt100"));
        assert_eq!(Console::parse("24 65536 vt100"), console(None, "vt100"));
        assert_eq!(Console::parse(""), None);
    }

    #[test]
    fn only_lines_about_sizes_are_followed() {
        assert_eq!(asked_size(b"vmtrace 1 size 50 132"), Some((50, 132)));
        for other in
            ["vmtrace 1 size 0 0", "vmtrace 2 size 1 1", "size 1 1", "vmtrace 1 size 1", ""]
        {
            assert_eq!(asked_size(other.as_bytes()), None, "{other}");
        }
        assert_eq!(asked_size(b"\xff"), None);
    }

    // The built-in initramfs has no accounts, and a root may name a shell that it has not.
    #[test]
    fn a_login_has_what_is_there() {
        let of = |passwd: &str| {
            let Root { home, shell } = of_passwd(passwd);
            (home, shell)
        };
        let usual = ("/".to_owned(), SHELL.to_owned());
        assert_eq!(of(""), usual);
        assert_eq!(of("root:x:0:0:root:/no/where:/no/shell\n"), usual);
        let this = std::env::current_exe().unwrap();
        let line = format!("other:x:1:1::/:/bin/x\nroot:x:0:0:root:/dev:{}\n", this.display());
        assert_eq!(of(&line), ("/dev".to_owned(), this.display().to_string()));
    }
}
