//! Output formats, one file each.
//!
//! A [`Player`] turns the bytes of a stream into [`Event`]s in time order, with names resolved. An
//! [`Export`] turns events into a format. A player is an [`std::io::Write`], so that a stream
//! [`Writer`](crate::stream::Writer) can print live:
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

mod absent;
mod ahead;
mod aside;
mod called;
mod callers;
mod colour;
mod counted;
#[cfg(test)]
mod counted_tests;
mod digits;
mod error;
pub(crate) mod fields;
mod front;
mod gather;
mod graph;
#[cfg(test)]
mod graph_tests;
mod horizon;
mod host;
mod init;
mod json;
mod kept;
mod live;
#[cfg(test)]
mod live_tests;
mod losses;
mod names;
mod pairing;
mod pick;
mod player;
mod select;
mod sorted;
mod spans;
mod stage;
mod stats;
mod summary;
mod tables;
mod tell;
#[cfg(test)]
mod tests;
mod text;
#[cfg(test)]
mod threads_tests;
pub(crate) mod times;
mod top;
#[cfg(test)]
mod top_tests;
mod values;
#[cfg(test)]
mod values_tests;
mod waiting;

use std::borrow::Cow;
use std::io;
use std::num::NonZeroU64;

use crate::stream::{Context, Header, Loss, Mark, Stretch, Summary};

