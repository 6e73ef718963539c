//! A guest's console, while others wait for what it says.

use std::io::Write;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

/// As it comes; clones are the same.
#[derive(Clone, Debug, Default)]
pub(crate) struct Console(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    said: Mutex<Said>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Said {
    text: Vec<u8>,
    ended: bool,
}

impl Console {
    fn said(&self) -> MutexGuard<'_, Said> {
        self.0.said.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What `find` finds in the complete lines, once it finds something; nothing when that is not within `patience`.
    pub(crate) fn wait<T>(
        &self,
        patience: Duration,
        find: impl Fn(&str) -> Option<T>,
    ) -> Result<Option<T>> {
        let end = Instant::now() + patience;
        let mut said = self.said();
        loop {
            let complete = said.text.iter().rposition(|&byte| byte == b'\n').unwrap_or(0);
            if let Some(found) = find(&String::from_utf8_lossy(&said.text[..complete])) {
                return Ok(Some(found));
            }
            ensure!(!said.ended, "the guest has ended");
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            said =
                self.0.changed.wait_timeout(said, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Nothing more comes.
    pub(crate) fn end(&self) {
        self.said().ended = true;
        self.0.changed.notify_all();
    }

    /// All of it so far.
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.said().text).into_owned()
    }
}

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.said().text.extend(bytes);
        self.0.changed.notify_all();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
