//! Plays a finished stream with two threads: one reads it and finds the order, the other makes
//! events.

use std::io::{ErrorKind, Read};
use std::mem;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread;

use crate::stream::{Apart, Decoder, Frame, Header, Mark, StreamError, Summary};

use super::Export;
use super::ahead::{Ahead, Item};
use super::error::PlayError;
use super::front::{Behind, Front};
use super::stage::Stage;

/// Things to do that are handed over at a time.
const STEPS: usize = 4096;
/// So many times that may wait to be done.
const WAITING: usize = 4;

/// One thing to do for the thread that has the stage.
#[derive(Debug)]
enum Step {
    /// An item of a queue, with so many words beside it.
    Item(u32, u16, Item),
    Frame(Apart),
    /// What follows is of this stream.
    Begin(Box<Header>, Apart),
    See(u8),
    SweepTasks(Vec<u32>),
    SweepFormats,
    End(Option<Mark>, Option<Box<Summary>>),
}

/// What is handed over at a time.
#[derive(Debug, Default)]
struct Batch {
    steps: Vec<Step>,
    /// What waited beside items, in their order.
    words: Vec<u64>,
}

/// Hands everything over, and knows what is ahead of it.
#[derive(Debug)]
struct Forward {
    ahead: Ahead,
    batch: Batch,
    to: SyncSender<Batch>,
    /// Batches that were done, to be filled again.
    back: Receiver<Batch>,
}

impl Forward {
    fn step(&mut self, step: Step) -> Result<(), PlayError> {
        self.batch.steps.push(step);
        if self.batch.steps.len() < STEPS { Ok(()) } else { self.hand_over() }
    }

    fn hand_over(&mut self) -> Result<(), PlayError> {
        let next = self.back.try_recv().unwrap_or_default();
        let sent = self.to.send(mem::replace(&mut self.batch, next));
        // The other thread knows why its output failed, and tells.
        sent.map_err(|_| PlayError::Output(ErrorKind::BrokenPipe.into()))
    }
}

impl Behind for Forward {
    fn ahead(&mut self) -> &mut Ahead {
        &mut self.ahead
    }

    #[inline]
    fn give(&mut self, _: &Header, queue: usize, item: Item) -> Result<(), PlayError> {
        let before = self.batch.words.len();
        if let Item::Record(held) = &item {
            self.ahead.take(queue, held, &mut self.batch.words);
        }
        let words = u16::try_from(self.batch.words.len() - before).unwrap_or(u16::MAX);
        self.step(Step::Item(u32::try_from(queue).unwrap_or(u32::MAX), words, item))
    }

    fn frame(
        &mut self,
        header: &Header,
        frame: &Frame<'_>,
        decoder: &Decoder,
    ) -> Result<(), PlayError> {
        self.ahead.learn(frame)?;
        let Some(apart) = decoder.apart() else { return Ok(()) };
        self.step(match frame {
            Frame::Header(_) => Step::Begin(Box::new(header.clone()), apart),
            _ => Step::Frame(apart),
        })
    }

    fn see(&mut self, tracer: u8) -> Result<(), PlayError> {
        self.ahead.tracers.see(tracer);
        self.step(Step::See(tracer))
    }

    fn sweep_tasks(&mut self, in_use: Vec<u32>) -> Result<(), PlayError> {
        self.ahead.tasks.sweep(in_use.iter().copied());
        self.step(Step::SweepTasks(in_use))
    }

    fn sweep_formats(&mut self) -> Result<(), PlayError> {
        self.ahead.formats.sweep();
        self.step(Step::SweepFormats)
    }

    /// Each batch is shown when it is done.
    fn flush(&mut self) -> Result<(), PlayError> {
        Ok(())
    }

    fn end(
        &mut self,
        _: &Header,
        note: Option<Mark>,
        summary: Option<&Summary>,
    ) -> Result<(), PlayError> {
        self.step(Step::End(note, summary.cloned().map(Box::new)))
    }
}

/// Plays all of a source.
///
/// # Errors
/// As [`Player::play_file`](super::Player::play_file).
pub(super) fn play<E: Export>(
    source: &mut (impl Read + Send),
    front: &mut Front,
    stage: &mut Stage<E>,
) -> Result<(), PlayError> {
    let (to, batches) = sync_channel(WAITING);
    let (done, back) = channel();
    let ahead = stage.ahead.again();
    let forward = Forward { ahead, batch: Batch::default(), to, back };
    thread::scope(|scope| {
        let reader = thread::Builder::new().name("reader".into());
        let reader = reader.spawn_scoped(scope, move || read(source, front, forward));
        let reader = reader.map_err(|error| PlayError::Stream(StreamError::Io(error)))?;
        let played = replay(&batches, &done, stage);
        // It ends when it has nobody to hand over to.
        drop(batches);
        let read = reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        played.and(read)
    })
}

fn read(source: &mut impl Read, front: &mut Front, mut forward: Forward) -> Result<(), PlayError> {
    match front.play_all(source, &mut forward) {
        // Nobody takes any more.
        Err(error @ PlayError::Output(_)) => Err(error),
        // What there is has been told, whatever came then.
        played => forward.hand_over().and(played),
    }
}

/// Does what is handed over, until nothing more is.
fn replay<E: Export>(
    batches: &Receiver<Batch>,
    done: &Sender<Batch>,
    stage: &mut Stage<E>,
) -> Result<(), PlayError> {
    let mut header = Header::default();
    for mut batch in batches {
        let mut words = &batch.words[..];
        for step in batch.steps.drain(..) {
            match step {
                Step::Item(queue, count, item) => {
                    let queue = usize::try_from(queue).unwrap_or(usize::MAX);
                    let (own, rest) = words.split_at(usize::from(count).min(words.len()));
                    words = rest;
                    stage.give(&header, queue, &item, own)?;
                }
                Step::Frame(frame) => {
                    let Some(frame) = frame.frame() else { continue };
                    stage.frame(&header, &frame)?;
                }
                Step::Begin(new, frame) => {
                    header = *new;
                    let Some(frame) = frame.frame() else { continue };
                    stage.frame(&header, &frame)?;
                }
                Step::See(tracer) => stage.ahead.tracers.see(tracer),
                Step::SweepTasks(in_use) => stage.ahead.tasks.sweep(in_use.into_iter()),
                Step::SweepFormats => stage.ahead.formats.sweep(),
                Step::End(note, summary) => {
                    stage.end(&header, note.as_ref(), summary.as_deref())?;
                }
            }
        }
        batch.words.clear();
        // Nobody may need it any more.
        let _ = done.send(batch);
        stage.flush()?;
    }
    Ok(())
}
