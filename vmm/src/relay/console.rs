//! Puts lines of the guest's console into the stream as marks.

use std::mem::take;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Longest line; a longer one goes on in the next.
const LINE: usize = 1 << 10;
/// Most lines that wait for the relay.
const WAITING: usize = 4096;

/// A line, and when its end came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ConsoleLine {
    pub(super) ended: Instant,
    pub(super) text: String,
}

#[derive(Debug, Default)]
struct State {
    begun: Vec<u8>,
    lines: Vec<ConsoleLine>,
    dropped: u64,
}

/// What the guest writes to its console, cut into lines: vCPUs add bytes, the relay takes lines.
#[derive(Clone, Debug, Default)]
pub struct ConsoleLines(Arc<Mutex<State>>);

impl ConsoleLines {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The guest has written these bytes just now. Lines that would have to wait for too long are
    /// counted and left out.
    pub fn feed(&self, bytes: &[u8]) {
        let mut state = self.lock();
        for &byte in bytes {
            if byte != b'\n' && byte != b'\r' {
                state.begun.push(byte);
            }
            if byte == b'\n' || state.begun.len() >= LINE {
                state.end(Instant::now());
            }
        }
    }

    /// Those that have ended, and how many were left out before them since the last time.
    pub(super) fn take(&self) -> (Vec<ConsoleLine>, u64) {
        let mut state = self.lock();
        (take(&mut state.lines), take(&mut state.dropped))
    }

    /// There will be no more: what was begun is a line.
    pub(super) fn finish(&self) {
        self.lock().end(Instant::now());
    }
}

impl State {
    /// Empty lines say nothing.
    fn end(&mut self, ended: Instant) {
        if self.begun.is_empty() {
            return;
        }
        if self.lines.len() >= WAITING {
            self.begun.clear();
            self.dropped += 1;
            return;
        }
        let text = String::from_utf8_lossy(&take(&mut self.begun)).into_owned();
        self.lines.push(ConsoleLine { ended, text });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // However the bytes come: a UART gives them one by one.
    #[test]
    fn lines_are_whole_and_bounded() {
        let console = ConsoleLines::default();
        b"[    0.1] a\r\n\r\nb\xff".iter().for_each(|byte| console.feed(&[*byte]));
        let texts = |console: &ConsoleLines| {
            let (lines, dropped) = console.take();
            (lines.into_iter().map(|line| line.text).collect::<Vec<_>>(), dropped)
        };
        assert_eq!(texts(&console), (vec!["[    0.1] a".to_owned()], 0));
        console.feed(&[b'x'; LINE]);
        console.finish();
        let (lines, _) = texts(&console);
        assert_eq!(lines.iter().map(|line| line.chars().count()).collect::<Vec<_>>(), [LINE, 2]);
        assert!(lines[0].starts_with("b\u{fffd}x"));
        (0..WAITING + 3).for_each(|_| console.feed(b"z\n"));
        let (lines, dropped) = texts(&console);
        assert_eq!((lines.len(), dropped), (WAITING, 3));
    }
}
