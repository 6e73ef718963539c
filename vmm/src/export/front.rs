//! Turns the bytes of a stream into items in time order.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read};

use crate::stream::{
    Decoder, Frame, Header, Loss, Mark, MarkKind, Merger, Plain, Progress, Record, StreamError,
    Summary,
};

use super::ahead::Ahead;
use super::error::PlayError;
use super::horizon::Horizon;
use super::waiting::Words;

/// Bytes that are read at a time.
const CHUNK: usize = 256 << 10;
/// Most events that wait for their order; see [`Player::disordered`](super::Player::disordered).
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

/// What is behind a [`Front`]: all that it is told is to be taken in this order.
pub(super) trait Behind {
    /// What is known of the stream up to where it has been read.
    fn ahead(&mut self) -> &mut Ahead;

    /// A record that is wanted is the last of its queue from here on: when it was, and how many words
    /// of values it has. Unknown kinds are counted.
    fn hold(
        &mut self,
        header: &Header,
        queue: usize,
        record: &Record<'_>,
        unknown: &mut u64,
    ) -> Option<(u64, usize)>;

    /// The same of a record that has no more than most: when it was.
    fn hold_plain(&mut self, header: &Header, queue: usize, record: &Plain<'_>) -> Option<u64>;

    /// No more records of that queue are held at present.
    fn held(&mut self, queue: usize) -> Result<(), PlayError>;

    /// The same of a loss.
    fn hold_loss(&mut self, queue: usize, loss: Loss) -> Result<(), PlayError>;

    /// The same of a mark.
    fn hold_mark(&mut self, queue: usize, mark: Box<Mark>) -> Result<(), PlayError>;

    /// The next item of all queues is the first of this one.
    fn next(&mut self, header: &Header, queue: usize) -> Result<(), PlayError>;

    /// A frame that does not wait, which the decoder has just found.
    fn frame(
        &mut self,
        header: &Header,
        frame: &Frame<'_>,
        decoder: &Decoder,
    ) -> Result<(), PlayError>;

    /// A tracer has a record of which nothing has been told.
    fn see(&mut self, tracer: u8) -> Result<(), PlayError>;

    /// No record waits with a format.
    fn sweep_formats(&mut self) -> Result<(), PlayError>;

    /// What was read has been told, and more may take its time.
    fn flush(&mut self) -> Result<(), PlayError>;

    /// Nothing follows; with a word about the order, and the summary if there is one.
    fn end(
        &mut self,
        header: &Header,
        note: Option<Mark>,
        summary: Option<&Summary>,
    ) -> Result<(), PlayError>;
}

/// Bytes of a stream in, items in time order out.
#[derive(Debug)]
pub(super) struct Front {
    decoder: Decoder,
    /// When what waits behind was.
    merger: Merger<()>,
    words: Words,
    /// Those that wait, by their time, and those of one time as they came: more than one thread
    /// makes them.
    marks: Marks,
    /// Marks so far.
    marked: u64,
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
    /// Ticks that are shown as 0, if not those of the header.
    start: Option<u64>,
    begun: bool,
}

impl Default for Front {
    fn default() -> Self {
        Self {
            decoder: Decoder::new(),
            merger: Merger::new(0),
            words: Words::default(),
            marks: Marks::new(),
            marked: 0,
            header: Header::default(),
            summary: None,
            held_text: 0,
            unknown_records: 0,
            disordered: 0,
            newest: 0,
            watermark: 0,
            horizon: None,
            start: None,
            begun: false,
        }
    }
}

impl Front {
    pub(super) fn set_horizon(&mut self, horizon: Horizon) {
        self.horizon = Some(horizon);
    }

    pub(super) fn set_start(&mut self, ticks: u64) {
        self.start = Some(ticks);
    }

    pub(super) fn header(&self) -> Option<&Header> {
        self.begun.then_some(&self.header)
    }

    pub(super) fn summary(&self) -> Option<&Summary> {
        self.summary.as_ref()
    }

    pub(super) fn unknown_records(&self) -> u64 {
        self.unknown_records
    }

    pub(super) fn disordered(&self) -> u64 {
        self.disordered
    }

    pub(super) fn late(&self) -> u64 {
        // Marks are of whoever makes them.
        self.merger.late().take(marks_of(&self.header)).sum()
    }

    pub(super) fn held(&self) -> usize {
        self.merger.held() + self.marks.len()
    }

    pub(super) fn watermark(&self) -> u64 {
        self.watermark
    }

