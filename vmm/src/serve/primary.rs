//! The primary output of a stream. A separate thread writes it, so that the stream's writer never
//! waits for a terminal, a pipe or a disk.

use crate::sandbox::{self, Thread};
use std::collections::VecDeque;
use std::fmt;
use std::io::{self, ErrorKind, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The most bytes that wait to be written. Frames that must not be dropped may take as much again, and what users
/// ask for a quarter of it more.
const CAPACITY: usize = 64 << 20;
/// Buffers that are kept to be used again, and their size up to which they are.
const SPARES: usize = 8;
const SPARE_SIZE: usize = 1 << 20;
/// What a sink that gathers is given at once, bytes, and how long less than that may wait.
const GATHER: u64 = 1 << 20;
const GATHER_TIME: Duration = Duration::from_secs(1);
/// How often what the output has taken is looked at.
const LOOK: Duration = Duration::from_millis(50);

/// Where a stream goes.
pub struct Sink {
    out: Box<dyn Write + Send>,
    gathers: bool,
}

impl Sink {
    /// One that makes better use of much at once, such as a
    /// [`Compressor`](crate::stream::Compressor), and is flushed after that.
    #[must_use]
    pub fn gathering(out: Box<dyn Write + Send>) -> Self {
        Self { out, gathers: true }
    }
}

impl From<Box<dyn Write + Send>> for Sink {
    fn from(out: Box<dyn Write + Send>) -> Self {
        Self { out, gathers: false }
    }
}

impl<W: Write + Send + 'static> From<Box<W>> for Sink {
    fn from(out: Box<W>) -> Self {
        Self { out, gathers: false }
    }
}

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
    /// When the first of `pieces` came, about.
    since: Option<Instant>,
    /// Nothing is to be gathered.
    hurried: bool,
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
    fn write_all(&self, sink: Sink) {
        let Sink { mut out, gathers } = sink;
        let (mut result, mut pieces) = (Ok(()), Vec::new());
        while result.is_ok() && self.next(gathers, &mut pieces) {
            result = pieces.iter().try_for_each(|piece: &Piece| out.write_all(&piece.bytes));
            if gathers && result.is_ok() {
                // What it gathers itself counts as written only now.
                result = out.flush();
            }
            let mut state = self.lock();
            for piece in pieces.drain(..) {
                if result.is_ok() {
                    state.taken += piece.bytes.len() as u64;
                    state.less(&piece);
                }
                if state.spares.len() < SPARES && piece.bytes.capacity() <= SPARE_SIZE {
                    state.spares.push(piece.bytes);
                }
            }
            self.less.notify_all();
        }
        let result = result.and_then(|()| out.flush());
        drop(out);
        self.lock().result = Some(result);
        self.less.notify_all();
    }

    /// Waits for what is to be written next; false: nothing is.
    fn next(&self, gathers: bool, pieces: &mut Vec<Piece>) -> bool {
        let most = if gathers { GATHER } else { 1 };
        let mut state = self.lock();
        loop {
            let time = state
                .since
                .map_or(GATHER_TIME, |since| GATHER_TIME.saturating_sub(since.elapsed()));
            let enough = state.waiting.bytes >= most || time.is_zero();
            if !gathers || state.ended || state.hurried || enough {
                let mut size = 0;
                while size < most
                    && let Some(piece) = state.pieces.pop_front()
                {
                    size += piece.bytes.len() as u64;
                    pieces.push(piece);
                }
                state.since = (!state.pieces.is_empty()).then(Instant::now);
                if !pieces.is_empty() || state.ended {
                    return !pieces.is_empty();
                }
            }
            state = if state.since.is_some() {
                let waited = self.more.wait_timeout(state, time);
                waited.unwrap_or_else(PoisonError::into_inner).0
            } else {
                self.more.wait(state).unwrap_or_else(PoisonError::into_inner)
            };
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
    pub fn start(sink: impl Into<Sink>) -> io::Result<Self> {
        let sink = sink.into();
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
        state.since.get_or_insert_with(Instant::now);
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

    /// Whether so much waits that nothing may come any more, not even the little that users ask for.
    #[must_use]
    pub fn is_overfull(&self) -> bool {
        let capacity = self.capacity as u64;
        self.waits() > 2 * capacity + capacity / 4
    }

    fn waits(&self) -> u64 {
        let state = self.shared.lock();
        // An output that has failed takes anything: whoever pushes next learns of it.
        if state.result.is_some() { 0 } else { state.waiting.bytes }
    }

    /// What waits to be written, for those who wait for no lock: `None` where somebody has that.
    pub(crate) fn unwritten(&self) -> impl Fn() -> Option<Unwritten> + Send + 'static {
        let shared = Arc::clone(&self.shared);
        move || shared.state.try_lock().ok().map(|state| state.waiting)
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
        self.shared.lock().hurried = true;
        self.shared.more.notify_one();
        self.wait(|_| Some(LOOK), |state| state.result.is_some() || state.waiting.bytes == 0);
        self.shared.lock().hurried = false;
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
        assert!(!primary.has_room() && primary.is_stuffed() && primary.is_overfull());
        // 24 bytes wait.
        primary.set_capacity(11);
        assert!(primary.is_stuffed() && !primary.is_overfull());
        primary.set_capacity(10);
        assert!(!primary.wait_for_room(|taken| (taken > 0).then_some(LOOK)));
        open.send(()).unwrap();
        asks.recv().unwrap();
        assert!(!primary.is_stuffed());
        let unwritten = primary.finish(|taken| (taken > 6).then_some(LOOK)).unwrap();
        assert_eq!(unwritten, Unwritten { bytes: 18, records: 6 });
        assert_eq!(primary.taken(), 6);
    }

    /// What was written, with nothing where it was flushed.
    #[derive(Clone, Default)]
    struct Pieces(Arc<Mutex<Vec<Vec<u8>>>>);

    impl Write for Pieces {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().push(bytes.to_vec());
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            self.write(&[]).map(drop)
        }
    }

    // A block of a trace of few records would otherwise be as small as what one look at the rings
    // has found.
    #[test]
    fn a_sink_that_gathers_is_given_much_at_once() {
        let sink = Pieces::default();
        let mut primary = Primary::start(Sink::gathering(Box::new(sink.clone()))).unwrap();
        let large = vec![2; 1 << 20];
        for piece in [&[1][..], &large, &[3], &[4]] {
            primary.push(piece, 0).unwrap();
        }
        assert_eq!(primary.finish(|_| Some(LOOK)).unwrap(), ALL);
        let pieces = sink.0.lock().unwrap();
        let first: Vec<_> = pieces.iter().map(|it| it.first().copied().unwrap_or(0)).collect();
        assert_eq!(first, [1, 2, 0, 3, 4, 0, 0]);
        assert_eq!(primary.taken(), 3 + (1 << 20));
    }

    #[test]
    fn what_is_gathered_does_not_wait_for_ever() {
        let sink = Pieces::default();
        let mut primary = Primary::start(Sink::gathering(Box::new(sink.clone()))).unwrap();
        let begun = Instant::now();
        primary.push(&[1], 0).unwrap();
        while primary.taken() == 0 {
            assert!(begun.elapsed() < 30 * GATHER_TIME, "it is not written");
            std::thread::sleep(LOOK);
        }
        assert!(begun.elapsed() >= GATHER_TIME / 2);
        primary.push(&[2], 0).unwrap();
        primary.wait_until_written();
        assert_eq!(*sink.0.lock().unwrap(), [&[1][..], &[], &[2], &[]]);
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
