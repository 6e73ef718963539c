//! vCPUs that wait for room in their rings (`--overflow block`).

use super::Waiting;
use crate::stream::{self, Summary};
use crate::tracer::ring::RingReader;
use std::time::{Duration, Instant};

/// How long vCPUs may wait while records could be taken, if there were any: who has begun one and
/// is preempted may be kept from finishing it by the very vCPU that waits.
const DEADLOCK: Duration = Duration::from_secs(2);

/// What the relay does about them. Without anybody who waits, nothing.
#[derive(Default)]
pub(super) struct Waits {
    waiting: Option<Box<dyn Waiting>>,
    /// The output takes nothing.
    closed: bool,
    /// Nobody waits any more, for now.
    let_go: bool,
    /// How often that was.
    times: u64,
    told: stream::Waits,
    /// Nobody waits any more, for good.
    over: bool,
}

impl Waits {
    pub(super) fn new(waiting: Option<Box<dyn Waiting>>) -> Self {
        Self { waiting, ..Self::default() }
    }

    /// Whether the output takes nothing, so that records stay in their rings.
    pub(super) fn close(&mut self, closed: bool) {
        let Some(waiting) = self.waiting.as_ref().filter(|_| self.closed != closed) else { return };
        self.closed = closed;
        waiting.close(closed);
    }

    /// There was a look at all rings, and records were taken, or not.
    pub(super) fn passed(&mut self, readers: &[RingReader], any: bool) {
        let Some(waiting) = self.waiting.as_ref().filter(|_| !self.over) else { return };
        if any {
            if std::mem::take(&mut self.let_go) {
                readers.iter().for_each(|reader| reader.let_wait(true));
            }
            waiting.made_room();
        } else if !self.let_go && waiting.wanted_for().is_some_and(|time| time > DEADLOCK) {
            self.let_go = true;
            self.times += 1;
            readers.iter().for_each(|reader| reader.let_wait(false));
            waiting.made_room();
        }
    }

    /// When vCPUs all stood still since the last time, and for how long.
    pub(super) fn stalls(&mut self) -> Vec<(Instant, Duration)> {
        let stalls = self.waiting.as_ref().map(|waiting| waiting.stalls()).unwrap_or_default();
        for (_, time) in &stalls {
            self.told.stalls += 1;
            self.told.stalls_ns = self.told.stalls_ns.saturating_add(nanoseconds(*time));
        }
        stalls
    }

    /// Nothing is traced any more: nobody waits from now on.
    pub(super) fn end(&mut self, readers: &[RingReader]) {
        let Some(waiting) = &self.waiting else { return };
        self.over = true;
        readers.iter().for_each(|reader| reader.let_wait(false));
        waiting.close(false);
        waiting.made_room();
    }

    /// Says how it was, at the end.
    pub(super) fn tell(mut self, summary: &mut Summary) {
        // Those of an output that was stuck to the end are in no mark.
        self.stalls();
        let Some(waiting) = self.waiting else { return };
        let vcpus_ns: Vec<u64> = waiting.waited().into_iter().map(nanoseconds).collect();
        if vcpus_ns.iter().any(|time| *time > 0) {
            summary.waits = Some(stream::Waits { vcpus_ns, ..self.told });
        }
        if self.times > 0 {
            summary.notes.push(format!(
                "vCPUs went on without room {} times: a record in a ring was not finished for \
                 {} s, by a task that did not run",
                self.times,
                DEADLOCK.as_secs()
            ));
        }
    }
}

/// As clocks of the host count, at most what fits.
pub fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Sender, channel};

    /// Tells what it is told.
    struct Told(Sender<bool>);

    impl Waiting for Told {
        fn made_room(&self) {}
        fn close(&self, closed: bool) {
            self.0.send(closed).unwrap();
        }
        fn wanted_for(&self) -> Option<Duration> {
            None
        }
        fn stalls(&self) -> Vec<(Instant, Duration)> {
            Vec::new()
        }
        fn waited(&self) -> Vec<Duration> {
            vec![Duration::ZERO]
        }
    }

    // Where nobody takes records, vCPUs wait; who is not told that somebody does again waits for ever.
    #[test]
    fn it_is_told_when_the_output_takes_nothing_and_when_it_does_again() {
        let (sender, told) = channel();
        let mut waits = Waits::new(Some(Box::new(Told(sender))));
        for closed in [false, true, true, false, false, true] {
            waits.close(closed);
        }
        waits.end(&[]);
        assert_eq!(told.try_iter().collect::<Vec<_>>(), [true, false, true, false]);
        let mut summary = Summary::default();
        waits.tell(&mut summary);
        assert_eq!(summary.waits, None, "nobody has waited");
    }
}
