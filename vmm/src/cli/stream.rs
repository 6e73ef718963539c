//! `vmtrace stream`: follows a running trace.

use super::losses::{self, Counted};
use super::report::{self, Played};
use super::view::{View, WHAT, parse_glob};
use crate::export::{Export, Graph, Json, PlayError, Player, Stats, Text, Top, write_summary};
use crate::serve::{self, Format, Globs, Source, StreamRequest};
use crate::stream::{Decoder, Progress, StreamError};
use anyhow::{Context, Result};
use std::cell::Cell;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::mem;
use std::path::{Path, PathBuf};
use std::time::Duration;
use vmtrace_system::say;

/// Follow a running trace.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Socket of `vmtrace boot --socket`, or vsock:CID:PORT inside a guest
    source: Source,
    /// How to print it [default: graph with an option for calls, else text]
    #[arg(long, value_enum)]
    format: Option<FormatArg>,
    #[command(flatten)]
    view: View,
    /// Only functions that match: GLOB, GLOB:mod:NAME or :mod:NAME; may be repeated
    #[arg(short, long, value_name = "GLOB", value_parser = parse_glob, help_heading = WHAT)]
    filter: Vec<String>,
    /// No functions that match this glob; may be repeated
    #[arg(short, long, value_name = "GLOB", value_parser = parse_glob, help_heading = WHAT)]
    notrace: Vec<String>,
    /// Write to this file instead of standard output
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Wait up to SECS seconds for the socket to appear
    #[arg(long, value_name = "SECS", default_value_t = 0)]
    wait: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum FormatArg {
    /// As ftrace's function tracer prints it
    Text,
    /// One JSON object per line
    Json,
    /// As ftrace's function_graph tracer prints it
    Graph,
    /// How often each function was entered, at the end
    Stats,
    /// Time and calls of each function, at the end
    Top,
    /// The stream itself, for `vmtrace report`
    Raw,
}

/// Follows the trace to its end.
///
/// # Errors
/// When there is no trace, it is torn, or the output fails.
pub fn run(args: Args) -> Result<u8> {
    args.view.check()?;
    match args.follow() {
        Err(error) if report::is_broken_pipe(&error) => Ok(0),
        done => done,
    }
}

impl Args {
    fn follow(mut self) -> Result<u8> {
        let name = self.source.to_string();
        let file = self.output.as_ref().map(|path| path.display().to_string());
        let unwritten = || format!("cannot write {}", file.as_deref().unwrap_or("standard output"));
        super::check_globs(self.filter.iter().chain(&self.notrace))?;
        let stream = super::reach(&self.source, Duration::from_secs(self.wait))?;
        // The binary stream in any case: only it can be verified.
        let (filter, notrace) = (mem::take(&mut self.filter), mem::take(&mut self.notrace));
        let globs = Globs { filter, notrace };
        let tracer = self.view.tracer().map(str::to_owned);
        let request = StreamRequest { format: Format::Raw, globs, tracer };
        serve::ask_stream(&stream, &request).with_context(|| name.clone())?;
        let mut source = serve::accepted(stream).with_context(|| name.clone())?;
        let Some(path) = self.output.clone() else {
            return self.write(&mut source, &mut io::stdout().lock(), unwritten);
        };
        let mut anew =
            Anew::open(&path).with_context(|| format!("cannot make {}", path.display()))?;
        let done = self.write(&mut source, &mut anew, unwritten);
        anew.finish(&path, done.is_ok()).with_context(unwritten)?;
        done
    }

    /// Writes what comes in the format that is asked for.
    fn write(
        self,
        mut source: &mut dyn Read,
        mut out: &mut dyn Write,
        unwritten: impl Fn() -> String + Copy,
    ) -> Result<u8> {
        let name = self.source.to_string();
        let default = if self.view.wants_graph() { FormatArg::Graph } else { FormatArg::Text };
        let format = self.format.unwrap_or(default);
        if format == FormatArg::Raw {
            match copy(&mut source, &mut out) {
                Err(PlayError::Output(error)) => return Err(error).with_context(unwritten),
                done => done.with_context(|| name)?,
            }
            return Ok(0);
        }
        let export: Box<dyn Export + '_> = match format {
            FormatArg::Json => Box::new(Json::new(&mut out)),
            FormatArg::Graph => Box::new(Graph::new(&mut out)),
            FormatArg::Stats => Box::new(Stats::new(&mut out)),
            FormatArg::Top => Box::new(Top::new(&mut out)),
            _ => Box::new(Text::new(&mut out)),
        };
        // Its notes are not shown: what has no record yet may have one later.
        let export = self.view.pick(export, true);
        let missed = Cell::new(0);
        let export: Box<dyn Export + '_> = Box::new(Counted { export, missed: &missed });
        let mut player = self.view.apply(Player::new(export));
        let played = player.play(&mut source);
        let Played { summary, .. } = match report::played_of(player, played) {
            Err(PlayError::Output(error)) => return Err(error).with_context(unwritten),
            played => played.with_context(|| name)?,
        };
        out.flush().with_context(unwritten)?;
        if let Some(summary) = summary {
            let mut text = Vec::new();
            write_summary(&mut text, &summary)?;
            say::text(&text);
            losses::tell(&summary, missed.get())?;
        }
        Ok(0)
    }
}

/// A file that is as it was until there is something else: what was asked for may be refused.
struct Anew {
    file: File,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It was not there.
    New,
    /// It has what it had.
    Old,
    /// It has what was written, or is no regular file.
    Written,
}

impl Anew {
    fn open(path: &Path) -> io::Result<Self> {
        match File::create_new(path) {
            Ok(file) => return Ok(Self { file, state: State::New }),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
        // Once more with `create`, for a link to a file that is not there.
        let file = File::options().write(true).create(true).truncate(false).open(path)?;
        // Others have no length.
        let state = if file.metadata()?.is_file() { State::Old } else { State::Written };
        Ok(Self { file, state })
    }

    /// Nothing more is written: all was, or something was refused.
    fn finish(self, path: &Path, is_whole: bool) -> io::Result<()> {
        match (self.state, is_whole) {
            // That nothing came is what the file has to say.
            (State::Old, true) => self.file.set_len(0),
            (State::New, false) => fs::remove_file(path),
            _ => Ok(()),
        }
    }
}

impl Write for Anew {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.state == State::Old {
            self.file.set_len(0)?;
        }
        self.state = State::Written;
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Passes the bytes on, and verifies them beside that.
fn copy(source: &mut dyn Read, out: &mut dyn Write) -> Result<(), PlayError> {
    let mut decoder = Decoder::new();
    let mut chunk = vec![0; 256 << 10];
    loop {
        match source.read(&mut chunk) {
            Ok(0) => break,
            Ok(length) => {
                let bytes = chunk.get(..length).unwrap_or_default();
                out.write_all(bytes).map_err(PlayError::Output)?;
                decoder.feed(bytes);
                while decoder.advance()? == Progress::Frame {}
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(StreamError::from(error).into()),
        }
    }
    out.flush().map_err(PlayError::Output)?;
    Ok(decoder.finish()?)
}