    /// Takes the next bytes.
    ///
    /// # Errors
    /// When the stream is damaged, or what is behind fails.
    pub(super) fn push(&mut self, bytes: &[u8], behind: &mut impl Behind) -> Result<(), PlayError> {
        self.decoder.feed(bytes);
        self.decode(behind)
    }

    fn decode(&mut self, behind: &mut impl Behind) -> Result<(), PlayError> {
        while self.decoder.advance()? == Progress::Frame {
            self.frame(behind)?;
            let offset = self.decoder.offset();
            if let Some(until) = self.horizon.as_mut().and_then(|horizon| horizon.at(offset)) {
                self.play(until, behind)?;
            }
        }
        behind.flush()
    }

    /// Takes all that there is to read.
    ///
    /// # Errors
    /// When the source fails, the stream is damaged, torn or followed by something, or what is behind
    /// fails. All that is whole has been told in any case, unless the last is why.
    pub(super) fn play_all(
        &mut self,
        source: &mut impl Read,
        behind: &mut impl Behind,
    ) -> Result<(), PlayError> {
        let read = loop {
            match self.decoder.read(source, CHUNK) {
                Ok(0) => break Ok(()),
                Ok(_) => match self.decode(behind) {
                    Ok(()) => {}
                    Err(error @ (PlayError::Output(_) | PlayError::Absent(_))) => {
                        return Err(error);
                    }
                    error => break error,
                },
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => break Err(StreamError::from(error).into()),
            }
        };
        let finished = self.finish(behind);
        read.and(finished)
    }

    /// No bytes follow.
    ///
    /// # Errors
    /// When the stream is torn, or what is behind fails.
    pub(super) fn finish(&mut self, behind: &mut impl Behind) -> Result<(), PlayError> {
        self.play(u64::MAX, behind)?;
        if self.begun && self.summary.is_none() {
            behind.end(&self.header, self.about_order(), None)?;
        }
        Ok(self.decoder.finish()?)
    }

    fn frame(&mut self, behind: &mut impl Behind) -> Result<(), PlayError> {
        let Some(frame) = self.decoder.frame() else { return Ok(()) };
        // A module took the place of another, or a tracer of one: what waits has the old names.
        let renames = match &frame {
            Frame::Symbols(list) => {
                list.clone().any(|symbol| behind.ahead().symbols.renames(&symbol))
            }
            Frame::Tracers(list) => {
                list.clone().any(|tracer| behind.ahead().tracers.renames(&tracer))
            }
            _ => false,
        };
        if renames {
            give_all((&mut self.merger, &mut self.words), &mut self.marks, &self.header, behind)?;
        }
        match frame {
            Frame::Header(ref header) => {
                self.begun = true;
                self.header.clone_from(header);
                if let Some(start) = self.start {
                    self.header.clock_start = start;
                }
                self.merger = Merger::new(marks_of(header) + 1);
                self.words = Words::new(marks_of(header) + 1);
                behind.frame(&self.header, &frame, &self.decoder)
            }
            Frame::Records(batch) => {
                let queue = usize::try_from(batch.vcpu).unwrap_or(usize::MAX);
                let (mut records, mut last) = (batch.records(), 0);
                loop {
                    let plain = records.next_plain();
                    let other = if plain.is_some() { None } else { records.next() };
                    let plain_head = plain.as_ref().map(|record| record.head);
                    let Some(head) = plain_head.or_else(|| other.as_ref().map(Record::head)) else {
                        break;
                    };
                    if head.tracer != last && behind.ahead().tracers.is_new(head.tracer) {
                        behind.see(head.tracer)?;
                    }
                    last = head.tracer;
                    let held = match (plain, other) {
                        (Some(record), _) => {
                            behind.hold_plain(&self.header, queue, &record).map(|time| (time, 0))
                        }
                        (None, Some(record)) => {
                            let unknown = &mut self.unknown_records;
                            behind.hold(&self.header, queue, &record, unknown)
                        }
                        (None, None) => None,
                    };
                    if let Some((time, words)) = held {
                        self.newest = self.newest.max(time);
                        self.merger.push(queue, time, ());
                        self.words.add(queue, words);
                    }
                }
                behind.held(queue)?;
                self.relieve(behind)
            }
            Frame::Values(_) => {
                behind.frame(&self.header, &frame, &self.decoder)?;
                if behind.ahead().formats.is_crowded() {
                    give_all(
                        (&mut self.merger, &mut self.words),
                        &mut self.marks,
                        &self.header,
                        behind,
                    )?;
                    behind.sweep_formats()?;
                }
                Ok(())
            }
            Frame::Loss(loss) => {
                let queue = usize::try_from(loss.vcpu).unwrap_or(usize::MAX);
                if self.merger.push_now(queue, ()).is_some() {
                    self.words.add(queue, 0);
                    behind.hold_loss(queue, loss)?;
                }
                self.relieve(behind)
            }
            Frame::Mark(mark) => {
                self.held_text += mark.text.len();
                self.marks.insert((mark.ticks, self.marked), Box::new(mark));
                self.marked += 1;
                self.relieve(behind)
            }
            Frame::Watermark(ticks) => {
                self.watermark = ticks.max(self.watermark);
                // The horizon knows better.
                let known = self.horizon.as_ref().is_some_and(Horizon::is_within);
                if known { Ok(()) } else { self.play(ticks.max(self.patience()), behind) }
            }
            Frame::End(summary) => {
                self.play(u64::MAX, behind)?;
                behind.end(&self.header, self.about_order(), Some(&summary))?;
                self.summary = Some(*summary);
                Ok(())
            }
            Frame::Symbols(_)
            | Frame::Tasks(_)
            | Frame::Tracers(_)
            | Frame::Join(_)
            | Frame::Traced(_)
            | Frame::Counts(_) => behind.frame(&self.header, &frame, &self.decoder),
            _ => Ok(()),
        }
    }

