//! The frames that one consumer has still to be sent, and what it loses when the queue is full.

use super::patience::Patience;
use crate::deadline::Pulse;
use crate::events::Bell;
use crate::stream::{FrameSpan, consumer_loss, frame_spans};
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Whole frames, shared by all consumers.
pub(super) type Chunk = Arc<[u8]>;

/// Records that one consumer was too slow for.
#[derive(Clone, Copy, Debug, Default)]
struct Missed {
    /// Since the last loss frame that it was given.
    pending: u64,
    total: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    /// Nothing follows what is in the queue.
    Ended,
    /// Nobody takes anything any more.
    Gone,
}

#[derive(Debug)]
struct Inner {
    chunks: VecDeque<Chunk>,
    bytes: usize,
    missed: Vec<Missed>,
    /// Records are left out until the queue is half empty.
    skipping: bool,
    state: State,
}

/// The queue between the relay, which never waits, and one consumer.
#[derive(Debug)]
pub(super) struct Queue {
    inner: Mutex<Inner>,
    /// The consumer takes nothing more.
    left: Condvar,
    /// Rings when there is something again.
    bell: Bell,
    /// Bytes that the consumer's socket has taken.
    sent: AtomicU64,
    /// Bytes from which on records are left out. What must not be left out may take as much
    /// again; a consumer that does not even read that is cut off.
    capacity: usize,
}

/// What [`Queue::pop`] found.
pub(super) enum Popped {
    Chunk(Chunk),
    /// Nothing yet.
    Wait,
    /// Nothing more will come.
    End,
}

impl Queue {
    /// # Errors
    /// When the system has no descriptors left.
    pub(super) fn new(capacity: usize, vcpus: usize) -> io::Result<Self> {
        let inner = Inner {
            chunks: VecDeque::new(),
            bytes: 0,
            missed: vec![Missed::default(); vcpus],
            skipping: false,
            state: State::Open,
        };
        let (inner, left, sent) = (Mutex::new(inner), Condvar::new(), AtomicU64::new(0));
        Ok(Self { inner, left, bell: Bell::new()?, sent, capacity })
    }

