//! Messages for the user.

use std::fmt::Arguments;
use std::io::Write;
use std::os::fd::AsFd;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Like `eprintln!`, but without its panic when standard error cannot be written: the work and the
/// exit code of a command must not depend on the reader of its messages.
#[macro_export]
macro_rules! say {
    ($($words:tt)*) => {
        $crate::say::line(format_args!($($words)*))
    };
}

/// Writes a line to standard error.
pub fn line(words: Arguments<'_>) {
    text(format!("{words}\n").as_bytes());
}

/// Writes to standard error.
pub fn text(bytes: &[u8]) {
    // Nobody is left to tell of an error.
    let _ = std::io::stderr().write_all(&crate::terminal::lines(bytes));
}

/// Writes to standard error if that takes something within this time: at most so much at once as a pipe
/// has room for when it has any, and without the lock that a thread may hold that is stuck there.
pub fn in_time(words: &str, time: Duration) {
    const ROOM: usize = 4096;
    let stderr = std::io::stderr();
    let stderr = stderr.as_fd();
    let time = PollTimeout::try_from(time).unwrap_or(PollTimeout::MAX);
    if poll(&mut [PollFd::new(stderr, PollFlags::POLLOUT)], time) == Ok(1) {
        let bytes = words.as_bytes();
        // Nobody is left to tell of an error.
        let _ = nix::unistd::write(stderr, bytes.get(..ROOM).unwrap_or(bytes));
    }
}
