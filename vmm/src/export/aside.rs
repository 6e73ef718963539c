//! Plays a finished stream with two threads: one reads it and finds the order, the other makes
//! events.

use std::io::{ErrorKind, Read};
use std::mem;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread;

use crate::stream::{
    Apart, Decoder, Frame, Header, Loss, Mark, Plain, Record, StreamError, Summary,
};

use super::Export;
use super::ahead::{Ahead, Held};
use super::error::PlayError;
use super::front::{Behind, Front};
use super::stage::Stage;

/// Things to do of a kind that are handed over at a time, but for what one frame has.
const STEPS: usize = 4096;
/// So many times that may wait to be done.
const WAITING: usize = 4;

/// One thing to do for the thread that has the stage.
#[derive(Debug)]
enum Step {
    /// Records are the last of a queue, with so many of the numbers beside.
    Hold(usize, Vec<Held>, usize),
    Loss(usize, Loss),
    Mark(usize, Box<Mark>),
    /// So many runs of the order are next.
    Next(usize),
    Frame(Apart),
    /// What follows is of this stream.
    Begin(Box<Header>, Apart),
    See(u8),
    SweepFormats,
    End(Option<Mark>, Option<Box<Summary>>),
}

/// So many items of a queue in a row.
#[derive(Clone, Copy, Debug)]
struct Run {
    queue: u16,
    items: u16,
}

/// What is handed over at a time.
#[derive(Debug, Default)]
struct Batch {
    steps: Vec<Step>,
    /// So many are in steps.
    records: usize,
    /// What is beside records, in their order.
    beside: Vec<u64>,
    order: Vec<Run>,
}

/// Hands everything over, and knows what is ahead of it.
#[derive(Debug)]
struct Forward {
    ahead: Ahead,
    batch: Batch,
    /// Of which no step tells yet.
    records: Vec<Held>,
    /// Of the batch, what steps tell of: numbers beside records, and runs.
    told: (usize, usize),
    to: SyncSender<Batch>,
    /// Batches that were done, to be filled again.
    back: Receiver<Batch>,
}

impl Forward {
    fn step(&mut self, step: Step) -> Result<(), PlayError> {
        self.tell_order();
        self.batch.steps.push(step);
        let Batch { steps, records, beside, .. } = &self.batch;
        let most = steps.len().max(*records).max(beside.len());
        if most < STEPS { Ok(()) } else { self.hand_over() }
    }

    fn tell_order(&mut self) {
        let runs = self.batch.order.len() - self.told.1;
        if runs > 0 {
            self.told.1 += runs;
            self.batch.steps.push(Step::Next(runs));
        }
    }

    fn hand_over(&mut self) -> Result<(), PlayError> {
        self.tell_order();
        self.told = (0, 0);
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
    fn hold(
        &mut self,
        header: &Header,
        _: usize,
        record: &Record<'_>,
        unknown: &mut u64,
    ) -> Option<(u64, usize)> {
        let (mut held, words) = self.ahead.hold(header, record, unknown, &mut self.batch.beside)?;
        self.ahead.look_up(header, &mut held);
        self.records.push(held);
        Some((held.timestamp, words))
    }

    #[inline]
    fn hold_plain(&mut self, header: &Header, _: usize, record: &Plain<'_>) -> Option<u64> {
        let mut held = self.ahead.hold_plain(header, record)?;
        self.ahead.look_up(header, &mut held);
        self.records.push(held);
        Some(held.timestamp)
    }

    fn held(&mut self, queue: usize) -> Result<(), PlayError> {
        if self.records.is_empty() {
            return Ok(());
        }
        // The next frame may be like this one.
        let next = Vec::with_capacity(self.records.len());
        let mut records = mem::replace(&mut self.records, next);
        // They may have to wait for long.
        if records.capacity() > 2 * records.len() {
            records.shrink_to_fit();
        }
        let beside = self.batch.beside.len() - self.told.0;
        self.told.0 += beside;
        self.batch.records += records.len();
        self.step(Step::Hold(queue, records, beside))
    }

    fn hold_loss(&mut self, queue: usize, loss: Loss) -> Result<(), PlayError> {
        self.step(Step::Loss(queue, loss))
    }

    fn hold_mark(&mut self, queue: usize, mark: Box<Mark>) -> Result<(), PlayError> {
        self.step(Step::Mark(queue, mark))
    }

    #[inline]
    fn next(&mut self, _: &Header, queue: usize) -> Result<(), PlayError> {
        // There are fewer queues, for vCPUs and marks.
        let queue = u16::try_from(queue).unwrap_or(u16::MAX);
        let told = self.told.1;
        let runs = self.batch.order.get_mut(told..).unwrap_or_default();
        if let Some(run) = runs.last_mut().filter(|run| run.queue == queue && run.items < u16::MAX)
        {
            run.items += 1;
            return Ok(());
        }
        self.batch.order.push(Run { queue, items: 1 });
        if self.batch.order.len() < STEPS { Ok(()) } else { self.hand_over() }
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
        // Not by `step`: there may be numbers beside records of which no step tells yet.
        self.tell_order();
        self.batch.steps.push(Step::See(tracer));
        Ok(())
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
    let ahead = stage.teller.ahead.again();
    let (batch, records) = (Batch::default(), Vec::new());
    let forward = Forward { ahead, batch, records, told: (0, 0), to, back };
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
        let mut order = batch.order.iter();
        let mut beside = batch.beside.iter();
        for step in batch.steps.drain(..) {
            match step {
                Step::Hold(queue, records, numbers) => {
                    stage.hold_all(queue, records, beside.by_ref().take(numbers));
                }
                Step::Loss(queue, loss) => stage.hold_loss(queue, loss)?,
                Step::Mark(queue, mark) => stage.hold_mark(queue, mark)?,
                Step::Next(runs) => {
                    for &Run { queue, items } in order.by_ref().take(runs) {
                        for _ in 0..items {
                            stage.next(&header, usize::from(queue))?;
                        }
                    }
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
                Step::See(tracer) => stage.teller.ahead.tracers.see(tracer),
                Step::SweepFormats => stage.teller.ahead.formats.sweep(),
                Step::End(note, summary) => {
                    stage.end(&header, note.as_ref(), summary.as_deref())?;
                }
            }
        }
        batch.records = 0;
        batch.beside.clear();
        batch.order.clear();
        // Nobody may need it any more.
        let _ = done.send(batch);
        stage.flush()?;
    }
    Ok(())
}
