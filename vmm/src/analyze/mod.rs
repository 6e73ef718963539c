//! Reports on whole traces: the time of a boot, latencies, and the differences between two traces.
//!
//! Each is an [`Export`](crate::export::Export) that uses bounded memory, whatever the length of the
//! trace, and makes a report at the end.

pub mod boot;
pub mod diff;
#[cfg(test)]
mod documented;
mod gaps;
pub mod latency;

use std::io::{self, Write};

use crate::export::{Export, seconds};

pub use gaps::{Gaps, LostOf};

/// What makes a report of one trace.
pub trait Analysis: Export {
    /// Writes the report, as JSON or as a page for people, when the trace has ended; `late` records of
    /// it were played behind later ones.
    ///
    /// # Errors
    /// When the output fails.
    fn write(self, late: u64, json: bool, out: &mut dyn Write) -> io::Result<()>;

    /// Why the report of this trace, which has ended, would be empty whatever the guest did.
    fn cannot(&self) -> Option<String> {
        None
    }

    /// What is not in the report whatever the guest did, where it is not empty; for people.
    fn lacks(&self) -> Option<String> {
        None
    }
}

/// Columns of a page for people.
const WIDTH: usize = 80;

/// In milliseconds.
fn milliseconds(nanoseconds: u64) -> String {
    format!("{}.{:03}", nanoseconds / 1_000_000, nanoseconds / 1_000 % 1_000)
}

/// A name of at most so many characters: of a longer one the beginning.
fn cut(name: &str, width: usize) -> String {
    if name.chars().count() <= width {
        return name.to_owned();
    }
    let mut short: String = name.chars().take(width.saturating_sub(2)).collect();
    short.push_str("..");
    short
}

/// A time of the trace in nanoseconds since its clock's start; what is before that is 0.
fn nanoseconds(header: &crate::stream::Header, ticks: u64) -> u64 {
    u64::try_from(header.nanoseconds(ticks).max(0)).unwrap_or(u64::MAX)
}

/// A text in lines, the first of which begins so.
fn wrap(out: &mut dyn Write, first: &str, text: &str) -> io::Result<()> {
    let mut line = first.to_owned();
    let indent = if first.is_empty() { "  ".to_owned() } else { " ".repeat(first.len()) };
    let mut begun = false;
    for word in text.split(' ') {
        if begun && line.chars().count() + 1 + word.chars().count() > WIDTH {
            writeln!(out, "{line}")?;
            line.clone_from(&indent);
            begun = false;
        }
        if begun {
            line.push(' ');
        }
        line.push_str(word);
        begun = true;
    }
    writeln!(out, "{line}")
}
