//! Output formats, one file each.
//!
//! A [`Player`] turns the bytes of a stream into [`Event`]s in time order with their names
//! resolved; an [`Export`] turns events into a format. A player is an [`std::io::Write`], so
//! that a stream [`Writer`](crate::stream::Writer) can print live:
//!
//! ```no_run
//! use vmtrace::export::{Player, Text};
//! use vmtrace::stream::{Header, Writer};
//!
//! # fn main() -> std::io::Result<()> {
//! # let header = Header::default();
//! let mut writer = Writer::new(Player::new(Text::new(std::io::stdout())), &header)?;
//! # Ok(())
//! # }
//! ```

mod json;
mod names;
mod player;
mod stats;
mod summary;
#[cfg(test)]
mod tests;
mod text;

use std::io;

use crate::stream::{Header, Loss, Mark, Summary};

pub use json::Json;
pub use player::{PlayError, Player};
pub use stats::Stats;
pub use summary::write_summary;
pub use text::Text;

/// A format.
pub trait Export {
    /// The stream begins.
    ///
    /// # Errors
    /// When the output fails.
    fn begin(&mut self, header: &Header) -> io::Result<()>;

    /// The next event, in time order.
    ///
    /// # Errors
    /// When the output fails.
    fn event(&mut self, event: &Event<'_>) -> io::Result<()>;

    /// No event can be had at present: show what there is.
    ///
    /// # Errors
    /// When the output fails.
    fn flush(&mut self) -> io::Result<()>;

    /// The stream ended, with its summary unless it was torn.
    ///
    /// # Errors
    /// When the output fails.
    fn end(&mut self, summary: Option<&Summary>) -> io::Result<()>;
}

impl<E: Export + ?Sized> Export for Box<E> {
    fn begin(&mut self, header: &Header) -> io::Result<()> {
        (**self).begin(header)
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        (**self).event(event)
    }

    fn flush(&mut self) -> io::Result<()> {
        (**self).flush()
    }

    fn end(&mut self, summary: Option<&Summary>) -> io::Result<()> {
        (**self).end(summary)
    }
}

/// Something in a trace.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A function was entered.
    Entry(Entry<'a>),
    /// Records are missing.
    Loss(Loss),
    /// Something happened beside the records.
    Mark(&'a Mark),
}

/// A function was entered.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    /// Clock ticks.
    pub timestamp: u64,
    /// The vCPU.
    pub vcpu: u32,
    /// Process id.
    pub pid: u32,
    /// Name of the task, if known; without control characters.
    pub comm: Option<&'a str>,
    /// The function.
    pub function: Name<'a>,
    /// Who called it, if known.
    pub caller: Option<Name<'a>>,
}

/// A place in kernel text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name<'a> {
    /// Its address.
    pub address: u64,
    /// The symbol that it is in: name and module (empty for the kernel itself), both
    /// without control characters.
    pub symbol: Option<(&'a str, &'a str)>,
}

/// The text with everything replaced that would move a terminal's cursor or worse.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}