    fn play(&mut self, until: u64, behind: &mut impl Behind) -> Result<(), PlayError> {
        let header = &self.header;
        line_up(&mut self.marks, until, (&mut self.merger, &mut self.words), header, behind)?;
        self.merger.drain(until, |queue, ()| behind.next(header, queue))?;
        self.words.keep(self.merger.waiting());
        if self.held() == 0 {
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
    fn about_order(&self) -> Option<Mark> {
        let late = self.late();
        let text = format!("{late} records came late: they are shown after later ones");
        let mark = Mark { ticks: self.newest, kind: MarkKind::Note, duration_ns: 0, text };
        (late > 0).then_some(mark)
    }

    /// Keeps the memory bounded when the watermarks stay away.
    fn relieve(&mut self, behind: &mut impl Behind) -> Result<(), PlayError> {
        let held = self.held();
        let known = self.horizon.as_ref().is_some_and(Horizon::is_within);
        let most = if known { HELD_KNOWN } else { HELD };
        let keep = match self.held_text {
            text if text > HELD_TEXT => 0,
            _ if held > most => most / 2,
            _ if self.words.len() > HELD_WORDS => held / 2,
            _ => return Ok(()),
        };
        if keep == 0 {
            self.held_text = 0;
        }
        self.disordered += u64::try_from(held - keep).unwrap_or(0);
        let header = &self.header;
        line_up(&mut self.marks, u64::MAX, (&mut self.merger, &mut self.words), header, behind)?;
        self.merger.shrink(keep, |queue, ()| behind.next(header, queue))?;
        self.words.keep(self.merger.waiting());
        Ok(())
    }
}

/// What waits, and words of values of it.
type Order<'a> = (&'a mut Merger<()>, &'a mut Words);

/// Marks that wait.
type Marks = BTreeMap<(u64, u64), Box<Mark>>;

/// Gives all that waits, whatever may still come.
fn give_all(
    (merger, words): Order<'_>,
    marks: &mut Marks,
    header: &Header,
    behind: &mut impl Behind,
) -> Result<(), PlayError> {
    line_up(marks, u64::MAX, (merger, words), header, behind)?;
    merger.drain(u64::MAX, |queue, ()| behind.next(header, queue))?;
    words.keep(merger.waiting());
    Ok(())
}

/// Puts marks up to a time into their queue.
fn line_up(
    marks: &mut Marks,
    until: u64,
    (merger, words): Order<'_>,
    header: &Header,
    behind: &mut impl Behind,
) -> Result<(), PlayError> {
    let queue = marks_of(header);
    while let Some(first) = marks.first_entry().filter(|first| first.key().0 <= until) {
        let (ticks, _) = *first.key();
        let mark = first.remove();
        if merger.push(queue, ticks, ()).is_some() {
            words.add(queue, 0);
            behind.hold_mark(queue, mark)?;
        }
    }
    Ok(())
}

/// The queue of the marks, which comes after those of the vCPUs.
fn marks_of(header: &Header) -> usize {
    usize::try_from(header.vcpus).unwrap_or(0)
}
