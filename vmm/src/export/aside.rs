//! Plays a finished stream with two threads: one reads it, finds the order and what records turn out to be, the
//! other tells of that as events.

use std::io::{ErrorKind, Read};
use std::mem;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread;

use crate::stream::{
    Apart, Decoder, Frame, Header, Loss, Mark, Plain, Record, StreamError, Summary,
};

use super::ahead::{Ahead, Held, Kind};
use super::error::PlayError;
use super::front::{Behind, Front};
use super::names::{LATER, Tasks};
use super::pairing::{self, Pairing, Steps};
use super::stage::{Item, Stage, pair};
use super::tell::Told;
use super::waiting::{Other, Waiting, move_beside};
use super::{Event, Export};

#[cfg(test)]
mod tests;

/// Things to do of a kind that are handed over at a time, or a few more. With few of them, short streams of tests
/// are handed over in many pieces.
const STEPS: usize = if cfg!(test) { 16 } else { 1024 };
/// Bytes of frames and of texts of marks after which all is handed over: 256 KiB.
const BYTES: usize = 256 * STEPS;
/// So many times that may wait to be done.
const WAITING: usize = 8;

/// One thing to do for the thread that has the stage.
#[derive(Debug)]
enum Step {
    /// So many items are next.
    Tell(usize),
    Loss(Loss),
    Mark(Box<Mark>),
    Frame(Apart),
    /// What follows is of this stream.
    Begin(Box<Header>, Apart),
    See(u8),
    SweepFormats,
    /// Names of tasks that nobody needs any more.
    ReleaseTasks(Vec<u32>),
    End(Option<Mark>, Option<Box<Summary>>),
}

/// What is handed over at a time.
#[derive(Debug, Default)]
struct Batch {
    steps: Vec<Step>,
    items: Vec<Item>,
    /// What is beside records of items, in their order.
    beside: Vec<u64>,
    /// So many bytes, or fewer, are in what steps point to.
    bytes: usize,
}

impl Batch {
    fn is_large(&self) -> bool {
        let most = self.steps.len().max(self.items.len()).max(self.beside.len());
        most >= STEPS || self.bytes >= BYTES
    }

    /// An empty one, with room for as much as most have: what has grown beyond that once would stay as large.
    fn again(self) -> Self {
        fn emptied<T>(mut list: Vec<T>) -> Vec<T> {
            list.clear();
            if list.capacity() > 4 * STEPS { Vec::new() } else { list }
        }
        let Self { steps, items, beside, .. } = self;
        Self { steps: emptied(steps), items: emptied(items), beside: emptied(beside), bytes: 0 }
    }
}

/// Hands everything over, in order.
#[derive(Debug)]
struct Forward {
    ahead: Ahead,
    tasks: Tasks,
    pairing: Pairing,
    /// What waits, by queue: of vCPUs, and of marks.
    waiting: Vec<Waiting>,
    /// Of the present frame.
    records: Vec<Held>,
    /// Whether any record told where in the call graph it is.
    framed: bool,
    batch: Batch,
    /// Items of the batch that steps tell of.
    told: usize,
    /// Where the last frame that was put into a batch ended.
    offset: u64,
    to: SyncSender<Batch>,
    /// Batches that were done, to be filled again.
    back: Receiver<Batch>,
}

/// Hands over what one record turns out to be.
struct Passing<'a> {
    items: &'a mut Vec<Item>,
    held: &'a Held,
    vcpu: u16,
    again: bool,
}

impl Steps for Passing<'_> {
    #[inline]
    fn step(&mut self, step: pairing::Step) {
        if let Some(told) = Told::of(&step, self.held.function) {
            self.items.push(Item { held: *self.held, told, vcpu: self.vcpu, again: self.again });
            self.again = true;
        }
    }
}

impl Forward {
    fn new(ahead: Ahead, pairing: Pairing, to: SyncSender<Batch>, back: Receiver<Batch>) -> Self {
        Self {
            ahead,
            tasks: Tasks::default(),
            pairing,
            waiting: Vec::new(),
            records: Vec::new(),
            framed: false,
            batch: Batch::default(),
            told: 0,
            offset: 0,
            to,
            back,
        }
    }

    fn step(&mut self, step: Step) -> Result<(), PlayError> {
        self.tell_items();
        self.batch.steps.push(step);
        self.relieve()
    }

    fn tell_items(&mut self) {
        let items = self.batch.items.len() - self.told;
        if items > 0 {
            self.told += items;
            self.batch.steps.push(Step::Tell(items));
        }
    }