    /// See [`Queue`].
    pub(super) fn bell(&self) -> &Bell {
        &self.bell
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds what the consumer must have whatever its size: the frames it joins with.
    pub(super) fn push_first(&self, chunk: Chunk) {
        self.lock().append(chunk);
        self.bell.ring();
    }

    /// Adds whole frames of the trace. False: the consumer is gone.
    pub(super) fn push(&self, chunk: &Chunk) -> bool {
        let mut inner = self.lock();
        if inner.state != State::Open {
            return false;
        }
        let was_empty = inner.chunks.is_empty();
        if inner.skipping && inner.bytes <= self.capacity / 2 {
            let first = frame_spans(chunk).next().map_or(0, |span| span.sequence);
            let losses = inner.losses(first);
            inner.append(losses.into());
            inner.skipping = false;
        }
        if !inner.skipping && inner.bytes + chunk.len() <= self.capacity {
            inner.append(Arc::clone(chunk));
        } else {
            inner.skipping = true;
            let kept = inner.without_records(chunk);
            inner.append(kept.into());
            if inner.bytes > 2 * self.capacity {
                inner.chunks.clear();
                inner.state = State::Gone;
            }
        }
        if was_empty || inner.state != State::Open {
            self.bell.ring();
        }
        inner.state == State::Open
    }

    /// The next chunk.
    pub(super) fn pop(&self) -> Popped {
        let mut inner = self.lock();
        match (inner.chunks.pop_front(), inner.state) {
            (Some(chunk), _) => {
                inner.bytes -= chunk.len();
                Popped::Chunk(chunk)
            }
            (None, State::Open) => Popped::Wait,
            (None, State::Ended | State::Gone) => Popped::End,
        }
    }

    /// Nothing follows.
    pub(super) fn end(&self) {
        let mut inner = self.lock();
        if inner.state == State::Open {
            inner.state = State::Ended;
        }
        self.bell.ring();
    }

    /// The consumer takes nothing more.
    pub(super) fn leave(&self) {
        let mut inner = self.lock();
        inner.chunks.clear();
        inner.bytes = 0;
        inner.state = State::Gone;
        self.left.notify_all();
    }

    /// Whether the consumer is gone.
    pub(super) fn is_left(&self) -> bool {
        self.lock().state == State::Gone
    }

    /// The consumer's socket has taken so many bytes.
    pub(super) fn note_sent(&self, bytes: usize) {
        self.sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Waits until the consumer has everything, or has had its time.
    pub(super) fn wait_over(&self, patience: &Patience, pulse: &Pulse) {
        /// How often what it has taken is looked at.
        const LOOK: Duration = Duration::from_millis(50);
        let before = self.sent.load(Ordering::Relaxed);
        let mut inner = self.lock();
        while inner.state != State::Gone {
            let sent = self.sent.load(Ordering::Relaxed) - before;
            let Some(left) = patience.left(sent) else { break };
            pulse.beat();
            let waited = self.left.wait_timeout(inner, left.min(LOOK));
            inner = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Inner {
    fn append(&mut self, chunk: Chunk) {
        if !chunk.is_empty() {
            self.bytes += chunk.len();
            self.chunks.push_back(chunk);
        }
    }

    /// Loss frames for all that was left out since the last ones; `sequence` is the number of
    /// the frame that follows them.
    fn losses(&mut self, sequence: u32) -> Vec<u8> {
        let mut frames = Vec::new();
        for (vcpu, missed) in (0..).zip(&mut self.missed) {
            if missed.pending > 0 {
                missed.total += missed.pending;
                frames.extend(consumer_loss(vcpu, missed.pending, missed.total, sequence));
                missed.pending = 0;
            }
        }
        frames
    }

    /// The frames of `chunk` but for records, and watermarks behind them, with the losses before them.
    fn without_records(&mut self, chunk: &[u8]) -> Vec<u8> {
        let mut kept = Vec::new();
        for FrameSpan { bytes, sequence, records, droppable } in frame_spans(chunk) {
            if let Some((vcpu, count)) = records {
                let vcpu = usize::try_from(vcpu).unwrap_or(usize::MAX);
                if let Some(missed) = self.missed.get_mut(vcpu) {
                    missed.pending += u64::from(count);
                }
            }
            // A gap needs a loss frame, which tells of records: a watermark behind which none was left out stays.
            if !droppable || self.missed.iter().all(|missed| missed.pending == 0) {
                kept.extend(self.losses(sequence));
                kept.extend_from_slice(bytes);
            }
        }
        kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::{Frame, Reader, Writer, sample};

    // Watermarks come without records, too: between two frames that a full queue must take, one was left out without
    // any loss to tell, and the reader of what is a whole stream said that it is damaged.
    #[test]
    fn a_full_queue_leaves_no_gap_that_is_not_told() {
        let mut writer = Writer::new(Vec::new(), &sample::header()).unwrap();
        let queue = Queue::new(4096, 2).unwrap();
        let push = |writer: &mut Writer<Vec<u8>>| {
            writer.flush().unwrap();
            assert!(queue.push(&std::mem::take(writer.get_mut()).into()));
        };
        let records = vec![sample::entry(1, sample::READ, sample::OPEN, 7); 300];
        // More than half of it is full from now on.
        writer.entries(0, &records[..100]).unwrap();
        push(&mut writer);
        for _ in 0..2 {
            writer.entries(0, &records).unwrap();
            push(&mut writer);
            for time in 0..3 {
                writer.watermark(time).unwrap();
                push(&mut writer);
                writer.mark(&sample::mark()).unwrap();
                push(&mut writer);
            }
        }
        writer.end(&sample::summary()).unwrap();
        push(&mut writer);
        let mut stream = Vec::new();
        while let Popped::Chunk(chunk) = queue.pop() {
            stream.extend_from_slice(&chunk);
        }
        let (mut reader, mut missed, mut marks) = (Reader::new(&stream[..]).unwrap(), 0, 0);
        while let Some(frame) = reader.next_frame().unwrap() {
            match frame {
                Frame::Loss(loss) => missed += loss.count,
                Frame::Mark(_) => marks += 1,
                _ => {}
            }
        }
        assert_eq!((missed, marks), (600, 6));
    }
}
