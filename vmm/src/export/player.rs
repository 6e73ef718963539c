//! Turns the bytes of a stream into events in time order.

use std::io::{self, Read};

use crate::stream::{Header, Summary};

use super::error::PlayError;
use super::front::Front;
use super::horizon::Horizon;
use super::stage::Stage;
use super::{Export, aside};

/// Bytes of a stream in, events in time order out.
#[derive(Debug)]
pub struct Player<E> {
    front: Front,
    stage: Stage<E>,
}

impl<E: Export> Player<E> {
    /// A player for one stream.
    pub fn new(export: E) -> Self {
        Self { front: Front::default(), stage: Stage::new(export) }
    }

    /// Plays a finished stream, of which it is known when what comes: in order, always.
    #[must_use]
    pub fn with_horizon(mut self, horizon: Horizon) -> Self {
        self.set_horizon(horizon);
        self
    }

    /// See [`Player::with_horizon`].
    pub fn set_horizon(&mut self, horizon: Horizon) {
        self.front.set_horizon(horizon);
    }

    /// Shows these ticks as 0, instead of the header's `clock_start`: to be called before the stream
    /// begins. What is before them has negative times, where a format has such.
    pub fn set_start(&mut self, ticks: u64) {
        self.front.set_start(ticks);
    }

    /// Plays only the records of functions whose name and module (none: the kernel itself) the
    /// filter accepts; a function without a name has its address, such as `0xffffffff81000000`.
    #[must_use]
    pub fn with_filter(
        mut self,
        accepts: impl Fn(&str, Option<&str>) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.stage.teller.ahead.selection.set_filter(accepts);
        self
    }

    /// Plays only what is called from functions that are accepted, and these. That is known
    /// of records with a stack pointer only; others are not played.
    #[must_use]
    pub fn with_roots(
        mut self,
        accepts: impl Fn(&str, Option<&str>) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.stage.teller.ahead.selection.set_roots(accepts);
        self
    }

    /// Plays only the records of the tracer of that name.
    #[must_use]
    pub fn with_tracer(mut self, name: String) -> Self {
        self.stage.teller.ahead.selection.set_tracer(name);
        self
    }

    /// Plays nothing if the guest lacks one of these vCPUs; what is of others is played as well.
    #[must_use]
    pub fn with_cpus(mut self, cpus: Vec<u32>) -> Self {
        self.stage.teller.ahead.selection.cpus = cpus;
        self
    }

    /// Whether the tracer whose records are played was one of the stream, of which all was read.
    ///
    /// # Errors
    /// When it was not.
    pub fn check_tracer(&self) -> Result<(), PlayError> {
        let ahead = &self.stage.teller.ahead;
        Ok(ahead.selection.check_tracer(&ahead.tracers)?)
    }

    /// Whether any record so far told where in the call graph it is: others say nothing of depths,
    /// durations and what a function calls.
    pub fn has_calls(&self) -> bool {
        self.stage.framed
    }

    /// Plays no functions from that depth on, counted from 0 for the outermost.
    #[must_use]
    pub fn with_max_depth(mut self, depth: u32) -> Self {
        self.stage.pairing.max_depth = depth;
        self
    }

    /// Plays only returns of functions that took at least so many nanoseconds.
    #[must_use]
    pub fn with_min_duration(mut self, nanoseconds: u64) -> Self {
        self.stage.teller.ahead.selection.min_duration = Some(nanoseconds);
        self
    }

    /// Takes the next bytes.
    ///
    /// # Errors
    /// When the stream is damaged or the output fails.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), PlayError> {
        self.front.push(bytes, &mut self.stage)
    }

    /// No bytes follow. What was whole has been played in any case.
    ///
    /// # Errors
    /// When the stream is torn or the output fails.
    pub fn finish(&mut self) -> Result<Option<&Summary>, PlayError> {
        self.front.finish(&mut self.stage)?;
        Ok(self.front.summary())
    }

    /// Plays all that there is to read, from the beginning to the end; everything is shown as soon as
    /// it can be.
    ///
    /// # Errors
    /// When the source fails, the stream is damaged or torn, or the output fails. What was whole
    /// has been played in any case, unless the output failed.
    pub fn play(&mut self, source: &mut impl Read) -> Result<(), PlayError> {
        self.front.play_all(source, &mut self.stage)
    }

    /// The same with a second thread: one reads and finds the order, the other makes events of it.
    /// For files: when the output fails while a source is waited for, that wait ends first.
    ///
    /// # Errors
    /// As those of [`Player::play`].
    pub fn play_file(&mut self, source: &mut (impl Read + Send)) -> Result<(), PlayError> {
        aside::play(source, &mut self.front, &mut self.stage)
    }

    /// The header, once it was seen.
    pub fn header(&self) -> Option<&Header> {
        self.front.header()
    }

    /// The closing summary, once the whole stream was seen.
    pub fn summary(&self) -> Option<&Summary> {
        self.front.summary()
    }

    /// Records of kinds that this version does not know; they were skipped.
    pub fn unknown_records(&self) -> u64 {
        self.front.unknown_records()
    }

    /// Events that had to be played before it was sure that no earlier ones come, because
    /// too many would have had to wait.
    pub fn disordered(&self) -> u64 {
        self.front.disordered()
    }

    /// Records and losses that came when later ones had been played: they were played at once. In a
    /// stream that is played with its [`Horizon`] there are none, unless more than 8 million events
    /// had to wait.
    pub fn late(&self) -> u64 {
        self.front.late()
    }

    /// Open calls that were given up, because there were too many: their ends are not shown.
    pub fn evicted(&self) -> u64 {
        self.stage.pairing.evicted()
    }

    /// Events that wait for their order.
    pub fn held(&self) -> usize {
        self.front.held()
    }

    /// Up to this time, in ticks of the guest's clock, the stream has all records, and they were
    /// played.
    pub fn watermark(&self) -> u64 {
        self.front.watermark()
    }

    /// The export.
    pub fn export(&self) -> &E {
        &self.stage.teller.export
    }

    /// Returns the export.
    pub fn into_export(self) -> E {
        self.stage.teller.export
    }
}

/// Live output: a stream writer writes into the player.
impl<E: Export> io::Write for Player<E> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.push(bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stage.teller.export.flush()
    }
}
