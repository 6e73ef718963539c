//! A user who sits at the console of a guest (`vmtrace boot --interactive`).

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use nix::pty::{Winsize, openpty};
use nix::sys::termios::{Termios, tcgetattr};
use vmtrace::emulated::cache_dir;
use vmtrace::stream::Exit;

use crate::trace::Trace;
use crate::userland::debian_style;
use crate::{command, qemu_of, within};

/// What is waited for may take so long, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(300);
/// What was typed is typed again after this: whoever should have read it may not have been there.
const AGAIN: Duration = Duration::from_secs(30);

/// A run whose terminal this is; killed when it is dropped.
struct Seat {
    child: Child,
    /// The user's side.
    keys: File,
    /// The side of the programs.
    terminal: OwnedFd,
    shown: Arc<Mutex<Vec<u8>>>,
    /// What was looked at already.
    read: usize,
}

impl Seat {
    fn take(kernel: &str, trace: &Path, args: &[&str]) -> Self {
        let size = Winsize { ws_row: 33, ws_col: 101, ws_xpixel: 0, ws_ypixel: 0 };
        let pty = openpty(&size, None).unwrap();
        let end = || Stdio::from(pty.slave.try_clone().unwrap());
        let mut command = command().unwrap();
        command.args(["boot", "--host", "emulated", "--interactive", "--timeout", "800"]);
        command.arg(cache_dir().unwrap().join("kernels").join(kernel).join("vmlinuz"));
        command.arg("-o").arg(trace).args(["-f", "vfs_*"]);
        // No word of the kernel's among those of the shell.
        command.args(["--cmdline", "loglevel=1"]).args(args).env("TERM", "vt220");
        let child = command.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        let keys = File::from(pty.master);
        let (shown, mut screen) = (Arc::<Mutex<Vec<u8>>>::default(), keys.try_clone().unwrap());
        let filled = Arc::clone(&shown);
        // It ends with the process: this side of the terminal stays open.
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = screen.read(&mut bytes) {
                filled.lock().unwrap_or_else(PoisonError::into_inner).extend(&bytes[..count]);
            }
        });
        Self { child, keys, terminal: pty.slave, shown, read: 0 }
    }

    fn shown(&self) -> String {
        let shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&shown).into_owned()
    }

    fn key(&self, keys: &[u8]) {
        (&self.keys).write_all(keys).unwrap();
    }

    /// Whether this is shown within that time, behind what was waited for last.
    fn shows(&mut self, text: &str, time: Duration) -> bool {
        let shown = Arc::clone(&self.shown);
        let (mut place, mut after_end) = (None, 0);
        within(time, || {
            let shown = shown.lock().unwrap_or_else(PoisonError::into_inner);
            let new = &shown[self.read..];
            place = new.windows(text.len()).position(|it| it == text.as_bytes());
            // Its last words may still be on their way.
            after_end += u32::from(self.child.try_wait().unwrap().is_some());
            place.is_some() || after_end > 100
        });
        place.into_iter().for_each(|at| self.read += at + text.len());
        place.is_some()
    }

    fn wait_for(&mut self, text: &str) {
        assert!(self.shows(text, PATIENCE), "the guest hangs: no {text:?} in {}", self.shown());
    }

    /// Types a line that this answers; it must not be in the line itself.
    fn type_line(&mut self, line: &str, answer: &str) {
        self.key(format!("{line}\r").as_bytes());
        self.wait_for(answer);
    }

    /// The same, until that is so.
    fn ask(&mut self, line: &str, answer: &str) {
        let asked = (0..10).any(|_| {
            self.key(format!("{line}\r").as_bytes());
            self.shows(answer, AGAIN)
        });
        assert!(asked, "the guest hangs: no {answer:?} to {line:?} in {}", self.shown());
    }

    fn resize(&self, rows: u16, columns: u16) {
        let size = ["rows", &rows.to_string(), "cols", &columns.to_string()].map(str::to_owned);
        let name = nix::unistd::ttyname(&self.terminal).unwrap();
        let status = Command::new("stty").arg("-F").arg(name).args(size).status().unwrap();
        assert!(status.success());
        // As the kernel does for the session that has the terminal.
        signal("WINCH", self.child.id());
    }

    /// Its exit code.
    fn ends(&mut self) -> Option<i32> {
        let mut status = None;
        within(PATIENCE, || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap_or_else(|| panic!("the guest hangs: {}", self.shown())).code()
    }

    fn settings(&self) -> Termios {
        tcgetattr(&self.terminal).unwrap()
    }
}

fn signal(name: &str, process: u32) {
    let status = Command::new("kill").args(["-s", name, &process.to_string()]).status().unwrap();
    assert!(status.success());
}

