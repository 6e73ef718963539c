//! The agent channel: lines for the VMM on the second serial port.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::sys::termios::{SetArg, cfmakeraw, tcgetattr, tcsetattr};

nix::ioctl_read_bad!(bytes_waiting, libc::TIOCOUTQ, libc::c_int);

pub(crate) const DEVICE: &str = "/dev/ttyS1";
const PREFIX: &str = "vmtrace-agent 1";
/// A line is never longer, prefix and line end included.
const LINE_MAX: usize = 256;
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Open or not: a guest without that port works as well, it just cannot report.
pub(crate) struct Channel(Option<File>);

impl Channel {
    pub(crate) fn open() -> Self {
        let open = || -> std::io::Result<File> {
            // Non-blocking: opening must not wait for a carrier, writing must not hang on a dead port.
            let port = OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags((OFlag::O_NOCTTY | OFlag::O_NONBLOCK).bits())
                .open(DEVICE)?;
            let mut settings = tcgetattr(&port)?;
            cfmakeraw(&mut settings);
            tcsetattr(&port, SetArg::TCSANOW, &settings)?;
            Ok(port)
        };
        Self(open().ok())
    }

    pub(crate) fn hello(&mut self) {
        self.line(&format!("hello {}", env!("CARGO_PKG_VERSION")));
    }

    pub(crate) fn exited(&mut self, status: i32) {
        self.line(&format!("exit {status}"));
    }

    pub(crate) fn signaled(&mut self, signal: i32) {
        self.line(&format!("signal {signal}"));
    }

    /// Why the host cannot connect.
    pub(crate) fn no_vsock(&mut self, reason: &str) {
        self.line(&format!("novsock {reason}"));
    }

    /// Why the command's output goes to the console.
    pub(crate) fn output_to_console(&mut self, reason: &str) {
        self.line(&format!("console {reason}"));
    }

    /// `false`: there is no such port.
    pub(crate) fn mark(&mut self, ticks: u64, text: &str) -> bool {
        self.line(&format!("mark {ticks} {text}"));
        self.0.is_some()
    }

    /// To the VMM, and to the console for whoever watches it.
    pub(crate) fn error(&mut self, text: &str) {
        eprintln!("vmtrace-agent: {text}");
        self.line(&format!("error {text}"));
    }

    fn line(&mut self, text: &str) {
        let Some(port) = &mut self.0 else { return };
        let line = format_line(text);
        let mut rest = line.as_bytes();
        let end = Instant::now() + DRAIN_TIMEOUT;
        while !rest.is_empty() {
            match port.write(rest) {
                Ok(n) => rest = rest.get(n..).unwrap_or_default(),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock && Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                // EIO: no such port in this machine.
                Err(_) => return self.0 = None,
            }
        }
    }

    /// Waits until the VMM has every byte, but not for ever.
    pub(crate) fn drain(&mut self) {
        if let Some(port) = &self.0 {
            drain(port);
        }
    }
}

/// Waits until a terminal has taken what was written, but not for long: nobody may take it.
pub(crate) fn drain(terminal: &File) {
    let end = Instant::now() + DRAIN_TIMEOUT;
    while Instant::now() < end && waiting(terminal) > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits for the UART to take what was written: the kernel's last message does not, and the
/// power goes with the rest.
pub(crate) fn drain_console() {
    if let Ok(console) = File::options().write(true).open("/dev/console") {
        drain(&console);
    }
}

#[allow(unsafe_code)] // an ioctl that nix and std do not wrap
fn waiting(port: &File) -> libc::c_int {
    let mut count = 0;
    // SAFETY: TIOCOUTQ writes one int through the pointer, which is valid for it.
    match unsafe { bytes_waiting(port.as_raw_fd(), &raw mut count) } {
        Ok(_) => count,
        Err(_) => 0,
    }
}

fn format_line(text: &str) -> String {
    let mut line = format!("{PREFIX} ");
    for c in text.chars() {
        if line.len() + c.len_utf8() >= LINE_MAX {
            break;
        }
        line.push(if c.is_control() { ' ' } else { c });
    }
    line.push('\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_single_and_bounded() {
        assert_eq!(format_line("error a\nb\tc"), "vmtrace-agent 1 error a b c\n");
        let long = format_line(&"ä".repeat(500));
        assert!(long.len() <= LINE_MAX && long.ends_with('\n'));
    }
}
