//! Where the trace of a run goes, and which reports read it on its way.

use std::io::Write;

use anyhow::{Context, Result};

use super::reports::Reports;
use super::{Args, FormatArg};
use crate::cli::check::Live;
use crate::export::{Export, Graph, Json, Player, Text};
use crate::serve::Sink;
use crate::stream::Compressor;

/// Reports and checks that read the trace during the run.
#[derive(Clone, Default)]
pub(super) struct Watchers {
    pub(super) rules: Option<Live>,
    pub(super) reports: Reports,
}

/// To the one and to those who look at it.
struct Tee {
    trace: Box<dyn Write + Send>,
    watchers: Watchers,
}

impl Write for Tee {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let written = self.trace.write(bytes)?;
        let bytes = bytes.get(..written).unwrap_or_default();
        if let Some(rules) = &mut self.watchers.rules {
            rules.write_all(bytes)?;
        }
        self.watchers.reports.push(bytes);
        Ok(written)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.trace.flush()
    }
}

/// Where the trace stream of a run goes.
pub(super) fn trace_output(args: &Args, watchers: &Watchers) -> Result<Sink> {
    let mut trace = output(args, &watchers.reports)?;
    if watchers.rules.is_some() || !watchers.reports.is_empty() {
        trace = Box::new(Tee { trace, watchers: watchers.clone() });
    }
    Ok(if args.compress.is_some() { Sink::gathering(trace) } else { trace.into() })
}

fn output(args: &Args, reports: &Reports) -> Result<Box<dyn Write + Send>> {
    if let Some(path) = &args.output {
        let file = std::fs::File::create(path).with_context(|| path.display().to_string())?;
        return Ok(match args.compress {
            Some(how) => Box::new(Compressor::new(file, how).context("--compress")?),
            None => Box::new(file),
        });
    }
    if !reports.is_empty() || args.interactive {
        return Ok(Box::new(std::io::sink()));
    }
    let out = std::io::stdout();
    let export: Box<dyn Export + Send> = match args.format() {
        FormatArg::Text => Box::new(Text::new(out)),
        FormatArg::Json => Box::new(Json::new(out)),
        FormatArg::Graph => Box::new(Graph::new(out)),
    };
    Ok(Box::new(Player::new(export)))
}

/// What an output of the trace is called in errors.
pub(super) fn trace_name(args: &Args) -> String {
    let path = args.output.as_deref();
    path.map_or_else(
        || "the trace to standard output".to_owned(),
        |path| path.display().to_string(),
    )
}