impl Drop for Seat {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a user does at a shell: words, keys that are signals there, another size; and the key that ends the run.
pub fn a_user_sits_at_the_console(kernel: &str) {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("trace");
    let mut seat = Seat::take(kernel, &place, &[]);
    let found = seat.settings();
    seat.wait_for("Ctrl-] q ends the run");
    seat.wait_for("# ");
    assert_ne!(seat.settings(), found, "it is raw");
    seat.ask("echo a-$((1+1))-$TERM", "a-2-vt220");
    seat.ask("stty size", "33 101");
    // The whole group of it, which the terminal signals.
    seat.type_line("sh -c 'echo b-$((3+4))-b; sleep 100000'", "b-7-b");
    seat.key(b"\x03");
    seat.wait_for("# ");
    seat.type_line("echo c-$?-c", "c-130-c");
    seat.resize(44, 111);
    seat.ask("stty size", "44 111");
    // The escape key itself is the guest's if it comes twice, and so are bytes that are no text: they come back as
    // they were typed.
    seat.type_line(
        "stty raw -echo; echo r-$((4+4))-r; dd bs=1 count=4 2>/dev/null | hexdump -C; stty sane",
        "r-8-r",
    );
    seat.key(b"\x1d\x1d\xff\x00\x03");
    seat.wait_for("1d ff 00 03");
    seat.type_line("echo d-$((5+4))-d", "d-9-d");
    seat.key(b"\x1dq");
    let code = seat.ends();
    let shown = seat.shown();
    assert_eq!(code, Some(0), "{shown}");
    seat.wait_for("vmtrace: guest stopped\r\n");
    assert_eq!(seat.settings(), found, "{shown}");
    let trace = Trace::read(fs::read(&place).unwrap()).unwrap();
    assert_eq!(trace.summary.exit, Exit::Stopped);
    assert!(
        trace.entries.iter().any(|entry| &*entry.function == "vfs_read"),
        "{:?}",
        trace.summary
    );
    assert!(!shown.contains("vfs_"), "the trace is elsewhere: {shown}");
}

/// The end of the shell is that of the guest, and its status that of a run: in an initramfs of the user's, whose /init is not
/// started.
pub fn a_shell_ends_its_guest(kernel: &str) {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("trace");
    let initrd = directory.path().join("initrd");
    fs::write(&initrd, debian_style(kernel)).unwrap();
    let initrd = initrd.to_str().unwrap();
    let mut seat = Seat::take(kernel, &place, &["--initrd", initrd]);
    let found = seat.settings();
    seat.wait_for("its own /init");
    seat.wait_for("# ");
    seat.ask("echo a-$((1+1))-$TERM", "a-2-vt220");
    seat.ask("stty size", "33 101");
    seat.ask("test -e /started || echo b-$((2+2))-b", "b-4-b");
    seat.key(b"exit 7\r");
    let code = seat.ends();
    let shown = seat.shown();
    assert_eq!(code, Some(4), "{shown}");
    seat.wait_for("run status 7");
    assert_eq!(seat.settings(), found, "{shown}");
    let trace = Trace::read(fs::read(&place).unwrap()).unwrap();
    assert_eq!((trace.summary.exit, trace.summary.run_status), (Exit::Poweroff, Some(7)));
}

/// Stopped as a job of a shell, the run has the terminal no more, and has it again when it goes on; and it gives it back
/// at an end that is not in order.
pub fn a_run_that_is_stopped_gives_the_terminal_back(kernel: &str) {
    let directory = tempfile::tempdir().unwrap();
    let mut seat = Seat::take(kernel, &directory.path().join("trace"), &[]);
    let (found, id) = (seat.settings(), seat.child.id());
    let becomes_raw = |seat: &Seat| within(PATIENCE, || seat.settings() != found);
    assert!(becomes_raw(&seat), "{}", seat.shown());
    let raw = seat.settings();
    signal("TSTP", id);
    let stat = format!("/proc/{id}/stat");
    let stopped = || fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") T "));
    assert!(within(PATIENCE, stopped), "{}", seat.shown());
    assert_eq!(seat.settings(), found);
    signal("CONT", id);
    assert!(becomes_raw(&seat), "{}", seat.shown());
    assert_eq!(seat.settings(), raw);
    // A host that hangs, so that nothing ends in order.
    signal("STOP", qemu_of(id).unwrap());
    let mut status = None;
    let ended = within(PATIENCE, || {
        signal("TERM", id);
        status = seat.child.try_wait().unwrap();
        status.is_some()
    });
    assert!(ended, "{}", seat.shown());
    // One that comes when it has given up ends it as if it had no handler: the terminal is back by then.
    let status = status.unwrap();
    let hard = status.code() == Some(1) || status.signal() == Some(libc::SIGTERM);
    assert!(hard, "{status:?} {}", seat.shown());
    assert_eq!(seat.settings(), found, "{}", seat.shown());
}
