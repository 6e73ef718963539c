//! `--interactive`: the user's terminal is the guest's console.

mod ends;
mod keys;
mod window;

use super::Args;
use crate::cli::BadUsage;
use crate::emulated::Interrupts;
use crate::serve::GuestReaders;
use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use signal_hook::consts::{SIGCONT, SIGWINCH};
use std::collections::VecDeque;
use std::ffi::c_int;
use std::fs::OpenOptions;
use std::io::{self, IsTerminal, Read, Stdin};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use vmtrace_system::say;
use vmtrace_system::terminal::{self, RawTerminal, Screen};

use keys::Escape;
pub(super) use keys::{Decoder, Keys, Plain, Size, Typed};
pub(super) use window::{Teller, Window};

/// The message for a user who cannot stop the run by Ctrl-C.
const HINT: &str = "this terminal is the guest's console; Ctrl-] q ends the run, Ctrl-] Ctrl-] sends \
                    Ctrl-] to the guest";

/// Signals at which the terminal is looked at again: it has another size, or was the shell's while this
/// was stopped.
const SIGNALS: [c_int; 2] = [SIGWINCH, SIGCONT];

/// Whether it can be.
///
/// # Errors
/// When the trace would go to the terminal as well, or there is none.
pub(super) fn check(args: &Args) -> Result<()> {
    if !args.interactive {
        return Ok(());
    }
    let served = args.serve_guest.is_some_and(|readers| readers != GuestReaders::None);
    let read = args.socket.is_some() || served;
    let watched = args.boot_report || args.latency.is_some() || args.rules.any();
    let wrong = match &args.output {
        None if !read && !watched => {
            "the terminal is the guest's, and the trace needs another place: a file (-o FILE, or -o \
             /dev/null) or a socket (--socket PATH)"
        }
        Some(file) if is_terminal(file) => {
            "-o is a terminal: the trace would be mixed with the guest's output"
        }
        _ if !io::stdin().is_terminal() => {
            "standard input is not a terminal (ssh and containers have an option for one: -t); to run a \
             command in the guest there is --run"
        }
        _ if !io::stdout().is_terminal() => {
            "standard output is not a terminal, and the guest's console is shown there"
        }
        _ => return Ok(()),
    };
    Err(BadUsage(format!("--interactive: {wrong}")).into())
}

fn is_terminal(path: &Path) -> bool {
    let device = path.metadata().is_ok_and(|file| file.file_type().is_char_device());
    let flags = (nix::fcntl::OFlag::O_NOCTTY | nix::fcntl::OFlag::O_NONBLOCK).bits();
    device
        && OpenOptions::new()
            .write(true)
            .custom_flags(flags)
            .open(path)
            .is_ok_and(|it| it.is_terminal())
}

/// For the shell in the guest: rows, columns and type of the terminal.
pub(super) fn for_guest(args: &Args) -> Option<(u16, u16, String)> {
    let Size { rows, columns } = size().unwrap_or(Size { rows: 0, columns: 0 });
    args.interactive.then(|| (rows, columns, kind(std::env::var("TERM").ok())))
}

/// A name that is one word, of which the guest's programs may know something.
fn kind(named: Option<String>) -> String {
    let good = |c: char| c.is_ascii_alphanumeric() || "-+._".contains(c);
    let named = named.filter(|name| (1..=64).contains(&name.len()) && name.chars().all(good));
    named.unwrap_or_else(|| "vt100".to_owned())
}

/// As far as the terminal says.
fn size() -> Option<Size> {
    let (columns, rows) = terminal_size::terminal_size_of(io::stdin())?;
    Some(Size { rows: rows.0, columns: columns.0 })
}

/// Tells the user how this ends, and takes the terminal until the guard is dropped, or a signal but
/// these ends or stops the process.
///
/// # Errors
/// When the terminal is gone.
pub(super) fn take_terminal(taken: &[c_int]) -> Result<RawTerminal> {
    hint();
    ends::give_the_terminal_back(taken);
    RawTerminal::enter(io::stdin()).context("--interactive: the terminal cannot be made raw")
}

fn hint() {
    say!("vmtrace: {HINT}");
}

/// Where the guest's console is shown.
///
/// # Errors
/// When the system has no descriptors left.
pub(super) fn screen() -> Result<Screen> {
    Ok(Screen::new(io::stdout())?)
}

/// Has a window follow the terminal's size; needs its size now.
pub(super) fn follow(window: &Window) -> io::Result<crate::events::Signals<impl FnMut() + use<>>> {
    let window = window.clone();
    let look = move || {
        if let Err(error) = terminal::again() {
            log::warn!("the terminal: {error}");
        }
        size().into_iter().for_each(|size| window.resize(size));
    };
    look();
    crate::events::Signals::new(&SIGNALS, look)
}

