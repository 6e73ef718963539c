//! Buffers console output for a sink that may be slow.

use crate::sandbox::{self, Thread};
use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Output that is kept for a slow sink, in bytes; more is dropped.
const CAPACITY: usize = 4 << 20;
/// How long a line's beginning waits for its end before it is shown: a write for each byte costs a
/// system call each.
const LINE_TIME: Duration = Duration::from_millis(20);

/// A buffer that a thread of its own empties into a sink, so that a sink that blocks never blocks
/// a vCPU. The thread ends when this is dropped and it has written what there was.
pub struct OutputPump {
    shared: Arc<Shared>,
}

/// The writing end of an [`OutputPump`]. Never fails, never blocks for long.
#[derive(Clone)]
pub struct PumpWriter {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    /// There is something to write, or nothing will come any more.
    filled: Condvar,
    /// All that was there is written.
    drained: Condvar,
}

struct State {
    buffer: Vec<u8>,
    /// Bytes dropped since the last that was kept.
    dropped: u64,
    /// The thread holds bytes that the sink has not taken yet.
    writing: bool,
    /// Nothing more will come.
    closed: bool,
    /// The sink failed: everything is dropped.
    broken: bool,
}

impl OutputPump {
    /// Starts the thread.
    pub fn new(sink: Box<dyn Write + Send>) -> io::Result<OutputPump> {
        let state =
            State { buffer: Vec::new(), dropped: 0, writing: false, closed: false, broken: false };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            filled: Condvar::new(),
            drained: Condvar::new(),
        });
        let reader = Arc::clone(&shared);
        std::thread::Builder::new().name(Thread::Console.name().into()).spawn(move || {
            sandbox::enter(Thread::Console);
            reader.pump(sink);
        })?;
        Ok(OutputPump { shared })
    }

    /// A writing end.
    #[must_use]
    pub fn writer(&self) -> PumpWriter {
        PumpWriter { shared: Arc::clone(&self.shared) }
    }

    /// Waits until the sink has everything, at most so long. Whether it has.
    pub fn flush(&self, limit: Duration) -> bool {
        let limit = Instant::now() + limit;
        let mut state = self.shared.lock();
        while state.writing || !state.buffer.is_empty() {
            let Some(left) = limit.checked_duration_since(Instant::now()) else { return false };
            self.shared.filled.notify_one();
            let (guard, _) = self
                .shared
                .drained
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner);
            state = guard;
        }
        true
    }
}

impl Write for PumpWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut state = self.shared.lock();
        if state.broken {
            return Ok(bytes.len());
        }
        let was_empty = state.buffer.is_empty();
        if state.buffer.len() + bytes.len() > CAPACITY {
            state.dropped += bytes.len() as u64;
            return Ok(bytes.len());
        }
        let dropped = std::mem::take(&mut state.dropped);
        if dropped > 0 {
            write!(state.buffer, "\n[vmtrace: {dropped} bytes of console output dropped]\n")?;
        }
        state.buffer.extend_from_slice(bytes);
        if was_empty || bytes.contains(&b'\n') {
            self.shared.filled.notify_one();
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for OutputPump {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.filled.notify_one();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pump(&self, mut sink: Box<dyn Write + Send>) {
        let mut bytes = Vec::new();
        loop {
            let mut state = self.lock();
            state.writing = false;
            self.drained.notify_all();
            state = self
                .filled
                .wait_while(state, |state| state.buffer.is_empty() && !state.closed)
                .unwrap_or_else(PoisonError::into_inner);
            if state.buffer.is_empty() {
                return;
            }
            if !state.closed && !state.buffer.contains(&b'\n') {
                (state, _) = self
                    .filled
                    .wait_timeout(state, LINE_TIME)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            bytes.clear();
            std::mem::swap(&mut bytes, &mut state.buffer);
            state.writing = true;
            drop(state);
            if sink.write_all(&bytes).and_then(|()| sink.flush()).is_err() {
                let mut state = self.lock();
                state.broken = true;
                state.writing = false;
                state.buffer.clear();
                self.drained.notify_all();
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// Passes on what it gets once it is allowed to.
    struct Slow(Sender<Vec<u8>>, Receiver<()>);

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.1.recv().map_err(io::Error::other)?;
            self.0.send(bytes.to_vec()).map_err(io::Error::other)?;
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn slow() -> (Box<Slow>, Receiver<Vec<u8>>, Sender<()>) {
        let (out, seen) = channel();
        let (go, allowed) = channel();
        (Box::new(Slow(out, allowed)), seen, go)
    }

    #[test]
    fn everything_arrives_in_order() {
        let (sink, seen, go) = slow();
        let pump = OutputPump::new(sink).unwrap();
        let mut writer = pump.writer();
        for i in 0..100 {
            writeln!(writer, "{i}").unwrap();
            go.send(()).unwrap();
        }
        assert!(pump.flush(Duration::from_secs(10)));
        let all: Vec<u8> = seen.try_iter().flatten().collect();
        let expected: String = (0..100).map(|i| format!("{i}\n")).collect();
        assert_eq!(String::from_utf8(all).unwrap(), expected);
    }

    #[test]
    fn a_stuck_sink_blocks_nobody_and_drops_are_told() {
        let (sink, seen, go) = slow();
        let pump = OutputPump::new(sink).unwrap();
        let mut writer = pump.writer();
        for _ in 0..10 {
            writer.write_all(&vec![b'x'; 1 << 20]).unwrap();
        }
        assert!(!pump.flush(Duration::from_millis(10)));
        go.send(()).unwrap();
        go.send(()).unwrap();
        go.send(()).unwrap();
        assert!(pump.flush(Duration::from_secs(10)));
        writer.write_all(b"end\n").unwrap();
        assert!(pump.flush(Duration::from_secs(10)));
        let all: Vec<u8> = seen.try_iter().flatten().collect();
        assert!(all.len() <= 2 * CAPACITY);
        let tail = String::from_utf8_lossy(&all[all.len() - 80..]).into_owned();
        assert!(tail.contains("bytes of console output dropped]\nend\n"), "{tail}");
    }

    #[test]
    fn a_broken_sink_is_no_error() {
        let (sink, _, go) = slow();
        drop(go);
        let pump = OutputPump::new(sink).unwrap();
        let mut writer = pump.writer();
        writeln!(writer, "lost").unwrap();
        assert!(pump.flush(Duration::from_secs(10)));
        writeln!(writer, "lost").unwrap();
        assert!(pump.flush(Duration::from_secs(10)));
    }
}
