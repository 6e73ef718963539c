//! The primary output of a stream, written by a thread of its own: whoever makes the stream never
//! waits for a terminal, a pipe or a disk.

use crate::sandbox::{self, Thread};
use std::collections::VecDeque;
use std::fmt;
use std::io::{self, ErrorKind, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// What may wait to be written, bytes; as much again of what must not be left out.
const CAPACITY: usize = 64 << 20;
/// Buffers that are kept to be used again, and their size up to which they are.
const SPARES: usize = 8;
const SPARE_SIZE: usize = 1 << 20;
/// How often what the output has taken is looked at.
const LOOK: Duration = Duration::from_millis(50);

/// What an output has not taken by the time it was left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unwritten {
    /// Bytes of the stream.
    pub bytes: u64,
    /// Records in them.
    pub records: u64,
}

impl fmt::Display for Unwritten {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, records } = self;
        write!(
            f,
            "its output was stuck: the last {bytes} bytes of the stream were not taken in time"
        )?;
        if *records > 0 {
            write!(f, ", which hold {records} records")?;
        }
        Ok(())
    }
}

/// A queue, and the thread that writes what is in it.
#[derive(Debug)]
pub struct Primary {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    capacity: usize,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// There is something to write, or nothing will come.
    more: Condvar,
    /// Something was written, or nothing will be any more.
    less: Condvar,
}

#[derive(Debug, Default)]
struct State {
    pieces: VecDeque<Piece>,
    spares: Vec<Vec<u8>>,
    /// All that was not written yet.
    waiting: Unwritten,
    /// Bytes that were written.
    taken: u64,
    /// Nothing follows.
    ended: bool,
    /// How writing has ended.
    result: Option<io::Result<()>>,
}

#[derive(Debug)]
struct Piece {
    bytes: Vec<u8>,
    records: u64,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread: writes all that comes, to the end or to an error.
    fn write_all(&self, mut sink: Box<dyn Write + Send>) {
        let mut result = Ok(());
        while let (Ok(()), Some(piece)) = (&result, self.next()) {
            result = sink.write_all(&piece.bytes);
            let mut state = self.lock();
            if result.is_ok() {
                state.taken += piece.bytes.len() as u64;
                state.less(&piece);
            }
            if state.spares.len() < SPARES && piece.bytes.capacity() <= SPARE_SIZE {
                state.spares.push(piece.bytes);
            }
            self.less.notify_all();
        }
        let result = result.and_then(|()| sink.flush());
        drop(sink);
        self.lock().result = Some(result);
        self.less.notify_all();
    }

