//! Bytes of a stream in, events in time order out.

use std::collections::HashMap;
use std::convert::Infallible;
use std::fmt;
use std::io;

use crate::stream::{
    Batch, Decoder, DictionaryFull, EntryRecord, Frame, Header, Loss, Mark, Merger, Progress,
    Record, StreamError, Summary,
};

use super::names::{Symbols, Tasks};
use super::{Entry, Event, Export};

/// Most events that wait for their order; see [`Player::disordered`].
const HELD: usize = 1 << 20;
/// Most bytes of text that wait in marks.
const HELD_TEXT: usize = 16 << 20;
/// Most answers of a filter that are remembered.
const KNOWN: usize = 1 << 20;

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
    filter: Option<Filter>,
    held_text: usize,
    unknown_records: u64,
    disordered: u64,
    begun: bool,
}

/// Which functions are wanted.
struct Filter {
    accepts: Box<dyn Fn(&str) -> bool + Send>,
    /// Answers by address, until the names change.
    known: HashMap<u32, bool>,
}

impl Filter {
    fn accepts(&mut self, symbols: &mut Symbols, header: &Header, function: u32) -> bool {
        if self.known.len() > KNOWN {
            self.known.clear();
        }
        *self.known.entry(function).or_insert_with(|| {
            let index = symbols.index(header, function);
            let name = symbols.name(header, function, index);
            match name.symbol {
                Some((name, _)) => (self.accepts)(name),
                None => (self.accepts)(&format!("{:#x}", name.address)),
            }
        })
    }
}

impl fmt::Debug for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Filter").field("known", &self.known).finish_non_exhaustive()
    }
}

/// What waits for its turn.
#[derive(Debug)]
enum Item {
    Entry(EntryRecord, u32),
    Loss(Loss),
    Mark(Box<Mark>),
}

/// Where items become events.
#[derive(Debug)]
struct Stage<E> {
    export: E,
    symbols: Symbols,
    tasks: Tasks,
}

impl<E: Export> Player<E> {
    /// A player for one stream.
    pub fn new(export: E) -> Self {
        Self {
            decoder: Decoder::new(),
            stage: Stage { export, symbols: Symbols::new(), tasks: Tasks::default() },
            merger: Merger::new(0),
            header: Header::default(),
            summary: None,
            filter: None,
            held_text: 0,
            unknown_records: 0,
            disordered: 0,
            begun: false,
        }
    }

    /// Plays only the records of functions whose name the filter accepts; a function without
    /// a name has its address, such as `0xffffffff81000000`.
    #[must_use]
    pub fn with_filter(mut self, accepts: impl Fn(&str) -> bool + Send + 'static) -> Self {
        self.filter = Some(Filter { accepts: Box::new(accepts), known: HashMap::new() });
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

    /// Events that wait for their order.
    pub fn held(&self) -> usize {
        self.merger.held()
    }

    /// Returns the export.
    pub fn into_export(self) -> E {
        self.stage.export
    }

    fn frame(&mut self) -> Result<(), PlayError> {
        let marks = self.merger_queues();
        match self.decoder.frame() {
            Some(Frame::Header(header)) => {
                self.begun = true;
                self.header = *header;
                self.merger = Merger::new(self.merger_queues() + 1);
                self.stage.export.begin(&self.header).map_err(PlayError::Output)
            }
            Some(Frame::Symbols(list)) => {
                // A module took the place of another: old records keep the old names.
                if list.clone().any(|symbol| self.stage.symbols.renames(&symbol)) {
                    self.stage.drain(&mut self.merger, &self.header, u64::MAX)?;
                }
                if let Some(filter) = &mut self.filter {
                    filter.known.clear();
                }
                Ok(self.stage.symbols.extend(list)?)
            }
            Some(Frame::Tasks(list)) => {
                for task in list {
                    self.stage.tasks.insert(&task);
                }
                if self.stage.tasks.is_crowded() {
                    self.stage.tasks.sweep(self.merger.items().filter_map(|item| match item {
                        Item::Entry(_, slot) => Some(*slot),
                        _ => None,
                    }));
                }
                Ok(())
            }
            Some(Frame::Records(batch)) => {
                let (stage, merger) = (&mut self.stage, &mut self.merger);
                let filter = self.filter.as_mut();
                self.unknown_records += stage.hold(merger, &self.header, filter, &batch);
                self.relieve()
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
            Some(Frame::Watermark(ticks)) => self.play(ticks),
            Some(Frame::End(summary)) => {
                self.play(u64::MAX)?;
                self.stage.export.end(Some(&summary)).map_err(PlayError::Output)?;
                self.summary = Some(*summary);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// The queues of the vCPUs; that of the marks comes after them.
    fn merger_queues(&self) -> usize {
        usize::try_from(self.header.vcpus).unwrap_or(0)
    }

    fn play(&mut self, until: u64) -> Result<(), PlayError> {
        self.stage.drain(&mut self.merger, &self.header, until)?;
        if self.merger.held() == 0 {
            self.held_text = 0;
        }
        Ok(())
    }

    /// Keeps the memory bounded when the watermarks stay away.
    fn relieve(&mut self) -> Result<(), PlayError> {
        let held = self.merger.held();
        let keep = match self.held_text {
            text if text > HELD_TEXT => 0,
            _ if held > HELD => HELD / 2,
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

impl<E: Export> Stage<E> {
    fn drain(
        &mut self,
        merger: &mut Merger<Item>,
        header: &Header,
        until: u64,
    ) -> Result<(), PlayError> {
        merger.drain(until, |queue, item| self.give(header, queue, &item))
    }

    /// Takes a batch in; returns how many of its records are of unknown kinds.
    fn hold(
        &mut self,
        merger: &mut Merger<Item>,
        header: &Header,
        mut filter: Option<&mut Filter>,
        batch: &Batch<'_>,
    ) -> u64 {
        let queue = usize::try_from(batch.vcpu).unwrap_or(usize::MAX);
        let mut unknown = 0;
        for record in batch.records() {
            let Record::Entry(entry) = record else {
                unknown += 1;
                continue;
            };
            if let Some(filter) = &mut filter
                && !filter.accepts(&mut self.symbols, header, entry.function.get())
            {
                continue;
            }
            let slot = self.tasks.slot(entry.pid());
            merger.push(queue, entry.timestamp(), Item::Entry(*entry, slot));
        }
        unknown
    }

    fn give(&mut self, header: &Header, queue: usize, item: &Item) -> Result<(), PlayError> {
        let event = match item {
            Item::Entry(record, slot) => {
                let (function, caller) = (record.function.get(), record.caller.get());
                let function_index = self.symbols.index(header, function);
                let caller_index = self.symbols.index(header, caller);
                Event::Entry(Entry {
                    timestamp: record.timestamp(),
                    vcpu: u32::try_from(queue).unwrap_or(u32::MAX),
                    pid: record.pid(),
                    comm: self.tasks.comm(record.pid(), *slot),
                    function: self.symbols.name(header, function, function_index),
                    caller: (caller != 0).then(|| self.symbols.name(header, caller, caller_index)),
                })
            }
            Item::Loss(loss) => Event::Loss(*loss),
            Item::Mark(mark) => Event::Mark(mark),
        };
        self.export.event(&event).map_err(PlayError::Output)
    }
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
