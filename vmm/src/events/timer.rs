//! A timer, which calls a subscriber at a given time.

use std::io;
use std::time::{Duration, Instant};

use event_manager::{EventSet, Events};
use vmm_sys_util::timerfd::TimerFd;

/// A timer; off at first.
#[derive(Debug)]
pub struct Timer {
    timer: TimerFd,
    due: Option<Instant>,
}

impl Timer {
    /// A new one.
    ///
    /// # Errors
    /// When the system has no descriptors left.
    pub fn new() -> io::Result<Self> {
        Ok(Self { timer: TimerFd::new()?, due: None })
    }

    /// Has the subscriber called at that time, or not at all. Setting what is set already costs
    /// nothing.
    pub fn set(&mut self, due: Option<Instant>) {
        if self.due == due {
            return;
        }
        self.due = due;
        let set = match due {
            None => self.timer.clear(),
            // Nothing at all would be off.
            Some(due) => {
                let left = due.saturating_duration_since(Instant::now());
                self.timer.reset(left.max(Duration::from_nanos(1)), None)
            }
        };
        if let Err(error) = set {
            log::error!("events: cannot set a timer: {}", io::Error::from(error));
        }
    }

    /// What to wait for; its event has this data. Every expiry is an edge.
    #[must_use]
    pub fn events(&self, data: u32) -> Events {
        Events::with_data(&self.timer, data, EventSet::IN | EventSet::EDGE_TRIGGERED)
    }
}
