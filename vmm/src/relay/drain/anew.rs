//! Goes on with the rings of another kernel of the guest.

use super::{Drain, TaskNames};
use crate::tracer::Tasks;
use crate::tracer::ring::RingReader;
use std::io;

/// What was found at the end of a kernel that is gone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Left {
    /// Records that the output did not take in time, which count as lost.
    pub given_up: u64,
    /// What was wrong with rings.
    pub corrupt: Vec<String>,
}

impl Drain {
    /// Nobody writes to the rings any more: takes all that is there, as at the end of a stream, and forgets
    /// the rings. Their memory may be changed then.
    ///
    /// # Errors
    /// When the primary output fails.
    pub fn leave_rings(&mut self) -> io::Result<Left> {
        let left = self.bounded();
        let given_up = self.take_until_stuck(left)?.unwrap_or(0);
        let mut found = Left { given_up, ..Left::default() };
        for vcpu in 0..self.orders.len() {
            found.given_up += self.take_rest(vcpu, left)?;
        }
        let corrupt = self.readers.iter().filter_map(RingReader::corrupt);
        found.corrupt = corrupt.map(|corrupt| corrupt.to_string()).collect();
        self.readers.clear();
        // What its programs wrote for events are other programs' words from now on.
        self.events.forget_words();
        self.writer.flush()?;
        Ok(found)
    }

    /// Another kernel writes to these from now on.
    pub(super) fn enter_rings(&mut self, readers: Vec<RingReader>, tasks: Tasks) {
        self.readers = readers;
        self.tasks = TaskNames::new(tasks);
    }
}
