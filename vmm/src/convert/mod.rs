//! Formats of other tools, for `vmtrace convert`, one file each. [`unsaid`] is the table of what
//! formats cannot express.
//!
//! A converter is an [`Export`]: it gets the events of a trace once, in time order. Data that a
//! format needs in another order goes to a scratch file of its [`Output`], so that memory stays
//! bounded.

mod calls;
mod chart;
mod chrome;
mod csv;
mod ctf;
mod folded;
mod ground;
mod output;
mod parquet;
mod perfetto;
mod tracedat;
mod uftrace;
mod unsaid;

use std::io;
use std::path::Path;

use clap::ValueEnum;

use crate::export::{Export, Graph, Json, Text};

pub use chart::Chart;
pub use chrome::Chrome;
pub use csv::Csv;
pub use ctf::Ctf;
pub use folded::Folded;
pub use output::Output;
pub use parquet::Parquet;
pub use perfetto::Perfetto;
pub use tracedat::{TraceDat, Version};
pub use uftrace::Uftrace;
pub use unsaid::{Fact, Tally};

/// A format that a trace can be converted to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// Perfetto's protobuf: ui.perfetto.dev, trace_processor (*.pftrace, *.perfetto-trace).
    Perfetto,
    /// trace.dat of version 6: any trace-cmd, KernelShark (*.dat).
    #[value(name = "trace.dat")]
    TraceDat6,
    /// trace.dat of version 7: trace-cmd since 3.0.
    #[value(name = "trace.dat-7")]
    TraceDat7,
    /// A data directory of uftrace: replay, report, graph, dump, tui (*.uftrace).
    Uftrace,
    /// The Common Trace Format 1.8, a directory: babeltrace2, Trace Compass (*.ctf).
    Ctf,
    /// Apache Parquet, a row a call: DuckDB, PyArrow (*.parquet).
    Parquet,
    /// The same in files by vCPU and time, in a directory, for readers that take many at once (*.parquet/).
    ParquetDir,
    /// Folded stacks for flame graphs: nanoseconds, or entries without returns (*.folded).
    Folded,
    /// A flame chart: one HTML page, with zoom and search, that needs no network (*.html).
    Html,
    /// Chrome's trace event JSON (*.json).
    Chrome,
    /// A row an event, with a line of names (*.csv).
    Csv,
    /// Text as ftrace's function tracer prints it (*.txt).
    Text,
    /// Text as ftrace's function_graph tracer prints it (*.graph).
    Graph,
    /// One JSON object a line (*.jsonl).
    Json,
}

impl Format {
    /// The format that goes with the name of a file or directory.
    #[must_use]
    pub fn of(place: &Path) -> Option<Self> {
        let name = place.file_name()?.to_str()?;
        let is_folder = place.as_os_str().as_encoded_bytes().ends_with(b"/");
        let (_, extension) = name.rsplit_once('.')?;
        Some(match &*extension.to_ascii_lowercase() {
            "pftrace" | "perfetto-trace" | "perfetto" => Self::Perfetto,
            "dat" => Self::TraceDat6,
            "uftrace" => Self::Uftrace,
            "ctf" => Self::Ctf,
            "parquet" if is_folder => Self::ParquetDir,
            "parquet" => Self::Parquet,
            "folded" | "collapsed" => Self::Folded,
            "html" | "htm" => Self::Html,
            "json" => Self::Chrome,
            "csv" => Self::Csv,
            "txt" => Self::Text,
            "graph" => Self::Graph,
            "jsonl" | "ndjson" => Self::Json,
            _ => return None,
        })
    }

    /// The name that users give.
    #[must_use]
    pub fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// The names of all.
    #[must_use]
    pub fn list() -> String {
        let names: Vec<_> = Self::value_variants().iter().map(|format| format.name()).collect();
        names.join("|")
    }

    /// Whether it is one file, and no directory.
    #[must_use]
    pub fn is_file(self) -> bool {
        !matches!(self, Self::Uftrace | Self::Ctf | Self::ParquetDir)
    }

    /// Where it goes: `place` is made a directory for formats that are several files.
    ///
    /// # Errors
    /// When nothing can be made there.
    pub fn output(self, place: &Path) -> io::Result<Output> {
        match self {
            _ if !self.is_file() && place == Path::new("-") => {
                let reason = "this format is a directory, which standard output is not";
                Err(io::Error::new(io::ErrorKind::InvalidInput, reason))
            }
            _ if self.is_file() => Output::file(place),
            _ => Output::directory(place),
        }
    }

    /// What writes it.
    ///
    /// # Errors
    /// When a file cannot be made.
    pub fn writer(self, output: &Output) -> io::Result<Box<dyn Export>> {
        let file = || output.handle();
        Ok(match self {
            Self::Perfetto => Box::new(Perfetto::new(file()?)),
            Self::TraceDat6 => Box::new(TraceDat::new(file()?, output.scratch()?, Version::V6)),
            Self::TraceDat7 => Box::new(TraceDat::new(file()?, output.scratch()?, Version::V7)),
            Self::Uftrace => Box::new(Uftrace::new(&output.path())?),
            Self::Ctf => Box::new(Ctf::new(&output.path())),
            Self::Parquet => Box::new(Parquet::new(file()?)),
            Self::ParquetDir => Box::new(Parquet::partitioned(&output.path())),
            Self::Folded => Box::new(Folded::new(file()?)),
            Self::Html => Box::new(Chart::new(file()?)),
            Self::Chrome => Box::new(Chrome::new(file()?)),
            Self::Csv => Box::new(Csv::new(file()?)),
            Self::Text => Box::new(Text::new(file()?)),
            Self::Graph => Box::new(Graph::new(file()?)),
            Self::Json => Box::new(Json::new(file()?)),
        })
    }
}
