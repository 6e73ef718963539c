//! The trace stream: one framing for files, unix sockets and vsock.
//!
//! `docs/stream.md` specifies the format; this crate is the library for both ends:
//!
//! - [`Writer`] turns records of the relay into frames;
//! - [`Reader`] (pull) and [`Decoder`] (push) turn bytes into [`Frame`]s and verify them: check
//!   values, frame numbers, positions, and the totals in the last frame;
//! - [`Dictionaries`] has the names that both ends know, and that a consumer that joins late is
//!   sent;
//! - [`Merger`] puts the records of all vCPUs into one order;
//! - `Compressor` compresses a stream; readers read it like any other.
//!
//! The feature `zstd`, on by default, adds compressed streams. Only this feature needs a C library.
//!
//! Input is not trusted: a reader returns a frame or a [`StreamError`], never panics, and uses no
//! more memory than the limits of the format allow.

mod buffer;
mod check;
#[cfg(feature = "zstd")]
mod compress;
#[cfg(all(test, feature = "zstd"))]
mod compress_tests;
mod context;
mod counts;
#[cfg(test)]
mod counts_tests;
mod decode;
mod dictionary;
mod error;
mod expand;
mod frame;
mod header;
#[cfg(test)]
mod histograms_tests;
mod host;
mod initcalls;
mod mark;
mod merge;
#[cfg(test)]
mod properties;
mod reader;
mod record;
#[cfg(any(test, feature = "sample"))]
#[allow(missing_docs, reason = "for tests")]
pub mod sample;
mod span;
mod summary;
#[cfg(test)]
mod tests;
mod told;
mod traced;
mod values;
#[cfg(test)]
mod values_tests;
mod wire;
mod writer;

pub use buffer::RecordBuffer;
#[cfg(feature = "zstd")]
pub use compress::{Compression, Compressor};
pub use context::Context;
pub use counts::{Bucket, Count, Counts, CountsOf, HistogramOf};
pub use decode::{Apart, Decoder, Progress};
pub use dictionary::{AddressSet, Dictionaries, DictionaryFull, FormatsFull, Symbol, Task, Tracer};
pub use error::{Remedy, StreamError};
pub use frame::{Frame, Loss, RawSymbol, RawTracer, SymbolList, TaskList, TracerList, ValuesList};
pub use header::{Header, nanoseconds};
pub use host::{ExitDir, ExitReason, HostExit};
pub use initcalls::Initcall;
pub use mark::{LossReason, Mark, MarkKind};
pub use merge::Merger;
pub use reader::Reader;
pub use record::{
    Batch, EntryRecord, EventRecord, FrameEntryRecord, Record, RecordHead, Records, ReturnRecord,
    ReturnValueRecord, TailRecord, WireRecord,
};
pub use span::{FrameSpan, frame_spans};
pub use summary::{
    Counted, Exit, ExitsOf, GuestClock, Pauses, Sites, Skipped, Summary, VcpuTotals, Waits,
};
pub use traced::{Stretch, Traced, TracedOf};
pub use values::{
    RawValues, Shape, Shown, ValueField, Values, ValuesFormat, ValuesOf, number_repeated,
    show_values, split_values,
};
pub use wire::{
    MAGIC, MAX_DESCRIPTION, MAX_FORMATS, MAX_FORMATS_TEXT, MAX_NAME, MAX_PAYLOAD, MAX_PID,
    MAX_SYMBOLS, MAX_VALUE_WORDS, MAX_VALUES, MAX_VALUES_TEXT, MAX_VCPUS, VERSION_COMPRESSED,
    VERSION_MAJOR, VERSION_MINOR,
};
pub use writer::{Writer, consumer_loss};