    fn next(&self) -> Option<Piece> {
        let mut state = self.lock();
        loop {
            if let Some(piece) = state.pieces.pop_front() {
                return Some(piece);
            }
            if state.ended {
                return None;
            }
            state = self.more.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl State {
    fn less(&mut self, piece: &Piece) {
        let Unwritten { bytes, records } = &mut self.waiting;
        *bytes = bytes.saturating_sub(piece.bytes.len() as u64);
        *records = records.saturating_sub(piece.records);
    }
}

impl Primary {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the system has no thread left.
    pub fn start(sink: Box<dyn Write + Send>) -> io::Result<Self> {
        let shared = Arc::<Shared>::default();
        let writing = Arc::clone(&shared);
        let thread =
            std::thread::Builder::new().name(Thread::Output.name().into()).spawn(move || {
                sandbox::enter(Thread::Output);
                writing.write_all(sink);
            })?;
        Ok(Self { shared, thread: Some(thread), capacity: CAPACITY })
    }

    /// Sets another limit for what may wait, in bytes.
    pub fn set_capacity(&mut self, bytes: usize) {
        self.capacity = bytes;
    }

    /// Adds bytes with so many records in them, and does not wait.
    ///
    /// # Errors
    /// That of the output, once.
    pub fn push(&mut self, bytes: &[u8], records: u64) -> io::Result<()> {
        let mut state = self.shared.lock();
        if state.result.is_some() {
            return Err(match state.result.take() {
                Some(Err(error)) => error,
                _ => io::Error::other("the output has ended"),
            });
        }
        let mut piece = state.spares.pop().unwrap_or_default();
        piece.clear();
        piece.extend_from_slice(bytes);
        state.waiting.bytes += bytes.len() as u64;
        state.waiting.records += records;
        state.pieces.push_back(Piece { bytes: piece, records });
        self.shared.more.notify_one();
        Ok(())
    }

    /// Whether the output takes more without much having to wait: what can wait elsewhere should
    /// come only then.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.waits() <= self.capacity as u64
    }

    /// Whether so much waits that even what should not be left out has to be.
    #[must_use]
    pub fn is_stuffed(&self) -> bool {
        self.waits() > 2 * self.capacity as u64
    }

    fn waits(&self) -> u64 {
        let state = self.shared.lock();
        // An output that has failed takes anything: whoever pushes next learns of it.
        if state.result.is_some() { 0 } else { state.waiting.bytes }
    }

    /// Bytes that were written.
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.shared.lock().taken
    }

    /// Waits until there is room. `patience` gives the time that is left by what the output has
    /// taken in all. False: there is none, and the time is over.
    pub fn wait_for_room(&self, patience: impl Fn(u64) -> Option<Duration>) -> bool {
        self.wait(patience, |state| {
            state.result.is_some() || state.waiting.bytes <= self.capacity as u64
        })
    }

    /// Waits until all is written that was pushed, or the output has failed.
    pub fn wait_until_written(&self) {
        self.wait(|_| Some(LOOK), |state| state.result.is_some() || state.waiting.bytes == 0);
    }

    fn wait(
        &self,
        patience: impl Fn(u64) -> Option<Duration>,
        enough: impl Fn(&State) -> bool,
    ) -> bool {
        let mut state = self.shared.lock();
        while !enough(&state) {
            let Some(left) = patience(state.taken) else { return false };
            let waited = self.shared.less.wait_timeout(state, left.min(LOOK));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Nothing follows: waits until all is written, as long as `patience` allows (see
    /// [`Primary::wait_for_room`]). Returns what was not written; then the thread may be stuck
    /// for ever, and is left to itself.
    ///
    /// # Errors
    /// That of the output; that a reader has seen enough is none.
    pub fn finish(&mut self, patience: impl Fn(u64) -> Option<Duration>) -> io::Result<Unwritten> {
        if self.thread.is_none() {
            return Ok(Unwritten::default());
        }
        self.shared.lock().ended = true;
        self.shared.more.notify_one();
        if !self.wait(patience, |state| state.result.is_some()) {
            let mut state = self.shared.lock();
            state.pieces.clear();
            self.thread = None;
            return Ok(state.waiting);
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        match self.shared.lock().result.take() {
            Some(Err(error)) if error.kind() != ErrorKind::BrokenPipe => Err(error),
            _ => Ok(Unwritten::default()),
        }
    }
}

impl Drop for Primary {
    /// Whoever wants to know what became of the last bytes has called [`Primary::finish`].
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.pieces.clear();
        state.ended = true;
        self.shared.more.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};

    #[derive(Clone, Default)]
    struct Slow(Arc<Mutex<Vec<u8>>>);

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            std::thread::sleep(Duration::from_millis(1));
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    struct Failing(ErrorKind);

    impl Write for Failing {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Takes one piece for each message, and says so.
    struct Gate(Receiver<()>, Sender<()>);

    impl Write for Gate {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.1.send(()).unwrap();
            self.0.recv().map_err(|_| ErrorKind::BrokenPipe)?;
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn gate() -> (Primary, Sender<()>, Receiver<()>) {
        let (open, opened) = channel();
        let (asked, asks) = channel();
        let mut primary = Primary::start(Box::new(Gate(opened, asked))).unwrap();
        primary.set_capacity(10);
        (primary, open, asks)
    }

    const ALL: Unwritten = Unwritten { bytes: 0, records: 0 };

    #[test]
    fn everything_is_written_in_its_order() {
        let sink = Slow::default();
        let mut primary = Primary::start(Box::new(sink.clone())).unwrap();
        (0..100_u8).for_each(|byte| primary.push(&[byte], 1).unwrap());
        assert_eq!(primary.finish(|_| Some(LOOK)).unwrap(), ALL);
        assert_eq!(*sink.0.lock().unwrap(), (0..100).collect::<Vec<u8>>());
        assert_eq!(primary.taken(), 100);
    }

    // A relay that goes on for a disk that is full traces for nobody.
    #[test]
    fn an_error_of_the_sink_comes_back() {
        let mut primary = Primary::start(Box::new(Failing(ErrorKind::StorageFull))).unwrap();
        let error = loop {
            if let Err(error) = primary.push(b"x", 0) {
                break error;
            }
            std::thread::yield_now();
        };
        assert_eq!(error.kind(), ErrorKind::StorageFull);
    }

    // A short trace is all in the queue when the run ends: a full disk must not be a success.
    #[test]
    fn an_error_of_the_last_bytes_is_one() {
        for (kind, fails) in [(ErrorKind::StorageFull, true), (ErrorKind::BrokenPipe, false)] {
            let mut primary = Primary::start(Box::new(Failing(kind))).unwrap();
            primary.push(b"x", 0).unwrap();
            assert_eq!(primary.finish(|_| Some(LOOK)).is_err(), fails);
        }
    }

    // Nobody waits for an output that is stuck, and what it did not take is told.
    #[test]
    fn a_stuck_output_is_left_with_what_it_did_not_take() {
        let (mut primary, open, asks) = gate();
        for _ in 0..4 {
            primary.push(&[0; 6], 2).unwrap();
        }
        asks.recv().unwrap();
        assert!(!primary.has_room() && primary.is_stuffed());
        assert!(!primary.wait_for_room(|taken| (taken > 0).then_some(LOOK)));
        open.send(()).unwrap();
        asks.recv().unwrap();
        assert!(!primary.is_stuffed());
        let unwritten = primary.finish(|taken| (taken > 6).then_some(LOOK)).unwrap();
        assert_eq!(unwritten, Unwritten { bytes: 18, records: 6 });
        assert_eq!(primary.taken(), 6);
    }

    #[test]
    fn there_is_room_when_enough_was_taken() {
        let (mut primary, open, asks) = gate();
        for _ in 0..3 {
            primary.push(&[0; 6], 1).unwrap();
        }
        asks.recv().unwrap();
        assert!(!primary.has_room());
        open.send(()).unwrap();
        open.send(()).unwrap();
        assert!(primary.wait_for_room(|_| Some(LOOK)));
        open.send(()).unwrap();
        assert_eq!(primary.finish(|_| Some(LOOK)).unwrap(), ALL);
    }
}
