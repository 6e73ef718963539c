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
//! How often each function was called (a function is an offset from an address in the header, and its
//! name comes before its first record):
//!
//! ```
//! use std::collections::BTreeMap;
//! use vmtrace_stream::{Frame, Reader, Record};
//! # use vmtrace_stream::{EntryRecord, Header, Summary, Symbol, Writer};
//!
//! # // Instead of a file of `vmtrace boot -o`, or a connection to its socket:
//! # let header = Header { clock_hz: 1_000_000, vcpus: 1, address_base: Header::TOP_4_GIB, ..Header::default() };
//! # let mut writer = Writer::new(Vec::new(), &header)?;
//! # writer.symbols([Symbol::new(Header::TOP_4_GIB + 64, 32, "vfs_read")])?;
//! # writer.entries(0, &[EntryRecord::new(10, 64, 0, 1), EntryRecord::new(20, 64, 0, 1)])?;
//! # writer.end(&Summary::default())?;
//! # let source = writer.into_inner()?;
//! # let source = source.as_slice();
//! // `source` is a file, a socket, or anything else that can be read.
//! let mut reader = Reader::new(source)?;
//! let header = reader.header().clone();
//! let (mut names, mut calls) = (BTreeMap::new(), BTreeMap::<String, u64>::new());
//! while let Some(frame) = reader.next_frame()? {
//!     match frame {
//!         Frame::Symbols(list) => names.extend(
//!             list.map(|symbol| (symbol.address, String::from_utf8_lossy(symbol.name).into_owned())),
//!         ),
//!         Frame::Records(batch) => {
//!             for record in batch.records() {
//!                 let Record::Entry { entry, .. } = record else { continue };
//!                 let function = header.address(entry.function.get());
//!                 let name = names.get(&function).cloned().unwrap_or_else(|| format!("{function:#x}"));
//!                 *calls.entry(name).or_default() += 1;
//!             }
//!         }
//!         Frame::Loss(loss) => println!("vCPU {} has lost {} records", loss.vcpu, loss.count),
//!         _ => {}
//!     }
//! }
//! assert_eq!(calls["vfs_read"], 2);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
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
mod pieces_tests;
#[cfg(test)]
mod properties;
mod reader;
mod record;
#[cfg(test)]
mod refused_tests;
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

pub use buffer::{Filler, RecordBuffer};
#[cfg(feature = "zstd")]
pub use compress::{Compression, Compressor};
pub use context::Context;
pub use counts::{Bucket, CallerCount, Count, Counts, CountsOf, HistogramOf};
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
    Batch, EntryRecord, EventRecord, FrameEntryRecord, Plain, Record, RecordHead, Records,
    ReturnRecord, ReturnValueRecord, TailRecord, WireRecord,
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