    /// Hands the batch over if it is large enough.
    #[inline]
    fn relieve(&mut self) -> Result<(), PlayError> {
        if self.batch.is_large() { self.hand_over() } else { Ok(()) }
    }

    #[inline(never)]
    fn hand_over(&mut self) -> Result<(), PlayError> {
        self.tell_items();
        self.told = 0;
        let next = self.back.try_recv().unwrap_or_default();
        let sent = self.to.send(mem::replace(&mut self.batch, next));
        // The other thread knows why its output failed, and tells.
        sent.map_err(|_| PlayError::Output(ErrorKind::BrokenPipe.into()))
    }

    /// Hands over what was left open.
    fn finish(&mut self) -> Result<(), PlayError> {
        let mut steps = Vec::new();
        self.pairing.finish(&mut steps);
        self.left(&steps)
    }

    fn left(&mut self, steps: &[pairing::Step]) -> Result<(), PlayError> {
        let held = Held::default();
        let left = steps.iter().filter_map(|step| Told::of(step, 0));
        let mut left = left.map(|told| Item { held, told, vcpu: 0, again: false });
        left.try_for_each(|item| {
            self.batch.items.push(item);
            self.relieve()
        })
    }

    fn other(&mut self, other: Other) -> Result<(), PlayError> {
        match other {
            Other::Loss(loss) => {
                self.pairing.loss(loss.vcpu);
                self.step(Step::Loss(loss))
            }
            Other::Mark(mark) => {
                let left = self.pairing.mark(&mark);
                self.left(&left)?;
                self.batch.bytes += mark.text.len();
                self.step(Step::Mark(mark))
            }
        }
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
        queue: usize,
        record: &Record<'_>,
        unknown: &mut u64,
    ) -> Option<(u64, usize)> {
        let beside = &mut self.waiting.get_mut(queue)?.beside;
        let (mut held, words) = self.ahead.hold(header, record, unknown, beside)?;
        self.ahead.look_up(header, &mut held);
        held.slot = self.tasks.slot(held.pid);
        self.records.push(held);
        Some((held.timestamp, words))
    }

    #[inline]
    fn hold_plain(&mut self, header: &Header, _: usize, record: &Plain<'_>) -> Option<u64> {
        let mut held = self.ahead.hold_plain(header, record)?;
        self.ahead.look_up(header, &mut held);
        held.slot = self.tasks.slot(held.pid);
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
        if let Some(waiting) = self.waiting.get_mut(queue) {
            waiting.add_all(records);
        }
        Ok(())
    }

    fn hold_loss(&mut self, queue: usize, loss: Loss) -> Result<(), PlayError> {
        if let Some(waiting) = self.waiting.get_mut(queue) {
            waiting.add_other(Other::Loss(loss));
        }
        Ok(())
    }

    fn hold_mark(&mut self, queue: usize, mark: Box<Mark>) -> Result<(), PlayError> {
        if let Some(waiting) = self.waiting.get_mut(queue) {
            waiting.add_other(Other::Mark(mark));
        }
        Ok(())
    }

    #[inline]
    fn next(&mut self, header: &Header, queue: usize) -> Result<(), PlayError> {
        let Some(waiting) = self.waiting.get_mut(queue) else { return Ok(()) };
        let Some((held, beside)) = waiting.first() else {
            let other = waiting.next_other();
            return other.map_or(Ok(()), |other| self.other(other));
        };
        // There are fewer queues, for vCPUs and marks.
        let vcpu = u16::try_from(queue).unwrap_or(u16::MAX);
        let Batch { items, beside: words, .. } = &mut self.batch;
        let (items_before, words_before) = (items.len(), words.len());
        let took = if held.has_more() { move_beside(held, beside, words) } else { None };
        if held.function_index == LATER {
            self.ahead.look_up(header, held);
        }
        let held = &*held;
        if held.kind() == Kind::Event {
            items.push(Item { held: *held, told: Told::Event, vcpu, again: false });
        } else if held.has_sp() {
            self.framed = true;
            let Ahead { selection, symbols, .. } = &mut self.ahead;
            let choice = selection.choice(symbols, header, held.function);
            let mut passing = Passing { items, held, vcpu, again: false };
            pair(&mut self.pairing, (vcpu.into(), held), choice, took, &mut passing);
            if items.len() == items_before {
                // Nothing is told of it.
                words.truncate(words_before);
            }
        } else {
            self.pairing.plain(vcpu.into());
            items.push(Item { held: *held, told: Told::Plain, vcpu, again: false });
        }
        waiting.pass();
        self.relieve()
    }

