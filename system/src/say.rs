//! Words for the user.

use std::fmt::Arguments;
use std::io::Write;

/// As `eprintln!`, which panics when standard error cannot be written: what a command does, and
/// what it exits with, must not depend on who reads it.
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
