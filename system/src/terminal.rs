//! The user's terminal in raw mode, so that the guest gets every key.
//!
//! A process has one. The guard restores its mode when it is dropped; [`restore`] does so for code
//! that ends the process without dropping it. Meanwhile messages for the user ([`crate::say`]) have
//! the line ends that a raw terminal needs.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, IsTerminal as _, Write};
use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};
use nix::unistd::{Pid, getpgrp, tcgetpgrp};

/// The terminal that was made raw first, with its former mode.
static TERMINAL: OnceLock<Terminal> = OnceLock::new();
static RAW: AtomicBool = AtomicBool::new(false);
/// What was shown last did not end a line.
static MID_LINE: AtomicBool = AtomicBool::new(false);

struct Terminal {
    terminal: File,
    /// The process group of this process, as shells know jobs.
    group: Pid,
    cooked: libc::termios,
    raw: libc::termios,
}

/// While this lives the terminal is raw.
#[derive(Debug)]
pub struct RawTerminal(());

impl RawTerminal {
    /// Makes the terminal raw, and has a panic of any thread restore it before it says anything.
    ///
    /// # Errors
    /// When this is no terminal.
    pub fn enter(terminal: impl AsFd) -> io::Result<Self> {
        let found = tcgetattr(&terminal)?;
        let mut raw = found.clone();
        cfmakeraw(&mut raw);
        let terminal = File::from(terminal.as_fd().try_clone_to_owned()?);
        let first = Terminal { terminal, group: getpgrp(), cooked: found.into(), raw: raw.into() };
        if TERMINAL.set(first).is_ok() {
            let hook = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                restore();
                hook(panic);
            }));
        }
        RAW.store(true, Ordering::SeqCst);
        let this = Self(());
        again()?;
        Ok(this)
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        if MID_LINE.swap(false, Ordering::SeqCst)
            && let Some(terminal) = TERMINAL.get()
        {
            let _ = (&terminal.terminal).write_all(b"\r\n");
        }
        restore();
    }
}

/// Makes the terminal raw once more if it is meant to be: whoever had it meanwhile, such as the shell
/// of a stopped job, has changed that.
///
/// # Errors
/// When the terminal is gone.
pub fn again() -> io::Result<()> {
    match TERMINAL.get() {
        Some(terminal) if RAW.load(Ordering::SeqCst) => set(terminal, terminal.raw),
        _ => Ok(()),
    }
}

/// Gives the terminal back as it was found, if it is raw. Async-signal-safe.
pub fn restore() {
    if let Some(terminal) = TERMINAL.get()
        && RAW.swap(false, Ordering::SeqCst)
    {
        give_back(terminal);
    }
}

/// Gives the terminal back for as long as this process is stopped: [`again`] takes it once more.
/// Async-signal-safe.
pub fn lend() {
    if let Some(terminal) = TERMINAL.get()
        && RAW.load(Ordering::SeqCst)
    {
        give_back(terminal);
    }
}

fn give_back(terminal: &Terminal) {
    // In the background it belongs to another job, and the shell has restored it.
    if !tcgetpgrp(&terminal.terminal).is_ok_and(|group| group != terminal.group) {
        // Nobody is left to tell of a terminal that is gone.
        let _ = set(terminal, terminal.cooked);
    }
}

fn set(terminal: &Terminal, how: libc::termios) -> io::Result<()> {
    // Not once all was shown: a terminal that was stopped (Ctrl-S) would never be restored.
    Ok(tcsetattr(&terminal.terminal, SetArg::TCSANOW, &Termios::from(how))?)
}

/// What others show on the terminal, as it comes.
#[derive(Debug)]
pub struct Screen(File);

impl Screen {
    /// Shows on this.
    ///
    /// # Errors
    /// When the system has no descriptors left.
    pub fn new(terminal: impl AsFd) -> io::Result<Self> {
        Ok(Self(File::from(terminal.as_fd().try_clone_to_owned()?)))
    }

    /// Whether it is a terminal at all.
    #[must_use]
    pub fn is_terminal(&self) -> bool {
        self.0.is_terminal()
    }
}

impl Write for Screen {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.0.write(bytes)?;
        if let Some(last) = bytes.get(..written).and_then(<[u8]>::last) {
            MID_LINE.store(*last != b'\n', Ordering::SeqCst);
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Lines as the terminal wants them now: where it is raw, at the beginning of a line, and with
/// returns of their own.
pub(crate) fn lines(text: &[u8]) -> Cow<'_, [u8]> {
    if !RAW.load(Ordering::SeqCst) {
        return Cow::Borrowed(text);
    }
    raw_lines(text, MID_LINE.swap(false, Ordering::SeqCst)).into()
}

fn raw_lines(text: &[u8], mid_line: bool) -> Vec<u8> {
    let mut lines = if mid_line { b"\r\n".to_vec() } else { Vec::new() };
    for line in text.split_inclusive(|byte| *byte == b'\n') {
        match line.strip_suffix(b"\n") {
            Some(line) => lines.extend([line, b"\r\n"].concat()),
            None => lines.extend(line),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::pty::openpty;

    // The only test that has a terminal: there is one for a process.
    #[test]
    fn the_terminal_is_as_it_was_however_that_ends() {
        let pty = openpty(None, None).unwrap();
        let flags = || {
            let settings: libc::termios = tcgetattr(&pty.slave).unwrap().into();
            (settings.c_iflag, settings.c_oflag, settings.c_lflag, settings.c_cc)
        };
        let found = flags();
        let raw = RawTerminal::enter(&pty.slave).unwrap();
        assert_ne!(flags(), found);
        let is_raw = flags();
        assert_eq!((is_raw.1 & libc::OPOST, is_raw.2 & (libc::ECHO | libc::ISIG)), (0, 0));
        // What a shell does with the terminal of a job that was stopped.
        set(TERMINAL.get().unwrap(), TERMINAL.get().unwrap().cooked).unwrap();
        again().unwrap();
        assert_eq!(flags(), is_raw);
        lend();
        assert_eq!(flags(), found);
        again().unwrap();
        assert_eq!(flags(), is_raw);
        assert_eq!(&*lines(b"a\nb\n"), b"a\r\nb\r\n");
        drop(raw);
        assert_eq!(flags(), found);
        assert_eq!(&*lines(b"a\nb\n"), b"a\nb\n");
        // Nothing is made raw that nobody wants raw any more.
        again().unwrap();
        assert_eq!(flags(), found);

        let raw = RawTerminal::enter(&pty.slave).unwrap();
        assert_eq!(flags(), is_raw);
        let panics = std::thread::spawn(|| panic!("on purpose"));
        assert!(panics.join().is_err());
        assert_eq!(flags(), found);
        drop(raw);
        assert_eq!(flags(), found);

        let _raw = RawTerminal::enter(&pty.slave).unwrap();
        // As those do who end the process.
        restore();
        assert_eq!(flags(), found);
        assert!(RawTerminal::enter(File::open("/dev/null").unwrap()).is_err());
    }

    // A guest's prompt is no line, and a raw terminal returns only where it is told to.
    #[test]
    fn words_begin_a_line_of_their_own() {
        assert_eq!(raw_lines(b"one\ntwo\n", true), b"\r\none\r\ntwo\r\n");
        assert_eq!(raw_lines(b"one", false), b"one");
        assert_eq!(raw_lines(b"", false), b"");
    }
}