pub use absent::Absent;
pub(crate) use absent::{Seen, Span, Unmet};
pub use callers::Callers;
pub use colour::Colours;
pub(crate) use digits::decimal;
pub use error::PlayError;
pub(crate) use gather::Gather;
pub use graph::Graph;
pub use horizon::Horizon;
pub(crate) use host::OutOfGuest;
pub(crate) use init::{STARTS_INIT, says_init};
pub use json::Json;
pub(crate) use kept::{Names, Tasks, Who};
pub use live::{Live, Order, Rows};
pub use losses::write_losses;
pub(crate) use names::task_name;
pub use pick::{Pick, Picked};
pub use player::Player;
pub(crate) use select::TracerChoice;
pub use sorted::SortedBy;
pub(crate) use sorted::{Table, Words};
pub(crate) use spans::covered;
pub use stats::Stats;
pub(crate) use stats::share;
pub use summary::write_summary;
pub use text::Text;
pub(crate) use text::seconds;
pub use top::Top;
pub use values::{Args, Returned};
pub(crate) use values::{JsonArgs, JsonReturned, quoted_char};

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

    /// Whether it looks at calls: where they are in the call graph, when they return and what is left open. Who does
    /// not is told of entries whose places mean nothing, of calls of which there is one record alone, and of no
    /// more than one of all other returns and jumps. That takes much less time.
    fn looks_at_calls(&self) -> bool {
        true
    }

    /// Which functions were traced when, called or not; before the end, and not in any order.
    ///
    /// # Errors
    /// When the output fails.
    fn traced(&mut self, _: &Stretch, _: &mut dyn Iterator<Item = Name<'_>>) -> io::Result<()> {
        Ok(())
    }

    /// How often functions were entered on a vCPU, beside events, for a tracer (which is
    /// named if there are several). At any time before the end; what comes again adds to it.
    ///
    /// # Errors
    /// When the output fails.
    fn counts(
        &mut self,
        _vcpu: u32,
        _tracer: Option<&str>,
        _hits: &mut dyn Iterator<Item = (Name<'_>, u64)>,
    ) -> io::Result<()> {
        Ok(())
    }

    /// The same by caller, if that is known: functions with their callers. Who does not tell callers apart counts
    /// calls of functions.
    ///
    /// # Errors
    /// When the output fails.
    fn callers(
        &mut self,
        vcpu: u32,
        tracer: Option<&str>,
        hits: &mut dyn Iterator<Item = Called<'_>>,
    ) -> io::Result<()> {
        self.counts(vcpu, tracer, &mut hits.map(|it| (it.function, it.hits)))
    }

    /// What calls were sorted into, beside events: functions with numbers and words as those of
    /// [`Bucket`](crate::stream::Bucket), the words of a function in a row. At any time before the end; what comes
    /// again adds to it.
    ///
    /// # Errors
    /// When the output fails.
    fn sorted(
        &mut self,
        _by: &SortedBy<'_>,
        _words: &mut dyn Iterator<Item = (Name<'_>, u8, u64)>,
    ) -> io::Result<()> {
        Ok(())
    }

    /// The stream begins only here: these are records and losses of each vCPU before.
    ///
    /// # Errors
    /// When the output fails.
    fn joined(&mut self, _: &[(u64, u64)]) -> io::Result<()> {
        Ok(())
    }

    /// No event can be had at present: show what there is. Most show nothing before the end.
    ///
    /// # Errors
    /// When the output fails.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// The stream ended, with its summary unless it was torn.
    ///
    /// # Errors
    /// When the output fails.
    fn end(&mut self, summary: Option<&Summary>) -> io::Result<()>;

    /// What became of things that the format has not enough room for: lines, after the end.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }
}

impl<E: Export + ?Sized> Export for Box<E> {
    fn begin(&mut self, header: &Header) -> io::Result<()> {
        (**self).begin(header)
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        (**self).event(event)
    }

    fn looks_at_calls(&self) -> bool {
        (**self).looks_at_calls()
    }

    fn traced(
        &mut self,
        stretch: &Stretch,
        functions: &mut dyn Iterator<Item = Name<'_>>,
    ) -> io::Result<()> {
        (**self).traced(stretch, functions)
    }

    fn counts(
        &mut self,
        vcpu: u32,
        tracer: Option<&str>,
        hits: &mut dyn Iterator<Item = (Name<'_>, u64)>,
    ) -> io::Result<()> {
        (**self).counts(vcpu, tracer, hits)
    }

    fn callers(
        &mut self,
        vcpu: u32,
        tracer: Option<&str>,
        hits: &mut dyn Iterator<Item = Called<'_>>,
    ) -> io::Result<()> {
        (**self).callers(vcpu, tracer, hits)
    }

    fn sorted(
        &mut self,
        by: &SortedBy<'_>,
        words: &mut dyn Iterator<Item = (Name<'_>, u8, u64)>,
    ) -> io::Result<()> {
        (**self).sorted(by, words)
    }

    fn joined(&mut self, totals: &[(u64, u64)]) -> io::Result<()> {
        (**self).joined(totals)
    }

    fn flush(&mut self) -> io::Result<()> {
        (**self).flush()
    }

    fn end(&mut self, summary: Option<&Summary>) -> io::Result<()> {
        (**self).end(summary)
    }

    fn notes(&self) -> Vec<String> {
        (**self).notes()
    }
}

/// How often a caller called a function.
#[derive(Clone, Copy, Debug)]
pub struct Called<'a> {
    /// The function.
    pub function: Name<'a>,
    /// Who called it, if known.
    pub caller: Option<Name<'a>>,
    /// How often.
    pub hits: u64,
}

/// Something in a trace.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A function was entered.
    Entry(Entry<'a>),
    /// A function returned, or what it had jumped to in its place.
    Return(Return<'a>),
    /// A function was left by a jump to another one.
    Tail(Tail<'a>),
    /// A function was left unseen, or is not left yet.
    Unfinished(Unfinished<'a>),
    /// A tracepoint was come by.
    Tracepoint(Tracepoint<'a>),
    /// Records are missing.
    Loss(Loss),
    /// Something happened beside the records.
    Mark(&'a Mark),
}

impl Event<'_> {
    /// The state of the CPU, if it was recorded.
    #[must_use]
    pub fn context(&self) -> Option<Context> {
        match self {
            Self::Entry(entry) => entry.context,
            Self::Return(ret) => ret.context,
            Self::Tail(tail) => tail.context,
            Self::Tracepoint(event) => event.context,
            Self::Unfinished(_) | Self::Loss(_) | Self::Mark(_) => None,
        }
    }
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
    /// Id of its thread group, if known.
    pub tgid: Option<u32>,
    /// The function.
    pub function: Name<'a>,
    /// Who called it, if known.
    pub caller: Option<Name<'a>>,
    /// The tracer, if there are several.
    pub tracer: Option<&'a str>,
    /// Where in the call graph, if the trace has returns.
    pub place: Option<Place>,
    /// Its arguments, if they were recorded.
    pub args: Option<Args<'a>>,
    /// The state of the CPU, if it was recorded.
    pub context: Option<Context>,
}

/// A place in the call graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Number of the call.
    pub frame: u64,
    /// Number of the innermost shown call around it, on the same stack; known of entries only.
    pub parent: Option<u64>,
    /// So many calls of shown functions are around it.
    pub depth: u32,
}

/// A function returned. One that jumped to another at its end returns with that.
#[derive(Clone, Copy, Debug)]
pub struct Return<'a> {
    /// Clock ticks.
    pub timestamp: u64,
    /// The vCPU.
    pub vcpu: u32,
    /// Process id.
    pub pid: u32,
    /// Name of the task, if known; without control characters.
    pub comm: Option<&'a str>,
    /// Id of its thread group, if known.
    pub tgid: Option<u32>,
    /// The function.
    pub function: Name<'a>,
    /// The tracer, if there are several.
    pub tracer: Option<&'a str>,
    /// So many calls of shown functions are around it.
    pub depth: u32,
    /// How long it took, if its entry was seen and that is certain, or if the guest has
    /// told it.
    pub duration_ns: Option<u64>,
    /// What it returned, if that was recorded.
    pub value: Option<Returned<'a>>,
    /// Number of the call, if it was shown.
    pub frame: Option<u64>,
    /// Whether it is all that there is of the call: it has a duration, and no entry.
    pub whole: bool,
    /// The state of the CPU, if it was recorded.
    pub context: Option<Context>,
}

/// A function was left by a jump to another one, which returns in its place.
#[derive(Clone, Copy, Debug)]
pub struct Tail<'a> {
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
    /// Where to, if known.
    pub target: Option<Name<'a>>,
    /// The tracer, if there are several.
    pub tracer: Option<&'a str>,
    /// So many calls of shown functions are around it.
    pub depth: u32,
    /// The state of the CPU, if it was recorded.
    pub context: Option<Context>,
}

/// A tracepoint was come by.
#[derive(Clone, Copy, Debug)]
pub struct Tracepoint<'a> {
    /// Clock ticks.
    pub timestamp: u64,
    /// The vCPU.
    pub vcpu: u32,
    /// Process id.
    pub pid: u32,
    /// Name of the task, if known; without control characters.
    pub comm: Option<&'a str>,
    /// Id of its thread group, if known.
    pub tgid: Option<u32>,
    /// The event: its symbol is such as `sched:sched_switch`.
    pub event: Name<'a>,
    /// The function in which it was, if known.
    pub caller: Option<Name<'a>>,
    /// Its fields, if they were recorded.
    pub fields: Option<Args<'a>>,
    /// How they are printed, if that is known: see `docs/stream.md`.
    pub print: Option<&'a str>,
    /// The state of the CPU, if it was recorded.
    pub context: Option<Context>,
}

impl Tracepoint<'_> {
    /// The fields as the kernel's own trace prints them.
    #[must_use]
    pub fn text(&self) -> String {
        fields::text(self)
    }
}

/// A function was left unseen, some time ago, or is not left at the end of the trace.
#[derive(Clone, Copy, Debug)]
pub struct Unfinished<'a> {
    /// The vCPU of its entry.
    pub vcpu: u32,
    /// Process id.
    pub pid: u32,
    /// Name of the task, if known; without control characters.
    pub comm: Option<&'a str>,
    /// The function.
    pub function: Name<'a>,
    /// The tracer, if there are several.
    pub tracer: Option<&'a str>,
    /// Where in the call graph.
    pub place: Place,
}

/// A place in kernel text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name<'a> {
    /// Its address.
    pub address: u64,
    /// The symbol that it is in: name and module (empty for the kernel itself), both
    /// without control characters.
    pub symbol: Option<(&'a str, &'a str)>,
    /// Which symbol of the stream that is: another one as soon as the symbol has another name, so
    /// that names need not be compared. `None` where nobody has numbered it.
    pub number: Option<NonZeroU64>,
}

impl<'a> Name<'a> {
    /// Name and module in one text, or the address without a name.
    pub(crate) fn label(&self) -> String {
        self.text().into_owned()
    }

    /// The same, for who does not keep it.
    pub(crate) fn text(&self) -> Cow<'a, str> {
        match self.symbol {
            Some((symbol, "")) => symbol.into(),
            Some((symbol, module)) => format!("{symbol} [{module}]").into(),
            None => format!("{:#x}", self.address).into(),
        }
    }
}

/// The text with everything replaced that would move a terminal's cursor or worse.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}
