//! What one consumer has still to be sent, and what it loses when that gets too much.

use crate::stream::{FrameSpan, consumer_loss, frame_spans};
use std::collections::VecDeque;
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
    /// Chunks handed out; tells whether the consumer moves.
    taken: u64,
}

/// The queue between the relay, which never waits, and one consumer's thread.
#[derive(Debug)]
pub(super) struct Queue {
    inner: Mutex<Inner>,
    changed: Condvar,
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
    pub(super) fn new(capacity: usize, vcpus: usize) -> Self {
        let inner = Inner {
            chunks: VecDeque::new(),
            bytes: 0,
            missed: vec![Missed::default(); vcpus],
            skipping: false,
            state: State::Open,
            taken: 0,
        };
        Self { inner: Mutex::new(inner), changed: Condvar::new(), capacity }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds what the consumer must have whatever its size: the frames it joins with.
    pub(super) fn push_first(&self, chunk: Chunk) {
        self.lock().append(chunk);
        self.changed.notify_all();
    }

    /// Adds whole frames of the trace. False: the consumer is gone.
    pub(super) fn push(&self, chunk: &Chunk) -> bool {
        let mut inner = self.lock();
        if inner.state != State::Open {
            return false;
        }
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
        self.changed.notify_all();
        inner.state == State::Open
    }

    /// The next chunk; waits for one at most so long.
    pub(super) fn pop(&self, wait: Duration) -> Popped {
        let mut inner = self.lock();
        if inner.chunks.is_empty() && inner.state == State::Open {
            let waited = self.changed.wait_timeout(inner, wait);
            inner = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        match (inner.chunks.pop_front(), inner.state) {
            (Some(chunk), _) => {
                inner.bytes -= chunk.len();
                inner.taken += 1;
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
        self.changed.notify_all();
    }

    /// The consumer takes nothing more.
    pub(super) fn leave(&self) {
        let mut inner = self.lock();
        inner.chunks.clear();
        inner.bytes = 0;
        inner.state = State::Gone;
        self.changed.notify_all();
    }

    /// Grows as long as the consumer moves.
    pub(super) fn taken(&self) -> u64 {
        self.lock().taken
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

    /// The frames of `chunk` but for records and watermarks, with the losses before them.
    fn without_records(&mut self, chunk: &[u8]) -> Vec<u8> {
        let mut kept = Vec::new();
        for FrameSpan { bytes, sequence, records, droppable } in frame_spans(chunk) {
            if let Some((vcpu, count)) = records {
                let vcpu = usize::try_from(vcpu).unwrap_or(usize::MAX);
                if let Some(missed) = self.missed.get_mut(vcpu) {
                    missed.pending += u64::from(count);
                }
            }
            if !droppable {
                kept.extend(self.losses(sequence));
                kept.extend_from_slice(bytes);
            }
        }
        kept
    }
}
