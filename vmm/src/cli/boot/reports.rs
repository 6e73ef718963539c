//! Reports that are made during the run, and printed at its end instead of the trace.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use vmtrace_system::say;

use super::{Args, FormatArg};
use crate::analyze::Analysis;
use crate::analyze::boot::Boot;
use crate::analyze::latency::Latency;
use crate::cli::BadUsage;
use crate::cli::report::is_broken_pipe;
use crate::export::{PlayError, Player};

/// The reports that a run makes.
#[derive(Clone, Default)]
pub(super) struct Reports {
    boot: Option<Live<Boot>>,
    latency: Option<Live<Latency>>,
    json: bool,
}

impl Reports {
    /// Those that are asked for.
    ///
    /// # Errors
    /// When they are to have a form that reports have not.
    pub(super) fn new(args: &Args) -> Result<Self> {
        let named = [(args.boot_report, "--boot-report"), (args.latency.is_some(), "--latency")];
        if let Some((_, option)) = named.iter().find(|(asked, _)| *asked)
            && args.format == Some(FormatArg::Graph)
        {
            return Err(BadUsage(format!("{option} is printed as text or json")).into());
        }
        Ok(Self {
            boot: args.boot_report.then(|| Live::new(Boot::new())),
            latency: args.latency.map(|kind| Live::new(Latency::new(kind, args.over))),
            json: args.format == Some(FormatArg::Json),
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.boot.is_none() && self.latency.is_none()
    }

    /// The next bytes of the stream; the run goes on whatever is wrong with them.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        if let Some(boot) = &mut self.boot {
            boot.push(bytes);
        }
        if let Some(latency) = &mut self.latency {
            latency.push(bytes);
        }
    }

    /// Prints them, once all of the stream was written.
    ///
    /// # Errors
    /// When the output fails.
    pub(super) fn print(self) -> Result<()> {
        let json = self.json;
        if let Some(boot) = self.boot {
            boot.print("boot report", json)?;
        }
        if let Some(latency) = self.latency {
            latency.print("report of latencies", json)?;
        }
        Ok(())
    }
}

/// A report that grows.
struct Live<E>(Arc<Mutex<Made<E>>>);

impl<E> Clone for Live<E> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

struct Made<E> {
    player: Option<Player<E>>,
    error: Option<PlayError>,
}

impl<E: Analysis> Live<E> {
    fn new(export: E) -> Self {
        let player = Some(Player::new(export));
        Self(Arc::new(Mutex::new(Made { player, error: None })))
    }

    fn push(&mut self, bytes: &[u8]) {
        let mut made = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if made.error.is_none()
            && let Some(player) = &mut made.player
            && let Err(error) = player.push(bytes)
        {
            made.error = Some(error);
        }
    }

    fn print(self, what: &str, json: bool) -> Result<()> {
        let (player, error) = {
            let mut made = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            (made.player.take(), made.error.take())
        };
        let Some(mut player) = player else { return Ok(()) };
        let finished = player.finish().map(|_| ());
        if let Some(error) = error.or(finished.err()) {
            say!("vmtrace: the {what} is not complete: {error}");
        }
        if player.header().is_none() {
            say!("vmtrace: no {what}: nothing was traced");
            return Ok(());
        }
        let late = player.late();
        let mut text = Vec::new();
        player.into_export().write(late, json, &mut text)?;
        let mut out = io::stdout().lock();
        let printed = out.write_all(&text).and_then(|()| out.flush());
        match printed.with_context(|| format!("printing the {what}")) {
            Err(error) if !is_broken_pipe(&error) => Err(error),
            _ => Ok(()),
        }
    }
}