/// A user's keys, with help for those who ask.
#[derive(Default)]
pub(super) struct UserKeys(Escape);

impl Keys for UserKeys {
    fn take(&mut self, bytes: &[u8]) -> Typed {
        let typed = self.0.take(bytes);
        if typed.help {
            hint();
        }
        typed
    }
}

/// What a user types, for the vmtrace in an emulated host: keys and sizes ([`Decoder`]). Ends with
/// the terminal.
pub(super) struct Typing {
    stdin: Stdin,
    /// Written by handlers of [`SIGNALS`].
    signals: UnixStream,
    keys: UserKeys,
    /// Told of ends.
    interrupts: Arc<Interrupts>,
    bytes: VecDeque<u8>,
}

impl Typing {
    pub(super) fn new(interrupts: Arc<Interrupts>) -> io::Result<Self> {
        let (signals, handlers) = UnixStream::pair()?;
        signals.set_nonblocking(true)?;
        for signal in SIGNALS {
            signal_hook::low_level::pipe::register(signal, handlers.try_clone()?)?;
        }
        let (keys, stdin) = (UserKeys::default(), io::stdin());
        // It may have changed while the host came up.
        let bytes = size().into_iter().flat_map(Size::encode).collect();
        Ok(Self { stdin, signals, keys, interrupts, bytes })
    }

    /// Waits for something and takes it; false: the terminal is gone.
    fn wait(&mut self) -> io::Result<bool> {
        let mut descriptors = [
            PollFd::new(self.stdin.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
        ];
        match poll(&mut descriptors, PollTimeout::NONE) {
            Err(Errno::EINTR) => return Ok(true),
            polled => polled?,
        };
        let [typed, signalled] = descriptors.map(|it| it.any().unwrap_or(true));
        let mut bytes = [0; 1024];
        if signalled {
            while (&self.signals).read(&mut bytes).is_ok_and(|count| count > 0) {}
            terminal::again()?;
            self.bytes.extend(size().into_iter().flat_map(Size::encode));
        }
        if typed {
            // Not by the buffer of `Stdin`, which nobody could wait for.
            let count = match nix::unistd::read(&self.stdin, &mut bytes) {
                Err(Errno::EINTR | Errno::EAGAIN) => return Ok(true),
                Ok(0) | Err(_) => return Ok(false),
                Ok(count) => count,
            };
            let typed = self.keys.take(bytes.get(..count).unwrap_or_default());
            self.bytes.extend(keys::encode_keys(&typed.keys));
            (0..typed.ends).for_each(|_| self.interrupts.ask());
        }
        Ok(true)
    }
}

impl Read for Typing {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.bytes.is_empty() {
            if !self.wait()? {
                return Ok(0);
            }
        }
        self.bytes.read(buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::boot::tests::args;

    fn error(line: &str) -> String {
        let error = check(&args(line).unwrap()).unwrap_err();
        assert!(error.is::<BadUsage>(), "{error}");
        error.to_string()
    }

    // Records among what a shell says would be of no use to anybody.
    #[test]
    fn the_trace_needs_a_place_of_its_own() {
        let text = error("--interactive");
        assert!(text.starts_with("--interactive: ") && !text.contains('\n'), "{text}");
        assert!(text.contains("-o FILE") && text.contains("--socket"), "{text}");
        let pty = nix::pty::openpty(None, None).unwrap();
        let name = nix::unistd::ttyname(&pty.slave).unwrap();
        assert!(
            error(&format!("--interactive -o {}", name.display())).contains("-o is a terminal")
        );
        // All else is well with these, if there is a terminal.
        for line in ["-o t", "-o /dev/null", "--socket s", "--boot-report", "--expect f"] {
            let checked = check(&args(&format!("--interactive {line}")).unwrap());
            let text = checked.err().map(|error| error.to_string()).unwrap_or_default();
            assert!(text.is_empty() || text.contains("is not a terminal"), "{line}: {text}");
        }
        assert!(check(&args("").unwrap()).is_ok());
    }

    #[test]
    fn what_else_has_the_console_cannot_be_said_as_well() {
        for line in ["--run ls", "--console none", "--console stderr", "--format json"] {
            let error = args(&format!("--interactive -o t {line}")).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{line}");
        }
    }

    #[test]
    fn types_of_terminals_are_words() {
        assert_eq!(kind(Some("xterm-256color".to_owned())), "xterm-256color");
        for odd in [None, Some(""), Some("a b"), Some("a\nb")] {
            assert_eq!(kind(odd.map(str::to_owned)), "vt100");
        }
    }
}
