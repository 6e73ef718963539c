//! Bytes of a stream in, events in time order out.

use std::convert::Infallible;
use std::io;

use crate::stream::{
    Decoder, DictionaryFull, Frame, Header, Mark, MarkKind, Merger, Progress, StreamError, Summary,
};

use super::horizon::Horizon;
use super::stage::{Item, Stage};
use super::{Event, Export};

/// Most events that wait for their order; see [`Player::disordered`].
const HELD: usize = 1 << 20;
/// The same where it is known how long they must wait, which is longer only where one is that late.
const HELD_KNOWN: usize = 1 << 23;
/// What is so many milliseconds older than the newest record does not wait for a vCPU whose records
/// do not come: a task may be preempted for long while it writes one.
const PATIENCE_MS: u64 = 100;
/// Most bytes of text that wait in marks.
const HELD_TEXT: usize = 16 << 20;
/// Most words of values that wait with their records.
const HELD_WORDS: usize = 4 << 20;

/// Why playing stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlayError {
    /// The stream is not whole.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// The stream has too many names.
    #[error(transparent)]
    Names(#[from] DictionaryFull),
    /// The output failed.
    #[error("writing the output")]
    Output(#[source] io::Error),
}

impl From<Infallible> for PlayError {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

impl From<PlayError> for io::Error {
    fn from(error: PlayError) -> Self {
        match error {
            PlayError::Output(error) => error,
            other => Self::new(io::ErrorKind::InvalidData, other),
        }
    }
}

/// Bytes of a stream in, events in time order out.
#[derive(Debug)]
pub struct Player<E> {
    decoder: Decoder,
    stage: Stage<E>,
    merger: Merger<Item>,
    header: Header,
    summary: Option<Summary>,
    held_text: usize,
    unknown_records: u64,
    disordered: u64,
    /// The latest time of a record.
    newest: u64,
    /// The last watermark.
    watermark: u64,
    horizon: Option<Horizon>,
    begun: bool,
}

impl<E: Export> Player<E> {
    /// A player for one stream.
    pub fn new(export: E) -> Self {
        Self {
            decoder: Decoder::new(),
            stage: Stage::new(export),
            merger: Merger::new(0),
            header: Header::default(),
            summary: None,
            held_text: 0,
            unknown_records: 0,
            disordered: 0,
            newest: 0,
            watermark: 0,
            horizon: None,
            begun: false,
        }
    }

    /// Plays a finished stream, of which it is known when what comes: in order, always.
    #[must_use]
    pub fn with_horizon(mut self, horizon: Horizon) -> Self {
        self.horizon = Some(horizon);
        self
    }

    /// Plays only the records of functions whose name and module (none: the kernel itself) the
    /// filter accepts; a function without a name has its address, such as `0xffffffff81000000`.
    #[must_use]
    pub fn with_filter(
        mut self,
        accepts: impl Fn(&str, Option<&str>) -> bool + Send + 'static,
    ) -> Self {
        self.stage.selection.set_filter(accepts);
        self
    }

    /// Plays only what is called from functions that are accepted, and these. That is known
    /// of records with a stack pointer only; others are not played.
    #[must_use]
    pub fn with_roots(
        mut self,
        accepts: impl Fn(&str, Option<&str>) -> bool + Send + 'static,
    ) -> Self {
        self.stage.selection.set_roots(accepts);
        self
    }

    /// Plays only the records of the tracer of that name.
    #[must_use]
    pub fn with_tracer(mut self, name: String) -> Self {
        self.stage.selection.set_tracer(name);
        self
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
        self.stage.selection.min_duration = Some(nanoseconds);
        self
    }

    /// Takes the next bytes.
    ///
    /// # Errors
    /// When the stream is damaged or the output fails.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), PlayError> {
        self.decoder.feed(bytes);
        while self.decoder.advance()? == Progress::Frame {
            self.frame()?;
            let offset = self.decoder.offset();
            if let Some(until) = self.horizon.as_mut().and_then(|horizon| horizon.at(offset)) {
                self.play(until)?;
            }
        }
        self.stage.export.flush().map_err(PlayError::Output)
    }

    /// No bytes follow. What was whole has been played in any case.
    ///
    /// # Errors
    /// When the stream is torn or the output fails.
    pub fn finish(&mut self) -> Result<Option<&Summary>, PlayError> {
        self.play(u64::MAX)?;
        if self.begun && self.summary.is_none() {
            self.stage.finish(&self.header)?;
            self.tell_late()?;
            self.stage.export.end(None).map_err(PlayError::Output)?;
        }
        self.decoder.finish()?;
        Ok(self.summary.as_ref())
    }

    /// The header, once it was seen.
    pub fn header(&self) -> Option<&Header> {
        self.begun.then_some(&self.header)
    }

    /// The closing summary, once the whole stream was seen.
    pub fn summary(&self) -> Option<&Summary> {
        self.summary.as_ref()
    }

    /// Records of kinds that this version does not know; they were skipped.
    pub fn unknown_records(&self) -> u64 {
        self.unknown_records
    }

    /// Events that had to be played before it was sure that no earlier ones come, because
    /// too many would have had to wait.
    pub fn disordered(&self) -> u64 {
        self.disordered
    }

    /// Records and losses that came when later ones had been played: they were played at once. In a
    /// stream that is played with its [`Horizon`] there are none, unless more than 8 million events
    /// had to wait.
    pub fn late(&self) -> u64 {
        // Marks are of whoever makes them.
        self.merger.late().take(marks_of(&self.header)).sum()
    }

    /// Open calls that were given up, because there were too many: their ends are not shown.
    pub fn evicted(&self) -> u64 {
        self.stage.pairing.evicted()
    }

    /// Events that wait for their order.
    pub fn held(&self) -> usize {
        self.merger.held()
    }

    /// Up to this time, in ticks of the guest's clock, the stream has all records, and they were
    /// played.
    pub fn watermark(&self) -> u64 {
        self.watermark
    }

    /// The export.
    pub fn export(&self) -> &E {
        &self.stage.export
    }

    /// Returns the export.
    pub fn into_export(self) -> E {
        self.stage.export
    }

    fn frame(&mut self) -> Result<(), PlayError> {
        let marks = marks_of(&self.header);
        match self.decoder.frame() {
            Some(Frame::Header(header)) => {
                self.begun = true;
                self.header = *header;
                self.merger = Merger::new(marks_of(&self.header) + 1);
                self.stage.begin(marks_of(&self.header));
                self.stage.export.begin(&self.header).map_err(PlayError::Output)
            }
            Some(Frame::Symbols(list)) => {
                // A module took the place of another: old records keep the old names.
                if list.clone().any(|symbol| self.stage.symbols.renames(&symbol)) {
                    let (stage, header) = (&mut self.stage, &self.header);
                    self.merger.drain(u64::MAX, |queue, item| stage.give(header, queue, &item))?;
                }
                self.stage.selection.renamed();
                Ok(self.stage.symbols.extend(list)?)
            }
            Some(Frame::Tasks(list)) => {
                for task in list {
                    self.stage.tasks.insert(&task);
                }
                if self.stage.tasks.is_crowded() {
                    self.stage.tasks.sweep(self.merger.items().filter_map(|item| match item {
                        Item::Record(held) => Some(held.slot),
                        _ => None,
                    }));
                }
                Ok(())
            }
            Some(Frame::Records(batch)) => {
                let queue = usize::try_from(batch.vcpu).unwrap_or(usize::MAX);
                for record in batch.records() {
                    let unknown = &mut self.unknown_records;
                    if let Some(held) = self.stage.hold(&self.header, queue, &record, unknown) {
                        self.newest = self.newest.max(held.timestamp());
                        self.merger.push(queue, held.timestamp(), Item::Record(held));
                    }
                }
                self.relieve()
            }
            Some(Frame::Tracers(list)) => {
                // What waits has the old names.
                if list.clone().any(|tracer| self.stage.tracers.renames(&tracer)) {
                    let (stage, header) = (&mut self.stage, &self.header);
                    self.merger.drain(u64::MAX, |queue, item| stage.give(header, queue, &item))?;
                }
                list.for_each(|tracer| self.stage.learn(&tracer));
                Ok(())
            }
            Some(Frame::Values(list)) => {
                list.for_each(|values| self.stage.formats.insert(&values));
                if self.stage.formats.is_crowded() {
                    let (stage, header) = (&mut self.stage, &self.header);
                    self.merger.drain(u64::MAX, |queue, item| stage.give(header, queue, &item))?;
                    self.stage.formats.sweep();
                }
                Ok(())
            }
            Some(Frame::Loss(loss)) => {
                let queue = usize::try_from(loss.vcpu).unwrap_or(usize::MAX);
                self.merger.push_now(queue, Item::Loss(loss));
                self.relieve()
            }
            Some(Frame::Mark(mark)) => {
                self.held_text += mark.text.len();
                self.merger.push(marks, mark.ticks, Item::Mark(Box::new(mark)));
                self.relieve()
            }
            Some(Frame::Watermark(ticks)) => {
                self.watermark = ticks.max(self.watermark);
                // The horizon knows better.
                let known = self.horizon.as_ref().is_some_and(Horizon::is_within);
                if known { Ok(()) } else { self.play(ticks.max(self.patience())) }
            }
            Some(Frame::End(summary)) => {
                self.play(u64::MAX)?;
                self.stage.finish(&self.header)?;
                self.tell_late()?;
                self.stage.export.end(Some(&summary)).map_err(PlayError::Output)?;
                self.summary = Some(*summary);
                Ok(())
            }
            Some(Frame::Join(totals)) => {
                self.stage.export.joined(&totals).map_err(PlayError::Output)
            }
            Some(Frame::Traced(traced)) => self.stage.traced(&self.header, &traced),
            Some(Frame::Counts(counts)) => self.stage.counts(&self.header, &counts),
            _ => Ok(()),
        }
    }

    fn play(&mut self, until: u64) -> Result<(), PlayError> {
        let (stage, header) = (&mut self.stage, &self.header);
        self.merger.drain(until, |queue, item| stage.give(header, queue, &item))?;
        if self.merger.held() == 0 {
            self.held_text = 0;
        }
        Ok(())
    }

    /// What is older does not wait any longer.
    fn patience(&self) -> u64 {
        let ticks = u128::from(self.header.clock_hz) * u128::from(PATIENCE_MS) / 1000;
        self.newest.saturating_sub(u64::try_from(ticks).unwrap_or(u64::MAX))
    }

    /// Says at the end that the order is not what it should be.
    fn tell_late(&mut self) -> Result<(), PlayError> {
        let late = self.late();
        if late == 0 {
            return Ok(());
        }
        let text = format!("{late} records came late: they are shown behind later ones");
        let mark = Mark { ticks: self.newest, kind: MarkKind::Note, duration_ns: 0, text };
        self.stage.export.event(&Event::Mark(&mark)).map_err(PlayError::Output)
    }

    /// Keeps the memory bounded when the watermarks stay away.
    fn relieve(&mut self) -> Result<(), PlayError> {
        let held = self.merger.held();
        let known = self.horizon.as_ref().is_some_and(Horizon::is_within);
        let most = if known { HELD_KNOWN } else { HELD };
        let keep = match self.held_text {
            text if text > HELD_TEXT => 0,
            _ if held > most => most / 2,
            _ if self.stage.words() > HELD_WORDS => held / 2,
            _ => return Ok(()),
        };
        if keep == 0 {
            self.held_text = 0;
        }
        self.disordered += u64::try_from(held - keep).unwrap_or(0);
        let (stage, header) = (&mut self.stage, &self.header);
        self.merger.shrink(keep, |queue, item| stage.give(header, queue, &item))
    }
}

/// The queue of the marks, which comes after those of the vCPUs.
fn marks_of(header: &Header) -> usize {
    usize::try_from(header.vcpus).unwrap_or(0)
}

/// Live output: a stream writer writes into the player.
impl<E: Export> io::Write for Player<E> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.push(bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stage.export.flush()
    }
}