    fn frame(
        &mut self,
        header: &Header,
        frame: &Frame<'_>,
        decoder: &Decoder,
    ) -> Result<(), PlayError> {
        self.ahead.learn(frame)?;
        match frame {
            Frame::Header(_) => {
                self.pairing = self.pairing.again(header);
                self.waiting = Waiting::queues(header);
            }
            Frame::Symbols(_) => self.waiting.iter_mut().for_each(Waiting::rename),
            Frame::Tasks(list) => list.clone().for_each(|task| self.tasks.insert(&task)),
            _ => {}
        }
        let Some(apart) = decoder.apart() else { return Ok(()) };
        // The payload, and what records came before it.
        let offset = decoder.offset();
        self.batch.bytes += usize::try_from(offset - self.offset).unwrap_or(BYTES);
        self.offset = offset;
        self.step(match frame {
            Frame::Header(_) => Step::Begin(Box::new(header.clone()), apart),
            _ => Step::Frame(apart),
        })?;
        if matches!(frame, Frame::Tasks(_)) && self.tasks.is_crowded() {
            let unused = self.tasks.sweep(self.waiting.iter().flat_map(Waiting::slots));
            self.batch.bytes += size_of_val(&unused[..]);
            self.step(Step::ReleaseTasks(unused))?;
        }
        Ok(())
    }

    fn see(&mut self, tracer: u8) -> Result<(), PlayError> {
        self.ahead.tracers.see(tracer);
        self.step(Step::See(tracer))
    }

    fn sweep_formats(&mut self) -> Result<(), PlayError> {
        self.ahead.formats.sweep();
        self.step(Step::SweepFormats)
    }

    /// Few may be wanted of very many records: they are shown without waiting for others. Where there is nothing, it
    /// is handed over as well: so it is noticed that nobody takes any more.
    fn flush(&mut self) -> Result<(), PlayError> {
        self.hand_over()
    }

    fn end(
        &mut self,
        _: &Header,
        note: Option<Mark>,
        summary: Option<&Summary>,
    ) -> Result<(), PlayError> {
        self.finish()?;
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
    let (ahead, pairing) = (stage.teller.ahead.again(), stage.new_pairing(&Header::default()));
    let mut forward = Forward::new(ahead, pairing, to, back);
    thread::scope(|scope| {
        let reader = thread::Builder::new().name("reader".into());
        let reader = reader.spawn_scoped(scope, move || {
            let read = read(source, front, &mut forward);
            (read, forward.pairing, forward.framed)
        });
        let reader = reader.map_err(|error| PlayError::Stream(StreamError::Io(error)))?;
        let played = replay(&batches, &done, stage);
        // It ends when it has nobody to hand over to.
        drop(batches);
        let read;
        (read, stage.pairing, stage.framed) =
            reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        played.and(read)
    })
}

fn read(source: &mut impl Read, front: &mut Front, forward: &mut Forward) -> Result<(), PlayError> {
    match front.play_all(source, forward) {
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
    while let Some(mut batch) = next_batch(batches, stage)? {
        let mut items = batch.items.iter();
        let mut beside = batch.beside.iter();
        for step in batch.steps.drain(..) {
            match step {
                Step::Tell(count) => {
                    for item in items.by_ref().take(count) {
                        stage.tell(&header, item, &mut beside)?;
                    }
                }
                Step::Loss(loss) => stage.show(&Event::Loss(loss))?,
                Step::Mark(mark) => stage.show(&Event::Mark(&mark))?,
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
                Step::ReleaseTasks(unused) => stage.teller.tasks.release(&unused),
                Step::End(note, summary) => {
                    stage.end(&header, note.as_ref(), summary.as_deref())?;
                }
            }
        }
        // Nobody may need it any more.
        let _ = done.send(batch.again());
    }
    Ok(())
}

/// The next that is handed over. What was told is shown before that is waited for, and after the last.
fn next_batch<E: Export>(
    batches: &Receiver<Batch>,
    stage: &mut Stage<E>,
) -> Result<Option<Batch>, PlayError> {
    if let Ok(batch) = batches.try_recv() {
        return Ok(Some(batch));
    }
    stage.flush()?;
    Ok(batches.recv().ok())
}
